#include "matmul/fixed_point_matmul.h"

namespace opst::gemm {

const FewRowsBlockKernels& few_rows_block_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512_vnni) return avx512_vnni::gemm::kFewRowsBlockKernels;
  if (isa >= Isa::avx512) return avx512::gemm::kFewRowsBlockKernels;
  if (isa >= Isa::avx2) return avx2::gemm::kFewRowsBlockKernels;
#endif
  static_cast<void>(isa);
  static constexpr FewRowsBlockKernels kNone = {};
  return kNone;
}

}  // namespace opst::gemm
