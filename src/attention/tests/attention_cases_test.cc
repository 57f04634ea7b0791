// Attention forward on inputs that went wrong elsewhere, by their number in the collection of cases.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <thread>

#include "attention/tests/attention_problem.h"
#include "core/sanitizers.h"

namespace opst::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// query [1, 1, query_len, dim], key and value given by rows, run in every context; each output element.
void expect_rows(const ProblemOptions& p, const std::function<void(Problem&)>& set_inputs,
                 const std::vector<double>& expected, double tolerance) {
  Random random(1);
  Problem problem(p, random);
  set_inputs(problem);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(get(r.out->tensor(), static_cast<int64_t>(i)), expected[i], tolerance) << t.name << ", row " << i;
    }
  }
}

void powers_of_two(Problem& problem) {
  for (int64_t j = 0; j < problem.options().kv_len; ++j) set(problem.value(), j, std::ldexp(1.0, static_cast<int>(j)));
}

ProblemOptions probe(int64_t query_len, int64_t kv_len, CausalAlignment alignment) {
  ProblemOptions p;
  p.query_len = query_len, p.kv_len = kv_len;
  p.query_fill = Fill::zeros;
  p.options.causal = true, p.options.alignment = alignment;
  return p;
}

TEST(AttentionCases, B09_LseOfNoKeysIsMinusInfinity) {
  Random random(seed());
  for (const bool causal : {false, true}) {
    ProblemOptions p;
    // No keys at all; with a causal mask, more queries than keys.
    p.query_len = 5, p.kv_len = causal ? 2 : 0, p.head_dim = 4, p.value_head_dim = 3;
    p.options.causal = causal;
    Problem problem(p, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome r = problem.run(t.context);
      for (int64_t i = 0; i < (causal ? 3 : 5); ++i) {
        EXPECT_EQ(get(r.lse->tensor(), i), -kInfinity);
        for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(get(r.out->tensor(), i * 3 + d), 0);
      }
      ASSERT_EQ(problem.judge(r, t.context), "");
    }
  }
}

// An empty sequence beside one so long that its keys are split.
TEST(AttentionCases, B09_AnEmptySequenceBesideALongOne) {
  Random random(seed());
  for (const int64_t query_len : {1, 40}) {
    ProblemOptions p;
    p.batch = 2, p.query_len = query_len, p.kv_len = 3000, p.head_dim = 4, p.value_head_dim = 3;
    Problem problem(p, random);
    const std::vector<int64_t> lengths = {0, 3000};
    problem.inputs.kv_lengths = ConstTensor::contiguous(DType::i64, {2}, lengths.data());
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_GT(problem.plan(t.context.machine()).kv_splits, 1);
      const Outcome r = problem.run(t.context);
      EXPECT_EQ(get(r.lse->tensor(), 0), -kInfinity);
      EXPECT_EQ(get(r.out->tensor(), 0), 0);
      ASSERT_EQ(problem.judge(r, t.context, 40), "");
    }
  }
}

TEST(AttentionCases, B11_LseIsANaturalLogarithm) {
  Random random(seed() + 1);
  ProblemOptions p;
  p.kv_len = 5, p.head_dim = 4;
  p.query_fill = Fill::zeros;
  Problem problem(p, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    EXPECT_NEAR(get(r.lse->tensor(), 0), 1.6094379, 1e-6) << t.name;
    EXPECT_EQ(get(r.sum->tensor(), 0), 5);
  }
}

TEST(AttentionCases, B17_TopLeftAlignment) {
  expect_rows(probe(2, 5, CausalAlignment::top_left), powers_of_two, {1, 1.5}, 1e-6);
  expect_rows(probe(5, 2, CausalAlignment::top_left), powers_of_two, {1, 1.5, 1.5, 1.5, 1.5}, 1e-6);
}

TEST(AttentionCases, B18_BottomRightAlignment) {
  expect_rows(probe(2, 5, CausalAlignment::bottom_right), powers_of_two, {3.75, 6.2}, 1e-5);
  expect_rows(probe(5, 2, CausalAlignment::bottom_right), powers_of_two, {0, 0, 0, 1, 1.5}, 1e-6);
  // 3 queries, 128 keys: one-hot values of the last three keys.
  ProblemOptions p = probe(3, 128, CausalAlignment::bottom_right);
  p.value_fill = Fill::zeros;
  expect_rows(
      p, [](Problem& problem) { set(problem.value(), 126, 127), set(problem.value(), 127, 128); }, {0, 1, 255.0 / 128},
      1e-5);
}

