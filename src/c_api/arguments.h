// The arguments of a C function as the core's values. The first that is wrong becomes the function's error.
#pragma once

#include <cstdint>

#include "c_api/error.h"
#include "c_api/handles.h"
#include "opst/opst.h"
#include "opst/tensor.h"

namespace opst::c_api {

class Arguments {
 public:
  explicit Arguments(const char* function) : function_(function) {}

  bool ok() const { return status_ == OPST_OK; }
  opst_status status() const { return status_; }
  const char* function() const { return function_; }

  // A tensor that must be there, or, if `optional`, Tensor{} where the pointer is NULL. Its sizes and strides are the
  // core's to check; what cannot even be written as a Tensor is refused here.
  Tensor tensor(const char* name, const opst_tensor* tensor, bool optional = false);
  Tensor optional(const char* name, const opst_tensor* given) { return tensor(name, given, true); }

  // A number as an enumerator, from 0 to `last`.
  template <class Enum>
  Enum enumerator(const char* name, int32_t value, Enum last) {
    if (ok() && (value < 0 || value > static_cast<int32_t>(last))) {
      status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s is %d, but must be from 0 to %d", name, value,
                     static_cast<int>(last));
    }
    return ok() ? static_cast<Enum>(value) : Enum{};
  }
  bool flag(const char* name, int32_t value) { return enumerator(name, value, 1) != 0; }

  // A struct that begins with its own size: the defaults where it may be NULL.
  template <class Struct>
  Struct members(const char* name, const Struct* given, const Struct& defaults, bool required = false) {
    if (given == nullptr && required) is_null(name);
    if (!ok() || given == nullptr) return defaults;
    // A struct of a later library is larger. What this one does not know it cannot do.
    if (given->struct_bytes != static_cast<int64_t>(sizeof(Struct))) {
      status_ = fail(OPST_INVALID_ARGUMENT, function_,
                     "%s->struct_bytes is %lld, but must be %zu, as the struct's initial value in opst_types.h says",
                     name, static_cast<long long>(given->struct_bytes), sizeof(Struct));
      return defaults;
    }
    return *given;
  }

  template <class Handle>
  void handle(const char* name, const Handle* given) {
    if (given == nullptr) return is_null(name);
    if (ok() && given->tag != Handle::kTag) {
      status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s is no %s", name, Handle::kName);
    }
  }

  // Where a function writes.
  template <class T>
  void result(const char* name, T* pointer, const T& value_of_failure) {
    if (pointer == nullptr) return is_null(name);
    *pointer = value_of_failure;
  }

  void positive(const char* name, int64_t value);
  // `condition`, or the sentence.
  void require(bool condition, const char* sentence) {
    if (ok() && !condition) status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s", sentence);
  }
  void require(const Status& status) {
    if (ok()) status_ = report(function_, status);
  }

 private:
  void is_null(const char* name) {
    if (ok()) status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s is NULL", name);
  }

  const char* function_;
  opst_status status_ = OPST_OK;
};

}  // namespace opst::c_api
