// Pages of eight bits, i8 with scales and f8, read where they are: against the reference over the numbers that they stand
// for, at every level. What belongs to nobody is poisoned: scales NaN, f8 NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "attention/tests/drawn_call.h"
#include "opst/attention_backward.h"
#include "testing/effort.h"

namespace opst::test {
namespace {

// The problem's keys and values as a cache of bytes. The problem gets the numbers that the bytes stand for, which f32
// holds exactly: nine bits of q + offset times six bits of a scale.
struct BytePages {
  struct Side {
    std::unique_ptr<GuardedBuffer> bytes, scales, offsets;
  };
  Pages norm;
  Side key, value;
  AttentionInputs inputs;

  BytePages(Problem& problem, DType dtype, bool has_offsets, int64_t block_size, Random& random) {
    const ProblemOptions& p = problem.options();
    struct Row {
      float scale, offset;
    };
    std::vector<Row> rows[2];
    std::vector<uint8_t> numbers[2];
    for (const bool keys : {true, false}) {
      const Tensor t = keys ? problem.key() : problem.value();
      for (int64_t i = 0; i < t.num_elements(); ++i) {
        uint8_t byte = 0;
        if (dtype == DType::i8) {
          if (i % t.shape[3] == 0) {
            rows[keys].push_back({static_cast<float>(random.integer(1, 63)) * 0x1p-11f,
                                  has_offsets ? static_cast<float>(random.integer(-127, 128)) : 0.0f});
          }
          const auto q = static_cast<int8_t>(random.integer(-128, 127));
          byte = static_cast<uint8_t>(q);
          const Row& row = rows[keys].back();
          test::set(t, i, (static_cast<double>(q) + static_cast<double>(row.offset)) * static_cast<double>(row.scale));
        } else {
          test::set(dtype, &byte, 0, random.normal());
          test::set(t, i, test::get(dtype, &byte, 0));
        }
        numbers[keys].push_back(byte);
      }
    }
    norm = problem.paged(block_size, random);
    inputs = norm.inputs;
    const int64_t blocks = norm.inputs.key.shape[0], heads = p.num_kv_heads;
    const auto max_blocks = static_cast<int64_t>(norm.table.size()) / p.batch;
    for (const bool keys : {true, false}) {
      Side& side = keys ? key : value;
      const int64_t dim = keys ? p.head_dim : p.value_head_dim;
      side.bytes = std::make_unique<GuardedBuffer>(blocks * block_size * heads * dim);
      side.scales = std::make_unique<GuardedBuffer>(blocks * block_size * heads * 4);
      side.offsets = std::make_unique<GuardedBuffer>(blocks * block_size * heads * 4);
      const Tensor scales = side.scales->tensor(DType::f32, {blocks, block_size, heads, 1});
      const Tensor offsets = side.offsets->tensor(DType::f32, {blocks, block_size, heads, 1});
      for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t j = 0; j < problem.length(b); ++j) {
            const int64_t block = norm.table[static_cast<size_t>(b * max_blocks + j / block_size)];
            const int64_t to = (block * block_size + j % block_size) * heads + h, from = (b * heads + h) * p.kv_len + j;
            std::copy_n(numbers[keys].begin() + from * dim, dim, static_cast<uint8_t*>(side.bytes->data()) + to * dim);
            if (dtype != DType::i8) continue;
            test::set(scales, to, static_cast<double>(rows[keys][static_cast<size_t>(from)].scale));
            test::set(offsets, to, static_cast<double>(rows[keys][static_cast<size_t>(from)].offset));
          }
        }
      }
      (keys ? inputs.key : inputs.value) = side.bytes->tensor(dtype, {blocks, block_size, heads, dim});
      if (dtype != DType::i8) continue;
      (keys ? inputs.key_scales : inputs.value_scales) = scales;
      if (has_offsets) (keys ? inputs.key_offsets : inputs.value_offsets) = offsets;
    }
  }
};

struct Format {
  DType dtype;
  bool has_offsets;
};
constexpr Format kFormats[] = {{DType::i8, false}, {DType::i8, true}, {DType::f8_e4m3, false}, {DType::f8_e5m2, false}};

