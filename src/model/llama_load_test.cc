// What a file must have to be a model, and by which name the rest is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <random>

#include "model/llama.h"
#include "model/tiny_model.h"
#include "model/tokenizer.h"
#include "opst/context.h"

namespace opst::model {
namespace {

Context make_context(int num_threads) { return std::move(Context::create({.num_threads = num_threads}).value()); }

// The message with which a file is refused that differs from a good one by what `change` adds.
template <class Change>
std::string refusal(const Change& change, const TinyModelOptions& options = {}) {
  Context context = make_context(1);
  TinyModel tiny = make_tiny_model(options);
  change(tiny.writer);
  const std::string bytes = tiny.writer.bytes();
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  if (!file.ok()) return file.status().message();
  return LlamaModel::load(context, file.value()).status().message();
}

// The same, with a piece of the file replaced by another one of the same length.
std::string refusal_with(const std::string& from, const std::string& to, const TinyModelOptions& options = {}) {
  Context context = make_context(1);
  std::string bytes = make_tiny_model(options).writer.bytes();
  const size_t position = bytes.find(from);
  EXPECT_NE(position, std::string::npos) << from;
  EXPECT_EQ(from.size(), to.size());
  bytes.replace(position, from.size(), to);
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  if (!file.ok()) return file.status().message();
  return LlamaModel::load(context, file.value()).status().message();
}

std::string u32_entry(const std::string& key, uint32_t value) {
  std::string bytes = key;
  GgufWriter::append(bytes, static_cast<uint32_t>(GgufType::u32));
  GgufWriter::append(bytes, value);
  return bytes;
}

TEST(LlamaLoad, WhatIsNotImplementedIsRefusedByName) {
  EXPECT_EQ(refusal([](GgufWriter&) {}), "");
  EXPECT_EQ(refusal_with("llama", "qwen2"),
            "f.gguf: general.architecture is 'qwen2', but only 'llama', 'qwen2moe', 'qwen3moe' are "
            "supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("llama.rope.scaling.type", "yarn"); }),
            "f.gguf: key 'llama.rope.scaling.type' is 'yarn', but only 'none' is supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("llama.rope.scaling.type", "none"); }), "");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.f32("llama.rope.scaling.factor", 8); }),
            "f.gguf: key 'llama.rope.scaling.factor' is 8.000000, which is not supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.expert_count", 4); }),
            "f.gguf: key 'llama.expert_used_count' is missing");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.attention.sliding_window", 64); }),
            "f.gguf: key 'llama.attention.sliding_window' is 64.000000, which is not supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.boolean("llama.attention.causal", false); }),
            "f.gguf: key 'llama.attention.causal' is false, which is not supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.tensor("rope_freqs.weight", {16}, std::vector<float>(16, 1.0f)); }),
            "f.gguf: tensor 'rope_freqs.weight' (rope scaling by factors) is not supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.tensor("blk.0.attn_q.bias", {96}, std::vector<float>(96, 1.0f)); }),
            "f.gguf: tensor 'blk.0.attn_q.bias' is not part of a supported llama model");
  EXPECT_EQ(refusal([](GgufWriter& w) {
              w.tensor("output.weight", {96, 269}, 20, std::string(96 * 269 / 32 * 18, 0));
            }),
            "f.gguf: tensor 'output.weight' is of type IQ4_NL, but only F32, F16, Q8_0, Q4_1, Q4_0, Q5_0, Q5_1, Q6_K, "
            "Q4_K, Q5_K and BF16 are supported");
}

