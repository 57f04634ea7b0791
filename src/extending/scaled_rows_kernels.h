// What attention's kernel table would hold for the source ScaledRows, one table per instruction set level.
#pragma once

#include "attention/kernels.h"

namespace opst::extending {

struct ScaledRowsKernels {
  int64_t lanes;  // numbers per vector
  void (*empty_state)(const attention::QueryBlock& block);
  void (*attend)(const attention::QueryBlock& block, const attention::KvTile* tiles, int64_t num_tiles);
  void (*finish_rows)(const attention::FinishRows& finish);
};

}  // namespace opst::extending
