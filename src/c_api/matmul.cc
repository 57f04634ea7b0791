// Products, of one weight and of groups.
#include "opst/matmul.h"

#include "c_api/phases.h"
#include "opst/grouped_matmul.h"

using namespace opst;
using c_api::AnyWeight;
using c_api::FirstPhase;

static_assert(OPST_SWIGLU_SWAPPED == static_cast<int>(Activation::swiglu_swapped));
static_assert(OPST_ACTIVATIONS_INT8 == static_cast<int>(ActivationType::int8));
static_assert(OPST_GROUP_COUNTS == static_cast<int>(GroupListType::counts));

namespace {

constexpr char kDense[] = "opst_matmul", kDensePlan[] = "opst_matmul_workspace";
constexpr char kPacked[] = "opst_matmul_packed", kPackedPlan[] = "opst_matmul_packed_workspace";
constexpr char kGrouped[] = "opst_grouped_matmul", kGroupedPlan[] = "opst_grouped_matmul_workspace";
constexpr char kGroupedPacked[] = "opst_grouped_matmul_packed",
               kGroupedPackedPlan[] = "opst_grouped_matmul_packed_workspace";

// All options of any product are those of a grouped one.
GroupedMatmulOptions options_of(FirstPhase& phase, const opst_matmul_options* given) {
  const opst_matmul_options in = phase.members("options", given, OPST_MATMUL_OPTIONS);
  return {.bias = phase.optional("bias", in.bias),
          .activation = phase.enumerator("options->activation", in.activation, Activation::swiglu_swapped),
          .residual = phase.optional("residual", in.residual),
          .activations = phase.enumerator("options->activations", in.activations, ActivationType::int8),
          .batch_invariant = phase.flag("options->batch_invariant", in.batch_invariant),
          .x_scales = phase.optional("x_scales", in.x_scales),
          .out_scales = phase.optional("out_scales", in.out_scales),
          .smooth_scales = phase.optional("smooth_scales", in.smooth_scales)};
}

// Of a product with one weight.
GroupedMatmulOptions single_options_of(FirstPhase& phase, const opst_matmul_options* given) {
  const GroupedMatmulOptions options = options_of(phase, given);
  phase.require(!options.smooth_scales, "smooth_scales is given, but belongs to grouped products");
  return options;
}

MatmulOptions float_options(FirstPhase& phase, const GroupedMatmulOptions& options) {
  phase.require(!options.x_scales, "x_scales is given, but belongs to int8 or int4 weights");
  return {.bias = options.bias,
          .activation = options.activation,
          .residual = options.residual,
          .activations = options.activations,
          .batch_invariant = options.batch_invariant,
          .out_scales = options.out_scales};
}

IntMatmulOptions int_options(FirstPhase& phase, const GroupedMatmulOptions& options) {
  phase.require(options.activations == ActivationType::exact,
                "options->activations is int8, but the weight is int8 or int4, whose x is given as i8");
  return {.x_scales = options.x_scales,
          .bias = options.bias,
          .activation = options.activation,
          .residual = options.residual,
          .out_scales = options.out_scales};
}

GroupList groups_of(FirstPhase& phase, const opst_tensor* group_list, opst_group_list_type type) {
  return {.list = phase.tensor("group_list", group_list),
          .type = phase.enumerator("type", type, GroupListType::counts)};
}

}  // namespace

opst_status opst_matmul_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                  const opst_tensor* out, const opst_matmul_options* options, int64_t* workspace_bytes,
                                  opst_executor** executor) {
  FirstPhase phase(kDense, kDensePlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("x", x), dense = phase.tensor("weight", weight);
  const Tensor to = phase.tensor("out", out);
  const MatmulOptions chosen = float_options(phase, single_options_of(phase, options));
  return phase.plan([=](Context& c) { return matmul(c, from, dense, to, chosen); });
}

opst_status opst_matmul(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kDense, workspace, workspace_bytes, executor);
}

opst_status opst_matmul_packed_workspace(opst_context* context, const opst_tensor* x, const opst_weight* weight,
                                         const opst_tensor* out, const opst_matmul_options* options,
                                         int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kPacked, kPackedPlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("x", x);
  phase.handle("weight", weight);
  const Tensor to = phase.tensor("out", out);
  const GroupedMatmulOptions all = single_options_of(phase, options);
  if (!phase.ok()) return phase.status();
  const std::shared_ptr<const AnyWeight> kept = weight->weight;
  if (std::holds_alternative<PackedWeight>(*kept)) {
    const MatmulOptions chosen = float_options(phase, all);
    return phase.plan([=](Context& c) { return matmul(c, from, std::get<PackedWeight>(*kept), to, chosen); });
  }
  const IntMatmulOptions chosen = int_options(phase, all);
  return phase.plan([=](Context& c) { return matmul(c, from, std::get<PackedIntWeight>(*kept), to, chosen); });
}

opst_status opst_matmul_packed(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kPacked, workspace, workspace_bytes, executor);
}

opst_status opst_grouped_matmul_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                          const opst_tensor* group_list, opst_group_list_type type,
                                          const opst_tensor* out, const opst_matmul_options* options,
                                          int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kGrouped, kGroupedPlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("x", x), stack = phase.tensor("weight", weight);
  const GroupList groups = groups_of(phase, group_list, type);
  const Tensor to = phase.tensor("out", out);
  const GroupedMatmulOptions chosen = options_of(phase, options);
  return phase.plan([=](Context& c) { return grouped_matmul(c, from, stack, groups, to, chosen); });
}

opst_status opst_grouped_matmul(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kGrouped, workspace, workspace_bytes, executor);
}

opst_status opst_grouped_matmul_packed_workspace(opst_context* context, const opst_tensor* x, const opst_weight* weight,
                                                 const opst_tensor* group_list, opst_group_list_type type,
                                                 const opst_tensor* out, const opst_matmul_options* options,
                                                 int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kGroupedPacked, kGroupedPackedPlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("x", x);
  phase.handle("weight", weight);
  const GroupList groups = groups_of(phase, group_list, type);
  const Tensor to = phase.tensor("out", out);
  const GroupedMatmulOptions chosen = options_of(phase, options);
  if (!phase.ok()) return phase.status();
  const std::shared_ptr<const AnyWeight> kept = weight->weight;
  return phase.plan([=](Context& c) {
    return std::visit([&](const auto& stack) { return grouped_matmul(c, from, stack, groups, to, chosen); }, *kept);
  });
}

opst_status opst_grouped_matmul_packed(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kGroupedPacked, workspace, workspace_bytes, executor);
}
