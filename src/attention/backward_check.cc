#include "attention/backward_check.h"

#include <algorithm>
#include <string>

#include "attention/check.h"
#include "attention/sequences.h"
#include "core/shape_check.h"

namespace opst::attention {

namespace {

// Of the bias's shape.
void check_grad_bias(ShapeCheck& check, const ConstTensor& bias, const Tensor& g, DType real) {
  check.output("grad_bias", g).dtype({real});
  check.require(bias.data != nullptr, [] { return std::string("grad_bias is given, but bias is not"); });
  check.require(g.rank == bias.rank, [&] {
    return "grad_bias has rank " + std::to_string(g.rank) + ", but bias has rank " + std::to_string(bias.rank);
  });
  for (int d = 0; check.ok() && d < g.rank; ++d) {
    check.require(g.shape[d] == bias.shape[d], [&] {
      return "grad_bias dim " + std::to_string(d) + " is " + std::to_string(g.shape[d]) + ", but bias has " +
             std::to_string(bias.shape[d]);
    });
  }
}

// Types that go together: f64 with f64, value with key.
void check_kinds(ShapeCheck& check, const AttentionInputs& in, const AttentionSaved& saved,
                 const AttentionGradients& grads) {
  const auto same_kind = [&](const char* name, const ConstTensor& t) {
    check.require(t.data == nullptr || (t.dtype == DType::f64) == (in.query.dtype == DType::f64), [&] {
      return std::string("f64 does not mix with other types: query is ") + to_string(in.query.dtype) + ", " + name +
             " " + to_string(t.dtype);
    });
  };
  same_kind("key", in.key);
  same_kind("out", saved.out);
  same_kind("grad_out", saved.grad_out);
  same_kind("grad_query", grads.grad_query);
  same_kind("grad_key", grads.grad_key);
  same_kind("grad_value", grads.grad_value);
  check.require(in.value.dtype == in.key.dtype, [&] {
    return std::string("value is ") + to_string(in.value.dtype) + ", but key is " + to_string(in.key.dtype);
  });
}

}  // namespace

Result<AttentionBackwardProblem> check_backward(const AttentionInputs& in, const AttentionSaved& saved,
                                                const AttentionGradients& grads, const AttentionOptions& options) {
  ShapeCheck check("flash_attention_backward");
  const bool paged = in.block_table.data != nullptr;
  if (paged && options.page_layout != PageLayout::norm) {
    return Status::unsupported(std::string("flash_attention_backward: pages are ") + to_string(options.page_layout) +
                               ", but gradients are taken of norm pages only");
  }
  const std::initializer_list<DType> floats = {DType::f32, DType::bf16, DType::f16, DType::f64};
  const bool varlen_k = in.cu_seqlens_k.data != nullptr;
  const DType real = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;

  bind_inputs(check, in, options.page_layout);
  const QueryDims& dims = query_dims(in.cu_seqlens_q.data != nullptr);
  check.tensor("out", saved.out).dtype(floats).dims(dims.out);
  check.tensor("grad_out", saved.grad_out).dtype(floats).dims(dims.out);
  const auto statistic = [&](const char* name, const ConstTensor& t) {
    if (t.data != nullptr) check.tensor(name, t).dtype({real}).dims(dims.statistic);
  };
  statistic("softmax_lse", saved.softmax_lse);
  statistic("softmax_max", saved.softmax_max);
  statistic("softmax_sum", saved.softmax_sum);
  statistic("grad_lse", saved.grad_lse);
  const auto gradient = [&](const char* name, const Tensor& t, std::initializer_list<const char*> names) {
    if (t.data != nullptr) check.output(name, t).dtype(floats).dims(names);
  };
  gradient("grad_query", grads.grad_query, dims.query);
  if (paged) {
    gradient("grad_key", grads.grad_key, {"num_blocks", "block_size", "num_kv_heads", "head_dim"});
    gradient("grad_value", grads.grad_value, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
  } else if (varlen_k) {
    gradient("grad_key", grads.grad_key, {"total_k", "num_kv_heads", "head_dim"});
    gradient("grad_value", grads.grad_value, {"total_k", "num_kv_heads", "value_head_dim"});
  } else {
    gradient("grad_key", grads.grad_key, {"batch", "num_kv_heads", "kv_len", "head_dim"});
    gradient("grad_value", grads.grad_value, {"batch", "num_kv_heads", "kv_len", "value_head_dim"});
  }
  if (grads.grad_bias.data != nullptr) check_grad_bias(check, in.bias, grads.grad_bias, real);
  if (grads.grad_sinks.data != nullptr) {
    check.output("grad_sinks", grads.grad_sinks).dtype({real}).dims({"num_heads"});
    check.require(in.sinks.data != nullptr, [] { return std::string("grad_sinks is given, but sinks is not"); });
  }

  check_kinds(check, in, saved, grads);
  const bool has_max = saved.softmax_max.data != nullptr, has_sum = saved.softmax_sum.data != nullptr;
  check.require(has_max == has_sum, [&] {
    return std::string(has_max ? "softmax_max" : "softmax_sum") + " is given, but " +
           (has_max ? "softmax_sum" : "softmax_max") + " is not";
  });
  check.require(has_max || saved.softmax_lse.data != nullptr || saved.out.num_elements() == 0,
                [] { return std::string("neither softmax_lse nor softmax_max and softmax_sum are given"); });

  Result<AttentionProblem> problem = pose_problem(check, in, options);
  if (!problem.ok()) return problem.status();
  AttentionBackwardProblem b;
  b.forward = problem.value();
  b.grad_out_dtype = saved.grad_out.dtype;
  b.grad_bias = grads.grad_bias.data != nullptr;
  b.grad_sinks = grads.grad_sinks.data != nullptr;
  if (paged) b.num_blocks = in.key.shape[0];
  // Every row of a tensor has a gradient, beyond kv_lengths too.
  if (!paged) b.forward.kv_len = varlen_k ? 0 : in.key.shape[2];
  const int64_t different =
      Sequences::repeats(in.cu_seqlens_k) ? std::min<int64_t>(b.forward.batch, 1) : b.forward.batch;
  for (int64_t i = 0; i < different && varlen_k; ++i) {
    b.forward.kv_len = std::max(b.forward.kv_len, key_rows_of(in, i));
  }
  return b;
}

int64_t key_rows_of(const AttentionInputs& in, int64_t b) {
  if (in.cu_seqlens_k.data == nullptr) return in.key.shape[2];
  return index_at(in.cu_seqlens_k, b + 1) - index_at(in.cu_seqlens_k, b);
}

}  // namespace opst::attention
