// Every verb of vec.h, small_ints.h and math.h at every level that this processor has.
//
// The functions of math.h are checked over every 4099th float, with OPST_EXHAUSTIVE=1 over every float.
#include <Random123/philox.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <numbers>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "machine/levels.h"
#include "opst/context.h"
#include "opst/tensor.h"
#include "simd/verb_table_test.h"
#include "testing/contexts.h"
#include "testing/effort.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_ALL_LEVELS, simd_test, LevelTables, kTables, tables)

namespace {

using simd_test::LevelTables;
using simd_test::StorageTable;
using simd_test::tables;
using simd_test::VerbTable;
using test::exhaustive;
using test::Guard;
using test::GuardedBuffer;
using test::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Calls check(table) for the f32 verbs of each level and for generic's f64 verbs; a failure names the level.
template <class Check>
void for_each_table(const Check& check) {
  for (Isa isa : test::levels()) {
    SCOPED_TRACE(to_string(isa));
    check(tables(isa).f32);
    if (tables(isa).f64 != nullptr) {
      SCOPED_TRACE("f64");
      check(*tables(isa).f64);
    }
  }
}
template <class Check>
void for_each_level(const Check& check) {
  for (Isa isa : test::levels()) {
    SCOPED_TRACE(to_string(isa));
    check(tables(isa));
  }
}
template <class S>
S scalar_of(const VerbTable<S>&) {
  return S();
}

// Conversions other than the ones under test.
DType dtype_of(float) { return DType::f32; }
DType dtype_of(double) { return DType::f64; }
DType dtype_of(bf16) { return DType::bf16; }
DType dtype_of(f16) { return DType::f16; }
template <class T>
float to_f32(T x) {
  return static_cast<float>(test::get(ConstTensor::contiguous(dtype_of(x), {1}, &x), 0));
}
template <class T>
T rounded_to(float x) {
  T out;
  test::set(Tensor::contiguous(dtype_of(T()), {1}, &out), 0, static_cast<double>(x));
  return out;
}

template <class S>
bool same(S a, S b) {
  return std::memcmp(&a, &b, sizeof(S)) == 0 || (std::isnan(a) && std::isnan(b));
}

// ---- arithmetic, choice, bits

// Special values, which the rounds pair in every combination.
template <class S>
std::vector<S> interesting() {
  using Limits = std::numeric_limits<S>;
  return {S(0),
          -S(0),
          S(1),
          S(-1),
          S(0.5),
          S(-2.5),
          S(3.5),
          S(1e10),
          S(-1e-10),
          Limits::max(),
          Limits::lowest(),
          Limits::min(),
          Limits::denorm_min(),
          -Limits::denorm_min(),
          Limits::infinity(),
          -Limits::infinity(),
          Limits::quiet_NaN()};
}

TEST(Vec, ArithmeticAndChoiceAreIeee) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    const std::vector<S> values = interesting<S>();
    const auto lanes = static_cast<size_t>(verbs.lanes);
    std::vector<S> a(lanes), b(lanes), out(lanes);
    for (size_t first = 0; first < values.size() * values.size(); ++first) {
      for (size_t i = 0; i < lanes; ++i) {
        a[i] = values[(first + i) % values.size()];
        b[i] = values[(first / values.size() + 3 * i) % values.size()];
      }
      const auto expect = [&](const char* name, auto verb, auto scalar) {
        verb(a.data(), b.data(), out.data());
        for (size_t i = 0; i < lanes; ++i) {
          EXPECT_TRUE(same<S>(out[i], scalar(a[i], b[i])))
              << name << "(" << a[i] << ", " << b[i] << ") = " << out[i] << " in lane " << i;
        }
      };
      expect("+", verbs.add, [](S x, S y) { return x + y; });
      expect("-", verbs.subtract, [](S x, S y) { return x - y; });
      expect("*", verbs.multiply, [](S x, S y) { return x * y; });
      expect("/", verbs.divide, [](S x, S y) { return x / y; });
      // The second operand where either is NaN, and where they are equal (zeros of both signs).
      expect("max", verbs.max, [](S x, S y) { return x > y ? x : y; });
      expect("min", verbs.min, [](S x, S y) { return x < y ? x : y; });
      expect("copy_sign", verbs.copy_sign, [](S x, S y) { return std::copysign(x, y); });
      expect("<", verbs.less, [](S x, S y) { return S(x < y); });
      expect("<=", verbs.less_equal, [](S x, S y) { return S(x <= y); });
      expect("==", verbs.equal, [](S x, S y) { return S(x == y); });
      bool any = false;
      for (size_t i = 0; i < lanes; ++i) any = any || a[i] < b[i];
      EXPECT_EQ(verbs.any_less(a.data(), b.data()), any);
      const auto expect_unary = [&](const char* name, auto verb, auto scalar) {
        verb(a.data(), out.data());
        for (size_t i = 0; i < lanes; ++i) {
          EXPECT_TRUE(same<S>(out[i], scalar(a[i])) || (out[i] == 0 && scalar(a[i]) == 0))
              << name << "(" << a[i] << ") = " << out[i];
        }
      };
      expect_unary("sqrt", verbs.sqrt, [](S x) { return std::sqrt(x); });
      expect_unary("abs", verbs.abs, [](S x) { return std::abs(x); });
      expect_unary("round", verbs.round, [](S x) { return std::nearbyint(x); });
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST(Vec, RoundIsToNearestEven) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    Random random(test::seed());
    const auto lanes = static_cast<size_t>(verbs.lanes);
    std::vector<S> a(lanes), out(lanes);
    for (int i = 0; i < 4000; ++i) {
      for (S& x : a) {
        x = random.chance(0.5)
                ? static_cast<S>(random.integer(-2000, 2000)) / 2
                : static_cast<S>(std::ldexp(random.uniform(-1, 1), static_cast<int>(random.integer(-3, 60))));
      }
      verbs.round(a.data(), out.data());
      for (size_t j = 0; j < lanes; ++j) ASSERT_EQ(out[j], std::nearbyint(a[j])) << a[j];
    }
  });
}

