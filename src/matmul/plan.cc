#include "matmul/plan.h"

#include <algorithm>

#include "core/int_math.h"
#include "machine/workspace.h"
#include "matmul/packed_layout.h"

namespace opst::gemm {
namespace {

// Up to this many rows, decoding in registers once per 4 rows (2 without AVX-512) costs less than filling scratch and a
// register tile.
constexpr int64_t kMaxFewRows = 8;
// Weights of one few_rows task: some microseconds of reading, beside which handing out a task is nothing.
constexpr int64_t kFewTaskBytes = 32 << 10;
// Weights of one task of plan_few_blocks. Small products give each worker one piece. A worker reads ahead within its
// own piece only: where two cores fetch the same lines, the lines wander between the cores. q4_1 of 1536 x 576, two
// threads, microseconds: tasks of 32 KB 22 with reading ahead into the next task, 17 without; one task each 14.
constexpr int64_t kMinPieceBytes = 16 << 10, kMaxPieceBytes = 1 << 20, kMaxLonePieceBytes = 2 << 20;
// Columns of a piece: a multiple of what the kernel of two rows takes at once.
constexpr int64_t kPieceColumns = 2 * kPanelColumns;
// many_rows: a run of x, 256 x 512 words = 512 KB, sums 128 KB and decoded weights 64 KB stay in a 1 MB L2. Decoding
// costs as much as three rows.
constexpr int64_t kManyRows = 256;
constexpr int64_t kMaxKBlock = 512;
// Columns of a task: x is read once per task. Below n = kWideEnough fewer columns, or too few tasks would leave
// threads waiting.
constexpr int64_t kManyColumns = 128, kFewerColumns = 64, kWideEnough = 1024;
// Rows of packed x do not lie a multiple of 4 KB apart, or a register tile's rows would share a set of L1.
constexpr int64_t kPadding = 16;

// `size` in the fewest equal shares of at most `most`: the size of one, rounded up to a multiple of `unit`.
int64_t balanced(int64_t size, int64_t most, int64_t unit) {
  if (size == 0) return unit;
  return round_up(ceil_div(size, ceil_div(size, most)), unit);
}

}  // namespace

Plan make_plan(const Problem& problem, int few_columns, int many_columns) {
  Plan plan;
  plan.words = problem.dot ? ceil_div(problem.k, 2) : packed_inputs(problem.format, problem.k);
  const bool few = problem.m <= kMaxFewRows;
  if (few) {
    const int64_t unit = std::max<int64_t>(few_columns, kPanelColumns);
    const int64_t bytes_per_unit =
        std::max<int64_t>(1, (problem.two_halves ? 2 : 1) * packed_column_bytes(problem.format, problem.k) * unit);
    plan.path = Path::few_rows;
    plan.rows_per_task = problem.m;
    plan.columns_per_task = std::max<int64_t>(1, kFewTaskBytes / bytes_per_unit) * unit;
    plan.k_block = std::max<int64_t>(1, plan.words);
    plan.x_stride = problem.read_x_in_place ? 0 : plan.k_block;
    plan.packed_x_bytes = Arena::size_of<float>((Size(problem.m) * plan.x_stride).value());
  } else {
    plan.path = Path::many_rows;
    plan.rows_per_task = balanced(problem.m, kManyRows, 1);
    plan.columns_per_task = problem.n >= kWideEnough ? kManyColumns : kFewerColumns;
    const int64_t block = std::max<int64_t>(32, block_values(problem.format));
    plan.k_block = balanced(plan.words, kMaxKBlock / block * block, block);
    plan.x_stride = plan.k_block + kPadding;
    plan.packed_x_bytes =
        Arena::size_of<float>((Size(ceil_div(plan.words, plan.k_block)) * problem.m * plan.x_stride).value());
    plan.decoded_bytes_per_worker = Arena::size_of<float>(plan.k_block * many_columns);
  }
  plan.row_tasks = ceil_div(problem.m, plan.rows_per_task);
  plan.column_tasks = ceil_div(problem.n, plan.columns_per_task);
  const int64_t unit = few ? few_columns : many_columns;
  plan.sums_stride = round_up(plan.columns_per_task, unit);
  plan.sums_bytes_per_worker = Arena::size_of<float>(plan.rows_per_task * plan.sums_stride);
  if (problem.two_halves) {
    // The second half begins anywhere in a panel.
    plan.second_stride = round_up(plan.columns_per_task + kPanelColumns - 1, unit);
    plan.second_bytes_per_worker = Arena::size_of<float>(plan.rows_per_task * plan.second_stride);
  }
  return plan;
}

Plan plan_few_blocks(const Problem& problem, int num_threads) {
  const int64_t halves = problem.two_halves ? 2 : 1;
  const int64_t column_bytes = std::max<int64_t>(1, halves * packed_column_bytes(problem.format, problem.k));
  const int64_t most = num_threads > 1 ? kMaxPieceBytes : kMaxLonePieceBytes;
  const int64_t pieces = num_threads * ceil_div(problem.n * column_bytes, num_threads * most);
  Plan plan;
  plan.rows_per_task = problem.m;
  plan.row_tasks = 1;
  plan.words = problem.k;
  plan.columns_per_task = round_up(
      std::max(ceil_div(problem.n, std::max<int64_t>(1, pieces)), kMinPieceBytes / column_bytes), kPieceColumns);
  plan.column_tasks = ceil_div(problem.n, plan.columns_per_task);
  plan.sums_stride = plan.columns_per_task;
  plan.sums_bytes_per_worker = Arena::size_of<float>(problem.m * plan.sums_stride);
  if (problem.two_halves) {
    plan.second_stride = plan.columns_per_task + kPanelColumns;
    plan.second_bytes_per_worker = Arena::size_of<float>(problem.m * plan.second_stride);
  }
  return plan;
}

std::string to_string(const Plan& plan) {
  return std::string(plan.path == Path::few_rows ? "few rows" : "many rows") + ", tasks of " +
         std::to_string(plan.rows_per_task) + " x " + std::to_string(plan.columns_per_task) + ", k block " +
         std::to_string(plan.k_block) + ", " + std::to_string(plan.num_tasks()) + " tasks";
}

int64_t packed_inputs(QuantFormat format, int64_t k) { return format == QuantFormat::bf16 ? round_up(k, 2) : k; }

int64_t packed_column_bytes(QuantFormat format, int64_t k) {
  return (Size(packed_inputs(format, k) / block_values(format)) * block_bytes(format)).value();
}

}  // namespace opst::gemm
