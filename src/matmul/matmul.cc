// The public functions: each checks its call, makes the problem of it, and hands both to the driver.
#include "opst/matmul.h"

#include <algorithm>
#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "matmul/call.h"
#include "matmul/plan.h"

namespace opst {
namespace gemm {
namespace {

using DTypes = std::initializer_list<DType>;
constexpr DTypes kFloats = {DType::f32, DType::bf16, DType::f16};
constexpr DTypes kF64 = {DType::f64};
constexpr DTypes kIntX = {DType::i8, DType::f32, DType::bf16, DType::f16};
constexpr DTypes kIntOut = {DType::i32, DType::f32, DType::bf16, DType::f16};
constexpr DTypes kIntBias = {DType::f32, DType::bf16, DType::f16, DType::i32};

// What a weight [n, k] may be multiplied with.
struct Partners {
  int64_t n, k;
  DTypes x, bias, residual, out;
  const std::optional<ConstTensor>& x_scales;
};
constexpr std::optional<ConstTensor> kNone = {};

bool is_known(Activation activation) { return activation <= Activation::swiglu_swapped; }
bool is_known(ActivationType type) { return type == ActivationType::exact || type == ActivationType::int8; }

// Checks x, its scales, bias, residual and out, beside a weight that has been checked.
void check_operands(ShapeCheck& check, const Partners& partners, const ConstTensor& x, const Tensor& out,
                    const MatmulOptions& options) {
  const int64_t n = partners.n, k = partners.k;
  check.require(is_known(options.activation), [&] {
    return "activation is " + std::to_string(static_cast<int>(options.activation)) + ", which is no Activation";
  });
  check.require(is_known(options.activations), [&] {
    return "activations is " + std::to_string(static_cast<int>(options.activations)) + ", which is no ActivationType";
  });
  const bool halves = takes_two_halves(options.activation);
  const char* const width = halves ? "half_n" : "n";
  check.tensor("x", x).dtype(partners.x).dims({"m", "k"});
  if (partners.x_scales) check.tensor("x_scales", *partners.x_scales).dtype({DType::f32}).dims({"m"});
  if (options.bias) check.tensor("bias", *options.bias).dtype(partners.bias).dims({"n"});
  // A residual that is the same view as out is checked with out; any other overlap is refused.
  if (options.residual && !same_view(*options.residual, out)) {
    check.tensor("residual", *options.residual).dtype(partners.residual).dims({"m", width});
  }
  if (options.out_scales) {
    check.output("out", out).dtype({DType::i8}).dims({"m", width});
    check.output("out_scales", *options.out_scales).dtype({DType::f32}).dims({"m"});
    check.require(x.dtype != DType::f64, "out_scales is given, but products of f64 are not quantised");
  } else {
    check.output("out", out).dtype(partners.out).dims({"m", width});
  }
  if (!check.ok()) return;
  const auto differs = [](const char* where, int64_t size, const char* name, int64_t expected) {
    return std::string(where) + " is " + std::to_string(size) + ", but the weight has " + name + " = " +
           std::to_string(expected);
  };
  check.require(check["k"] == k, [&] { return differs("x dim 1 (k)", check["k"], "k", k); });
  if (options.bias) {
    check.require(check["n"] == n, [&] {
      return halves ? differs("bias dim 0 (n)", check["n"], "n", n) : differs("out dim 1 (n)", check["n"], "n", n);
    });
  }
  if (halves) {
    check.require(n % 2 == 0, [&] {
      return "the weight has n = " + std::to_string(n) + ", but " + to_string(options.activation) + " needs two halves";
    });
    check.require(check["half_n"] == n / 2, [&] {
      return "out dim 1 (half_n) is " + std::to_string(check["half_n"]) +
             ", but the weight has n = " + std::to_string(n) + ", of which " + to_string(options.activation) +
             " makes half";
    });
  } else {
    check.require(check["n"] == n, [&] { return differs("out dim 1 (n)", check["n"], "n", n); });
  }
}

// The problem of a checked call, but for its weight.
MatmulProblem problem_of(const ConstTensor& x, int64_t n, int64_t k, const MatmulOptions& options) {
  return {.m = x.shape[0],
          .n = n,
          .k = k,
          .x_dtype = x.dtype,
          .unit_stride_x = normal_strides(x).strides[1] == 1,
          .activation = options.activation,
          .activations = options.activations,
          .batch_invariant = options.batch_invariant,
          .has_bias = options.bias.has_value(),
          .has_out_scales = options.out_scales.has_value()};
}

Operands operands_of(const ConstTensor& x, const Tensor& out, const MatmulOptions& options) {
  const auto normal = [](const std::optional<ConstTensor>& tensor) {
    return tensor ? std::optional(normal_strides(*tensor)) : std::nullopt;
  };
  return {.x = normal_strides(x),
          .out = normal_strides(out),
          .bias = normal(options.bias),
          .residual = normal(options.residual),
          .out_scales = options.out_scales};
}

Result<MatmulProblem> check_call(const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                 const MatmulOptions& options) {
  ShapeCheck check("matmul");
  check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
  check_operands(check, {weight.n(), weight.k(), kFloats, kFloats, kFloats, kFloats, kNone}, x, out, options);
  if (!check.ok()) return check.status();
  MatmulProblem problem = problem_of(x, weight.n(), weight.k(), options);
  problem.format = weight.format();
  return problem;
}

Result<MatmulProblem> check_call(const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                                 const MatmulOptions& options) {
  ShapeCheck check("matmul");
  check.tensor("weight", weight)
      .dtype({DType::f32, DType::bf16, DType::f16, DType::f64})
      .dims({"weight_n", "weight_k"});
  if (!check.ok()) return check.status();
  const int64_t n = check["weight_n"], k = check["weight_k"];
  const DTypes floats = weight.dtype == DType::f64 ? kF64 : kFloats;
  check_operands(check, {n, k, floats, floats, floats, floats, kNone}, x, out, options);
  if (!check.ok()) return check.status();
  MatmulProblem problem = problem_of(x, n, k, options);
  problem.weight = MatmulWeight::unpacked;
  problem.format = weight_format(weight.dtype);
  return problem;
}

MatmulOptions shared_options(const IntMatmulOptions& options) {
  return {.bias = options.bias,
          .activation = options.activation,
          .residual = options.residual,
          .out_scales = options.out_scales};
}

Result<MatmulProblem> check_call(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                 const IntMatmulOptions& options) {
  ShapeCheck check("matmul");
  check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
  const bool integers = x.dtype == DType::i8, one_group = weight.groups() == 1;
  const DTypes biases = integers && one_group ? kIntBias : kFloats;
  const MatmulOptions shared = shared_options(options);
  check_operands(check,
                 {weight.n(), weight.k(), kIntX, biases, kFloats, integers ? kIntOut : kFloats, options.x_scales}, x,
                 out, shared);
  check.require(integers || !options.x_scales,
                [&] { return std::string("x_scales belong to an x of i8, but x is ") + to_string(x.dtype); });
  if (out.dtype == DType::i32) {
    check.require(one_group, [&] {
      return "out is i32, but the weight has " + std::to_string(weight.groups()) + " groups, each with its scales";
    });
    check.require(!options.x_scales, "out is i32, which x_scales cannot multiply");
    check.require(!options.bias || options.bias->dtype == DType::i32,
                  [&] { return std::string("out is i32, but bias is ") + to_string(options.bias->dtype); });
    check.require(options.activation == Activation::none, [&] {
      return std::string("out is i32, the bare sums, but activation is ") + to_string(options.activation);
    });
    check.require(!options.residual, "out is i32, the bare sums, to which no residual is added");
  }
  if (!check.ok()) return check.status();
  MatmulProblem problem = problem_of(x, weight.n(), weight.k(), shared);
  problem.weight = MatmulWeight::integers;
  problem.bits = weight.bits();
  problem.groups = weight.groups();
  problem.has_x_scales = options.x_scales.has_value();
  return problem;
}

// A call with a weight of any kind: `place` puts the weight among the operands.
template <class Weight, class Options, class Place>
Status checked_call(Context& context, const ConstTensor& x, const Weight& weight, const Tensor& out,
                    const Options& options, const MatmulOptions& shared, const Place& place) {
  return guarded([&]() -> Status {
    const Result<MatmulProblem> problem = check_call(x, weight, out, options);
    if (!problem.ok()) return problem.status();
    Operands operands = operands_of(x, out, shared);
    place(operands);
    return multiply(context, problem.value(), operands);
  });
}

}  // namespace
}  // namespace gemm

void read_ahead(Context& context, const PackedWeight& weight, Activation activation) {
  // A worker has some microseconds between two parallel regions, and an L2 of its own to fetch into.
  constexpr int64_t kMostBytes = 128 << 10;
  const int threads = context.num_threads();
  if (threads == 1 || weight.size_bytes() == 0 || !gemm::is_known(activation)) return;
  const int64_t halves = gemm::takes_two_halves(activation) ? 2 : 1;
  const int64_t column_bytes = gemm::packed_column_bytes(weight.format(), weight.k());
  const int64_t piece = column_bytes * gemm::columns_per_piece(weight.n() / halves, halves * column_bytes, threads);
  context.impl().pool.read_ahead(weight.data(), piece, std::min(piece, kMostBytes));
}

const char* to_string(ActivationType type) {
  static constexpr const char* kNames[] = {"exact", "int8"};
  return gemm::name_of(kNames, type);
}

const char* to_string(Activation activation) {
  static constexpr const char* kNames[] = {"none", "silu", "gelu_erf", "gelu_tanh", "swiglu", "swiglu_swapped"};
  return gemm::name_of(kNames, activation);
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return guarded([&] { return gemm::check_call(x, weight, out, options); });
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return guarded([&] { return gemm::check_call(x, weight, out, options); });
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                     const IntMatmulOptions& options) {
  return guarded([&] { return gemm::check_call(x, weight, out, options); });
}

Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options) {
  return gemm::checked_call(context, x, weight, out, options, options,
                            [&](gemm::Operands& operands) { operands.panels = weight.data(); });
}

Status matmul(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
              const MatmulOptions& options) {
  return gemm::checked_call(context, x, weight, out, options, options,
                            [&](gemm::Operands& operands) { operands.weight = normal_strides(weight); });
}

Status matmul(Context& context, const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
              const IntMatmulOptions& options) {
  return gemm::checked_call(context, x, weight, out, options, gemm::shared_options(options),
                            [&](gemm::Operands& operands) {
                              operands.ints = gemm::int_weight(weight);
                              if (options.x_scales) operands.x_scales = normal_strides(*options.x_scales);
                            });
}

}  // namespace opst
