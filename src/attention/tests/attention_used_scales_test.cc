// Pages of eight bits, where they are: scales and offsets that may not be read matter where some row sees their key, and
// nowhere else; pools beyond 2^31 elements.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/tests/block_mask_lists.h"
#include "attention/tests/byte_pages.h"
#include "opst/kv_cache.h"
#include "testing/contexts.h"
#include "testing/lazy_mapping.h"

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
  // Runs with bad numbers in the last group of a key's rows of one KV head.
  Outcome run_spoiled(const Problem& problem, const TestContext& t, const AttentionInputs& in, int64_t kv_head,
                      int64_t key = kKey) const {
    const int64_t row = (pages.norm.table[static_cast<size_t>(key / 16)] * 16 + key % 16) * 2 + kv_head;
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
        if (in.mask) {  // a tile with numbers that are not finite is summed key by key
          for (int64_t i = 0; i < 4 * kQueries * 16; ++i) {
            ASSERT_NEAR(get(hidden.out->tensor(), i), get(clean.out->tensor(), i), 1e-5);
          }
        } else {
          ASSERT_EQ(hidden.differs_from(clean), "");
        }
        const Outcome seen = scales.run_spoiled(problem, t, in, 1);
        ASSERT_EQ(seen.status.message(), refusal);
        for (int64_t i = 0; i < 4 * kQueries * 16; ++i) ASSERT_TRUE(std::isnan(get(seen.out->tensor(), i)));
      }
      ASSERT_EQ(scales.run_spoiled(problem, t, scales.pages.inputs, 1).status.message(), refusal);
    }
  }
}

// The second of three draft tokens, on no path or on its own.
TEST(AttentionUsedScales, DraftTokensOnNoPathDoNotMatter) {
  Random random(seed());
  const Problem problem(sizes(), random);
  const ScalesInUse scales(problem, kByteFormats[1], random);
  const std::vector<int64_t> without = {1, 1, 5}, with = {1, 3, 5};
  AttentionInputs in = scales.pages.inputs;
  for (const TestContext& t : contexts()) {
    in.tree_mask = ConstTensor::contiguous(DType::i64, {1, kQueries}, without.data());
    const Outcome clean = problem.run(t.context, in);
    const Outcome hidden = scales.run_spoiled(problem, t, in, 1, kKeys - 2);
    ASSERT_EQ(hidden.status.message(), "") << t.name;
    for (int64_t i = 0; i < 4 * kQueries * 16; ++i) {
      ASSERT_NEAR(get(hidden.out->tensor(), i), get(clean.out->tensor(), i), 1e-5) << t.name;
    }
    in.tree_mask = ConstTensor::contiguous(DType::i64, {1, kQueries}, with.data());
    const std::string refusal = scales.run_spoiled(problem, t, in, 1, kKeys - 2).status.message();
    ASSERT_NE(refusal.find(", row 4, head 1, group "), std::string::npos) << refusal;
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

// A cache whose last block holds five tokens: written, attended to and gathered.
class LastBlock {
 public:
  static constexpr int64_t kRows = 32, kHeads = 8, kDim = 128, kTokens = 5;

  LastBlock(DType dtype, PageLayout layout, int64_t blocks) : layout_(layout), block_(blocks - 1) {
    const PageSizes sizes = {blocks, kRows, kHeads, kDim, kDim};
    for (int i = 0; i < 4; ++i) {
      memory_[i] = std::make_unique<LazyMapping>(blocks * kRows * kHeads * (i < 2 ? kDim : 4));
      if (memory_[i]->data() == nullptr) return;
    }
    key_ = key_pages(layout, dtype, sizes, memory_[0]->data());
    value_ = value_pages(layout, dtype, sizes, memory_[1]->data());
    if (dtype == DType::i8) {
      scales_.key = key_scale_pages(layout, sizes, 1, memory_[2]->data());
      scales_.value = value_scale_pages(layout, sizes, 1, memory_[3]->data());
    }
  }
  bool is_there() const { return key_.data != nullptr; }

  Status scatter(Context& context, const ConstTensor& rows) const {
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < kTokens; ++t) slots.push_back(block_ * kRows + t * 3);
    return scatter_pa_kv_cache(context, rows, rows, ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()), key_,
                               value_, {.layout = layout_, .scales = scales_});
  }
  Status gather(Context& context, const Tensor& key, const Tensor& value) const {
    return gather_pa_kv_cache(context, key_, value_, table(), length(), key, value,
                              {.layout = layout_, .scales = scales_});
  }
  Status attend(Context& context, const ConstTensor& query, const ConstTensor& list, const Tensor& out) const {
    AttentionInputs in = {.query = query, .key = key_, .value = value_, .block_table = table(), .kv_lengths = length()};
    in.key_scales = scales_.key, in.value_scales = scales_.value;
    in.sparse_indices.indices = list;
    AttentionOptions options;
    options.page_layout = layout_;
    return flash_attention_forward(context, in, {.out = out}, options);
  }

 private:
  ConstTensor table() const { return ConstTensor::contiguous(DType::i64, {1, 1}, &block_); }
  ConstTensor length() const { return ConstTensor::contiguous(DType::i64, {1}, &length_); }

  PageLayout layout_;
  int64_t block_, length_ = 3 * kTokens - 2;
  std::unique_ptr<LazyMapping> memory_[4];
  Tensor key_, value_;
  PageScales scales_;
};

