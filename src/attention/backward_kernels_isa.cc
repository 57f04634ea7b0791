// The kernels of attention's gradient at one instruction set level: a table, no logic.
#include "attention/backward.h"
#include "attention/far_statistics.h"

namespace opst::OPST_ISA_NS::attention {

template <class P, class T>
constexpr BackwardKernels backward_kernels() {
  return {.pack_queries = BackwardPack<P>::pack_queries,
          .pack_keys = BackwardPack<P>::template pack_keys<T>,
          .add_statistics = FarStatistics<P>::add_statistics,
          .keep_statistics = FarStatistics<P>::keep_statistics,
          .grad_tile = Backward<P>::grad_tile,
          .grad_query = Backward<P>::grad_query,
          .add_grad_bias = BackwardSums<P>::add_grad_bias,
          .sees_key = VisiblePairs<P>::sees_key,
          .finish_rows = BackwardPack<P>::finish_rows,
          .add_row = BackwardPack<P>::add_row};
}

extern const BackwardKernelTable kBackwardTable;
constinit const BackwardKernelTable kBackwardTable = {
    .f32_product = {backward_kernels<tile::ProductF32, float>(), backward_kernels<tile::ProductF32, bf16>(),
                    backward_kernels<tile::ProductF32, f16>()},
#if defined(__AVX512BF16__)
    .bf16_dot = backward_kernels<tile::ProductBf16Dot, bf16>(),
#endif
#if !defined(__AVX2__)
    .f64_product = backward_kernels<tile::ProductF64, double>(),
#endif
};

}  // namespace opst::OPST_ISA_NS::attention
