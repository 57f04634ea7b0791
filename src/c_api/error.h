// The last error of a thread: what opst_last_error() returns.
#pragma once

#include "opst/opst.h"
#include "opst/status.h"

namespace opst::c_api {

// Keeps the sentence "function: ..." and returns the code. Takes no memory.
[[gnu::format(printf, 3, 4)]] opst_status fail(opst_status code, const char* function, const char* format,
                                               ...) noexcept;
// The same of what the core says of a call; ok leaves the last error as it is. The core's name of the operator gives
// way to the function's.
opst_status report(const char* function, const Status& status) noexcept;

}  // namespace opst::c_api
