// rope_scatter_pa_kv_cache: a token's heads are normalised and turned in f32, where they lie or in scratch that stays
// in L1, and stored once.
#include "core/int_math.h"
#include "kv_cache/page_rows.h"
#include "machine/context_impl.h"
#include "rowwise/rows.h"

namespace opst {

using namespace kv_cache;

namespace {

// Checks all tensors and options; gives the cache's sizes, which mean nothing where the check fails.
PageSizes check_call(ShapeCheck& check, const RopeScatterInputs& in, const Tensor& query_out, const Tensor& key_cache,
                     const Tensor& value_cache, const RopeScatterOptions& options) {
  check.tensor("cos", in.cos).dtype({DType::f32}).dims({"tokens", "half"});
  check.tensor("sin", in.sin).dtype({DType::f32}).dims({"tokens", "half"});
  check.tensor("slot_mapping", in.slot_mapping).dtype(kIntegers).dims({"tokens"});
  check.tensor("key", in.key).dtype(kFloats).dims({"tokens", "num_kv_heads", "head_dim"});
  check.tensor("value", in.value).dtype({in.key.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
  if (in.query_weight) check.tensor("query_weight", in.query_weight).dtype({DType::f32}).dims({"head_dim"});
  if (in.key_weight) check.tensor("key_weight", in.key_weight).dtype({DType::f32}).dims({"head_dim"});
  rowwise::check_heads(check, {"query", &in.query}, {"query_out", &query_out}, {in.key.dtype});
  const PageSizes sizes = check_cache(check, kCacheNames, {options.layout, key_cache, value_cache, options.scales},
                                      options.scales_given ? CacheUse::written_by_given_scales : CacheUse::written);
  // Scales that are read come after query_out, which has been compared with what came before it.
  const auto& [key_scales, value_scales, key_offsets, value_offsets] = options.scales;
  for (const Tensor* const read : {&key_scales, &value_scales, &key_offsets, &value_offsets}) {
    const bool given = options.scales_given && check.ok() && *read;
    check.require(!given || !may_overlap(query_out, *read),
                  "query_out overlaps scales or offsets that are given, but an output must not");
  }
  rowwise::check_pairs(check, "cos", "key");
  rowwise::check_style(check, options.style);
  rowwise::check_eps(check, options.eps);
  check_slots(check, in.slot_mapping, sizes);
  return sizes;
}

// A checked call: what is done with one token. `scratch`: the heads of one token in f32.
struct RopeScatter {
  const rowwise::TypeKernels& f32;
  CopyRowsKernel widen, store_query;  // widen: to f32
  RowConversion store_key, store_value;
  ConstTensor query, key, value, cos, sin;
  rowwise::ConstRow query_weight, key_weight;
  Tensor query_out;
  CacheSide keys, values;
  bool pairs;
  double eps;

  // Norm and rotation: the heads of a token of x as f32 into `to`, which may be the heads of x themselves.
  void turn(const ConstTensor& x, const rowwise::ConstRow& weight, int64_t token, const Rows& to) const {
    const int64_t num_heads = x.shape[1], head_dim = x.shape[2];
    Rows from = heads_of(x, token);
    if (x.dtype != DType::f32) {
      widen({num_heads, head_dim, from, to});
      from = to;
    }
    if (weight.data != nullptr) {
      for (int64_t head = 0; head < num_heads; ++head) {
        f32.rms_norm[1]({static_cast<const float*>(from.data) + head * from.row_stride, from.word_stride}, weight, {},
                        {static_cast<float*>(to.data) + head * to.row_stride, to.word_stride}, head_dim, eps);
      }
      from = to;
    }
    f32.rope({.x = {from.data, from.word_stride},
              .out = {to.data, to.word_stride},
              .num_heads = num_heads,
              .x_head_stride = from.row_stride,
              .out_head_stride = to.row_stride,
              .head_dim = head_dim,
              .half = cos.shape[1],
              .cos = rowwise::row_of(cos, token),
              .sin = rowwise::row_of(sin, token),
              .pairs = pairs,
              .inverse = false});
  }

  void write_query(int64_t token, const Rows& scratch) const {
    const Rows to = heads_of(query_out, token);
    if (query_out.dtype == DType::f32) return turn(query, query_weight, token, to);
    turn(query, query_weight, token, scratch);
    store_query({query_out.shape[1], query_out.shape[2], scratch, to});
  }

  void write_cache(int64_t token, int64_t block, int64_t row, const Rows& scratch) const {
    const int64_t num_heads = key.shape[1];
    if (keys.dim() > 0) {
      turn(key, key_weight, token, scratch);
      store_key(num_heads, keys.dim(), {scratch}, keys.heads(block, row));
    }
    if (values.dim() > 0) store_value(num_heads, values.dim(), {heads_of(value, token)}, values.heads(block, row));
  }
};

}  // namespace

Status rope_scatter_pa_kv_cache(Context& context, const RopeScatterInputs& inputs, const Tensor& query_out,
                                const Tensor& key_cache, const Tensor& value_cache, const RopeScatterOptions& options) {
  return checked("rope_scatter_pa_kv_cache", [&](ShapeCheck& check) -> Status {
    const PageSizes sizes = check_call(check, inputs, query_out, key_cache, value_cache, options);
    if (!check.ok()) return check.status();

    const int64_t tokens = check["tokens"], num_heads = check["num_heads"], head_dim = sizes.head_dim;
    // Without a slot every token is skipped, and keys may have any size: they get no task and no scratch.
    const bool has_slots = sizes.num_blocks > 0;
    const int64_t cached = has_slots ? sizes.num_kv_heads * (head_dim + sizes.value_head_dim) : 0;
    const int64_t query_elements = num_heads * head_dim;
    if (tokens == 0 || cached + query_elements == 0) return {};
    const CacheTensors cache = {options.layout, key_cache, value_cache, options.scales};
    if (options.scales_given && cached > 0) check_slot_scales(check, cache, inputs.slot_mapping, sizes);
    if (!check.ok()) return check.status();
    const CacheSide keys(cache, PageSide::key), values(cache, PageSide::value);
    const Isa isa = context.machine().isa;
    const auto copying = [&](DType from, DType to) { return copy_rows_kernel(isa, from, to); };
    const DType dtype = inputs.key.dtype;
    const RopeScatter call = {.f32 = rowwise::kernels_of(context, DType::f32),
                              .widen = copying(dtype, DType::f32),
                              .store_query = copying(DType::f32, dtype),
                              .store_key = RowConversion(isa, {}, keys.format(), options.scales_given),
                              .store_value = RowConversion(isa, {dtype}, values.format(), options.scales_given),
                              .query = normal_strides(inputs.query),
                              .key = normal_strides(inputs.key),
                              .value = normal_strides(inputs.value),
                              .cos = normal_strides(inputs.cos),
                              .sin = normal_strides(inputs.sin),
                              .query_weight = {inputs.query_weight.data, inputs.query_weight.strides[0]},
                              .key_weight = {inputs.key_weight.data, inputs.key_weight.strides[0]},
                              .query_out = normal_strides(query_out),
                              .keys = keys,
                              .values = values,
                              .pairs = options.style == RopeStyle::pairs,
                              .eps = options.eps};

    // Per worker: the heads of one token in f32.
    const int64_t scratch_bytes =
        Arena::size_of<float>(std::max(num_heads, has_slots ? sizes.num_kv_heads : 0) * head_dim);
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(scratch_bytes * context.num_threads());
    if (!lease.ok()) return lease.status();
    char* const all_scratch = static_cast<char*>(lease.value().data());

    // Slots first, then queries, in one region.
    const SlotTasks slot_tasks(sizes, tokens * cached);
    const int64_t tokens_per_task = query_elements > 0 ? std::max<int64_t>(1, kTaskElements / query_elements) : tokens;
    const int64_t num_tasks = slot_tasks.count + ceil_div(tokens, tokens_per_task);
    context.impl().pool.parallel_for(num_tasks, [&](int64_t task, int worker) {
      const Rows scratch = {all_scratch + worker * scratch_bytes, head_dim, 1, 1};
      if (task < slot_tasks.count) {
        if (cached == 0) return;
        return slot_tasks.run(task, inputs.slot_mapping,
                              [&](int64_t t, int64_t block, int64_t row) { call.write_cache(t, block, row, scratch); });
      }
      const int64_t begin = (task - slot_tasks.count) * tokens_per_task;
      const int64_t end = query_elements > 0 ? std::min(tokens, begin + tokens_per_task) : begin;
      for (int64_t t = begin; t < end; ++t) call.write_query(t, scratch);
    });
    return {};
  });
}

}  // namespace opst
