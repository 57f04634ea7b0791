#include "extending/normed_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "extending/reference.h"
#include "opst/graph.h"
#include "opst/rowwise.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst {
namespace {

using extending::normed_matmul;
using namespace test;

// Every context, the ends of every tile and panel, any strides, forbidden pages on both sides.
TEST(NormedMatmul, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int round = 0; round < 12; ++round) {
      const int64_t m = random.pick<int64_t>({1, 4, 12, 13, 31, 47, 48, 49}), n = random.integer(1, 300),
                    k = random.pick<int64_t>({1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 131});
      const bool transposed = random.chance(0.4);
      const std::string about = t.name + ", m " + std::to_string(m) + ", n " + std::to_string(n) + ", k " +
                                std::to_string(k) + (transposed ? ", transposed" : "");
      SCOPED_TRACE(about);
      const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
      GuardedBuffer x_memory(m * k * 4, guard), gain_memory(k * 4, guard), weight_memory(n * k * 4, guard),
          out_memory(m * n * 4, guard);
      const auto matrix = [&](const GuardedBuffer& memory, int64_t rows) {
        return transposed ? memory.tensor(DType::f32, {k, rows}).transposed(0, 1)
                          : memory.tensor(DType::f32, {rows, k});
      };
      const Tensor x = matrix(x_memory, m), weight = matrix(weight_memory, n),
                   gain = gain_memory.tensor(DType::f32, {k}), out = out_memory.tensor(DType::f32, {m, n});
      for (const Tensor& tensor : {x, weight, gain}) fill(tensor, Fill::normal, random);
      const std::vector<double> expected =
          reference::normed_matmul(to_doubles(x), to_doubles(gain), to_doubles(weight), m, n, k, 1e-3);
      const Status status = normed_matmul(t.context, x, gain, weight, out, 1e-3);
      ASSERT_TRUE(status.ok()) << status.message();
      // A sum of k products of numbers about 1.
      const Comparison c = compare(out, ConstTensor::contiguous(DType::f64, {m, n}, expected.data()), ConstTensor(),
                                   {.about = about, .extra = 4e-6 * std::sqrt(static_cast<double>(k))});
      ASSERT_TRUE(c.ok) << c.message;
      EXPECT_TRUE(out_memory.slack_intact());
    }
  }
}

struct Problem {
  static constexpr int64_t kRows = 50, kColumns = 700, kDepth = 96;
  std::vector<float> x, gain, weight, out;

  explicit Problem(Random& random) : x(kRows * kDepth), gain(kDepth), weight(kColumns * kDepth), out(kRows * kColumns) {
    for (std::vector<float>* v : {&x, &gain, &weight}) {
      fill(Tensor::contiguous(DType::f32, {static_cast<int64_t>(v->size())}, v->data()), Fill::normal, random);
    }
  }
  ConstTensor x_rows(int64_t begin, int64_t count) const {
    return ConstTensor::contiguous(DType::f32, {count, kDepth}, x.data() + begin * kDepth);
  }
  ConstTensor gains() const { return ConstTensor::contiguous(DType::f32, {kDepth}, gain.data()); }
  ConstTensor weights() const { return ConstTensor::contiguous(DType::f32, {kColumns, kDepth}, weight.data()); }
  Tensor result(int64_t rows) { return Tensor::contiguous(DType::f32, {rows, kColumns}, out.data()); }
};

TEST(NormedMatmul, RowsAreIndependentAndThreadsDoNotMatter) {
  Random random(seed());
  Problem p(random);
  p.x[7 * Problem::kDepth + 5] = NAN;
  for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
    std::vector<float> first;
    for (int num_threads : {1, 2, 3, 5}) {
      const TestContext& t = contexts_with_threads(num_threads)[level];
      SCOPED_TRACE(t.name);
      ASSERT_TRUE(normed_matmul(t.context, p.x_rows(0, 50), p.gains(), p.weights(), p.result(50)).ok());
      if (first.empty()) first = p.out;
      EXPECT_TRUE(compare_bits(p.result(50), Tensor::contiguous(DType::f32, {50, 700}, first.data())).ok);
    }
    for (int64_t row = 0; row < 50; ++row) EXPECT_EQ(std::isnan(first[static_cast<size_t>(row * 700)]), row == 7);
    ASSERT_TRUE(
        normed_matmul(contexts_with_threads(1)[level].context, p.x_rows(49, 1), p.gains(), p.weights(), p.result(1))
            .ok());
    EXPECT_TRUE(compare_bits(p.result(1), Tensor::contiguous(DType::f32, {1, 700}, first.data() + 49 * 700)).ok);
  }
}

TEST(NormedMatmul, AsANodeOfAGraph) {
  Random random(seed());
  Problem p(random);
  Context& context = contexts_with_threads(2).back().context;
  ASSERT_TRUE(normed_matmul(context, p.x_rows(0, 20), p.gains(), p.weights(), p.result(20)).ok());
  const std::vector<float> expected = p.out;

  Graph graph = std::move(Graph::create("example").value());
  const Dim rows = graph.dim("rows", Problem::kRows);
  const std::vector<Value> results =
      graph.node({.name = "product",
                  .op = "normed_matmul",
                  .inputs = {graph.input("x", DType::f32, {rows, Problem::kDepth}),
                             graph.input("gain", DType::f32, {Problem::kDepth}),
                             graph.input("weight", DType::f32, {Problem::kColumns, Problem::kDepth})},
                  .outputs = {{"product", DType::f32, {rows, Problem::kColumns}}},
                  .run = [](Context& c, const NodeTensors& t) {
                    return normed_matmul(c, t.input(0), t.input(1), t.input(2), t.output(0));
                  }});
  graph.output("y", results[0]);
  std::fill(p.out.begin(), p.out.end(), 0.0f);
  ASSERT_TRUE(graph.bind("x", p.x_rows(0, 50)).ok());
  ASSERT_TRUE(graph.bind("gain", p.gains()).ok());
  ASSERT_TRUE(graph.bind("weight", p.weights()).ok());
  ASSERT_TRUE(graph.bind("y", p.result(50)).ok());
  ASSERT_TRUE(graph.set(rows, 20).ok());
  ASSERT_TRUE(graph.setup(context.machine()).ok());
  ASSERT_TRUE(graph.execute(context).ok());
  const std::vector<float> first_rows(p.out.begin(), p.out.begin() + 20 * 700);
  EXPECT_EQ(first_rows, std::vector<float>(expected.begin(), expected.begin() + 20 * 700));
}

TEST(NormedMatmul, NamesWhatIsWrong) {
  Random random(seed());
  Problem p(random);
  Context& context = contexts_with_threads(1).back().context;
  EXPECT_EQ(normed_matmul(context, p.x_rows(0, 50), p.gains().narrowed(0, 0, 95), p.weights(), p.result(50)).message(),
            "normed_matmul: gain dim 0 (k) is 95, but x set k = 96");
  EXPECT_EQ(normed_matmul(context, p.x_rows(0, 49), p.gains(), p.weights(), p.result(50)).message(),
            "normed_matmul: out dim 0 (m) is 50, but x set m = 49");
  EXPECT_EQ(normed_matmul(context, p.x_rows(0, 50), p.gains(), p.weights(), p.result(50), -1).message(),
            "normed_matmul: eps is -1.000000, but must be >= 0");
}

}  // namespace
}  // namespace opst
