// Gradients of keys and values in pages: the bits of dense keys, sums where pages are shared, zeros where nobody looks.
// (Options on pages, against the reference: attention_backward_options_test.)
#include <gtest/gtest.h>

#include <set>

#include "attention/tests/attention_backward_call.h"
#include "machine/workspace.h"

namespace opst::test {
namespace {

struct Types {
  DType query, kv;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},
                            {DType::bf16, DType::bf16},
                            {DType::f16, DType::f16},
                            {DType::f32, DType::bf16},
                            {DType::f64, DType::f64}};

Draw paged_draw(Types types, int64_t block_size) {
  Draw d;
  d.query_dtype = d.out_dtype = types.query;
  d.kv_dtype = types.kv;
  d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 24, d.value_head_dim = 17;
  d.query_lens = {20, 20, 20}, d.kv_lens = {37, 100, 8};
  d.keys = Keys::norm_pages;
  d.block_size = block_size;
  d.options.causal = true;
  d.options.block_q = 16, d.options.block_kv = 32;
  return d;
}

struct Slot {
  int64_t block, row;
};
Slot slot_of(const AttentionInputs& in, int64_t b, int64_t j) {
  const int64_t block_size = in.key.shape[1];
  return {static_cast<int64_t>(get(in.block_table.selected(0, b), j / block_size)), j % block_size};
}
int64_t length_of(const AttentionInputs& in, int64_t b) { return static_cast<int64_t>(get(in.kv_lengths, b)); }

// The keys and values of pages in tensors [batch, num_kv_heads, kv_len, dim].
struct Dense {
  std::unique_ptr<View> key, value;
  AttentionInputs inputs;
};
Dense dense_of(const AttentionInputs& pages, int64_t kv_len) {
  Dense dense;
  dense.inputs = pages;
  dense.inputs.block_table = {};
  const int64_t batch = pages.kv_lengths.shape[0], heads = pages.key.shape[2];
  const auto gather = [&](const ConstTensor& from, std::unique_ptr<View>& memory) {
    memory = std::make_unique<View>(from.dtype, batch, heads, kv_len, from.shape[3], Strides::bnsd);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t j = 0; j < length_of(pages, b); ++j) {
        const Slot slot = slot_of(pages, b, j);
        for (int64_t h = 0; h < heads; ++h) {
          copy(from.selected(0, slot.block).selected(0, slot.row).selected(0, h),
               memory->tensor().selected(0, b).selected(0, h).selected(0, j));
        }
      }
    }
    return memory->tensor();
  };
  dense.inputs.key = gather(pages.key, dense.key);
  dense.inputs.value = gather(pages.value, dense.value);
  return dense;
}

// Gradients of dense keys, from what forward wrote over pages.
struct DenseGradients {
  std::unique_ptr<View> key, value;
  Status status;
};
DenseGradients dense_gradients(const Context& context, const Dense& dense, const AttentionSaved& saved, DType dtype,
                               const AttentionOptions& options) {
  DenseGradients g;
  const auto like = [&](const ConstTensor& t) {
    return std::make_unique<View>(dtype, t.shape[0], t.shape[1], t.shape[2], t.shape[3], Strides::bnsd);
  };
  g.key = like(dense.inputs.key), g.value = like(dense.inputs.value);
  g.status = flash_attention_backward(const_cast<Context&>(context), dense.inputs, saved,
                                      {.grad_key = g.key->tensor(), .grad_value = g.value->tensor()}, options);
  return g;
}

