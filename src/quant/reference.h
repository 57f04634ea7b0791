// The formats' equations in plain loops: one value of a quantised row as a double, exact.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/convert.h"
#include "opst/quant.h"

namespace opst::reference {

inline double half_at(const unsigned char* p) {
  f16 half;
  std::memcpy(&half, p, 2);
  return static_cast<double>(to_f32(half));
}

// Value `col` of the row that begins at `row`.
inline double dequantized(QuantFormat format, const void* row, int64_t col) {
  const auto* bytes = static_cast<const unsigned char*>(row);
  switch (format) {
    case QuantFormat::f32: {
      float x;
      std::memcpy(&x, bytes + 4 * col, 4);
      return static_cast<double>(x);
    }
    case QuantFormat::f16:
      return half_at(bytes + 2 * col);
    case QuantFormat::q8_0: {
      const unsigned char* block = bytes + 34 * (col / 32);
      const int byte = block[2 + col % 32];
      return half_at(block) * (byte < 128 ? byte : byte - 256);
    }
    case QuantFormat::q4_1: {
      const unsigned char* block = bytes + 20 * (col / 32);
      const int byte = block[4 + col % 16];
      return half_at(block) * (col % 32 < 16 ? byte % 16 : byte / 16) + half_at(block + 2);
    }
  }
  return 0;
}

inline double dequantized(const QuantMatrix& matrix, int64_t row, int64_t col) {
  const int64_t bytes = matrix.cols / block_values(matrix.format) * block_bytes(matrix.format);
  return dequantized(matrix.format, static_cast<const char*>(matrix.data) + row * bytes, col);
}

}  // namespace opst::reference
