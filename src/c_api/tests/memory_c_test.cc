// Phase 2 takes nothing from the heap, and several threads use one context.
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "c_api/test_calls.h"
#include "core/int_math.h"
#include "core/sanitizers.h"
#include "opst/attention.h"
#include "opst/matmul.h"
#include "testing/compare.h"
#include "testing/fail_allocations.h"

// malloc and its kin beside every form of new: a sanitizer has its own, which cannot be replaced.
#if !defined(__SANITIZE_ADDRESS__) && !OPST_HAS_FEATURE(address_sanitizer) && !OPST_THREAD_SANITIZER
#define OPST_COUNTS_MALLOC 1
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

static std::atomic<int64_t> num_mallocs{0};

void* malloc(size_t size) {
  num_mallocs.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  num_mallocs.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  num_mallocs.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(memory, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  num_mallocs.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  num_mallocs.fetch_add(1, std::memory_order_relaxed);
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr;
}
}
#else
#define OPST_COUNTS_MALLOC 0
static std::atomic<int64_t> num_mallocs{0};
#endif

namespace opst {
namespace {

using test::CContext;
using test::Fill;
using test::Numbers;
using test::Random;

struct Operation {
  const char* name;
  std::function<opst_status(int64_t*, opst_executor**)> plan;
  test::RunPhase run;
};

// Tensors of calls of every function, and the calls.
struct Operations {
  explicit Operations(opst_context* c, Random& random) : context(c), rng(random) {
    attention();
    empty();
    paged();
    products();
    rows();
  }
  ~Operations() { opst_weight_destroy(packed); }
  Operations(const Operations&) = delete;

  void add(const char* name, std::function<opst_status(int64_t*, opst_executor**)> plan, test::RunPhase run) {
    all.push_back({name, std::move(plan), run});
  }

  void attention() {
    inputs.query = &q.c, inputs.key = &k.c, inputs.value = &v.c;
    outputs.out = &out.c, outputs.softmax_lse = &lse.c;
    options.causal = 1;
    add(
        "attention",
        [this](auto* b, auto* e) { return opst_flash_attention_workspace(context, &inputs, &outputs, &options, b, e); },
        opst_flash_attention);
    few = inputs, few.query = &last_q.c;
    few_outputs.out = &last_out.c;
    add(
        "attention of few queries, whose keys are split",
        [this](auto* b, auto* e) { return opst_flash_attention_workspace(context, &few, &few_outputs, nullptr, b, e); },
        opst_flash_attention);
    standard = options, standard.path = OPST_PATH_STANDARD, standard.softcap = 3;
    masked = inputs, masked.mask = &mask.c, masked.sinks = &sinks.c;
    add(
        "standard attention with a mask",
        [this](auto* b, auto* e) {
          return opst_flash_attention_workspace(context, &masked, &outputs, &standard, b, e);
        },
        opst_flash_attention);
    varlen.query = &vq.c, varlen.key = &vk.c, varlen.value = &vk.c, varlen.cu_seqlens_q = &cu_q.c;
    varlen.cu_seqlens_k = &cu_k.c;
    varlen_outputs.out = &vout.c;
    add(
        "varlen attention",
        [this](auto* b, auto* e) {
          return opst_flash_attention_workspace(context, &varlen, &varlen_outputs, &options, b, e);
        },
        opst_flash_attention);
    saved.out = &out.c, saved.softmax_lse = &lse.c, saved.grad_out = &grad_out.c;
    gradients.grad_query = &grad_q.c, gradients.grad_key = &grad_k.c, gradients.grad_value = &grad_v.c;
    add(
        "attention backward",
        [this](auto* b, auto* e) {
          return opst_flash_attention_backward_workspace(context, &inputs, &saved, &gradients, &options, b, e);
        },
        opst_flash_attention_backward);
  }

  // Calls of nothing to compute, which write all the same.
  void empty() {
    no_queries = inputs, no_queries.query = &no_q.c;
    no_saved.out = &no_q.c, no_saved.softmax_lse = &no_lse.c, no_saved.grad_out = &no_q.c;
    zeros.grad_key = &zero_k.c, zeros.grad_value = &zero_v.c;
    add(
        "attention backward without queries",
        [this](auto* b, auto* e) {
          return opst_flash_attention_backward_workspace(context, &no_queries, &no_saved, &zeros, nullptr, b, e);
        },
        opst_flash_attention_backward);
    add(
        "grouped matmul of empty groups",
        [this](auto* b, auto* e) {
          return opst_grouped_matmul_workspace(context, &x.c, &stack.c, &nobody.c, OPST_GROUP_COUNTS, &zero_y.c,
                                               nullptr, b, e);
        },
        opst_grouped_matmul);
  }

