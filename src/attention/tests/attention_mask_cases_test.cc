// Masks, windows, sequences of different lengths and dropout on inputs that went wrong elsewhere, by their number in
// the collection of cases; and the integers of docs/semantics.md.
#include <gtest/gtest.h>

#include <functional>

#include "attention/tests/attention_problem.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLowest = -3.4028234663852886e38;  // of f32

// A mask or bias of any shape with values by function of its row-major index.
class Mask {
 public:
  template <class Value>
  Mask(DType dtype, std::initializer_list<int64_t> shape, const Value& value, Strides strides = Strides::bnsd) {
    int64_t four[4] = {1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), four + 4 - shape.size());
    view_ = std::make_unique<View>(dtype, four[0], four[1], four[2], four[3], strides);
    for (int64_t i = 0; i < view_->tensor().num_elements(); ++i) set(view_->tensor(), i, static_cast<double>(value(i)));
    tensor = view_->tensor();
    for (size_t i = shape.size(); i < 4; ++i) tensor = tensor.selected(0, 0);
  }
  ConstTensor tensor;

 private:
  std::unique_ptr<View> view_;
};

void expect_in_every_context(Problem& problem, int64_t max_rows = 1 << 20,
                             const std::function<void(const Outcome&)>& also = {}) {
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    ASSERT_EQ(problem.judge(r, t.context, max_rows), "");
    if (also) also(r);
  }
}

// Q = 0, so that all visible keys weigh the same; V[j] = 2^j. out * count is the set of visible keys.
std::vector<double> visible_sums(const ProblemOptions& options, const std::function<void(Problem&)>& change = {}) {
  ProblemOptions p = options;
  p.query_fill = Fill::zeros;
  Random random(1);
  Problem problem(p, random);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t j = 0; j < p.kv_len; ++j) {
      set(problem.value(), b * p.kv_len + j, std::ldexp(1.0, static_cast<int>(j)));
    }
  }
  if (change) change(problem);
  std::vector<double> first;
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    EXPECT_EQ(r.status.message(), "");
    std::vector<double> sums;
    for (int64_t i = 0; i < r.out->tensor().num_elements(); ++i) {
      sums.push_back(std::round(get(r.out->tensor(), i) * get(r.sum->tensor(), i)));
    }
    if (first.empty()) first = sums;
    EXPECT_EQ(sums, first) << t.name;
  }
  return first;
}
ProblemOptions probe(int64_t query_len, int64_t kv_len) {
  ProblemOptions p;
  p.query_len = query_len, p.kv_len = kv_len;
  return p;
}
using Sums = std::vector<double>;

// The table of docs/semantics.md.
TEST(AttentionSemantics, ExactIntegersOfTheDocument) {
  ProblemOptions p = probe(2, 5);
  p.options.causal = true;
  p.options.alignment = CausalAlignment::top_left;
  EXPECT_EQ(visible_sums(p), (Sums{1, 3}));
  p.options.alignment = CausalAlignment::bottom_right;
  EXPECT_EQ(visible_sums(p), (Sums{15, 31}));
  p = probe(5, 2);
  p.options.causal = true;
  EXPECT_EQ(visible_sums(p), (Sums{0, 0, 0, 1, 3}));
  p.options.alignment = CausalAlignment::top_left;
  EXPECT_EQ(visible_sums(p), (Sums{1, 3, 3, 3, 3}));
  // Windows, both ends included.
  p = probe(4, 6);
  p.options.window_left = 1, p.options.window_right = 0;
  EXPECT_EQ(visible_sums(p), (Sums{2 + 4, 4 + 8, 8 + 16, 16 + 32}));
  p.options.alignment = CausalAlignment::top_left;
  EXPECT_EQ(visible_sums(p), (Sums{1, 1 + 2, 2 + 4, 4 + 8}));
  p.options.window_right = 2;
  EXPECT_EQ(visible_sums(p), (Sums{7, 15, 30, 60}));
  // Bands away from the diagonal.
  p.options.window_left = -2, p.options.window_right = 3;
  EXPECT_EQ(visible_sums(p), (Sums{4 + 8, 8 + 16, 16 + 32, 32}));
  p.options.window_left = 3, p.options.window_right = -2;
  EXPECT_EQ(visible_sums(p), (Sums{0, 0, 1, 1 + 2}));
  p.options.window_left = -3, p.options.window_right = 2;
  EXPECT_EQ(visible_sums(p), (Sums{0, 0, 0, 0}));
  // The largest and smallest numbers there are.
  p.options.window_left = kUnbounded - 1, p.options.window_right = std::numeric_limits<int64_t>::min() + 1;
  EXPECT_EQ(visible_sums(p), (Sums{0, 0, 0, 0}));
  p.options.window_right = kUnbounded;
  EXPECT_EQ(visible_sums(p), (Sums{63, 63, 63, 63}));
  // A prefix besides: the union of two intervals.
  p = probe(4, 6);
  p.options.window_left = 0, p.options.window_right = 0;
  const std::vector<int32_t> two = {2};
  EXPECT_EQ(
      visible_sums(p, [&](Problem& x) { x.inputs.prefix = ConstTensor::contiguous(DType::i32, {1}, two.data()); }),
      (Sums{3 + 4, 3 + 8, 3 + 16, 3 + 32}));
  // Lengths move the bottom right corner.
  p = probe(2, 5);
  p.options.causal = true;
  const std::vector<int32_t> three = {3};
  EXPECT_EQ(visible_sums(
                p, [&](Problem& x) { x.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, three.data()); }),
            (Sums{3, 7}));
  // 1 in a bool mask shows.
  const Mask mask(DType::boolean, {2, 5}, [](int64_t i) { return i % 2; });
  EXPECT_EQ(visible_sums(probe(2, 5), [&](Problem& x) { x.inputs.mask = mask.tensor; }), (Sums{2 + 8, 1 + 4 + 16}));
}

