#include "c_api/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace opst::c_api {
namespace {

// One sentence of a thread. Longer ones are cut.
thread_local char last_error[1024] = "";

}  // namespace

opst_status fail(opst_status code, const char* function, const char* format, ...) noexcept {
  const int length = std::snprintf(last_error, sizeof(last_error), "%s: ", function);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error + length, sizeof(last_error) - static_cast<size_t>(length), format, arguments);
  va_end(arguments);
  return code;
}

opst_status report(const char* function, const Status& status) noexcept {
  if (status.ok()) return OPST_OK;
  const char* message = status.message().c_str();
  const size_t name = std::strspn(message, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:");
  if (name > 1 && message[name - 1] == ':' && message[name] == ' ') message += name + 1;
  return fail(static_cast<opst_status>(status.code()), function, "%s", message);
}

}  // namespace opst::c_api

const char* opst_version(void) { return OPST_VERSION; }

const char* opst_last_error(void) { return opst::c_api::last_error; }

const char* opst_status_name(opst_status status) {
  if (status < OPST_OK || status > OPST_INTERNAL) return "unknown";
  return opst::to_string(static_cast<opst::StatusCode>(status));
}
