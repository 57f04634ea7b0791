// Products through the C interface: every kind of weight against double loops over its dequantised values, and the
// options against the C++ function.
#include <functional>

#include "c_api/test_calls.h"
#include "matmul/reference.h"
#include "opst/grouped_matmul.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::CContext;
using test::compare;
using test::compare_bits;
using test::Doubles;
using test::Numbers;
using test::Random;
using test::to_doubles;
using test::two_phases;

// Frees what it holds.
struct CWeight {
  opst_weight* handle = nullptr;
  CWeight() = default;
  CWeight(const CWeight&) = delete;
  ~CWeight() { opst_weight_destroy(handle); }
};

opst_status run_packed(opst_context* context, const Numbers& x, const CWeight& weight, const Numbers& out,
                       const opst_matmul_options* options = nullptr) {
  return two_phases(
      [&](int64_t* bytes, opst_executor** executor) {
        return opst_matmul_packed_workspace(context, &x.c, weight.handle, &out.c, options, bytes, executor);
      },
      opst_matmul_packed);
}

TEST(CMatmul, DenseAndPackedAgainstTheOracle) {
  Random random(test::seed());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int64_t m : {1, 3, 40}) {
      SCOPED_TRACE(to_string(dtype));
      const CContext context(2);
      const int64_t n = 50, k = 33;
      Numbers x(dtype, {m, k}, random), weight(dtype, {n, k}, random), out(dtype, {m, n});
      ASSERT_EQ(two_phases(
                    [&](int64_t* bytes, opst_executor** executor) {
                      return opst_matmul_workspace(context, &x.c, &weight.c, &out.c, nullptr, bytes, executor);
                    },
                    opst_matmul),
                OPST_OK)
          << opst_last_error();
      const std::vector<double> expected =
          reference::matmul(to_doubles(x.tensor), to_doubles(weight.tensor), {}, m, n, k);
      const test::CompareOptions bound = {.extra = dtype == DType::f64 ? 1e-13 : 1e-4};
      const auto good = compare(out.tensor, Doubles(expected, out.tensor).tensor, {}, bound);
      EXPECT_TRUE(good.ok) << good.message;
      if (dtype == DType::f64) continue;

      CWeight packed;
      ASSERT_EQ(opst_weight_pack(context, &weight.c, &packed.handle), OPST_OK) << opst_last_error();
      Numbers again(dtype, {m, n});
      ASSERT_EQ(run_packed(context, x, packed, again), OPST_OK) << opst_last_error();
      EXPECT_TRUE(compare_bits(again.tensor, out.tensor).ok);
    }
  }
}

TEST(CMatmul, EveryBlockFormatAgainstTheOracle) {
  Random random(test::seed());
  const CContext context;
  for (const QuantFormat format : test::kQuantFormats) {
    SCOPED_TRACE(to_string(format));
    const int64_t m = 5, n = 32, k = 256;
    const std::vector<unsigned char> bytes = test::random_blocks(format, n, k, random);
    const auto size = static_cast<int64_t>(bytes.size());
    const opst_quant_matrix matrix = {static_cast<opst_quant_format>(format), n, k, bytes.data(), size};
    CWeight packed;
    ASSERT_EQ(opst_weight_pack_blocks(context, &matrix, 1, &packed.handle), OPST_OK) << opst_last_error();
    Numbers x(DType::f32, {m, k}, random), out(DType::f32, {m, n});
    ASSERT_EQ(run_packed(context, x, packed, out), OPST_OK) << opst_last_error();
    std::vector<double> weight;
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < k; ++c)
        weight.push_back(reference::dequantized({format, n, k, bytes.data(), size}, r, c));
    }
    const auto expected = reference::matmul(to_doubles(x.tensor), weight, {}, m, n, k);
    const auto good = compare(out.tensor, Doubles(expected, out.tensor).tensor, {}, {.eps_factor = 64});
    EXPECT_TRUE(good.ok) << good.message;
  }
}

TEST(CMatmul, IntegersAgainstTheOracle) {
  Random random(test::seed());
  const CContext context(3);
  const int64_t m = 7, n = 20, k = 64, groups = 2;
  Numbers q(DType::i8, {n, k}, random), scales(DType::f32, {n, groups}, random, test::Fill::uniform);
  Numbers zeros(DType::i8, {n, groups}, random);
  const opst_int_matrix matrix = {&q.c, &scales.c, &zeros.c};
  CWeight packed;
  ASSERT_EQ(opst_weight_pack_int(context, &matrix, 1, &packed.handle), OPST_OK) << opst_last_error();
  std::vector<double> weight;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      const int64_t group = r * groups + c / (k / groups);
      weight.push_back((test::get(q.tensor, r * k + c) - test::get(zeros.tensor, group)) *
                       test::get(scales.tensor, group));
    }
  }
  Numbers x(DType::i8, {m, k}, random), x_scales(DType::f32, {m}, random, test::Fill::uniform);
  Numbers bias(DType::f32, {n}, random), out(DType::f32, {m, n});
  opst_matmul_options options = OPST_MATMUL_OPTIONS;
  options.x_scales = &x_scales.c, options.bias = &bias.c;
  ASSERT_EQ(run_packed(context, x, packed, out, &options), OPST_OK) << opst_last_error();
  std::vector<double> scaled = to_doubles(x.tensor);
  for (int64_t i = 0; i < m * k; ++i) scaled[static_cast<size_t>(i)] *= test::get(x_scales.tensor, i / k);
  const auto expected = reference::matmul(scaled, weight, to_doubles(bias.tensor), m, n, k);
  const auto good = compare(out.tensor, Doubles(expected, out.tensor).tensor, {}, {.eps_factor = 64});
  EXPECT_TRUE(good.ok) << good.message;
}

