// normed_matmul: check, plan, run.
#include "extending/normed_matmul.h"

#include <algorithm>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "extending/normed_matmul_kernels.h"
#include "machine/context_impl.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, extending, Kernels, kKernels, kernels)

namespace extending {

Status normed_matmul(Context& context, const ConstTensor& x, const ConstTensor& gain, const ConstTensor& weight,
                     const Tensor& out, double eps) {
  return guarded([&]() -> Status {
    // Check: contract, check and messages in one paragraph.
    ShapeCheck check("normed_matmul");
    check.tensor("x", x).dtype({DType::f32}).dims({"m", "k"});
    check.tensor("gain", gain).dtype({DType::f32}).dims({"k"});
    check.tensor("weight", weight).dtype({DType::f32}).dims({"n", "k"});
    check.output("out", out).dtype({DType::f32}).dims({"m", "n"}).unit_inner_stride();
    check.require(eps >= 0, [&] { return "eps is " + std::to_string(eps) + ", but must be >= 0"; });
    if (!check.ok()) return check.status();

    // Plan: a function of the problem and the machine, never of the number of threads.
    const Kernels& kernel = kernels(context.machine().isa);
    const int64_t m = check["m"], n = check["n"], k = check["k"];
    if (m == 0 || n == 0) return {};
    constexpr int64_t kPanels = 8;  // of a task: the rows are normalised once for 256 columns
    const int64_t task_columns = kPanels * kernel.panel_columns;
    const int64_t row_tasks = ceil_div(m, kernel.tile_rows), column_tasks = ceil_div(n, task_columns);
    const int64_t weight_bytes = Arena::size_of<float>(round_up(n, kernel.panel_columns) * k);
    const int64_t worker_bytes = Arena::size_of<float>(kernel.tile_rows * k);
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(weight_bytes + context.num_threads() * worker_bytes);
    if (!lease.ok()) return lease.status();
    auto* const panels = static_cast<float*>(lease.value().data());
    char* const scratch = static_cast<char*>(lease.value().data()) + weight_bytes;

    // Run: pack the weight, then tiles of out; tasks in ascending order, each written by one of them.
    const auto* const w = static_cast<const float*>(weight.data);
    context.impl().pool.parallel_for(ceil_div(n, kernel.panel_columns), [&](int64_t task, int) {
      const void* rows[64];
      const int64_t first = task * kernel.panel_columns, count = std::min(kernel.panel_columns, n - first);
      for (int64_t i = 0; i < count; ++i) rows[i] = w + (first + i) * weight.strides[0];
      kernel.pack(rows, weight.strides[1], count, k, panels + first * k);
    });
    context.impl().pool.parallel_for(row_tasks * column_tasks, [&](int64_t task, int worker) {
      const int64_t row = task / column_tasks * kernel.tile_rows, column = task % column_tasks * task_columns;
      kernel.run({.rows = std::min(kernel.tile_rows, m - row),
                  .columns = std::min(task_columns, n - column),
                  .k = k,
                  .x = static_cast<const float*>(x.data) + row * x.strides[0],
                  .x_row_stride = x.strides[0],
                  .x_stride = x.strides[1],
                  .gain = static_cast<const float*>(gain.data),
                  .gain_stride = gain.strides[0],
                  .eps = static_cast<float>(eps),
                  .normed = reinterpret_cast<float*>(scratch + worker * worker_bytes),
                  .panels = panels + column * k,
                  .out = static_cast<float*>(out.data) + row * out.strides[0] + column,
                  .out_row_stride = out.strides[0]});
    });
    return {};
  });
}

}  // namespace extending
}  // namespace opst
