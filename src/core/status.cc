#include "opst/status.h"

namespace opst {

Status::Status(const Status& other) noexcept : code_(other.code_) {
  try {
    message_ = other.message_;
  } catch (...) {
    message_ = out_of_memory().message_;  // fits a small string
  }
}

const char* to_string(StatusCode code) {
  switch (code) {
    case StatusCode::ok:
      return "ok";
    case StatusCode::invalid_argument:
      return "invalid_argument";
    case StatusCode::unsupported:
      return "unsupported";
    case StatusCode::out_of_memory:
      return "out_of_memory";
    case StatusCode::communication:
      return "communication";
    case StatusCode::timeout:
      return "timeout";
    case StatusCode::internal:
      return "internal";
  }
  return "unknown";
}

}  // namespace opst