// Decode with lengths around every tile; what lies beyond the length is NaN.
TEST(AttentionCases, B22_LengthsOfDecode) {
  Random random(seed() + 2);
  for (const int64_t query_len : {1, 2, 3, 5, 8}) {
    for (const int64_t head_dim : {64, 96, 128}) {
      for (const int64_t length : {1, 31, 32, 33, 38, 39, 70, 127, 129}) {
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
        p.query_len = query_len, p.kv_len = length + 7, p.head_dim = p.value_head_dim = head_dim;
        p.options.causal = random.chance(0.5);
        Problem problem(p, random);
        for (const Tensor& x : {problem.key(), problem.value()}) {
          fill(x.narrowed(2, length, 7), Fill::nan, random);
        }
        const std::vector<int32_t> lengths = {static_cast<int32_t>(length)};
        problem.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, lengths.data());
        for (const TestContext& t : contexts_with_threads(2)) {
          ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "") << "length " << length;
        }
      }
    }
  }
}

TEST(AttentionCases, B23_ChunkedPrefillIsOneShot) {
  Random random(seed() + 3);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.query_len = p.kv_len = 520, p.head_dim = p.value_head_dim = 64;
    p.options.causal = true;
    Problem whole(p, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome expected = whole.run(t.context);
      ASSERT_EQ(whole.judge(expected, t.context, 40), "");
      for (const int64_t start : {0, 130, 260, 390}) {
        ProblemOptions chunk_options = p;
        chunk_options.query_len = 130, chunk_options.kv_len = start + 130;
        Problem chunk(chunk_options, random);
        const Outcome r = chunk.run(t.context, {.query = whole.query().narrowed(2, start, 130),
                                                .key = whole.key().narrowed(2, 0, start + 130),
                                                .value = whole.value().narrowed(2, 0, start + 130)});
        ASSERT_TRUE(r.status.ok()) << r.status.message();
        for (int64_t i = 0; i < 130 * 64; ++i) {
          ASSERT_NEAR(get(r.out->tensor(), i), get(expected.out->tensor(), start * 64 + i),
                      dtype == DType::f32 ? 1e-5 : 0.03)
              << t.name << ", start " << start;
        }
      }
    }
  }
}

// The products overflow f16, the scaled scores do not overflow f32.
TEST(AttentionCases, B34_ScoresBeyondF16) {
  struct Case {
    int64_t head_dim;
    double large, small;
  };
  for (const Case& c : {Case{192, 20, 19.5}, Case{128, 256, 255}}) {
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = DType::f16;
    p.kv_len = 2, p.head_dim = c.head_dim;
    expect_rows(
        p,
        [&](Problem& problem) {
          for (int64_t d = 0; d < c.head_dim; ++d) {
            set(problem.query(), d, c.large);
            set(problem.key(), d, c.large);
            set(problem.key(), c.head_dim + d, c.small);
          }
          set(problem.value(), 0, 1);
          set(problem.value(), 1, 2);
        },
        {1}, 1e-3);
  }
}

