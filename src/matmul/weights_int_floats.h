// int8 and int4 weights (packed_layout.h) times rows of floats: the weight alone is quantised.
//
// Computes   sums[i, j] = sum_t x[i, t] * (q[j, t] * scale[j, g]),   q = u - offset (- zero[j, g])
// Shapes     x [rows, k] f32; weight: packed panels of u (packed_layout.h); sums [rows, columns]
// Loop nest  many rows: for each run of k within a group
//              for each 2 vectors of columns: decode [k_block][2 vectors] floats once
//                for each register tile of rows: sums += x * decoded               (tile/gemm_tile.h)
//            few rows: as in few_rows.h, with the values of a group's words decoded in registers
// Memory     many rows, k_block 384, avx512: decoded [384][32] f32 48 KB, L2, streamed by each tile; sums as in
//            many_rows.h. Few rows: weights stream once per kRowsAtOnce rows; x stays in L1
// Numerics   each value is rounded to f32; each sum is one chain of multiply-adds over ascending t
#pragma once

#include "matmul/many_rows.h"

namespace opst::OPST_ISA_NS::gemm {

// One vector of columns in one group: a word at a time, whose value i is (q - zero) * scale as f32.
template <class Word>
struct IntDecoder {
  const uint32_t* words;  // the next one
  F32 scale, zero = F32::set1(static_cast<float>(Word::kOffset));
  Words word;

  OPST_INLINE IntDecoder(const ProductPart& part, int64_t column, int64_t group, int64_t first = 0) {
    const IntWeightPart& weight = part.ints;
    const int64_t vec = clamped_vec(part, column), number = group * kIntPanelColumns;
    scale = F32::load(vector_of(weight.scales, weight.groups, vec) + number);
    if (weight.zeros != nullptr) {
      zero = zero + to_f32(I32::load(vector_of(weight.zeros, weight.groups, vec) + number));
    }
    words = vector_of(weight.words, weight.groups * weight.group_words, vec) +
            (group * weight.group_words + first / Word::kValues) * kIntPanelColumns;
  }
  OPST_INLINE void next() {
    __builtin_prefetch(words + kPrefetchBytes / 4);
    word = Words::load(words);
    words += kIntPanelColumns;
  }
  OPST_INLINE F32 value(int i) const {
    const int bit = Word::kBits == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
    const Words q = word >> bit & simd::words_of((1u << Word::kBits) - 1);
    return (simd::to_f32(simd::as_ints(q)) - zero) * scale;
  }
};

// Values [first, first + count) of a group -> decoded [count][kTileColumns].
template <class Word>
OPST_NOINLINE void decode_int_columns(const ProductPart& part, int64_t column, int64_t group, int64_t first,
                                      int64_t count) {
  for (int j = 0; j < kTileVecs; ++j) {
    IntDecoder<Word> decoder(part, column + j * F32::kLanes, group, first);
    float* to = static_cast<float*>(part.scratch) + j * F32::kLanes;
    for (int64_t t = 0; t < count;) {
      decoder.next();
      OPST_UNROLL for (int i = 0; i < Word::kValues && t < count; ++i, ++t, to += kTileColumns) {
        decoder.value(i).store(to);
      }
    }
  }
}

template <class Word>
void int_floats_many(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const FloatTiles<tile::ProductF32> tiles{part};
  if (weight.group_values == 0) return clear_sums(part);
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t first = 0; first < weight.group_values; first += part.k_block) {
      const int64_t left = weight.group_values - first;
      const int64_t count = left < part.k_block ? left : part.k_block;
      const float* const x = static_cast<const float*>(part.x) + g * weight.group_values + first;
      for (int64_t column = 0; column < part.columns; column += kTileColumns) {
        decode_int_columns<Word>(part, column, g, first, count);
        tiles.add(column, count, x, g + first == 0, [](int64_t, const char* next_x) OPST_INLINE_LAMBDA {
          return tile::LinesOfRows{next_x, 64, 0};
        });
      }
    }
  }
}

template <class Word, int MR>
OPST_NOINLINE void int_floats_group(const ProductPart& part, int64_t first_row, int64_t column) {
  constexpr int NV = kFewVecs, kLanes = F32::kLanes;
  const int64_t x_stride = part.x_stride, count = part.ints.group_values;
  const float* x = static_cast<const float*>(part.x) + first_row * x_stride;
  F32 acc[MR][NV];
  tile::clear_tile<tile::ProductF32, MR, NV>(acc);
  for (int64_t g = 0; g < part.ints.groups; ++g) {
    IntDecoder<Word> decoder[NV] = {
        {part, column, g}, {part, column + kLanes, g}, {part, column + 2 * kLanes, g}, {part, column + 3 * kLanes, g}};
    for (int64_t t = 0; t < count;) {
      OPST_UNROLL for (int v = 0; v < NV; ++v) decoder[v].next();
      OPST_UNROLL for (int i = 0; i < Word::kValues && t < count; ++i, ++t, ++x) {
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          const F32 w = decoder[v].value(i);
          OPST_UNROLL for (int r = 0; r < MR; ++r) acc[r][v] = fma(F32::set1(x[r * x_stride]), w, acc[r][v]);
        }
      }
    }
  }
  store_sums(part, first_row, column, acc);
}

template <class Word>
void int_floats_few(const ProductPart& part) {
  for_groups(part, [](auto n) OPST_INLINE_LAMBDA { return &int_floats_group<Word, n>; });
}

}  // namespace opst::OPST_ISA_NS::gemm
