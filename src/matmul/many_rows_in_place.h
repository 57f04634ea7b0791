// Columns of a weight that is not packed and lies [inputs][columns], as a gradient's transposed weight does: its rows are
// what scratch needs, so that many_rows copies them from where they are, once per task.
//
// Computes   scratch[t][c] = weight[k0 + t][column + c]; of bf16 pairs: words of two inputs, the lower one in the lower
//            half, 0 for the second half of an odd one
// Shapes     weight [inputs][columns], elements of any alignment, inputs `input_stride` elements apart
// Loop nest  inputs, vectors of columns
// Memory     128 or 64 bytes of each input, a page apart where the weight is wide: the hardware's prefetchers do not follow,
//            so the tiles fetch a line of each input that is decoded next
// Numerics   widening is exact: the bits are those of the packed weight
#pragma once

#include "matmul/many_rows.h"
#include "matmul/pack_operands.h"

namespace opst::OPST_ISA_NS::gemm {

// The columns of a weight [inputs][columns] that are decoded next, kInputs inputs for a word of k: each tile fetches those
// of depth / 4 inputs, in up to two lines.
template <class T, int kInputs>
struct AheadInPlace {
  static constexpr int64_t kApart = kTileColumns * sizeof(T) > 64 ? 64 : 0;
  const char* first;
  int64_t stride, inputs;  // of a tile
  bool outputs_first;      // few inputs are near already, and each tile stores

  OPST_INLINE AheadInPlace(const ProductPart& part, int64_t column, int64_t k0, int64_t depth)
      : first(fetch_address(static_cast<const T*>(part.panels), k0 * kInputs * part.input_stride + column)),
        stride(part.input_stride * static_cast<int64_t>(sizeof(T))),
        inputs(depth / 4),
        outputs_first(part.out != nullptr) {}
  OPST_INLINE tile::LinesOfRows operator()(int64_t t, const tile::LinesOfRows& next) const {
    if (t >= 4 * kInputs || outputs_first) return next;
    return {fetch_address(first, t * inputs * stride), stride, kApart};
  }
};

// Inputs whose columns are fetched before they are decoded, where no tile has.
inline constexpr int64_t kInputsAhead = 16;

template <class T>
struct ColumnsInPlace {
  using Product = tile::ProductF32;
  using Ahead = AheadInPlace<T, 1>;
  static OPST_NOINLINE void decode(const ProductPart& part, int64_t column, int64_t k0, int64_t depth) {
    const T* from = static_cast<const T*>(part.panels) + k0 * part.input_stride + column;
    float* to = static_cast<float*>(part.scratch);
    const int64_t present = part.columns - column;
    for (int64_t k = 0; k < depth; ++k, from += part.input_stride, to += kTileColumns) {
      __builtin_prefetch(fetch_address(from, kInputsAhead * part.input_stride));
      OPST_UNROLL for (int v = 0; v < kTileVecs; ++v) {
        const int64_t c = v * F32::kLanes;
        (c < present ? load_unaligned(from + c, 1, present - c) : F32::zero()).store(to + c);
      }
    }
  }
};

#if defined(__AVX512BF16__)
struct PairsInPlace {
  using Product = tile::ProductBf16Dot;
  using Ahead = AheadInPlace<bf16, 2>;
  static OPST_NOINLINE void decode(const ProductPart& part, int64_t column, int64_t k0, int64_t depth) {
    static_assert(kTileColumns == 32);
    const int64_t stride = part.input_stride, present = part.columns - column;
    const bf16* from = static_cast<const bf16*>(part.panels) + 2 * k0 * stride + column;
    uint32_t* to = static_cast<uint32_t*>(part.scratch);
    for (int64_t k = k0; k < k0 + depth; ++k, from += 2 * stride, to += kTileColumns) {
      __builtin_prefetch(fetch_address(from, kInputsAhead * stride));
      __builtin_prefetch(fetch_address(from, (kInputsAhead + 1) * stride));
      simd::interleave_words(from, from + stride, present, 2 * k + 1 < part.inputs, to);
      if (present <= F32::kLanes) F32::zero().store(reinterpret_cast<float*>(to + F32::kLanes));
    }
  }
};
#endif

}  // namespace opst::OPST_ISA_NS::gemm
