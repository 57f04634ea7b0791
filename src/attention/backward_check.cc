// The contract of flash_attention_backward's tensors.
#include <algorithm>
#include <array>

#include "attention/check.h"
#include "attention/sequences.h"
#include "core/shape_check.h"

namespace opst::attention {

namespace {

// Of the bias's shape.
void check_grad_bias(ShapeCheck& check, const ConstTensor& bias, const Tensor& g, DType real) {
  check.output("grad_bias", g).dtype({real});
  check.require(bool{bias}, "grad_bias is given, but bias is not");
  check.require(g.rank == bias.rank, "grad_bias has rank ", g.rank, ", but bias has rank ", bias.rank);
  for (int d = 0; check.ok() && d < g.rank; ++d) {
    check.require(g.shape[d] == bias.shape[d], "grad_bias dim ", d, " is ", g.shape[d], ", but bias has ",
                  bias.shape[d]);
  }
}

// Of the shape of `like` but for its last dimension.
void check_rope_gradient(ShapeCheck& check, const char* name, const Tensor& t, bool has_rope,
                         std::span<const char* const> like) {
  if (!t) return;
  check.require(has_rope, name, " is given, but query_rope and key_rope are not");
  if (!check.ok()) return;
  std::array<const char*, 4> names = {};
  std::copy(like.begin(), like.end(), names.begin());
  names[like.size() - 1] = "rope_dim";
  check.output(name, t).dtype(kFloats).dims(std::span<const char* const>(names.data(), like.size()));
}

// Types that go together: f64 with f64, value with key.
void check_kinds(ShapeCheck& check, const AttentionInputs& in, const AttentionSaved& saved,
                 const AttentionGradients& grads) {
  const auto same_kind = [&](const char* name, const ConstTensor& t) {
    check.require(!t || (t.dtype == DType::f64) == (in.query.dtype == DType::f64),
                  "f64 does not mix with other types: query is ", to_string(in.query.dtype), ", ", name, " ",
                  to_string(t.dtype));
  };
  same_kind("key", in.key);
  same_kind("out", saved.out);
  same_kind("grad_out", saved.grad_out);
  same_kind("grad_query", grads.grad_query);
  same_kind("grad_key", grads.grad_key);
  same_kind("grad_value", grads.grad_value);
  same_kind("grad_query_rope", grads.grad_query_rope);
  same_kind("grad_key_rope", grads.grad_key_rope);
  check.require(in.value.dtype == in.key.dtype, "value is ", to_string(in.value.dtype), ", but key is ",
                to_string(in.key.dtype));
}

}  // namespace

Result<AttentionBackwardProblem> check_backward(const AttentionInputs& in, const AttentionSaved& saved,
                                                const AttentionGradients& grads, const AttentionOptions& options) {
  ShapeCheck check("flash_attention_backward");
  const bool paged(in.block_table), varlen_k(in.cu_seqlens_k);
  if (paged && options.page_layout != PageLayout::norm) {
    return Status::unsupported(text("flash_attention_backward: pages are ", to_string(options.page_layout),
                                    ", but gradients are taken of norm pages only"));
  }
  if (is_given(in.tree_mask)) {
    return Status::unsupported("flash_attention_backward: tree_mask has no gradient: a mask may hide the same keys");
  }
  const DType real = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;

  bind_inputs(check, in, options.page_layout);
  check.require(size_bytes(in.key.dtype) != 1, "key is ", to_string(in.key.dtype),
                ", but gradients are taken of f32, bf16, f16 and f64");
  const CallDims dims = call_dims(in);
  check.tensor("out", saved.out).dtype(kFloats).dims(dims.out);
  check.tensor("grad_out", saved.grad_out).dtype(kFloats).dims(dims.out);
  const auto statistic = [&](const char* name, const ConstTensor& t) {
    if (t) check.tensor(name, t).dtype({real}).dims(dims.statistic);
  };
  statistic("softmax_lse", saved.softmax_lse);
  statistic("softmax_max", saved.softmax_max);
  statistic("softmax_sum", saved.softmax_sum);
  statistic("grad_lse", saved.grad_lse);
  const auto gradient = [&](const char* name, const Tensor& t, std::span<const char* const> names) {
    if (t) check.output(name, t).dtype(kFloats).dims(names);
  };
  gradient("grad_query", grads.grad_query, dims.query);
  gradient("grad_key", grads.grad_key, dims.key);
  gradient("grad_value", grads.grad_value, dims.value);
  check_rope_gradient(check, "grad_query_rope", grads.grad_query_rope, is_given(in.query_rope), dims.query);
  check_rope_gradient(check, "grad_key_rope", grads.grad_key_rope, is_given(in.key_rope), dims.key);
  if (grads.grad_bias) check_grad_bias(check, in.bias, grads.grad_bias, real);
  if (grads.grad_sinks) {
    check.output("grad_sinks", grads.grad_sinks).dtype({real}).dims({"num_heads"});
    check.require(bool{in.sinks}, "grad_sinks is given, but sinks is not");
  }

  check_kinds(check, in, saved, grads);
  const bool has_max(saved.softmax_max), has_sum(saved.softmax_sum);
  check.require(has_max == has_sum, has_max ? "softmax_max" : "softmax_sum", " is given, but ",
                has_max ? "softmax_sum" : "softmax_max", " is not");
  check.require(has_max || saved.softmax_lse || saved.out.num_elements() == 0,
                "neither softmax_lse nor softmax_max and softmax_sum are given");

  Result<AttentionProblem> problem = pose_problem(check, in, options);
  if (!problem.ok()) return problem.status();
  AttentionBackwardProblem b = {.forward = problem.value(),
                                .grad_out_dtype = saved.grad_out.dtype,
                                .grad_bias = bool{grads.grad_bias},
                                .grad_sinks = bool{grads.grad_sinks}};
  AttentionProblem& p = b.forward;
  if (p.sparse_indices) {
    if (grads.grad_bias) {
      return Status::unsupported("flash_attention_backward: grad_bias is given, but with sparse_indices bias has none");
    }
    const ConstTensor& key = in.key;
    b.key_rows = (Size(key.shape[0]) * key.shape[1] * (key.rank > 3 ? key.shape[2] : 1)).value();
  }
  if (paged) b.num_blocks = in.key.shape[0];
  // Every row of a tensor has a gradient, beyond kv_lengths too.
  if (!paged) p.kv_len = varlen_k ? 0 : in.key.shape[2];
  const Sequences sequences(in, p);
  for (int64_t i = 0; varlen_k && i < sequences.num_different(); ++i) {
    p.kv_len = std::max(p.kv_len, sequences.key_rows(i));
  }
  return b;
}

}  // namespace opst::attention
