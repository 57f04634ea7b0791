// Scalar conversions between f32, f64, bf16 and f16, for code that runs on every processor (kernels have their own).
//
// Narrowing rounds once, to nearest, ties to even; subnormals are exact or correctly rounded whatever the processor's
// flush-to-zero mode; what is too large becomes infinite; NaN stays NaN, becomes quiet and keeps its sign.
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

// The bits of `value` in a format with a sign, kExponentBits and kMantissaBits.
template <int kExponentBits, int kMantissaBits>
constexpr uint16_t round_to_16_bits(double value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr uint64_t kInfinity = ((uint64_t{1} << kExponentBits) - 1) << kMantissaBits;
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint64_t sign = (bits >> 63) << 15;
  const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
  if (magnitude > (uint64_t{0x7ff} << 52)) {
    const uint64_t payload = (magnitude >> (52 - kMantissaBits)) & ((uint64_t{1} << kMantissaBits) - 1);
    return static_cast<uint16_t>(sign | kInfinity | (uint64_t{1} << (kMantissaBits - 1)) | payload);
  }
  // Exponent field of the result, 1 for subnormals too: they have the same unit in the last place.
  const int exponent = static_cast<int>(magnitude >> 52) - 1023 + kBias;
  const int field = exponent > 1 ? exponent : 1;
  const int dropped_bits = 52 - kMantissaBits + (field - exponent);
  if (dropped_bits > 54) return static_cast<uint16_t>(sign);  // below half of the smallest subnormal
  const uint64_t significand = (magnitude & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52);
  const uint64_t rest = significand & ((uint64_t{1} << dropped_bits) - 1);
  const uint64_t half = uint64_t{1} << (dropped_bits - 1);
  uint64_t rounded = significand >> dropped_bits;
  if (rest > half || (rest == half && (rounded & 1) != 0)) ++rounded;
  // `rounded` holds the leading one of a normal number: adding it raises the field, and a carry raises it once more.
  const uint64_t result = (static_cast<uint64_t>(field - 1) << kMantissaBits) + rounded;
  return static_cast<uint16_t>(sign | (result < kInfinity ? result : kInfinity));
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

// Any of the four types to any other.
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
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace opst
