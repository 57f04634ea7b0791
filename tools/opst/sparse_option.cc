#include "sparse_option.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <utility>

#include "command.h"
#include "testing/random.h"

namespace opst::tools {

namespace {

constexpr int64_t kMostTokens = int64_t{1} << 30;

// What a pattern lacks until lengths are known.
struct SparseText {
  BlockPattern pattern;
  double density = 0;
  int64_t document = 0;
};

SparseText parse_sparse(const std::string& text) {
  SparseText sparse;
  BlockPattern& p = sparse.pattern;
  int64_t window = -1, seed = 0, block = 0;
  const std::pair<const char*, int64_t*> kNumbers[] = {
      {"block", &block},     {"block_q", &p.block_q}, {"block_kv", &p.block_kv},      {"window", &window},
      {"global", &p.global}, {"stride", &p.stride},   {"dilation", &p.dilation},      {"random", &p.random},
      {"heads", &p.heads},   {"seed", &seed},         {"documents", &sparse.document}};
  for (const std::string& item : list_items(text)) {
    const auto complain = [&](const std::string& what) { usage_error("--sparse: '" + item + "' " + what); };
    const size_t equals = item.find('=');
    if (equals == std::string::npos) complain("is not KEY=NUMBER");
    const std::string key = item.substr(0, equals), value = item.substr(equals + 1);
    const char* end = value.data() + value.size();
    if (key == "density") {
      const auto [rest, error] = std::from_chars(value.data(), end, sparse.density);
      if (error != std::errc() || rest != end || !(sparse.density > 0 && sparse.density <= 1)) {
        complain("is not a number above 0 and up to 1");
      }
      continue;
    }
    const auto* number =
        std::find_if(std::begin(kNumbers), std::end(kNumbers), [&](const auto& n) { return key == n.first; });
    if (number == std::end(kNumbers)) complain("has no known key");
    const auto [rest, error] = std::from_chars(value.data(), end, *number->second);
    if (error != std::errc() || rest != end || *number->second < 0 || *number->second > kMostTokens) {
      complain("is not a whole number from 0 to 2^30");
    }
    if (key == "block") p.block_q = p.block_kv = block;
  }
  if (window >= 0) p.window_left = p.window_right = window;
  p.seed = static_cast<uint64_t>(seed);
  return sparse;
}

// Of a mask that make_block_mask has made.
int64_t offset(const BlockMask& mask, int64_t head, int64_t row) {
  return static_cast<const int64_t*>(mask.row_offsets.data)[head * mask.row_offsets.shape[2] + row];
}
int64_t column(const BlockMask& mask, int64_t entry) { return static_cast<const int64_t*>(mask.columns.data)[entry]; }

}  // namespace

std::shared_ptr<const BlockMaskBuffer> make_sparse(const std::string& text, AttentionProblem& problem) {
  SparseText sparse = parse_sparse(text);
  BlockPattern& p = sparse.pattern;
  p.query_len = problem.query_len, p.kv_len = problem.kv_len;
  p.causal = problem.options.causal, p.alignment = problem.options.alignment;
  if (p.heads != 1 && p.heads != problem.num_heads && p.heads != problem.num_kv_heads) {
    usage_error("--sparse: heads=" + std::to_string(p.heads) + " is not 1, --heads or --kv-heads");
  }
  if (sparse.density > 0 && p.block_kv > 0) {
    const double blocks = std::ceil(static_cast<double>(p.kv_len) / static_cast<double>(p.block_kv));
    p.random = std::max<int64_t>(std::llround(sparse.density * blocks), 1);
  }
  std::vector<int64_t> documents;
  for (int64_t at = 0; sparse.document > 0; at += sparse.document) {
    documents.push_back(std::min(at, p.kv_len));
    if (at >= p.kv_len) break;
  }
  if (!documents.empty()) {
    p.documents = ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(documents.size())}, documents.data());
  }
  auto made = std::make_shared<BlockMaskBuffer>(value_or_fail(make_block_mask(p), 2));
  const BlockMask& mask = made->mask;
  BlockMaskSizes& sizes = problem.block_mask;
  sizes = {mask.block_q, mask.block_kv, 1, p.heads, 0, mask.columns.shape[0]};
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t i = 0; i + 1 < mask.row_offsets.shape[2]; ++i) {
      sizes.row_blocks = std::max(sizes.row_blocks, offset(mask, h, i + 1) - offset(mask, h, i));
    }
  }
  return made;
}

