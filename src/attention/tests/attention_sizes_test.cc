// Sizes that no memory backs: a tensor with strides of 0 needs none, so that a caller can state any number. Whatever is
// stated, a call comes back with a Status and a plan with numbers; a refused call has written nothing.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "core/int_math.h"
#include "opst/attention_backward.h"
#include "testing/contexts.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {
namespace {

constexpr int64_t kTera = int64_t{1} << 40;
// Of an output that has memory, and of an input whose elements are not all one.
constexpr int64_t kMostElements = 48;

int64_t extreme(Random& random) {
  return random.pick<int64_t>({0, 1, 2, 3, INT32_MAX, int64_t{1} << 31, kTera, kMaxBytes - 1, kMaxBytes, kMaxBytes + 1,
                               int64_t{1} << 62, INT64_MAX, -1, INT64_MIN});
}
// One in so many is extreme; the others are small.
int64_t some_size(Random& random, int one_in) {
  return random.integer(1, one_in) == 1 ? extreme(random) : random.integer(0, 4);
}
// An enumerator, now and then one that its type does not have.
template <class Enum>
Enum some_enumerator(Random& random, Enum last) {
  return static_cast<Enum>(random.chance(0.02) ? random.integer(0, 255) : random.integer(0, static_cast<int>(last)));
}
AttentionOptions some_options(Random& random) {
  AttentionOptions o;
  o.causal = random.chance(0.5);
  o.path = some_enumerator(random, AttentionPath::flash);
  o.alignment = some_enumerator(random, CausalAlignment::bottom_right);
  o.alibi_form = some_enumerator(random, AlibiForm::square_root);
  if (random.chance(0.2)) o.window_left = extreme(random);
  if (random.chance(0.2)) o.window_right = extreme(random);
  if (random.chance(0.3)) o.block_q = some_size(random, 10);
  if (random.chance(0.3)) o.block_kv = some_size(random, 10);
  if (random.chance(0.1)) o.alibi_query_start = extreme(random), o.alibi_key_start = extreme(random);
  if (random.chance(0.2)) {
    o.dropout.keep_prob = 0.5;
    o.dropout.first_query = some_size(random, 10), o.dropout.first_key = some_size(random, 10);
    o.dropout.first_head = some_size(random, 10), o.dropout.total_heads = some_size(random, 10);
  }
  return o;
}

// ---- Plans

AttentionProblem some_problem(Random& random) {
  AttentionProblem p;
  const int one_in = random.pick({2, 5, 100});
  for (int64_t* size : {&p.batch, &p.num_heads, &p.num_kv_heads, &p.query_len, &p.kv_len, &p.head_dim,
                        &p.value_head_dim, &p.block_size, &p.key_groups, &p.value_groups}) {
    *size = some_size(random, one_in);
  }
  if (random.chance(0.3)) {
    for (int64_t* size : {&p.block_mask.block_q, &p.block_mask.block_kv, &p.block_mask.batch, &p.block_mask.heads,
                          &p.block_mask.row_blocks, &p.block_mask.entries}) {
      *size = some_size(random, one_in);
    }
  }
  p.query_dtype = some_enumerator(random, DType::f8_e5m2), p.kv_dtype = some_enumerator(random, DType::f8_e5m2);
  p.options = some_options(random);
  p.options.page_layout = some_enumerator(random, PageLayout::panel32);
  for (bool* x : {&p.paged, &p.unit_stride_kv, &p.varlen_q, &p.varlen_k, &p.has_prefix, &p.has_mask, &p.has_bias,
                  &p.has_alibi, &p.has_sinks, &p.has_drop_mask}) {
    *x = random.chance(0.5);
  }
  return p;
}

Machine some_machine(Random& random) {
  Machine m;
  m.isa = random.pick({Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16});
  m.bf16_product = random.pick({Bf16Product::dot, Bf16Product::widen});
  if (random.chance(0.2)) m.cache = {.l1d_bytes = 0, .l2_bytes = 0, .l3_bytes_per_core = 0};
  return m;
}

bool possible(const AttentionProblem& p) {
  for (const int64_t size : {p.batch, p.num_heads, p.num_kv_heads, p.query_len, p.kv_len, p.head_dim, p.value_head_dim,
                             p.block_size, p.key_groups, p.value_groups, p.rope_dim, p.sparse_indices.block_size,
                             p.sparse_indices.count, p.block_mask.block_q, p.block_mask.block_kv, p.block_mask.batch,
                             p.block_mask.heads, p.block_mask.row_blocks, p.block_mask.entries}) {
    if (size < 0 || size > kMaxBytes) return false;
  }
  if (p.block_mask && p.block_mask.block_kv == 0) return false;
  const AttentionOptions& o = p.options;
  if (p.sparse_indices && (p.block_mask || o.path == AttentionPath::standard)) return false;
  return p.rope_dim < p.head_dim && p.head_dim > 0 && p.value_head_dim > 0 && o.block_q >= 0 && o.block_q <= 4096 &&
         o.block_kv >= 0 && o.block_kv <= 4096 && o.path <= AttentionPath::flash &&
         o.alignment <= CausalAlignment::bottom_right && o.alibi_form <= AlibiForm::square_root &&
         o.page_layout <= PageLayout::panel32;
}

// No sum wraps: every number of a plan is from 0 to the limit. (Undefined arithmetic shows under -fsanitize=undefined.)
TEST(AttentionSizes, PlansOfAnyProblem) {
  Random random(seed());
  int with_tasks = 0, at_the_limit = 0;
  for (int n = 0; n < 200'000; ++n) {
    const AttentionProblem p = some_problem(random);
    const Machine m = some_machine(random);
    const AttentionPlan plan = plan_attention(p, m);
    const int64_t numbers[] = {plan.block_q,
                               plan.block_kv,
                               plan.kv_splits,
                               plan.keys_per_split,
                               plan.heads_per_wave,
                               plan.num_tasks,
                               plan.scratch_bytes_shared,
                               plan.scratch_bytes_per_worker,
                               plan.scratch_bytes(1024)};
    for (const int64_t x : numbers) ASSERT_TRUE(x >= 0 && x <= 2 * kMaxBytes) << opst::to_string(plan);
    ASSERT_STRNE(plan.reason, "");
    AttentionBackwardProblem b{.forward = p};
    b.grad_out_dtype = some_enumerator(random, DType::f8_e5m2);
    b.grad_bias = random.chance(0.5), b.grad_sinks = random.chance(0.5);
    b.num_blocks = some_size(random, 4), b.shared_blocks = some_size(random, 4);
    const AttentionBackwardPlan backward = plan_attention_backward(b, m);
    const int64_t backward_numbers[] = {backward.block_q,
                                        backward.block_kv,
                                        backward.heads_per_wave,
                                        backward.num_tasks,
                                        backward.scratch_bytes_shared,
                                        backward.scratch_bytes_per_worker,
                                        backward.scratch_bytes(1024)};
    for (const int64_t x : backward_numbers) ASSERT_TRUE(x >= 0 && x <= kMaxBytes) << opst::to_string(backward);
    if (!possible(p)) {
      ASSERT_EQ(plan.num_tasks + plan.scratch_bytes(64), 0) << plan.reason;
      ASSERT_EQ(backward.num_tasks + backward.scratch_bytes(64), 0);
    } else if (p.batch > 0 && p.query_len > 0 && p.num_kv_heads > 0 && p.num_heads >= p.num_kv_heads &&
               size_bytes(p.query_dtype) > 0 && size_bytes(p.kv_dtype) > 0) {
      ASSERT_GT(plan.num_tasks, 0) << plan.reason;
      ++with_tasks;
      at_the_limit += plan.scratch_bytes(1) == kMaxBytes ? 1 : 0;
    }
  }
  EXPECT_GT(with_tasks, 1000);
  EXPECT_GT(at_the_limit, 100);
}

// ---- Calls

// A named size or product of sizes that may be beyond int64_t.
__int128 product_of(std::initializer_list<int64_t> sizes) {
  __int128 product = 1;
  for (const int64_t size : sizes) {
    if (size <= 0) return 0;
    product = std::min<__int128>(product * size, __int128{1} << 64);
  }
  return product;
}

// Memory of a call's tensors: inputs read zeros that cannot be written, each output has a page of its own.
class CallTensors {
 public:
  explicit CallTensors(Random& random) : random_(random), zeros_(kMostElements * 8) {
    std::memset(zeros_.data(), 0, kMostElements * 8);
    zeros_.make_read_only();
  }
  ConstTensor input(DType dtype, std::initializer_list<int64_t> shape) { return view(dtype, shape, zeros_.data()); }
  // Elements that have memory, or strides of 0: then they share addresses, and the call is refused.
  Tensor output(DType dtype, std::initializer_list<int64_t> shape) {
    outputs_.push_back(std::make_unique<GuardedBuffer>(kMostElements * 8));
    const ConstTensor v = view(dtype, shape, outputs_.back()->data());
    Tensor t = Tensor::contiguous(dtype, {}, outputs_.back()->data());
    t.rank = v.rank;
    std::copy(v.shape, v.shape + kMaxRank, t.shape);
    std::copy(v.strides, v.strides + kMaxRank, t.strides);
    tensors_.push_back(t);
    return t;
  }
  // Either as a function of dtype and shape.
  auto inputs() {
    return [this](DType dtype, std::initializer_list<int64_t> shape) { return input(dtype, shape); };
  }
  auto outputs() {
    return [this](DType dtype, std::initializer_list<int64_t> shape) { return output(dtype, shape); };
  }
  // One number for all, or what a correct call would have; i64.
  ConstTensor integers(int64_t count, int64_t each, bool ascending) {
    const bool repeat = count < 0 || count > 8 || random_.chance(0.3);
    auto& numbers = integers_.emplace_back();
    for (int64_t i = 0; i < (repeat ? 1 : count); ++i) {
      numbers.push_back(random_.chance(0.05)  ? extreme(random_)
                        : ascending && i == 0 ? 0
                        : ascending           ? std::min(numbers.back(), INT64_MAX - 1) + random_.integer(0, 1)
                                              : random_.integer(0, std::clamp<int64_t>(each, 0, 4)));
    }
    numbers.resize(8);  // never without memory
    ConstTensor t = ConstTensor::contiguous(DType::i64, {count}, numbers.data());
    if (repeat) t.strides[0] = 0;
    return t;
  }

