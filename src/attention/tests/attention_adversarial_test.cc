// Inputs that break softmax and masks: huge scores, rising maxima, NaN and infinity everywhere, identities of the
// equation. Each on every level, on both paths, with keys read in place, packed per task and packed for all.
#include <gtest/gtest.h>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Options that lead a problem of about 13 stacked rows and up to 100 keys through every access to keys and values.
std::vector<AttentionOptions> ways() {
  std::vector<AttentionOptions> list;
  for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::flash, AttentionPath::standard}) {
    for (const int64_t block_q : {0, 3}) {
      for (const int64_t block_kv : {0, 5, 16}) {
        AttentionOptions o;
        o.path = path, o.block_q = block_q, o.block_kv = block_kv;
        list.push_back(o);
      }
    }
  }
  return list;
}

const DType kStorages[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

ProblemOptions small(DType dtype, int64_t query_len, int64_t kv_len) {
  ProblemOptions p;
  p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
  p.num_heads = 2, p.query_len = query_len, p.kv_len = kv_len, p.head_dim = 19, p.value_head_dim = 21;
  return p;
}

// Runs and judges a problem in every way on every level.
void judge_everywhere(ProblemOptions p, Random& random, double share = 1) {
  const AttentionOptions given = p.options;
  for (const AttentionOptions& way : ways()) {
    p.options = given;
    p.options.path = way.path, p.options.block_q = way.block_q, p.options.block_kv = way.block_kv;
    if (!random.chance(share * kEffort)) continue;
    Problem problem(p, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "");
    }
  }
}

TEST(AttentionAdversarial, ClassicFillsAgreeWithTheReference) {
  Random random(seed());
  for (const DType dtype : kStorages) {
    for (const int64_t query_len : {2, 9}) {
      for (const Fill fill : {Fill::ones, Fill::large_normal, Fill::ascending_rows, Fill::outlier, Fill::denormals}) {
        ProblemOptions p = small(dtype, query_len, 77);
        p.query_fill = fill == Fill::ascending_rows ? Fill::ones : fill;
        p.key_fill = fill;
        p.value_fill = fill == Fill::denormals ? fill : Fill::normal;
        judge_everywhere(p, random, 0.5);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Scores of 10^11 and more: c * max is rounded by thousands, which must not reach an exponent.
TEST(AttentionAdversarial, HugeScoresKeepTheirSoftmax) {
  Random random(seed() + 1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const int64_t query_len : {1, 9}) {
      for (const int64_t kv_len : {2, 77, 3000}) {
        for (const float scale : {1.0f, -1.0f, 1e10f}) {
          ProblemOptions p = small(dtype, query_len, kv_len);
          p.head_dim = p.value_head_dim = 1;
          p.options.softmax_scale = scale;
          for (const AttentionPath path : {AttentionPath::flash, AttentionPath::standard}) {
            p.options.path = path;
            Problem problem(p, random);
            // Exact in f32 and in bf16's products: query 2^15, keys (128 + m) 2^9, the largest once.
            const int64_t favourite = random.integer(0, kv_len - 1);
            for (int64_t i = 0; i < problem.query().num_elements(); ++i) set(problem.query(), i, 0x1p15);
            for (int64_t j = 0; j < kv_len; ++j) {
              const double m = j == favourite ? 127.0 : static_cast<double>(random.integer(0, 126));
              set(problem.key(), j, (scale > 0 ? 1 : -1) * (128 + m) * 0x1p9);
            }
            for (const TestContext& t : contexts_with_threads(2)) {
              SCOPED_TRACE(t.name + " " + to_string(p));
              const Outcome r = problem.run(t.context);
              ASSERT_TRUE(r.status.ok()) << r.status.message();
              for (int64_t i = 0; i < r.out->tensor().num_elements(); ++i) {
                // All others are at least 2^24 lower.
                ASSERT_EQ(get(r.out->tensor(), i), get(problem.value(), favourite));
                ASSERT_EQ(get(r.sum->tensor(), i), 1);
                const double score = std::fabs(static_cast<double>(scale)) * 255 * 0x1p24;
                ASSERT_NEAR(get(r.lse->tensor(), i), score, score * 0x1p-22);
                ASSERT_NEAR(get(r.max->tensor(), i), score, score * 0x1p-22);
              }
            }
          }
        }
      }
    }
  }
}

TEST(AttentionAdversarial, RandomNumbersUpToTheLargestF16StayFinite) {
  Random random(seed() + 2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int64_t query_len : {1, 20}) {
      for (const bool causal : {false, true}) {
        for (const AttentionOptions& way : ways()) {
          if (!random.chance(0.3)) continue;
          ProblemOptions p = small(dtype, query_len, 90);
          p.options = way;
          p.options.causal = causal;
          p.options.softmax_scale = random.pick({1.0f, 0.1f, -1.0f});
          Problem problem(p, random);
          for (const Tensor& x : {problem.query(), problem.key(), problem.value()}) {
            for (int64_t i = 0; i < x.num_elements(); ++i) set(x, i, random.uniform(-65504, 65504));
          }
          for (const TestContext& t : contexts_with_threads(2)) {
            ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "");
          }
        }
      }
    }
  }
}

// A scale so large that softmax_scale * log2(e) is no float.
TEST(AttentionAdversarial, EveryFiniteScaleWorks) {
  Random random(seed() + 3);
  for (const float scale : {std::numeric_limits<float>::max(), -std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), -0.0f}) {
    for (const int64_t query_len : {1, 9}) {
      ProblemOptions p = small(DType::f32, query_len, 40);
      p.options.softmax_scale = scale;
      // Scores of the largest scales would be no floats; zeros must stay zeros.
      if (std::fabs(scale) > 1) p.query_fill = Fill::zeros;
      judge_everywhere(p, random, 0.5);
      if (HasFatalFailure()) return;
    }
  }
}