TEST(AttentionBackwardPages, GivesTheBitsOfDenseKeysAndZerosElsewhere) {
  Random random(seed());
  for (const Types types : kTypes) {
    for (const int64_t block_size : {1, 3, 16, 40, 128}) {
      const Draw d = paged_draw(types, block_size);
      DrawnCall call(d, random);
      BackwardForm form;
      form.grad_out_dtype = d.out_dtype;
      form.gradient_strides = block_size == 16 ? Strides::padded : Strides::bnsd;
      BackwardCallData data(call, form, random);
      const Dense dense = dense_of(call.inputs, d.longest_keys());
      for (const TestContext& t : contexts_with_threads(2)) {
        SCOPED_TRACE(t.name + " " + to_string(d));
        const BackwardCallData::Outcome r = data.run(t.context);
        ASSERT_EQ(r.status.message(), "");
        const DenseGradients expected = dense_gradients(t.context, dense, data.saved(r.forward), d.kv_dtype, d.options);
        ASSERT_EQ(expected.status.message(), "");
        for (const auto& [got, want] : {std::pair(r.tensors.grad_key, expected.key->tensor()),
                                        std::pair(r.tensors.grad_value, expected.value->tensor())}) {
          std::set<std::pair<int64_t, int64_t>> seen;
          for (int64_t b = 0; b < d.batch(); ++b) {
            for (int64_t j = 0; j < length_of(call.inputs, b); ++j) {
              const Slot slot = slot_of(call.inputs, b, j);
              seen.insert({slot.block, slot.row});
              for (int64_t h = 0; h < d.num_kv_heads; ++h) {
                const Comparison c = compare_bits(got.selected(0, slot.block).selected(0, slot.row).selected(0, h),
                                                  want.selected(0, b).selected(0, h).selected(0, j), {});
                ASSERT_TRUE(c.ok) << "sequence " << b << " key " << j << ": " << c.message;
              }
            }
          }
          for (int64_t block = 0; block < got.shape[0]; ++block) {
            for (int64_t row = 0; row < got.shape[1]; ++row) {
              if (seen.count({block, row}) > 0) continue;
              const Tensor unseen = got.selected(0, block).selected(0, row);
              for (int64_t i = 0; i < unseen.num_elements(); ++i) ASSERT_EQ(get(unseen, i), 0) << block << " " << row;
            }
          }
        }
      }
    }
  }
}

// Sequences with a prefix in common; in one of them a page comes twice, in another one a page of the prefix once more.
// The gradient of a slot is the sum over all places that show it.
TEST(AttentionBackwardPages, SharedPagesGetTheSumOverTheirPlaces) {
  Random random(seed() + 1);
  for (const Types types : kTypes) {
    for (const int64_t block_size : {1, 5, 16, 50}) {
      Draw d = paged_draw(types, block_size);
      d.kv_lens = {99, 100, 51};
      DrawnCall call(d, random);
      std::vector<int32_t> table;
      const int64_t columns = ceil_div(int64_t{100}, block_size);
      const auto blocks = static_cast<int32_t>(call.inputs.key.shape[0]);
      for (int b = 0; b < 3; ++b) {
        for (int32_t i = 0; i < columns; ++i) {
          int32_t block = (i + b * static_cast<int32_t>(columns)) % blocks;
          if (i < columns / 2) block = i;
          if (b == 0 && i == columns - 1) block = table.back();
          if (b == 1 && i == columns - 1) block = 0;
          table.push_back(block);
        }
      }
      call.inputs.block_table = ConstTensor::contiguous(DType::i32, {3, columns}, table.data());
      fill(mutable_view(call.inputs.key), Fill::normal, random);
      fill(mutable_view(call.inputs.value), Fill::normal, random);
      call.oracle_inputs = call.inputs;
      BackwardForm form;
      form.grad_out_dtype = d.out_dtype;
      form.wide_gradients = true;
      BackwardCallData data(call, form, random);
      const Dense dense = dense_of(call.inputs, d.longest_keys());
      for (const TestContext& t : contexts_with_threads(2)) {
        SCOPED_TRACE(t.name + " " + to_string(d));
        const BackwardCallData::Outcome r = data.run(t.context);
        ASSERT_EQ(r.status.message(), "");
        double worst = 0;
        ASSERT_EQ(data.judge(r, t.context, worst), "");
        const DType real = types.query == DType::f64 ? DType::f64 : DType::f32;
        const DenseGradients parts = dense_gradients(t.context, dense, data.saved(r.forward), real, d.options);
        ASSERT_EQ(parts.status.message(), "");
        for (const auto& [got, part] : {std::pair(r.tensors.grad_key, parts.key->tensor()),
                                        std::pair(r.tensors.grad_value, parts.value->tensor())}) {
          std::vector<double> sum(static_cast<size_t>(got.num_elements())), magnitude(sum.size());
          for (int64_t b = 0; b < d.batch(); ++b) {
            for (int64_t j = 0; j < length_of(call.inputs, b); ++j) {
              const Slot slot = slot_of(call.inputs, b, j);
              for (int64_t i = 0; i < got.shape[2] * got.shape[3]; ++i) {
                const int64_t h = i / got.shape[3], dim = i % got.shape[3];
                const double x = get(part.selected(0, b).selected(0, h).selected(0, j), dim);
                const auto at =
                    static_cast<size_t>((slot.block * block_size + slot.row) * got.shape[2] * got.shape[3] + i);
                sum[at] += x, magnitude[at] += std::fabs(x);
              }
            }
          }
          const double eps = real == DType::f64 ? 0x1p-50 : 0x1p-21;
          for (size_t i = 0; i < sum.size(); ++i) {
            ASSERT_NEAR(get(got, static_cast<int64_t>(i)), sum[i], eps * magnitude[i]) << i;
          }
        }
      }
    }
  }
}

