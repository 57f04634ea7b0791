// Computes   elements of any strides -> the operands of the products: weight panels (packed_layout.h), rows of x as
//            floats
// Shapes     a panel: up to 16 outputs by k inputs; rows [rows, columns]
// Loop nest  squares of kLanes by kLanes, loaded along the contiguous dimension of the source, transposed where the
//            target runs along the other one
// Memory     everything streams; squares in registers
// Numerics   widening is exact; a panel keeps the type of its source
#pragma once

#include "matmul/panels.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::gemm {

// kLanes elements from `p` on, `stride` apart, those from n on 0. Any alignment.
template <class T>
OPST_INLINE F32 load_unaligned(const T* p, int64_t stride, int64_t n) {
  T lanes[F32::kLanes] = {};
  if (stride == 1 && n >= F32::kLanes) {
    __builtin_memcpy(lanes, p, sizeof(lanes));
  } else {
    const char* const bytes = reinterpret_cast<const char*>(p);
    for (int64_t i = 0; i < n && i < F32::kLanes; ++i) {
      __builtin_memcpy(&lanes[i], bytes + i * stride * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
  return F32::load(lanes);
}

// f32 and f16: [k][16].
template <class T>
void pack_panel(const void* first, int64_t output_stride, int64_t input_stride, int64_t outputs, int64_t k,
                void* panel) {
  constexpr int kLanes = F32::kLanes;
  const T* const from = static_cast<const T*>(first);
  T* const to = static_cast<T*>(panel);
  for (int64_t c = 0; c < kPanelColumns; c += kLanes) {
    const int64_t present = outputs - c;  // may be negative
    const T* const corner = from + (present > 0 ? c * output_stride : 0);
    if (output_stride == 1 || present <= 0) {
      for (int64_t t = 0; t < k; ++t) {
        load_unaligned(corner + t * input_stride, 1, present).store(to + t * kPanelColumns + c);
      }
      continue;
    }
    for (int64_t t = 0; t < k; t += kLanes) {
      F32 square[kLanes];
      OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
        square[i] = i < present ? load_unaligned(corner + i * output_stride + t * input_stride, input_stride, k - t)
                                : F32::zero();
      }
      simd::transpose(square);
      OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
        if (t + i < k) square[i].store(to + (t + i) * kPanelColumns + c);
      }
    }
  }
}

// bf16: [ceil(k / 2)][16] words of two inputs.
inline void pack_bf16_panel(const void* first, int64_t output_stride, int64_t input_stride, int64_t outputs, int64_t k,
                            void* panel) {
  constexpr int kLanes = F32::kLanes;
  const bf16* const from = static_cast<const bf16*>(first);
  uint32_t* const to = static_cast<uint32_t*>(panel);
  const int64_t words = (k + 1) / 2;
  const auto bits_at = [&](int64_t c, int64_t t) -> uint32_t {
    if (c >= outputs || t >= k) return 0;
    uint16_t bits;
    __builtin_memcpy(&bits, from + c * output_stride + t * input_stride, 2);
    return bits;
  };
  // Squares of pairs travel through the transpose as raw 32-bit lanes.
  int64_t w = 0;
  if (input_stride == 1) {
    for (; 2 * (w + kLanes) <= k; w += kLanes) {
      for (int64_t c = 0; c < kPanelColumns; c += kLanes) {
        F32 square[kLanes];
        OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
          float pairs[kLanes] = {};
          if (c + i < outputs) __builtin_memcpy(pairs, from + (c + i) * output_stride + 2 * w, sizeof(pairs));
          square[i] = F32::load(pairs);
        }
        simd::transpose(square);
        OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
          square[i].store(reinterpret_cast<float*>(to + (w + i) * kPanelColumns + c));
        }
      }
    }
  } else if (output_stride == 1 && outputs == kPanelColumns) {
    for (; 2 * w + 2 <= k; ++w) {
      uint16_t low[kPanelColumns], high[kPanelColumns];
      __builtin_memcpy(low, from + 2 * w * input_stride, sizeof(low));
      __builtin_memcpy(high, from + (2 * w + 1) * input_stride, sizeof(high));
      for (int c = 0; c < kPanelColumns; ++c) {
        to[w * kPanelColumns + c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
      }
    }
  }
  for (; w < words; ++w) {
    for (int c = 0; c < kPanelColumns; ++c) to[w * kPanelColumns + c] = bits_at(c, 2 * w) | bits_at(c, 2 * w + 1) << 16;
  }
}

template <class T>
void widen_rows(const void* first, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, float* out,
                int64_t out_stride) {
  constexpr int kLanes = F32::kLanes;
  const T* const from = static_cast<const T*>(first);
  if (column_stride == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t t = 0; t < columns; t += kLanes) {
        store_first(tile::load_row<F32>(from + i * row_stride, 1, t, columns), out + i * out_stride + t, columns - t);
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t t = 0; t < columns; t += kLanes) {
      F32 square[kLanes];
      OPST_UNROLL for (int j = 0; j < kLanes; ++j) {
        square[j] = t + j < columns
                        ? load_unaligned(from + i * row_stride + (t + j) * column_stride, row_stride, rows - i)
                        : F32::zero();
      }
      simd::transpose(square);
      OPST_UNROLL for (int j = 0; j < kLanes; ++j) {
        if (i + j < rows) store_first(square[j], out + (i + j) * out_stride + t, columns - t);
      }
    }
  }
}

}  // namespace opst::OPST_ISA_NS::gemm
