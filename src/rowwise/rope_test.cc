// rope_table, rope, rope_cached.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "opst/rowwise.h"
#include "rowwise/test_rows.h"

namespace opst {
namespace {

using namespace test;

TEST(Rope, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t half : kRowSizes) {
      const DType dtype = kFloatTypes[random.integer(0, 2)];
      const RopeStyle style = random.pick({RopeStyle::pairs, RopeStyle::halves});
      const int64_t head_dim = 2 * half + random.pick<int64_t>({0, 1, 6});
      const int64_t tokens = random.pick<int64_t>({1, 3});
      const int64_t heads = random.pick<int64_t>({1, 3});
      const bool in_place = random.chance(0.5);
      const bool inverse = random.chance(0.3);
      const RowLayout layout = random_layout(random);
      const std::string about = t.name + ", " + to_string(dtype) + ", half " + std::to_string(half) + ", head_dim " +
                                std::to_string(head_dim) + ", " + to_string(style) + " " + name_of(layout) +
                                (in_place ? " in place" : "") + (inverse ? ", inverse" : "");
      SCOPED_TRACE(about);
      // [tokens * heads, head_dim] seen as [tokens, heads, head_dim]; or heads outermost in memory.
      const auto heads_view = [&](const Tensor& m, bool heads_first) {
        Tensor v = m;
        v.rank = 3;
        v.shape[0] = tokens, v.shape[1] = heads, v.shape[2] = head_dim;
        v.strides[0] = m.strides[0] * (heads_first ? 1 : heads);
        v.strides[1] = m.strides[0] * (heads_first ? tokens : 1);
        v.strides[2] = m.strides[1];
        return v;
      };
      Matrix x(dtype, tokens * heads, head_dim, layout);
      Matrix other(dtype, tokens * heads, head_dim, random_layout(random));
      Matrix cos(DType::f32, tokens, half, random_layout(random));
      Matrix sin(DType::f32, tokens, half, random_layout(random));
      for (const Matrix* m : {&x, &cos, &sin}) fill(m->tensor, Fill::uniform, random);
      const Tensor in = heads_view(x.tensor, random.chance(0.5));
      const Tensor out = in_place ? in : heads_view(other.tensor, random.chance(0.5));
      std::vector<Doubles> expected;
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t h = 0; h < heads; ++h) {
          Doubles sines = row_of(sin.tensor, token);
          if (inverse) {
            for (double& v : sines) v = -v;
          }
          expected.push_back(reference::rope(to_doubles(in.selected(0, token).selected(0, h)),
                                             row_of(cos.tensor, token), sines, style == RopeStyle::pairs));
        }
      }
      const Status status = rope(t.context, in, cos.tensor, sin.tensor, out, {.style = style, .inverse = inverse});
      ASSERT_TRUE(status.ok()) << status.message();
      Expected reference(expected, head_dim);
      reference.tensor = ConstTensor::contiguous(DType::f64, {tokens, heads, head_dim}, reference.values.data());
      expect_close(out, reference, about);
      EXPECT_TRUE(x.intact() && other.intact());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Rope, CopiesTheElementsThatDoNotTurnBitByBit) {
  // A NaN with a payload, and 8 elements of which 4 turn.
  std::vector<uint32_t> x(8, 0x7fc12345u), out(8);
  const float one[2] = {1, 1}, zero[2] = {0, 0};
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(rope(t.context, ConstTensor::contiguous(DType::f32, {1, 1, 8}, x.data()),
                     ConstTensor::contiguous(DType::f32, {1, 2}, one),
                     ConstTensor::contiguous(DType::f32, {1, 2}, zero),
                     Tensor::contiguous(DType::f32, {1, 1, 8}, out.data()))
                    .ok());
    for (size_t i = 4; i < 8; ++i) EXPECT_EQ(out[i], 0x7fc12345u);
  }
}

