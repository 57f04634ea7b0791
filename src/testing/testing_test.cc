// The tools that tests rely on, where they could pass silently.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "machine/context_impl.h"
#include "testing/contexts.h"
#include "testing/effort.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/lazy_mapping.h"
#include "testing/peak.h"
#include "testing/random.h"

namespace opst::test {
namespace {

TEST(Elements, ReadAndWriteEveryDTypeAndLayout) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i8, DType::u8, DType::i32, DType::i64}) {
    alignas(8) char data[8 * 12] = {};
    const Tensor t = Tensor::contiguous(dtype, {3, 4}, data).transposed(0, 1);
    for (int64_t i = 0; i < 12; ++i) set(t, i, static_cast<double>(i * 3));
    EXPECT_EQ(get(t, 5), 15) << to_string(dtype);
    EXPECT_EQ(get(t.transposed(0, 1), 1 * 4 + 2), (2 * 3 + 1) * 3) << to_string(dtype);
    EXPECT_EQ(to_doubles(t)[11], 33);
  }
  EXPECT_EQ(index_text(ConstTensor::contiguous(DType::f32, {2, 3, 4}, nullptr), 23), "[1, 2, 3]");
  EXPECT_EQ(index_text(ConstTensor::contiguous(DType::f32, {}, nullptr), 0), "[]");
  int8_t byte = 0;
  const Tensor i8 = Tensor::contiguous(DType::i8, {}, &byte);
  for (const auto& [value, expected] : {std::pair{300.0, 127}, std::pair{-300.0, -128}, std::pair{std::nan(""), 0},
                                        std::pair{2.5, 2}, std::pair{-1.6, -2}}) {
    set(i8, 0, value);
    EXPECT_EQ(byte, expected);
  }
}

TEST(RandomTest, SameSeedSameNumbers) {
  Random a(7), b(7), c(8);
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const double x = a.normal();
    EXPECT_EQ(x, b.normal());
    differs |= x != c.normal();
  }
  EXPECT_TRUE(differs);
}

TEST(RandomTest, Distributions) {
  Random random(seed());
  double sum = 0, squares = 0, cubes = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double x = random.normal();
    sum += x, squares += x * x, cubes += x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.03);
  EXPECT_NEAR(cubes / kCount, 0, 0.06);
  std::set<int64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random.integer(-2, 2));
  EXPECT_EQ(seen, (std::set<int64_t>{-2, -1, 0, 1, 2}));
  for (int i = 0; i < 1000; ++i) {
    const double x = random.uniform(3, 4);
    ASSERT_TRUE(x >= 3 && x < 4);
  }
}

TEST(RandomTest, FillsAreWhatTheySay) {
  Random random(seed());
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    std::vector<char> data(8 * 1000);
    const Tensor t = Tensor::contiguous(dtype, {20, 50}, data.data());
    const auto values = [&](Fill kind) {
      fill(t, kind, random);
      return to_doubles(t);
    };
    const auto largest = [](const std::vector<double>& v) {
      double m = 0;
      for (double x : v) m = std::max(m, std::abs(x));
      return m;
    };
    for (double x : values(Fill::small_integers)) ASSERT_TRUE(x == std::nearbyint(x) && std::abs(x) <= 4);
    for (double x : values(Fill::powers_of_two)) {
      int exponent = 0;
      ASSERT_TRUE(std::abs(std::frexp(x, &exponent)) == 0.5 && exponent >= -2 && exponent <= 4) << x;
    }
    for (double x : values(Fill::nan)) ASSERT_TRUE(std::isnan(x));
    EXPECT_EQ(largest(values(Fill::zeros)), 0);
    EXPECT_EQ(largest(values(Fill::ones)), 1);
    EXPECT_GT(largest(values(Fill::outlier)), 900);
    EXPECT_LT(largest(values(Fill::normal)), 10);
    const auto extremes = values(Fill::alternating_extremes);
    EXPECT_GT(extremes[0], 200);
    EXPECT_EQ(extremes[0], -extremes[1]);
    EXPECT_TRUE(std::isfinite(extremes[0] * extremes[0]));
    const double tiny = largest(values(Fill::denormals));
    EXPECT_GT(tiny, 0);
    EXPECT_LT(tiny, dtype == DType::f16 ? 0x1p-14 : dtype == DType::f64 ? 0x1p-1022 : 0x1p-126);
    const auto rows = values(Fill::ascending_rows);
    EXPECT_GT(rows[19 * 50], rows[18 * 50 + 49]);
  }
  for (Fill kind : kAllFills) EXPECT_STRNE(to_string(kind), "unknown");
}

TEST(Contexts, CoverLevelsThreadsAndCaches) {
  std::set<Isa> isas;
  std::set<int> threads;
  std::set<int64_t> l2;
  std::set<std::string> names;
  for (const TestContext& t : contexts()) {
    isas.insert(t.context.machine().isa);
    threads.insert(t.context.num_threads());
    l2.insert(t.context.machine().cache.l2_bytes);
    names.insert(t.name);
  }
  EXPECT_EQ(isas.size(), levels().size());
  EXPECT_GE(contexts().size(), levels().size() * 2);
  if (kSanitized && !exhaustive()) return;  // a share of them
  EXPECT_EQ(threads, (std::set<int>{1, 2, 3, 5}));
  EXPECT_EQ(l2.size(), 2u);
  EXPECT_EQ(names.size(), contexts().size());
  EXPECT_GE(contexts().size(), levels().size() * 8);
  EXPECT_EQ(levels().front(), Isa::generic);
  for (const TestContext& t : contexts_with_threads(2)) EXPECT_EQ(t.context.num_threads(), 2);
}

