#include "testing/elements.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/convert.h"

namespace opst::test {
namespace {

template <class T>
T clamped(double value) {
  if (std::isnan(value)) return 0;
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(std::nearbyint(value));
}

// Calls f with a null pointer to the C++ type of a dtype; bytes of no dtype are u8.
template <class F>
auto with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    case DType::f64:
      return f(static_cast<double*>(nullptr));
    case DType::bf16:
      return f(static_cast<bf16*>(nullptr));
    case DType::f16:
      return f(static_cast<f16*>(nullptr));
    case DType::f8_e4m3:
      return f(static_cast<f8_e4m3*>(nullptr));
    case DType::f8_e5m2:
      return f(static_cast<f8_e5m2*>(nullptr));
    case DType::i8:
      return f(static_cast<int8_t*>(nullptr));
    case DType::i32:
      return f(static_cast<int32_t*>(nullptr));
    case DType::i64:
      return f(static_cast<int64_t*>(nullptr));
    case DType::u8:
    case DType::boolean:
      break;
  }
  return f(static_cast<uint8_t*>(nullptr));
}

}  // namespace

int64_t offset_of(const ConstTensor& tensor, int64_t index) {
  int64_t offset = 0;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    offset += index % tensor.shape[i] * tensor.strides[i];
    index /= tensor.shape[i];
  }
  return offset;
}

double get(DType dtype, const void* data, int64_t offset) {
  return with_type(dtype, [&](auto* type) {
    const auto value = static_cast<const std::remove_pointer_t<decltype(type)>*>(data)[offset];
    if constexpr (std::is_arithmetic_v<std::remove_const_t<decltype(value)>>) {
      return static_cast<double>(value);
    } else {
      return static_cast<double>(to_f32(value));
    }
  });
}

void set(DType dtype, void* data, int64_t offset, double value) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto& element = static_cast<T*>(data)[offset];
    if constexpr (std::is_integral_v<T>) {
      element = clamped<T>(value);
    } else {
      element = convert<T>(value);
    }
  });
}

double get(const ConstTensor& tensor, int64_t index) {
  return get(tensor.dtype, tensor.data, offset_of(tensor, index));
}

void set(const Tensor& tensor, int64_t index, double value) {
  set(tensor.dtype, tensor.data, offset_of(tensor, index), value);
}

std::string index_text(const ConstTensor& tensor, int64_t index) {
  std::string text = "]";
  for (int i = tensor.rank - 1; i >= 0; --i) {
    text = (i > 0 ? ", " : "[") + std::to_string(index % tensor.shape[i]) + text;
    index /= tensor.shape[i];
  }
  return tensor.rank == 0 ? "[]" : text;
}

std::vector<double> to_doubles(const ConstTensor& tensor) {
  const int64_t count = tensor.num_elements();
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = get(tensor, i);
  return values;
}

void copy(const ConstTensor& from, const Tensor& to) {
  const int64_t count = to.num_elements();
  for (int64_t i = 0; i < count; ++i) set(to, i, get(from, i));
}

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x1p-23;
    case DType::f64:
      return 0x1p-52;
    case DType::bf16:
      return 0x1p-7;
    case DType::f16:
      return 0x1p-10;
    case DType::f8_e4m3:
      return 0x1p-3;
    case DType::f8_e5m2:
      return 0x1p-2;
    default:
      return 0;
  }
}

}  // namespace opst::test
