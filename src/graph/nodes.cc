// The operators of include/opst as nodes: what they infer, where they may write, what they cost.
#include <algorithm>

#include "graph/graph_impl.h"

namespace opst {

namespace {

using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

// One operator's inputs, as ShapeCheck does it for tensors: a dimension's name is bound to its first size.
class NodeCheck {
 public:
  NodeCheck(GraphImpl& graph, const std::string& node, const char* op)
      : graph_(graph), where_(node + " (" + op + "): ") {}

  bool ok() const { return ok_; }
  void fail(const std::string& message) {
    if (ok_) graph_.fail(where_ + message);
    ok_ = false;
  }

  void tensor(const char* role, Value value, std::initializer_list<DType> dtypes,
              std::initializer_list<const char*> names) {
    if (const ValueData* const data = find_tensor(role, value, dtypes)) dims(role, *data, names);
  }

  // Any rank from 1; the last dimension has a name.
  void last_dim(const char* role, Value value, std::initializer_list<DType> dtypes, const char* name) {
    const ValueData* const data = find_tensor(role, value, dtypes);
    if (data == nullptr) return;
    if (data->shape.rank == 0) return fail(named(role, *data) + " has no dimension " + name);
    dim(role, *data, data->shape.rank - 1, name);
  }

  // A packed weight, [n, k].
  void weight(const char* role, Value value, std::initializer_list<const char*> names) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return;
    if (data->kind != Kind::weight) return fail(named(role, *data) + " is a tensor, expected a packed weight");
    dims(role, *data, names);
  }

  // Shape and dtype of `value` are those of `other`.
  void same(const char* role, Value value, const char* other_role, Value other) {
    const ValueData* const a = find(role, value);
    const ValueData* const b = find(other_role, other);
    if (a == nullptr || b == nullptr) return;
    if (a->dtype != b->dtype || a->shape != b->shape) {
      fail(named(role, *a) + " is " + to_string(a->dtype) + " " + graph_.text(a->shape) + ", but " +
           named(other_role, *b) + " is " + to_string(b->dtype) + " " + graph_.text(b->shape));
    }
  }

  void written(const char* role, Value value) {
    const ValueData* const data = find(role, value);
    if (data != nullptr && data->kind != Kind::cache) fail(named(role, *data) + " is written, but is no cache");
  }

