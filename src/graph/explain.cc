// What a graph says about itself: nodes, costs, memory.
#include <cstdio>

#include "graph/graph_impl.h"

namespace opst {

namespace {

// Bytes of all elements; of a tensor of a graph, whose shape has been checked.
int64_t bytes_of(const Tensor& tensor) { return tensor.num_elements() * size_bytes(tensor.dtype); }

// What `body` returns, or what a function of the node throws in it.
template <class Body>
auto explaining(const GraphImpl& graph, size_t node, Body&& body) noexcept -> Result<decltype(body())> try {
  return body();
} catch (...) {
  return graph.thrown_by(node);
}

// A line of the table.
std::string line(const std::string (&cells)[8]) {
  constexpr size_t kWidths[] = {24, 26, 44, 10, 10, 11, 11, 0};
  std::string joined;
  for (size_t i = 0; i < 8; ++i) {
    const std::string padding(std::max(kWidths[i], cells[i].size()) - cells[i].size(), ' ');
    joined += i < 3 ? cells[i] + padding : padding + cells[i];
  }
  return joined + "\n";
}

std::string row(const NodeInfo& info) {
  const std::string results = joined(info.outputs.size(), [&](size_t i) { return info.outputs[i]; });
  const auto bytes = [](int64_t count) { return count > 0 ? std::to_string(count) : ""; };
  char flops[32];
  std::snprintf(flops, sizeof(flops), "%.2f", info.cost.flops / 1e6);
  return line({info.name, info.op, results,
               info.offsets.empty()  ? ""
               : info.offsets[0] < 0 ? "external"
                                     : std::to_string(info.offsets[0]),
               info.cost.flops > 0 ? flops : "", bytes(info.cost.weight_bytes), bytes(info.cost.cache_bytes),
               "  " + info.plan});
}

}  // namespace

NodeCost GraphImpl::count_bytes(const NodeTensors& t, const Counted* counted) {
  NodeCost cost;
  for (int i = 0; i < t.num_inputs_; ++i) {
    const Counted as = counted != nullptr ? counted[i] : Counted::tensor;
    if (as == Counted::tensor) cost += {.tensor_bytes = bytes_of(t.input(i))};
    if (as == Counted::weight) cost += {.weight_bytes = bytes_of(t.input(i))};
    if (as == Counted::packed) cost += {.weight_bytes = t.weight(i).size_bytes()};
  }
  for (int i = 0; i < t.num_outputs_; ++i) cost += {.tensor_bytes = bytes_of(t.output(i))};
  return cost;
}

Result<NodeInfo> Graph::describe(int node) const {
  if (node < 0 || node >= num_nodes()) {
    return guarded([&] { return impl_->error("node ", node, " of ", num_nodes(), " is asked for"); });
  }
  const auto at = static_cast<size_t>(node);
  return explaining(*impl_, at, [&] {
    const NodeSpec& spec = impl_->nodes[at];
    NodeInfo info;
    info.name = spec.name;
    info.op = spec.op;
    for (const Value input : spec.inputs) info.inputs.push_back(impl_->text(input));
    for (const int output : impl_->outputs_of(at)) {
      info.outputs.push_back(impl_->text(static_cast<size_t>(output)));
      const ValueData& value = impl_->values[static_cast<size_t>(output)];
      info.offsets.push_back(value.kind == Kind::intermediate ? value.offset : -1);
    }
    if (spec.plan) info.plan = spec.plan(impl_->machine, impl_->tensors_of(at));
    info.cost = spec.cost(impl_->tensors_of(at));
    return info;
  });
}

Result<NodeCost> Graph::cost() const {
  NodeCost cost;
  for (size_t i = 0; i < impl_->nodes.size(); ++i) {
    const Result<NodeCost> node = explaining(*impl_, i, [&] { return impl_->nodes[i].cost(impl_->tensors_of(i)); });
    if (!node.ok()) return node;
    cost += node.value();
  }
  return cost;
}

GraphMemory Graph::memory() const { return impl_->memory; }

std::string to_string(const Graph& graph) try {
  std::string table = line({"node", "operator", "result", "at", "MFLOP", "weights", "cache", "  plan"});
  for (int i = 0; i < graph.num_nodes(); ++i) {
    const Result<NodeInfo> info = graph.describe(i);
    if (!info.ok()) return info.status().message();
    table += row(info.value());
  }
  const GraphMemory memory = graph.memory();
  return text(table, "workspace ", memory.workspace_bytes, " bytes (without sharing ", memory.sum_bytes,
              ", needed at once ", memory.peak_live_bytes, ")\n");
} catch (...) {
  return "out of memory";
}

}  // namespace opst