TEST(RopeTable, HasTheAnglesRoundedOnce) {
  const int64_t positions[] = {0, 1, 2, 1000, 8191, 131071, -5, int64_t{1} << 40};
  constexpr int64_t kTokens = 8, kHalf = 32;
  for (const TestContext& t : contexts_with_threads(3)) {
    GuardedBuffer cos(kTokens * kHalf * 4), sin(kTokens * kHalf * 4);
    const Tensor cos_view = cos.tensor(DType::f32, {kHalf, kTokens}).transposed(0, 1);
    ASSERT_TRUE(rope_table(t.context, ConstTensor::contiguous(DType::i64, {kTokens}, positions), cos_view,
                           sin.tensor(DType::f32, {kTokens, kHalf}), {.theta = 1e5})
                    .ok());
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t i = 0; i < kHalf; ++i) {
        // An angle of 2^40 in double has an error of 2^-13 radians, so there only f64's own rounding can be asked for.
        const double angle = static_cast<double>(positions[token]) * std::pow(1e5, -static_cast<double>(i) / kHalf);
        const double tolerance = 6.0e-8 + std::abs(angle) * 4.5e-16;
        EXPECT_NEAR(static_cast<double>(static_cast<float*>(cos.data())[i * kTokens + token]), std::cos(angle),
                    tolerance);
        EXPECT_NEAR(static_cast<double>(static_cast<float*>(sin.data())[token * kHalf + i]), std::sin(angle),
                    tolerance);
      }
    }
  }
}

// Turning by p and then by q is turning by p + q; lengths stay.
TEST(Rope, ComposesAndKeepsLengths) {
  Random random(seed());
  Context& context = contexts_with_threads(2).back().context;
  const int64_t positions[3] = {37, 100, 137};
  std::vector<float> cos(3 * 16), sin(3 * 16), x(32), once(32), twice(32), sum(32), back(32);
  const auto table = [&](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {3, 16}, v.data()); };
  ASSERT_TRUE(rope_table(context, ConstTensor::contiguous(DType::i64, {3}, positions), table(cos), table(sin)).ok());
  const auto head = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {1, 1, 32}, v.data()); };
  for (RopeStyle style : {RopeStyle::pairs, RopeStyle::halves}) {
    fill(head(x), Fill::normal, random);
    const auto turn = [&](std::vector<float>& from, int64_t row, std::vector<float>& to) {
      ASSERT_TRUE(rope(context, head(from), table(cos).narrowed(0, row, 1), table(sin).narrowed(0, row, 1), head(to),
                       {.style = style})
                      .ok());
    };
    turn(x, 0, once);
    turn(once, 1, twice);
    turn(x, 2, sum);
    ASSERT_TRUE(rope(context, head(once), table(cos).narrowed(0, 0, 1), table(sin).narrowed(0, 0, 1), head(back),
                     {.style = style, .inverse = true})
                    .ok());
    double before = 0, after = 0;
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(twice[i], sum[i], 2e-6);
      EXPECT_NEAR(back[i], x[i], 1e-6);
      before += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      after += static_cast<double>(twice[i]) * static_cast<double>(twice[i]);
    }
    EXPECT_NEAR(before, after, before * 1e-6);
  }
}

// The gradient of sum g . rope(x) with respect to x is g turned back.
TEST(Rope, TheInverseIsTheGradient) {
  Random random(seed());
  const Doubles x = random_doubles(10, random), g = random_doubles(10, random), angles = random_doubles(4, random);
  Doubles cos(4), sin(4), minus_sin(4);
  for (size_t i = 0; i < 4; ++i) {
    cos[i] = std::cos(angles[i]), sin[i] = std::sin(angles[i]), minus_sin[i] = -sin[i];
  }
  for (const bool pairs : {false, true}) {
    expect_near(reference::rope(g, cos, minus_sin, pairs),
                central_differences(g, x, [&](const Doubles& v) { return reference::rope(v, cos, sin, pairs); }), 1e-8);
  }
}

Tensor vec(std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(DType::f32, shape, v.data());
}
ConstTensor i64s(const std::vector<int64_t>& v, std::initializer_list<int64_t> shape) {
  return ConstTensor::contiguous(DType::i64, shape, v.data());
}

