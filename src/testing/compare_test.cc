#include "testing/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "testing/elements.h"
#include "testing/random.h"

namespace opst::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const ConstTensor kNoNaive;

// [3, 40] f32 result, f64 reference and an f32 naive result with errors of about 1e-6.
class Compare : public testing::Test {
 protected:
  void SetUp() override {
    Random random(test::seed());
    fill(reference(), Fill::normal, random);
    for (int64_t i = 0; i < 120; ++i) {
      const double ref = get(reference(), i);
      set(got(), i, ref + 1e-6 * random.uniform(-1, 1));
      set(naive(), i, ref + 1e-6 * random.uniform(-1, 1));
    }
    set(naive(), 7, get(reference(), 7) + 1e-6);
  }
  Tensor got() { return Tensor::contiguous(DType::f32, {3, 40}, got_); }
  Tensor reference() { return Tensor::contiguous(DType::f64, {3, 40}, reference_); }
  Tensor naive() { return Tensor::contiguous(DType::f32, {3, 40}, naive_); }
  Comparison result(const CompareOptions& options = {}) { return compare(got(), reference(), naive(), options); }

  float got_[120];
  float naive_[120];
  double reference_[120];
};

TEST_F(Compare, AcceptsWhatIsAsGoodAsNaive) {
  const Comparison c = result();
  EXPECT_TRUE(c.ok) << c.message;
  EXPECT_EQ(c.message, "");
  EXPECT_EQ(c.num_compared, 120);
  EXPECT_GT(c.max_error, 0);
  EXPECT_LT(c.max_error, 1.3e-6);  // 1e-6 and half a unit in the last place of a number below 8
  EXPECT_GE(c.bound, 2e-6);
  EXPECT_LT(c.bound, 5e-6);
}

TEST_F(Compare, FailsOnOneWrongElement) {
  for (int64_t i : {0, 39, 40, 77, 119}) {
    const double right = get(got(), i);
    set(got(), i, right + 1e-5);
    const Comparison c = result();
    EXPECT_FALSE(c.ok) << i;
    EXPECT_EQ(c.worst_index, i);
    EXPECT_GT(c.max_error_ratio, 1);
    set(got(), i, right);
  }
  EXPECT_TRUE(result().ok);
}

TEST_F(Compare, MessageNamesEverything) {
  set(got(), 83, 5.0);
  set(reference(), 83, 3.0);
  set(naive(), 83, 3.0);
  const Comparison c = result({.name = "out", .about = "plan X, context Y"});
  for (const char* part : {"out f32 [3, 40]: element [2, 3] is 5, but the reference is 3 (naive: 3); error 2, bound ",
                           "1 of 120 elements are wrong", "plan X, context Y"}) {
    EXPECT_NE(c.message.find(part), std::string::npos) << c.message;
  }
  EXPECT_NE(c.message.find("seed " + std::to_string(test::seed())), std::string::npos);
}

TEST_F(Compare, ASmallRowIsJudgedByItsOwnScale) {
  for (int64_t i = 40; i < 80; ++i) {
    for (const Tensor& t : {got(), reference(), naive()}) set(t, i, get(t, i) * 1e-4);
  }
  EXPECT_TRUE(result().ok) << result().message;
  set(got(), 50, get(reference(), 50) + 1e-7);  // small beside the other rows, wrong in its own
  EXPECT_FALSE(result().ok);
  EXPECT_TRUE(result({.per_row = false}).ok);
}

TEST_F(Compare, NanAndInfinityMustAgree) {
  const auto verdict = [&](double value, double ref) {
    const double old_value = get(got(), 60);
    const double old_ref = get(reference(), 60);
    set(got(), 60, value);
    set(reference(), 60, ref);
    const bool ok = result().ok;
    set(got(), 60, old_value);
    set(reference(), 60, old_ref);
    return ok;
  };
  EXPECT_FALSE(verdict(kNan, 1.0));
  EXPECT_FALSE(verdict(1.0, kNan));
  EXPECT_FALSE(verdict(kInfinity, 1.0));
  EXPECT_FALSE(verdict(1.0, kInfinity));
  EXPECT_FALSE(verdict(kInfinity, -kInfinity));
  EXPECT_FALSE(verdict(kNan, kInfinity));
  EXPECT_FALSE(verdict(kInfinity, kNan));
  EXPECT_TRUE(verdict(kNan, kNan));
  EXPECT_TRUE(verdict(kInfinity, kInfinity));
  EXPECT_TRUE(verdict(-kInfinity, -kInfinity));
  EXPECT_TRUE(verdict(kInfinity, 1e39));  // no float holds that
  EXPECT_FALSE(verdict(-kInfinity, 1e39));
}

