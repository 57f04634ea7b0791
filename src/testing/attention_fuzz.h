// The attention calls that operator_fuzz draws.
#pragma once

#include <limits>
#include <vector>

#include "opst/attention.h"
#include "opst/attention_backward.h"
#include "opst/lightning_indexer.h"
#include "testing/fuzz_call.h"

namespace opst::test {

inline AttentionOptions draw_options(Choices& c) {
  AttentionOptions o;
  o.causal = c.coin();
  if (c.coin()) o.alignment = CausalAlignment::top_left;
  o.path = c.pick({AttentionPath::automatic, AttentionPath::flash, AttentionPath::standard});
  if (c.rarely(64)) o.path = static_cast<AttentionPath>(9);
  if (c.rarely(4)) o.block_q = c.size(c.integer(0, 70)), o.block_kv = c.size(c.integer(0, 70));
  if (c.rarely(4)) o.window_left = c.size(c.integer(-3, 20));
  if (c.rarely(4)) o.window_right = c.size(c.integer(-3, 20));
  if (c.rarely(4)) o.softcap = c.pick({5.0f, 0.5f, -1.0f, std::numeric_limits<float>::quiet_NaN()});
  if (c.rarely(4)) o.softmax_scale = c.pick({0.3, 0.0, -1.0, 1e300, std::numeric_limits<double>::infinity()});
  if (c.rarely(8)) o.bias_scale = 0.5f;
  if (c.rarely(8)) o.alibi_form = AlibiForm::square_root;
  if (c.rarely(8)) o.alibi_query_start = c.size(c.integer(0, 9)), o.alibi_key_start = c.size(c.integer(0, 9));
  if (c.rarely(4)) o.shared_prefix = c.size(c.integer(-2, 20));
  if (c.rarely(4)) {
    o.dropout.keep_prob = c.pick({0.5, 0.9, 1.0, 0.0, -1.0, 2.0});
    o.dropout.seed = c.byte();
    o.dropout.first_query = c.size(c.byte());
    o.dropout.total_heads = c.size(0);
  }
  if (std::getenv("OPST_FUZZ_SHOW") != nullptr) {
    std::fprintf(stderr, "causal %d top_left %d scale %g softcap %g keep_prob %g windows %lld %lld\n", o.causal,
                 o.alignment == CausalAlignment::top_left, o.softmax_scale.value_or(-77),
                 static_cast<double>(o.softcap), o.dropout.keep_prob, static_cast<long long>(o.window_left),
                 static_cast<long long>(o.window_right));
  }
  return o;
}

// Shapes of an attention call: dense, sequences one after another, or pages.
struct AttentionSizes {
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, block_size = 0, num_blocks = 0, table_columns = 0;
  bool varlen_q = false, varlen_k = false, paged = false;
  int64_t mask_block_q = 0, mask_block_kv = 0;  // of a block mask
  int64_t index_block = 1;                      // of lists

