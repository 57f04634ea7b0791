// Every operator when memory is exhausted: each allocation of a call fails in turn, also those of a refusal's message.
// The call gives a Status, nothing is leaked, and the same call on the same Context then has the right result.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "opst/attention.h"
#include "opst/attention_backward.h"
#include "opst/grouped_matmul.h"
#include "opst/kv_cache.h"
#include "opst/matmul.h"
#include "opst/moe_layer.h"
#include "opst/quant.h"
#include "opst/rowwise.h"
#include "testing/fail_allocations.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::fail_each_allocation;
using test::Fill;
using test::Random;

// Contiguous tensors with random contents; they live as long as this object.
class Tensors {
 public:
  Tensor operator()(DType dtype, std::initializer_list<int64_t> shape, Fill kind = Fill::normal) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    memory_.push_back(std::move(Buffer::allocate(elements * size_bytes(dtype)).value()));
    const Tensor tensor = memory_.back().tensor(dtype, shape);
    fill(tensor, kind, random_);
    return tensor;
  }
  Tensor integers(DType dtype, std::initializer_list<int64_t> shape, const std::vector<int64_t>& values) {
    const Tensor tensor = (*this)(dtype, shape, Fill::zeros);
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == DType::i64) static_cast<int64_t*>(tensor.data)[i] = values[i];
      if (dtype == DType::i32) static_cast<int32_t*>(tensor.data)[i] = static_cast<int32_t>(values[i]);
    }
    return tensor;
  }
  // Everything, to see what a call changed.
  std::vector<std::string> bytes() const {
    std::vector<std::string> all;
    for (const Buffer& b : memory_) all.emplace_back(static_cast<const char*>(b.data()), b.size_bytes());
    return all;
  }

 private:
  Random random_{1};
  std::vector<Buffer> memory_;
};

// A call with its tensors in `t`, which the results are part of.
using Call = std::function<Status(Context&)>;

// Fails every allocation of the call and of a context's first steps with it; then the results are those of a context
// that never lacked memory.
void survives(const char* name, const Tensors& t, const Call& call, StatusCode expected = StatusCode::ok) {
  SCOPED_TRACE(name);
  ContextOptions options;
  options.num_threads = 3;
  Result<Context> made = Context::create(options);
  ASSERT_TRUE(made.ok());
  Context& context = made.value();
  const Status first = call(context);
  ASSERT_EQ(first.code(), expected) << first.message();
  ASSERT_EQ(call(context).code(), expected);  // in place: a second time, as below
  context.trim();
  const std::vector<std::string> right = t.bytes();
  const int64_t live = test::live_allocations;
  const int64_t failed = fail_each_allocation([&] { return call(context); },
                                              [&] {
                                                EXPECT_EQ(call(context).code(), expected);
                                                context.trim();
                                                EXPECT_EQ(test::live_allocations, live);
                                              },
                                              expected);
  testing::Test::RecordProperty(name, static_cast<int>(failed));
  EXPECT_TRUE(t.bytes() == right);
}

// As above, and a wrong call besides.
void refuses(const char* name, const Tensors& t, const Call& call) {
  survives(name, t, call, StatusCode::invalid_argument);
}

TEST(ExhaustedMemory, AttentionForward) {
  Tensors t;
  const auto problem = [&](DType dtype, int64_t query_len, int64_t kv_len) {
    return std::pair<AttentionInputs, AttentionOutputs>(
        {.query = t(dtype, {2, 4, query_len, 40}),
         .key = t(dtype, {2, 2, kv_len, 40}),
         .value = t(dtype, {2, 2, kv_len, 24})},
        {.out = t(dtype, {2, 4, query_len, 24}), .softmax_lse = t(DType::f32, {2, 4, query_len})});
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const auto& [query_len, kv_len] : {std::pair{70, 90}, std::pair{1, 700}, std::pair{600, 2000}}) {
      const auto [in, out] = problem(dtype, query_len, kv_len);
      for (const AttentionPath path : {AttentionPath::flash, AttentionPath::standard}) {
        survives("forward", t, [&, in = in, out = out](Context& c) {
          return flash_attention_forward(c, in, out, {.causal = true, .path = path});
        });
      }
    }
  }
  auto [in, out] = problem(DType::f32, 70, 90);
  in.bias = t(DType::f32, {1, 4, 70, 90});
  in.sinks = t(DType::f32, {4});
  survives("options", t, [&, in = in, out = out](Context& c) {
    return flash_attention_forward(c, in, out, {.softcap = 3, .dropout = {.keep_prob = 0.5, .seed = 3}});
  });
  refuses("refused", t,
          [&, in = in, out = out](Context& c) { return flash_attention_forward(c, in, out, {.softcap = -1}); });
}

