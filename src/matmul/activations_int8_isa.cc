#include "matmul/activations_int8_many_rows.h"
#include "matmul/activations_int8_kernels.h"

namespace opst::OPST_ISA_NS::gemm {

extern const opst::gemm::Int8BlockKernels kInt8BlockKernels;
constinit const opst::gemm::Int8BlockKernels kInt8BlockKernels = {
    kInt8Columns,
    quantise_row,
    {nullptr, nullptr, int8_block_rows<PieceQ8_0>, int8_block_rows<PieceQ4_1>, int8_block_rows<PieceQ4_0>,
     int8_block_rows<PieceQ5_0>, int8_block_rows<PieceQ5_1>, int8_block_rows<PieceQ6_K>, int8_block_rows<PieceQ4_K>,
     int8_block_rows<PieceQ5_K>}};

}  // namespace opst::OPST_ISA_NS::gemm