// A page that 40 sequences share: sums in bf16 would be far off. The output is the f32 sum, rounded.
TEST(AttentionBackwardPages, SumsOfSharedPagesAreRoundedOnce) {
  Random random(seed() + 2);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Draw d = paged_draw({dtype, dtype}, 16);
    d.query_lens.assign(40, 3), d.kv_lens.assign(40, 16);
    d.options.causal = false;
    DrawnCall call(d, random);
    const std::vector<int32_t> table(40, 5);
    call.inputs.block_table = ConstTensor::contiguous(DType::i32, {40, 1}, table.data());
    fill(mutable_view(call.inputs.key), Fill::normal, random);
    fill(mutable_view(call.inputs.value), Fill::normal, random);
    BackwardForm form;
    form.grad_out_dtype = dtype;
    BackwardCallData narrow(call, form, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      SCOPED_TRACE(t.name);
      const BackwardCallData::Outcome r = narrow.run(t.context);
      ASSERT_EQ(r.status.message(), "");
      const auto wide = [&](const Tensor& like) {
        return std::make_unique<View>(DType::f32, like.shape[0], like.shape[1], like.shape[2], like.shape[3],
                                      Strides::bnsd);
      };
      const std::unique_ptr<View> key = wide(r.tensors.grad_key), value = wide(r.tensors.grad_value);
      ASSERT_TRUE(flash_attention_backward(const_cast<Context&>(t.context), call.inputs, narrow.saved(r.forward),
                                           {.grad_key = key->tensor(), .grad_value = value->tensor()}, d.options)
                      .ok());
      for (const auto& [got, exact] :
           {std::pair(r.tensors.grad_key, key->tensor()), std::pair(r.tensors.grad_value, value->tensor())}) {
        for (int64_t i = 0; i < got.num_elements(); ++i) {
          ASSERT_EQ(get(got, i), attention::reference::rounded_to(dtype, get(exact, i))) << i;
        }
      }
    }
  }
}

// Several waves of sequences over the same pages, long and short ones in turn: tasks end out of order.
TEST(AttentionBackwardPages, SharedPagesHaveTheSameBitsForAnyNumberOfThreads) {
  Random random(seed() + 3);
  constexpr int64_t kBatch = 16, kLong = 900, kKeys = 200;
  for (const Types types : {kTypes[0], kTypes[1]}) {
    Draw d = paged_draw(types, 16);
    d.num_heads = d.num_kv_heads = 1, d.head_dim = d.value_head_dim = 64;
    d.varlen_q = true;
    d.query_lens.clear();
    for (int64_t b = 0; b < kBatch; ++b) d.query_lens.push_back(b % 2 == 0 ? kLong : 10);
    d.kv_lens.assign(kBatch, kKeys);
    d.options.causal = false;
    d.options.block_q = 0;
    DrawnCall call(d, random);
    const int64_t columns = ceil_div(kKeys, d.block_size);
    std::vector<int32_t> table;
    for (int64_t i = 0; i < kBatch * columns; ++i) table.push_back(static_cast<int32_t>(i % columns));
    call.inputs.block_table = ConstTensor::contiguous(DType::i32, {kBatch, columns}, table.data());
    fill(mutable_view(call.inputs.key), Fill::normal, random);
    fill(mutable_view(call.inputs.value), Fill::normal, random);
    BackwardForm form;
    form.grad_out_dtype = d.out_dtype;
    form.wide_gradients = true;
    BackwardCallData data(call, form, random);
    std::unique_ptr<BackwardCallData::Outcome> first;
    for (const int threads : {1, 2, 3, 5}) {
      Context context = fresh_context(threads);
      AttentionBackwardProblem problem;
      problem.forward.query_dtype = types.query, problem.forward.kv_dtype = types.kv;
      problem.forward.batch = kBatch, problem.forward.query_len = kLong, problem.forward.kv_len = kKeys;
      problem.forward.head_dim = problem.forward.value_head_dim = 64;
      problem.grad_out_dtype = types.query;
      ASSERT_LT(plan_attention_backward(problem, context.machine()).heads_per_wave, kBatch) << "one wave tests less";
      for (int repeat = 0; repeat < 3; ++repeat) {
        auto r = std::make_unique<BackwardCallData::Outcome>(data.run(context));
        ASSERT_EQ(r->status.message(), "");
        if (first == nullptr) {
          first = std::move(r);
        } else {
          ASSERT_EQ(r->differs_from(*first), "") << threads << " threads";
        }
      }
    }
  }
}