TEST(ExhaustedMemory, AttentionOfSequencesAndPages) {
  Tensors t;
  const Tensor lse = t(DType::f32, {4, 100});
  AttentionInputs varlen = {
      .query = t(DType::f32, {100, 4, 32}), .key = t(DType::f32, {120, 2, 32}), .value = t(DType::f32, {120, 2, 32})};
  varlen.cu_seqlens_q = t.integers(DType::i32, {4}, {0, 30, 30, 90});
  varlen.cu_seqlens_k = t.integers(DType::i64, {4}, {0, 50, 60, 120});
  const AttentionOutputs out = {.out = t(DType::f32, {100, 4, 32}), .softmax_lse = lse};
  survives("varlen", t, [&](Context& c) { return flash_attention_forward(c, varlen, out, {.causal = true}); });

  AttentionInputs paged = {.query = t(DType::f32, {2, 4, 3, 32}),
                           .key = t(DType::f32, {9, 16, 2, 32}),
                           .value = t(DType::f32, {9, 16, 2, 32})};
  paged.block_table = t.integers(DType::i32, {2, 4}, {8, 1, 2, 3, 4, 5, 6, 7});
  paged.kv_lengths = t.integers(DType::i64, {2}, {60, 17});
  const AttentionOutputs paged_out = {.out = t(DType::f32, {2, 4, 3, 32}), .softmax_lse = t(DType::f32, {2, 4, 3})};
  survives("paged", t, [&](Context& c) { return flash_attention_forward(c, paged, paged_out, {.causal = true}); });
  paged.kv_lengths = t.integers(DType::i64, {2}, {60, 117});
  refuses("too long", t, [&](Context& c) { return flash_attention_forward(c, paged, paged_out, {}); });
}

TEST(ExhaustedMemory, AttentionBackwardAndMerge) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensors t;
    const AttentionInputs in = {.query = t(dtype, {2, 4, 70, 40}),
                                .key = t(dtype, {2, 2, 90, 40}),
                                .value = t(dtype, {2, 2, 90, 24}),
                                .bias = t(DType::f32, {4, 70, 90}),
                                .sinks = t(DType::f32, {4})};
    const AttentionOutputs out = {.out = t(dtype, {2, 4, 70, 24}), .softmax_lse = t(DType::f32, {2, 4, 70})};
    const AttentionSaved saved = {.out = out.out, .softmax_lse = out.softmax_lse, .grad_out = t(dtype, {2, 4, 70, 24})};
    const AttentionGradients gradients = {.grad_query = t(dtype, {2, 4, 70, 40}),
                                          .grad_key = t(dtype, {2, 2, 90, 40}),
                                          .grad_value = t(dtype, {2, 2, 90, 24}),
                                          .grad_bias = t(DType::f32, {4, 70, 90}),
                                          .grad_sinks = t(DType::f32, {4})};
    survives("backward", t, [&](Context& c) {
      const Status forward = flash_attention_forward(c, in, out, {.causal = true});
      return forward.ok() ? flash_attention_backward(c, in, saved, gradients, {.causal = true}) : forward;
    });
    refuses("backward refused", t, [&](Context& c) {
      return flash_attention_backward(c, in, {.out = out.out, .grad_out = saved.grad_out}, gradients, {});
    });
  }
  Tensors t;
  const AttentionParts parts = {.out = t(DType::f32, {3, 2, 50, 24}), .softmax_lse = t(DType::f32, {3, 2, 50})};
  const AttentionOutputs merged = {.out = t(DType::f32, {2, 50, 24}), .softmax_lse = t(DType::f32, {2, 50})};
  survives("merge", t, [&](Context& c) { return merge_attention(c, parts, merged); });
  refuses("merge refused", t, [&](Context& c) { return merge_attention(c, {.out = parts.out}, merged); });
}

