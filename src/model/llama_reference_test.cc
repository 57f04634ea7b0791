// The real model against trusted engines: see src/testing/data/reference/README.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>

#include "model/llama.h"
#include "model/prompt.h"
#include "model/reference_data.h"
#include "model/sampler.h"
#include "testing/contexts.h"
#include "testing/effort.h"

namespace opst::model {
namespace {

struct Reference {
  Context context;
  GgufFile file;
  Tokenizer tokenizer;
  LlamaModel model;
};

// The file is opened and its weights are packed once for all cases: packed weights serve every level.
const Reference& reference() {
  static const Reference loaded = [] {
    Context context = std::move(Context::create().value());
    GgufFile file = std::move(GgufFile::open(reference_model_path()).value());
    Tokenizer tokenizer = std::move(Tokenizer::from_gguf(file).value());
    LlamaModel model = std::move(LlamaModel::load(context, file).value());
    return Reference{std::move(context), std::move(file), std::move(tokenizer), std::move(model)};
  }();
  return loaded;
}

class LlamaReference : public ReferenceModelTest {};

// Under a sanitizer a fifth of the cases, by the seed.
bool left_out(const std::string& file, const nlohmann::json& line) {
  return test::kSanitized && test::drawn_case(file + line["id"].get<std::string>(), 5) != 0;
}

// The most that a case decodes: a sanitizer makes a token about ten times as slow.
constexpr size_t kTokens = test::kSanitized ? 4 : SIZE_MAX;

struct Case {
  nlohmann::json prompt, greedy;
  std::vector<int32_t> prompt_ids() const { return prompt["token_ids"]; }
  std::vector<int32_t> tokens() const { return greedy["tokens_no_stop"]; }
  // Positions over 1000 have float32 rope angles in the reference.
  double tolerance() const { return prompt["n_tokens"].get<int>() < 200 ? 3e-4 : 3e-3; }
};

Case find_case(const std::string& id) {
  return {reference_line("prompts.jsonl", id), reference_line("greedy.jsonl", id)};
}

// Greedy tokens from `session`, the first `count` of the case's, with their logits.
void check_greedy(LlamaSession& session, const Case& c, size_t count) {
  SCOPED_TRACE(c.prompt["id"]);
  const std::vector<int32_t> expected = c.tokens();
  count = std::min(count, expected.size());
  Sampler sampler = std::move(Sampler::create({}).value());
  auto logits = session.feed(c.prompt_ids());
  for (size_t i = 0; i < count; ++i) {
    ASSERT_TRUE(logits.ok()) << logits.status().message();
    const int32_t token = sampler.next(logits.value()).value();
    ASSERT_EQ(token, expected[i]) << "step " << i << ", gap " << c.greedy["gap"][i];
    EXPECT_NEAR(logits.value()[static_cast<size_t>(token)], c.greedy["logit"][i].get<double>(), c.tolerance()) << i;
    const size_t second = c.greedy["second_id"][i];
    EXPECT_NEAR(logits.value()[second], c.greedy["second_logit"][i].get<double>(), c.tolerance()) << i;
    if (i + 1 < count) logits = session.feed({&token, 1});
  }
}

LlamaSession open_session(Context& context, const SessionOptions& options) {
  Result<LlamaSession> session = LlamaSession::create(context, reference().model, options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(session.value());
}

Context make_context(int num_threads) { return std::move(Context::create({.num_threads = num_threads}).value()); }

TEST_F(LlamaReference, EveryPromptsGreedyTokens) {
  Context context = make_context(0);
  LlamaSession session = open_session(context, {.context = 1280});
  int cases = 0;
  for (const auto& line : reference_lines("prompts.jsonl")) {
    const Case c = find_case(line["id"]);
    EXPECT_EQ(c.tokens().size(), c.prompt["n_greedy"].get<size_t>());
    ++cases;
    if (left_out("prompts", line)) continue;
    session.reset();
    check_greedy(session, c, kTokens);
  }
  EXPECT_EQ(cases, 12);
}

TEST_F(LlamaReference, B98_LogitsAfterThePrompt) {
  Context context = make_context(0);
  LlamaSession session = open_session(context, {.context = 1280});
  for (const auto& line : reference_lines("logits.jsonl")) {
    if (left_out("logits", line)) continue;
    SCOPED_TRACE(line["id"]);
    const Case c = find_case(line["id"]);
    session.reset();
    const auto logits = session.feed(c.prompt_ids());
    ASSERT_TRUE(logits.ok());
    double sum = 0, squares = 0, exponentials = 0;
    for (const float logit : logits.value()) {
      sum += logit;
      squares += static_cast<double>(logit) * logit;
      exponentials += std::exp(static_cast<double>(logit) - 30);
    }
    const double size = static_cast<double>(logits.value().size());
    EXPECT_NEAR(sum / size, line["mean"].get<double>(), c.tolerance());
    EXPECT_NEAR(std::log(exponentials) + 30, line["logsumexp"].get<double>(), c.tolerance());
    // A difference of the tolerance everywhere moves the norm by its square root of the size at most.
    EXPECT_NEAR(std::sqrt(squares), line["l2_norm"].get<double>(), c.tolerance() * std::sqrt(size));
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(logits.value()[i], line["first8"][i].get<double>(), c.tolerance());
    for (const auto& [id, value] : line["top10"].get<std::vector<std::pair<size_t, double>>>()) {
      EXPECT_NEAR(logits.value()[id], value, c.tolerance()) << id;
    }
  }
}

TEST_F(LlamaReference, EveryInstructionSetLevel) {
  for (const test::TestContext& t : test::contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    LlamaSession session = open_session(const_cast<Context&>(t.context), {.context = 128});
    check_greedy(session, find_case("short_en"), std::min<size_t>(kTokens, 30));
    session.reset();
    check_greedy(session, find_case("one_token"), std::min<size_t>(kTokens, 16));
  }
}

TEST_F(LlamaReference, ThreadsChunksAndCaches) {
  const Case c = find_case("code_crlf");
  constexpr int64_t kAll = 128;
  for (const int num_threads : {1, 2}) {
    if (test::kSanitized && num_threads == 1) continue;
    Context context = make_context(num_threads);
    const auto check = [&](const SessionOptions& options) {
      SCOPED_TRACE(testing::Message() << num_threads << " threads, chunk " << options.prefill_chunk << ", block size "
                                      << (options.cache == CacheKind::paged ? options.block_size : 0));
      LlamaSession session = open_session(context, options);
      check_greedy(session, c, std::min<size_t>(kTokens, 20));
    };
    for (const int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}, kAll}) {
      check({.context = kAll, .prefill_chunk = chunk});
    }
    for (const int64_t block_size : {1, 16, 32, 33, 96}) {
      check({.context = kAll, .cache = CacheKind::paged, .block_size = block_size, .prefill_chunk = kAll});
    }
    check({.context = kAll, .cache = CacheKind::paged, .block_size = 16, .prefill_chunk = 7});
  }
}

TEST_F(LlamaReference, RoundedCaches) {
  // Fed with the reference's tokens, so that an early difference does not decide all later ones.
  Context context = make_context(0);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    SCOPED_TRACE(to_string(dtype));
    const Case c = find_case("mixed_scripts");
    std::vector<int32_t> tokens = c.prompt_ids();
    const size_t prompt_size = tokens.size();
    for (const int32_t token : c.tokens()) tokens.push_back(token);
    LlamaSession session = open_session(context, {.context = 256, .kv_dtype = dtype, .logit_rows = 32});
    int64_t sure = 0;
    double largest = 0;
    const Status status = session.feed_all(tokens, [&](int64_t position, std::span<const float> logits) {
      const size_t next = static_cast<size_t>(position) + 1;
      if (next < prompt_size || next >= tokens.size()) return;
      const size_t step = next - prompt_size;
      const double difference =
          std::fabs(logits[static_cast<size_t>(tokens[next])] - c.greedy["logit"][step].get<double>());
      largest = std::max(largest, difference);
      if (c.greedy["gap"][step].get<double>() <= 1) return;
      ++sure;
      EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), tokens[next]) << step;
    });
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GT(sure, 20);
    EXPECT_GT(largest, 0);
    EXPECT_LT(largest, dtype == DType::f16 ? 0.1 : 0.5);
  }
}