TEST(AttentionBackwardPages, ScratchGrowsWithSharedPagesNotWithTheirSequences) {
  const Machine machine = detect_machine(detect_isa());
  const auto bytes = [&](int64_t batch, int64_t shared_blocks) {
    AttentionBackwardProblem b;
    b.forward.batch = batch, b.forward.num_heads = b.forward.num_kv_heads = 4;
    b.forward.query_len = 100, b.forward.kv_len = 8192;
    b.forward.head_dim = b.forward.value_head_dim = 64;
    b.forward.paged = true, b.forward.block_size = 16;
    b.num_blocks = 1000;
    b.shared_blocks = shared_blocks;
    const AttentionBackwardPlan plan = plan_attention_backward(b, machine);
    return plan.scratch_bytes(1);
  };
  const int64_t ordinals = 1000 * 8, sums = 512 * 16 * 4 * (64 + 64) * 4;
  EXPECT_EQ(bytes(100, 512) - bytes(100, 0), Arena::round_up(ordinals) + Arena::round_up(sums));
  EXPECT_EQ(bytes(100, 512), bytes(1000, 512));
}

TEST(AttentionBackwardPages, NoSequencesNoKeysAndGradientsThatAreNotWanted) {
  Random random(seed() + 5);
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Draw d = paged_draw(kTypes[0], 8);
    d.share_pages = true;
    DrawnCall call(d, random);
    BackwardCallData data(call, {}, random);
    BackwardCallData::Outcome r = data.run(t.context);
    ASSERT_EQ(r.status.message(), "");
    const AttentionSaved saved = data.saved(r.forward);
    auto& context = const_cast<Context&>(t.context);
    // Of the three gradients one is left out.
    for (int left_out = 0; left_out < 3; ++left_out) {
      BackwardCallData::Outcome other = data.run(t.context);
      AttentionGradients wanted = other.tensors;
      Tensor* const tensors[] = {&wanted.grad_query, &wanted.grad_key, &wanted.grad_value};
      *tensors[left_out] = {};
      for (const Tensor* x : tensors) {
        if (x->data != nullptr) fill(*x, Fill::nan, random);
      }
      ASSERT_TRUE(flash_attention_backward(context, call.inputs, saved, wanted, d.options).ok());
      EXPECT_EQ(other.differs_from(r), "") << left_out;
    }
    // No sequence has keys; then there is no sequence.
    const auto expect_zeros = [&](const AttentionInputs& in, AttentionSaved from, int64_t batch) {
      AttentionGradients g = r.tensors;
      for (ConstTensor* x : {&from.out, &from.grad_out, &from.softmax_lse}) x->shape[0] = batch;
      g.grad_query.shape[0] = batch;
      fill(g.grad_key, Fill::nan, random), fill(g.grad_value, Fill::nan, random);
      ASSERT_EQ(flash_attention_backward(context, in, from, g, d.options).message(), "");
      for (const Tensor& x : {g.grad_query, g.grad_key, g.grad_value}) {
        for (int64_t i = 0; i < x.num_elements(); ++i) ASSERT_EQ(get(x, i), 0);
      }
    };
    const std::vector<int32_t> none(3, 0);
    AttentionInputs in = call.inputs;
    in.kv_lengths = ConstTensor::contiguous(DType::i32, {3}, none.data());
    expect_zeros(in, saved, 3);
    in.query.shape[0] = in.kv_lengths.shape[0] = in.block_table.shape[0] = 0;
    expect_zeros(in, saved, 0);
  }
}

