// Norms and pages through the C interface, against double loops.
#include "c_api/test_calls.h"
#include "kv_cache/reference.h"
#include "opst/attention.h"
#include "opst/rowwise.h"
#include "rowwise/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::CContext;
using test::compare;
using test::compare_bits;
using test::Numbers;
using test::Random;
using test::to_doubles;
using test::two_phases;

constexpr int64_t kRows = 9, kFeatures = 37;
constexpr double kEps = 1e-3;

reference::Doubles row_of(const Tensor& tensor, int64_t row) { return to_doubles(tensor.narrowed(0, row, 1)); }

void expect_row(const Tensor& got, int64_t row, const reference::Doubles& expected) {
  for (int64_t i = 0; i < kFeatures; ++i) {
    EXPECT_NEAR(test::get(got, row * kFeatures + i), expected[static_cast<size_t>(i)], 2e-5) << row << ", " << i;
  }
}

TEST(CNorms, AgainstTheOracle) {
  Random random(test::seed());
  const CContext context(2);
  Numbers x(DType::f32, {kRows, kFeatures}, random), other(DType::f32, {kRows, kFeatures}, random);
  Numbers weight(DType::f32, {kFeatures}, random), bias(DType::f32, {kFeatures}, random);
  Numbers out(DType::f32, {kRows, kFeatures}), sum(DType::f32, {kRows, kFeatures}), rstd(DType::f32, {kRows});
  Numbers layer(DType::f32, {kRows, kFeatures}), mean(DType::f32, {kRows}), layer_rstd(DType::f32, {kRows});
  Numbers added(DType::f32, {kRows, kFeatures});
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_rms_norm_workspace(context, &x.c, &weight.c, kEps, &out.c, &rstd.c, bytes, executor);
                },
                opst_rms_norm),
            OPST_OK)
      << opst_last_error();
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_add_rms_norm_workspace(context, &x.c, &other.c, &weight.c, kEps, &added.c, &sum.c,
                                                     nullptr, bytes, executor);
                },
                opst_add_rms_norm),
            OPST_OK)
      << opst_last_error();
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_layer_norm_workspace(context, &x.c, &weight.c, &bias.c, kEps, &layer.c, &mean.c,
                                                   &layer_rstd.c, bytes, executor);
                },
                opst_layer_norm),
            OPST_OK)
      << opst_last_error();
  const reference::Doubles w = to_doubles(weight.tensor), b = to_doubles(bias.tensor);
  for (int64_t r = 0; r < kRows; ++r) {
    const reference::Doubles row = row_of(x.tensor, r);
    reference::Doubles total = row_of(other.tensor, r);
    for (size_t i = 0; i < total.size(); ++i) total[i] += row[i];
    expect_row(out.tensor, r, reference::rms_norm(row, w, kEps));
    expect_row(sum.tensor, r, total);
    expect_row(added.tensor, r, reference::rms_norm(total, w, kEps));
    expect_row(layer.tensor, r, reference::layer_norm(row, w, b, kEps));
    EXPECT_NEAR(test::get(rstd.tensor, r), reference::rms_rstd(row, kEps), 1e-5);
    EXPECT_NEAR(test::get(mean.tensor, r), reference::mean(row), 1e-5);
    EXPECT_NEAR(test::get(layer_rstd.tensor, r), reference::rms_rstd(reference::centred(row), kEps), 1e-5);
  }
}

