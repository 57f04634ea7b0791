// Attention of sequences that are spread over ranks: exchange of heads for rows, and attention with keys that pass from
// rank to rank.
//
// P ranks call the same operator with tensors of their own; communicator.h says how, and which errors there are. r is
// the calling rank, R_s the rows (tokens) that belong to rank s, H_s its heads.
//
//   sequence_to_heads    rows sharded -> heads sharded:   out[R_0 + .. + R_s-1 + i, h] = (x of s)[i, H_0 + .. + H_r-1 + h]
//   heads_to_sequence    heads sharded -> rows sharded, the inverse
//
// Each is the gradient of the other: the gradient of x is heads_to_sequence of the gradient of out. Attention is per
// head, so that attention between the two is exact (Ulysses). Values are copied bit by bit.
//
// Memory: tiles in flight, at most 2 P tiles per rank; none where a rank can store into another's out.
//
//   ring_attention_forward, _backward    attention (attention.h) of my queries with the keys of all ranks
//
// Source: Jacobs et al., "DeepSpeed Ulysses" (2023); Liu et al., "Ring Attention with Blockwise Transformers" (2023).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "opst/attention_backward.h"
#include "opst/communicator.h"
#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// All ranks pass the same.
struct HeadShardOptions {
  // [P] rows of each rank, any number >= 0. Empty: sequence_to_heads: as many for every rank as x has here;
  // heads_to_sequence: the rows of x divided, as equal as they can be, the first ranks one more if need be.
  std::span<const int64_t> rows = {};
  // [P] heads of each rank. Empty: all heads divided likewise (share_of in mc2.h).
  std::span<const int64_t> heads = {};
  int64_t tile_rows = 0;  // 0: the plan's choice
};

//   x    [R_r, sum of H_s, head_dim]      any dtype, any strides
//   out  [sum of R_s, H_r, head_dim]      the same dtype
Status sequence_to_heads(Context& context, Communicator& communicator, const ConstTensor& x, const Tensor& out,
                         const HeadShardOptions& options = {});

//   x    [sum of R_s, H_r, head_dim]
//   out  [R_r, sum of H_s, head_dim]
Status heads_to_sequence(Context& context, Communicator& communicator, const ConstTensor& x, const Tensor& out,
                         const HeadShardOptions& options = {});

// Which tokens of the sequence a rank's rows are.
enum class SequenceOrder : uint8_t {
  contiguous,  // rank 0's are the first ones, rank 1's follow
  // The sequence is cut into 2 P chunks; rank r has chunk r, then chunk 2 P - 1 - r. Under a causal mask all ranks have
  // the same work. Of R_r rows the first ceil(R_r / 2) are of the first chunk, the others of the second.
  zigzag,
};

// All ranks pass the same.
struct RingAttentionOptions {
  std::optional<double> softmax_scale = {};  // as in AttentionOptions, like the next three
  bool causal = false;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  double softcap = 0;
  SequenceOrder order = SequenceOrder::contiguous;
  std::span<const int64_t> rows = {};  // [P] rows of each rank, any number >= 0. Empty: as many as key has here
  int64_t tile_rows = 0;               // keys of a tile; 0: the plan's choice
};

//   query  [batch, num_heads, R_r, head_dim]              f32, bf16 or f16
//   key    [batch, num_kv_heads, R_r, head_dim]           f32, bf16 or f16
//   value  [batch, num_kv_heads, R_r, value_head_dim]     key's dtype
// Masks and windows count in tokens of the whole sequence, whose queries and keys are as many.
struct RingAttentionInputs {
  ConstTensor query, key, value;
};

// out [batch, num_heads, R_r, value_head_dim] f32, bf16 or f16; softmax_lse f32 [batch, num_heads, R_r] if it has data.
// (softmax_max and softmax_sum have none.)
//   for tiles i: for ranks s = r, r + 1, ..: out, lse = merge_attention(.., attention with the keys of tile i of s)
// Tiles do not reach over the end of a chunk; a tile is sent to the ranks that see some key of it.
// Numerics: partial results and their sum are f32, merged in the order above; out is rounded once. The bits depend on
// the tile's rows and on the rank that has a query, not on timing or threads. Rules of rows as in attention.h: one that
// sees no key has out = 0, softmax_lse = -inf.
// Memory: tiles of keys and values in flight, at most 2 P per rank; f32 of out's size for a tile's result, and again for
// the sum where out is not f32.
Status ring_attention_forward(Context& context, Communicator& communicator, const RingAttentionInputs& inputs,
                              const AttentionOutputs& outputs, const RingAttentionOptions& options = {});

// Gradients, as flash_attention_backward defines them. saved: out, softmax_lse and grad_out of this rank's rows (no
// other members); gradients: of query, key and value (no others), in f32, bf16 or f16.
//   for tiles i: for ranks s = r, r + 1, ..: grad_query += ..; a tile's grad_key and grad_value go back to s
// whose owner adds those of all ranks in the order of ranks.
// Numerics: sums in f32, each result rounded once. Memory: tiles in flight as above, those of gradients f32; f32 of
// query's size, and again where grad_query is not f32; two tiles of gradients.
Status ring_attention_backward(Context& context, Communicator& communicator, const RingAttentionInputs& inputs,
                               const AttentionSaved& saved, const AttentionGradients& gradients,
                               const RingAttentionOptions& options = {});

}  // namespace opst
