// What flash_attention_forward refuses: every check with its whole message, and nothing written.
#include <gtest/gtest.h>

#include <functional>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

// A call that is right, for tests to spoil.
struct Call {
  std::vector<float> memory = std::vector<float>(4096, 0.5f);
  std::vector<float> out_memory = std::vector<float>(1024, 7.0f);
  std::vector<int32_t> table = {0, 1, 2, 3};
  std::vector<int32_t> lengths = {7, 5};
  std::vector<int32_t> numbers;
  std::vector<uint8_t> bytes = std::vector<uint8_t>(2 * 4 * 3 * 7, 1);
  AttentionInputs in;
  AttentionOutputs out;
  AttentionOptions options;

  Call() {
    in.query = ConstTensor::contiguous(DType::f32, {2, 4, 3, 8}, memory.data());
    in.key = ConstTensor::contiguous(DType::f32, {2, 2, 7, 8}, memory.data());
    in.value = ConstTensor::contiguous(DType::f32, {2, 2, 7, 5}, memory.data());
    out.out = Tensor::contiguous(DType::f32, {2, 4, 3, 5}, out_memory.data());
    for (int i = 0; i < 3; ++i) {
      (i == 0   ? out.softmax_lse
       : i == 1 ? out.softmax_max
                : out.softmax_sum) = Tensor::contiguous(DType::f32, {2, 4, 3}, out_memory.data() + 200 + 30 * i);
    }
  }
  // The same with pages: 4 blocks of 4 keys, two for each sequence.
  void make_paged() {
    in.key = ConstTensor::contiguous(DType::f32, {4, 4, 2, 8}, memory.data());
    in.value = ConstTensor::contiguous(DType::f32, {4, 4, 2, 5}, memory.data());
    in.block_table = ConstTensor::contiguous(DType::i32, {2, 2}, table.data());
    in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
  }
  // Two sequences one after the other: 2 and 1 queries, 4 and 3 keys.
  void make_varlen(std::vector<int32_t> offsets = {0, 2, 3, 0, 4, 7}) {
    in.query = ConstTensor::contiguous(DType::f32, {3, 4, 8}, memory.data());
    in.key = ConstTensor::contiguous(DType::f32, {7, 2, 8}, memory.data());
    in.value = ConstTensor::contiguous(DType::f32, {7, 2, 5}, memory.data());
    out.out = Tensor::contiguous(DType::f32, {3, 4, 5}, out_memory.data());
    out.softmax_lse = Tensor::contiguous(DType::f32, {4, 3}, out_memory.data() + 200);
    out.softmax_max = out.softmax_sum = {};
    numbers = std::move(offsets);
    in.cu_seqlens_q = ConstTensor::contiguous(DType::i32, {3}, numbers.data());
    in.cu_seqlens_k = ConstTensor::contiguous(DType::i32, {3}, numbers.data() + 3);
  }
  ConstTensor mask(std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::boolean, shape, bytes.data());
  }
  ConstTensor bias(std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::f32, shape, memory.data());
  }
  void set_prefix(int32_t a, int32_t b) {
    numbers = {a, b};
    in.prefix = ConstTensor::contiguous(DType::i32, {2}, numbers.data());
  }
  Status run() { return flash_attention_forward(const_cast<Context&>(contexts().front().context), in, out, options); }
};

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;  // after "flash_attention_forward: "
};

const float kNan = std::numeric_limits<float>::quiet_NaN();