TEST(AttentionBytePages, AgreeWithTheReference) {
  Random random(seed());
  int judged = 0;
  for (const Format format : kFormats) {
    for (const int64_t query_len : {1, 2, 5, 37}) {
      for (const int64_t kv_len : {1, 7, 64, 65, 300, 1100}) {
        ProblemOptions p;
        p.query_dtype = p.out_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
        p.batch = random.pick<int64_t>({1, 2});
        p.num_kv_heads = random.pick<int64_t>({1, 2});
        p.num_heads = p.num_kv_heads * random.pick<int64_t>({1, 3, 4, 13});
        p.query_len = query_len, p.kv_len = kv_len;
        p.head_dim = random.pick<int64_t>({1, 3, 8, 16, 33, 64, 80});
        p.value_head_dim = random.pick<int64_t>({1, 3, 16, 24, 40, 64, 71});
        p.ragged = p.batch > 1;
        p.options.causal = random.chance(0.6);
        p.options.window_left = random.chance(0.3) ? random.integer(0, 90) : kUnbounded;
        p.options.softcap = random.chance(0.3) ? 5 : 0;
        p.options.block_kv = random.pick<int64_t>({0, 0, 17, 32, 100});
        p.options.block_q = random.pick<int64_t>({0, 0, 5, 40});
        Problem problem(p, random);
        const BytePages pages(problem, format.dtype, format.has_offsets, random.pick<int64_t>({1, 5, 16, 64}), random);
        for (const TestContext& t : contexts()) {
          if (!exhaustive() && random.chance(0.7)) continue;
          SCOPED_TRACE(t.name + ", " + opst::to_string(format.dtype) + (format.has_offsets ? " with offsets" : ""));
          const Outcome r = problem.run(t.context, pages.inputs);
          ASSERT_EQ(problem.judge(r, t.context, 200), "");
          ++judged;
        }
      }
    }
  }
  EXPECT_GT(judged, 100);
}

// Float pages become such as bytes hold, and the bytes; rows of nobody are NaN, and have a scale of NaN.
class BytesOf {
 public:
  BytesOf(AttentionInputs& in, const Format& format, Random& random) {
    for (const bool keys : {true, false}) {
      ConstTensor& pages = keys ? in.key : in.value;
      const Tensor floats = mutable_view(pages);
      const int64_t dim = floats.shape[3], rows = floats.num_elements() / dim;
      bytes_[keys] = std::make_unique<GuardedBuffer>(rows * dim);
      for (auto* const memory : {&scales_[keys], &offsets_[keys]}) *memory = std::make_unique<GuardedBuffer>(rows * 4);
      const auto list = [&](const GuardedBuffer& memory) {
        return memory.tensor(DType::f32, {floats.shape[0], floats.shape[1], floats.shape[2], 1});
      };
      for (int64_t row = 0; row < rows; ++row) {
        if (std::isnan(test::get(floats, row * dim))) continue;
        const double scale = static_cast<double>(random.integer(1, 63)) * 0x1p-11;
        const double offset = format.has_offsets ? static_cast<double>(random.integer(-127, 128)) : 0;
        test::set(list(*scales_[keys]), row, scale);
        test::set(list(*offsets_[keys]), row, offset);
        for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
          const double number =
              format.dtype == DType::i8 ? static_cast<double>(random.integer(-128, 127)) : random.normal();
          test::set(format.dtype, bytes_[keys]->data(), i, number);
          const double stored = test::get(format.dtype, bytes_[keys]->data(), i);
          test::set(floats, i, format.dtype == DType::i8 ? (stored + offset) * scale : stored);
        }
      }
      pages = bytes_[keys]->tensor(format.dtype, {floats.shape[0], floats.shape[1], floats.shape[2], dim});
      if (format.dtype != DType::i8) continue;
      (keys ? in.key_scales : in.value_scales) = list(*scales_[keys]);
      if (format.has_offsets) (keys ? in.key_offsets : in.value_offsets) = list(*offsets_[keys]);
    }
  }

 private:
  std::unique_ptr<GuardedBuffer> bytes_[2], scales_[2], offsets_[2];
};

