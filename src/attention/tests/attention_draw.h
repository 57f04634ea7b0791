// Which call of attention to test: any combination of options and sizes, drawn at random, and how often each was.
// Forward and backward are tested on the same draws; drawn_call.h makes their tensors.
#pragma once

#include <cstdio>
#include <map>
#include <numeric>

#include "attention/tests/attention_problem.h"

namespace opst::test {

enum class Keys : uint8_t { dense, varlen, norm_pages, panel_pages };

struct Draw {
  DType query_dtype = DType::f32, kv_dtype = DType::f32, out_dtype = DType::f32;
  int64_t num_heads = 1, num_kv_heads = 1, head_dim = 1, value_head_dim = 1;
  std::vector<int64_t> query_lens, kv_lens;  // of each sequence
  bool varlen_q = false;
  int64_t rows_behind = 0;  // varlen: of the tensors, after the last sequence
  Keys keys = Keys::dense;
  int64_t block_size = 16;
  bool share_pages = false;  // a block may come several times in the block table
  // Pages: how many leading blocks of a sequence are those of the one before it; empty: none.
  std::vector<int64_t> shared_blocks = {};
  Strides query_strides = Strides::bnsd, kv_strides = Strides::bnsd, out_strides = Strides::bnsd;
  bool prefix = false, mask = false, bias = false, alibi = false, sinks = false, drop_mask = false;
  // Which of [batch, num_heads, query_len, kv_len] the mask (bias) does not repeat, and how many dimensions it has.
  bool mask_dims[4] = {}, bias_dims[4] = {};
  int mask_rank = 4, bias_rank = 4;
  Strides mask_strides = Strides::bnsd, bias_strides = Strides::bnsd;
  DType bias_dtype = DType::f32;
  bool slopes_of_batch = false;
  // Sizes of row_offsets' first dimensions and of blocks; mask_heads 0: no block mask.
  int64_t mask_batch = 1, mask_heads = 0, mask_block_q = 1, mask_block_kv = 1;
  bool non_finite = false;  // one element of key or value
  // Of draw_all alone: blocks of sparse indices (0: there are none) and the entries of a list; columns of a rope
  // apart, in one tensor with the keys or not; values that are the first columns of the keys.
  bool draws_all = false;
  int64_t index_block = 0, index_count = 0, rope_dim = 0;
  bool rope_beside = false, values_of_keys = false;
  // Of draw_all for forward: a tree mask.
  bool for_forward = false, tree = false;
  AttentionOptions options;

