#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "moe/test_moe.h"

namespace opst {
namespace {

using namespace test;

Matrix random_rows(DType dtype, int64_t rows, int64_t features, Random& random) {
  Matrix m(dtype, rows, features, random_layout(random));
  fill(m.tensor, Fill::normal, random);
  return m;
}

// Rows of random slots, some with none; no row twice.
Matrix random_row_of_slot(int64_t tokens, int64_t top_k, int64_t rows, Random& random) {
  Indices free;
  for (int64_t r = 0; r < rows; ++r) free.push_back(r);
  Matrix m(random_integer_type(random), tokens, top_k, random_layout(random));
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    int64_t row = -1;
    if (!free.empty() && !random.chance(0.1)) {
      const auto at = free.begin() + random.integer(0, static_cast<int64_t>(free.size()) - 1);
      row = *at;
      free.erase(at);
    }
    set(m.tensor, i, static_cast<double>(row));
  }
  return m;
}

constexpr int64_t kFeatures[] = {0, 1, 3, 4, 15, 16, 17, 33, 64, 127, 128, 129, 257, 300};

TEST(Permute, CopiesTheRowsOfSlots) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t features : kFeatures) {
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::i8, DType::f64, DType::f8_e4m3, DType::i64});
      const int64_t tokens = random.integer(1, 9), top_k = random.integer(1, 3), rows = random.integer(0, 30);
      const Matrix from = random_rows(dtype, tokens, features, random);
      Matrix slots(random_integer_type(random), 1, rows, RowLayout::contiguous);
      for (int64_t r = 0; r < rows; ++r)
        set(slots.tensor, r, static_cast<double>(random.integer(-1, tokens * top_k - 1)));
      Matrix to(dtype, rows, features, random_layout(random));
      ASSERT_TRUE(moe_permute(t.context, from.tensor, vector_of(slots), top_k, to.tensor).ok()) << t.name;
      for (int64_t r = 0; r < rows; ++r) {
        const auto slot = static_cast<int64_t>(get(slots.tensor, r));
        const Doubles expected =
            slot < 0 ? Doubles(static_cast<size_t>(features), 0.0) : row_of(from.tensor, slot / top_k);
        ASSERT_EQ(row_of(to.tensor, r), expected) << t.name << ", row " << r;
      }
      EXPECT_TRUE(to.intact());
    }
  }
}

TEST(Permute, RefusesWithAMessage) {
  Context& context = contexts_with_threads(2).back().context;
  const Matrix from = matrix(DType::f32, 2, 3, {1});
  Matrix to(DType::f32, 2, 3, RowLayout::contiguous);
  const auto refused = [&](const Indices& ids, int64_t top_k, const std::string& message) {
    const Matrix slots = matrix(DType::i32, 1, 2, {ids.begin(), ids.end()});
    expect_refused(moe_permute(context, from.tensor, vector_of(slots), top_k, to.tensor), "moe_permute: " + message);
    EXPECT_TRUE(untouched(to));
  };
  refused({0, 4}, 2, "slot_of_row[1] is 4, but there are 4 slots (-1 is none)");
  refused({-2, 0}, 2, "slot_of_row[0] is -2, but there are 4 slots (-1 is none)");
  refused({0, 0}, 0, "top_k is 0, but must be at least 1");
}

// A finalize call whose optional tensors may be absent.
struct Finalize {
  Matrix expanded, rows;
  std::optional<Matrix> weights, skip1, skip2, bias, ids;
  Matrix out;