TEST(CNorms, GradientsAgainstTheOracle) {
  Random random(test::seed());
  const CContext context(3);
  Numbers x(DType::f32, {kRows, kFeatures}, random), grad_out(DType::f32, {kRows, kFeatures}, random);
  Numbers weight(DType::f32, {kFeatures}, random);
  Numbers grad_x(DType::f32, {kRows, kFeatures}), grad_weight(DType::f32, {kFeatures}),
      alone(DType::f32, {kRows, kFeatures});
  Numbers layer_x(DType::f32, {kRows, kFeatures}), layer_weight(DType::f32, {kFeatures}),
      layer_bias(DType::f32, {kFeatures});
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_rms_norm_backward_workspace(context, &grad_out.c, &x.c, &weight.c, kEps, &grad_x.c,
                                                          &grad_weight.c, bytes, executor);
                },
                opst_rms_norm_backward),
            OPST_OK)
      << opst_last_error();
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_rms_norm_backward_workspace(context, &grad_out.c, &x.c, &weight.c, kEps, &alone.c,
                                                          nullptr, bytes, executor);
                },
                opst_rms_norm_backward),
            OPST_OK)
      << opst_last_error();
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_layer_norm_backward_workspace(context, &grad_out.c, &x.c, &weight.c, kEps, &layer_x.c,
                                                            &layer_weight.c, &layer_bias.c, bytes, executor);
                },
                opst_layer_norm_backward),
            OPST_OK)
      << opst_last_error();
  EXPECT_TRUE(compare_bits(alone.tensor, grad_x.tensor).ok);
  const reference::Doubles w = to_doubles(weight.tensor);
  reference::Doubles rms(kFeatures), layer(kFeatures), bias(kFeatures);
  for (int64_t r = 0; r < kRows; ++r) {
    const auto one = reference::rms_norm_backward(row_of(grad_out.tensor, r), row_of(x.tensor, r), w, kEps);
    const auto other = reference::layer_norm_backward(row_of(grad_out.tensor, r), row_of(x.tensor, r), w, kEps);
    expect_row(grad_x.tensor, r, one.x);
    expect_row(layer_x.tensor, r, other.x);
    for (size_t i = 0; i < rms.size(); ++i) {
      rms[i] += one.weight[i], layer[i] += other.weight[i], bias[i] += other.bias[i];
    }
  }
  expect_row(grad_weight.tensor, 0, rms);
  expect_row(layer_weight.tensor, 0, layer);
  expect_row(layer_bias.tensor, 0, bias);
}

// Seven tokens of two sequences into pages in the caller's memory, out again, and attention over the pages.
TEST(CPages, ScatterGatherAndAttention) {
  Random random(test::seed());
  const CContext context(2);
  const int64_t heads = 2, dim = 16, value_dim = 8;
  for (const opst_page_layout layout : {OPST_PAGES_NORM, OPST_PAGES_PANEL32}) {
    const opst_page_sizes sizes = {layout, OPST_F32, 5, 32, heads, dim, value_dim};
    int64_t key_bytes = 0, value_bytes = 0;
    ASSERT_EQ(opst_kv_pages_size(&sizes, &key_bytes, &value_bytes), OPST_OK) << opst_last_error();
    EXPECT_EQ(key_bytes, 5 * 32 * heads * dim * 4);
    EXPECT_EQ(value_bytes, 5 * 32 * heads * value_dim * 4);
    const test::GuardedBuffer key_memory(key_bytes), value_memory(value_bytes);
    opst_tensor key_cache, value_cache;
    ASSERT_EQ(
        opst_kv_pages(&sizes, key_memory.data(), key_bytes, value_memory.data(), value_bytes, &key_cache, &value_cache),
        OPST_OK)
        << opst_last_error();

    Numbers key(DType::f32, {7, heads, dim}, random), value(DType::f32, {7, heads, value_dim}, random);
    Numbers slots(DType::i64, {7}, {3 * 32, 3 * 32 + 1, 3 * 32 + 2, 3 * 32 + 3, 0, 1, 2});
    opst_scatter_options scatter = OPST_SCATTER_OPTIONS;
    scatter.layout = layout;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_scatter_kv_cache_workspace(context, &key.c, &value.c, &slots.c, &key_cache,
                                                           &value_cache, &scatter, bytes, executor);
                  },
                  opst_scatter_kv_cache),
              OPST_OK)
        << opst_last_error();

    Numbers table(DType::i32, {2, 1}, {3, 0}), lengths(DType::i32, {2}, {4, 3});
    Numbers key_back(DType::f32, {7, heads, dim}), value_back(DType::f32, {7, heads, value_dim});
    opst_gather_options gather = OPST_GATHER_OPTIONS;
    gather.layout = layout;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_gather_kv_cache_workspace(context, &key_cache, &value_cache, &table.c, &lengths.c,
                                                          &key_back.c, &value_back.c, &gather, bytes, executor);
                  },
                  opst_gather_kv_cache),
              OPST_OK)
        << opst_last_error();
    EXPECT_TRUE(compare_bits(key_back.tensor, key.tensor).ok);
    EXPECT_TRUE(compare_bits(value_back.tensor, value.tensor).ok);

    Numbers query(DType::f32, {2, 4, 1, dim}, random), out(DType::f32, {2, 4, 1, value_dim});
    Numbers expected(DType::f32, {2, 4, 1, value_dim}), cu_k(DType::i32, {3}, {0, 4, 7});
    opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
    inputs.query = &query.c, inputs.key = &key_cache, inputs.value = &value_cache;
    inputs.block_table = &table.c, inputs.kv_lengths = &lengths.c;
    opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
    outputs.out = &out.c;
    opst_attention_options options = OPST_ATTENTION_OPTIONS;
    options.page_layout = layout;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_flash_attention_workspace(context, &inputs, &outputs, &options, bytes, executor);
                  },
                  opst_flash_attention),
              OPST_OK)
        << opst_last_error();
    ASSERT_TRUE(flash_attention_forward(
                    test::one_context(),
                    {.query = query.tensor, .key = key.tensor, .value = value.tensor, .cu_seqlens_k = cu_k.tensor},
                    {.out = expected.tensor})
                    .ok());
    const auto good = compare(out.tensor, expected.tensor, {}, {.extra = 1e-6});
    EXPECT_TRUE(good.ok) << good.message;
  }
}

