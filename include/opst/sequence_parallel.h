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
// Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
#pragma once

#include <cstdint>
#include <span>

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

}  // namespace opst
