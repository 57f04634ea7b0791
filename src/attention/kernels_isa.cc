// The attention kernels of one instruction set level: a table, no logic.
#include <type_traits>

#include "attention/at_once.h"
#include "attention/finish.h"
#include "attention/forward.h"
#include "attention/in_place_source.h"
#include "attention/packed_source.h"
#include "attention/pages_source.h"
#include "attention/pairs_in_place_source.h"
#include "attention/widen_rows.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::attention {

template <class P, class T>
void pack_keys(const void* const* rows, int64_t dim_stride, int64_t count, int64_t head_dim, void* out) {
  tile::pack_columns<P, T>({rows, dim_stride}, count, head_dim, static_cast<typename P::Word*>(out));
}
template <class P, class T>
bool pack_values(const void* const* rows, int64_t dim_stride, int64_t count, int64_t value_head_dim, void* out) {
  return tile::pack_values<P, T>({rows, dim_stride}, count, value_head_dim, static_cast<typename P::Word*>(out));
}

// Pages: the product with panel32 pages of T; void where there are none.
template <class P, class T, class Pages>
constexpr Kernels kernels() {
  using V = typename P::V;
  Kernels k = {.geometry = {.tile_rows = P::kTileRows,
                            .lanes = V::kLanes,
                            .panel = P::kTileVecs * V::kLanes,
                            .step = P::kStep,
                            .word_bytes = sizeof(typename P::Word),
                            .accumulator_bytes = sizeof(typename V::Scalar)},
               .copy_queries = copy_queries<P>,
               .empty_state = empty_state<V>,
               .pack_keys = pack_keys<P, T>,
               .pack_values = pack_values<P, T>,
               .values_finite = tile::rows_finite<V, T>,
               .attend = attend<PackedSource<P>>,
               .finish_rows = Finish<V>::finish_rows};
  if constexpr (P::kStep == 1) {
    k.attend_in_place = attend<InPlaceSource<P, T>>;
    k.attend_at_once = attend_at_once<PackedSource<P>>;
  }
#if defined(__AVX512BF16__)
  if constexpr (P::kStep == 2) k.attend_in_place = attend<PairsInPlaceSource<P>>;
#endif
  if constexpr (!std::is_void<Pages>::value) k.attend_pages = attend<PagesSource<Pages>>;
  return k;
}

// Rows of T of eight bits: read where they are, or packed as floats. Without groups, panels of them too.
template <class T, bool kGroups = false>
constexpr Kernels byte_kernels() {
  Kernels k = kernels<tile::ProductF32, float, void>();
  k.widen_rows = widen_rows<T, kGroups>;
  k.values_finite = nullptr;
  k.attend_in_place = attend<InPlaceSource<tile::ProductF32, T, kGroups>>;
  if constexpr (!kGroups) k.attend_pages = attend<PagesSource<tile::ProductOfStored<T>>>;
  return k;
}

extern const KernelTable kTable;
constinit const KernelTable kTable = {
    .f32_product = {kernels<tile::ProductF32, float, tile::ProductF32>(),
                    kernels<tile::ProductF32, bf16, tile::ProductWiden>(),
                    kernels<tile::ProductF32, f16, tile::ProductOfStored<f16>>()},
    .eight_bits = {byte_kernels<int8_t>(), byte_kernels<f8_e4m3>(), byte_kernels<f8_e5m2>()},
    .integers_in_groups = {byte_kernels<int8_t, true>(), byte_kernels<uint8_t, true>()},
#if defined(__AVX512BF16__)
    .bf16_dot = kernels<tile::ProductBf16Dot, bf16, tile::ProductBf16Dot>(),
#endif
#if !defined(__AVX2__)
    .f64_product = kernels<tile::ProductF64, double, void>(),
#endif
};

}  // namespace opst::OPST_ISA_NS::attention
