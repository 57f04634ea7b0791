#include "extending/block_w5.h"
#include "extending/weight_format_kernels.h"
#include "matmul/activations_int8_many_rows.h"
#include "matmul/few_rows.h"
#include "quant/dequantize.h"

namespace opst::OPST_ISA_NS::extending {

using Packed = opst::gemm::Piece<opst::extending::BlockW5>;

extern const opst::extending::FormatKernels kFormatKernels;
constinit const opst::extending::FormatKernels kFormatKernels = {
    .dequantize_row = quant::dequantize_row<opst::extending::BlockW5>,
    .few_rows = gemm::few_rows<Packed>,
    .int8_columns = gemm::kTileColumns,
    .quantise_row = gemm::quantise_row,
    .int8_rows = gemm::int8_block_rows<Packed>};

}  // namespace opst::OPST_ISA_NS::extending
