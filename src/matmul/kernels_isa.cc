#include "matmul/few_rows.h"
#include "matmul/kernels.h"
#include "matmul/many_rows.h"

namespace opst::OPST_ISA_NS::gemm {
namespace {

template <class... Pieces>
constexpr opst::gemm::Kernels kernels_for() {
  static_assert(sizeof...(Pieces) == kNumBlockFormats);
  return {kFewColumns, kManyColumns, {few_rows<Pieces>...}, {many_rows<Pieces>...}};
}

}  // namespace

constinit const opst::gemm::Kernels kKernels = kernels_for<PieceF32, PieceF16, PieceQ8_0, PieceQ4_1, PieceQ4_0,
                                                           PieceQ5_0, PieceQ5_1, PieceQ6_K, PieceQ4_K, PieceQ5_K>();

}  // namespace opst::OPST_ISA_NS::gemm
