// int8 and int4 weights (weights_int.h) times rows of int8: many rows, bound by multiplying.
//
// Computes   S[i, j, g] = sum over group g of k of x[i, t] * q[j, t],   q = u - offset (- zero[j, g])
//            sums       S + int_bias[j] as i32, or times scale[j] as f32: one group
//                       sum over g of S * scale[j, g] as f32: more groups
// Shapes     x [rows, k] int8; weight: packed panels of u (weights_int.h); sums [rows, columns]
// Loop nest  for each run of k (more than one group: each group)
//              for each 2 vectors of columns
//                for each register tile of rows: sums += x * words
// Memory     at 192 rows, k 2048, avx512_vnni:
//              words  [256][32] of 4 bytes  32 KB   L1 and L2, read by every tile of rows
//              x      [192][2048] bytes    384 KB   L2, read again for each 2 vectors of columns
//              sums   [192][64] of 4 bytes  48 KB   L2, touched once per tile and run of k
// Numerics   integer sums are exact as long as they fit into 32 bits, and wrap around on the way: u * x is summed, and
//            (offset + zero) * (sum of x) taken off. Scaled sums of one group are a product, of more groups one chain of
//            f32 multiply-adds over ascending groups, so a row's bits do not depend on the others
#pragma once

#include "matmul/weights_int_panels.h"
#include "tile/row_tiles.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::kIntFours;

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
  const float* scales[kTileVecs];  // of the tile's vectors, behind the last run of k; null: sums stay integers
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

// sums += MR rows * the run. The last run of k leaves sums * scale as f32, where there are scales.
template <int kMost, int MR>
OPST_NOINLINE void int_accumulate(const IntTileWords& block, const int8_t* a, int64_t a_stride, float* sums,
                                  int64_t sums_stride) {
  auto* const totals = reinterpret_cast<int32_t*>(sums);
  I32 acc[MR][kTileVecs];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j] = I32::load(totals + i * sums_stride + j * F32::kLanes);
  }
  int_tile<kMost, MR>(block, a, a_stride, acc);
  if (block.scales[0] == nullptr) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j].store(totals + i * sums_stride + j * F32::kLanes);
    }
    return;
  }
  OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
    const F32 scale = F32::load(block.scales[j]);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      (to_f32(acc[i][j]) * scale).store(sums + i * sums_stride + j * F32::kLanes);
    }
  }
}