const Refusal kRefusals[] = {
    {"query_rank", [](Call& c) { c.in.query = c.in.query.selected(0, 0); },
     "query has rank 3, but [batch, num_heads, query_len, head_dim] has rank 4"},
    {"query_dtype", [](Call& c) { c.in.query.dtype = DType::i32; }, "query is i32, but must be f32, bf16, f16 or f64"},
    {"query_null", [](Call& c) { c.in.query.data = nullptr; },
     "query has null data, but 192 elements: f32 [2, 4, 3, 8]"},
    {"B39_query_negative_stride", [](Call& c) { c.in.query.strides[3] = -1; },
     "query stride 3 is -1, but must be >= 0"},
    {"query_negative_size", [](Call& c) { c.in.query.shape[2] = -3; }, "query dim 2 is -3, but must be >= 0"},
    {"query_spans_too_much", [](Call& c) { c.in.query.strides[2] = int64_t{1} << 61; },
     "query f32 [2, 4, 3, 8] spans more bytes than the limit of 2^56"},
    {"key_batch", [](Call& c) { c.in.key.shape[0] = 1; }, "key dim 0 (batch) is 1, but query set batch = 2"},
    {"key_head_dim", [](Call& c) { c.in.key.shape[3] = 7; }, "key dim 3 (head_dim) is 7, but query set head_dim = 8"},
    {"key_dtype", [](Call& c) { c.in.key.dtype = DType::i64; }, "key is i64, but must be f32, bf16, f16 or f64"},
    {"key_rank", [](Call& c) { c.in.key.rank = 3; },
     "key has rank 3, but [batch, num_kv_heads, kv_len, head_dim] has rank 4"},
    {"B39_key_negative_stride", [](Call& c) { c.in.key.strides[2] = -8; }, "key stride 2 is -8, but must be >= 0"},
    {"value_kv_len", [](Call& c) { c.in.value.shape[2] = 6; }, "value dim 2 (kv_len) is 6, but key set kv_len = 7"},
    {"value_kv_heads", [](Call& c) { c.in.value.shape[1] = 1; },
     "value dim 1 (num_kv_heads) is 1, but key set num_kv_heads = 2"},
    {"value_dtype", [](Call& c) { c.in.value.dtype = DType::boolean; },
     "value is bool, but must be f32, bf16, f16 or f64"},
    {"value_differs_from_key", [](Call& c) { c.in.value.dtype = DType::f16; }, "value is f16, but key is f32"},
    {"f64_mixed",
     [](Call& c) {
       c.in.query = ConstTensor::contiguous(DType::f64, {2, 4, 3, 8}, c.memory.data());
       c.out.softmax_lse = c.out.softmax_max = c.out.softmax_sum = {};
     },
     "f64 does not mix with other types: query is f64, key f32, out f32"},
    {"f64_out",
     [](Call& c) {
       c.out.out = Tensor::contiguous(DType::f64, {2, 4, 3, 5}, c.out_memory.data() + 300);
     },
     "f64 does not mix with other types: query is f32, key f32, out f64"},
    {"out_shape_follows_value",
     [](Call& c) {
       c.out.out = Tensor::contiguous(DType::f32, {2, 4, 3, 8}, c.out_memory.data() + 300);
     },
     "out dim 3 (value_head_dim) is 8, but value set value_head_dim = 5"},
    {"out_heads", [](Call& c) { c.out.out.shape[1] = 2; }, "out dim 1 (num_heads) is 2, but query set num_heads = 4"},
    {"out_dtype", [](Call& c) { c.out.out.dtype = DType::u8; }, "out is u8, but must be f32, bf16, f16 or f64"},
    {"out_null", [](Call& c) { c.out.out.data = nullptr; }, "out has null data, but 120 elements: f32 [2, 4, 3, 5]"},
    {"out_aliases_itself", [](Call& c) { c.out.out.strides[0] = 0; },
     "out f32 [2, 4, 3, 5] has strides [0, 15, 5, 1], with which elements share addresses, but every element of an "
     "output needs its own"},
    {"out_overlaps_query", [](Call& c) { c.out.out.data = c.memory.data() + 100; },
     "out f32 [2, 4, 3, 5] overlaps query f32 [2, 4, 3, 8] in memory, but an output must not"},
    {"out_overlaps_value",
     [](Call& c) {
       c.in.value.data = c.memory.data() + 2000;
       c.out.out.data = c.memory.data() + 2139;
     },
     "out f32 [2, 4, 3, 5] overlaps value f32 [2, 2, 7, 5] in memory, but an output must not"},
    {"lse_shape",
     [](Call& c) {
       c.out.softmax_lse = Tensor::contiguous(DType::f32, {2, 4, 4}, c.out_memory.data() + 500);
     },
     "softmax_lse dim 2 (query_len) is 4, but query set query_len = 3"},
    {"lse_dtype", [](Call& c) { c.out.softmax_lse.dtype = DType::bf16; }, "softmax_lse is bf16, but must be f32"},
    {"max_rank", [](Call& c) { c.out.softmax_max.rank = 2; },
     "softmax_max has rank 2, but [batch, num_heads, query_len] has rank 3"},
    {"sum_dtype",
     [](Call& c) {
       c.out.softmax_sum = Tensor::contiguous(DType::f64, {2, 4, 3}, c.out_memory.data() + 500);
     },
     "softmax_sum is f64, but must be f32"},
    {"sum_overlaps_max", [](Call& c) { c.out.softmax_sum.data = c.out_memory.data() + 231; },
     "softmax_sum f32 [2, 4, 3] overlaps softmax_max f32 [2, 4, 3] in memory, but an output must not"},
    {"B47_heads_33_over_2",
     [](Call& c) {
       c.in.query = ConstTensor::contiguous(DType::f32, {2, 33, 3, 8}, c.memory.data());
       c.out.out = Tensor::contiguous(DType::f32, {2, 33, 3, 5}, c.memory.data() + 2500);
       c.out.softmax_lse = c.out.softmax_max = c.out.softmax_sum = {};
     },
     "num_heads is 33, not a multiple of num_kv_heads = 2"},
    {"B47_fewer_heads_than_kv_heads",
     [](Call& c) {
       c.in.query.shape[1] = c.out.out.shape[1] = 1;
       c.out.softmax_lse = c.out.softmax_max = c.out.softmax_sum = {};
     },
     "num_heads is 1, not a multiple of num_kv_heads = 2"},
    {"B47_no_kv_heads", [](Call& c) { c.in.key.shape[1] = c.in.value.shape[1] = 0; },
     "num_heads is 4, not a multiple of num_kv_heads = 0"},
    {"B47_heads_3_over_2_in_pages",
     [](Call& c) {
       c.make_paged();
       c.in.query.shape[1] = c.out.out.shape[1] = 3;
       c.out.softmax_lse = c.out.softmax_max = c.out.softmax_sum = {};
     },
     "num_heads is 3, not a multiple of num_kv_heads = 2"},
    {"B32_head_dim_0", [](Call& c) { c.in.query.shape[3] = c.in.key.shape[3] = 0; }, "head_dim is 0, must be 1 to 768"},
    {"B32_value_head_dim_0", [](Call& c) { c.in.value.shape[3] = c.out.out.shape[3] = 0; },
     "value_head_dim is 0, must be 1 to 768"},
    {"head_dim_769",
     [](Call& c) {
       c.in.query.shape[3] = c.in.key.shape[3] = 769;
       c.in.query.strides[3] = c.in.key.strides[3] = 0;
     },
     "head_dim is 769, must be 1 to 768"},
    {"value_head_dim_769",
     [](Call& c) {
       c.in.value.shape[3] = 769, c.in.value.strides[3] = 0;
       c.memory.resize(30000), c.in.query.data = c.in.key.data = c.in.value.data = c.memory.data();
       c.out.out = Tensor::contiguous(DType::f32, {2, 4, 3, 769}, c.memory.data() + 2500);
     },
     "value_head_dim is 769, must be 1 to 768"},
    {"scale_nan", [](Call& c) { c.options.softmax_scale = kNan; }, "softmax_scale is nan, must be finite"},
    {"scale_infinite", [](Call& c) { c.options.softmax_scale = -HUGE_VALF; }, "softmax_scale is -inf, must be finite"},
    {"scale_beyond_f32", [](Call& c) { c.options.softmax_scale = 1e39; },
     "softmax_scale is 1e+39, must be finite in f32"},
    {"block_q_negative", [](Call& c) { c.options.block_q = -1; }, "block_q is -1, must be 0 to 4096"},
    {"block_q_large", [](Call& c) { c.options.block_q = 4097; }, "block_q is 4097, must be 0 to 4096"},
    {"block_kv_negative", [](Call& c) { c.options.block_kv = -2; }, "block_kv is -2, must be 0 to 4096"},
    {"block_kv_large", [](Call& c) { c.options.block_kv = 5000; }, "block_kv is 5000, must be 0 to 4096"},
    {"lengths_dtype", [](Call& c) { c.in.kv_lengths = ConstTensor::contiguous(DType::f32, {2}, c.lengths.data()); },
     "kv_lengths is f32, but must be i32 or i64"},
    {"B61_lengths_too_few",
     [](Call& c) { c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, c.lengths.data()); },
     "kv_lengths dim 0 (batch) is 1, but query set batch = 2"},
    {"dense_length_too_long",
     [](Call& c) {
       c.lengths = {7, 8};
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "kv_lengths[1] is 8, must be 0 to 7 (kv_len of key)"},
    {"B61_dense_length_negative",
     [](Call& c) {
       c.lengths = {-1, 5};
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "kv_lengths[0] is -1, must be 0 to 7 (kv_len of key)"},
    {"paged_without_lengths", [](Call& c) { c.make_paged(), c.in.kv_lengths = {}; },
     "block_table is given, but kv_lengths is not"},
    {"table_dtype", [](Call& c) { c.make_paged(), c.in.block_table.dtype = DType::u8; },
     "block_table is u8, but must be i32 or i64"},
    {"table_batch",
     [](Call& c) {
       c.make_paged(), c.in.block_table = ConstTensor::contiguous(DType::i32, {1, 4}, c.table.data());
     },
     "block_table dim 0 (batch) is 1, but query set batch = 2"},
    {"table_rank",
     [](Call& c) { c.make_paged(), c.in.block_table = ConstTensor::contiguous(DType::i32, {4}, c.table.data()); },
     "block_table has rank 1, but [batch, max_blocks] has rank 2"},
    {"paged_value_blocks", [](Call& c) { c.make_paged(), c.in.value.shape[0] = 3; },
     "value dim 0 (num_blocks) is 3, but key set num_blocks = 4"},
    {"paged_value_block_size", [](Call& c) { c.make_paged(), c.in.value.shape[1] = 3; },
     "value dim 1 (block_size) is 3, but key set block_size = 4"},
    {"paged_block_size_0", [](Call& c) { c.make_paged(), c.in.key.shape[1] = c.in.value.shape[1] = 0; },
     "block_size is 0, must be at least 1"},
    {"B61_length_beyond_the_table",
     [](Call& c) {
       c.lengths = {9, 5}, c.make_paged();
     },
     "kv_lengths[0] is 9, must be 0 to 8 (2 blocks of 4 keys in block_table)"},
    {"B61_length_negative",
     [](Call& c) {
       c.lengths = {7, -5}, c.make_paged();
     },
     "kv_lengths[1] is -5, must be 0 to 8 (2 blocks of 4 keys in block_table)"},
    {"B62_block_id_too_large",
     [](Call& c) {
       c.table = {0, 4, 1, 1}, c.make_paged();
     },
     "block_table[0][1] is 4, but the cache has 4 blocks"},
    {"B62_block_id_negative",
     [](Call& c) {
       c.table = {0, 1, -1, 1}, c.make_paged();
     },
     "block_table[1][0] is -1, but the cache has 4 blocks"},

    // Sequences of different lengths.
    {"varlen_query_rank", [](Call& c) { c.make_varlen(), c.in.query.rank = 2; },
     "query has rank 2, but [total_q, num_heads, head_dim] has rank 3"},
    {"varlen_out_tokens", [](Call& c) { c.make_varlen(), c.out.out.shape[0] = 2; },
     "out dim 0 (total_q) is 2, but query set total_q = 3"},
    {"varlen_lse_is_by_head",
     [](Call& c) {
       c.make_varlen(), c.out.softmax_lse = Tensor::contiguous(DType::f32, {3, 4}, c.out_memory.data() + 200);
     },
     "softmax_lse dim 0 (num_heads) is 3, but query set num_heads = 4"},
    {"varlen_value_tokens", [](Call& c) { c.make_varlen(), c.in.value.shape[0] = 6; },
     "value dim 0 (total_k) is 6, but key set total_k = 7"},
    {"offsets_dtype", [](Call& c) { c.make_varlen(), c.in.cu_seqlens_q.dtype = DType::f32; },
     "cu_seqlens_q is f32, but must be i32 or i64"},
    {"offsets_without_entries", [](Call& c) { c.make_varlen(), c.in.cu_seqlens_q.shape[0] = 0; },
     "cu_seqlens_q is i32 [0], but must be [batch + 1], which has at least one entry"},
    {"offsets_batches_differ", [](Call& c) { c.make_varlen(), c.in.cu_seqlens_k.shape[0] = 2; },
     "cu_seqlens_k dim 0 (batch) is 1, but cu_seqlens_q set batch = 2"},
    {"offsets_not_from_0",
     [](Call& c) {
       c.make_varlen({1, 2, 3, 0, 4, 7});
     },
     "cu_seqlens_q[0] is 1, must be 0"},
    {"offsets_negative",
     [](Call& c) {
       c.make_varlen({0, -2, 3, 0, 4, 7});
     },
     "cu_seqlens_q[1] is -2, less than cu_seqlens_q[0] = 0"},
    {"offsets_decrease",
     [](Call& c) {
       c.make_varlen({0, 2, 3, 0, 5, 4});
     },
     "cu_seqlens_k[2] is 4, less than cu_seqlens_k[1] = 5"},
    {"offsets_beyond_query",
     [](Call& c) {
       c.make_varlen({0, 2, 4, 0, 4, 7});
     },
     "cu_seqlens_q[2] is 4, but query has 3 rows"},
    {"offsets_beyond_key",
     [](Call& c) {
       c.make_varlen({0, 2, 3, 0, 4, 8});
     },
     "cu_seqlens_k[2] is 8, but key has 7 rows"},
    {"varlen_length_beyond_its_sequence",
     [](Call& c) {
       c.make_varlen(), c.lengths = {4, 4};
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "kv_lengths[1] is 4, must be 0 to 3 (keys of sequence 1)"},
    {"varlen_batch_of_lengths",
     [](Call& c) {
       c.make_varlen();
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, c.lengths.data());
     },
     "kv_lengths dim 0 (batch) is 1, but cu_seqlens_q set batch = 2"},
    {"pages_and_offsets_of_keys",
     [](Call& c) {
       c.make_paged(), c.numbers = {0, 1, 2};
       c.in.cu_seqlens_k = ConstTensor::contiguous(DType::i32, {3}, c.numbers.data());
     },
     "block_table and cu_seqlens_k are given, but only one may be"},
    {"prefix_beyond_the_keys", [](Call& c) { c.set_prefix(7, 8); },
     "prefix[1] is 8, must be 0 to 7 (keys of sequence 1)"},
    {"prefix_negative", [](Call& c) { c.set_prefix(-1, 2); }, "prefix[0] is -1, must be 0 to 7 (keys of sequence 0)"},
    {"prefix_beyond_the_length",
     [](Call& c) {
       c.set_prefix(7, 6);
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "prefix[1] is 6, must be 0 to 5 (keys of sequence 1)"},
    {"prefix_batch", [](Call& c) { c.set_prefix(1, 1), c.in.prefix.shape[0] = 1; },
     "prefix dim 0 (batch) is 1, but query set batch = 2"},

    // Masks and biases.
    {"B15_mask_of_integers",
     [](Call& c) {
       c.in.mask = c.mask({3, 7}), c.in.mask.dtype = DType::u8;
     },
     "mask is u8, but must be bool"},
    {"mask_keys",
     [](Call& c) {
       c.in.mask = c.mask({3, 6});
     },
     "mask dim 1 is 6, but must be 1 or kv_len = 7"},
    {"mask_queries",
     [](Call& c) {
       c.in.mask = c.mask({4, 7});
     },
     "mask dim 0 is 4, but must be 1 or query_len = 3"},
    {"mask_heads",
     [](Call& c) {
       c.in.mask = c.mask({2, 3, 7});
     },
     "mask dim 0 is 2, but must be 1 or num_heads = 4"},
    {"mask_batch",
     [](Call& c) {
       c.in.mask = c.mask({3, 1, 3, 7});
     },
     "mask dim 0 is 3, but must be 1 or batch = 2"},
    {"mask_rank",
     [](Call& c) {
       c.in.mask = c.mask({1, 1, 1, 3, 7});
     },
     "mask has rank 5, must be at most 4"},
    {"mask_is_as_wide_as_the_tensor_not_the_lengths",
     [](Call& c) {
       c.lengths = {5, 5}, c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
       c.in.mask = c.mask({3, 5});
     },
     "mask dim 1 is 5, but must be 1 or kv_len = 7"},
    {"B39_mask_negative_stride",
     [](Call& c) {
       c.in.mask = c.mask({3, 7}), c.in.mask.strides[1] = -1;
     },
     "mask stride 1 is -1, but must be >= 0"},
    {"varlen_mask_too_narrow",
     [](Call& c) {
       c.make_varlen(), c.in.mask = c.mask({2, 3});
     },
     "mask dim 1 is 3, but must be 1 or at least kv_len = 4"},
    {"varlen_mask_too_low",
     [](Call& c) {
       c.make_varlen({0, 0, 3, 0, 4, 7}), c.in.mask = c.mask({2, 4});
     },
     "mask dim 0 is 2, but must be 1 or at least query_len = 3"},
    {"bias_dtype",
     [](Call& c) {
       c.in.bias = c.bias({3, 7}), c.in.bias.dtype = DType::bf16;
     },
     "bias is bf16, but must be f32"},
    {"bias_keys",
     [](Call& c) {
       c.in.bias = c.bias({3, 8});
     },
     "bias dim 1 is 8, but must be 1 or kv_len = 7"},
    {"bias_scale_nan", [](Call& c) { c.options.bias_scale = kNan; }, "bias_scale is nan, must be finite"},
    {"slopes_heads", [](Call& c) { c.in.alibi_slopes = c.bias({3}); },
     "alibi_slopes dim 0 (num_heads) is 3, but query set num_heads = 4"},
    {"slopes_batch",
     [](Call& c) {
       c.in.alibi_slopes = c.bias({1, 4});
     },
     "alibi_slopes dim 0 (batch) is 1, but query set batch = 2"},
    {"slopes_rank",
     [](Call& c) {
       c.in.alibi_slopes = c.bias({2, 4, 1});
     },
     "alibi_slopes has rank 3, but [batch, num_heads] has rank 2"},
    {"slopes_dtype", [](Call& c) { c.in.alibi_slopes = c.bias({4}), c.in.alibi_slopes.dtype = DType::f64; },
     "alibi_slopes is f64, but must be f32"},
    {"alibi_start", [](Call& c) { c.options.alibi_key_start = int64_t{1} << 62; },
     "alibi_key_start is 4611686018427387904, must be -1152921504606846976 to 1152921504606846976"},
    {"sinks_heads", [](Call& c) { c.in.sinks = c.bias({2}); },
     "sinks dim 0 (num_heads) is 2, but query set num_heads = 4"},
    {"softcap_negative", [](Call& c) { c.options.softcap = -1; }, "softcap is -1, must be 0 or positive"},
    {"softcap_of_nothing_in_f32", [](Call& c) { c.options.softcap = 1e-60; },
     "softcap is 1e-60, must be 0 or positive in f32"},
    {"softcap_huge", [](Call& c) { c.options.softcap = 1e300; }, "softcap is 1e+300, must be finite in f32"},
    {"bias_scale_huge", [](Call& c) { c.options.bias_scale = -1e300; }, "bias_scale is -1e+300, must be finite in f32"},
    {"softcap_nan", [](Call& c) { c.options.softcap = kNan; }, "softcap is nan, must be finite"},

    // Dropout.
    {"keep_prob_0", [](Call& c) { c.options.dropout.keep_prob = 0; },
     "dropout.keep_prob is 0, must be at least 2^-32 (2.33e-10) and at most 1"},
    {"keep_prob_above_1", [](Call& c) { c.options.dropout.keep_prob = 1.5; },
     "dropout.keep_prob is 1.5, must be at least 2^-32 (2.33e-10) and at most 1"},
    {"keep_prob_nan", [](Call& c) { c.options.dropout.keep_prob = std::nan(""); },
     "dropout.keep_prob is nan, must be at least 2^-32 (2.33e-10) and at most 1"},
    {"first_key_negative", [](Call& c) { c.options.dropout.first_key = -4; },
     "dropout.first_key is -4, must be 0 to 1152921504606846976"},
    {"more_heads_than_in_all", [](Call& c) { c.options.dropout.first_head = 3, c.options.dropout.total_heads = 6; },
     "dropout.first_head + num_heads is 7, but dropout.total_heads is 6"},
    {"drop_mask_too_short", [](Call& c) { c.in.drop_mask = ConstTensor::contiguous(DType::u8, {20}, c.bytes.data()); },
     "drop_mask has 20 bytes, but 168 weights need 21"},
    {"drop_mask_dtype", [](Call& c) { c.in.drop_mask = c.mask({168}); }, "drop_mask is bool, but must be u8"},
    {"drop_mask_strides",
     [](Call& c) {
       c.in.drop_mask = ConstTensor::contiguous(DType::u8, {42}, c.bytes.data()), c.in.drop_mask.strides[0] = 2;
     },
     "drop_mask u8 [42] is not contiguous, but its bits are counted on"},
    {"varlen_drop_mask_too_short",
     [](Call& c) { c.make_varlen(), c.in.drop_mask = ConstTensor::contiguous(DType::u8, {5}, c.bytes.data()); },
     "drop_mask has 5 bytes, but 44 weights need 6"},
    {"out_overlaps_the_bias",
     [](Call& c) {
       c.in.bias = c.bias({3, 7}), c.in.bias.data = c.out_memory.data() + 119;
     },
     "out f32 [2, 4, 3, 5] overlaps bias f32 [3, 7] in memory, but an output must not"},
};

class AttentionRefuses : public testing::TestWithParam<Refusal> {};

TEST_P(AttentionRefuses, WithItsWholeMessageAndWritesNothing) {
  Call call;
  GetParam().spoil(call);
  const std::vector<float> memory_before = call.memory, out_before = call.out_memory;
  const Status status = call.run();
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), "flash_attention_forward: " + GetParam().message);
  EXPECT_EQ(call.memory, memory_before);
  EXPECT_EQ(call.out_memory, out_before);
}
std::string refusal_name(const testing::TestParamInfo<Refusal>& chosen) { return chosen.param.name; }
INSTANTIATE_TEST_SUITE_P(Attention, AttentionRefuses, testing::ValuesIn(kRefusals), refusal_name);

