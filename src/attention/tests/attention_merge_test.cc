// merge_attention: its rules, what it refuses, and that attention over parts of the keys, merged, is attention over all
// of them.
#include <gtest/gtest.h>

#include <functional>

#include "attention/tests/attention_problem.h"
#include "core/convert.h"

namespace opst::test {
namespace {

// Parts [parts, rows, dim] of random numbers.
struct Parts {
  std::vector<float> out, lse, max, sum;
  int64_t parts, rows, dim;

  Parts(int64_t num_parts, int64_t num_rows, int64_t value_head_dim, Random& random)
      : parts(num_parts), rows(num_rows), dim(value_head_dim) {
    for (int64_t i = 0; i < parts * rows * dim; ++i) out.push_back(static_cast<float>(random.normal()));
    for (int64_t i = 0; i < parts * rows; ++i) {
      max.push_back(static_cast<float>(3 * random.normal()));
      sum.push_back(static_cast<float>(random.uniform(1, 50)));
      lse.push_back(max.back() + std::log(sum.back()));
    }
  }
  void make_empty(int64_t part, int64_t row, float top = -HUGE_VALF) {
    const auto at = static_cast<size_t>(part * rows + row);
    lse[at] = max[at] = top, sum[at] = 0;
    for (int64_t d = 0; d < dim; ++d) out[at * static_cast<size_t>(dim) + static_cast<size_t>(d)] = std::nanf("");
  }
  AttentionParts by_lse() const {
    return {.out = ConstTensor::contiguous(DType::f32, {parts, rows, dim}, out.data()),
            .softmax_lse = ConstTensor::contiguous(DType::f32, {parts, rows}, lse.data())};
  }
  AttentionParts by_max() const {
    return {.out = ConstTensor::contiguous(DType::f32, {parts, rows, dim}, out.data()),
            .softmax_max = ConstTensor::contiguous(DType::f32, {parts, rows}, max.data()),
            .softmax_sum = ConstTensor::contiguous(DType::f32, {parts, rows}, sum.data())};
  }
};
struct Merged {
  std::vector<float> out, lse, max, sum;
  AttentionOutputs tensors;
  Merged(int64_t rows, int64_t dim, bool with_max)
      : out(static_cast<size_t>(rows * dim), 7), lse(static_cast<size_t>(rows), 7), max(lse), sum(lse) {
    tensors.out = Tensor::contiguous(DType::f32, {rows, dim}, out.data());
    tensors.softmax_lse = Tensor::contiguous(DType::f32, {rows}, lse.data());
    if (!with_max) return;
    tensors.softmax_max = Tensor::contiguous(DType::f32, {rows}, max.data());
    tensors.softmax_sum = Tensor::contiguous(DType::f32, {rows}, sum.data());
  }
};
Context& context() { return contexts().front().context; }

TEST(AttentionMerge, B10_PartsThatSawNothing) {
  Random random(seed());
  for (const bool by_max : {false, true}) {
    Parts parts(2, 64, 5, random);
    for (int64_t row = 0; row < 64; ++row) {
      // Neither, the first, the second (as others mark it), or no part has seen a key.
      if (row % 4 == 1 || row % 4 == 3) parts.make_empty(0, row);
      if (row % 4 == 2 || row % 4 == 3) parts.make_empty(1, row, row % 8 < 4 ? HUGE_VALF : -HUGE_VALF);
    }
    Merged merged(64, 5, by_max);
    ASSERT_EQ(merge_attention(context(), by_max ? parts.by_max() : parts.by_lse(), merged.tensors).message(), "");
    for (size_t row = 0; row < 64; ++row) {
      if (row % 4 == 0) continue;
      const size_t from = row % 4 == 1 ? 64 + row : row;  // the part that is passed on
      for (size_t d = 0; d < 5; ++d) {
        const float expected = row % 4 == 3 ? 0 : parts.out[from * 5 + d];
        EXPECT_EQ(std::memcmp(&merged.out[row * 5 + d], &expected, 4), 0);
      }
      if (!by_max) {
        EXPECT_EQ(merged.lse[row], row % 4 == 3 ? -HUGE_VALF : parts.lse[from]);
      } else {
        EXPECT_EQ(merged.max[row], row % 4 == 3 ? -HUGE_VALF : parts.max[from]);
        EXPECT_EQ(merged.sum[row], row % 4 == 3 ? 0 : parts.sum[from]);
      }
    }
  }
}

TEST(AttentionMerge, AgreesWithItsEquationInDouble) {
  Random random(seed() + 1);
  for (const int64_t num_parts : {1, 2, 3, 17}) {
    for (const int64_t dim : {1, 64, 65, 200}) {
      const Parts parts(num_parts, 70, dim, random);
      for (const bool by_max : {false, true}) {
        Merged merged(70, dim, by_max);
        ASSERT_TRUE(merge_attention(context(), by_max ? parts.by_max() : parts.by_lse(), merged.tensors).ok());
        for (int64_t row = 0; row < 70; ++row) {
          const auto at = [&](int64_t k) { return static_cast<size_t>(k * 70 + row); };
          const auto lse = [&](int64_t k) {
            return by_max ? static_cast<double>(parts.max[at(k)]) + std::log(static_cast<double>(parts.sum[at(k)]))
                          : static_cast<double>(parts.lse[at(k)]);
          };
          double total = 0;
          for (int64_t k = 0; k < num_parts; ++k) total += std::exp(lse(k));
          EXPECT_NEAR(merged.lse[static_cast<size_t>(row)], std::log(total), 1e-5);
          for (int64_t d = 0; d < dim; ++d) {
            double out = 0;
            for (int64_t k = 0; k < num_parts; ++k) {
              out += std::exp(lse(k)) / total *
                     static_cast<double>(parts.out[at(k) * static_cast<size_t>(dim) + static_cast<size_t>(d)]);
            }
            EXPECT_NEAR(merged.out[static_cast<size_t>(row * dim + d)], out, 2e-6);
          }
        }
      }
    }
  }
}

// A statistic that is NaN makes its row NaN and no other.
TEST(AttentionMerge, NanStaysInItsRow) {
  Random random(seed() + 2);
  Parts parts(3, 4, 2, random);
  parts.lse[4 + 1] = std::nanf("");
  Merged merged(4, 2, false);
  ASSERT_TRUE(merge_attention(context(), parts.by_lse(), merged.tensors).ok());
  for (size_t row = 0; row < 4; ++row) {
    EXPECT_EQ(std::isnan(merged.lse[row]), row == 1);
    EXPECT_EQ(std::isnan(merged.out[2 * row]), row == 1);
  }
}

// A ring of ranks: each holds a part of the keys and sees every query. Masks, ALiBi and dropout of a part know where
// the part begins; the sink is in one of them.
TEST(AttentionMerge, ARingIsTheWhole) {
  Random random(seed() + 3);
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    for (int repeat = 0; repeat < 12; ++repeat) {
      ProblemOptions p;
      p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
      const DType real = dtype == DType::f64 ? DType::f64 : DType::f32;
      p.batch = 2, p.num_heads = 4, p.num_kv_heads = 2, p.query_len = 37, p.kv_len = 101;
      p.head_dim = 24, p.value_head_dim = 40;
      p.options.alignment = CausalAlignment::top_left;
      const bool causal = random.chance(0.7), alibi = random.chance(0.5), dropout = random.chance(0.5);
      const bool sinks = random.chance(0.5), window = random.chance(0.4), bias = random.chance(0.5);
      p.options.causal = causal;
      if (window) p.options.window_left = 20, p.options.window_right = 9;
      if (dropout) p.options.dropout = {.keep_prob = 0.7, .seed = random.bits(), .first_key = 3};
      Problem whole(p, random);
      View slopes(real, 1, 1, 1, 4, Strides::bnsd), sink(real, 1, 1, 1, 4, Strides::bnsd);
      View biases(real, 1, 4, 37, 101, Strides::padded);
      fill(slopes.tensor(), Fill::uniform, random);
      fill(sink.tensor(), Fill::normal, random);
      fill(biases.tensor(), Fill::normal, random);
      const auto row_of = [](const View& v) { return v.tensor().selected(0, 0).selected(0, 0).selected(0, 0); };
      if (alibi) whole.inputs.alibi_slopes = row_of(slopes);
      if (sinks) whole.inputs.sinks = row_of(sink);
      if (bias) whole.inputs.bias = biases.tensor();

      const int64_t starts[] = {0, 40, 41, 90, 101};
      constexpr int64_t kParts = 4;
      std::vector<char> memory(static_cast<size_t>(kParts * 2 * 4 * 37 * 41 * 8));
      for (const bool by_max : {false, true}) {
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome expected = whole.run(t.context);
          ASSERT_EQ(whole.judge(expected, t.context, 30), "");
          const Tensor out = Tensor::contiguous(real, {kParts, 2, 4, 37, 40}, memory.data());
          std::vector<char> statistics(static_cast<size_t>(3 * kParts * 2 * 4 * 37 * 8));
          const auto statistic = [&](int64_t i) {
            return Tensor::contiguous(real, {kParts, 2, 4, 37}, statistics.data() + i * kParts * 2 * 4 * 37 * 8);
          };
          for (int64_t k = 0; k < kParts; ++k) {
            const int64_t first = starts[k], count = starts[k + 1] - first;
            AttentionInputs in = whole.inputs;
            in.key = in.key.narrowed(2, first, count), in.value = in.value.narrowed(2, first, count);
            if (bias) in.bias = in.bias.narrowed(3, first, count);
            if (k != 2) in.sinks = {};
            AttentionOptions o = p.options;
            // Key j of the part is key first + j: the diagonal lies that much further to the left.
            o.causal = false;
            if (window) o.window_left += first, o.window_right -= first;
            if (causal) o.window_right = std::min(window ? o.window_right : kUnbounded, -first);
            o.alibi_key_start = first;
            o.dropout.first_key += first;
            ASSERT_EQ(flash_attention_forward(t.context, in,
                                              {.out = out.selected(0, k),
                                               .softmax_lse = statistic(0).selected(0, k),
                                               .softmax_max = statistic(1).selected(0, k),
                                               .softmax_sum = statistic(2).selected(0, k)},
                                              o)
                          .message(),
                      "");
          }
          AttentionParts parts{.out = out};
          if (by_max)
            parts.softmax_max = statistic(1), parts.softmax_sum = statistic(2);
          else
            parts.softmax_lse = statistic(0);
          Outcome merged = whole.run(t.context);  // for its memory
          AttentionOutputs to{.out = merged.out->tensor()};
          to.softmax_lse = merged.lse->tensor().selected(3, 0);
          if (by_max) to.softmax_max = merged.max->tensor().selected(3, 0);
          if (by_max) to.softmax_sum = merged.sum->tensor().selected(3, 0);
          for (const Tensor& x : {to.out, to.softmax_lse}) fill(x, Fill::nan, random);
          ASSERT_EQ(merge_attention(t.context, parts, to).message(), "");
          ASSERT_EQ(whole.judge(merged, t.context, 30), "") << "by max " << by_max;
        }
      }
    }
  }
}

