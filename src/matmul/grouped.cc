// Grouped products: checks, and the operands of each group. The products are the driver's.
#include <functional>
#include <vector>

#include "matmul/groups.h"

namespace opst {

using namespace gemm;

namespace {

// More groups are a mistake, and a list of them with a stride of 0 has no memory of its own.
constexpr int64_t kMostGroups = 1 << 20;

std::string described(const PackedWeight& w) {
  return text(to_string(w.format()), " [", w.n(), ", ", w.k(), "]", w.count() == 1 ? "" : ", a stack");
}
std::string described(const PackedIntWeight& w) {
  return text("int", w.bits(), " [", w.n(), ", ", w.k(), "] in ", w.groups(), " groups",
              w.has_zeros() ? " with zeros" : "", w.count() == 1 ? "" : ", a stack");
}
bool alike(const PackedWeight& a, const PackedWeight& b) {
  return a.format() == b.format() && a.n() == b.n() && a.k() == b.k() && b.count() == 1;
}
bool alike(const PackedIntWeight& a, const PackedIntWeight& b) {
  return a.bits() == b.bits() && a.n() == b.n() && a.k() == b.k() && a.groups() == b.groups() &&
         a.has_zeros() == b.has_zeros() && b.count() == 1;
}

// A stack, or as many weights as there are groups.
template <class Weight>
void check_alike(ShapeCheck& check, const char* name, std::span<const Weight> weights) {
  check.require(!weights.empty(), "no ", name, " is given");
  for (size_t e = 1; check.ok() && e < weights.size(); ++e) {
    const Weight& first = weights[0];
    check.require(
        alike(first, weights[e]) && first.count() == 1, name, " ", e, " is ", [&] { return described(weights[e]); },
        ", but ", name, " 0 is ", [&] { return described(first); });
  }
}

// A call of few rows has little time for hundreds of weights: what an output spans is asked once.
template <class Weight>
void check_none_overlaps(ShapeCheck& check, const char* name, std::span<const Weight> weights,
                         const ConstTensor& written) {
  if (!check.ok() || !written) return;
  const auto* const begin = static_cast<const char*>(written.data);
  const auto* const end = begin + span_bytes(written);
  for (size_t e = 1; e < weights.size(); ++e) {
    const auto* const bytes = static_cast<const char*>(weights[e].data());
    if (std::less_equal<>()(end, bytes) || std::less_equal<>()(bytes + weights[e].size_bytes(), begin)) continue;
    const auto weight = ConstTensor::contiguous(DType::u8, {weights[e].size_bytes()}, bytes);
    check.require(!may_overlap(weight, written), "an output overlaps ", name, " ", e, " in memory, but must not");
  }
}

template <class Weight>
Result<MatmulProblem> check_weights(ShapeCheck& check, std::span<const Weight> weights, const CallTensors& tensors) {
  check_alike(check, "weight", weights);
  if (!check.ok()) return check.status();
  Result<MatmulProblem> problem = check_call(check, weights[0], tensors);
  check_none_overlaps(check, "weight", weights, tensors.out);
  check_none_overlaps(check, "weight", weights, tensors.options.out_scales);
  return check.ok() ? std::move(problem) : check.status();
}

// Every tensor of a call.
Result<MatmulProblem> check_grouped(ShapeCheck& check, const ConstTensor& x, const GroupedWeight& weight,
                                    const GroupList& groups, const Tensor& out, const GroupedMatmulOptions& options) {
  check_group_list(check, groups);
  if (weight.kind() != MatmulWeight::unpacked) check.holds("weight", "groups", count_of(weight));
  const MatmulOptions shared{.bias = options.bias,
                             .activation = options.activation,
                             .residual = options.residual,
                             .activations = options.activations,
                             .batch_invariant = options.batch_invariant,
                             .out_scales = options.out_scales};
  if (is_given(options.smooth_scales)) {
    auto smooth = check.tensor("smooth_scales", options.smooth_scales).dtype({DType::f32});
    const char* const width = takes_two_halves(options.activation) ? "half_n" : "n";
    options.smooth_scales.rank == 1 ? smooth.dims({"groups"}) : smooth.dims({"groups", width});
    check.require(is_given(options.out_scales),
                  "smooth_scales are of an out that is quantised, but out_scales is absent");
  }
  check.require(weight.kind() == MatmulWeight::integers || !is_given(options.x_scales),
                "x_scales belong to int8 or int4 weights");
  if (!check.ok()) return check.status();
  const CallTensors tensors{x, out, shared, options.x_scales, true};
  Result<MatmulProblem> problem = weight.kind() == MatmulWeight::packed ? check_weights(check, weight.packed(), tensors)
                                  : weight.kind() == MatmulWeight::integers
                                      ? check_weights(check, weight.integers(), tensors)
                                      : check_call(check, weight.stack(), tensors);
  if (check.ok() && problem.ok()) check_group_rows(check, groups, problem.value().m);
  return check.ok() ? std::move(problem) : check.status();
}

// The weight of group e among a product's operands.
void give_weight(const GroupedWeight& weight, int64_t e, GroupOperands& to) {
  const auto place = [&](const auto& range, const auto& give) {
    range.size() == 1 ? give(range[0], e) : give(range[static_cast<size_t>(e)], int64_t{0});
  };
  if (weight.kind() == MatmulWeight::packed) {
    place(weight.packed(), [&](const PackedWeight& w, int64_t index) {
      const int64_t bytes = w.count() == 0 ? 0 : w.size_bytes() / w.count();
      to.operands.panels = static_cast<const char*>(w.data()) + index * bytes;
    });
  } else if (weight.kind() == MatmulWeight::integers) {
    place(weight.integers(), [&](const PackedIntWeight& w, int64_t index) { to.operands.ints = int_weight(w, index); });
  } else {
    to.give(to.operands.weight, to.weight, weight.stack().selected(0, e));
  }
}

}  // namespace

int64_t gemm::count_of(const GroupedWeight& weight) {
  if (weight.kind() == MatmulWeight::unpacked) return weight.stack().shape[0];
  const auto of = [](const auto& range) {
    return range.size() == 1 ? range[0].count() : static_cast<int64_t>(range.size());
  };
  return weight.kind() == MatmulWeight::packed ? of(weight.packed()) : of(weight.integers());
}

MatmulProblem gemm::check_grouped_weight(ShapeCheck& check, const char* name, const GroupedWeight& weight,
                                         const WeightDims& dims) {
  if (weight.kind() == MatmulWeight::unpacked) {
    check.tensor(name, weight.stack()).dtype(kFloats).dims({dims.count, dims.n, dims.k});
    if (!check.ok()) return {};
    return {.n = weight.stack().shape[1],
            .k = weight.stack().shape[2],
            .weight = MatmulWeight::unpacked,
            .format = weight_format(weight.stack().dtype)};
  }
  const auto of = [&](const auto& weights) -> MatmulProblem {
    check_alike(check, name, weights);
    if (!check.ok()) return {};
    const auto& first = weights[0];
    check.tensor(name, ConstTensor::contiguous(DType::u8, {first.size_bytes()}, first.data()));
    check.holds(name, dims.count, count_of(weight));
    check.holds(name, dims.n, first.n()).holds(name, dims.k, first.k());
    if constexpr (requires { first.format(); }) {
      return {.n = first.n(), .k = first.k(), .format = first.format()};
    } else {
      return {.n = first.n(),
              .k = first.k(),
              .weight = MatmulWeight::integers,
              .bits = first.bits(),
              .groups = first.groups()};
    }
  };
  return weight.kind() == MatmulWeight::packed ? of(weight.packed()) : of(weight.integers());
}

void gemm::check_apart(ShapeCheck& check, const char* name, const GroupedWeight& weight, const ConstTensor& output) {
  check_none_overlaps(check, name, weight.packed(), output);
  check_none_overlaps(check, name, weight.integers(), output);
}

Status gemm::run_grouped(Context& context, const MatmulProblem& problem, const ConstTensor& x,
                         const GroupedWeight& weight, const GroupList& groups, const Tensor& out,
                         const GroupedMatmulOptions& options, const GroupedPart& part) {
  const int64_t width = out.shape[1];
  const Status status = multiply_groups(context, problem, groups, false, [&](const Group& g, GroupOperands& to) {
    Operands& o = to.operands;
    const auto rows = [&](const auto& tensor) { return tensor.narrowed(0, g.first, g.rows); };
    const int64_t index = part.first_group + g.index;
    if (part.row_of_x == nullptr) {
      o.x = rows(x);
    } else {
      o.x = x;
      o.row_of_x = part.row_of_x + g.first;
    }
    o.out = rows(out);
    give_weight(weight, index, to);
    if (options.x_scales) to.give(o.x_scales, to.x_scales, rows(options.x_scales));
    if (options.bias) to.give(o.bias, to.bias, options.bias.selected(0, index));
    if (options.residual) to.give(o.residual, to.residual, rows(options.residual));
    if (problem.has_out_scales) {
      to.out_scales = rows(options.out_scales);
      o.out_scales = &to.out_scales;
    }
    if (options.smooth_scales) {
      ConstTensor smooth = options.smooth_scales.narrowed(0, index, 1);
      if (smooth.rank == 2) smooth = smooth.selected(0, 0);
      smooth.strides[0] = options.smooth_scales.rank == 2 ? smooth.strides[0] : 0;  // one number for the whole row
      smooth.shape[0] = width;
      to.give(o.smooth_scales, to.smooth_scales, smooth);
    }
  });
  if (!status.ok()) return status;
  const int64_t end = for_each_group(groups, [](const Group&) {});
  clear_rows(context, out, end);
  if (problem.has_out_scales) clear_rows(context, options.out_scales, end);
  return {};
}

void gemm::check_group_list(ShapeCheck& check, const GroupList& groups) {
  check.tensor("group_list", groups.list).dtype({DType::i64, DType::i32}).dims({"groups"});
  check.require(groups.type <= GroupListType::counts, "the type of group_list is ", static_cast<int>(groups.type),
                ", which is no GroupListType");
  const int64_t count = check["groups"];
  check.require(count <= kMostGroups, "group_list has ", count, " groups, but there may be at most ", kMostGroups);
}

void gemm::check_group_rows(ShapeCheck& check, const GroupList& groups, int64_t m) {
  const bool counts = groups.type == GroupListType::counts;
  int64_t end = 0;
  for (int64_t e = 0; check.ok() && e < groups.list.shape[0]; ++e) {
    const int64_t value = index_at(groups.list, e);
    check.require(value >= 0, "group_list[", e, "] is ", value, ", but must not be negative");
    check.require(counts || value >= end, "group_list[", e, "] is ", value, ", but group_list[", e - 1, "] is ", end,
                  ", and ends do not decrease");
    const int64_t left = counts ? m - end : m;
    check.require(value <= left, "group_list[", e, "] is ", value, ", but x has ", left, " rows",
                  counts ? " behind the groups before" : "");
    if (check.ok()) end = counts ? end + value : value;
  }
}

void gemm::clear_rows(Context& context, const Tensor& tensor, int64_t first) {
  const Tensor out = normal_strides(tensor);
  const int64_t columns = out.rank == 1 ? 1 : out.shape[1], stride = out.rank == 1 ? 1 : out.strides[1];
  const int64_t element = size_bytes(out.dtype);
  if (columns == 0 || first >= out.shape[0]) return;
  context.impl().pool.for_each(out.shape[0] - first, rows_per_task(columns), [&](int64_t row, int) {
    clear_elements(static_cast<char*>(out.data) + (first + row) * out.strides[0] * element, stride, columns, element);
  });
}

Status grouped_matmul(Context& context, const ConstTensor& x, const GroupedWeight& weight, const GroupList& groups,
                      const Tensor& out, const GroupedMatmulOptions& options) {
  return checked("grouped_matmul", [&](ShapeCheck& check) -> Status {
    const Result<MatmulProblem> problem = check_grouped(check, x, weight, groups, out, options);
    if (!problem.ok()) return problem.status();
    return run_grouped(context, problem.value(), x, weight, groups, out, options);
  });
}

Status grouped_matmul_swiglu_quant(Context& context, const ConstTensor& x, const ConstTensor& x_scales,
                                   const GroupedWeight& weight, const GroupList& groups, const Tensor& out,
                                   const Tensor& out_scales, const GroupedSwigluQuantOptions& options) {
  return checked("grouped_matmul_swiglu_quant", [&](ShapeCheck& check) -> Status {
    check.require(weight.kind() == MatmulWeight::integers, "the weight is not int8 or int4");
    check.require(x.dtype == DType::i8, "x is ", to_string(x.dtype), ", but must be i8");
    check.require(is_given(x_scales), "x_scales is absent");
    check.require(is_given(out_scales), "out_scales is absent");
    if (!check.ok()) return check.status();
    const GroupedMatmulOptions all{.bias = options.bias,
                                   .activation = Activation::swiglu,
                                   .x_scales = x_scales,
                                   .out_scales = out_scales,
                                   .smooth_scales = options.smooth_scales};
    const Result<MatmulProblem> problem = check_grouped(check, x, weight, groups, out, all);
    if (!problem.ok()) return problem.status();
    return run_grouped(context, problem.value(), x, weight, groups, out, all);
  });
}

Result<GroupedMatmulPlan> plan_grouped_matmul(const MatmulProblem& product, std::span<const int64_t> rows,
                                              const Machine& machine, int num_threads) {
  return guarded([&]() -> Result<GroupedMatmulPlan> {
    GroupedMatmulPlan plan;
    num_threads = std::max(1, num_threads);
    for (const int64_t count : rows) plan.groups += count > 0;
    std::vector<SingleProduct> products;
    const int threads = threads_per_group(plan.groups, num_threads);
    MatmulProblem of_group = product;
    int64_t fewest = 0, most = 0;
    Size tasks = 0;
    for (const int64_t count : rows) {
      if (count <= 0) continue;
      of_group.m = count;
      products.push_back({.plan = make_plan(of_group, machine, threads)});
      const Plan& of = products.back().plan;
      tasks += of.num_tasks();
      if (fewest == 0 || count < fewest) fewest = count, plan.smallest = of;
      if (count > most) most = count, plan.largest = of;
    }
    plan.num_tasks = tasks.value();
    plan.list_bytes = description_bytes(plan.groups);
    Wave wave;
    for (size_t begin = 0; begin < products.size(); begin = wave.end, ++plan.waves) {
      wave = wave_from(products, begin, num_threads);
      if (wave.scratch_bytes(num_threads) <
          (Size(plan.scratch_bytes_per_worker) * num_threads + plan.scratch_bytes_shared).value()) {
        continue;
      }
      plan.scratch_bytes_shared = wave.scratch_bytes_shared;
      plan.scratch_bytes_per_worker = wave.scratch_bytes_per_worker;
    }
    return plan;
  });
}

std::string to_string(const GroupedMatmulPlan& plan) {
  return text(plan.groups, " groups, ", plan.num_tasks, " tasks in ", plan.waves, plan.waves == 1 ? " wave" : " waves",
              ", scratch ", plan.scratch_bytes_shared, " + ", plan.scratch_bytes_per_worker,
              " bytes per thread; fewest rows: ", to_string(plan.smallest), "; most: ", to_string(plan.largest));
}

}  // namespace opst
