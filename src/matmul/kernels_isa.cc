#include "matmul/few_rows.h"
#include "matmul/kernels.h"
#include "matmul/many_rows.h"

namespace opst::OPST_ISA_NS::gemm {

constinit const opst::gemm::Kernels kKernels = {
    kFewColumns,
    kManyColumns,
    {few_rows<PieceF32>, few_rows<PieceF16>, few_rows<PieceQ8_0>, few_rows<PieceQ4_1>},
    {many_rows<PieceF32>, many_rows<PieceF16>, many_rows<PieceQ8_0>, many_rows<PieceQ4_1>},
};

}  // namespace opst::OPST_ISA_NS::gemm