TEST(Vec, FmaRoundsOnceExceptAtTheGenericLevel) {
  for (Isa isa : test::levels()) {
    SCOPED_TRACE(to_string(isa));
    const VerbTable<float>& verbs = tables(isa).f32;
    Random random(test::seed());
    const auto lanes = static_cast<size_t>(verbs.lanes);
    std::vector<float> a(lanes), b(lanes), c(lanes), out(lanes);
    for (int i = 0; i < 2000; ++i) {
      for (size_t j = 0; j < lanes; ++j) {
        a[j] = static_cast<float>(random.normal());
        b[j] = static_cast<float>(random.normal());
        c[j] = random.chance(0.5) ? -a[j] * b[j] : static_cast<float>(random.normal());
      }
      verbs.fma(a.data(), b.data(), c.data(), out.data());
      for (size_t j = 0; j < lanes; ++j) {
        const float expected = isa == Isa::generic ? a[j] * b[j] + c[j] : std::fma(a[j], b[j], c[j]);
        ASSERT_EQ(out[j], expected);
      }
    }
  }
}

TEST(Vec, SelectAndBlendTakeTheNamedLanes) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    const auto lanes = static_cast<size_t>(verbs.lanes);
    std::vector<S> a(lanes), b(lanes), x(lanes), y(lanes), out(lanes);
    Random random(test::seed());
    for (int round = 0; round < 200; ++round) {
      for (size_t i = 0; i < lanes; ++i) {
        a[i] = static_cast<S>(random.integer(0, 2)), b[i] = static_cast<S>(random.integer(0, 2));
        x[i] = static_cast<S>(i + 1), y[i] = -static_cast<S>(i + 1);
      }
      verbs.select_less(a.data(), b.data(), x.data(), y.data(), out.data());
      for (size_t i = 0; i < lanes; ++i) ASSERT_EQ(out[i], a[i] < b[i] ? x[i] : y[i]);
    }
    for (size_t n = 0; n <= lanes; ++n) {
      verbs.blend_n(static_cast<int64_t>(n), x.data(), y.data(), out.data());
      for (size_t i = 0; i < lanes; ++i) ASSERT_EQ(out[i], i < n ? x[i] : y[i]) << n;
    }
  });
}

TEST(Vec, ConstructsZeroOneValueAndIota) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    std::vector<S> out(static_cast<size_t>(verbs.lanes), S(9));
    verbs.zero(out.data());
    for (S v : out) EXPECT_TRUE(same(v, S(0)));
    verbs.set1(S(-2.5), out.data());
    for (S v : out) EXPECT_EQ(v, S(-2.5));
    verbs.iota(out.data());
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], static_cast<S>(i));
  });
}

TEST(Vec, ScalePow2IsExactAndSaturates) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    const int range = sizeof(S) == 4 ? 300 : 2300;
    std::vector<S> p(static_cast<size_t>(verbs.lanes)), n(p.size()), out(p.size());
    Random random(test::seed());
    for (int k = -range; k <= range; ++k) {
      for (S& x : p) x = static_cast<S>(random.uniform(0.5, 2) * random.pick({-1.0, 1.0}));
      p[0] = 1;
      std::fill(n.begin(), n.end(), static_cast<S>(k));
      verbs.scale_pow2(p.data(), n.data(), out.data());
      for (size_t i = 0; i < p.size(); ++i) ASSERT_EQ(out[i], std::ldexp(p[i], k)) << p[i] << " * 2^" << k;
    }
  });
}

TEST(Vec, SumsMaximaAndTransposesAreRight) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    const auto lanes = static_cast<size_t>(verbs.lanes);
    std::vector<S> rows(lanes * lanes), out(rows.size()), sums(lanes), maxima(lanes);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<S>(i * 7 % 257);
    verbs.transpose(rows.data(), out.data());
    for (size_t i = 0; i < lanes; ++i) {
      for (size_t j = 0; j < lanes; ++j) ASSERT_EQ(out[i * lanes + j], rows[j * lanes + i]) << i << ", " << j;
    }
    std::vector<const void*> pointers(lanes);
    for (size_t i = 0; i + 1 < lanes; ++i) pointers[i] = &rows[(lanes - 2 - i) * lanes];
    pointers[lanes - 1] = rows.data();
    verbs.load_transposed(pointers.data(), 1, out.data());
    for (size_t i = 0; i < lanes; ++i) {
      for (size_t c = 0; c < lanes; ++c) {
        ASSERT_EQ(out[c * lanes + i], static_cast<const S*>(pointers[i])[1 + c]) << i << ", " << c;
      }
    }
    verbs.hsum_each(rows.data(), sums.data());
    verbs.hmax_each(rows.data(), maxima.data());
    for (size_t i = 0; i < lanes; ++i) {
      const S* const row = &rows[i * lanes];
      S sum = 0;
      for (size_t j = 0; j < lanes; ++j) sum += row[j];
      EXPECT_EQ(sums[i], sum);
      EXPECT_EQ(verbs.hsum(row), sum);
      EXPECT_EQ(verbs.hmax(row), *std::max_element(row, row + lanes));
      EXPECT_EQ(maxima[i], verbs.hmax(row));
    }
    // Negative numbers only, the largest in each lane in turn.
    for (size_t top = 0; top < lanes; ++top) {
      std::vector<S> row(lanes, S(-5));
      row[top] = S(-4);
      EXPECT_EQ(verbs.hmax(row.data()), S(-4));
    }
  });
}

TEST(Vec, SumsHaveOneOrder) {
  // hsum_each has hsum's bits, wherever a row stands.
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    const auto lanes = static_cast<size_t>(verbs.lanes);
    Random random(test::seed());
    std::vector<S> rows(lanes * lanes), sums(lanes);
    for (S& x : rows) x = static_cast<S>(random.normal());
    verbs.hsum_each(rows.data(), sums.data());
    for (size_t i = 0; i < lanes; ++i) EXPECT_TRUE(same(sums[i], verbs.hsum(&rows[i * lanes]))) << i;
  });
}

