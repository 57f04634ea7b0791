// Machine: what a plan may know about the processor. Context: the first argument of every operator.
//
//   Result<Context> context = Context::create();             // this machine, all cores it may use
//   Status status = flash_attention_forward(context.value(), {...});
//
// Environment, read by Context::create and overridden by its options:
//   OPST_ISA=generic|avx2|avx512|avx512_vnni|avx512_bf16     caps the instruction set level
//   OPST_NUM_THREADS=N                                       number of threads, the caller's included
//   OMP_NUM_THREADS=N                                        without the former: at most so many, as launchers set it
//   OPST_BF16=dot|widen                                      pins the choice that is otherwise measured once
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "opst/status.h"

namespace opst {

// Instruction set levels. Each adds instructions to a base, all of which it may use too: avx2 to generic, avx512 to
// avx2, avx512_vnni to avx512, avx512_bf16 to avx512_vnni.
//   generic      the compiler's baseline (x86-64-v1)
//   avx2         AVX2, FMA, F16C, BMI2 (x86-64-v3)
//   avx512       AVX-512 F, BW, DQ, VL, CD (x86-64-v4)
//   avx512_vnni  + 8-bit integer dot products
//   avx512_bf16  + pairwise bf16 dot products
enum class Isa : uint8_t { generic, avx2, avx512, avx512_vnni, avx512_bf16 };
inline constexpr int kNumIsaLevels = 5;

// The level to whose instructions `isa` adds its own. generic, the root of the tree, is its own base.
constexpr Isa base_of(Isa isa) {
  if (isa == Isa::avx512_bf16) return Isa::avx512_vnni;
  if (isa == Isa::avx512_vnni) return Isa::avx512;
  return isa == Isa::avx512 ? Isa::avx2 : Isa::generic;
}
// Whether a processor of level `isa` runs the code of `level`. (Comparing the two numbers would call any level of
// another architecture higher or lower.)
constexpr bool includes(Isa isa, Isa level) {
  while (isa != level && isa != Isa::generic) isa = base_of(isa);
  return isa == level;
}

const char* to_string(Isa isa);
std::optional<Isa> parse_isa(const std::string& name);
// The highest level that this processor and operating system can run.
Isa detect_isa();

// How bf16 products are formed at level avx512_bf16: by the pairwise dot instruction, or widened to f32. Which is
// faster differs between processors (twice the f32 rate on Zen 5, half of it on some Intel cores), so it is measured.
enum class Bf16Product : uint8_t { dot, widen };
const char* to_string(Bf16Product product);

struct CacheSizes {
  int64_t l1d_bytes = 32 << 10;
  int64_t l2_bytes = 512 << 10;
  int64_t l3_bytes_per_core = 2 << 20;
};

// A plain value: plans are functions of it, so a test can invent one.
struct Machine {
  Isa isa = Isa::generic;
  int cores = 1;  // that this process may use: affinity and cgroup quota counted
  CacheSizes cache = {};
  Bf16Product bf16_product = Bf16Product::widen;
};

// This machine at the given level (at most detect_isa()). What the system reports is clamped to what one core can
// reasonably call its own.
Machine detect_machine(Isa isa);
std::string to_string(const Machine& machine);

using InterruptedFunction = bool (*)();

struct ContextOptions {
  std::optional<Isa> isa = {};  // default: OPST_ISA, else detect_isa(). More than the processor has is refused.
  int num_threads = 0;          // the caller included; 0: OPST_NUM_THREADS, else cores, at most OMP_NUM_THREADS
  std::optional<CacheSizes> cache = {};          // default: this machine's
  std::optional<Bf16Product> bf16_product = {};  // default: OPST_BF16, else measured
  // Asked by the caller's thread, every 20 ms at most, while an attention call of 2^30 multiply-adds or more runs. True
  // ends the call: Status internal, "interrupted", and its outputs hold anything. Must not throw nor use the Context.
  InterruptedFunction interrupted = nullptr;
};

// A Machine, a pool of threads and reusable scratch memory. Operators called on one Context from several threads are
// legal: each call leases its own workspace. Operators give the same bits for every number of threads.
// fork() is legal at any time, also while other threads are inside calls: the child's first parallel call starts new
// threads. Scratch memory that the parent's other threads had in use at that moment stays unused in the child.
class Context {
 public:
  static Result<Context> create(const ContextOptions& options = {});
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;

  const Machine& machine() const;
  int num_threads() const;

  // Scratch memory now held for reuse, and how often the system was asked for more since the start. In steady state the
  // second count stands still.
  int64_t workspace_bytes() const;
  int64_t workspace_allocations() const;
  // Gives idle scratch memory back to the system.
  void trim();

  // For the library's own rooms.
  struct Impl;
  Impl& impl() const { return *impl_; }
  explicit Context(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace opst
