#include "moe/combine.h"
#include "moe/gate.h"

namespace opst::OPST_ISA_NS::moe {

template <class T>
constexpr TypeKernels kernels_of_type() {
  return {gate<T>, gate_backward<T>, combine<T>, combine_backward<T>};
}

extern const Kernels kKernels;
constinit const Kernels kKernels = {{kernels_of_type<float>(), kernels_of_type<bf16>(), kernels_of_type<f16>()}};

}  // namespace opst::OPST_ISA_NS::moe