  explicit AttentionSizes(Choices& c) {
    batch = c.integer(1, 3), kv_heads = c.integer(1, 2), heads = kv_heads * c.integer(1, 3);
    q_len = c.pick<int64_t>({1, 2, 7, 17, 33, 65}), kv_len = c.pick<int64_t>({1, 3, 16, 31, 64, 100});
    head_dim = c.pick<int64_t>({1, 8, 16, 33, 64}), value_dim = c.coin() ? head_dim : c.integer(1, 40);
    const int form = c.pick({0, 0, 0, 1, 2, 3, 4});
    varlen_q = form == 1 || form == 4, varlen_k = form == 1 || form == 2, paged = form == 3 || form == 4;
    if (!paged) return;
    block_size = c.pick<int64_t>({1, 4, 16, 32}), num_blocks = c.integer(1, 9);
    table_columns = c.integer(1, 5);
    kv_len = table_columns * block_size;
  }
  std::vector<int64_t> query(int64_t dim) const {
    if (varlen_q) return {q_len, heads, dim};
    return {batch, heads, q_len, dim};
  }
  std::vector<int64_t> keys(int64_t dim) const {
    if (paged) return {num_blocks, block_size, kv_heads, dim};
    if (varlen_k) return {kv_len, kv_heads, dim};
    return {batch, kv_heads, kv_len, dim};
  }
  std::vector<int64_t> statistic() const {
    if (varlen_q) return {heads, q_len};
    return {batch, heads, q_len};
  }
  // Ascending offsets from 0 to at most `total`.
  std::vector<int64_t> offsets(Choices& c, int64_t total) const {
    std::vector<int64_t> ends = {0};
    for (int64_t b = 0; b < batch; ++b) ends.push_back(c.integer(0, total));
    if (!c.rarely(16)) std::sort(ends.begin(), ends.end());
    return ends;
  }
};

// row_offsets and columns of a block mask that shows about half of the blocks; `s` gets its sizes.
inline void draw_block_mask(Choices& c, AttentionSizes& s, Operands& t) {
  s.mask_block_q = c.pick<int64_t>({1, 4, 16, 70}), s.mask_block_kv = c.pick<int64_t>({1, 5, 16, 64});
  const int64_t rows = (s.q_len + s.mask_block_q - 1) / s.mask_block_q;
  // The longest sequence may be shorter than all keys.
  const int64_t width = s.paged || s.varlen_k ? 1 : (s.kv_len + s.mask_block_kv - 1) / s.mask_block_kv;
  const int64_t batch = c.coin() ? s.batch : 1, heads = c.pick({int64_t{1}, s.kv_heads, s.heads});
  std::vector<int64_t> offsets, columns;
  for (int64_t head = 0; head < batch * heads; ++head) {
    offsets.push_back(static_cast<int64_t>(columns.size()));
    for (int64_t i = 0; i < rows; ++i) {
      uint8_t bits = c.byte();
      for (int64_t j = 0; j < width; ++j, bits = static_cast<uint8_t>(bits >> 1 | bits << 7)) {
        if (bits % 2 == 1) columns.push_back(j);
      }
      offsets.push_back(static_cast<int64_t>(columns.size()));
    }
  }
  if (!columns.empty() && c.rarely(16)) columns[c.byte() % columns.size()] = c.integer(-1, 100);
  if (c.rarely(16)) offsets[c.byte() % offsets.size()] = c.integer(-1, 100);
  const auto index_type = [&] { return c.pick({DType::i32, DType::i64}); };
  t.integers(index_type(), {batch, heads, rows + 1}, offsets);
  t.integers(index_type(), {static_cast<int64_t>(columns.size())}, columns);
  s.mask_block_q = c.size(s.mask_block_q), s.mask_block_kv = c.size(s.mask_block_kv);
}

// Lists of some of the first eight blocks, of which a sequence may have fewer.
inline void draw_lists(Choices& c, AttentionSizes& s, Operands& t) {
  s.index_block = c.pick<int64_t>({1, 2, 4, 16});
  const int64_t count = c.pick<int64_t>({8, 1, 3}), rows = (s.varlen_q ? 1 : s.batch) * s.q_len * s.kv_heads;
  const int64_t blocks = s.paged || s.varlen_k ? 1 : (s.kv_len + s.index_block - 1) / s.index_block;
  std::vector<int64_t> entries;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t bits = c.byte();
    const size_t end = entries.size() + static_cast<size_t>(count);
    for (int64_t j = std::min<int64_t>(blocks, 8); j-- > 0;) {
      if (entries.size() < end && (bits >> j) % 2 == 1) entries.push_back(j);
    }
    entries.resize(end, -1);
  }
  if (c.rarely(16)) entries[c.byte() % entries.size()] = c.integer(-2, 100);
  std::vector<int64_t> shape = {s.q_len, s.kv_heads, count};
  if (!s.varlen_q) shape.insert(shape.begin(), s.batch);
  t.integers(DType::i32, shape, entries);
  s.index_block = c.size(s.index_block);
}

