// The contract between attention.cc and the per-level kernels: a block of query rows against a list of KV tiles.
//
// To kernels a layout or page table is an array of row pointers, a mask an interval of keys per row. Plain data only.
//
// Life of a block:
//   copy_queries       unless the product reads the rows where they are
//   empty_state        of the running softmax
//   attend             once or more, tiles ascending; or attend_in_place, attend_pages
//   finish_rows        over the states of all parts of the keys
// Where all keys are one packed tile, attend_at_once alone takes the place of the last three.
//
// A word is what the product multiplies per lane: f32, f64 or a pair of bf16 (tile/pack.h). The accumulator type is
// float, or double for f64.
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst::attention {

// Rows of queries (or of outputs): row r = i * group + g is query i of head g of the group that shares a KV head.
struct StackedRows {
  void* data;  // query 0 of the group's first head
  DType dtype;
  int64_t seq_stride, head_stride, dim_stride;  // in elements
  int64_t group;

  // Elements between a row and the next, where that is the same for all.
  bool evenly_spaced() const { return group == 1 || seq_stride == group * head_stride; }
  int64_t row_stride() const { return group == 1 ? seq_stride : head_stride; }
};

// Rows of a tensor that the worker reads next.
struct RowsAhead {
  const char* data = nullptr;
  int64_t rows = 0, row_bytes = 0, stride_bytes = 0;
};

struct RowRules {
  const uint8_t* mask;   // of key 0
  const void* bias;      // of key 0
  double slope;          // of ALiBi
  int64_t position;      // key j is at distance |j - position|
  int64_t drop_bit;      // of key 0 in drop_mask
  uint32_t query, head;  // the row's words of the dropout counter
};

// ScoreRules: what turns raw scores q k into S and decides which weights dropout keeps, for the rows of one block.
// Pointers and strides are resolved per row, because the rows of a block are queries of several heads. score_ops.h
// applies them, forward and backward.
//
//   S = Y + alibi + bias_scale * bias,   Y = softcap tanh(Z / softcap),   Z = score_scale * raw
//   hidden (S = -inf) where the mask is 0, or outside the row's interval and not below the prefix
struct ScoreRules {
  const RowRules* rows = nullptr;  // of the block's rows
  int64_t prefix = 0;              // keys below it are visible to every row

  // Scores become S itself; otherwise they stay raw, and are only hidden. Set where there is softcap, ALiBi or bias.
  bool natural = false;
  double score_scale = 1;
  double softcap = 0;  // 0: none

  bool has_alibi = false;
  bool alibi_square_root = false;

  bool has_bias = false;
  DType bias_dtype = DType::f32;
  int64_t bias_stride = 0;  // between keys
  double bias_scale = 1;

  bool has_mask = false;
  int64_t mask_stride = 0;  // between keys

  // Dropout by Philox where keep_below > 0: a weight is kept where its word is less. Else by drop_mask, unless null.
  uint64_t keep_below = 0;  // at most 2^32 - 1
  uint32_t seed[2] = {};
  uint32_t offset = 0;
  int64_t first_key = 0;  // key 0's index in the larger problem (DropoutOptions)
  const uint8_t* drop_mask = nullptr;

  bool drops() const { return keep_below > 0 || drop_mask != nullptr; }
  // Whether a key that the structure shows may still contribute nothing.
  bool hides() const { return has_mask || has_bias || prefix > 0 || drops(); }
};

// Running softmax of `rows` rows, all in the accumulator type.
struct RowState {
  void* acc;   // [rows][acc_stride]   sum of exp2(c (score - max)) * value
  void* max;   // [rows]               largest score, raw or natural; -inf before the first visible key
  void* sums;  // [rows][lanes]        sum of exp2(c (score - max)), in one partial sum per lane
};

struct QueryBlock {
  int64_t rows;
  int64_t head_dim, value_head_dim;
  const void* query;     // words [rows][query_stride], written by copy_queries or the caller's own
  int64_t query_stride;  // in words
  RowState state;
  int64_t acc_stride;     // value_head_dim rounded up to whole vectors
  double exponent_scale;  // c = |softmax_scale| * log2(e) > 0, the sign is in `query`; log2(e) where scores are natural
  void* scores;           // accumulator type [rows of one register tile][scores_stride], 64-byte aligned
  int64_t scores_stride;  // at least the keys of a tile, or of joined ones, rounded up to panels
  // Keys that row r may see: [visible_begin[r], visible_end[r]), and those below the prefix of `rules`; of a tile that
  // has intervals of its own, those.
  const int64_t* visible_begin;
  const int64_t* visible_end;
  const ScoreRules* rules;  // null: scores are used as they are
};

// A number of f32 for each group of each row of a tile: that of group g of row j is the element g * stride of rows[j].
struct GroupList {
  const void* const* rows = nullptr;
  int64_t stride = 0;
};
// Groups of `size` neighbours in a row of integers: number d is (q + offset) * scale with those of group d / size.
struct RowGroups {
  int64_t size = 0;
  GroupList scales, offsets;  // offsets that are not there are 0
};

// Memory to fetch: from each of `count` pointers so many bytes.
struct RowsToFetch {
  const void* const* rows = nullptr;
  int64_t count = 0, bytes = 0;
};

struct KvTile {
  int64_t first_key;
  int64_t count;
  bool partial;                // some row of the block does not see some key of the tile
  bool values_finite = false;  // no NaN or Inf among the values; may be false where nothing is hidden
  // Not 0: `values` are rows of the tensor, this many words apart, finite or not hidden; in attend_at_once only.
  int32_t values_stride = 0;
  // Packed: column panels of the keys and value panels (tile/pack.h).
  const void* keys = nullptr;
  const void* values = nullptr;
  // In place: a pointer per row, whose dimensions are next to each other. Values that are columns of the keys' rows:
  // value_rows = key_rows. Of panel32 pages a pointer per 32 keys; rows_ahead more keys follow that may be prefetched.
  const void* const* key_rows = nullptr;
  const void* const* value_rows = nullptr;
  int64_t rows_ahead = 0;
  // In place: what to fetch while keys are read, and while values are.
  RowsToFetch with_keys = {}, with_values = {};
  // Packed: this tile and so many in all share a step of the softmax. All of them have as many keys, whole panels, and
  // every row sees every key.
  int64_t joined = 1;
  // Keys that row r of the block may see, within the tile, in the place of the block's intervals; null: those.
  const int64_t* visible_begin = nullptr;
  const int64_t* visible_end = nullptr;
  // Of rows of integers in place, and of panel32 pages: [count] each, offsets null where the cache has none.
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  const float* key_offsets = nullptr;
  const float* value_offsets = nullptr;
  // Of rows of integers whose groups have scales of their own.
  RowGroups key_groups = {}, value_groups = {};
};

struct FinishRows {
  const RowState* parts;  // num_parts states of the same rows, in key order
  int64_t num_parts;
  int64_t rows;
  int64_t value_head_dim, acc_stride;
  double exponent_scale;
  double score_scale;  // turns max into a score: |softmax_scale|, or 1 where scores are natural (ScoreRules)
  double keep_prob;    // of dropout
  const void* sinks;   // accumulator type, of the group's heads; null: none
  int64_t sinks_stride;
  int64_t first_row;  // row r of the block is row first_row + r of `out`
  StackedRows out;
  StackedRows lse, max, sum;  // dim_stride unused, dtype the accumulator's; data = null: not wanted

  bool writes_statistics() const { return lse.data != nullptr || max.data != nullptr || sum.data != nullptr; }
};

// What the kernels of a level and product count in.
struct Geometry {
  int64_t tile_rows;  // rows of a register tile
  int64_t lanes;      // numbers per vector
  int64_t panel;      // keys or columns of a full panel
  int64_t step;       // elements per word
  int64_t word_bytes;
  int64_t accumulator_bytes;
};

struct Kernels {
  Geometry geometry;

  // Copies block.rows rows of `query`, from first_row on, as words, times 0 or a power of two with a sign.
  void (*copy_queries)(const StackedRows& query, int64_t first_row, double factor, const QueryBlock& block, void* out);
  void (*empty_state)(const QueryBlock& block);

  // rows[0 .. count): keys (values) -> panels. dim_stride in elements. pack_values returns whether all are finite.
  void (*pack_keys)(const void* const* rows, int64_t dim_stride, int64_t count, int64_t head_dim, void* out);
  bool (*pack_values)(const void* const* rows, int64_t dim_stride, int64_t count, int64_t value_head_dim, void* out);

  // Keys (values) of a tile as floats, a row behind the other: for rows of eight bits, whose pack_keys packs f32.
  void (*widen_rows)(const KvTile& tile, bool keys, int64_t dim, float* out) = nullptr;

  // Whether values, dimensions next to each other, are finite.
  bool (*values_finite)(const void* const* rows, int64_t count, int64_t value_head_dim);

  void (*attend)(const QueryBlock& block, const KvTile* tiles, int64_t num_tiles);  // packed tiles
  // Rows where they are; panel32 pages.
  void (*attend_in_place)(const QueryBlock& block, const KvTile* tiles, int64_t num_tiles) = nullptr;
  void (*attend_pages)(const QueryBlock& block, const KvTile* tiles, int64_t num_tiles) = nullptr;
  // Writes outputs and statistics, straight from the registers that hold them; block.state is scratch. Wants one
  // element per word, outputs of the accumulator type next to each other, rows evenly spaced, value_head_dim a multiple
  // of the lanes. `ahead`: keys, queries and values to fetch meanwhile, where they are likely not to be in a cache.
  void (*attend_at_once)(const QueryBlock& block, const KvTile& tile, const FinishRows& finish,
                         const RowsAhead (&ahead)[3]) = nullptr;

  void (*finish_rows)(const FinishRows& finish);
};

// The kernels of a level, by product and storage type of keys and values; null where the level has none.
template <class K>
struct TableOf {
  K f32_product[3];              // keys stored as f32, bf16, f16
  K eight_bits[3] = {};          // keys stored as i8 with a scale to a row, f8_e4m3, f8_e5m2
  K integers_in_groups[2] = {};  // keys stored as i8, u8 (two numbers each)
  K bf16_dot = {};               // keys and queries stored as bf16
  K f64_product = {};            // at the generic level only
};
// attend_at_once is null for the bf16 dot product, attend_pages for what panel32 cannot hold and for integers in
// groups.
using KernelTable = TableOf<Kernels>;

// The standard form (options.path). Takes all packed tiles that a block sees, once; finish_rows follows. `matrix`
// [rows][matrix_stride]: scores of the tiles side by side, each rounded up to panels.
using AttendStandard = void (*)(const QueryBlock& block, const KvTile* tiles, int64_t num_tiles, void* matrix,
                                int64_t matrix_stride);
struct StandardTable {
  AttendStandard f32, bf16_dot = nullptr, f64 = nullptr;  // by AttentionProduct, as in KernelTable
};

}  // namespace opst::attention
