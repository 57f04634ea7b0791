// Pages of keys and values.
#include "opst/kv_cache.h"

#include "c_api/phases.h"
#include "core/guarded.h"
#include "core/int_math.h"

using namespace opst;
using c_api::Arguments;
using c_api::FirstPhase;

namespace {

constexpr char kScatter[] = "opst_scatter_kv_cache", kScatterPlan[] = "opst_scatter_kv_cache_workspace";
constexpr char kGather[] = "opst_gather_kv_cache", kGatherPlan[] = "opst_gather_kv_cache_workspace";

struct Pages {
  Tensor key, value;
};

// Views of any memory, of the sizes' shapes.
Pages pages_of(Arguments& arguments, const opst_page_sizes* given, void* key_memory, void* value_memory) {
  arguments.require(given != nullptr, "sizes is NULL");
  if (!arguments.ok()) return {};
  const auto layout = arguments.enumerator("layout", given->layout, PageLayout::panel32);
  const auto dtype = arguments.enumerator("dtype", given->dtype, DType::f8_e5m2);
  for (const auto& [name, size] :
       {std::pair{"num_blocks", given->num_blocks}, std::pair{"num_kv_heads", given->num_kv_heads},
        std::pair{"head_dim", given->head_dim}, std::pair{"value_head_dim", given->value_head_dim}}) {
    if (arguments.ok() && size < 0) arguments.positive(name, size);
  }
  if (!arguments.ok()) return {};
  arguments.require(guarded([&] { return supports(layout, dtype, given->block_size, given->head_dim); }));
  const PageSizes sizes = {given->num_blocks, given->block_size, given->num_kv_heads, given->head_dim,
                           given->value_head_dim};
  const Pages pages = {key_pages(layout, dtype, sizes, key_memory), value_pages(layout, dtype, sizes, value_memory)};
  arguments.require(pages.key.rank > 0 && pages.value.rank > 0, "a cache of these sizes has 2^56 bytes or more");
  return pages;
}

int64_t bytes_of(const Tensor& pages) {
  return (Size(pages.num_elements()) * size_bytes(pages.dtype)).value();  // below 2^56
}

PageScales scales_of(FirstPhase& phase, const opst_page_scales& given) {
  return {.key = phase.optional("key scales", given.key),
          .value = phase.optional("value scales", given.value),
          .key_offsets = phase.optional("key_offsets", given.key_offsets),
          .value_offsets = phase.optional("value_offsets", given.value_offsets)};
}

opst_tensor as_c(const Tensor& tensor) {
  opst_tensor c = {static_cast<opst_dtype>(tensor.dtype), tensor.rank, {}, {}, tensor.data};
  for (int i = 0; i < tensor.rank; ++i) c.shape[i] = tensor.shape[i], c.strides[i] = tensor.strides[i];
  return c;
}

}  // namespace

opst_status opst_kv_pages_size(const opst_page_sizes* sizes, int64_t* key_bytes, int64_t* value_bytes) {
  Arguments arguments("opst_kv_pages_size");
  arguments.result<int64_t>("key_bytes", key_bytes, 0);
  arguments.result<int64_t>("value_bytes", value_bytes, 0);
  const Pages pages = pages_of(arguments, sizes, nullptr, nullptr);
  if (!arguments.ok()) return arguments.status();
  *key_bytes = bytes_of(pages.key);
  *value_bytes = bytes_of(pages.value);
  return OPST_OK;
}

