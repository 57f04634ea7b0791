#include "core/shape_check.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/int_math.h"

namespace opst {
namespace {

bool is_empty(const ConstTensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.rank, 0) != tensor.shape + tensor.rank;
}

// The size that a name like "8" demands.
std::optional<int64_t> as_number(const char* name) {
  int64_t number = 0;
  const char* c = name;
  for (; *c >= '0' && *c <= '9'; ++c) number = number * 10 + (*c - '0');
  if (c == name || *c != '\0') return std::nullopt;
  return number;
}

// Bytes that a view spans along strides that are no multiples of `period`. Modulo the period every element lies in
// [start, start + this), start being the view's first address.
int64_t span_within_period(const ConstTensor& tensor, int64_t period) {
  const int64_t element_bytes = size_bytes(tensor.dtype);
  int64_t span = element_bytes;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] <= 1) continue;
    const int64_t stride_bytes = tensor.strides[i] * element_bytes;
    if (stride_bytes % period != 0) span += (tensor.shape[i] - 1) * stride_bytes;
  }
  return span;
}

// What no tensor may be, in the order in which it is looked for.
enum class Fault { none, rank, dtype, size, stride, bytes, span, data, alignment };
struct Examined {
  Fault fault = Fault::none;
  int dim = -1;            // of a negative size or stride
  int64_t span_bytes = 0;  // from the first element's start to the last one's end
};
inline Examined examine(const ConstTensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > kMaxRank) return {Fault::rank};
  const int64_t element_bytes = size_bytes(tensor.dtype);
  if (element_bytes == 0) return {Fault::dtype};
  // Repeated elements are counted; a size of 0 counts as 1, since plans multiply the other sizes.
  Size bytes = element_bytes, span = 1;
  int negative_size = -1, negative_stride = -1;
  bool empty = false;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const int64_t size = tensor.shape[i], stride = tensor.strides[i];
    if (size < 0) negative_size = i;
    empty = empty || size == 0;
    if (size <= 1) continue;
    if (stride < 0) negative_stride = i;
    bytes *= size;
    span += Size(size - 1) * stride;
  }
  if (negative_size >= 0) return {Fault::size, negative_size};
  if (negative_stride >= 0 && !empty) return {Fault::stride, negative_stride};
  if (!bytes.within_limit()) return {Fault::bytes};
  if (empty) return {};
  span *= element_bytes;
  if (!span.within_limit()) return {Fault::span};
  if (tensor.data == nullptr) return {Fault::data};
  return {tensor.is_aligned() ? Fault::none : Fault::alignment, -1, span.value()};
}

// The fault, for a message behind the tensor's name.
std::string describe(const Examined& examined, const ConstTensor& tensor) {
  const int dim = examined.dim;
  switch (examined.fault) {
    case Fault::none:
      break;
    case Fault::rank:
      return text(" has rank ", tensor.rank, ", but it must be from 0 to ", kMaxRank);
    case Fault::dtype:
      return text(" has dtype ", static_cast<int>(tensor.dtype), ", which is no DType");
    case Fault::size:
      return text(" dim ", dim, " is ", tensor.shape[dim], ", but must be >= 0");
    case Fault::stride:
      return text(" stride ", dim, " is ", tensor.strides[dim], ", but must be >= 0");
    case Fault::bytes:
      return text(" ", to_string(tensor), " has more bytes than the limit of 2^56, repeated elements counted");
    case Fault::span:
      return text(" ", to_string(tensor), " spans more bytes than the limit of 2^56");
    case Fault::data:
      return text(" has null data, but ", tensor.num_elements(), " elements: ", to_string(tensor));
    case Fault::alignment:
      return text(" ", to_string(tensor), " lies ",
                  reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size_bytes(tensor.dtype)),
                  " beyond a multiple of ", size_bytes(tensor.dtype),
                  " bytes, but elements must lie at multiples of their size");
  }
  return "";
}

// Whether the ranges of addresses cross.
bool cross(const ConstTensor& a, int64_t span_a, const ConstTensor& b, int64_t span_b) {
  const auto start_a = reinterpret_cast<uintptr_t>(a.data), start_b = reinterpret_cast<uintptr_t>(b.data);
  return span_a > 0 && span_b > 0 && start_a + static_cast<uintptr_t>(span_a) > start_b &&
         start_b + static_cast<uintptr_t>(span_b) > start_a;
}