  // The tensors of a cache. Binds num_blocks, block_size, num_kv_heads, head_dim and value_head_dim.
  void pages(PageLayout layout, Value key_cache, Value value_cache) {
    const ValueData* const key = find_tensor("key_cache", key_cache, kFloats);
    if (key == nullptr) return;
    const DType dtype = key->dtype;
    if (layout == PageLayout::norm) {
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "block_size", "num_kv_heads", "head_dim"});
      tensor("value_cache", value_cache, {dtype}, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
      return;
    }
    constexpr int64_t kPanelRows = 32;
    if (const Status status = supports(layout, dtype, kPanelRows); !status.ok()) return fail(status.message());
    int64_t step = 1;
    if (dtype == DType::bf16) {
      step = 2;
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "64"});
      tensor("value_cache", value_cache, {dtype},
             {"num_blocks", "num_kv_heads", "block_size / 2", "2 * value_head_dim"});
    } else {
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim", "32"});
      tensor("value_cache", value_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size", "value_head_dim"});
    }
    if (!ok_) return;
    const Dim* const k = key->shape.dims;
    const Dim* const v = graph_.at(value_cache).shape.dims;
    if (k[4].bound() != kPanelRows * step) {
      return fail(named("key_cache", *key) + " dim 4 is " + graph_.text(k[4]) + ", but a panel has " +
                  std::to_string(kPanelRows * step) + " elements");
    }
    holds("key_cache", key_cache, "head_dim", k[3].bound() * step);
    holds("key_cache", key_cache, "block_size", k[2].bound() * kPanelRows);
    holds("value_cache", value_cache, "block_size", v[2].bound() * step);
    holds("value_cache", value_cache, "value_head_dim", v[3].bound() / step);
  }

  // A bound size.
  Dim operator[](std::string_view name) const {
    const Bound* const known = find_bound(name);
    return known != nullptr ? known->dim : Dim();
  }

 private:
  struct Bound {
    std::string_view name;
    Dim dim;
    std::string by;
  };

  static std::string named(const char* role, const ValueData& data) {
    return std::string(role) + " '" + data.name + "'";
  }

  // A size that follows from a shape.
  void holds(const char* role, Value value, const char* name, Dim size) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return;
    const Bound* const known = find_bound(name);
    if (known == nullptr) {
      bound_.push_back({name, size, named(role, *data)});
    } else if (known->dim != size) {
      fail(named(role, *data) + " holds " + name + " = " + graph_.text(size) + ", but " + known->by + " has " + name +
           " = " + graph_.text(known->dim));
    }
  }

  const Bound* find_bound(std::string_view name) const {
    const auto known = std::find_if(bound_.begin(), bound_.end(), [name](const Bound& b) { return b.name == name; });
    return known == bound_.end() ? nullptr : &*known;
  }

  const ValueData* find(const char* role, Value value) {
    if (!ok_) return nullptr;
    if (graph_.has(value)) return &graph_.at(value);
    fail(std::string(role) + " is no tensor of this graph");
    return nullptr;
  }

  const ValueData* find_tensor(const char* role, Value value, std::initializer_list<DType> dtypes) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return nullptr;
    if (data->kind == Kind::weight) {
      return fail(named(role, *data) + " is a packed weight, expected a tensor"), nullptr;
    }
    if (std::find(dtypes.begin(), dtypes.end(), data->dtype) == dtypes.end()) {
      std::string expected;
      for (const DType dtype : dtypes) expected += (expected.empty() ? "" : " or ") + std::string(to_string(dtype));
      return fail(named(role, *data) + " is " + to_string(data->dtype) + ", expected " + expected), nullptr;
    }
    return data;
  }

  void dims(const char* role, const ValueData& data, std::initializer_list<const char*> names) {
    if (data.shape.rank != static_cast<int>(names.size())) {
      std::string expected;
      for (const char* name : names) expected += (expected.empty() ? "" : ", ") + std::string(name);
      return fail(named(role, data) + " is " + graph_.text(data.shape) + ", expected [" + expected + "]");
    }
    int i = 0;
    for (const char* name : names) dim(role, data, i++, name);
  }

  void dim(const char* role, const ValueData& data, int i, const char* name) {
    const Dim size = data.shape.dims[i];
    const Bound* const known = find_bound(name);
    if (known == nullptr) {
      bound_.push_back({name, size, named(role, data)});
    } else if (known->dim != size) {
      fail(named(role, data) + " dim " + std::to_string(i) + " (" + name + ") is " + graph_.text(size) + ", but " +
           known->by + " has " + name + " = " + graph_.text(known->dim));
    }
  }

  GraphImpl& graph_;
  std::string where_;
  bool ok_ = true;
  std::vector<Bound> bound_;
};

int64_t bytes_of(const Tensor& tensor) { return tensor.num_elements() * size_bytes(tensor.dtype); }

std::string str(int64_t number) { return std::to_string(number); }

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

// Pairs of a query and a key that it sees: the last query sees all keys.
double visible_pairs(int64_t queries, int64_t keys, const AttentionOptions& options) {
  const auto q = static_cast<double>(queries), k = static_cast<double>(keys);
  if (!options.causal) return q * k;
  double pairs = 0;
  const int64_t offset = options.alignment == CausalAlignment::bottom_right ? keys - queries : 0;
  // Query i sees clamp(i + offset + 1, 0, keys) keys.
  const int64_t none = std::clamp<int64_t>(-offset, 0, queries);              // the first ones, which see nothing
  const int64_t all = std::clamp<int64_t>(keys - offset - 1, none, queries);  // from here on: every key
  const auto first = static_cast<double>(none + offset + 1), count = static_cast<double>(all - none);
  pairs += count * first + count * (count - 1) / 2;
  return pairs + static_cast<double>(queries - all) * k;
}

struct AttentionSizes {
  int64_t tokens, num_heads, head_dim, kv_len, num_kv_heads, value_head_dim;
  DType kv_dtype;
  bool paged = false;
  PageLayout layout = PageLayout::norm;
  int64_t block_size = 0;
};