  Finalize(Matrix expanded_rows, Matrix row_of_slot, RowLayout layout = RowLayout::contiguous)
      : expanded(std::move(expanded_rows)),
        rows(std::move(row_of_slot)),
        out(expanded.tensor.dtype, rows.tensor.shape[0], expanded.tensor.shape[1], layout) {}
  MoeFinalizeInputs inputs() const {
    const auto view = [](const std::optional<Matrix>& m) { return m ? m->tensor : Tensor{}; };
    return {expanded.tensor, rows.tensor, view(weights), view(skip1), view(skip2), view(bias), view(ids)};
  }
  Status run(Context& context) const { return moe_finalize(context, inputs(), out.tensor); }
  double weight(int64_t slot) const { return weights ? get(weights->tensor, slot) : 1; }
  // Row of the slot plus bias, as far as there are such.
  Doubles term(int64_t slot) const {
    Doubles sum(static_cast<size_t>(expanded.tensor.shape[1]), 0.0);
    const auto add = [&](const Matrix& from, double row) {
      if (row < 0) return;
      const Doubles x = row_of(from.tensor, static_cast<int64_t>(row));
      for (size_t f = 0; f < sum.size(); ++f) sum[f] += x[f];
    };
    add(expanded, get(rows.tensor, slot));
    if (bias) add(*bias, get(ids->tensor, slot));
    return sum;
  }
  bool goes_nowhere(int64_t slot) const { return get(rows.tensor, slot) < 0 && (!bias || get(ids->tensor, slot) < 0); }
  Doubles expected(int64_t t) const {
    const int64_t top_k = rows.tensor.shape[1];
    Doubles sum(static_cast<size_t>(expanded.tensor.shape[1]), 0.0);
    for (const auto* skip : {&skip1, &skip2}) {
      if (!*skip) continue;
      const Doubles x = row_of((*skip)->tensor, t);
      for (size_t f = 0; f < sum.size(); ++f) sum[f] += x[f];
    }
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      if (goes_nowhere(slot)) continue;
      const Doubles x = term(slot);
      for (size_t f = 0; f < sum.size(); ++f) sum[f] += weight(slot) * x[f];
    }
    return sum;
  }
};

Finalize random_finalize(DType dtype, int64_t features, Random& random) {
  const int64_t tokens = random.integer(1, 12), top_k = random.integer(1, 9), experts = random.integer(1, 5);
  const int64_t rows = random.integer(1, tokens * top_k + 3);
  Finalize f(random_rows(dtype, rows, features, random), random_row_of_slot(tokens, top_k, rows, random),
             random_layout(random));
  if (random.chance(0.7)) f.weights.emplace(random_rows(weight_type(dtype, random), tokens, top_k, random));
  if (random.chance(0.5)) f.skip1.emplace(random_rows(dtype, tokens, features, random));
  if (random.chance(0.5)) f.skip2.emplace(random_rows(dtype, tokens, features, random));
  if (random.chance(0.5)) {
    f.bias.emplace(random_rows(dtype, experts, features, random));
    f.ids.emplace(random_integer_type(random), tokens, top_k, random_layout(random));
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      set(f.ids->tensor, i, static_cast<double>(random.integer(random.chance(0.1) ? -1 : 0, experts - 1)));
    }
  }
  return f;
}

TEST(Finalize, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t features : kFeatures) {
      const DType dtype = random_float_type(random);
      const Finalize f = random_finalize(dtype, features, random);
      const std::string about = t.name + ", " + to_string(dtype) + ", " + std::to_string(features) + " features";
      const Status status = f.run(t.context);
      ASSERT_TRUE(status.ok()) << about << status.message();
      std::vector<Doubles> expected;
      for (int64_t token = 0; token < f.out.tensor.shape[0]; ++token) expected.push_back(f.expected(token));
      expect_close(f.out.tensor, test::Expected(expected, features), about, 1e-5);
      EXPECT_TRUE(f.out.intact());
      if (HasFatalFailure()) return;
    }
  }
}

// Worked by hand; the order of k is the order of the sum: 2^24 + 1 - 2^24 loses the one, 2^24 - 2^24 + 1 keeps it.
TEST(Finalize, AddsInTheOrderOfSlots) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Finalize f(matrix(DType::f32, 3, 1, {0x1p24, 1, -0x1p24}), matrix(DType::i32, 2, 3, {0, 1, 2, 0, 2, 1}));
    ASSERT_TRUE(f.run(t.context).ok());
    EXPECT_EQ(to_doubles(f.out.tensor), (Doubles{0, 1}));
  }
}