// Every option of attention, drawn as in attention_options_test.
TEST(AttentionBytePages, EveryOptionAgreesWithTheReference) {
  Random random(seed() + 4);
  double worst_ratio = 0;
  const int draws = static_cast<int>(400 * kEffort);
  for (int n = 0; n < draws; ++n) {
    Draw d = draw_for_forward(random);
    d.rope_dim = 0, d.values_of_keys = false;
    if (d.query_dtype == DType::f64) continue;
    d.keys = Keys::norm_pages, d.kv_dtype = DType::f32, d.non_finite = false;
    d.options.page_layout = PageLayout::norm;
    d.options.path = AttentionPath::automatic;
    const Format format = kFormats[random.integer(0, 3)];
    DrawnCall call(d, random);
    AttentionInputs inputs = call.inputs;
    const BytesOf bytes(inputs, format, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "")
        << "draw " << n << ", " << opst::to_string(format.dtype) << (format.has_offsets ? " with offsets" : "");
    const auto others = contexts_like(t);
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(others.back()->context, inputs, again.tensors, d.options).ok());
    ASSERT_EQ(again.differs_from(out), "") << to_string(d);
  }
  std::printf("%d draws, worst error / bound %.2f\n", draws, worst_ratio);
}

TEST(AttentionBytePages, SameBitsForEveryNumberOfThreadsAndAnyPages) {
  Random random(seed());
  for (const Format format : kFormats) {
    for (const int64_t query_len : {1, 30}) {
      ProblemOptions p;
      p.num_heads = 6, p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 2500, p.head_dim = p.value_head_dim = 64;
      p.options.causal = true;
      Problem problem(p, random);
      const BytePages pages(problem, format.dtype, format.has_offsets, 16, random);
      std::vector<Outcome> outcomes;
      for (const int threads : {1, 2, 3, 5}) {
        Result<Context> context = Context::create({.num_threads = threads});
        ASSERT_TRUE(context.ok());
        outcomes.push_back(problem.run(context.value(), pages.inputs));
        ASSERT_EQ(outcomes.back().status.message(), "");
        EXPECT_EQ(outcomes.front().differs_from(outcomes.back()), "");
      }
    }
  }
}

// Two queries, causal: the first does not see the last key. An infinite scale, the mark of a row that was not finite,
// makes NaN of what sees it, and of nothing else; with and without rules.
TEST(AttentionBytePages, HiddenRowsDoNotReachAQuery) {
  Random random(seed());
  for (const bool rules : {false, true}) {
    for (const bool keys : {false, true}) {
      ProblemOptions p;
      p.query_len = 2, p.kv_len = 70, p.head_dim = p.value_head_dim = 32;
      p.options.causal = true;
      p.options.softcap = rules ? 20 : 0;
      Problem problem(p, random);
      const BytePages pages(problem, DType::i8, false, 16, random);
      const int64_t row = pages.norm.table[4] * 16 + 69 % 16;
      const BytePages::Side& side = keys ? pages.key : pages.value;
      for (const TestContext& t : contexts_with_threads(1)) {
        SCOPED_TRACE(t.name);
        const Outcome before = problem.run(t.context, pages.inputs);
        float& scale = static_cast<float*>(side.scales->data())[row];
        const float kept = scale;
        scale = std::numeric_limits<float>::infinity();
        std::vector<int8_t> bytes(32, 0);
        std::swap_ranges(bytes.begin(), bytes.end(), static_cast<int8_t*>(side.bytes->data()) + row * 32);
        const Outcome after = problem.run(t.context, pages.inputs);
        std::swap_ranges(bytes.begin(), bytes.end(), static_cast<int8_t*>(side.bytes->data()) + row * 32);
        scale = kept;
        ASSERT_EQ(after.status.message(), "");
        for (int64_t d = 0; d < 32; ++d) {
          const double first = get(after.out->tensor(), d);
          EXPECT_LE(std::abs(first - get(before.out->tensor(), d)), 1e-5 * (1 + std::abs(first)));
          EXPECT_TRUE(std::isnan(get(after.out->tensor(), 32 + d)));
        }
      }
    }
  }
}

