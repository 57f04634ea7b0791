// Two bursts that tell whether the pairwise bf16 dot instruction beats the f32 FMA on this processor (cpu.cc): 16
// independent chains, one instruction each per iteration. `sink` receives 16 floats, so that no work can be dropped.
#include <immintrin.h>

#include <cstdint>

namespace opst::OPST_ISA_NS {
namespace {

template <class Step>
void burst(int64_t iterations, float* sink, Step step) {
  constexpr int kChains = 16;
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(0.1f * static_cast<float>(i));
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = step(acc[i]);
  }
  __m512 sum = acc[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, acc[i]);
  _mm512_storeu_ps(sink, sum);
}

}  // namespace

void fma_burst(int64_t iterations, float* sink) {
  const __m512 a = _mm512_set1_ps(0.37f), b = _mm512_set1_ps(-0.71f);
  burst(iterations, sink, [=](__m512 acc) { return _mm512_fmadd_ps(a, b, acc); });
}

void dot_burst(int64_t iterations, float* sink) {
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3ebd3ebd);                    // 0.37 twice
  const __m512bh b = (__m512bh)_mm512_set1_epi32(static_cast<int>(0xbf36bf36));  // -0.71 twice
  burst(iterations, sink, [=](__m512 acc) { return _mm512_dpbf16_ps(acc, a, b); });
}

}  // namespace opst::OPST_ISA_NS
