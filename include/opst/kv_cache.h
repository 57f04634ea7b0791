// A paged cache of keys and values: a pool of blocks, each with room for block_size tokens.
//
// The caller decides where the token at position p of a sequence lives, by a slot: slot = block * block_size + row.
//
//   const PageSizes sizes = {
//       .num_blocks = 100, .block_size = 16, .num_kv_heads = 8, .head_dim = 64, .value_head_dim = 64};
//   Tensor key_cache = key_pages(PageLayout::norm, DType::f32, sizes, key_memory);
//   Tensor value_cache = value_pages(PageLayout::norm, DType::f32, sizes, value_memory);
//   Status status = scatter_pa_kv_cache(context, key, value, slot_mapping, key_cache, value_cache);
//
// A tensor whose default is {} is optional: absent where it has no data. Threads: several may call these operators on
// one Context at once, also on one cache as long as no call writes blocks that another one reads or writes; a BlockPool
// is used by one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "opst/context.h"
#include "opst/page_layout.h"
#include "opst/rope_style.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// Whether pages of these sizes can be held in a layout: ok, or unsupported with the reason. No layout holds blocks of
// block_size < 1; a layout that is no enumerator holds nothing. head_dim: of the keys; 0: not asked about.
Status supports(PageLayout layout, DType dtype, int64_t block_size, int64_t head_dim = 0);

// A contiguous cache over `data` in the shape of its layout: num_blocks * block_size * num_kv_heads * head_dim (or
// value_head_dim) elements. A rank-0 view where the layout cannot hold the sizes (see supports), a size is negative or
// the cache would have 2^56 bytes or more.
Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data);
Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data);

// How a cache stores numbers.
//
//   name                    dtype of the pages         a number is            scales and offsets
//   f32 bf16 f16            that                       the element            none
//   f8_e4m3 f8_e5m2         that                       the element            none
//   int8                    i8                         q * scale              a scale for each group of a row
//   int8_offset             i8                         (q + offset) * scale   and an offset
//   int4, int4_offset       u8, two q in -8..7 each,   the same               the same
//                           the lower half first
// A row, one token's numbers for one head, is cut into groups of equal length: head_dim / key_groups neighbours share a
// scale, value_head_dim / value_groups of a value. An operator reads the format off the tensors that it gets; integers
// always have scales, and keys have offsets where values do.
struct KvFormat {
  DType dtype = DType::f32;
  int64_t key_groups = 0, value_groups = 0;  // 0: no scales
  bool has_offsets = false;
};
// The format of a name in the table, invalid_argument for others. One group in a row of int8; of int4 groups of 32,
// or one where 32 does not divide the dimension.
Result<KvFormat> kv_format(std::string_view name, int64_t head_dim, int64_t value_head_dim);

// The scales of a cache that is read, and of one that is written: f32 pages in the cache's layout, with key_groups (or
// value_groups) elements to a row. In norm, any strides, 0 too where nothing is written:
//   key [num_blocks, block_size, num_kv_heads, key_groups]; key_offsets of the same shape; values likewise.
// The device's [num_blocks, num_kv_heads, block_size] is a view of that, its [num_kv_heads, head_dim] for all tokens
// another one, with groups of one number. Absent: see KvFormat.
struct ConstPageScales {
  ConstTensor key = {}, value = {};
  ConstTensor key_offsets = {}, value_offsets = {};
};
struct PageScales {
  Tensor key = {}, value = {};
  Tensor key_offsets = {}, value_offsets = {};
  // Those of blocks [first, first + count): what convert_pages wants beside narrowed pages. Absent ones stay absent.
  PageScales blocks(int64_t first, int64_t count = 1) const;
  operator ConstPageScales() const { return {key, value, key_offsets, value_offsets}; }
};
// Contiguous scales (or offsets) with `groups` in a row, as key_pages and value_pages give a cache.
Tensor key_scale_pages(PageLayout layout, const PageSizes& sizes, int64_t groups, void* data);
Tensor value_scale_pages(PageLayout layout, const PageSizes& sizes, int64_t groups, void* data);

struct ScatterOptions {
  PageLayout layout = PageLayout::norm;
  PageScales scales = {};
  // The scales and offsets of the slots that are named are there already and are read: finite and >= 0, offsets whole
  // and in -127..128 (of int4 -7..8). Else each row's are computed and written.
  bool scales_given = false;
};