  int64_t batch() const { return static_cast<int64_t>(query_lens.size()); }
  int64_t longest_query() const { return *std::max_element(query_lens.begin(), query_lens.end()); }
  int64_t longest_keys() const { return *std::max_element(kv_lens.begin(), kv_lens.end()); }
};

// Every option that a draw may have, by name.
inline std::map<std::string, bool> options_of(const Draw& d) {
  const AttentionOptions& o = d.options;
  const bool window = o.window_left != kUnbounded || o.window_right != kUnbounded;
  std::map<std::string, bool> on = {
      {"causal", o.causal},
      {"top left", o.alignment == CausalAlignment::top_left},
      {"window", window},
      {"prefix", d.prefix},
      {"varlen queries", d.varlen_q},
      {"varlen keys", d.keys == Keys::varlen},
      {"pages", d.keys == Keys::norm_pages || d.keys == Keys::panel_pages},
      {"lengths differ", d.kv_lens != std::vector<int64_t>(d.kv_lens.size(), d.kv_lens[0])},
      {"bool mask", d.mask},
      {"block mask", d.mask_heads > 0},
      {"bias", d.bias},
      {"softcap", o.softcap > 0},
      {"alibi", d.alibi},
      {"sinks", d.sinks},
      {"dropout by seed", !d.drop_mask && o.dropout.keep_prob < 1},
      {"drop_mask", d.drop_mask},
      {"grouped heads", d.num_heads > d.num_kv_heads},
      {"value_head_dim differs", d.head_dim != d.value_head_dim},
      {"strides", d.query_strides != Strides::bnsd || d.kv_strides != Strides::bnsd},
      {"softmax_scale", o.softmax_scale.has_value()},
      {"standard path", o.path == AttentionPath::standard},
      {"half precision", d.query_dtype == DType::bf16 || d.query_dtype == DType::f16},
  };
  if (!d.draws_all) return on;
  on["sparse indices"] = d.index_block > 0;
  on["rope apart"] = d.rope_dim > 0;
  on["values of keys"] = d.values_of_keys;
  if (d.for_forward) on["tree mask"] = d.tree;
  return on;
}

inline std::string to_string(const Draw& d) {
  const AttentionOptions& o = d.options;
  std::string s = std::string("query ") + to_string(d.query_dtype) + " " + to_string(d.query_strides) + ", key " +
                  to_string(d.kv_dtype) + " " + to_string(d.kv_strides) + ", out " + to_string(d.out_dtype) + " " +
                  to_string(d.out_strides);
  const auto number = [&](const char* name, auto x) {
    s.append(", ").append(name).append(" ").append(std::to_string(x));
  };
  const auto numbers = [&](const char* name, const std::vector<int64_t>& list) {
    s.append(", ").append(name);
    for (const int64_t x : list) s.append(" ").append(std::to_string(x));
  };
  number("heads", d.num_heads);
  number("kv heads", d.num_kv_heads);
  number("head_dim", d.head_dim);
  number("value_head_dim", d.value_head_dim);
  numbers("query lengths", d.query_lens);
  numbers("key lengths", d.kv_lens);
  number("rows behind", d.rows_behind);
  number("block_q", o.block_q);
  number("block_kv", o.block_kv);
  s += "\n  options:";
  for (const auto& [name, on] : options_of(d)) {
    if (on) s.append(" [").append(name).append("]");
  }
  number("keys", static_cast<int>(d.keys));
  number("block_size", d.block_size);
  number("share_pages", static_cast<int>(d.share_pages));
  numbers("shared blocks", d.shared_blocks);
  number("shared_prefix", o.shared_prefix);
  number("left", o.window_left);
  number("right", o.window_right);
  number("softcap", o.softcap);
  number("bias_scale", o.bias_scale);
  number("keep_prob", o.dropout.keep_prob);
  number("first_key", o.dropout.first_key);
  number("alibi form", static_cast<int>(o.alibi_form));
  if (o.softmax_scale) number("softmax_scale", *o.softmax_scale);
  for (int i = 0; i < 4; ++i) number("mask", static_cast<int>(d.mask_dims[i]));
  for (int i = 0; i < 4; ++i) number("bias", static_cast<int>(d.bias_dims[i]));
  s.append(", ").append(to_string(d.mask_strides)).append(" ").append(to_string(d.bias_strides));
  s.append(" ").append(to_string(d.bias_dtype));
  number("block mask", d.mask_batch);
  for (const int64_t x : {d.mask_heads, d.mask_block_q, d.mask_block_kv}) number("", x);
  number("indices", d.index_block);
  for (const int64_t x : {d.index_count, d.rope_dim, int64_t{d.rope_beside}}) number("", x);
  number("ranks", d.mask_rank);
  number("", d.bias_rank);
  if (d.non_finite) s += ", one element not finite";
  return s;
}

// Half of the draws have at least three blocks of rows and three tiles of keys.
inline Draw draw(Random& random) {
  struct Types {
    DType query, kv, out;
  };
  constexpr Types kTypes[] = {
      {DType::f32, DType::f32, DType::f32},    {DType::f32, DType::f32, DType::f32},
      {DType::bf16, DType::bf16, DType::bf16}, {DType::f16, DType::f16, DType::f16},
      {DType::f64, DType::f64, DType::f64},    {DType::f32, DType::bf16, DType::f32},
      {DType::bf16, DType::bf16, DType::f32},
  };
  Draw d;
  const Types types = kTypes[random.integer(0, std::size(kTypes) - 1)];
  d.query_dtype = types.query, d.kv_dtype = types.kv, d.out_dtype = types.out;
  d.num_kv_heads = random.pick<int64_t>({1, 1, 2, 3});
  d.num_heads = d.num_kv_heads * random.pick<int64_t>({1, 1, 2, 3, 4});
  const auto dimension = [&] { return random.pick<int64_t>({1, 3, 8, 16, 17, 32, 33, 40, random.integer(1, 64)}); };
  d.head_dim = dimension();
  d.value_head_dim = random.chance(0.5) ? d.head_dim : dimension();
  const bool many_tiles = random.chance(0.6);
  const int64_t batch = random.pick<int64_t>({1, 1, 2, 3});
  d.varlen_q = random.chance(0.4);
  d.keys = random.pick({Keys::dense, Keys::dense, Keys::varlen, Keys::varlen, Keys::norm_pages, Keys::panel_pages});
  if (d.keys == Keys::panel_pages && d.query_dtype == DType::f64) {
    d.keys = Keys::norm_pages;
  }
  if (d.keys == Keys::panel_pages && d.kv_dtype == DType::bf16) d.head_dim += d.head_dim % 2;
  d.block_size = d.keys == Keys::panel_pages ? random.pick<int64_t>({32, 64}) : random.pick<int64_t>({1, 3, 8, 16, 40});
  const bool differ = random.chance(0.6);
  for (int64_t b = 0; b < batch; ++b) {
    const auto length = [&](int64_t longest) {
      if (many_tiles && b == 0) return random.integer(longest / 2, longest);
      return random.chance(0.15) ? random.integer(0, 2) : random.integer(0, longest);
    };
    d.query_lens.push_back(d.varlen_q || b == 0 ? length(many_tiles ? 70 : 40) : d.query_lens[0]);
    d.kv_lens.push_back(differ || b == 0 ? length(many_tiles ? 130 : 60) : d.kv_lens[0]);
  }
  if (d.varlen_q && random.chance(0.3)) d.rows_behind = random.integer(1, 3);
  const auto strides = [&](bool output) {
    if (random.chance(0.5)) return Strides::bnsd;
    if (output) return random.pick({Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted});
    return random.pick({Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted});
  };
  d.query_strides = strides(false), d.kv_strides = strides(false), d.out_strides = strides(true);

  AttentionOptions& o = d.options;
  o.causal = random.chance(0.4);
  o.alignment = random.chance(0.45) ? CausalAlignment::top_left : CausalAlignment::bottom_right;
  if (random.chance(0.4)) {
    const auto side = [&] {
      return random.chance(0.25) ? kUnbounded : random.chance(0.25) ? -random.integer(0, 10) : random.integer(0, 40);
    };
    o.window_left = side(), o.window_right = side();
    if (o.window_left == kUnbounded && o.window_right == kUnbounded) o.window_left = random.integer(0, 30);
  }
  d.prefix = random.chance(0.35);
  const auto broadcast = [&](bool(&dims)[4], int& rank) {
    for (bool& dim : dims) dim = random.chance(0.7);
    rank = random.chance(0.7) ? 4 : static_cast<int>(random.integer(1, 4));
    for (int i = 0; i < 4 - rank; ++i) dims[i] = false;
  };
  d.mask = random.chance(0.35);
  broadcast(d.mask_dims, d.mask_rank);
  d.mask_strides = random.pick({Strides::bnsd, Strides::bnsd, Strides::transposed, Strides::padded, Strides::shifted});
  d.bias = random.chance(0.35);
  broadcast(d.bias_dims, d.bias_rank);
  d.bias_strides = random.pick({Strides::bnsd, Strides::bnsd, Strides::transposed, Strides::padded, Strides::shifted});
  d.bias_dtype = d.query_dtype == DType::f64 || random.chance(0.5) ? d.query_dtype : DType::f32;
  if (random.chance(0.5)) o.bias_scale = random.pick({0.5f, -1.0f, 2.0f});
  if (random.chance(0.35)) o.softcap = random.pick({1.0f, 5.0f, 30.0f});
  d.alibi = random.chance(0.35);
  d.slopes_of_batch = random.chance(0.5);
  o.alibi_form = random.pick({AlibiForm::linear, AlibiForm::square_root});
  if (random.chance(0.4)) o.alibi_query_start = random.integer(-9, 50), o.alibi_key_start = random.integer(-9, 50);
  d.sinks = random.chance(0.35);
  const double dropout = random.uniform(0, 1);
  if (dropout < 0.7) {
    d.drop_mask = dropout < 0.33;
    o.dropout.keep_prob = random.pick({0.9, 0.5, 0.1, 1 - 0x1p-20, 0.75});
    o.dropout.seed = random.bits(), o.dropout.offset = random.bits();
    if (random.chance(0.4)) {
      o.dropout.first_query = random.integer(0, 1000), o.dropout.first_key = random.integer(0, int64_t{1} << 34);
      o.dropout.total_heads = d.num_heads + random.integer(0, 5);
      o.dropout.first_head = random.integer(0, o.dropout.total_heads - d.num_heads);
    }
  }
  if (random.chance(0.35)) o.softmax_scale = random.pick({0.0f, -0.3f, 0.05f, 0.5f});
  if (d.keys != Keys::panel_pages && random.chance(0.45)) o.path = AttentionPath::standard;
  o.block_q = many_tiles ? random.integer(1, 20) : random.chance(0.5) ? 0 : random.integer(1, 64);
  o.block_kv = many_tiles ? random.integer(5, 20) : random.chance(0.5) ? 0 : random.integer(1, 80);
  if (d.keys == Keys::panel_pages) {
    o.page_layout = PageLayout::panel32;
    o.block_kv = o.block_kv == 0 ? 0 : 32;
  }
  if (random.chance(0.35)) {
    d.mask_batch = random.pick({int64_t{1}, batch});
    d.mask_heads = random.pick({int64_t{1}, d.num_kv_heads, d.num_heads});
    const auto block = [&] { return random.pick<int64_t>({1, 4, 7, 16, 32, 200, random.integer(1, 40)}); };
    d.mask_block_q = block(), d.mask_block_kv = block();
  }
  d.share_pages = random.chance(0.6);
  d.non_finite = random.chance(0.12);
  return d;
}

// Leading blocks of all sequences, and the option that tells of them.
inline void share_prefix(Draw& d, Random& random) {
  const int64_t keys = random.integer(0, *std::min_element(d.kv_lens.begin(), d.kv_lens.end()));
  d.shared_blocks.assign(d.kv_lens.size(), ceil_div(keys, d.block_size));
  d.options.shared_prefix = random.chance(0.2) ? 0 : keys;
}

// With lists of keys, ropes, and values that share memory with keys; `forward`: with what backward does not take, too.
inline Draw draw_all(Random& random, bool forward) {
  Draw d = draw(random);
  d.draws_all = true, d.for_forward = forward;
  const bool panels = d.keys == Keys::panel_pages;
  if (forward && random.chance(0.27)) {
    d.tree = true;
    d.mask_heads = 0;
    d.options.path = AttentionPath::automatic;
    if (random.chance(0.5)) {
      for (size_t b = 0; b < d.query_lens.size(); ++b) d.query_lens[b] = std::min(d.query_lens[b], d.kv_lens[b]);
      if (!d.varlen_q) std::fill(d.query_lens.begin(), d.query_lens.end(), d.query_lens[0]);
    }
  } else if (d.mask_heads == 0 && random.chance(0.45)) {
    d.index_block = panels ? random.pick<int64_t>({32, 64}) : random.pick<int64_t>({1, 1, 2, 4, 8, 16, 64});
    const int64_t blocks = ceil_div(d.longest_keys(), d.index_block);
    d.index_count =
        random.pick<int64_t>({0, 1, blocks, blocks + 2, random.integer(0, blocks), random.integer(0, blocks)});
    d.options.path = AttentionPath::automatic;
  } else if (!panels && random.chance(0.2)) {
    d.options.path = AttentionPath::standard;
  }
  if (!panels && random.chance(0.4)) {
    d.rope_dim = random.pick<int64_t>({1, 3, 8, 16});
    d.rope_beside = random.chance(0.5);
  }
  if (forward && (panels || d.keys == Keys::norm_pages)) share_prefix(d, random);
  if (!panels && random.chance(0.4)) {
    d.values_of_keys = true;
    d.value_head_dim = random.chance(0.4) ? d.head_dim : random.integer(1, d.head_dim);
  }
  return d;
}

// Makes a draw one of many heads and few queries, whose heads a task attends in turn where tokens' rows of all heads lie
// side by side, as they do then in dense tensors and norm pages.
inline void share_tasks(Draw& d, Random& random) {
  const int64_t group = random.pick<int64_t>({1, 1, 2, 3}), batch = random.integer(8, 12);
  d.num_kv_heads = random.pick<int64_t>({2, 4, 6, 8});
  d.num_heads = d.num_kv_heads * group;
  d.kv_strides = Strides::bsnd;
  d.mask_heads = d.index_block = d.rope_dim = 0;
  d.rope_beside = false;
  d.query_lens.assign(static_cast<size_t>(batch), 1);
  d.kv_lens.clear();
  for (int64_t& n : d.query_lens) {
    if (d.varlen_q && group < 3) n = random.integer(0, 2);
    d.kv_lens.push_back(random.chance(0.1) ? random.integer(1000, 1200) : random.integer(0, 150));
  }
  d.query_lens[0] = 1;
  d.options.path = AttentionPath::automatic;
  d.options.block_q = 0;
  d.options.dropout.first_head = d.options.dropout.total_heads = 0;
}

// Lists of blocks in any order, in t [batch, query_len, num_kv_heads, count] (varlen: [1, tokens, ...]). Rows that belong
// to no query hold what would be refused.
inline void draw_lists(const Draw& d, const Tensor& t, Random& random) {
  for (int64_t i = 0; i < t.num_elements(); ++i) set(t, i, 123456789);
  int64_t first = 0;  // row of the sequence's first query
  for (size_t b = 0; b < d.query_lens.size(); ++b) {
    const int64_t blocks = ceil_div(d.kv_lens[b], d.index_block);
    for (int64_t i = 0; i < d.query_lens[b] * d.num_kv_heads; ++i) {
      std::vector<int64_t> list(static_cast<size_t>(blocks));
      std::iota(list.begin(), list.end(), 0);
      for (size_t n = list.size(); n > 1; --n) {
        std::swap(list[n - 1], list[static_cast<size_t>(random.integer(0, static_cast<int64_t>(n) - 1))]);
      }
      const int64_t most = std::min(blocks, d.index_count), used = random.chance(0.5) ? most : random.integer(0, most);
      const Tensor row = t.selected(0, d.varlen_q ? 0 : static_cast<int64_t>(b))
                             .selected(0, first + i / d.num_kv_heads)
                             .selected(0, i % d.num_kv_heads);
      for (int64_t n = 0; n < d.index_count; ++n) {
        set(row, n, n < used ? static_cast<double>(list[static_cast<size_t>(n)]) : -1);
      }
    }
    if (d.varlen_q) first += d.query_lens[b];
  }
}

// How often each option was drawn.
struct DrawCounts {
  std::map<std::string, int> of;
  int draws = 0, many_tiles = 0;

