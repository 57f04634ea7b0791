// The groups of a grouped product, and their products as one call of the driver.
#pragma once

#include "matmul/call.h"
#include "opst/grouped_matmul.h"

namespace opst::gemm {

// Rows [first, first + rows) and the weight `index`.
struct Group {
  int64_t index, first, rows;
};

// body(group) for every group of a checked list, empty ones too, in ascending order. The row behind the last one.
template <class Body>
int64_t for_each_group(const GroupList& groups, const Body& body) {
  int64_t end = 0;
  for (int64_t e = 0; e < groups.list.shape[0]; ++e) {
    const int64_t first = end, value = index_at(groups.list, e);
    end = groups.type == GroupListType::ends ? value : first + value;
    body(Group{e, first, end - first});
  }
  return end;
}

// The list as a tensor [groups], and with `m` rows every number in it.
void check_group_list(ShapeCheck& check, const GroupList& groups);
void check_group_rows(ShapeCheck& check, const GroupList& groups, int64_t m);

// Rows [first, ..) become zeros. out [m] or [m, columns]
void clear_rows(Context& context, const Tensor& out, int64_t first);

// How many weights there are.
int64_t count_of(const GroupedWeight& weight);
// A weight's own checks, by the name `name`: a tensor's type, weights that are alike, none where an output of the check
// lies already. n, k and what else a problem has of a weight.
struct WeightDims {
  const char *count, *n, *k;  // names of its dimensions in the check
};
MatmulProblem check_grouped_weight(ShapeCheck& check, const char* name, const GroupedWeight& weight,
                                   const WeightDims& dims);
// No output may overlap one of several weights. (ShapeCheck knows the first.)
void check_apart(ShapeCheck& check, const char* name, const GroupedWeight& weight, const ConstTensor& output);

// Of a grouped product that is a part of another operator.
struct GroupedPart {
  int64_t first_group = 0;            // group g of the list has weight and bias first_group + g
  const int64_t* row_of_x = nullptr;  // of all rows, as in Operands
};
// A grouped product whose call is checked, and what its problem is known.
Status run_grouped(Context& context, const MatmulProblem& problem, const ConstTensor& x, const GroupedWeight& weight,
                   const GroupList& groups, const Tensor& out, const GroupedMatmulOptions& options,
                   const GroupedPart& part = {});

// The operands of a group's product; those that a call may leave out lie beside them.
struct GroupOperands {
  Operands operands;
  ConstTensor weight, x_scales, bias, residual, smooth_scales;
  Tensor out_scales;

  // Absent: stays null.
  template <class T>
  void give(const T*& operand, T& own, const T& tensor) {
    own = tensor;
    operand = &own;
  }
};

// The memory that the descriptions of so many products take.
inline int64_t description_bytes(int64_t count) {
  return Arena::size_of<SingleProduct>(count) + Arena::size_of<GroupOperands>(count);
}

// The products of all groups that have rows (of_empty: of all) as one call of the driver. describe(group, operands)
// fills in a group's operands, with an x [m, k] and an out [m, n] of any strides; `problem` is that of every group but
// for m and k.
template <class Describe>
Status multiply_groups(Context& context, MatmulProblem problem, const GroupList& groups, bool of_empty,
                       const Describe& describe) {
  int64_t count = 0;
  for_each_group(groups, [&](const Group& group) { count += of_empty || group.rows > 0; });
  if (count == 0) return context.impl().workspaces.ready();
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease_for_plan(description_bytes(count));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  auto* const products = arena.take<SingleProduct>(count);
  auto* const all_operands = arena.take<GroupOperands>(count);
  const int threads = threads_per_group(count, context.num_threads());
  int64_t i = 0;
  for_each_group(groups, [&](const Group& group) {
    if (!of_empty && group.rows == 0) return;
    GroupOperands& of_group = *std::construct_at(all_operands + i);
    describe(group, of_group);
    Operands& operands = of_group.operands;
    make_strides_normal(operands.x);
    make_strides_normal(operands.out);
    problem.m = operands.out.shape[0];
    problem.k = operands.x.shape[1];
    problem.unit_stride_x = operands.x.strides[1] == 1;
    problem.unit_stride_outputs = operands.weight != nullptr && has_unit_stride_outputs(*operands.weight);
    std::construct_at(products + i,
                      SingleProduct{.operands = &operands, .plan = make_plan(problem, context.machine(), threads)});
    ++i;
  });
  return multiply_all(context, problem, {products, static_cast<size_t>(count)});
}

}  // namespace opst::gemm
