// The driver's first step: rows of x in the form that a plan's kernel multiplies.
#pragma once

#include <cstdint>
#include <optional>

#include "machine/workspace.h"
#include "matmul/call.h"
#include "matmul/plan.h"

namespace opst::gemm {

// The memory of one worker.
struct WorkerScratch {
  char* decoded;
  float *sums, *second, *widened;
  WorkerScratch(const Plan& plan, char* all, int worker) : decoded(all + worker * plan.scratch_bytes_per_worker) {
    sums = reinterpret_cast<float*>(decoded + plan.decoded_bytes_per_worker);
    second = reinterpret_cast<float*>(decoded + plan.decoded_bytes_per_worker + plan.sums_bytes_per_worker);
    widened = reinterpret_cast<float*>(decoded + plan.scratch_bytes_per_worker - plan.widened_bytes_per_worker);
  }
};

// Rows of x as the product takes them.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;  // elements of the form
  int64_t element_bytes = 0;
  const int32_t* sums = nullptr;
  int64_t groups = 0;
};

// Nothing where the form of x cannot hold one of its rows. `scratch`: the workers' memory.
std::optional<Rows> pack_x(Context& context, const Plan& plan, const Operands& o, Arena& arena, char* scratch);

}  // namespace opst::gemm