NodeCost attention_cost(const AttentionSizes& s, const AttentionOptions& options, int64_t tensor_bytes) {
  return {.flops = 2.0 * static_cast<double>((s.head_dim + s.value_head_dim) * s.num_heads) *
                   visible_pairs(s.tokens, s.kv_len, options),
          .cache_bytes = s.kv_len * s.num_kv_heads * (s.head_dim + s.value_head_dim) * size_bytes(s.kv_dtype),
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
                                   .page_layout = s.layout,
                                   .block_size = s.block_size,
                                   .options = options},
                                  machine));
}

Value only(const std::vector<Value>& outputs) { return outputs.empty() ? Value() : outputs[0]; }

}  // namespace

Value Graph::matmul(std::string name, Value x, Value weight) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "matmul");
    check.tensor("x", x, {DType::f32}, {"rows", "k"});
    check.weight("weight", weight, {"n", "k"});
    if (!check.ok()) return {};
    return only(
        node({.name = name,
              .op = "matmul",
              .inputs = {x, weight},
              .outputs = {{name, DType::f32, {check["rows"], check["n"]}}},
              .run = [](Context& context,
                        const NodeTensors& t) { return opst::matmul(context, t.input(0), t.weight(1), t.output(0)); },
              .cost =
                  [](const NodeTensors& t) {
                    const int64_t multiply_adds = t.output(0).num_elements() * t.input(0).shape[1];
                    return NodeCost{.flops = 2.0 * static_cast<double>(multiply_adds),
                                    .weight_bytes = t.weight(1).size_bytes(),
                                    .tensor_bytes = bytes_of(t.input(0)) + bytes_of(t.output(0))};
                  },
              .plan =
                  [](const Machine&, const NodeTensors& t) {
                    return std::string(to_string(t.weight(1).format())) + ", " + str(t.output(0).shape[0]) + " x " +
                           str(t.output(0).shape[1]) + " x " + str(t.input(0).shape[1]);
                  }}));
  });
}

Value Graph::lookup_rows(std::string name, Value weight, Value rows) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "lookup_rows");
    check.weight("weight", weight, {"n", "k"});
    check.tensor("rows", rows, {DType::i64}, {"count"});
    if (!check.ok()) return {};
    return only(node(
        {.name = name,
         .op = "lookup_rows",
         .inputs = {weight, rows},
         .outputs = {{name, DType::f32, {check["count"], check["k"]}}},
         .run = [](Context& context,
                   const NodeTensors& t) { return opst::lookup_rows(context, t.weight(0), t.input(1), t.output(0)); },
         .cost =
             [](const NodeTensors& t) {
               const PackedWeight& w = t.weight(0);
               return NodeCost{.weight_bytes = w.n() > 0 ? t.input(1).shape[0] * (w.size_bytes() / w.n()) : 0,
                               .tensor_bytes = bytes_of(t.input(1)) + bytes_of(t.output(0))};
             }}));
  });
}

Value Graph::rms_norm(std::string name, Value x, Value weight, const RmsNormOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rms_norm");
    check.last_dim("x", x, kFloats, "features");
    check.tensor("weight", weight, {DType::f32, dtype(x)}, {"features"});
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "rms_norm",
                      .inputs = {x, weight},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run =
                          [options](Context& context, const NodeTensors& t) {
                            return opst::rms_norm(context, t.input(0), t.input(1), t.output(0), options);
                          },
                      .cost =
                          [](const NodeTensors& t) {
                            return NodeCost{.weight_bytes = bytes_of(t.input(1)),
                                            .tensor_bytes = bytes_of(t.input(0)) + bytes_of(t.output(0))};
                          }}));
  });
}

Graph::RopeTable Graph::rope_table(std::string name, Value positions, int64_t half, const RopeTableOptions& options) {
  return building(*impl_, [&]() -> RopeTable {
    NodeCheck check(*impl_, name, "rope_table");
    check.tensor("positions", positions, {DType::i64}, {"tokens"});
    if (!check.ok()) return {};
    const Shape table = {check["tokens"], half};
    const std::vector<Value> outputs =
        node({.name = name,
              .op = "rope_table",
              .inputs = {positions},
              .outputs = {{name + ".cos", DType::f32, table}, {name + ".sin", DType::f32, table}},
              .run = [options](Context& context, const NodeTensors& t) {
                return opst::rope_table(context, t.input(0), t.output(0), t.output(1), options);
              }});
    if (outputs.empty()) return {};
    return {outputs[0], outputs[1]};
  });
}

