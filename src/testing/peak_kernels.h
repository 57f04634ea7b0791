// The reference bursts of one instruction set level.
#pragma once

#include <cstdint>

namespace opst::test {

// Operands that every burst reads from the first-level cache: kPeakSteps steps of kPeakStepBytes.
inline constexpr int kPeakSteps = 16;
inline constexpr int kPeakStepBytes = 10 * 64;
inline constexpr int kPeakBytes = kPeakSteps * kPeakStepBytes;

// Walks over the operands `iterations` times. `sink` receives 64 bytes, so that the work cannot be dropped.
struct PeakBurst {
  void (*run)(int64_t iterations, const void* operands,
              void* sink) = nullptr;  // null: the level has no such instruction
  double flops_per_iteration = 0;     // 2 for each multiply-add
  int lanes = 0;                      // multiply-adds of one instruction, or of one sequence that stands for it
  bool single = false;                // one instruction: its rate is a whole number of units
};

struct PeakKernels {
  PeakBurst f32;       // fused multiply-add; generic: multiply, then add
  PeakBurst bf16_dot;  // pairwise bf16 dot
  PeakBurst i8;        // 8-bit dot; below avx512_vnni the shortest sequence of multiplies and adds
  // Reads the bytes once, in order. size_bytes is a multiple of 64.
  void (*read)(const void* data, int64_t size_bytes, void* sink);
};

}  // namespace opst::test