// ---- memory

// Loads and stores of `count` elements of T, with the forbidden page behind or before them.
template <class T, class S>
void check_memory(int lanes, void (*load)(const T*, S*), void (*load_n)(const T*, int64_t, S*),
                  void (*store)(const S*, T*), void (*store_n)(const S*, T*, int64_t)) {
  for (Guard guard : {Guard::after, Guard::before}) {
    for (int n = 0; n <= lanes; ++n) {
      SCOPED_TRACE(n);
      GuardedBuffer source(n * static_cast<int64_t>(sizeof(T)), guard),
          target(n * static_cast<int64_t>(sizeof(T)), guard);
      T* const p = static_cast<T*>(source.data());
      for (int i = 0; i < n; ++i) p[i] = rounded_to<T>(static_cast<float>(i + 1));
      std::vector<S> out(static_cast<size_t>(lanes), S(77));
      load_n(p, n, out.data());
      for (int i = 0; i < lanes; ++i) {
        ASSERT_TRUE(same(out[static_cast<size_t>(i)], i < n ? static_cast<S>(i + 1) : S(0))) << "lane " << i;
      }
      store_n(out.data(), static_cast<T*>(target.data()), n);
      ASSERT_TRUE(n == 0 || std::memcmp(target.data(), p, static_cast<size_t>(n) * sizeof(T)) == 0);
      ASSERT_TRUE(target.slack_intact());
      if (n == lanes) {
        load(p, out.data());
        for (int i = 0; i < lanes; ++i) ASSERT_EQ(out[static_cast<size_t>(i)], static_cast<S>(i + 1));
        std::memset(target.data(), 0, static_cast<size_t>(n) * sizeof(T));
        store(out.data(), static_cast<T*>(target.data()));
        ASSERT_EQ(std::memcmp(target.data(), p, static_cast<size_t>(n) * sizeof(T)), 0);
        ASSERT_TRUE(target.slack_intact());
      }
    }
  }
}

// Pairs of bf16 pass for floats, but a tensor of bf16 begins at any even address. (Shows under -fsanitize=alignment.)
template <class S>
void check_even_addresses(int lanes, void (*load_n)(const S*, int64_t, S*), void (*store_n)(const S*, S*, int64_t)) {
  const auto n = static_cast<size_t>(lanes);
  std::vector<S> values(n), loaded(n, S(77)), stored(n);
  std::iota(values.begin(), values.end(), S(1));
  std::vector<uint16_t> memory(1 + n * sizeof(S) / 2);
  auto* const p = reinterpret_cast<S*>(memory.data() + 1);
  std::memcpy(memory.data() + 1, values.data(), n * sizeof(S));
  load_n(p, lanes, loaded.data());
  EXPECT_EQ(loaded, values);
  std::fill(memory.begin(), memory.end(), uint16_t{0});
  store_n(values.data(), p, lanes);
  std::memcpy(stored.data(), memory.data() + 1, n * sizeof(S));
  EXPECT_EQ(stored, values);
}

TEST(Vec, LoadsAndStoresAtAnyEvenAddress) {
  for_each_table([](const auto& verbs) { check_even_addresses(verbs.lanes, verbs.load_n, verbs.store_n); });
}

TEST(Vec, LoadsAndStoresTouchTheirElementsOnly) {
  for_each_table(
      [](const auto& verbs) { check_memory(verbs.lanes, verbs.load, verbs.load_n, verbs.store, verbs.store_n); });
  for_each_level([](const LevelTables& level) {
    const auto& s = level.storage;
    check_memory(level.f32.lanes, s.load_bf16, s.load_n_bf16, s.store_bf16, s.store_n_bf16);
    check_memory(level.f32.lanes, s.load_f16, s.load_n_f16, s.store_f16, s.store_n_f16);
  });
}

template <class T>
void check_widening(int lanes, void (*load)(const T*, float*), void (*load_n)(const T*, int64_t, float*)) {
  std::vector<T> in(static_cast<size_t>(lanes));
  std::vector<float> out(in.size()), part(in.size());
  for (uint32_t bits = 0; bits < 65536; bits += static_cast<uint32_t>(lanes)) {
    for (uint32_t i = 0; i < static_cast<uint32_t>(lanes); ++i) in[i] = {static_cast<uint16_t>(bits + i)};
    load(in.data(), out.data());
    load_n(in.data(), lanes - 1, part.data());
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_TRUE(same(out[i], to_f32(in[i]))) << in[i].bits;
      ASSERT_TRUE(same(part[i], i + 1 < in.size() ? to_f32(in[i]) : 0.0f)) << in[i].bits;
    }
  }
}

template <class T>
bool same_half(T a, T b) {
  return a.bits == b.bits || (std::isnan(to_f32(a)) && std::isnan(to_f32(b)));
}

// Every value of T, the midpoints between neighbours and the floats just beside these, and random floats.
template <class T>
void check_narrowing(int lanes, void (*store)(const float*, T*), void (*store_n)(const float*, T*, int64_t)) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = to_f32(T{static_cast<uint16_t>(bits)});
    const float next = to_f32(T{static_cast<uint16_t>(bits + 1)});
    const float half = static_cast<float>((static_cast<double>(x) + static_cast<double>(next)) / 2);
    for (float y : {x, half, std::nextafter(half, x), std::nextafter(half, next)}) values.push_back(y);
  }
  Random random(test::seed());
  for (int i = 0; i < 400000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.bits())));
  while (values.size() % static_cast<size_t>(lanes) != 0) values.push_back(0);
  std::vector<T> out(static_cast<size_t>(lanes)), part(out.size());
  for (size_t first = 0; first < values.size(); first += out.size()) {
    store(&values[first], out.data());
    store_n(&values[first], part.data(), lanes);
    for (size_t i = 0; i < out.size(); ++i) {
      const T expected = rounded_to<T>(values[first + i]);
      ASSERT_TRUE(same_half(out[i], expected)) << values[first + i] << ": " << out[i].bits << ", not " << expected.bits;
      ASSERT_EQ(part[i].bits, out[i].bits) << values[first + i];
    }
  }
}

