#include "rowwise/elementwise.h"
#include "rowwise/kernels.h"
#include "rowwise/layer_norm.h"
#include "rowwise/rms_norm.h"
#include "rowwise/rope.h"
#include "rowwise/softmax.h"

namespace opst::OPST_ISA_NS::rowwise {

extern const opst::rowwise::Kernels kKernels;
constinit const opst::rowwise::Kernels kKernels = {
    {{rms_norm<float, float>, rms_norm<float, float>},
     {rms_norm<bf16, bf16>, rms_norm<bf16, float>},
     {rms_norm<f16, f16>, rms_norm<f16, float>}},
    {{rms_norm_backward<float, float>, rms_norm_backward<float, float>},
     {rms_norm_backward<bf16, bf16>, rms_norm_backward<bf16, float>},
     {rms_norm_backward<f16, f16>, rms_norm_backward<f16, float>}},
    {{layer_norm<float, float>, layer_norm<float, float>},
     {layer_norm<bf16, bf16>, layer_norm<bf16, float>},
     {layer_norm<f16, f16>, layer_norm<f16, float>}},
    {{layer_norm_backward<float, float>, layer_norm_backward<float, float>},
     {layer_norm_backward<bf16, bf16>, layer_norm_backward<bf16, float>},
     {layer_norm_backward<f16, f16>, layer_norm_backward<f16, float>}},
    {softmax<float>, softmax<bf16>, softmax<f16>},
    {softmax_backward<float>, softmax_backward<bf16>, softmax_backward<f16>},
    {rope<float>, rope<bf16>, rope<f16>},
    {swiglu<float>, swiglu<bf16>, swiglu<f16>},
    {swiglu_backward<float>, swiglu_backward<bf16>, swiglu_backward<f16>},
    {add<float>, add<bf16>, add<f16>},
};

}  // namespace opst::OPST_ISA_NS::rowwise
