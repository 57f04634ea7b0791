// A node while it is made: what the files of nodes share. rms_norm in nodes.cc is a short example.
//
// Each input is checked as the operators check theirs, by ShapeCheck, with named sizes among its sizes. The first
// contradiction becomes the graph's: graph layers: gate (matmul): weight 'w' dim 1 (k) is 31, but x 'x' set k = 32.
#pragma once

#include <array>
#include <deque>

#include "core/shape_check.h"
#include "graph/graph_impl.h"

namespace opst::graph {

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

class NewNode : public NodeSpec, private ShapeCheck::SizeNames {
  const std::string where_;  // "gate (matmul)"
  GraphImpl& graph_;
  std::deque<std::string> names_;
  std::vector<Counted> counted_;  // of each input
  int rank_ = 0;                  // of rows()

  // The role with the name of the tensor in the graph, weight 'blk.0.gate', which the check may point to.
  const char* named(const char* role, Value value);

 public:
  NewNode(GraphImpl& graph, const std::string& node, const char* operator_name);

  // The next input, whose dtype and dims the caller asks of what this gives.
  ShapeCheck::TensorCheck input(const char* role, Value value, Counted counted = Counted::tensor);
  // An input that may be absent: its index in NodeTensors, -1 where it is.
  int8_t optional(const char* role, Value value, std::initializer_list<DType> types,
                  std::initializer_list<const char*> dims, Counted counted = Counted::tensor) {
    if (!value.exists()) return -1;
    input(role, value, counted).dtype(types).dims(dims);
    return static_cast<int8_t>(inputs.size() - 1);
  }
  // Of any rank from 1, which is that of the node's first such input: dim_0, dim_1, .., `last`.
  ShapeCheck::TensorCheck rows(const char* role, Value value, const char* last = "features");
  // The tensors of a cache, `written` or only read: keys, values, and the scales and offsets that are there. Binds the
  // names of PageSizes, and of groups where there are scales.
  struct ScaleInputs {  // -1: absent
    int8_t key = -1, value = -1, key_offsets = -1, value_offsets = -1;

    PageScales of(const NodeTensors& t) const {
      return {t.input(key), t.input(value), t.input(key_offsets), t.input(value_offsets)};
    }
  };
  ScaleInputs pages(PageLayout layout, Value key_cache, Value value_cache, const ScaleValues& scales, bool written);

  // The next result, of the node's name and `suffix`.
  ShapeCheck::TensorCheck result(DType dtype, const Shape& shape, const char* suffix = "");
  // A result like the input `x`, which may be written onto the inputs of these indices.
  void result_as(Value x, std::initializer_list<int> onto) {
    if (!check.ok()) return;
    result(graph_.at(x).dtype, graph_.at(x).shape);
    for (const int input : onto) in_place.push_back({input, 0});
  }

  // What cos holds are pairs of elements of a head.
  void half_of_head_dim() {
    const int64_t half = dim("half").bound(), head_dim = dim("head_dim").bound();
    check.require(half <= head_dim / 2, "cos dim 1 (half) is ", half, ", more than half of head_dim = ", head_dim);
  }

  // A size that the check has bound, or calculated with.
  Dim dim(const char* bound) const { return dim(check[bound]); }
  Dim dim(int64_t size) const { return graph_.dim_of(size); }
  std::string text(int64_t size) const override { return graph_.text(dim(size)); }

  // The node runs call(context, inputs.., results..), of which it has so many. What `call` holds should fit into a
  // std::function without memory of its own.
  template <int kInputs, int kResults = 1, class Call>
  void calls(Call call) {
    run = [call](Context& context, const NodeTensors& t) {
      return [&]<int... i, int... r>(std::integer_sequence<int, i...>, std::integer_sequence<int, r...>) {
        return call(context, t.input(i)..., t.output(r)...);
      }
      (std::make_integer_sequence<int, kInputs>(), std::make_integer_sequence<int, kResults>());
    };
  }

  // Adds the node to the graph, unless the check has failed.
  std::array<Value, 2> add() &&;

  ShapeCheck check;
  // What the node costs beside the bytes of its tensors and weights.
  std::function<NodeCost(const NodeTensors&)> also_costs;
};

// Adds the node that `describe` makes; the first of its results. No operator has more than two, others are memory that a
// node needs while it runs.
template <class Describe>
std::array<Value, 2> made(GraphImpl& graph, const std::string& name, const char* op, Describe&& describe) {
  return building(graph, [&] {
    NewNode node(graph, name, op);
    describe(node);
    return std::move(node).add();
  });
}

}  // namespace opst::graph
