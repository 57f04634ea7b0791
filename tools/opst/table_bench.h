// Measures what tables.h drew up: standard attention (standard_attention.h) and flash attention in turn.
#pragma once

#include <string>

#include "attention_verdict.h"
#include "tables.h"

namespace opst::tools {

struct FormResult {
  FormState state = FormState::time;    // run: measured
  double seconds = -1, q1 = 0, q3 = 0;  // of a call: median and quartiles; negative: not measured
  double bytes = -1;  // tensors, matrices and the scratch memory that the context held after a call; negative: not run
};

struct TableResult {
  FormResult standard, flash;
  int repeats = 0;                                      // calls of each form that count
  double speedup = -1, speedup_q1 = 0, speedup_q3 = 0;  // standard over flash, of neighbouring calls; negative: none
  AttentionVerdict verdict;                             // flash's output against float64, on sampled rows
  // The largest between the two forms' outputs (training: and gradients), over flash's largest element; negative: none.
  double difference = -1;
  double setup_seconds = 0, touch_seconds = 0;  // what else it took: tensors; the standard form's memory
};

// Only the forms whose state is run. A CommandError where flash fails.
TableResult measure_run(Context& context, const TableRun& run);

// Rates out of a short call of each form.
TableLimits measure_limits(Context& context, const TablesOptions& options, double memory_bytes);
// The rates as a run has shown them.
void learn(const TableRun& run, const TableResult& result, TableLimits& limits);

}  // namespace opst::tools