TEST(CMatmul, OptionsAreThoseOfTheCore) {
  Random random(test::seed());
  const CContext context(2);
  const int64_t m = 6, n = 32, k = 64;
  const std::vector<unsigned char> bytes = test::random_blocks(QuantFormat::q8_0, n, k, random);
  const auto size = static_cast<int64_t>(bytes.size());
  const opst_quant_matrix matrix = {OPST_FORMAT_Q8_0, n, k, bytes.data(), size};
  CWeight packed;
  ASSERT_EQ(opst_weight_pack_blocks(context, &matrix, 1, &packed.handle), OPST_OK) << opst_last_error();
  auto core_weight = PackedWeight::pack(test::one_context(), QuantMatrix{QuantFormat::q8_0, n, k, bytes.data(), size});
  ASSERT_TRUE(core_weight.ok());
  Numbers x(DType::f32, {m, k}, random), bias(DType::f32, {n}, random), residual(DType::f32, {m, n}, random);
  struct Call {
    opst_matmul_options options = OPST_MATMUL_OPTIONS;
    MatmulOptions core = {};
    int64_t width = 32;
    bool quantised = false;
  };
  const std::function<void(Call&)> cases[] = {
      [](Call&) {},
      [&](Call& c) { c.options.bias = &bias.c, c.core.bias = bias.tensor; },
      [](Call& c) { c.options.activation = OPST_SILU, c.core.activation = Activation::silu; },
      [](Call& c) { c.options.activation = OPST_GELU_ERF, c.core.activation = Activation::gelu_erf; },
      [](Call& c) { c.options.activation = OPST_GELU_TANH, c.core.activation = Activation::gelu_tanh; },
      [](Call& c) { c.options.activation = OPST_SWIGLU, c.core.activation = Activation::swiglu, c.width = 16; },
      [](Call& c) {
        c.options.activation = OPST_SWIGLU_SWAPPED, c.core.activation = Activation::swiglu_swapped, c.width = 16;
      },
      [&](Call& c) { c.options.residual = &residual.c, c.core.residual = residual.tensor; },
      [](Call& c) { c.options.activations = OPST_ACTIVATIONS_INT8, c.core.activations = ActivationType::int8; },
      [](Call& c) { c.quantised = true; },
  };
  for (const auto& edit : cases) {
    SCOPED_TRACE(&edit - cases);
    Call call;
    edit(call);
    const DType out_dtype = call.quantised ? DType::i8 : DType::f32;
    Numbers out(out_dtype, {m, call.width}), expected(out_dtype, {m, call.width});
    Numbers out_scales(DType::f32, {m}), expected_scales(DType::f32, {m});
    if (call.quantised) call.options.out_scales = &out_scales.c, call.core.out_scales = expected_scales.tensor;
    ASSERT_EQ(run_packed(context, x, packed, out, &call.options), OPST_OK) << opst_last_error();
    ASSERT_TRUE(matmul(test::one_context(), x.tensor, core_weight.value(), expected.tensor, call.core).ok());
    EXPECT_TRUE(compare_bits(out.tensor, expected.tensor).ok);
    if (call.quantised) {
      EXPECT_TRUE(compare_bits(out_scales.tensor, expected_scales.tensor).ok);
    }
  }
  // One row meets a quantised weight in fixed point, unless the caller wants the bits of many rows.
  Numbers row(DType::f32, {1, k}, random), free(DType::f32, {1, n}), fixed(DType::f32, {1, n});
  opst_matmul_options options = OPST_MATMUL_OPTIONS;
  options.batch_invariant = 1;
  ASSERT_EQ(run_packed(context, row, packed, fixed, &options), OPST_OK);
  ASSERT_TRUE(
      matmul(test::one_context(), row.tensor, core_weight.value(), free.tensor, {.batch_invariant = true}).ok());
  EXPECT_TRUE(compare_bits(fixed.tensor, free.tensor).ok);
}

