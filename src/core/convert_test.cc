#include "core/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

namespace opst {
namespace {

// What the bits mean, from the definition of the formats.
double meaning(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int field = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits >> 15 & 1u) != 0 ? -1 : 1;
  if (field == (1 << exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  if (field == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1u << mantissa_bits), field - bias - mantissa_bits);
}

struct Bf16Format {
  using Type = bf16;
  static constexpr int kExponentBits = 8;
  static constexpr int kMantissaBits = 7;
};
struct F16Format {
  using Type = f16;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 10;
};

template <class Format>
class Convert : public testing::Test {
 public:
  using Value = typename Format::Type;
  static double meaning_of(uint32_t bits) { return meaning(bits, Format::kExponentBits, Format::kMantissaBits); }
  static constexpr uint16_t kInfinity = ((1 << Format::kExponentBits) - 1) << Format::kMantissaBits;
};
using Formats = testing::Types<Bf16Format, F16Format>;
TYPED_TEST_SUITE(Convert, Formats);

TYPED_TEST(Convert, EveryValueWidensExactlyAndComesBack) {
  using Type = typename TestFixture::Value;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Type value{static_cast<uint16_t>(bits)};
    const double expected = TestFixture::meaning_of(bits);
    const float widened = to_f32(value);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(widened)) << bits;
      EXPECT_EQ(std::signbit(widened), (bits & 0x8000) != 0) << bits;
      const uint16_t back = convert<Type>(widened).bits;
      EXPECT_TRUE(std::isnan(TestFixture::meaning_of(back))) << bits;
      EXPECT_NE(back & (1 << (TypeParam::kMantissaBits - 1)), 0) << "signalling: " << bits;
      EXPECT_EQ(back & 0x8000u, bits & 0x8000u);
      continue;
    }
    EXPECT_EQ(widened, expected) << bits;
    EXPECT_EQ(std::signbit(widened), std::signbit(expected)) << bits;
    EXPECT_EQ(convert<Type>(widened).bits, bits);
    EXPECT_EQ(convert<Type>(expected).bits, bits);
  }
}

// All midpoints between neighbours, and the doubles right beside them: any way through f32 would round twice.
TYPED_TEST(Convert, RoundsOnceToNearestEven) {
  using Type = typename TestFixture::Value;
  for (uint16_t bits = 0; bits + 1 < TestFixture::kInfinity; ++bits) {
    const double low = TestFixture::meaning_of(bits);
    const double high = TestFixture::meaning_of(bits + 1u);
    const double middle = (low + high) / 2;
    const uint16_t even = bits % 2 == 0 ? bits : static_cast<uint16_t>(bits + 1);
    for (double sign : {1.0, -1.0}) {
      const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      EXPECT_EQ(convert<Type>(sign * middle).bits, sign_bit | even) << bits;
      EXPECT_EQ(convert<Type>(sign * std::nextafter(middle, 0)).bits, sign_bit | bits) << bits;
      EXPECT_EQ(convert<Type>(sign * std::nextafter(middle, HUGE_VAL)).bits, sign_bit | (bits + 1)) << bits;
      // The float next to the middle, where the middle itself is a float.
      const float as_float = static_cast<float>(sign * middle);
      if (static_cast<double>(as_float) != sign * middle) continue;
      EXPECT_EQ(convert<Type>(as_float).bits, sign_bit | even) << bits;
      EXPECT_EQ(convert<Type>(std::nextafter(as_float, 0.0f)).bits, sign_bit | bits) << bits;
    }
  }
}

