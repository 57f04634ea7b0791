// Rows that see one key, or none: what is promised of them is exact. Every way to hide the others, every way to reach
// keys and values, every level.
#include <gtest/gtest.h>

#include "attention/tests/attention_backward_call.h"

namespace opst::test {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN();

enum class Hides : uint8_t { window, mask, bias, length };

// Leaves each row at most one key. Scores are as large as they come, and no round numbers.
Draw draw_one_key(Hides hides, Random& random) {
  Draw d = draw(random);
  d.mask = d.bias = d.sinks = d.prefix = d.drop_mask = d.non_finite = false;
  d.mask_heads = 0;
  AttentionOptions& o = d.options;
  o.dropout = {};
  o.causal = false;
  o.window_left = o.window_right = kUnbounded;
  o.softmax_scale = random.pick({0.3f, 1.7f, 40.0f});
  switch (hides) {
    case Hides::window:
      o.window_left = random.integer(-3, 5);
      o.window_right = -o.window_left;
      break;
    case Hides::mask:
      d.mask = d.mask_dims[2] = d.mask_dims[3] = true, d.mask_rank = 4;
      break;
    case Hides::bias:
      d.bias = d.bias_dims[2] = d.bias_dims[3] = true, d.bias_rank = 4;
      break;
    case Hides::length:
      std::fill(d.kv_lens.begin(), d.kv_lens.end(), 1);
      break;
  }
  return d;
}

// One key of each row stays.
void leave_one_key(const ConstTensor& tensor, double hidden, double shown, Random& random) {
  const Tensor t = mutable_view(tensor);
  const int64_t columns = t.shape[t.rank - 1], rows = columns == 0 ? 0 : t.num_elements() / columns;
  for (int64_t i = 0; i < t.num_elements(); ++i) set(t, i, hidden);
  for (int64_t r = 0; r < rows; ++r) set(t, r * columns + random.integer(0, columns - 1), shown);
}

// Which key a row sees, by the reference; -1: none.
int64_t key_of(const attention::reference::Softmax<double>& row) {
  int64_t key = -1;
  for (size_t n = 0; n < row.keys.size(); ++n) {
    if (row.score[n] != -HUGE_VAL) key = row.keys[n];
  }
  return key;
}

// out = V of that key, softmax_sum = 1, to the bit.
std::string expect_value(const DrawnCall& call, const DrawnCall::Outputs& out, int64_t& rows_with_a_key) {
  const Draw& d = call.drawn();
  const AttentionInputs& in = call.oracle_inputs;
  for (const DrawnCall::Row& row : call.rows(200)) {
    const auto softmax = attention::reference::softmax<double>(in, d.options, row.b, row.h, row.i, DType::f64);
    const int64_t key = key_of(softmax);
    const double sum = get(call.row_of(out.tensors.softmax_sum, row), 0);
    if (sum != (key < 0 ? 0 : 1)) return "softmax_sum is " + std::to_string(sum) + "\n  " + to_string(d);
    if (key < 0) continue;
    ++rows_with_a_key;
    const int64_t at =
        attention::reference::row_offset(in, in.value, row.b, row.h / (d.num_heads / d.num_kv_heads), key);
    const ConstTensor got = call.row_of(out.tensors.out, row);
    for (int64_t i = 0; i < d.value_head_dim; ++i) {
      const double value = attention::reference::number_at(in.value, at + i * in.value.strides[in.value.rank - 1]);
      if (get(got, i) != value) return "out is " + std::to_string(get(got, i)) + "\n  " + to_string(d);
    }
  }
  return "";
}

TEST(AttentionFewKeys, ARowOfOneKeyIsItsValueAndHasNoGradient) {
  Random random(seed());
  int64_t rows_with_a_key = 0, gradients = 0;
  for (int n = 0; n < static_cast<int>(120 * kEffort); ++n) {
    const Hides hides = random.pick({Hides::window, Hides::mask, Hides::bias, Hides::length});
    Draw d = draw_one_key(hides, random);
    if (d.out_dtype != DType::f64 && d.kv_dtype != d.out_dtype) d.out_dtype = DType::f32;  // holds any value
    DrawnCall call(d, random);
    if (hides == Hides::mask) leave_one_key(call.inputs.mask, 0, 1, random);
    if (hides == Hides::bias) leave_one_key(call.inputs.bias, -HUGE_VAL, d.options.bias_scale < 0 ? 0 : 0.7, random);
    if (hides == Hides::bias && d.options.bias_scale < 0) continue;
    BackwardForm form;
    form.grad_out_dtype = d.out_dtype;
    form.from_lse = random.chance(0.5);
    const BackwardCallData data(call, form, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      BackwardCallData::Outcome r;
      r.forward = call.make_outputs();
      const Status status = flash_attention_forward(t.context, call.inputs, r.forward.tensors, d.options);
      ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
      ASSERT_EQ(expect_value(call, r.forward, rows_with_a_key), "") << t.name;
      // Pairs of bf16 are multiplied by an instruction that takes no f32 out.
      const bool pairs = d.query_dtype == DType::bf16 && d.kv_dtype == DType::bf16 && d.out_dtype != DType::bf16;
      if (d.keys == Keys::panel_pages || pairs) continue;
      data.run_backward(t.context, r);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      for (int64_t i = 0; i < r.tensors.grad_query.num_elements(); ++i) {
        ASSERT_EQ(get(r.tensors.grad_query, i), 0) << t.name << "\n  " << to_string(d);
      }
      ++gradients;
    }
  }
  std::printf("%lld rows with a key, %lld gradients\n", static_cast<long long>(rows_with_a_key),
              static_cast<long long>(gradients));
}

// Few queries of many keys: the keys are read in place, and split.
TEST(AttentionFewKeys, OneKeyAmongManyThatAreSplit) {
  Random random(seed() + 1);
  int64_t rows_with_a_key = 0;
  int split = 0;
  for (int n = 0; n < static_cast<int>(24 * kEffort) + 6; ++n) {
    Draw d = draw_one_key(Hides::mask, random);
    d.out_dtype = d.query_dtype == DType::f64 ? DType::f64 : DType::f32;
    d.num_kv_heads = 1, d.num_heads = random.pick<int64_t>({1, 3});
    d.varlen_q = false, d.rows_behind = 0;
    d.query_lens = {random.pick<int64_t>({1, 2})}, d.kv_lens = {random.integer(3000, 6000)};
    d.options.block_q = d.options.block_kv = 0;
    d.options.path = AttentionPath::automatic;
    DrawnCall call(d, random);
    leave_one_key(call.inputs.mask, 0, 1, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const DrawnCall::Outputs out = call.make_outputs();
      ASSERT_EQ(flash_attention_forward(t.context, call.inputs, out.tensors, d.options).message(), "");
      ASSERT_EQ(expect_value(call, out, rows_with_a_key), "") << t.name;
      AttentionProblem p;
      p.query_dtype = d.query_dtype, p.kv_dtype = d.kv_dtype;
      p.num_heads = d.num_heads, p.query_len = d.query_lens[0], p.kv_len = d.kv_lens[0];
      p.head_dim = d.head_dim, p.value_head_dim = d.value_head_dim;
      p.options = d.options;
      p.has_mask = true;
      split += plan_attention(p, t.context.machine()).kv_splits > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(split, 0);
  EXPECT_GT(rows_with_a_key, 0);
}

// Rows whose keys are all hidden, with a sink: their grad_out reaches nothing, whatever hides the keys.
TEST(AttentionFewKeys, GradOutOfARowWithoutKeysNeverReachesTheSinks) {
  Random random(seed() + 2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const Hides hides : {Hides::mask, Hides::bias, Hides::window}) {
      for (const bool grad_lse : {false, true}) {
        Draw d;
        d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
        d.bias_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
        d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = d.value_head_dim = 24;
        d.query_lens = {30}, d.kv_lens = {37};
        d.sinks = true;
        d.options.block_q = 8, d.options.block_kv = 16;
        if (hides == Hides::mask) d.mask = d.mask_dims[2] = d.mask_dims[3] = true;
        if (hides == Hides::bias) d.bias = d.bias_dims[2] = d.bias_dims[3] = true;
        if (hides == Hides::window) {  // rows from 27 on see nothing
          d.options.alignment = CausalAlignment::top_left;
          d.options.window_left = -10, d.options.window_right = kUnbounded;
        }
        DrawnCall call(d, random);
        for (int64_t i = 0; i < 4; ++i) set(mutable_view(call.inputs.sinks), i, random.normal());
        const auto hidden = [&](int64_t row) { return hides == Hides::window ? row >= 27 : row % 5 == 3; };
        for (int64_t i = 0; i < 30 * 37; ++i) {
          if (hides == Hides::mask) set(mutable_view(call.inputs.mask), i, hidden(i / 37) ? 0 : 1);
          if (hides == Hides::bias) set(mutable_view(call.inputs.bias), i, hidden(i / 37) ? -HUGE_VAL : 0.5);
        }
        BackwardForm form;
        form.grad_out_dtype = dtype, form.grad_lse = grad_lse;
        BackwardCallData data(call, form, random);
        const auto spoil = [&](double x) {
          for (int64_t i = 0; i < data.grad_out().num_elements(); ++i) {
            if (hidden(i / 24 % 30)) set(data.grad_out(), i, x);
          }
        };
        for (const TestContext& t : contexts_with_threads(2)) {
          double worst_ratio = 0;
          spoil(0);
          const BackwardCallData::Outcome expected = data.run(t.context);
          ASSERT_TRUE(expected.status.ok()) << expected.status.message();
          for (const double x : {kNan, HUGE_VAL, -HUGE_VAL}) {
            spoil(x);
            const BackwardCallData::Outcome r = data.run(t.context);
            // Pairs are added one by one now, so other gradients may round otherwise.
            const Comparison sinks = compare_bits(r.tensors.grad_sinks, expected.tensors.grad_sinks);
            ASSERT_TRUE(sinks.ok) << t.name << ", grad_out " << x << " " << sinks.message << "\n  " << to_string(d);
            ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name << ", grad_out " << x;
          }
          // A row that sees keys is another matter.
          const double healthy = get(data.grad_out(), 0);
          set(data.grad_out(), 0, kNan);
          const BackwardCallData::Outcome ill = data.run(t.context);
          ASSERT_TRUE(std::isnan(get(ill.tensors.grad_sinks, 0))) << t.name;
          set(data.grad_out(), 0, healthy);
        }
      }
    }
  }
}

// -inf hides a key; added to a NaN or +inf score it gives NaN, and the row is NaN, forward and backward.
TEST(AttentionFewKeys, ANaNScoreUnderABiasOfMinusInfinityIsNaN) {
  Random random(seed() + 3);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const bool others : {false, true}) {  // whether the ill row sees other keys
      Draw d;
      d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
      d.bias_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
      d.num_heads = 2, d.num_kv_heads = 1, d.head_dim = 24, d.value_head_dim = 16;
      d.query_lens = {20}, d.kv_lens = {40};
      d.bias = d.bias_dims[2] = d.bias_dims[3] = true;
      d.options.block_q = 8, d.options.block_kv = 16;
      DrawnCall call(d, random);
      // Key 21 is NaN. Row 5 alone has no mask over it, but a bias of -inf.
      set(mutable_view(call.inputs.key), 21 * 24 + 3, kNan);
      for (int64_t i = 0; i < 20 * 40; ++i) set(mutable_view(call.inputs.bias), i, others ? 0.25 : -HUGE_VAL);
      for (int64_t i = 0; i < 20; ++i) set(mutable_view(call.inputs.bias), i * 40 + 21, -HUGE_VAL);
      View mask(DType::boolean, 1, 1, 20, 40, Strides::bnsd);
      for (int64_t i = 0; i < 20 * 40; ++i) set(mask.tensor(), i, i % 40 == 21 && i / 40 != 5 ? 0 : 1);
      call.inputs.mask = call.oracle_inputs.mask = mask.tensor();
      BackwardForm form;
      form.grad_out_dtype = dtype;
      BackwardCallData data(call, form, random);
      for (const TestContext& t : contexts_with_threads(2)) {
        const BackwardCallData::Outcome r = data.run(t.context);
        ASSERT_TRUE(r.status.ok()) << r.status.message();
        for (int64_t i = 0; i < 2 * 20; ++i) {
          const bool ill = i % 20 == 5;
          for (int64_t k = 0; k < 16; ++k) ASSERT_EQ(std::isnan(get(r.forward.tensors.out, i * 16 + k)), ill) << t.name;
          for (int64_t k = 0; k < 24; ++k) ASSERT_EQ(std::isnan(get(r.tensors.grad_query, i * 24 + k)), ill) << t.name;
        }
        for (int64_t j = 0; j < 40; ++j) {
          ASSERT_EQ(std::isnan(get(r.tensors.grad_key, j * 24)), j == 21 || others) << t.name << " key " << j;
          ASSERT_EQ(std::isnan(get(r.tensors.grad_value, j * 16)), j == 21 || others) << t.name << " key " << j;
        }
        double worst_ratio = 0;
        ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name;
      }
    }
  }
}

}  // namespace
}  // namespace opst::test