// Groups of 3, 0, 5 rows and two rows of nobody: dense and packed stacks, ends and counts.
TEST(CMatmul, GroupsAgainstTheOracle) {
  Random random(test::seed());
  const CContext context(2);
  const int64_t m = 10, n = 48, k = 40;
  Numbers x(DType::f32, {m, k}, random), weight(DType::f32, {3, n, k}, random), bias(DType::f32, {3, n}, random);
  Numbers ends(DType::i64, {3}, {3, 3, 8}), counts(DType::i32, {3}, {3, 0, 5});
  std::vector<double> expected;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t group = i < 3 ? 0 : 2;
    const auto part = [&](const Tensor& t, int64_t index) { return to_doubles(t.narrowed(0, index, 1)); };
    std::vector<double> row =
        reference::matmul(part(x.tensor, i), part(weight.tensor, group), part(bias.tensor, group), 1, n, k);
    if (i >= 8) row.assign(static_cast<size_t>(n), 0);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  CWeight packed;
  ASSERT_EQ(opst_weight_pack(context, &weight.c, &packed.handle), OPST_OK) << opst_last_error();
  opst_matmul_options options = OPST_MATMUL_OPTIONS;
  options.bias = &bias.c;
  for (const bool in_counts : {false, true}) {
    const opst_tensor* const list = in_counts ? &counts.c : &ends.c;
    const opst_group_list_type type = in_counts ? OPST_GROUP_COUNTS : OPST_GROUP_ENDS;
    for (const bool is_packed : {false, true}) {
      Numbers out(DType::f32, {m, n});
      ASSERT_EQ(two_phases(
                    [&](int64_t* bytes, opst_executor** executor) {
                      return is_packed ? opst_grouped_matmul_packed_workspace(context, &x.c, packed.handle, list, type,
                                                                              &out.c, &options, bytes, executor)
                                       : opst_grouped_matmul_workspace(context, &x.c, &weight.c, list, type, &out.c,
                                                                       &options, bytes, executor);
                    },
                    is_packed ? opst_grouped_matmul_packed : opst_grouped_matmul),
                OPST_OK)
          << opst_last_error();
      const auto good = compare(out.tensor, Doubles(expected, out.tensor).tensor, {}, {.extra = 1e-4});
      EXPECT_TRUE(good.ok) << good.message;
    }
  }
}

// The gate and up product of a quantised mixture: int8 in, int8 out, with smooth scales.
TEST(CMatmul, QuantisedGroupsAreThoseOfTheCore) {
  Random random(test::seed());
  const CContext context;
  const int64_t m = 9, n = 32, k = 32;
  std::vector<Numbers> q, scales;
  std::vector<opst_int_matrix> matrices;
  std::vector<IntMatrix> core_matrices;
  for (int e = 0; e < 2; ++e) {
    q.emplace_back(DType::i8, std::initializer_list<int64_t>{n, k}, random);
    scales.emplace_back(DType::f32, std::initializer_list<int64_t>{n, 1}, random, test::Fill::uniform);
  }
  for (size_t e = 0; e < 2; ++e) {
    matrices.push_back({&q[e].c, &scales[e].c, nullptr});
    core_matrices.push_back({.q = q[e].tensor, .scales = scales[e].tensor});
  }
  CWeight packed;
  ASSERT_EQ(opst_weight_pack_int(context, matrices.data(), 2, &packed.handle), OPST_OK) << opst_last_error();
  auto core_weight = PackedIntWeight::pack_stack(test::one_context(), core_matrices);
  ASSERT_TRUE(core_weight.ok());
  Numbers x(DType::i8, {m, k}, random), x_scales(DType::f32, {m}, random, test::Fill::uniform);
  Numbers smooth(DType::f32, {2, n / 2}, random, test::Fill::uniform), counts(DType::i64, {2}, {4, 5});
  Numbers out(DType::i8, {m, n / 2}), out_scales(DType::f32, {m});
  Numbers expected(DType::i8, {m, n / 2}), expected_scales(DType::f32, {m});
  opst_matmul_options options = OPST_MATMUL_OPTIONS;
  options.activation = OPST_SWIGLU, options.x_scales = &x_scales.c, options.out_scales = &out_scales.c;
  options.smooth_scales = &smooth.c;
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_grouped_matmul_packed_workspace(context, &x.c, packed.handle, &counts.c,
                                                              OPST_GROUP_COUNTS, &out.c, &options, bytes, executor);
                },
                opst_grouped_matmul_packed),
            OPST_OK)
      << opst_last_error();
  const Status status = grouped_matmul_swiglu_quant(test::one_context(), x.tensor, x_scales.tensor, core_weight.value(),
                                                    {counts.tensor, GroupListType::counts}, expected.tensor,
                                                    expected_scales.tensor, {.smooth_scales = smooth.tensor});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(compare_bits(out.tensor, expected.tensor).ok);
  EXPECT_TRUE(compare_bits(out_scales.tensor, expected_scales.tensor).ok);
}

}  // namespace
}  // namespace opst
