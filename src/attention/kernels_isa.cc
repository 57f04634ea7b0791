// The attention kernels of one instruction set level: a table, no logic.
#include "attention/forward.h"
#include "attention/forward_in_place.h"
#include "attention/forward_pages.h"
#include "attention/kernels.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::attention {

using opst::attention::Kernels;
using opst::attention::KernelTable;

template <class P, class T>
void pack_keys(const void* const* rows, int64_t dim_stride, int64_t count, int64_t head_dim, void* out) {
  tile::pack_columns<P, T>({rows, dim_stride}, count, head_dim, static_cast<typename P::Word*>(out));
}
template <class P, class T>
bool pack_values(const void* const* rows, int64_t dim_stride, int64_t count, int64_t value_head_dim, void* out) {
  return tile::pack_values<P, T>({rows, dim_stride}, count, value_head_dim, static_cast<typename P::Word*>(out));
}

template <class P, class T>
constexpr Kernels packed_kernels() {
  return {.geometry = {.tile_rows = P::kTileRows,
                       .lanes = P::V::kLanes,
                       .panel = P::kTileVecs * P::V::kLanes,
                       .step = P::kStep,
                       .word_bytes = sizeof(typename P::Word),
                       .accumulator_bytes = sizeof(typename P::V::Scalar)},
          .begin_block = Forward<P>::begin_block,
          .pack_keys = pack_keys<P, T>,
          .pack_values = pack_values<P, T>,
          .values_finite = tile::rows_finite<typename P::V, T>,
          .attend = Forward<P>::attend,
          .attend_in_place = nullptr,
          .attend_pages = nullptr,
          .attend_standard = Forward<P>::attend_standard,
          .finish_rows = Forward<P>::finish_rows};
}
template <class P, class T>
constexpr Kernels all_kernels() {
  Kernels k = packed_kernels<P, T>();
  k.attend_in_place = ForwardInPlace<P, T>::attend;
  return k;
}

template <class P>
constexpr Kernels with_pages(Kernels k) {
  k.attend_pages = ForwardPages<P>::attend;
  return k;
}

extern const KernelTable kTable;
constinit const KernelTable kTable = {
    .f32_product = {with_pages<tile::ProductF32>(all_kernels<tile::ProductF32, float>()),
                    with_pages<tile::ProductWiden>(all_kernels<tile::ProductF32, bf16>()),
                    all_kernels<tile::ProductF32, f16>()},
#if defined(__AVX512BF16__)
    .bf16_dot = with_pages<tile::ProductBf16Dot>(packed_kernels<tile::ProductBf16Dot, bf16>()),
    .has_bf16_dot = true,
#else
    .bf16_dot = {},
    .has_bf16_dot = false,
#endif
#if !defined(__AVX2__)
    .f64_product = all_kernels<tile::ProductF64, double>(),
    .has_f64 = true,
#else
    .f64_product = {},
    .has_f64 = false,
#endif
};

}  // namespace opst::OPST_ISA_NS::attention
