// A graph and the tensors that the tests of graphs share.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "opst/graph.h"

namespace opst {

inline Context make_context() { return std::move(Context::create({.num_threads = 2}).value()); }

inline Graph make_graph() { return std::move(Graph::create("test").value()); }

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& x : numbers) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500.0f;
  return numbers;
}

inline Tensor view(std::vector<float>& numbers, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(DType::f32, shape, numbers.data());
}

// [tokens, heads, dim] as [1, heads, tokens, dim].
inline Tensor as_batch(const Tensor& t) {
  Tensor batch = t.transposed(0, 1);
  for (int i = 3; i > 0; --i) batch.shape[i] = batch.shape[i - 1], batch.strides[i] = batch.strides[i - 1];
  batch.rank = 4, batch.shape[0] = 1, batch.strides[0] = 0;
  return batch;
}

// What a node says about itself.
inline NodeInfo info_of(const Graph& graph, int node) { return std::move(graph.describe(node).value()); }

#define ASSERT_OK(call)                             \
  do {                                              \
    const Status status_ = (call);                  \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

// y = Wdown swiglu(Wgate norm(x), Wup norm(x)) + x, as a graph and as calls.
class FeedForward {
 public:
  static constexpr int64_t kWidth = 32, kSize = 48, kMaxRows = 9;

  FeedForward() {
    for (auto* weight : {&gate_, &up_}) *weight = pack(kSize, kWidth, weight == &gate_ ? 1 : 2);
    down_ = pack(kWidth, kSize, 3);
  }

  Graph graph() const {
    Graph g = make_graph();
    rows = g.dim("rows", kMaxRows);
    const Value x = g.input("x", DType::f32, {rows, kWidth});
    const Value normed = g.rms_norm("norm", x, g.input("norm.weight", DType::f32, {kWidth}));
    const Value gate = g.matmul("gate", normed, g.weight("gate.weight", kSize, kWidth));
    const Value up = g.matmul("up", normed, g.weight("up.weight", kSize, kWidth));
    const Value down = g.matmul("down", g.swiglu("act", gate, up), g.weight("down.weight", kWidth, kSize));
    g.output("y", g.add("sum", x, down));
    return g;
  }

  void bind(Graph& g) {
    ASSERT_OK(g.bind("gate.weight", gate_));
    ASSERT_OK(g.bind("up.weight", up_));
    ASSERT_OK(g.bind("down.weight", down_));
    ASSERT_OK(g.bind("norm.weight", ConstTensor(view(norm_, {kWidth}))));
  }

  std::vector<float> expected(const ConstTensor& x) {
    const int64_t n = x.shape[0];
    const auto narrow = static_cast<size_t>(n * kWidth), wide = static_cast<size_t>(n * kSize);
    std::vector<float> normed(narrow), gate(wide), up(wide), down(narrow), y(narrow);
    EXPECT_TRUE(rms_norm(context, x, view(norm_, {kWidth}), view(normed, {n, kWidth})).ok());
    EXPECT_TRUE(matmul(context, view(normed, {n, kWidth}), gate_, view(gate, {n, kSize})).ok());
    EXPECT_TRUE(matmul(context, view(normed, {n, kWidth}), up_, view(up, {n, kSize})).ok());
    EXPECT_TRUE(swiglu(context, view(gate, {n, kSize}), view(up, {n, kSize}), view(gate, {n, kSize})).ok());
    EXPECT_TRUE(matmul(context, view(gate, {n, kSize}), down_, view(down, {n, kWidth})).ok());
    EXPECT_TRUE(add(context, x, view(down, {n, kWidth}), view(y, {n, kWidth})).ok());
    return y;
  }

  Context context = make_context();
  mutable Dim rows;

 private:
  PackedWeight pack(int64_t n, int64_t k, uint32_t seed) {
    std::vector<float> numbers = random_floats(n * k, seed);
    return std::move(PackedWeight::pack(context, view(numbers, {n, k})).value());
  }
  PackedWeight gate_, up_, down_;
  std::vector<float> norm_ = random_floats(kWidth, 4);
};

}  // namespace opst