TEST(ExhaustedMemory, MatmulAndItsWeights) {
  Tensors t;
  const Tensor x = t(DType::f32, {70, 64}), few = t(DType::f32, {2, 64}), bias = t(DType::f32, {96});
  const Tensor out = t(DType::f32, {70, 96}), few_out = t(DType::f32, {2, 96});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor weight = t(dtype, {96, 64});
    survives("unpacked", t, [&](Context& c) { return matmul(c, x, ConstTensor(weight), out, {.bias = bias}); });
    survives("packed", t, [&](Context& c) {
      const Result<PackedWeight> packed = PackedWeight::pack(c, weight);
      return packed.ok() ? matmul(c, few, packed.value(), few_out) : packed.status();
    });
    survives("backward", t, [&, gw = t(DType::f32, {96, 64}), gx = t(DType::f32, {70, 64})](Context& c) {
      return matmul_backward(c, out, x, weight, {.x = gx, .weight = gw});
    });
  }
  const Tensor rows = t.integers(DType::i64, {3}, {5, 0, 95}), found = t(DType::f32, {3, 64});
  const Tensor blocks = t(DType::u8, {96 * 2 * 34}, Fill::zeros);
  const QuantMatrix matrix{QuantFormat::q8_0, 96, 64, blocks.data, 96 * 2 * 34};
  survives("quantised", t, [&](Context& c) {
    const Result<PackedWeight> packed = PackedWeight::pack(c, matrix);
    if (!packed.ok()) return packed.status();
    const Status looked_up = lookup_rows(c, packed.value(), rows, found);
    if (!looked_up.ok()) return looked_up;
    const Status one = matmul(c, few, packed.value(), few_out);
    return one.ok() ? matmul(c, x, packed.value(), out, {.activations = ActivationType::int8}) : one;
  });
  refuses("few bytes", t, [&](Context& c) {
    return PackedWeight::pack(c, QuantMatrix{QuantFormat::q8_0, 96, 64, blocks.data, 5}).status();
  });
  const Tensor q = t(DType::i8, {96, 64}), sums = t(DType::i32, {70, 96});
  const Tensor qx = t(DType::i8, {70, 64}), scales = t(DType::f32, {96, 2}), x_scales = t(DType::f32, {70});
  survives("integers", t, [&](Context& c) {
    const Result<PackedIntWeight> packed = PackedIntWeight::pack(c, q), scaled = PackedIntWeight::pack(c, {q, scales});
    if (!packed.ok()) return packed.status();
    if (!scaled.ok()) return scaled.status();
    const Status exact = matmul(c, qx, packed.value(), sums);
    if (!exact.ok()) return exact;
    const Status dynamic = matmul(c, qx, scaled.value(), out, {.x_scales = x_scales});
    return dynamic.ok() ? matmul(c, x, scaled.value(), out) : dynamic;
  });
  refuses("out", t, [&](Context& c) { return matmul(c, x, ConstTensor(q), few_out); });
}

TEST(ExhaustedMemory, GroupedProducts) {
  Tensors t;
  const Tensor x = t(DType::f32, {70, 64}), out = t(DType::f32, {70, 96}), stack = t(DType::bf16, {3, 96, 64});
  const GroupList ends{t.integers(DType::i64, {3}, {1, 40, 70})};
  survives("grouped", t, [&](Context& c) {
    const Result<PackedWeight> packed = PackedWeight::pack_stack(c, stack);
    if (!packed.ok()) return packed.status();
    const Status status = grouped_matmul(c, x, packed.value(), ends, out);
    return status.ok() ? grouped_matmul(c, x, stack, ends, out) : status;
  });
  survives("grouped backward", t, [&, gw = t(DType::f32, {3, 96, 64}), gx = t(DType::f32, {70, 64})](Context& c) {
    return grouped_matmul_backward(c, out, x, stack, ends, {.x = gx, .weight = gw});
  });
  const Tensor q = t(DType::i8, {96, 64}), scales = t(DType::f32, {96, 1}), qx = t(DType::i8, {70, 64});
  const Tensor x_scales = t(DType::f32, {70}), q_out = t(DType::i8, {70, 48}), out_scales = t(DType::f32, {70});
  const IntMatrix matrices[] = {{q, scales}, {q, scales}, {q, scales}};
  survives("grouped swiglu quant", t, [&](Context& c) {
    const Result<PackedIntWeight> packed = PackedIntWeight::pack_stack(c, matrices);
    if (!packed.ok()) return packed.status();
    return grouped_matmul_swiglu_quant(c, qx, x_scales, packed.value(), ends, q_out, out_scales);
  });
  refuses("grouped", t, [&](Context& c) { return grouped_matmul(c, x, stack, ends, q_out); });
}

