// int8 and int4 weights with scales (PackedIntWeight), times int8 rows (IntRows) or f32 rows (IntFloatRows).
// int8 activations in blocks, times GGUF weights (Int8Rows), are activations_int8_many_rows.h.
//
// Computes   S[i, j, g] = sum over group g of k of a[i, t] * q[j, t],   q = u - offset (- zero[j, g])
//              i32 out    S (+ int_bias[j]); one group
//              float out  (sum over g of S * scale[j, g]) * x_scale[i] + bias[j]
//            f32 rows     out[i, j] = sum_t x[i, t] * (q[j, t] * scale[j, g]) + bias[j]
// Shapes     a [rows, k] int8 or x [rows, k] f32; weight: packed panels of u (weights_int.h); out [rows, columns]
// Loop nest  few rows     for each panel; for each group; over k: load words, per row one dot product (int4: two)
//            many rows    for each run of k (more than one group: each group)
//                           for each 2 vectors of columns
//                             for each register tile of rows: sums += a * words
//            f32 rows     for each run of k: as many rows, with words decoded to floats once per 2 vectors of columns
// Memory     many rows, at 192 rows, k 2048, avx512_vnni:
//              words  [256][32] of 4 bytes  32 KB   L1 and L2, read by every tile of rows
//              a      [192][2048] bytes    384 KB   L2, read again for each 2 vectors of columns
//              sums   [192][64] of 4 bytes  48 KB   L2, touched once per tile and run of k
// Numerics   integer sums are exact as long as they fit into 32 bits, and wrap around on the way: u * a is summed, and
//            (offset + zero) * (sum of a) taken off. Scaled sums are one chain of f32 multiply-adds over ascending
//            groups, so a row's bits do not depend on the others. f32 rows: one chain over ascending t
#pragma once

#include "matmul/weights_int_kernels.h"
#include "simd/dot_i8.h"
#include "tile/gemm_tile.h"
#include "tile/pack.h"
#include "tile/row_tiles.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::IntFloatRows;
using opst::gemm::IntOutputPart;
using opst::gemm::IntRows;
using opst::gemm::IntWeightPart;
using opst::gemm::kIntDecoded;
using opst::gemm::kIntFewRows;
using opst::gemm::kIntFours;
using opst::gemm::kIntPanelColumns;
using opst::gemm::WordI4;
using opst::gemm::WordI8;
using simd::F32;
using simd::I32;
using simd::Words;
inline constexpr int kTileRows = tile::RegisterTile::kTileRows, kTileVecs = tile::RegisterTile::kTileVecs;

inline constexpr int kIntColumns = kTileVecs * F32::kLanes;
inline constexpr int kIntPanelVecs = kIntPanelColumns / F32::kLanes;

template <class Word>
inline constexpr int kFoursPerWord = Word::kValues / 4;
template <class Word>
inline constexpr int kMostOf = (1 << Word::kBits) - 1;

// Where vector `vec` of the columns lies, with `per_panel` elements per output and panel.
template <class T>
OPST_INLINE const T* vector_of(const T* base, int64_t per_panel, int64_t vec) {
  return base + vec / kIntPanelVecs * per_panel * kIntPanelColumns + vec % kIntPanelVecs * F32::kLanes;
}

OPST_INLINE Words four_bytes(const int8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return simd::words_of(four);
}

// -(offset + zero) * sum: takes off the excess of the unsigned products.
template <class Word>
OPST_INLINE I32 correction(const int32_t* zeros, int32_t sum) {
  const I32 offset = I32::set1(-Word::kOffset * sum);
  return zeros == nullptr ? offset : offset - I32::load(zeros) * I32::set1(sum);
}

template <class T>
OPST_INLINE void store_vector(F32 value, T* p, int64_t stride, int64_t n) {
  if (stride == 1) return value.store_n(p, n);
  T lanes[F32::kLanes];
  value.store_n(lanes, n);
  for (int64_t i = 0; i < n; ++i) p[i * stride] = lanes[i];
}
OPST_INLINE void store_vector(I32 value, int32_t* p, int64_t stride, int64_t n) {
  int32_t lanes[F32::kLanes];
  value.store(lanes);
  for (int64_t i = 0; i < n; ++i) p[i * stride] = lanes[i];
}