TEST(AttentionCases, B01_ARowThatTheMaskHidesWhole) {
  Random random(seed());
  for (const int64_t query_len : {6, 130}) {
    ProblemOptions p;
    p.num_heads = p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 10, p.head_dim = p.value_head_dim = 8;
    p.options.softmax_scale = 0.125f;
    Problem problem(p, random);
    const Mask mask(DType::boolean, {query_len, 10},
                    [&](int64_t i) { return i / 10 != query_len - 1 && i % 10 <= i / 10 ? 1 : 0; });
    problem.inputs.mask = mask.tensor;
    expect_in_every_context(problem, 1 << 20, [&](const Outcome& r) {
      for (int64_t d = 0; d < 8; ++d) EXPECT_EQ(get(r.out->tensor(), (query_len - 1) * 8 + d), 0);
      EXPECT_EQ(get(r.lse->tensor(), query_len - 1), -kInfinity);
    });
  }
}

TEST(AttentionCases, B03_AFirstTileOfTheLowestFloat) {
  Random random(seed() + 1);
  ProblemOptions p;
  p.query_len = p.kv_len = 441, p.head_dim = p.value_head_dim = 64;
  Problem problem(p, random);
  const Mask mask(DType::f32, {1, 1, 1, 441}, [](int64_t j) { return j < 128 ? kLowest : 0; });
  problem.inputs.bias = mask.tensor;
  ProblemOptions rest_options = p;
  rest_options.kv_len = 313;
  Problem rest(rest_options, random);
  copy(problem.query(), rest.query());
  copy(problem.key().narrowed(2, 128, 313), rest.key());
  copy(problem.value().narrowed(2, 128, 313), rest.value());
  for (const int64_t block_kv : {0, 128, 32}) {
    for (const TestContext& t : contexts_with_threads(2)) {
      AttentionOptions options = p.options;
      options.block_kv = block_kv;
      const Outcome r = problem.run(t.context);
      ASSERT_TRUE(flash_attention_forward(t.context, problem.inputs, {.out = r.out->tensor()}, options).ok());
      const Outcome expected = rest.run(t.context);
      for (int64_t i = 0; i < 441 * 64; ++i) {
        ASSERT_NEAR(get(r.out->tensor(), i), get(expected.out->tensor(), i), 1e-5) << t.name;
      }
    }
  }
  // Nothing but the lowest float: a uniform average, not nothing.
  const Mask all(DType::f32, {441, 441}, [](int64_t) { return kLowest; });
  problem.inputs.bias = all.tensor;
  problem.forget_reference();
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    for (int64_t d = 0; d < 64; ++d) {
      double mean = 0;
      for (int64_t j = 0; j < 441; ++j) mean += get(problem.value(), j * 64 + d) / 441;
      ASSERT_NEAR(get(r.out->tensor(), 7 * 64 + d), mean, 1e-6) << t.name;
    }
  }
}