TEST(ExhaustedMemory, QuantAndRowwise) {
  Tensors t;
  const Tensor x = t(DType::f32, {9, 64}), y = t(DType::f32, {9, 64}), out = t(DType::f32, {9, 64});
  const Tensor weight = t(DType::f32, {64}), grad = t(DType::f32, {64}), half = t(DType::f32, {9, 32});
  const Tensor q = t(DType::i8, {9, 64}), scales = t(DType::f32, {9}), group_scales = t(DType::f32, {9, 1});
  const Tensor blocks = t(DType::u8, {9 * 2 * 20}, Fill::zeros);
  survives("quant", t, [&](Context& c) {
    Status s = dynamic_quant(c, x, q, scales);
    if (s.ok()) s = quantize(c, x, q, group_scales);
    if (s.ok()) s = dequantize(c, {q, group_scales}, out);
    if (s.ok()) s = dequantize(c, QuantMatrix{QuantFormat::q4_1, 9, 64, blocks.data, 9 * 2 * 20}, out);
    return s;
  });
  refuses("quant refused", t, [&](Context& c) { return dynamic_quant(c, x, q, group_scales); });
  survives("rowwise", t, [&](Context& c) {
    Status s = rms_norm(c, x, weight, out);
    if (s.ok()) s = rms_norm_backward(c, y, x, weight, {.x = out, .weight = grad});
    if (s.ok()) s = layer_norm(c, x, out, {.weight = weight, .bias = weight});
    if (s.ok()) s = layer_norm_backward(c, y, x, {.x = out, .weight = grad, .bias = {}}, {.weight = weight});
    if (s.ok()) s = softmax(c, x, out);
    if (s.ok()) s = softmax_backward(c, y, x, out);
    if (s.ok()) s = swiglu(c, x, half);
    if (s.ok()) s = add(c, x, y, out);
    return s;
  });
  refuses("rowwise refused", t, [&](Context& c) { return add(c, x, half, out); });
  const Tensor positions = t.integers(DType::i64, {9}, {0, 1, 2, 3, 4, 5, 6, 7, 8});
  const Tensor cosines = t(DType::f32, {9, 16}), sines = t(DType::f32, {9, 16});
  const Tensor heads = t(DType::f32, {9, 2, 32}), turned = t(DType::f32, {9, 2, 32});
  survives("rope", t, [&](Context& c) {
    Status s = rope_table(c, positions, cosines, sines);
    if (s.ok()) s = rope(c, heads, cosines, sines, turned);
    if (s.ok()) s = rope_cached(c, heads, positions, cosines, sines, turned);
    return s;
  });
  refuses("rope refused", t, [&](Context& c) { return rope(c, heads, cosines, half, turned); });
}

TEST(ExhaustedMemory, Moe) {
  Tensors t;
  const Tensor logits = t(DType::f32, {9, 20}), weights = t(DType::f32, {9, 2}), scores = t(DType::f32, {9, 20});
  const Tensor bias = t(DType::f32, {20}), x = t(DType::f32, {9, 32}), out = t(DType::f32, {9, 32});
  const Tensor expanded = t(DType::f32, {18, 32}), grad_rows = t(DType::f32, {18, 32}),
               experts = t(DType::f32, {20, 32});
  const Tensor ids = t.integers(DType::i32, {9, 2}, std::vector<int64_t>(18, 3)), rows = t(DType::i64, {9, 2});
  const Tensor slots = t(DType::i64, {18}), counts = t(DType::i64, {20}), grad_bias = t(DType::f32, {20, 32});
  survives("moe", t, [&](Context& c) {
    Status s =
        moe_gating(c, {.logits = logits, .bias = bias}, {ids, weights, scores}, {.num_groups = 4, .kept_groups = 2});
    if (s.ok()) s = moe_routing(c, ids, 20, {rows, slots, counts});
    if (s.ok()) s = moe_permute(c, x, slots, 2, expanded);
    const MoeFinalizeInputs in = {.expanded = expanded, .row_of_slot = rows, .bias = experts, .topk_ids = ids};
    if (s.ok()) s = moe_finalize(c, in, out);
    if (s.ok())
      s = moe_finalize_backward(c, x, in, {.expanded = grad_rows, .topk_weights = weights, .bias = grad_bias});
    if (s.ok()) s = moe_gating_backward(c, {logits, ids, weights}, scores);
    return s;
  });
  const Tensor gate_up = t(DType::bf16, {20, 48, 32}), down = t(DType::bf16, {20, 32, 24});
  const MoeLayerInputs layer{.x = x, .logits = logits, .experts = {.gate_up = gate_up, .down = down}};
  survives("layer", t, [&](Context& c) {
    return moe_layer_forward(c, layer, {.out = out, .topk_ids = ids}, {.top_k = 2, .gating = {.renormalise = true}});
  });
  survives("layer backward", t, [&, grad = t(DType::f32, {20, 48, 32}), grad_x = t(DType::f32, {9, 32})](Context& c) {
    return moe_layer_backward(c, out, layer, {.x = grad_x, .logits = scores, .gate_up = grad}, {.top_k = 2});
  });
  refuses("layer refused", t, [&](Context& c) { return moe_layer_forward(c, layer, {.out = out}, {.top_k = 21}); });
  refuses("moe refused", t, [&](Context& c) { return moe_routing(c, ids, 1, {rows, slots, counts}); });
}