TEST(Vec, ConvertsEvery16BitValueAndRoundsToNearestEven) {
  for_each_level([](const LevelTables& level) {
    const auto& s = level.storage;
    check_widening(level.f32.lanes, s.load_bf16, s.load_n_bf16);
    check_widening(level.f32.lanes, s.load_f16, s.load_n_f16);
    check_narrowing(level.f32.lanes, s.store_bf16, s.store_n_bf16);
    check_narrowing(level.f32.lanes, s.store_f16, s.store_n_f16);
  });
}

TEST(SmallInts, UnpackEveryField) {
  for_each_level([](const LevelTables& level) {
    const auto lanes = static_cast<size_t>(level.f32.lanes);
    Random random(test::seed());
    std::vector<uint32_t> words(lanes);
    std::vector<float> out(8 * lanes);
    for (int round = 0; round < 500; ++round) {
      for (uint32_t& word : words) word = static_cast<uint32_t>(random.bits());
      std::vector<uint32_t> high(lanes);
      for (uint32_t& x : high) x = static_cast<uint32_t>(random.bits());
      const auto expect = [&](const char* verb, const auto& value) {
        for (size_t field = 0; field < 8; ++field) {
          for (size_t i = 0; i < lanes; ++i) {
            ASSERT_EQ(out[field * lanes + i], static_cast<float>(value(i, field))) << verb << ", field " << field;
          }
        }
      };
      const auto low = [&](size_t i, size_t field) { return static_cast<int>(words[i] >> (4 * field) & 15u); };
      level.storage.nibbles(words.data(), out.data());
      expect("nibble", low);
      level.storage.shifted_nibbles(words.data(), out.data());
      expect(">>", low);
      level.storage.nibbles_minus_8(words.data(), out.data());
      expect("nibble<8>", [&](size_t i, size_t field) { return low(i, field) - 8; });
      level.storage.fields5_minus_16(words.data(), high.data(), out.data());
      expect("field5<16>", [&](size_t i, size_t field) {
        return low(i, field) + 16 * static_cast<int>(high[i] >> (4 * field) & 1) - 16;
      });
      level.storage.fields6_minus_32(words.data(), high.data(), out.data());
      expect("field6<32>", [&](size_t i, size_t field) {
        return low(i, field) + 16 * static_cast<int>(high[i] >> (4 * field) & 3) - 32;
      });
      level.storage.signed_bytes(words.data(), out.data());
      for (size_t i = 0; i < 4 * lanes; ++i) {
        ASSERT_EQ(out[i], static_cast<float>(static_cast<int8_t>(words[i % lanes] >> (i / lanes * 8) & 255u)));
      }
    }
    for (int base = -128; base < 128; base += static_cast<int>(lanes)) {
      GuardedBuffer bytes(static_cast<int64_t>(lanes));
      auto* const p = static_cast<int8_t*>(bytes.data());
      for (size_t i = 0; i < lanes; ++i) p[i] = static_cast<int8_t>(base + static_cast<int>(i));
      level.storage.load_i8(p, out.data());
      for (size_t i = 0; i < lanes; ++i) ASSERT_EQ(out[i], static_cast<float>(p[i]));
    }
  });
}

TEST(SmallInts, TwoNumbersOfAByteInOrder) {
  for_each_level([](const LevelTables& level) {
    const auto lanes = static_cast<size_t>(level.f32.lanes);
    std::vector<float> out(lanes);
    for (size_t n = 2; n <= lanes; n += 2) {
      const GuardedBuffer memory(static_cast<int64_t>(n / 2));
      auto* const p = static_cast<uint8_t*>(memory.data());
      for (int base = 0; base < 256; ++base) {
        for (size_t i = 0; i < n / 2; ++i) p[i] = static_cast<uint8_t>(base + 37 * static_cast<int>(i));
        level.storage.load_i4(p, static_cast<int64_t>(n), out.data());
        for (size_t i = 0; i < lanes; ++i) {
          const int bits = i >= n ? 0 : i % 2 == 0 ? p[i / 2] & 15 : p[i / 2] >> 4;
          ASSERT_EQ(out[i], static_cast<float>(bits < 8 ? bits : bits - 16)) << base << ", number " << i << " of " << n;
        }
      }
    }
  });
}

// ---- numbers of eight bits

template <class T, class Load, class Store>
void expect_eight_bits(DType dtype, size_t lanes, const Load& load, const Store& store) {
  std::vector<float> wide(lanes);
  for (size_t n = 1; n <= lanes; ++n) {
    for (int base = 0; base < 256; base += static_cast<int>(n)) {
      const GuardedBuffer memory(static_cast<int64_t>(n));
      auto* const p = static_cast<T*>(memory.data());
      for (size_t i = 0; i < n; ++i) p[i].bits = static_cast<uint8_t>(base + static_cast<int>(i));
      load(p, static_cast<int64_t>(n), wide.data());
      for (size_t i = 0; i < lanes; ++i) {
        const double expected = i < n ? test::get(dtype, p, static_cast<int64_t>(i)) : 0;
        ASSERT_EQ(std::signbit(wide[i]), std::signbit(expected)) << base << " + " << i;
        ASSERT_TRUE(static_cast<double>(wide[i]) == expected || (std::isnan(wide[i]) && std::isnan(expected)))
            << base << " + " << i;
      }
    }
  }
  // Every upper half of a float, with lower halves that are ties and beside them; infinities and NaN too.
  std::vector<float> x(lanes);
  size_t count = 0;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x8000u, 0xffffu}) {
      x[count++ % lanes] = std::bit_cast<float>(high << 16 | low);
      if (count % lanes != 0) continue;
      for (const size_t n : {lanes, 1 + count / lanes % lanes}) {
        std::vector<T> narrow(lanes + 1, T{0xa5});
        store(x.data(), static_cast<int64_t>(n), narrow.data());
        for (size_t i = 0; i < n; ++i) {
          T expected;
          test::set(dtype, &expected, 0, static_cast<double>(x[i]));
          ASSERT_EQ(int{narrow[i].bits}, int{expected.bits}) << x[i];
        }
        ASSERT_EQ(int{narrow[n].bits}, 0xa5);
      }
    }
  }
}