TEST(AttentionCases, B05_ABandOfMinusInfinity) {
  Random random(seed() + 2);
  ProblemOptions p;
  p.query_len = p.kv_len = 640, p.head_dim = p.value_head_dim = 4;
  p.query_fill = p.key_fill = Fill::zeros, p.value_fill = Fill::ones;
  Problem problem(p, random);
  const Mask band(DType::f32, {640, 640}, [](int64_t i) {
    const int64_t distance = i / 640 - i % 640;
    return distance >= 0 && distance < 10 ? 0 : -kInfinity;
  });
  problem.inputs.bias = band.tensor;
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    for (int64_t i = 0; i < 640 * 4; ++i) ASSERT_EQ(get(r.out->tensor(), i), 1) << t.name << " " << i;
  }
}

// One rule at every tile size: what is hidden by structure or by a bool mask does not matter, whatever its bytes.
TEST(AttentionCases, B06_NanInAHiddenKey) {
  for (const int64_t block_kv : {1, 2, 0}) {
    for (const double poison : {1e10, std::nan(""), kInfinity, -kInfinity}) {
      for (const bool in_value : {false, true}) {
        ProblemOptions p;
        p.query_len = p.kv_len = 2, p.head_dim = p.value_head_dim = 4;
        p.options.block_kv = block_kv;
        Random random(1);
        Problem problem(p, random);
        for (const Tensor& x : {problem.query(), problem.key(), problem.value()}) {
          for (int64_t i = 0; i < 8; ++i) set(x, i, static_cast<double>(i));
        }
        set(in_value ? problem.value() : problem.key(), 4, poison);
        const Mask mask(DType::boolean, {2, 2}, [](int64_t i) { return i % 2 == 0; });
        problem.inputs.mask = mask.tensor;
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome r = problem.run(t.context);
          for (int64_t i = 0; i < 8; ++i) ASSERT_EQ(get(r.out->tensor(), i), static_cast<double>(i % 4)) << t.name;
        }
      }
    }
  }
}

// Every shape that broadcasts is what its expansion is, bit for bit; a mask of ones is none.
TEST(AttentionCases, B16_MaskShapes) {
  Random random(seed() + 3);
  ProblemOptions p;
  p.batch = 2, p.num_heads = 3, p.query_len = 5, p.kv_len = 7, p.head_dim = p.value_head_dim = 8;
  for (const DType dtype : {DType::boolean, DType::f32}) {
    Problem problem(p, random);
    const auto value = [&](int64_t) { return dtype == DType::boolean ? random.chance(0.5) * 1.0 : random.normal(); };
    std::vector<Mask> masks;
    masks.emplace_back(dtype, std::initializer_list<int64_t>{7}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{5, 7}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{1, 7}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{3, 1, 7}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{3, 5, 7}, value, Strides::transposed);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{2, 1, 5, 7}, value, Strides::padded);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{2, 1, 1, 7}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{2, 3, 5, 7}, value, Strides::shifted);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{2, 3, 5, 1}, value);
    masks.emplace_back(dtype, std::initializer_list<int64_t>{1, 1, 1, 1}, value);
    for (const Mask& mask : masks) {
      const Mask expanded(dtype, {2, 3, 5, 7}, [&](int64_t i) {
        return attention::reference::broadcast_at(mask.tensor, i / 105, i / 35 % 3, i / 7 % 5, i % 7);
      });
      // The same by strides of 0.
      ConstTensor repeated = mask.tensor;
      const int64_t sizes[4] = {2, 3, 5, 7};
      for (int d = 0; d < repeated.rank; ++d) {
        if (repeated.shape[d] == 1) repeated.strides[d] = 0, repeated.shape[d] = sizes[4 - repeated.rank + d];
      }
      for (const TestContext& t : contexts_with_threads(2)) {
        const auto run_with = [&](const ConstTensor& m) {
          problem.inputs.mask = problem.inputs.bias = {};
          (dtype == DType::boolean ? problem.inputs.mask : problem.inputs.bias) = m;
          return problem.run(t.context);
        };
        const Outcome r = run_with(mask.tensor);
        ASSERT_EQ(r.status.message(), "");
        ASSERT_EQ(run_with(expanded.tensor).differs_from(r), "") << t.name << " " << to_string(mask.tensor);
        ASSERT_EQ(run_with(repeated).differs_from(r), "") << t.name << " " << to_string(mask.tensor);
      }
      problem.forget_reference();
      expect_in_every_context(problem);
    }
  }
  p.query_len = 150, p.kv_len = 300, p.options.causal = true;
  Problem problem(p, random);
  const Mask ones(DType::boolean, {150, 300}, [](int64_t) { return 1; });
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome plain = problem.run(t.context);
    AttentionInputs masked = problem.inputs;
    masked.mask = ones.tensor;
    ASSERT_EQ(problem.run(t.context, masked).differs_from(plain), "") << t.name;
  }
}