// Exponentials around the subnormal range: flushed or kept, a vector's tail gives what its body gives, and V = 1
// gives 1.
TEST(AttentionCases, B36_SubnormalExponentials) {
  const double scores[6] = {0, -87, -90, -95, -100, -104};
  for (const int64_t kv_len : {4096, 4099, 37}) {
    for (const int64_t query_len : {1, 14}) {
      ProblemOptions p;
      p.query_len = query_len, p.kv_len = kv_len, p.value_head_dim = 7;
      p.query_fill = Fill::ones;
      p.value_fill = Fill::zeros;
      Random random(1);
      Problem problem(p, random);
      double count[6] = {};
      for (int64_t j = 0; j < kv_len; ++j) {
        set(problem.key(), j, scores[j % 6]);
        set(problem.value(), j * 7 + j % 6, 1);  // one column for each score
        set(problem.value(), j * 7 + 6, 1);
        count[j % 6] += 1;
      }
      for (const TestContext& t : contexts_with_threads(2)) {
        const Outcome r = problem.run(t.context);
        for (int64_t i = 0; i < query_len; ++i) {
          EXPECT_NEAR(get(r.out->tensor(), i * 7 + 6), 1, 1e-6) << t.name;
          for (int c = 0; c < 6; ++c) {
            const double exact = count[c] * std::exp(scores[c]) / count[0];
            const double got = get(r.out->tensor(), i * 7 + c);
            // Below 2^-126 each is 0; the sum of what is left is still tiny.
            if (std::exp(scores[c]) < 0x1p-126) {
              EXPECT_EQ(got, 0) << t.name << ", score " << scores[c];
            } else {
              EXPECT_NEAR(got, exact, exact * 2e-5 + 1e-41) << t.name << ", score " << scores[c];
            }
          }
        }
      }
    }
  }
}

#if defined(__x86_64__)
// The caller's flush-to-zero mode changes no bit, and is as it was afterwards.
TEST(AttentionCases, B37_CallersFloatMode) {
  Random random(seed() + 4);
  const unsigned plain = __builtin_ia32_stmxcsr();
  const unsigned flushing = plain | 0x8040;
  for (const int64_t query_len : {1, 30}) {
    ProblemOptions p;
    p.num_heads = 4, p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 50, p.head_dim = p.value_head_dim = 16;
    Problem problem(p, random);
    for (const Tensor& x : {problem.query(), problem.key()}) {
      for (int64_t i = 0; i < x.num_elements(); ++i) set(x, i, random.normal() * 1e-19);
    }
    for (int64_t i = 0; i < problem.value().num_elements(); ++i) set(problem.value(), i, random.normal() * 1e-39);
    for (const Isa isa : levels()) {
      Outcome first;
      for (const int num_threads : {1, 4}) {
        ContextOptions options;
        options.isa = isa, options.num_threads = num_threads;
        opst::Result<Context> context = Context::create(options);
        ASSERT_TRUE(context.ok());
        for (const unsigned mode : {plain, flushing}) {
          __builtin_ia32_ldmxcsr(mode);
          Outcome r = problem.run(context.value());
          const unsigned after = __builtin_ia32_stmxcsr();
          __builtin_ia32_ldmxcsr(plain);
          EXPECT_EQ(after & ~0x3fu, mode & ~0x3fu) << "the caller's mode has changed";
          ASSERT_TRUE(r.status.ok());
          bool tiny = false;
          for (int64_t i = 0; i < r.out->tensor().num_elements(); ++i) tiny |= get(r.out->tensor(), i) != 0;
          EXPECT_TRUE(tiny) << "values of 1e-39 were flushed: " << to_string(isa);
          if (first.out == nullptr) {
            first = std::move(r);
          } else {
            ASSERT_EQ(r.differs_from(first), "") << to_string(isa) << ", " << num_threads << " threads";
          }
        }
      }
    }
  }
}
#endif

TEST(AttentionCases, B39_InnerStrideIsNotOne) {
  Random random(seed() + 5);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // base [1, 2, 8, 16], its last two dimensions exchanged: 16 tokens of 8 dimensions, 16 elements apart.
    View base(dtype, 1, 2, 8, 16, Strides::bnsd);
    fill(base.tensor(), Fill::normal, random);
    const Tensor x = base.tensor().transposed(2, 3);
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.num_heads = p.num_kv_heads = 2, p.query_len = p.kv_len = 16, p.head_dim = p.value_head_dim = 8;
    Problem problem(p, random);
    for (const Tensor& to : {problem.query(), problem.key(), problem.value()}) copy(x, to);
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome r = problem.run(t.context, {.query = x, .key = x, .value = x});
      ASSERT_EQ(problem.judge(r, t.context), "");
    }
  }
}