// One vector of one row: sums, already times the weight's scales, from `column` on.
OPST_INLINE void store_scaled(const IntOutputPart& out, int64_t columns, int64_t row, int64_t column, F32 sums) {
  const int64_t n = columns - column < F32::kLanes ? columns - column : F32::kLanes;
  const int64_t at = row * out.row_stride + column * out.column_stride;
  if (out.x_scales != nullptr) sums = sums * F32::set1(out.x_scales[row]);
  if (out.bias != nullptr) sums = sums + F32::load_n(out.bias + column, n);
  switch (out.type) {
    case DType::bf16:
      return store_vector(sums, static_cast<bf16*>(out.data) + at, out.column_stride, n);
    case DType::f16:
      return store_vector(sums, static_cast<f16*>(out.data) + at, out.column_stride, n);
    default:
      return store_vector(sums, static_cast<float*>(out.data) + at, out.column_stride, n);
  }
}
// The same from integer sums of one group, and i32 output.
OPST_INLINE void store_total(const IntRows& part, int64_t row, int64_t column, I32 total) {
  const IntOutputPart& out = part.out;
  const int64_t left = part.weight.columns - column;
  const int64_t n = left < F32::kLanes ? left : F32::kLanes;
  if (out.int_bias != nullptr) {
    int32_t bias[F32::kLanes] = {};
    __builtin_memcpy(bias, out.int_bias + column, static_cast<size_t>(n) * sizeof(int32_t));
    total = total + I32::load(bias);
  }
  if (out.type == DType::i32) {
    int32_t* const p = static_cast<int32_t*>(out.data) + row * out.row_stride + column * out.column_stride;
    if (n == F32::kLanes && out.column_stride == 1) return total.store(p);
    return store_vector(total, p, out.column_stride, n);
  }
  const F32 scale = F32::load(vector_of(part.weight.scales, 1, column / F32::kLanes));
  store_scaled(out, part.weight.columns, row, column, to_f32(total) * scale);
}

inline void pack_row(const int8_t* x, int64_t x_stride, const IntWeightPart& weight, int64_t group_bytes, int8_t* a,
                     int32_t* a_sums) {
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
    a_sums[g] = sum;
  }
}

template <class T>
void widen_row(const void* x, int64_t x_stride, int64_t k, float* out) {
  for (int64_t t = 0; t < k; t += F32::kLanes) {
    const int64_t n = k - t < F32::kLanes ? k - t : F32::kLanes;
    tile::load_row<F32>(static_cast<const T*>(x), x_stride, t, k).store_n(out + t, n);
  }
}

// total[i][v] += words [count] of one group and panel * MR rows.
template <class Word, int MR>
OPST_INLINE void few_rows_words(int64_t count, const int8_t* a, int64_t a_stride, const uint32_t* words,
                                I32 (&total)[MR][kIntPanelVecs]) {
  constexpr int NV = kIntPanelVecs;
  // Independent sums hide the latency of the dot product.
  constexpr int kParts = MR * NV >= 6 ? 1 : MR * NV >= 3 ? 2 : 4;
  constexpr int64_t kAheadWords = 4096 / 4;
  I32 acc[kParts][MR][NV];
  OPST_UNROLL for (int p = 0; p < kParts; ++p) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int v = 0; v < NV; ++v) acc[p][i][v] = p == 0 ? total[i][v] : I32::zero();
    }
  }
  const auto step = [&](int p) OPST_INLINE_LAMBDA {
    __builtin_prefetch(words + kAheadWords);
    Words u[NV];
    OPST_UNROLL for (int v = 0; v < NV; ++v) u[v] = Words::load(words + v * F32::kLanes);
    if constexpr (Word::kBits == 8) {
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const Words s = four_bytes(a + i * a_stride);
        OPST_UNROLL for (int v = 0; v < NV; ++v) acc[p][i][v] = simd::dot<255>(acc[p][i][v], u[v], s);
      }
    } else {
      const Words mask = simd::words_of(0x0f0f0f0f);
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const Words low = four_bytes(a + i * a_stride), high = four_bytes(a + i * a_stride + 4);
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          acc[p][i][v] = simd::dot<15>(acc[p][i][v], u[v] & mask, low);
          acc[p][i][v] = simd::dot<15>(acc[p][i][v], simd::shift_right<4>(u[v]) & mask, high);
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
OPST_NOINLINE void int_few_rows(const IntRows& part) {
  constexpr int NV = kIntPanelVecs;
  const IntWeightPart& weight = part.weight;
  const int64_t group_bytes = 4 * kFoursPerWord<Word> * weight.group_words;
  for (int64_t column = 0; column < weight.columns; column += kIntPanelColumns) {
    const int64_t panel = column / kIntPanelColumns;
    const uint32_t* words = weight.words + panel * weight.groups * weight.group_words * kIntPanelColumns;
    F32 sums[MR][NV];
    I32 total[MR][NV];
    OPST_UNROLL for (int i = 0; i < MR; ++i) { OPST_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = F32::zero(); }
    for (int64_t g = 0; g < weight.groups; ++g, words += weight.group_words * kIntPanelColumns) {
      const int64_t numbers = (panel * weight.groups + g) * kIntPanelColumns;
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          const int32_t* const zeros = weight.zeros == nullptr ? nullptr : weight.zeros + numbers + v * F32::kLanes;
          total[i][v] = correction<Word>(zeros, part.a_sums[i * weight.groups + g]);
        }
      }
      few_rows_words<Word, MR>(weight.group_words, part.a + g * group_bytes, part.a_stride, words, total);
      if (weight.groups == 1) break;
      OPST_UNROLL for (int v = 0; v < NV; ++v) {
        const F32 scale = F32::load(weight.scales + numbers + v * F32::kLanes);
        OPST_UNROLL for (int i = 0; i < MR; ++i) sums[i][v] = fma(to_f32(total[i][v]), scale, sums[i][v]);
      }
    }
    for (int i = 0; i < MR; ++i) {
      for (int v = 0; v < NV; ++v) {
        const int64_t c = column + v * F32::kLanes;
        if (c >= weight.columns) break;
        if (weight.groups == 1) {
          store_total(part, i, c, total[i][v]);
        } else {
          store_scaled(part.out, weight.columns, i, c, sums[i][v]);
        }
      }
    }
  }
}