TEST(AttentionCases, B21_SlidingWindow) {
  ProblemOptions p = probe(10, 10);
  const auto row_9 = [&](int64_t left, int64_t right) {
    p.options.window_left = left, p.options.window_right = right;
    return visible_sums(p).at(9);
  };
  EXPECT_EQ(row_9(4, 0), 0x3e0);  // keys 5 to 9
  EXPECT_EQ(row_9(3, 0), 0x3c0);  // keys 6 to 9
  EXPECT_EQ(row_9(9, 0), 0x3ff);
  p.options.window_left = 9, p.options.window_right = 0;
  const Sums whole = visible_sums(p);
  p.options.window_left = 10;
  EXPECT_EQ(visible_sums(p), whole);
  p.options.window_left = kUnbounded;
  EXPECT_EQ(visible_sums(p), whole);
  p.options.window_right = kUnbounded, p.options.causal = true;
  EXPECT_EQ(visible_sums(p), whole);
}

TEST(AttentionCases, B27_BlocksOnTheDiagonalInBf16) {
  Random random(seed() + 4);
  ProblemOptions p;
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  p.num_heads = p.num_kv_heads = 2, p.query_len = p.kv_len = 600, p.head_dim = p.value_head_dim = 80;
  Problem problem(p, random);
  const auto block_of = [](int64_t i) { return i < 384 ? i / 128 : i >= 543 ? 3 : -1; };
  const Mask mask(DType::boolean, {600, 600},
                  [&](int64_t i) { return block_of(i / 600) >= 0 && block_of(i / 600) == block_of(i % 600) ? 1 : 0; });
  problem.inputs.mask = mask.tensor;
  expect_in_every_context(problem, 60, [&](const Outcome& r) {
    for (int64_t i = 384; i < 543; ++i) ASSERT_EQ(get(r.out->tensor(), i * 80), 0);
  });
}

TEST(AttentionCases, B28_SequencesOfOneQueryAndOfNone) {
  Random random(seed() + 5);
  View query(DType::bf16, 1, 2, 9, 64, Strides::bnsd), key(DType::bf16, 1, 8, 3, 64, Strides::bnsd),
      value(DType::bf16, 1, 8, 3, 64, Strides::bnsd), out(DType::bf16, 1, 2, 9, 64, Strides::bnsd);
  for (const View* view : {&query, &key, &value}) fill(view->tensor(), Fill::normal, random);
  const std::vector<int32_t> cu_q = {0, 1, 1, 2};
  const std::vector<int64_t> cu_k = {0, 3, 3, 8};
  AttentionInputs in{.query = query.tensor().selected(0, 0),
                     .key = key.tensor().selected(0, 0),
                     .value = value.tensor().selected(0, 0)};
  in.cu_seqlens_q = ConstTensor::contiguous(DType::i32, {4}, cu_q.data());
  in.cu_seqlens_k = ConstTensor::contiguous(DType::i64, {4}, cu_k.data());
  const AttentionOptions options{.softmax_scale = 1.0f, .causal = true};
  for (const TestContext& t : contexts_with_threads(2)) {
    ASSERT_EQ(flash_attention_forward(t.context, in, {.out = out.tensor().selected(0, 0)}, options).message(), "");
    for (const auto& [token, first, count] : {std::tuple(0, 0, 3), std::tuple(1, 3, 5)}) {
      ProblemOptions p;
      p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
      p.num_heads = 9, p.num_kv_heads = 3, p.kv_len = count, p.head_dim = p.value_head_dim = 64;
      p.options = options;
      Problem alone(p, random);
      copy(query.tensor().narrowed(1, token, 1).transposed(1, 2), alone.query());
      copy(key.tensor().narrowed(1, first, count).transposed(1, 2), alone.key());
      copy(value.tensor().narrowed(1, first, count).transposed(1, 2), alone.value());
      Outcome r = alone.run(t.context);
      copy(out.tensor().narrowed(1, token, 1).transposed(1, 2), r.out->tensor());
      ASSERT_EQ(alone.judge(r, t.context), "") << "token " << token;
    }
  }
}

