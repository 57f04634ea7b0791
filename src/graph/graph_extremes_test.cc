// Graphs built at random out of what means nothing: sizes that no memory holds, ranks and enumerators that are none,
// values and sizes of another graph, indices that do not exist. Whatever is called gives a Status, at once.
#include <gtest/gtest.h>

#include <cstdio>

#include "graph/test_graphs.h"
#include "testing/extremes.h"

namespace opst {
namespace {

using test::Extremes;
using test::Random;

class Builder {
 public:
  Builder(Random& random, Extremes& draw) : random_(random), draw_(draw) {}

  // One call more, of any kind. `strange`: how often a value or size is another graph's.
  void add(Graph& graph, double strange) {
    strange_ = strange;
    const std::string name = std::string("v").append(std::to_string(next_++));
    const DType type = draw_.enumerator({DType::f32, DType::bf16, DType::f16, DType::i64});
    switch (random_.integer(0, 19)) {
      case 0:
        return keep(graph.dim(name, draw_.size()));
      case 1:
      case 2:
      case 3:
        return keep(graph.input(name, type, shape()));
      case 4:
        return keep(graph.cache(name, type, shape()));
      case 5:
        return keep(graph.weight(name, draw_.size(), draw_.size()));
      case 6:
        return keep(graph.view(value(), shape()));
      case 7:
        return keep(graph.columns(value(), draw_.size(), shape()));
      case 8:
        return graph.output(name, value());
      case 9:
        return keep(
            graph.matmul(name, value(), value(),
                         {.activation = draw_.enumerator({Activation::none, Activation::swiglu}), .dtype = type}));
      case 10:
        return keep(graph.rms_norm(name, value(), value()));
      case 11:
        return keep(graph.add_rms_norm(name, value(), value(), value()).sum);
      case 12:
        return keep(graph.layer_norm(name, value(), {.weight = maybe(), .bias = maybe()}));
      case 13:
        return keep(graph.softmax(name, value()));
      case 14:
        return keep(graph.rope_table(name, value(), draw_.size()).cos);
      case 15:
        return keep(graph.rope(name, value(), {value(), value()},
                               {.style = draw_.enumerator({RopeStyle::pairs, RopeStyle::halves})}));
      case 16:
        return keep(graph.attention(name, value(), value(), value()));
      case 17:
        return keep(graph.paged_attention(name, value(), value(), value(), {value(), value(), dim()},
                                          {.page_layout = draw_.enumerator({PageLayout::norm, PageLayout::panel32})}));
      case 18:
        return keep(graph.lookup_rows(name, value(), value()));
      default:
        return keep(graph.add(name, value(), value()));
    }
  }
  std::vector<Value> values;
  std::vector<Dim> dims;

 private:
  void keep(Value made) {
    if (made.exists()) values.push_back(made);
  }
  void keep(Dim made) { dims.push_back(made); }
  Value value() {
    if (random_.chance(strange_) || values.empty()) return foreign_;
    return values[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(values.size()) - 1))];
  }
  Value maybe() { return random_.chance(0.5) ? value() : Value(); }
  Dim dim() {
    if (random_.chance(strange_)) return foreign_dim_;
    if (dims.empty() || random_.chance(0.7)) return draw_.size();
    return dims[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(dims.size()) - 1))];
  }
  // Few shapes, so that some fit together.
  Shape shape() {
    if (random_.chance(0.02)) {
      Shape strange;
      strange.rank = static_cast<int>(random_.pick<int64_t>({-1, 6, 1 << 30}));
      return strange;
    }
    const Dim rows = random_.chance(0.8) ? Dim(4) : dim(), columns = random_.chance(0.8) ? Dim(6) : dim();
    switch (random_.integer(0, 3)) {
      case 0:
        return {columns};
      case 1:
        return {rows, 2, columns};
      default:
        return {rows, columns};
    }
  }

  Random& random_;
  Extremes& draw_;
  double strange_ = 0;
  int next_ = 0;
  Graph other_ = make_graph();
  Dim foreign_dim_ = other_.dim("d", 3);
  Value foreign_ = other_.input("v0", DType::f32, {foreign_dim_, 6});
};

