// Groups of rows and the weights of each, in every kind, for tests of grouped products.
#pragma once

#include <deque>
#include <functional>
#include <numeric>

#include "matmul/test_int_weights.h"
#include "opst/grouped_matmul.h"
#include "quant/random_blocks.h"

namespace opst::test {

// A group list in memory of its own: counts of rows as ends or counts, i64 or i32, next to each other or two apart.
struct DrawnList {
  std::vector<int64_t> rows;  // of each group
  GuardedBuffer memory;
  GroupList list;

  DrawnList(const std::vector<int64_t>& rows_, GroupListType type, DType dtype = DType::i64, int64_t stride = 1)
      : rows(rows_), memory(static_cast<int64_t>(rows_.size()) * stride * size_bytes(dtype)) {
    Tensor tensor = memory.tensor(dtype, {static_cast<int64_t>(rows.size()), stride});
    int64_t end = 0;
    for (int64_t e = 0; e < tensor.shape[0]; ++e) {
      const int64_t count = rows[static_cast<size_t>(e)];
      end += count;
      set(tensor, e * stride, static_cast<double>(type == GroupListType::counts ? count : end));
    }
    list = {tensor.selected(1, 0), type};
  }
  DrawnList(const std::vector<int64_t>& rows_, Random& random)
      : DrawnList(rows_, random.pick({GroupListType::ends, GroupListType::counts}),
                  random.pick({DType::i64, DType::i32}), random.integer(1, 2)) {}

