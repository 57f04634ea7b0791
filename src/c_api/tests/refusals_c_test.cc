// Bad calls of the C interface: a status and a sentence that names function, argument, got and expected; nothing is
// written; nothing crashes.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "c_api/test_calls.h"
#include "opst/attention.h"
#include "opst/status.h"

namespace opst {
namespace {

using test::CContext;
using test::Numbers;
using test::Random;

// Both phases' answer: the first refuses.
void expect_refused(const std::function<opst_status(int64_t*, opst_executor**)>& plan, const std::string& message,
                    opst_status code = OPST_INVALID_ARGUMENT) {
  int64_t bytes = -1;
  auto* executor = reinterpret_cast<opst_executor*>(&bytes);
  EXPECT_EQ(plan(&bytes, &executor), code) << message;
  EXPECT_EQ(opst_last_error(), message);
  EXPECT_EQ(bytes, 0);
  EXPECT_EQ(executor, nullptr);
}

struct Rows {
  explicit Rows(Random& random)
      : x(DType::f32, {4, 8}, random), weight(DType::f32, {8}, random), out(DType::f32, {4, 8}) {}
  opst_status plan(opst_context* context, int64_t* bytes, opst_executor** executor) const {
    return opst_rms_norm_workspace(context, &x.c, &weight.c, 1e-5, &out.c, nullptr, bytes, executor);
  }
  bool untouched() const { return std::isnan(test::get(out.tensor, 0)); }
  Numbers x, weight, out;
};

TEST(CRefusals, NullPointers) {
  Random random(test::seed());
  const CContext context;
  const Rows r(random);
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  expect_refused([&](auto* b, auto* e) { return r.plan(nullptr, b, e); }, "opst_rms_norm_workspace: context is NULL");
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_rms_norm_workspace(context, nullptr, &r.weight.c, 0, &r.out.c, nullptr, b, e);
      },
      "opst_rms_norm_workspace: x is NULL");
  expect_refused(
      [&](auto* b, auto* e) { return opst_rms_norm_workspace(context, &r.x.c, nullptr, 0, &r.out.c, nullptr, b, e); },
      "opst_rms_norm_workspace: weight is NULL");
  EXPECT_EQ(r.plan(context, nullptr, &executor), OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_rms_norm_workspace: workspace_bytes is NULL");
  EXPECT_EQ(r.plan(context, &bytes, nullptr), OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_rms_norm_workspace: executor is NULL");
  EXPECT_EQ(opst_rms_norm(nullptr, 0, nullptr), OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_rms_norm: executor is NULL");

  opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
  opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
  expect_refused(
      [&](auto* b, auto* e) { return opst_flash_attention_workspace(context, nullptr, &outputs, nullptr, b, e); },
      "opst_flash_attention_workspace: inputs is NULL");
  expect_refused(
      [&](auto* b, auto* e) { return opst_flash_attention_workspace(context, &inputs, nullptr, nullptr, b, e); },
      "opst_flash_attention_workspace: query is NULL");
  inputs.query = inputs.key = inputs.value = &r.x.c;
  expect_refused(
      [&](auto* b, auto* e) { return opst_flash_attention_workspace(context, &inputs, nullptr, nullptr, b, e); },
      "opst_flash_attention_workspace: outputs is NULL");
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_flash_attention_backward_workspace(context, &inputs, nullptr, nullptr, nullptr, b, e);
      },
      "opst_flash_attention_backward_workspace: saved is NULL");
  expect_refused(
      [&](auto* b, auto* e) { return opst_matmul_packed_workspace(context, &r.x.c, nullptr, &r.out.c, nullptr, b, e); },
      "opst_matmul_packed_workspace: weight is NULL");
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_grouped_matmul_packed_workspace(context, &r.x.c, nullptr, nullptr, 0, nullptr, nullptr, b, e);
      },
      "opst_grouped_matmul_packed_workspace: weight is NULL");
  opst_tensor without_data = r.x.c;
  without_data.data = nullptr;
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_layer_norm_workspace(context, &r.x.c, &without_data, nullptr, 0, &r.out.c, nullptr, nullptr, b, e);
      },
      "opst_layer_norm_workspace: weight data is NULL, but its shape has elements");

  // Destroying nothing does nothing.
  opst_context_destroy(nullptr);
  opst_weight_destroy(nullptr);
  opst_executor_destroy(nullptr);
  EXPECT_EQ(opst_executor_set_repeatable(nullptr), OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_executor_set_repeatable: executor is NULL");
  EXPECT_EQ(opst_context_create(nullptr, nullptr), OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_context_create: context is NULL");
}

TEST(CRefusals, TensorsThatAreNone) {
  Random random(test::seed());
  const CContext context;
  const Rows r(random);
  const auto refused = [&](const std::function<void(opst_tensor&)>& edit, const std::string& message) {
    opst_tensor x = r.x.c;
    edit(x);
    expect_refused(
        [&](auto* b, auto* e) { return opst_rms_norm_workspace(context, &x, &r.weight.c, 0, &r.out.c, nullptr, b, e); },
        "opst_rms_norm_workspace: " + message);
    EXPECT_TRUE(r.untouched());
  };
  refused([](opst_tensor& x) { x.dtype = 256; }, "x dtype is 256, but must be from 0 to 10");
  refused([](opst_tensor& x) { x.dtype = -1; }, "x dtype is -1, but must be from 0 to 10");
  refused([](opst_tensor& x) { x.rank = 6; }, "x rank is 6, but must be from 0 to 5");
  refused([](opst_tensor& x) { x.rank = -2147483647 - 1; }, "x rank is -2147483648, but must be from 0 to 5");
  refused([](opst_tensor& x) { x.shape[0] = -4; }, "x dim 0 is -4, but must be >= 0");
  refused(
      [](opst_tensor& x) {
        x.shape[0] = INT64_MAX;
        x.shape[1] = INT64_MAX;
      },
      "x f32 [9223372036854775807, 9223372036854775807] has more bytes than the limit of 2^56, repeated elements "
      "counted");
  refused([](opst_tensor& x) { x.data = static_cast<char*>(x.data) + 2; },
          "x f32 [4, 8] lies 2 beyond a multiple of 4 bytes, but elements must lie at multiples of their size");
  refused([](opst_tensor& x) { x.shape[1] = 7; }, "x dim 1 (features) is 7, but weight set features = 8");
  refused([](opst_tensor& x) { x.dtype = OPST_I32; }, "x is i32, but must be f32, bf16 or f16");
}

TEST(CRefusals, NumbersThatAreNoEnumerators) {
  Random random(test::seed());
  const CContext context;
  Numbers q(DType::f32, {1, 1, 2, 4}, random), out(DType::f32, {1, 1, 2, 4});
  const auto refused = [&](const std::function<void(opst_attention_options&)>& edit, const std::string& message) {
    opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
    inputs.query = inputs.key = inputs.value = &q.c;
    opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS;
    outputs.out = &out.c;
    opst_attention_options options = OPST_ATTENTION_OPTIONS;
    edit(options);
    expect_refused(
        [&](auto* b, auto* e) { return opst_flash_attention_workspace(context, &inputs, &outputs, &options, b, e); },
        "opst_flash_attention_workspace: " + message);
  };
  refused([](auto& o) { o.causal = 2; }, "options->causal is 2, but must be from 0 to 1");
  refused([](auto& o) { o.alignment = 2; }, "options->alignment is 2, but must be from 0 to 1");
  refused([](auto& o) { o.path = 256; }, "options->path is 256, but must be from 0 to 2");
  refused([](auto& o) { o.alibi_form = -1; }, "options->alibi_form is -1, but must be from 0 to 1");
  refused([](auto& o) { o.page_layout = 2; }, "options->page_layout is 2, but must be from 0 to 1");
  refused([](auto& o) { o.has_softmax_scale = 7; }, "options->has_softmax_scale is 7, but must be from 0 to 1");
  refused([](auto& o) { o.struct_bytes = 0; }, "options->struct_bytes is 0, but must be " +
                                                   std::to_string(sizeof(opst_attention_options)) +
                                                   ", as the struct's initial value in opst_types.h says");
  refused([](auto& o) { o.struct_bytes = -8; }, "options->struct_bytes is -8, but must be " +
                                                    std::to_string(sizeof(opst_attention_options)) +
                                                    ", as the struct's initial value in opst_types.h says");

  Numbers x(DType::f32, {2, 4}, random), to(DType::f32, {2, 2}), w(DType::f32, {2, 4}, random);
  opst_matmul_options options = OPST_MATMUL_OPTIONS;
  options.activation = 6;
  const auto plan = [&](auto* b, auto* e) { return opst_matmul_workspace(context, &x.c, &w.c, &to.c, &options, b, e); };
  expect_refused(plan, "opst_matmul_workspace: options->activation is 6, but must be from 0 to 5");
  options = OPST_MATMUL_OPTIONS;
  options.x_scales = &w.c;
  expect_refused(plan, "opst_matmul_workspace: x_scales is given, but belongs to int8 or int4 weights");
  options = OPST_MATMUL_OPTIONS;
  options.smooth_scales = &w.c;
  expect_refused(plan, "opst_matmul_workspace: smooth_scales is given, but belongs to grouped products");
  Numbers list(DType::i64, {1}, {2});
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_grouped_matmul_workspace(context, &x.c, &w.c, &list.c, 2, &to.c, nullptr, b, e);
      },
      "opst_grouped_matmul_workspace: type is 2, but must be from 0 to 1");
}

