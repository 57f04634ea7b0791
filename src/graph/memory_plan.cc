// Which values of a graph share memory, and where they lie in its workspace.
#include <limits>

#include "graph/graph_impl.h"

namespace opst {

namespace {

Size aligned(int64_t bytes) { return round_up(bytes, kAlignment); }

bool is_none(const Lifetime& l) { return l.bytes < 0 || l.first < 0 || l.last < l.first; }

struct Range {
  int64_t begin = 0, end = 0;
};

// The begin of the smallest gap between `taken` that holds `bytes`; behind all of them if there is none.
int64_t best_gap(std::vector<Range>& taken, int64_t bytes) {
  std::sort(taken.begin(), taken.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  int64_t best = -1, smallest = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  for (const Range& range : taken) {
    const int64_t gap = range.begin - end;
    if (gap >= bytes && gap < smallest) best = end, smallest = gap;
    end = std::max(end, range.end);
  }
  return best >= 0 ? best : end;
}

// Most bytes alive at one node, which is one where some lifetime begins.
int64_t peak_live(const std::vector<Lifetime>& lifetimes) {
  int64_t peak = 0;
  for (const Lifetime& at : lifetimes) {
    Size live = 0;
    for (const Lifetime& l : lifetimes) {
      if (!is_none(l) && l.first <= at.first && at.first <= l.last) live += aligned(l.bytes);
    }
    peak = std::max(peak, live.value());
  }
  return peak;
}

}  // namespace

MemoryPlan graph::plan_memory(const std::vector<Lifetime>& lifetimes) {
  MemoryPlan plan;
  plan.offsets.resize(lifetimes.size(), -1);
  plan.memory.peak_live_bytes = peak_live(lifetimes);
  std::vector<size_t> order;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    if (!is_none(lifetimes[i])) order.push_back(i);
  }
  std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) { return lifetimes[i].bytes; });
  std::vector<Range> taken;
  for (size_t i = 0; i < order.size(); ++i) {
    const Lifetime& lifetime = lifetimes[order[i]];
    const Size bytes = aligned(lifetime.bytes);
    taken.clear();
    for (size_t j = 0; j < i; ++j) {
      const Lifetime& other = lifetimes[order[j]];
      if (other.first <= lifetime.last && lifetime.first <= other.last) {
        taken.push_back({plan.offsets[order[j]], (Size(plan.offsets[order[j]]) + aligned(other.bytes)).value()});
      }
    }
    const int64_t offset = best_gap(taken, bytes.value());
    plan.offsets[order[i]] = offset;
    plan.memory.workspace_bytes = std::max(plan.memory.workspace_bytes, (Size(offset) + bytes).value());
    plan.memory.sum_bytes = (Size(plan.memory.sum_bytes) + bytes).value();
  }
  return plan;
}

// Lifetimes of what nodes make, merged where a node may write onto its input, and their places.
Status GraphImpl::lay_out() {
  const size_t count = values.size();
  std::vector<int> first(count, -1), last(count, -1);  // node that makes the value; that uses its memory last
  std::vector<size_t> home(count);                     // value whose place in the workspace this value takes
  for (size_t i = 0; i < count; ++i) home[i] = values[i].base < i ? home[values[i].base] : i;
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (const int output : outputs_of(n)) {
      first[static_cast<size_t>(output)] = last[static_cast<size_t>(output)] = static_cast<int>(n);
    }
    for (const Value input : nodes[n].inputs) last[home[index(input)]] = static_cast<int>(n);
  }
  const auto home_of = [&](size_t value) {
    while (home[value] != value) value = home[value];
    return value;
  };
  const auto is_internal = [&](size_t value) { return values[value].kind == Kind::intermediate; };
  for (size_t n = 0; n < nodes.size(); ++n) {
    const std::vector<Value>& inputs = nodes[n].inputs;
    for (const auto& [input, output] : nodes[n].in_place) {
      const size_t from = index(inputs[static_cast<size_t>(input)]);
      const auto to = static_cast<size_t>(outputs_of(n)[static_cast<size_t>(output)]);
      const size_t place = home_of(from);
      const ValueData &a = values[from], &b = values[to];
      if (a.of_columns || a.dtype != b.dtype || a.shape != b.shape) continue;
      if (!is_internal(to) || !is_internal(place) || home[to] != to || last[place] != static_cast<int>(n)) continue;
      // Another input that is a view of the same memory would be overwritten while it is read.
      if (std::ranges::count(inputs, place, [&](Value v) { return home_of(index(v)); }) != 1) continue;
      // Another result of the node may have it already.
      if (std::ranges::count(outputs_of(n), place, home_of) != 0) continue;
      home[to] = place;
      last[place] = last[to];
    }
  }

  std::vector<Lifetime> lifetimes(count, {.bytes = -1});  // none, but of the values that are homes
  for (size_t i = 0; i < count; ++i) {
    const ValueData& value = values[i];
    if (is_internal(i) && home[i] == i) lifetimes[i] = {most_bytes(value.dtype, value.shape), first[i], last[i]};
  }
  const MemoryPlan plan = plan_memory(lifetimes);
  if (workspace.size_bytes() != plan.memory.workspace_bytes) {
    // Not both at once: the one that is there may fill half of the memory, and nobody can use it any more.
    for (ValueData& value : values) value.offset = -1;
    workspace = Buffer();
    memory = {};
    refresh_all();
    Result<Buffer> buffer = Buffer::allocate(plan.memory.workspace_bytes);
    if (!buffer.ok()) return buffer.status();
    workspace = std::move(buffer.value());
  }
  memory = plan.memory;
  for (size_t i = 0; i < count; ++i) {
    if (is_internal(i)) values[i].offset = plan.offsets[home_of(i)];
  }
  refresh_all();
  return {};
}

}  // namespace opst