// Scales of keys and values, and their offsets, where pages hold integers.
inline void draw_scales(Choices& c, const AttentionSizes& s, DType kv, Operands& t) {
  const bool integers = kv == DType::i8 || kv == DType::u8, offsets = integers && c.coin();
  for (const bool are_scales : {true, false}) {
    for (const int64_t dim : {s.head_dim, s.value_dim}) {
      if (!integers || (!are_scales && !offsets)) {
        t.absent();
        continue;
      }
      const int64_t groups = c.coin() && dim % 4 == 0 ? dim / 4 : 1;
      const int64_t rows = s.num_blocks * s.block_size * s.kv_heads;
      std::vector<int64_t> numbers;
      for (int64_t i = 0; i < rows * groups; ++i) numbers.push_back(are_scales ? i % 3 : i % 9 - 4);
      if (c.rarely(16)) numbers[c.byte() % numbers.size()] = -1;
      t.integers(DType::f32, s.keys(groups), numbers);
    }
  }
}

// The operands of AttentionInputs: 23 of them.
inline void draw_attention_inputs(Choices& c, AttentionSizes& s, DType q, DType kv, Operands& t) {
  const DType narrow = q == DType::f64 ? DType::f64 : DType::f32;
  const bool halves = kv == DType::u8;
  if (halves) s.head_dim += s.head_dim % 2, s.value_dim += s.value_dim % 2;
  const auto keys = [&](int64_t dim) {
    t.input(kv, s.keys(halves ? dim / 2 : dim), halves ? 0 : -100, halves ? 255 : 100);
  };
  t.input(q, s.query(s.head_dim));
  keys(s.head_dim);
  keys(s.value_dim);
  const auto maybe = [&](int rarity, const auto& add) { c.rarely(rarity) ? add() : t.absent(); };
  const auto index_type = [&] { return c.pick({DType::i32, DType::i64}); };
  if (s.paged) {
    t.input(index_type(), {s.batch, s.table_columns}, c.rarely(16) ? -1 : 0, s.num_blocks - (c.rarely(16) ? 0 : 1));
    t.input(index_type(), {s.batch}, 0, s.kv_len);
  } else {
    t.absent();
    t.absent();
  }
  s.varlen_q ? t.integers(index_type(), {s.batch + 1}, s.offsets(c, s.q_len)) : t.absent();
  s.varlen_k ? t.integers(index_type(), {s.batch + 1}, s.offsets(c, s.kv_len)) : t.absent();
  maybe(8, [&] { t.input(index_type(), {s.batch}, 0, c.rarely(8) ? s.kv_len + 1 : 1); });
  const std::vector<int64_t> scores = {c.coin() ? s.batch : 1, c.coin() ? s.heads : 1, c.coin() ? s.q_len : 1,
                                       s.kv_len};
  maybe(6, [&] { t.input(DType::boolean, scores); });
  maybe(6, [&] { t.input(c.coin() ? narrow : q, scores); });
  maybe(8, [&] { t.input(narrow, {s.heads}); });
  maybe(8, [&] { t.input(narrow, {s.heads}); });
  t.absent();  // drop_mask
  const int form = c.pick({0, 0, 0, 1, 2});
  if (form == 1) {
    draw_block_mask(c, s, t);
  } else {
    t.absent();
    t.absent();
  }
  form == 2 ? draw_lists(c, s, t) : t.absent();
  const bool rope = size_bytes(kv) > 1 && c.rarely(8);
  const int64_t rope_dim = rope ? c.pick<int64_t>({8, 1, 3}) : 0;
  rope ? t.input(q, s.query(rope_dim)) : t.absent();
  rope ? t.input(kv, s.keys(rope_dim)) : t.absent();
  draw_scales(c, s, kv, t);
  maybe(6, [&] {  // tree_mask
    std::vector<int64_t> words;
    for (int64_t i = 0; i < (s.varlen_q ? 1 : s.batch) * s.q_len; ++i) {
      words.push_back(c.coin() ? -1 : c.byte() % (int64_t{1} << std::min<int64_t>(s.q_len, 8)));
    }
    t.integers(DType::i64, s.varlen_q ? std::vector<int64_t>{s.q_len} : std::vector<int64_t>{s.batch, s.q_len}, words);
  });
}

