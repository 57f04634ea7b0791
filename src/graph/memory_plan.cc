#include "graph/memory_plan.h"

#include <algorithm>
#include <limits>

#include "core/int_math.h"

namespace opst::graph {

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

int64_t peak_live(const std::vector<Lifetime>& lifetimes) {
  struct Event {
    int64_t node, change;
  };
  std::vector<Event> events;
  for (const Lifetime& l : lifetimes) {
    if (is_none(l)) continue;
    events.push_back({l.first, aligned(l.bytes).value()});
    events.push_back({int64_t{l.last} + 1, -aligned(l.bytes).value()});
  }
  // What ends before a node ends first.
  std::sort(events.begin(), events.end(),
            [](const Event& a, const Event& b) { return a.node != b.node ? a.node < b.node : a.change < b.change; });
  // In 128 bits: what was added beyond the limit has to go again.
  __int128 live = 0, peak = 0;
  for (const Event& event : events) peak = std::max(peak, live += event.change);
  return static_cast<int64_t>(std::min<__int128>(peak, kMaxBytes));
}

}  // namespace

MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes) {
  MemoryPlan plan;
  plan.offsets.resize(lifetimes.size(), -1);
  plan.peak_live_bytes = peak_live(lifetimes);
  std::vector<size_t> order;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    if (!is_none(lifetimes[i])) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lifetimes[a].bytes > lifetimes[b].bytes; });
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
    plan.bytes = std::max(plan.bytes, (Size(offset) + bytes).value());
    plan.sum_bytes = (Size(plan.sum_bytes) + bytes).value();
  }
  return plan;
}

}  // namespace opst::graph