TEST(LlamaLoad, ShapesAreCheckedAgainstTheConfiguration) {
  EXPECT_EQ(refusal([](GgufWriter& w) {
              w.tensor("output.weight", {269, 96}, std::vector<float>(269 * 96));
            }),
            "f.gguf: tensor 'output.weight' is F32 [269, 96], expected shape [96, 269]");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.vocab_size", 270); }),
            "f.gguf: tensor 'token_embd.weight' is Q8_0 [96, 269], expected shape [96, 270]");
  EXPECT_EQ(refusal_with("blk.1.ffn_up.weight", "blk.2.ffn_up.weight"),
            "f.gguf: tensor 'blk.1.ffn_up.weight' is missing");
  const auto with_u32 = [](const std::string& key, uint32_t from, uint32_t to) {
    return refusal_with(u32_entry(key, from), u32_entry(key, to));
  };
  EXPECT_EQ(with_u32("llama.block_count", 2, 0), "f.gguf: key 'llama.block_count' is 0, expected 1 to 16777216");
  EXPECT_EQ(with_u32("llama.block_count", 2, 1),
            "f.gguf: tensor 'blk.1.attn_norm.weight' is not part of a supported llama model");
  EXPECT_EQ(with_u32("llama.block_count", 2, 3), "f.gguf: tensor 'blk.2.attn_norm.weight' is missing");
  EXPECT_EQ(with_u32("llama.embedding_length", 96, 192),
            "f.gguf: tensor 'token_embd.weight' is Q8_0 [96, 269], expected shape [192, 269]");
  EXPECT_EQ(with_u32("llama.feed_forward_length", 160, 4000000000u),
            "f.gguf: key 'llama.feed_forward_length' is 4000000000, expected 1 to 16777216");
  EXPECT_EQ(with_u32("llama.feed_forward_length", 160, 128),
            "f.gguf: tensor 'blk.0.ffn_gate.weight' is Q4_1 [96, 160], expected shape [96, 128]");
  EXPECT_EQ(with_u32("llama.attention.head_count_kv", 1, 2),
            "f.gguf: llama.attention.head_count is 3, not a multiple of head_count_kv = 2");
  EXPECT_EQ(with_u32("llama.attention.head_count_kv", 1, 3),
            "f.gguf: tensor 'blk.0.attn_k.weight' is Q8_0 [96, 32], expected shape [96, 96]");
  EXPECT_EQ(with_u32("llama.attention.head_count", 3, 5),
            "f.gguf: llama.embedding_length is 96, not a multiple of head_count = 5");
  EXPECT_EQ(with_u32("llama.rope.dimension_count", 32, 34),
            "f.gguf: llama.rope.dimension_count is 34, expected an even number up to the head size 32");
  EXPECT_EQ(with_u32("llama.rope.dimension_count", 32, 31),
            "f.gguf: llama.rope.dimension_count is 31, expected an even number up to the head size 32");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.attention.value_length", 16); }),
            "f.gguf: llama.attention.value_length is 16, but the head size is 32; different ones are not supported");
  EXPECT_EQ(refusal_with("llama.attention.layer_norm_rms_epsilon", "other.attention.layer_norm_rms_epsilon"),
            "f.gguf: key 'llama.attention.layer_norm_rms_epsilon' is missing");
}