// Which axis each pair follows: positions 0, 1 and 2 stand for the axes.
std::vector<int> axes_of(Context& context, int64_t half, const RopeSections& sections) {
  const auto n = static_cast<size_t>(half);
  std::vector<float> cos_cache(3 * n), sin_cache(3 * n), x(2 * n), out(2 * n);
  for (size_t i = 0; i < n; ++i) {
    x[i] = 1;
    for (size_t p = 0; p < 3; ++p) cos_cache[p * n + i] = static_cast<float>(p);
  }
  const Status status =
      rope_cached(context, vec(x, {1, 1, 2 * half}), i64s({0, 1, 2}, {3, 1}), vec(cos_cache, {3, half}),
                  vec(sin_cache, {3, half}), vec(out, {1, 1, 2 * half}), {.sections = sections});
  EXPECT_TRUE(status.ok()) << status.message();
  return std::vector<int>(out.begin(), out.begin() + half);
}

TEST(RopeCached, SectionsSayWhichAxisAPairFollows) {
  Context& context = contexts().back().context;
  EXPECT_EQ(axes_of(context, 4, {.temporal = 2, .height = 1, .width = 1}), (std::vector<int>{0, 0, 1, 2}));
  EXPECT_EQ(axes_of(context, 5, {.height = 2, .width = 3}), (std::vector<int>{1, 1, 2, 2, 2}));
  EXPECT_EQ(axes_of(context, 4, {.temporal = 2, .height = 1, .width = 1, .interleaved = true}),
            (std::vector<int>{0, 1, 2, 0}));
  EXPECT_EQ(axes_of(context, 8, {.temporal = 4, .height = 3, .width = 1, .interleaved = true}),
            (std::vector<int>{0, 1, 2, 0, 1, 0, 0, 1}));
}

// Any cache, sections, positions: the same bits as turning by a table that was looked up by hand.
TEST(RopeCached, EqualsRopeByATableInEveryContext) {
  Random random(seed());
  constexpr int64_t kMaxPositions = 50;
  for (const TestContext& t : contexts()) {
    for (int64_t half : {0, 1, 3, 8, 17, 32, 40}) {
      const DType dtype = kFloatTypes[random.integer(0, 2)];
      const DType cache_dtype = random.chance(0.5) ? DType::f32 : dtype;
      const int64_t tokens = random.pick<int64_t>({0, 1, 6}), heads = random.pick<int64_t>({1, 3});
      const int64_t head_dim = 2 * half + random.pick<int64_t>({0, 3});
      const RopeStyle style = random.pick({RopeStyle::pairs, RopeStyle::halves});
      const bool axes = half > 0 && random.chance(0.6), inverse = random.chance(0.3), in_place = random.chance(0.3);
      RopeSections sections;
      if (axes) {
        sections.interleaved = random.chance(0.5);
        const int64_t most = sections.interleaved ? half / 3 : half / 2;
        sections.height = random.integer(0, most);
        sections.width = random.integer(0, most);
        sections.temporal = half - sections.height - sections.width;
      }
      const std::string about = t.name + ", " + to_string(dtype) + ", cache " + to_string(cache_dtype) + ", half " +
                                std::to_string(half) + ", sections " + std::to_string(sections.temporal) + " " +
                                std::to_string(sections.height) + " " + std::to_string(sections.width);
      SCOPED_TRACE(about);
      Matrix cos_cache(cache_dtype, kMaxPositions, half, random_layout(random)),
          sin_cache(cache_dtype, kMaxPositions, half, random_layout(random)),
          x(dtype, tokens, heads * head_dim, RowLayout::contiguous),
          other(dtype, tokens, heads * head_dim, RowLayout::contiguous),
          expected(dtype, tokens, heads * head_dim, RowLayout::contiguous);
      for (const Matrix* m : {&cos_cache, &sin_cache, &x}) fill(m->tensor, Fill::uniform, random);
      std::vector<int64_t> positions(static_cast<size_t>(3 * tokens));
      for (int64_t& p : positions) p = random.integer(0, kMaxPositions - 1);
      std::vector<float> cos(static_cast<size_t>(tokens * half)), sin(cos.size());
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t i = 0; i < half; ++i) {
          int64_t axis = 0;
          if (axes && !sections.interleaved) axis = i < sections.temporal ? 0 : i < half - sections.width ? 1 : 2;
          if (axes && sections.interleaved) {
            for (int64_t j = 0; j < sections.height; ++j) axis = i == 3 * j + 1 ? 1 : axis;
            for (int64_t j = 0; j < sections.width; ++j) axis = i == 3 * j + 2 ? 2 : axis;
          }
          const int64_t position = positions[static_cast<size_t>(axis * tokens + token)];
          const auto at = static_cast<size_t>(token * half + i);
          cos[at] = static_cast<float>(get(cos_cache.tensor, position * half + i));
          sin[at] = static_cast<float>(get(sin_cache.tensor, position * half + i));
        }
      }
      const auto as_heads = [&](const Matrix& m) {
        return Tensor::contiguous(dtype, {tokens, heads, head_dim}, m.tensor.data);
      };
      ASSERT_TRUE(rope(t.context, as_heads(x), vec(cos, {tokens, half}), vec(sin, {tokens, half}), as_heads(expected),
                       {.style = style, .inverse = inverse})
                      .ok());
      const Tensor out = as_heads(in_place ? x : other);
      const Status status = rope_cached(
          t.context, as_heads(x), axes ? i64s(positions, {3, tokens}) : i64s(positions, {tokens}), cos_cache.tensor,
          sin_cache.tensor, out, {.style = style, .inverse = inverse, .sections = sections});
      ASSERT_TRUE(status.ok()) << status.message();
      const Comparison c = compare_bits(out, as_heads(expected));
      ASSERT_TRUE(c.ok) << c.message;
      EXPECT_TRUE(x.intact() && other.intact());
    }
  }
}

