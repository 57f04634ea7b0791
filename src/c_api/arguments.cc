#include "c_api/arguments.h"

namespace opst::c_api {

Tensor Arguments::tensor(const char* name, const opst_tensor* given, bool optional) {
  Tensor tensor;
  if (given == nullptr && !optional) is_null(name);
  if (!ok() || given == nullptr) return tensor;
  const auto refuse = [&](const char* what, int value, int last) {
    status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s %s is %d, but must be from 0 to %d", name, what, value, last);
    return Tensor();
  };
  constexpr int kLast = static_cast<int>(DType::f8_e5m2);
  if (given->dtype < 0 || given->dtype > kLast) return refuse("dtype", given->dtype, kLast);
  if (given->rank < 0 || given->rank > kMaxRank) return refuse("rank", given->rank, kMaxRank);
  tensor.dtype = static_cast<DType>(given->dtype);
  tensor.rank = given->rank;
  for (int i = 0; i < tensor.rank; ++i) {
    tensor.shape[i] = given->shape[i];
    tensor.strides[i] = given->strides[i];
  }
  tensor.data = given->data;
  // To the core an optional tensor without data is absent, which here a NULL pointer says.
  if (tensor.data == nullptr && tensor.num_elements() != 0) {
    status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s data is NULL, but its shape has elements", name);
  }
  return tensor;
}

void Arguments::positive(const char* name, int64_t value) {
  if (!ok() || value > 0) return;
  status_ = fail(OPST_INVALID_ARGUMENT, function_, "%s is %lld, but must be > 0", name, static_cast<long long>(value));
}

}  // namespace opst::c_api