  bool within_limit() const { return within_limit_; }
  // Nothing was written, or everything was and is 0 as all that goes in. `statistics` may be anything but unwritten.
  bool untouched() const {
    for (const auto& output : outputs_) {
      const auto* bytes = static_cast<const unsigned char*>(output->data());
      if (std::any_of(bytes, bytes + output->size_bytes(), [](unsigned char c) { return c != 0xff; })) return false;
    }
    return true;
  }
  bool zero(size_t index) const {
    const Tensor& t = tensors_[index];
    const auto* bytes = static_cast<const unsigned char*>(t.data);
    const int64_t count = t.num_elements() * size_bytes(t.dtype);
    return std::all_of(bytes, bytes + count, [](unsigned char c) { return c == 0 || c == 0x80; }) && t.is_contiguous();
  }

 private:
  ConstTensor view(DType dtype, std::initializer_list<int64_t> shape, void* data) {
    ConstTensor t = ConstTensor::contiguous(dtype, shape, data);
    const __int128 elements = product_of(shape);
    __int128 bytes = size_bytes(dtype);
    for (const int64_t size : shape) bytes = std::min<__int128>(bytes * std::max<int64_t>(size, 1), __int128{1} << 64);
    within_limit_ = within_limit_ && bytes < kMaxBytes;
    for (int d = 0; d < t.rank; ++d) {
      if (elements > kMostElements) t.strides[d] = 0;
      if ((t.shape[d] == 1 || elements == 0) && random_.chance(0.3)) t.strides[d] = extreme(random_);
    }
    if (elements == 0 && random_.chance(0.3)) t.data = nullptr;
    return t;
  }

