// articles.h beside plain double loops, and what it refuses.
#include "opst/articles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "testing/random.h"

namespace opst {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 19, kKeys = 37, kDim = 24;

struct Array {
  std::vector<float> values;
  std::vector<int64_t> shape;
  Tensor tensor() {
    Tensor t = Tensor::contiguous(DType::f32, {}, values.data());
    t.rank = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; --d) {
      t.shape[d] = shape[static_cast<size_t>(d)];
      t.strides[d] = stride;
      stride *= t.shape[d];
    }
    return t;
  }
  double at(int64_t i) const { return values[static_cast<size_t>(i)]; }
};

Array zeros(std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return {std::vector<float>(static_cast<size_t>(count)), std::move(shape)};
}
Array random_array(std::vector<int64_t> shape, uint64_t seed) {
  Array array = zeros(std::move(shape));
  test::Random random(seed);
  test::fill(array.tensor(), test::Fill::normal, random);
  return array;
}

void expect_near(const Array& got, const std::vector<double>& expected, double bound, const char* what) {
  ASSERT_EQ(got.values.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(got.values[i], expected[i], bound) << what << " " << i;
}

// Attention and its gradients in double, heads of queries h with keys h / 2.
struct Naive {
  std::vector<double> out, lse, grad_query, grad_key, grad_value;

  Naive(const Array& q, const Array& k, const Array& v, const Array& g, double scale, bool causal)
      : out(q.values.size()),
        lse(q.values.size() / kDim),
        grad_query(q.values.size()),
        grad_key(k.values.size()),
        grad_value(v.values.size()) {
    for (int64_t bh = 0; bh < kBatch * kHeads; ++bh) {
      const int64_t kv = (bh / kHeads * kKvHeads + bh % kHeads / 2) * kKeys;
      for (int64_t i = 0; i < kQueries; ++i) {
        const int64_t row = bh * kQueries + i, visible = causal ? kKeys - kQueries + i + 1 : kKeys;
        std::vector<double> p(static_cast<size_t>(visible));
        double sum = 0;
        for (int64_t j = 0; j < visible; ++j) {
          p[static_cast<size_t>(j)] = std::exp(scale * dot(q, row, k, kv + j));
          sum += p[static_cast<size_t>(j)];
        }
        lse[static_cast<size_t>(row)] = std::log(sum);
        double mean = 0;
        for (int64_t j = 0; j < visible; ++j) {
          double& weight = p[static_cast<size_t>(j)];
          weight /= sum;
          mean += weight * dot(g, row, v, kv + j);
          for (int64_t d = 0; d < kDim; ++d) {
            out[static_cast<size_t>(row * kDim + d)] += weight * v.at((kv + j) * kDim + d);
            grad_value[static_cast<size_t>((kv + j) * kDim + d)] += weight * g.at(row * kDim + d);
          }
        }
        for (int64_t j = 0; j < visible; ++j) {
          const double ds = scale * p[static_cast<size_t>(j)] * (dot(g, row, v, kv + j) - mean);
          for (int64_t d = 0; d < kDim; ++d) {
            grad_query[static_cast<size_t>(row * kDim + d)] += ds * k.at((kv + j) * kDim + d);
            grad_key[static_cast<size_t>((kv + j) * kDim + d)] += ds * q.at(row * kDim + d);
          }
        }
      }
    }
  }

  static double dot(const Array& a, int64_t i, const Array& b, int64_t j) {
    double sum = 0;
    for (int64_t d = 0; d < kDim; ++d) sum += a.at(i * kDim + d) * b.at(j * kDim + d);
    return sum;
  }
};

class Articles : public testing::Test {
 protected:
  Context context = std::move(Context::create({.num_threads = 2}).value());
  FlashAttentionOp op{context};
  Array query = random_array({kBatch, kHeads, kQueries, kDim}, 1),
        key = random_array({kBatch, kKvHeads, kKeys, kDim}, 2),
        value = random_array({kBatch, kKvHeads, kKeys, kDim}, 3),
        grad = random_array({kBatch, kHeads, kQueries, kDim}, 4);
  Array out = zeros({kBatch, kHeads, kQueries, kDim}), lse = zeros({kBatch, kHeads, kQueries});
};

TEST_F(Articles, AttentionAndItsGradientsAreThoseOfPlainLoops) {
  for (const bool causal : {false, true}) {
    for (const float scale : {-1.0F, 0.3F}) {
      for (const int64_t block : {0, 16}) {
        const FlashAttentionOp::Config config = {
            .block_size_q = block, .block_size_kv = block, .softmax_scale = scale, .causal = causal};
        const Naive naive(query, key, value, grad, scale == -1 ? 1 / std::sqrt(kDim) : scale, causal);
        Status status = op.Compute(query.tensor(), key.tensor(), value.tensor(), out.tensor(), config, lse.tensor());
        ASSERT_TRUE(status.ok()) << status.message();
        expect_near(out, naive.out, 1e-5, "output");
        expect_near(lse, naive.lse, 1e-5, "softmax_lse");
        Array dq = zeros(query.shape), dk = zeros(key.shape), dv = zeros(value.shape);
        status =
            op.ComputeGrad(query.tensor(), key.tensor(), value.tensor(), {out.tensor(), lse.tensor(), grad.tensor()},
                           {dq.tensor(), dk.tensor(), dv.tensor()}, config);
        ASSERT_TRUE(status.ok()) << status.message();
        expect_near(dq, naive.grad_query, 1e-4, "gradient of query");
        expect_near(dk, naive.grad_key, 1e-4, "gradient of key");
        expect_near(dv, naive.grad_value, 1e-4, "gradient of value");
      }
    }
  }
}

// Values that are a unit matrix show the probabilities: each is 0, or divided by what is kept.
TEST_F(Articles, DropoutZeroesItsPartAndDividesTheRest) {
  Array unit = zeros({kBatch, kKvHeads, kKeys, kKeys}), whole = zeros({kBatch, kHeads, kQueries, kKeys});
  for (int64_t b = 0; b < kBatch * kKvHeads; ++b) {
    for (int64_t j = 0; j < kKeys; ++j) unit.values[static_cast<size_t>((b * kKeys + j) * kKeys + j)] = 1;
  }
  Array dropped = whole, again = whole, other = whole;
  const auto run = [&](Array& to, float p, uint64_t seed) {
    FlashAttentionOp::Config config;
    config.dropout_p = p;
    config.seed = seed;
    const Status status = op.Compute(query.tensor(), key.tensor(), unit.tensor(), to.tensor(), config);
    ASSERT_TRUE(status.ok()) << status.message();
  };
  run(whole, 0, 0);
  run(dropped, 0.25F, 7);
  run(again, 0.25F, 7);
  run(other, 0.25F, 8);
  EXPECT_EQ(dropped.values, again.values);
  EXPECT_NE(dropped.values, other.values);
  double zeroes = 0;
  for (size_t i = 0; i < whole.values.size(); ++i) {
    if (dropped.values[i] == 0) {
      ++zeroes;
    } else {
      ASSERT_NEAR(dropped.values[i], whole.values[i] / 0.75, 1e-6);
    }
  }
  EXPECT_NEAR(zeroes / static_cast<double>(whole.values.size()), 0.25, 0.03);
}

TEST_F(Articles, ConfigsAreRefusedAndNothingIsWritten) {
  const auto message = [&](const FlashAttentionOp::Config& config) {
    const Status status = op.Compute(query.tensor(), key.tensor(), value.tensor(), out.tensor(), config);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(out.values, zeros(out.shape).values);
    return status.message();
  };
  EXPECT_EQ(message({.block_size_q = -3}),
            "FlashAttentionOp::Compute: block_size_q is -3, but must be from 1 to 4096, or 0 for the plan's choice");
  EXPECT_EQ(message({.block_size_kv = 5000}),
            "FlashAttentionOp::Compute: block_size_kv is 5000, but must be from 1 to 4096, or 0 for the plan's choice");
  for (const float p : {1.0F, -0.5F, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_NE(message({.dropout_p = p}).find("dropout_p is "), std::string::npos);
  }
  EXPECT_NE(message({.softmax_scale = std::numeric_limits<float>::infinity()}).find("softmax_scale"),
            std::string::npos);
  Array narrow = zeros({kBatch, kKvHeads, kKeys, kDim - 1});
  Status status = op.Compute(query.tensor(), narrow.tensor(), value.tensor(), out.tensor(), {});
  EXPECT_NE(status.message().find("23"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("24"), std::string::npos) << status.message();
  status = op.ComputeGrad(query.tensor(), key.tensor(), value.tensor(), {out.tensor(), lse.tensor(), grad.tensor()}, {},
                          {.block_size_q = 4097});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("FlashAttentionOp::ComputeGrad: block_size_q is 4097"), std::string::npos);
}

// body(rank, its context) on threads.
template <class Body>
void on_ranks(std::vector<Communicator>& ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (Communicator& rank : ranks) {
    threads.emplace_back([&] {
      Context own = std::move(Context::create({.num_threads = 1 + rank.rank() % 2}).value());
      body(rank, own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MatMulAlltoAllPipelined, IsTheProductAndThenTheExchange) {
  constexpr int64_t kRows = 11, kInputs = 32, kColumns = 19;
  for (const int world : {1, 2, 3}) {
    for (const int64_t tile : {0, 1, 4, 100}) {
      std::vector<Communicator> ranks = std::move(Communicator::create_threads(world).value());
      Array x = random_array({world * kRows, kInputs}, 5), weight = random_array({kColumns, kInputs}, 6);
      std::vector<Array> outs;
      for (int r = 0; r < world; ++r) outs.push_back(zeros({world * kRows, kColumns / world + (r < kColumns % world)}));
      on_ranks(ranks, [&](Communicator& rank, Context& own) {
        Array& out = outs[static_cast<size_t>(rank.rank())];
        const Status status = MatMulAlltoAll_pipelined(own, x.tensor().narrowed(0, rank.rank() * kRows, kRows),
                                                       weight.tensor(), rank, out.tensor(), tile);
        EXPECT_TRUE(status.ok()) << status.message();
      });
      int64_t first = 0;
      for (Array& out : outs) {
        std::vector<double> expected(out.values.size());
        for (int64_t i = 0; i < out.shape[0]; ++i) {
          for (int64_t j = 0; j < out.shape[1]; ++j) {
            double& sum = expected[static_cast<size_t>(i * out.shape[1] + j)];
            for (int64_t t = 0; t < kInputs; ++t) sum += x.at(i * kInputs + t) * weight.at((first + j) * kInputs + t);
          }
        }
        expect_near(out, expected, 1e-5, "out");
        first += out.shape[1];
      }
    }
  }
}

// One rank's refusal reaches the other at once, not after the timeout.
TEST(MatMulAlltoAllPipelined, WhatOneRankIsRefusedForAllAreTold) {
  for (const bool bad_weight : {false, true}) {
    std::vector<Communicator> ranks = std::move(Communicator::create_threads(2).value());
    std::vector<Status> statuses(2);
    on_ranks(ranks, [&](Communicator& rank, Context& own) {
      Array x = random_array({4, 8}, 7), weight = random_array({6, 8}, 8), out = zeros({8, 3});
      const bool bad = rank.rank() == 1;
      const ConstTensor w = bad && bad_weight ? ConstTensor() : ConstTensor(weight.tensor());
      statuses[static_cast<size_t>(rank.rank())] =
          MatMulAlltoAll_pipelined(own, x.tensor(), w, rank, out.tensor(), bad && !bad_weight ? -5 : 0);
    });
    EXPECT_EQ(statuses[1].code(), StatusCode::invalid_argument) << statuses[1].message();
    EXPECT_EQ(statuses[0].code(), StatusCode::communication) << statuses[0].message();
    EXPECT_NE(statuses[0].message().find("rank 1"), std::string::npos) << statuses[0].message();
  }
}

}  // namespace
}  // namespace opst
