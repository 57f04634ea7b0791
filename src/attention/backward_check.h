// The contract of flash_attention_backward's tensors, checked before anything is written.
#pragma once

#include "opst/attention_backward.h"

namespace opst::attention {

// The problem that the tensors pose, or why they are refused. Its kv_len is that of the key tensor (paged: of the
// longest sequence), since every key has a gradient. Its shared_blocks are not known yet.
Result<AttentionBackwardProblem> check_backward(const AttentionInputs& inputs, const AttentionSaved& saved,
                                                const AttentionGradients& gradients, const AttentionOptions& options);

// Rows of sequence b in key and value, whatever its kv_lengths. Not of pages.
int64_t key_rows_of(const AttentionInputs& inputs, int64_t b);

}  // namespace opst::attention