TEST(LlamaLoad, MixturesAreCheckedAgainstTheConfiguration) {
  const TinyModelOptions mixture = {.num_experts = 4, .shared_size = 32};
  const auto with_u32 = [&](const std::string& key, uint32_t from, uint32_t to) {
    return refusal_with(u32_entry(key, from), u32_entry(key, to), mixture);
  };
  EXPECT_EQ(refusal([](GgufWriter&) {}, mixture), "");
  EXPECT_EQ(with_u32("llama.expert_used_count", 2, 5), "f.gguf: llama.expert_used_count is 5, but expert_count is 4");
  EXPECT_EQ(with_u32("llama.expert_used_count", 2, 0),
            "f.gguf: key 'llama.expert_used_count' is 0, expected 1 to 16777216");
  EXPECT_EQ(with_u32("llama.expert_count", 4, 3),
            "f.gguf: tensor 'blk.0.ffn_gate_inp.weight' is F32 [96, 4], expected shape [96, 3]");
  EXPECT_EQ(with_u32("llama.expert_count", 4, 0),
            "f.gguf: key 'llama.expert_shared_feed_forward_length' is given, but 'llama.expert_count' says that there "
            "are no experts");
  EXPECT_EQ(with_u32("llama.expert_shared_feed_forward_length", 32, 64),
            "f.gguf: tensor 'blk.0.ffn_gate_shexp.weight' is F16 [96, 32], expected shape [96, 64]");
  EXPECT_EQ(with_u32("llama.expert_shared_feed_forward_length", 32, 0),
            "f.gguf: tensor 'blk.0.ffn_gate_shexp.weight' is not part of a supported llama model");
  for (const char* name : {"ffn_gate_inp", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp"}) {
    const std::string full = std::string("blk.1.") + name + ".weight";
    EXPECT_EQ(refusal_with(full, "blk.9." + full.substr(6), mixture), "f.gguf: tensor '" + full + "' is missing");
  }
  EXPECT_EQ(refusal(
                [](GgufWriter& w) {
                  w.tensor("blk.0.ffn_gate.0.weight", {96, 160}, std::vector<float>(96 * 160));
                },
                mixture),
            "f.gguf: tensor 'blk.0.ffn_gate.0.weight' is that of one expert, an old form, which is not supported: "
            "convert the model again");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.expert_gating_func", 3); }, mixture),
            "f.gguf: key 'llama.expert_gating_func' is 3, but only 1 (softmax) and 2 (sigmoid) are supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.f32("llama.expert_weights_scale", 0); }, mixture),
            "f.gguf: key 'llama.expert_weights_scale' is 0.000000, expected more than 0");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("llama.expert_group_count", 2); }, mixture),
            "f.gguf: key 'llama.expert_group_count' is not supported: it may change what the model computes");
  EXPECT_EQ(
      refusal([](GgufWriter& w) { w.f32("llama.expert_weights_scale", 1); }),
      "f.gguf: key 'llama.expert_weights_scale' is given, but 'llama.expert_count' says that there are no experts");
  EXPECT_EQ(refusal([](GgufWriter&) {}, {.architecture = "qwen3moe"}),
            "f.gguf: key 'qwen3moe.expert_count' is missing");
  EXPECT_EQ(refusal([](GgufWriter&) {}, {.num_experts = 4, .architecture = "qwen2moe"}),
            "f.gguf: tensor 'blk.0.attn_q.bias' is missing");
  EXPECT_EQ(refusal([](GgufWriter&) {}, {.num_experts = 4, .architecture = "qwen3moe"}),
            "f.gguf: tensor 'blk.0.attn_q_norm.weight' is missing");
}

// The third dimension of a stack, and the types of its parts.
TEST(LlamaLoad, StacksOfExpertsAreChecked) {
  const auto message = [](std::vector<int64_t> dims, uint32_t up_type) {
    Context context = make_context(1);
    TinyModel tiny = make_tiny_model({.num_layers = 1, .num_experts = 4});
    GgufWriter& w = tiny.writer;
    const auto& type = *find_tensor_type(up_type);
    int64_t size = type.block_bytes;
    for (const int64_t dim : dims) size *= dim;
    w.tensor("blk.0.ffn_up_exps.WEIGHT", dims, up_type,
             std::string(static_cast<size_t>(size / type.block_elements), 0));
    // The tensor under another name, and one that takes its place.
    std::string bytes = w.bytes();
    bytes.replace(bytes.find("blk.0.ffn_up_exps.weight"), 24, "blk.7.ffn_up_exps.weight");
    bytes.replace(bytes.find("blk.0.ffn_up_exps.WEIGHT"), 24, "blk.0.ffn_up_exps.weight");
    return LlamaModel::load(context, GgufFile::parse("f.gguf", as_bytes(bytes)).value()).status().message();
  };
  EXPECT_EQ(message({96, 160, 3}, 3),
            "f.gguf: tensor 'blk.0.ffn_up_exps.weight' is Q4_1 [96, 160, 3], expected shape [96, 160, 4]");
  EXPECT_EQ(message({96, 160}, 3),
            "f.gguf: tensor 'blk.0.ffn_up_exps.weight' is Q4_1 [96, 160], expected shape [96, 160, 4]");
  EXPECT_NE(message({96, 160, 4}, 20).find("' is of type IQ4_NL, but only "), std::string::npos);
  EXPECT_NE(message({96, 160, 4}, 8).find("ffn_gate_exps.weight' is Q4_1 [96, 160, 4]: both must be of one type"),
            std::string::npos)
      << message({96, 160, 4}, 8);
}

