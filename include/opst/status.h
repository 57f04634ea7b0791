// Status and Result: how every operator reports what went wrong.
//
// The library never prints, aborts, exits or throws across its API. A refused call returns a Status whose message names
// the operator, the tensor, the dimension and both values, and has written nothing.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace opst {

enum class StatusCode : uint8_t {
  ok,
  invalid_argument,  // the caller's shapes, dtypes, sizes or options contradict each other or the documented limits
  unsupported,       // well formed, but this build or this machine has no implementation of it
  out_of_memory,     // scratch memory could not be had; nothing was written
  communication,     // a peer process failed or disagreed
  timeout,
  internal,  // a bug in this library
};

// "ok", "invalid_argument", ...
const char* to_string(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  // Copying never throws: where there is no memory for the message, the copy says "out of memory" instead.
  Status(const Status& other) noexcept;
  Status& operator=(const Status& other) noexcept { return *this = Status(other); }
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;

  static Status invalid_argument(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }
  static Status unsupported(std::string message) { return {StatusCode::unsupported, std::move(message)}; }
  static Status internal(std::string message) { return {StatusCode::internal, std::move(message)}; }
  // Fits the small-string buffer, so that reporting exhausted memory needs none.
  static Status out_of_memory() { return {StatusCode::out_of_memory, "out of memory"}; }

  bool ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
};

// A value, or the reason why there is none.
//   Result<Context> context = Context::create();
//   if (!context.ok()) return context.status();
//   use(context.value());
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Status status) : state_(std::move(status)) {}

  bool ok() const { return std::holds_alternative<T>(state_); }
  // The reason; an ok Status where there is a value.
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }
  // Only where ok().
  T& value() { return *std::get_if<T>(&state_); }
  const T& value() const { return *std::get_if<T>(&state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace opst
