// Norms and their gradients.
#include "c_api/phases.h"
#include "opst/rowwise.h"

using namespace opst;
using c_api::FirstPhase;

namespace {

constexpr char kRms[] = "opst_rms_norm", kRmsPlan[] = "opst_rms_norm_workspace";
constexpr char kAddRms[] = "opst_add_rms_norm", kAddRmsPlan[] = "opst_add_rms_norm_workspace";
constexpr char kRmsBackward[] = "opst_rms_norm_backward", kRmsBackwardPlan[] = "opst_rms_norm_backward_workspace";
constexpr char kLayer[] = "opst_layer_norm", kLayerPlan[] = "opst_layer_norm_workspace";
constexpr char kLayerBackward[] = "opst_layer_norm_backward",
               kLayerBackwardPlan[] = "opst_layer_norm_backward_workspace";

}  // namespace

opst_status opst_rms_norm_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight, double eps,
                                    const opst_tensor* out, const opst_tensor* rstd, int64_t* workspace_bytes,
                                    opst_executor** executor) {
  FirstPhase phase(kRms, kRmsPlan, context, workspace_bytes, executor);
  const ConstTensor rows = phase.tensor("x", x), scale = phase.tensor("weight", weight);
  const Tensor to = phase.tensor("out", out);
  const RmsNormOptions options = {.eps = eps, .rstd = phase.optional("rstd", rstd)};
  return phase.plan([=](Context& c) { return rms_norm(c, rows, scale, to, options); });
}

opst_status opst_rms_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kRms, workspace, workspace_bytes, executor);
}

opst_status opst_add_rms_norm_workspace(opst_context* context, const opst_tensor* a, const opst_tensor* b,
                                        const opst_tensor* weight, double eps, const opst_tensor* out,
                                        const opst_tensor* sum, const opst_tensor* rstd, int64_t* workspace_bytes,
                                        opst_executor** executor) {
  FirstPhase phase(kAddRms, kAddRmsPlan, context, workspace_bytes, executor);
  const ConstTensor one = phase.tensor("a", a), other = phase.tensor("b", b), scale = phase.tensor("weight", weight);
  const Tensor to = phase.tensor("out", out), total = phase.tensor("sum", sum);
  const RmsNormOptions options = {.eps = eps, .rstd = phase.optional("rstd", rstd)};
  return phase.plan([=](Context& c) { return add_rms_norm(c, one, other, scale, to, total, options); });
}

opst_status opst_add_rms_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kAddRms, workspace, workspace_bytes, executor);
}

opst_status opst_rms_norm_backward_workspace(opst_context* context, const opst_tensor* grad_out, const opst_tensor* x,
                                             const opst_tensor* weight, double eps, const opst_tensor* grad_x,
                                             const opst_tensor* grad_weight, int64_t* workspace_bytes,
                                             opst_executor** executor) {
  FirstPhase phase(kRmsBackward, kRmsBackwardPlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("grad_out", grad_out), rows = phase.tensor("x", x);
  const ConstTensor scale = phase.tensor("weight", weight);
  const NormGradients to = {.x = phase.optional("grad_x", grad_x),
                            .weight = phase.optional("grad_weight", grad_weight)};
  return phase.plan([=](Context& c) { return rms_norm_backward(c, from, rows, scale, to, {.eps = eps}); });
}

opst_status opst_rms_norm_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kRmsBackward, workspace, workspace_bytes, executor);
}

opst_status opst_layer_norm_workspace(opst_context* context, const opst_tensor* x, const opst_tensor* weight,
                                      const opst_tensor* bias, double eps, const opst_tensor* out,
                                      const opst_tensor* mean, const opst_tensor* rstd, int64_t* workspace_bytes,
                                      opst_executor** executor) {
  FirstPhase phase(kLayer, kLayerPlan, context, workspace_bytes, executor);
  const ConstTensor rows = phase.tensor("x", x);
  const Tensor to = phase.tensor("out", out);
  const LayerNormOptions options = {.eps = eps,
                                    .weight = phase.optional("weight", weight),
                                    .bias = phase.optional("bias", bias),
                                    .mean = phase.optional("mean", mean),
                                    .rstd = phase.optional("rstd", rstd)};
  return phase.plan([=](Context& c) { return layer_norm(c, rows, to, options); });
}

opst_status opst_layer_norm(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kLayer, workspace, workspace_bytes, executor);
}

opst_status opst_layer_norm_backward_workspace(opst_context* context, const opst_tensor* grad_out, const opst_tensor* x,
                                               const opst_tensor* weight, double eps, const opst_tensor* grad_x,
                                               const opst_tensor* grad_weight, const opst_tensor* grad_bias,
                                               int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kLayerBackward, kLayerBackwardPlan, context, workspace_bytes, executor);
  const ConstTensor from = phase.tensor("grad_out", grad_out), rows = phase.tensor("x", x);
  const LayerNormOptions options = {.eps = eps, .weight = phase.optional("weight", weight)};
  const NormGradients to = {.x = phase.optional("grad_x", grad_x),
                            .weight = phase.optional("grad_weight", grad_weight),
                            .bias = phase.optional("grad_bias", grad_bias)};
  return phase.plan([=](Context& c) { return layer_norm_backward(c, from, rows, to, options); });
}

opst_status opst_layer_norm_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kLayerBackward, workspace, workspace_bytes, executor);
}