// Whether two views whose ranges cross repeat with a common period and use different parts of it.
bool interleaved(const ConstTensor& a, const ConstTensor& b) {
  int64_t strides[2 * kMaxRank];  // in bytes, of all dimensions with more than one index and a stride
  int count = 0;
  for (const ConstTensor* const t : {&a, &b}) {
    for (int i = 0; i < t->rank; ++i) {
      if (t->shape[i] > 1 && t->strides[i] != 0) strides[count++] = t->strides[i] * size_bytes(t->dtype);
    }
  }
  const auto distance = static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data) - reinterpret_cast<uintptr_t>(a.data));
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j <= i; ++j) {
      const int64_t period = std::gcd(strides[i], strides[j]);
      const int64_t part_a = span_within_period(a, period), part_b = span_within_period(b, period);
      // Where b's part starts in the period that begins with a's.
      const int64_t offset = (distance % period + period) % period;
      if (part_a <= offset && offset + part_b <= period) return true;
    }
  }
  return false;
}

}  // namespace

bool may_overlap(const ConstTensor& a, const ConstTensor& b) {
  return cross(a, span_bytes(a), b, span_bytes(b)) && !interleaved(a, b);
}

int64_t span_bytes(const ConstTensor& tensor) { return examine(tensor).span_bytes; }

bool is_sound(const ConstTensor& tensor) { return examine(tensor).fault == Fault::none; }

bool may_alias_itself(const ConstTensor& tensor) {
  // Strides in ascending order must each step over all that the smaller ones reach.
  std::pair<int64_t, int64_t> steps[kMaxRank];  // stride, size
  int count = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
    if (tensor.shape[i] == 1) continue;
    int place = count++;
    for (; place > 0 && steps[place - 1].first > tensor.strides[i]; --place) steps[place] = steps[place - 1];
    steps[place] = {tensor.strides[i], tensor.shape[i]};
  }
  Size reach = 0;
  for (const auto& [stride, size] : std::span(steps, static_cast<size_t>(count))) {
    if (stride <= reach.value()) return true;
    reach += Size(size - 1) * stride;
  }
  return !reach.within_limit();
}

bool same_view(const ConstTensor& a, const ConstTensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank || a.rank < 0 || a.rank > kMaxRank) return false;
  if (!std::equal(a.shape, a.shape + a.rank, b.shape)) return false;
  if (is_empty(a)) return true;
  for (int i = 0; i < a.rank; ++i) {
    if (a.strides[i] != b.strides[i] && a.shape[i] != 1) return false;
  }
  return true;
}

int64_t distinct(const ConstTensor& tensor, int dim) {
  return tensor.strides[dim] == 0 ? std::min<int64_t>(tensor.shape[dim], 1) : tensor.shape[dim];
}

template <class T>
void make_strides_normal(T& tensor) {
  const bool empty = is_empty(tensor);
  int64_t row_major = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (empty) tensor.strides[i] = i == tensor.rank - 1 ? 1 : 0;
    if (tensor.shape[i] == 1 && !empty) tensor.strides[i] = row_major;
    row_major = tensor.strides[i] * tensor.shape[i];  // at most twice what the tensor spans
  }
}
template void make_strides_normal(ConstTensor& tensor);
template void make_strides_normal(Tensor& tensor);

void ShapeCheck::fail(const std::string& message, StatusCode code) {
  if (status_.ok()) status_ = Status(code, text(operator_name_, ": ", message));
}

ShapeCheck& ShapeCheck::require(const Status& status) {
  if (!status.ok()) fail(status.message(), status.code());
  return *this;
}

ShapeCheck::Dimension ShapeCheck::find(const char* name) const {
  for (int i = 0; i < num_dimensions_; ++i) {
    const Dimension& dimension = dimensions_[i];
    // Most names differ in their first letter.
    if (*dimension.name == *name && std::strcmp(dimension.name, name) == 0) return dimension;
  }
  return {};
}

template <class Where>
void ShapeCheck::bind(const char* name, const char* tensor, int64_t size, const Where& where) {
  if (const Dimension bound = find(name); bound.name != nullptr) {
    if (bound.size == size) return;
    fail(text(where, " ", shown(size), ", but ", bound.tensor, " set ", name, " = ", shown(bound.size)));
  } else if (num_dimensions_ == kMaxDimensions) {
    fail(text(where, " one name more than a check holds"));
  } else {
    dimensions_[num_dimensions_++] = {name, tensor, size};
  }
}