TEST(EightBits, ConvertAsTheScalarFunctionsDo) {
  for_each_level([](const LevelTables& level) {
    const auto lanes = static_cast<size_t>(level.f32.lanes);
    const StorageTable& s = level.storage;
    expect_eight_bits<f8_e4m3>(DType::f8_e4m3, lanes, s.load_e4m3, s.store_e4m3);
    expect_eight_bits<f8_e5m2>(DType::f8_e5m2, lanes, s.load_e5m2, s.store_e5m2);
  });
}

// ---- bf16 pairs

TEST(Bf16Pairs, InterleaveRowsOfAnyLength) {
  for_each_level([](const LevelTables& level) {
    if (level.storage.interleave_words == nullptr) return;
    for (int64_t n = 1; n <= 32; ++n) {
      for (bool has_odd : {false, true}) {
        GuardedBuffer even(2 * n), odd(2 * n);
        for (int64_t i = 0; i < n; ++i) {
          static_cast<uint16_t*>(even.data())[i] = static_cast<uint16_t>(1000 + i);
          static_cast<uint16_t*>(odd.data())[i] = static_cast<uint16_t>(2000 + i);
        }
        // Whole vectors are written, zeros beyond n.
        const int64_t written = n > 16 ? 32 : 16;
        GuardedBuffer words(4 * written);
        auto* const out = static_cast<uint32_t*>(words.data());
        level.storage.interleave_words(static_cast<const bf16*>(even.data()),
                                       has_odd ? static_cast<const bf16*>(odd.data()) : nullptr, n, has_odd, out);
        for (int64_t i = 0; i < written; ++i) {
          const auto low = static_cast<uint32_t>(i < n ? 1000 + i : 0);
          const auto high = static_cast<uint32_t>(i < n && has_odd ? 2000 + i : 0);
          ASSERT_EQ(out[i], low | high << 16) << "n " << n << ", word " << i;
        }
      }
    }
  });
}

TEST(Bf16Pairs, WordsWidenToTheirTwoValues) {
  for_each_level([](const LevelTables& level) {
    const int64_t lanes = level.f32.lanes;
    Random random(test::seed());
    for (Guard guard : {Guard::after, Guard::before}) {
      for (int64_t n = 0; n <= lanes; ++n) {
        GuardedBuffer source(4 * n, guard);
        auto* const words = static_cast<uint32_t*>(source.data());
        for (int64_t i = 0; i < n; ++i) words[i] = static_cast<uint32_t>(random.bits());
        std::vector<float> low(static_cast<size_t>(lanes), 9.0f), high(low);
        const auto expect = [&] {
          for (int64_t i = 0; i < lanes; ++i) {
            const uint32_t word = i < n ? words[i] : 0;
            const auto at = static_cast<size_t>(i);
            ASSERT_TRUE(same(low[at], std::bit_cast<float>(word << 16))) << "n " << n << ", lane " << i;
            ASSERT_TRUE(same(high[at], std::bit_cast<float>(word & 0xffff0000u))) << "n " << n << ", lane " << i;
          }
        };
        level.storage.load_n_words(words, n, low.data(), high.data());
        expect();
        if (n < lanes) continue;
        level.storage.load_words(words, low.data(), high.data());
        expect();
      }
    }
  });
}

TEST(Bf16Pairs, DotAddsBothProducts) {
  for_each_level([](const LevelTables& level) {
    if (level.storage.dot_pairs == nullptr) return;
    Random random(test::seed());
    const auto lanes = static_cast<size_t>(level.f32.lanes);
    std::vector<float> acc(lanes), out(lanes);
    std::vector<uint32_t> a(lanes), b(lanes);
    const auto word = [&] {
      return static_cast<uint32_t>(rounded_to<bf16>(static_cast<float>(random.normal())).bits) |
             static_cast<uint32_t>(rounded_to<bf16>(static_cast<float>(random.normal())).bits) << 16;
    };
    const auto low = [](uint32_t w) { return static_cast<double>(to_f32(bf16{static_cast<uint16_t>(w)})); };
    const auto high = [](uint32_t w) { return static_cast<double>(to_f32(bf16{static_cast<uint16_t>(w >> 16)})); };
    for (int round = 0; round < 1000; ++round) {
      const uint32_t repeated = word();
      for (size_t i = 0; i < lanes; ++i) acc[i] = static_cast<float>(random.normal()), a[i] = word(), b[i] = word();
      level.storage.dot_pairs(acc.data(), a.data(), b.data(), repeated, out.data());
      for (size_t i = 0; i < lanes; ++i) {
        const double terms[] = {static_cast<double>(acc[i]), low(a[i]) * low(b[i]), high(a[i]) * high(b[i]),
                                low(a[i]) * low(repeated), high(a[i]) * high(repeated)};
        double sum = 0, magnitude = 0;
        for (double term : terms) sum += term, magnitude += std::abs(term);
        ASSERT_NEAR(static_cast<double>(out[i]), sum, 4 * 0x1p-24 * magnitude);
      }
    }
  });
}

TEST(Bf16Pairs, FastStoreRoundsToNearestEven) {
  for_each_level([](const LevelTables& level) {
    if (level.storage.store_bf16_fast == nullptr) return;
    Random random(test::seed());
    const auto count = static_cast<size_t>(2 * level.f32.lanes);
    std::vector<float> x(count);
    std::vector<bf16> out(count);
    for (int round = 0; round < 30000; ++round) {
      for (float& v : x) {
        v = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
        // Half of them halfway between two bf16.
        if (round % 2 == 0) v = std::bit_cast<float>((std::bit_cast<uint32_t>(v) & 0xffff0000u) | 0x8000u);
      }
      level.storage.store_bf16_fast(x.data(), out.data());
      for (size_t i = 0; i < count; ++i) {
        bf16 expected = rounded_to<bf16>(x[i]);
        // The instruction flushes subnormal operands.
        if (std::abs(x[i]) < std::numeric_limits<float>::min()) expected = rounded_to<bf16>(std::copysign(0.0f, x[i]));
        ASSERT_TRUE(same_half(out[i], expected)) << x[i] << ": " << out[i].bits << ", not " << expected.bits;
      }
    }
  });
}

