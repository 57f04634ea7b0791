// What attention of a problem is on a described machine: tile, places, traffic of each memory, time of each unit, and the
// length at which memory ends. For `opst plan attention --machine` and `opst plan layer`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "machine_profile.h"
#include "opst/attention.h"
#include "tile_rule.h"

namespace opst::tools {

struct AttentionForm {        // standard or flash
  std::vector<double> bytes;  // that each level of the profile delivers to the one before it
  double matrix_seconds = 0, vector_seconds = 0;
  std::vector<double> level_seconds;
  double seconds = 0;       // predicted
  std::string bound;        // the slowest unit: matrix, vector, or a memory's name
  double memory_bytes = 0;  // inputs, outputs and what the form keeps
  int64_t longest = 0;      // keys and queries at which that fills the main memory
};

struct AttentionOutlook {
  TileSize tile;  // that the prediction is of
  std::string tile_reason;
  TileChoice by_rule;   // sram / heads
  TileChoice one_head;  // sram for one head at a time
  double flops = 0;
  AttentionForm flash, standard;
};

struct OutlookOptions {
  bool train = false;      // and the gradients
  int64_t sram_heads = 0;  // heads whose tiles share the tile memory; 0: all of the problem
};

// `pairs`: visible pairs of a head, summed over the batch.
AttentionOutlook attention_outlook(const AttentionProblem& problem, double pairs, const MachineProfile& machine,
                                   const OutlookOptions& options);

// Scores of all heads in elements of the query's type; one matrix.
double score_bytes(const AttentionProblem& problem);
// Matrices of that size which the standard form keeps: training keeps scores, weights and their gradient.
inline constexpr double kTrainingMatrices = 3;
// Everything that lies in memory at once.
double flash_memory_bytes(const AttentionProblem& problem, bool train);
double standard_memory_bytes(const AttentionProblem& problem, bool train);
// The longest sequence, queries and keys alike, for which bytes(problem) is at most `capacity`.
int64_t longest_that_fits(AttentionProblem problem, double capacity, double (*bytes)(const AttentionProblem&, bool),
                          bool train);

}  // namespace opst::tools