opst_status opst_kv_pages(const opst_page_sizes* sizes, void* key_memory, int64_t key_bytes, void* value_memory,
                          int64_t value_bytes, opst_tensor* key, opst_tensor* value) {
  Arguments arguments("opst_kv_pages");
  arguments.result<opst_tensor>("key", key, {});
  arguments.result<opst_tensor>("value", value, {});
  const Pages pages = pages_of(arguments, sizes, key_memory, value_memory);
  if (!arguments.ok()) return arguments.status();
  for (const auto& [name, given, tensor] :
       {std::tuple{"key", key_bytes, &pages.key}, std::tuple{"value", value_bytes, &pages.value}}) {
    const int64_t needed = bytes_of(*tensor);
    if (given < needed) {
      return c_api::fail(OPST_INVALID_ARGUMENT, arguments.function(), "%s_bytes is %lld, but must be at least %lld",
                         name, static_cast<long long>(given), static_cast<long long>(needed));
    }
    if (needed > 0 && tensor->data == nullptr) {
      return c_api::fail(OPST_INVALID_ARGUMENT, arguments.function(), "%s_memory is NULL", name);
    }
    if (!tensor->is_aligned()) {
      return c_api::fail(OPST_INVALID_ARGUMENT, arguments.function(),
                         "%s_memory is not at a multiple of an element's size", name);
    }
  }
  *key = as_c(pages.key);
  *value = as_c(pages.value);
  return OPST_OK;
}

opst_status opst_scatter_kv_cache_workspace(opst_context* context, const opst_tensor* key, const opst_tensor* value,
                                            const opst_tensor* slot_mapping, const opst_tensor* key_cache,
                                            const opst_tensor* value_cache, const opst_scatter_options* options,
                                            int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kScatter, kScatterPlan, context, workspace_bytes, executor);
  const ConstTensor keys = phase.tensor("key", key), values = phase.tensor("value", value);
  const ConstTensor slots = phase.tensor("slot_mapping", slot_mapping);
  const Tensor to_keys = phase.tensor("key_cache", key_cache), to_values = phase.tensor("value_cache", value_cache);
  const opst_scatter_options in = phase.members("options", options, OPST_SCATTER_OPTIONS);
  const ScatterOptions chosen = {.layout = phase.enumerator("options->layout", in.layout, PageLayout::panel32),
                                 .scales = scales_of(phase, in.scales),
                                 .scales_given = phase.flag("options->scales_given", in.scales_given)};
  return phase.plan(
      [=](Context& c) { return scatter_pa_kv_cache(c, keys, values, slots, to_keys, to_values, chosen); });
}

opst_status opst_scatter_kv_cache(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kScatter, workspace, workspace_bytes, executor);
}

opst_status opst_gather_kv_cache_workspace(opst_context* context, const opst_tensor* key_cache,
                                           const opst_tensor* value_cache, const opst_tensor* block_table,
                                           const opst_tensor* kv_lengths, const opst_tensor* key,
                                           const opst_tensor* value, const opst_gather_options* options,
                                           int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kGather, kGatherPlan, context, workspace_bytes, executor);
  const ConstTensor from_keys = phase.tensor("key_cache", key_cache);
  const ConstTensor from_values = phase.tensor("value_cache", value_cache);
  const ConstTensor table = phase.tensor("block_table", block_table), lengths = phase.tensor("kv_lengths", kv_lengths);
  const Tensor keys = phase.tensor("key", key), values = phase.tensor("value", value);
  const opst_gather_options in = phase.members("options", options, OPST_GATHER_OPTIONS);
  const GatherOptions chosen = {.layout = phase.enumerator("options->layout", in.layout, PageLayout::panel32),
                                .scales = scales_of(phase, in.scales),
                                .cumulative_lengths = phase.flag("options->cumulative_lengths", in.cumulative_lengths),
                                .seq_offset = phase.optional("seq_offset", in.seq_offset),
                                .head_indices = phase.optional("head_indices", in.head_indices),
                                .zero_fill = phase.flag("options->zero_fill", in.zero_fill)};
  return phase.plan(
      [=](Context& c) { return gather_pa_kv_cache(c, from_keys, from_values, table, lengths, keys, values, chosen); });
}

opst_status opst_gather_kv_cache(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kGather, workspace, workspace_bytes, executor);
}
