// Words of two bf16 values made from rows in memory, for products of pairs (dot_pairs in simd/vec.h).
#pragma once

#include "simd/vec.h"

#if defined(__AVX512BF16__)
namespace opst::OPST_ISA_NS::simd {

// The first n <= 32 values at p, zeros behind them.
OPST_INLINE Bf16Words load_pairs_n(const bf16* p, int64_t n) {
  return {(Bf16Words::Register)_mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (1u << n) - 1u, p)};
}
// Words {even[c], odd[c]} of columns c < 16 in `low` and c < 32 in `high`, zeros from column n on; without has_odd, 0 for
// odd[c].
OPST_INLINE void interleave_pairs(const bf16* even, const bf16* odd, int64_t n, bool has_odd, Bf16Words& low,
                                  Bf16Words& high) {
  alignas(64) uint32_t words[32];
  interleave_words(even, odd, n, has_odd, words);
  low = Bf16Words::load(words);
  if (n > 16) high = Bf16Words::load(words + 16);
}

}  // namespace opst::OPST_ISA_NS::simd
#endif
