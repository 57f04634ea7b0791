#include "quant/dequantize.h"
#include "quant/integers.h"
#include "quant/kernels.h"

namespace opst::OPST_ISA_NS::quant {
namespace {

template <class... Blocks>
constexpr opst::quant::Kernels kernels_for() {
  static_assert(sizeof...(Blocks) == kNumBlockFormats);
  return {{dequantize_row<Blocks>...},
          {quantize_group<float>, quantize_group<bf16>, quantize_group<f16>},
          {dequantize_group<float>, dequantize_group<bf16>, dequantize_group<f16>}};
}

}  // namespace

extern const opst::quant::Kernels kKernels;
constinit const opst::quant::Kernels kKernels =
    kernels_for<BlockF32, BlockF16, BlockQ8_0, BlockQ4_1, BlockQ4_0, BlockQ5_0, BlockQ5_1, BlockQ6_K, BlockQ4_K,
                BlockQ5_K, BlockBf16>();

}  // namespace opst::OPST_ISA_NS::quant
