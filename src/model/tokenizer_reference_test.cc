// Every text of the reference data, with the real model's vocabulary.
#include "model/prompt.h"
#include "model/reference_data.h"
#include "model/tokenizer.h"

namespace opst::model {
namespace {

class TokenizerReference : public ReferenceModelTest {
 protected:
  void SetUp() override {
    ReferenceModelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    Result<GgufFile> file = GgufFile::open(reference_model_path());
    ASSERT_TRUE(file.ok()) << file.status().message();
    file_ = std::make_unique<GgufFile>(std::move(file.value()));
    Result<Tokenizer> tokenizer = Tokenizer::from_gguf(*file_);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    tokenizer_ = std::make_unique<Tokenizer>(std::move(tokenizer.value()));
  }
  std::unique_ptr<GgufFile> file_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(TokenizerReference, EveryCase) {
  const auto cases = reference_lines("tokenizer_cases.jsonl");
  ASSERT_EQ(cases.size(), 282u);
  for (const auto& line : cases) {
    const auto text = line["text"].get<std::string>();
    const auto ids = tokenizer_->encode(text, line["parse_special"].get<bool>());
    ASSERT_TRUE(ids.ok()) << line;
    EXPECT_EQ(ids.value(), line["token_ids"].get<std::vector<int32_t>>()) << line;
  }
}

TEST_F(TokenizerReference, EveryPromptWithSpecialTokensParsed) {
  const auto prompts = reference_lines("prompts.jsonl");
  ASSERT_EQ(prompts.size(), 12u);
  for (const auto& line : prompts) {
    const auto ids = text_ids(*tokenizer_, line["prompt"].get<std::string>());
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(ids.value(), line["token_ids"].get<std::vector<int32_t>>()) << line["id"];
  }
}

TEST_F(TokenizerReference, ChatsWithLiteralContent) {
  int64_t literal = 0;
  for (const auto& line : reference_lines("prompts.jsonl")) {
    if (line["form"] != "chat") continue;
    std::vector<ChatMessage> messages;
    for (const auto& message : line["messages"]) messages.push_back({message["role"], message["content"]});
    const auto ids = chat_prompt(*file_, *tokenizer_, messages);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    const bool has_literal = line.contains("token_ids_content_literal");
    literal += has_literal;
    const auto& expected = line[has_literal ? "token_ids_content_literal" : "token_ids"];
    EXPECT_EQ(ids.value(), expected.get<std::vector<int32_t>>()) << line["id"];
  }
  EXPECT_EQ(literal, 1);
}

TEST_F(TokenizerReference, DecodingRoundTrips) {
  for (const auto& line : reference_lines("greedy.jsonl")) {
    std::string text;
    for (const int32_t id : line["tokens"].get<std::vector<int32_t>>()) text += tokenizer_->piece(id);
    const auto expected = line["text"].get<std::string>();
    if (expected.find("\xEF\xBF\xBD") == std::string::npos) {
      EXPECT_EQ(text, expected) << line["id"];
    }
  }
}

}  // namespace
}  // namespace opst::model
