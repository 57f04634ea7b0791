// Attention through the C interface: values against the float64 oracle, bits against the C++ function, and the options
// in the places where they belong.
#include <functional>

#include "attention/backward_reference.h"
#include "attention/reference.h"
#include "c_api/test_calls.h"
#include "opst/attention_backward.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::CContext;
using test::compare;
using test::compare_bits;
using test::Doubles;
using test::Fill;
using test::Numbers;
using test::Random;
using test::two_phases;

struct Problem {
  int64_t batch = 2, heads = 4, kv_heads = 2, query_len = 37, kv_len = 53, dim = 24, value_dim = 16;
};

// Stored [batch, seq, heads, dim], seen as [batch, heads, seq, dim].
Numbers heads_of(DType dtype, int64_t batch, int64_t seq, int64_t heads, int64_t dim, Random& random) {
  Numbers numbers(dtype, {batch, seq, heads, dim}, random);
  numbers.see_as(numbers.tensor.transposed(1, 2));
  return numbers;
}

struct Oracle {
  std::vector<double> out, lse, naive, naive_lse;
};
Oracle oracle_of(const AttentionInputs& in, const AttentionOptions& options, const Problem& p, DType storage) {
  Oracle oracle;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < p.query_len; ++i) {
        const auto row = attention::reference_row(in, options, b, h, i);
        const auto naive = attention::naive_row(in, options, b, h, i, storage);
        oracle.out.insert(oracle.out.end(), row.out.begin(), row.out.end());
        oracle.naive.insert(oracle.naive.end(), naive.out.begin(), naive.out.end());
        oracle.lse.push_back(row.lse);
        oracle.naive_lse.push_back(naive.lse);
      }
    }
  }
  return oracle;
}

TEST(CAttention, ForwardAgainstTheOracle) {
  Random random(test::seed());
  const Problem p;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int threads : {1, 3}) {
      SCOPED_TRACE(to_string(dtype));
      const CContext context(threads);
      Numbers q = heads_of(dtype, p.batch, p.query_len, p.heads, p.dim, random);
      Numbers k = heads_of(dtype, p.batch, p.kv_len, p.kv_heads, p.dim, random);
      Numbers v = heads_of(dtype, p.batch, p.kv_len, p.kv_heads, p.value_dim, random);
      const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
      Numbers out(dtype, {p.batch, p.heads, p.query_len, p.value_dim}), lse(wide, {p.batch, p.heads, p.query_len});
      opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
      inputs.query = &q.c, inputs.key = &k.c, inputs.value = &v.c;
      opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
      outputs.out = &out.c, outputs.softmax_lse = &lse.c;
      opst_attention_options options = OPST_ATTENTION_OPTIONS;
      options.causal = 1;
      ASSERT_EQ(two_phases(
                    [&](int64_t* bytes, opst_executor** executor) {
                      return opst_flash_attention_workspace(context, &inputs, &outputs, &options, bytes, executor);
                    },
                    opst_flash_attention),
                OPST_OK)
          << opst_last_error();
      const AttentionInputs in = {.query = q.tensor, .key = k.tensor, .value = v.tensor};
      const Oracle oracle = oracle_of(in, {.causal = true}, p, dtype);
      const auto good =
          compare(out.tensor, Doubles(oracle.out, out.tensor).tensor, Doubles(oracle.naive, out.tensor).tensor);
      EXPECT_TRUE(good.ok) << good.message;
      const auto good_lse = compare(lse.tensor, Doubles(oracle.lse, lse.tensor).tensor,
                                    Doubles(oracle.naive_lse, lse.tensor).tensor, {.per_row = false});
      EXPECT_TRUE(good_lse.ok) << good_lse.message;

      Numbers expected(dtype, {p.batch, p.heads, p.query_len, p.value_dim});
      ASSERT_TRUE(flash_attention_forward(test::one_context(), in, {.out = expected.tensor}, {.causal = true}).ok());
      const auto same = compare_bits(out.tensor, expected.tensor);
      EXPECT_TRUE(same.ok) << same.message;
    }
  }
}

