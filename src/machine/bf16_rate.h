// Two bursts that tell whether the pairwise bf16 dot instruction beats the f32 FMA on this processor.
#pragma once

#include <cstdint>

namespace opst::avx512_bf16 {

// 16 independent chains, one instruction each per iteration. `sink` receives 16 floats, so that the work cannot be
// dropped.
void fma_burst(int64_t iterations, float* sink);
void dot_burst(int64_t iterations, float* sink);

}  // namespace opst::avx512_bf16