  int64_t total() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
};

// Some groups without rows, some with few, some with more than a task's.
inline std::vector<int64_t> drawn_rows(int64_t groups, Random& random) {
  std::vector<int64_t> rows;
  for (int64_t e = 0; e < groups; ++e) {
    rows.push_back(random.pick<int64_t>({0, 0, 1, 2, 3, 5, 8, 9, random.integer(10, 40), random.integer(10, 40)}));
  }
  return rows;
}

// E weights of one kind: as a grouped product takes them, and one of them in a product of its own.
struct Experts {
  std::string about;
  int64_t n = 0, k = 0;
  bool integers = false;  // int8 or int4
  std::function<GroupedWeight()> grouped = {};
  std::function<Status(Context&, int64_t e, const ConstTensor& x, const Tensor& out, const GroupedMatmulOptions&)>
      single = {};
};

inline MatmulOptions float_options(const GroupedMatmulOptions& o) {
  return {.bias = o.bias,
          .activation = o.activation,
          .residual = o.residual,
          .activations = o.activations,
          .batch_invariant = o.batch_invariant,
          .out_scales = o.out_scales};
}
inline IntMatmulOptions int_options(const GroupedMatmulOptions& o) {
  return {.x_scales = o.x_scales,
          .bias = o.bias,
          .activation = o.activation,
          .residual = o.residual,
          .out_scales = o.out_scales};
}

template <class Weight>
void take_packed(Experts& experts, std::vector<Weight> each, Weight stack, bool stacked) {
  const auto weights = std::make_shared<std::vector<Weight>>(std::move(each));
  const auto whole = std::make_shared<Weight>(std::move(stack));
  experts.grouped = [=] { return stacked ? GroupedWeight(*whole) : GroupedWeight(*weights); };
  experts.single = [=](Context& context, int64_t e, const ConstTensor& x, const Tensor& out,
                       const GroupedMatmulOptions& options) {
    const Weight& weight = (*weights)[static_cast<size_t>(e)];
    if constexpr (std::is_same_v<Weight, PackedWeight>)
      return matmul(context, x, weight, out, float_options(options));
    else
      return matmul(context, x, weight, out, int_options(options));
  };
}

// Floats [E, n, k], as they are, packed one by one, or as a stack; transposed: stored as [E, k, n].
inline Experts float_experts(Context& context, int64_t count, int64_t n, int64_t k, DType dtype, Random& random,
                             Fill kind = Fill::normal) {
  Experts experts{.about = to_string(dtype), .n = n, .k = k};
  const auto memory = std::make_shared<GuardedBuffer>(count * n * k * size_bytes(dtype));
  const bool transposed = random.chance(0.5);
  const Tensor stack =
      transposed ? memory->tensor(dtype, {count, k, n}).transposed(1, 2) : memory->tensor(dtype, {count, n, k});
  fill(stack, kind, random);
  if (random.chance(0.4)) {
    experts.about += transposed ? ", stack [E, k, n]" : ", stack [E, n, k]";
    experts.grouped = [=] { return GroupedWeight(stack); };
    experts.single = [memory, stack](Context& c, int64_t e, const ConstTensor& x, const Tensor& out,
                                     const GroupedMatmulOptions& options) {
      return matmul(c, x, ConstTensor(stack.selected(0, e)), out, float_options(options));
    };
    return experts;
  }
  std::vector<PackedWeight> each;
  for (int64_t e = 0; e < count; ++e) each.push_back(packed(context, stack.selected(0, e)));
  Result<PackedWeight> whole = PackedWeight::pack_stack(context, stack);
  EXPECT_TRUE(whole.ok()) << whole.status().message();
  const bool stacked = random.chance(0.5);
  experts.about += stacked ? ", packed stack" : ", packed";
  take_packed(experts, std::move(each), std::move(whole.value()), stacked);
  return experts;
}

inline Experts block_experts(Context& context, int64_t count, int64_t n, int64_t k, QuantFormat format,
                             Random& random) {
  Experts experts{.about = to_string(format), .n = n, .k = k};
  std::deque<std::vector<unsigned char>> bytes;
  std::vector<QuantMatrix> matrices;
  std::vector<PackedWeight> each;
  for (int64_t e = 0; e < count; ++e) {
    bytes.push_back(random_blocks(format, n, k, random));
    matrices.push_back({format, n, k, bytes.back().data(), static_cast<int64_t>(bytes.back().size())});
    each.push_back(std::move(PackedWeight::pack(context, matrices.back()).value()));
  }
  Result<PackedWeight> whole = PackedWeight::pack_stack(context, matrices);
  EXPECT_TRUE(whole.ok()) << whole.status().message();
  const bool stacked = random.chance(0.5);
  experts.about += stacked ? ", packed stack" : ", packed";
  take_packed(experts, std::move(each), std::move(whole.value()), stacked);
  return experts;
}

// q and scales of [E, n, k]; zeros may be absent.
struct IntExperts : Experts {
  int64_t groups = 1;
  std::vector<IntWeight> weights;
};
inline IntExperts int_experts(Context& context, int64_t count, int64_t n, int64_t k, int bits, int64_t groups,
                              bool with_zeros, Random& random) {
  IntExperts experts;
  experts.about = "int" + std::to_string(bits) + " in " + std::to_string(groups) + " groups";
  experts.n = n, experts.k = k, experts.groups = groups, experts.integers = true;
  for (int64_t e = 0; e < count; ++e) experts.weights.emplace_back(bits, n, k, groups, with_zeros, random);
  std::vector<PackedIntWeight> each;
  std::vector<IntMatrix> matrices;
  std::deque<std::vector<int8_t>> bytes;
  for (IntWeight& w : experts.weights) {
    std::vector<int8_t>& q = bytes.emplace_back();
    for (size_t i = 0; i < w.q.size(); i += bits == 8 ? 1 : 2) {
      q.push_back(static_cast<int8_t>(bits == 8 ? w.q[i] : (w.q[i] & 15) | w.q[i + 1] * 16));
    }
    IntMatrix matrix{ConstTensor::contiguous(bits == 8 ? DType::i8 : DType::u8, {n, bits == 8 ? k : k / 2}, q.data()),
                     ConstTensor::contiguous(DType::f32, {n, groups}, w.scales.data())};
    if (with_zeros) {
      std::vector<int8_t>& zeros = bytes.emplace_back(w.zeros.begin(), w.zeros.end());
      matrix.zeros = ConstTensor::contiguous(DType::i8, {n, groups}, zeros.data());
    }
    matrices.push_back(matrix);
    each.push_back(std::move(w.packed));
  }
  Result<PackedIntWeight> whole = PackedIntWeight::pack_stack(context, matrices);
  EXPECT_TRUE(whole.ok()) << whole.status().message();
  const bool stacked = random.chance(0.5);
  experts.about += stacked ? ", packed stack" : ", packed";
  take_packed(experts, std::move(each), std::move(whole.value()), stacked);
  return experts;
}

inline Experts drawn_experts(Context& context, int64_t count, Random& random) {
  const int64_t n = 2 * random.integer(1, 40);
  const double kind = random.uniform(0, 1);
  if (kind < 0.35)
    return float_experts(context, count, n, random.integer(1, 80), random.pick({DType::f32, DType::bf16, DType::f16}),
                         random);
  if (kind < 0.65) {
    const QuantFormat format = kQuantFormats[static_cast<size_t>(random.integer(0, kNumQuantFormats - 1))];
    const int64_t k = std::max<int64_t>(block_values(format), 32) * random.integer(1, 2);
    return block_experts(context, count, n, k, format, random);
  }
  const int64_t groups = random.pick<int64_t>({1, 1, 2, 4});
  return int_experts(context, count, n, groups * 2 * random.integer(1, 20), random.pick({8, 4}), groups,
                     random.chance(0.4), random);
}

}  // namespace opst::test