// Before anything is written: scales that are read, and no others; gradients; forms that nothing reads.
TEST(AttentionBytePages, Refusals) {
  Random random(seed());
  ProblemOptions p;
  p.query_len = 1, p.kv_len = 40, p.num_heads = p.num_kv_heads = 2, p.head_dim = p.value_head_dim = 8;
  p.options.causal = true;
  p.options.window_left = 20;
  Problem problem(p, random);
  const BytePages pages(problem, DType::i8, true, 16, random);
  const TestContext& t = contexts_with_threads(2).back();
  const auto message = [&](const AttentionInputs& in) { return problem.run(t.context, in).status.message(); };
  const auto at = [&](const BytePages::Side& side, bool offsets, int64_t key, int64_t head) -> float& {
    const int64_t row = pages.norm.table[static_cast<size_t>(key / 16)] * 16 + key % 16;
    return static_cast<float*>((offsets ? side.offsets : side.scales)->data())[row * 2 + head];
  };
  const auto spoiled = [&](float& x, float bad) {
    const float kept = std::exchange(x, bad);
    const Outcome r = problem.run(t.context, pages.inputs);
    x = kept;
    if (!r.status.ok()) {
      EXPECT_TRUE(std::isnan(get(r.out->tensor(), 0)));  // as it was
    }
    return r.status.message();
  };
  const std::string where = " of block " + std::to_string(pages.norm.table[2]) + ", row 1, head 1, group 0 is ";
  EXPECT_EQ(message(pages.inputs), "");
  EXPECT_EQ(spoiled(at(pages.key, false, 33, 1), -1),
            "flash_attention_forward: key_scales" + where + "-1.000000, but must be >= 0");
  EXPECT_EQ(spoiled(at(pages.value, false, 33, 1), std::nanf("")),
            "flash_attention_forward: value_scales" + where + "nan, but must be >= 0");
  EXPECT_EQ(spoiled(at(pages.value, true, 33, 1), std::numeric_limits<float>::infinity()),
            "flash_attention_forward: value_offsets" + where + "inf, but must be finite");
  EXPECT_EQ(spoiled(at(pages.key, false, 3, 0), -1), "");  // outside the window

  AttentionInputs in = pages.inputs;
  in.value_scales = {};
  EXPECT_EQ(message(in),
            "flash_attention_forward: value_scales is absent, but value is i8: integers to be multiplied with scales");
  in = pages.inputs;
  in.key_offsets = {};
  EXPECT_EQ(message(in), "flash_attention_forward: key_offsets and value_offsets must both be given or both be absent");
  in = pages.inputs;
  in.key_scales.shape[0] -= 1;
  EXPECT_NE(message(in).find("key_scales dim 0 (num_blocks) is "), std::string::npos);
  in = pages.inputs;
  in.key.shape[3] = 4, in.key.strides[3] = 2, in.query.shape[3] = 4;
  EXPECT_EQ(message(in), "flash_attention_forward: key and value of i8 must have unit stride in dim 3");
  in = pages.norm.inputs;
  in.key_scales = pages.inputs.key_scales;
  EXPECT_EQ(message(in), "flash_attention_forward: key_scales is given, but key is f32, and only i8 and u8 have any");
  in = problem.inputs;
  in.key_scales = pages.inputs.key_scales;
  EXPECT_EQ(message(in),
            "flash_attention_forward: key_scales, value_scales, key_offsets or value_offsets is given, but key is no "
            "norm pages of i8");
  in = problem.inputs;
  in.key.dtype = in.value.dtype = DType::f8_e4m3;
  EXPECT_EQ(message(in), "flash_attention_forward: key is f8_e4m3, but must be f32, bf16, f16 or f64");
  EXPECT_EQ(flash_attention_backward(t.context, pages.inputs, {}, {}).message(),
            "flash_attention_backward: key is i8, but gradients are taken of f32, bf16, f16 and f64");
}

}  // namespace
}  // namespace opst::test
