// Sizes, lengths and enumerators that attention refuses: the whole message, and nothing written.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "core/int_math.h"
#include "opst/attention_backward.h"
#include "testing/contexts.h"

namespace opst::test {
namespace {

constexpr int64_t kTera = int64_t{1} << 40;

// A call that is right; its tensors may be made to repeat one element.
struct RefusedCall {
  std::vector<float> memory = std::vector<float>(64, 0.5f), out_memory = std::vector<float>(1024, 7.0f);
  std::vector<int64_t> integers = {0, 0};
  AttentionInputs in;
  AttentionOutputs out;
  AttentionSaved saved;
  AttentionGradients grads;
  AttentionOptions options;

  RefusedCall() {
    in = {.query = repeated({1, 1, 16, 1}), .key = repeated({1, 1, 3, 1}), .value = repeated({1, 1, 3, 1})};
    in.sinks = repeated({1});
    out.out = Tensor::contiguous(DType::f32, {1, 1, 16, 1}, out_memory.data());
    saved = {.out = in.query, .softmax_lse = repeated({1, 1, 16}), .grad_out = in.query};
    grads.grad_sinks = Tensor::contiguous(DType::f32, {1}, out_memory.data());
  }
  ConstTensor repeated(std::initializer_list<int64_t> shape, DType dtype = DType::f32) const {
    ConstTensor t = ConstTensor::contiguous(dtype, shape, memory.data());
    std::fill_n(t.strides, kMaxRank, 0);
    return t;
  }
  void repeat_keys(int64_t kv_len, DType dtype = DType::f32) { in.key = in.value = repeated({1, 1, kv_len, 1}, dtype); }
  void make_paged(int64_t batch, int64_t heads, int64_t max_blocks, int64_t block_size, int64_t length) {
    in.query = saved.out = saved.grad_out = repeated({batch, heads, 1, 1});
    saved.softmax_lse = repeated({batch, heads, 1});
    in.key = in.value = repeated({1, block_size, heads, 1});
    in.sinks = repeated({heads});
    integers = {0, length};
    in.block_table = ConstTensor::contiguous(DType::i64, {batch, max_blocks}, integers.data());
    in.kv_lengths = ConstTensor::contiguous(DType::i64, {batch}, integers.data() + 1);
    in.block_table.strides[0] = in.block_table.strides[1] = in.kv_lengths.strides[0] = 0;
    out.out = Tensor::contiguous(DType::f32, {batch, heads, 1, 1}, out_memory.data());
    grads.grad_sinks = Tensor::contiguous(DType::f32, {heads}, out_memory.data());
  }
};

struct SizeRefusal {
  const char* name;
  std::function<void(RefusedCall&)> spoil;
  std::string message;  // after the operator's name
};
const SizeRefusal kOfBoth[] = {
    {"keys", [](RefusedCall& c) { c.repeat_keys(INT64_MAX); },
     "key f32 [1, 1, 9223372036854775807, 1] has more bytes than the limit of 2^56, repeated elements counted"},
    {"keys_at_the_limit", [](RefusedCall& c) { c.repeat_keys(kMaxBytes / 4); },
     "key f32 [1, 1, 18014398509481984, 1] has more bytes than the limit of 2^56, repeated elements counted"},
    {"sizes_of_an_empty_tensor",
     [](RefusedCall& c) {
       c.in.query = c.repeated({0, kTera, kTera, 1});
     },
     "query f32 [0, 1099511627776, 1099511627776, 1] has more bytes than the limit of 2^56, repeated elements counted"},
    {"length_beyond_the_limit", [](RefusedCall& c) { c.make_paged(1, 1, kTera, kTera, int64_t{1} << 60); },
     "kv_lengths[0] is 1152921504606846976, must be 0 to 72057594037927936 (1099511627776 blocks of 1099511627776 keys "
     "in block_table)"},
    {"block_of_a_repeated_table",
     [](RefusedCall& c) {
       c.make_paged(1, 1, kTera, 1, kTera);
       c.integers[0] = 1;
     },
     "block_table[0][0] is 1, but the cache has 1 blocks"},
    {"drop_mask_of_more_bits_than_counted",
     [](RefusedCall& c) {
       c.repeat_keys(int64_t{1} << 53, DType::bf16);
       c.in.drop_mask = c.repeated({1}, DType::u8);
     },
     "drop_mask has 1 bytes, but at least 72057594037927936 weights need 9007199254740992"},
    {"total_heads", [](RefusedCall& c) { c.options.dropout.total_heads = INT64_MAX; },
     "dropout.total_heads is 9223372036854775807, must be 0 to 1152921504606846976"},
    {"path", [](RefusedCall& c) { c.options.path = static_cast<AttentionPath>(3); },
     "path is 3, which is no AttentionPath"},
    {"alignment", [](RefusedCall& c) { c.options.alignment = static_cast<CausalAlignment>(2); },
     "alignment is 2, which is no CausalAlignment"},
    {"alibi_form", [](RefusedCall& c) { c.options.alibi_form = static_cast<AlibiForm>(255); },
     "alibi_form is 255, which is no AlibiForm"},
    {"page_layout", [](RefusedCall& c) { c.options.page_layout = static_cast<PageLayout>(2); },
     "page_layout is 2, which is no PageLayout"},
    {"dtype", [](RefusedCall& c) { c.in.value.dtype = static_cast<DType>(99); },
     "value has dtype 99, which is no DType"},
};
const SizeRefusal kOfForward[] = {
    {"out_rank", [](RefusedCall& c) { c.out.out.rank = 6; }, "out has rank 6, but it must be from 0 to 5"},
    {"out_dtype", [](RefusedCall& c) { c.out.out.dtype = static_cast<DType>(200); },
     "out has dtype 200, which is no DType"},
};
const SizeRefusal kOfBackward[] = {
    {"grad_query_rank", [](RefusedCall& c) { c.grads.grad_query = c.out.out, c.grads.grad_query.rank = 1 << 20; },
     "grad_query has rank 1048576, but it must be from 0 to 5"},
    {"tiles", [](RefusedCall& c) { c.make_paged(1 << 20, 1 << 9, 1 << 30, 1 << 20, int64_t{1} << 50); },
     "1048576 sequences, 512 KV heads and 1125899906842624 keys are more than 2^56 tiles"},
};

void expect_refused(const SizeRefusal& refusal, bool backward) {
  RefusedCall c;
  refusal.spoil(c);
  Context& context = contexts().front().context;
  const Status status = backward ? flash_attention_backward(context, c.in, c.saved, c.grads, c.options)
                                 : flash_attention_forward(context, c.in, c.out, c.options);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument) << refusal.name;
  EXPECT_EQ(status.message(),
            std::string(backward ? "flash_attention_backward: " : "flash_attention_forward: ") + refusal.message)
      << refusal.name;
  EXPECT_TRUE(std::all_of(c.out_memory.begin(), c.out_memory.end(), [](float x) { return x == 7; })) << refusal.name;
}
TEST(AttentionSizes, RefusedByName) {
  for (const SizeRefusal& refusal : kOfBoth) expect_refused(refusal, false), expect_refused(refusal, true);
  for (const SizeRefusal& refusal : kOfForward) expect_refused(refusal, false);
  for (const SizeRefusal& refusal : kOfBackward) expect_refused(refusal, true);
  RefusedCall legal;
  Context& context = contexts().front().context;
  EXPECT_EQ(flash_attention_forward(context, legal.in, legal.out, legal.options).message(), "");
  EXPECT_EQ(flash_attention_backward(context, legal.in, legal.saved, legal.grads, legal.options).message(), "");
}

}  // namespace
}  // namespace opst::test