TEST_F(Compare, ABrokenNaiveResultDoesNotExcuseAnything) {
  set(naive(), 3, kNan);
  set(naive(), 4, kInfinity);
  EXPECT_TRUE(result().ok) << result().message;
  set(got(), 5, get(got(), 5) + 1e-4);
  EXPECT_FALSE(result().ok);
}

TEST_F(Compare, EverythingNanFails) {
  for (int64_t i = 0; i < 120; ++i) set(got(), i, kNan);
  EXPECT_FALSE(result().ok);
}

TEST_F(Compare, ScaleAndExtra) {
  set(got(), 5, get(reference(), 5) + 1e-3);
  EXPECT_FALSE(result().ok);
  EXPECT_TRUE(result({.scale = 3000}).ok) << result({.scale = 3000}).message;
  EXPECT_TRUE(result({.extra = 1.1e-3}).ok);
  EXPECT_FALSE(result({.extra = 0.9e-3}).ok);
}

TEST(CompareShapes, MustAgree) {
  float data[6] = {};
  const Tensor a = Tensor::contiguous(DType::f32, {2, 3}, data);
  const Tensor b = Tensor::contiguous(DType::f32, {3, 2}, data);
  EXPECT_FALSE(compare(a, b, kNoNaive).ok);
  EXPECT_FALSE(compare(a, a, b).ok);
  EXPECT_FALSE(compare(a, Tensor::contiguous(DType::f32, {6}, data), kNoNaive).ok);
  EXPECT_TRUE(compare(a, a, kNoNaive).ok);
  EXPECT_FALSE(compare_bits(a, b).ok);
  const Comparison empty =
      compare(Tensor::contiguous(DType::f32, {0, 3}, data), Tensor::contiguous(DType::f64, {0, 3}, data), kNoNaive);
  EXPECT_TRUE(empty.ok);
  EXPECT_EQ(empty.num_compared, 0);
}

TEST(CompareWithoutNaive, LeavesRoundingOnly) {
  float got[2] = {1.0f, 0.0f};
  double ref[2] = {1.0 + 3 * 0x1p-23, 0.0};
  const Tensor g = Tensor::contiguous(DType::f32, {2}, got);
  const Tensor r = Tensor::contiguous(DType::f64, {2}, ref);
  EXPECT_TRUE(compare(g, r, kNoNaive).ok);
  ref[0] = 1.0 + 5 * 0x1p-23;
  EXPECT_FALSE(compare(g, r, kNoNaive).ok);
  // All zero: nothing but zero will do.
  ref[0] = 0;
  got[0] = 0;
  EXPECT_TRUE(compare(g, r, kNoNaive).ok);
  got[0] = 1e-30f;
  EXPECT_FALSE(compare(g, r, kNoNaive).ok);
}

TEST(CompareLayouts, FollowStrides) {
  float data[6] = {0, 1, 2, 3, 4, 5};
  float swapped[6] = {0, 3, 1, 4, 2, 5};
  const Tensor a = Tensor::contiguous(DType::f32, {2, 3}, data);
  const Tensor b = Tensor::contiguous(DType::f32, {3, 2}, swapped).transposed(0, 1);
  EXPECT_TRUE(compare(a, b, kNoNaive).ok);
  EXPECT_TRUE(compare_bits(a, b).ok);
}

TEST(CompareBits, SeesEveryBit) {
  float a[4] = {1.0f, 0.0f, -1.0f, std::nanf("")};
  float b[4] = {1.0f, 0.0f, -1.0f, std::nanf("")};
  const auto ok = [&] {
    return compare_bits(Tensor::contiguous(DType::f32, {4}, a), Tensor::contiguous(DType::f32, {4}, b)).ok;
  };
  EXPECT_TRUE(ok());
  b[1] = -0.0f;
  EXPECT_FALSE(ok());
  b[1] = 0.0f;
  b[2] = std::nextafter(-1.0f, 0.0f);
  EXPECT_FALSE(ok());
  const Comparison c =
      compare_bits(Tensor::contiguous(DType::f32, {4}, a), Tensor::contiguous(DType::f32, {4}, b), {.name = "out"});
  EXPECT_EQ(c.worst_index, 2);
  EXPECT_NE(c.message.find("out f32 [4]: element [2] is -1"), std::string::npos) << c.message;
  EXPECT_FALSE(compare_bits(Tensor::contiguous(DType::f32, {4}, a), Tensor::contiguous(DType::i32, {4}, a)).ok);
}

}  // namespace
}  // namespace opst::test
