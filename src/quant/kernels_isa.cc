#include "quant/dequantize.h"
#include "quant/integers.h"
#include "quant/kernels.h"

namespace opst::OPST_ISA_NS::quant {
namespace {

constexpr opst::quant::Kernels all_kernels() {
  opst::quant::Kernels table = {
      .dequantize_row = {},
      .quantize_group = {quantize_group<float>, quantize_group<bf16>, quantize_group<f16>},
      .dequantize_group = {dequantize_group<float>, dequantize_group<bf16>, dequantize_group<f16>}};
  QuantBlocks::each(
      [&]<class Block>() { table.dequantize_row[static_cast<int>(Block::kFormat)] = dequantize_row<Block>; });
  return table;
}

}  // namespace

extern const opst::quant::Kernels kKernels;
constinit const opst::quant::Kernels kKernels = all_kernels();

}  // namespace opst::OPST_ISA_NS::quant