using IntFewRows = void (*)(const IntRows&);
template <class Word, int MR = kIntFewRows>
OPST_INLINE IntFewRows int_few_rows_for(int64_t rows) {
  if constexpr (MR == 1) {
    return int_few_rows<Word, 1>;
  } else {
    return rows == MR ? int_few_rows<Word, MR> : int_few_rows_for<Word, MR - 1>(rows);
  }
}
template <class Word>
void int_few(const IntRows& part) {
  int_few_rows_for<Word>(part.rows)(part);
}

// A run of words of the tile's vectors: four bytes w of vector j at words[j] + w * step.
struct IntTileWords {
  const uint32_t* words[kTileVecs];
  int64_t step;
  int64_t fours;
  const char* next;  // the words that are read next: a line is fetched to L2 per four words of k
  // Rows of the output, fetched while the last run of k is summed: without that, storing takes as long as a sixth of
  // the products at k = 2048.
  const char* out;
  int64_t out_stride;
};

// acc += MR rows of `fours` words of four bytes * the run.
template <int kMost, int MR>
OPST_INLINE void int_tile(const IntTileWords& block, const int8_t* a, int64_t a_stride, I32 (&acc)[MR][kTileVecs]) {
  const uint32_t* b[kTileVecs];
  OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) b[j] = block.words[j];
  const int64_t step_words = block.step;
  // Rows by fours: each address is one base plus 0, 1, 2 or 3 times the stride.
  constexpr int kGroups = (MR + 3) / 4;
  const int8_t* group[kGroups];
  OPST_UNROLL for (int g = 0; g < kGroups; ++g) group[g] = a + 4 * g * a_stride;
  const auto step = [&](int64_t k) OPST_INLINE_LAMBDA {
    Words u[kTileVecs];
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) u[j] = Words::load(b[j] + k * step_words);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      const Words s = four_bytes(group[i / 4] + i % 4 * a_stride + 4 * k);
      OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j] = simd::dot<kMost>(acc[i][j], u[j], s);
    }
  };
  const char* next = block.next;
  const char* out = block.out;
  int64_t out_rows = MR;
  int64_t k = 0;
  for (; k + 4 <= block.fours; k += 4, next += 64) {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(out, 1);
    __builtin_prefetch(out + 64, 1);
    out += --out_rows > 0 ? block.out_stride : 0;
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < block.fours; ++k) step(k);
}

// sums += MR rows * the run.
template <int kMost, int MR>
OPST_NOINLINE void int_accumulate(const IntTileWords& block, const int8_t* a, int64_t a_stride, int32_t* sums,
                                  int64_t sums_stride) {
  I32 acc[MR][kTileVecs];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j] = I32::load(sums + i * sums_stride + j * F32::kLanes);
  }
  int_tile<kMost, MR>(block, a, a_stride, acc);
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j].store(sums + i * sums_stride + j * F32::kLanes);
  }
}

