// Every call of the room with sizes, strides, ranks and enumerators that mean nothing: a Status, at once.
#include <gtest/gtest.h>

#include "opst/rowwise.h"
#include "testing/contexts.h"
#include "testing/extremes.h"

namespace opst {
namespace {

using test::Extremes;

class RowwiseExtremes : public test::ExtremesTest {
 protected:
  RowwiseExtremes() : ExtremesTest(20000) {}
  std::vector<int64_t> shape(Extremes& draw, int64_t last) {
    std::vector<int64_t> sizes;
    for (int64_t i = random_.integer(0, 4); i > 0; --i) sizes.push_back(draw.size());
    sizes.push_back(last);
    return sizes;
  }
  static std::vector<int64_t> leading(std::vector<int64_t> sizes) {
    sizes.pop_back();
    return sizes;
  }
};

TEST_F(RowwiseExtremes, Norms) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t features = draw.size();
    const std::vector<int64_t> x = shape(draw, features);
    const auto in = [&] { return draw.input(type, x); };
    RmsNormOptions options;
    if (random_.chance(0.3)) options.rstd = draw.output(DType::f32, leading(x));
    LayerNormOptions layer;
    if (random_.chance(0.5)) layer.weight = draw.input(DType::f32, {features});
    if (random_.chance(0.5)) layer.bias = draw.input(DType::f32, {features});
    if (random_.chance(0.3)) layer.mean = draw.output(DType::f32, leading(x));
    // A gradient of x takes memory for every row: no sum over rows is longer than that.
    NormGradients gradients = {.x = draw.output(type, x)};
    if (gradients.x && random_.chance(0.5)) gradients.weight = draw.output(DType::f32, {features});
    switch (random_.integer(0, 4)) {
      case 0:
        return rms_norm(context_, in(), draw.input(DType::f32, {features}), draw.output(type, x), options);
      case 1:
        return add_rms_norm(context_, in(), in(), draw.input(DType::f32, {features}), draw.output(type, x),
                            draw.output(type, x), options);
      case 2:
        return layer_norm(context_, in(), draw.output(type, x), layer);
      case 3:
        return rms_norm_backward(context_, in(), in(), draw.input(DType::f32, {features}), gradients);
      default:
        return layer_norm_backward(context_, in(), in(), gradients, layer);
    }
  });
}

TEST_F(RowwiseExtremes, ElementwiseAndSoftmax) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t n = draw.size();
    const std::vector<int64_t> x = shape(draw, n);
    std::vector<int64_t> both = x;
    both.back() = n > 0 && n < (int64_t{1} << 61) ? 2 * n : n;
    const auto in = [&] { return draw.input(type, x); };
    const auto out = [&] { return draw.output(type, x); };
    switch (random_.integer(0, 6)) {
      case 0:
        return add(context_, in(), in(), out());
      case 1:
        return swiglu(context_, in(), in(), out());
      case 2:
        return swiglu(context_, draw.input(type, both), out(), SwigluOptions{random_.chance(0.5)});
      case 3:
        return swiglu_backward(context_, in(), in(), in(), out(), out());
      case 4:
        return swiglu_backward(context_, in(), draw.input(type, both), draw.output(type, both), SwigluOptions());
      case 5:
        return softmax(context_, in(), out());
      default:
        return softmax_backward(context_, in(), in(), out());
    }
  });
}