TEST(RopeTable, FollowsTheAxes) {
  Context& context = contexts().back().context;
  const std::vector<int64_t> positions = {5, 6, 100, 200, 7000, 8000};  // [3, 2]
  std::vector<float> mixed_cos(8), mixed_sin(8), cos(24), sin(24);
  ASSERT_TRUE(rope_table(context, i64s(positions, {6}), vec(cos, {6, 4}), vec(sin, {6, 4})).ok());
  ASSERT_TRUE(rope_table(context, i64s(positions, {3, 2}), vec(mixed_cos, {2, 4}), vec(mixed_sin, {2, 4}),
                         {.sections = {.temporal = 1, .height = 2, .width = 1}})
                  .ok());
  const size_t axes[] = {0, 1, 1, 2};
  for (size_t token = 0; token < 2; ++token) {
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(mixed_cos[token * 4 + i], cos[(axes[i] * 2 + token) * 4 + i]);
      EXPECT_EQ(mixed_sin[token * 4 + i], sin[(axes[i] * 2 + token) * 4 + i]);
    }
  }
}

TEST(Rope, TheSameBitsForAnyNumberOfThreads) {
  Random random(seed());
  constexpr int64_t kTokens = 201, kHeads = 5, kHalf = 20;
  std::vector<float> x(kTokens * kHeads * 2 * kHalf), out(x.size()), cos(kTokens * kHalf), sin(cos.size());
  std::vector<int64_t> positions(3 * kTokens);
  for (int64_t& p : positions) p = random.integer(0, kTokens - 1);
  for (std::vector<float>* v : {&x, &cos, &sin}) fill(vec(*v, {static_cast<int64_t>(v->size())}), Fill::normal, random);
  for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
    std::vector<float> first;
    for (int num_threads : {1, 2, 3, 5}) {
      const TestContext& t = contexts_with_threads(num_threads)[level];
      SCOPED_TRACE(t.name);
      ASSERT_TRUE(rope_cached(t.context, vec(x, {kTokens, kHeads, 2 * kHalf}), i64s(positions, {3, kTokens}),
                              vec(cos, {kTokens, kHalf}), vec(sin, {kTokens, kHalf}),
                              vec(out, {kTokens, kHeads, 2 * kHalf}),
                              {.style = RopeStyle::pairs, .sections = {.temporal = 10, .height = 5, .width = 5}})
                      .ok());
      if (first.empty()) first = out;
      EXPECT_EQ(out, first);
    }
  }
}