ShapeCheck& ShapeCheck::holds(const char* tensor, const char* name, int64_t size) {
  if (ok()) bind(name, tensor, size, [&] { return text(tensor, " holds ", name, " ="); });
  return *this;
}

ShapeCheck::TensorCheck ShapeCheck::tensor(const char* name, const ConstTensor& tensor) {
  TensorCheck result(this, name, tensor);
  if (!ok() || names_ != nullptr) return result;
  const Examined examined = examine(tensor);
  if (examined.fault != Fault::none) {
    fail(name + describe(examined, tensor));
  } else if (num_seen_ == kMaxTensors) {
    fail(text(name, " is one tensor more than a check holds"));
  } else {
    new (&seen_[num_seen_++].seen) Seen{name, tensor, examined.span_bytes};
  }
  return result;
}

ShapeCheck::TensorCheck ShapeCheck::output(const char* name, const ConstTensor& tensor) {
  const int num_before = num_seen_;
  TensorCheck result = this->tensor(name, tensor);
  if (!ok() || names_ != nullptr) return result;
  if (may_alias_itself(tensor)) {
    fail(text(name, " ", to_string(tensor), " has strides [",
              joined(tensor.rank, [&](int i) { return tensor.strides[i]; }),
              "], with which elements share addresses, but every element of an output needs its own"));
  }
  const int64_t span_bytes = seen_[num_before].seen.span_bytes;
  for (int i = 0; i < num_before && ok(); ++i) {
    const Seen& before = seen_[i].seen;
    if (cross(tensor, span_bytes, before.tensor, before.span_bytes) && !interleaved(tensor, before.tensor)) {
      fail(text(name, " ", to_string(tensor), " overlaps ", before.name, " ", to_string(before.tensor),
                " in memory, but an output must not"));
    }
  }
  return result;
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::leading_dims(int num_leading, const char* last) {
  constexpr const char* kNames[] = {"dim_0", "dim_1", "dim_2", "dim_3", "dim_4"};
  static_assert(std::size(kNames) == kMaxRank);
  const char* names[kMaxRank + 1];
  std::copy_n(kNames, num_leading, names);
  names[num_leading] = last;
  return dims({names, static_cast<size_t>(num_leading) + (last != nullptr ? 1 : 0)});
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::dims(std::span<const char* const> names) {
  if (!check_->ok()) return *this;
  if (static_cast<size_t>(tensor_.rank) != names.size()) {
    // A declared tensor has its sizes in the message too: " [rows, 32]".
    const bool declared = check_->names_ != nullptr && tensor_.rank > 0;
    const auto shape = [&] { return joined(tensor_.rank, [&](int i) { return check_->shown(tensor_.shape[i]); }); };
    check_->fail(text(name_, declared ? text(" [", shape, "]") : "", " has rank ", tensor_.rank, ", but [",
                      joined(names.size(), [&](size_t i) { return names[i]; }), "] has rank ", names.size()));
    return *this;
  }
  for (int dim = 0; dim < tensor_.rank && check_->ok(); ++dim) {
    const char* const name = names[static_cast<size_t>(dim)];
    const int64_t size = tensor_.shape[dim];
    if (const std::optional<int64_t> number = as_number(name)) {
      if (size != *number) check_->fail(text(name_, " dim ", dim, " is ", check_->shown(size), ", but must be ", name));
    } else {
      check_->bind(name, name_, size, [&] { return text(name_, " dim ", dim, " (", name, ") is"); });
    }
  }
  return *this;
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::dtype(std::initializer_list<DType> allowed) {
  if (!check_->ok() || std::find(allowed.begin(), allowed.end(), tensor_.dtype) != allowed.end()) return *this;
  // Each once: "f32 or the dtype of x" names f32 twice where x is f32.
  std::vector<DType> different;
  for (const DType dtype : allowed) {
    if (std::find(different.begin(), different.end(), dtype) == different.end()) different.push_back(dtype);
  }
  const auto name = [&](size_t i) { return to_string(different[i]); };
  check_->fail(text(name_, " is ", to_string(tensor_.dtype), ", but must be ", joined(different.size(), name, " or ")));
  return *this;
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::unit_inner_stride() {
  if (!check_->ok() || tensor_.rank == 0) return *this;
  const int last = tensor_.rank - 1;
  if (tensor_.shape[last] > 1 && tensor_.strides[last] != 1 && !is_empty(tensor_)) {
    check_->fail(text(name_, " stride ", last, " is ", tensor_.strides[last], ", but must be 1"));
  }
  return *this;
}

}  // namespace opst