  void add(const Draw& d) {
    ++draws;
    for (const auto& [name, on] : options_of(d)) of[name] += on ? 1 : 0;
    const int64_t rows = d.longest_query() * (d.num_heads / d.num_kv_heads);
    const bool blocks = d.options.block_q > 0 && ceil_div(rows, d.options.block_q) >= 3;
    const bool tiles = d.options.block_kv > 0 && ceil_div(d.longest_keys(), d.options.block_kv) >= 3;
    many_tiles += blocks && tiles ? 1 : 0;
  }
  // Prints the histogram. Of 1000 draws and more, half have at least three tiles in both directions and each option is
  // in a quarter; of those that exclude each other in a sixth.
  void expect_shares(double worst_ratio) const {
    std::printf("%d draws, worst error / bound %.2f, with at least 3 tiles in both directions %.1f %%\n", draws,
                worst_ratio, 100.0 * many_tiles / draws);
    for (const auto& [name, count] : of) std::printf("  %-24s %5.1f %%\n", name.c_str(), 100.0 * count / draws);
    if (draws < 1000) return;
    EXPECT_GE(many_tiles, draws / 2);
    for (const auto& [name, count] : of) {
      const bool excludes = name == "block mask" || name == "sparse indices" || name == "tree mask" ||
                            (name == "standard path" && of.count("tree mask") > 0);
      EXPECT_GE(count, draws / (excludes ? 6 : 4)) << name;
    }
  }
};

}  // namespace opst::test