TEST(AttentionContract, WhatTheRefusalsSpoilIsLegal) {
  Call dense;
  EXPECT_EQ(dense.run().message(), "");
  Call paged;
  paged.make_paged();
  EXPECT_EQ(paged.run().message(), "");
  Call varlen;
  varlen.make_varlen();
  EXPECT_EQ(varlen.run().message(), "");
  for (const float x : {paged.out_memory[0], paged.out_memory[119], paged.out_memory[200], paged.out_memory[283]}) {
    EXPECT_NE(x, 7.0f);
  }
}

// As in every operator that reads them: no panel32 page has 0 rows. (Of norm pages it is an invalid argument, above.)
TEST(AttentionContract, PanelPagesWithoutRowsAreUnsupported) {
  Call call;
  call.make_paged();
  call.options.page_layout = PageLayout::panel32;
  call.in.key = ConstTensor::contiguous(DType::f32, {4, 2, 0, 8, 32}, call.memory.data());
  call.in.value = ConstTensor::contiguous(DType::f32, {4, 2, 0, 5}, call.memory.data());
  const Status status = call.run();
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_EQ(status.message(), "flash_attention_forward: page layout panel32: block_size is 0, but must be >= 1");
}

// Tensors of one fused buffer are interleaved, not overlapping: an output may lie between the inputs.
TEST(AttentionContract, InterleavedOutputIsNoOverlap) {
  Random random(seed());
  std::vector<float> fused(5 * 4 * 32);  // [token][query, key, value, out][32]
  const auto part = [&](int64_t i) {
    Tensor t = Tensor::contiguous(DType::f32, {1, 1, 5, 32}, fused.data() + i * 32);
    t.strides[0] = t.strides[1] = 5 * 128, t.strides[2] = 128;
    return t;
  };
  for (int64_t i = 0; i < 3; ++i) fill(part(i), Fill::normal, random);
  ProblemOptions p;
  p.query_len = p.kv_len = 5, p.head_dim = p.value_head_dim = 32;
  Problem problem(p, random);
  copy(part(0), problem.query());
  copy(part(1), problem.key());
  copy(part(2), problem.value());
  for (const TestContext& t : contexts_with_threads(2)) {
    const Status status = flash_attention_forward(
        const_cast<Context&>(t.context), {.query = part(0), .key = part(1), .value = part(2)}, {.out = part(3)});
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison c = compare_bits(part(3), problem.run(t.context).out->tensor(), {.about = t.name});
    ASSERT_TRUE(c.ok) << c.message;
  }
}