inline AttentionInputs attention_inputs(const Views& v, const AttentionSizes& s) {
  AttentionInputs in = {.query = v[0],
                        .key = v[1],
                        .value = v[2],
                        .block_table = v[3],
                        .kv_lengths = v[4],
                        .key_scales = v[18],
                        .value_scales = v[19],
                        .key_offsets = v[20],
                        .value_offsets = v[21],
                        .cu_seqlens_q = v[5],
                        .cu_seqlens_k = v[6],
                        .prefix = v[7],
                        .mask = v[8],
                        .bias = v[9],
                        .alibi_slopes = v[10],
                        .sinks = v[11],
                        .drop_mask = v[12],
                        .block_mask = {v[13], v[14], s.mask_block_q, s.mask_block_kv}};
  if (v[15].data != nullptr || v[15].rank != 0) in.sparse_indices = {v[15], s.index_block};
  in.query_rope = v[16], in.key_rope = v[17];
  in.tree_mask = v[22];
  return in;
}
inline constexpr size_t kAttentionInputs = 23;

inline FuzzedCall draw_forward(Choices& c, Operands& t) {
  AttentionSizes s(c);
  const DType q = c.float_dtype();
  DType kv = q == DType::f64 ? q : c.pick({q, DType::f32, DType::bf16, DType::f16});
  if (s.paged && c.rarely(3)) kv = c.pick({DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2});
  draw_attention_inputs(c, s, q, kv, t);
  t.output(q == DType::f64 ? q : c.pick({q, DType::f32, DType::bf16}), s.query(s.value_dim));
  const DType narrow = q == DType::f64 ? q : DType::f32;
  for (int i = 0; i < 3; ++i) c.coin() ? t.output(narrow, s.statistic()) : t.absent();
  const AttentionOptions options = draw_options(c);
  return {.call =
              [=](Context& context, const Views& v) {
                const AttentionOutputs out = {v[kAttentionInputs], v[kAttentionInputs + 1], v[kAttentionInputs + 2],
                                              v[kAttentionInputs + 3]};
                return flash_attention_forward(context, attention_inputs(v, s), out, options);
              },
          .loose_infinities = true};
}

// Forward comes before the call: out and lse belong together.
inline FuzzedCall draw_backward(Choices& c, Operands& t) {
  AttentionSizes s(c);
  const DType q = c.float_dtype(), kv = q == DType::f64 ? q : c.pick({q, DType::f32});
  draw_attention_inputs(c, s, q, kv, t);
  const DType narrow = q == DType::f64 ? q : DType::f32;
  t.input(q, s.query(s.value_dim));  // out
  t.input(narrow, s.statistic());
  t.input(q, s.query(s.value_dim));
  c.rarely(8) ? t.input(narrow, s.statistic()) : t.absent();
  c.rarely(8) ? t.absent() : t.output(q, s.query(s.head_dim));
  c.rarely(8) ? t.absent() : t.output(kv, s.keys(s.head_dim));
  c.rarely(8) ? t.absent() : t.output(kv, s.keys(s.value_dim));
  const Tensor bias = t.all()[9].view;
  if (bias.data != nullptr && bias.rank >= 0 && bias.rank <= 4 && c.coin()) {
    t.output(narrow, std::vector<int64_t>(bias.shape, bias.shape + bias.rank));
  } else {
    t.absent();
  }
  t.all()[11].view.data != nullptr&& c.coin() ? t.output(narrow, {s.heads}) : t.absent();
  const Tensor rope = t.all()[16].view;
  const int64_t rope_dim = rope.data != nullptr && rope.rank >= 3 && rope.rank <= 4 ? rope.shape[rope.rank - 1] : 0;
  const bool of_ropes = rope_dim > 0 && rope_dim < 9 && c.coin();
  of_ropes ? t.output(q, s.query(rope_dim)) : t.absent();
  of_ropes ? t.output(kv, s.keys(rope_dim)) : t.absent();
  const AttentionOptions options = draw_options(c);
  const auto forward = [=](Context& context, const Views& v) {
    return flash_attention_forward(context, attention_inputs(v, s),
                                   {.out = v[kAttentionInputs], .softmax_lse = v[kAttentionInputs + 1]}, options);
  };
  const auto backward = [=](Context& context, const Views& v) {
    const Tensor* const o = v.data() + kAttentionInputs;
    return flash_attention_backward(context, attention_inputs(v, s),
                                    {.out = o[0], .softmax_lse = o[1], .grad_out = o[2], .grad_lse = o[3]},
                                    {o[4], o[5], o[6], o[7], o[8], o[9], o[10]}, options);
  };
  return {backward, {}, forward, {}, true};
}