TEST(AttentionCases, B40_ValuesStoredTokenByToken) {
  Random random(seed() + 6);
  ProblemOptions p;
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  p.num_heads = p.num_kv_heads = 16, p.query_len = p.kv_len = 62, p.head_dim = p.value_head_dim = 128;
  Problem problem(p, random);
  View stored(DType::bf16, 1, 62, 16, 128, Strides::bnsd);
  const Tensor value = stored.tensor().transposed(1, 2);
  copy(problem.value(), value);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context, {.query = problem.query(), .key = problem.key(), .value = value});
    ASSERT_EQ(r.differs_from(problem.run(t.context)), "") << t.name;
    ASSERT_EQ(problem.judge(r, t.context, 50), "");
  }
}

// Each query head reads its group's KV head: equal to keys and values repeated for every head.
TEST(AttentionCases, B49_GroupsThatAreNoPowerOfTwo) {
  Random random(seed() + 7);
  for (const auto& [heads, kv_heads] : {std::pair(12, 2), std::pair(3, 1), std::pair(10, 2), std::pair(7, 1),
                                        std::pair(24, 1), std::pair(9, 3), std::pair(8, 2)}) {
    for (const auto& [query_len, kv_len] : {std::pair(1, 4096), std::pair(9, 100)}) {
      ProblemOptions p;
      p.num_heads = heads, p.num_kv_heads = kv_heads, p.query_len = query_len, p.kv_len = kv_len;
      p.head_dim = p.value_head_dim = 16;
      Problem grouped(p, random);
      p.num_kv_heads = heads;
      Problem expanded(p, random);
      copy(grouped.query(), expanded.query());
      for (int64_t h = 0; h < heads; ++h) {
        copy(grouped.key().selected(1, h / (heads / kv_heads)), expanded.key().selected(1, h));
        copy(grouped.value().selected(1, h / (heads / kv_heads)), expanded.value().selected(1, h));
      }
      for (const TestContext& t : contexts_with_threads(2)) {
        const Outcome r = grouped.run(t.context);
        ASSERT_EQ(grouped.judge(r, t.context, 24), "");
        ASSERT_EQ(expanded.judge(r, t.context, 24), "");
      }
    }
  }
}

// Five new tokens behind a paged prefix of 37 are the last five rows of attention over all 42.
TEST(AttentionCases, B50_ExtendWithAPagedPrefix) {
  Random random(seed() + 8);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.num_heads = 8, p.num_kv_heads = 2, p.query_len = p.kv_len = 42, p.head_dim = p.value_head_dim = 64;
    p.options.causal = true;
    Problem whole(p, random);
    p.query_len = 5;
    Problem extend(p, random);
    copy(whole.query().narrowed(2, 37, 5), extend.query());
    copy(whole.key(), extend.key());
    copy(whole.value(), extend.value());
    const Pages pages = extend.paged(16, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome expected = whole.run(t.context), r = extend.run(t.context, pages.inputs);
      ASSERT_EQ(extend.judge(r, t.context), "");
      for (int64_t h = 0; h < 8; ++h) {
        for (int64_t i = 0; i < 5 * 64; ++i) {
          ASSERT_NEAR(get(r.out->tensor(), h * 5 * 64 + i), get(expected.out->tensor(), (h * 42 + 37) * 64 + i),
                      dtype == DType::bf16 ? 0.03 : 1e-5)
              << t.name;
        }
      }
    }
  }
}

TEST(AttentionCases, B52_OutputIsAsWideAsTheValues) {
  Random random(seed() + 9);
  for (const int64_t value_head_dim : {24, 48, 1}) {
    ProblemOptions p;
    p.query_len = p.kv_len = 16, p.head_dim = 32, p.value_head_dim = value_head_dim;
    p.out_strides = Strides::padded;
    Problem problem(p, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "");  // checks the gaps beside each row, too
    }
  }
}

TEST(AttentionCases, B53_WideHeads) {
  Random random(seed() + 10);
  for (const auto& [head_dim, value_head_dim] :
       {std::pair(128, 128), std::pair(192, 128), std::pair(576, 512), std::pair(256, 256), std::pair(768, 768)}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      ProblemOptions p;
      p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
      p.batch = 2, p.num_heads = 4, p.num_kv_heads = random.pick<int64_t>({1, 4}), p.query_len = 5, p.kv_len = 8;
      p.head_dim = head_dim, p.value_head_dim = value_head_dim;
      Problem problem(p, random);
      const std::vector<int32_t> lengths = {5, 3};
      problem.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
      for (const TestContext& t : contexts_with_threads(2)) {
        ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "");
      }
    }
  }
}

