// Attention, forward and backward: the structs of opst_types.h as those of attention.h.
#include "opst/attention.h"

#include "c_api/phases.h"
#include "opst/attention_backward.h"

using namespace opst;
using c_api::FirstPhase;

static_assert(OPST_BOTTOM_RIGHT == static_cast<int>(CausalAlignment::bottom_right));
static_assert(OPST_PATH_FLASH == static_cast<int>(AttentionPath::flash));
static_assert(OPST_ALIBI_SQUARE_ROOT == static_cast<int>(AlibiForm::square_root));
static_assert(OPST_PAGES_PANEL32 == static_cast<int>(PageLayout::panel32));
static_assert(OPST_UNBOUNDED == kUnbounded && OPST_FIND_SHARED == kFindShared);

namespace {

constexpr char kForward[] = "opst_flash_attention", kForwardPlan[] = "opst_flash_attention_workspace";
constexpr char kBackward[] = "opst_flash_attention_backward",
               kBackwardPlan[] = "opst_flash_attention_backward_workspace";

AttentionInputs inputs_of(FirstPhase& phase, const opst_attention_inputs* given) {
  const opst_attention_inputs in = phase.members("inputs", given, OPST_ATTENTION_INPUTS, true);
  return {.query = phase.tensor("query", in.query),
          .key = phase.tensor("key", in.key),
          .value = phase.tensor("value", in.value),
          .block_table = phase.optional("block_table", in.block_table),
          .kv_lengths = phase.optional("kv_lengths", in.kv_lengths),
          .key_scales = phase.optional("key_scales", in.key_scales),
          .value_scales = phase.optional("value_scales", in.value_scales),
          .key_offsets = phase.optional("key_offsets", in.key_offsets),
          .value_offsets = phase.optional("value_offsets", in.value_offsets),
          .cu_seqlens_q = phase.optional("cu_seqlens_q", in.cu_seqlens_q),
          .cu_seqlens_k = phase.optional("cu_seqlens_k", in.cu_seqlens_k),
          .prefix = phase.optional("prefix", in.prefix),
          .mask = phase.optional("mask", in.mask),
          .bias = phase.optional("bias", in.bias),
          .alibi_slopes = phase.optional("alibi_slopes", in.alibi_slopes),
          .sinks = phase.optional("sinks", in.sinks),
          .drop_mask = phase.optional("drop_mask", in.drop_mask),
          .block_mask = {.row_offsets = phase.optional("block_mask_row_offsets", in.block_mask_row_offsets),
                         .columns = phase.optional("block_mask_columns", in.block_mask_columns),
                         .block_q = in.block_mask_q,
                         .block_kv = in.block_mask_kv},
          .sparse_indices = {.indices = phase.optional("sparse_indices", in.sparse_indices),
                             .block_size = in.sparse_block_size},
          .tree_mask = phase.optional("tree_mask", in.tree_mask),
          .query_rope = phase.optional("query_rope", in.query_rope),
          .key_rope = phase.optional("key_rope", in.key_rope)};
}

AttentionOptions options_of(FirstPhase& phase, const opst_attention_options* given) {
  const opst_attention_options in = phase.members("options", given, OPST_ATTENTION_OPTIONS);
  AttentionOptions options = {
      .causal = phase.flag("options->causal", in.causal),
      .alignment = phase.enumerator("options->alignment", in.alignment, CausalAlignment::bottom_right),
      .path = phase.enumerator("options->path", in.path, AttentionPath::flash),
      .block_q = in.block_q,
      .block_kv = in.block_kv,
      .window_left = in.window_left,
      .window_right = in.window_right,
      .softcap = in.softcap,
      .bias_scale = in.bias_scale,
      .alibi_form = phase.enumerator("options->alibi_form", in.alibi_form, AlibiForm::square_root),
      .alibi_query_start = in.alibi_query_start,
      .alibi_key_start = in.alibi_key_start,
      .page_layout = phase.enumerator("options->page_layout", in.page_layout, PageLayout::panel32),
      .shared_prefix = in.shared_prefix,
      .dropout = {.keep_prob = in.keep_prob,
                  .seed = in.dropout_seed,
                  .offset = in.dropout_offset,
                  .first_query = in.dropout_first_query,
                  .first_key = in.dropout_first_key,
                  .first_head = in.dropout_first_head,
                  .total_heads = in.dropout_total_heads}};
  if (phase.flag("options->has_softmax_scale", in.has_softmax_scale)) options.softmax_scale = in.softmax_scale;
  return options;
}

}  // namespace

opst_status opst_flash_attention_workspace(opst_context* context, const opst_attention_inputs* inputs,
                                           const opst_attention_outputs* outputs, const opst_attention_options* options,
                                           int64_t* workspace_bytes, opst_executor** executor) {
  FirstPhase phase(kForward, kForwardPlan, context, workspace_bytes, executor);
  const AttentionInputs in = inputs_of(phase, inputs);
  const opst_attention_outputs to = phase.members("outputs", outputs, OPST_ATTENTION_OUTPUTS, true);
  const AttentionOutputs out = {.out = phase.tensor("out", to.out),
                                .softmax_lse = phase.optional("softmax_lse", to.softmax_lse),
                                .softmax_max = phase.optional("softmax_max", to.softmax_max),
                                .softmax_sum = phase.optional("softmax_sum", to.softmax_sum)};
  const AttentionOptions chosen = options_of(phase, options);
  return phase.plan([=](Context& c) { return flash_attention_forward(c, in, out, chosen); });
}

opst_status opst_flash_attention(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kForward, workspace, workspace_bytes, executor);
}

opst_status opst_flash_attention_backward_workspace(opst_context* context, const opst_attention_inputs* inputs,
                                                    const opst_attention_saved* saved,
                                                    const opst_attention_gradients* gradients,
                                                    const opst_attention_options* options, int64_t* workspace_bytes,
                                                    opst_executor** executor) {
  FirstPhase phase(kBackward, kBackwardPlan, context, workspace_bytes, executor);
  const AttentionInputs in = inputs_of(phase, inputs);
  const opst_attention_saved from = phase.members("saved", saved, OPST_ATTENTION_SAVED, true);
  const AttentionSaved kept = {.out = phase.tensor("out", from.out),
                               .softmax_lse = phase.optional("softmax_lse", from.softmax_lse),
                               .softmax_max = phase.optional("softmax_max", from.softmax_max),
                               .softmax_sum = phase.optional("softmax_sum", from.softmax_sum),
                               .grad_out = phase.tensor("grad_out", from.grad_out),
                               .grad_lse = phase.optional("grad_lse", from.grad_lse)};
  const opst_attention_gradients to = phase.members("gradients", gradients, OPST_ATTENTION_GRADIENTS, true);
  const AttentionGradients wanted = {.grad_query = phase.optional("grad_query", to.grad_query),
                                     .grad_key = phase.optional("grad_key", to.grad_key),
                                     .grad_value = phase.optional("grad_value", to.grad_value),
                                     .grad_bias = phase.optional("grad_bias", to.grad_bias),
                                     .grad_sinks = phase.optional("grad_sinks", to.grad_sinks),
                                     .grad_query_rope = phase.optional("grad_query_rope", to.grad_query_rope),
                                     .grad_key_rope = phase.optional("grad_key_rope", to.grad_key_rope)};
  const AttentionOptions chosen = options_of(phase, options);
  return phase.plan([=](Context& c) { return flash_attention_backward(c, in, kept, wanted, chosen); });
}

opst_status opst_flash_attention_backward(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
  return c_api::run(kBackward, workspace, workspace_bytes, executor);
}
