// CallRules: the options of a call as ScoreRules, for any block of query rows.
#pragma once

#include <cmath>
#include <numbers>

#include "attention/kernels.h"
#include "attention/sequences.h"
#include "core/int_math.h"

namespace opst::attention {

// softmax_scale as two factors: of_query, which multiplies queries exactly when they are copied (the sign, or 0; also a
// power of two where the scale times log2(e) would overflow f32), and of_score, the positive rest.
struct Scale {
  explicit Scale(const AttentionProblem& p) {
    const double natural = 1 / std::sqrt(static_cast<double>(p.head_dim));
    double scale = p.options.softmax_scale.value_or(natural);
    if (p.query_dtype != DType::f64) scale = static_cast<double>(static_cast<float>(scale));
    const double power = std::fabs(scale) > 1e38 ? 4 : 1;
    of_query = scale > 0 ? power : scale < 0 ? -power : 0;
    of_score = scale == 0 ? 1 : std::fabs(scale) / power;
  }
  double of_query, of_score;
};

class CallRules {
 public:
  CallRules(const AttentionInputs& inputs, const AttentionProblem& problem) : in_(inputs), p_(problem) {
    const AttentionOptions& o = problem.options;
    if (p_.has_mask) broadcast(in_.mask, mask_strides_);
    if (p_.has_bias) broadcast(in_.bias, bias_strides_);
    base_ = {.natural = o.softcap > 0 || p_.has_alibi || p_.has_bias,
             .score_scale = scale_.of_score,
             .softcap = o.softcap,
             .has_alibi = p_.has_alibi,
             .alibi_square_root = o.alibi_form == AlibiForm::square_root,
             .has_bias = p_.has_bias,
             .bias_dtype = in_.bias.dtype,
             .bias_stride = bias_strides_[3],
             .bias_scale = o.bias_scale,
             .has_mask = p_.has_mask,
             .mask_stride = mask_strides_[3]};
    if (p_.has_drop_mask) {
      base_.drop_mask = static_cast<const uint8_t*>(in_.drop_mask.data);
    } else {
      // Words below it are kept: the least integer that is not less than keep_prob * 2^32.
      const double below = std::ceil(o.dropout.keep_prob * 0x1p32);
      base_.keep_below = below >= 0x1p32 ? 0 : static_cast<uint64_t>(below);
      base_.seed[0] = static_cast<uint32_t>(o.dropout.seed);
      base_.seed[1] = static_cast<uint32_t>(o.dropout.seed >> 32);
      base_.offset = static_cast<uint32_t>(o.dropout.offset);
      base_.first_key = o.dropout.first_key;
    }
  }

  const Scale& scale() const { return scale_; }
  // What a kernel's score is multiplied by: score_scale gives S, exponent_scale an exponent of 2.
  double score_scale() const { return base_.natural ? 1 : scale_.of_score; }
  double exponent_scale() const { return score_scale() * std::numbers::log2e; }
  double keep_prob() const { return p_.options.dropout.keep_prob; }

  // Whether a sequence's scores need any rule.
  bool any(int64_t batch) const { return base_.natural || p_.has_mask || base_.drops() || prefix(batch) > 0; }
  // Keys below it are visible to every row; 0 with a block mask, a tree or indices, whose tiles show what is seen of it.
  int64_t prefix(int64_t batch) const {
    return p_.block_mask || p_.sparse_indices || sequences_.has_tree(batch) ? 0 : sequences_.prefix(batch);
  }

  // The rules of stacked rows [first_row, first_row + rows) of a (batch, KV head) pair.
  ScoreRules of_block(int64_t batch, int64_t kv_head, int64_t first_row, int64_t rows, RowRules* row_rules) const {
    ScoreRules rules = base_;
    rules.rows = row_rules;
    rules.prefix = prefix(batch);
    const AttentionOptions& o = p_.options;
    const int64_t group = p_.num_heads / p_.num_kv_heads;
    const int64_t query_len = sequences_.query_len(batch), kv_len = sequences_.kv_len(batch);
    const int64_t off = o.alignment == CausalAlignment::bottom_right ? kv_len - query_len : 0;
    const int64_t drop_base = p_.has_drop_mask ? drop_bits_before(batch).value() : 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = (first_row + r) / group, head = kv_head * group + (first_row + r) % group;
      RowRules& row = row_rules[r];
      row.mask = static_cast<const uint8_t*>(address(in_.mask, mask_strides_, batch, head, i));
      row.bias = address(in_.bias, bias_strides_, batch, head, i);
      row.slope = p_.has_alibi ? slope(batch, head) : 0;
      row.position = i + off + o.alibi_query_start - o.alibi_key_start;
      row.drop_bit = drop_base + (head * query_len + i) * drop_columns(kv_len);
      const int64_t total_heads = o.dropout.total_heads > 0 ? o.dropout.total_heads : p_.num_heads;
      row.query = static_cast<uint32_t>(o.dropout.first_query + i);
      row.head = static_cast<uint32_t>(batch) * static_cast<uint32_t>(total_heads) +
                 static_cast<uint32_t>(o.dropout.first_head + head);
    }
    return rules;
  }

  // How many bits a drop_mask for this call must have.
  Size drop_mask_bits() const { return drop_bits_before(p_.batch); }

 private:
  // In [batch, heads, query, key]; 0 where the tensor repeats.
  static void broadcast(const ConstTensor& t, int64_t (&strides)[4]) {
    for (int d = 0; d < t.rank; ++d) {
      if (t.shape[d] != 1) strides[4 - t.rank + d] = t.strides[d];
    }
  }
  static const void* address(const ConstTensor& t, const int64_t (&s)[4], int64_t b, int64_t h, int64_t i) {
    if (!t) return nullptr;
    return static_cast<const char*>(t.data) + (b * s[0] + h * s[1] + i * s[2]) * size_bytes(t.dtype);
  }
  double slope(int64_t batch, int64_t head) const {
    const ConstTensor& t = in_.alibi_slopes;
    const int64_t at = t.rank == 1 ? head * t.strides[0] : batch * t.strides[0] + head * t.strides[1];
    return t.dtype == DType::f64 ? static_cast<const double*>(t.data)[at]
                                 : double{static_cast<const float*>(t.data)[at]};
  }
  bool varlen() const { return p_.varlen_q || p_.varlen_k; }
  // Bits of a row of the drop mask.
  int64_t drop_columns(int64_t kv_len) const { return varlen() ? kv_len : p_.paged ? p_.kv_len : in_.key.shape[2]; }
  Size drop_bits_before(int64_t batch) const {
    const auto of_sequence = [&](int64_t b) { return Size(p_.num_heads) * sequences_.query_len(b); };
    if (!varlen()) return of_sequence(0) * drop_columns(0) * batch;
    if (batch > 0 && sequences_.num_different() == 1) return of_sequence(0) * sequences_.kv_len(0) * batch;
    Size bits = 0;
    for (int64_t b = 0; b < batch; ++b) bits += of_sequence(b) * sequences_.kv_len(b);
    return bits;
  }

  const AttentionInputs& in_;
  const AttentionProblem& p_;
  const Sequences sequences_{in_, p_};
  const Scale scale_{p_};
  ScoreRules base_;
  int64_t mask_strides_[4] = {}, bias_strides_[4] = {};
};

}  // namespace opst::attention
