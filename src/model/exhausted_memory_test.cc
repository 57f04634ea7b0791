// Reading, loading and running a model when memory is exhausted: each allocation of each call fails in turn. The call
// gives a Status, nothing is leaked, and what the call was made on still works.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/conversation.h"
#include "model/generate.h"
#include "model/gguf.h"
#include "model/llama.h"
#include "model/perplexity.h"
#include "model/prompt.h"
#include "model/tiny_model.h"
#include "model/tokenizer.h"
#include "testing/fail_allocations.h"

namespace opst::model {
namespace {

using test::fail_each_allocation;
using test::live_allocations;

class ModelMemory : public testing::Test {
 protected:
  ModelMemory() {
    ContextOptions options;
    options.num_threads = 2;
    context_.emplace(std::move(Context::create(options).value()));
    TinyModelOptions tiny;
    tiny.num_layers = 1;
    bytes_ = make_tiny_model(tiny).writer.bytes();
    file_.emplace(std::move(GgufFile::parse("tiny.gguf", as_bytes(bytes_)).value()));
    tokenizer_.emplace(std::move(Tokenizer::from_gguf(*file_).value()));
  }
  void make_session() {
    weights_.emplace(std::move(LlamaModel::load(*context_, *file_).value()));
    session_.emplace(std::move(LlamaSession::create(*context_, *weights_, small_).value()));
  }
  // Nothing of the attempt is left behind, workspaces aside.
  int64_t live() {
    context_->trim();
    return live_allocations;
  }