// Each option changes the result, and to the bits of the C++ function with the same one.
TEST(CAttention, OptionsAndInputsAreThoseOfTheCore) {
  Random random(test::seed());
  const CContext context(2);
  const Problem p{.kv_heads = 4};
  Numbers q(DType::f32, {p.batch, p.heads, p.query_len, p.dim}, random);
  Numbers k(DType::f32, {p.batch, p.heads, p.kv_len, p.dim}, random);
  Numbers v(DType::f32, {p.batch, p.heads, p.kv_len, p.value_dim}, random);
  Numbers lengths(DType::i32, {p.batch}, {50, 20}), prefix(DType::i64, {p.batch}, {3, 7});
  Numbers mask(DType::boolean, {p.query_len, p.kv_len}, random, Fill::small_integers);
  Numbers bias(DType::f32, {p.heads, p.query_len, p.kv_len}, random), slopes(DType::f32, {p.heads}, random);
  Numbers sinks(DType::f32, {p.heads}, random);
  Numbers query_rope(DType::f32, {p.batch, p.heads, p.query_len, 8}, random);
  Numbers key_rope(DType::f32, {p.batch, p.heads, p.kv_len, 8}, random);
  Numbers offsets(DType::i32, {1, 1, 4}, {0, 2, 3, 4}), columns(DType::i32, {4}, {0, 2, 1, 3});
  Numbers indices(DType::i32, {p.batch, p.query_len, p.heads, 3}, std::vector<int64_t>());
  for (int64_t i = 0; i < indices.tensor.num_elements(); ++i)
    test::set(indices.tensor, i, i % 3 == 2 ? -1.0 : static_cast<double>(i % 3) * 5);
  Numbers drop_mask(DType::u8, {(p.batch * p.heads * p.query_len * p.kv_len + 7) / 8}, random, Fill::uniform);

  struct Call {
    opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
    opst_attention_options options = OPST_ATTENTION_OPTIONS;
    AttentionInputs in = {};
    AttentionOptions core = {};
  };
  struct Case {
    const char* name;
    std::function<void(Call&)> edit;
    bool changes = true;
  };
  const Case cases[] = {
      {"causal", [](Call& c) { c.options.causal = 1, c.core.causal = true; }},
      {"alignment",
       [](Call& c) {
         c.options.causal = 1, c.core.causal = true;
         c.options.alignment = OPST_TOP_LEFT, c.core.alignment = CausalAlignment::top_left;
       }},
      {"softmax_scale",
       [](Call& c) { c.options.has_softmax_scale = 1, c.options.softmax_scale = 0.1, c.core.softmax_scale = 0.1; }},
      {"softmax_scale 0", [](Call& c) { c.options.has_softmax_scale = 1, c.core.softmax_scale = 0; }},
      {"path", [](Call& c) { c.options.path = OPST_PATH_STANDARD, c.core.path = AttentionPath::standard; }, false},
      {"blocks",
       [](Call& c) { c.options.block_q = 8, c.core.block_q = 8, c.options.block_kv = 32, c.core.block_kv = 32; },
       false},
      {"window_left", [](Call& c) { c.options.window_left = 4, c.core.window_left = 4; }},
      {"window_right", [](Call& c) { c.options.window_right = -2, c.core.window_right = -2; }},
      {"softcap", [](Call& c) { c.options.softcap = 1.5, c.core.softcap = 1.5; }},
      {"bias", [&](Call& c) { c.inputs.bias = &bias.c, c.in.bias = bias.tensor; }},
      {"bias_scale",
       [&](Call& c) {
         c.inputs.bias = &bias.c, c.in.bias = bias.tensor, c.options.bias_scale = 2, c.core.bias_scale = 2;
       }},
      {"alibi_slopes", [&](Call& c) { c.inputs.alibi_slopes = &slopes.c, c.in.alibi_slopes = slopes.tensor; }},
      {"alibi_form",
       [&](Call& c) {
         c.inputs.alibi_slopes = &slopes.c, c.in.alibi_slopes = slopes.tensor;
         c.options.alibi_form = OPST_ALIBI_SQUARE_ROOT, c.core.alibi_form = AlibiForm::square_root;
         c.options.alibi_query_start = 5, c.core.alibi_query_start = 5;
         c.options.alibi_key_start = 9, c.core.alibi_key_start = 9;
       }},
      {"kv_lengths", [&](Call& c) { c.inputs.kv_lengths = &lengths.c, c.in.kv_lengths = lengths.tensor; }},
      {"prefix",
       [&](Call& c) {
         c.inputs.prefix = &prefix.c, c.in.prefix = prefix.tensor, c.options.causal = 1, c.core.causal = true;
       }},
      {"mask", [&](Call& c) { c.inputs.mask = &mask.c, c.in.mask = mask.tensor; }},
      {"sinks", [&](Call& c) { c.inputs.sinks = &sinks.c, c.in.sinks = sinks.tensor; }},
      {"drop_mask",
       [&](Call& c) {
         c.inputs.drop_mask = &drop_mask.c, c.in.drop_mask = drop_mask.tensor;
         c.options.keep_prob = 0.5, c.core.dropout.keep_prob = 0.5;
       }},
      {"dropout",
       [](Call& c) {
         c.options.keep_prob = 0.7, c.options.dropout_seed = 11, c.options.dropout_offset = 13;
         c.options.dropout_first_query = 2, c.options.dropout_first_key = 3, c.options.dropout_first_head = 1;
         c.options.dropout_total_heads = 9, c.core.dropout = {0.7, 11, 13, 2, 3, 1, 9};
       }},
      {"rope",
       [&](Call& c) {
         c.inputs.query_rope = &query_rope.c, c.in.query_rope = query_rope.tensor;
         c.inputs.key_rope = &key_rope.c, c.in.key_rope = key_rope.tensor;
       }},
      {"block mask",
       [&](Call& c) {
         c.inputs.block_mask_row_offsets = &offsets.c, c.inputs.block_mask_columns = &columns.c;
         c.inputs.block_mask_q = 16, c.inputs.block_mask_kv = 14;
         c.in.block_mask = {offsets.tensor, columns.tensor, 16, 14};
       }},
      {"sparse indices",
       [&](Call& c) {
         c.inputs.sparse_indices = &indices.c, c.inputs.sparse_block_size = 4;
         c.in.sparse_indices = {indices.tensor, 4};
       }},
  };
  const auto run_c = [&](const Call& call, Numbers& out) {
    opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
    outputs.out = &out.c;
    EXPECT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_flash_attention_workspace(context, &call.inputs, &outputs, &call.options, bytes,
                                                          executor);
                  },
                  opst_flash_attention),
              OPST_OK)
        << opst_last_error();
  };
  Call plain;
  plain.inputs.query = &q.c, plain.inputs.key = &k.c, plain.inputs.value = &v.c;
  plain.in = {.query = q.tensor, .key = k.tensor, .value = v.tensor};
  Numbers without(DType::f32, {p.batch, p.heads, p.query_len, p.value_dim});
  run_c(plain, without);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Call call = plain;
    c.edit(call);
    Numbers out(DType::f32, {p.batch, p.heads, p.query_len, p.value_dim});
    Numbers expected(DType::f32, {p.batch, p.heads, p.query_len, p.value_dim});
    run_c(call, out);
    const Status status = flash_attention_forward(test::one_context(), call.in, {.out = expected.tensor}, call.core);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(compare_bits(out.tensor, expected.tensor).ok);
    if (c.changes) {
      EXPECT_FALSE(compare_bits(out.tensor, without.tensor).ok) << "the option changes nothing";
    }
  }
}