TEST(CRefusals, TheCoreSpeaksByTheFunctionsName) {
  Random random(test::seed());
  const CContext context;
  Numbers x(DType::f32, {2, 5}, random), w(DType::f32, {3, 4}, random), out(DType::f32, {2, 3});
  expect_refused([&](auto* b, auto* e) { return opst_matmul_workspace(context, &x.c, &w.c, &out.c, nullptr, b, e); },
                 "opst_matmul_workspace: x dim 1 (k) is 5, but the weight has k = 4");
  EXPECT_TRUE(std::isnan(test::get(out.tensor, 0)));
  // Pages in panels have no backward pass.
  const opst_page_sizes sizes = {OPST_PAGES_PANEL32, OPST_F32, 1, 16, 1, 8, 8};
  int64_t bytes = 0;
  EXPECT_EQ(opst_kv_pages_size(&sizes, &bytes, &bytes), OPST_UNSUPPORTED);
  EXPECT_EQ(std::string(opst_last_error()).find("opst_kv_pages_size: "), 0u) << opst_last_error();
}

TEST(CRefusals, ContextsTensorsWeightsAndPages) {
  Random random(test::seed());
  const CContext context;
  const auto says = [](opst_status status, const std::string& message, opst_status code = OPST_INVALID_ARGUMENT) {
    EXPECT_EQ(status, code) << message;
    EXPECT_EQ(opst_last_error(), message);
  };
  opst_context* made = nullptr;
  opst_context_options options = OPST_CONTEXT_OPTIONS;
  options.isa = "mmx";
  says(opst_context_create(&options, &made), "opst_context_create: options->isa is 'mmx', which is no level");
  EXPECT_EQ(made, nullptr);
  options = OPST_CONTEXT_OPTIONS;
  options.num_threads = -1;
  says(opst_context_create(&options, &made),
       "opst_context_create: num_threads is -1, but must be from 1 to 1024, or 0 for the default");

  opst_tensor view;
  const int64_t shape[6] = {2, 3, 4, 5, 6, 7};
  says(opst_tensor_contiguous(OPST_F32, 6, shape, nullptr, &view),
       "opst_tensor_contiguous: rank is 6, but must be from 0 to 5");
  says(opst_tensor_contiguous(11, 2, shape, nullptr, &view),
       "opst_tensor_contiguous: dtype is 11, but must be from 0 to 10");
  says(opst_tensor_contiguous(OPST_F32, 2, nullptr, nullptr, &view), "opst_tensor_contiguous: shape is NULL");
  says(opst_tensor_contiguous(OPST_F32, 2, shape, nullptr, nullptr), "opst_tensor_contiguous: tensor is NULL");
  float data[6];
  ASSERT_EQ(opst_tensor_contiguous(OPST_F32, 2, shape, data, &view), OPST_OK);
  says(opst_tensor_transpose(&view, 0, 2),
       "opst_tensor_transpose: dimension 2 is exchanged, but the tensor has rank 2");

  opst_weight* weight = nullptr;
  says(opst_weight_pack(context, nullptr, &weight), "opst_weight_pack: weight is NULL");
  Numbers integers(DType::i32, {3, 4}, std::vector<int64_t>(12, 1));
  EXPECT_EQ(opst_weight_pack(context, &integers.c, &weight), OPST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(opst_last_error()).find("i32"), std::string::npos) << opst_last_error();
  const unsigned char bytes[34] = {};
  opst_quant_matrix matrix = {OPST_FORMAT_Q8_0, 1, 32, bytes, 34};
  says(opst_weight_pack_blocks(context, &matrix, 0, &weight), "opst_weight_pack_blocks: count is 0, but must be > 0");
  says(opst_weight_pack_blocks(context, &matrix, INT64_MAX, &weight), "opst_weight_pack_blocks: count is beyond 2^20");
  matrix.format = 256;
  says(opst_weight_pack_blocks(context, &matrix, 1, &weight),
       "opst_weight_pack_blocks: format is 256, but must be from 0 to 10");
  matrix.format = OPST_FORMAT_Q8_0, matrix.size_bytes = 33;
  EXPECT_EQ(opst_weight_pack_blocks(context, &matrix, 1, &weight), OPST_INVALID_ARGUMENT);
  matrix.size_bytes = 34, matrix.rows = -1;
  EXPECT_EQ(opst_weight_pack_blocks(context, &matrix, 1, &weight), OPST_INVALID_ARGUMENT);
  const opst_int_matrix nothing = {};
  says(opst_weight_pack_int(context, &nothing, 1, &weight), "opst_weight_pack_int: q is NULL");
  EXPECT_EQ(weight, nullptr);

  opst_page_sizes sizes = {OPST_PAGES_NORM, OPST_F32, 2, 16, 1, 8, 8};
  int64_t key_bytes = 0, value_bytes = 0;
  says(opst_kv_pages_size(nullptr, &key_bytes, &value_bytes), "opst_kv_pages_size: sizes is NULL");
  sizes.num_blocks = -1;
  says(opst_kv_pages_size(&sizes, &key_bytes, &value_bytes), "opst_kv_pages_size: num_blocks is -1, but must be > 0");
  sizes.num_blocks = INT64_MAX / 2;
  says(opst_kv_pages_size(&sizes, &key_bytes, &value_bytes),
       "opst_kv_pages_size: a cache of these sizes has 2^56 bytes or more");
  sizes.num_blocks = 2;
  opst_tensor key, value;
  alignas(64) char memory[2][1024];
  says(opst_kv_pages(&sizes, memory[0], 1023, memory[1], 1024, &key, &value),
       "opst_kv_pages: key_bytes is 1023, but must be at least 1024");
  says(opst_kv_pages(&sizes, memory[0], 1024, nullptr, 1024, &key, &value), "opst_kv_pages: value_memory is NULL");
  says(opst_kv_pages(&sizes, memory[0], 1024, memory[1] + 1, 1024, &key, &value),
       "opst_kv_pages: value_memory is not at a multiple of an element's size");
}

