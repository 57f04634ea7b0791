// count_visible: pairs that the structure shows, in closed form.
#include <algorithm>

#include "attention/kv_blocks.h"

namespace opst {
namespace {

using Wide = __int128;  // sums of 2^40 lengths of 2^40 cancel, so that no double would do

// Sum over queries i of clamp(i + shift, low, high).
Wide sum_of_clamped(int64_t query_len, int64_t shift, int64_t low, int64_t high) {
  const int64_t first = std::clamp<int64_t>(low - shift, 0, query_len);      // queries before it are at `low`
  const int64_t last = std::clamp<int64_t>(high - shift, first, query_len);  // from it on they are at `high`
  const Wide count = last - first;
  const Wide between = count * (Wide{first} + shift) + count * (count - 1) / 2;
  return Wide{first} * low + between + Wide{query_len - last} * high;
}

}  // namespace

VisibleKeys count_visible(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t prefix) {
  if (query_len <= 0 || kv_len <= 0) return {};
  const attention::Visibility v = attention::Visibility::of(options, query_len, kv_len);
  const int64_t front = std::clamp<int64_t>(prefix, 0, kv_len);
  Wide pairs = Wide{query_len} * front;
  VisibleKeys visible{static_cast<double>(pairs), front};
  // Behind the prefix query i sees keys [i + low, i + high + 1): both ends grow with i.
  if (v.low > v.high) return visible;
  pairs += sum_of_clamped(query_len, v.high + 1, front, kv_len) - sum_of_clamped(query_len, v.low, front, kv_len);
  visible.pairs = static_cast<double>(pairs);
  const int64_t begin = std::clamp<int64_t>(v.low, front, kv_len);
  const int64_t end = std::clamp<int64_t>(query_len + v.high, front, kv_len);
  visible.keys += std::max<int64_t>(end - begin, 0);
  return visible;
}

}  // namespace opst
