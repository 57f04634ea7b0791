// Memory of attention backward: linear in the length, scratch is what the plan says, a second call allocates nothing,
// and views of one fused buffer keep their neighbours whole.
#include <gtest/gtest.h>

#include <fstream>

#include "attention/tests/attention_backward_call.h"
#include "testing/count_allocations.h"

namespace opst::test {
namespace {

std::vector<Draw> one_of_each_kind() {
  std::vector<Draw> list;
  Draw d;
  d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 64, d.value_head_dim = 48;
  d.query_lens = {150, 150, 150}, d.kv_lens = {300, 300, 300};
  d.options.causal = true;
  list.push_back(d);
  d.bias = d.bias_dims[2] = d.bias_dims[3] = d.sinks = true, d.options.softcap = 5;
  d.options.dropout.keep_prob = 0.9;
  list.push_back(d);
  d.bias_dims[2] = false;
  list.push_back(d);
  for (size_t i = 0; i < 3; ++i) {
    Draw bf16 = list[i];
    bf16.query_dtype = bf16.kv_dtype = bf16.out_dtype = DType::bf16;
    list.push_back(bf16);
  }
  return list;
}

AttentionBackwardProblem problem_of(const Draw& d) {
  AttentionBackwardProblem b;
  AttentionProblem& p = b.forward;
  p.query_dtype = d.query_dtype, p.kv_dtype = d.kv_dtype;
  p.batch = d.batch(), p.num_heads = d.num_heads, p.num_kv_heads = d.num_kv_heads;
  p.query_len = d.longest_query(), p.kv_len = d.longest_keys();
  p.head_dim = d.head_dim, p.value_head_dim = d.value_head_dim;
  p.options = d.options;
  p.has_bias = d.bias, p.has_sinks = d.sinks;
  b.grad_out_dtype = d.out_dtype;
  b.grad_bias = d.bias, b.grad_sinks = d.sinks;
  return b;
}

TEST(AttentionBackwardMemory, ASecondCallAllocatesNothing) {
  Random random(seed());
  std::vector<Draw> draws = one_of_each_kind();
  draws.push_back(draws.front());
  draws.back().keys = Keys::norm_pages, draws.back().share_pages = true;
  for (const Draw& d : draws) {
    for (const int num_threads : {1, 3}) {
      Context context = fresh_context(num_threads);
      DrawnCall call(d, random);
      BackwardForm form;
      form.grad_out_dtype = d.out_dtype;
      BackwardCallData data(call, form, random);
      BackwardCallData::Outcome r = data.run(context);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      const AttentionSaved saved = data.saved(r.forward);
      ASSERT_TRUE(flash_attention_backward(context, call.inputs, saved, r.tensors, d.options).ok());
      const int64_t heap_before = num_allocations.load(), workspaces_before = context.workspace_allocations();
      const bool second_ok = flash_attention_backward(context, call.inputs, saved, r.tensors, d.options).ok();
      const int64_t heap_after = num_allocations.load();
      ASSERT_TRUE(second_ok);
      EXPECT_EQ(heap_after, heap_before) << to_string(d);
      EXPECT_EQ(context.workspace_allocations(), workspaces_before);
    }
  }
}

TEST(AttentionBackwardMemory, ScratchIsWhatThePlanSays) {
  Random random(seed() + 1);
  for (const Draw& d : one_of_each_kind()) {
    for (const Isa isa : levels()) {
      for (const int num_threads : {1, 3}) {
        Context context = fresh_context(num_threads, isa);
        DrawnCall call(d, random);
        BackwardForm form;
        form.grad_out_dtype = d.out_dtype;
        BackwardCallData data(call, form, random);
        BackwardCallData::Outcome r = data.run(context);
        ASSERT_TRUE(r.status.ok()) << r.status.message();
        context.trim();
        ASSERT_TRUE(flash_attention_backward(context, call.inputs, data.saved(r.forward), r.tensors, d.options).ok());
        const int64_t planned = plan_attention_backward(problem_of(d), context.machine()).scratch_bytes(num_threads);
        // Workspaces are rounded up to 64 KiB, or 2 MiB.
        const int64_t step = planned < (2 << 20) ? 64 << 10 : 2 << 20;
        EXPECT_EQ(context.workspace_bytes(), round_up(planned, step)) << to_string(d);
      }
    }
  }
}

// 8K, 16K and 32K tokens, one head: what forward and backward take beyond inputs and outputs grows by the length, and
// stays below 100 MB.
TEST(AttentionBackwardMemory, ScratchGrowsWithTheLengthOnly) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t dim : {64, 128}) {
      for (const bool everything : {false, true}) {
        int64_t bytes[3];
        for (int i = 0; i < 3; ++i) {
          Draw d;
          d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
          d.head_dim = d.value_head_dim = dim;
          d.query_lens = d.kv_lens = {int64_t{8192} << i};
          d.options.causal = true;
          if (everything) d.bias = d.sinks = true, d.options.dropout.keep_prob = 0.9, d.options.softcap = 10;
          const AttentionBackwardProblem b = problem_of(d);
          const Machine machine = detect_machine(detect_isa());
          // One workspace serves both calls.
          bytes[i] = std::max(plan_attention(b.forward, machine).scratch_bytes(2),
                              plan_attention_backward(b, machine).scratch_bytes(2));
        }
        const int64_t first = bytes[1] - bytes[0], second = bytes[2] - bytes[1];
        EXPECT_NEAR(static_cast<double>(second), 2.0 * static_cast<double>(first), 0.1 * static_cast<double>(second));
        EXPECT_TRUE(dim != 64 || bytes[2] < int64_t{100} * 1000 * 1000) << bytes[2];
        // Packed queries, their gradients and dQ: at most 5 f32 numbers for each element of a query, and 4 MiB.
        EXPECT_LT(bytes[2], 32768 * dim * 4 * 5 + (int64_t{4} << 20)) << dim << " " << to_string(dtype);
      }
    }
  }
}