// What may go wrong between the phases.
TEST(CRefusals, SecondPhase) {
  Random random(test::seed());
  const CContext context(2);
  Numbers x(DType::f32, {64, 64}, random), w(DType::f32, {64, 64}, random), out(DType::f32, {64, 64});
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  ASSERT_EQ(opst_matmul_workspace(context, &x.c, &w.c, &out.c, nullptr, &bytes, &executor), OPST_OK);
  ASSERT_GT(bytes, 64);
  const test::GuardedBuffer workspace(bytes + 64);
  char* const memory = static_cast<char*>(workspace.data());
  const auto says = [&](opst_status status, const std::string& message) {
    EXPECT_EQ(status, OPST_INVALID_ARGUMENT);
    EXPECT_EQ(opst_last_error(), message);
  };
  const std::string least = std::to_string(bytes);
  says(opst_rms_norm(memory, bytes, executor),
       "opst_rms_norm: executor is of opst_matmul_workspace, but must be of opst_rms_norm_workspace");
  says(opst_matmul(memory, bytes - 64, executor), "opst_matmul: workspace_bytes is " + std::to_string(bytes - 64) +
                                                      ", but must be at least " + least +
                                                      ", as opst_matmul_workspace said");
  says(opst_matmul(memory, -1, executor),
       "opst_matmul: workspace_bytes is -1, but must be at least " + least + ", as opst_matmul_workspace said");
  says(opst_matmul(nullptr, bytes, executor), "opst_matmul: workspace is NULL, but the call needs " + least + " bytes");
  says(opst_matmul(memory + 4, bytes, executor),
       "opst_matmul: workspace lies 4 bytes behind a multiple of 64, but must be at one");
  const auto* const no_executor = static_cast<opst_context*>(context);
  EXPECT_EQ(opst_matmul(memory, bytes, reinterpret_cast<opst_executor*>(const_cast<opst_context*>(no_executor))),
            OPST_INVALID_ARGUMENT);
  EXPECT_STREQ(opst_last_error(), "opst_matmul: executor is no opst_executor");
  EXPECT_TRUE(std::isnan(test::get(out.tensor, 0)));

  ASSERT_EQ(opst_matmul(memory, bytes, executor), OPST_OK) << opst_last_error();
  EXPECT_FALSE(std::isnan(test::get(out.tensor, 0)));
  says(opst_matmul(memory, bytes, executor),
       "opst_matmul: executor has run already, but runs once unless opst_executor_set_repeatable is called");
  ASSERT_EQ(opst_executor_set_repeatable(executor), OPST_OK);
  const double before = test::get(out.tensor, 0);
  test::set(x.tensor, 0, test::get(x.tensor, 0) + 1);
  ASSERT_EQ(opst_matmul(memory, bytes, executor), OPST_OK) << opst_last_error();
  EXPECT_NE(test::get(out.tensor, 0), before);
  opst_executor_destroy(executor);
}