  void paged() {
    add(
        "scatter",
        [this](auto* b, auto* e) {
          return opst_scatter_kv_cache_workspace(context, &tokens.c, &tokens.c, &slots.c, &key_cache.c, &value_cache.c,
                                                 nullptr, b, e);
        },
        opst_scatter_kv_cache);
    add(
        "gather",
        [this](auto* b, auto* e) {
          return opst_gather_kv_cache_workspace(context, &key_cache.c, &value_cache.c, &table.c, &lengths.c,
                                                &gathered_k.c, &gathered_v.c, nullptr, b, e);
        },
        opst_gather_kv_cache);
    pages.query = &page_q.c, pages.key = &key_cache.c, pages.value = &value_cache.c;
    pages.block_table = &table.c, pages.kv_lengths = &lengths.c;
    page_outputs.out = &page_out.c, page_outputs.softmax_lse = &page_lse.c;
    add(
        "paged attention",
        [this](auto* b, auto* e) {
          return opst_flash_attention_workspace(context, &pages, &page_outputs, nullptr, b, e);
        },
        opst_flash_attention);
    page_saved.out = &page_out.c, page_saved.softmax_lse = &page_lse.c, page_saved.grad_out = &page_grad.c;
    page_gradients.grad_key = &grad_key_cache.c, page_gradients.grad_value = &grad_value_cache.c;
    add(
        "paged attention backward",
        [this](auto* b, auto* e) {
          return opst_flash_attention_backward_workspace(context, &pages, &page_saved, &page_gradients, nullptr, b, e);
        },
        opst_flash_attention_backward);
  }

  void products() {
    EXPECT_EQ(opst_weight_pack(context, &stack.c, &packed), OPST_OK) << opst_last_error();
    add(
        "matmul", [this](auto* b, auto* e) { return opst_matmul_workspace(context, &x.c, &w.c, &y.c, nullptr, b, e); },
        opst_matmul);
    add(
        "matmul of f64",
        [this](auto* b, auto* e) { return opst_matmul_workspace(context, &xd.c, &wd.c, &yd.c, nullptr, b, e); },
        opst_matmul);
    quantised.out_scales = &y_scales.c;
    add(
        "quantised matmul",
        [this](auto* b, auto* e) { return opst_matmul_workspace(context, &x.c, &w.c, &yq.c, &quantised, b, e); },
        opst_matmul);
    add(
        "grouped matmul",
        [this](auto* b, auto* e) {
          return opst_grouped_matmul_workspace(context, &x.c, &stack.c, &counts.c, OPST_GROUP_COUNTS, &y.c, nullptr, b,
                                               e);
        },
        opst_grouped_matmul);
    add(
        "grouped matmul with a packed stack",
        [this](auto* b, auto* e) {
          return opst_grouped_matmul_packed_workspace(context, &x.c, packed, &counts.c, OPST_GROUP_COUNTS, &y.c,
                                                      nullptr, b, e);
        },
        opst_grouped_matmul_packed);
  }

  void rows() {
    add(
        "rms_norm",
        [this](auto* b, auto* e) {
          return opst_rms_norm_workspace(context, &x.c, &gain.c, 1e-5, &normed.c, &rstd.c, b, e);
        },
        opst_rms_norm);
    add(
        "add_rms_norm",
        [this](auto* b, auto* e) {
          return opst_add_rms_norm_workspace(context, &x.c, &x.c, &gain.c, 1e-5, &normed.c, &sum.c, nullptr, b, e);
        },
        opst_add_rms_norm);
    add(
        "rms_norm backward",
        [this](auto* b, auto* e) {
          return opst_rms_norm_backward_workspace(context, &x.c, &x.c, &gain.c, 1e-5, &normed.c, &grad_gain.c, b, e);
        },
        opst_rms_norm_backward);
    add(
        "rms_norm backward without the weight's gradient",
        [this](auto* b, auto* e) {
          return opst_rms_norm_backward_workspace(context, &x.c, &x.c, &gain.c, 1e-5, &grad_rows.c, nullptr, b, e);
        },
        opst_rms_norm_backward);
    add(
        "layer_norm",
        [this](auto* b, auto* e) {
          return opst_layer_norm_workspace(context, &x.c, &gain.c, &gain.c, 1e-5, &normed.c, nullptr, nullptr, b, e);
        },
        opst_layer_norm);
    add(
        "layer_norm backward",
        [this](auto* b, auto* e) {
          return opst_layer_norm_backward_workspace(context, &x.c, &x.c, &gain.c, 1e-5, &normed.c, &grad_gain.c,
                                                    &grad_bias.c, b, e);
        },
        opst_layer_norm_backward);
  }