TEST_F(LlamaReference, LikelihoodOfAText) {
  if (test::kSanitized) GTEST_SKIP() << "under a sanitizer perplexity_reference_test computes this window";
  std::ifstream text_file(std::string(OPST_SOURCE_DIR) + "/src/testing/data/reference/devils_dictionary_excerpt.txt",
                          std::ios::binary);
  std::ostringstream text;
  text << text_file.rdbuf();
  std::ifstream data_file(std::string(OPST_SOURCE_DIR) + "/src/testing/data/reference/perplexity.json");
  const nlohmann::json data = nlohmann::json::parse(data_file);
  nlohmann::json expected;
  for (const auto& entry : data["texts"]) {
    if (entry["name"] == "devils_dictionary_excerpt") expected = entry;
  }
  const auto ids = reference().tokenizer.encode(text.str(), false);
  ASSERT_TRUE(ids.ok());
  ASSERT_EQ(ids.value().size(), expected["n_tokens"].get<size_t>());
  // The first window of 1024 tokens.
  const auto window = std::span(ids.value()).first(1024);
  Context context = make_context(0);
  LlamaSession session = open_session(context, {.context = 1024, .logit_rows = 64});
  double nll = 0;
  const Status status = session.feed_all(window, [&](int64_t position, std::span<const float> logits) {
    if (position + 1 == 1024) return;
    const float largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit - largest));
    nll += largest + std::log(sum) - logits[static_cast<size_t>(window[static_cast<size_t>(position) + 1])];
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_NEAR(nll / 1023, expected["windows"][0]["nll_mean"].get<double>(), 1e-5);
}

}  // namespace
}  // namespace opst::model