// Lengths that grew since the first phase: a sentence, not memory that is overrun; a larger workspace serves.
TEST(CRefusals, NumbersThatChangedBetweenThePhases) {
  Random random(test::seed());
  const CContext context(2);
  Numbers q(DType::f32, {1, 8, 1, 64}, random), k(DType::f32, {1, 1, 9000, 64}, random);
  Numbers lengths(DType::i64, {1}, {4}), out(DType::f32, {1, 8, 1, 64}), expected(DType::f32, {1, 8, 1, 64});
  Numbers x(DType::f32, {40, 16}, random), w(DType::f32, {3, 64, 16}, random), y(DType::f32, {40, 64});
  Numbers counts(DType::i64, {3}, {0, 0, 1});
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  ASSERT_EQ(opst_grouped_matmul_workspace(context, &x.c, &w.c, &counts.c, OPST_GROUP_COUNTS, &y.c, nullptr, &bytes,
                                          &executor),
            OPST_OK)
      << opst_last_error();
  test::set(counts.tensor, 0, 20);
  test::set(counts.tensor, 1, 19);
  {
    const test::GuardedBuffer workspace(bytes);
    EXPECT_EQ(opst_grouped_matmul(workspace.data(), bytes, executor), OPST_INVALID_ARGUMENT);
    EXPECT_EQ(opst_last_error(), "opst_grouped_matmul: workspace_bytes is " + std::to_string(bytes) +
                                     ", but the numbers in lengths, tables or lists have become others since "
                                     "opst_grouped_matmul_workspace, and need more");
    EXPECT_TRUE(std::isnan(test::get(y.tensor, 0)));
  }
  const test::GuardedBuffer larger(1 << 22);
  EXPECT_EQ(opst_grouped_matmul(larger.data(), 1 << 22, executor), OPST_OK) << opst_last_error();
  opst_executor_destroy(executor);
  test::set(counts.tensor, 2, 2);
  expect_refused(
      [&](auto* b, auto* e) {
        return opst_grouped_matmul_workspace(context, &x.c, &w.c, &counts.c, OPST_GROUP_COUNTS, &y.c, nullptr, b, e);
      },
      "opst_grouped_matmul_workspace: group_list[2] is 2, but x has 1 rows behind the groups before");
}