// In bytes: what the process occupies now, and the most since reset_peak.
int64_t memory_status(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::stoll(line.substr(std::strlen(field))) * 1024;
  }
  return -1;
}
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << 5 << std::flush;
  return file.good();
}

// Forward and backward, causal, one head of 8K, 16K and 32K tokens: below 100 MB beyond the tensors, and linear.
TEST(AttentionBackwardMemory, LongCallsTakeLittleMemoryAndGiveTheGradients) {
  if (kEffort < 1) GTEST_SKIP() << "too long under a sanitizer, whose memory is not the library's";
  constexpr int64_t kDim = 64;
  int64_t scratch[3], extra[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t len = int64_t{8192} << i;
    Context context = fresh_context(2);
    Random random(seed() + 2);
    std::vector<std::vector<float>> memory(8, std::vector<float>(static_cast<size_t>(len * kDim)));
    std::vector<float> lse(static_cast<size_t>(len));
    std::vector<Tensor> t;
    for (auto& m : memory) t.push_back(Tensor::contiguous(DType::f32, {1, 1, len, kDim}, m.data()));
    for (int n : {0, 1, 2, 4}) fill(t[static_cast<size_t>(n)], Fill::normal, random);
    const Tensor statistic = Tensor::contiguous(DType::f32, {1, 1, len}, lse.data());
    const AttentionInputs in = {.query = t[0], .key = t[1], .value = t[2]};
    const AttentionOptions options = {.causal = true};
    const bool measured = reset_peak();
    const int64_t before = memory_status("VmRSS:");
    ASSERT_TRUE(flash_attention_forward(context, in, {.out = t[3], .softmax_lse = statistic}, options).ok());
    ASSERT_TRUE(flash_attention_backward(context, in, {.out = t[3], .softmax_lse = statistic, .grad_out = t[4]},
                                         {.grad_query = t[5], .grad_key = t[6], .grad_value = t[7]}, options)
                    .ok());
    scratch[i] = context.workspace_bytes();
    extra[i] = measured ? memory_status("VmHWM:") - before : scratch[i];
    if (i < 2) continue;

    std::printf("32K tokens: scratch %.1f MB, %s %.1f MB\n", static_cast<double>(scratch[i]) / 1e6,
                measured ? "peak beyond the tensors" : "peak not measured, taken as",
                static_cast<double>(extra[i]) / 1e6);
    const auto row = [&](int tensor, int64_t at) {
      return &memory[static_cast<size_t>(tensor)][static_cast<size_t>(at * kDim)];
    };
    const auto dot = [&](const float* a, const float* b, bool absolute = false) {
      double sum = 0;
      for (int64_t d = 0; d < kDim; ++d) {
        const double product = static_cast<double>(a[d]) * static_cast<double>(b[d]);
        sum += absolute ? std::fabs(product) : product;
      }
      return sum;
    };
    // dQ of some rows, in double. dS is a difference of sums that may cancel: its error is on the scale of their terms.
    for (const int64_t query : {int64_t{1}, len / 3, len - 1}) {
      std::vector<double> p, dp, expected(kDim);
      double sum = 0, delta = 0, scale = 0;
      for (int64_t key = 0; key <= query; ++key) {
        p.push_back(std::exp(dot(row(0, query), row(1, key)) / 8));
        dp.push_back(dot(row(4, query), row(2, key)));
        sum += p.back(), delta += p.back() * dp.back();
      }
      for (int64_t key = 0; key <= query; ++key) {
        const auto n = static_cast<size_t>(key);
        const double ds = p[n] / sum * (dp[n] - delta / sum) / 8;
        scale += p[n] / sum * (dot(row(4, query), row(2, key), true) + std::fabs(delta / sum)) / 8;
        for (int64_t d = 0; d < kDim; ++d) expected[static_cast<size_t>(d)] += ds * static_cast<double>(row(1, key)[d]);
      }
      for (int64_t d = 0; d < kDim; ++d) {
        EXPECT_NEAR(static_cast<double>(row(5, query)[d]), expected[static_cast<size_t>(d)], 1e-6 * scale) << query;
      }
    }
    // The last key is seen by the last query alone: dV = P dO.
    const double p = std::exp(dot(row(0, len - 1), row(1, len - 1)) / 8 - static_cast<double>(lse.back()));
    for (int64_t d = 0; d < kDim; ++d) {
      EXPECT_NEAR(static_cast<double>(row(7, len - 1)[d]), p * static_cast<double>(row(4, len - 1)[d]),
                  1e-5 * p + 1e-9);
    }
  }
  EXPECT_LT(extra[2], 100 * 1000 * 1000);
  for (const auto& bytes : {scratch, extra}) {
    const auto first = static_cast<double>(bytes[1] - bytes[0]), second = static_cast<double>(bytes[2] - bytes[1]);
    EXPECT_NEAR(second, 2 * first, 0.1 * second + (6 << 20)) << bytes[0] << " " << bytes[1] << " " << bytes[2];
  }
}

