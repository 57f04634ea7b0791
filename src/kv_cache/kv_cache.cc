// scatter_pa_kv_cache, convert_pages: check, then deal out the rows to tasks.
#include "opst/kv_cache.h"

#include "core/int_math.h"
#include "kv_cache/pages.h"
#include "machine/context_impl.h"

namespace opst {

using namespace kv_cache;

Status scatter_pa_kv_cache(Context& context, const ConstTensor& key_rows, const ConstTensor& value_rows,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options) {
  return checked("scatter_pa_kv_cache", [&](ShapeCheck& check) {
    check.tensor("key", key_rows).dtype(kFloats).dims({"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", value_rows).dtype({key_rows.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("slot_mapping", slot_mapping).dtype(kIntegers).dims({"tokens"});
    const PageSizes sizes =
        check_pages(check, options.layout, "key_cache", key_cache, "value_cache", value_cache, /*are_outputs=*/true);
    check_slots(check, slot_mapping, sizes);
    if (!check.ok()) return;

    if (sizes.num_blocks == 0) return;  // every slot is -1
    const ConstTensor key = normal_strides(key_rows), value = normal_strides(value_rows);
    const int64_t elements = check["tokens"] * sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (elements == 0) return;
    const CopyRowsKernel copy_rows = copy_rows_kernel(context.machine().isa, key.dtype, key_cache.dtype);
    const Pages keys(options.layout, PageSide::key, key_cache);
    const Pages values(options.layout, PageSide::value, value_cache);
    const int64_t heads = sizes.num_kv_heads;
    const SlotTasks tasks(sizes, elements);
    context.impl().pool.parallel_for(tasks.count, [&](int64_t task, int) {
      tasks.run(task, slot_mapping, [&](int64_t t, int64_t block, int64_t row) {
        if (keys.dim() > 0) copy_rows({heads, keys.dim(), heads_of(key, t), keys.heads(block, row)});
        if (values.dim() > 0) copy_rows({heads, values.dim(), heads_of(value, t), values.heads(block, row)});
      });
    });
  });
}

Status convert_pages(Context& context, const ConstTensor& from_key, const ConstTensor& from_value, const Tensor& to_key,
                     const Tensor& to_value, const ConvertPagesOptions& options) {
  return checked("convert_pages", [&](ShapeCheck& check) {
    const PageSizes sizes = check_pages(check, options.from, "from_key", from_key, "from_value", from_value);
    check_pages(check, options.to, "to_key", to_key, "to_value", to_value, /*are_outputs=*/true);
    if (!check.ok()) return;

    const int64_t row_elements = sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (sizes.num_blocks == 0 || row_elements == 0) return;
    const CopyRowsKernel copy_rows = copy_rows_kernel(context.machine().isa, from_key.dtype, to_key.dtype);
    const Pages from_keys(options.from, PageSide::key, from_key), to_keys(options.to, PageSide::key, to_key);
    const Pages from_values(options.from, PageSide::value, from_value);
    const Pages to_values(options.to, PageSide::value, to_value);
    // A piece: rows of a block, a panel of panel32, head after head. The lines of a transposed page that one row of a
    // head touches stay in L1 for the next.
    const int64_t piece_rows = std::min(sizes.block_size, kPanelRows);
    const auto copy_piece = [&](const Pages& from, const Pages& to, int64_t block, int64_t begin) {
      const int64_t end = std::min(sizes.block_size, begin + piece_rows);
      for (int64_t head = 0; from.dim() > 0 && head < sizes.num_kv_heads; ++head) {
        for (int64_t row = begin, count = 0; row < end; row += count) {
          count = from.even_rows(row, to.even_rows(row, end - row));
          copy_rows({count, from.dim(), from.rows(block, row, head), to.rows(block, row, head)});
        }
      }
    };
    const int64_t pieces_per_block = ceil_div(sizes.block_size, piece_rows);
    const int64_t num_pieces = sizes.num_blocks * pieces_per_block;
    const int64_t pieces_per_task = ceil_div(kTaskElements, piece_rows * row_elements);
    context.impl().pool.for_each(num_pieces, pieces_per_task, [&](int64_t piece, int) {
      const int64_t block = piece / pieces_per_block, begin = piece % pieces_per_block * piece_rows;
      copy_piece(from_keys, to_keys, block, begin);
      copy_piece(from_values, to_values, block, begin);
    });
  });
}

}  // namespace opst