// Outputs that were not asked for cost nothing, and do not change those that were.
TEST(AttentionContract, EveryStatisticIsOptional) {
  for (int wanted = 0; wanted < 8; ++wanted) {
    Call all, some;
    ASSERT_TRUE(all.run().ok());
    if ((wanted & 1) == 0) some.out.softmax_lse = {};
    if ((wanted & 2) == 0) some.out.softmax_max = {};
    if ((wanted & 4) == 0) some.out.softmax_sum = {};
    ASSERT_TRUE(some.run().ok());
    for (size_t i = 0; i < some.out_memory.size(); ++i) {
      const bool unwanted = (i >= 200 && i < 224 && (wanted & 1) == 0) || (i >= 230 && i < 254 && (wanted & 2) == 0) ||
                            (i >= 260 && i < 284 && (wanted & 4) == 0);
      EXPECT_EQ(some.out_memory[i], unwanted ? 7.0f : all.out_memory[i]) << i;
    }
  }
}

// Zero-sized inputs: an empty output where there is no query, zeros and -inf where there is no key.
TEST(AttentionContract, B32_EmptyInputs) {
  Random random(seed() + 1);
  for (const bool causal : {false, true}) {
    for (const bool paged : {false, true}) {
      for (const auto& [batch, heads, kv_heads, query_len, kv_len] :
           {std::tuple(7, 9, 9, 0, 7), std::tuple(0, 3, 3, 2, 13), std::tuple(0, 0, 0, 0, 0), std::tuple(1, 2, 1, 3, 0),
            std::tuple(1, 2, 1, 0, 5), std::tuple(0, 2, 2, 3, 5), std::tuple(2, 0, 1, 3, 5), std::tuple(2, 0, 0, 3, 5),
            std::tuple(1, 1, 1, 100, 0)}) {
        if (paged && batch == 0) continue;  // an empty vector has no data to tell pages by
        for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::flash, AttentionPath::standard}) {
          ProblemOptions p;
          p.batch = batch, p.num_heads = heads, p.num_kv_heads = kv_heads, p.query_len = query_len, p.kv_len = kv_len;
          p.head_dim = 9, p.value_head_dim = 7;
          p.options.causal = causal, p.options.path = path;
          Problem problem(p, random);
          const Pages pages = problem.paged(4, random);
          for (const TestContext& t : contexts_with_threads(2)) {
            const Outcome r = problem.run(t.context, paged ? pages.inputs : problem.inputs);
            ASSERT_EQ(r.status.message(), "") << to_string(p);
            for (int64_t i = 0; i < r.out->tensor().num_elements(); ++i) ASSERT_EQ(get(r.out->tensor(), i), 0);
            for (int64_t i = 0; i < r.lse->tensor().num_elements(); ++i) {
              ASSERT_EQ(get(r.lse->tensor(), i), -HUGE_VAL);
              ASSERT_EQ(get(r.max->tensor(), i), -HUGE_VAL);
              ASSERT_EQ(get(r.sum->tensor(), i), 0);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test