// A dropped slot adds its bias, and reads no row: NaN elsewhere does not show.
TEST(Finalize, ASlotWithoutARowIsZeros) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Finalize f(matrix(DType::f32, 2, 2, {kNan, kNan, 3, 4}), matrix(DType::i32, 2, 2, {-1, 1, -1, -1}));
    f.weights.emplace(matrix(DType::f32, 2, 2, {2, 1, 2, kNan}));
    f.skip1.emplace(matrix(DType::f32, 2, 2, {100, 100, 100, 100}));
    ASSERT_TRUE(f.run(t.context).ok());
    EXPECT_EQ(to_doubles(f.out.tensor), (Doubles{103, 104, 100, 100}));
    f.bias.emplace(matrix(DType::f32, 2, 2, {10, 20, 1, 2}));
    f.ids.emplace(matrix(DType::i64, 2, 2, {0, 1, 1, -1}));
    ASSERT_TRUE(f.run(t.context).ok());
    EXPECT_EQ(to_doubles(f.out.tensor), (Doubles{124, 146, 102, 104}));
  }
}

// route, permute, finalize with weights that add up to 1: every token comes back, dropless; those that were dropped
// come back as far as their weights went somewhere.
TEST(Finalize, UndoesPermute) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    const int64_t tokens = 50, experts = 7, top_k = 4, features = 33;
    Matrix ids(DType::i32, tokens, top_k, RowLayout::contiguous),
        rows(DType::i32, tokens, top_k, RowLayout::contiguous);
    for (int64_t i = 0; i < tokens * top_k; ++i)
      set(ids.tensor, i, static_cast<double>(random.integer(0, experts - 1)));
    const Matrix x = random_rows(DType::f32, tokens, features, random);
    for (const int64_t capacity : {kDropless, int64_t{10}}) {
      Matrix slots(DType::i32, 1, capacity < 0 ? tokens * top_k : experts * capacity, RowLayout::contiguous);
      ASSERT_TRUE(moe_routing(t.context, ids.tensor, experts,
                              {.row_of_slot = rows.tensor, .slot_of_row = vector_of(slots)}, {.capacity = capacity})
                      .ok());
      Matrix expanded(DType::f32, slots.tensor.shape[1], features, RowLayout::contiguous);
      ASSERT_TRUE(moe_permute(t.context, x.tensor, vector_of(slots), top_k, expanded.tensor).ok());
      const Matrix quarter = matrix(DType::f32, tokens, top_k, {0.25});
      Matrix back(DType::f32, tokens, features, RowLayout::contiguous);
      ASSERT_TRUE(
          moe_finalize(t.context,
                       {.expanded = expanded.tensor, .row_of_slot = rows.tensor, .topk_weights = quarter.tensor},
                       back.tensor)
              .ok());
      for (int64_t token = 0; token < tokens; ++token) {
        double kept = 0;
        for (int64_t k = 0; k < top_k; ++k) kept += get(rows.tensor, token * top_k + k) >= 0 ? 0.25 : 0;
        Doubles expected = row_of(x.tensor, token);
        for (double& v : expected) v *= kept;
        ASSERT_TRUE(capacity > 0 || kept == 1);
        expect_near(row_of(back.tensor, token), expected, 1e-6);
      }
    }
  }
}

TEST(Finalize, SameBitsForAnyNumberOfThreads) {
  Random random(seed());
  const Finalize f = random_finalize(DType::f32, 300, random);
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(f.run(t.context).ok());
    const Doubles expected = to_doubles(f.out.tensor);
    for (const TestContext& other : contexts()) {
      if (other.context.machine().isa != t.context.machine().isa) continue;
      ASSERT_TRUE(f.run(other.context).ok());
      EXPECT_EQ(to_doubles(f.out.tensor), expected) << other.name;
    }
  }
}

