#include "testing/contexts.h"

#include <cstdio>
#include <cstdlib>
#include <map>

#include "machine/levels.h"
#include "testing/effort.h"
#include "testing/random.h"

namespace opst::test {
namespace {

void add(std::vector<TestContext>& list, Isa isa, int num_threads, bool tiny, Bf16Product product) {
  ContextOptions options;
  options.isa = isa;
  options.num_threads = num_threads;
  options.bf16_product = product;
  if (tiny) options.cache = tiny_caches();
  Result<Context> context = Context::create(options);
  if (!context.ok()) {
    std::fprintf(stderr, "test context: %s\n", context.status().message().c_str());
    std::abort();
  }
  std::string name = to_string(isa);
  if (includes(isa, Isa::avx512_bf16)) name += std::string(" ") + to_string(product);
  name += ", " + std::to_string(num_threads) + (num_threads == 1 ? " thread, " : " threads, ");
  name += tiny ? "tiny caches" : "real caches";
  list.push_back({std::move(name), std::move(context.value())});
}

void add_products(std::vector<TestContext>& list, Isa isa, int num_threads, bool tiny) {
  add(list, isa, num_threads, tiny, Bf16Product::widen);
  if (includes(isa, Isa::avx512_bf16)) add(list, isa, num_threads, tiny, Bf16Product::dot);
}

}  // namespace

std::vector<Isa> levels() {
  Isa best = detect_isa();
  if (const char* cap = std::getenv("OPST_ISA"); cap != nullptr && *cap != '\0') {
    best = common_level(best, parse_isa(cap).value_or(best));
  }
  std::vector<Isa> list;
  for (int i = 0; i < kNumIsaLevels; ++i) {
    if (const Isa isa = static_cast<Isa>(i); includes(best, isa)) list.push_back(isa);
  }
  return list;
}

CacheSizes tiny_caches() { return {.l1d_bytes = 4 << 10, .l2_bytes = 16 << 10, .l3_bytes_per_core = 32 << 10}; }

const std::vector<TestContext>& contexts() {
  static const std::vector<TestContext> list = [] {
    std::vector<TestContext> made;
    if (kSanitized && !exhaustive()) {
      Random random(seed());
      for (Isa isa : levels()) {
        const bool tiny = random.chance(0.5);
        for (int num_threads : {1, random.pick({2, 3, 5})}) add_products(made, isa, num_threads, tiny);
      }
      return made;
    }
    for (Isa isa : levels()) {
      for (bool tiny : {false, true}) {
        for (int num_threads : {1, 2, 3, 5}) add_products(made, isa, num_threads, tiny);
      }
    }
    return made;
  }();
  return list;
}

const std::vector<TestContext>& contexts_with_threads(int num_threads) {
  static std::map<int, std::vector<TestContext>> lists;
  std::vector<TestContext>& list = lists[num_threads];
  if (list.empty()) {
    for (Isa isa : levels()) add_products(list, isa, num_threads, false);
  }
  return list;
}

}  // namespace opst::test