  // All that the calls write.
  std::vector<const Numbers*> written() const {
    return {&out,    &lse,    &last_out,   &vout,       &grad_q,   &grad_k,         &grad_v,
            &zero_k, &zero_v, &zero_y,     &page_out,   &page_lse, &grad_key_cache, &grad_value_cache,
            &y,      &yq,     &gathered_k, &gathered_v, &yd,       &y_scales,       &normed,
            &sum,    &rstd,   &grad_gain,  &grad_bias,  &grad_rows};
  }

  opst_context* context;
  Random& rng;
  std::vector<Operation> all;
  Numbers q{DType::f32, {1, 4, 150, 32}, rng}, k{DType::f32, {1, 2, 600, 32}, rng}, v{DType::f32, {1, 2, 600, 32}, rng};
  Numbers out{DType::f32, {1, 4, 150, 32}}, lse{DType::f32, {1, 4, 150}};
  Numbers last_q{DType::f32, {1, 4, 1, 32}, rng}, last_out{DType::f32, {1, 4, 1, 32}};
  Numbers mask{DType::boolean, {150, 600}, rng, Fill::small_integers}, sinks{DType::f32, {4}, rng};
  Numbers vq{DType::bf16, {40, 2, 16}, rng}, vk{DType::bf16, {90, 2, 16}, rng}, vout{DType::bf16, {40, 2, 16}};
  Numbers cu_q{DType::i32, {4}, {0, 1, 30, 39}}, cu_k{DType::i32, {4}, {0, 20, 50, 90}};
  Numbers grad_out{DType::f32, {1, 4, 150, 32}, rng}, grad_q{DType::f32, {1, 4, 150, 32}};
  Numbers grad_k{DType::f32, {1, 2, 600, 32}}, grad_v{DType::f32, {1, 2, 600, 32}};
  Numbers no_q{DType::f32, {1, 4, 0, 32}}, no_lse{DType::f32, {1, 4, 0}}, zero_k{DType::f32, {1, 2, 600, 32}};
  Numbers zero_v{DType::f32, {1, 2, 600, 32}}, zero_y{DType::f32, {50, 48}}, nobody{DType::i64, {3}, {0, 0, 0}};
  Numbers tokens{DType::f32, {6, 2, 16}, rng}, slots{DType::i64, {6}, {0, 1, 2, 5, 6, 7}};
  Numbers key_cache{DType::f32, {3, 4, 2, 16}, rng}, value_cache{DType::f32, {3, 4, 2, 16}, rng};
  Numbers table{DType::i32, {2, 2}, {0, 1, 1, 2}}, lengths{DType::i32, {2}, {7, 5}};
  Numbers gathered_k{DType::f32, {12, 2, 16}}, gathered_v{DType::f32, {12, 2, 16}};
  Numbers page_q{DType::f32, {2, 2, 3, 16}, rng}, page_out{DType::f32, {2, 2, 3, 16}}, page_lse{DType::f32, {2, 2, 3}};
  Numbers page_grad{DType::f32, {2, 2, 3, 16}, rng};
  Numbers grad_key_cache{DType::f32, {3, 4, 2, 16}}, grad_value_cache{DType::f32, {3, 4, 2, 16}};
  Numbers x{DType::f32, {50, 64}, rng}, w{DType::f32, {48, 64}, rng}, y{DType::f32, {50, 48}}, yq{DType::i8, {50, 48}};
  Numbers xd{DType::f64, {5, 8}, rng}, wd{DType::f64, {6, 8}, rng}, yd{DType::f64, {5, 6}};
  Numbers y_scales{DType::f32, {50}}, stack{DType::f32, {3, 48, 64}, rng}, counts{DType::i64, {3}, {10, 0, 30}};
  Numbers gain{DType::f32, {64}, rng}, grad_gain{DType::f32, {64}}, grad_bias{DType::f32, {64}};
  Numbers normed{DType::f32, {50, 64}}, sum{DType::f32, {50, 64}}, rstd{DType::f32, {50}};
  Numbers grad_rows{DType::f32, {50, 64}};
  opst_weight* packed = nullptr;
  opst_attention_inputs inputs = OPST_ATTENTION_INPUTS, few = inputs, masked = inputs, varlen = inputs, pages = inputs,
                        no_queries = inputs;
  opst_attention_outputs outputs = OPST_ATTENTION_OUTPUTS, few_outputs = outputs, varlen_outputs = outputs,
                         page_outputs = outputs;
  opst_attention_options options = OPST_ATTENTION_OPTIONS, standard = options;
  opst_attention_saved saved = OPST_ATTENTION_SAVED, page_saved = saved, no_saved = saved;
  opst_attention_gradients gradients = OPST_ATTENTION_GRADIENTS, page_gradients = gradients, zeros = gradients;
  opst_matmul_options quantised = OPST_MATMUL_OPTIONS;
};

struct Counts {
  int64_t news = test::num_allocations.load(), mallocs = num_mallocs.load();
};

TEST(CMemory, TheCountersCount) {
  const Counts before;
  void* volatile memory = ::operator new(1);
  ::operator delete(memory);
  const Counts between;
  memory = malloc(1);
  free(memory);
  const Counts after;
  EXPECT_EQ(between.news, before.news + 1);
  EXPECT_TRUE(!OPST_COUNTS_MALLOC || after.mallocs == between.mallocs + 1);
}

// Every byte of the outputs is as it was; afterwards the second phases write all of them.
TEST(CMemory, TheFirstPhaseWritesNothing) {
  Random random(test::seed());
  const CContext context(2);
  Operations operations(context, random);
  const auto bytes_of = [](const Numbers& numbers) {
    return std::string(static_cast<const char*>(numbers.memory.data()),
                       static_cast<size_t>(numbers.memory.size_bytes()));
  };
  const auto untouched = [&](const Numbers& n) { return bytes_of(n).find_first_not_of('\xff') == std::string::npos; };
  const std::string keys = bytes_of(operations.key_cache), values = bytes_of(operations.value_cache);
  std::vector<std::pair<int64_t, opst_executor*>> planned;
  for (const Operation& operation : operations.all) {
    SCOPED_TRACE(operation.name);
    auto& [bytes, executor] = planned.emplace_back();
    ASSERT_EQ(operation.plan(&bytes, &executor), OPST_OK) << opst_last_error();
    for (const Numbers* numbers : operations.written()) ASSERT_TRUE(untouched(*numbers));
    ASSERT_EQ(bytes_of(operations.key_cache), keys);
    ASSERT_EQ(bytes_of(operations.value_cache), values);
  }
  for (size_t i = 0; i < planned.size(); ++i) {
    const auto& [bytes, executor] = planned[i];
    const test::GuardedBuffer workspace(bytes);
    EXPECT_EQ(operations.all[i].run(bytes > 0 ? workspace.data() : nullptr, bytes, executor), OPST_OK);
    opst_executor_destroy(executor);
  }
  for (const Numbers* numbers : operations.written()) EXPECT_FALSE(untouched(*numbers));
  EXPECT_NE(bytes_of(operations.key_cache), keys);
  EXPECT_NE(bytes_of(operations.value_cache), values);
}

TEST(CMemory, TheSecondPhaseAllocatesNothing) {
  Random random(test::seed());
  for (const int threads : {1, 3}) {
    const CContext context(threads);
    Operations operations(context, random);
    for (const Operation& operation : operations.all) {
      SCOPED_TRACE(std::string(operation.name) + ", threads " + std::to_string(threads));
      int64_t bytes = 0;
      opst_executor* executor = nullptr;
      ASSERT_EQ(operation.plan(&bytes, &executor), OPST_OK) << opst_last_error();
      const test::GuardedBuffer workspace(bytes);
      void* const memory = bytes > 0 ? workspace.data() : nullptr;
      // The very first run: nothing may be left for it to allocate.
      const Counts before;
      const opst_status status = operation.run(memory, bytes, executor);
      const Counts after;
      EXPECT_EQ(status, OPST_OK) << opst_last_error();
      EXPECT_EQ(after.news, before.news);
      EXPECT_EQ(after.mallocs, before.mallocs);
      opst_executor_destroy(executor);
    }
  }
}

// Of this process.
int64_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// A context's threads, whose stacks are memory too, are started with it and not by its first run.
TEST(CMemory, TheFirstRunOfAContextAllocatesNothing) {
  Random random(test::seed());
  Numbers x(DType::f32, {200, 256}, random), w(DType::f32, {256, 256}, random), y(DType::f32, {200, 256});
  const int64_t threads_before = num_threads();
  const CContext context(3);
  EXPECT_EQ(num_threads(), threads_before + 2);
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  ASSERT_EQ(opst_matmul_workspace(context, &x.c, &w.c, &y.c, nullptr, &bytes, &executor), OPST_OK);
  const test::GuardedBuffer workspace(bytes);
  const Counts before;
  const opst_status status = opst_matmul(workspace.data(), bytes, executor);
  const Counts after;
  EXPECT_EQ(status, OPST_OK) << opst_last_error();
  EXPECT_EQ(after.news, before.news);
  EXPECT_EQ(after.mallocs, before.mallocs);
  opst_executor_destroy(executor);
}

// The first phase says what the plans of the C++ interface say.
TEST(CMemory, TheSizeIsThatOfThePlan) {
  Random random(test::seed());
  for (const int threads : {1, 3}) {
    const CContext c_context(threads);
    Operations operations(c_context, random);
    Result<Context> context = Context::create({.num_threads = threads});
    ASSERT_TRUE(context.ok());
    const Machine& machine = context.value().machine();
    const auto expect = [&](const char* name, int64_t expected) {
      for (const Operation& operation : operations.all) {
        if (std::string(operation.name) != name) continue;
        int64_t bytes = 0;
        opst_executor* executor = nullptr;
        ASSERT_EQ(operation.plan(&bytes, &executor), OPST_OK) << opst_last_error();
        opst_executor_destroy(executor);
        EXPECT_GT(bytes, 0) << name;
        EXPECT_EQ(bytes, round_up(expected, OPST_WORKSPACE_ALIGNMENT)) << name;
      }
    };
    const Operations& o = operations;
    const auto problem =
        attention_problem({.query = o.q.tensor, .key = o.k.tensor, .value = o.v.tensor}, {.causal = true});
    ASSERT_TRUE(problem.ok());
    expect("attention", plan_attention(problem.value(), machine).scratch_bytes(threads));
    const auto product = matmul_problem(o.x.tensor, o.w.tensor, o.y.tensor);
    ASSERT_TRUE(product.ok());
    expect("matmul", plan_matmul(product.value(), machine, threads).scratch_bytes(threads));
  }
}

Status as_core(opst_status status) {
  return status == OPST_OK ? Status() : Status(static_cast<StatusCode>(status), "");
}

// Whatever the allocation that fails in what may allocate: out_of_memory, and nothing is leaked.
TEST(CMemory, ExhaustedMemory) {
  Random random(test::seed());
  const CContext context(2);
  Operations operations(context, random);
  for (const Operation& operation : operations.all) {
    SCOPED_TRACE(operation.name);
    const int64_t live = test::live_allocations;
    const int64_t failed = test::fail_each_allocation([&] {
      int64_t bytes = 0;
      opst_executor* executor = nullptr;
      const opst_status status = operation.plan(&bytes, &executor);
      opst_executor_destroy(executor);
      return as_core(status);
    });
    EXPECT_GT(failed, 0);
    EXPECT_EQ(test::live_allocations, live);
  }
  const int64_t live = test::live_allocations;
  EXPECT_GT(test::fail_each_allocation([&] {
              opst_weight* weight = nullptr;
              const opst_status status = opst_weight_pack(context, &operations.stack.c, &weight);
              opst_weight_destroy(weight);
              return as_core(status);
            }),
            0);
  EXPECT_GT(test::fail_each_allocation([&] {
              opst_context* made = nullptr;
              const opst_status status = opst_context_create(nullptr, &made);
              opst_context_destroy(made);
              return as_core(status);
            }),
            0);
  EXPECT_EQ(test::live_allocations, live);
}

// One context, one executor and one workspace for each thread: the bits of one thread alone.
TEST(CMemory, SeveralThreadsUseOneContext) {
  Random random(test::seed());
  const CContext context(2);
  constexpr int kThreads = 4, kRounds = 20;
  std::vector<std::unique_ptr<Operations>> all;
  for (int i = 0; i < kThreads + 1; ++i) {
    Random same(7);
    all.push_back(std::make_unique<Operations>(context, same));
  }
  const auto run_all = [](Operations& operations, std::atomic<int>& failed) {
    for (const Operation& operation : operations.all) {
      int64_t bytes = 0;
      opst_executor* executor = nullptr;
      if (operation.plan(&bytes, &executor) != OPST_OK) ++failed;
      const test::GuardedBuffer workspace(bytes);
      if (operation.run(bytes > 0 ? workspace.data() : nullptr, bytes, executor) != OPST_OK) ++failed;
      opst_executor_destroy(executor);
      // A refusal of one thread is no other thread's last error.
      if (opst_rms_norm(nullptr, 0, nullptr) != OPST_INVALID_ARGUMENT) ++failed;
      if (std::string(opst_last_error()) != "opst_rms_norm: executor is NULL") ++failed;
    }
  };
  std::atomic<int> failed = 0;
  run_all(*all[kThreads], failed);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) run_all(*all[static_cast<size_t>(i)], failed);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  const Operations& alone = *all[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    const Operations& one = *all[static_cast<size_t>(i)];
    for (const auto member : {&Operations::out, &Operations::grad_k, &Operations::y, &Operations::normed,
                              &Operations::page_out, &Operations::gathered_k, &Operations::vout}) {
      EXPECT_TRUE(test::compare_bits((one.*member).tensor, (alone.*member).tensor).ok) << i;
    }
  }
}

// An executor that two threads run at once: each time one of them runs it, and the other is told so or runs it after.
TEST(CMemory, OneExecutorRunsInOneThreadAtATime) {
  Random random(test::seed());
  const CContext context(1);
  Numbers x(DType::f32, {200, 256}, random), w(DType::f32, {256, 256}, random), y(DType::f32, {200, 256});
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  ASSERT_EQ(opst_matmul_workspace(context, &x.c, &w.c, &y.c, nullptr, &bytes, &executor), OPST_OK);
  ASSERT_EQ(opst_executor_set_repeatable(executor), OPST_OK);
  const test::GuardedBuffer workspace(bytes);
  std::atomic<int> ran = 0, refused = 0, other = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        if (opst_matmul(workspace.data(), bytes, executor) == OPST_OK) {
          ++ran;
        } else if (std::string(opst_last_error()) == "opst_matmul: executor is running in another thread") {
          ++refused;
        } else {
          ++other;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran + refused, 60);
  EXPECT_GE(ran, 1);
  EXPECT_EQ(other, 0);
  opst_executor_destroy(executor);
}

// Whatever the order in which handles go: what an executor needs stays.
TEST(CMemory, ExecutorsOutliveContextsAndWeights) {
  Random random(test::seed());
  Numbers x(DType::f32, {4, 32}, random), w(DType::f32, {16, 32}, random), y(DType::f32, {4, 16});
  opst_context* context = nullptr;
  ASSERT_EQ(opst_context_create(nullptr, &context), OPST_OK) << opst_last_error();
  opst_weight* weight = nullptr;
  ASSERT_EQ(opst_weight_pack(context, &w.c, &weight), OPST_OK) << opst_last_error();
  int64_t bytes = 0;
  opst_executor* executor = nullptr;
  ASSERT_EQ(opst_matmul_packed_workspace(context, &x.c, weight, &y.c, nullptr, &bytes, &executor), OPST_OK);
  opst_weight_destroy(weight);
  opst_context_destroy(context);
  const test::GuardedBuffer workspace(bytes);
  EXPECT_EQ(opst_matmul_packed(bytes > 0 ? workspace.data() : nullptr, bytes, executor), OPST_OK) << opst_last_error();
  opst_executor_destroy(executor);
}

}  // namespace
}  // namespace opst