TEST(AttentionCases, B31_RowsBehindTheLastSequence) {
  Random random(seed() + 6);
  for (const auto& [total, heads, dim, cu] :
       {std::tuple(7, 2, 8, std::vector<int32_t>{0, 2, 5}),
        std::tuple(946, 4, 16, std::vector<int32_t>{0, 144, 432, 944}), std::tuple(5, 1, 3, std::vector<int32_t>{0}),
        std::tuple(5, 1, 3, std::vector<int32_t>{0, 0})}) {
    View x(DType::f32, 1, total, heads, dim, Strides::bnsd), out(DType::f32, 1, total, heads, dim, Strides::padded),
        lse(DType::f32, 1, 1, heads, total, Strides::bnsd);
    fill(x.tensor(), Fill::normal, random);
    const ConstTensor tokens = x.tensor().selected(0, 0);
    AttentionInputs in{.query = tokens, .key = tokens, .value = tokens};
    in.cu_seqlens_q = in.cu_seqlens_k =
        ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(cu.size())}, cu.data());
    for (const TestContext& t : contexts_with_threads(2)) {
      fill(out.tensor(), Fill::nan, random);
      ASSERT_EQ(flash_attention_forward(
                    t.context, in,
                    {.out = out.tensor().selected(0, 0), .softmax_lse = lse.tensor().selected(0, 0).selected(0, 0)})
                    .message(),
                "");
      for (int64_t i = 0; i < total * heads * dim; ++i) {
        const double got = get(out.tensor(), i);
        if (i / heads / dim >= cu.back())
          ASSERT_EQ(got, 0) << i;
        else
          ASSERT_TRUE(std::isfinite(got) && got != 0) << i;
      }
      EXPECT_EQ(get(lse.tensor(), total - 1), -kInfinity);
    }
  }
}

// bf16 on every level is close to f32.
TEST(AttentionCases, B38_Bf16OnEveryLevel) {
  Random random(seed() + 7);
  ProblemOptions p;
  p.num_heads = p.num_kv_heads = 2, p.query_len = 64, p.kv_len = 256, p.head_dim = p.value_head_dim = 64;
  Problem wide(p, random);
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  Problem narrow(p, random);
  copy(wide.query(), narrow.query());
  copy(wide.key(), narrow.key());
  copy(wide.value(), narrow.value());
  for (const TestContext& t : contexts()) {
    const Outcome expected = wide.run(t.context), r = narrow.run(t.context);
    double dot = 0, a = 0, b = 0;
    for (int64_t i = 0; i < expected.out->tensor().num_elements(); ++i) {
      const double x = get(expected.out->tensor(), i), y = get(r.out->tensor(), i);
      dot += x * y, a += x * x, b += y * y;
    }
    EXPECT_GE(dot / std::sqrt(a * b), 0.9999) << t.name;
  }
}

// Offsets into a mask beyond 2^32 elements: two rows that far apart, of which a few pages are real.
TEST(AttentionCases, B45_MaskRowsBeyond32Bits) {
  Random random(seed() + 8);
  const int64_t stride = (int64_t{1} << 32) + 64;
  ProblemOptions p;
  p.query_len = 2, p.kv_len = 64, p.head_dim = p.value_head_dim = 8;
  Problem problem(p, random);
  for (const DType dtype : {DType::boolean, DType::bf16}) {
    const LazyMapping memory(stride * size_bytes(dtype) + 4096);
    if (memory.data() == nullptr) GTEST_SKIP() << "the system gives no address space";
    ConstTensor mask = ConstTensor::contiguous(dtype, {2, 64}, memory.data());
    mask.strides[0] = stride;
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 64; ++j) {
        void* at = static_cast<char*>(memory.data()) + (i * stride + j) * size_bytes(dtype);
        set(Tensor::contiguous(dtype, {1}, at), 0,
            dtype == DType::boolean ? j % 3 == i
            : j % 3 == i            ? 0.5
                                    : -kInfinity);
      }
    }
    problem.inputs.mask = problem.inputs.bias = {};
    (dtype == DType::boolean ? problem.inputs.mask : problem.inputs.bias) = mask;
    problem.forget_reference();
    if (dtype == DType::boolean) {
      expect_in_every_context(problem);
    } else {
      p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
      Problem half(p, random);
      half.inputs.bias = mask;
      expect_in_every_context(half);
    }
  }
}

