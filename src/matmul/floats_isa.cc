#include "matmul/epilogue.h"
#include "matmul/many_rows_in_place.h"

namespace opst::OPST_ISA_NS::gemm {
namespace {

constexpr FloatKernels all_kernels() {
  FloatKernels table = {
    .few_columns = kFewColumns,
    .many_columns = kTileColumns,
    .few_rows = {},
    .many_rows = {},
#if defined(__AVX512BF16__)
    .few_rows_dot = few_rows<PieceBf16Words>,
    .many_rows_dot = many_rows<PackedColumns<PieceBf16Words>>,
    .many_rows_dot_in_place = many_rows<PairsInPlace>,
#else
    .few_rows_dot = nullptr,
    .many_rows_dot = nullptr,
    .many_rows_dot_in_place = nullptr,
#endif
    .many_rows_in_place = {many_rows<ColumnsInPlace<float>>, many_rows<ColumnsInPlace<bf16>>,
                           many_rows<ColumnsInPlace<f16>>},
    .finish = {finish<NoActivation>, finish<Silu>, finish<GeluErf>, finish<GeluTanh>, finish<Swiglu>,
               finish<SwigluSwapped>},
    .pack_panel = {pack_panel<float>, pack_bf16_panel, pack_panel<f16>},
    .widen_rows = {widen_rows<float>, widen_rows<bf16>, widen_rows<f16>}
  };
  QuantBlocks::each([&]<class Block>() {
    table.few_rows[static_cast<int>(Block::kFormat)] = few_rows<Piece<Block>>;
    table.many_rows[static_cast<int>(Block::kFormat)] = many_rows<PackedColumns<Piece<Block>>>;
  });
  return table;
}

}  // namespace

extern const FloatKernels kFloatKernels;
constinit const FloatKernels kFloatKernels = all_kernels();

}  // namespace opst::OPST_ISA_NS::gemm
