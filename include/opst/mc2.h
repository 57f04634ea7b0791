// MC2: products fused with the exchange of their operands or results between ranks. The product of one tile is computed
// while the tiles before it are on their way, and no rank ever holds the tensor that the unfused form would exchange.
//
// P ranks call the same operator with tensors of their own. `x`, `weight`, `out` are as in matmul (opst/matmul.h):
// x . weight^T, weight [n, k] packed. r is the calling rank, R_s the rows that belong to rank s (Mc2Options::rows).
//
//   matmul_all_to_all       rows sharded -> columns sharded:  out[R_0 + .. + R_s-1 + i] = (x of s)[i] . weight_r^T
//   all_to_all_matmul       columns sharded -> rows sharded:  out = (my rows of the x of every rank, side by side) . weight^T
//   all_gather_matmul       out = (the x of all ranks, one below another) . weight^T
//   matmul_reduce_scatter   out = my rows of the sum over ranks of x . weight^T
//   matmul_all_reduce       out = the sum over ranks of x . weight^T
//
// Numerics: each result has the bits of its unfused form: matmul with batch_invariant = true, then the plain collective.
// Sums over ranks are of f32 partial products, added in f32 in the order of ranks; bias, then the residual follow in f32,
// once, and out is rounded once. No bit depends on timing, tiles or threads.
//
// Memory: tiles in flight, at most 2 P tiles per rank (Mc2Plan::staging_bytes, CommunicatorStats::peak_staging_bytes).
//
// Weights: a PackedWeight (f32, bf16, f16 and the GGUF formats; x f32, bf16 or f16) or a PackedIntWeight (x of floats or
// i8), not owned, as GroupedWeight takes them: one, or a range of P where the columns are sharded.
//
// Errors: communicator.h. A call that this rank refuses (invalid_argument) has written nothing, and fails on all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "opst/communicator.h"
#include "opst/context.h"
#include "opst/grouped_matmul.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// All ranks pass the same, but for tensors. ConstTensor{} is absent.
struct Mc2Options {
  // matmul_all_to_all: [n of all ranks]; else [n]. Added once, also where ranks are summed: there it must be the same on
  // all ranks, each of which adds it to some rows.
  ConstTensor bias = {};
  // [m] f32: x is i8 and stands for x * x_scales. Not of all_to_all_matmul, where a row comes from several ranks.
  ConstTensor x_scales = {};
  // Sums alone: out's shape, added once; the very same view as out, or no overlap with it. The same on all ranks.
  ConstTensor residual = {};
  ActivationType activations = ActivationType::exact;  // of a PackedWeight, as in MatmulOptions
  // [P] rows of each rank, any number >= 0. Empty:
  //   matmul_all_to_all, all_gather_matmul      as many for every rank as x has here
  //   all_to_all_matmul, matmul_reduce_scatter  the rows of x divided: P equal parts, the first ones one more if need be
  std::span<const int64_t> rows = {};
  // all_to_all_matmul: [P] columns of each rank's x. Empty: as many for every rank as x has here.
  std::span<const int64_t> inputs = {};
  // A second output: x as exchanged. all_gather_matmul: [rows of all ranks, k]; all_to_all_matmul: [my rows, k].
  Tensor exchanged = {};
  int64_t tile_rows = 0;  // 0: the plan's choice
};

//   x        [R_r, k]
//   weights  a range of P: weight d [n_d, k] makes the columns of rank d (pack_columns)
//   out      [sum of R_s, n_r] f32, bf16, f16, or i32 as in matmul of i8; any strides
Status matmul_all_to_all(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weights, const Tensor& out, const Mc2Options& options = {});

//   x        [sum of R_s, inputs of r]: the rows of rank d are sent there
//   weight   [n, sum of inputs]
//   out      [R_r, n]
Status all_to_all_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options = {});

//   x [R_r, k], weight [n, k], out [sum of R_s, n]
Status all_gather_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options = {});

//   x [sum of R_s, k_r], weight [n, k_r], out [R_r, n] f32, bf16 or f16. k_r may differ from rank to rank.
Status matmul_reduce_scatter(Context& context, Communicator& communicator, const ConstTensor& x,
                             const GroupedWeight& weight, const Tensor& out, const Mc2Options& options = {});

//   x [m, k_r], weight [n, k_r], out [m, n] f32, bf16 or f16. k_r may differ from rank to rank.
// Tile t of the rows is summed by rank t mod P, which sends the finished tile to all.
Status matmul_all_reduce(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options = {});

// Rows (outputs) of a weight [n, k] divided over `parts` ranks, each packed for itself: as equal as they can be, the
// first ones one more if need be. Errors: as PackedWeight::pack; invalid_argument for parts < 1.
Result<std::vector<PackedWeight>> pack_columns(Context& context, const ConstTensor& weight, int parts);
Result<std::vector<PackedWeight>> pack_columns(Context& context, const QuantMatrix& weight, int parts);
Result<std::vector<PackedIntWeight>> pack_columns(Context& context, const IntMatrix& weight, int parts);
// The part of `index` in such a division of n; 0 for parts < 1.
int64_t share_of(int64_t n, int parts, int index);

enum class Mc2Operator : uint8_t {
  matmul_all_to_all,
  all_to_all_matmul,
  all_gather_matmul,
  matmul_reduce_scatter,
  matmul_all_reduce,
  // sequence_parallel.h
  sequence_to_heads,
  heads_to_sequence,
  ring_attention_forward,
  ring_attention_backward,
  // expert_parallel.h
  all_to_allv_grouped_matmul,
  grouped_matmul_all_to_allv,
  moe_dispatch,
  moe_combine,
  attention_to_ffn,
  ffn_to_attention,
};
const char* to_string(Mc2Operator op);

// What a plan depends on: the same on all ranks.
struct Mc2Problem {
  Mc2Operator op = Mc2Operator::matmul_all_to_all;
  int world_size = 1;
  int64_t rows = 0;        // the most that one rank has (matmul_all_reduce: sums, the rows of x over P)
  int64_t row_bytes = 0;   // of a tile's row: the most that one rank sends another
  int64_t slot_bytes = 0;  // what a slot may have at most
  int64_t tile_rows = 0;   // Mc2Options::tile_rows
};

struct Mc2Plan {
  Mc2Operator op = Mc2Operator::matmul_all_to_all;
  int world_size = 1;
  int64_t tile_rows = 0;      // 0: not one row fits into a slot
  int64_t tile_bytes = 0;     // of a slot
  int64_t tiles = 0;          // of the rank with the most rows
  int64_t staging_bytes = 0;  // of a rank: 2 slots for each of P ranks
};

// A pure function.
Mc2Plan plan_mc2(const Mc2Problem& problem);
// One line, then the order of rank `rank`'s work.
std::string to_string(const Mc2Plan& plan, int rank = 0);

}  // namespace opst