TEST(CAttention, VarlenStatisticsAndTrees) {
  Random random(test::seed());
  const CContext context;
  Numbers q(DType::f32, {11, 2, 16}, random), k(DType::f32, {20, 2, 16}, random), v(DType::f32, {20, 2, 16}, random);
  Numbers cu_q(DType::i32, {4}, {0, 4, 4, 10}), cu_k(DType::i64, {4}, {0, 7, 7, 19});
  Numbers tree(DType::i64, {11}, {1, 3, 5, 9, 1, 3, 7, 11, 17, 33, 0});
  Numbers out(DType::f32, {11, 2, 16}), max(DType::f32, {2, 11}), sum(DType::f32, {2, 11}), lse(DType::f32, {2, 11});
  opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
  inputs.query = &q.c, inputs.key = &k.c, inputs.value = &v.c, inputs.cu_seqlens_q = &cu_q.c;
  inputs.cu_seqlens_k = &cu_k.c, inputs.tree_mask = &tree.c;
  opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
  outputs.out = &out.c, outputs.softmax_max = &max.c, outputs.softmax_sum = &sum.c, outputs.softmax_lse = &lse.c;
  ASSERT_EQ(two_phases(
                [&](int64_t* bytes, opst_executor** executor) {
                  return opst_flash_attention_workspace(context, &inputs, &outputs, nullptr, bytes, executor);
                },
                opst_flash_attention),
            OPST_OK)
      << opst_last_error();
  const AttentionInputs in = {.query = q.tensor,
                              .key = k.tensor,
                              .value = v.tensor,
                              .cu_seqlens_q = cu_q.tensor,
                              .cu_seqlens_k = cu_k.tensor,
                              .tree_mask = tree.tensor};
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      const auto start = static_cast<int64_t>(test::get(cu_q.tensor, b)),
                 end = static_cast<int64_t>(test::get(cu_q.tensor, b + 1));
      for (int64_t i = 0; i < end - start; ++i) {
        const auto row = attention::reference_row(in, {}, b, h, i);
        const int64_t at = h * 11 + start + i;
        EXPECT_NEAR(test::get(max.tensor, at), row.max, 1e-5);
        EXPECT_NEAR(test::get(sum.tensor, at), row.sum, 1e-5 * row.sum);
        EXPECT_NEAR(test::get(lse.tensor, at), row.lse, 1e-5);
        for (int64_t d = 0; d < 16; ++d) {
          EXPECT_NEAR(test::get(out.tensor, ((start + i) * 2 + h) * 16 + d), row.out[static_cast<size_t>(d)], 1e-5);
        }
      }
    }
  }
}