// ---- math.h

struct Function {
  const char* name;
  simd_test::Map<float> VerbTable<float>::*f32;
  double (*reference)(double);
  double max_ulp;           // in units of the exact result's last place
  double max_relative = 0;  // or, where given, relative to the exact result
};
// Of small x by two terms of the series, which are right to 2^-59: most floats are so small, and libm takes long.
double exact_tanh(double x) { return std::abs(x) < 0x1p-15 ? x - x * x * x / 3 : std::tanh(x); }
double exact_erf(double x) {
  return std::abs(x) < 0x1p-15 ? 2 / std::sqrt(std::numbers::pi) * (x - x * x * x / 3) : std::erf(x);
}
const Function kFunctions[] = {
    {"exp2", &VerbTable<float>::exp2, [](double x) { return std::exp2(x); }, 1.5},
    {"exp2_short", &VerbTable<float>::exp2_short, [](double x) { return std::exp2(x); }, 3.1},
    // 2^-13.2
    {"exp2_bf16", &VerbTable<float>::exp2_bf16, [](double x) { return std::exp2(x); }, 0, 0x1p-13 * 0.8705},
    {"exp", &VerbTable<float>::exp, [](double x) { return std::exp(x); }, 1.5},
    {"tanh", &VerbTable<float>::tanh, exact_tanh, 2.5},
    {"tanh_short", &VerbTable<float>::tanh_short, exact_tanh, 6.5},
    {"erf", &VerbTable<float>::erf, exact_erf, 1.5},
};
constexpr size_t kNumFunctions = std::size(kFunctions);

// A float's unit in the last place at this magnitude, by the bits: libm's ilogb and ldexp would take most of the time.
double ulp_of(double magnitude) {
  constexpr uint64_t kExponent = uint64_t{0x7ff} << 52;
  const uint64_t exponent = std::bit_cast<uint64_t>(magnitude) & kExponent;
  return std::bit_cast<double>(std::max(exponent, std::bit_cast<uint64_t>(0x1p-126)) - (uint64_t{23} << 52));
}

// Distance as a fraction of the function's bound; infinite where a special value is wrong. A result below the
// smallest normal number must be 0; just at that border either is right.
double error_of(const Function& function, float x, float got, double exact) {
  constexpr double kSmallest = static_cast<double>(std::numeric_limits<float>::min());
  constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max());
  if (std::isnan(x)) return std::isnan(got) ? 0 : HUGE_VAL;
  if (std::isnan(got)) return HUGE_VAL;
  const double magnitude = std::abs(exact);
  if (magnitude == 0) return got == 0 ? 0 : HUGE_VAL;
  const bool odd = function.f32 == &VerbTable<float>::tanh || function.f32 == &VerbTable<float>::tanh_short ||
                   function.f32 == &VerbTable<float>::erf;
  if (magnitude < kSmallest && !odd) {
    const bool border = magnitude > kSmallest * (1 - 0x1p-11);
    return got == 0 || (border && static_cast<double>(got) == kSmallest) ? 0 : HUGE_VAL;
  }
  if (magnitude < kSmallest * (1 + 0x1p-11) && got == 0 && magnitude < kSmallest * (1 + 1e-6)) return 0;
  const double ulp = ulp_of(magnitude);
  double value = static_cast<double>(got);
  if (std::isinf(value)) value = std::copysign(0x1p128, value);
  if (magnitude > kLargest + ulp) return std::isinf(got) ? 0 : HUGE_VAL;
  const double allowed = function.max_relative > 0 ? function.max_relative * magnitude : function.max_ulp * ulp;
  return std::abs(value - exact) / allowed;
}

// Whether neighbouring floats of one sign, from the first to the last one, have exact results that differ by less than
// kFlat of every bound above: most floats are so small or so large. The functions are monotone, so the results between
// lie between.
constexpr double kFlat = 0.01;
bool is_flat(double exact_first, double exact_last) {
  const auto [low, high] = std::minmax({std::abs(exact_first), std::abs(exact_last)});
  const bool normal = low > 2.0 * static_cast<double>(std::numeric_limits<float>::min()) && high < 0x1p127;
  return exact_first == exact_last || (normal && high - low < kFlat * ulp_of(low));
}

// The positions of the smallest and of the largest of n outputs; NaN counts as beyond the infinity of its sign.
std::pair<size_t, size_t> extremes_of(const std::vector<float>& out, size_t n) {
  const auto key = [&](size_t i) {
    const auto bits = std::bit_cast<int32_t>(out[i]);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  };
  int32_t low = key(0), high = low;
  for (size_t i = 1; i < n; ++i) low = std::min(low, key(i)), high = std::max(high, key(i));
  size_t at_low = 0, at_high = 0;
  while (key(at_low) != low) ++at_low;
  while (key(at_high) != high) ++at_high;
  return {at_low, at_high};
}

struct Worst {
  double error = 0;
  float x = 0;

  void take(double other, float at) {
    if (other > error) error = other, x = at;
  }
};