// Scaled sums of one group: sums = fma(product - correction, scale, sums).
struct IntTileGroup {
  const int32_t* a_sums;  // of the tile's first row
  int64_t a_sums_stride;
  const float* scales[kTileVecs];
  const int32_t* zeros[kTileVecs];
};
template <class Word, int MR>
OPST_NOINLINE void int_accumulate_scaled(const IntTileWords& block, const IntTileGroup& group, const int8_t* a,
                                         int64_t a_stride, float* sums, int64_t sums_stride) {
  I32 acc[MR][kTileVecs];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
      acc[i][j] = correction<Word>(group.zeros[j], group.a_sums[i * group.a_sums_stride]);
    }
  }
  int_tile<kMostOf<Word>, MR>(block, a, a_stride, acc);
  OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
    const F32 scale = F32::load(group.scales[j]);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      float* const at = sums + i * sums_stride + j * F32::kLanes;
      fma(to_f32(acc[i][j]), scale, F32::load(at)).store(at);
    }
  }
}

using IntAccumulate = void (*)(const IntTileWords&, const int8_t*, int64_t, int32_t*, int64_t);
template <int kMost, int MR = kTileRows>
OPST_INLINE IntAccumulate int_accumulate_for(int64_t rows) {
  if constexpr (MR == 1) {
    return int_accumulate<kMost, 1>;
  } else {
    return rows == MR ? int_accumulate<kMost, MR> : int_accumulate_for<kMost, MR - 1>(rows);
  }
}
using IntAccumulateScaled = void (*)(const IntTileWords&, const IntTileGroup&, const int8_t*, int64_t, float*, int64_t);
template <class Word, int MR = kTileRows>
OPST_INLINE IntAccumulateScaled int_accumulate_scaled_for(int64_t rows) {
  if constexpr (MR == 1) {
    return int_accumulate_scaled<Word, 1>;
  } else {
    return rows == MR ? int_accumulate_scaled<Word, MR> : int_accumulate_scaled_for<Word, MR - 1>(rows);
  }
}

OPST_INLINE int64_t clamped_vec(int64_t column, int64_t columns) {
  const int64_t vec = column / F32::kLanes, last = (columns - 1) / F32::kLanes;
  return vec < last ? vec : last;
}

// `count` words of a group, from word `first` of it on, for two vectors of columns; four-bit ones are unpacked.
template <class Word>
OPST_INLINE IntTileWords tile_words(const IntRows& part, int64_t column, int64_t group, int64_t first, int64_t count) {
  const IntWeightPart& weight = part.weight;
  const int64_t panel_words = weight.groups * weight.group_words;
  IntTileWords out = {};
  for (int j = 0; j < kTileVecs; ++j) {
    const int64_t vec = clamped_vec(column + j * F32::kLanes, weight.columns);
    const uint32_t* from =
        vector_of(weight.words, panel_words, vec) + (group * weight.group_words + first) * kIntPanelColumns;
    if constexpr (Word::kBits == 8) {
      out.words[j] = from;
    } else {
      uint32_t* to = part.unpacked + j * F32::kLanes;
      out.words[j] = to;
      const Words mask = simd::words_of(0x0f0f0f0f);
      for (int64_t w = 0; w < count; ++w, from += kIntPanelColumns, to += 2 * kIntColumns) {
        const Words words = Words::load(from);
        simd::store(words & mask, to);
        simd::store(simd::shift_right<4>(words) & mask, to + kIntColumns);
      }
    }
  }
  out.step = Word::kBits == 8 ? kIntPanelColumns : kIntColumns;
  out.fours = count * kFoursPerWord<Word>;
  return out;
}

// Rows [row, row + rows) and two vectors from `column` on of the sums of one group -> out.
inline void store_totals(const IntRows& part, const int32_t* sums, int64_t sums_stride, int64_t row, int64_t rows,
                         int64_t column) {
  const IntOutputPart& out = part.out;
  const bool plain = out.type == DType::f32 && out.column_stride == 1 && out.int_bias == nullptr;
  for (int j = 0; j < kTileVecs && column < part.weight.columns; ++j, column += F32::kLanes, sums += F32::kLanes) {
    if (!plain || column + F32::kLanes > part.weight.columns) {
      for (int64_t i = 0; i < rows; ++i) store_total(part, row + i, column, I32::load(sums + i * sums_stride));
      continue;
    }
    // The commonest output, with less work per element.
    const F32 scale = F32::load(vector_of(part.weight.scales, 1, column / F32::kLanes));
    const F32 bias = out.bias == nullptr ? F32::zero() : F32::load(out.bias + column);
    float* const to = static_cast<float*>(out.data) + row * out.row_stride + column;
    for (int64_t i = 0; i < rows; ++i) {
      F32 y = to_f32(I32::load(sums + i * sums_stride)) * scale;
      if (out.x_scales != nullptr) y = y * F32::set1(out.x_scales[row + i]);
      if (out.bias != nullptr) y = y + bias;
      y.store(to + i * out.row_stride);
    }
  }
}

