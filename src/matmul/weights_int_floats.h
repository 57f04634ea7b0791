// int8 and int4 weights (packed_layout.h) times rows of floats: the weight alone is quantised.
//
// Computes   sums[i, j] = sum_t x[i, t] * (q[j, t] * scale[j, g]),   q = u - offset (- zero[j, g])
// Shapes     x [rows, k] f32; weight: packed panels of u (packed_layout.h); sums [rows, columns]
// Loop nest  for each run of k within a group
//              for each 2 vectors of columns: decode [k_block][2 vectors] floats once
//                for each register tile of rows: sums += x * decoded               (tile/gemm_tile.h)
// Memory     at k_block 384, avx512: decoded [384][32] f32 48 KB, L2, streamed by each tile; sums as in many_rows.h
// Numerics   each value is rounded to f32; each sum is one chain of multiply-adds over ascending t
#pragma once

#include "matmul/many_rows.h"

namespace opst::OPST_ISA_NS::gemm {

// Values [first, first + count) of a group, (q - zero) * scale as f32 -> decoded [count][kTileColumns].
template <class Word>
OPST_NOINLINE void decode_int_columns(const ProductPart& part, int64_t column, int64_t group, int64_t first,
                                      int64_t count) {
  const IntWeightPart& weight = part.ints;
  for (int j = 0; j < kTileVecs; ++j) {
    const int64_t vec = clamped_vec(part, column + j * F32::kLanes);
    const int64_t number = group * kIntPanelColumns;
    const F32 scale = F32::load(vector_of(weight.scales, weight.groups, vec) + number);
    F32 zero = F32::set1(static_cast<float>(Word::kOffset));
    if (weight.zeros != nullptr) {
      zero = zero + to_f32(I32::load(vector_of(weight.zeros, weight.groups, vec) + number));
    }
    const uint32_t* words = vector_of(weight.words, weight.groups * weight.group_words, vec) +
                            (group * weight.group_words + first / Word::kValues) * kIntPanelColumns;
    float* to = static_cast<float*>(part.scratch) + j * F32::kLanes;
    const Words mask = simd::words_of((1u << Word::kBits) - 1);
    for (int64_t t = 0; t < count; words += kIntPanelColumns) {
      const Words word = Words::load(words);
      OPST_UNROLL for (int i = 0; i < Word::kValues; ++i) {
        if (t >= count) break;
        const int bit = Word::kBits == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
        ((simd::to_f32(simd::as_ints(word >> bit & mask)) - zero) * scale).store(to);
        to += kTileColumns;
        ++t;
      }
    }
  }
}

template <class Word>
void int_with_floats(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const FloatTiles<tile::ProductF32> tiles{part};
  clear_sums(part);
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t first = 0; first < weight.group_values; first += part.k_block) {
      const int64_t left = weight.group_values - first;
      const int64_t count = left < part.k_block ? left : part.k_block;
      const float* const x = static_cast<const float*>(part.x) + g * weight.group_values + first;
      for (int64_t column = 0; column < part.columns; column += kTileColumns) {
        decode_int_columns<Word>(part, column, g, first, count);
        tiles.add(column, count, x, [](int64_t, const char* next_x) OPST_INLINE_LAMBDA { return next_x; });
      }
    }
  }
}

}  // namespace opst::OPST_ISA_NS::gemm