TEST(Finalize, RefusesWithAMessage) {
  Context& context = contexts_with_threads(2).back().context;
  Finalize f(matrix(DType::f32, 3, 2, {1}), matrix(DType::i32, 2, 2, {0, 1, 2, 3}));
  const auto refused = [&](const std::string& message) {
    expect_refused(f.run(context), "moe_finalize: " + message);
    EXPECT_TRUE(untouched(f.out));
  };
  refused("row_of_slot[1, 1] is 3, but there are 3 rows (-1 is none)");
  set(f.rows.tensor, 3, -2);
  refused("row_of_slot[1, 1] is -2, but there are 3 rows (-1 is none)");
  set(f.rows.tensor, 3, 0);
  f.bias.emplace(matrix(DType::f32, 2, 2, {1}));
  refused("bias is given, but topk_ids are not");
  f.ids.emplace(matrix(DType::i32, 2, 2, {0, 1, 2, 0}));
  refused("topk_ids[1, 0] is 2, but there are 2 experts (-1 is none)");
  f.bias.reset();
  refused("bias is not given, but topk_ids are");
  f.ids.reset();
  f.weights.emplace(matrix(DType::f32, 2, 3, {1}));
  refused("topk_weights dim 1 (top_k) is 3, but row_of_slot set top_k = 2");
  f.weights.reset();
  f.skip2.emplace(matrix(DType::bf16, 2, 2, {1}));
  EXPECT_EQ(f.run(context).code(), StatusCode::invalid_argument);
}

TEST(FinalizeBackward, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t features : kFeatures) {
      const DType dtype = random_float_type(random);
      const Finalize f = random_finalize(dtype, features, random);
      const int64_t tokens = f.rows.tensor.shape[0], top_k = f.rows.tensor.shape[1], rows = f.expanded.tensor.shape[0];
      const int64_t experts = f.bias ? f.bias->tensor.shape[0] : 0;
      const Matrix grad_out = random_rows(dtype, tokens, features, random);
      Matrix grad_rows(dtype, rows, features, random_layout(random)),
          grad_bias(dtype, experts, features, random_layout(random)),
          grad_weights(weight_type(dtype, random), tokens, top_k, random_layout(random));
      std::vector<Doubles> by_row(static_cast<size_t>(rows), Doubles(static_cast<size_t>(features), 0.0)),
          by_expert(static_cast<size_t>(experts), Doubles(static_cast<size_t>(features), 0.0)), by_slot;
      for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
        const Doubles g = row_of(grad_out.tensor, slot / top_k), x = f.term(slot);
        double dot = 0;
        const auto row = static_cast<int64_t>(get(f.rows.tensor, slot));
        const auto expert = f.bias ? static_cast<int64_t>(get(f.ids->tensor, slot)) : -1;
        for (size_t i = 0; i < g.size(); ++i) {
          dot += g[i] * x[i];
          if (row >= 0) by_row[static_cast<size_t>(row)][i] = f.weight(slot) * g[i];
          if (expert >= 0) by_expert[static_cast<size_t>(expert)][i] += f.weight(slot) * g[i];
        }
        if (slot % top_k == 0) by_slot.push_back({});
        by_slot.back().push_back(dot);
      }
      const std::string about = t.name + ", " + to_string(dtype) + ", " + std::to_string(features) + " features";
      const bool of_rows = random.chance(0.8), of_weights = random.chance(0.8), of_bias = f.bias && random.chance(0.8);
      const Status status =
          moe_finalize_backward(t.context, grad_out.tensor, f.inputs(),
                                {of_rows ? grad_rows.tensor : Tensor{}, of_weights ? grad_weights.tensor : Tensor{},
                                 of_bias ? grad_bias.tensor : Tensor{}});
      ASSERT_TRUE(status.ok()) << about << status.message();
      // Sums in f32: of 300 products of features, of 100 slots of an expert that reach 50.
      if (of_rows) expect_close(grad_rows.tensor, test::Expected(by_row, features), about + ", expanded", 1e-6);
      if (of_weights) expect_close(grad_weights.tensor, test::Expected(by_slot, top_k), about + ", weights", 1e-4);
      if (of_bias) expect_close(grad_bias.tensor, test::Expected(by_expert, features), about + ", bias", 4e-4);
      EXPECT_TRUE(grad_rows.intact() && grad_weights.intact() && grad_bias.intact());
      EXPECT_TRUE(of_rows || untouched(grad_rows));
      if (HasFatalFailure()) return;
    }
  }
}

