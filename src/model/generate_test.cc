// From a prompt to an answer, on small random weights.
#include "model/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "model/tiny_model.h"
#include "model/utf8.h"
#include "opst/context.h"

namespace opst::model {
namespace {

class GenerateTest : public testing::Test {
 protected:
  GenerateTest()
      : context_(std::move(Context::create({.num_threads = 1}).value())), bytes_(make_tiny_model().writer.bytes()) {
    open(bytes_);
  }
  void open(const std::string& bytes) {
    if (&bytes != &bytes_) bytes_ = bytes;
    const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes_));
    tokenizer_ = std::make_unique<Tokenizer>(std::move(Tokenizer::from_gguf(file.value()).value()));
    model_ = std::make_unique<LlamaModel>(std::move(LlamaModel::load(context_, file.value()).value()));
  }
  LlamaSession open_session(int64_t context) {
    return std::move(LlamaSession::create(context_, *model_, {.context = context}).value());
  }

  Result<Generation> run(const std::vector<int32_t>& prompt, const GenerateOptions& options, int64_t context) {
    LlamaSession session = open_session(context);
    streamed_.clear();
    return generate(session, *tokenizer_, prompt, options, [&](std::string_view text) {
      EXPECT_FALSE(text.empty());
      EXPECT_TRUE(is_valid_utf8(text));
      streamed_ += text;
      return Status();
    });
  }

  Context context_;
  std::string bytes_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<LlamaModel> model_;
  std::string streamed_;
};

TEST_F(GenerateTest, FinishReasons) {
  const auto length = run({5, 6, 7}, {.max_tokens = 20, .ignore_end = true}, 64);
  ASSERT_TRUE(length.ok()) << length.status().message();
  EXPECT_EQ(length.value().finish_reason, FinishReason::length);
  EXPECT_EQ(length.value().tokens.size(), 20u);
  EXPECT_EQ(length.value().text, streamed_);
  EXPECT_TRUE(length.value().tpot_ms.has_value());

  // Prompt and answer together fill the context.
  const auto full = run({5, 6, 7}, {.max_tokens = 100, .ignore_end = true}, 10);
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full.value().finish_reason, FinishReason::context);
  EXPECT_EQ(full.value().tokens.size(), 7u);
  EXPECT_TRUE(std::equal(full.value().tokens.begin(), full.value().tokens.end(), length.value().tokens.begin()));

  EXPECT_EQ(run(std::vector<int32_t>(10, 5), {}, 10).status().message(),
            "the prompt has 10 tokens, which leaves no room in a context of 10");
  EXPECT_EQ(run({}, {}, 10).status().message(), "no tokens to feed");
  EXPECT_FALSE(run({5}, {.max_tokens = 1}, 10).value().tpot_ms.has_value());
}

TEST_F(GenerateTest, StopsAtTheEndTokenUnlessTold) {
  // A prompt whose answer holds the end token: sampled ones get there soon.
  for (uint64_t seed = 0; seed < 200; ++seed) {
    GenerateOptions options{.max_tokens = 60, .sampling = {.greedy = false, .temperature = 3.0, .seed = seed}};
    const auto stopped = run({5, 6}, options, 64);
    ASSERT_TRUE(stopped.ok());
    const auto& tokens = stopped.value().tokens;
    const bool ends = tokens.back() == 2;
    EXPECT_EQ(stopped.value().finish_reason, ends ? FinishReason::stop : FinishReason::length);
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 2), ends ? 1 : 0);
    EXPECT_EQ(stopped.value().text.find("<|im_end|>"), std::string::npos);
    if (!ends) continue;
    options.ignore_end = true;
    const auto going_on = run({5, 6}, options, 64);
    EXPECT_EQ(going_on.value().tokens.size(), 60u);
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), going_on.value().tokens.begin()));
    return;
  }
  ADD_FAILURE() << "no seed gave the end token";
}

TEST_F(GenerateTest, AFailingReaderStopsIt) {
  LlamaSession session = open_session(64);
  const auto result = generate(session, *tokenizer_, std::vector<int32_t>{5}, {.ignore_end = true},
                               [](std::string_view) { return Status(StatusCode::internal, "pipe"); });
  EXPECT_EQ(result.status().message(), "pipe");
}

// Any end of a text, of a turn or of a message ends an answer.
TEST_F(GenerateTest, EveryEndTokenStops) {
  const auto likeliest = run({5, 6, 7}, {.max_tokens = 6, .ignore_end = true}, 64);
  const int32_t third = likeliest.value().tokens[2];
  for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    TinyModel tiny = make_tiny_model();
    tiny.writer.u32(key, static_cast<uint32_t>(third));
    open(tiny.writer.bytes());
    const auto stopped = run({5, 6, 7}, {.max_tokens = 6}, 64);
    ASSERT_TRUE(stopped.ok());
    EXPECT_EQ(stopped.value().finish_reason, FinishReason::stop) << key;
    EXPECT_EQ(stopped.value().tokens.back(), third);
    EXPECT_LE(stopped.value().tokens.size(), 3u);
  }
}

// A weight that overflowed gives no text at all, as it gives no perplexity.
TEST_F(GenerateTest, ALogitThatIsNotFiniteIsAnError) {
  std::string bytes = bytes_;
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + file.value().find_tensor("output_norm.weight")->offset, &nan, sizeof nan);
  open(bytes);
  const auto result = run({5, 6}, {}, 64);
  EXPECT_EQ(result.status().code(), StatusCode::internal);
  EXPECT_NE(result.status().message().find("not a finite number"), std::string::npos) << result.status().message();
}

TEST_F(GenerateTest, Interrupted) {
  LlamaSession session = open_session(64);
  const auto result = generate(
      session, *tokenizer_, std::vector<int32_t>{5}, {.ignore_end = true}, [](std::string_view) { return Status(); },
      [] { return true; });
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().finish_reason, FinishReason::interrupted);
  EXPECT_TRUE(result.value().tokens.empty());
}

}  // namespace
}  // namespace opst::model