std::vector<int64_t> sizes_of(const Shape& shape) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < shape.rank; ++i) sizes.push_back(shape.dims[i].bound());
  return sizes;
}

TEST(GraphExtremes, WhateverIsBuiltAndBoundGivesAStatus) {
  Random random(test::seed());
  Context context = make_context();
  std::vector<float> numbers(64, 1.0f);
  const PackedWeight weight = std::move(PackedWeight::pack(context, view(numbers, {6, 6})).value());
  int set_up = 0, executed = 0;
  for (int round = 0; round < 40000; ++round) {
    Extremes draw(random, int64_t{1} << 40);
    Builder builder(random, draw);
    Graph graph = make_graph();
    const double strange = random.chance(0.5) ? 0 : 0.02;
    for (int64_t calls = random.integer(1, 9); calls > 0; --calls) {
      Graph as_it_was = std::move(graph);
      graph = std::move(as_it_was);
      builder.add(graph, strange);
    }
    for (const Value value : builder.values) {
      const DType dtype = graph.dtype(value);
      const std::vector<int64_t> sizes = sizes_of(graph.shape(value));
      const Status bound = random.chance(0.1)   ? graph.bind(value, weight)
                           : random.chance(0.5) ? graph.bind(value, draw.output(dtype, sizes))
                                                : graph.bind(value, draw.input(dtype, sizes));
      static_cast<void>(bound.ok());
    }
    const Status status = graph.setup(context.machine());
    set_up += status.ok() ? 1 : 0;
    EXPECT_NE(status.code(), StatusCode::internal) << status.message();
    for (const Dim dim : builder.dims) static_cast<void>(graph.set(dim, draw.size()).ok());
    const Status run = graph.execute(context);
    EXPECT_NE(run.code(), StatusCode::internal) << run.message();
    executed += run.ok() ? 1 : 0;
    for (int node = -1; node <= graph.num_nodes(); ++node) {
      EXPECT_EQ(graph.describe(node).ok(), node >= 0 && node < graph.num_nodes());
    }
    EXPECT_TRUE(graph.cost().ok());
    EXPECT_FALSE(to_string(graph).empty());
    if (testing::Test::HasFailure()) FAIL() << "round " << round;
  }
  std::printf("%d set up, %d executed\n", set_up, executed);
  EXPECT_GT(set_up, 1000);
  EXPECT_GT(executed, 200);
}

// Sizes whose sum no memory holds.
TEST(GraphExtremes, AWorkspaceThatNoMemoryHolds) {
  Context context = make_context();
  Graph graph = make_graph();
  constexpr int64_t kHuge = int64_t{1} << 53;
  Value x = graph.input("x", DType::f32, {kHuge});
  std::vector<Value> all;
  for (int i = 0; i < 80; ++i) all.push_back(graph.softmax(std::string("soft").append(std::to_string(i)), x));
  for (int i = 1; i < 80; ++i)
    x = graph.add(std::string("sum").append(std::to_string(i)), i == 1 ? all[0] : x, all[static_cast<size_t>(i)]);
  EXPECT_EQ(graph.setup(context.machine()).code(), StatusCode::out_of_memory);
  EXPECT_EQ(graph.memory().workspace_bytes, 0);
  EXPECT_EQ(graph.setup(context.machine()).code(), StatusCode::out_of_memory);
  EXPECT_EQ(graph.cost().value().tensor_bytes, int64_t{1} << 56);  // the limit
  EXPECT_EQ(graph.execute(context).message(), "graph test: executed without a setup");
}

TEST(GraphExtremes, ViewsOfViews) {
  Graph graph = make_graph();
  Value x = graph.input("x", DType::f32, {4});
  for (int i = 0; i < 64; ++i) x = graph.view(x, {4});
  EXPECT_TRUE(x.exists());
  EXPECT_FALSE(graph.view(x, {4}).exists());
  EXPECT_EQ(graph.setup(Machine()).message(), "graph test: a view of 64 views of one another, of 'x'");
}

}  // namespace
}  // namespace opst