Value Graph::rope(std::string name, Value x, const RopeTable& table, const RopeOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rope");
    check.tensor("x", x, kFloats, {"tokens", "num_heads", "head_dim"});
    check.tensor("cos", table.cos, {DType::f32}, {"tokens", "half"});
    check.tensor("sin", table.sin, {DType::f32}, {"tokens", "half"});
    if (check.ok() && 2 * check["half"].bound() > check["head_dim"].bound()) {
      check.fail("cos dim 1 (half) is " + str(check["half"].bound()) +
                 ", more than half of head_dim = " + str(check["head_dim"].bound()));
    }
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "rope",
                      .inputs = {x, table.cos, table.sin},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run = [options](Context& context, const NodeTensors& t) {
                        return opst::rope(context, t.input(0), t.input(1), t.input(2), t.output(0), options);
                      }}));
  });
}

Value Graph::swiglu(std::string name, Value gate, Value up) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "swiglu");
    check.same("up", up, "gate", gate);
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "swiglu",
                      .inputs = {gate, up},
                      .outputs = {{name, dtype(gate), shape(gate)}},
                      .in_place = {{0, 0}, {1, 0}},
                      .run = [](Context& context, const NodeTensors& t) {
                        return opst::swiglu(context, t.input(0), t.input(1), t.output(0));
                      }}));
  });
}

Value Graph::add(std::string name, Value a, Value b) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "add");
    check.same("b", b, "a", a);
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "add",
                      .inputs = {a, b},
                      .outputs = {{name, dtype(a), shape(a)}},
                      .in_place = {{0, 0}, {1, 0}},
                      .run = [](Context& context, const NodeTensors& t) {
                        return opst::add(context, t.input(0), t.input(1), t.output(0));
                      }}));
  });
}

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

namespace {

// What both forms of attention demand of their heads.
void check_heads(NodeCheck& check) {
  if (!check.ok()) return;
  const int64_t heads = check["num_heads"].bound(), kv_heads = check["num_kv_heads"].bound();
  if (kv_heads < 1 || heads % kv_heads != 0) {
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
                             const AttentionOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "paged_attention");
    check.tensor("query", query, kFloats, {"tokens", "num_heads", "head_dim"});
    check.pages(pages.layout, key_cache, value_cache);
    check.tensor("block_table", pages.block_table, {DType::i64, DType::i32}, {"batch", "max_blocks"});
    check.tensor("kv_lengths", pages.kv_lengths, {DType::i64, DType::i32}, {"batch"});
    check_heads(check);
    if (check.ok() && check["batch"] != Dim(1)) {
      check.fail("block_table dim 0 (batch) is " + impl_->text(check["batch"]) +
                 ", but a node attends with one sequence");
    }
    if (!check.ok()) return {};
    const auto sizes = [kv_len = pages.kv_len, layout = pages.layout, kv_heads = check["num_kv_heads"],
                        value_head_dim = check["value_head_dim"],
                        block_size = check["block_size"]](const NodeTensors& t) {
      const Tensor& q = t.input(0);
      return AttentionSizes{
          q.shape[0],       q.shape[1], q.shape[2], t.size(kv_len),    t.size(kv_heads), t.size(value_head_dim),
          t.input(1).dtype, true,       layout,     t.size(block_size)};
    };
    return only(node({.name = name,
                      .op = "paged_attention",
                      .inputs = {query, key_cache, value_cache, pages.block_table, pages.kv_lengths},
                      .outputs = {{name, dtype(query), {check["tokens"], check["num_heads"], check["value_head_dim"]}}},
                      .run =
                          [options, layout = pages.layout](Context& context, const NodeTensors& t) {
                            return flash_attention_forward(context,
                                                           {.query = as_batch(t.input(0)),
                                                            .key = t.input(1),
                                                            .value = t.input(2),
                                                            .block_table = t.input(3),
                                                            .kv_lengths = t.input(4),
                                                            .page_layout = layout},
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
