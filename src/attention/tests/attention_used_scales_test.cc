// Scales and offsets of pages that may not be read: they matter where some row sees their key, and nowhere else.
#include <gtest/gtest.h>

#include "attention/tests/block_mask_lists.h"
#include "attention/tests/byte_pages.h"
#include "testing/contexts.h"

namespace opst::test {
namespace {

constexpr int64_t kQueries = 3, kKeys = 70, kKey = 44;  // the key whose numbers are bad

// Query heads 0 and 1, of KV head 0, do not see kKey; of heads 2 and 3 some row does.
class ScalesInUse {
 public:
  ScalesInUse(const Problem& problem, const ByteFormat& format, Random& random)
      : pages(problem, format, 16, random),
        shown_(4 * kQueries * kKeys, 1),
        blocks_(1, 2, kQueries, kKeys, 2, 5, [](auto, auto h, auto, auto j) { return h == 1 || j != kKey / 5; }) {
    for (size_t row = 0; row + 1 < 4 * kQueries; ++row) shown_[row * kKeys + kKey] = 0;  // the last row sees it
    for (int64_t list = 0; list < kQueries * 2; ++list) {
      const bool sees = list == 5;
      for (int32_t j = 0; j < 18; ++j) listed_.push_back(sees || j < kKey / 4 ? j : j < 17 ? j + 1 : -1);
    }
  }
  std::vector<AttentionInputs> calls() const {
    std::vector<AttentionInputs> calls(3, pages.inputs);
    calls[0].mask = ConstTensor::contiguous(DType::boolean, {1, 4, kQueries, kKeys}, shown_.data());
    calls[1].block_mask = blocks_.mask;
    calls[2].sparse_indices = {ConstTensor::contiguous(DType::i32, {1, kQueries, 2, 18}, listed_.data()), 4};
    return calls;
  }
  // Runs with bad numbers in the last group of kKey's rows of one KV head.
  Outcome run_spoiled(const Problem& problem, const TestContext& t, const AttentionInputs& in, int64_t kv_head) const {
    const int64_t row = (pages.norm.table[kKey / 16] * 16 + kKey % 16) * 2 + kv_head;
    struct Spoilt {
      float* at;
      float kept;
    };
    std::vector<Spoilt> all;
    const auto spoil = [&](const BytePages::Side& side, const GuardedBuffer& numbers, float bad) {
      float* const at = static_cast<float*>(numbers.data()) + (row + 1) * side.groups - 1;
      all.push_back({at, std::exchange(*at, bad)});
    };
    spoil(pages.bytes.key, *pages.bytes.key.scales, std::nanf(""));
    spoil(pages.bytes.value, *pages.bytes.value.scales, -1);
    spoil(pages.bytes.value, *pages.bytes.value.offsets, std::numeric_limits<float>::infinity());
    Outcome r = problem.run(t.context, in);
    for (const Spoilt& s : all) *s.at = s.kept;
    return r;
  }

  const BytePagesOf pages;

 private:
  std::vector<uint8_t> shown_;
  MaskLists blocks_;
  std::vector<int32_t> listed_;
};

ProblemOptions sizes() {
  ProblemOptions p;
  p.num_heads = 4, p.num_kv_heads = 2, p.query_len = kQueries, p.kv_len = kKeys, p.head_dim = p.value_head_dim = 16;
  return p;
}

TEST(AttentionUsedScales, HiddenOnesDoNotMatterAndOthersAreRefused) {
  Random random(seed());
  for (const ByteFormat& format : {kByteFormats[0], kByteFormats[1], kByteFormats[6]}) {
    const Problem problem(sizes(), random);
    const ScalesInUse scales(problem, format, random);
    const std::string groups = std::to_string(scales.pages.bytes.key.groups - 1);
    const std::string refusal = "flash_attention_forward: key_scales of block " +
                                std::to_string(scales.pages.norm.table[kKey / 16]) + ", row 12, head 1, group " +
                                groups + " is nan, but must be >= 0";
    for (const TestContext& t : contexts()) {
      int way = 0;
      for (const AttentionInputs& in : scales.calls()) {
        SCOPED_TRACE(t.name + ", " + format.name + ", way to hide " + std::to_string(way++));
        const Outcome clean = problem.run(t.context, in);
        ASSERT_EQ(clean.status.message(), "");
        const Outcome hidden = scales.run_spoiled(problem, t, in, 0);
        ASSERT_EQ(hidden.status.message(), "");
        ASSERT_EQ(hidden.differs_from(clean), "");
        const Outcome seen = scales.run_spoiled(problem, t, in, 1);
        ASSERT_EQ(seen.status.message(), refusal);
        for (int64_t i = 0; i < 4 * kQueries * 16; ++i) ASSERT_TRUE(std::isnan(get(seen.out->tensor(), i)));
      }
      ASSERT_EQ(scales.run_spoiled(problem, t, scales.pages.inputs, 1).status.message(), refusal);
    }
  }
}

// Three queries of the first keys.
TEST(AttentionUsedScales, KeysBehindTheLastQueryAreNotLookedAt) {
  Random random(seed());
  ProblemOptions p = sizes();
  p.options.causal = true, p.options.alignment = CausalAlignment::top_left;
  const Problem problem(p, random);
  const ScalesInUse scales(problem, kByteFormats[1], random);
  for (const TestContext& t : contexts()) {
    const Outcome clean = problem.run(t.context, scales.pages.inputs);
    const Outcome hidden = scales.run_spoiled(problem, t, scales.pages.inputs, 1);
    ASSERT_EQ(hidden.status.message(), "") << t.name;
    ASSERT_EQ(hidden.differs_from(clean), "") << t.name;
  }
}

}  // namespace
}  // namespace opst::test
