// Products of groups of rows, each group with a weight of its own: the experts of a mixture.
//
//   rows of group e:   out = residual + activation(x . weight[e]^T + bias[e])
//
// The rows of a group lie next to each other, groups in ascending order (tokens sorted by expert).
//
//   Result<PackedWeight> experts = PackedWeight::pack_stack(context, weights);          // [E, n, k], one buffer
//   Status status = grouped_matmul(context, x, experts.value(), {ends}, out);
//   Status status = grouped_matmul(context, x, gate_up.value(), {counts, GroupListType::counts}, hidden,
//                                  {.activation = Activation::swiglu});
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>

#include "opst/matmul.h"

namespace opst {

enum class GroupListType : uint8_t {
  ends,    // [e] is the first row behind group e: cumulative, without a leading 0
  counts,  // [e] is the number of rows of group e
};

// How many rows each of E groups has; they begin at row 0. Rows behind the last group belong to none. A group may be
// empty, and its weight is not looked at then.
struct GroupList {
  ConstTensor list;  // [E] i64 or i32, any stride
  GroupListType type = GroupListType::ends;
};

// The weights of E groups, not owned: all of one kind, n and k (and format, or bits, groups of k and whether there are
// zeros). What makes one:
//   PackedWeight, PackedIntWeight  a stack of E (pack_stack)
//   a range of E of these          a vector, an array, a span: each packed for itself
//   ConstTensor                    [E, n, k] as it is: f32, bf16, f16 or f64, any strides (a stack [E, k, n] is its
//                                  view transposed(1, 2)). The weights of groups with rows are packed in each call
class GroupedWeight {
 public:
  GroupedWeight(const PackedWeight& stack) : packed_(&stack, 1) {}
  GroupedWeight(const PackedIntWeight& stack) : integers_(&stack, 1), kind_(MatmulWeight::integers) {}
  GroupedWeight(const ConstTensor& stack) : stack_(stack), kind_(MatmulWeight::unpacked) {}
  GroupedWeight(const Tensor& stack) : GroupedWeight(ConstTensor(stack)) {}
  template <class Range>
  requires std::convertible_to<const Range&, std::span<const PackedWeight>> GroupedWeight(const Range& weights)
      : packed_(weights) {}
  template <class Range>
  requires std::convertible_to<const Range&, std::span<const PackedIntWeight>> GroupedWeight(const Range& weights)
      : integers_(weights), kind_(MatmulWeight::integers) {}

  MatmulWeight kind() const { return kind_; }
  std::span<const PackedWeight> packed() const { return packed_; }         // of kind packed
  std::span<const PackedIntWeight> integers() const { return integers_; }  // of kind integers
  const ConstTensor& stack() const { return stack_; }                      // of kind unpacked

 private:
  std::span<const PackedWeight> packed_;
  std::span<const PackedIntWeight> integers_;
  ConstTensor stack_;
  MatmulWeight kind_ = MatmulWeight::packed;
};

// All may be combined, as far as a product with such a weight may have them (MatmulOptions, IntMatmulOptions).
// ConstTensor{} is absent.
struct GroupedMatmulOptions {
  ConstTensor bias = {};  // [E, n]
  Activation activation = Activation::none;
  ConstTensor residual = {};  // out's shape
  ActivationType activations = ActivationType::exact;
  bool batch_invariant = false;
  ConstTensor x_scales = {};  // [m] f32, of an x of i8
  Tensor out_scales = {};     // [m] f32: out is i8, each row quantised by its own scale
  // With out_scales: f32 [E, width of out] or [E]. Rows of group e are multiplied with it before they are quantised.
  ConstTensor smooth_scales = {};
};

//   x       [m, k], out [m, n] (swiglu: [m, n / 2]): dtypes and strides as matmul takes them with such a weight
//   weight  E of [n, k]
//   groups  E of them, m rows together or fewer
// Rows behind the last group become zeros, and so do their out_scales; x and residual are not read there.
// Numerics: the rows of a group have the bits of matmul of these rows and the group's weight, for any threads.
// Memory: an out that is quantised passes through f32 in a tile of a task's whole rows, of at most 1 MB for each thread;
// of a group with fewer such tasks than it has threads to keep busy, or with rows of more than 85 KB, all together.
// Errors: invalid_argument for ranks, dtypes or sizes that disagree, and for a list that decreases, is negative or ends
// behind row m; out_of_memory.
Status grouped_matmul(Context& context, const ConstTensor& x, const GroupedWeight& weight, const GroupList& groups,
                      const Tensor& out, const GroupedMatmulOptions& options = {});

struct GroupedSwigluQuantOptions {
  ConstTensor bias = {};           // [E, n] f32, or with one scale per output i32, which joins the sums
  ConstTensor smooth_scales = {};  // [E, n / 2] or [E] f32
};

// The gate and up product of a quantised mixture, for rows i of group e (GroupedMatmulSwigluQuant):
//   C[i, j] = (sum_t x[i, t] q[e, j, t]) * scale[e, j] * x_scales[i]        bias: of i32 joins the sum, of f32 C
//   S[i, j] = silu(C[i, j]) * C[i, n / 2 + j] (* smooth)
//   out_scales[i] = max_j |S[i, j]| / 127,  out[i, j] = round(S[i, j] / out_scales[i]), ties to even
//   x         [m, k] i8, x_scales [m] f32
//   weight    E of [n, k] int8 or int4, with scales per output or group of k, with zeros or without
//   out       [m, n / 2] i8, out_scales [m] f32. A row of zeros has scale 0; one that is not finite NaN
// It is grouped_matmul with these options; errors by the name grouped_matmul_swiglu_quant.
Status grouped_matmul_swiglu_quant(Context& context, const ConstTensor& x, const ConstTensor& x_scales,
                                   const GroupedWeight& weight, const GroupList& groups, const Tensor& out,
                                   const Tensor& out_scales, const GroupedSwigluQuantOptions& options = {});

// Gradients of sum(grad_out * (x . weight[e]^T + bias[e])), those of each group with the bits of its matmul_backward.
//   grad_out   [m, n], x [m, k], weight [E, n, k]: dtypes, strides and absence as in matmul_backward
//   gradients  x [m, k], zeros behind the last group; weight [E, n, k] and bias [E, n], zeros of an empty group
Status grouped_matmul_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x,
                               const ConstTensor& weight, const GroupList& groups, const MatmulGradients& gradients);

struct GroupedMatmulPlan {
  int64_t groups = 0;     // with rows
  int64_t num_tasks = 0;  // of all groups together
  int64_t waves = 0;      // groups are multiplied so many times apart, where their packed operands are large
  // Of the largest wave, and what each group's description takes.
  int64_t scratch_bytes_shared = 0, scratch_bytes_per_worker = 0, list_bytes = 0;
  MatmulPlan smallest, largest;  // of the groups with the fewest and the most rows
};

// What a call with groups of `rows` rows each does: pure, as plan_matmul. `product` is that of a group, of any m.
// Errors: out_of_memory.
Result<GroupedMatmulPlan> plan_grouped_matmul(const MatmulProblem& product, std::span<const int64_t> rows,
                                              const Machine& machine, int num_threads = 1);
std::string to_string(const GroupedMatmulPlan& plan);

}  // namespace opst
