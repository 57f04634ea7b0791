// Memory of attention forward: nothing beyond the tensors is touched, scratch is what the plan says, a second call
// allocates nothing, and offsets beyond 32 bits hold.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "attention/check.h"
#include "attention/layout.h"
#include "attention/sequences.h"
#include "attention/tests/attention_problem.h"
#include "attention/tests/drawn_call.h"
#include "testing/count_allocations.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

std::vector<ProblemOptions> one_of_each_kind() {
  std::vector<ProblemOptions> list;
  ProblemOptions p;
  p.num_heads = 4, p.num_kv_heads = 2, p.head_dim = 64, p.value_head_dim = 48;
  p.query_len = 1, p.kv_len = 3000;  // in place, split
  list.push_back(p);
  p.query_len = 20, p.kv_len = 200;  // packed per task
  list.push_back(p);
  p.query_len = 300, p.kv_len = 900, p.batch = 3;  // packed for all
  p.options.causal = true;
  list.push_back(p);
  p.query_len = 100, p.kv_len = 100;
  p.options.path = AttentionPath::standard;
  list.push_back(p);
  const size_t count = list.size();
  for (size_t i = 0; i < count; ++i) {
    ProblemOptions bf16 = list[i];
    bf16.query_dtype = bf16.kv_dtype = bf16.out_dtype = DType::bf16;
    list.push_back(bf16);
  }
  return list;
}

TEST(AttentionMemory, ASecondCallAllocatesNothing) {
  Random random(seed());
  for (const ProblemOptions& options : one_of_each_kind()) {
    for (const int num_threads : {1, 3}) {
      for (const bool paged : {false, true}) {
        Context context = fresh_context(num_threads);
        Problem problem(options, random);
        const Pages pages = problem.paged(16, random);
        const AttentionInputs inputs = paged ? pages.inputs : problem.inputs;
        View out(options.out_dtype, options.batch, options.num_heads, options.query_len, options.value_head_dim,
                 Strides::bnsd);
        std::vector<float> statistics[3];
        AttentionOutputs outputs{.out = out.tensor()};
        Tensor* const wanted[3] = {&outputs.softmax_lse, &outputs.softmax_max, &outputs.softmax_sum};
        for (int i = 0; i < 3; ++i) {
          statistics[i].resize(static_cast<size_t>(options.batch * options.num_heads * options.query_len));
          *wanted[i] = Tensor::contiguous(DType::f32, {options.batch, options.num_heads, options.query_len},
                                          statistics[i].data());
        }
        ASSERT_TRUE(flash_attention_forward(context, inputs, outputs, options.options).ok());
        const int64_t heap_before = num_allocations.load(), workspaces_before = context.workspace_allocations();
        const bool second_ok = flash_attention_forward(context, inputs, outputs, options.options).ok();
        const int64_t heap_after = num_allocations.load();
        ASSERT_TRUE(second_ok);
        EXPECT_EQ(heap_after, heap_before) << to_string(options);
        EXPECT_EQ(context.workspace_allocations(), workspaces_before);
        EXPECT_EQ(workspaces_before, 1);
      }
    }
  }
}

// With any options: the second call allocates nothing, and scratch is what the plan says.
TEST(AttentionMemory, OptionsAllocateNothingBeyondThePlan) {
  Random random(seed() + 20);
  for (int n = 0; n < 60; ++n) {
    const Draw d = draw(random);
    const DrawnCall call(d, random);
    const DrawnCall::Outputs out = call.make_outputs();
    const int num_threads = random.pick({1, 3});
    Context context = fresh_context(num_threads);
    ASSERT_TRUE(flash_attention_forward(context, call.inputs, out.tensors, d.options).ok());
    const int64_t heap_before = num_allocations.load(), workspaces_before = context.workspace_allocations();
    const bool second_ok = flash_attention_forward(context, call.inputs, out.tensors, d.options).ok();
    const int64_t heap_after = num_allocations.load();
    ASSERT_TRUE(second_ok);
    EXPECT_EQ(heap_after, heap_before) << to_string(d);
    EXPECT_EQ(context.workspace_allocations(), workspaces_before);
    const opst::Result<AttentionProblem> problem = attention::check_forward(call.inputs, out.tensors, d.options);
    ASSERT_TRUE(problem.ok());
    const attention::SequenceGroups groups = attention::sequence_groups(
        call.inputs, problem.value(), attention::sequence_kinds(problem.value(), context.machine()));
    int64_t planned = 0;
    for (int g = 0; g < groups.count; ++g) {
      const AttentionPlan plan = plan_attention(groups.group[g].problem, context.machine());
      planned = std::max(planned, plan.scratch_bytes(num_threads));
    }
    const int64_t step = planned < (2 << 20) ? 64 << 10 : 2 << 20;
    EXPECT_EQ(context.workspace_bytes(), round_up(planned, step)) << to_string(d);
  }
}