TEST(CRefusals, Names) {
  EXPECT_STREQ(opst_status_name(OPST_OK), "ok");
  EXPECT_STREQ(opst_status_name(OPST_INTERNAL), "internal");
  EXPECT_STREQ(opst_status_name(-1), "unknown");
  EXPECT_STREQ(opst_status_name(7), "unknown");
  EXPECT_EQ(std::strncmp(opst_version(), "0.", 2), 0);
}

// The initial values of the structs are the defaults of the core.
TEST(CRefusals, InitialValuesAreTheDefaults) {
  const opst_attention_options c = OPST_ATTENTION_OPTIONS;
  const AttentionOptions core;
  EXPECT_EQ(c.struct_bytes, static_cast<int64_t>(sizeof(c)));
  EXPECT_EQ(c.has_softmax_scale, 0);
  EXPECT_EQ(c.causal, core.causal);
  EXPECT_EQ(c.alignment, static_cast<int>(core.alignment));
  EXPECT_EQ(c.path, static_cast<int>(core.path));
  EXPECT_EQ(c.block_q, core.block_q);
  EXPECT_EQ(c.block_kv, core.block_kv);
  EXPECT_EQ(c.window_left, core.window_left);
  EXPECT_EQ(c.window_right, core.window_right);
  EXPECT_EQ(c.softcap, core.softcap);
  EXPECT_EQ(c.bias_scale, core.bias_scale);
  EXPECT_EQ(c.alibi_form, static_cast<int>(core.alibi_form));
  EXPECT_EQ(c.page_layout, static_cast<int>(core.page_layout));
  EXPECT_EQ(c.shared_prefix, core.shared_prefix);
  EXPECT_EQ(c.keep_prob, core.dropout.keep_prob);
  EXPECT_EQ(c.dropout_total_heads, core.dropout.total_heads);
  const opst_attention_inputs inputs = OPST_ATTENTION_INPUTS;
  EXPECT_EQ(inputs.sparse_block_size, SparseIndices().block_size);
  EXPECT_EQ(inputs.sparse_indices, nullptr);
  EXPECT_EQ(inputs.tree_mask, nullptr);
}

}  // namespace
}  // namespace opst