// Two levels may exchange keys whose scores differ by rounding alone: only threads are compared.
inline FuzzedCall draw_indexer(Choices& c, Operands& t) {
  const AttentionSizes s(c);
  const auto real = [&] { return c.pick({DType::f32, DType::bf16, DType::f16}); };
  const auto index_type = [&] { return c.pick({DType::i32, DType::i64}); };
  std::vector<int64_t> weights = s.query(1), selected = {s.q_len, s.kv_heads, c.pick<int64_t>({1, 5, 40, 130})};
  weights.pop_back();
  if (!s.varlen_q) selected.insert(selected.begin(), s.batch);
  t.input(real(), s.query(s.head_dim));
  t.input(real(), s.keys(s.head_dim));
  t.input(real(), weights);
  s.paged
      ? t.input(index_type(), {s.batch, s.table_columns}, c.rarely(16) ? -1 : 0, s.num_blocks - (c.rarely(16) ? 0 : 1))
      : t.absent();
  s.paged || c.rarely(4) ? t.input(index_type(), {s.batch}, 0, s.kv_len) : t.absent();
  c.rarely(4) ? t.input(index_type(), {s.batch}, 0, s.q_len) : t.absent();
  s.varlen_q ? t.integers(index_type(), {s.batch + 1}, s.offsets(c, s.q_len)) : t.absent();
  s.varlen_k ? t.integers(index_type(), {s.batch + 1}, s.offsets(c, s.kv_len)) : t.absent();
  t.output(DType::i32, selected);
  c.coin() ? t.output(real(), selected) : t.absent();
  LightningIndexerOptions options = {.causal = c.coin()};
  if (c.rarely(4)) options.block_q = c.size(c.integer(0, 9)), options.block_kv = c.size(c.integer(0, 70));
  return {[=](Context& context, const Views& v) {
            const LightningIndexerInputs in = {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
            return lightning_indexer(context, in, {v[8], v[9]}, options);
          },
          std::numeric_limits<double>::infinity()};
}

inline FuzzedCall draw_merge(Choices& c, Operands& t) {
  const int64_t parts = c.integer(1, 4), heads = c.integer(1, 3), rows = c.integer(1, 40), dim = c.integer(1, 40);
  const DType narrow = c.pick({DType::f32, DType::f64});
  t.input(narrow, {parts, heads, rows, dim});
  const bool with_lse = c.coin();
  for (int i = 0; i < 3; ++i) (i == 0) == with_lse ? t.input(narrow, {parts, heads, rows}) : t.absent();
  t.output(c.pick({narrow, narrow, DType::bf16}), {heads, rows, dim});
  for (int i = 0; i < 3; ++i) c.coin() ? t.output(narrow, {heads, rows}) : t.absent();
  return {[](Context& context, const Views& v) {
    return merge_attention(context, {v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]});
  }};
}

}  // namespace opst::test
