#include "attention/backward_check.h"

#include <cmath>
#include <string>

#include "attention/sequences.h"
#include "core/shape_check.h"

namespace opst::attention {

namespace {

constexpr int64_t kMaxHeadDim = 768;
constexpr int64_t kMaxBlock = 4096;

std::string str(int64_t x) { return std::to_string(x); }

}  // namespace

Result<AttentionBackwardProblem> check_backward(const AttentionInputs& in, const AttentionSaved& saved,
                                                const AttentionGradients& grads, const AttentionOptions& options) {
  ShapeCheck check("flash_attention_backward");
  if (in.block_table.data != nullptr) {
    return Status::unsupported("flash_attention_backward: block_table is given, but paged keys have no gradient");
  }
  if (in.cu_seqlens_q.data != nullptr || in.cu_seqlens_k.data != nullptr || in.prefix.data != nullptr ||
      in.mask.data != nullptr || in.bias.data != nullptr || in.alibi_slopes.data != nullptr ||
      in.sinks.data != nullptr || in.drop_mask.data != nullptr || options.softcap != 0 ||
      options.dropout.keep_prob != 1) {
    return Status::unsupported("flash_attention_backward: knows causal masks, windows and kv_lengths only, so far");
  }
  const std::initializer_list<DType> floats = {DType::f32, DType::bf16, DType::f16, DType::f64};
  const bool f64 = in.query.dtype == DType::f64;
  const DType statistics = f64 ? DType::f64 : DType::f32;

  check.tensor("query", in.query).dtype(floats).dims({"batch", "num_heads", "query_len", "head_dim"});
  check.tensor("key", in.key).dtype(floats).dims({"batch", "num_kv_heads", "kv_len", "head_dim"});
  check.tensor("value", in.value).dtype(floats).dims({"batch", "num_kv_heads", "kv_len", "value_head_dim"});
  const bool has_lengths = in.kv_lengths.data != nullptr;
  if (has_lengths) check.tensor("kv_lengths", in.kv_lengths).dtype({DType::i32, DType::i64}).dims({"batch"});
  check.tensor("out", saved.out).dtype(floats).dims({"batch", "num_heads", "query_len", "value_head_dim"});
  check.tensor("grad_out", saved.grad_out).dtype(floats).dims({"batch", "num_heads", "query_len", "value_head_dim"});
  const auto statistic = [&](const char* name, const ConstTensor& t) {
    if (t.data != nullptr) check.tensor(name, t).dtype({statistics}).dims({"batch", "num_heads", "query_len"});
  };
  statistic("softmax_lse", saved.softmax_lse);
  statistic("softmax_max", saved.softmax_max);
  statistic("softmax_sum", saved.softmax_sum);
  statistic("grad_lse", saved.grad_lse);
  const auto gradient = [&](const char* name, const Tensor& t, std::initializer_list<const char*> dims) {
    if (t.data != nullptr) check.output(name, t).dtype(floats).dims(dims);
  };
  gradient("grad_query", grads.grad_query, {"batch", "num_heads", "query_len", "head_dim"});
  gradient("grad_key", grads.grad_key, {"batch", "num_kv_heads", "kv_len", "head_dim"});
  gradient("grad_value", grads.grad_value, {"batch", "num_kv_heads", "kv_len", "value_head_dim"});

  const auto same_kind = [&](const char* name, const ConstTensor& t) {
    check.require(t.data == nullptr || (t.dtype == DType::f64) == f64, [&] {
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
  const bool has_max = saved.softmax_max.data != nullptr, has_sum = saved.softmax_sum.data != nullptr;
  check.require(has_max == has_sum, [&] {
    return std::string(has_max ? "softmax_max" : "softmax_sum") + " is given, but " +
           (has_max ? "softmax_sum" : "softmax_max") + " is not";
  });
  check.require(has_max || saved.softmax_lse.data != nullptr || check["query_len"] == 0 || check["batch"] == 0 ||
                    check["num_heads"] == 0,
                [] { return std::string("neither softmax_lse nor softmax_max and softmax_sum are given"); });

  if (options.softmax_scale) {
    check.require(std::isfinite(*options.softmax_scale),
                  [&] { return "softmax_scale is " + std::to_string(*options.softmax_scale) + ", must be finite"; });
  }
  check.require(options.block_q >= 0 && options.block_q <= kMaxBlock,
                [&] { return "block_q is " + str(options.block_q) + ", must be 0 to " + str(kMaxBlock); });
  check.require(options.block_kv >= 0 && options.block_kv <= kMaxBlock,
                [&] { return "block_kv is " + str(options.block_kv) + ", must be 0 to " + str(kMaxBlock); });
  for (const char* name : {"head_dim", "value_head_dim"}) {
    const int64_t d = check[name];
    check.require(d >= 1 && d <= kMaxHeadDim,
                  [&] { return std::string(name) + " is " + str(d) + ", must be 1 to " + str(kMaxHeadDim); });
  }
  const int64_t heads = check["num_heads"], kv_heads = check["num_kv_heads"], kv_len = check["kv_len"];
  check.require(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0,
                [&] { return "num_heads is " + str(heads) + ", not a multiple of num_kv_heads = " + str(kv_heads); });
  for (int64_t b = 0; has_lengths && check.ok() && b < in.kv_lengths.shape[0]; ++b) {
    const int64_t length = integer_at(in.kv_lengths, b * in.kv_lengths.strides[0]);
    check.require(length >= 0 && length <= kv_len, [&] {
      return "kv_lengths[" + str(b) + "] is " + str(length) + ", must be 0 to " + str(kv_len) + " (kv_len of key)";
    });
  }
  if (!check.ok()) return check.status();

  AttentionBackwardProblem b;
  AttentionProblem& p = b.forward;
  p.query_dtype = in.query.dtype;
  p.kv_dtype = in.key.dtype;
  p.batch = check["batch"];
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.query_len = check["query_len"];
  p.kv_len = kv_len;
  p.head_dim = check["head_dim"];
  p.value_head_dim = check["value_head_dim"];
  p.options = options;
  b.grad_out_dtype = saved.grad_out.dtype;
  return b;
}

}  // namespace opst::attention