TEST(ExhaustedMemory, KvCache) {
  Tensors t;
  const PageSizes sizes = {.num_blocks = 5, .block_size = 32, .num_kv_heads = 2, .head_dim = 32, .value_head_dim = 32};
  const auto pages = [&](PageLayout layout, DType dtype) {
    const auto memory = [&] { return t(dtype, {5 * 32 * 2 * 32}, Fill::zeros).data; };
    return std::pair(key_pages(layout, dtype, sizes, memory()), value_pages(layout, dtype, sizes, memory()));
  };
  const auto [key_cache, value_cache] = pages(PageLayout::norm, DType::f32);
  const auto [key_panels, value_panels] = pages(PageLayout::panel32, DType::bf16);
  const Tensor query = t(DType::f32, {40, 4, 32}), key = t(DType::f32, {40, 2, 32}), value = t(DType::f32, {40, 2, 32});
  const Tensor cosines = t(DType::f32, {40, 16}), sines = t(DType::f32, {40, 16}), turned = t(DType::f32, {40, 4, 32});
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < 40; ++i) slots.push_back(i < 5 ? 7 : 100 - i);  // some come twice
  const Tensor slot_mapping = t.integers(DType::i64, {40}, slots);
  const Tensor table = t.integers(DType::i32, {2, 2}, {1, 3, 2, 0}), lengths = t.integers(DType::i64, {2}, {33, 7});
  const Tensor key_read = t(DType::f32, {40, 2, 32}), value_read = t(DType::f32, {40, 2, 32});
  const auto all = [&, kc = key_cache, vc = value_cache, kp = key_panels, vp = value_panels](Context& c) {
    Status s = scatter_pa_kv_cache(c, key, value, slot_mapping, kc, vc);
    if (s.ok()) {
      s = rope_scatter_pa_kv_cache(c, {query, key, value, cosines, sines, slot_mapping}, turned, kc, vc);
    }
    if (s.ok()) s = convert_pages(c, kc, vc, kp, vp, {PageLayout::norm, PageLayout::panel32});
    if (s.ok()) s = gather_pa_kv_cache(c, kc, vc, table, lengths, key_read, value_read);
    return s;
  };
  survives("cache", t, all);
  refuses("cache refused", t, [&, kc = key_cache, vc = value_cache](Context& c) {
    return gather_pa_kv_cache(c, kc, vc, table, slot_mapping, key, value);
  });
}

TEST(ExhaustedMemory, BlockPool) {
  const int64_t failed = fail_each_allocation([] { return BlockPool::create(100).status(); });
  EXPECT_GE(failed, 2);
  BlockPool pool = std::move(BlockPool::create(4).value());
  int64_t blocks[5];
  ASSERT_TRUE(pool.allocate(std::span(blocks, 2)).ok());
  const auto refused = [&]() -> Status {
    const Status taken = pool.allocate(blocks);
    const int64_t wrong[] = {0, 3};
    const Status freed = pool.free(wrong), forked = pool.fork(wrong), written = pool.prepare_write(77).status();
    for (const Status* s : {&taken, &freed, &forked, &written}) {
      if (s->ok()) return Status::internal("ok");
    }
    return Status::out_of_memory();
  };
  fail_each_allocation(
      refused, [&] { EXPECT_EQ(pool.num_free(), 2); }, StatusCode::out_of_memory);
}

}  // namespace
}  // namespace opst
