#include "matmul/epilogue.h"
#include "matmul/few_rows.h"
#include "matmul/kernels.h"
#include "matmul/many_rows.h"
#include "matmul/pack_operands.h"

namespace opst::OPST_ISA_NS::gemm {
namespace {

template <class... Pieces>
constexpr opst::gemm::FloatKernels kernels_for() {
  static_assert(sizeof...(Pieces) == kNumBlockFormats);
  return {
    .few_columns = kFewColumns, .many_columns = kManyColumns, .few_rows = {few_rows<Pieces>...},
    .many_rows = {many_rows<Pieces>...},
#if defined(__AVX512BF16__)
    .few_rows_dot = few_rows<PieceBf16Words>, .many_rows_dot = many_rows<PieceBf16Words>,
#else
    .few_rows_dot = nullptr, .many_rows_dot = nullptr,
#endif
    .finish = {finish<NoActivation>, finish<Silu>,   finish<GeluErf>,
               finish<GeluTanh>,     finish<Swiglu>, finish<SwigluSwapped>},
    .pack_panel = {pack_panel<float>, pack_bf16_panel, pack_panel<f16>}, .widen_rows = {
      widen_rows<float>,
      widen_rows<bf16>,
      widen_rows<f16>
    }
  };
}

}  // namespace

extern const opst::gemm::FloatKernels kFloatKernels;
constinit const opst::gemm::FloatKernels kFloatKernels =
    kernels_for<PieceF32, PieceF16, PieceQ8_0, PieceQ4_1, PieceQ4_0, PieceQ5_0, PieceQ5_1, PieceQ6_K, PieceQ4_K,
                PieceQ5_K, PieceBf16>();

}  // namespace opst::OPST_ISA_NS::gemm
