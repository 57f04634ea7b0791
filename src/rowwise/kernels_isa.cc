#include "rowwise/activations.h"
#include "rowwise/norm.h"
#include "rowwise/rope.h"

namespace opst::OPST_ISA_NS::rowwise {

template <class T>
constexpr TypeKernels kernels_of_type() {
  return {{rms_norm<T, T>, rms_norm<T, float>},
          {rms_norm_backward<T, T>, rms_norm_backward<T, float>},
          {layer_norm<T, T>, layer_norm<T, float>},
          {layer_norm_backward<T, T>, layer_norm_backward<T, float>},
          softmax<T>,
          softmax_backward<T>,
          rope<T>,
          swiglu<T>,
          swiglu_backward<T>,
          add<T>};
}

extern const Kernels kKernels;
constinit const Kernels kKernels = {{kernels_of_type<float>(), kernels_of_type<bf16>(), kernels_of_type<f16>()}};

}  // namespace opst::OPST_ISA_NS::rowwise