  std::string bytes_;
  std::optional<Context> context_;
  std::optional<GgufFile> file_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<LlamaModel> weights_;
  std::optional<LlamaSession> session_;
  const SessionOptions small_ = {.context = 64, .prefill_chunk = 8, .logit_rows = 2};
};

TEST_F(ModelMemory, ReadingAFile) {
  const std::string path = testing::TempDir() + "exhausted_memory_" + std::to_string(getpid()) + ".gguf";
  std::ofstream(path, std::ios::binary) << bytes_;
  const std::string missing = path + ".missing";
  int64_t before = live();
  EXPECT_GT(fail_each_allocation([&] { return GgufFile::open(path).status(); }, [&] { EXPECT_EQ(live(), before); }),
            20);
  fail_each_allocation([&] { return GgufFile::open(missing).status(); }, [] {}, StatusCode::invalid_argument);
  std::remove(path.c_str());

  const std::string cut = bytes_.substr(0, 1000);
  fail_each_allocation([&] { return GgufFile::parse("cut", as_bytes(cut)).status(); }, [] {},
                       StatusCode::invalid_argument);
  fail_each_allocation([&] { return file_->integer("a key that is missing").status(); }, [] {},
                       StatusCode::invalid_argument);
  before = live();
  EXPECT_GT(
      fail_each_allocation([&] { return Tokenizer::from_gguf(*file_).status(); }, [&] { EXPECT_EQ(live(), before); }),
      100);
}

TEST_F(ModelMemory, Tokenizing) {
  const std::string text = "hello world 12 aaaa <|im_end|> \xC3\xA9";
  const auto right = tokenizer_->encode(text, true);
  ASSERT_TRUE(right.ok());
  std::optional<Result<std::vector<int32_t>>> last;
  last.emplace(right);
  const int64_t failed = fail_each_allocation(
      [&] {
        last.emplace(tokenizer_->encode(text, true));
        return last->status();
      },
      [&] {
        if (last->ok()) {
          EXPECT_EQ(last->value(), right.value());
        }
      });
  EXPECT_GT(failed, 5);
  fail_each_allocation([&] { return chat_prompt(*file_, *tokenizer_, {}).status(); });
  fail_each_allocation([&] { return text_ids(*tokenizer_, "hello").status(); });
}

TEST_F(ModelMemory, Loading) {
  const int64_t before = live();
  const int64_t failed = fail_each_allocation([&] { return LlamaModel::load(*context_, *file_).status(); },
                                              // The context keeps the block that the next weights go to.
                                              [&] { EXPECT_LE(live(), before + 5); });
  EXPECT_GT(failed, 50);
}

TEST_F(ModelMemory, MakingASession) {
  make_session();
  const int64_t before = live();
  const int64_t failed = fail_each_allocation(
      [&] { return LlamaSession::create(*context_, *weights_, small_).status(); }, [&] { EXPECT_EQ(live(), before); });
  EXPECT_GT(failed, 100);
}

TEST_F(ModelMemory, FeedingASession) {
  make_session();
  const std::vector<int32_t> tokens = {5, 60, 7, 8, 90, 10, 11, 12, 13, 14, 15};
  std::vector<float> right;
  const auto feed = [&]() -> Status {
    session_->reset();
    const Result<std::span<const float>> first = session_->feed(tokens);
    if (!first.ok()) return first.status();
    return session_->feed(std::span(tokens).first(1)).status();
  };
  const auto logits = [&] {
    EXPECT_TRUE(feed().ok());
    const auto last = session_->feed(std::span(tokens).first(1));
    return last.ok() ? std::vector<float>(last.value().begin(), last.value().end()) : std::vector<float>();
  };
  right = logits();
  ASSERT_FALSE(right.empty());
  context_->trim();
  EXPECT_GT(fail_each_allocation(feed,
                                 [&] {
                                   EXPECT_EQ(logits(), right);
                                   context_->trim();
                                 }),
            0);
  // A refused call needs memory for its message alone.
  const std::vector<int32_t> outside = {5, 1 << 20};
  session_->reset();
  fail_each_allocation([&] { return session_->feed(outside).status(); }, [&] { EXPECT_EQ(session_->position(), 0); },
                       StatusCode::invalid_argument);
}

// Whatever ends a call early, an exception of the visitor too, puts the position back.
TEST_F(ModelMemory, FeedAllIsAllOrNothing) {
  make_session();
  const std::vector<int32_t> tokens(30, 5);
  ASSERT_TRUE(session_->feed(std::span(tokens).first(3)).ok());
  int64_t visited = 0;
  const Status status = session_->feed_all(tokens, [&](int64_t, std::span<const float>) {
    if (++visited == 20) throw std::bad_alloc();
  });
  EXPECT_EQ(status.code(), StatusCode::out_of_memory);
  EXPECT_EQ(session_->position(), 3);
  context_->trim();
  const LlamaSession::LogitsVisitor nobody = [](int64_t, std::span<const float>) {};
  const auto feed = [&] { return session_->feed_all(tokens, nobody); };
  const int64_t failed = fail_each_allocation(feed, [&] {
    EXPECT_TRUE(session_->position() == 3 || session_->position() == 33) << session_->position();
    session_->rewind(3);
    context_->trim();
  });
  EXPECT_GT(failed, 0);
}

TEST_F(ModelMemory, GeneratingAndMeasuring) {
  make_session();
  const std::vector<int32_t> prompt = {5, 60, 7};
  const GenerateOptions options = {.max_tokens = 4, .ignore_end = true, .sampling = {.seed = 7}};
  const TextReader nobody = [](std::string_view) { return Status(); };
  const auto generation = [&] { return generate(*session_, *tokenizer_, prompt, options, nobody); };
  const std::vector<int32_t> right = generation().value().tokens;
  const int64_t before = live();
  int64_t failed = fail_each_allocation([&] { return generation().status(); },
                                        [&] {
                                          EXPECT_EQ(live(), before);
                                          EXPECT_EQ(generation().value().tokens, right);
                                        });
  EXPECT_GT(failed, 5);

  const std::vector<int32_t> text(20, 9);
  failed =
      fail_each_allocation([&] { return measure_perplexity(*session_, text, {}).status(); }, [&] { context_->trim(); });
  EXPECT_GT(failed, 0);
}

TEST_F(ModelMemory, AConversation) {
  make_session();
  const Result<ChatTemplate> chat_template = ChatTemplate::from_gguf(*file_, *tokenizer_);
  ASSERT_TRUE(chat_template.ok());
  const TextReader nobody = [](std::string_view) { return Status(); };
  const auto talk = [&]() -> Status {
    Result<Conversation> made = Conversation::create(*session_, *tokenizer_, chat_template.value(), "s", {});
    if (!made.ok()) return made.status();
    const Status first = made.value().answer("a", 2, nobody, {}).status();
    if (!first.ok()) return first;
    return made.value().answer("b", 2, nobody, {}).status();
  };
  ASSERT_TRUE(talk().ok());
  const int64_t before = live();
  EXPECT_GT(fail_each_allocation(talk, [&] { EXPECT_EQ(live(), before); }), 20);
}

}  // namespace
}  // namespace opst::model
