// Whether what an AttentionCase computed is right: the rule of the sweeps (attention/judge.h) on sampled rows, and on
// whole gradients.
#pragma once

#include <string>
#include <vector>

#include "attention_backward_case.h"
#include "attention_case.h"

namespace opst::tools {

struct AttentionVerdict {
  bool ok = true;
  int64_t rows = 0;             // compared
  double error = 0, bound = 0;  // of out; the largest, over the whole tensor
  double lse_error = 0, lse_bound = 0;
  std::string message;  // what is wrong, in one line; empty where ok
};

// After data.run by `path`; at most `rows` rows. Everything but out and lse is read from the case's inputs.
AttentionVerdict judge_attention(const Context& context, const AttentionCase& data, AttentionPath path, int64_t rows);

struct GradientVerdict {
  const char* name;
  bool ok;
  double error, bound;
};
// All elements of every gradient.
std::vector<GradientVerdict> judge_gradients(const Context& context, const AttentionCase& forward,
                                             const AttentionBackwardCase& data);

}  // namespace opst::tools
