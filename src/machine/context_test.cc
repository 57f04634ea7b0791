#include "opst/context.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "machine/context_impl.h"
#include "machine/cpu.h"

namespace opst {
namespace {

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    setenv(name, value, 1);
  }
  ~Environment() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

class ContextTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"OPST_ISA", "OPST_NUM_THREADS", "OPST_BF16", "OMP_NUM_THREADS"}) unsetenv(name);
  }
};

Context create(const ContextOptions& options = {}) {
  Result<Context> context = Context::create(options);
  EXPECT_TRUE(context.ok()) << context.status().message();
  return std::move(context.value());
}

std::string refusal(const ContextOptions& options = {}) {
  const Result<Context> context = Context::create(options);
  EXPECT_EQ(context.status().code(), StatusCode::invalid_argument);
  return context.status().message();
}

TEST_F(ContextTest, Defaults) {
  const Context context = create();
  EXPECT_EQ(context.machine().isa, detect_isa());
  EXPECT_EQ(context.num_threads(), available_cores());
  EXPECT_EQ(context.machine().cores, available_cores());
  EXPECT_EQ(context.workspace_bytes(), 0);
  EXPECT_EQ(context.workspace_allocations(), 0);
}

TEST_F(ContextTest, IsaFromTheEnvironmentCaps) {
  {
    const Environment isa("OPST_ISA", "generic");
    EXPECT_EQ(create().machine().isa, Isa::generic);
  }
  const Environment isa("OPST_ISA", "avx512_bf16");  // above the processor or not: a cap
  EXPECT_EQ(create().machine().isa, detect_isa());
}

TEST_F(ContextTest, OptionsOverrideTheEnvironment) {
  const Environment isa("OPST_ISA", "nonsense");
  const Environment threads("OPST_NUM_THREADS", "nonsense");
  const Environment bf16("OPST_BF16", "nonsense");
  ContextOptions options;
  options.isa = Isa::generic;
  options.num_threads = 3;
  options.bf16_product = Bf16Product::widen;
  options.cache = CacheSizes{1000, 2000, 3000};
  const Context context = create(options);
  EXPECT_EQ(context.machine().isa, Isa::generic);
  EXPECT_EQ(context.num_threads(), 3);
  EXPECT_EQ(context.machine().cache.l2_bytes, 2000);
  EXPECT_EQ(context.machine().bf16_product, Bf16Product::widen);
}

TEST_F(ContextTest, MalformedEnvironmentIsRefused) {
  {
    const Environment isa("OPST_ISA", "sse9");
    EXPECT_EQ(refusal(),
              "Context::create: OPST_ISA is 'sse9', but must be generic, avx2, avx512, avx512_vnni or avx512_bf16");
  }
  for (const char* wrong : {"0", "-2", "two", "2x", " 2", "1025", "99999999999999999999"}) {
    const Environment threads("OPST_NUM_THREADS", wrong);
    EXPECT_EQ(refusal(),
              "Context::create: OPST_NUM_THREADS is '" + std::string(wrong) + "', but must be a number from 1 to 1024");
  }
  const Environment bf16("OPST_BF16", "fast");
  EXPECT_EQ(refusal(), "Context::create: OPST_BF16 is 'fast', but must be dot or widen");
}

TEST_F(ContextTest, EmptyEnvironmentCountsAsUnset) {
  const Environment isa("OPST_ISA", "");
  const Environment threads("OPST_NUM_THREADS", "");
  const Environment bf16("OPST_BF16", "");
  EXPECT_EQ(create().num_threads(), available_cores());
}

TEST_F(ContextTest, WrongOptionsAreRefused) {
  ContextOptions threads;
  threads.num_threads = -1;
  EXPECT_EQ(refusal(threads), "Context::create: num_threads is -1, but must be from 1 to 1024, or 0 for the default");
  ContextOptions cache;
  cache.cache = CacheSizes{1, 0, 1};
  EXPECT_EQ(refusal(cache), "Context::create: cache.l2_bytes is 0, but must be > 0");
  ContextOptions dot;
  dot.isa = Isa::generic;
  dot.bf16_product = Bf16Product::dot;
  EXPECT_EQ(refusal(dot), "Context::create: bf16_product is dot, but must be widen at level generic");
}

TEST_F(ContextTest, ALevelAboveTheProcessorsIsRefused) {
  ContextOptions options;
  options.isa = static_cast<Isa>(static_cast<int>(detect_isa()) + 1);
  EXPECT_EQ(refusal(options), std::string("Context::create: isa is ") + to_string(*options.isa) +
                                  ", but must be at most this processor's level, " + to_string(detect_isa()));
}

TEST_F(ContextTest, ThreadsOfOpenMpLimitTheDefault) {
  for (const char* text : {"1", "1,4"}) {
    const Environment threads("OMP_NUM_THREADS", text);
    EXPECT_EQ(create().num_threads(), 1);
  }
  for (const char* text : {"100000", "0", "-2", "two", "1x", ""}) {
    const Environment threads("OMP_NUM_THREADS", text);
    EXPECT_EQ(create().num_threads(), available_cores()) << text;
  }
  const Environment ours("OPST_NUM_THREADS", "3");
  const Environment theirs("OMP_NUM_THREADS", "1");
  EXPECT_EQ(create().num_threads(), 3);
}

TEST_F(ContextTest, ThreadsFromTheEnvironment) {
  const Environment threads("OPST_NUM_THREADS", "7");
  EXPECT_EQ(create().num_threads(), 7);
}

TEST_F(ContextTest, Bf16ProductCanBePinned) {
  for (Bf16Product product : {Bf16Product::dot, Bf16Product::widen}) {
    const Environment bf16("OPST_BF16", to_string(product));
    // Below the level that has the instruction the environment's wish means nothing.
    const bool has_dot = detect_isa() == Isa::avx512_bf16;
    EXPECT_EQ(create().machine().bf16_product, has_dot ? product : Bf16Product::widen);
    ContextOptions generic;
    generic.isa = Isa::generic;
    EXPECT_EQ(create(generic).machine().bf16_product, Bf16Product::widen);
  }
}

TEST_F(ContextTest, CountsScratchMemory) {
  Context context = create();
  { EXPECT_TRUE(context.impl().workspaces.lease(100000).ok()); }
  EXPECT_GE(context.workspace_bytes(), 100000);
  EXPECT_EQ(context.workspace_allocations(), 1);
  context.trim();
  EXPECT_EQ(context.workspace_bytes(), 0);
  EXPECT_EQ(context.workspace_allocations(), 1);
}

TEST_F(ContextTest, Moves) {
  Context a = create();
  const int num_threads = a.num_threads();
  Context b = std::move(a);
  EXPECT_EQ(b.num_threads(), num_threads);
  a = std::move(b);
  EXPECT_EQ(a.num_threads(), num_threads);
}

}  // namespace
}  // namespace opst
