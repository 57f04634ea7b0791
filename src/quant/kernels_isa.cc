#include "quant/dequantize.h"
#include "quant/kernels.h"

namespace opst::OPST_ISA_NS::quant {

constinit const opst::quant::Kernels kKernels = {
    {dequantize_row<BlockF32>, dequantize_row<BlockF16>, dequantize_row<BlockQ8_0>, dequantize_row<BlockQ4_1>}};

}  // namespace opst::OPST_ISA_NS::quant
