// rope_scatter_pa_kv_cache: a token's heads are normalised and turned in f32, where they lie or in scratch that stays
// in L1, and stored once.
#include <algorithm>

#include "core/guarded.h"
#include "core/int_math.h"
#include "kv_cache/pages.h"
#include "kv_cache/slots.h"
#include "machine/context_impl.h"
#include "rowwise/rows.h"

namespace opst {
namespace {

using kv_cache::CopyRows;
using kv_cache::CopyRowsKernel;
using kv_cache::Pages;
using kv_cache::RowsView;
using kv_cache::SlotTasks;

constexpr int kF32 = 0;  // row of the rowwise tables

const char* token_of(const ConstTensor& tensor, int64_t token) {
  return static_cast<const char*>(tensor.data) + token * tensor.strides[0] * size_bytes(tensor.dtype);
}
RowsView heads_of(const ConstTensor& tensor) {
  return {.row_stride = tensor.strides[1], .word_stride = tensor.strides[2], .step = 1};
}

// The heads of a token in f32, elements `stride` apart.
struct Heads {
  void* data;
  int64_t head_stride, stride;
};

// Norm and rotation of queries or keys.
struct Turning {
  rowwise::Norm norm;
  rowwise::Rope rope;
  CopyRowsKernel widen;  // to f32
  rowwise::ConstRow weight;
  ConstTensor cos, sin;
  bool pairs;
  double eps;

