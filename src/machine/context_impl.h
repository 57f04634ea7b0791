// What a Context holds, for the operators.
#pragma once

#include "machine/thread_pool.h"
#include "machine/weight_memory.h"
#include "machine/workspace.h"
#include "opst/context.h"

namespace opst {

struct Context::Impl {
  Impl(const Machine& m, int num_threads) : machine(m), pool(num_threads) {}

  Machine machine;
  ThreadPool pool;
  WorkspacePool workspaces;
  WeightMemory weights;
};

}  // namespace opst
