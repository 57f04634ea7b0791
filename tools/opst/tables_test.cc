// How `opst bench tables` draws up its rows, with numbers worked out by hand; and that the standard form beside which
// flash is measured computes attention and its gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "attention_verdict.h"
#include "standard_attention.h"
#include "table_bench.h"
#include "testing/elements.h"

namespace opst::tools {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

// A pair of one head takes 1 ns (flash; training 4 ns) and twice that (standard); nothing else takes time.
TableLimits limits(double memory_bytes) {
  return {.memory_bytes = memory_bytes,
          .standard = {.forward = 2e-9, .training = 8e-9},
          .flash = {.forward = 1e-9, .training = 4e-9}};
}
TablesOptions options(std::vector<TableKind> kinds, double budget) {
  TablesOptions o;
  o.tables = std::move(kinds);
  o.budget_seconds = budget;
  return o;
}
const TableRow& row_of(const Tables& tables, TableKind kind, const std::string& name) {
  const auto found = std::find_if(tables.rows.begin(), tables.rows.end(),
                                  [&](const TableRow& r) { return r.table == kind && r.name == name; });
  EXPECT_NE(found, tables.rows.end()) << name;
  return *found;
}
const TableRun& run_of(const Tables& tables, TableKind kind, const std::string& name) {
  return tables.runs[row_of(tables, kind, name).run];
}
double spent(const Tables& tables, const TableLimits& l) {
  double seconds = 0;
  for (const TableRun& r : tables.runs) {
    seconds += r.flash.state == FormState::run ? r.flash_cost(l) : 0;
    seconds += r.standard.state == FormState::run ? r.standard_cost(l) : 0;
  }
  return seconds;
}

// One batch of 32 heads in bf16: 1, 4, 16 and 256 GiB at 4K, 8K, 16K and 64K tokens; training three times as much.
TEST(Tables, PublishedScoresAreThoseOfTheArticles) {
  const Tables t = draw_tables(options({TableKind::inference, TableKind::training, TableKind::video}, 1), limits(kGiB));
  const std::pair<const char*, double> cases[] = {{"4K", 1}, {"8K", 4}, {"16K", 16}, {"64K", 256}, {"128K", 1024}};
  for (const auto& [name, gib] : cases) {
    const TableRow& inference = row_of(t, TableKind::inference, name);
    EXPECT_EQ(inference.published_score_bytes, kPublishedBatch * gib * kGiB) << name;
    EXPECT_EQ(row_of(t, TableKind::training, name).published_score_bytes, 3 * inference.published_score_bytes) << name;
    EXPECT_GT(inference.published_standard_bytes, inference.published_score_bytes);
  }
  EXPECT_EQ(row_of(t, TableKind::video, "64 frames").published_score_bytes, 256 * kGiB);
  EXPECT_EQ(row_of(t, TableKind::video, "64 frames, training").published_score_bytes, 768 * kGiB);
  // Query, key, value and output of 4 x 32 heads of 128, and a statistic for each row.
  EXPECT_EQ(row_of(t, TableKind::inference, "2K").published_flash_bytes, 4.0 * 32 * 2048 * (4 * 128 * 2 + 4));
}

TEST(Tables, RowsOfEveryKind) {
  const Tables t = draw_tables(TablesOptions{}, limits(1000 * kGiB));
  std::string names;
  for (const TableRow& r : t.rows) names += std::string(to_string(r.table)) + " " + r.name + "; ";
  EXPECT_EQ(names,
            "inference 2K; inference 4K; inference 8K; inference 16K; inference 32K; inference 64K; inference 128K; "
            "training 2K; training 4K; training 8K; training 16K; training 32K; training 64K; training 128K; "
            "video 16 frames; video 64 frames; video 128 frames; "
            "video 16 frames, training; video 64 frames, training; video 128 frames, training; "
            "long 256K; long 256K, one token; ");
  EXPECT_EQ(t.left_out, 0);
  EXPECT_EQ(run_of(t, TableKind::video, "128 frames").problem.kv_len, 131072);
  EXPECT_EQ(run_of(t, TableKind::long_context, "256K").problem.query_len, 262144);
  EXPECT_EQ(run_of(t, TableKind::long_context, "256K, one token").problem.query_len, 1);
  // A video of 128 frames is a sequence of 128K tokens: one measurement stands in both tables.
  EXPECT_EQ(row_of(t, TableKind::video, "128 frames").run, row_of(t, TableKind::inference, "128K").run);
  EXPECT_EQ(row_of(t, TableKind::video, "16 frames, training").run, row_of(t, TableKind::training, "16K").run);
  EXPECT_EQ(t.runs.size(), 16u);
  TablesOptions small;
  small.max_seq = 512;
  const Tables s = draw_tables(small, limits(kGiB));
  ASSERT_EQ(s.rows.size(), 6u);  // 128, 256, 512: inference and training
  EXPECT_EQ(s.rows[0].name, "128");
  EXPECT_EQ(s.rows[5].name, "512");
  EXPECT_EQ(s.left_out, 8);
}

TEST(Tables, TheStandardFormStopsWhereItDoesNotFit) {
  TablesOptions o = options({TableKind::inference, TableKind::training}, 1e9);
  o.most_heads = 1;
  const Tables t = draw_tables(o, limits(8.5 * kGiB));
  // One head in bf16 has 2 GiB of scores at 32K, 8 at 64K, 32 at 128K.
  const auto state = [&](TableKind kind, const char* name) { return run_of(t, kind, name).standard.state; };
  EXPECT_EQ(state(TableKind::inference, "64K"), FormState::run);
  EXPECT_EQ(state(TableKind::inference, "128K"), FormState::memory);
  EXPECT_EQ(state(TableKind::training, "32K"), FormState::run);
  EXPECT_EQ(state(TableKind::training, "64K"), FormState::memory);
  for (const TableRun& r : t.runs) EXPECT_EQ(r.flash.state, FormState::run);
  EXPECT_NEAR(run_of(t, TableKind::inference, "128K").standard.bytes, 32 * kGiB, 0.2 * kGiB);
  // Memory allows for fewer heads than time does; where one head does not fit, flash may have more.
  const Tables more = draw_tables(options({TableKind::inference}, 1e9), limits(8.5 * kGiB));
  EXPECT_EQ(run_of(more, TableKind::inference, "32K").problem.num_heads, 4);
  EXPECT_EQ(run_of(more, TableKind::inference, "64K").problem.num_heads, 1);
  EXPECT_EQ(run_of(more, TableKind::inference, "128K").problem.num_heads, 32);
  EXPECT_EQ(row_of(more, TableKind::inference, "32K").times, 32);
  EXPECT_EQ(row_of(more, TableKind::inference, "2K").times, 4);
}

TEST(Tables, TheBudgetHolds) {
  const TableLimits l = limits(1000 * kGiB);
  // One head: forward 2K 4 ms, .. 64K 4.3 s, 128K 17 s; standard twice, training four times as long.
  for (const double budget : {0.0, 0.01, 1.0, 30.0, 120.0, 3600.0}) {
    const Tables t = draw_tables(options({TableKind::inference, TableKind::training}, budget), l);
    EXPECT_LE(spent(t, l), budget);
    for (const TableRun& r : t.runs) {
      if (r.flash.state == FormState::time) {
        EXPECT_EQ(r.standard.state, FormState::time);
      }
      EXPECT_GE(r.problem.num_heads, 1);
    }
  }
  const Tables none = draw_tables(options({TableKind::inference}, 0), l);
  for (const TableRun& r : none.runs) EXPECT_EQ(r.flash.state, FormState::time);
  // The cheapest come first: up to 64K, whose standard form, and all of 128K, do not.
  const Tables t = draw_tables(options({TableKind::inference}, 22), l);
  EXPECT_EQ(run_of(t, TableKind::inference, "32K").standard.state, FormState::run);
  EXPECT_EQ(run_of(t, TableKind::inference, "128K").flash.state, FormState::time);
  const Tables all = draw_tables(options({TableKind::inference}, 120), l);
  EXPECT_EQ(run_of(all, TableKind::inference, "128K").standard.state, FormState::run);
  EXPECT_EQ(run_of(all, TableKind::inference, "128K").problem.num_heads, 1);
  EXPECT_GT(run_of(all, TableKind::inference, "2K").problem.num_heads, 4);
}

TEST(Tables, LongCallsAreMadeLessOften) {
  TablesOptions o = options({TableKind::inference}, 1e9);
  o.most_heads = 1;
  // One call of the standard form: 8 ms, 34 ms, 134 ms, 0.5 s, 2.1 s, 8.6 s, 34 s.
  const std::pair<const char*, int> cases[] = {{"2K", 11}, {"4K", 7},  {"8K", 7},  {"16K", 3},
                                               {"32K", 3}, {"64K", 3}, {"128K", 1}};
  const Tables rich = draw_tables(o, limits(1000 * kGiB));
  for (const auto& [name, calls] : cases) {
    const TableRun& run = run_of(rich, TableKind::inference, name);
    EXPECT_EQ(run.repeats(), calls) << name;
    EXPECT_EQ(run.calls_before(), calls >= 7 ? 2 : 0) << name;
  }
  // All rows with one call of 32K and more take 75 s; two more calls of 32K 6 s, of 64K 26 s.
  o.budget_seconds = 85;
  const Tables poor = draw_tables(o, limits(1000 * kGiB));
  EXPECT_EQ(run_of(poor, TableKind::inference, "128K").standard.state, FormState::run);
  EXPECT_EQ(run_of(poor, TableKind::inference, "32K").repeats(), 3);
  EXPECT_EQ(run_of(poor, TableKind::inference, "64K").repeats(), 1);
}

TEST(Tables, CheaperRunsKeepTheirSeconds) {
  const TableLimits l = limits(1000 * kGiB);
  const Tables t = draw_tables(options({TableKind::training, TableKind::inference}, 1e4), l);
  const auto cost = [&](size_t run) { return t.runs[run].flash_cost(l) + t.runs[run].standard_cost(l); };
  for (size_t i = 0; i < t.runs.size(); ++i) {
    double cheaper = 0;
    for (size_t j = i + 1; j < t.runs.size(); ++j) cheaper += cost(j) < cost(i) ? cost(j) : 0;
    EXPECT_DOUBLE_EQ(kept_seconds(t, i, l), cheaper);
  }
  EXPECT_GT(kept_seconds(t, 6, l), 0);  // training of 128K, before all of inference
  EXPECT_EQ(kept_seconds(t, t.runs.size() - 1, l), 0);
  TablesOptions o = options({TableKind::training, TableKind::inference}, 0);
  EXPECT_EQ(kept_seconds(draw_tables(o, l), 6, l), 0);  // nothing is to be run
}

TEST(Tables, SlowerThanExpectedIsNotRun) {
  TableRun run =
      run_of(draw_tables(options({TableKind::inference}, 1e6), limits(1000 * kGiB)), TableKind::inference, "2K");
  const TableLimits l = limits(1000 * kGiB);
  const double flash = run.flash_cost(l), both = flash + run.standard_cost(l);
  const auto settled = [&](TableLimits now, double left) {
    TableRun r = run;
    settle(r, now, left);
    return std::pair(r.flash.state, r.standard.state);
  };
  EXPECT_EQ(settled(l, both), std::pair(FormState::run, FormState::run));
  EXPECT_EQ(settled(l, both * 0.99), std::pair(FormState::run, FormState::time));
  EXPECT_EQ(settled(l, flash * 0.99), std::pair(FormState::time, FormState::time));
  EXPECT_EQ(settled(limits(run.standard.bytes - 1), both), std::pair(FormState::run, FormState::memory));
  TableLimits slow = l;
  slow.standard.forward *= 100;
  EXPECT_EQ(settled(slow, both * 1.5), std::pair(FormState::run, FormState::time));
}

// ---- the forms -------------------------------------------------------------------------------------------------------

void copy(const Tensor& from, const Tensor& to) {
  std::memcpy(to.data, from.data, static_cast<size_t>(from.num_elements() * size_bytes(from.dtype)));
}

// By the judges of `opst check`, which share nothing with it.
TEST(StandardAttention, ComputesAttentionAndItsGradients) {
  Context context = make_context(2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const auto& [batch, heads, queries, keys, dim, value_dim] :
         {std::tuple(1, 1, 1, 1, 8, 8), std::tuple(2, 3, 33, 70, 40, 24), std::tuple(1, 2, 65, 17, 128, 128)}) {
      AttentionSetup setup;
      AttentionProblem& p = setup.problem;
      p.query_dtype = p.kv_dtype = dtype;
      setup.kv_format = to_string(dtype);
      p.batch = batch, p.num_heads = p.num_kv_heads = heads;
      p.query_len = queries, p.kv_len = keys, p.head_dim = dim, p.value_head_dim = value_dim;
      const AttentionCase data(setup);
      const AttentionBackwardCase gradients(context, data);
      for (const bool train : {false, true}) {
        Result<StandardAttention> made = StandardAttention::create(context, data, train);
        ASSERT_TRUE(made.ok());
        const StandardAttention& standard = made.value();
        const int64_t matrices = train ? 3 : 1, size = size_bytes(dtype);
        const int64_t outputs = queries * value_dim + (train ? queries * dim + keys * (dim + value_dim) : 0);
        EXPECT_EQ(standard.size_bytes(), batch * heads * size * (matrices * queries * keys + outputs));
        ASSERT_TRUE(standard.forward(context).ok());
        data.run(context, AttentionPath::flash);
        copy(standard.out(), data.outputs().out);
        const AttentionVerdict verdict = judge_attention(context, data, AttentionPath::flash, 1000);
        EXPECT_TRUE(verdict.ok) << to_string(dtype) << " " << queries << ": " << verdict.message;
        if (!train) continue;
        ASSERT_TRUE(standard.backward(context, gradients.grad_out()).ok());
        for (const auto tensor :
             {&AttentionGradients::grad_query, &AttentionGradients::grad_key, &AttentionGradients::grad_value}) {
          copy(standard.gradients().*tensor, gradients.gradients().*tensor);
        }
        for (const GradientVerdict& v : judge_gradients(context, data, gradients)) {
          EXPECT_TRUE(v.ok) << to_string(dtype) << " " << queries << " " << v.name << ": " << v.error << " > "
                            << v.bound;
        }
      }
    }
  }
}

