// int8 activations in blocks of 32, times GGUF weights: plan, quantise x, multiply.
#include "matmul/int8_blocks.h"

#include <algorithm>

#include "core/int_math.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "matmul/int8_blocks_matmul.h"
#include "matmul/packed_layout.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, Int8BlockKernels, kInt8BlockKernels, int8_block_kernels)

namespace gemm {
namespace {

// Rows x columns of a task. Unpacking 64 columns costs as much as multiplying them with two or three rows.
constexpr int64_t kTaskRows = 192;
constexpr int64_t kTaskColumns = 64;
// Values of k unpacked at once: bytes and scales of two vectors of columns stay in L1.
constexpr int64_t kMaxKBlock = 512;
// Rows of x per quantising task.
constexpr int64_t kQuantiseRows = 16;

}  // namespace

bool multiplies_int8_blocks(QuantFormat format) {
  return int8_block_kernels(Isa::generic).rows[static_cast<int>(format)] != nullptr;
}

QuantiseRow int8_quantise_row(Isa isa) { return int8_block_kernels(isa).quantise_row; }

Status matmul_int8_blocks(Context& context, const ConstTensor& x, const PackedWeight& weight, const OutputPart& out) {
  const int64_t m = x.shape[0], n = weight.n(), k = weight.k();
  const auto format = static_cast<int>(weight.format());
  const Int8BlockKernels& table = int8_block_kernels(context.machine().isa);
  const auto multiply = table.rows[format];

  // Plan.
  const int64_t row_tasks = ceil_div(m, kTaskRows);
  const int64_t rows_per_task = ceil_div(m, row_tasks);
  const int64_t column_tasks = ceil_div(n, kTaskColumns);
  const int64_t blocks = k / kActivationBlock;
  const int64_t k_block = std::min(kMaxKBlock, std::max<int64_t>(k, kActivationBlock));
  const int64_t columns = table.columns_at_once;
  const int64_t blocks_bytes = Arena::size_of<ActivationBlock>(m * blocks);
  const int64_t bytes_bytes = Arena::size_of<uint32_t>(k_block / 4 * columns);
  const int64_t scales_bytes = Arena::size_of<float>(k_block / 16 * columns);
  const int64_t minimums_bytes = Arena::size_of<float>(k_block / kActivationBlock * columns);
  const int64_t sums_bytes = Arena::size_of<float>(rows_per_task * round_up(kTaskColumns, columns));
  const int64_t worker_bytes = bytes_bytes + scales_bytes + minimums_bytes + sums_bytes;
  ThreadPool& pool = context.impl().pool;
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(blocks_bytes + pool.num_threads() * worker_bytes);
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());

  // Run.
  auto* const a = arena.take<ActivationBlock>(m * blocks);
  pool.parallel_for(ceil_div(m, kQuantiseRows), [&](int64_t task, int) {
    for (int64_t i = task * kQuantiseRows; i < std::min(m, (task + 1) * kQuantiseRows); ++i) {
      table.quantise_row(static_cast<const float*>(x.data) + i * x.strides[0], x.strides[1], k, a + i * blocks);
    }
  });
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * worker_bytes));
  const int64_t row_bytes = k / block_values(weight.format()) * block_bytes(weight.format());
  pool.parallel_for(row_tasks * column_tasks, [&](int64_t task, int worker) {
    const int64_t row = task / column_tasks * rows_per_task;
    const int64_t column = task % column_tasks * kTaskColumns;
    OutputPart part = out;
    part.data += row * out.row_stride + column * out.column_stride;
    if (part.bias != nullptr) part.bias += column * out.bias_stride;
    char* const own = scratch + worker * worker_bytes;
    multiply({.a = a + row * blocks,
              .a_stride = blocks,
              .rows = std::min(rows_per_task, m - row),
              .columns = std::min(kTaskColumns, n - column),
              .k = k,
              .k_block = k_block,
              .panels = static_cast<const char*>(weight.data()) + column * row_bytes,
              .out = part,
              .bytes = reinterpret_cast<uint32_t*>(own),
              .scales = reinterpret_cast<float*>(own + bytes_bytes),
              .minimums = reinterpret_cast<float*>(own + bytes_bytes + scales_bytes),
              .sums = reinterpret_cast<float*>(own + bytes_bytes + scales_bytes + minimums_bytes)});
  });
  return {};
}

}  // namespace gemm
}  // namespace opst
