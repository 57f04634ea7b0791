// scatter_pa_kv_cache, convert_pages: check, then deal out the rows to tasks.
#include "opst/kv_cache.h"

#include <algorithm>
#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/pages.h"
#include "kv_cache/slots.h"
#include "machine/context_impl.h"

namespace opst {
namespace {

using kv_cache::CopyRowsKernel;
using kv_cache::Pages;

// Elements of a convert_pages task: fewer are not worth handing out.
constexpr int64_t kTaskElements = int64_t{1} << 14;

// convert_pages takes so many rows of a block at once: a panel of panel32.
constexpr int64_t kPieceRows = 32;

const char* start(const ConstTensor& tensor, int64_t offset) {
  return static_cast<const char*>(tensor.data) + offset * size_bytes(tensor.dtype);
}

// Rows [begin, end) of a block, head after head: the lines of a transposed page that one row of a head touches stay in
// L1 for the next.
void copy_piece(CopyRowsKernel copy_rows, const Pages& from, const Pages& to, int64_t num_heads, int64_t block,
                int64_t begin, int64_t end) {
  if (from.dim() == 0) return;
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = begin; row < end;) {
      const int64_t count = from.even_rows(row, to.even_rows(row, end - row));
      copy_rows({.num_rows = count,
                 .dim = from.dim(),
                 .from = from.at(block, row) + from.head_offset_bytes(head),
                 .from_view = from.rows_view(),
                 .to = to.writable_at(block, row) + to.head_offset_bytes(head),
                 .to_view = to.rows_view()});
      row += count;
    }
  }
}

}  // namespace

Status scatter_pa_kv_cache(Context& context, const ConstTensor& key_rows, const ConstTensor& value_rows,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("scatter_pa_kv_cache");
    check.tensor("key", key_rows)
        .dtype({DType::f32, DType::bf16, DType::f16})
        .dims({"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", value_rows).dtype({key_rows.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("slot_mapping", slot_mapping).dtype({DType::i32, DType::i64}).dims({"tokens"});
    const PageSizes sizes =
        kv_cache::check_output_pages(check, options.layout, "key_cache", key_cache, "value_cache", value_cache);
    kv_cache::check_slots(check, slot_mapping, sizes);
    if (!check.ok()) return check.status();

    const int64_t tokens = check["tokens"];
    if (sizes.num_blocks * sizes.block_size == 0) return {};  // every slot is -1
    const ConstTensor key = normal_strides(key_rows), value = normal_strides(value_rows);
    const int64_t elements = tokens * sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (elements == 0) return {};
    const CopyRowsKernel copy_rows = kv_cache::copy_rows_kernel(context.machine().isa, key.dtype, key_cache.dtype);
    const Pages keys(options.layout, PageSide::key, key_cache);
    const Pages values(options.layout, PageSide::value, value_cache);
    const auto write = [&](const ConstTensor& from, int64_t t, const Pages& to, int64_t slot) {
      if (to.dim() == 0) return;
      copy_rows({.num_rows = sizes.num_kv_heads,
                 .dim = to.dim(),
                 .from = start(from, t * from.strides[0]),
                 .from_view = {.row_stride = from.strides[1], .word_stride = from.strides[2], .step = 1},
                 .to = to.writable_at(slot / sizes.block_size, slot % sizes.block_size),
                 .to_view = to.heads_view()});
    };
    const kv_cache::SlotTasks tasks(elements);
    context.impl().pool.parallel_for(tasks.count, [&](int64_t task, int) {
      for (int64_t t = kv_cache::first_written(slot_mapping); t < tokens; ++t) {
        const int64_t slot = index_at(slot_mapping, t);
        if (!tasks.writes(task, slot)) continue;
        write(key, t, keys, slot);
        write(value, t, values, slot);
      }
    });
    return {};
  });
}

Status convert_pages(Context& context, const ConstTensor& from_key, const ConstTensor& from_value, const Tensor& to_key,
                     const Tensor& to_value, const ConvertPagesOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("convert_pages");
    const PageSizes sizes = kv_cache::check_pages(check, options.from, "from_key", from_key, "from_value", from_value);
    kv_cache::check_output_pages(check, options.to, "to_key", to_key, "to_value", to_value);
    if (!check.ok()) return check.status();

    const int64_t row_elements = sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (sizes.num_blocks == 0 || sizes.block_size == 0 || row_elements == 0) return {};
    const CopyRowsKernel copy_rows = kv_cache::copy_rows_kernel(context.machine().isa, from_key.dtype, to_key.dtype);
    const Pages from_keys(options.from, PageSide::key, from_key), to_keys(options.to, PageSide::key, to_key);
    const Pages from_values(options.from, PageSide::value, from_value),
        to_values(options.to, PageSide::value, to_value);
    const int64_t pieces_per_block = ceil_div(sizes.block_size, kPieceRows);
    const int64_t num_pieces = sizes.num_blocks * pieces_per_block;
    const int64_t piece_rows = std::min(sizes.block_size, kPieceRows);
    const int64_t pieces_per_task = ceil_div(kTaskElements, piece_rows * row_elements);
    context.impl().pool.parallel_for(ceil_div(num_pieces, pieces_per_task), [&](int64_t task, int) {
      const int64_t last = std::min(num_pieces, (task + 1) * pieces_per_task);
      for (int64_t piece = task * pieces_per_task; piece < last; ++piece) {
        const int64_t block = piece / pieces_per_block;
        const int64_t begin = piece % pieces_per_block * kPieceRows;
        const int64_t end = std::min(sizes.block_size, begin + kPieceRows);
        copy_piece(copy_rows, from_keys, to_keys, sizes.num_kv_heads, block, begin, end);
        copy_piece(copy_rows, from_values, to_values, sizes.num_kv_heads, block, begin, end);
      }
    });
    return {};
  });
}

}  // namespace opst