TYPED_TEST(Convert, Extremes) {
  using Type = typename TestFixture::Value;
  const uint16_t infinity = TestFixture::kInfinity;
  const double largest = TestFixture::meaning_of(infinity - 1u);
  const double step = largest - TestFixture::meaning_of(infinity - 2u);
  EXPECT_EQ(convert<Type>(std::nextafter(largest + step / 2, 0)).bits, infinity - 1);
  EXPECT_EQ(convert<Type>(largest + step / 2).bits, infinity);
  EXPECT_EQ(convert<Type>(-std::numeric_limits<double>::max()).bits, 0x8000 | infinity);
  EXPECT_EQ(convert<Type>(std::numeric_limits<float>::max()).bits, infinity);
  EXPECT_EQ(convert<Type>(HUGE_VAL).bits, infinity);
  const double smallest = TestFixture::meaning_of(1);
  EXPECT_EQ(convert<Type>(smallest / 2).bits, 0);
  EXPECT_EQ(convert<Type>(std::nextafter(smallest / 2, 1)).bits, 1);
  EXPECT_EQ(convert<Type>(-std::numeric_limits<double>::denorm_min()).bits, 0x8000);
  EXPECT_EQ(convert<Type>(-0.0).bits, 0x8000);
  EXPECT_EQ(convert<Type>(0.0f).bits, 0);
}

// Eight bits: what they mean, again from the definition. f8_e4m3 gives its highest exponent to numbers, all but one.
double meaning_of(f8_e4m3 value) {
  if ((value.bits & 0x7f) == 0x7f) return std::nan("");
  const int field = value.bits >> 3 & 15, mantissa = value.bits & 7;
  const double magnitude = field == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, field - 10);
  return value.bits >= 0x80 ? -magnitude : magnitude;
}
double meaning_of(f8_e5m2 value) {
  const int field = value.bits >> 2 & 31, mantissa = value.bits & 3;
  if (field == 31 && mantissa != 0) return std::nan("");
  const double magnitude = field == 31  ? HUGE_VAL
                           : field == 0 ? std::ldexp(mantissa, -16)
                                        : std::ldexp(4 + mantissa, field - 17);
  return value.bits >= 0x80 ? -magnitude : magnitude;
}

template <class Type>
class ConvertEightBits : public testing::Test {
 public:
  static constexpr bool kHasInfinity = std::is_same_v<Type, f8_e5m2>;
  static constexpr uint8_t kLargest = kHasInfinity ? 0x7b : 0x7e;
};
using EightBits = testing::Types<f8_e4m3, f8_e5m2>;
TYPED_TEST_SUITE(ConvertEightBits, EightBits);

TYPED_TEST(ConvertEightBits, EveryValueWidensExactlyAndComesBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const TypeParam value{static_cast<uint8_t>(bits)};
    const double expected = meaning_of(value);
    const float widened = to_f32(value);
    EXPECT_EQ(std::signbit(widened), bits >= 0x80) << bits;
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(widened)) << bits;
      EXPECT_EQ(convert<TypeParam>(widened).bits, bits | 0x7f);
      continue;
    }
    EXPECT_EQ(static_cast<double>(widened), expected) << bits;
    EXPECT_EQ(convert<TypeParam>(widened).bits, bits);
    EXPECT_EQ(convert<TypeParam>(expected).bits, bits);
    EXPECT_EQ(static_cast<double>(to_f32(convert<f16>(value))), expected) << bits;  // f16 holds every value
  }
}