  // The heads of a token of x into `to`, which may be the heads of x themselves.
  void run(const ConstTensor& x, int64_t token, const Heads& to) const {
    const int64_t num_heads = x.shape[1], head_dim = x.shape[2];
    const void* from = token_of(x, token);
    int64_t head_stride = x.strides[1], stride = x.strides[2];
    const auto now_in_place = [&] { from = to.data, head_stride = to.head_stride, stride = to.stride; };
    if (x.dtype != DType::f32) {
      widen({.num_rows = num_heads,
             .dim = head_dim,
             .from = from,
             .from_view = heads_of(x),
             .to = to.data,
             .to_view = {.row_stride = to.head_stride, .word_stride = to.stride, .step = 1}});
      now_in_place();
    }
    if (weight.data != nullptr) {
      for (int64_t head = 0; head < num_heads; ++head) {
        norm({static_cast<const float*>(from) + head * head_stride, stride}, weight, {nullptr, 0},
             {static_cast<float*>(to.data) + head * to.head_stride, to.stride}, head_dim, eps);
      }
      now_in_place();
    }
    rope({.x = {from, stride},
          .out = {to.data, to.stride},
          .num_heads = num_heads,
          .x_head_stride = head_stride,
          .out_head_stride = to.head_stride,
          .head_dim = head_dim,
          .half = cos.shape[1],
          .cos = rowwise::row_of(cos, token),
          .sin = rowwise::row_of(sin, token),
          .pairs = pairs,
          .inverse = false});
  }
};

// Checks all tensors and options; gives the cache's sizes.
Result<PageSizes> check_call(ShapeCheck& check, const RopeScatterInputs& in, const Tensor& query_out,
                             const Tensor& key_cache, const Tensor& value_cache, const RopeScatterOptions& options) {
  check.tensor("cos", in.cos).dtype({DType::f32}).dims({"tokens", "half"});
  check.tensor("sin", in.sin).dtype({DType::f32}).dims({"tokens", "half"});
  check.tensor("slot_mapping", in.slot_mapping).dtype({DType::i32, DType::i64}).dims({"tokens"});
  check.tensor("key", in.key).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "num_kv_heads", "head_dim"});
  check.tensor("value", in.value).dtype({in.key.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
  if (in.query_weight) check.tensor("query_weight", in.query_weight).dtype({DType::f32}).dims({"head_dim"});
  if (in.key_weight) check.tensor("key_weight", in.key_weight).dtype({DType::f32}).dims({"head_dim"});
  const bool in_place = same_view(in.query, query_out);
  if (in_place) check.output("query_out", query_out).dims({"tokens", "num_heads", "head_dim"});
  check.tensor("query", in.query).dtype({in.key.dtype}).dims({"tokens", "num_heads", "head_dim"});
  if (!in_place) check.output("query_out", query_out).dtype({in.key.dtype}).dims({"tokens", "num_heads", "head_dim"});
  const PageSizes sizes =
      kv_cache::check_output_pages(check, options.layout, "key_cache", key_cache, "value_cache", value_cache);
  if (!check.ok()) return check.status();
  const int64_t half = check["half"];
  check.require(half <= sizes.head_dim / 2, [&] {
    return "cos dim 1 (half) is " + std::to_string(half) +
           ", but key has head_dim = " + std::to_string(sizes.head_dim) + ", which holds " +
           std::to_string(sizes.head_dim / 2) + " pairs";
  });
  rowwise::check_style(check, options.style);
  check.require(options.eps >= 0, [&] { return "eps is " + std::to_string(options.eps) + ", but must be >= 0"; });
  kv_cache::check_slots(check, in.slot_mapping, sizes);
  if (!check.ok()) return check.status();
  return sizes;
}

// `in` with normal_strides.
RopeScatterInputs normal_inputs(RopeScatterInputs in) {
  for (ConstTensor* const tensor : {&in.query, &in.key, &in.value, &in.cos, &in.sin}) *tensor = normal_strides(*tensor);
  return in;
}

// A checked call: what is done with one token.
class RopeScatter {
 public:
  RopeScatter(Isa isa, const RopeScatterInputs& in, const Tensor& query_out, const Tensor& key_cache,
              const Tensor& value_cache, const PageSizes& sizes, const RopeScatterOptions& options)
      : in_(normal_inputs(in)),
        query_out_(normal_strides(query_out)),
        sizes_(sizes),
        query_turning_(turning(isa, in_.query_weight, options)),
        key_turning_(turning(isa, in_.key_weight, options)),
        store_query_(kv_cache::copy_rows_kernel(isa, DType::f32, in.key.dtype)),
        store_key_(kv_cache::copy_rows_kernel(isa, DType::f32, key_cache.dtype)),
        store_value_(kv_cache::copy_rows_kernel(isa, in.key.dtype, key_cache.dtype)),
        keys_(options.layout, PageSide::key, key_cache),
        values_(options.layout, PageSide::value, value_cache) {}

  // `scratch`: the heads of one token.
  void write_query(int64_t token, const Heads& scratch) const {
    char* const to = const_cast<char*>(token_of(query_out_, token));
    if (query_out_.dtype == DType::f32) {
      return query_turning_.run(in_.query, token, {to, query_out_.strides[1], query_out_.strides[2]});
    }
    query_turning_.run(in_.query, token, scratch);
    store_query_({.num_rows = query_out_.shape[1],
                  .dim = sizes_.head_dim,
                  .from = scratch.data,
                  .from_view = {.row_stride = sizes_.head_dim, .word_stride = 1, .step = 1},
                  .to = to,
                  .to_view = heads_of(query_out_)});
  }

  void write_cache(int64_t token, int64_t slot, const Heads& scratch) const {
    const int64_t block = slot / sizes_.block_size, row = slot % sizes_.block_size;
    if (sizes_.head_dim > 0) {
      key_turning_.run(in_.key, token, scratch);
      store_key_({.num_rows = sizes_.num_kv_heads,
                  .dim = sizes_.head_dim,
                  .from = scratch.data,
                  .from_view = {.row_stride = sizes_.head_dim, .word_stride = 1, .step = 1},
                  .to = keys_.writable_at(block, row),
                  .to_view = keys_.heads_view()});
    }
    if (sizes_.value_head_dim > 0) {
      store_value_({.num_rows = sizes_.num_kv_heads,
                    .dim = sizes_.value_head_dim,
                    .from = token_of(in_.value, token),
                    .from_view = heads_of(in_.value),
                    .to = values_.writable_at(block, row),
                    .to_view = values_.heads_view()});
    }
  }

 private:
  Turning turning(Isa isa, const ConstTensor& weight, const RopeScatterOptions& options) const {
    const rowwise::Kernels& table = rowwise::kernels(isa);
    return {.norm = table.rms_norm[kF32][1],
            .rope = table.rope[kF32],
            .widen = kv_cache::copy_rows_kernel(isa, in_.key.dtype, DType::f32),
            .weight =
                sizes_.head_dim > 0 ? rowwise::ConstRow{weight.data, weight.strides[0]} : rowwise::ConstRow{nullptr, 0},
            .cos = in_.cos,
            .sin = in_.sin,
            .pairs = options.style == RopeStyle::pairs,
            .eps = options.eps};
  }

  const RopeScatterInputs in_;
  const Tensor query_out_;
  const PageSizes sizes_;
  const Turning query_turning_, key_turning_;
  const CopyRowsKernel store_query_, store_key_, store_value_;
  const Pages keys_, values_;
};

}  // namespace

Status rope_scatter_pa_kv_cache(Context& context, const RopeScatterInputs& inputs, const Tensor& query_out,
                                const Tensor& key_cache, const Tensor& value_cache, const RopeScatterOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope_scatter_pa_kv_cache");
    const Result<PageSizes> checked = check_call(check, inputs, query_out, key_cache, value_cache, options);
    if (!checked.ok()) return checked.status();
    const PageSizes& sizes = checked.value();

    const int64_t tokens = check["tokens"], num_heads = check["num_heads"], head_dim = sizes.head_dim;
    // Without a slot every token is skipped, and keys may have any size: they get no task and no scratch.
    const bool has_slots = sizes.num_blocks > 0;
    const int64_t cached = has_slots ? sizes.num_kv_heads * (head_dim + sizes.value_head_dim) : 0;
    const int64_t query_elements = num_heads * head_dim;
    if (tokens == 0 || cached + query_elements == 0) return {};
    const RopeScatter call(context.machine().isa, inputs, query_out, key_cache, value_cache, sizes, options);

    // Per worker: the heads of one token in f32.
    const int64_t scratch_bytes =
        Arena::size_of<float>(std::max(num_heads, has_slots ? sizes.num_kv_heads : 0) * head_dim);
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(scratch_bytes * context.num_threads());
    if (!lease.ok()) return lease.status();
    char* const all_scratch = static_cast<char*>(lease.value().data());

    // Slots first, then queries, in one region.
    const ConstTensor& slots = inputs.slot_mapping;
    const SlotTasks slot_tasks(tokens * cached);
    const int64_t tokens_per_task =
        query_elements > 0 ? std::max<int64_t>(1, SlotTasks::kTaskElements / query_elements) : tokens;
    const int64_t num_tasks = slot_tasks.count + ceil_div(tokens, tokens_per_task);
    context.impl().pool.parallel_for(num_tasks, [&](int64_t task, int worker) {
      const Heads scratch = {all_scratch + worker * scratch_bytes, head_dim, 1};
      if (task < slot_tasks.count) {
        for (int64_t t = cached > 0 ? kv_cache::first_written(slots) : tokens; t < tokens; ++t) {
          const int64_t slot = index_at(slots, t);
          if (slot_tasks.writes(task, slot)) call.write_cache(t, slot, scratch);
        }
        return;
      }
      const int64_t begin = (task - slot_tasks.count) * tokens_per_task;
      const int64_t end = query_elements > 0 ? std::min(tokens, begin + tokens_per_task) : begin;
      for (int64_t t = begin; t < end; ++t) call.write_query(t, scratch);
    });
    return {};
  });
}

}  // namespace opst
