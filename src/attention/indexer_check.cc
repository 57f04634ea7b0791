// What lightning_indexer refuses, in the words of attention's check where a tensor is attention's too.
#include <limits>

#include "attention/check.h"
#include "attention/indexer.h"
#include "core/elements.h"
#include "core/guarded.h"
#include "core/shape_check.h"

namespace opst::attention {

namespace {

constexpr std::initializer_list<DType> kIndexerFloats = {DType::f32, DType::bf16, DType::f16};

void bind_tensors(ShapeCheck& check, const LightningIndexerInputs& in, const LightningIndexerOutputs& out) {
  check.tensor("query", in.query).dtype(kIndexerFloats);
  check.tensor("key", in.key).dtype(kIndexerFloats);
  const AttentionInputs inputs = attention_inputs(in);
  bind_inputs(check, inputs, PageLayout::norm);
  const CallDims dims = call_dims(inputs);
  check.tensor("weights", in.weights).dtype(kIndexerFloats).dims(dims.query.first(dims.query.size() - 1));
  if (in.query_lengths) {
    check.tensor("query_lengths", in.query_lengths).dtype({DType::i32, DType::i64}).dims({"batch"});
    check.require(!in.cu_seqlens_q, "query_lengths and cu_seqlens_q are given, but only one may be");
  }
  static constexpr const char* kDims[] = {"batch", "query_len", "num_kv_heads", "count"};
  static constexpr const char* kVarlenDims[] = {"total_q", "num_kv_heads", "count"};
  const std::span<const char* const> selected = in.cu_seqlens_q ? std::span<const char* const>(kVarlenDims) : kDims;
  check.output("indices", out.indices).dtype({DType::i32}).dims(selected);
  if (out.values) check.output("values", out.values).dtype(kIndexerFloats).dims(selected);
}

void check_query_lengths(ShapeCheck& check, const ConstTensor& lengths, int64_t query_len) {
  if (!lengths) return;
  for (int64_t b = 0; check.ok() && b < distinct(lengths, 0); ++b) {
    const int64_t x = index_at(lengths, b);
    check.require(x >= 0 && x <= query_len, "query_lengths[", b, "] is ", x, ", must be 0 to ", query_len,
                  " (query_len of query)");
  }
}

}  // namespace

Result<IndexerCheck> check_indexer(const char* operator_name, const LightningIndexerInputs& in,
                                   const LightningIndexerOutputs& out, const LightningIndexerOptions& options) {
  ShapeCheck check(operator_name);
  bind_tensors(check, in, out);
  const Result<AttentionProblem> posed = pose_problem(check, attention_inputs(in), attention_options(options));
  if (!posed.ok()) return posed.status();
  AttentionProblem p = posed.value();
  p.value_head_dim = 0;  // there are none
  constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max();
  check.require(p.num_heads > 0 || p.num_kv_heads == 0,
                "num_heads is 0, must be a positive multiple of num_kv_heads = ", p.num_kv_heads);
  check.require(p.kv_len <= kMostKeys, "the longest sequence has ", p.kv_len, " keys, but indices are i32: at most ",
                kMostKeys);
  check_query_lengths(check, in.query_lengths, p.query_len);
  if (!check.ok()) return check.status();
  return IndexerCheck{.problem = {.query_dtype = p.query_dtype,
                                  .kv_dtype = p.kv_dtype,
                                  .batch = p.batch,
                                  .num_heads = p.num_heads,
                                  .num_kv_heads = p.num_kv_heads,
                                  .query_len = p.query_len,
                                  .kv_len = p.kv_len,
                                  .head_dim = p.head_dim,
                                  .count = check["count"],
                                  .options = options},
                      .attention = p};
}

}  // namespace opst::attention

namespace opst {

Result<LightningIndexerProblem> lightning_indexer_problem(const LightningIndexerInputs& inputs,
                                                          const LightningIndexerOutputs& outputs,
                                                          const LightningIndexerOptions& options) {
  return guarded([&]() -> Result<LightningIndexerProblem> {
    const auto checked = attention::check_indexer("lightning_indexer_problem", inputs, outputs, options);
    if (!checked.ok()) return checked.status();
    return checked.value().problem;
  });
}

}  // namespace opst
