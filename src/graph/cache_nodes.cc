// The nodes that read and write cached keys and values, and attention.
#include "graph/new_node.h"
#include "kv_cache/pages.h"

namespace opst {

namespace {

constexpr std::initializer_list<DType> kIntegers = {DType::i64, DType::i32};

// [tokens, heads, dim], which is `batch` sequences of equal length one after the other, as [batch, heads, length, dim].
Tensor as_batch(const Tensor& t, int64_t batch = 1) {
  const int64_t length = batch > 0 ? t.shape[0] / batch : 0;
  Tensor view = t;
  view.rank = 4;
  view.shape[0] = batch, view.strides[0] = length * t.strides[0];
  view.shape[1] = t.shape[1], view.strides[1] = t.strides[1];
  view.shape[2] = length, view.strides[2] = t.strides[0];
  view.shape[3] = t.shape[2], view.strides[3] = t.strides[2];
  return view;
}

// Bytes of the key and the value of a token for one head, with their scales and offsets.
struct CachedRow {
  int64_t groups = 0;  // of both
  bool has_offsets = false;

  // Of a node whose inputs have been checked.
  CachedRow(const NewNode& node, const NewNode::ScaleInputs& scales)
      : groups(scales.key >= 0 ? node.check["key_groups"] + node.check["value_groups"] : 0),
        has_offsets(scales.key_offsets >= 0) {}
  int64_t bytes(int64_t dims, DType cache) const {
    return dims * size_bytes(cache) / kv_cache::numbers_of(cache) +
           groups * size_bytes(DType::f32) * (has_offsets ? 2 : 1);
  }
  // A row of each token and head is written.
  NodeCost written(const Tensor& key, const Tensor& value, const Tensor& cache) const {
    return {.cache_bytes = key.shape[0] * key.shape[1] * bytes(key.shape[2] + value.shape[2], cache.dtype)};
  }
};

// Scales are values of the graph, so that it knows what is written.
void check_no_tensors(NewNode& node, const PageScales& scales, bool scales_given) {
  const bool none = !is_given(scales.key) && !is_given(scales.value) && !is_given(scales.key_offsets) &&
                    !is_given(scales.value_offsets);
  node.check.require(none && !scales_given, "options.scales or scales_given is set, but a node's scales are values");
}

// What both forms of attention demand of their heads.
void check_heads(NewNode& node) {
  ShapeCheck& check = node.check;
  if (!check.ok()) return;
  for (const char* size : {"num_heads", "num_kv_heads", "head_dim", "value_head_dim"}) {
    check.require(check[size] != 0, check.setter(size), " has ", size, " = 0, but must be >= 1");
  }
  if (!check.ok()) return;
  const int64_t heads = node.dim("num_heads").bound(), kv_heads = node.dim("num_kv_heads").bound();
  check.require(heads % kv_heads == 0, "query dim 1 (num_heads) is ", heads,
                ", not a multiple of num_kv_heads = ", kv_heads);
}

// How many queries each sequence of paged attention has. Sizes with a name are what they should be when the node runs:
// the operator refuses others.
void check_sequences(NewNode& node, bool has_starts) {
  const int64_t tokens = node.check["tokens"], batch = node.check["batch"];
  if (has_starts) {
    const int64_t starts = node.check["batch + 1"];
    node.check.require(starts < 0 || batch < 0 || starts == batch + 1, "cu_seqlens_q dim 0 is ", starts,
                       ", but must be ", batch + 1, ": one more than batch");
  } else {
    const bool equal = tokens == batch || batch == 1 || (batch > 0 && tokens >= 0 && tokens % batch == 0);
    node.check.require(equal, "query dim 0 (tokens) is ", node.text(tokens),
                       ", not a multiple of batch = ", node.text(batch),
                       ", and sequences of different lengths need cu_seqlens_q");
  }
}

// The size by which paged attention is planned, which no tensor has: as limited as the keys and values that it counts.
void check_kv_len(NewNode& node, bool is_known, int64_t kv_len) {
  node.check.require(is_known, "kv_len is a size of another graph");
  node.check.require(kv_len >= 0, "kv_len is ", kv_len, ", must be >= 0");
  if (!node.check.ok()) return;
  const int64_t dims = node.dim("head_dim").bound() + node.dim("value_head_dim").bound();
  const Size bytes = Size(kv_len) * std::max<int64_t>(node.dim("batch").bound(), 1) * node.dim("num_kv_heads").bound() *
                     dims * size_bytes(DType::f32);
  node.check.require(bytes.within_limit(), "kv_len is ", kv_len, ", too large: more than 2^56 bytes");
}

// Costs and plan of attention: input 0 is the query, 1 the keys, and of pages `table` the block table.
void plan_as(NewNode& node, const AttentionOptions& options, Dim kv_len, const CachedRow& row, int8_t table,
             bool varlen_q) {
  const bool paged = table >= 0;
  const Dim kv_heads = node.dim("num_kv_heads"), block_size = paged ? node.dim("block_size") : Dim();
  const int64_t key_groups = node.check["key_groups"], value_groups = node.check["value_groups"];
  const auto problem = [=](const NodeTensors& t) -> AttentionProblem {
    const Tensor& query = t.input(0);
    const int64_t batch = paged ? t.input(table).shape[0] : 1;
    return {.query_dtype = query.dtype,
            .kv_dtype = t.input(1).dtype,
            .batch = batch,
            .num_heads = query.shape[1],
            .num_kv_heads = t.size(kv_heads),
            .query_len = batch > 0 ? ceil_div(query.shape[0], batch) : 0,
            .kv_len = t.size(kv_len),
            .head_dim = query.shape[2],
            .value_head_dim = t.output(0).shape[2],
            .paged = paged,
            .block_size = t.size(block_size),
            .key_groups = key_groups,
            .value_groups = value_groups,
            .has_offsets = row.has_offsets,
            .heads_side_by_side_kv = !paged || options.page_layout == PageLayout::norm,
            .options = options,
            .varlen_q = varlen_q};
  };
  node.also_costs = [problem, row](const NodeTensors& t) -> NodeCost {
    const AttentionProblem p = problem(t);
    const VisibleKeys visible = count_visible(p.options, p.query_len, p.kv_len);
    const int64_t dims = p.head_dim + p.value_head_dim;
    return {.flops = 2.0 * static_cast<double>(dims * p.num_heads) * visible.pairs * static_cast<double>(p.batch),
            .cache_bytes = p.batch * visible.keys * p.num_kv_heads * row.bytes(dims, p.kv_dtype)};
  };
  node.plan = [problem](const Machine& machine, const NodeTensors& t) {
    return to_string(plan_attention(problem(t), machine));
  };
}

}  // namespace

void Graph::scatter_pa_kv_cache(std::string name, Value key, Value value, Value slots, Value key_cache,
                                Value value_cache, const ScatterOptions& options, const ScaleValues& scales) {
  made(*impl_, name, "scatter_pa_kv_cache", [&](NewNode& node) {
    node.input("key", key).dtype(kFloats).dims({"tokens", "num_kv_heads", "head_dim"});
    node.input("value", value).dtype({dtype(key)}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    node.input("slots", slots).dtype({DType::i64}).dims({"tokens"});
    check_no_tensors(node, options.scales, options.scales_given);
    const auto of_cache = node.pages(options.layout, key_cache, value_cache, scales, /*written=*/true);
    node.run = [layout = options.layout, of_cache](Context& context, const NodeTensors& t) {
      return opst::scatter_pa_kv_cache(context, t.input(0), t.input(1), t.input(2), t.input(3), t.input(4),
                                       {.layout = layout, .scales = of_cache.of(t)});
    };
    node.also_costs = [row = CachedRow(node, of_cache)](const NodeTensors& t) {
      return row.written(t.input(0), t.input(1), t.input(3));
    };
  });
}

Value Graph::rope_scatter_pa_kv_cache(std::string name, const Step& step, Value key_cache, Value value_cache,
                                      const RopeScatterOptions& options, const ScaleValues& scales) {
  return made(*impl_, name, "rope_scatter_pa_kv_cache", [&](NewNode& node) {
    node.input("query", step.query).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    node.input("key", step.key).dtype({dtype(step.query)}).dims({"tokens", "num_kv_heads", "head_dim"});
    node.input("value", step.value).dtype({dtype(step.query)}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    node.input("cos", step.table.cos).dtype({DType::f32}).dims({"tokens", "half"});
    node.input("sin", step.table.sin).dtype({DType::f32}).dims({"tokens", "half"});
    node.input("slots", step.slots).dtype({DType::i64}).dims({"tokens"});
    check_no_tensors(node, options.scales, options.scales_given);
    const auto of_cache = node.pages(options.layout, key_cache, value_cache, scales, /*written=*/true);
    node.half_of_head_dim();
    const auto weight = [&](const char* role, Value value) {
      return node.optional(role, value, {DType::f32}, {"head_dim"}, Counted::not_all);
    };
    const int8_t query_weight = weight("query_weight", step.query_weight);
    const int8_t key_weight = weight("key_weight", step.key_weight);
    node.result_as(step.query, {0});
    node.run = [layout = options.layout, style = options.style, eps = options.eps, of_cache, query_weight, key_weight](
                   Context& context, const NodeTensors& t) {
      const RopeScatterInputs in = {
          t.input(0),         t.input(1), t.input(2), t.input(3), t.input(4), t.input(5), t.input(query_weight),
          t.input(key_weight)};
      return opst::rope_scatter_pa_kv_cache(context, in, t.output(0), t.input(6), t.input(7),
                                            {.layout = layout, .style = style, .eps = eps, .scales = of_cache.of(t)});
    };
    node.also_costs = [row = CachedRow(node, of_cache)](const NodeTensors& t) {
      return row.written(t.input(1), t.input(2), t.input(6));
    };
  })[0];
}

Value Graph::attention(std::string name, Value query, Value key, Value value, const AttentionOptions& options) {
  return made(*impl_, name, "attention", [&](NewNode& node) {
    node.input("query", query).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    node.input("key", key, Counted::not_all).dtype(kFloats).dims({"kv_len", "num_kv_heads", "head_dim"});
    node.input("value", value, Counted::not_all).dtype({dtype(key)}).dims({"kv_len", "num_kv_heads", "value_head_dim"});
    check_heads(node);
    node.result(dtype(query), {node.dim("tokens"), node.dim("num_heads"), node.dim("value_head_dim")});
    node.run = [options](Context& context, const NodeTensors& t) {
      return flash_attention_forward(
          context, {.query = as_batch(t.input(0)), .key = as_batch(t.input(1)), .value = as_batch(t.input(2))},
          {.out = as_batch(t.output(0))}, options);
    };
    plan_as(node, options, node.dim("kv_len"), CachedRow(node, {}), /*table=*/-1, /*varlen_q=*/false);
  })[0];
}

Value Graph::paged_attention(std::string name, Value query, Value key_cache, Value value_cache, const Pages& pages,
                             const AttentionOptions& options) {
  return made(*impl_, name, "paged_attention", [&](NewNode& node) {
    node.input("query", query).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    const auto of_cache = node.pages(options.page_layout, key_cache, value_cache, pages.scales, /*written=*/false);
    const auto table = static_cast<int8_t>(node.inputs.size());
    node.input("block_table", pages.block_table, Counted::not_all).dtype(kIntegers).dims({"batch", "max_blocks"});
    node.input("kv_lengths", pages.kv_lengths, Counted::not_all).dtype(kIntegers).dims({"batch"});
    const int8_t starts = node.optional("cu_seqlens_q", pages.cu_seqlens_q, kIntegers, {"batch + 1"}, Counted::not_all);
    check_heads(node);
    check_sequences(node, starts >= 0);
    check_kv_len(node, impl_->has(pages.kv_len), pages.kv_len.bound());
    node.result(dtype(query), {node.dim("tokens"), node.dim("num_heads"), node.dim("value_head_dim")});
    node.run = [options, of_cache, table, starts](Context& context, const NodeTensors& t) {
      const auto batched = [&](const Tensor& x) { return starts >= 0 ? x : as_batch(x, t.input(table).shape[0]); };
      const PageScales scales = of_cache.of(t);
      const AttentionInputs in = {.query = batched(t.input(0)),
                                  .key = t.input(1),
                                  .value = t.input(2),
                                  .block_table = t.input(table),
                                  .kv_lengths = t.input(table + 1),
                                  .key_scales = scales.key,
                                  .value_scales = scales.value,
                                  .key_offsets = scales.key_offsets,
                                  .value_offsets = scales.value_offsets,
                                  .cu_seqlens_q = t.input(starts)};
      return flash_attention_forward(context, in, {.out = batched(t.output(0))}, options);
    };
    plan_as(node, options, pages.kv_len, CachedRow(node, of_cache), table, /*varlen_q=*/starts >= 0);
  })[0];
}

}  // namespace opst
