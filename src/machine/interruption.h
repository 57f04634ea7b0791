// Interruption: how a long call ends before its work is done.
//
//   Interruption interruption(impl.interrupted, multiply_adds);
//   pool.parallel_for(n, [&](int64_t task, int worker) { if (!interruption.requested(worker)) work(task); ... });
//   if (interruption.happened()) return interruption.status("flash_attention_forward");
//
// Once an end is requested, tasks leave their work out but still say that they are done, so that nobody waits for ever.
#pragma once

#include <atomic>
#include <chrono>

#include "core/int_math.h"
#include "core/text.h"
#include "opst/context.h"
#include "opst/status.h"

namespace opst {

class Interruption {
 public:
  // ask: ContextOptions::interrupted. A call of fewer than kLongCall multiply-adds never asks, and reads no clock.
  Interruption(InterruptedFunction ask, Size multiply_adds) : ask_(multiply_adds < kLongCall ? nullptr : ask) {
    if (ask_ != nullptr) next_ = Clock::now() + kPeriod;
  }

  // Whether the task about to begin should leave its work out. Asks on the caller's thread alone, which is worker 0.
  bool requested(int worker) {
    if (ask_ == nullptr) return false;
    if (worker == 0 && !happened() && Clock::now() >= next_) {
      next_ = Clock::now() + kPeriod;
      if (ask_()) happened_.store(true, std::memory_order_relaxed);
    }
    return happened();
  }
  bool happened() const { return happened_.load(std::memory_order_relaxed); }
  Status status(const char* operator_name) const {
    return Status::internal(text(operator_name, ": interrupted; the outputs hold anything"));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kLongCall = int64_t{1} << 30;  // 5 ms and more on one core
  static constexpr std::chrono::milliseconds kPeriod{20};

  InterruptedFunction ask_;
  Clock::time_point next_;  // the caller's thread alone
  std::atomic<bool> happened_{false};
};

}  // namespace opst