TEST(AttentionCases, B48_MasksPerHeadWithGroupedHeads) {
  Random random(seed() + 9);
  for (const DType dtype : {DType::boolean, DType::f16}) {
    for (const auto& [heads, len] : {std::pair(8, 8), std::pair(6, 40)}) {
      ProblemOptions p;
      p.query_dtype = p.kv_dtype = p.out_dtype = DType::f16;
      p.batch = 3, p.num_heads = heads, p.num_kv_heads = 2, p.query_len = p.kv_len = len;
      p.head_dim = p.value_head_dim = 64;
      Problem problem(p, random);
      const Mask mask(dtype, {3, heads, len, len},
                      [&](int64_t) { return dtype == DType::boolean ? random.chance(0.5) * 1.0 : random.normal(); });
      (dtype == DType::boolean ? problem.inputs.mask : problem.inputs.bias) = mask.tensor;
      expect_in_every_context(problem, 100);
    }
  }
}

// Dropout neither needs the score matrix nor allocates one: the plan says so, and memory_test holds calls to the plan.
TEST(AttentionCases, B57_DropoutNeedsNoMatrix) {
  for (const TestContext& t : contexts_with_threads(2)) {
    AttentionProblem p{.query_len = 32768, .kv_len = 32768, .head_dim = 64, .value_head_dim = 64};
    p.options.dropout.keep_prob = 0.9;
    const int64_t bytes = plan_attention(p, t.context.machine()).scratch_bytes(2);
    EXPECT_LT(bytes, int64_t{32768} * 64 * 4 * 2 + (int64_t{16} << 20)) << t.name;
  }
}

// Elements at any address, however little aligned.
TEST(AttentionCases, B96_UnalignedMemory) {
  Random random(seed() + 10);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ProblemOptions p;
    p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
    p.num_heads = p.num_kv_heads = 2, p.query_len = 14, p.kv_len = 40, p.head_dim = p.value_head_dim = 20;
    p.query_strides = p.key_strides = p.value_strides = p.out_strides = Strides::shifted;
    Problem problem(p, random);
    expect_in_every_context(problem);
  }
}

// Half of the weights are dropped: what is left is scaled up, so that outputs keep their mean; the same seed gives the
// same bits, another one others; keep_prob = 1 is no dropout.
TEST(AttentionDropout, KeepsTheMean) {
  Random random(seed() + 11);
  ProblemOptions p;
  p.num_heads = 8, p.num_kv_heads = 4, p.query_len = 100, p.kv_len = 400;
  p.query_fill = Fill::zeros, p.value_fill = Fill::ones;
  for (const double keep_prob : {0.5, 0.9, 1.0}) {
    p.options.dropout = {.keep_prob = keep_prob, .seed = random.bits()};
    Problem problem(p, random);
    p.options.dropout.seed ^= 1;
    const Problem other(p, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome r = problem.run(t.context);
      ASSERT_EQ(problem.run(t.context).differs_from(r), "");
      double mean = 0;
      const int64_t rows = r.out->tensor().num_elements();
      for (int64_t i = 0; i < rows; ++i) mean += get(r.out->tensor(), i) / static_cast<double>(rows);
      const double deviation = std::sqrt((1 - keep_prob) / keep_prob / static_cast<double>(rows * 400));
      EXPECT_NEAR(mean, 1, 6 * deviation + 1e-6) << t.name;
      EXPECT_EQ(other.run(t.context).differs_from(r).empty(), keep_prob == 1);
    }
  }
}

// Which weights are dropped does not depend on tiles: with values that name their key, row by row.
TEST(AttentionDropout, IsAFunctionOfPositionAlone) {
  Random random(seed() + 12);
  ProblemOptions p;
  p.num_heads = 2, p.query_len = 30, p.kv_len = 23;
  p.options.dropout = {.keep_prob = 0.5, .seed = random.bits(), .offset = 5, .first_key = 2};
  Sums first;
  for (const int64_t block_kv : {0, 1, 3, 8}) {
    for (const AttentionPath path : {AttentionPath::flash, AttentionPath::standard}) {
      p.options.block_kv = block_kv, p.options.path = path;
      const Sums sums = visible_sums(p);
      if (first.empty()) first = sums;
      EXPECT_EQ(sums, first);
    }
  }
  EXPECT_NE(std::count(first.begin(), first.end(), first[0]), 60);
}

}  // namespace
}  // namespace opst::test
