#include "rowwise/elementwise.h"
#include "rowwise/kernels.h"
#include "rowwise/rms_norm.h"
#include "rowwise/rope.h"

namespace opst::OPST_ISA_NS::rowwise {

constinit const opst::rowwise::Kernels kKernels = {
    {rms_norm<float, float>, rms_norm<bf16, bf16>, rms_norm<f16, f16>},
    {rms_norm<float, float>, rms_norm<bf16, float>, rms_norm<f16, float>},
    {rope<float>, rope<bf16>, rope<f16>},
    {swiglu<float>, swiglu<bf16>, swiglu<f16>},
    {add<float>, add<bf16>, add<f16>},
};

}  // namespace opst::OPST_ISA_NS::rowwise
