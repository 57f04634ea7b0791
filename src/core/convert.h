// Scalar conversions between f32, f64, bf16, f16, f8_e4m3 and f8_e5m2, for code that runs on every processor (kernels
// have their own: simd/vec.h, simd/float8.h).
//
// Narrowing rounds once, to nearest, ties to even; subnormals are exact or correctly rounded whatever the processor's
// flush-to-zero mode; NaN stays NaN, becomes quiet and keeps its sign. What is too large becomes infinite in bf16 and
// f16. In eight bits a number that is too large saturates (448, 57344); an infinity stays one in f8_e5m2 and is NaN in
// f8_e4m3, which has none: what was not finite never becomes so. Every NaN is then 0x7f or 0xff.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "opst/dtype.h"

namespace opst {

constexpr float to_f32(bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

constexpr float to_f32(f16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 31u;
  const uint32_t mantissa = value.bits & 1023u;
  if (exponent == 31) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// An f8_e5m2 is the upper half of an f16.
constexpr float to_f32(f8_e5m2 value) { return to_f32(f16{static_cast<uint16_t>(value.bits << 8)}); }

constexpr float to_f32(f8_e4m3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
  const uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) return (sign != 0 ? -1.0f : 1.0f) * static_cast<float>(magnitude) * 0x1p-9f;
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// The bits without a sign of |value|, no NaN, in a format with kExponentBits and kMantissaBits whose exponents have no
// end: the caller compares with what it holds. `magnitude`: the bits of |value|.
template <int kExponentBits, int kMantissaBits>
constexpr uint64_t round_magnitude(uint64_t magnitude) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  // Exponent field of the result, 1 for subnormals too: they have the same unit in the last place.
  const int exponent = static_cast<int>(magnitude >> 52) - 1023 + kBias;
  const int field = exponent > 1 ? exponent : 1;
  const int dropped_bits = 52 - kMantissaBits + (field - exponent);
  if (dropped_bits > 54) return 0;  // below half of the smallest subnormal
  const uint64_t significand = (magnitude & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52);
  const uint64_t rest = significand & ((uint64_t{1} << dropped_bits) - 1);
  const uint64_t half = uint64_t{1} << (dropped_bits - 1);
  uint64_t rounded = significand >> dropped_bits;
  if (rest > half || (rest == half && (rounded & 1) != 0)) ++rounded;
  // `rounded` holds the leading one of a normal number: adding it raises the field, and a carry raises it once more.
  return (static_cast<uint64_t>(field - 1) << kMantissaBits) + rounded;
}

// The bits of `value` in a format with a sign, kExponentBits and kMantissaBits.
template <int kExponentBits, int kMantissaBits>
constexpr uint16_t round_to_16_bits(double value) {
  constexpr uint64_t kInfinity = ((uint64_t{1} << kExponentBits) - 1) << kMantissaBits;
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint64_t sign = (bits >> 63) << 15;
  const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
  if (magnitude > (uint64_t{0x7ff} << 52)) {
    const uint64_t payload = (magnitude >> (52 - kMantissaBits)) & ((uint64_t{1} << kMantissaBits) - 1);
    return static_cast<uint16_t>(sign | kInfinity | (uint64_t{1} << (kMantissaBits - 1)) | payload);
  }
  const uint64_t result = round_magnitude<kExponentBits, kMantissaBits>(magnitude);
  return static_cast<uint16_t>(sign | (result < kInfinity ? result : kInfinity));
}

// The same in eight bits: kLargest is the largest number, kInfinity what becomes of an infinity.
template <int kExponentBits, int kMantissaBits, uint64_t kLargest, uint64_t kInfinity>
constexpr uint8_t round_to_8_bits(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint64_t sign = (bits >> 63) << 7;
  const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
  if (magnitude > (uint64_t{0x7ff} << 52)) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude == (uint64_t{0x7ff} << 52)) return static_cast<uint8_t>(sign | kInfinity);
  const uint64_t result = round_magnitude<kExponentBits, kMantissaBits>(magnitude);
  return static_cast<uint8_t>(sign | (result < kLargest ? result : kLargest));
}

constexpr bf16 to_bf16(double value) { return {round_to_16_bits<8, 7>(value)}; }
constexpr f16 to_f16(double value) { return {round_to_16_bits<5, 10>(value)}; }

// The same for float, without the way through double: a processor that treats denormals as zero would lose them there.
constexpr bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
constexpr f16 to_f16(float value) { return to_f16(static_cast<double>(value)); }

// Exact in double, float denormals too: they are far below half of the smallest of these.
constexpr f8_e4m3 to_f8_e4m3(double value) { return {round_to_8_bits<4, 3, 0x7e, 0x7f>(value)}; }
constexpr f8_e5m2 to_f8_e5m2(double value) { return {round_to_8_bits<5, 2, 0x7b, 0x7c>(value)}; }

// Any of the six types to any other.
template <class To, class From>
constexpr To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (!std::is_floating_point_v<From>) {
    return convert<To>(to_f32(value));
  } else if constexpr (std::is_same_v<To, bf16>) {
    return to_bf16(value);
  } else if constexpr (std::is_same_v<To, f16>) {
    return to_f16(value);
  } else if constexpr (std::is_same_v<To, f8_e4m3>) {
    return to_f8_e4m3(static_cast<double>(value));
  } else if constexpr (std::is_same_v<To, f8_e5m2>) {
    return to_f8_e5m2(static_cast<double>(value));
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace opst
