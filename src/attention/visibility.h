// What the structure of a sequence, its causal mask, window and prefix, shows of its keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "opst/attention.h"

namespace opst::attention {

struct KeyInterval {
  int64_t begin = 0;
  int64_t end = 0;  // empty where end <= begin
};

// What the structure of one sequence shows: query i sees keys [i + low, i + high], and those below the prefix.
struct Visibility {
  int64_t kv_len = 0;
  int64_t low = -kFar, high = kFar;
  int64_t prefix = 0;

  static Visibility of(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t prefix = 0) {
    const int64_t off = options.alignment == CausalAlignment::bottom_right ? kv_len - query_len : 0;
    // Sides beyond any length do not limit; what is added to them must not overflow.
    const int64_t left = std::clamp(options.window_left, -kFar, kFar);
    int64_t right = std::clamp(options.window_right, -kFar, kFar);
    if (options.causal) right = std::min<int64_t>(right, 0);
    return {kv_len, left == kFar ? -kFar : off - left, right == kFar ? kFar : off + right, prefix};
  }

  // The interval of query i. An interval that touches the prefix holds it; otherwise the prefix is seen besides.
  KeyInterval keys_of_query(int64_t i) const {
    const int64_t begin = std::clamp<int64_t>(i + low, 0, kv_len), end = std::clamp<int64_t>(i + high + 1, 0, kv_len);
    if (prefix == 0) return {begin, end};
    if (begin >= end) return {0, prefix};
    return begin <= prefix ? KeyInterval{0, std::max(end, prefix)} : KeyInterval{begin, end};
  }

  // Whether every query sees every key.
  bool all() const { return low == -kFar && high == kFar; }
  // First key that query i or a later one sees, unless by the prefix.
  int64_t first_key(int64_t i) const { return std::clamp<int64_t>(i + low, 0, kv_len); }
  // Whether some of `query_len` queries may see some of keys [begin, end).
  bool may_see(KeyInterval keys, int64_t query_len) const {
    return query_len > 0 && (keys.begin < prefix || (keys.begin < query_len + high && keys.end > low));
  }
  // The most keys from the first to the last one that `queries` neighbouring queries of a sequence see, of which any
  // has at most kv_len keys and query_len queries.
  static int64_t most_keys(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t queries) {
    const Visibility v = of(options, query_len, kv_len);
    int64_t keys = kv_len;
    if (v.low != -kFar && v.high != kFar) keys = queries + v.high - v.low;
    if (v.high != kFar && options.alignment == CausalAlignment::top_left) keys = std::min(keys, query_len + v.high);
    return std::clamp<int64_t>(keys, 0, kv_len);
  }

  static constexpr int64_t kFar = int64_t{1} << 60;
};

}  // namespace opst::attention
