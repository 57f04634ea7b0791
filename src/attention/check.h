// The contract of the attention operators' tensors, checked before anything is written. An operator checks in three
// stages, so that messages come in the order of its arguments: bind_inputs (dtypes, ranks, sizes), its own outputs,
// pose_problem (values: lengths, options).
#pragma once

#include <span>

#include "attention/sequences.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/pages.h"
#include "machine/thread_pool.h"
#include "opst/attention_backward.h"

namespace opst::attention {

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16, DType::f64};

// Names of the dimensions of a call's tensors, and of their gradients; where paged, key and value are norm pages.
struct CallDims {
  std::span<const char*const> query, out, statistic, key, value;
};
CallDims call_dims(const AttentionInputs& inputs);

// Pages as the kv_cache room checks them, and their names in messages.
inline constexpr kv_cache::CacheNames kPageNames = {"key",          "value",       "key_scales",
                                                    "value_scales", "key_offsets", "value_offsets"};
inline kv_cache::CacheTensors pages_of(const AttentionInputs& in, PageLayout layout) {
  return {layout, in.key, in.value, {in.key_scales, in.value_scales, in.key_offsets, in.value_offsets}};
}
bool has_scales(const AttentionInputs& inputs);

// The scales and offsets of the keys that a checked call may read (i8 and u8 pages): >= 0 and not NaN, finite.
Status check_scales(const char* operator_name, const AttentionInputs& inputs, const AttentionProblem& problem,
                    ThreadPool& pool);

// Binds batch, num_heads, num_kv_heads, head_dim; query_len, kv_len and value_head_dim where tensors have them.
void bind_inputs(ShapeCheck& check, const AttentionInputs& inputs, PageLayout page_layout);

Result<AttentionProblem> pose_problem(ShapeCheck& check, const AttentionInputs& inputs,
                                      const AttentionOptions& options);

// The part of bind_inputs, and of pose_problem, for block masks. The latter returns what a plan depends on; query_len
// is that of the longest sequence, and `width` the keys that columns may show: of the tensor, or the longest sequence.
void bind_block_mask(ShapeCheck& check, const BlockMask& mask);
BlockMaskSizes check_block_mask(ShapeCheck& check, const BlockMask& mask, const AttentionProblem& problem,
                                int64_t query_len, int64_t width);

// The same for trees of draft tokens; of lengths that have been checked.
void bind_tree_mask(ShapeCheck& check, const AttentionInputs& inputs);
void check_tree_mask(ShapeCheck& check, const AttentionInputs& inputs, const AttentionProblem& problem,
                     const Sequences& sequences);

// The same for sparse indices and a rope apart: shapes; what a plan depends on (the rope joins head_dim, which is that of
// query before); what does not go together. Every entry of the lists: check_indices, of tensors of uniform_shapes, with
// index_check_bytes of scratch memory.
void bind_sparse_indices(ShapeCheck& check, const AttentionInputs& inputs);
void describe_sparse_indices(const ShapeCheck& check, const AttentionInputs& inputs, AttentionProblem& problem);
void check_sparse_sizes(ShapeCheck& check, const AttentionInputs& inputs, const AttentionProblem& problem);
int64_t index_check_bytes(const AttentionProblem& problem, int num_threads);
Status check_indices(const char* operator_name, const AttentionInputs& inputs, const AttentionProblem& problem,
                     ThreadPool& pool, void* scratch);

// Refuses options.shared_prefix where the block table does not bear it out; finds what sequences share.
void check_shared_prefix(ShapeCheck& check, const AttentionInputs& inputs, AttentionProblem& problem);

// The problem that inputs and outputs of flash_attention_forward pose, or why they are refused.
Result<AttentionProblem> check_forward(const AttentionInputs& inputs, const AttentionOutputs& outputs,
                                       const AttentionOptions& options);

// The problem that the tensors of flash_attention_backward pose, or why they are refused. Its kv_len is that of the key
// tensor (paged: of the longest sequence), since every key has a gradient. Its shared_blocks are not known yet.
Result<AttentionBackwardProblem> check_backward(const AttentionInputs& inputs, const AttentionSaved& saved,
                                                const AttentionGradients& gradients, const AttentionOptions& options);

// Of all pairs of queries and keys, masked ones too, with sequences as long as the longest: how long a call may take.
Size multiply_adds(const AttentionProblem& problem);

}  // namespace opst::attention
