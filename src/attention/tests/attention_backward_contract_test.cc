// What flash_attention_backward refuses: every check with its whole message, and nothing written.
#include <gtest/gtest.h>

#include <functional>

#include "opst/attention_backward.h"
#include "testing/contexts.h"

namespace opst::test {
namespace {

// A call that is right, for tests to spoil.
struct Call {
  std::vector<float> memory = std::vector<float>(4096, 0.5f);
  std::vector<float> out_memory = std::vector<float>(4096, 7.0f);
  std::vector<int32_t> integers = {0, 1, 2, 3};
  std::vector<int32_t> lengths = {7, 5};
  AttentionInputs in;
  AttentionSaved saved;
  AttentionGradients grads;
  AttentionOptions options;

  Call() {
    in.query = ConstTensor::contiguous(DType::f32, {2, 4, 3, 8}, memory.data());
    in.key = ConstTensor::contiguous(DType::f32, {2, 2, 7, 8}, memory.data());
    in.value = ConstTensor::contiguous(DType::f32, {2, 2, 7, 5}, memory.data());
    in.bias = ConstTensor::contiguous(DType::f32, {4, 1, 7}, memory.data());
    in.sinks = ConstTensor::contiguous(DType::f32, {4}, memory.data());
    saved.out = saved.grad_out = ConstTensor::contiguous(DType::f32, {2, 4, 3, 5}, memory.data());
    saved.softmax_lse = saved.grad_lse = ConstTensor::contiguous(DType::f32, {2, 4, 3}, memory.data());
    grads.grad_query = Tensor::contiguous(DType::f32, {2, 4, 3, 8}, out_memory.data());
    grads.grad_key = Tensor::contiguous(DType::f32, {2, 2, 7, 8}, out_memory.data() + 500);
    grads.grad_value = Tensor::contiguous(DType::f32, {2, 2, 7, 5}, out_memory.data() + 1000);
    grads.grad_bias = Tensor::contiguous(DType::f32, {4, 1, 7}, out_memory.data() + 1500);
    grads.grad_sinks = Tensor::contiguous(DType::f32, {4}, out_memory.data() + 1600);
  }
  Status run() {
    return flash_attention_backward(const_cast<Context&>(contexts().front().context), in, saved, grads, options);
  }
};

// The queries of both sequences one after the other.
void make_varlen(Call& c, std::vector<int32_t> offsets) {
  c.in.query = ConstTensor::contiguous(DType::f32, {6, 4, 8}, c.memory.data());
  c.saved.out = c.saved.grad_out = ConstTensor::contiguous(DType::f32, {6, 4, 5}, c.memory.data());
  c.saved.softmax_lse = c.saved.grad_lse = ConstTensor::contiguous(DType::f32, {4, 6}, c.memory.data());
  c.grads.grad_query = Tensor::contiguous(DType::f32, {6, 4, 8}, c.out_memory.data());
  c.integers = std::move(offsets);
  c.in.cu_seqlens_q = ConstTensor::contiguous(DType::i32, {3}, c.integers.data());
}

// Two blocks of two queries: the first sees key blocks 0 and 2 of three keys, the second key block 1.
void make_blocks(Call& c, std::vector<int32_t> offsets, std::vector<int32_t> columns) {
  c.integers = std::move(offsets);
  c.integers.insert(c.integers.end(), columns.begin(), columns.end());
  c.in.block_mask = {ConstTensor::contiguous(DType::i32, {1, 1, 3}, c.integers.data()),
                     ConstTensor::contiguous(DType::i32, {3}, c.integers.data() + 3), 2, 3};
}
// Three of four blocks of two keys for each query and KV head: of the first query's first head `first`, else 0, 1, 2.
void make_lists(Call& c, std::vector<int32_t> first) {
  c.integers = std::move(first);
  while (c.integers.size() < 2 * 3 * 2 * 3) c.integers.push_back(static_cast<int32_t>(c.integers.size() % 3));
  c.in.sparse_indices = {ConstTensor::contiguous(DType::i32, {2, 3, 2, 3}, c.integers.data()), 2};
  c.in.bias = {}, c.grads.grad_bias = {};
}

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;  // after "flash_attention_backward: "
};

const Refusal kRefusals[] = {
    {"query_rank", [](Call& c) { c.in.query = c.in.query.selected(0, 0); },
     "query has rank 3, but [batch, num_heads, query_len, head_dim] has rank 4"},
    {"key_head_dim", [](Call& c) { c.in.key.shape[3] = 7; }, "key dim 3 (head_dim) is 7, but query set head_dim = 8"},
    {"value_dtype", [](Call& c) { c.in.value.dtype = DType::f16; }, "value is f16, but key is f32"},
    {"B39_negative_stride", [](Call& c) { c.saved.grad_out.strides[2] = -5; },
     "grad_out stride 2 is -5, but must be >= 0"},
    {"heads_not_divisible",
     [](Call& c) {
       c.in.key.shape[1] = c.in.value.shape[1] = 3;
       c.grads.grad_key = c.grads.grad_value = {};
     },
     "num_heads is 4, not a multiple of num_kv_heads = 3"},
    {"out_null", [](Call& c) { c.saved.out.data = nullptr; }, "out has null data, but 120 elements: f32 [2, 4, 3, 5]"},
    {"out_dim", [](Call& c) { c.saved.out.shape[3] = 4; },
     "out dim 3 (value_head_dim) is 4, but value set value_head_dim = 5"},
    {"grad_out_shape", [](Call& c) { c.saved.grad_out.shape[2] = 2; },
     "grad_out dim 2 (query_len) is 2, but query set query_len = 3"},
    {"grad_out_dtype", [](Call& c) { c.saved.grad_out.dtype = DType::i32; },
     "grad_out is i32, but must be f32, bf16, f16 or f64"},
    {"grad_out_f64", [](Call& c) { c.saved.grad_out.dtype = DType::f64; },
     "f64 does not mix with other types: query is f32, grad_out f64"},
    {"lse_shape", [](Call& c) { c.saved.softmax_lse.shape[1] = 3; },
     "softmax_lse dim 1 (num_heads) is 3, but query set num_heads = 4"},
    {"lse_dtype", [](Call& c) { c.saved.softmax_lse.dtype = DType::bf16; }, "softmax_lse is bf16, but must be f32"},
    {"no_statistics", [](Call& c) { c.saved.softmax_lse = {}; },
     "neither softmax_lse nor softmax_max and softmax_sum are given"},
    {"max_without_sum", [](Call& c) { c.saved.softmax_max = c.saved.softmax_lse; },
     "softmax_max is given, but softmax_sum is not"},
    {"sum_without_max", [](Call& c) { c.saved.softmax_sum = c.saved.softmax_lse; },
     "softmax_sum is given, but softmax_max is not"},
    {"grad_lse_shape", [](Call& c) { c.saved.grad_lse.shape[2] = 2; },
     "grad_lse dim 2 (query_len) is 2, but query set query_len = 3"},
    {"grad_query_shape", [](Call& c) { c.grads.grad_query.shape[0] = 1; },
     "grad_query dim 0 (batch) is 1, but query set batch = 2"},
    {"grad_query_dtype", [](Call& c) { c.grads.grad_query.dtype = DType::u8; },
     "grad_query is u8, but must be f32, bf16, f16 or f64"},
    {"grad_key_shape", [](Call& c) { c.grads.grad_key.shape[2] = 6; },
     "grad_key dim 2 (kv_len) is 6, but key set kv_len = 7"},
    {"grad_value_shape", [](Call& c) { c.grads.grad_value.shape[3] = 4; },
     "grad_value dim 3 (value_head_dim) is 4, but value set value_head_dim = 5"},
    {"grad_key_is_an_input", [](Call& c) { c.grads.grad_key.data = c.memory.data(); },
     "grad_key f32 [2, 2, 7, 8] overlaps query f32 [2, 4, 3, 8] in memory, but an output must not"},
    {"grad_value_is_grad_key", [](Call& c) { c.grads.grad_value.data = c.out_memory.data() + 600; },
     "grad_value f32 [2, 2, 7, 5] overlaps grad_key f32 [2, 2, 7, 8] in memory, but an output must not"},
    {"grad_query_overlaps_itself", [](Call& c) { c.grads.grad_query.strides[2] = 4; },
     "grad_query f32 [2, 4, 3, 8] has strides [96, 24, 4, 1], with which elements share addresses, but every element "
     "of an "
     "output needs its own"},
    {"grad_bias_without_bias", [](Call& c) { c.in.bias = {}; }, "grad_bias is given, but bias is not"},
    {"grad_bias_rank", [](Call& c) { c.grads.grad_bias = c.grads.grad_bias.selected(1, 0); },
     "grad_bias has rank 2, but bias has rank 3"},
    {"grad_bias_shape", [](Call& c) { c.grads.grad_bias.shape[2] = 6; }, "grad_bias dim 2 is 6, but bias has 7"},
    {"grad_bias_dtype", [](Call& c) { c.grads.grad_bias.dtype = DType::bf16; }, "grad_bias is bf16, but must be f32"},
    {"grad_sinks_without_sinks", [](Call& c) { c.in.sinks = {}; }, "grad_sinks is given, but sinks is not"},
    {"grad_sinks_shape", [](Call& c) { c.grads.grad_sinks.shape[0] = 3; },
     "grad_sinks dim 0 (num_heads) is 3, but query set num_heads = 4"},
    {"grad_query_rope_without_ropes",
     [](Call& c) {
       c.grads.grad_query_rope = Tensor::contiguous(DType::f32, {2, 4, 3, 8}, c.out_memory.data() + 1700);
     },
     "grad_query_rope is given, but query_rope and key_rope are not"},
    {"grad_key_rope_shape",
     [](Call& c) {
       c.in.query_rope = ConstTensor::contiguous(DType::f32, {2, 4, 3, 2}, c.memory.data());
       c.in.key_rope = ConstTensor::contiguous(DType::f32, {2, 2, 7, 2}, c.memory.data());
       c.grads.grad_key_rope = Tensor::contiguous(DType::f32, {2, 2, 7, 3}, c.out_memory.data() + 1700);
     },
     "grad_key_rope dim 3 (rope_dim) is 3, but query_rope set rope_dim = 2"},
    {"grad_key_rope_dtype",
     [](Call& c) {
       c.in.query_rope = ConstTensor::contiguous(DType::f32, {2, 4, 3, 2}, c.memory.data());
       c.in.key_rope = ConstTensor::contiguous(DType::f32, {2, 2, 7, 2}, c.memory.data());
       c.grads.grad_key_rope = Tensor::contiguous(DType::f64, {2, 2, 7, 2}, c.out_memory.data() + 1700);
     },
     "f64 does not mix with other types: query is f32, grad_key_rope f64"},
    {"lengths_too_long",
     [](Call& c) {
       c.lengths[1] = 8;
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "kv_lengths[1] is 8, must be 0 to 7 (kv_len of key)"},
    {"bias_shape", [](Call& c) { c.in.bias.shape[2] = c.grads.grad_bias.shape[2] = 5; },
     "bias dim 2 is 5, but must be 1 or kv_len = 7"},
    {"mask_shape",
     [](Call& c) {
       c.in.mask = ConstTensor::contiguous(DType::boolean, {4, 1, 6}, c.memory.data());
     },
     "mask dim 2 is 6, but must be 1 or kv_len = 7"},
    {"offsets_decrease",
     [](Call& c) {
       make_varlen(c, {0, 4, 3});
     },
     "cu_seqlens_q[2] is 3, less than cu_seqlens_q[1] = 4"},
    {"offsets_beyond_query",
     [](Call& c) {
       make_varlen(c, {0, 4, 7});
     },
     "cu_seqlens_q[2] is 7, but query has 6 rows"},
    {"prefix_beyond_the_keys",
     [](Call& c) {
       c.lengths[1] = 8;
       c.in.prefix = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "prefix[1] is 8, must be 0 to 7 (keys of sequence 1)"},
    {"drop_mask_too_short", [](Call& c) { c.in.drop_mask = ConstTensor::contiguous(DType::u8, {20}, c.memory.data()); },
     "drop_mask has 20 bytes, but 168 weights need 21"},
    {"scale_nan", [](Call& c) { c.options.softmax_scale = std::numeric_limits<float>::quiet_NaN(); },
     "softmax_scale is nan, must be finite"},
    {"keep_prob", [](Call& c) { c.options.dropout.keep_prob = 0; },
     "dropout.keep_prob is 0, must be at least 2^-32 (2.33e-10) and at most 1"},
    {"block_kv", [](Call& c) { c.options.block_kv = 5000; }, "block_kv is 5000, must be 0 to 4096"},
    {"head_dim",
     [](Call& c) {
       c.in.query.shape[3] = c.in.key.shape[3] = c.grads.grad_query.shape[3] = c.grads.grad_key.shape[3] = 0;
     },
     "head_dim is 0, must be 1 to 768"},

    // Block masks and lists.
    {"rows_of_blocks_decrease",
     [](Call& c) {
       make_blocks(c, {0, 3, 2}, {0, 1, 2});
     },
     "block_mask.row_offsets[0][0][2] is 2, less than block_mask.row_offsets[0][0][1] = 3"},
    {"rows_of_blocks_beyond_the_columns",
     [](Call& c) {
       make_blocks(c, {0, 2, 4}, {0, 2, 1});
     },
     "block_mask.row_offsets[0][0][2] is 4, must be 0 to 3, the columns"},
    {"columns_unsorted",
     [](Call& c) {
       make_blocks(c, {0, 2, 3}, {2, 0, 1});
     },
     "block_mask.columns[1] is 0, not more than block_mask.columns[0] = 2 of the same row"},
    {"columns_repeated",
     [](Call& c) {
       make_blocks(c, {0, 2, 3}, {2, 2, 1});
     },
     "block_mask.columns[1] is 2, not more than block_mask.columns[0] = 2 of the same row"},
    {"columns_past_the_end",
     [](Call& c) {
       make_blocks(c, {0, 2, 3}, {0, 3, 1});
     },
     "block_mask.columns[1] is 3, but kv_len = 7 has 3 blocks of 3 keys"},
    {"columns_negative",
     [](Call& c) {
       make_blocks(c, {0, 2, 3}, {0, 2, -1});
     },
     "block_mask.columns[2] is -1, but kv_len = 7 has 3 blocks of 3 keys"},
    {"index_past_the_end",
     [](Call& c) {
       make_lists(c, {0, 4, -1});
     },
     "sparse_indices.indices[0][0][0][1] is 4, but sequence 0 has 4 blocks of 2 keys (kv_len = 7); only -1 may stand "
     "for "
     "none"},
    {"minus_one_in_the_middle",
     [](Call& c) {
       make_lists(c, {0, -1, 2});
     },
     "sparse_indices.indices[0][0][0][2] is 2, but sparse_indices.indices[0][0][0][1] = -1 ended the list"},
    {"index_below_minus_one",
     [](Call& c) {
       make_lists(c, {-2, 0, 1});
     },
     "sparse_indices.indices[0][0][0][0] is -2, but sequence 0 has 4 blocks of 2 keys (kv_len = 7); only -1 may stand "
     "for none"},
    {"index_repeated",
     [](Call& c) {
       make_lists(c, {3, 1, 3});
     },
     "sparse_indices.indices[0][0][0][2] is 3, as is sparse_indices.indices[0][0][0][0] of the same list"},
};

class AttentionBackwardRefuses : public testing::TestWithParam<Refusal> {};

TEST_P(AttentionBackwardRefuses, AndWritesNothing) {
  Call call;
  GetParam().spoil(call);
  const Status status = call.run();
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), "flash_attention_backward: " + GetParam().message);
  for (const float x : call.out_memory) ASSERT_EQ(x, 7.0f);
}
INSTANTIATE_TEST_SUITE_P(Attention, AttentionBackwardRefuses, testing::ValuesIn(kRefusals),
                         [](const auto& refusal) { return std::string(refusal.param.name); });

TEST(AttentionBackwardContract, TheUnspoiledCallIsRight) {
  Call call, blocks, lists;
  make_blocks(blocks, {0, 2, 3}, {0, 2, 1});
  make_lists(lists, {3, 1, -1});
  for (Call* c : {&call, &blocks, &lists}) EXPECT_EQ(c->run().message(), "");
}

// Any gradient may be left out, and the others keep their bits.
TEST(AttentionBackwardContract, GradientsThatAreNotWantedAreNotNeeded) {
  Call whole;
  ASSERT_TRUE(whole.run().ok());
  for (int left_out = 0; left_out < 5; ++left_out) {
    Call call;
    Tensor* const tensors[] = {&call.grads.grad_query, &call.grads.grad_key, &call.grads.grad_value,
                               &call.grads.grad_bias, &call.grads.grad_sinks};
    const Tensor absent = *tensors[left_out];
    *tensors[left_out] = {};
    ASSERT_TRUE(call.run().ok());
    const auto* begin = static_cast<const float*>(absent.data);
    for (size_t i = 0; i < call.out_memory.size(); ++i) {
      const float* at = call.out_memory.data() + i;
      const bool untouched = at >= begin && at < begin + absent.num_elements();
      ASSERT_EQ(call.out_memory[i], untouched ? 7.0f : whole.out_memory[i]) << left_out << " " << i;
    }
  }
  Call none;
  none.grads = {};
  EXPECT_TRUE(none.run().ok());
}

TEST(AttentionBackwardContract, NoQueriesNoKeysNoBatch) {
  for (const TestContext& t : contexts_with_threads(2)) {
    auto& context = const_cast<Context&>(t.context);
    Call no_queries;  // keys have gradients all the same
    no_queries.in.query.shape[2] = no_queries.saved.out.shape[2] = no_queries.saved.grad_out.shape[2] = 0;
    no_queries.saved.softmax_lse.shape[2] = no_queries.saved.grad_lse.shape[2] = 0;
    no_queries.grads.grad_query.shape[2] = 0;
    ASSERT_TRUE(flash_attention_backward(context, no_queries.in, no_queries.saved, no_queries.grads).ok());
    for (int i = 0; i < 2 * 2 * 7 * 8; ++i) ASSERT_EQ(no_queries.out_memory[static_cast<size_t>(500 + i)], 0);
    for (int i = 0; i < 2 * 2 * 7 * 5; ++i) ASSERT_EQ(no_queries.out_memory[static_cast<size_t>(1000 + i)], 0);
    for (int i = 0; i < 28; ++i) ASSERT_EQ(no_queries.out_memory[static_cast<size_t>(1500 + i)], 0);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(no_queries.out_memory[static_cast<size_t>(1600 + i)], 0);

    Call no_keys;
    no_keys.in.bias = {}, no_keys.grads.grad_bias = {};
    no_keys.in.key.shape[2] = no_keys.in.value.shape[2] = 0;
    no_keys.grads.grad_key.shape[2] = no_keys.grads.grad_value.shape[2] = 0;
    ASSERT_TRUE(flash_attention_backward(context, no_keys.in, no_keys.saved, no_keys.grads).ok());
    for (int i = 0; i < 2 * 4 * 3 * 8; ++i) ASSERT_EQ(no_keys.out_memory[static_cast<size_t>(i)], 0);

    Call no_batch;
    for (ConstTensor* x : {&no_batch.in.query, &no_batch.in.key, &no_batch.in.value, &no_batch.saved.out,
                           &no_batch.saved.grad_out, &no_batch.saved.softmax_lse, &no_batch.saved.grad_lse}) {
      x->shape[0] = 0;
    }
    for (Tensor* x : {&no_batch.grads.grad_query, &no_batch.grads.grad_key, &no_batch.grads.grad_value})
      x->shape[0] = 0;
    ASSERT_TRUE(flash_attention_backward(context, no_batch.in, no_batch.saved, no_batch.grads).ok());
    for (int i = 0; i < 28; ++i) ASSERT_EQ(no_batch.out_memory[static_cast<size_t>(1500 + i)], 0);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(no_batch.out_memory[static_cast<size_t>(1600 + i)], 0);
  }
}

}  // namespace
}  // namespace opst::test