double visible_pairs(const BlockMask& mask, const AttentionProblem& problem) {
  const AttentionOptions& o = problem.options;
  const int64_t heads = mask.row_offsets.shape[1], kv_len = problem.kv_len;
  const int64_t off = o.alignment == CausalAlignment::bottom_right ? kv_len - problem.query_len : 0;
  const int64_t left = std::clamp(o.window_left, -kMostTokens, 2 * kMostTokens);
  const int64_t right = std::clamp(o.window_right, -kMostTokens, o.causal ? 0 : 2 * kMostTokens);
  double pairs = 0;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < problem.query_len; ++i) {
      const int64_t first = std::max<int64_t>(i + off - left, 0), last = std::min(i + off + right + 1, kv_len);
      for (int64_t n = offset(mask, h, i / mask.block_q); n < offset(mask, h, i / mask.block_q + 1); ++n) {
        const int64_t begin = column(mask, n) * mask.block_kv;
        pairs +=
            static_cast<double>(std::max<int64_t>(std::min(begin + mask.block_kv, last) - std::max(begin, first), 0));
      }
    }
  }
  return pairs / static_cast<double>(heads);
}

std::string draw_mask(const BlockMask& mask, const AttentionProblem& problem) {
  constexpr int64_t kMostCharacters = 96;
  const int64_t rows = mask.row_offsets.shape[2] - 1;
  const int64_t columns = (problem.kv_len + mask.block_kv - 1) / mask.block_kv;
  const int64_t share = std::max<int64_t>((std::max(rows, columns) + kMostCharacters - 1) / kMostCharacters, 1);
  std::string picture = std::to_string(rows) + " x " + std::to_string(columns) + " blocks of " +
                        std::to_string(mask.block_q) + " queries and " + std::to_string(mask.block_kv) + " keys";
  if (share > 1) picture += ", " + std::to_string(share) + " x " + std::to_string(share) + " to a character";
  picture += "\n";
  for (int64_t top = 0; top < rows; top += share) {
    std::vector<int64_t> counts(static_cast<size_t>((columns + share - 1) / share));
    const int64_t height = std::min(share, rows - top);
    for (int64_t n = offset(mask, 0, top); n < offset(mask, 0, top + height); ++n) {
      ++counts[static_cast<size_t>(column(mask, n) / share)];
    }
    picture += "  ";
    for (size_t c = 0; c < counts.size(); ++c) {
      const int64_t width = std::min(share, columns - static_cast<int64_t>(c) * share);
      picture += counts[c] == 0 ? '.' : counts[c] == height * width ? '#' : '+';
    }
    picture += "\n";
  }
  return picture;
}

std::vector<int32_t> make_sparse_indices(const std::string& text, AttentionProblem& p) {
  int64_t numbers[] = {0, 1};
  size_t n = 0;
  for (const std::string& item : list_items(text)) {
    const char* end = item.data() + item.size();
    int64_t number = 0;
    const auto [rest, error] = std::from_chars(item.data(), end, number);
    if (error != std::errc() || rest != end || number < 1 || number > kMostTokens || n == std::size(numbers)) {
      usage_error("--sparse-indices: '" + text + "' is not COUNT or COUNT,BLOCK, whole numbers from 1 to 2^30");
    }
    numbers[n++] = number;
  }
  const auto [count, block] = numbers;
  const int64_t blocks = (p.kv_len + block - 1) / block;
  if (count > blocks) {
    usage_error("--sparse-indices: " + std::to_string(count) + " blocks of " + std::to_string(block) +
                " are more than the " + std::to_string(blocks) + " of " + std::to_string(p.kv_len) + " keys");
  }
  p.sparse_indices = {block, count};
  std::vector<int32_t> all(static_cast<size_t>(blocks)), lists;
  std::iota(all.begin(), all.end(), 0);
  test::Random random(1);
  for (int64_t row = 0; row < p.batch * p.query_len * p.num_kv_heads; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(random.integer(i, blocks - 1))]);
    }
    lists.insert(lists.end(), all.begin(), all.begin() + count);
  }
  return lists;
}

double visible_pairs(const std::vector<int32_t>& lists, const AttentionProblem& p) {
  const int64_t block = p.sparse_indices.block_size, per_row = p.num_kv_heads * p.sparse_indices.count;
  const int64_t shift = p.options.alignment == CausalAlignment::bottom_right ? p.kv_len - p.query_len : 0;
  double pairs = 0;
  for (size_t n = 0; n < lists.size(); ++n) {
    // The query is at key `at`.
    const int64_t at = static_cast<int64_t>(n) / per_row % p.query_len + shift, left = p.options.window_left;
    const int64_t right = p.options.causal ? std::min<int64_t>(p.options.window_right, 0) : p.options.window_right;
    const int64_t first = left == kUnbounded ? 0 : at - left, last = right == kUnbounded ? p.kv_len : at + right + 1;
    const int64_t begin = std::max<int64_t>(lists[n] * block, first);
    pairs += static_cast<double>(std::max<int64_t>(std::min({(lists[n] + 1) * block, p.kv_len, last}) - begin, 0));
  }
  return pairs / static_cast<double>(p.num_kv_heads);
}

}  // namespace opst::tools
