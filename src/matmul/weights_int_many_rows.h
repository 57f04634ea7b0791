// int8 and int4 weights (packed_layout.h) times rows of int8: many rows, bound by multiplying.
//
// Computes   S[i, j, g] = sum over group g of k of x[i, t] * q[j, t],   q = u - offset (- zero[j, g])
//            sums       S + int_bias[j] as i32, or times scale[j] as f32: one group
//                       sum over g of S * scale[j, g] as f32: more groups
// Shapes     x [rows, k] int8; weight: packed panels of u (packed_layout.h); sums [rows, columns]
// Loop nest  for each run of k (more than one group: each group)
//              for each 2 vectors of columns
//                for each register tile of rows: sums += x * words
// Memory     at 192 rows, k 2048, avx512_vnni:
//              words  [512][32] of 4 bytes  64 KB   L2, read by every tile of rows
//              x      [192][2048] bytes    384 KB   L2, read again for each 2 vectors of columns
//              sums   [192][64] of 4 bytes  48 KB   L2, touched once per tile and run of k
// Numerics   integer sums are exact as long as they fit into 32 bits, and wrap around on the way: u * x is summed, and
//            (offset + zero) * (sum of x) taken off. Scaled sums of one group are a product, of more groups one chain
//            of f32 multiply-adds over ascending groups, so a row's bits do not depend on the others
#pragma once

#include "matmul/panels.h"

namespace opst::OPST_ISA_NS::gemm {

// A run of words of the tile's vectors: four bytes w of vector j at words[j] + w * step.
struct IntTile {
  static constexpr int64_t kLines = 2;  // with one, the tiles of 64 rows would not fetch all that is read next
  const uint32_t* words[kTileVecs];
  int64_t step;
  int64_t fours;
  const char* next;                 // the words that are read next: kLines lines go to L2 per four words of k
  const float* scales[kTileVecs];   // of the group; the first one null: sums stay integers, as before the last run of k
  bool begins;                      // sums begin with the correction and the bias, not with what is in their place
  const int32_t* zeros[kTileVecs];  // null: all 0
  const int32_t* bias[kTileVecs];   // null: none
  const int32_t* x_sums;            // of the tile's first row
  int64_t x_sums_stride;
};

// acc += MR rows of `fours` words of four bytes * the run.
template <int kMost, int MR>
OPST_INLINE void add_int_tile(const IntTile& block, const int8_t* a, int64_t a_stride, I32 (&acc)[MR][kTileVecs]) {
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
  int64_t k = 0;
  for (; k + 4 <= block.fours; k += 4, next += 64 * IntTile::kLines) {
    OPST_UNROLL for (int64_t line = 0; line < IntTile::kLines; ++line) simd::fetch_into_l2(next + 64 * line);
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < block.fours; ++k) step(k);
}

// One group: sums begin, or go on, with MR rows * the run as integers; the last run of k leaves sums * scale as f32.
// More groups: sums = fma(MR rows * the run - correction, scale, sums) as f32.
template <class Word, bool kGroups, int MR>
OPST_NOINLINE void int_accumulate(const IntTile& block, const int8_t* a, int64_t a_stride, float* sums,
                                  int64_t sums_stride) {
  auto* const totals = reinterpret_cast<int32_t*>(sums);
  I32 acc[MR][kTileVecs];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
      if (kGroups || block.begins) {
        acc[i][j] = correction<Word>(block.zeros[j], block.x_sums[i * block.x_sums_stride]);
        if (!kGroups && block.bias[j] != nullptr) acc[i][j] = acc[i][j] + I32::load(block.bias[j]);
      } else {
        acc[i][j] = I32::load(totals + i * sums_stride + j * F32::kLanes);
      }
    }
  }
  add_int_tile<kMostOf<Word>, MR>(block, a, a_stride, acc);
  if (!kGroups && block.scales[0] == nullptr) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) acc[i][j].store(totals + i * sums_stride + j * F32::kLanes);
    }
    return;
  }
  OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
    const F32 scale = F32::load(block.scales[j]);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      float* const at = sums + i * sums_stride + j * F32::kLanes;
      const F32 sum = to_f32(acc[i][j]);
      (kGroups ? fma(sum, scale, F32::load(at)) : sum * scale).store(at);
    }
  }
}

template <class Word, bool kGroups>
OPST_INLINE void accumulate_rows(const ProductPart& part, const IntTile& block, tile::RowTile rows, int64_t column,
                                 int64_t first_byte) {
  const auto accumulate = tile::with_rows<kTileRows>(
      rows.rows, [](auto n) OPST_INLINE_LAMBDA { return &int_accumulate<Word, kGroups, n>; });
  accumulate(block, static_cast<const int8_t*>(part.x) + rows.first * part.x_stride + first_byte, part.x_stride,
             part.sums + rows.first * part.sums_stride + column, part.sums_stride);
}

