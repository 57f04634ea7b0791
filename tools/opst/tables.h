// The tables that articles on flash attention print, drawn up for this machine: which rows there are, their published
// shape, the shape that is run here, and what of it the memory and the time allow. Pure functions of what is known of
// the machine; bench_tables.cc runs what they say.
//
//   inference, training   2K, 4K .. 128K tokens, batch 4, 32 heads: the forward pass; forward and backward
//   video                 16, 64 and 128 frames of 1024 patches, batch 1: both
//   long                  256K tokens, batch 1: the forward pass; one decoded token
//
// How a row is scaled down: time and memory of both forms are proportional to batch x heads, so batch is 1 and heads as
// many as the row's share of the budget allows. Where one head takes more than its share, rows come cheapest first.
#pragma once

#include <string>
#include <vector>

#include "opst/attention.h"

namespace opst::tools {

enum class TableKind : uint8_t { inference, training, video, long_context };
const char* to_string(TableKind kind);  // inference, training, video, long
inline constexpr TableKind kTableKinds[] = {TableKind::inference, TableKind::training, TableKind::video,
                                            TableKind::long_context};

inline constexpr int64_t kPublishedBatch = 4, kPublishedHeads = 32;

struct TablesOptions {
  std::vector<TableKind> tables = {std::begin(kTableKinds), std::end(kTableKinds)};
  DType dtype = DType::bf16;
  int64_t max_seq = 262144;              // longer rows are left out
  int64_t most_heads = kPublishedHeads;  // that are run
  int64_t head_dim = 128;
  double budget_seconds = 120;
};

// Seconds for each pair of a query and a key of one head.
struct FormRates {
  double forward = 0, training = 0;  // training: forward and backward
};
struct TableLimits {
  double memory_bytes = 0;
  FormRates standard, flash;
  double element_seconds = 0;  // of making and checking tensors, for each of their elements
  double touch_seconds = 0;    // of the first write to memory, for each byte
};

enum class FormState : uint8_t { run, memory, time };
struct FormPlan {
  FormState state = FormState::run;
  double bytes = 0;         // computed: tensors, and matrices of the standard form
  double call_seconds = 0;  // predicted
};

// Something to measure. Rows of several tables may be the same one.
struct TableRun {
  AttentionProblem problem;
  bool train = false;
  bool sparing = true;  // calls of 1 s to 10 s are made once, not three times
  FormPlan standard, flash;

  double pairs() const;  // of queries and keys, of all heads
  // Calls of each form: those that count, fewer where a call of either is long; and those before, where it is short,
  // from whose scratch memory the memory is taken.
  int repeats() const;
  int calls_before() const;
  // Predicted seconds of all that belongs to the run.
  double flash_cost(const TableLimits& limits) const;
  double standard_cost(const TableLimits& limits) const;
};

struct TableRow {
  TableKind table;
  std::string name;
  int64_t published_batch = 1;
  size_t run = 0;  // of Tables::runs
  // Computed for the published shape: the matrices of scores alone, and all.
  double published_score_bytes = 0, published_standard_bytes = 0, published_flash_bytes = 0;
  double times = 1;  // published batch x heads over those that are run
};

struct Tables {
  std::vector<TableRow> rows;
  std::vector<TableRun> runs;
  int left_out = 0;  // rows that are longer than max_seq
};
Tables draw_tables(const TablesOptions& options, const TableLimits& limits);

// Computes the bytes of both forms of run.problem.
void set_bytes(TableRun& run);

// Predicted seconds of the runs behind tables.runs[index] that cost less than it, with what of them is to be run: kept
// for them, so that a long run that comes before them does not take their time.
double kept_seconds(const Tables& tables, size_t index, const TableLimits& limits);

// Before a run, with rates and memory as they have become: what of it these and the seconds that are left allow.
void settle(TableRun& run, const TableLimits& limits, double seconds_left);

}  // namespace opst::tools
