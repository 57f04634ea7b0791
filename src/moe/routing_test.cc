#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "moe/test_moe.h"

namespace opst {
namespace {

using namespace test;

// [1, n] integers.
Matrix integers(DType dtype, const Indices& values) {
  return matrix(dtype, 1, static_cast<int64_t>(values.size()), {values.begin(), values.end()});
}

struct Routing {
  Matrix ids, rows, slots, counts;
  int64_t num_experts;
  MoeRoutingOptions options;

  Routing(Matrix topk_ids, int64_t experts, const MoeRoutingOptions& o, std::optional<int64_t> num_rows = {},
          DType type = DType::i32, DType counts_type = DType::i64, RowLayout layout = RowLayout::contiguous)
      : ids(std::move(topk_ids)),
        rows(type, ids.tensor.shape[0], ids.tensor.shape[1], layout),
        slots(type, 1, num_rows.value_or(o.capacity > 0 ? range(o, experts) * o.capacity : ids.tensor.num_elements()),
              RowLayout::contiguous),
        counts(counts_type, 1, range(o, experts), RowLayout::contiguous),
        num_experts(experts),
        options(o) {
    // What nobody writes shows: the memory's own filling would be -1.
    for (const Matrix* m : {&rows, &slots, &counts}) {
      for (int64_t i = 0; i < m->tensor.num_elements(); ++i) set(m->tensor, i, kBefore);
    }
  }
  static constexpr double kBefore = 77;
  static int64_t range(const MoeRoutingOptions& o, int64_t experts) {
    return std::max<int64_t>(0, (o.expert_end < 0 ? experts : o.expert_end) - o.expert_begin);
  }
  Status run(Context& context) const {
    return moe_routing(
        context, ids.tensor, num_experts,
        {.row_of_slot = rows.tensor, .slot_of_row = vector_of(slots), .expert_tokens = vector_of(counts)}, options);
  }
  Indices row_of_slot() const { return integers_of(rows.tensor); }
  Indices slot_of_row() const { return integers_of(slots.tensor); }
  Indices expert_tokens() const { return integers_of(counts.tensor); }
  bool all_untouched() const {
    for (const Matrix* m : {&rows, &slots, &counts}) {
      const Doubles values = to_doubles(m->tensor);
      if (std::any_of(values.begin(), values.end(), [](double v) { return v != kBefore; })) return false;
    }
    return true;
  }
};

// The rule, slot by slot for each expert.
struct Expected {
  Indices rows, slots, counts;
  explicit Expected(const Routing& r) {
    const Indices ids = integers_of(r.ids.tensor);
    const bool dropless = r.options.capacity < 0;
    rows.assign(ids.size(), -1);
    slots.assign(static_cast<size_t>(r.slots.tensor.shape[1]), -1);
    int64_t next = 0, total = 0;
    const int64_t begin = r.options.expert_begin, end = begin + Routing::range(r.options, r.num_experts);
    for (int64_t e = begin; e < end; ++e) {
      int64_t count = 0;
      if (!dropless) next = (e - begin) * r.options.capacity;
      for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] != e) continue;
        ++count;
        const bool fits = dropless ? next < static_cast<int64_t>(slots.size()) : count <= r.options.capacity;
        if (!fits) continue;
        rows[i] = next;
        slots[static_cast<size_t>(next++)] = static_cast<int64_t>(i);
      }
      total += count;
      counts.push_back(r.options.cumulative_ends ? total : count);
    }
  }
};

void expect_rule(const Routing& r, const std::string& about) {
  const Expected expected(r);
  ASSERT_EQ(r.row_of_slot(), expected.rows) << about;
  ASSERT_EQ(r.slot_of_row(), expected.slots) << about;
  ASSERT_EQ(r.expert_tokens(), expected.counts) << about;
  ASSERT_TRUE(r.rows.intact() && r.slots.intact() && r.counts.intact()) << about;
}

// Two tokens [1, 0] and [0, 1].
TEST(Routing, WorkedValues) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Routing r(matrix(DType::i32, 2, 2, {1, 0, 0, 1}), 2, {});
    ASSERT_TRUE(r.run(t.context).ok());
    EXPECT_EQ(r.row_of_slot(), (Indices{2, 0, 1, 3}));
    EXPECT_EQ(r.slot_of_row(), (Indices{1, 2, 0, 3}));
    EXPECT_EQ(r.expert_tokens(), (Indices{2, 2}));
    r.options.cumulative_ends = true;
    ASSERT_TRUE(r.run(t.context).ok());
    EXPECT_EQ(r.expert_tokens(), (Indices{2, 4}));
    // Slots in the order k * tokens + t: a transposed view.
    Routing columns(matrix(DType::i32, 2, 2, {1, 0, 0, 1}), 2, {}, {}, DType::i32, DType::i64, RowLayout::transposed);
    ASSERT_TRUE(columns.run(t.context).ok());
    EXPECT_EQ(integers_of(columns.rows.memory.tensor(DType::i32, {4})), (Indices{2, 1, 0, 3}));
  }
}