// All midpoints between neighbours, and the floats and doubles right beside them.
TYPED_TEST(ConvertEightBits, RoundsOnceToNearestEven) {
  for (uint8_t bits = 0; bits < TestFixture::kLargest; ++bits) {
    const double low = meaning_of(TypeParam{bits}), high = meaning_of(TypeParam{static_cast<uint8_t>(bits + 1)});
    const double middle = (low + high) / 2;
    ASSERT_EQ(static_cast<double>(static_cast<float>(middle)), middle);
    const int even = bits % 2 == 0 ? bits : bits + 1;
    for (const int sign : {0, 0x80}) {
      const auto signed_of = [&](auto x) { return sign != 0 ? -x : x; };
      const auto as_float = static_cast<float>(middle);
      EXPECT_EQ(convert<TypeParam>(signed_of(middle)).bits, sign | even) << int{bits};
      EXPECT_EQ(convert<TypeParam>(signed_of(std::nextafter(middle, 0))).bits, sign | bits) << int{bits};
      EXPECT_EQ(convert<TypeParam>(signed_of(std::nextafter(middle, HUGE_VAL))).bits, sign | (bits + 1)) << int{bits};
      EXPECT_EQ(convert<TypeParam>(signed_of(as_float)).bits, sign | even) << int{bits};
      EXPECT_EQ(convert<TypeParam>(signed_of(std::nextafter(as_float, 0.0f))).bits, sign | bits) << int{bits};
      EXPECT_EQ(convert<TypeParam>(signed_of(std::nextafter(as_float, HUGE_VALF))).bits, sign | (bits + 1))
          << int{bits};
    }
  }
}

// Every float whose lower half is 0, 1, half or all ones, against a search among all values: nearest, ties to even.
TYPED_TEST(ConvertEightBits, IsTheNearestOfAllValues) {
  for (uint32_t high = 0; high < 0x7f80; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x8000u, 0xffffu}) {
      const float x = std::bit_cast<float>(high << 16 | low);
      // Far beyond the largest value, all are as far away in double.
      const double place = std::min(static_cast<double>(x), meaning_of(TypeParam{TestFixture::kLargest}));
      int nearest = 0;
      double least = HUGE_VAL;
      for (int bits = 0; bits <= TestFixture::kLargest; ++bits) {
        const double distance = std::abs(meaning_of(TypeParam{static_cast<uint8_t>(bits)}) - place);
        if (distance < least || (distance == least && bits % 2 == 0)) nearest = bits, least = distance;
      }
      ASSERT_EQ(convert<TypeParam>(x).bits, nearest) << x;
      ASSERT_EQ(convert<TypeParam>(-x).bits, nearest | 0x80) << x;
    }
  }
}

TYPED_TEST(ConvertEightBits, NumbersSaturateAndInfinitiesDoNot) {
  const int last = TestFixture::kLargest, infinity = TestFixture::kHasInfinity ? 0x7c : 0x7f;
  const double largest = meaning_of(TypeParam{TestFixture::kLargest});
  EXPECT_EQ(largest, TestFixture::kHasInfinity ? 57344 : 448);
  for (const double x : {largest, largest * 1.01, largest * 1.2, 1e30, std::numeric_limits<double>::max()}) {
    EXPECT_EQ(convert<TypeParam>(x).bits, last) << x;
    EXPECT_EQ(convert<TypeParam>(-x).bits, last | 0x80) << x;
  }
  EXPECT_EQ(convert<TypeParam>(std::numeric_limits<float>::max()).bits, last);
  EXPECT_EQ(convert<TypeParam>(HUGE_VAL).bits, infinity);
  EXPECT_EQ(convert<TypeParam>(-HUGE_VALF).bits, infinity | 0x80);
  EXPECT_EQ(convert<TypeParam>(-0.0).bits, 0x80);
  EXPECT_EQ(convert<TypeParam>(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(ConvertTypes, AnyToAny) {
  static_assert(convert<float>(bf16{0x3f80}) == 1.0f);
  static_assert(convert<double>(f16{0x3c00}) == 1.0);
  static_assert(convert<bf16>(f16{0x3c00}).bits == 0x3f80);
  static_assert(convert<f16>(bf16{0x3f80}).bits == 0x3c00);
  static_assert(convert<f8_e4m3>(f8_e5m2{0x3c}).bits == 0x38);
  static_assert(convert<bf16>(f8_e4m3{0x38}).bits == 0x3f80);
  EXPECT_EQ(convert<float>(1e-50), 0.0f);
  EXPECT_EQ(convert<double>(0.1f), static_cast<double>(0.1f));
}

}  // namespace
}  // namespace opst
