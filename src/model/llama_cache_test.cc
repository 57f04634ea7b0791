// Sessions whose caches round: against the equations in double, with and without the same rounding; memory; how much is
// lost.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "model/double_llama.h"
#include "model/perplexity.h"
#include "testing/contexts.h"
#include "testing/elements.h"

namespace opst::model {
namespace {

TEST(LlamaCache, RoundedCachesStayClose) {
  Context context = make_context(2);
  const Loaded loaded = load(context);
  for (const CacheKind cache : {CacheKind::contiguous, CacheKind::paged}) {
    check_against_double(context, loaded, {.context = 64, .kv_dtype = DType::f16, .cache = cache}, 2e-2);
    check_against_double(context, loaded, {.context = 64, .kv_dtype = DType::bf16, .cache = cache}, 1e-1);
  }
  const int64_t f32_bytes = open_session(context, loaded.model, {.context = 64}).kv_cache_bytes();
  EXPECT_EQ(f32_bytes, 64 * 2 * 2 * 32 * 4);  // positions, layers, key and value, head_dim, bytes
  EXPECT_EQ(open_session(context, loaded.model, {.context = 64, .kv_dtype = DType::bf16}).kv_cache_bytes(),
            f32_bytes / 2);
}

// Groups of `count` numbers, each with the scale that spans it.
void round_groups(std::vector<double>& heads, size_t count, double most) {
  for (size_t first = 0; first < heads.size(); first += count) {
    double largest = 0;
    for (size_t i = first; i < first + count; ++i) largest = std::max(largest, std::fabs(heads[i]));
    for (size_t i = first; i < first + count && largest > 0; ++i) {
      heads[i] = std::nearbyint(heads[i] * most / largest) * largest / most;
    }
  }
}
void round_to_f8(std::vector<double>& heads, DType dtype) {
  for (double& x : heads) {
    unsigned char stored = 0;
    test::set(dtype, &stored, 0, x);
    x = test::get(dtype, &stored, 0);
  }
}

// The equations round as the cache does. A number that lies between two steps may fall to the other side in f32: the
// tolerance is some such falls.
struct Format {
  const char* name;
  double tolerance;
  int64_t bytes;  // of a row of 64 numbers
};
constexpr Format kFormats[] = {{"int8", 5e-2, 64 + 4}, {"int4", 0.3, 32 + 8}, {"fp8", 0.15, 64}, {"f8_e5m2", 0.3, 64}};

DType dtype_of(const std::string& name) {
  const KvType* const type = find_kv_type(name);
  if (type == nullptr) ADD_FAILURE() << name;
  return type == nullptr ? DType::f32 : type->dtype;
}

TEST(LlamaCache, QuantisedCachesRoundAsTheEquationsDo) {
  for (const Format& format : kFormats) {
    const DType dtype = dtype_of(format.name);
    const auto cached = [&](std::vector<double>& heads) {
      if (dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2) return round_to_f8(heads, dtype);
      round_groups(heads, dtype == DType::i8 ? 64 : 32, dtype == DType::i8 ? 127 : 7);
    };
    for (const test::TestContext& t : test::contexts_with_threads(2)) {
      Context& context = const_cast<Context&>(t.context);
      const Loaded loaded = load(context, {.num_heads = 4, .num_kv_heads = 2, .head_dim = 64, .ffn_size = 96});
      // Blocks of 33 rows are norm pages, those of 32 panels (but for int4).
      for (const int64_t block_size : {0, 32, 33}) {
        SCOPED_TRACE(t.name + ", " + format.name + ", blocks of " + std::to_string(block_size));
        SessionOptions options = {.context = 64, .kv_dtype = dtype};
        if (block_size > 0) options.cache = CacheKind::paged, options.block_size = block_size;
        check_against_double(context, loaded, options, format.tolerance, 0, cached);
      }
    }
  }
}

TEST(LlamaCache, QuantisedCachesTakeWhatTheirFormatsSay) {
  Context context = make_context(1);
  const Loaded loaded = load(context, {.num_heads = 4, .num_kv_heads = 2, .head_dim = 64, .ffn_size = 96});
  for (const Format& format : kFormats) {
    const LlamaSession session =
        open_session(context, loaded.model, {.context = 64, .kv_dtype = dtype_of(format.name)});
    EXPECT_EQ(session.kv_cache_bytes(), 64 * 2 * 2 * 2 * format.bytes) << format.name;  // layers, key and value, heads
  }
  const Loaded narrow = load(context, {.num_heads = 4, .num_kv_heads = 2, .head_dim = 24, .ffn_size = 96});
  EXPECT_EQ(open_session(context, narrow.model, {.context = 32, .kv_dtype = DType::u8}).kv_cache_bytes(),
            32 * 2 * 2 * 2 * (12 + 4));  // 32 does not divide 24: one scale
}

// What rounding keys and values costs a model, in nats of its mean NLL (0.001 is 0.1 % of the perplexity).
TEST(LlamaCache, PerplexityIsKept) {
  Context context = make_context(2);
  const Loaded loaded = load(context, {.num_heads = 4, .num_kv_heads = 2, .head_dim = 64, .ffn_size = 96});
  const std::vector<int32_t> tokens = random_tokens(500, loaded.tiny.vocab_size);
  const auto mean_nll = [&](const std::string& name) {
    LlamaSession session =
        open_session(context, loaded.model, {.context = 250, .kv_dtype = dtype_of(name), .logit_rows = 32});
    const Result<Perplexity> measured = measure_perplexity(session, tokens, {});
    EXPECT_TRUE(measured.ok()) << measured.status().message();
    return measured.value().mean_nll();
  };
  const double exact = mean_nll("f32");
  for (const auto& [name, most] :
       {std::pair("bf16", 0.02), {"int8", 0.02}, {"f8_e4m3", 0.1}, {"f8_e5m2", 0.2}, {"int4", 0.2}}) {
    const double rounded = mean_nll(name);
    EXPECT_NEAR(rounded, exact, most) << name;
    EXPECT_NE(rounded, exact) << name;
    std::printf("%s: mean NLL %.6f, %+.6f from f32\n", name, rounded, rounded - exact);
  }
}

}  // namespace
}  // namespace opst::model