// int8 pages with scales; the options of gather.
TEST(CPages, ScalesAndOptions) {
  Random random(test::seed());
  const CContext context;
  const int64_t heads = 3, dim = 8;
  const opst_page_sizes sizes = {OPST_PAGES_NORM, OPST_I8, 2, 4, heads, dim, dim};
  Numbers key_pages(DType::i8, {2, 4, heads, dim}), value_pages(DType::i8, {2, 4, heads, dim});
  opst_tensor key_cache, value_cache;
  ASSERT_EQ(opst_kv_pages(&sizes, key_pages.memory.data(), 2 * 4 * heads * dim, value_pages.memory.data(),
                          2 * 4 * heads * dim, &key_cache, &value_cache),
            OPST_OK)
      << opst_last_error();
  Numbers key_scales(DType::f32, {2, 4, heads, 1}), value_scales(DType::f32, {2, 4, heads, 1});
  Numbers key(DType::f32, {3, heads, dim}, random), value(DType::f32, {3, heads, dim}, random);
  Numbers slots(DType::i32, {3}, {1, 2, 6});
  opst_scatter_options scatter = OPST_SCATTER_OPTIONS;
  scatter.scales.key = &key_scales.c, scatter.scales.value = &value_scales.c;
  for (const int32_t given : {0, 1}) {  // by the scales that are there already, the second time
    scatter.scales_given = given;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_scatter_kv_cache_workspace(context, &key.c, &value.c, &slots.c, &key_cache,
                                                           &value_cache, &scatter, bytes, executor);
                  },
                  opst_scatter_kv_cache),
              OPST_OK)
        << opst_last_error();
  }
  Numbers table(DType::i32, {1, 2}, {0, 7}), lengths(DType::i32, {2}, {0, 5}), start(DType::i64, {1}, {1});
  Numbers chosen(DType::i32, {2}, {2, 0});
  Numbers key_back(DType::f32, {5, 2, dim}), value_back(DType::f32, {5, 2, dim});
  opst_gather_options gather = OPST_GATHER_OPTIONS;
  gather.scales = scatter.scales;
  gather.cumulative_lengths = 1, gather.zero_fill = 1, gather.seq_offset = &start.c, gather.head_indices = &chosen.c;
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_gather_kv_cache_workspace(context, &key_cache, &value_cache, &table.c, &lengths.c,
                                                        &key_back.c, &value_back.c, &gather, bytes, executor);
                },
                opst_gather_kv_cache),
            OPST_INVALID_ARGUMENT);  // row 3 of block 0 was never written: its scales are NaN
  EXPECT_NE(std::string(opst_last_error()).find("scale"), std::string::npos) << opst_last_error();
  for (Numbers* scales : {&key_scales, &value_scales}) {
    for (int64_t i = 0; i < heads; ++i) test::set(scales->tensor, 3 * heads + i, 0);
  }
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_gather_kv_cache_workspace(context, &key_cache, &value_cache, &table.c, &lengths.c,
                                                        &key_back.c, &value_back.c, &gather, bytes, executor);
                },
                opst_gather_kv_cache),
            OPST_OK)
      << opst_last_error();
  for (int64_t i = 0; i < 5 * 2 * dim; ++i) {  // rows 1 and 2 are tokens 0 and 1, row 3 is 0, block 7 is none
    const int64_t token = i / (2 * dim), head = test::get(chosen.tensor, i / dim % 2) == 0 ? 0 : 2, at = i % dim;
    const double exact = token < 2 ? test::get(key.tensor, (token * heads + head) * dim + at) : 0;
    EXPECT_NEAR(test::get(key_back.tensor, i), exact, 0.03) << i;
    const double exact_value = token < 2 ? test::get(value.tensor, (token * heads + head) * dim + at) : 0;
    EXPECT_NEAR(test::get(value_back.tensor, i), exact_value, 0.03) << i;
  }
}

}  // namespace
}  // namespace opst
