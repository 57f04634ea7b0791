#include "matmul/plan.h"

#include <algorithm>

#include "core/int_math.h"
#include "machine/workspace.h"
#include "matmul/packed_layout.h"

namespace opst::gemm {
namespace {

// Up to here decoding per four rows costs less than filling scratch and a register tile.
constexpr int64_t kMaxFewRows = 8;
// Weights of one few_rows task: some microseconds of reading, beside which handing out a task is nothing.
constexpr int64_t kFewTaskBytes = 32 << 10;
// many_rows: x block 192 x 384 f32 = 288 KB leaves half of a 1 MB L2 to decoded weights and sums. Decoding costs as
// much as three rows.
constexpr int64_t kManyRows = 192;
constexpr int64_t kManyColumns = 64;
constexpr int64_t kMaxKBlock = 384;
// Rows of packed x do not lie a multiple of 4 KB apart, or a register tile's rows would share a set of L1.
constexpr int64_t kPadding = 16;

// The smallest equal parts of `size`, each at most `most` and a multiple of `unit`.
int64_t balanced(int64_t size, int64_t most, int64_t unit) {
  if (size == 0) return unit;
  return round_up(ceil_div(size, ceil_div(size, most)), unit);
}

}  // namespace

Plan make_plan(const Problem& problem, int few_columns, int many_columns) {
  Plan plan;
  if (problem.m <= kMaxFewRows) {
    const int64_t unit = std::max<int64_t>(few_columns, kPanelColumns);
    const int64_t bytes_per_unit =
        std::max<int64_t>(1, problem.k / block_values(problem.format) * block_bytes(problem.format) * unit);
    plan.path = Path::few_rows;
    plan.rows_per_task = problem.m;
    plan.row_tasks = 1;
    plan.columns_per_task = std::max<int64_t>(1, kFewTaskBytes / bytes_per_unit) * unit;
    plan.column_tasks = ceil_div(problem.n, plan.columns_per_task);
    plan.k_block = std::max<int64_t>(1, problem.k);
    if (!problem.x_rows_contiguous) {
      plan.x_stride = problem.k;
      plan.packed_x_bytes = Arena::size_of<float>(problem.m * problem.k);
    }
    return plan;
  }
  plan.path = Path::many_rows;
  plan.rows_per_task = balanced(problem.m, kManyRows, 1);
  plan.row_tasks = ceil_div(problem.m, plan.rows_per_task);
  plan.columns_per_task = kManyColumns;
  plan.column_tasks = ceil_div(problem.n, kManyColumns);
  const int64_t block = std::max<int64_t>(32, block_values(problem.format));
  plan.k_block = balanced(problem.k, kMaxKBlock / block * block, block);
  plan.x_stride = plan.k_block + kPadding;
  plan.packed_x_bytes = Arena::size_of<float>(plan.k_blocks(problem.k) * problem.m * plan.x_stride);
  plan.decoded_bytes_per_worker = Arena::size_of<float>(plan.k_block * many_columns);
  plan.sums_bytes_per_worker = Arena::size_of<float>(plan.rows_per_task * round_up(kManyColumns, many_columns));
  return plan;
}

std::string to_string(const Plan& plan) {
  return std::string(plan.path == Path::few_rows ? "few rows" : "many rows") + ", tasks of " +
         std::to_string(plan.rows_per_task) + " x " + std::to_string(plan.columns_per_task) + ", k block " +
         std::to_string(plan.k_block) + ", " + std::to_string(plan.num_tasks()) + " tasks";
}

}  // namespace opst::gemm