TEST(Routing, SlotsThatGoNowhere) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Routing r(matrix(DType::i32, 3, 2, {3, -1, 0, 3, -1, -1}), 4, {});
    ASSERT_TRUE(r.run(t.context).ok());
    EXPECT_EQ(r.row_of_slot(), (Indices{1, -1, 0, 2, -1, -1}));
    EXPECT_EQ(r.slot_of_row(), (Indices{2, 0, 3, -1, -1, -1}));
    EXPECT_EQ(r.expert_tokens(), (Indices{1, 0, 0, 2}));
  }
}

// Later tokens are dropped, missing rows belong to nobody, counts are those before.
TEST(Routing, Capacity) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Routing r(matrix(DType::i64, 4, 1, {1, 1, 0, 1}), 3, {.capacity = 2});
    ASSERT_TRUE(r.run(t.context).ok());
    EXPECT_EQ(r.row_of_slot(), (Indices{2, 3, 0, -1}));
    EXPECT_EQ(r.slot_of_row(), (Indices{2, -1, 0, 1, -1, -1}));
    EXPECT_EQ(r.expert_tokens(), (Indices{1, 3, 0}));
  }
}

TEST(Routing, FollowsTheRuleInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t tokens : {0, 1, 2, 63, 1000, 9000}) {
      const int64_t experts = random.pick<int64_t>({1, 2, 7, 128, 300}), top_k = random.pick<int64_t>({1, 2, 3, 8});
      Matrix ids(random_integer_type(random), tokens, top_k, random_layout(random));
      const bool one = random.chance(0.2);  // all tokens at one expert
      for (int64_t i = 0; i < tokens * top_k; ++i) {
        set(ids.tensor, i,
            static_cast<double>(one ? experts - 1 : random.integer(random.chance(0.1) ? -1 : 0, experts - 1)));
      }
      MoeRoutingOptions o = {.cumulative_ends = random.chance(0.5)};
      if (random.chance(0.4)) o.capacity = random.integer(1, 2 * tokens * top_k / experts + 2);
      if (random.chance(0.4)) {
        o.expert_begin = random.integer(0, experts);
        o.expert_end = random.integer(o.expert_begin, experts);
      }
      std::optional<int64_t> rows;
      if (o.capacity < 0 && random.chance(0.4)) rows = random.integer(0, tokens * top_k + 5);
      const DType type = random_integer_type(random);
      const std::string about = t.name + ", " + std::to_string(tokens) + " tokens, top " + std::to_string(top_k) +
                                " of " + std::to_string(experts) + ", capacity " + std::to_string(o.capacity);
      const Routing r(std::move(ids), experts, o, rows, type, random_integer_type(random), random_layout(random));
      const Status status = r.run(t.context);
      ASSERT_TRUE(status.ok()) << about << status.message();
      expect_rule(r, about);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Routing, RefusesIdsInAnyTask) {
  for (const TestContext& t : contexts_with_threads(3)) {
    SCOPED_TRACE(t.name);
    const auto refused = [&](int64_t tokens, int64_t at, int64_t id) {
      Routing r(matrix(DType::i32, tokens, 2, {0}), 4, {});
      set(r.ids.tensor, at, static_cast<double>(id));
      expect_refused(r.run(t.context), "moe_routing: topk_ids[" + std::to_string(at / 2) + ", " +
                                           std::to_string(at % 2) + "] is " + std::to_string(id) +
                                           ", but there are 4 experts (-1 is none)");
      EXPECT_TRUE(r.all_untouched());
    };
    refused(1, 0, 4);
    refused(1, 1, -2);
    refused(1, 0, int64_t{1} << 30);
    refused(20000, 39999, 4);
    refused(20000, 20000, -7);
  }
}

