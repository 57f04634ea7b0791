// Every call of the room with sizes, strides, ranks and enumerators that mean nothing: a Status, at once.
#include <gtest/gtest.h>

#include <array>

#include "core/convert.h"
#include "opst/grouped_matmul.h"
#include "opst/matmul.h"
#include "testing/extremes.h"

namespace opst {
namespace {

using test::Extremes;

constexpr int64_t kHuge = int64_t{1} << 40;

class MatmulExtremes : public test::ExtremesTest {
 protected:
  // 2^31 inputs could be multiplied in earnest.
  MatmulExtremes() : ExtremesTest(10000, kHuge) {}
  MatmulOptions options(Extremes& draw, int64_t m, int64_t n, int64_t width) {
    MatmulOptions options = {.activation = draw.enumerator({Activation::none, Activation::silu, Activation::gelu_erf}),
                             .activations = draw.enumerator({ActivationType::exact, ActivationType::int8}),
                             .batch_invariant = random_.chance(0.5)};
    if (width != n) options.activation = Activation::swiglu;
    if (random_.chance(0.3)) options.bias = draw.input(float_type(), {n});
    if (random_.chance(0.3)) options.residual = draw.input(float_type(), {m, width});
    if (random_.chance(0.3)) options.out_scales = draw.output(DType::f32, {m});
    return options;
  }
  int64_t width_of(int64_t n) { return n > 0 && n % 2 == 0 && random_.chance(0.3) ? n / 2 : n; }
};

TEST_F(MatmulExtremes, Dense) {
  rounds([&](Extremes& draw) {
    const int64_t m = draw.size(), n = draw.size(), k = draw.size(), width = width_of(n);
    const MatmulOptions with = options(draw, m, n, width);
    return matmul(context_, draw.input(float_type(), {m, k}), draw.input(float_type(), {n, k}),
                  draw.output(with.out_scales.rank > 0 ? DType::i8 : float_type(), {m, width}), with);
  });
}

TEST_F(MatmulExtremes, Packed) {
  const std::array<char, 1 << 14> bytes = {};
  rounds([&](Extremes& draw) {
    const int64_t m = draw.size(), n = draw.size();
    int64_t k = draw.size();
    Result<PackedWeight> packed = Status();
    if (random_.chance(0.5)) {
      packed = PackedWeight::pack(context_, draw.input(float_type(), {n, k}));
    } else {
      QuantMatrix matrix = {static_cast<QuantFormat>(random_.integer(0, kNumQuantFormats)), n, k, bytes.data(),
                            static_cast<int64_t>(bytes.size())};
      const int64_t block = std::max<int64_t>(1, block_values(matrix.format));
      if (k > 0 && k < kHuge) matrix.cols = k *= block;
      packed = PackedWeight::pack(context_, matrix);
    }
    if (!packed.ok()) return packed.status();
    const PackedWeight& weight = packed.value();
    read_ahead(context_, weight, draw.enumerator({Activation::none, Activation::swiglu}));
    if (random_.chance(0.3)) {
      const int64_t count = draw.size();
      return lookup_rows(context_, weight, draw.input(DType::i64, {count}, random_.chance(0.8) ? 0 : 0xff),
                         draw.output(DType::f32, {count, k}));
    }
    const int64_t width = width_of(n);
    const MatmulOptions with = options(draw, m, n, width);
    return matmul(context_, draw.input(float_type(), {m, k}), weight,
                  draw.output(with.out_scales.rank > 0 ? DType::i8 : float_type(), {m, width}), with);
  });
}

TEST_F(MatmulExtremes, Integers) {
  rounds([&](Extremes& draw) {
    const bool bytes = random_.chance(0.5);
    const int64_t m = draw.size(), n = draw.size(), groups = draw.size(), count = draw.size();
    const bool small = groups >= 0 && groups < 100 && count >= 0 && count < 100;
    const int64_t width = small ? groups * count : count, k = bytes || !small ? width : 2 * width;
    IntMatrix matrix = {draw.input(bytes ? DType::i8 : DType::u8, {n, width}), draw.input(DType::f32, {n, groups})};
    if (random_.chance(0.3)) matrix.zeros = draw.input(DType::i8, {n, groups});
    Result<PackedIntWeight> packed =
        random_.chance(0.2) ? PackedIntWeight::pack(context_, matrix.q) : PackedIntWeight::pack(context_, matrix);
    if (!packed.ok()) return packed.status();
    IntMatmulOptions options;
    const DType x = random_.chance(0.6) ? DType::i8 : float_type();
    const DType out = random_.chance(0.3) ? DType::i32 : float_type();
    if (random_.chance(0.3)) options.x_scales = draw.input(DType::f32, {m});
    if (random_.chance(0.3)) options.bias = draw.input(random_.pick({DType::f32, DType::bf16, DType::i32}), {n});
    const int64_t outputs = width_of(n);
    if (outputs != n) options.activation = Activation::swiglu;
    if (random_.chance(0.2)) options.residual = draw.input(float_type(), {m, outputs});
    if (random_.chance(0.2)) options.out_scales = draw.output(DType::f32, {m});
    return matmul(context_, draw.input(x, {m, k}), packed.value(),
                  draw.output(options.out_scales.rank > 0 ? DType::i8 : out, {m, outputs}), options);
  });
}

TEST_F(MatmulExtremes, Gradients) {
  rounds([&](Extremes& draw) {
    const int64_t m = draw.size(), n = draw.size(), k = draw.size();
    MatmulGradients gradients;
    // A gradient of x takes memory for every row: no sum over rows is longer than that.
    gradients.x = draw.output(float_type(), {m, k});
    if (random_.chance(0.5)) gradients.weight = draw.output(float_type(), {n, k});
    if (k > 0 && random_.chance(0.5)) gradients.bias = draw.output(float_type(), {n});
    return matmul_backward(context_, draw.input(float_type(), {m, n}), draw.input(float_type(), {m, k}),
                           draw.input(float_type(), {n, k}), gradients);
  });
}

TEST_F(MatmulExtremes, Grouped) {
  rounds([&](Extremes& draw) {
    const int64_t m = draw.size(), n = draw.size(), k = draw.size(), groups = draw.size();
    const GroupList list{draw.input(random_.pick({DType::i64, DType::i32}), {groups}, random_.chance(0.9) ? 0 : 0xff),
                         draw.enumerator({GroupListType::ends, GroupListType::counts})};
    const ConstTensor x = draw.input(float_type(), {m, k}), weight = draw.input(float_type(), {groups, n, k});
    if (random_.chance(0.3)) {
      MatmulGradients gradients{.x = draw.output(float_type(), {m, k})};
      if (random_.chance(0.5)) gradients.weight = draw.output(float_type(), {groups, n, k});
      if (random_.chance(0.5)) gradients.bias = draw.output(float_type(), {groups, n});
      return grouped_matmul_backward(context_, draw.input(float_type(), {m, n}), x, weight, list, gradients);
    }
    const int64_t width = width_of(n);
    GroupedMatmulOptions with{.activation = draw.enumerator({Activation::none, Activation::silu})};
    if (width != n) with.activation = Activation::swiglu;
    if (random_.chance(0.3)) with.bias = draw.input(float_type(), {groups, n});
    if (random_.chance(0.3)) with.residual = draw.input(float_type(), {m, width});
    if (random_.chance(0.3)) with.out_scales = draw.output(DType::f32, {m});
    if (random_.chance(0.1)) with.smooth_scales = draw.input(DType::f32, {groups});
    const Tensor out = draw.output(with.out_scales.rank > 0 ? DType::i8 : float_type(), {m, width});
    if (random_.chance(0.5)) return grouped_matmul(context_, x, weight, list, out, with);
    const Result<PackedWeight> packed = PackedWeight::pack_stack(context_, weight);
    return packed.ok() ? grouped_matmul(context_, x, packed.value(), list, out, with) : packed.status();
  });
}

// Calls with nothing to do, which once did not return or planned for huge sizes.
TEST_F(MatmulExtremes, NothingToDo) {
  const Tensor no_inputs = Tensor::contiguous(DType::f32, {kHuge, 0}, nullptr);
  const Result<PackedWeight> wide = PackedWeight::pack(context_, no_inputs);
  ASSERT_TRUE(wide.ok());
  EXPECT_EQ(wide.value().n(), kHuge);
  const Tensor no_rows = Tensor::contiguous(DType::f32, {0, kHuge}, nullptr);
  const Tensor none = Tensor::contiguous(DType::f32, {0, 0}, nullptr);
  EXPECT_TRUE(matmul(context_, none, wide.value(), no_rows).ok());
  EXPECT_TRUE(PackedWeight::pack(context_, QuantMatrix{QuantFormat::q4_k, kHuge, 0, nullptr, 0}).ok());
  const Result<PackedWeight> long_rows = PackedWeight::pack(context_, no_rows);
  ASSERT_TRUE(long_rows.ok());
  EXPECT_TRUE(matmul(context_, no_rows, long_rows.value(), none).ok());
  float number = 1;
  ConstTensor weight = ConstTensor::contiguous(DType::f32, {7, kHuge}, &number);
  weight.strides[0] = weight.strides[1] = 0;
  EXPECT_TRUE(matmul(context_, no_rows, weight, Tensor::contiguous(DType::f32, {0, 7}, nullptr)).ok());
  EXPECT_EQ(context_.workspace_bytes(), 0);
  int64_t row = 3;
  ConstTensor rows = ConstTensor::contiguous(DType::i64, {kHuge}, &row);
  rows.strides[0] = 0;
  EXPECT_TRUE(lookup_rows(context_, wide.value(), rows, no_inputs).ok());
  row = -1;
  EXPECT_EQ(lookup_rows(context_, wide.value(), rows, no_inputs).message(),
            "lookup_rows: rows[0] is -1, but the matrix has 1099511627776 rows");
}

TEST_F(MatmulExtremes, EnumeratorsThatAreNone) {
  float x[4] = {};
  const Tensor t = Tensor::contiguous(DType::f32, {1, 1}, x), weight = Tensor::contiguous(DType::f32, {1, 1}, x + 1),
               out = Tensor::contiguous(DType::f32, {1, 1}, x + 2);
  EXPECT_EQ(matmul(context_, t, weight, out, {.activation = static_cast<Activation>(6)}).message(),
            "matmul: activation is 6, which is no Activation");
  EXPECT_EQ(matmul(context_, t, weight, out, {.activations = static_cast<ActivationType>(2)}).message(),
            "matmul: activations is 2, which is no ActivationType");
  EXPECT_STREQ(to_string(static_cast<Activation>(200)), "unknown");
  EXPECT_STREQ(to_string(static_cast<ActivationType>(2)), "unknown");
  EXPECT_EQ(PackedWeight::pack(context_, QuantMatrix{static_cast<QuantFormat>(11), 1, 1, x, 4}).status().message(),
            "PackedWeight::pack: weight's format is 11, which is no QuantFormat");
}

// One row and one column have the same bits whatever the strides between rows and columns.
TEST_F(MatmulExtremes, StridesThatMeanNothing) {
  const auto with_stride = [](Tensor tensor, int64_t stride) {
    for (int i = 0; i < tensor.rank; ++i) {
      if (tensor.shape[i] == 1) tensor.strides[i] = stride;
    }
    return tensor;
  };
  std::vector<float> x = {1, 2, 3, 4, 5}, weight = {1, -1, 2, -2, 3}, out(1), residual = {10};
  for (const int64_t k : {1, 5}) {
    for (const int64_t stride : {int64_t{0}, int64_t{-3}, INT64_MIN, INT64_MAX}) {
      const auto view = [&](std::vector<float>& v, int64_t rows, int64_t columns) {
        return with_stride(Tensor::contiguous(DType::f32, {rows, columns}, v.data()), stride);
      };
      const Tensor result = view(out, 1, 1);
      const float expected = k == 1 ? 1.0f : 1 - 2 + 6 - 8 + 15;
      ASSERT_TRUE(matmul(context_, view(x, 1, k), view(weight, 1, k), result, {.residual = view(residual, 1, 1)}).ok());
      EXPECT_EQ(out[0], 10 + expected);
      const PackedWeight packed = std::move(PackedWeight::pack(context_, view(weight, 1, k)).value());
      // The residual is out itself, with other strides.
      out[0] = 1;
      ASSERT_TRUE(matmul(context_, view(x, 1, k), packed, Tensor::contiguous(DType::f32, {1, 1}, out.data()),
                         {.residual = result})
                      .ok());
      EXPECT_EQ(out[0], 1 + expected);
      std::vector<float> gradient(5);
      std::vector<float> one = {2};
      ASSERT_TRUE(
          matmul_backward(context_, view(one, 1, 1), view(x, 1, k), view(weight, 1, k), {.x = view(gradient, 1, k)})
              .ok());
      EXPECT_EQ(gradient[0], 2);

      // Optional tensors of one element: f32 and bf16 bias; f64; i32 bias and x_scales of an int8 weight.
      const auto one_of = [&](DType dtype, void* data) {
        return with_stride(Tensor::contiguous(dtype, {1}, data), stride);
      };
      std::vector<float> bias = {7}, x_scales = {0.5f};
      bf16 short_bias = to_bf16(7.0f);
      for (const Tensor& b : {one_of(DType::f32, bias.data()), one_of(DType::bf16, &short_bias)}) {
        ASSERT_TRUE(matmul(context_, view(x, 1, k), packed, result, {.bias = b}).ok());
        EXPECT_EQ(out[0], 7 + expected);
      }
      std::vector<double> wide_x(x.begin(), x.end()), wide_weight(weight.begin(), weight.end()), wide = {0, 10, 7};
      const auto wide_view = [&](double* data, int64_t columns) {
        return with_stride(Tensor::contiguous(DType::f64, {1, columns}, data), stride);
      };
      ASSERT_TRUE(matmul(context_, wide_view(wide_x.data(), k), wide_view(wide_weight.data(), k),
                         wide_view(&wide[0], 1),
                         {.bias = one_of(DType::f64, &wide[2]), .residual = wide_view(&wide[1], 1)})
                      .ok());
      EXPECT_EQ(wide[0], 17 + double{expected});
      std::vector<int8_t> int_x(x.begin(), x.end()), int_weight(weight.begin(), weight.end());
      int32_t int_bias = 3;
      const auto int_view = [&](std::vector<int8_t>& v) {
        return with_stride(Tensor::contiguous(DType::i8, {1, k}, v.data()), stride);
      };
      const PackedIntWeight ints = std::move(PackedIntWeight::pack(context_, int_view(int_weight)).value());
      ASSERT_TRUE(matmul(context_, int_view(int_x), ints, result,
                         {.x_scales = one_of(DType::f32, x_scales.data()), .bias = one_of(DType::i32, &int_bias)})
                      .ok());
      EXPECT_EQ(out[0], (expected + 3) / 2);
      // int8 out of an unpacked weight: one value is its own scale times 127.
      int8_t byte = 0;
      float scale = 0;
      ASSERT_TRUE(matmul(context_, view(x, 1, k), view(weight, 1, k),
                         with_stride(Tensor::contiguous(DType::i8, {1, 1}, &byte), stride),
                         {.bias = one_of(DType::f32, bias.data()), .out_scales = one_of(DType::f32, &scale)})
                      .ok());
      EXPECT_EQ(byte, 127);
      EXPECT_FLOAT_EQ(scale * 127, 7 + expected);
    }
  }
}

}  // namespace
}  // namespace opst