// Writes the keys and values of new tokens into the cache (reshape_and_cache). In terms of the norm layout:
//   key_cache[slot / block_size, slot % block_size, h, :] = key[t, h, :]   with slot = slot_mapping[t], value likewise
//   key           [tokens, num_kv_heads, head_dim]                         f32, bf16 or f16
//   value         [tokens, num_kv_heads, value_head_dim]                   the dtype of key
//   slot_mapping  [tokens] i32 or i64; -1 skips the token
//   key_cache     pages in options.layout, in any KvFormat with its options.scales: floats are rounded once, to nearest
//                 even; in f8 numbers that are too large saturate (core/convert.h)
//   value_cache   the dtype of key_cache
// Integers, for each group of a row (quantize in quant.h has the details):
//   no offsets   scale = max |x| / 127 (int4: 7)                 q = round(x / scale)
//   offsets      scale = (max(x, 0) - min(x, 0)) / 255 (15)      q = round(x / scale) - offset, offset a whole number
//   a group of zeros, or whose scale is rounded to 0             scale 0
//   a group with a NaN or an infinity                            scale +inf, q = -offset = 0: every number read is NaN
//   scales given: a scale of 0; a NaN of another group           q = -offset: the numbers read are 0
//   scales given: an infinity, or what is beyond the integers    the end of their range, -128 or 127 (int4: -8 or 7)
// Any strides of key, value and slot_mapping; the caches overlap neither each other nor the inputs. Of several tokens
// with one slot the last wins. Cache rows that no slot names keep their bytes. Errors: invalid_argument for shapes and
// dtypes that disagree, scales that are missing, not wanted or wrong, groups that do not divide a row, and for a slot
// outside the cache (the message names token, slot and capacity), unsupported for a layout that cannot hold the blocks
// (supports; also block_size 0); nothing has been written then.
Status scatter_pa_kv_cache(Context& context, const ConstTensor& key, const ConstTensor& value,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options = {});

// Queries, keys and values of new tokens in one pass: a decoder's work between its projections and attention.
//   query_out[t, h, :] = rope(rms_norm(query[t, h, :], query_weight))
//   key_cache[slot / block_size, slot % block_size, h, :] = rope(rms_norm(key[t, h, :], key_weight)),  slot as above
//   value_cache                                    likewise = value[t, h, :]
//   query         [tokens, num_heads, head_dim]            f32, bf16 or f16
//   key           [tokens, num_kv_heads, head_dim]         the dtype of query
//   value         [tokens, num_kv_heads, value_head_dim]   the dtype of query
//   cos, sin      [tokens, half] f32, 2 * half <= head_dim (rope_table in rowwise.h)
//   weights       [head_dim] f32, the same for all heads; absent (no data): no norm
//   query_out     as query; may be the very same view
//   slot_mapping, key_cache, value_cache                   as in scatter_pa_kv_cache
// Arithmetic in f32, each result rounded once, when it is stored: for f32 the bits of rms_norm, rope and
// scatter_pa_kv_cache one after the other. Errors: those of these three.
struct RopeScatterInputs {
  ConstTensor query, key, value;
  ConstTensor cos, sin;
  ConstTensor slot_mapping;
  ConstTensor query_weight = {}, key_weight = {};
};
struct RopeScatterOptions {
  PageLayout layout = PageLayout::norm;
  RopeStyle style = RopeStyle::halves;
  double eps = 1e-5;  // of the norms
  PageScales scales = {};
  bool scales_given = false;  // as in ScatterOptions
};
Status rope_scatter_pa_kv_cache(Context& context, const RopeScatterInputs& inputs, const Tensor& query_out,
                                const Tensor& key_cache, const Tensor& value_cache,
                                const RopeScatterOptions& options = {});

struct ConvertPagesOptions {
  PageLayout from = PageLayout::norm;
  PageLayout to = PageLayout::panel32;
  ConstPageScales from_scales = {};
  PageScales to_scales = {};
};

// Copies all pages of a cache into another one of the same sizes, between any two layouts and formats: to = from,
// rounded once, to nearest even; equal formats keep the bits of pages, scales and offsets. What integers stand for is
// rounded to f32 before it is rounded to another format. Caches as in scatter_pa_kv_cache; `to` does not overlap
// `from`. For some blocks only, or a private copy of a block within one pool: views narrowed in dimension 0, scales too.
// Scales are not looked at, since rows that were never written hold anything.
//   convert_pages(context, k.narrowed(0, 7, 1), v.narrowed(0, 7, 1),                     // block 7
//                 k.narrowed(0, 9, 1), v.narrowed(0, 9, 1),                              // to block 9
//                 {.from = norm, .to = norm, .from_scales = scales.blocks(7), .to_scales = scales.blocks(9)})
// Errors: as scatter_pa_kv_cache; both layouts must hold the sizes.
Status convert_pages(Context& context, const ConstTensor& from_key, const ConstTensor& from_value, const Tensor& to_key,
                     const Tensor& to_value, const ConvertPagesOptions& options = {});