TEST(AttentionMemory, ScratchIsWhatThePlanSays) {
  Random random(seed() + 1);
  for (const ProblemOptions& options : one_of_each_kind()) {
    for (const Isa isa : levels()) {
      for (const int num_threads : {1, 3}) {
        Context context = fresh_context(num_threads, isa);
        Problem problem(options, random);
        ASSERT_TRUE(problem.run(context).status.ok());
        const int64_t planned = problem.plan(context.machine()).scratch_bytes(num_threads);
        ASSERT_GT(planned, 0);
        // Workspaces are rounded up to 64 KiB, or 2 MiB.
        const int64_t step = planned < (2 << 20) ? 64 << 10 : 2 << 20;
        EXPECT_EQ(context.workspace_bytes(), round_up(planned, step)) << to_string(options);
        context.trim();
        EXPECT_EQ(context.workspace_bytes(), 0);
      }
    }
  }
}

TEST(AttentionMemory, LongContextNeedsLittleBeyondPackedKeysAndValues) {
  constexpr int64_t kLen = 128 << 10, kDim = 128;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Isa isa : levels()) {
      for (const int64_t query_len : {int64_t{1}, int64_t{16}, int64_t{100}, kLen}) {
        const AttentionPlan plan = plan_attention({.query_dtype = dtype,
                                                   .kv_dtype = dtype,
                                                   .query_len = query_len,
                                                   .kv_len = kLen,
                                                   .head_dim = kDim,
                                                   .value_head_dim = kDim},
                                                  detect_machine(isa));
        const bool pairs = plan.product == AttentionProduct::bf16_dot;
        const int64_t packed =
            plan.kv_access == KvAccess::packed_shared ? 2 * kLen * kDim * (pairs ? 2 : 4) : int64_t{0};
        EXPECT_LT(plan.scratch_bytes(2) - packed, 16 << 20) << to_string(isa) << " " << opst::to_string(plan);
      }
    }
  }
  // And so it runs: few queries see all keys, judged in full. That takes minutes under a sanitizer: an eighth there.
  const int64_t run_len = kEffort < 1 ? kLen / 8 : kLen;
  Random random(seed() + 2);
  for (const int64_t query_len : {1, 40}) {
    ProblemOptions p;
    p.query_len = query_len, p.kv_len = run_len, p.head_dim = p.value_head_dim = kDim;
    p.options.causal = true;
    Context context = fresh_context(2);
    Problem problem(p, random);
    ASSERT_EQ(problem.judge(problem.run(context), context, 2), "");
    EXPECT_LT(context.workspace_bytes(), 16 << 20);
  }
}

// The standard path's matrix of 2^39 numbers is refused by name, and nothing is written.
TEST(AttentionMemory, ScratchThatCannotBeHadIsAStatus) {
  std::vector<float> one(8, 1.0f);
  constexpr int64_t kKeys = int64_t{1} << 50;
  ConstTensor keys = ConstTensor::contiguous(DType::f32, {1, 1, kKeys, 8}, one.data());
  keys.strides[2] = 0;
  View query(DType::f32, 1, 1, 100, 8, Strides::bnsd), out(DType::f32, 1, 1, 100, 8, Strides::bnsd);
  for (const Isa isa : levels()) {
    Context context = fresh_context(1, isa);
    const Status status = flash_attention_forward(context, {.query = query.tensor(), .key = keys, .value = keys},
                                                  {.out = out.tensor()}, {.path = AttentionPath::standard});
    EXPECT_EQ(status.code(), StatusCode::out_of_memory);
    EXPECT_EQ(status.message(), "out of memory");
    for (int64_t i = 0; i < 800; ++i) ASSERT_TRUE(std::isnan(get(out.tensor(), i)));
  }
}

