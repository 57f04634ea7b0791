// Storage types of tensor elements, as plain data.
//
// Kernel code includes this file, so it holds no function: an inline function compiled for AVX-512 could be the copy
// that the linker keeps for everyone.
#pragma once

#include <cstdint>

namespace opst {

enum class DType : uint8_t { f32, f64, bf16, f16, i8, u8, i32, i64, boolean, f8_e4m3, f8_e5m2 };

// The upper half of an IEEE binary32: 8 bits of exponent, 7 of mantissa.
struct bf16 {
  uint16_t bits;
};

// IEEE binary16: 5 bits of exponent, 10 of mantissa.
struct f16 {
  uint16_t bits;
};

// Eight bits of the Open Compute Project (OFP8): 4 bits of exponent, 3 of mantissa. From 2^-9 to 448; no infinity; NaN
// is 0x7f and 0xff. (torch and ml_dtypes call it float8_e4m3fn.)
struct f8_e4m3 {
  uint8_t bits;
};

// The upper half of an f16: 5 bits of exponent, 2 of mantissa. From 2^-16 to 57344, infinities and NaN.
struct f8_e5m2 {
  uint8_t bits;
};

}  // namespace opst
