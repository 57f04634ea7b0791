// The contract of a call's block mask: shapes, and every number in it, before anything is written. O(entries).
#include <algorithm>

#include "attention/check.h"
#include "core/elements.h"

namespace opst::attention {

namespace {

constexpr const char* kOffsets = "block_mask.row_offsets";
constexpr const char* kColumns = "block_mask.columns";

void check_sizes(ShapeCheck& check, const BlockMask& mask, const AttentionProblem& p, int64_t query_len) {
  const auto block = [&](const char* name, int64_t size) {
    check.require(size >= 1 && size <= kMaxBytes, name, " is ", size, ", must be 1 to 2^56");
  };
  block("block_mask.block_q", mask.block_q);
  block("block_mask.block_kv", mask.block_kv);
  if (!check.ok()) return;
  const int64_t* shape = mask.row_offsets.shape;
  check.require(shape[0] == 1 || shape[0] == p.batch, kOffsets, " dim 0 is ", shape[0],
                ", but must be 1 or batch = ", p.batch);
  check.require(shape[1] == 1 || shape[1] == p.num_heads || shape[1] == p.num_kv_heads, kOffsets, " dim 1 is ",
                shape[1], ", but must be 1, num_kv_heads = ", p.num_kv_heads, " or num_heads = ", p.num_heads);
  const int64_t blocks = ceil_div(query_len, mask.block_q);
  check.require(p.varlen_q ? shape[2] > blocks : shape[2] == blocks + 1, kOffsets, " dim 2 is ", shape[2],
                ", but must be ", p.varlen_q ? "at least " : "", blocks + 1, ": ", blocks, " blocks of ", mask.block_q,
                " queries, of query_len = ", query_len);
}

// Columns of one row: ascending, each a key block.
void check_row(ShapeCheck& check, const ConstTensor& columns, int64_t begin, int64_t end, int64_t width,
               int64_t block_kv) {
  const int64_t blocks = ceil_div(width, block_kv);
  int64_t previous = -1;
  for (int64_t i = begin; i < end && check.ok(); ++i) {
    const int64_t x = index_at(columns, i);
    check.require(x >= 0 && x < blocks, kColumns, "[", i, "] is ", x, ", but kv_len = ", width, " has ", blocks,
                  " blocks of ", block_kv, " keys");
    check.require(x > previous, kColumns, "[", i, "] is ", x, ", not more than ", kColumns, "[", i - 1,
                  "] = ", previous, " of the same row");
    previous = x;
  }
}

}  // namespace

void bind_block_mask(ShapeCheck& check, const BlockMask& mask) {
  check.require(bool{mask} || !mask.columns, kColumns, " is given, but ", kOffsets, " is not");
  if (!mask) return;
  check.tensor(kOffsets, mask.row_offsets).dtype({DType::i32, DType::i64});
  check.require(mask.row_offsets.rank == 3, kOffsets, " has rank ", mask.row_offsets.rank,
                ", must be 3: [batch or 1, heads or 1, query blocks + 1]");
  check.tensor(kColumns, mask.columns).dtype({DType::i32, DType::i64});
  check.require(mask.columns.rank == 1, kColumns, " has rank ", mask.columns.rank, ", must be 1");
}

BlockMaskSizes check_block_mask(ShapeCheck& check, const BlockMask& mask, const AttentionProblem& p, int64_t query_len,
                                int64_t width) {
  check_sizes(check, mask, p, query_len);
  if (!check.ok()) return {};
  const ConstTensor offsets = normal_strides(mask.row_offsets), columns = normal_strides(mask.columns);
  BlockMaskSizes sizes = {mask.block_q, mask.block_kv, distinct(offsets, 0), distinct(offsets, 1)};
  const int64_t total = columns.shape[0], different = distinct(offsets, 2);
  Size entries = 0;
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t h = 0; h < sizes.heads; ++h) {
      const ConstTensor of_head = offsets.selected(0, b).selected(0, h);
      int64_t previous = 0;
      for (int64_t i = 0; i < different && check.ok(); ++i) {
        const int64_t x = index_at(of_head, i);
        const auto name = [&](int64_t at) { return text(kOffsets, "[", b, "][", h, "][", at, "]"); };
        check.require(
            x >= 0 && x <= total, [&] { return name(i); }, " is ", x, ", must be 0 to ", total, ", the columns");
        check.require(
            i == 0 || x >= previous, [&] { return name(i); }, " is ", x, ", less than ", [&] { return name(i - 1); },
            " = ", previous);
        if (i > 0 && check.ok()) {
          check_row(check, columns, previous, x, width, mask.block_kv);
          sizes.row_blocks = std::max(sizes.row_blocks, x - previous);
          entries += x - previous;
        }
        previous = x;
      }
      if (!check.ok()) return {};
    }
  }
  sizes.entries = entries.value();
  return sizes;
}

}  // namespace opst::attention
