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

constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

bool is_known(Activation activation) { return activation <= Activation::swiglu_swapped; }
bool is_known(ActivationType type) { return type == ActivationType::exact || type == ActivationType::int8; }

// Checks x, bias, residual and out, beside a weight [n, k] that has been checked.
void check_operands(ShapeCheck& check, std::initializer_list<DType> dtypes, int64_t n, int64_t k, const ConstTensor& x,
                    const Tensor& out, const MatmulOptions& options) {
  check.require(is_known(options.activation), [&] {
    return "activation is " + std::to_string(static_cast<int>(options.activation)) + ", which is no Activation";
  });
  check.require(is_known(options.activations), [&] {
    return "activations is " + std::to_string(static_cast<int>(options.activations)) + ", which is no ActivationType";
  });
  const bool halves = takes_two_halves(options.activation);
  const char* const width = halves ? "half_n" : "n";
  check.tensor("x", x).dtype(dtypes).dims({"m", "k"});
  if (options.bias) check.tensor("bias", *options.bias).dtype(dtypes).dims({"n"});
  // A residual that is the same view as out is checked with out; any other overlap is refused.
  if (options.residual && !same_view(*options.residual, out)) {
    check.tensor("residual", *options.residual).dtype(dtypes).dims({"m", width});
  }
  if (options.out_scales) {
    check.output("out", out).dtype({DType::i8}).dims({"m", width});
    check.output("out_scales", *options.out_scales).dtype({DType::f32}).dims({"m"});
    check.require(x.dtype != DType::f64, "out_scales is given, but products of f64 are not quantised");
  } else {
    check.output("out", out).dtype(dtypes).dims({"m", width});
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
  check_operands(check, kFloats, weight.n(), weight.k(), x, out, options);
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
  if (weight.dtype == DType::f64) {
    check_operands(check, {DType::f64}, n, k, x, out, options);
  } else {
    check_operands(check, kFloats, n, k, x, out, options);
  }
  if (!check.ok()) return check.status();
  MatmulProblem problem = problem_of(x, n, k, options);
  problem.weight = MatmulWeight::unpacked;
  problem.format = weight_format(weight.dtype);
  return problem;
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
  switch (type) {
    case ActivationType::exact:
      return "exact";
    case ActivationType::int8:
      return "int8";
  }
  return "unknown";
}

const char* to_string(Activation activation) {
  switch (activation) {
    case Activation::none:
      return "none";
    case Activation::silu:
      return "silu";
    case Activation::gelu_erf:
      return "gelu_erf";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::swiglu:
      return "swiglu";
    case Activation::swiglu_swapped:
      return "swiglu_swapped";
  }
  return "unknown";
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return guarded([&] { return gemm::check_call(x, weight, out, options); });
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return guarded([&] { return gemm::check_call(x, weight, out, options); });
}

Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options) {
  return guarded([&]() -> Status {
    const Result<MatmulProblem> problem = gemm::check_call(x, weight, out, options);
    if (!problem.ok()) return problem.status();
    gemm::Operands operands = gemm::operands_of(x, out, options);
    operands.panels = weight.data();
    return gemm::multiply(context, problem.value(), operands);
  });
}

Status matmul(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
              const MatmulOptions& options) {
  return guarded([&]() -> Status {
    const Result<MatmulProblem> problem = gemm::check_call(x, weight, out, options);
    if (!problem.ok()) return problem.status();
    gemm::Operands operands = gemm::operands_of(x, out, options);
    operands.weight = normal_strides(weight);
    return gemm::multiply(context, problem.value(), operands);
  });
}

}  // namespace opst