  Random& random_;
  GuardedBuffer zeros_;
  std::vector<std::unique_ptr<GuardedBuffer>> outputs_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<int64_t>> integers_;
  bool within_limit_ = true;
};

struct Sizes {
  int64_t batch, num_heads, num_kv_heads, query_len, kv_len, head_dim, value_head_dim;
  int64_t total_q, total_k, num_blocks, block_size, max_blocks;
};
Sizes some_sizes(Random& random) {
  Sizes s;
  const int one_in = random.pick({3, 10, 40});
  for (int64_t* size : {&s.batch, &s.num_heads, &s.num_kv_heads, &s.query_len, &s.kv_len, &s.head_dim,
                        &s.value_head_dim, &s.total_q, &s.total_k, &s.num_blocks, &s.block_size, &s.max_blocks}) {
    *size = some_size(random, one_in);
  }
  if (random.chance(0.7)) s.num_kv_heads = s.num_heads;
  return s;
}

struct ExtremeCall {
  Sizes s;
  bool varlen_q, varlen_k, paged;
  DType dtype, real;
  AttentionInputs in;
  AttentionOptions options;

  // Tensors of query's, of key's and of a statistic's shape; `make` is tensors.inputs() or tensors.outputs().
  template <class Make>
  auto queries(const Make& make, int64_t dim) const {
    return varlen_q ? make(dtype, {s.total_q, s.num_heads, dim})
                    : make(dtype, {s.batch, s.num_heads, s.query_len, dim});
  }
  template <class Make>
  auto keys(const Make& make, int64_t dim) const {
    return paged      ? make(dtype, {s.num_blocks, s.block_size, s.num_kv_heads, dim})
           : varlen_k ? make(dtype, {s.total_k, s.num_kv_heads, dim})
                      : make(dtype, {s.batch, s.num_kv_heads, s.kv_len, dim});
  }
  template <class Make>
  auto statistic(const Make& make) const {
    return varlen_q ? make(real, {s.num_heads, s.total_q}) : make(real, {s.batch, s.num_heads, s.query_len});
  }

