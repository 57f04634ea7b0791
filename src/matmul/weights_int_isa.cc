#include "matmul/weights_int_kernels.h"
#include "matmul/weights_int_many_rows.h"

namespace opst::OPST_ISA_NS::gemm {

extern const opst::gemm::IntKernels kIntKernels;
constinit const opst::gemm::IntKernels kIntKernels = {kIntColumns,
                                                      pack_row,
                                                      {widen_row<float>, widen_row<bf16>, widen_row<f16>},
                                                      {int_few<WordI8>, int_few<WordI4>},
                                                      {int_many<WordI8>, int_many<WordI4>},
                                                      {int_with_floats<WordI8>, int_with_floats<WordI4>}};

}  // namespace opst::OPST_ISA_NS::gemm
