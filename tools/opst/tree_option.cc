#include "tree_option.h"

#include <algorithm>

#include "command.h"
#include "testing/random.h"

namespace opst::tools {

std::shared_ptr<const std::vector<int64_t>> make_tree(AttentionProblem& p) {
  if (p.query_len > 64 || p.query_len > p.kv_len) {
    usage_error("--tree takes a --query-len of at most 64 and of no more than the keys, but it is " +
                std::to_string(p.query_len) + " of " + std::to_string(p.kv_len) + " keys");
  }
  p.has_tree_mask = true;
  auto words = std::make_shared<std::vector<int64_t>>();
  test::Random random(1);
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto first = static_cast<int64_t>(words->size());
    for (int64_t i = 0; i < p.query_len; ++i) {
      const int64_t parent = random.integer(-1, i - 1);  // -1: the context itself
      const int64_t ancestors = parent < 0 ? 0 : (*words)[static_cast<size_t>(first + parent)];
      words->push_back(static_cast<int64_t>(static_cast<uint64_t>(ancestors) | uint64_t{1} << i));
    }
  }
  return words;
}

double visible_pairs_of_tree(const std::vector<int64_t>& words, const AttentionProblem& p) {
  const AttentionOptions& o = p.options;
  const int64_t context = p.kv_len - p.query_len, shift = o.alignment == CausalAlignment::bottom_right ? context : 0;
  const int64_t far = p.kv_len + p.query_len;  // a side that limits nothing
  const int64_t left = std::clamp(o.window_left, -far, far);
  const int64_t right = std::clamp(o.window_right, -far, o.causal ? int64_t{0} : far);
  int64_t pairs = 0;
  for (size_t n = 0; n < words.size(); ++n) {
    const int64_t at = static_cast<int64_t>(n) % p.query_len + shift;
    const int64_t begin = std::max<int64_t>(at - left, 0), end = std::min(at + right + 1, p.kv_len);
    pairs += std::max<int64_t>(std::min(end, context) - begin, 0);
    for (int64_t j = std::max(begin, context); j < end; ++j) {
      pairs += static_cast<uint64_t>(words[n]) >> (j - context) & 1;
    }
  }
  return static_cast<double>(pairs);
}

}  // namespace opst::tools
