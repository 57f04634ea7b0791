// scatter_pa_kv_cache, convert_pages: check, then deal out the rows to tasks.
#include "opst/kv_cache.h"

#include "core/int_math.h"
#include "kv_cache/page_rows.h"
#include "machine/context_impl.h"

namespace opst {

using namespace kv_cache;

namespace {

// Groups are the two caches' own.
PageSizes check_conversion(ShapeCheck& check, const CacheTensors& from, const CacheTensors& to) {
  static constexpr CacheNames kFrom = {"from_key",          "from_value",       "from_key_scales",
                                       "from_value_scales", "from_key_offsets", "from_value_offsets"};
  static constexpr CacheNames kTo = {"to_key",         "to_value",         "to_key_scales", "to_value_scales",
                                     "to_key_offsets", "to_value_offsets", "to_key_groups", "to_value_groups"};
  const PageSizes sizes = check_cache(check, kFrom, from, CacheUse::read);
  check_cache(check, kTo, to, CacheUse::written);
  return sizes;
}

}  // namespace

Status scatter_pa_kv_cache(Context& context, const ConstTensor& key_rows, const ConstTensor& value_rows,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options) {
  return checked("scatter_pa_kv_cache", [&](ShapeCheck& check) {
    check.tensor("key", key_rows).dtype(kFloats).dims({"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", value_rows).dtype({key_rows.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("slot_mapping", slot_mapping).dtype(kIntegers).dims({"tokens"});
    const CacheTensors cache = {options.layout, key_cache, value_cache, options.scales};
    const PageSizes sizes = check_cache(check, kCacheNames, cache,
                                        options.scales_given ? CacheUse::written_by_given_scales : CacheUse::written);
    check_slots(check, slot_mapping, sizes);
    if (!check.ok()) return;

    if (sizes.num_blocks == 0) return;  // every slot is -1
    const ConstTensor key = normal_strides(key_rows), value = normal_strides(value_rows);
    const int64_t elements = check["tokens"] * sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (elements == 0) return;
    if (options.scales_given) check_slot_scales(check, cache, slot_mapping, sizes);
    if (check.ok()) check.require(context.impl().workspaces.ready());
    if (!check.ok()) return;
    const CacheSide keys(cache, PageSide::key), values(cache, PageSide::value);
    const Isa isa = context.machine().isa;
    const RowConversion store_key(isa, {key.dtype}, keys.format(), options.scales_given);
    const RowConversion store_value(isa, {value.dtype}, values.format(), options.scales_given);
    const int64_t heads = sizes.num_kv_heads;
    const SlotTasks tasks(sizes, elements);
    context.impl().pool.parallel_for(tasks.count, [&](int64_t task, int) {
      tasks.run(task, slot_mapping, [&](int64_t t, int64_t block, int64_t row) {
        if (keys.dim() > 0) store_key(heads, keys.dim(), {heads_of(key, t)}, keys.heads(block, row));
        if (values.dim() > 0) store_value(heads, values.dim(), {heads_of(value, t)}, values.heads(block, row));
      });
    });
  });
}

Status convert_pages(Context& context, const ConstTensor& from_key, const ConstTensor& from_value, const Tensor& to_key,
                     const Tensor& to_value, const ConvertPagesOptions& options) {
  return checked("convert_pages", [&](ShapeCheck& check) -> Status {
    const CacheTensors from = {options.from, from_key, from_value, options.from_scales};
    const CacheTensors to = {options.to, to_key, to_value, options.to_scales};
    const PageSizes sizes = check_conversion(check, from, to);
    if (!check.ok()) return check.status();

    const int64_t row_elements = sizes.num_kv_heads * (sizes.head_dim + sizes.value_head_dim);
    if (sizes.num_blocks == 0 || row_elements == 0) return {};
    struct Side {
      CacheSide from, to;
      RowConversion convert;
    };
    const auto side_of = [&](PageSide which) -> Side {
      const CacheSide source(from, which), target(to, which);
      return {source, target, RowConversion(context.machine().isa, source.format(), target.format())};
    };
    const Side sides[2] = {side_of(PageSide::key), side_of(PageSide::value)};
    // Per worker: a row in f32, on the way from one format to another.
    const bool copies = sides[0].convert.is_copy() && sides[1].convert.is_copy();
    const int64_t scratch_bytes = copies ? 0 : Arena::size_of<float>(std::max(sizes.head_dim, sizes.value_head_dim));
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(scratch_bytes * context.num_threads());
    if (!lease.ok()) return lease.status();
    char* const all_scratch = static_cast<char*>(lease.value().data());
    // A piece: rows of a block, a panel of panel32, head after head. The lines of a transposed page that one row of a
    // head touches stay in L1 for the next.
    const int64_t piece_rows = std::min(sizes.block_size, kPanelRows);
    const int64_t pieces_per_block = ceil_div(sizes.block_size, piece_rows);
    const int64_t num_pieces = sizes.num_blocks * pieces_per_block;
    const int64_t pieces_per_task = ceil_div(kTaskElements, piece_rows * row_elements);
    context.impl().pool.for_each(num_pieces, pieces_per_task, [&](int64_t piece, int worker) {
      const int64_t block = piece / pieces_per_block, begin = piece % pieces_per_block * piece_rows;
      const int64_t end = std::min(sizes.block_size, begin + piece_rows);
      auto* const scratch = reinterpret_cast<float*>(all_scratch + worker * scratch_bytes);
      for (const Side& side : sides) {
        for (int64_t head = 0; side.from.dim() > 0 && head < sizes.num_kv_heads; ++head) {
          for (int64_t row = begin, count = 0; row < end; row += count) {
            count = side.from.even_rows(row, side.to.even_rows(row, end - row));
            side.convert(count, side.from.dim(), side.from.rows(block, row, head), side.to.rows(block, row, head),
                         scratch);
          }
        }
      }
    });
    return {};
  });
}

}  // namespace opst
