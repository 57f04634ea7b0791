// What a Context holds, for the operators.
#pragma once

#include "machine/thread_pool.h"
#include "machine/workspace.h"
#include "opst/context.h"

namespace opst {

struct Context::Impl {
  Impl(const Machine& m, int num_threads, InterruptedFunction ask) : machine(m), pool(num_threads), interrupted(ask) {}

  Machine machine;
  ThreadPool pool;
  InterruptedFunction interrupted;  // ContextOptions::interrupted
  WorkspacePool workspaces;
  WeightMemory weights;
};

}  // namespace opst
