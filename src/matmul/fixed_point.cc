#include "matmul/fixed_point.h"

#include <algorithm>

#include "core/int_math.h"
#include "machine/context_impl.h"
#include "machine/float_control.h"
#include "matmul/fixed_point_matmul.h"
#include "matmul/packed_layout.h"

namespace opst::gemm {
namespace {

// Weights of one task. Small products give each worker one piece. A worker reads ahead within its own task only: where
// two cores fetch the same lines, these wander between them (q4_1 of 1536 x 576, two threads: tasks of 32 KB 22 us
// reading ahead into the next one, 17 us not; one task each 14 us).
constexpr int64_t kMinTaskBytes = 16 << 10, kMaxTaskBytes = 512 << 10;
// Columns of a task are whole groups of two rows' kernel.
constexpr int64_t kColumnUnit = 2 * kPanelColumns;

const FewRowsBlockKernels* kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512_vnni) return &avx512_vnni::gemm::kFewRowsBlockKernels;
  if (isa >= Isa::avx512) return &avx512::gemm::kFewRowsBlockKernels;
  if (isa >= Isa::avx2) return &avx2::gemm::kFewRowsBlockKernels;
#endif
  static_cast<void>(isa);
  return nullptr;
}

template <class Block>
void run(Context& context, void (*multiply)(const BlockRows<Block>&), const Block* a, int64_t m,
         const PackedWeight& weight, const OutputPart& out) {
  const int64_t n = weight.n(), k = weight.k();
  const int64_t row_bytes = k / block_values(weight.format()) * block_bytes(weight.format());
  ThreadPool& pool = context.impl().pool;
  int64_t columns = n;
  if (pool.num_threads() > 1) {  // where a cut lies shows in no bit of the result
    const int64_t wanted = std::clamp(n * row_bytes / pool.num_threads() + 1, kMinTaskBytes, kMaxTaskBytes);
    columns = std::max<int64_t>(1, wanted / std::max<int64_t>(1, row_bytes * kColumnUnit)) * kColumnUnit;
  }
  pool.parallel_for(ceil_div(n, columns), [&](int64_t task, int) {
    const int64_t column = task * columns;
    OutputPart part = out;
    part.data += column * out.column_stride;
    if (part.bias != nullptr) part.bias += column * out.bias_stride;
    multiply({.a = a,
              .a_stride = k / kActivationBlock,
              .rows = m,
              .columns = std::min(columns, n - column),
              .k = k,
              .panels = static_cast<const char*>(weight.data()) + column * row_bytes,
              .out = part});
  });
}

}  // namespace

bool multiplies_fixed_point(const Machine& machine, QuantFormat format, int64_t m) {
  const FewRowsBlockKernels* const table = kernels(machine.isa);
  return m <= kMaxFixedRows && table != nullptr && table->fixed[static_cast<int>(format)] != nullptr;
}

Result<bool> matmul_fixed_point(Context& context, const ConstTensor& x, const PackedWeight& weight,
                                const OutputPart& out) {
  const int64_t m = x.shape[0], k = weight.k();
  const int64_t blocks = k / kActivationBlock;
  const FewRowsBlockKernels& table = *kernels(context.machine().isa);
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(Arena::size_of<FixedBlock>(m * blocks));
  if (!lease.ok()) return lease.status();
  auto* const a = Arena(lease.value()).take<FixedBlock>(m * blocks);
  {
    const DefaultFloatControl float_control;  // as in a parallel region
    for (int64_t i = 0; i < m; ++i) {
      const float* const row = static_cast<const float*>(x.data) + i * x.strides[0];
      if (!table.fix_row(row, x.strides[1], k, a + i * blocks)) return false;
    }
  }
  run(context, table.fixed[static_cast<int>(weight.format())], a, m, weight, out);
  return true;
}

bool multiply_few_int8_rows(Context& context, const ActivationBlock* a, int64_t m, const PackedWeight& weight,
                            const OutputPart& out) {
  const FewRowsBlockKernels* const table = kernels(context.machine().isa);
  const auto format = static_cast<int>(weight.format());
  if (table == nullptr || table->int8[format] == nullptr) return false;
  run(context, table->int8[format], a, m, weight, out);
  return true;
}

}  // namespace opst::gemm
