#include "opst/status.h"

#include "core/text.h"

namespace opst {

Status::Status(const Status& other) noexcept : code_(other.code_) {
  try {
    message_ = other.message_;
  } catch (...) {
    message_ = out_of_memory().message_;  // fits a small string
  }
}

const char* to_string(StatusCode code) {
  return name_of(code,
                 {"ok", "invalid_argument", "unsupported", "out_of_memory", "communication", "timeout", "internal"});
}

}  // namespace opst
