// The public functions: each checks its call, makes the problem of it, and hands both to the driver.
#include "opst/matmul.h"

#include <algorithm>

#include "core/guarded.h"
#include "core/shape_check.h"
#include "matmul/call.h"

namespace opst {

using namespace gemm;

namespace {

constexpr DTypes kIntX = {DType::i8, DType::f32, DType::bf16, DType::f16};
constexpr DTypes kIntOut = {DType::i32, DType::f32, DType::bf16, DType::f16};
constexpr DTypes kIntBias = {DType::f32, DType::bf16, DType::f16, DType::i32};

// The types that a weight may be multiplied with.
struct Partners {
  DTypes x, bias, residual, out;
};

bool is_known(Activation activation) { return activation <= Activation::swiglu_swapped; }

// Checks x, its scales, bias, residual and out, beside a weight that has been checked and whose part of the problem is
// given; the whole problem.
Result<MatmulProblem> check_operands(ShapeCheck& check, MatmulProblem problem, const Partners& partners,
                                     const CallTensors& call) {
  const auto& [x, out, options, x_scales, grouped] = call;
  const int64_t n = problem.n;
  check.require(is_known(options.activation), "activation is ", static_cast<int>(options.activation),
                ", which is no Activation");
  check.require(options.activations <= ActivationType::int8, "activations is ", static_cast<int>(options.activations),
                ", which is no ActivationType");
  const bool halves = takes_two_halves(options.activation);
  const char* const width = halves ? "half_n" : "n";
  check.tensor("x", x).dtype(partners.x).dims({"m", "k"});
  if (is_given(x_scales)) check.tensor("x_scales", x_scales).dtype({DType::f32}).dims({"m"});
  if (is_given(options.bias)) {
    auto bias = check.tensor("bias", options.bias).dtype(partners.bias);
    grouped ? bias.dims({"groups", "n"}) : bias.dims({"n"});
  }
  // A residual that is the same view as an out of floats is checked with out; any other overlap is refused.
  if (is_given(options.residual) && (is_given(options.out_scales) || !same_view(options.residual, out))) {
    check.tensor("residual", options.residual).dtype(partners.residual).dims({"m", width});
  }
  if (is_given(options.out_scales)) {
    check.output("out", out).dtype({DType::i8}).dims({"m", width});
    check.output("out_scales", options.out_scales).dtype({DType::f32}).dims({"m"});
    check.require(x.dtype != DType::f64, "out_scales is given, but products of f64 are not quantised");
  } else {
    check.output("out", out).dtype(partners.out).dims({"m", width});
  }
  if (!check.ok()) return check.status();
  const auto agrees = [&](const char* where, const char* name, int64_t expected) {
    const int64_t size = check[name];
    check.require(size == expected, where, " is ", size, ", but the weight has ", name, " = ", expected);
  };
  agrees("x dim 1 (k)", "k", problem.k);
  const char* const bias = grouped ? "bias dim 1 (n)" : "bias dim 0 (n)";
  if (!halves || is_given(options.bias)) agrees(halves ? bias : "out dim 1 (n)", "n", n);
  if (halves) {
    const char* const activation = to_string(options.activation);
    const int64_t half_n = check["half_n"];
    check.require(n % 2 == 0, "the weight has n = ", n, ", but ", activation, " needs two halves");
    check.require(half_n == n / 2, "out dim 1 (half_n) is ", half_n, ", but the weight has n = ", n, ", of which ",
                  activation, " makes half");
  }
  if (!check.ok()) return check.status();
  problem.m = x.shape[0];
  problem.x_dtype = x.dtype;
  problem.unit_stride_x = normal_strides(x).strides[1] == 1;
  problem.activation = options.activation;
  problem.activations = options.activations;
  problem.batch_invariant = options.batch_invariant;
  problem.has_bias = static_cast<bool>(options.bias);
  problem.has_x_scales = static_cast<bool>(x_scales);
  problem.has_out_scales = is_given(options.out_scales);
  return problem;
}

// A packed weight: of one matrix, unless the call is grouped.
template <class Weight>
void check_packed(ShapeCheck& check, const Weight& weight, bool grouped) {
  check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
  check.require(grouped || weight.count() == 1, "the weight is a stack of ", weight.count(),
                " matrices, of which grouped_matmul makes products");
}

MatmulOptions shared_options(const IntMatmulOptions& options) {
  return {.bias = options.bias,
          .activation = options.activation,
          .residual = options.residual,
          .out_scales = options.out_scales};
}

// A call with a weight of any kind: `place` puts the weight, and what only such a call has, among the operands.
template <class Weight, class Options, class Place>
Status checked_call(Context& context, const ConstTensor& x, const Weight& weight, const Tensor& out,
                    const Options& options, const Place& place) {
  return guarded([&]() -> Status {
    const Result<MatmulProblem> problem = matmul_problem(x, weight, out, options);
    if (!problem.ok()) return problem.status();
    const auto given = [](const auto& tensor) { return tensor ? &tensor : nullptr; };
    Operands operands{.x = normal_strides(x),
                      .out = normal_strides(out),
                      .bias = given(options.bias),
                      .residual = given(options.residual),
                      .out_scales = &options.out_scales};
    place(operands);
    return multiply(context, problem.value(), operands);
  });
}

}  // namespace

void read_ahead(Context& context, const PackedWeight& weight, Activation activation) {
  // A worker has some microseconds between two parallel regions, and an L2 of its own to fetch into.
  constexpr int64_t kMostBytes = 128 << 10;
  const int threads = context.num_threads();
  if (threads == 1 || weight.size_bytes() == 0 || !is_known(activation)) return;
  const Plan plan =
      make_plan({.m = 1, .n = weight.n(), .k = weight.k(), .format = weight.format(), .activation = activation},
                context.machine(), threads);
  const int64_t piece = plan.column_bytes * plan.columns_per_task;
  context.impl().pool.read_ahead(weight.data(), piece, std::min(piece, kMostBytes));
}

const char* to_string(ActivationType type) { return name_of(type, {"exact", "int8"}); }

const char* to_string(Activation activation) {
  return name_of(activation, {"none", "silu", "gelu_erf", "gelu_tanh", "swiglu", "swiglu_swapped"});
}

Result<MatmulProblem> gemm::check_call(ShapeCheck& check, const PackedWeight& weight, const CallTensors& tensors) {
  check_packed(check, weight, tensors.grouped);
  return check_operands(check, {.n = weight.n(), .k = weight.k(), .format = weight.format()},
                        {kFloats, kFloats, kFloats, kFloats}, tensors);
}

Result<MatmulProblem> gemm::check_call(ShapeCheck& check, const ConstTensor& weight, const CallTensors& tensors) {
  auto part = check.tensor("weight", weight).dtype({DType::f32, DType::bf16, DType::f16, DType::f64});
  tensors.grouped ? part.dims({"groups", "weight_n", "weight_k"}) : part.dims({"weight_n", "weight_k"});
  if (!check.ok()) return check.status();
  const DTypes floats = weight.dtype == DType::f64 ? kF64 : kFloats;
  return check_operands(check,
                        {.n = check["weight_n"],
                         .k = check["weight_k"],
                         .weight = MatmulWeight::unpacked,
                         .format = weight_format(weight.dtype),
                         .unit_stride_outputs = !tensors.grouped && has_unit_stride_outputs(weight)},
                        {floats, floats, floats, floats}, tensors);
}

Result<MatmulProblem> gemm::check_call(ShapeCheck& check, const PackedIntWeight& weight, const CallTensors& tensors) {
  const auto& [x, out, options, x_scales, grouped] = tensors;
  check_packed(check, weight, grouped);
  const bool integers = x.dtype == DType::i8, one_group = weight.groups() == 1;
  Result<MatmulProblem> problem = check_operands(
      check,
      {.n = weight.n(),
       .k = weight.k(),
       .weight = MatmulWeight::integers,
       .bits = weight.bits(),
       .groups = weight.groups()},
      {kIntX, integers && one_group ? kIntBias : kFloats, kFloats, integers ? kIntOut : kFloats}, tensors);
  check.require(integers || !x_scales, "x_scales belong to an x of i8, but x is ", to_string(x.dtype));
  if (out.dtype == DType::i32) {
    check.require(one_group, "out is i32, but the weight has ", weight.groups(), " groups, each with its scales");
    check.require(!x_scales, "out is i32, which x_scales cannot multiply");
    check.require(!options.bias || options.bias.dtype == DType::i32, "out is i32, but bias is ",
                  to_string(options.bias.dtype));
    check.require(options.activation == Activation::none, "out is i32, the bare sums, but activation is ",
                  to_string(options.activation));
    check.require(!options.residual, "out is i32, the bare sums, to which no residual is added");
  }
  return check.ok() ? std::move(problem) : check.status();
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return checked("matmul", [&](ShapeCheck& check) { return check_call(check, weight, {x, out, options}); });
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                                     const MatmulOptions& options) {
  return checked("matmul", [&](ShapeCheck& check) { return check_call(check, weight, {x, out, options}); });
}

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                     const IntMatmulOptions& options) {
  return checked("matmul", [&](ShapeCheck& check) {
    const MatmulOptions shared = shared_options(options);
    return check_call(check, weight, {x, out, shared, options.x_scales});
  });
}

Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options) {
  return checked_call(context, x, weight, out, options, [&](Operands& operands) { operands.panels = weight.data(); });
}

Status matmul(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
              const MatmulOptions& options) {
  return checked_call(context, x, weight, out, options, [&](Operands& operands) { operands.weight = &weight; });
}

Status matmul(Context& context, const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
              const IntMatmulOptions& options) {
  return checked_call(context, x, weight, out, options, [&](Operands& operands) {
    operands.ints = int_weight(weight);
    if (options.x_scales) operands.x_scales = &options.x_scales;
  });
}

}  // namespace opst