TEST(Routing, RefusesWithAMessage) {
  Context& context = contexts_with_threads(2).back().context;
  const auto refused = [&](const MoeRoutingOptions& o, std::optional<int64_t> rows, const std::string& message) {
    const Routing r(matrix(DType::i32, 3, 2, {0}), 4, o, rows);
    expect_refused(r.run(context), "moe_routing: " + message);
    EXPECT_TRUE(r.all_untouched());
  };
  refused({.capacity = 0}, {}, "capacity is 0, but must be at least 1, or kDropless (-1)");
  refused({.capacity = -2}, {}, "capacity is -2, but must be at least 1, or kDropless (-1)");
  refused({.capacity = 3}, 11, "slot_of_row dim 0 (rows) is 11, but 4 experts of capacity 3 have 12");
  refused({.expert_begin = 2, .expert_end = 1}, {}, "the range of experts is [2, 1), but must lie in [0, 4)");
  refused({.expert_begin = 0, .expert_end = 5}, {}, "the range of experts is [0, 5), but must lie in [0, 4)");
  refused({.expert_begin = -1}, 6, "the range of experts is [-1, 4), but must lie in [0, 4)");
  const Matrix ids = matrix(DType::i32, 3, 2, {0});
  Matrix rows(DType::i32, 3, 2, RowLayout::contiguous), counts(DType::i64, 1, 3, RowLayout::contiguous);
  expect_refused(moe_routing(context, ids.tensor, 4, {.row_of_slot = rows.tensor, .expert_tokens = vector_of(counts)}),
                 "moe_routing: expert_tokens dim 0 is 3, but the range has 4 experts");
  expect_refused(moe_routing(context, ids.tensor, -1, {.row_of_slot = rows.tensor}),
                 "moe_routing: num_experts is -1, but must be from 0 to 2^56");
  expect_refused(moe_routing(context, ids.tensor, 4, {.row_of_slot = rows.tensor}, {.capacity = int64_t{1} << 30}),
                 "moe_routing: row_of_slot is i32, which holds 2147483647, but may have to hold 4294967296");
  Matrix wide(DType::i64, 3, 2, RowLayout::contiguous);
  expect_refused(moe_routing(context, ids.tensor, 4, {.row_of_slot = wide.tensor}, {.capacity = int64_t{1} << 60}),
                 "moe_routing: capacity is 1152921504606846976, of 4 experts more than 2^56 rows");
  EXPECT_EQ(moe_routing(context, ids.tensor, int64_t{1} << 50, {.row_of_slot = rows.tensor}).code(),
            StatusCode::out_of_memory);
}

TEST(Routing, PlansArePure) {
  for (int64_t tokens : {0, 1, 1000, 65536, 1 << 24}) {
    for (int64_t experts : {0, 1, 128, 1 << 20}) {
      const MoeRoutingPlan plan = plan_moe_routing(tokens, 8, experts);
      EXPECT_LE(plan.num_tasks, 64);
      EXPECT_GE(plan.num_tasks * plan.tokens_per_task, tokens);
      EXPECT_EQ(plan.num_tasks == 0, tokens == 0);
    }
  }
  EXPECT_EQ(to_string(plan_moe_routing(65536, 8, 128)).substr(0, 33), "64 tasks of 1024 tokens, scratch ");
  EXPECT_EQ(plan_moe_routing(1, 1, int64_t{1} << 60).scratch_bytes, int64_t{1} << 56);
  EXPECT_EQ(plan_moe_routing(-1, 1, 1).num_tasks, 0);
}

TEST(ComputeExpertTokens, CountsUpToEachExpert) {
  Random random(seed());
  Context& context = contexts_with_threads(2).back().context;
  for (int64_t n : {0, 1, 5, 1000}) {
    for (int64_t experts : {1, 3, 64}) {
      Indices ids, expected;
      for (int64_t i = 0; i < n; ++i) ids.push_back(random.integer(0, experts - 1));
      std::sort(ids.begin(), ids.end());
      for (int64_t e = 0; e < experts; ++e) {
        expected.push_back(std::count_if(ids.begin(), ids.end(), [&](int64_t id) { return id <= e; }));
      }
      const Matrix sorted = integers(random_integer_type(random), ids);
      Matrix tokens(random_integer_type(random), 1, experts, RowLayout::contiguous);
      ASSERT_TRUE(moe_compute_expert_tokens(context, vector_of(sorted), vector_of(tokens)).ok());
      EXPECT_EQ(integers_of(tokens.tensor), expected);
    }
  }
  Matrix tokens(DType::i32, 1, 4, RowLayout::contiguous);
  const auto refused = [&](const Indices& ids, const std::string& message) {
    const Matrix sorted = integers(DType::i32, ids);
    expect_refused(moe_compute_expert_tokens(context, vector_of(sorted), vector_of(tokens)),
                   "moe_compute_expert_tokens: " + message);
    EXPECT_TRUE(untouched(tokens));
  };
  refused({0, 2, 1}, "sorted_ids[2] is 1, but must be at least sorted_ids[1] = 2");
  refused({0, 4}, "sorted_ids[1] is 4, but there are 4 experts");
  refused({-1, 0}, "sorted_ids[0] is -1, but there are 4 experts");
}

}  // namespace
}  // namespace opst
