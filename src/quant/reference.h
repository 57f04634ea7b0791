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

// Bit `index` of consecutive bytes, the lowest of a byte first.
inline int bit(const unsigned char* p, int64_t index) { return p[index / 8] >> (index % 8) & 1; }

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
    case QuantFormat::bf16: {
      bf16 x;
      std::memcpy(&x, bytes + 2 * col, 2);
      return static_cast<double>(to_f32(x));
    }
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
    case QuantFormat::q4_0: {
      const unsigned char* block = bytes + 18 * (col / 32);
      const int byte = block[2 + col % 16];
      return half_at(block) * ((col % 32 < 16 ? byte % 16 : byte / 16) - 8);
    }
    case QuantFormat::q5_0:
    case QuantFormat::q5_1: {
      const int header = format == QuantFormat::q5_0 ? 2 : 4;
      const unsigned char* block = bytes + (header + 20) * (col / 32);
      const int64_t j = col % 32;
      const int byte = block[header + 4 + j % 16];
      const int q = (j < 16 ? byte % 16 : byte / 16) + 16 * bit(block + header, j);
      if (format == QuantFormat::q5_0) return half_at(block) * (q - 16);
      return half_at(block) * q + half_at(block + 2);
    }
    case QuantFormat::q6_k: {
      const unsigned char* block = bytes + 210 * (col / 256);
      const int64_t j = col % 256, half = j / 128, i = j % 128;
      const int byte = block[64 * half + i % 64];
      const int64_t high_bit = 8 * (32 * half + i % 32) + 2 * (i / 32);
      const int q =
          (i < 64 ? byte % 16 : byte / 16) + 16 * bit(block + 128, high_bit) + 32 * bit(block + 128, high_bit + 1);
      const int scale = block[192 + j / 16];
      return half_at(block + 208) * (scale < 128 ? scale : scale - 256) * (q - 32);
    }
    case QuantFormat::q4_k:
    case QuantFormat::q5_k: {
      const bool five = format == QuantFormat::q5_k;
      const unsigned char* block = bytes + (five ? 176 : 144) * (col / 256);
      const int64_t j = col % 256, s = j / 32;
      const int byte = block[(five ? 48 : 16) + j / 64 * 32 + j % 32];
      const int q = (s % 2 == 0 ? byte % 16 : byte / 16) + (five ? 16 * bit(block + 16, 8 * (j % 32) + s) : 0);
      const unsigned char* packed = block + 4;
      int scale = packed[s % 4] % 64, minimum = packed[4 + s % 4] % 64;
      if (s >= 4) {
        scale = packed[4 + s] % 16 + packed[s - 4] / 64 * 16;
        minimum = packed[4 + s] / 16 + packed[s] / 64 * 16;
      }
      return half_at(block) * scale * q - half_at(block + 2) * minimum;
    }
  }
  return 0;
}

inline double dequantized(const QuantMatrix& matrix, int64_t row, int64_t col) {
  const int64_t bytes = matrix.cols / block_values(matrix.format) * block_bytes(matrix.format);
  return dequantized(matrix.format, static_cast<const char*>(matrix.data) + row * bytes, col);
}

}  // namespace opst::reference
