// make_block_mask, block_mask_of: rows of runs of key blocks, counted, then written.
#include "opst/block_patterns.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "attention/visibility.h"
#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"

namespace opst {

namespace attention {
namespace {

// What a row shows, in any order: intervals of key blocks.
using Runs = std::vector<KeyInterval>;

void merge(Runs& runs) {
  std::sort(runs.begin(), runs.end(), [](const KeyInterval& a, const KeyInterval& b) { return a.begin < b.begin; });
  size_t n = 0;
  for (const KeyInterval& run : runs) {
    if (n > 0 && run.begin <= runs[n - 1].end) {
      runs[n - 1].end = std::max(runs[n - 1].end, run.end);
    } else {
      runs[n++] = run;
    }
  }
  runs.resize(n);
}

// find_row(b, h, i, runs) adds the runs of query block i.
template <class FindRow>
Result<BlockMaskBuffer> write_mask(int64_t batch, int64_t heads, int64_t query_blocks, int64_t block_q,
                                   int64_t block_kv, const FindRow& find_row) {
  const Size num_offsets = Size(batch) * heads * (Size(query_blocks) + 1);
  // The offsets first: sizes beyond any memory end here, not in a loop.
  Result<Buffer> offsets = Buffer::allocate((num_offsets * 8).value());
  if (!offsets.ok()) return offsets.status();
  auto* ends = static_cast<int64_t*>(offsets.value().data());
  Runs runs;
  Size entries = 0;
  const auto for_rows = [&](const auto& visit) {
    for (int64_t b = 0, at = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h, ++at) {
        for (int64_t i = 0; i < query_blocks; ++i) {
          runs.clear();
          find_row(b, h, i, runs);
          merge(runs);
          visit(at * (query_blocks + 1) + i);
        }
      }
    }
  };
  for_rows([&](int64_t row) {
    for (const KeyInterval& run : runs) entries += run.end - run.begin;
    ends[row + 1] = entries.value();
  });
  // A head begins where the one before has ended.
  for (int64_t at = 0; at < batch * heads; ++at) {
    const int64_t first = at * (query_blocks + 1);
    ends[first] = first == 0 ? 0 : ends[first - 1];
  }
  const int64_t offsets_bytes = num_offsets.value() * 8;
  Result<Buffer> memory = Buffer::allocate((Size(offsets_bytes) + entries * 8).value());
  if (!memory.ok()) return memory.status();
  auto* out = static_cast<int64_t*>(memory.value().data());
  std::copy_n(ends, num_offsets.value(), out);
  int64_t* columns = out + num_offsets.value();
  for_rows([&](int64_t row) {
    int64_t* to = columns + out[row];
    for (const KeyInterval& run : runs) {
      for (int64_t block = run.begin; block < run.end; ++block) *to++ = block;
    }
  });
  BlockMaskBuffer result = {std::move(memory.value()), {}};
  result.mask.row_offsets = ConstTensor::contiguous(DType::i64, {batch, heads, query_blocks + 1}, out);
  result.mask.columns = ConstTensor::contiguous(DType::i64, {entries.value()}, columns);
  result.mask.block_q = block_q, result.mask.block_kv = block_kv;
  return result;
}

// Number `n` of the sequence that belongs to a seed.
uint64_t random_bits(uint64_t seed, uint64_t n) {
  uint64_t x = seed + (n + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class PatternRows {
 public:
  explicit PatternRows(const BlockPattern& pattern)
      : p_(pattern),
        off_(pattern.alignment == CausalAlignment::bottom_right ? pattern.kv_len - pattern.query_len : 0),
        key_blocks_(ceil_div(pattern.kv_len, pattern.block_kv)),
        window_(pattern.window_left || pattern.window_right),
        some_(window_ || pattern.global > 0 || pattern.stride > 0 || pattern.random > 0) {}

  void find(int64_t head, int64_t block, Runs& runs) const {
    const int64_t first = block * p_.block_q + off_, end = std::min((block + 1) * p_.block_q, p_.query_len) + off_;
    draw(head, block, end);
    if (!p_.documents) return add({first, end}, {0, p_.kv_len}, runs);
    for (int64_t n = 0; n + 1 < distinct(p_.documents, 0); ++n) {
      const KeyInterval document = {index_at(p_.documents, n), index_at(p_.documents, n + 1)};
      const KeyInterval positions = {std::max(first, document.begin), std::min(end, document.end)};
      if (positions.begin < positions.end) add(positions, document, runs);
    }
  }

 private:
  // What positions [at.begin, at.end) see of `keys`.
  void add(KeyInterval at, KeyInterval keys, Runs& runs) const {
    const KeyInterval seen = causal(keys, at.end);
    if (!some_) return add_keys(seen, seen, runs);
    if (window_) add_steps(at, p_.window_left.value_or(0), p_.window_right.value_or(0), p_.dilation, seen, runs);
    if (p_.stride > 0) add_steps(at, all_, all_, p_.stride, seen, runs);
    add_keys({0, p_.global}, seen, runs);
    if (p_.global > 0 && at.begin < p_.global) add_keys(seen, causal(keys, std::min(at.end, p_.global)), runs);
    for (const int64_t block : drawn_) add_keys({block * p_.block_kv, (block + 1) * p_.block_kv}, seen, runs);
  }
  KeyInterval causal(KeyInterval keys, int64_t end) const {
    return {keys.begin, p_.causal ? std::min(keys.end, end) : keys.end};
  }
  // The blocks of keys that are in both.
  void add_keys(KeyInterval keys, KeyInterval seen, Runs& runs) const {
    const int64_t begin = std::max(keys.begin, seen.begin), end = std::min(keys.end, seen.end);
    if (begin < end) runs.push_back({begin / p_.block_kv, (end - 1) / p_.block_kv + 1});
  }
  // Keys from p - left to p + right that are a multiple of `step` apart from p.
  void add_steps(KeyInterval at, int64_t left, int64_t right, int64_t step, KeyInterval seen, Runs& runs) const {
    left -= left % step, right -= right % step;
    if (at.end - at.begin >= step) return add_keys({at.begin - left, at.end + right}, seen, runs);
    // Keys n steps before their positions are neighbours, as these are; under a causal mask n >= 0.
    const auto steps_down = [&](int64_t x) { return x / step - (x % step < 0 ? 1 : 0); };
    const int64_t first = std::max(p_.causal ? 0 : -right / step, steps_down(at.begin - seen.end) + 1);
    const int64_t last = std::min(left / step, steps_down(at.end - 1 - seen.begin));
    for (int64_t n = first; n <= last; ++n) add_keys({at.begin - n * step, at.end - n * step}, seen, runs);
  }
  // Different key blocks, of those that the last position of the block may see: Floyd's algorithm.
  void draw(int64_t head, int64_t block, int64_t end) const {
    drawn_.clear();
    const int64_t limit = p_.causal ? ceil_div(std::clamp<int64_t>(end, 0, p_.kv_len), p_.block_kv) : key_blocks_;
    const auto row = static_cast<uint64_t>(head * ceil_div(p_.query_len, p_.block_q) + block);
    for (int64_t most = std::max<int64_t>(limit - p_.random, 0), n = 0; most < limit && n < p_.random; ++most, ++n) {
      const uint64_t bits = random_bits(random_bits(p_.seed, row), static_cast<uint64_t>(n));
      const auto choices = static_cast<uint64_t>(most + 1);
      const auto x = static_cast<int64_t>((static_cast<unsigned __int128>(bits) * choices) >> 64);
      if (!drawn_.insert(x).second) drawn_.insert(most);
    }
  }

  const BlockPattern& p_;
  const int64_t off_, key_blocks_;
  const int64_t all_ = p_.query_len + p_.kv_len;  // beyond any distance
  const bool window_, some_;
  mutable std::unordered_set<int64_t> drawn_;  // of the row at hand
};

void check_block_sizes(ShapeCheck& check, int64_t block_q, int64_t block_kv) {
  check.require(block_q >= 1 && block_q <= kMaxBytes, "block_q is ", block_q, ", must be 1 to 2^56");
  check.require(block_kv >= 1 && block_kv <= kMaxBytes, "block_kv is ", block_kv, ", must be 1 to 2^56");
}

void check_pattern(ShapeCheck& check, const BlockPattern& p) {
  const auto within = [&](const char* name, int64_t x, int64_t low) {
    check.require(x >= low && x <= kMaxBytes, name, " is ", x, ", must be ", low, " to 2^56");
  };
  within("query_len", p.query_len, 0);
  within("kv_len", p.kv_len, 0);
  check_block_sizes(check, p.block_q, p.block_kv);
  within("heads", p.heads, 1);
  within("window_left", p.window_left.value_or(0), 0);
  within("window_right", p.window_right.value_or(0), 0);
  within("dilation", p.dilation, 1);
  within("global", p.global, 0);
  within("stride", p.stride, 0);
  within("random", p.random, 0);
  check.require(p.alignment <= CausalAlignment::bottom_right, "alignment is ", static_cast<int64_t>(p.alignment),
                ", which is no CausalAlignment");
  if (!p.documents) return;
  check.tensor("documents", p.documents).dtype({DType::i32, DType::i64});
  check.require(p.documents.rank == 1, "documents has rank ", p.documents.rank, ", must be 1");
  int64_t previous = 0;
  for (int64_t n = 0; check.ok() && n < distinct(p.documents, 0); ++n) {
    const int64_t x = index_at(p.documents, n);
    check.require(x >= previous && x <= p.kv_len, "documents[", n, "] is ", x, ", must be ", previous,
                  " to kv_len = ", p.kv_len);
    previous = x;
  }
}

}  // namespace
}  // namespace attention

Result<BlockMaskBuffer> make_block_mask(const BlockPattern& pattern) {
  using namespace attention;
  return guarded([&]() -> Result<BlockMaskBuffer> {
    ShapeCheck check("make_block_mask");
    check_pattern(check, pattern);
    if (!check.ok()) return check.status();
    const PatternRows rows(pattern);
    return write_mask(1, pattern.heads, ceil_div(pattern.query_len, pattern.block_q), pattern.block_q, pattern.block_kv,
                      [&](int64_t, int64_t h, int64_t i, Runs& runs) { rows.find(h, i, runs); });
  });
}

Result<BlockMaskBuffer> block_mask_of(const ConstTensor& mask, int64_t block_q, int64_t block_kv) {
  using namespace attention;
  return guarded([&]() -> Result<BlockMaskBuffer> {
    ShapeCheck check("block_mask_of");
    check.tensor("mask", mask).dtype({DType::boolean});
    check.require(mask.rank >= 2 && mask.rank <= 4, "mask has rank ", mask.rank, ", must be 2 to 4");
    check_block_sizes(check, block_q, block_kv);
    if (!check.ok()) return check.status();
    ConstTensor of = normal_strides(mask);  // [batch, heads, query_len, kv_len]
    while (of.rank < 4) {
      for (int d = of.rank; d > 0; --d) of.shape[d] = of.shape[d - 1], of.strides[d] = of.strides[d - 1];
      of.shape[0] = 1, of.strides[0] = 0, ++of.rank;
    }
    const int64_t query_len = of.shape[2], kv_len = of.shape[3];
    // A mask with strides of 0 may state any size: elements that repeat are looked at once.
    const bool same_rows = of.strides[2] == 0, same_keys = of.strides[3] == 0;
    const auto shows_some = [&](const uint8_t* rows, int64_t count, KeyInterval keys) {
      if (same_rows) count = std::min<int64_t>(count, 1);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          if (rows[i * of.strides[2] + j * of.strides[3]] != 0) return true;
        }
      }
      return false;
    };
    const auto find_row = [&](int64_t b, int64_t h, int64_t i, Runs& runs) {
      const int64_t count = std::min(block_q, query_len - i * block_q);
      const uint8_t* rows =
          static_cast<const uint8_t*>(of.data) + b * of.strides[0] + h * of.strides[1] + i * block_q * of.strides[2];
      if (same_keys) {
        if (shows_some(rows, count, {0, std::min<int64_t>(kv_len, 1)})) runs.push_back({0, ceil_div(kv_len, block_kv)});
        return;
      }
      for (int64_t j = 0; j * block_kv < kv_len; ++j) {
        if (shows_some(rows, count, {j * block_kv, std::min((j + 1) * block_kv, kv_len)})) runs.push_back({j, j + 1});
      }
    };
    return write_mask(of.shape[0], of.shape[1], ceil_div(query_len, block_q), block_q, block_kv, find_row);
  });
}

}  // namespace opst
