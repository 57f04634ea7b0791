// Names that articles about flash attention on Ascend cards use in their C++ samples, over attention.h and mc2.h.
//
//   opst::FlashAttentionOp op(context);
//   opst::FlashAttentionOp::Config config;
//   config.causal = true;
//   opst::Status status = op.Compute(query, key, value, output, config);
//
// Nothing is computed here: arguments become those of flash_attention_forward, flash_attention_backward and
// matmul_all_to_all, whose dtypes, strides, errors and numerics hold.
#pragma once

#include <cstdint>

#include "opst/communicator.h"
#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

class FlashAttentionOp {
 public:
  struct Config {
    int64_t block_size_q = 0;   // rows of queries of a tile, up to 4096; 0: the plan's choice
    int64_t block_size_kv = 0;  // keys of a tile, likewise
    float softmax_scale = -1;   // -1: 1 / sqrt(head_dim)
    bool causal = false;        // the last query sees the last key
    float dropout_p = 0;        // in [0, 1): the part of the probabilities that becomes 0
    uint64_t seed = 0;          // of dropout: attention.h says which are kept
  };

  // The context's threads are shared with other operators; it outlives this object.
  explicit FlashAttentionOp(Context& context) : context_(&context) {}

  //   query, output  [batch, heads, query_len, head_dim] (output: value's head_dim)
  //   key, value     [batch, kv_heads, kv_len, head_dim], kv_heads divides heads
  //   softmax_lse    f32 [batch, heads, query_len] if it has data; ComputeGrad reads it
  // Errors: invalid_argument, also for a config out of the ranges above; nothing is written then.
  Status Compute(const ConstTensor& query, const ConstTensor& key, const ConstTensor& value, const Tensor& output,
                 const Config& config, const Tensor& softmax_lse = {}) const;

  // Gradients of query, key and value, of what Compute gave with the same config; one without data is not wanted.
  struct Saved {
    ConstTensor output, softmax_lse, grad_output;
  };
  struct Gradients {
    Tensor query, key, value;
  };
  Status ComputeGrad(const ConstTensor& query, const ConstTensor& key, const ConstTensor& value, const Saved& saved,
                     const Gradients& gradients, const Config& config) const;

 private:
  Context* context_;
};

// matmul_all_to_all of mc2.h with a weight that is packed in this call:
//   input   [rows, k] of this rank, as many on every rank
//   weight  [n, k] f32, bf16 or f16, the same on all ranks; rank r makes its share of the n columns
//   output  [rows of all ranks, share of n]
// tile_size: rows of a tile of the pipeline, all ranks alike; 0: the plan's choice. What one rank's arguments are refused
// for, all ranks are told.
Status MatMulAlltoAll_pipelined(Context& context, const ConstTensor& input, const ConstTensor& weight,
                                Communicator& comm, const Tensor& output, int64_t tile_size = 0);

}  // namespace opst