// `count` words of a group, from word `first` of it on, for two vectors of columns; four-bit ones are unpacked. Scales
// and zeros of the group.
template <class Word>
OPST_INLINE IntTile tile_words(const ProductPart& part, int64_t column, int64_t group, int64_t first, int64_t count) {
  const IntWeightPart& weight = part.ints;
  const int64_t panel_words = weight.groups * weight.group_words;
  IntTile out = {};
  for (int j = 0; j < kTileVecs; ++j) {
    const int64_t vec = clamped_vec(part, column + j * F32::kLanes);
    out.scales[j] = vector_of(weight.scales, weight.groups, vec) + group * kIntPanelColumns;
    if (part.int_bias != nullptr) out.bias[j] = part.int_bias + vec * F32::kLanes;
    if (weight.zeros != nullptr) out.zeros[j] = vector_of(weight.zeros, weight.groups, vec) + group * kIntPanelColumns;
    const uint32_t* from =
        vector_of(weight.words, panel_words, vec) + (group * weight.group_words + first) * kIntPanelColumns;
    if constexpr (Word::kBits == 8) {
      out.words[j] = from;
    } else {
      uint32_t* to = static_cast<uint32_t*>(part.scratch) + j * F32::kLanes;
      out.words[j] = to;
      for (int64_t w = 0; w < count; ++w, from += kIntPanelColumns, to += 2 * kTileColumns) {
        const Words word = Words::load(from);
        OPST_UNROLL for (int i = 0; i < 2; ++i) simd::store(fours_of<Word>(word, i), to + i * kTileColumns);
      }
    }
  }
  out.step = Word::kBits == 8 ? kIntPanelColumns : kTileColumns;
  out.fours = count * kFoursPerWord<Word>;
  return out;
}

// One group: sums stay integers, over runs of k.
template <class Word>
void int_many_whole(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  constexpr int64_t kBlockWords = kIntFours / kFoursPerWord<Word>;
  int64_t w = 0;
  do {  // once where k is 0: sums become floats in the last run
    const int64_t count = weight.group_words - w < kBlockWords ? weight.group_words - w : kBlockWords;
    const bool last_block = w + count == weight.group_words;
    for (int64_t column = 0; column < part.columns; column += kTileColumns) {
      IntTile block = tile_words<Word>(part, column, 0, w, count);
      // The next columns' words come from farther than L2. Each tile of rows fetches its share of them.
      const bool last = column + kTileColumns >= part.columns;
      const int64_t next_column = last && !last_block ? 0 : column + kTileColumns;
      const int64_t next_run = last_block ? 0 : w + count, next_word = last ? next_run : w;
      const char* next[kTileVecs];
      for (int j = 0; j < kTileVecs; ++j) {
        // Behind the last columns lie those of the next task, or nothing.
        const int64_t vec = next_column / F32::kLanes + j, word = vec / kVecsPerPanel * weight.group_words + next_word;
        next[j] = fetch_address(weight.words, word * kIntPanelColumns + lane_of(vec));
      }
      if (!last_block || part.int_sums) block.scales[0] = nullptr;
      block.begins = w == 0;
      block.x_sums_stride = 1;
      const int64_t share = block.fours / 4 * 64 * IntTile::kLines, stream = count * 64;
      int64_t fetched = 0;
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const tile::RowTile rows = row_tiles[t];
        block.next = fetched < stream ? next[0] + fetched : next[kTileVecs - 1] + (fetched - stream);
        fetched += share;
        block.x_sums = part.x_sums + rows.first;
        accumulate_rows<Word, false>(part, block, rows, column, w * Word::kValues);
      }
    }
    w += kBlockWords;
  } while (w < weight.group_words);
}

template <class Word>
void int_many_groups(const ProductPart& part) {
  const IntWeightPart& weight = part.ints;
  const tile::RowTiles row_tiles(part.rows, kTileRows);
  clear_sums(part);
  const int64_t group_bytes = 4 * kFoursPerWord<Word> * weight.group_words;
  for (int64_t g = 0; g < weight.groups; ++g) {
    for (int64_t column = 0; column < part.columns; column += kTileColumns) {
      IntTile block = tile_words<Word>(part, column, g, 0, weight.group_words);
      block.next = reinterpret_cast<const char*>(block.words[0]);
      block.x_sums_stride = weight.groups;
      for (int64_t t = 0; t < row_tiles.count(); ++t) {
        const tile::RowTile rows = row_tiles[t];
        block.x_sums = part.x_sums + rows.first * weight.groups + g;
        accumulate_rows<Word, true>(part, block, rows, column, g * group_bytes);
      }
    }
  }
}

template <class Word>
void int_many(const ProductPart& part) {
  (part.ints.groups == 1 ? int_many_whole<Word> : int_many_groups<Word>)(part);
}

}  // namespace opst::OPST_ISA_NS::gemm
