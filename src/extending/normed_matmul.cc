// normed_matmul: check, plan, run.
#include "extending/normed_matmul.h"

#include <algorithm>

#include "core/guarded.h"
#include "core/shape_check.h"
#include "extending/normed_matmul_kernels.h"
#include "machine/levels.h"
#include "matmul/call.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, extending, Kernels, kKernels, kernels)

Status extending::normed_matmul(Context& context, const ConstTensor& x, const ConstTensor& gain,
                                const ConstTensor& weight, const Tensor& out, double eps) {
  return guarded([&]() -> Status {
    // Check: contract, check and messages in one paragraph.
    ShapeCheck check("normed_matmul");
    check.tensor("x", x).dtype({DType::f32}).dims({"m", "k"});
    check.tensor("gain", gain).dtype({DType::f32}).dims({"k"});
    check.tensor("weight", weight).dtype({DType::f32}).dims({"n", "k"});
    check.output("out", out).dtype({DType::f32}).dims({"m", "n"});
    check.require(eps >= 0, "eps is ", eps, ", but must be >= 0");
    if (!check.ok()) return check.status();

    // Plan: a function of the problem and the machine, never of the number of threads.
    const int64_t m = check["m"], n = check["n"], k = check["k"];
    if (m == 0 || n == 0) return {};
    const Isa isa = context.machine().isa;
    const gemm::FloatKernels& floats = gemm::float_kernels(isa);
    // Of a task. Normalised rows (110 KB at k = 576), sums (48 KB) and decoded weights (64 KB) stay in L2 together.
    constexpr int64_t kRows = 48, kColumns = 256, kDepth = 512;
    const int64_t stride = k + 16, depth = std::min(k, kDepth);
    const int64_t column_tasks = ceil_div(n, kColumns), tasks = ceil_div(m, kRows) * column_tasks;
    const int64_t weight_bytes = gemm::packed_bytes(QuantFormat::f32, n, k).value();
    const int64_t worker_bytes = Arena::size_of<float>(kRows * stride) + Arena::size_of<float>(kRows * kColumns) +
                                 Arena::size_of<float>(depth * floats.many_columns);
    const Size all_workers_bytes = Size(worker_bytes) * context.num_threads();
    Result<WorkspaceLease> lease =
        context.impl().workspaces.lease((all_workers_bytes + Arena::round_up(weight_bytes)).value());
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());

    // Run: pack the weight, then rectangles of out, each by one task.
    char* const panels = arena.take<char>(weight_bytes);
    auto* const scratch = static_cast<char*>(arena.take_bytes(all_workers_bytes));
    gemm::pack_float_weight(context, normal_strides(weight), panels);
    context.impl().pool.parallel_for(tasks, [&](int64_t task, int worker) {
      const int64_t row = task / column_tasks * kRows, rows = std::min(kRows, m - row);
      const int64_t column = task % column_tasks * kColumns, columns = std::min(kColumns, n - column);
      Arena own(scratch + worker * worker_bytes, worker_bytes);
      float *const normed = own.take<float>(kRows * stride), *const sums = own.take<float>(kRows * kColumns);
      for (int64_t i = 0; i < rows; ++i) {
        kernels(isa).normalise(static_cast<const float*>(x.data) + (row + i) * x.strides[0], x.strides[1],
                               static_cast<const float*>(gain.data), gain.strides[0], k, static_cast<float>(eps),
                               normed + i * stride);
      }
      floats.many_rows[static_cast<int>(QuantFormat::f32)](
          {.x = normed,
           .x_stride = stride,
           .x_block_stride = depth,
           .rows = rows,
           .columns = columns,
           .k = k,
           .k_block = depth,
           .panels = panels + column * gemm::packed_column_bytes(QuantFormat::f32, k),
           .scratch = own.take<float>(depth * floats.many_columns),
           .sums = sums,
           .sums_stride = kColumns});
      floats.finish[static_cast<int>(Activation::none)](
          {.sums = sums,
           .sums_stride = kColumns,
           .rows = rows,
           .columns = columns,
           .out = static_cast<float*>(out.data) + row * out.strides[0] + column * out.strides[1],
           .row_stride = out.strides[0],
           .column_stride = out.strides[1]});
    });
    return {};
  });
}

}  // namespace opst