TEST(AttentionCases, B54_OddHeadDims) {
  Random random(seed() + 11);
  for (const int64_t head_dim : {1, 3, 7, 40, 48, 63, 72, 80, 96, 160, 192, 256, 512}) {
    for (const int64_t len : {63, 100}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
        p.query_len = random.pick<int64_t>({1, len}), p.kv_len = len, p.head_dim = p.value_head_dim = head_dim;
        p.out_strides = Strides::padded;
        p.options.causal = random.chance(0.5);
        Problem problem(p, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          ASSERT_EQ(problem.judge(problem.run(t.context), t.context, 30), "");
        }
      }
    }
  }
}

TEST(AttentionCases, B87_ForkAfterUse) {
  if (kThreadSanitizer) GTEST_SKIP() << "the thread sanitizer allows no new threads in a forked child";
  Random random(seed() + 12);
  ProblemOptions p;
  p.num_heads = p.num_kv_heads = 4, p.query_len = p.kv_len = 100, p.head_dim = p.value_head_dim = 32;
  Problem problem(p, random);
  ContextOptions options;
  options.num_threads = 4;
  opst::Result<Context> context = Context::create(options);
  ASSERT_TRUE(context.ok());
  const Outcome before = problem.run(context.value());
  ASSERT_TRUE(before.status.ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a child that hangs ends here
    const Outcome r = problem.run(context.value());
    _exit(r.status.ok() && r.differs_from(before).empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(problem.run(context.value()).differs_from(before), "");
}

TEST(AttentionCases, B89_RunToRunTheSameBits) {
  Random random(seed() + 13);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.batch = 2, p.num_heads = p.num_kv_heads = 4, p.query_len = p.kv_len = 130, p.head_dim = p.value_head_dim = 64;
    p.options.causal = true;
    Problem problem(p, random);
    ContextOptions options;
    options.num_threads = 4;
    opst::Result<Context> context = Context::create(options);
    ASSERT_TRUE(context.ok());
    const Outcome first = problem.run(context.value());
    for (int i = 0; i < 50; ++i) ASSERT_EQ(problem.run(context.value()).differs_from(first), "") << "run " << i;
  }
}

// The baseline level, as a processor without AVX would choose it.
TEST(AttentionCases, B90_BaselineLevel) {
  Random random(seed() + 14);
  ContextOptions options;
  options.isa = Isa::generic;
  opst::Result<Context> context = Context::create(options);
  ASSERT_TRUE(context.ok());
  ASSERT_EQ(context.value().machine().isa, Isa::generic);
  ProblemOptions p;  // latent attention, decoding
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  p.num_heads = 16, p.kv_len = 70, p.head_dim = 576, p.value_head_dim = 512;
  Problem problem(p, random);
  ASSERT_EQ(problem.judge(problem.run(context.value()), context.value()), "");
}

// Calls on one context from several threads at once.
TEST(AttentionCases, ConcurrentCallsOnOneContext) {
  Random random(seed() + 15);
  ProblemOptions p;
  p.num_heads = 4, p.num_kv_heads = 2, p.query_len = 60, p.kv_len = 200, p.head_dim = p.value_head_dim = 32;
  ContextOptions options;
  options.num_threads = 2;
  opst::Result<Context> context = Context::create(options);
  ASSERT_TRUE(context.ok());
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<Outcome> expected;
  for (int i = 0; i < 4; ++i) {
    p.query_len = i % 2 == 0 ? 1 : 60;
    problems.push_back(std::make_unique<Problem>(p, random));
    expected.push_back(problems.back()->run(context.value()));
  }
  std::vector<std::string> messages(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int call = 0; call < 20 && messages[i].empty(); ++call) {
        const Outcome r = problems[i]->run(context.value());
        messages[i] = r.status.ok() ? r.differs_from(expected[i]) : r.status.message();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& message : messages) EXPECT_EQ(message, "");
}

}  // namespace
}  // namespace opst::test
