// Which values of a graph share memory, and where they lie in its workspace.
#include <algorithm>

#include "graph/graph_impl.h"

namespace opst {

using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

// Lifetimes of what nodes make, merged where a node may write onto its input, and their places.
Status GraphImpl::lay_out() {
  const size_t count = values.size();
  std::vector<int> last(count, -1);  // node that reads the memory last, or writes it
  std::vector<int> home(count);      // value whose place in the workspace this value takes
  for (size_t i = 0; i < count; ++i) home[i] = storage(static_cast<int>(i));
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (const int output : nodes[n].outputs) last[static_cast<size_t>(output)] = static_cast<int>(n);
    for (const Value input : nodes[n].spec.inputs) {
      last[static_cast<size_t>(home[static_cast<size_t>(index(input))])] = static_cast<int>(n);
    }
  }
  const auto internal = [&](int value) { return values[static_cast<size_t>(value)].kind == Kind::intermediate; };
  const auto home_of = [&](int value) {
    value = storage(value);
    while (home[static_cast<size_t>(value)] != value) value = home[static_cast<size_t>(value)];
    return value;
  };
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = nodes[n];
    for (const auto& [input, output] : node.spec.in_place) {
      const int from = index(node.spec.inputs[static_cast<size_t>(input)]);
      const int to = node.outputs[static_cast<size_t>(output)];
      const int place = home_of(from);
      const ValueData& a = values[static_cast<size_t>(from)];
      const ValueData& b = values[static_cast<size_t>(to)];
      // Another input that is a view of the same memory would be overwritten while it is read.
      const auto same_place = [&](Value v) { return internal(storage(index(v))) && home_of(index(v)) == place; };
      const auto readers = std::count_if(node.spec.inputs.begin(), node.spec.inputs.end(), same_place);
      if (a.of_columns || !internal(to) || !internal(storage(from)) || home[static_cast<size_t>(to)] != to ||
          readers != 1)
        continue;
      // Another result of the node may have it already.
      const bool taken = std::any_of(node.outputs.begin(), node.outputs.end(),
                                     [&](int other) { return other != to && home_of(other) == place; });
      if (taken || last[static_cast<size_t>(place)] != static_cast<int>(n) || a.dtype != b.dtype || a.shape != b.shape)
        continue;
      home[static_cast<size_t>(to)] = place;
      last[static_cast<size_t>(place)] = last[static_cast<size_t>(to)];
    }
  }

  std::vector<graph::Lifetime> lifetimes;
  std::vector<int> place_of(count, -1);
  for (size_t i = 0; i < count; ++i) {
    if (values[i].kind != Kind::intermediate || home[i] != static_cast<int>(i)) continue;
    place_of[i] = static_cast<int>(lifetimes.size());
    lifetimes.push_back({most_bytes(values[i].dtype, values[i].shape), values[i].producer, last[i]});
  }
  const graph::MemoryPlan plan = graph::plan_memory(lifetimes);
  if (workspace.size_bytes() != plan.bytes) {
    // Not both at once: the one that is there may fill half of the memory, and nobody can use it any more.
    for (ValueData& value : values) value.offset = -1;
    workspace = Buffer();
    memory = {};
    refresh_all();
    Result<Buffer> buffer = Buffer::allocate(plan.bytes);
    if (!buffer.ok()) return buffer.status();
    workspace = std::move(buffer.value());
  }
  memory = {plan.bytes, plan.sum_bytes, plan.peak_live_bytes};
  for (size_t i = 0; i < count; ++i) {
    if (values[i].kind != Kind::intermediate) continue;
    values[i].offset = plan.offsets[static_cast<size_t>(place_of[static_cast<size_t>(home_of(static_cast<int>(i)))])];
  }
  refresh_all();
  return {};
}

}  // namespace opst
