// What a Context holds, for the operators.
#pragma once

#include <memory>

#include "machine/thread_pool.h"
#include "machine/workspace.h"
#include "opst/context.h"

namespace opst {

struct Context::Impl {
  Impl(const Machine& m, int num_threads, InterruptedFunction ask)
      : machine(m), threads(std::make_shared<ThreadPool>(num_threads)), interrupted(ask) {}
  // With the machine and the threads of another context, and scratch memory of its own.
  explicit Impl(const Impl& other) : machine(other.machine), threads(other.threads), interrupted(other.interrupted) {}

  Machine machine;
  std::shared_ptr<ThreadPool> threads;
  ThreadPool& pool = *threads;
  InterruptedFunction interrupted;  // ContextOptions::interrupted
  WorkspacePool workspaces;
  WeightMemory weights;
};

}  // namespace opst