// Any key of the architecture that this code does not know may change the arithmetic.
TEST(LlamaLoad, KeysThatAreNotKnownAreRefused) {
  for (const char* key : {"llama.attention.temperature_scale", "llama.attention.scale",
                          "llama.rope.scaling.yarn_log_multiplier", "llama.something_new", "llama."}) {
    EXPECT_EQ(refusal([&](GgufWriter& w) { w.f32(key, 1.0f); }),
              "f.gguf: key '" + std::string(key) + "' is not supported: it may change what the model computes");
  }
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("llama.hidden_act", "gelu"); }),
            "f.gguf: key 'llama.hidden_act' is 'gelu', but only 'silu' is supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("llama.hidden_act", "silu"); }), "");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.boolean("llama.use_parallel_residual", true); }),
            "f.gguf: key 'llama.use_parallel_residual' is true, which is not supported");
  // Of consequence for scaled positions only; and whatever belongs to another namespace.
  EXPECT_EQ(refusal([](GgufWriter& w) {
              w.u32("llama.rope.scaling.original_context_length", 512).boolean("llama.rope.scaling.finetuned", true);
              w.f32("qwen2.attention.scale", 3).string("general.name", "x").u32("general.quantization_version", 2);
            }),
            "");
}

TEST(LlamaLoad, PartsOfModelsAreNamed) {
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("general.type", "adapter"); }),
            "f.gguf: is an adapter (LoRA), which changes a model and is none itself; adapters are not supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("general.type", "mmproj"); }),
            "f.gguf: general.type is 'mmproj', but only 'model' is supported");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.string("general.type", "model"); }), "");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("split.no", 1).u32("split.count", 3); }),
            "f.gguf: is part 2 of a model that is split into 3 files, which is not supported: merge them "
            "(llama-gguf-split --merge)");
  EXPECT_EQ(refusal([](GgufWriter& w) { w.u32("split.no", 0).u32("split.count", 1); }), "");
}

// A file with any damage is refused or gives a model that runs: never a crash.
void survive_mutations(const std::string& good, uint32_t count) {
  Context context = make_context(1);
  const size_t header = good.find("blk.0.ffn_down") + 60;
  for (uint32_t seed = 0; seed < count; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::string bytes = good;
    for (unsigned i = 0; i < 1 + random() % 3; ++i) {
      bytes[random() % header] = static_cast<char>(random() % 3 == 0 ? random() % 4 : random());
    }
    const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
    if (!file.ok()) continue;
    const Result<Tokenizer> tokenizer = Tokenizer::from_gguf(file.value());
    if (tokenizer.ok()) (void)tokenizer.value().encode("hello  world 12 \xC3\xA9<|im_end|>", true);
    const Result<LlamaModel> model = LlamaModel::load(context, file.value());
    if (!model.ok()) continue;
    const int64_t length = std::min<int64_t>(16, model.value().config().max_context);
    Result<LlamaSession> session = LlamaSession::create(context, model.value(), {.context = length});
    ASSERT_TRUE(session.ok()) << session.status().message();
    const auto logits = session.value().feed(std::vector<int32_t>{1});
    EXPECT_TRUE(logits.ok()) << logits.status().message();
  }
}

TEST(LlamaLoad, SurvivesMutations) {
  TinyModelOptions options = {.num_layers = 1, .num_heads = 1, .num_kv_heads = 1, .ffn_size = 32};
  survive_mutations(make_tiny_model(options).writer.bytes(), 1500);
  options.num_experts = 3, options.shared_size = 32;
  survive_mutations(make_tiny_model(options).writer.bytes(), 1000);
}

// A file whose end has been reserved on the disk and never written, as by a download that broke off.
TEST(LlamaLoad, AHoleIsNoWeight) {
  const std::string bytes = make_tiny_model().writer.bytes(), path = testing::TempDir() + "opst_hole.gguf";
  const GgufFile whole = std::move(GgufFile::parse("f.gguf", as_bytes(bytes)).value());
  std::ofstream(path, std::ios::binary) << bytes.substr(0, whole.find_tensor("blk.1.attn_q.weight")->offset);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(bytes.size())), 0);
  Context context = make_context(1);
  const Result<GgufFile> file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const std::string message = LlamaModel::load(context, file.value()).status().message();
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_TRUE(LlamaModel::load(context, GgufFile::open(path).value()).ok());
  std::remove(path.c_str());
  // A file system without holes reads zeros.
  EXPECT_TRUE(message.empty() || message.find("weight' has no data, as the file has a hole there") != std::string::npos)
      << message;
}

}  // namespace
}  // namespace opst::model
