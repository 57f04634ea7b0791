// int8 and int4 weights (packed_layout.h) times rows of int8: a few rows, bound by reading the weight.
//
// Computes   sums as weights_int_many_rows.h
// Shapes     x [rows, k] int8; weight: packed panels of u (packed_layout.h); sums [rows, columns]
// Loop nest  for each panel; for each group; over k: load words, per row one dot product (int4: two)
// Memory     weights stream once, fetched 4 KB ahead; x stays in L1
// Numerics   weights_int_many_rows.h: the same bits
#pragma once

#include "matmul/few_rows.h"

namespace opst::OPST_ISA_NS::gemm {

// total = the first sums of a group and panel + MR rows * its words.
template <class Word, int MR>
OPST_INLINE void few_rows_words(const ProductPart& part, int64_t panel, int64_t group,
                                I32 (&total)[MR][kVecsPerPanel]) {
  constexpr int NV = kVecsPerPanel;
  // Independent sums hide the latency of the dot product.
  constexpr int kParts = MR * NV >= 6 ? 1 : MR * NV >= 3 ? 2 : 4;
  constexpr int64_t kAheadWords = 4096 / 4;
  const int64_t count = part.ints.group_words, a_stride = part.x_stride;
  const uint32_t* words = part.ints.words + (panel * part.ints.groups + group) * count * kIntPanelColumns;
  const int8_t* a = static_cast<const int8_t*>(part.x) + group * count * Word::kValues;
  I32 acc[kParts][MR][NV];
  OPST_UNROLL for (int p = 0; p < kParts; ++p) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int v = 0; v < NV; ++v) {
        acc[p][i][v] = p == 0 ? first_sums<Word>(part, i, group, panel * NV + v) : I32::zero();
      }
    }
  }
  const auto step = [&](int p) OPST_INLINE_LAMBDA {
    __builtin_prefetch(words + kAheadWords);
    Words u[NV];
    OPST_UNROLL for (int v = 0; v < NV; ++v) u[v] = Words::load(words + v * F32::kLanes);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int f = 0; f < kFoursPerWord<Word>; ++f) {
        const Words s = four_bytes(a + i * a_stride + 4 * f);
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          acc[p][i][v] = simd::dot<kMostOf<Word>>(acc[p][i][v], fours_of<Word>(u[v], f), s);
        }
      }
    }
    words += kIntPanelColumns;
    a += Word::kValues;
  };
  int64_t w = 0;
  for (; w + kParts <= count; w += kParts) {
    OPST_UNROLL for (int p = 0; p < kParts; ++p) step(p);
  }
  for (; w < count; ++w) step(0);
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int v = 0; v < NV; ++v) {
      total[i][v] = acc[0][i][v];
      OPST_UNROLL for (int p = 1; p < kParts; ++p) total[i][v] = total[i][v] + acc[p][i][v];
    }
  }
}

template <class Word, int MR>
OPST_NOINLINE void int_few_rows(const ProductPart& part) {
  constexpr int NV = kVecsPerPanel;
  const IntWeightPart& weight = part.ints;
  for (int64_t column = 0; column < part.columns; column += kIntPanelColumns) {
    const int64_t panel = column / kIntPanelColumns;
    F32 sums[MR][NV];
    tile::clear_tile<tile::ProductF32, MR, NV>(sums);
    for (int64_t g = 0; g < weight.groups; ++g) {
      I32 total[MR][NV];
      few_rows_words<Word, MR>(part, panel, g, total);
      OPST_UNROLL for (int v = 0; v < NV; ++v) {
        const F32 scale = F32::load(weight.scales + (panel * weight.groups + g) * kIntPanelColumns + v * F32::kLanes);
        OPST_UNROLL for (int i = 0; i < MR; ++i) {
          const F32 sum = to_f32(total[i][v]);
          sums[i][v] = weight.groups == 1 ? sum * scale : fma(sum, scale, sums[i][v]);
          if (part.int_sums) sums[i][v] = {(decltype(F32::v))total[i][v].v};  // the same bits
        }
      }
    }
    store_sums(part, 0, column, sums);
  }
}

template <class Word>
void int_few(const ProductPart& part) {
  const auto rows = static_cast<int>(part.rows);
  tile::with_rows<kMaxFewRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return &int_few_rows<Word, n>; })(part);
}

// A row of x in groups, each filled up with zeros to group_bytes, and the groups' sums.
inline void pack_int_row(const int8_t* x, int64_t x_stride, const IntWeightPart& weight, int64_t group_bytes, int8_t* a,
                         int32_t* x_sums) {
  const int64_t values = weight.group_values;
  for (int64_t g = 0; g < weight.groups; ++g, x += values * x_stride, a += group_bytes) {
    if (x_stride == 1 && values > 0) {  // x may be null where there are none
      __builtin_memcpy(a, x, static_cast<size_t>(values));
    } else {
      for (int64_t t = 0; t < values; ++t) a[t] = x[t * x_stride];
    }
    __builtin_memset(a + values, 0, static_cast<size_t>(group_bytes - values));
    // group_bytes is a multiple of 4, and bytes beyond the values are zero.
    I32 sums = I32::zero();
    int64_t t = 0;
    for (; t + 4 * F32::kLanes <= group_bytes; t += 4 * F32::kLanes) {
      sums = simd::dot<1>(sums, simd::words_of(0x01010101), Words::load(reinterpret_cast<const uint32_t*>(a + t)));
    }
    int32_t lanes[F32::kLanes];
    sums.store(lanes);
    int32_t sum = 0;
    for (int i = 0; i < F32::kLanes; ++i) sum += lanes[i];
    for (; t < values; ++t) sum += a[t];
    x_sums[g] = sum;
  }
}

}  // namespace opst::OPST_ISA_NS::gemm