// One group: sums stay integers, over runs of k.
template <class Word>
void int_many_whole(const IntRows& part) {
  const IntWeightPart& weight = part.weight;
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  const int64_t sums_stride = (weight.columns + kIntColumns - 1) / kIntColumns * kIntColumns;
  int32_t* const sums = static_cast<int32_t*>(part.sums);
  // Sums begin with the correction.
  for (int64_t row = 0; row < part.rows; ++row) {
    for (int64_t c = 0; c < sums_stride; c += F32::kLanes) {
      const int32_t* const zeros =
          weight.zeros == nullptr ? nullptr : vector_of(weight.zeros, 1, clamped_vec(c, weight.columns));
      correction<Word>(zeros, part.a_sums[row]).store(sums + row * sums_stride + c);
    }
  }
  constexpr int64_t kBlockWords = kIntFours / kFoursPerWord<Word>;
  for (int64_t w = 0; w < weight.group_words; w += kBlockWords) {
    const int64_t count = weight.group_words - w < kBlockWords ? weight.group_words - w : kBlockWords;
    for (int64_t column = 0; column < weight.columns; column += kIntColumns) {
      IntTileWords block = tile_words<Word>(part, column, 0, w, count);
      // The next columns' words come from farther than L2. Each tile of rows fetches its share of them.
      const bool last = column + kIntColumns >= weight.columns;
      const int64_t next_column = last ? 0 : column + kIntColumns, next_word = last ? w + count : w;
      const char* next[kTileVecs];
      for (int j = 0; j < kTileVecs; ++j) {
        next[j] = reinterpret_cast<const char*>(
            vector_of(weight.words, weight.group_words, clamped_vec(next_column + j * F32::kLanes, weight.columns)) +
            next_word * kIntPanelColumns);
      }
      const int64_t share = block.fours / 4 * 64, stream = count * 64;
      int64_t fetched = 0;
      const bool last_block = w + count == weight.group_words;
      const int64_t out_bytes = part.out.type == DType::f32 || part.out.type == DType::i32 ? 4 : 2;
      const char* const out = static_cast<const char*>(part.out.data) + column * part.out.column_stride * out_bytes;
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const auto [row, rows] = row_tiles[t];
        block.next = fetched < stream ? next[0] + fetched : next[kTileVecs - 1] + (fetched - stream);
        fetched += share;
        block.out = last_block ? out + row * part.out.row_stride * out_bytes : block.next;
        block.out_stride = last_block ? part.out.row_stride * out_bytes : 0;
        int32_t* const tile_sums = sums + row * sums_stride + column;
        int_accumulate_for<kMostOf<Word>>(rows)(block, part.a + row * part.a_stride + w * Word::kValues, part.a_stride,
                                                tile_sums, sums_stride);
        if (last_block) store_totals(part, tile_sums, sums_stride, row, rows, column);
      }
    }
  }
  if (weight.group_words > 0) return;
  for (int64_t column = 0; column < weight.columns; column += kIntColumns) {
    store_totals(part, sums + column, sums_stride, 0, part.rows, column);
  }
}