  ExtremeCall(CallTensors& tensors, Random& random)
      : s(some_sizes(random)),
        varlen_q(random.chance(0.3)),
        varlen_k(random.chance(0.3)),
        paged(!varlen_k && random.chance(0.3)),
        dtype(random.pick({DType::f32, DType::bf16, DType::f16, DType::f64})),
        real(dtype == DType::f64 ? DType::f64 : DType::f32),
        options(some_options(random)) {
    const auto input = tensors.inputs();
    in.query = queries(input, s.head_dim);
    in.key = keys(input, s.head_dim), in.value = keys(input, s.value_head_dim);
    const int64_t offsets = s.batch == INT64_MAX ? s.batch : s.batch + 1;
    if (varlen_q) in.cu_seqlens_q = tensors.integers(offsets, 0, true);
    if (varlen_k) in.cu_seqlens_k = tensors.integers(offsets, 0, true);
    if (paged) in.block_table = table(tensors);
    if (paged || random.chance(0.2)) in.kv_lengths = tensors.integers(s.batch, s.kv_len, false);
    if (random.chance(0.2)) in.prefix = tensors.integers(s.batch, 1, false);
    if (random.chance(0.2)) in.drop_mask = tensors.input(DType::u8, {some_size(random, 4)});
    if (random.chance(0.2)) in.sinks = tensors.input(real, {s.num_heads});
  }
  ConstTensor table(CallTensors& tensors) const {
    ConstTensor t = tensors.integers(8, 0, false);
    t.rank = 2;
    t.shape[0] = s.batch, t.shape[1] = s.max_blocks;
    t.strides[0] = t.strides[1] = 0;
    return t;
  }
  // Whether the sizes are legal and so many that the multiplications would take a week.
  bool takes_too_long(const CallTensors& tensors) const {
    const auto largest = [](const ConstTensor& t) {
      const auto* numbers = static_cast<const int64_t*>(t.data);
      return *std::max_element(numbers, numbers + 8);
    };
    const int64_t rows = varlen_q ? largest(in.cu_seqlens_q) : s.query_len;
    const int64_t keys = paged ? largest(in.kv_lengths) : varlen_k ? largest(in.cu_seqlens_k) : s.kv_len;
    return tensors.within_limit() && product_of({s.batch, std::max(s.num_heads, s.num_kv_heads), rows,
                                                 std::max<int64_t>(keys, 1), s.head_dim, s.value_head_dim}) > (1 << 22);
  }
};

struct Counts {
  int ok = 0, refused = 0, skipped = 0;
  void expect_enough_of_each() const {
    std::printf("%d ok, %d refused, %d would take too long\n", ok, refused, skipped);
    EXPECT_GT(ok, 100);
    EXPECT_GT(refused, 1000);
    EXPECT_LT(skipped, refused);
  }
};
void expect_known(const Status& status) {
  const StatusCode code = status.code();
  ASSERT_TRUE(code == StatusCode::invalid_argument || code == StatusCode::unsupported ||
              code == StatusCode::out_of_memory)
      << status.message();
}
Context& some_context(Random& random) {
  const auto& all = contexts_with_threads(2);
  return all[static_cast<size_t>(random.integer(0, static_cast<int64_t>(all.size()) - 1))].context;
}

TEST(AttentionSizes, ForwardOfAnySizes) {
  Random random(seed() + 1);
  Counts counts;
  for (int n = 0; n < 20'000; ++n) {
    CallTensors tensors(random);
    const ExtremeCall c(tensors, random);
    const Sizes& s = c.s;
    AttentionOutputs out;
    out.out = c.queries(tensors.outputs(), s.value_head_dim);
    const bool out_has_memory = product_of({c.varlen_q ? 1 : s.batch, s.num_heads, c.varlen_q ? s.total_q : s.query_len,
                                            s.value_head_dim}) <= kMostElements;
    if (out_has_memory && c.takes_too_long(tensors)) {
      ++counts.skipped;
      continue;
    }
    for (Tensor* t : {&out.softmax_lse, &out.softmax_max, &out.softmax_sum}) {
      if (random.chance(0.3)) *t = c.statistic(tensors.outputs());
    }
    const Status status = flash_attention_forward(some_context(random), c.in, out, c.options);
    if (status.ok()) {
      ASSERT_TRUE(tensors.zero(0)) << "seed " << seed() << " call " << n;
      ++counts.ok;
    } else {
      expect_known(status);
      ASSERT_TRUE(tensors.untouched()) << status.message() << " seed " << seed() << " call " << n;
      ++counts.refused;
    }
  }
  counts.expect_enough_of_each();
}

TEST(AttentionSizes, BackwardOfAnySizes) {
  Random random(seed() + 2);
  Counts counts;
  for (int n = 0; n < 20'000; ++n) {
    CallTensors tensors(random);
    const ExtremeCall c(tensors, random);
    const Sizes& s = c.s;
    AttentionSaved saved;
    const auto input = tensors.inputs();
    saved.out = c.queries(input, s.value_head_dim), saved.grad_out = c.queries(input, s.value_head_dim);
    saved.softmax_lse = c.statistic(input);
    if (c.takes_too_long(tensors)) {
      ++counts.skipped;
      continue;
    }
    AttentionGradients grads;
    const auto output = tensors.outputs();
    if (random.chance(0.5)) grads.grad_query = c.queries(output, s.head_dim);
    if (random.chance(0.5)) grads.grad_key = c.keys(output, s.head_dim);
    if (random.chance(0.5)) grads.grad_value = c.keys(output, s.value_head_dim);
    if (random.chance(0.3)) grads.grad_sinks = tensors.output(c.real, {s.num_heads});
    const Status status = flash_attention_backward(some_context(random), c.in, saved, grads, c.options);
    if (status.ok()) {
      size_t index = 0;
      for (const Tensor* t : {&grads.grad_query, &grads.grad_key, &grads.grad_value, &grads.grad_sinks}) {
        if (t->rank > 0) {
          ASSERT_TRUE(tensors.zero(index)) << "seed " << seed() << " call " << n << " output " << index;
        }
        index += t->rank > 0 ? 1 : 0;
      }
      ++counts.ok;
    } else {
      expect_known(status);
      ASSERT_TRUE(tensors.untouched()) << status.message() << " seed " << seed() << " call " << n;
      ++counts.refused;
    }
  }
  counts.expect_enough_of_each();
}

TEST(AttentionSizes, MergeOfAnySizes) {
  Random random(seed() + 3);
  Counts counts;
  for (int n = 0; n < 20'000; ++n) {
    CallTensors tensors(random);
    const int one_in = random.pick({2, 4, 20});
    const int64_t parts = some_size(random, one_in), heads = some_size(random, one_in),
                  rows = some_size(random, one_in), dim = some_size(random, one_in);
    const DType dtype = random.pick({DType::f32, DType::f64});
    const AttentionParts in = {.out = tensors.input(dtype, {parts, heads, rows, dim}),
                               .softmax_lse = tensors.input(dtype, {parts, heads, rows})};
    AttentionOutputs out = {.out = tensors.output(dtype, {heads, rows, dim})};
    if (random.chance(0.3)) out.softmax_lse = tensors.output(dtype, {heads, rows});
    const Status status = merge_attention(some_context(random), in, out);
    if (status.ok()) {
      ASSERT_TRUE(tensors.zero(0)) << "seed " << seed() << " call " << n;
      ++counts.ok;
    } else {
      expect_known(status);
      ASSERT_TRUE(tensors.untouched()) << status.message() << " seed " << seed() << " call " << n;
      ++counts.refused;
    }
  }
  counts.expect_enough_of_each();
}

}  // namespace
}  // namespace opst::test
