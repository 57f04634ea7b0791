#include "opst/matmul.h"

#include <algorithm>
#include <cstring>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "matmul/fixed_point_matmul.h"
#include "matmul/int8_blocks_matmul.h"
#include "matmul/kernels.h"
#include "matmul/packed_layout.h"
#include "matmul/plan.h"

namespace opst {
namespace {

using gemm::Plan;

const gemm::Kernels& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512::gemm::kKernels;
  if (isa >= Isa::avx2) return avx2::gemm::kKernels;
#endif
  static_cast<void>(isa);
  return generic::gemm::kKernels;
}

// Rows [begin, end) of x -> [k block][m][x_stride].
void pack_x(const ConstTensor& x, const Plan& plan, int64_t begin, int64_t end, float* out) {
  const int64_t m = x.shape[0];
  const int64_t k = x.shape[1];
  for (int64_t k0 = 0; k0 < k; k0 += plan.k_block) {
    const int64_t depth = std::min(plan.k_block, k - k0);
    for (int64_t i = begin; i < end; ++i) {
      const float* const from = static_cast<const float*>(x.data) + i * x.strides[0] + k0 * x.strides[1];
      float* const to = out + (k0 / plan.k_block * m + i) * plan.x_stride;
      if (x.strides[1] == 1) {
        std::memcpy(to, from, static_cast<size_t>(depth) * sizeof(float));
      } else {
        for (int64_t t = 0; t < depth; ++t) to[t] = from[t * x.strides[1]];
      }
    }
  }
}

// Rows of x per packing task.
constexpr int64_t kPackRows = 32;

}  // namespace

const char* to_string(ActivationType type) { return type == ActivationType::exact ? "exact" : "int8"; }

const char* to_string(Activation activation) {
  switch (activation) {
    case Activation::none:
      return "none";
    case Activation::silu:
      return "silu";
    case Activation::gelu_erf:
      return "gelu_erf";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::swiglu:
      return "swiglu";
    case Activation::swiglu_swapped:
      return "swiglu_swapped";
  }
  return "unknown";
}

Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options) {
  return guarded([&]() -> Status {
    // Check.
    ShapeCheck check("matmul");
    check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
    check.tensor("x", x).dtype({DType::f32}).dims({"m", "k"});
    if (options.bias) check.tensor("bias", *options.bias).dtype({DType::f32}).dims({"n"});
    check.output("out", out).dtype({DType::f32}).dims({"m", "n"});
    if (!check.ok()) return check.status();
    if (options.activation != Activation::none || options.residual) {
      return Status::unsupported("matmul: activation and residual are not implemented yet");
    }
    const int64_t m = check["m"];
    const int64_t n = weight.n();
    const int64_t k = weight.k();
    const auto differs = [](const char* where, int64_t size, const char* name, int64_t expected) {
      return std::string(where) + " is " + std::to_string(size) + ", but the weight has " + name + " = " +
             std::to_string(expected);
    };
    check.require(check["k"] == k, [&] { return differs("x dim 1 (k)", check["k"], "k", k); });
    check.require(check["n"] == n, [&] { return differs("out dim 1 (n)", check["n"], "n", n); });
    if (!check.ok()) return check.status();
    if (m == 0 || n == 0) return {};
    const gemm::OutputPart whole{.data = static_cast<float*>(out.data),
                                 .row_stride = out.strides[0],
                                 .column_stride = out.strides[1],
                                 .bias = options.bias ? static_cast<const float*>(options.bias->data) : nullptr,
                                 .bias_stride = options.bias ? options.bias->strides[0] : 0};
    if (options.activations == ActivationType::int8 && gemm::multiplies_int8_blocks(weight.format())) {
      return gemm::matmul_int8_blocks(context, x, weight, whole);
    }
    if (!options.batch_invariant && gemm::multiplies_fixed_point(context.machine(), weight.format(), m)) {
      const Result<bool> done = gemm::matmul_fixed_point(context, x, weight, whole);
      if (!done.ok()) return done.status();
      if (done.value()) return {};
      // The other rows keep their bits.
      for (int64_t i = 0; m > 1 && i < m; ++i) {
        const Status status = matmul(context, x.narrowed(0, i, 1), weight, out.narrowed(0, i, 1), options);
        if (!status.ok()) return status;
      }
      if (m > 1) return {};
    }

    // Plan.
    const gemm::Kernels& table = kernels(context.machine().isa);
    const Plan plan =
        gemm::make_plan({m, n, k, weight.format(), x.strides[1] == 1 || k <= 1}, table.few_columns, table.many_columns);
    ThreadPool& pool = context.impl().pool;
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(pool.num_threads()));
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());

    // Run.
    const float* rows = static_cast<const float*>(x.data);
    int64_t x_stride = x.strides[0];
    if (plan.x_stride > 0) {
      auto* const packed = static_cast<float*>(arena.take_bytes(plan.packed_x_bytes));
      pool.parallel_for(ceil_div(m, kPackRows), [&](int64_t task, int) {
        pack_x(x, plan, task * kPackRows, std::min(m, (task + 1) * kPackRows), packed);
      });
      rows = packed;
      x_stride = plan.x_stride;
    }
    auto* const worker_scratch =
        static_cast<char*>(arena.take_bytes(plan.scratch_bytes(pool.num_threads()) - plan.packed_x_bytes));

    const auto format = static_cast<int>(weight.format());
    const int64_t row_bytes = k / block_values(weight.format()) * block_bytes(weight.format());
    const int64_t bias_stride = options.bias ? options.bias->strides[0] : 0;
    pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
      const int64_t row = task / plan.column_tasks * plan.rows_per_task;
      const int64_t column = task % plan.column_tasks * plan.columns_per_task;
      const int64_t num_rows = std::min(plan.rows_per_task, m - row);
      const int64_t num_columns = std::min(plan.columns_per_task, n - column);
      const void* const panels = static_cast<const char*>(weight.data()) + column * row_bytes;
      const gemm::OutputPart part{
          .data = static_cast<float*>(out.data) + row * out.strides[0] + column * out.strides[1],
          .row_stride = out.strides[0],
          .column_stride = out.strides[1],
          .bias = options.bias ? static_cast<const float*>(options.bias->data) + column * bias_stride : nullptr,
          .bias_stride = bias_stride};
      if (plan.path == gemm::Path::few_rows) {
        table.few_rows[format]({.x = rows,
                                .x_stride = x_stride,
                                .rows = num_rows,
                                .columns = num_columns,
                                .k = k,
                                .panels = panels,
                                .out = part});
        return;
      }
      char* const scratch = worker_scratch + worker * (plan.decoded_bytes_per_worker + plan.sums_bytes_per_worker);
      table.many_rows[format]({.x = rows + row * x_stride,
                               .x_stride = x_stride,
                               .x_block_stride = m * x_stride,
                               .rows = num_rows,
                               .columns = num_columns,
                               .k = k,
                               .k_block = plan.k_block,
                               .panels = panels,
                               .out = part,
                               .decoded = reinterpret_cast<float*>(scratch),
                               .sums = reinterpret_cast<float*>(scratch + plan.decoded_bytes_per_worker)});
    });
    return {};
  });
}

}  // namespace opst