// The gradient of permute is finalize without weights.
TEST(FinalizeBackward, PermuteAndFinalizeAreEachOthersGradient) {
  Random random(seed());
  Context& context = contexts_with_threads(3).back().context;
  const int64_t tokens = 9, top_k = 3, rows = 20, features = 5;
  const Matrix row_of_slot = random_row_of_slot(tokens, top_k, rows, random);
  Matrix slots = matrix(DType::i32, 1, rows, {-1});
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    const auto row = static_cast<int64_t>(get(row_of_slot.tensor, i));
    if (row >= 0) set(slots.tensor, row, static_cast<double>(i));
  }
  const Matrix x = random_rows(DType::f32, tokens, features, random),
               g = random_rows(DType::f32, rows, features, random);
  Matrix y(DType::f32, rows, features, RowLayout::contiguous),
      grad(DType::f32, tokens, features, RowLayout::contiguous);
  ASSERT_TRUE(moe_permute(context, x.tensor, vector_of(slots), top_k, y.tensor).ok());
  ASSERT_TRUE(moe_finalize(context, {.expanded = g.tensor, .row_of_slot = row_of_slot.tensor}, grad.tensor).ok());
  double forward = 0, backward = 0;
  for (int64_t i = 0; i < rows * features; ++i) forward += get(y.tensor, i) * get(g.tensor, i);
  for (int64_t i = 0; i < tokens * features; ++i) backward += get(grad.tensor, i) * get(x.tensor, i);
  EXPECT_NEAR(forward, backward, 1e-4);
}

TEST(FinalizeBackward, RefusesWithAMessage) {
  Context& context = contexts_with_threads(2).back().context;
  const Finalize f(matrix(DType::f32, 4, 2, {1}), matrix(DType::i32, 2, 2, {0, 1, 2, 1}));
  const Matrix grad_out = matrix(DType::f32, 2, 2, {1});
  Matrix grad(DType::f32, 4, 2, RowLayout::contiguous);
  expect_refused(
      moe_finalize_backward(context, grad_out.tensor, f.inputs(), {.expanded = grad.tensor}),
      "moe_finalize_backward: row_of_slot[1, 1] is 1, which another slot has, too: their gradients cannot share a "
      "row");
  EXPECT_TRUE(untouched(grad));
  MoeFinalizeInputs repeated = f.inputs();
  repeated.row_of_slot.strides[0] = 0;
  expect_refused(
      moe_finalize_backward(context, grad_out.tensor, repeated, {.expanded = grad.tensor}),
      "moe_finalize_backward: row_of_slot has strides that repeat slots, but their gradients cannot share a row");
  expect_refused(moe_finalize_backward(context, grad_out.tensor, f.inputs(), {.bias = grad.tensor}),
                 "moe_finalize_backward: grad.bias is asked for, but there is no bias");
  set(f.rows.tensor, 3, 4);
  expect_refused(moe_finalize_backward(context, grad_out.tensor, f.inputs(), {.expanded = grad.tensor}),
                 "moe_finalize_backward: row_of_slot[1, 1] is 4, but there are 4 rows (-1 is none)");
}

}  // namespace
}  // namespace opst
