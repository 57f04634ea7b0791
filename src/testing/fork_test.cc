// fork() at any moment, while other threads are inside calls on the same Context: the child's calls end, and with the
// same bits.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "opst/attention.h"
#include "opst/context.h"
#include "opst/matmul.h"
#include "testing/effort.h"
#include "testing/random.h"

namespace opst {
namespace {

// ThreadSanitizer allows no new threads in a forked child; AddressSanitizer's allocator stays locked there where
// another thread was inside it.
constexpr bool kForkFails = test::kSanitized;

// Attention, and a product with a weight that is packed anew: scratch memory, weight memory and the threads.
class Work {
 public:
  Work() {
    test::Random random(test::seed());
    for (Buffer* buffer : {&query_, &key_, &value_, &weight_}) {
      *buffer = std::move(Buffer::allocate(kBytes).value());
      fill(buffer->tensor(DType::f32, {kHeads, kTokens, kDim}), test::Fill::normal, random);
    }
  }

  // Both results, empty where a call failed. On memory of the caller's own: allocated nothing but what the calls take.
  bool run(Context& context, std::vector<float>& results) const {
    const auto tensor = [](const Buffer& b) {
      return ConstTensor::contiguous(DType::f32, {1, kHeads, kTokens, kDim}, b.data());
    };
    results.resize(2 * kElements);
    const Tensor out = Tensor::contiguous(DType::f32, {1, kHeads, kTokens, kDim}, results.data());
    if (!flash_attention_forward(context, {tensor(query_), tensor(key_), tensor(value_)}, {.out = out}).ok()) {
      return false;
    }
    const ConstTensor x = ConstTensor::contiguous(DType::f32, {kHeads * kTokens, kDim}, query_.data());
    const ConstTensor weight = ConstTensor::contiguous(DType::f32, {kDim, kDim}, weight_.data());
    const Tensor y = Tensor::contiguous(DType::f32, {kHeads * kTokens, kDim}, results.data() + kElements);
    const Result<PackedWeight> packed = PackedWeight::pack(context, weight);
    return packed.ok() && matmul(context, x, packed.value(), y).ok();
  }

 private:
  static constexpr int64_t kHeads = 2, kTokens = 24, kDim = 16, kElements = kHeads * kTokens * kDim;
  static constexpr int64_t kBytes = kElements * 4;
  Buffer query_, key_, value_, weight_;
};

// `parent_work` runs on other threads all the time; `child_work` in 400 children.
void fork_under_load(const std::function<void()>& parent_work, const std::function<bool()>& child_work) {
  constexpr int kForks = 400;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop.load()) parent_work();
    });
  }
  int wrong = 0;
  for (int i = 0; i < kForks && wrong == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs ends here
      _exit(child_work() ? 0 : 1);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      ADD_FAILURE() << "fork " << i << ": pid " << child << ", status " << status;
      ++wrong;
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(Fork, AnotherThreadIsInsideACall) {
  if (kForkFails) GTEST_SKIP() << "the sanitizer does not support it";
  ContextOptions options;
  options.num_threads = 2;
  Context context = std::move(Context::create(options).value());
  const Work work;
  std::vector<float> right, in_child;
  ASSERT_TRUE(work.run(context, right));
  in_child = right;
  fork_under_load(
      [&] {
        std::vector<float> results;
        EXPECT_TRUE(work.run(context, results));
        EXPECT_EQ(results, right);
        context.trim();
      },
      [&] {
        for (int i = 0; i < 2; ++i) {
          if (!work.run(context, in_child)) return false;
          if (std::memcmp(in_child.data(), right.data(), right.size() * sizeof(float)) != 0) return false;
          context.trim();
        }
        return true;
      });
}

TEST(Fork, AnotherThreadMakesContexts) {
  if (kForkFails) GTEST_SKIP() << "the sanitizer does not support it";
  const auto make_and_use = [work = std::make_shared<Work>()] {
    ContextOptions options;
    options.num_threads = 2;
    Result<Context> context = Context::create(options);
    std::vector<float> results;
    return context.ok() && work->run(context.value(), results);
  };
  fork_under_load([&] { EXPECT_TRUE(make_and_use()); }, make_and_use);
}

}  // namespace
}  // namespace opst
