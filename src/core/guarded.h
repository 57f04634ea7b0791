// The one place where exceptions end. Every public function that may allocate runs its body inside guarded, as
// `return guarded([&]() -> Status { ... });`, or inside checked (core/shape_check.h); or the function is one try block:
//
//   Status load(...) try {
//     ...
//   } catch (...) {
//     return status_of_exception();
//   }
#pragma once

#include <new>
#include <type_traits>
#include <utility>

#include "opst/status.h"

namespace opst {

// The Status of the exception that is being handled. Its message fits into a small string: reporting exhausted memory
// needs no memory.
inline Status status_of_exception() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory();
  } catch (...) {
    return Status::internal("exception");
  }
}

// The Status or Result that `body` returns; what it throws becomes a Status.
template <class Body>
std::invoke_result_t<Body> guarded(Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (...) {
    return status_of_exception();
  }
}

}  // namespace opst