// Parts of 16 bits, one after the other into an f32 result: the bits of all of them at once, and only the last rounding
// is to 16 bits.
TEST(AttentionMerge, PartsOf16BitsAccumulateInF32) {
  Random random(seed() + 4);
  constexpr int64_t kParts = 5, kRows = 7, kDim = 70;
  const Parts parts(kParts, kRows, kDim, random);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    std::vector<uint16_t> bits;
    std::vector<double> exact;
    for (const float x : parts.out) {
      bits.push_back(dtype == DType::bf16 ? to_bf16(x).bits : to_f16(x).bits);
      exact.push_back(static_cast<double>(dtype == DType::bf16 ? to_f32(bf16{bits.back()}) : to_f32(f16{bits.back()})));
    }
    for (const bool by_max : {false, true}) {
      AttentionParts all = by_max ? parts.by_max() : parts.by_lse();
      all.out = ConstTensor::contiguous(dtype, {kParts, kRows, kDim}, bits.data());
      Merged whole(kRows, kDim, by_max), ring(kRows, kDim, by_max);
      ASSERT_EQ(merge_attention(context(), all, whole.tensors).message(), "");
      for (int64_t k = 0; k < kParts; ++k) {
        AttentionParts one = all;
        for (ConstTensor* t : {&one.out, &one.softmax_lse, &one.softmax_max, &one.softmax_sum}) {
          if (t->data != nullptr) *t = t->narrowed(0, k, 1);
        }
        ASSERT_EQ(merge_attention(context(), one, ring.tensors, k > 0).message(), "");
      }
      for (size_t row = 0; row < kRows; ++row) {
        EXPECT_NEAR(ring.lse[row], whole.lse[row], 1e-5);
        double total = 0;
        for (size_t k = 0; k < kParts; ++k) total += std::exp(static_cast<double>(parts.lse[k * kRows + row]));
        for (size_t d = 0; d < kDim; ++d) {
          double expected = 0;
          for (size_t k = 0; k < kParts; ++k) {
            const size_t at = k * kRows + row;
            expected += std::exp(static_cast<double>(parts.lse[at])) / total * exact[at * kDim + d];
          }
          EXPECT_NEAR(whole.out[row * kDim + d], expected, 2e-6);
          EXPECT_NEAR(ring.out[row * kDim + d], expected, 4e-6);
        }
      }
    }
  }
}

