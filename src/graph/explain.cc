// What a graph says about itself: nodes, costs, memory.
#include <cstdio>

#include "graph/graph_impl.h"

namespace opst {

using graph::bytes_of;
using graph::str;
using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

namespace {

NodeCost cost_of(const GraphImpl& graph, int index) {
  const GraphImpl::Node& node = graph.nodes[static_cast<size_t>(index)];
  const NodeTensors tensors = graph.tensors_of(index);
  if (node.spec.cost) return node.spec.cost(tensors);
  return graph::count_bytes(tensors, static_cast<int>(node.spec.inputs.size()), static_cast<int>(node.outputs.size()),
                            nullptr);
}

// What `body` returns, or what a function of the node throws in it.
template <class Body>
auto explaining(const GraphImpl& graph, int node, Body&& body) noexcept -> Result<decltype(body())> {
  try {
    return body();
  } catch (...) {
    return graph.thrown_by(static_cast<size_t>(node));
  }
}

std::string padded(std::string s, size_t width, bool right = false) {
  if (s.size() < width) s.insert(right ? 0 : s.size(), width - s.size(), ' ');
  return s;
}

std::string row(const NodeInfo& info) {
  std::string results;
  for (const std::string& output : info.outputs) results += (results.empty() ? "" : ", ") + output;
  const std::string place = info.offsets.empty() ? "" : info.offsets[0] < 0 ? "external" : str(info.offsets[0]);
  char flops[32];
  std::snprintf(flops, sizeof(flops), "%.2f", info.cost.flops / 1e6);
  return padded(info.name, 24) + padded(info.op, 26) + padded(results, 44) + padded(place, 10, true) +
         padded(info.cost.flops > 0 ? flops : "", 10, true) +
         padded(info.cost.weight_bytes > 0 ? str(info.cost.weight_bytes) : "", 11, true) +
         padded(info.cost.cache_bytes > 0 ? str(info.cost.cache_bytes) : "", 11, true) + "  " + info.plan + "\n";
}

}  // namespace

NodeCost graph::count_bytes(const NodeTensors& t, int num_inputs, int num_outputs, const Counted* counted) {
  NodeCost cost;
  for (int i = 0; i < num_inputs; ++i) {
    const Counted as = counted != nullptr ? counted[i] : Counted::tensor;
    if (as == Counted::tensor) cost += {.tensor_bytes = bytes_of(t.input(i))};
    if (as == Counted::weight) cost += {.weight_bytes = bytes_of(t.input(i))};
    if (as == Counted::packed) cost += {.weight_bytes = t.weight(i).size_bytes()};
  }
  for (int i = 0; i < num_outputs; ++i) cost += {.tensor_bytes = bytes_of(t.output(i))};
  return cost;
}

Result<NodeInfo> Graph::describe(int node) const {
  if (node < 0 || node >= num_nodes()) {
    return guarded([&] { return impl_->error("node " + str(node) + " of " + str(num_nodes()) + " is asked for"); });
  }
  return explaining(*impl_, node, [&] {
    const GraphImpl::Node& data = impl_->nodes[static_cast<size_t>(node)];
    NodeInfo info;
    info.name = data.spec.name;
    info.op = data.spec.op;
    for (const Value input : data.spec.inputs) info.inputs.push_back(impl_->text(input));
    for (const int output : data.outputs) {
      info.outputs.push_back(impl_->text(output));
      const ValueData& value = impl_->values[static_cast<size_t>(output)];
      info.offsets.push_back(value.kind == Kind::intermediate ? value.offset : -1);
    }
    if (data.spec.plan) info.plan = data.spec.plan(impl_->machine, impl_->tensors_of(node));
    info.cost = cost_of(*impl_, node);
    return info;
  });
}

Result<NodeCost> Graph::cost() const {
  NodeCost cost;
  for (int i = 0; i < num_nodes(); ++i) {
    const Result<NodeCost> node = explaining(*impl_, i, [&] { return cost_of(*impl_, i); });
    if (!node.ok()) return node;
    cost += node.value();
  }
  return cost;
}

GraphMemory Graph::memory() const { return impl_->memory; }

std::string to_string(const Graph& graph) {
  try {
    std::string table = padded("node", 24) + padded("operator", 26) + padded("result", 44) + padded("at", 10, true) +
                        padded("MFLOP", 10, true) + padded("weights", 11, true) + padded("cache", 11, true) +
                        "  plan\n";
    for (int i = 0; i < graph.num_nodes(); ++i) {
      const Result<NodeInfo> info = graph.describe(i);
      if (!info.ok()) return info.status().message();
      table += row(info.value());
    }
    const GraphMemory memory = graph.memory();
    return table + "workspace " + str(memory.workspace_bytes) + " bytes (without sharing " + str(memory.sum_bytes) +
           ", needed at once " + str(memory.peak_live_bytes) + ")\n";
  } catch (...) {
    return "out of memory";
  }
}

}  // namespace opst