using GuardedBufferDeathTest = testing::Test;

// A volatile access, so that the compiler keeps it.
void touch(const volatile char* p) { [[maybe_unused]] const char c = *p; }

TEST(GuardedBufferDeathTest, NeighboursAreForbidden) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (int64_t bytes : {1, 100, 4096, 5000}) {
    GuardedBuffer after(bytes, Guard::after);
    char* data = static_cast<char*>(after.data());
    touch(data + bytes - 1);
    EXPECT_DEATH(touch(data + bytes), "") << bytes;
    GuardedBuffer before(bytes, Guard::before);
    data = static_cast<char*>(before.data());
    touch(data);
    EXPECT_DEATH(touch(data - 1), "") << bytes;
  }
}

TEST(GuardedBufferDeathTest, ReadOnlyMemoryCannotBeWritten) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  GuardedBuffer buffer(100);
  buffer.make_read_only();
  touch(static_cast<char*>(buffer.data()));
  EXPECT_DEATH(*static_cast<volatile char*>(buffer.data()) = 1, "");
}

TEST(GuardedBuffer, PrefillAndSlack) {
  GuardedBuffer buffer(4 * 10);
  for (double x : to_doubles(buffer.tensor(DType::f32, {10}))) EXPECT_TRUE(std::isnan(x));
  for (double x : to_doubles(buffer.tensor(DType::bf16, {20}))) EXPECT_TRUE(std::isnan(x));
  const GuardedBuffer huge(40, Guard::before, Prefill::x7f);
  for (double x : to_doubles(huge.tensor(DType::f32, {10}))) EXPECT_GT(x, 3e38);
  std::memset(buffer.data(), 0, 40);
  EXPECT_TRUE(buffer.slack_intact());
  static_cast<char*>(buffer.data())[-1] = 0;
  EXPECT_FALSE(buffer.slack_intact());
  GuardedBuffer moved(GuardedBuffer(64, Guard::before));
  EXPECT_TRUE(moved.slack_intact());
  static_cast<char*>(moved.data())[64] = 0;
  EXPECT_FALSE(moved.slack_intact());
}

TEST(LazyMapping, ReachesBeyond32Bits) {
  const int64_t bytes = int64_t{9} << 30;
  const LazyMapping mapping(bytes);
  if (mapping.data() == nullptr) GTEST_SKIP() << "the system refuses 9 GiB of address space";
  char* data = static_cast<char*>(mapping.data());
  EXPECT_EQ(data[bytes - 1], 0);
  data[bytes - 1] = 1;
  EXPECT_EQ(data[(bytes - 1) & 0xffffffff], 0);  // where a truncated offset would look
}

TEST(Peak, Quantiles) {
  EXPECT_EQ(quantile({}, 0.5), 0);
  EXPECT_EQ(quantile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(quantile({4, 1, 2, 3}, 0.5), 2.5);
  EXPECT_EQ(quantile({1, 2, 3, 4, 5}, 0.25), 2);
  EXPECT_EQ(quantile({1, 2}, 1), 2);
}

// No bars: only that the numbers are numbers, that they count what they say, and that nothing hangs.
TEST(Peak, MeasuresAtEveryLevel) {
  for (int num_threads : {1, 3}) {
    for (const TestContext& t : contexts_with_threads(num_threads)) {
      for (PeakKind kind : {PeakKind::f32, PeakKind::bf16, PeakKind::i8}) {
        const Peak peak = measure_peak(t.context, kind, 50e-6);
        EXPECT_GT(peak.flops_per_second, 1e5) << t.name << " " << to_string(kind);
        EXPECT_LT(peak.flops_per_second, 1e14) << t.name << " " << to_string(kind);
        EXPECT_GT(peak.seconds, 1e-6);
      }
      std::vector<char> data(1 << 20, 1);
      EXPECT_GT(measure_read_bandwidth(t.context, data.data(), 1 << 20), 1e5) << t.name;
    }
  }
  const double clock = measure_clock();
  EXPECT_GT(clock, 1e5);
  EXPECT_LT(clock, 1e10);
}

TEST(Peak, KindsOfDTypes) {
  EXPECT_EQ(peak_kind(DType::f32), PeakKind::f32);
  EXPECT_EQ(peak_kind(DType::f16), PeakKind::f32);
  EXPECT_EQ(peak_kind(DType::bf16), PeakKind::bf16);
  EXPECT_EQ(peak_kind(DType::i8), PeakKind::i8);
}

TEST(Peak, FractionFollowsTheRepetitionRule) {
  const Context& context = contexts_with_threads(1).back().context;
  int calls = 0;
  const Fraction f = measure_fraction(context, PeakKind::f32, 1e6, [&] {
    ++calls;
    measure_peak(context, PeakKind::f32, 100e-6);
  });
  EXPECT_GE(f.num_pairs, 11);
  EXPECT_LE(f.num_pairs, 101);
  EXPECT_EQ(calls, f.num_pairs + 2);
  EXPECT_GT(f.call_seconds, 50e-6);
  EXPECT_LE(f.fraction_q1, f.fraction);
  EXPECT_LE(f.fraction, f.fraction_q3);
  EXPECT_DOUBLE_EQ(f.flops_per_second, 1e6 / f.call_seconds);
  EXPECT_GT(f.peak_flops_per_second, 0);
  EXPECT_EQ(f.valid, f.peak_of_ideal >= 0.9);
}

}  // namespace
}  // namespace opst::test
