// Attention over very many keys: what a narrow accumulator, or a rounding that always goes the same way, would lose.
#include <gtest/gtest.h>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

constexpr int64_t kKeys = int64_t{1} << 18;

// The best level, with two threads.
const TestContext& fastest() { return contexts_with_threads(2).back(); }

struct Long {
  Buffer query, key, value, out, sum;
  AttentionInputs inputs;
  AttentionOutputs outputs;
};
Long make(DType dtype, int64_t heads, int64_t query_len, int64_t kv_len, int64_t dim) {
  Long p;
  const auto allocate = [](int64_t bytes) {
    opst::Result<Buffer> buffer = Buffer::allocate(bytes);
    EXPECT_TRUE(buffer.ok());
    return std::move(buffer.value());
  };
  p.query = allocate(heads * query_len * dim * 4);
  p.out = allocate(heads * query_len * dim * 4);
  p.sum = allocate(heads * query_len * 4);
  p.key = allocate(kv_len * dim * size_bytes(dtype));
  p.value = allocate(kv_len * dim * size_bytes(dtype));
  p.inputs.query = p.query.tensor(dtype, {1, heads, query_len, dim});
  p.inputs.key = p.key.tensor(dtype, {1, 1, kv_len, dim});
  p.inputs.value = p.value.tensor(dtype, {1, 1, kv_len, dim});
  p.outputs.out = p.out.tensor(DType::f32, {1, heads, query_len, dim});
  p.outputs.softmax_sum = p.sum.tensor(DType::f32, {1, heads, query_len});
  return p;
}

// Equal scores: a sum of bf16 (f16) would stay at 256 (2048), and a mean of 0 and 1 would be far from 1/2.
TEST(AttentionLong, EqualScoresOf256KKeys) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& [heads, query_len] : {std::pair(1, 1), std::pair(3, 8)}) {
      Long p = make(dtype, heads, query_len, kKeys, 8);
      Random random(1);
      fill(p.query.tensor(dtype, {heads * query_len * 8}), Fill::ones, random);
      fill(p.key.tensor(dtype, {kKeys * 8}), Fill::ones, random);
      auto* value = static_cast<uint16_t*>(p.value.data());
      const uint16_t one = dtype == DType::bf16 ? 0x3f80 : 0x3c00;
      for (int64_t i = 0; i < kKeys * 8; ++i) value[i] = i / 8 % 2 == 0 ? one : uint16_t{0};
      for (const TestContext& t : contexts_with_threads(2)) {
        ASSERT_EQ(flash_attention_forward(t.context, p.inputs, p.outputs).message(), "");
        for (int64_t i = 0; i < heads * query_len; ++i) {
          EXPECT_EQ(static_cast<float*>(p.sum.data())[i], static_cast<float>(kKeys)) << t.name;
          EXPECT_EQ(static_cast<float*>(p.out.data())[i * 8], 0.5f) << t.name;
        }
      }
    }
  }
}

void expect_reference(const Long& p, const AttentionOptions& options, const std::vector<int64_t>& rows, double bound,
                      const std::string& about) {
  for (const int64_t row : rows) {
    const int64_t query_len = p.inputs.query.shape[2], h = row / query_len, i = row % query_len;
    const attention::ReferenceRow expected = attention::reference_row(p.inputs, options, 0, h, i);
    const ConstTensor got = ConstTensor(p.outputs.out).selected(0, 0).selected(0, h).selected(0, i);
    double scale = 0;
    for (const double x : expected.out) scale = std::max(scale, std::fabs(x));
    for (size_t d = 0; d < expected.out.size(); ++d) {
      ASSERT_NEAR(get(got, static_cast<int64_t>(d)), expected.out[d], bound * scale) << about << " row " << row;
    }
    ASSERT_NEAR(static_cast<double>(static_cast<float*>(p.sum.data())[row]), expected.sum, 2e-4 * expected.sum)
        << about << " row " << row;
  }
}

// Random bf16 keys against float64: the error does not grow with their number.
TEST(AttentionLong, RandomKeysIn256KOfBf16) {
  Random random(seed());
  for (const auto& [heads, query_len, dropout] :
       {std::tuple(2, 1, false), std::tuple(1, 30, false), std::tuple(1, 30, true)}) {
    Long p = make(DType::bf16, heads, query_len, kKeys, 16);
    fill(p.query.tensor(DType::bf16, {heads * query_len * 16}), Fill::normal, random);
    fill(p.key.tensor(DType::bf16, {kKeys * 16}), Fill::normal, random);
    fill(p.value.tensor(DType::bf16, {kKeys * 16}), Fill::uniform, random);
    // A mean that is not 0, or all that is left is rounding.
    auto* value = static_cast<bf16*>(p.value.data());
    for (int64_t i = 0; i < kKeys * 16; ++i) value[i] = to_bf16(to_f32(value[i]) + 1);
    AttentionOptions options;
    if (dropout) options.dropout = {.keep_prob = 0.8, .seed = random.bits()};
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_EQ(flash_attention_forward(t.context, p.inputs, p.outputs, options).message(), "");
      expect_reference(p, options, {0, heads * query_len - 1}, 1e-4, t.name);
    }
  }
}

// A million keys, 256 queries, every option that costs no memory.
TEST(AttentionLong, AMillionKeys) {
  constexpr int64_t kMillion = 1 << 20;
  Random random(seed() + 1);
  Long p = make(DType::bf16, 1, 256, kMillion, 32);
  fill(p.query.tensor(DType::bf16, {256 * 32}), Fill::normal, random);
  fill(p.key.tensor(DType::bf16, {kMillion * 32}), Fill::normal, random);
  fill(p.value.tensor(DType::bf16, {kMillion * 32}), Fill::uniform, random);
  auto* value = static_cast<bf16*>(p.value.data());
  for (int64_t i = 0; i < kMillion * 32; ++i) value[i] = to_bf16(to_f32(value[i]) + 1);
  const float slope = 1e-6f;
  for (const bool with_options : {false, true}) {
    AttentionOptions options{.causal = true};
    if (with_options) {
      options.softcap = 20;
      options.dropout = {.keep_prob = 0.9, .seed = 3};
      p.inputs.alibi_slopes = ConstTensor::contiguous(DType::f32, {1}, &slope);
    }
    ASSERT_EQ(flash_attention_forward(fastest().context, p.inputs, p.outputs, options).message(), "");
    expect_reference(p, options, {0, 255}, 1e-4, fastest().name);
  }
}

}  // namespace
}  // namespace opst::test