TEST(AttentionMerge, AccumulateNeedsTheStatisticsThatItAddsTo) {
  Random random(seed() + 5);
  const Parts parts(1, 3, 4, random);
  Merged merged(3, 4, true);
  merged.tensors.softmax_sum = {};
  EXPECT_EQ(merge_attention(context(), parts.by_max(), merged.tensors, true).message(),
            "merge_attention: accumulate adds to what outputs hold, but softmax_max and softmax_sum are not both among "
            "the outputs");
}

struct Refusal {
  const char* name;
  std::function<void(AttentionParts&, AttentionOutputs&)> spoil;
  std::string message;
};
const Refusal kRefusals[] = {
    {"no_statistic", [](auto& in, auto&) { in.softmax_lse = {}; },
     "the parts need either softmax_lse or both softmax_max and softmax_sum"},
    {"dtype", [](auto& in, auto&) { in.out.dtype = DType::i32; },
     "parts.out is i32, but must be f32, bf16, f16 or f64"},
    {"lse_shape", [](auto& in, auto&) { in.softmax_lse.shape[1] = 5; },
     "parts.softmax_lse dim 1 is 5, but parts.out dim 1 is 6"},
    {"lse_parts", [](auto& in, auto&) { in.softmax_lse.shape[0] = 1; },
     "parts.softmax_lse dim 0 is 1, but parts.out dim 0 is 3"},
    {"out_dim", [](auto&, auto& out) { out.out.shape[1] = 4; }, "out dim 1 is 4, but parts.out dim 2 is 8"},
    {"out_rank", [](auto&, auto& out) { out.out.rank = 1; }, "out has rank 1, but parts.out f32 [3, 6, 8] asks for 2"},
    {"out_overlaps", [](auto& in, auto& out) { out.out.data = const_cast<void*>(in.out.data); },
     "out f32 [6, 8] overlaps parts.out f32 [3, 6, 8] in memory, but an output must not"},
    {"max_of_lse", [](auto&, auto& out) { out.softmax_max = out.softmax_lse, out.softmax_lse = {}; },
     "softmax_max is wanted, but the parts have softmax_lse only"},
    {"no_parts", [](auto& in, auto&) { in.out.shape[0] = 0; }, "parts.out dim 0 (parts) is 0, must be 1 to 4096"},
};
class MergeRefuses : public testing::TestWithParam<Refusal> {};
TEST_P(MergeRefuses, WithItsWholeMessageAndWritesNothing) {
  Random random(1);
  const Parts parts(3, 6, 8, random);
  Merged merged(6, 8, false);
  AttentionParts in = parts.by_lse();
  GetParam().spoil(in, merged.tensors);
  const Status status = merge_attention(context(), in, merged.tensors);
  EXPECT_EQ(status.message(), "merge_attention: " + GetParam().message);
  EXPECT_EQ(std::count(merged.out.begin(), merged.out.end(), 7.0f), 48);
}
INSTANTIATE_TEST_SUITE_P(Attention, MergeRefuses, testing::ValuesIn(kRefusals),
                         [](const auto& chosen) { return std::string(chosen.param.name); });

}  // namespace
}  // namespace opst::test