TEST(AttentionBytePages, B44_PoolsBeyond32Bits) {
  constexpr int64_t kLength = 3 * LastBlock::kTokens - 2, kHeads = LastBlock::kHeads, kDim = LastBlock::kDim;
  Random random(seed());
  std::vector<float> rows(LastBlock::kTokens * kHeads * kDim), queries(kHeads * 2 * kDim);
  for (std::vector<float>* list : {&rows, &queries}) {
    for (float& x : *list) x = static_cast<float>(random.normal());
  }
  const ConstTensor tokens = ConstTensor::contiguous(DType::f32, {LastBlock::kTokens, kHeads, kDim}, rows.data());
  const ConstTensor query = ConstTensor::contiguous(DType::f32, {1, kHeads, 2, kDim}, queries.data());
  std::vector<int32_t> entries;
  for (int64_t i = 0; i < 2 * kHeads; ++i) entries.insert(entries.end(), {9, 0, 12});
  for (const DType dtype : {DType::i8, DType::f8_e4m3}) {
    for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      const LastBlock small(dtype, layout, 1), large(dtype, layout, 70'001);
      if (!large.is_there()) GTEST_SKIP() << "the system refuses such a mapping";
      for (const TestContext& t : contexts_with_threads(2)) {
        SCOPED_TRACE(t.name + " " + to_string(dtype) + " " + to_string(layout));
        std::vector<std::vector<float>> found;
        for (const LastBlock* pool : {&small, &large}) {
          std::vector<float> key(kLength * kHeads * kDim), value(key), out(kHeads * 2 * kDim), listed(out);
          const auto gathered = [&](std::vector<float>& to) {
            return Tensor::contiguous(DType::f32, {kLength, kHeads, kDim}, to.data());
          };
          ASSERT_EQ(pool->scatter(t.context, tokens).message(), "");
          ASSERT_EQ(pool->gather(t.context, gathered(key), gathered(value)).message(), "");
          const auto attend = [&](const ConstTensor& list, std::vector<float>& to) {
            return pool->attend(t.context, query, list,
                                Tensor::contiguous(DType::f32, {1, kHeads, 2, kDim}, to.data()));
          };
          ASSERT_EQ(attend({}, out).message(), "");
          if (layout == PageLayout::norm) {
            const ConstTensor list = ConstTensor::contiguous(DType::i32, {1, 2, kHeads, 3}, entries.data());
            ASSERT_EQ(attend(list, listed).message(), "");
          }
          for (const std::vector<float>* of : {&key, &value, &out, &listed}) found.push_back(*of);
        }
        for (size_t i = 0; i < 4; ++i) ASSERT_EQ(found[i], found[i + 4]) << i;
        // Four significant bits of f8_e4m3.
        const double bound = dtype == DType::i8 ? 0.1 : std::fmax(0.1, std::fabs(rows[0]) / 16);
        ASSERT_NEAR(found[0][0], rows[0], bound);
        ASSERT_NE(found[2][0], 0.0f);
      }
    }
  }
}

}  // namespace
}  // namespace opst::test