// Each tensor ends, then begins, where reading or writing one byte more is a fault; inputs cannot be written at all.
TEST(AttentionMemory, NothingBeyondTheTensorsIsTouched) {
  Random random(seed() + 3);
  for (const Guard guard : {Guard::after, Guard::before}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      for (const int64_t query_len : {1, 3, 17, 70}) {
        for (const int64_t kv_len : {1, 5, 33, 130}) {
          for (const int64_t head_dim : {1, 5, 16, 31, 72}) {
            if (!random.chance(kEffort)) continue;
            const int64_t value_head_dim = random.pick<int64_t>({1, 7, 16, 33, 80});
            View query(dtype, 2, 2, query_len, head_dim, Strides::bnsd, guard);
            View key(dtype, 2, 1, kv_len, head_dim, Strides::bnsd, guard);
            View value(dtype, 2, 1, kv_len, value_head_dim, Strides::bnsd, guard);
            for (View* view : {&query, &key, &value}) {
              fill(view->tensor(), Fill::normal, random);
              view->buffer().make_read_only();
            }
            AttentionOptions options;
            options.causal = random.chance(0.5);
            options.path = random.pick({AttentionPath::flash, AttentionPath::standard});
            options.block_q = random.pick<int64_t>({0, 3}), options.block_kv = random.pick<int64_t>({0, 7, 64});
            for (const TestContext& t : contexts_with_threads(2)) {
              View out(dtype, 2, 2, query_len, value_head_dim, Strides::bnsd, guard);
              View lse(dtype == DType::f64 ? DType::f64 : DType::f32, 2, 2, query_len, 1, Strides::bnsd, guard);
              const Status status =
                  flash_attention_forward(const_cast<Context&>(t.context),
                                          {.query = query.tensor(), .key = key.tensor(), .value = value.tensor()},
                                          {.out = out.tensor(), .softmax_lse = lse.tensor().selected(3, 0)}, options);
              ASSERT_TRUE(status.ok()) << status.message();
              ASSERT_TRUE(out.gaps_intact() && lse.gaps_intact());
              for (int64_t i = 0; i < out.tensor().num_elements(); ++i) {
                ASSERT_FALSE(std::isnan(get(out.tensor(), i))) << t.name << " element " << i;
              }
            }
          }
        }
      }
    }
  }
}

// Three rows, sequences or heads 1.1e9 elements apart: the last begins beyond 2^31.
TEST(AttentionMemory, B43_StridesBeyond32Bits) {
  constexpr int64_t kFar = 1'100'000'000, kDim = 8;
  Random random(seed() + 4);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const LazyMapping memory[4] = {LazyMapping((2 * kFar + 1024) * 4), LazyMapping((2 * kFar + 1024) * 4),
                                   LazyMapping((2 * kFar + 1024) * 4), LazyMapping((2 * kFar + 1024) * 4)};
    for (const LazyMapping& m : memory) {
      if (m.data() == nullptr) GTEST_SKIP() << "the system refuses a mapping of " << m.size_bytes() << " bytes";
    }
    for (const int far_dim : {0, 1, 2}) {
      ProblemOptions p;
      p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
      (far_dim == 0 ? p.batch : far_dim == 1 ? p.num_heads : p.query_len) = 3;
      p.num_kv_heads = p.num_heads;
      p.kv_len = far_dim == 2 ? 3 : 2;
      p.head_dim = p.value_head_dim = kDim;
      Problem compact(p, random);
      const Tensor from[3] = {compact.query(), compact.key(), compact.value()};
      Tensor far[4];
      for (int i = 0; i < 4; ++i) {
        far[i] = i < 3 ? from[i] : compact.query();
        far[i].data = memory[i].data();
        far[i].strides[far_dim] = kFar;
        if (i < 3) copy(from[i], far[i]);
      }
      for (const TestContext& t : contexts_with_threads(2)) {
        const Outcome expected = compact.run(t.context);
        ASSERT_TRUE(expected.status.ok());
        const Status status =
            flash_attention_forward(const_cast<Context&>(t.context), {.query = far[0], .key = far[1], .value = far[2]},
                                    {.out = far[3]}, p.options);
        ASSERT_TRUE(status.ok()) << status.message();
        const Comparison c = compare_bits(far[3], expected.out->tensor(), {.about = t.name});
        ASSERT_TRUE(c.ok) << c.message;
      }
    }
  }
}

