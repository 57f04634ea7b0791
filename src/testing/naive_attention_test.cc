// The naive form computes attention, too: what a benchmark sets beside the operator must be the same thing.
#include "testing/naive_attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/backward_reference.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace opst::test {
namespace {

TEST(NaiveAttention, ForwardAndBackwardAgreeWithTheReference) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const bool causal : {false, true}) {
      const int64_t batch = 2, heads = 4, kv_heads = 2, queries = 13, keys = 70, dim = 19, value_dim = 24;
      std::vector<Buffer> buffers;
      const auto make = [&](std::initializer_list<int64_t> shape) {
        Tensor t = Tensor::contiguous(dtype, shape, nullptr);
        buffers.push_back(std::move(Buffer::allocate(t.num_elements() * size_bytes(dtype)).value()));
        t.data = buffers.back().data();
        fill(t, Fill::normal, random);
        return t;
      };
      const Tensor query = make({batch, heads, queries, dim}), key = make({batch, kv_heads, keys, dim});
      const Tensor value = make({batch, kv_heads, keys, value_dim}), out = make({batch, heads, queries, value_dim});
      const Tensor grad_out = make({batch, heads, queries, value_dim});
      const Tensor grad_query = make({batch, heads, queries, dim}), grad_key = make({batch, kv_heads, keys, dim});
      const Tensor grad_value = make({batch, kv_heads, keys, value_dim});
      std::vector<float> mask(static_cast<size_t>(queries * keys));
      for (int64_t i = 0; i < queries * keys; ++i) {
        mask[static_cast<size_t>(i)] = causal && i % keys > i / keys + keys - queries ? -HUGE_VALF : 0.0f;
      }
      const NaiveProblem problem{.query = query,
                                 .key = key,
                                 .value = value,
                                 .out = out,
                                 .scale = 1 / std::sqrt(static_cast<double>(dim)),
                                 .mask = causal ? mask.data() : nullptr};
      const AttentionInputs in{.query = query, .key = key, .value = value};
      const AttentionOptions options{.causal = causal};
      const auto expected = attention::reference_gradients(in, grad_out, {}, options);
      const double tolerance = dtype == DType::f64   ? 1e-12
                               : dtype == DType::f32 ? 2e-5
                               : dtype == DType::f16 ? 2e-2
                                                     : 0.15;
      for (const TestContext& t : contexts_with_threads(3)) {
        NaiveAttention naive(problem, true);
        ASSERT_TRUE(naive.ok());
        naive.forward(t.context);
        for (int64_t row = 0; row < batch * heads * queries; ++row) {
          const auto exact =
              attention::reference_row(in, options, row / queries / heads, row / queries % heads, row % queries);
          for (int64_t d = 0; d < value_dim; ++d) {
            ASSERT_NEAR(get(out, row * value_dim + d), exact.out[static_cast<size_t>(d)], tolerance) << t.name;
          }
        }
        naive.backward(t.context, {grad_out, grad_query, grad_key, grad_value});
        for (const auto& [got, want] : {std::pair(&grad_query, &expected.query), std::pair(&grad_key, &expected.key),
                                        std::pair(&grad_value, &expected.value)}) {
          for (size_t i = 0; i < want->size(); ++i) {
            ASSERT_NEAR(get(*got, static_cast<int64_t>(i)), (*want)[i], tolerance) << t.name << " " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test