TEST_F(RowwiseExtremes, Rope) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t tokens = draw.size(), heads = draw.size(), half = draw.size();
    const int64_t dim = half > 0 && half < (int64_t{1} << 61) ? 2 * half : draw.size();
    RopeSections sections;
    const bool axes = random_.chance(0.3);
    if (axes) sections = {.temporal = half, .height = random_.chance(0.1) ? draw.size() : 0, .interleaved = true};
    const uint8_t byte = random_.chance(0.9) ? 0 : 0xff;
    const ConstTensor positions =
        draw.input(DType::i64, axes ? std::vector<int64_t>{3, tokens} : std::vector<int64_t>{tokens}, byte);
    const RopeStyle style = draw.enumerator({RopeStyle::pairs, RopeStyle::halves});
    const std::vector<int64_t> x = {tokens, heads, dim};
    switch (random_.integer(0, 2)) {
      case 0:
        return rope_table(context_, positions, draw.output(DType::f32, {tokens, half}),
                          draw.output(DType::f32, {tokens, half}), {.sections = sections});
      case 1:
        return rope(context_, draw.input(type, x), draw.input(DType::f32, {tokens, half}),
                    draw.input(DType::f32, {tokens, half}), draw.output(type, x), {.style = style});
      default: {
        const int64_t cached = draw.size();
        return rope_cached(context_, draw.input(type, x), positions, draw.input(DType::f32, {cached, half}),
                           draw.input(DType::f32, {cached, half}), draw.output(type, x),
                           {.style = style, .sections = sections});
      }
    }
  });
}

// Calls with nothing to do but huge sizes to plan, which once took minutes, gigabytes or a crash.
TEST_F(RowwiseExtremes, NothingToDo) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  const ConstTensor no_positions = ConstTensor::contiguous(DType::i64, {0}, nullptr);
  const Tensor no_angles = Tensor::contiguous(DType::f32, {0, kHuge}, nullptr);
  EXPECT_TRUE(rope_table(context_, no_positions, no_angles, no_angles).ok());
  EXPECT_EQ(context_.workspace_bytes(), 0);
  int64_t position = 3;
  ConstTensor positions = ConstTensor::contiguous(DType::i64, {kHuge}, &position);
  positions.strides[0] = 0;
  float angle = 1;
  ConstTensor cache = ConstTensor::contiguous(DType::f32, {4, 1}, &angle);
  cache.strides[0] = 0;
  const Tensor x = Tensor::contiguous(DType::f32, {kHuge, 0, 2}, nullptr);
  EXPECT_TRUE(rope_cached(context_, x, positions, cache, cache, x).ok());
  position = 4;
  EXPECT_EQ(rope_cached(context_, x, positions, cache, cache, x).message(),
            "rope_cached: positions[0] is 4, but cos_cache has max_positions = 4");
}

TEST_F(RowwiseExtremes, EnumeratorsThatAreNone) {
  float x[4] = {}, angle[2] = {};
  const Tensor heads = Tensor::contiguous(DType::f32, {1, 1, 4}, x),
               row = Tensor::contiguous(DType::f32, {1, 2}, angle);
  const auto none = static_cast<RopeStyle>(7);
  EXPECT_STREQ(to_string(none), "unknown");
  EXPECT_EQ(rope(context_, heads, row, row, heads, {.style = none}).message(),
            "rope: style is 7, but must be pairs or halves");
  const int64_t position = 0;
  EXPECT_EQ(rope_cached(context_, heads, ConstTensor::contiguous(DType::i64, {1}, &position), row, row, heads,
                        {.style = none})
                .message(),
            "rope_cached: style is 7, but must be pairs or halves");
}

// One row has the same view whatever the stride between rows: x[::-1] of one row is x.
TEST_F(RowwiseExtremes, StridesThatMeanNothing) {
  float x[4] = {1, 2, 3, 4};
  Tensor usual = Tensor::contiguous(DType::f32, {1, 4}, x), reversed = usual;
  reversed.strides[0] = -4;
  EXPECT_TRUE(add(context_, reversed, usual, usual).ok());  // in place: the same view
  EXPECT_EQ(x[3], 8);
  EXPECT_TRUE(add(context_, usual, reversed, reversed).ok());
  EXPECT_EQ(x[3], 16);
  Tensor empty = Tensor::contiguous(DType::f32, {4, 0}, nullptr);
  empty.strides[0] = empty.strides[1] = 0;
  EXPECT_TRUE(softmax(context_, empty, empty).ok());
}

}  // namespace
}  // namespace opst
