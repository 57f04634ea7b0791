// Attention backward against central differences of forward, both in double through the kernels' own templates: every
// option alone, and all together.
#include <gtest/gtest.h>

#include <functional>

#include "attention/tests/attention_backward_call.h"

namespace opst::test {
namespace {

struct Check {
  const char* name;
  std::function<void(Draw&)> change;
};

void with_everything(Draw& d) {
  d.num_heads = 4, d.num_kv_heads = 2, d.value_head_dim = 2;
  d.varlen_q = true, d.query_lens = {3, 7}, d.kv_lens = {9, 5}, d.keys = Keys::varlen;
  d.prefix = d.mask = d.bias = d.alibi = d.sinks = true;
  d.mask_dims[1] = d.mask_dims[2] = d.mask_dims[3] = d.bias_dims[2] = d.bias_dims[3] = true;
  d.options.causal = true, d.options.window_left = 4, d.options.softcap = 2, d.options.bias_scale = -0.5f;
  d.options.dropout = {.keep_prob = 0.7, .seed = 4, .offset = 2};
}

const Check kChecks[] = {
    {"plain", [](Draw&) {}},
    {"causal_top_left", [](Draw& d) { d.options.causal = true, d.options.alignment = CausalAlignment::top_left; }},
    {"causal_bottom_right", [](Draw& d) { d.options.causal = true; }},
    {"window", [](Draw& d) { d.options.window_left = 2, d.options.window_right = 1; }},
    {"negative_band", [](Draw& d) { d.options.window_left = 4, d.options.window_right = -1; }},
    {"prefix", [](Draw& d) { d.options.causal = true, d.prefix = true; }},
    {"varlen",
     [](Draw& d) {
       d.varlen_q = true, d.query_lens = {3, 0, 6}, d.kv_lens = {5, 2, 9}, d.keys = Keys::varlen;
     }},
    {"kv_lengths",
     [](Draw& d) {
       d.query_lens = {4, 4}, d.kv_lens = {3, 7};
     }},
    {"grouped_heads", [](Draw& d) { d.num_heads = 4, d.num_kv_heads = 2; }},
    {"value_head_dim", [](Draw& d) { d.value_head_dim = 5; }},
    {"softmax_scale", [](Draw& d) { d.options.softmax_scale = -0.7f; }},
    {"mask", [](Draw& d) { d.mask = true, d.mask_dims[2] = d.mask_dims[3] = true; }},
    {"bias",
     [](Draw& d) { d.bias = true, std::fill(d.bias_dims, d.bias_dims + 4, true), d.options.bias_scale = 1.5f; }},
    {"bias_of_all_heads",
     [](Draw& d) {
       d.bias = true, d.bias_dims[2] = d.bias_dims[3] = true, d.query_lens = {5, 5}, d.kv_lens = {7, 7};
     }},
    {"bias_of_keys", [](Draw& d) { d.bias = true, d.bias_dims[1] = d.bias_dims[3] = true; }},
    {"bias_of_queries", [](Draw& d) { d.bias = true, d.bias_dims[0] = d.bias_dims[2] = true; }},
    {"bias_of_nothing", [](Draw& d) { d.bias = true; }},
    {"alibi", [](Draw& d) { d.alibi = true, d.options.alibi_query_start = 3; }},
    {"alibi_square_root", [](Draw& d) { d.alibi = true, d.options.alibi_form = AlibiForm::square_root; }},
    {"softcap", [](Draw& d) { d.options.softcap = 1.5f; }},
    {"sinks", [](Draw& d) { d.sinks = true, d.options.causal = true, d.options.window_right = -3; }},
    {"dropout_by_seed", [](Draw& d) { d.options.dropout = {.keep_prob = 0.6, .seed = 9}; }},
    {"drop_mask", [](Draw& d) { d.drop_mask = true, d.options.dropout.keep_prob = 0.5; }},
    {"pages", [](Draw& d) { d.keys = Keys::norm_pages, d.block_size = 2; }},
    {"shared_pages",
     [](Draw& d) {
       d.query_lens = {4, 4, 4}, d.kv_lens = {7, 6, 7};
       d.keys = Keys::norm_pages, d.block_size = 2, d.share_pages = true;
     }},
    {"everything", with_everything},
    {"everything_on_shared_pages",
     [](Draw& d) {
       with_everything(d);
       d.keys = Keys::norm_pages, d.block_size = 3, d.share_pages = true;
     }},
};

class AttentionGradcheck : public testing::TestWithParam<Check> {};

TEST_P(AttentionGradcheck, BackwardIsTheDerivativeOfForward) {
  Random random(seed());
  Draw d;
  d.query_dtype = d.kv_dtype = d.out_dtype = d.bias_dtype = DType::f64;
  d.num_heads = 2, d.num_kv_heads = 1, d.head_dim = d.value_head_dim = 3;
  d.query_lens = {6}, d.kv_lens = {7};
  d.options.block_q = 3, d.options.block_kv = 4;
  GetParam().change(d);
  DrawnCall call(d, random);
  BackwardForm form;
  form.grad_out_dtype = DType::f64;
  form.grad_lse = true;
  BackwardCallData data(call, form, random);
  const TestContext& t = contexts_with_threads(2).front();
  const BackwardCallData::Outcome r = data.run(t.context);
  ASSERT_TRUE(r.status.ok()) << r.status.message();

  // What the gradients are of: the sum of out * grad_out and lse * grad_lse.
  const auto loss = [&]() {
    const DrawnCall::Outputs out = call.make_outputs();
    EXPECT_TRUE(flash_attention_forward(const_cast<Context&>(t.context), call.inputs, out.tensors, d.options).ok());
    double sum = 0;
    for (const DrawnCall::Row& row : call.rows()) {
      for (int64_t i = 0; i < d.value_head_dim; ++i) {
        sum += get(call.row_of(out.tensors.out, row), i) * get(call.row_of(data.grad_out(), row), i);
      }
      const double lse = get(call.row_of(out.tensors.softmax_lse, row), 0);
      if (std::isfinite(lse)) sum += lse * get(call.row_of(data.grad_lse(), row), 0);
    }
    return sum;
  };
  const AttentionInputs& in = call.inputs;
  const AttentionGradients& g = r.tensors;
  int64_t checked = 0;
  for (const auto& [input, gradient, name] :
       {std::tuple(&in.query, &g.grad_query, "query"), std::tuple(&in.key, &g.grad_key, "key"),
        std::tuple(&in.value, &g.grad_value, "value"), std::tuple(&in.bias, &g.grad_bias, "bias"),
        std::tuple(&in.sinks, &g.grad_sinks, "sinks")}) {
    if (gradient->data == nullptr) continue;
    const Tensor to = mutable_view(*input);
    for (int64_t i = 0; i < to.num_elements(); ++i) {
      const double x = get(to, i), step = 1e-5;
      if (!std::isfinite(x)) continue;
      set(to, i, x + step);
      const double above = loss();
      set(to, i, x - step);
      const double below = loss();
      set(to, i, x);
      ASSERT_NEAR(get(*gradient, i), (above - below) / (2 * step), 1e-7)
          << name << " " << index_text(to, i) << "\n  " << to_string(d);
      ++checked;
    }
  }
  EXPECT_GT(checked, 30);
}
INSTANTIATE_TEST_SUITE_P(Attention, AttentionGradcheck, testing::ValuesIn(kChecks),
                         [](const auto& check) { return std::string(check.param.name); });

}  // namespace
}  // namespace opst::test