template <class Word>
void int_many_groups(const IntRows& part) {
  const IntWeightPart& weight = part.weight;
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  const int64_t sums_stride = (weight.columns + kIntColumns - 1) / kIntColumns * kIntColumns;
  float* const sums = static_cast<float*>(part.sums);
  for (int64_t i = 0; i < part.rows * sums_stride; i += F32::kLanes) F32::zero().store(sums + i);
  const int64_t group_bytes = 4 * kFoursPerWord<Word> * weight.group_words;
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t column = 0; column < weight.columns; column += kIntColumns) {
      IntTileWords block = tile_words<Word>(part, column, g, 0, weight.group_words);
      block.next = block.out = reinterpret_cast<const char*>(block.words[0]);
      IntTileGroup group = {part.a_sums + g, weight.groups, {}, {}};
      for (int j = 0; j < kTileVecs; ++j) {
        const int64_t vec = clamped_vec(column + j * F32::kLanes, weight.columns);
        group.scales[j] = vector_of(weight.scales, weight.groups, vec) + g * kIntPanelColumns;
        if (weight.zeros != nullptr) {
          group.zeros[j] = vector_of(weight.zeros, weight.groups, vec) + g * kIntPanelColumns;
        }
      }
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const auto [row, rows] = row_tiles[t];
        IntTileGroup of_tile = group;
        of_tile.a_sums += row * weight.groups;
        int_accumulate_scaled_for<Word>(rows)(block, of_tile, part.a + row * part.a_stride + g * group_bytes,
                                              part.a_stride, sums + row * sums_stride + column, sums_stride);
      }
    }
  }
  for (int64_t row = 0; row < part.rows; ++row) {
    for (int64_t c = 0; c < weight.columns; c += F32::kLanes) {
      store_scaled(part.out, weight.columns, row, c, F32::load(sums + row * sums_stride + c));
    }
  }
}

template <class Word>
void int_many(const IntRows& part) {
  (part.weight.groups == 1 ? int_many_whole<Word> : int_many_groups<Word>)(part);
}

// Values [first, first + count) of a group, (q - zero) * scale as f32 -> decoded [count][kIntColumns].
template <class Word>
OPST_NOINLINE void decode_int_columns(const IntFloatRows& part, int64_t column, int64_t group, int64_t first,
                                      int64_t count) {
  const IntWeightPart& weight = part.weight;
  for (int j = 0; j < kTileVecs; ++j) {
    const int64_t vec = clamped_vec(column + j * F32::kLanes, weight.columns);
    const int64_t number = group * kIntPanelColumns;
    const F32 scale = F32::load(vector_of(weight.scales, weight.groups, vec) + number);
    F32 zero = F32::set1(static_cast<float>(Word::kOffset));
    if (weight.zeros != nullptr) {
      zero = zero + to_f32(I32::load(vector_of(weight.zeros, weight.groups, vec) + number));
    }
    const uint32_t* words = vector_of(weight.words, weight.groups * weight.group_words, vec) +
                            (group * weight.group_words + first / Word::kValues) * kIntPanelColumns;
    float* to = part.decoded + j * F32::kLanes;
    const Words mask = simd::words_of((1u << Word::kBits) - 1);
    for (int64_t t = 0; t < count; words += kIntPanelColumns) {
      const Words word = Words::load(words);
      OPST_UNROLL for (int i = 0; i < Word::kValues; ++i) {
        if (t >= count) break;
        const int bit = Word::kBits == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
        ((simd::to_f32(simd::as_ints(word >> bit & mask)) - zero) * scale).store(to);
        to += kIntColumns;
        ++t;
      }
    }
  }
}

// f32 rows: sums over k in ascending order, one multiply-add per term.
template <class Word>
void int_with_floats(const IntFloatRows& part) {
  const IntWeightPart& weight = part.weight;
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  const int64_t sums_stride = (weight.columns + kIntColumns - 1) / kIntColumns * kIntColumns;
  for (int64_t i = 0; i < part.rows * sums_stride; i += F32::kLanes) F32::zero().store(part.sums + i);
  float ones[kTileRows];
  for (float& factor : ones) factor = 1;
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t first = 0; first < weight.group_values; first += kIntDecoded) {
      const int64_t left = weight.group_values - first;
      const int64_t count = left < kIntDecoded ? left : kIntDecoded;
      for (int64_t column = 0; column < weight.columns; column += kIntColumns) {
        decode_int_columns<Word>(part, column, g, first, count);
        for (int64_t t = 0; t < row_tiles.count(); ++t) {
          const auto [row, rows] = row_tiles[t];
          const float* const x = part.x + row * part.x_stride + g * weight.group_values + first;
          tile::scaled_accumulate_for<tile::ProductF32, kTileVecs>(rows)(
              count, x, part.x_stride, part.decoded, kIntColumns, part.sums + row * sums_stride + column, sums_stride,
              ones, reinterpret_cast<const char*>(x + rows * part.x_stride));
        }
      }
    }
  }
  for (int64_t row = 0; row < part.rows; ++row) {
    for (int64_t c = 0; c < weight.columns; c += F32::kLanes) {
      store_scaled(part.out, weight.columns, row, c, F32::load(part.sums + row * sums_stride + c));
    }
  }
}

}  // namespace opst::OPST_ISA_NS::gemm