TEST(CAttention, BackwardAgainstTheOracle) {
  Random random(test::seed());
  const Problem p;
  for (const int threads : {1, 2}) {
    const CContext context(threads);
    Numbers q(DType::f32, {p.batch, p.heads, p.query_len, p.dim}, random);
    Numbers k(DType::f32, {p.batch, p.kv_heads, p.kv_len, p.dim}, random);
    Numbers v(DType::f32, {p.batch, p.kv_heads, p.kv_len, p.value_dim}, random);
    Numbers bias(DType::f32, {p.heads, p.query_len, p.kv_len}, random), sinks(DType::f32, {p.heads}, random);
    Numbers out(DType::f32, {p.batch, p.heads, p.query_len, p.value_dim});
    Numbers max(DType::f32, {p.batch, p.heads, p.query_len}), sum(DType::f32, {p.batch, p.heads, p.query_len});
    Numbers grad_out(DType::f32, {p.batch, p.heads, p.query_len, p.value_dim}, random);
    opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
    inputs.query = &q.c, inputs.key = &k.c, inputs.value = &v.c, inputs.bias = &bias.c, inputs.sinks = &sinks.c;
    opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
    outputs.out = &out.c, outputs.softmax_max = &max.c, outputs.softmax_sum = &sum.c;
    opst_attention_options options = OPST_ATTENTION_OPTIONS;
    options.causal = 1;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_flash_attention_workspace(context, &inputs, &outputs, &options, bytes, executor);
                  },
                  opst_flash_attention),
              OPST_OK)
        << opst_last_error();
    Numbers gq(DType::f32, {p.batch, p.heads, p.query_len, p.dim}), gs(DType::f32, {p.heads});
    Numbers gk(DType::f32, {p.batch, p.kv_heads, p.kv_len, p.dim});
    Numbers gv(DType::f32, {p.batch, p.kv_heads, p.kv_len, p.value_dim});
    Numbers gb(DType::f32, {p.heads, p.query_len, p.kv_len});
    opst_attention_saved saved = OPST_ATTENTION_SAVED;
    saved.out = &out.c, saved.softmax_max = &max.c, saved.softmax_sum = &sum.c, saved.grad_out = &grad_out.c;
    opst_attention_gradients gradients = OPST_ATTENTION_GRADIENTS;
    gradients.grad_query = &gq.c, gradients.grad_key = &gk.c, gradients.grad_value = &gv.c;
    gradients.grad_bias = &gb.c, gradients.grad_sinks = &gs.c;
    ASSERT_EQ(two_phases(
                  [&](int64_t* bytes, opst_executor** executor) {
                    return opst_flash_attention_backward_workspace(context, &inputs, &saved, &gradients, &options,
                                                                   bytes, executor);
                  },
                  opst_flash_attention_backward),
              OPST_OK)
        << opst_last_error();
    const AttentionInputs in = {
        .query = q.tensor, .key = k.tensor, .value = v.tensor, .bias = bias.tensor, .sinks = sinks.tensor};
    const auto oracle = attention::reference_gradients(in, grad_out.tensor, {}, {.causal = true});
    const auto naive = attention::naive_gradients(in, grad_out.tensor, {}, {.causal = true}, DType::f32);
    const AttentionGradients got = {.grad_query = gq.tensor,
                                    .grad_key = gk.tensor,
                                    .grad_value = gv.tensor,
                                    .grad_bias = gb.tensor,
                                    .grad_sinks = gs.tensor};
    for (const auto& named : attention::kNamedGradients) {
      const Tensor& written = got.*named.written;
      if (!written) continue;
      const auto good =
          compare(written, Doubles(oracle.*named.reference, written).tensor,
                  Doubles(naive.*named.reference, written).tensor, {.name = named.name, .per_row = false});
      EXPECT_TRUE(good.ok) << good.message;
    }
  }
}

}  // namespace
}  // namespace opst