struct GatherOptions {
  PageLayout layout = PageLayout::norm;
  ConstPageScales scales = {};
  // kv_lengths is [batch + 1]: sequence b has kv_lengths[b + 1] - kv_lengths[b] tokens, kv_lengths[0] is 0.
  bool cumulative_lengths = false;
  // i32 or i64 [batch], >= 0: the position of each sequence's first token to read. Absent: 0. (The device takes whole
  // blocks only and rounds this down to a multiple of block_size.)
  ConstTensor seq_offset = {};
  // i32 or i64 [heads]: the KV heads to read, in this order; one may come twice. Absent: all of them.
  ConstTensor head_indices = {};
  // Rows whose position lies past the table's columns, or whose block id is outside [0, num_blocks), become zero
  // instead of an error.
  bool zero_fill = false;
};

// Reads cached tokens (GatherPaKvCache), sequence after sequence. In terms of the norm layout:
//   key[start(b) + i, h, :] = key_cache[block_table[b, p / block_size], p % block_size, head_indices[h], :]
//     with position p = seq_offset[b] + i, 0 <= i < length(b), start(b) = sum of the lengths before b; value likewise
//   key_cache, value_cache   pages in options.layout
//   block_table              [batch, max_blocks] i32 or i64; blocks may be shared and repeated; columns that no
//                            position needs are never read
//   kv_lengths               [batch] i32 or i64, >= 0 (see cumulative_lengths)
//   key                      [tokens, heads, head_dim]         f32, bf16 or f16, rounded once (what integers stand for
//                                                              first to f32); tokens is the sum of the lengths, heads
//                                                              num_kv_heads or that of head_indices
//   value                    [tokens, heads, value_head_dim]   the dtype of key
// Any strides of key, value and the integer tensors. Errors: invalid_argument for shapes, dtypes, lengths and offsets
// that disagree; a position past the table (the message names sequence, position and capacity) and a block id outside
// the cache (sequence, position, block id, num_blocks), both unless zero_fill; scales as in scatter_pa_kv_cache, and one
// that is read and is negative or NaN (+inf is the mark of a row that was not finite). Nothing has been written then.
Status gather_pa_kv_cache(Context& context, const ConstTensor& key_cache, const ConstTensor& value_cache,
                          const ConstTensor& block_table, const ConstTensor& kv_lengths, const Tensor& key,
                          const Tensor& value, const GatherOptions& options = {});

// Which blocks of a cache are in use, and by how many sequences. A pool holds block ids, not memory: the cache is the
// caller's. Not locked: calls on one pool come one after the other.
//
// A block has as many references as sequences hold it. Sequences that share a prefix share its blocks: fork() adds a
// reference to each. Whoever is about to write a row calls prepare_write(): a shared block gives way to a private one,
// into which the caller copies the rows (copy-on-write); docs/kv_cache.md has an example.
//
// A refused call changes nothing. Time: O(1) a block; only create() allocates memory, and touches none of it.
struct BlockWrite {
  int64_t block = -1;      // the block to write
  int64_t copy_from = -1;  // block whose rows must be copied into `block` first; -1: none, `block` is the one asked for
};

class BlockPool {
 public:
  // Blocks 0 to num_blocks - 1, all free. invalid_argument where num_blocks < 0.
  static Result<BlockPool> create(int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_free() const { return num_blocks_ - static_cast<int64_t>(references_.size() - free_.size()); }
  // 0 of a free block and of an id that is no block.
  int64_t references(int64_t block) const;

  // Takes blocks.size() free blocks, each with one reference then. The block freed last is given first; a new pool
  // gives 0, 1, 2, ... out_of_memory where too few are free: the message says how many.
  Status allocate(std::span<int64_t> blocks);
  // One more reference each. A block that comes twice gets two.
  Status fork(std::span<const int64_t> blocks);
  // One reference less each; a block without any is free again. A block that comes twice loses two. invalid_argument,
  // and nothing is freed, where one is free already or is no block.
  Status free(std::span<const int64_t> blocks);
  // For the holder of one reference to `block`: that same block where it is the only one, else a new block in exchange
  // for the reference. out_of_memory where none is free.
  Result<BlockWrite> prepare_write(int64_t block);

 private:
  BlockPool() = default;
  void make_room();
  Status refuse(const char* call, size_t index, int64_t block) const;

  int64_t num_blocks_ = 0;
  std::vector<int64_t> references_;  // of blocks 0, 1, .. that were ever given; room for all
  std::vector<int64_t> free_;        // freed blocks, the next one to give at the end; room for all
};

}  // namespace opst
