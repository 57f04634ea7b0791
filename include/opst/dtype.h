// Storage types of tensor elements, as plain data.
//
// Kernel code includes this file, so it holds no function: an inline function compiled for AVX-512 could be the copy
// that the linker keeps for everyone.
#pragma once

#include <cstdint>

namespace opst {

enum class DType : uint8_t { f32, f64, bf16, f16, i8, u8, i32, i64, boolean };

// The upper half of an IEEE binary32: 8 bits of exponent, 7 of mantissa.
struct bf16 {
  uint16_t bits;
};

// IEEE binary16: 5 bits of exponent, 10 of mantissa.
struct f16 {
  uint16_t bits;
};

}  // namespace opst
