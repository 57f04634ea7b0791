// The nodes that read and write cached keys and values, and attention.
#include "graph/node_check.h"

namespace opst {

using graph::bytes_of;
using graph::kFloats;
using graph::NodeCheck;
using graph::only;
using graph::str;

namespace {

// [rows, heads, dim] as [1, heads, rows, dim]
Tensor as_batch(const Tensor& t) {
  Tensor view = t;
  const int order[] = {1, 0, 2};
  view.rank = 4;
  view.shape[0] = 1;
  view.strides[0] = 0;
  for (int i = 0; i < 3; ++i) view.shape[i + 1] = t.shape[order[i]], view.strides[i + 1] = t.strides[order[i]];
  return view;
}

struct AttentionSizes {
  int64_t tokens, num_heads, head_dim, kv_len, num_kv_heads, value_head_dim;
  DType kv_dtype;
  bool paged = false;
  int64_t block_size = 0;
};

NodeCost attention_cost(const AttentionSizes& s, const AttentionOptions& options, int64_t tensor_bytes) {
  const VisibleKeys visible = count_visible(options, s.tokens, s.kv_len);
  return {.flops = 2.0 * static_cast<double>((s.head_dim + s.value_head_dim) * s.num_heads) * visible.pairs,
          .cache_bytes = visible.keys * s.num_kv_heads * (s.head_dim + s.value_head_dim) * size_bytes(s.kv_dtype),
          .tensor_bytes = tensor_bytes};
}

std::string attention_plan_text(const AttentionSizes& s, DType query_dtype, const AttentionOptions& options,
                                const Machine& machine) {
  return to_string(plan_attention({.query_dtype = query_dtype,
                                   .kv_dtype = s.kv_dtype,
                                   .num_heads = s.num_heads,
                                   .num_kv_heads = s.num_kv_heads,
                                   .query_len = s.tokens,
                                   .kv_len = s.kv_len,
                                   .head_dim = s.head_dim,
                                   .value_head_dim = s.value_head_dim,
                                   .paged = s.paged,
                                   .block_size = s.block_size,
                                   .options = options},
                                  machine));
}

}  // namespace

void Graph::scatter_pa_kv_cache(std::string name, Value key, Value value, Value slots, Value key_cache,
                                Value value_cache, const ScatterOptions& options) {
  building(*impl_, [&]() -> int {
    NodeCheck check(*impl_, name, "scatter_pa_kv_cache");
    check.tensor("key", key, kFloats, {"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", value, {dtype(key)}, {"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("slots", slots, {DType::i64}, {"tokens"});
    check.pages(options.layout, key_cache, value_cache);
    check.written("key_cache", key_cache);
    check.written("value_cache", value_cache);
    if (!check.ok()) return 0;
    node({.name = name,
          .op = "scatter_pa_kv_cache",
          .inputs = {key, value, slots, key_cache, value_cache},
          .outputs = {},
          .run =
              [options](Context& context, const NodeTensors& t) {
                return opst::scatter_pa_kv_cache(context, t.input(0), t.input(1), t.input(2), t.input(3), t.input(4),
                                                 options);
              },
          .cost =
              [](const NodeTensors& t) {
                const int64_t elements = t.input(0).num_elements() + t.input(1).num_elements();
                return NodeCost{.cache_bytes = elements * size_bytes(t.input(3).dtype),
                                .tensor_bytes = bytes_of(t.input(0)) + bytes_of(t.input(1)) + bytes_of(t.input(2))};
              }});
    return 0;
  });
}

Value Graph::rope_scatter_pa_kv_cache(std::string name, const Step& step, Value key_cache, Value value_cache,
                                      const RopeScatterOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rope_scatter_pa_kv_cache");
    check.tensor("query", step.query, kFloats, {"tokens", "num_heads", "head_dim"});
    check.tensor("key", step.key, {dtype(step.query)}, {"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", step.value, {dtype(step.query)}, {"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("cos", step.table.cos, {DType::f32}, {"tokens", "half"});
    check.tensor("sin", step.table.sin, {DType::f32}, {"tokens", "half"});
    check.tensor("slots", step.slots, {DType::i64}, {"tokens"});
    check.pages(options.layout, key_cache, value_cache);
    check.written("key_cache", key_cache);
    check.written("value_cache", value_cache);
    std::vector<Value> inputs = {step.query,     step.key,   step.value, step.table.cos,
                                 step.table.sin, step.slots, key_cache,  value_cache};
    int query_weight = 0, key_weight = 0;
    for (const bool is_key : {false, true}) {
      const Value weight = is_key ? step.key_weight : step.query_weight;
      if (!weight.exists()) continue;
      check.tensor(is_key ? "key_weight" : "query_weight", weight, {DType::f32}, {"head_dim"});
      (is_key ? key_weight : query_weight) = static_cast<int>(inputs.size());
      inputs.push_back(weight);
    }
    if (check.ok() && 2 * check["half"].bound() > check["head_dim"].bound()) {
      check.fail("cos dim 1 (half) is " + str(check["half"].bound()) +
                 ", more than half of head_dim = " + str(check["head_dim"].bound()));
    }
    if (!check.ok()) return {};
    return only(
        node({.name = name,
              .op = "rope_scatter_pa_kv_cache",
              .inputs = inputs,
              .outputs = {{name, dtype(step.query), shape(step.query)}},
              .in_place = {{0, 0}},
              .run =
                  [options, query_weight, key_weight](Context& context, const NodeTensors& t) {
                    RopeScatterInputs in = {.query = t.input(0),
                                            .key = t.input(1),
                                            .value = t.input(2),
                                            .cos = t.input(3),
                                            .sin = t.input(4),
                                            .slot_mapping = t.input(5)};
                    if (query_weight != 0) in.query_weight = t.input(query_weight);
                    if (key_weight != 0) in.key_weight = t.input(key_weight);
                    return opst::rope_scatter_pa_kv_cache(context, in, t.output(0), t.input(6), t.input(7), options);
                  },
              .cost =
                  [](const NodeTensors& t) {
                    const int64_t elements = t.input(1).num_elements() + t.input(2).num_elements();
                    int64_t bytes = bytes_of(t.output(0));
                    for (int i = 0; i < 6; ++i) bytes += bytes_of(t.input(i));
                    return NodeCost{.cache_bytes = elements * size_bytes(t.input(6).dtype), .tensor_bytes = bytes};
                  }}));
  });
}

namespace {

// What both forms of attention demand of their heads.
void check_heads(NodeCheck& check) {
  check.positive({"num_heads", "num_kv_heads", "head_dim", "value_head_dim"});
  if (!check.ok()) return;
  const int64_t heads = check["num_heads"].bound(), kv_heads = check["num_kv_heads"].bound();
  if (heads % kv_heads != 0) {
    check.fail("query dim 1 (num_heads) is " + str(heads) + ", not a multiple of num_kv_heads = " + str(kv_heads));
  }
}

}  // namespace

Value Graph::attention(std::string name, Value query, Value key, Value value, const AttentionOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "attention");
    check.tensor("query", query, kFloats, {"tokens", "num_heads", "head_dim"});
    check.tensor("key", key, kFloats, {"kv_len", "num_kv_heads", "head_dim"});
    check.tensor("value", value, {dtype(key)}, {"kv_len", "num_kv_heads", "value_head_dim"});
    check_heads(check);
    if (!check.ok()) return {};
    const auto sizes = [](const NodeTensors& t) {
      const Tensor &q = t.input(0), &k = t.input(1), &v = t.input(2);
      return AttentionSizes{q.shape[0], q.shape[1], q.shape[2], k.shape[0], k.shape[1], v.shape[2], k.dtype};
    };
    return only(node(
        {.name = name,
         .op = "attention",
         .inputs = {query, key, value},
         .outputs = {{name, dtype(query), {check["tokens"], check["num_heads"], check["value_head_dim"]}}},
         .run =
             [options](Context& context, const NodeTensors& t) {
               return flash_attention_forward(
                   context, {.query = as_batch(t.input(0)), .key = as_batch(t.input(1)), .value = as_batch(t.input(2))},
                   {.out = as_batch(t.output(0))}, options);
             },
         .cost =
             [options, sizes](const NodeTensors& t) {
               return attention_cost(sizes(t), options, bytes_of(t.input(0)) + bytes_of(t.output(0)));
             },
         .plan =
             [options, sizes](const Machine& machine, const NodeTensors& t) {
               return attention_plan_text(sizes(t), t.input(0).dtype, options, machine);
             }}));
  });
}

Value Graph::paged_attention(std::string name, Value query, Value key_cache, Value value_cache, const Pages& pages,
                             const AttentionOptions& given) {
  return building(*impl_, [&]() -> Value {
    AttentionOptions options = given;
    options.page_layout = pages.layout;
    NodeCheck check(*impl_, name, "paged_attention");
    check.tensor("query", query, kFloats, {"tokens", "num_heads", "head_dim"});
    check.pages(pages.layout, key_cache, value_cache);
    check.tensor("block_table", pages.block_table, {DType::i64, DType::i32}, {"batch", "max_blocks"});
    check.tensor("kv_lengths", pages.kv_lengths, {DType::i64, DType::i32}, {"batch"});
    check_heads(check);
    if (!impl_->has(pages.kv_len)) check.fail("kv_len is a size of another graph");
    if (pages.kv_len.bound() < 0) check.fail("kv_len is " + str(pages.kv_len.bound()) + ", must be >= 0");
    if (check.ok()) {
      const int64_t row = check["head_dim"].bound() + check["value_head_dim"].bound();
      const Size bytes = Size(pages.kv_len.bound()) * check["num_kv_heads"].bound() * row * size_bytes(DType::f32);
      if (!bytes.within_limit()) {
        check.fail("kv_len is " + str(pages.kv_len.bound()) + ", too large: more than 2^56 bytes");
      }
    }
    if (check.ok() && check["batch"] != Dim(1)) {
      check.fail("block_table dim 0 (batch) is " + impl_->text(check["batch"]) +
                 ", but a node attends with one sequence");
    }
    if (!check.ok()) return {};
    const auto sizes = [kv_len = pages.kv_len, kv_heads = check["num_kv_heads"],
                        value_head_dim = check["value_head_dim"],
                        block_size = check["block_size"]](const NodeTensors& t) {
      const Tensor& q = t.input(0);
      return AttentionSizes{
          q.shape[0],       q.shape[1], q.shape[2],        t.size(kv_len), t.size(kv_heads), t.size(value_head_dim),
          t.input(1).dtype, true,       t.size(block_size)};
    };
    return only(node({.name = name,
                      .op = "paged_attention",
                      .inputs = {query, key_cache, value_cache, pages.block_table, pages.kv_lengths},
                      .outputs = {{name, dtype(query), {check["tokens"], check["num_heads"], check["value_head_dim"]}}},
                      .run =
                          [options](Context& context, const NodeTensors& t) {
                            return flash_attention_forward(context,
                                                           {.query = as_batch(t.input(0)),
                                                            .key = t.input(1),
                                                            .value = t.input(2),
                                                            .block_table = t.input(3),
                                                            .kv_lengths = t.input(4)},
                                                           {.out = as_batch(t.output(0))}, options);
                          },
                      .cost =
                          [options, sizes](const NodeTensors& t) {
                            return attention_cost(sizes(t), options, bytes_of(t.input(0)) + bytes_of(t.output(0)));
                          },
                      .plan =
                          [options, sizes](const Machine& machine, const NodeTensors& t) {
                            return attention_plan_text(sizes(t), t.input(0).dtype, options, machine);
                          }}));
  });
}

}  // namespace opst
