// guarded: the one place where exceptions end. Every public function that may allocate runs its body inside it.
//
//   Status scatter(...) {
//     return guarded([&]() -> Status { ... });
//   }
#pragma once

#include <new>
#include <type_traits>
#include <utility>

#include "opst/status.h"

namespace opst {

// The Status or Result that `body` returns; what it throws becomes a Status. The messages fit into a small string, so
// that reporting exhausted memory needs none.
template <class Body>
std::invoke_result_t<Body> guarded(Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory();
  } catch (...) {
    return Status::internal("exception");
  }
}

}  // namespace opst
