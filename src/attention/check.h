// The contract of flash_attention_forward's tensors, checked before anything is written.
#pragma once

#include "opst/attention.h"

namespace opst::attention {

// The problem that the tensors pose, or why they are refused.
Result<AttentionProblem> check_forward(const AttentionInputs& inputs, const AttentionOutputs& outputs,
                                       const AttentionOptions& options);

// Length of sequence b; kv_len where there are no per-sequence lengths. `lengths` has been checked.
int64_t kv_length(const ConstTensor& lengths, int64_t b, int64_t kv_len);

}  // namespace opst::attention