// The gradients of a fused [batch, len, 3, heads, dim] buffer, written in place into another one.
TEST(AttentionBackwardMemory, GradientsMayBePartsOfOneBuffer) {
  Random random(seed() + 3);
  constexpr int64_t kBatch = 2, kLen = 37, kHeads = 2, kDim = 24;
  std::vector<float> fused(kBatch * kLen * 3 * kHeads * kDim), grads(fused.size(), NAN);
  const auto part = [&](std::vector<float>& from, int64_t which) {
    const Tensor all = Tensor::contiguous(DType::f32, {kBatch, kLen, 3, kHeads, kDim}, from.data());
    return all.selected(2, which).transposed(1, 2);
  };
  fill(Tensor::contiguous(DType::f32, {static_cast<int64_t>(fused.size())}, fused.data()), Fill::normal, random);
  std::vector<float> out(kBatch * kHeads * kLen * kDim), grad_out(out.size()), lse(kBatch * kHeads * kLen);
  const Tensor o = Tensor::contiguous(DType::f32, {kBatch, kHeads, kLen, kDim}, out.data());
  const Tensor go = Tensor::contiguous(DType::f32, {kBatch, kHeads, kLen, kDim}, grad_out.data());
  const Tensor l = Tensor::contiguous(DType::f32, {kBatch, kHeads, kLen}, lse.data());
  fill(go, Fill::normal, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    auto& context = const_cast<Context&>(t.context);
    const AttentionInputs in = {.query = part(fused, 0), .key = part(fused, 1), .value = part(fused, 2)};
    ASSERT_TRUE(flash_attention_forward(context, in, {.out = o, .softmax_lse = l}).ok());
    const Status status = flash_attention_backward(
        context, in, {.out = o, .softmax_lse = l, .grad_out = go},
        {.grad_query = part(grads, 0), .grad_key = part(grads, 1), .grad_value = part(grads, 2)});
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<float> apart[3];
    Tensor separate[3];
    for (int i = 0; i < 3; ++i) {
      apart[i].resize(out.size());
      separate[i] = Tensor::contiguous(DType::f32, {kBatch, kHeads, kLen, kDim}, apart[i].data());
    }
    ASSERT_TRUE(
        flash_attention_backward(context, in, {.out = o, .softmax_lse = l, .grad_out = go},
                                 {.grad_query = separate[0], .grad_key = separate[1], .grad_value = separate[2]})
            .ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(compare_bits(part(grads, i), separate[i]).ok) << i;
  }
}

}  // namespace
}  // namespace opst::test