// The matrices are all that grows with queries x keys: no product takes another one as scratch memory.
TEST(StandardAttention, TakesNoMatrixBeyondItsOwn) {
  Context context = make_context(2);
  AttentionSetup setup;
  AttentionProblem& p = setup.problem;
  p.query_dtype = p.kv_dtype = DType::bf16;
  setup.kv_format = "bf16";
  p.batch = p.num_heads = p.num_kv_heads = 1;
  p.query_len = p.kv_len = 6144, p.head_dim = p.value_head_dim = 16;
  const AttentionCase data(setup);
  const AttentionBackwardCase gradients(context, data);
  const Result<StandardAttention> standard = StandardAttention::create(context, data, true);
  ASSERT_TRUE(standard.ok());
  context.trim();
  ASSERT_TRUE(standard.value().forward(context).ok());
  ASSERT_TRUE(standard.value().backward(context, gradients.grad_out()).ok());
  EXPECT_LT(context.workspace_bytes(), p.query_len * p.kv_len * 2 / 2);
}

TEST(TableBench, MeasuresWhatIsToBeRun) {
  Context context = make_context(2);
  TablesOptions o;
  o.max_seq = 300;
  o.head_dim = 32;
  TableLimits l = measure_limits(context, o, kGiB);
  for (const double rate : {l.standard.forward, l.standard.training, l.flash.forward, l.flash.training}) {
    EXPECT_GT(rate, 0);
    EXPECT_LT(rate, 1e-3);
  }
  EXPECT_GT(l.element_seconds, 0);
  o.budget_seconds = 1e6, o.most_heads = 2;
  const Tables t = draw_tables(o, l);
  for (const TableRun& run : t.runs) {
    const TableResult r = measure_run(context, run);
    EXPECT_TRUE(r.verdict.ok) << r.verdict.message;
    EXPECT_GT(r.speedup, 0);
    EXPECT_LE(r.speedup_q1, r.speedup);
    EXPECT_GT(r.standard.q1, 0);
    EXPECT_GE(r.difference, 0);
    EXPECT_LT(r.difference, 0.05);  // bf16
    // What was counted is what was computed, and scratch memory.
    EXPECT_GE(r.standard.bytes, run.standard.bytes);
    EXPECT_GE(r.flash.bytes,
              run.flash.bytes - 8.0 * static_cast<double>(run.problem.num_heads * run.problem.query_len));
    TableRun flash_alone = run;
    flash_alone.standard.state = FormState::memory;
    const TableResult alone = measure_run(context, flash_alone);
    EXPECT_LT(alone.standard.seconds, 0);
    EXPECT_LT(alone.speedup, 0);
    EXPECT_EQ(alone.standard.state, FormState::memory);
    flash_alone.flash.state = FormState::time;
    EXPECT_EQ(measure_run(context, flash_alone).repeats, 0);
  }
}

}  // namespace
}  // namespace opst::tools