// Each key's score is above all before it, so every tile moves the reference of every row.
TEST(AttentionAdversarial, RisingMaximaRescaleWhatWasSummed) {
  Random random(seed() + 4);
  for (const DType dtype : kStorages) {
    for (const double step : {0.01, 1.0, 30.0}) {
      for (const bool rising : {true, false}) {
        for (const int64_t query_len : {1, 8}) {
          for (const AttentionOptions& way : ways()) {
            if (!random.chance(0.4)) continue;
            ProblemOptions p = small(dtype, query_len, 100);
            p.options = way;
            p.query_fill = Fill::ones;
            Problem problem(p, random);
            for (int64_t j = 0; j < p.kv_len; ++j) {
              const double x = step * static_cast<double>(rising ? j : p.kv_len - j);
              for (int64_t d = 0; d < p.head_dim; ++d) set(problem.key(), j * p.head_dim + d, x);
            }
            for (const TestContext& t : contexts_with_threads(2)) {
              ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "");
            }
          }
        }
      }
    }
  }
}

enum class Where : uint8_t { query, key, value };

// A non-finite element at every position of a small problem: rows that depend on it follow the equation, all others
// keep their bits.
void poison_everywhere(DType dtype, int64_t query_len, int64_t kv_len, bool causal, Where where, Random& random) {
  for (const AttentionOptions& way : ways()) {
    ProblemOptions p = small(dtype, query_len, kv_len);
    // Whole vectors of heads of their own may stay where they are.
    p.value_head_dim = random.pick({21, 32}), p.num_kv_heads = random.pick({1, 2});
    p.options = way;
    p.options.causal = causal;
    p.options.alignment = random.pick({CausalAlignment::top_left, CausalAlignment::bottom_right});
    p.ragged = random.chance(0.5);
    p.batch = p.ragged ? 2 : 1;
    for (const TestContext& t : contexts_with_threads(2)) {
      if (!exhaustive() && !random.chance(0.12 * kEffort)) continue;
      Problem problem(p, random);
      const Outcome clean = problem.run(t.context);
      ASSERT_EQ(problem.judge(clean, t.context), "");
      const Tensor& target = where == Where::query ? problem.query()
                             : where == Where::key ? problem.key()
                                                   : problem.value();
      const int64_t row_length = target.shape[3];
      for (int64_t row = 0; row < target.num_elements() / row_length; ++row) {
        const double poison = random.pick({kNan, kInfinity, -kInfinity});
        const int64_t at = row * row_length + random.integer(0, row_length - 1);
        const double before = get(target, at);
        set(target, at, poison);
        problem.forget_reference();
        const Outcome r = problem.run(t.context);
        const std::string about = std::string("element ") + index_text(target, at) + " is " + std::to_string(poison) +
                                  "\n  " + t.name + "\n  " + to_string(p);
        ASSERT_EQ(problem.judge(r, t.context), "") << about;
        // Rows that do not depend on it.
        const int64_t b = row / target.shape[2] / target.shape[1],
                      kv_head_or_head = row / target.shape[2] % target.shape[1];
        const int64_t key = row % target.shape[2];
        for (int64_t i = 0; i < clean.lse->tensor().num_elements(); ++i) {
          const int64_t query = i % p.query_len, h = i / p.query_len % p.num_heads,
                        batch = i / p.query_len / p.num_heads;
          const bool depends =
              where == Where::query
                  ? i == row
                  : batch == b && h / (p.num_heads / p.num_kv_heads) == kv_head_or_head &&
                        key < attention::reference::visible_keys(problem.inputs, p.options, batch, query);
          if (depends) continue;
          for (int64_t d = 0; d < p.value_head_dim; ++d) {
            const double old_value = get(clean.out->tensor(), i * p.value_head_dim + d);
            const double new_value = get(r.out->tensor(), i * p.value_head_dim + d);
            // Where a hidden value of a partial tile is not finite, bf16 pairs are summed one by one.
            if (dtype == DType::bf16 && where == Where::value) {
              ASSERT_NEAR(old_value, new_value, 0.02 * (1 + std::fabs(old_value))) << about;
            } else {
              ASSERT_EQ(old_value, new_value) << "row " << i << " changed\n  " << about;
            }
          }
          ASSERT_EQ(get(clean.lse->tensor(), i), get(r.lse->tensor(), i)) << about;
        }
        set(target, at, before);
      }
      problem.forget_reference();
      ASSERT_EQ(problem.run(t.context).differs_from(clean), "") << "scratch memory remembers a NaN\n" << t.name;
    }
  }
}

