// The names of articles.h: checks of their own, and the calls that they stand for.
#include "opst/articles.h"

#include <vector>

#include "core/guarded.h"
#include "core/text.h"
#include "opst/attention.h"
#include "opst/attention_backward.h"
#include "opst/mc2.h"

namespace opst {

namespace {

constexpr int64_t kMostBlock = 4096;

// The options that a config stands for.
Result<AttentionOptions> options_of(const char* function, const FlashAttentionOp::Config& config) {
  for (const auto& [name, size] :
       {std::pair{"block_size_q", config.block_size_q}, {"block_size_kv", config.block_size_kv}}) {
    if (size < 0 || size > kMostBlock) {
      return Status::invalid_argument(text(function, ": ", name, " is ", size, ", but must be from 1 to ", kMostBlock,
                                           ", or 0 for the plan's choice"));
    }
  }
  if (!(config.dropout_p >= 0 && config.dropout_p < 1)) {
    return Status::invalid_argument(
        text(function, ": dropout_p is ", config.dropout_p, ", but must be at least 0 and less than 1"));
  }
  AttentionOptions options;
  if (config.softmax_scale != -1) options.softmax_scale = config.softmax_scale;
  options.causal = config.causal;
  options.block_q = config.block_size_q;
  options.block_kv = config.block_size_kv;
  options.dropout = {.keep_prob = 1 - static_cast<double>(config.dropout_p), .seed = config.seed};
  return options;
}

}  // namespace

Status FlashAttentionOp::Compute(const ConstTensor& query, const ConstTensor& key, const ConstTensor& value,
                                 const Tensor& output, const Config& config, const Tensor& softmax_lse) const {
  return guarded([&]() -> Status {
    const Result<AttentionOptions> options = options_of("FlashAttentionOp::Compute", config);
    if (!options.ok()) return options.status();
    return flash_attention_forward(*context_, {.query = query, .key = key, .value = value},
                                   {.out = output, .softmax_lse = softmax_lse}, options.value());
  });
}

Status FlashAttentionOp::ComputeGrad(const ConstTensor& query, const ConstTensor& key, const ConstTensor& value,
                                     const Saved& saved, const Gradients& gradients, const Config& config) const {
  return guarded([&]() -> Status {
    const Result<AttentionOptions> options = options_of("FlashAttentionOp::ComputeGrad", config);
    if (!options.ok()) return options.status();
    return flash_attention_backward(
        *context_, {.query = query, .key = key, .value = value},
        {.out = saved.output, .softmax_lse = saved.softmax_lse, .grad_out = saved.grad_output},
        {.grad_query = gradients.query, .grad_key = gradients.key, .grad_value = gradients.value}, options.value());
  });
}

Status MatMulAlltoAll_pipelined(Context& context, const ConstTensor& input, const ConstTensor& weight,
                                Communicator& comm, const Tensor& output, int64_t tile_size) {
  return guarded([&]() -> Status {
    const Result<std::vector<PackedWeight>> parts = pack_columns(context, weight, comm.world_size());
    // Without weights the call is refused on all ranks, instead of the others waiting for this one.
    const std::vector<PackedWeight> none;
    const Status status =
        matmul_all_to_all(context, comm, input, parts.ok() ? parts.value() : none, output, {.tile_rows = tile_size});
    return parts.ok() ? status : parts.status();
  });
}

}  // namespace opst