// A pool of 2.29e9 elements for keys and as many for values, of which one block is used.
TEST(AttentionMemory, B44_PagesBeyond32Bits) {
  constexpr int64_t kBlocks = 140'001, kBlockSize = 16, kHeads = 8, kDim = 128;
  constexpr int64_t kElements = kBlocks * kBlockSize * kHeads * kDim;
  const LazyMapping keys(kElements * 2), values(kElements * 2);
  if (keys.data() == nullptr || values.data() == nullptr) GTEST_SKIP() << "the system refuses such a mapping";
  Random random(seed() + 5);
  ProblemOptions p;
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  p.num_heads = p.num_kv_heads = kHeads, p.query_len = 2, p.kv_len = 5, p.head_dim = p.value_head_dim = kDim;
  Problem problem(p, random);
  const Tensor pool_keys = Tensor::contiguous(DType::bf16, {kBlocks, kBlockSize, kHeads, kDim}, keys.data());
  const Tensor pool_values = Tensor::contiguous(DType::bf16, {kBlocks, kBlockSize, kHeads, kDim}, values.data());
  copy(problem.key().selected(0, 0).transposed(0, 1), pool_keys.selected(0, kBlocks - 1).narrowed(0, 0, 5));
  copy(problem.value().selected(0, 0).transposed(0, 1), pool_values.selected(0, kBlocks - 1).narrowed(0, 0, 5));
  const std::vector<int32_t> table = {static_cast<int32_t>(kBlocks - 1)}, lengths = {5};
  AttentionInputs paged{.query = problem.query(), .key = pool_keys, .value = pool_values};
  paged.block_table = ConstTensor::contiguous(DType::i32, {1, 1}, table.data());
  paged.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, lengths.data());
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context, paged);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    ASSERT_EQ(r.differs_from(problem.run(t.context)), "") << t.name;
  }
}

int64_t resident_bytes() {
  long total = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  const int fields = std::fscanf(file, "%ld %ld", &total, &resident);
  std::fclose(file);
  return fields == 2 ? resident * sysconf(_SC_PAGESIZE) : 0;
}

TEST(AttentionMemory, B91_VaryingLengthsDoNotMakeMemoryGrow) {
  if (kEffort < 1) GTEST_SKIP() << "a sanitizer's memory is not the library's";
  Random random(seed() + 6);
  constexpr int64_t kHeads = 8, kLongest = 1024, kDim = 16;
  Context context = fresh_context(2);
  std::vector<float> data(kHeads * kLongest * kDim, 0.5f), result(kHeads * kLongest * kDim);
  int64_t at_200 = 0;
  for (int call = 0; call < 500; ++call) {
    const int64_t len = call == 0 ? kLongest : random.integer(128, kLongest);
    const ConstTensor x = ConstTensor::contiguous(DType::f32, {1, kHeads, len, kDim}, data.data());
    ASSERT_TRUE(flash_attention_forward(context, {.query = x, .key = x, .value = x},
                                        {.out = Tensor::contiguous(DType::f32, {1, kHeads, len, kDim}, result.data())},
                                        {.causal = true})
                    .ok());
    if (call == 200) at_200 = resident_bytes();
  }
  EXPECT_LT(resident_bytes() - at_200, 5 << 20);
}

}  // namespace
}  // namespace opst::test