class AttentionPoison : public testing::TestWithParam<std::tuple<DType, Where>> {};

TEST_P(AttentionPoison, ReachesExactlyTheRowsThatDependOnIt) {
  Random random(seed() + 5);
  const auto [dtype, where] = GetParam();
  for (const bool causal : {false, true}) {
    // Decode-like, a register tile and more of rows, and more queries than keys.
    for (const auto& [query_len, kv_len] : {std::pair(2, 37), std::pair(15, 35), std::pair(19, 14)}) {
      poison_everywhere(dtype, query_len, kv_len, causal, where, random);
      if (HasFatalFailure()) return;
    }
  }
}
std::string poison_name(const testing::TestParamInfo<std::tuple<DType, Where>>& chosen) {
  constexpr const char* kNames[] = {"query", "key", "value"};
  return std::string(to_string(std::get<0>(chosen.param))) + "_" + kNames[static_cast<int>(std::get<1>(chosen.param))];
}
INSTANTIATE_TEST_SUITE_P(Attention, AttentionPoison,
                         testing::Combine(testing::ValuesIn(kStorages),
                                          testing::Values(Where::query, Where::key, Where::value)),
                         poison_name);

// All of a sequence's keys and values from some position on are NaN, and no row sees them.
TEST(AttentionAdversarial, HiddenNanTailsNeverMatter) {
  Random random(seed() + 6);
  for (const DType dtype : kStorages) {
    for (const int64_t query_len : {1, 14}) {
      for (const bool causal : {false, true}) {
        for (const AttentionOptions& way : ways()) {
          if (!random.chance(0.5)) continue;
          ProblemOptions p = small(dtype, query_len, 67);
          p.value_head_dim = random.pick({21, 32}), p.num_kv_heads = random.pick({1, 2});
          p.batch = 3;
          p.options = way;
          p.options.causal = causal;
          p.ragged = true;
          if (causal) p.options.alignment = CausalAlignment::top_left;
          Problem problem(p, random);
          std::vector<Outcome> clean;
          for (const TestContext& t : contexts_with_threads(2)) clean.push_back(problem.run(t.context));
          for (int64_t b = 0; b < p.batch; ++b) {
            const int64_t seen = causal ? std::min(problem.length(b), query_len) : problem.length(b);
            for (const Tensor& x : {problem.key(), problem.value()}) {
              fill(x.selected(0, b).selected(0, 0).narrowed(0, seen, p.kv_len - seen), Fill::nan, random);
            }
          }
          size_t i = 0;
          for (const TestContext& t : contexts_with_threads(2)) {
            const Outcome r = problem.run(t.context);
            ASSERT_EQ(problem.judge(r, t.context), "");
            if (dtype != DType::bf16) {
              ASSERT_EQ(r.differs_from(clean[i]), "") << t.name << "\n" << to_string(p);
            }
            ++i;
          }
        }
      }
    }
  }
}

TEST(AttentionIdentity, ValuesOfOneGiveOne) {
  Random random(seed() + 7);
  for (const DType dtype : kStorages) {
    for (const int64_t query_len : {1, 40}) {
      for (const AttentionOptions& way : ways()) {
        ProblemOptions p = small(dtype, query_len, 83);
        p.options = way;
        p.options.causal = random.chance(0.5);
        p.value_fill = Fill::ones;
        Problem problem(p, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome r = problem.run(t.context);
          const double tolerance = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f64 ? 0x1p-48 : 0x1p-18;
          for (int64_t i = 0; i < r.out->tensor().num_elements(); ++i) {
            ASSERT_NEAR(get(r.out->tensor(), i), 1, tolerance) << t.name << "\n" << to_string(p);
          }
        }
      }
    }
  }
}

