// The naive column of `opst bench attention`: attention as people write it (testing/naive_attention.h) on the tensors
// of an AttentionCase. Bounded: it is left out where its matrices do not fit, and beyond the length at which one run
// would take longer than a few seconds.
#pragma once

#include <string>

#include "attention_backward_case.h"
#include "attention_case.h"
#include "system_memory.h"
#include "testing/naive_attention.h"

namespace opst::tools {

struct NaiveTime {
  bool offered = true;  // the options can be written as a mask that is added
  bool fits = true;
  double seconds = -1;          // negative: not measured
  double expected_seconds = 0;  // what a run was expected to take that was left out for it
  int64_t bytes = 0;            // matrices and copies

  // "1.20 ms"; "~7.31 s" expected, not run; "no fit"; "-" not offered
  std::string text() const;
  // measured, memory, time or option: why it was not
  const char* state() const;
  nlohmann::ordered_json json() const;  // milliseconds, or null
};

class NaiveBench {
 public:
  NaiveBench(int64_t limit_bytes, bool backward) : limit_bytes_(limit_bytes), backward_(backward) {}

  NaiveTime measure(Context& context, const AttentionCase& data, const AttentionBackwardCase* gradients = nullptr);
  // What the column is, and at which length its matrices reach the limit; one or two lines.
  std::string explanation(const AttentionSetup& setup) const;

 private:
  int64_t limit_bytes_;
  bool backward_;
  double seconds_per_flop_ = 0;  // of the last run
};

}  // namespace opst::tools