TEST(Math, F32StaysWithinItsBoundOverAllFloats) {
  const uint64_t step = exhaustive() ? 1 : 4099;
  constexpr uint64_t kChunk = 1 << 16;
  const uint64_t count = ((uint64_t{1} << 32) + step - 1) / step;
  const std::vector<Isa> levels = test::levels();
  std::vector<std::array<Worst, kNumFunctions>> worst(levels.size());
  std::mutex mutex;
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    std::vector<float> x(kChunk), out(kChunk);
    std::vector<double> exact(kChunk);
    std::vector<std::array<Worst, kNumFunctions>> mine(levels.size());
    for (uint64_t begin; (begin = next.fetch_add(kChunk)) < count;) {
      const size_t n = static_cast<size_t>(std::min(kChunk, count - begin));
      for (size_t i = 0; i < n; ++i) x[i] = std::bit_cast<float>(static_cast<uint32_t>((begin + i) * step));
      bool flat = false;
      for (size_t f = 0; f < kNumFunctions; ++f) {
        const Function& function = kFunctions[f];
        if (f == 0 || function.reference(1.25) != kFunctions[f - 1].reference(1.25)) {
          exact[0] = function.reference(static_cast<double>(x[0]));
          flat = step == 1 && is_flat(exact[0], function.reference(static_cast<double>(x[n - 1])));
          for (size_t i = 1; i < n && !flat; ++i) exact[i] = function.reference(static_cast<double>(x[i]));
        }
        for (size_t level = 0; level < levels.size(); ++level) {
          // The levels above avx512 have its code: sampled only.
          if (step == 1 && levels[level] > Isa::avx512 && begin / kChunk % 64 != 0) continue;
          (tables(levels[level]).f32.*function.f32)(x.data(), out.data(), static_cast<int64_t>(n));
          Worst& w = mine[level][f];
          if (flat) {
            const auto [low, high] = extremes_of(out, n);
            for (const size_t i : {low, high}) w.take(kFlat + error_of(function, x[i], out[i], exact[0]), x[i]);
            continue;
          }
          for (size_t i = 0; i < n; ++i) w.take(error_of(function, x[i], out[i], exact[i]), x[i]);
        }
      }
    }
    const std::lock_guard lock(mutex);
    for (size_t level = 0; level < levels.size(); ++level) {
      for (size_t f = 0; f < kNumFunctions; ++f) {
        if (mine[level][f].error > worst[level][f].error) worst[level][f] = mine[level][f];
      }
    }
  };
  std::vector<std::thread> threads;
  const unsigned num_threads = exhaustive() ? std::max(1u, std::thread::hardware_concurrency()) : 1;
  for (unsigned i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (size_t level = 0; level < levels.size(); ++level) {
    for (size_t f = 0; f < kNumFunctions; ++f) {
      const Worst& w = worst[level][f];
      const Function& function = kFunctions[f];
      std::printf("%-12s %-11s %.3f of its bound at %a\n", to_string(levels[level]), function.name, w.error,
                  static_cast<double>(w.x));
      EXPECT_LE(w.error, 1) << to_string(levels[level]) << ", " << function.name << " at " << w.x;
    }
  }
}

TEST(Math, SpecialValuesAreExact) {
  for_each_table([](const auto& verbs) {
    using S = decltype(scalar_of(verbs));
    using Limits = std::numeric_limits<S>;
    const auto at = [&](simd_test::Map<S> f, S x) {
      S out = 77;
      f(&x, &out, 1);
      return out;
    };
    for (simd_test::Map<S> f : {verbs.exp2, verbs.exp2_short, verbs.exp}) {
      EXPECT_EQ(at(f, S(0)), S(1));
      EXPECT_EQ(at(f, -S(0)), S(1));
      EXPECT_EQ(at(f, Limits::denorm_min()), S(1));
      EXPECT_TRUE(same(at(f, -Limits::infinity()), S(0)));
      EXPECT_TRUE(same(at(f, Limits::lowest()), S(0)));
      EXPECT_EQ(at(f, Limits::infinity()), Limits::infinity());
      EXPECT_EQ(at(f, Limits::max()), Limits::infinity());
      EXPECT_TRUE(std::isnan(at(f, Limits::quiet_NaN())));
    }
    const int lowest = Limits::min_exponent - 1, highest = Limits::max_exponent;
    for (int n = lowest; n < highest; ++n) EXPECT_EQ(at(verbs.exp2, static_cast<S>(n)), std::ldexp(S(1), n)) << n;
    EXPECT_TRUE(same(at(verbs.exp2, std::nextafter(static_cast<S>(lowest), Limits::lowest())), S(0)));
    EXPECT_EQ(at(verbs.exp2, static_cast<S>(highest)), Limits::infinity());
    // Around the border of subnormal results: 0 or normal, never between.
    for (simd_test::Map<S> f : {verbs.exp2, verbs.exp2_short, verbs.exp}) {
      const S border = f == verbs.exp ? std::log(Limits::min()) : static_cast<S>(lowest);
      S x = border;
      for (int i = 0; i < 50; ++i) x = std::nextafter(x, S(0));
      for (int i = 0; i < 100; ++i, x = std::nextafter(x, Limits::lowest())) {
        const S y = at(f, x);
        EXPECT_TRUE(same(y, S(0)) || (y >= Limits::min() && y < S(1.001) * Limits::min())) << x << ": " << y;
      }
    }
    for (simd_test::Map<S> f : {verbs.tanh, verbs.tanh_short}) {
      EXPECT_EQ(at(f, Limits::infinity()), S(1));
      EXPECT_EQ(at(f, -Limits::infinity()), S(-1));
      EXPECT_TRUE(same(at(f, S(0)), S(0)));
      EXPECT_TRUE(same(at(f, -S(0)), -S(0)));
      EXPECT_TRUE(std::isnan(at(f, Limits::quiet_NaN())));
      EXPECT_EQ(at(f, S(50)), S(1));
    }
    if constexpr (sizeof(S) == 4) {
      EXPECT_TRUE(std::isnan(at(verbs.exp2_bf16, kNan)));
      EXPECT_EQ(at(verbs.exp2_bf16, -kInf), 0.0f);
      EXPECT_EQ(at(verbs.exp2_bf16, 0.0f), 1.0f);
      EXPECT_EQ(at(verbs.exp2_bf16, kInf), kInf);
      EXPECT_EQ(at(verbs.erf, kInf), 1.0f);
      EXPECT_EQ(at(verbs.erf, -kInf), -1.0f);
      EXPECT_TRUE(same(at(verbs.erf, 0.0f), 0.0f));
      EXPECT_TRUE(same(at(verbs.erf, -0.0f), -0.0f));
      EXPECT_TRUE(std::isnan(at(verbs.erf, kNan)));
    }
  });
}