// One more dimension, 1 in the queries and `shift` in the keys, adds `shift` to every score.
TEST(AttentionIdentity, ShiftingAllScoresMovesOnlyTheLse) {
  Random random(seed() + 8);
  for (const double shift : {-64.0, 0.5, 128.0}) {
    for (const int64_t query_len : {1, 30}) {
      for (const AttentionOptions& way : ways()) {
        ProblemOptions p = small(DType::f32, query_len, 70);
        p.options = way;
        p.options.softmax_scale = 0.25f;
        Problem problem(p, random);
        const Tensor query = problem.query(), key = problem.key();
        const int64_t last = p.head_dim - 1;
        const auto set_last = [&](const Tensor& t, double x) {
          for (int64_t i = 0; i < t.num_elements() / p.head_dim; ++i) set(t, i * p.head_dim + last, x);
        };
        set_last(query, 1);
        set_last(key, 0);
        for (const TestContext& t : contexts_with_threads(2)) {
          set_last(key, 0);
          const Outcome plain = problem.run(t.context);
          set_last(key, shift * 4);
          const Outcome shifted = problem.run(t.context);
          for (int64_t i = 0; i < plain.out->tensor().num_elements(); ++i) {
            ASSERT_NEAR(get(plain.out->tensor(), i), get(shifted.out->tensor(), i), 2e-4) << t.name;
          }
          for (int64_t i = 0; i < plain.lse->tensor().num_elements(); ++i) {
            ASSERT_NEAR(get(plain.lse->tensor(), i) + shift, get(shifted.lse->tensor(), i), 1e-4) << t.name;
            ASSERT_NEAR(get(plain.max->tensor(), i) + shift, get(shifted.max->tensor(), i), 1e-4) << t.name;
            ASSERT_NEAR(get(plain.sum->tensor(), i), get(shifted.sum->tensor(), i), 2e-3) << t.name;
          }
        }
      }
    }
  }
}

TEST(AttentionIdentity, TheOrderOfKeysDoesNotMatter) {
  Random random(seed() + 9);
  for (const int64_t query_len : {1, 30}) {
    for (const AttentionOptions& way : ways()) {
      ProblemOptions p = small(DType::f32, query_len, 70);
      p.options = way;
      Problem problem(p, random);
      std::vector<Outcome> results;
      for (const TestContext& t : contexts_with_threads(2)) results.push_back(problem.run(t.context));
      for (int64_t j = 0; j < p.kv_len / 2; ++j) {  // mirror the keys
        for (const Tensor& x : {problem.key(), problem.value()}) {
          for (int64_t d = 0; d < x.shape[3]; ++d) {
            const int64_t a = j * x.shape[3] + d, b = (p.kv_len - 1 - j) * x.shape[3] + d;
            const double kept = get(x, a);
            set(x, a, get(x, b));
            set(x, b, kept);
          }
        }
      }
      size_t i = 0;
      for (const TestContext& t : contexts_with_threads(2)) {
        const Outcome r = problem.run(t.context);
        const Outcome& old = results[i++];
        for (int64_t e = 0; e < r.out->tensor().num_elements(); ++e) {
          ASSERT_NEAR(get(r.out->tensor(), e), get(old.out->tensor(), e), 1e-5) << t.name << to_string(p);
        }
      }
    }
  }
}

// Attention over two parts of the keys, merged by their lse, is attention over all of them.
TEST(AttentionIdentity, PartsMergedByLseAreTheWhole) {
  Random random(seed() + 10);
  for (const int64_t split : {0, 1, 33, 96, 97}) {
    for (const int64_t query_len : {1, 17}) {
      for (const AttentionOptions& way : ways()) {
        if (!random.chance(0.5)) continue;
        ProblemOptions p = small(DType::f32, query_len, 97);
        p.options = way;
        Problem problem(p, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome whole = problem.run(t.context);
          const auto part = [&](int64_t begin, int64_t length) {
            return problem.run(t.context, {.query = problem.query(),
                                           .key = problem.key().narrowed(2, begin, length),
                                           .value = problem.value().narrowed(2, begin, length)});
          };
          const Outcome a = part(0, split), b = part(split, p.kv_len - split);
          ASSERT_TRUE(a.status.ok() && b.status.ok()) << a.status.message() << b.status.message();
          for (int64_t row = 0; row < whole.lse->tensor().num_elements(); ++row) {
            const double lse_a = get(a.lse->tensor(), row), lse_b = get(b.lse->tensor(), row);
            const double top = std::max(lse_a, lse_b);
            const double weight_a = std::exp(lse_a - top), weight_b = std::exp(lse_b - top);
            ASSERT_NEAR(get(whole.lse->tensor(), row), top + std::log(weight_a + weight_b), 1e-5) << t.name;
            for (int64_t d = 0; d < p.value_head_dim; ++d) {
              const int64_t e = row * p.value_head_dim + d;
              const double merged =
                  (get(a.out->tensor(), e) * weight_a + get(b.out->tensor(), e) * weight_b) / (weight_a + weight_b);
              ASSERT_NEAR(get(whole.out->tensor(), e), merged, 1e-5) << t.name << to_string(p);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test
