// The model on small random weights: against the same equations in double, one position after the other.
#include "model/llama.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <thread>

#include "model/double_llama.h"
#include "testing/contexts.h"
#include "testing/count_allocations.h"

namespace opst::model {
namespace {

TEST(Llama, B98_B99_EqualsTheEquationsAtEveryLevel) {
  for (const int num_threads : {1, 2}) {
    for (const test::TestContext& t : test::contexts_with_threads(num_threads)) {
      SCOPED_TRACE(t.name + ", " + std::to_string(num_threads) + " threads");
      Context& context = const_cast<Context&>(t.context);
      check_against_double(context, load(context), {.context = 64}, kTolerance);
    }
  }
}

// Tensor types that the tiny model lacks by default; one type in the whole model, embedding included.
TEST(Llama, EveryTensorTypeIsReadAtEveryLevel) {
  const std::vector<uint32_t> by_default = TinyModelOptions().types;
  size_t found = 0;
  for (uint32_t type = 0; type < 64; ++type) {
    const TensorType* const row = find_tensor_type(type);
    if (row == nullptr || !parse_quant_format(row->name)) continue;
    ++found;
    if (std::find(by_default.begin(), by_default.end(), type) != by_default.end()) continue;
    for (const test::TestContext& t : test::contexts_with_threads(2)) {
      SCOPED_TRACE(t.name + ", " + row->name);
      const Loaded loaded = load(t.context, {.num_layers = 1,
                                             .num_heads = 8,
                                             .num_kv_heads = 8,
                                             .ffn_size = 256,
                                             .types = {type},
                                             .embedding_type = type});
      check_against_double(t.context, loaded, {.context = 64}, kTolerance);
    }
  }
  EXPECT_EQ(found, static_cast<size_t>(kNumQuantFormats));
}

TEST(Llama, MixturesEqualTheEquationsAtEveryLevel) {
  for (const int64_t shared_size : {0, 96}) {
    for (const test::TestContext& t : test::contexts_with_threads(2)) {
      SCOPED_TRACE(t.name + ", shared " + std::to_string(shared_size));
      const Loaded loaded = load(t.context, {.num_experts = 5, .experts_used = 2, .shared_size = shared_size});
      EXPECT_GT(loaded.model.expert_bytes(), loaded.model.weight_bytes() / 4);
      check_against_double(t.context, loaded, {.context = 64}, kTolerance);
    }
  }
}

TEST(Llama, AMixtureHasTheSameBitsForAnyNumberOfThreads) {
  std::vector<float> first;
  for (const int num_threads : {1, 2, 3, 5}) {
    Context context = make_context(num_threads);
    const Loaded loaded = load(context, {.num_experts = 5, .shared_size = 32});
    LlamaSession session = open_session(context, loaded.model, {.context = 64});
    const auto logits = session.feed(random_tokens(33, loaded.tiny.vocab_size));
    ASSERT_TRUE(logits.ok()) << logits.status().message();
    if (first.empty()) first.assign(logits.value().begin(), logits.value().end());
    EXPECT_TRUE(std::equal(first.begin(), first.end(), logits.value().begin())) << num_threads;
  }
}

TEST(Llama, AnyChunkAndAnyCacheIsTheSame) {
  Context context = make_context(2);
  const Loaded loaded = load(context);
  for (const int64_t chunk : {1, 7, 64}) {
    for (const int64_t logit_rows : {1, 5, 64}) {
      SCOPED_TRACE(testing::Message() << "chunk " << chunk << ", logit rows " << logit_rows);
      check_against_double(context, loaded, {.context = 64, .prefill_chunk = chunk, .logit_rows = logit_rows},
                           kTolerance);
    }
    for (const int64_t block_size : {1, 16, 32, 33, 64, 1000}) {
      SCOPED_TRACE(testing::Message() << "chunk " << chunk << ", block size " << block_size);
      check_against_double(context, loaded,
                           {.context = 64, .cache = CacheKind::paged, .block_size = block_size, .prefill_chunk = chunk},
                           kTolerance);
    }
  }
}

// Logits after the last of `tokens`, fed in the given pieces.
std::vector<float> last_logits(Context& context, const Loaded& loaded, SessionOptions options,
                               const std::vector<int32_t>& tokens, size_t piece) {
  LlamaSession session = open_session(context, loaded.model, options);
  std::vector<float> last;
  for (size_t begin = 0; begin < tokens.size(); begin += piece) {
    const auto logits = session.feed(std::span(tokens).subspan(begin, std::min(piece, tokens.size() - begin)));
    EXPECT_TRUE(logits.ok()) << logits.status().message();
    last.assign(logits.value().begin(), logits.value().end());
  }
  return last;
}

// Sizes of public reports: 520 tokens in chunks of 130; 5 tokens behind a paged prefix of 37 in bf16, grouped heads.
TEST(Llama, B23_B50_PiecesBehindAPrefixEqualOneShot) {
  Context context = make_context(2);
  const Loaded loaded =
      load(context, {.num_heads = 8, .num_kv_heads = 2, .head_dim = 64, .ffn_size = 96, .context = 600});
  const auto check = [&](const SessionOptions& options, size_t count, size_t piece) {
    const std::vector<int32_t> tokens = random_tokens(count, loaded.tiny.vocab_size);
    const std::vector<float> whole = last_logits(context, loaded, options, tokens, count);
    const std::vector<float> pieces = last_logits(context, loaded, options, tokens, piece);
    for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(pieces[i], whole[i], 1e-4) << i;
  };
  check({.context = 520, .prefill_chunk = 520}, 520, 130);
  check({.context = 520, .prefill_chunk = 130}, 520, 520);
  check({.context = 64, .kv_dtype = DType::bf16, .cache = CacheKind::paged}, 42, 37);
}

TEST(Llama, OtherShapes) {
  Context context = make_context(2);
  check_against_double(context, load(context, {.num_heads = 4, .num_kv_heads = 2, .head_dim = 64, .ffn_size = 96}),
                       {.context = 64}, kTolerance);
  check_against_double(
      context,
      load(context,
           {.num_layers = 1, .num_heads = 4, .num_kv_heads = 4, .head_dim = 8, .ffn_size = 32, .rope_base = 100000.0f}),
      {.context = 45}, kTolerance);
}

TEST(Llama, B99_OutputWeightWinsOverTheEmbedding) {
  Context context = make_context(1);
  check_against_double(context, load(context, {.separate_output = true}), {.context = 64}, kTolerance);
}

TEST(Llama, SameBitsForAnyNumberOfThreads) {
  std::vector<std::vector<float>> results;
  for (const int num_threads : {1, 2, 3}) {
    Context context = make_context(num_threads);
    const Loaded loaded = load(context);
    LlamaSession session = open_session(context, loaded.model, {.context = 64});
    const auto logits = session.feed(random_tokens(40, loaded.tiny.vocab_size));
    ASSERT_TRUE(logits.ok());
    results.emplace_back(logits.value().begin(), logits.value().end());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Llama, SteadyStateAllocatesNothing) {
  Context context = make_context(2);
  const Loaded loaded = load(context);
  LlamaSession session = open_session(context, loaded.model, {.context = 64, .prefill_chunk = 16});
  const std::vector<int32_t> tokens = random_tokens(64, loaded.tiny.vocab_size);
  const auto run = [&] {
    session.reset();
    bool fed = session.feed(std::span(tokens).first(32)).ok();
    for (size_t t = 32; t < 64; ++t) fed = session.feed(std::span(tokens).subspan(t, 1)).ok() && fed;
    return fed;
  };
  ASSERT_TRUE(run());
  const int64_t allocations = context.workspace_allocations(), bytes = context.workspace_bytes();
  const int64_t news = test::num_allocations;
  const bool fed = run() && run();
  EXPECT_EQ(test::num_allocations, news);
  EXPECT_TRUE(fed);
  EXPECT_EQ(context.workspace_allocations(), allocations);
  EXPECT_EQ(context.workspace_bytes(), bytes);
}

int64_t resident_bytes() {
  std::ifstream status("/proc/self/statm");
  int64_t total = 0, resident = 0;
  status >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(Llama, B91_MemoryDoesNotGrowWithChangingLengths) {
  Context context = make_context(2);
  const Loaded loaded = load(context);
  LlamaSession session = open_session(context, loaded.model, {.context = 512, .prefill_chunk = 128});
  const std::vector<int32_t> tokens = random_tokens(512, loaded.tiny.vocab_size);
  std::mt19937 random(3);
  int64_t before = 0;
  for (int call = 0; call < 200; ++call) {
    if (call == 80) before = resident_bytes();
    session.reset();
    ASSERT_TRUE(session.feed(std::span(tokens).first(1 + random() % 200)).ok());
    ASSERT_TRUE(session.feed(std::span(tokens).first(1)).ok());
  }
  EXPECT_LT(resident_bytes() - before, 5 << 20);
}

// Nodes that take long enough for the session to ask whether to stop.
class SlowNodes : public NodeListener {
 public:
  void on_node(const char*, const std::string&, Clock::time_point, Clock::time_point) override {
    ++nodes;
    std::this_thread::sleep_for(std::chrono::milliseconds(nodes % 8 == 0 ? 25 : 0));
  }
  int nodes = 0;
};

TEST(Llama, InterruptedWithinAStepTheSequenceIsAsBefore) {
  Context context = make_context(1);
  const Loaded loaded = load(context);
  LlamaSession session = open_session(context, loaded.model, {.context = 64, .prefill_chunk = 4});
  const std::vector<int32_t> tokens = random_tokens(20, loaded.tiny.vocab_size);
  ASSERT_TRUE(session.feed(std::span(tokens).first(2)).ok());
  SlowNodes nodes;
  session.set_listener(&nodes);
  // The first four have gone through all layers, the others are on their way.
  const auto interrupted = [&] { return session.position() > 2; };
  for (const bool all : {false, true}) {
    const auto rest = std::span(tokens).subspan(2);
    const Status status = all ? session.feed_all(
                                    rest, [](int64_t, std::span<const float>) {}, interrupted)
                              : session.feed(rest, interrupted).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(session.was_interrupted());
    EXPECT_EQ(session.position(), 2);
  }
  session.set_listener(nullptr);
  const auto go_on = [&] {
    const auto logits = session.feed(std::span(tokens).subspan(2));
    EXPECT_FALSE(session.was_interrupted());
    return std::vector<float>(logits.value().begin(), logits.value().end());
  };
  const std::vector<float> after = go_on();
  session.rewind(2);
  EXPECT_EQ(go_on(), after);
}

TEST(Llama, RefusedTokensLeaveTheSequence) {
  Context context = make_context(1);
  const Loaded loaded = load(context);
  LlamaSession session = open_session(context, loaded.model, {.context = 8});
  const auto message = [&](const std::vector<int32_t>& tokens) { return session.feed(tokens).status().message(); };
  EXPECT_EQ(message({}), "no tokens to feed");
  EXPECT_EQ(message({5, -1}), "token -1 is outside the vocabulary of 269");
  EXPECT_EQ(message({269}), "token 269 is outside the vocabulary of 269");
  EXPECT_EQ(message(std::vector<int32_t>(9, 5)), "9 tokens at position 0 do not fit a context of 8");
  EXPECT_EQ(session.position(), 0);
  EXPECT_EQ(message(std::vector<int32_t>(8, 5)), "");
  EXPECT_EQ(message({5}), "1 tokens at position 8 do not fit a context of 8");
  EXPECT_EQ(session.position(), 8);

  const auto refused = [&](const SessionOptions& options) {
    return LlamaSession::create(context, loaded.model, options).status().message();
  };
  EXPECT_EQ(refused({.context = 513}), "context is 513, but the model's is 512");
  EXPECT_EQ(refused({.context = 0}), "context is 0, must be >= 1");
  EXPECT_EQ(refused({.context = 8, .kv_dtype = DType::i32}),
            "kv_dtype is i32, must be one of f32, bf16, f16, i8, u8, f8_e4m3, f8_e5m2");
  EXPECT_EQ(refused({.context = 8, .block_size = 0}), "block_size is 0, must be >= 1");
  EXPECT_EQ(refused({.context = 8, .prefill_chunk = -1}), "prefill_chunk is -1, must be >= 1");
}

std::string u32_entry(const std::string& key, uint32_t value) {
  std::string bytes = key;
  GgufWriter::append(bytes, static_cast<uint32_t>(GgufType::u32));
  GgufWriter::append(bytes, value);
  return bytes;
}

TEST(LlamaLoad, RopeMayTurnAPartOfEachHead) {
  Context context = make_context(1);
  Loaded loaded = load(context);
  const std::string from = u32_entry("llama.rope.dimension_count", 32),
                    to = u32_entry("llama.rope.dimension_count", 10);
  loaded.bytes.replace(loaded.bytes.find(from), from.size(), to);
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(loaded.bytes));
  loaded.model = std::move(LlamaModel::load(context, file.value()).value());
  check_against_double(context, loaded, {.context = 64}, kTolerance, 10);
}

}  // namespace
}  // namespace opst::model