TEST(AttentionBackwardPages, RefusalsNameWhatIsWrongAndWriteNothing) {
  std::vector<float> memory(8192, 0.5f), written(8192, 7.0f);
  std::vector<int32_t> table = {0, 3, 2, 1}, lengths = {7, 5};
  struct Call {
    AttentionInputs in;
    AttentionSaved saved;
    AttentionGradients grads;
  };
  const auto make = [&] {
    Call c;
    c.in.query = ConstTensor::contiguous(DType::f32, {2, 4, 3, 8}, memory.data());
    c.in.key = ConstTensor::contiguous(DType::f32, {4, 4, 2, 8}, memory.data());
    c.in.value = ConstTensor::contiguous(DType::f32, {4, 4, 2, 5}, memory.data());
    c.in.block_table = ConstTensor::contiguous(DType::i32, {2, 2}, table.data());
    c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
    c.saved.out = c.saved.grad_out = ConstTensor::contiguous(DType::f32, {2, 4, 3, 5}, memory.data());
    c.saved.softmax_lse = ConstTensor::contiguous(DType::f32, {2, 4, 3}, memory.data());
    c.grads.grad_query = Tensor::contiguous(DType::f32, {2, 4, 3, 8}, written.data());
    c.grads.grad_key = Tensor::contiguous(DType::f32, {4, 4, 2, 8}, written.data() + 1000);
    c.grads.grad_value = Tensor::contiguous(DType::f32, {4, 4, 2, 5}, written.data() + 2000);
    return c;
  };
  const auto refused = [&](const Call& c, StatusCode code, const std::string& message,
                           const AttentionOptions& options = {}) {
    const Status status =
        flash_attention_backward(const_cast<Context&>(contexts().front().context), c.in, c.saved, c.grads, options);
    EXPECT_EQ(status.code(), code) << message;
    EXPECT_EQ(status.message(), "flash_attention_backward: " + message);
    for (const float x : written) ASSERT_EQ(x, 7.0f) << message;
  };
  Call c = make();
  refused(c, StatusCode::unsupported, "pages are panel32, but gradients are taken of norm pages only",
          {.page_layout = PageLayout::panel32});
  c = make(), c.in.kv_lengths = {};
  refused(c, StatusCode::invalid_argument, "block_table is given, but kv_lengths is not");
  c = make(), c.grads.grad_key.shape[0] = 3;
  refused(c, StatusCode::invalid_argument, "grad_key dim 0 (num_blocks) is 3, but key set num_blocks = 4");
  c = make(), c.grads.grad_value.shape[1] = 3;
  refused(c, StatusCode::invalid_argument, "grad_value dim 1 (block_size) is 3, but key set block_size = 4");
  c = make(), c.grads.grad_key = Tensor::contiguous(DType::f32, {2, 2, 7, 8}, written.data() + 1000);
  refused(c, StatusCode::invalid_argument, "grad_key dim 0 (num_blocks) is 2, but key set num_blocks = 4");
  c = make(), c.grads.grad_key.data = memory.data();
  refused(c, StatusCode::invalid_argument,
          "grad_key f32 [4, 4, 2, 8] overlaps query f32 [2, 4, 3, 8] in memory, but an output must not");
  table[3] = 4;
  refused(make(), StatusCode::invalid_argument, "block_table[1][1] is 4, but the cache has 4 blocks");
  table[3] = 1, lengths[0] = 9;
  refused(make(), StatusCode::invalid_argument,
          "kv_lengths[0] is 9, must be 0 to 8 (2 blocks of 4 keys in block_table)");
  lengths[0] = 7;
  c = make();
  EXPECT_EQ(
      flash_attention_backward(const_cast<Context&>(contexts().front().context), c.in, c.saved, c.grads).message(), "");
}

}  // namespace
}  // namespace opst::test