TEST(Rope, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> a(64), b(64), c(64), d(64);
  const auto view = [](std::vector<float>& v, int64_t rows, int64_t cols) { return vec(v, {rows, cols}); };
  const auto heads = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {2, 2, 8}, v.data()); };
  EXPECT_EQ(rope(context, heads(a), view(b, 2, 5), view(b, 2, 5), heads(c)).message(),
            "rope: cos dim 1 (half) is 5, but x has head_dim = 8, which holds 4 pairs");
  EXPECT_EQ(rope(context, heads(a), view(b, 3, 4), view(b, 3, 4), heads(c)).message(),
            "rope: x dim 0 (tokens) is 2, but cos set tokens = 3");
  EXPECT_EQ(rope(context, heads(a), view(b, 2, 4), view(b, 2, 3), heads(c)).message(),
            "rope: sin dim 1 (half) is 3, but cos set half = 4");
  const int64_t positions[2] = {0, 1};
  EXPECT_EQ(rope_table(context, ConstTensor::contiguous(DType::i64, {2}, positions), view(a, 2, 4), view(b, 2, 4),
                       {.theta = 0})
                .message(),
            "rope_table: theta is 0.000000, but must be positive and finite");
  const auto cached = [&](const std::vector<int64_t>& p, int64_t half, const RopeSections& sections) {
    const int64_t tokens = 2;
    return rope_cached(context, heads(a), sections.temporal != 0 ? i64s(p, {3, tokens}) : i64s(p, {tokens}),
                       view(b, 7, half), view(c, 7, half), heads(d), {.sections = sections})
        .message();
  };
  EXPECT_EQ(cached({0, 7}, 4, {}), "rope_cached: positions[1] is 7, but cos_cache has max_positions = 7");
  EXPECT_EQ(cached({-1, 0}, 4, {}), "rope_cached: positions[0] is -1, but cos_cache has max_positions = 7");
  EXPECT_EQ(cached({0, 0, 1, 9, 2, 2}, 4, {.temporal = 2, .height = 1, .width = 1}),
            "rope_cached: positions[1, 1] is 9, but cos_cache has max_positions = 7");
  EXPECT_EQ(cached({0, 0}, 5, {}),
            "rope_cached: cos_cache dim 1 (half) is 5, but x has head_dim = 8, which holds 4 pairs");
  const std::vector<int64_t> six(6, 0);
  EXPECT_EQ(cached(six, 4, {.temporal = 2, .height = 1, .width = 2}),
            "rope_cached: sections are 2, 1 and 2, but must be >= 0 and add up to half = 4");
  EXPECT_EQ(cached(six, 4, {.temporal = 6, .height = -1, .width = -1}),
            "rope_cached: sections are 6, -1 and -1, but must be >= 0 and add up to half = 4");
  EXPECT_EQ(cached(six, 4, {.temporal = 2, .width = 2, .interleaved = true}),
            "rope_cached: sections are 2, 0 and 2, which interleaved reach pair 5, but half is 4");
  EXPECT_EQ(rope_cached(context, heads(a), i64s(six, {2}), view(b, 7, 4), view(c, 7, 4), heads(d),
                        {.sections = {.temporal = 4}})
                .message(),
            "rope_cached: positions has rank 1, but [3, tokens] has rank 2");
  EXPECT_EQ(rope_cached(context, heads(a), i64s(six, {2}), view(b, 7, 4), view(c, 8, 4), heads(d)).message(),
            "rope_cached: sin_cache dim 0 (max_positions) is 8, but cos_cache set max_positions = 7");
}

TEST(Rope, ZeroSizesAreLegal) {
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> x(8);
  const auto empty = [&](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  EXPECT_TRUE(
      rope_table(context, ConstTensor::contiguous(DType::i64, {0}, nullptr), empty({0, 4}), empty({0, 4})).ok());
  EXPECT_TRUE(rope(context, empty({0, 2, 8}), empty({0, 4}), empty({0, 4}), empty({0, 2, 8})).ok());
  EXPECT_TRUE(rope(context, empty({1, 0, 8}), vec(x, {1, 4}), vec(x, {1, 4}), empty({1, 0, 8})).ok());
  EXPECT_TRUE(
      rope_cached(context, empty({0, 2, 8}), i64s({}, {0}), vec(x, {2, 4}), vec(x, {2, 4}), empty({0, 2, 8})).ok());
}

}  // namespace
}  // namespace opst
