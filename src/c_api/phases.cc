#include "c_api/phases.h"

#include <cstring>

namespace opst::c_api {

FirstPhase::FirstPhase(const char* second, const char* first, opst_context* context, int64_t* workspace_bytes,
                       opst_executor** executor)
    : Arguments(first), second_(second), context_(context), workspace_bytes_(workspace_bytes), executor_(executor) {
  result<int64_t>("workspace_bytes", workspace_bytes, 0);
  result<opst_executor*>("executor", executor, nullptr);
  handle("context", context);
}

Status FirstPhase::rehearse(Call call) {
  auto made = std::make_unique<opst_executor>(second_, context_->context, std::move(call));
  WorkspacePool& pool = made->context.impl().workspaces;
  pool.rehearse();
  const Status status = made->call(made->context);
  // A call that has nothing to do never comes to its run.
  if (!status.ok() && !pool.rehearsed()) return status;
  made->workspace_bytes = pool.most_bytes();
  *workspace_bytes_ = made->workspace_bytes;
  *executor_ = made.release();
  return {};
}

opst_status run(const char* function, void* workspace, int64_t workspace_bytes, opst_executor* executor) noexcept {
  Arguments arguments(function);
  arguments.handle("executor", executor);
  if (!arguments.ok()) return arguments.status();
  if (std::strcmp(executor->function, function) != 0) {
    return fail(OPST_INVALID_ARGUMENT, function, "executor is of %s_workspace, but must be of %s_workspace",
                executor->function, function);
  }
  const int64_t needed = executor->workspace_bytes;
  if (workspace_bytes < needed) {
    return fail(OPST_INVALID_ARGUMENT, function,
                "workspace_bytes is %lld, but must be at least %lld, as %s_workspace said",
                static_cast<long long>(workspace_bytes), static_cast<long long>(needed), function);
  }
  if (workspace == nullptr && needed > 0) {
    return fail(OPST_INVALID_ARGUMENT, function, "workspace is NULL, but the call needs %lld bytes",
                static_cast<long long>(needed));
  }
  const auto excess = reinterpret_cast<uintptr_t>(workspace) % OPST_WORKSPACE_ALIGNMENT;
  if (excess != 0) {
    return fail(OPST_INVALID_ARGUMENT, function, "workspace lies %d bytes behind a multiple of %d, but must be at one",
                static_cast<int>(excess), OPST_WORKSPACE_ALIGNMENT);
  }
  if (executor->running.exchange(true, std::memory_order_acquire)) {
    return fail(OPST_INVALID_ARGUMENT, function, "executor is running in another thread");
  }
  opst_status code = OPST_OK;
  if (executor->has_run && !executor->repeatable.load(std::memory_order_relaxed)) {
    code = fail(OPST_INVALID_ARGUMENT, function,
                "executor has run already, but runs once unless opst_executor_set_repeatable is called");
  } else {
    WorkspacePool& pool = executor->context.impl().workspaces;
    pool.lend(workspace, workspace == nullptr ? 0 : workspace_bytes);
    const Status status = guarded([&] { return executor->call(executor->context); });
    executor->has_run = executor->has_run || status.ok();
    code = pool.exhausted() ? fail(OPST_INVALID_ARGUMENT, function,
                                   "workspace_bytes is %lld, but the numbers in lengths, tables or lists have become "
                                   "others since %s_workspace, and need more",
                                   static_cast<long long>(workspace_bytes), function)
                            : report(function, status);
  }
  executor->running.store(false, std::memory_order_release);
  return code;
}

}  // namespace opst::c_api

opst_status opst_executor_set_repeatable(opst_executor* executor) {
  opst::c_api::Arguments arguments("opst_executor_set_repeatable");
  arguments.handle("executor", executor);
  if (arguments.ok()) executor->repeatable.store(true, std::memory_order_relaxed);
  return arguments.status();
}

void opst_executor_destroy(opst_executor* executor) { delete executor; }
