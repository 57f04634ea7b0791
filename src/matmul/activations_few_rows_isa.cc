#if defined(__AVX2__)
#include "matmul/activations_few_rows.h"
#else
#include "matmul/activations_fixed.h"
#endif

namespace opst::OPST_ISA_NS::gemm {

extern const opst::gemm::FewRowsBlockKernels kFewRowsBlockKernels;

#if defined(__AVX2__)
namespace {

// Null where the level takes more instructions for the products of a format's bytes than for decoding them to floats.
template <class Piece, class Block>
constexpr opst::gemm::Product kernel() {
#if !defined(__AVX512VNNI__)
  if (Int8Piece<Piece>::Shape::kMost > 127) return nullptr;
#endif
  return few_rows_blocks<Piece, Block>;
}

template <class... Pieces>
constexpr opst::gemm::FewRowsBlockKernels kernels_for() {
  static_assert(sizeof...(Pieces) + 3 == kNumBlockFormats);  // and bf16, the last
  return {fix_row,
          {nullptr, nullptr, kernel<Pieces, FixedBlock>()...},
          {nullptr, nullptr, kernel<Pieces, ActivationBlock>()...}};
}

}  // namespace

constinit const opst::gemm::FewRowsBlockKernels kFewRowsBlockKernels =
    kernels_for<PieceQ8_0, PieceQ4_1, PieceQ4_0, PieceQ5_0, PieceQ5_1, PieceQ6_K, PieceQ4_K, PieceQ5_K>();
#else
constinit const opst::gemm::FewRowsBlockKernels kFewRowsBlockKernels = {};  // no quick products of bytes
#endif

}  // namespace opst::OPST_ISA_NS::gemm