// Scaled sums of one of several groups: sums = fma(product - correction, scale, sums).
struct IntTileGroup {
  const int32_t* x_sums;  // of the tile's first row
  int64_t x_sums_stride;
  const float* scales[kTileVecs];
  const int32_t* zeros[kTileVecs];
};
template <class Word, int MR>
OPST_NOINLINE void int_accumulate_scaled(const IntTileWords& block, const IntTileGroup& group, const int8_t* a,
                                         int64_t a_stride, float* sums, int64_t sums_stride) {
  I32 acc[MR][kTileVecs];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
      acc[i][j] = correction<Word>(group.zeros[j], group.x_sums[i * group.x_sums_stride]);
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

using IntAccumulate = void (*)(const IntTileWords&, const int8_t*, int64_t, float*, int64_t);
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

// `count` words of a group, from word `first` of it on, for two vectors of columns; four-bit ones are unpacked.
template <class Word>
OPST_INLINE IntTileWords tile_words(const ProductPart& part, int64_t column, int64_t group, int64_t first,
                                    int64_t count) {
  const IntWeightPart& weight = part.ints;
  const int64_t panel_words = weight.groups * weight.group_words;
  IntTileWords out = {};
  for (int j = 0; j < kTileVecs; ++j) {
    const int64_t vec = clamped_vec(column + j * F32::kLanes, part.columns);
    const uint32_t* from =
        vector_of(weight.words, panel_words, vec) + (group * weight.group_words + first) * kIntPanelColumns;
    if constexpr (Word::kBits == 8) {
      out.words[j] = from;
    } else {
      uint32_t* to = static_cast<uint32_t*>(part.scratch) + j * F32::kLanes;
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

// One group: sums stay integers, over runs of k.
template <class Word>
void int_many_whole(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const auto* const a = static_cast<const int8_t*>(part.x);
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  for (int64_t row = 0; row < part.rows; ++row) {
    auto* const sums = reinterpret_cast<int32_t*>(part.sums + row * part.sums_stride);
    for (int64_t c = 0; c < part.columns; c += kIntColumns) {
      for (int j = 0; j < kTileVecs; ++j) {
        const int64_t at = c + j * F32::kLanes;
        first_sums<Word>(part, row, 0, clamped_vec(at, part.columns)).store(sums + at);
      }
    }
  }
  constexpr int64_t kBlockWords = kIntFours / kFoursPerWord<Word>;
  int64_t w = 0;
  do {  // once where k is 0: sums become floats in the last run
    const int64_t count = weight.group_words - w < kBlockWords ? weight.group_words - w : kBlockWords;
    const bool last_block = w + count == weight.group_words;
    for (int64_t column = 0; column < part.columns; column += kIntColumns) {
      IntTileWords block = tile_words<Word>(part, column, 0, w, count);
      // The next columns' words come from farther than L2. Each tile of rows fetches its share of them.
      const bool last = column + kIntColumns >= part.columns;
      const int64_t next_column = last ? 0 : column + kIntColumns, next_word = last ? w + count : w;
      const char* next[kTileVecs];
      for (int j = 0; j < kTileVecs; ++j) {
        next[j] = reinterpret_cast<const char*>(
            vector_of(weight.words, weight.group_words, clamped_vec(next_column + j * F32::kLanes, part.columns)) +
            next_word * kIntPanelColumns);
        if (last_block && !part.int_sums) {
          block.scales[j] = vector_of(weight.scales, 1, clamped_vec(column + j * F32::kLanes, part.columns));
        }
      }
      const int64_t share = block.fours / 4 * 64, stream = count * 64;
      int64_t fetched = 0;
      const bool fetches_out = last_block && part.out != nullptr;
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const auto [row, rows] = row_tiles[t];
        block.next = fetched < stream ? next[0] + fetched : next[kTileVecs - 1] + (fetched - stream);
        fetched += share;
        block.out = fetches_out ? part.out + column * part.out_column_bytes + row * part.out_row_bytes : block.next;
        block.out_stride = fetches_out ? part.out_row_bytes : 0;
        int_accumulate_for<kMostOf<Word>>(rows)(block, a + row * part.x_stride + w * Word::kValues, part.x_stride,
                                                part.sums + row * part.sums_stride + column, part.sums_stride);
      }
    }
    w += kBlockWords;
  } while (w < weight.group_words);
}

template <class Word>
void int_many_groups(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const auto* const a = static_cast<const int8_t*>(part.x);
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  clear_sums(part);
  const int64_t group_bytes = 4 * kFoursPerWord<Word> * weight.group_words;
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t column = 0; column < part.columns; column += kIntColumns) {
      IntTileWords block = tile_words<Word>(part, column, g, 0, weight.group_words);
      block.next = block.out = reinterpret_cast<const char*>(block.words[0]);
      IntTileGroup group = {part.x_sums + g, weight.groups, {}, {}};
      for (int j = 0; j < kTileVecs; ++j) {
        const int64_t vec = clamped_vec(column + j * F32::kLanes, part.columns);
        group.scales[j] = vector_of(weight.scales, weight.groups, vec) + g * kIntPanelColumns;
        if (weight.zeros != nullptr) {
          group.zeros[j] = vector_of(weight.zeros, weight.groups, vec) + g * kIntPanelColumns;
        }
      }
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const auto [row, rows] = row_tiles[t];
        IntTileGroup of_tile = group;
        of_tile.x_sums += row * weight.groups;
        int_accumulate_scaled_for<Word>(rows)(block, of_tile, a + row * part.x_stride + g * group_bytes, part.x_stride,
                                              part.sums + row * part.sums_stride + column, part.sums_stride);
      }
    }
  }
}

template <class Word>
void int_many(const ProductPart& part) {
  (part.ints.groups == 1 ? int_many_whole<Word> : int_many_groups<Word>)(part);
}

}  // namespace opst::OPST_ISA_NS::gemm
