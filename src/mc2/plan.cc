// plan_mc2: from a problem to tiles. Beside each number, the limit that sets it.
#include <algorithm>

#include "core/int_math.h"
#include "core/text.h"
#include "mc2/transport.h"
#include "opst/mc2.h"

namespace opst {

namespace {

// A product of many rows packs x 256 rows at a time: smaller tiles would decode the weight more often.
constexpr int64_t kTileRows = 256;
constexpr int64_t kLine = 64;

}  // namespace

const char* to_string(Mc2Operator op) {
  return name_of(op, {"matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter",
                      "matmul_all_reduce", "sequence_to_heads", "heads_to_sequence", "ring_attention_forward",
                      "ring_attention_backward", "all_to_allv_grouped_matmul", "grouped_matmul_all_to_allv",
                      "moe_dispatch", "moe_combine", "attention_to_ffn", "ffn_to_attention"});
}

int64_t share_of(int64_t n, int parts, int index) { return parts < 1 ? 0 : n / parts + (index < n % parts ? 1 : 0); }

Mc2Plan plan_mc2(const Mc2Problem& problem) {
  Mc2Plan plan{.op = problem.op, .world_size = std::max(1, problem.world_size)};
  const int64_t rows = std::max<int64_t>(1, std::min(problem.rows, kMaxBytes));
  const int64_t row_bytes = std::clamp<int64_t>(problem.row_bytes, 0, kMaxBytes);
  const int64_t slot = std::max<int64_t>(0, problem.slot_bytes / kLine * kLine);
  const int64_t fitting = row_bytes == 0 ? kMaxBytes : slot / row_bytes;
  const int64_t most = std::min({rows, fitting, problem.tile_rows > 0 ? problem.tile_rows : kTileRows});
  if (most < 1) return plan;
  // As equal as they can be, or the last tile would leave the others' ranks waiting for little.
  plan.tile_rows = problem.tile_rows > 0 ? most : ceil_div(rows, ceil_div(rows, most));
  plan.tile_bytes = round_up((Size(plan.tile_rows) * row_bytes).value(), kLine);
  plan.tiles = problem.rows > 0 ? ceil_div(rows, plan.tile_rows) : 0;
  plan.staging_bytes = (Size(mc2::kSlots) * plan.world_size * plan.tile_bytes).value();
  return plan;
}

std::string to_string(const Mc2Plan& plan, int rank) {
  std::string line =
      text(to_string(plan.op), ": ", plan.world_size, " ranks, ", plan.tiles, " tiles of ", plan.tile_rows, " rows, ",
           plan.tile_bytes, " bytes; at most ", plan.staging_bytes, " bytes in flight to a rank\n");
  const auto ring = [&](int first) {
    const int ranks = std::max(1, plan.world_size);
    return joined(ranks, [&](int i) { return std::to_string((rank + first + i) % ranks); });
  };
  switch (plan.op) {
    case Mc2Operator::matmul_all_to_all:
      return line + text("rank ", rank, " multiplies for ranks ", ring(1), ", for each all tiles in turn");
    case Mc2Operator::all_to_all_matmul:
      return line + text("rank ", rank, " sends to ranks ", ring(1),
                         ", and multiplies a tile when all ranks' pieces are there");
    case Mc2Operator::all_gather_matmul:
      return line + text("rank ", rank, " multiplies the rows of ranks ", ring(0), ", as they arrive");
    case Mc2Operator::matmul_reduce_scatter:
      return line + text("rank ", rank, " multiplies tile 0 for ranks ", ring(1),
                         ", then tile 1, ..., and sums a tile when all ranks' partials are there");
    case Mc2Operator::ring_attention_forward:
    case Mc2Operator::ring_attention_backward:
      return line + text("rank ", rank, " sends its keys to ranks ", ring(1), ", and attends tile 0 of ranks ", ring(0),
                         ", then tile 1, ..");
    case Mc2Operator::all_to_allv_grouped_matmul:
      return line + text("rank ", rank, " sends to ranks ", ring(1),
                         ", and multiplies a tile of its experts' rows when all ranks' pieces are there");
    case Mc2Operator::grouped_matmul_all_to_allv:
      return line + text("rank ", rank, " multiplies tile 0 of its experts' rows, sends its pieces to ranks ", ring(1),
                         ", then tile 1, ..");
    case Mc2Operator::sequence_to_heads:
    case Mc2Operator::heads_to_sequence:
    case Mc2Operator::moe_dispatch:
    case Mc2Operator::moe_combine:
    case Mc2Operator::attention_to_ffn:
    case Mc2Operator::ffn_to_attention:
      return line + text("rank ", rank, " sends to ranks ", ring(1), ", to each all tiles in turn");
    default:
      return line + text("rank ", rank, " multiplies for ranks ", ring(1),
                         " a tile each, sums its own tile when all partials are there, and sends it to all");
  }
}

}  // namespace opst