// A vector's tail gives what its body gives.
TEST(Math, EveryLaneAndEveryTailIsTheSameFunction) {
  for_each_level([](const LevelTables& level) {
    Random random(test::seed());
    for (const Function& function : kFunctions) {
      const simd_test::Map<float> f = level.f32.*function.f32;
      std::vector<float> x(97), whole(97), single(97);
      for (float& v : x) v = static_cast<float>(random.normal() * random.pick({0.1, 3.0, 60.0, 1000.0}));
      f(x.data(), whole.data(), 97);
      for (size_t i = 0; i < x.size(); ++i) {
        f(&x[i], &single[i], 1);
        ASSERT_TRUE(same(whole[i], single[i])) << function.name << " " << x[i];
      }
    }
  });
}

TEST(Math, F64StaysWithinItsBound) {
  const VerbTable<double>& verbs = *tables(Isa::generic).f64;
  Random random(test::seed());
  const int64_t count = exhaustive() ? 50'000'000 : 400'000;
  std::vector<double> x(4096), out(x.size());
  double worst[3] = {};
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(x.size())) {
    for (double& v : x) {
      v = random.chance(0.5)   ? random.uniform(-1, 1)
          : random.chance(0.5) ? random.uniform(-740, 740)
                               : std::ldexp(random.uniform(-1, 1), static_cast<int>(random.integer(-60, 3)));
    }
    for (size_t f = 0; f < 3; ++f) {
      (f == 0 ? verbs.exp2 : f == 1 ? verbs.exp : verbs.tanh)(x.data(), out.data(), static_cast<int64_t>(x.size()));
      for (size_t i = 0; i < x.size(); ++i) {
        const long double y = x[i];
        const long double exact = f == 0 ? std::exp2(y) : f == 1 ? std::exp(y) : std::tanh(y);
        const auto magnitude = static_cast<double>(std::abs(exact));
        if (magnitude < std::numeric_limits<double>::min() * 1.001) {
          if (f < 2) {
            ASSERT_LE(out[i], std::numeric_limits<double>::min() * 1.001) << x[i];
          }
          continue;
        }
        if (std::isinf(magnitude)) {
          ASSERT_TRUE(std::isinf(out[i])) << x[i];
          continue;
        }
        const double ulp = std::ldexp(1.0, std::ilogb(magnitude) - 52);
        const auto error = static_cast<double>(std::abs(static_cast<long double>(out[i]) - exact)) / ulp;
        if (!(error <= worst[f])) worst[f] = error;
      }
    }
  }
  std::printf("f64: exp2 %.3f, exp %.3f, tanh %.3f ulp\n", worst[0], worst[1], worst[2]);
  EXPECT_LE(worst[0], 2);
  EXPECT_LE(worst[1], 2);
  EXPECT_LE(worst[2], 7);  // 6.27 seen in 200 million
}

TEST(SimdBits, LanesByBitsAndBitsByBytes) {
  Random random(test::seed());
  for (Isa isa : test::levels()) {
    SCOPED_TRACE(to_string(isa));
    const LevelTables& level = tables(isa);
    const int lanes = level.f32.lanes;
    for (int repeat = 0; repeat < 200; ++repeat) {
      const auto bits = static_cast<uint32_t>(random.bits());
      std::vector<float> a(static_cast<size_t>(lanes)), b = a, out = a;
      for (float& x : a) x = static_cast<float>(random.normal());
      for (float& x : b) x = random.chance(0.1) ? kNan : static_cast<float>(random.normal());
      level.bits.select_bits(bits, a.data(), b.data(), out.data());
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>((bits >> i & 1) != 0 ? a[i] : b[i]));
      }
      const int64_t n = random.integer(0, lanes);
      const GuardedBuffer memory(n, Guard::after);
      auto* bytes = static_cast<uint8_t*>(memory.data());
      uint32_t expected = 0;
      for (int64_t i = 0; i < n; ++i) {
        bytes[i] = random.chance(0.5) ? uint8_t{0} : static_cast<uint8_t>(random.integer(1, 255));
        expected |= static_cast<uint32_t>(bytes[i] != 0) << i;
      }
      EXPECT_EQ(level.bits.bits_of_bytes(bytes, n), expected);
    }
  }
}

TEST(SimdBits, PhiloxIsRandom123s) {
  Random random(test::seed() + 1);
  for (Isa isa : test::levels()) {
    SCOPED_TRACE(to_string(isa));
    const LevelTables& level = tables(isa);
    for (int repeat = 0; repeat < 300; ++repeat) {
      const auto word = [&] { return random.chance(0.2) ? ~0u - 20u : static_cast<uint32_t>(random.bits()); };
      const uint32_t key[2] = {word(), word()}, counter[3] = {word(), word(), word()}, c0 = word();
      const uint32_t last_kept = random.chance(0.2) ? 0u : random.chance(0.2) ? ~0u - 1 : word();
      const int64_t groups = random.integer(0, 5);
      std::vector<uint32_t> bits(static_cast<size_t>(groups) + 1, 77u);
      level.bits.philox_bits(key, counter, c0, groups, last_kept, bits.data());
      EXPECT_EQ(bits.back(), 77u);
      for (uint32_t i = 0; i < static_cast<uint32_t>(8 * groups); ++i) {
        r123::Philox4x32::ctr_type c;
        c[0] = c0 + i, c[1] = counter[0], c[2] = counter[1], c[3] = counter[2];
        r123::Philox4x32::key_type k;
        k[0] = key[0], k[1] = key[1];
        const auto exact = r123::Philox4x32()(c, k);
        uint32_t words[4];
        level.bits.philox_words(key, counter, c0 + i, words);
        for (uint32_t w = 0; w < 4; ++w) {
          EXPECT_EQ(words[w], exact[w]);
          EXPECT_EQ(bits[i / 8] >> (i % 8 * 4 + w) & 1, exact[w] <= last_kept ? 1u : 0u);
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst
