// The two phases of a call.
//
// Phase 1 translates the arguments and makes one Call of them, which is called twice: as a rehearsal, in which the core
// checks and plans and ends where it would lease its scratch memory (machine/workspace.h); and in phase 2, in the
// caller's memory. So there is one check and one plan of a call, the core's own.
//
//   opst_status opst_matmul_workspace(...) {
//     FirstPhase phase("opst_matmul", "opst_matmul_workspace", context, workspace_bytes, executor);
//     const ConstTensor tensor = phase.tensor("x", x);
//     ..
//     return phase.plan([=](Context& c) { return matmul(c, tensor, ..); });
//   }
//   opst_status opst_matmul(void* workspace, int64_t workspace_bytes, opst_executor* executor) {
//     return run("opst_matmul", workspace, workspace_bytes, executor);
//   }
#pragma once

#include <utility>

#include "c_api/arguments.h"
#include "core/guarded.h"

namespace opst::c_api {

class FirstPhase : public Arguments {
 public:
  // `second` is the name of the function of phase 2, `first` that of phase 1.
  FirstPhase(const char* second, const char* first, opst_context* context, int64_t* workspace_bytes,
             opst_executor** executor);

  // The executor of a call, once all its arguments are read.
  template <class Body>
  opst_status plan(Body&& body) noexcept {
    if (!ok()) return status();
    return report(function(), guarded([&] { return rehearse(Call(std::forward<Body>(body))); }));
  }

 private:
  Status rehearse(Call call);

  const char* second_;
  opst_context* context_;
  int64_t* workspace_bytes_;
  opst_executor** executor_;
};

opst_status run(const char* function, void* workspace, int64_t workspace_bytes, opst_executor* executor) noexcept;

}  // namespace opst::c_api
