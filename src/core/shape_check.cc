#include "core/shape_check.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <optional>

#include "core/int_math.h"

namespace opst {
namespace {

// Bytes from the first element's start to the last element's end; kMaxBytes where they are as many or more.
int64_t span_bytes(const ConstTensor& tensor) {
  Size span = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return 0;
    if (tensor.shape[i] > 1) span += Size(tensor.shape[i] - 1) * tensor.strides[i];
  }
  return (span * size_bytes(tensor.dtype)).value();
}

bool has_elements(const ConstTensor& tensor) {
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
  }
  return true;
}

template <class T>
void set_normal_strides(T& tensor) {
  const bool empty = !has_elements(tensor);
  int64_t row_major = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (empty) tensor.strides[i] = i == tensor.rank - 1 ? 1 : 0;
    if (tensor.shape[i] == 1 && !empty) tensor.strides[i] = row_major;
    row_major = tensor.strides[i] * tensor.shape[i];  // at most twice what the tensor spans
  }
}

// Two names of dimensions, most of which differ in their first letter.
bool same_name(const char* a, const char* b) { return *a == *b && std::strcmp(a, b) == 0; }

// The size that a name like "8" demands.
std::optional<int64_t> as_number(const char* name) {
  int64_t number = 0;
  if (*name == '\0') return std::nullopt;
  for (const char* c = name; *c != '\0'; ++c) {
    if (*c < '0' || *c > '9') return std::nullopt;
    number = number * 10 + (*c - '0');
  }
  return number;
}

// The dimensions that move: more than one index and a stride.
struct Walk {
  int count = 0;
  int64_t sizes[kMaxRank];
  int64_t strides_bytes[kMaxRank];
};

Walk walk(const ConstTensor& tensor) {
  Walk result;
  const int64_t element_bytes = size_bytes(tensor.dtype);
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] <= 1 || tensor.strides[i] == 0) continue;
    result.sizes[result.count] = tensor.shape[i];
    result.strides_bytes[result.count] = tensor.strides[i] * element_bytes;
    ++result.count;
  }
  return result;
}

// Bytes that a view spans along strides that are no multiples of `period`. Modulo the period every element lies in
// [start, start + this), start being the view's first address.
int64_t span_within_period(const Walk& dims, int64_t element_bytes, int64_t period) {
  int64_t span = element_bytes;
  for (int i = 0; i < dims.count; ++i) {
    if (dims.strides_bytes[i] % period != 0) span += (dims.sizes[i] - 1) * dims.strides_bytes[i];
  }
  return span;
}

// Whether elements lie at multiples of their size, as C++ demands of whatever is read as that type.
bool is_aligned(const ConstTensor& tensor, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(element_bytes) == 0;
}

// What the sizes and strides of a tensor of at most kMaxRank dimensions come to.
struct Measures {
  // elements: repeated ones counted; a size of 0 counts as 1, since plans multiply the other sizes.
  // span: elements from the first one's start to the last one's end.
  Size elements = 1, span = 1;
  int negative_size = -1, negative_stride = -1;  // the dimension, or -1
  bool empty = false;
};
inline Measures measure(const ConstTensor& tensor) {
  Measures m;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const int64_t size = tensor.shape[i], stride = tensor.strides[i];
    if (size < 0) m.negative_size = i;
    m.empty = m.empty || size == 0;
    if (size <= 1) continue;
    if (stride < 0) m.negative_stride = i;
    m.elements *= size;
    m.span += Size(size - 1) * stride;
  }
  return m;
}

}  // namespace

bool ShapeCheck::cross(const Seen& a, const Seen& b) {
  const auto start_a = reinterpret_cast<uintptr_t>(a.tensor.data);
  const auto start_b = reinterpret_cast<uintptr_t>(b.tensor.data);
  return a.span_bytes > 0 && b.span_bytes > 0 && start_a + static_cast<uintptr_t>(a.span_bytes) > start_b &&
         start_b + static_cast<uintptr_t>(b.span_bytes) > start_a;
}

bool may_overlap(const ConstTensor& a, const ConstTensor& b) {
  const int64_t span_a = span_bytes(a), span_b = span_bytes(b);
  if (span_a == kMaxBytes || span_b == kMaxBytes) return true;
  if (!ShapeCheck::cross({"", a, span_a}, {"", b, span_b})) return false;
  const auto start_a = reinterpret_cast<uintptr_t>(a.data);
  const auto start_b = reinterpret_cast<uintptr_t>(b.data);
  // The ranges cross. Where both views repeat with a common period and use different parts of it, they are interleaved.
  const Walk walk_a = walk(a);
  const Walk walk_b = walk(b);
  int64_t strides[2 * kMaxRank];
  int num_strides = 0;
  for (int i = 0; i < walk_a.count; ++i) strides[num_strides++] = walk_a.strides_bytes[i];
  for (int i = 0; i < walk_b.count; ++i) strides[num_strides++] = walk_b.strides_bytes[i];
  const auto distance = static_cast<int64_t>(start_b - start_a);
  for (int i = 0; i < num_strides; ++i) {
    for (int j = 0; j <= i; ++j) {
      const int64_t period = std::gcd(strides[i], strides[j]);
      const int64_t part_a = span_within_period(walk_a, size_bytes(a.dtype), period);
      const int64_t part_b = span_within_period(walk_b, size_bytes(b.dtype), period);
      // Where b's part starts in the period that begins with a's.
      const int64_t offset = (distance % period + period) % period;
      if (part_a <= offset && offset + part_b <= period) return false;
    }
  }
  return true;
}

bool is_sound(const ConstTensor& tensor) {
  const int64_t element_bytes = size_bytes(tensor.dtype);
  if (tensor.rank < 0 || tensor.rank > kMaxRank || element_bytes == 0) return false;
  const Measures m = measure(tensor);
  if (m.negative_size >= 0 || !(m.elements * element_bytes).within_limit()) return false;
  return m.empty || (m.negative_stride < 0 && (m.span * element_bytes).within_limit() && tensor.data != nullptr &&
                     is_aligned(tensor, element_bytes));
}

bool may_alias_itself(const ConstTensor& tensor) {
  // Strides in ascending order must each step over all that the smaller ones reach.
  struct Step {
    int64_t stride;
    int64_t size;
  };
  Step steps[kMaxRank];
  int count = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
    if (tensor.shape[i] == 1) continue;
    int place = count++;
    for (; place > 0 && steps[place - 1].stride > tensor.strides[i]; --place) steps[place] = steps[place - 1];
    steps[place] = {tensor.strides[i], tensor.shape[i]};
  }
  int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    if (steps[i].stride <= reach) return true;
    int64_t extent = 0;
    if (__builtin_mul_overflow(steps[i].size - 1, steps[i].stride, &extent) ||
        __builtin_add_overflow(reach, extent, &reach)) {
      return true;
    }
  }
  return false;
}

bool same_view(const ConstTensor& a, const ConstTensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank || a.rank < 0 || a.rank > kMaxRank) return false;
  if (!std::equal(a.shape, a.shape + a.rank, b.shape)) return false;
  const bool empty = !has_elements(a);
  for (int i = 0; i < a.rank; ++i) {
    if (a.strides[i] != b.strides[i] && a.shape[i] != 1 && !empty) return false;
  }
  return true;
}

int64_t distinct(const ConstTensor& tensor, int dim) {
  return tensor.strides[dim] == 0 ? std::min<int64_t>(tensor.shape[dim], 1) : tensor.shape[dim];
}

void make_strides_normal(ConstTensor& tensor) { set_normal_strides(tensor); }
void make_strides_normal(Tensor& tensor) { set_normal_strides(tensor); }

void ShapeCheck::fail(std::string message) {
  if (status_.ok()) status_ = Status::invalid_argument(std::string(operator_name_) + ": " + std::move(message));
}

ShapeCheck& ShapeCheck::require(bool condition, const std::string& message) {
  if (!condition) fail(message);
  return *this;
}

int64_t ShapeCheck::operator[](const char* name) const {
  for (int i = 0; i < num_dimensions_; ++i) {
    if (same_name(dimensions_[i].name, name)) return dimensions_[i].size;
  }
  return 0;
}

ShapeCheck::TensorCheck ShapeCheck::tensor(const char* name, const ConstTensor& tensor) {
  TensorCheck result(this, name, tensor);
  if (!ok()) return result;
  const auto prefix = [&] { return std::string(name); };
  if (tensor.rank < 0 || tensor.rank > kMaxRank) {
    fail(prefix() + " has rank " + std::to_string(tensor.rank) + ", but it must be from 0 to " +
         std::to_string(kMaxRank));
    return result;
  }
  const int64_t element_bytes = size_bytes(tensor.dtype);
  if (element_bytes == 0) {
    fail(prefix() + " has dtype " + std::to_string(static_cast<int>(tensor.dtype)) + ", which is no DType");
    return result;
  }
  const auto [elements, span, negative_size, negative_stride, empty] = measure(tensor);
  if (negative_size >= 0) {
    fail(prefix() + " dim " + std::to_string(negative_size) + " is " + std::to_string(tensor.shape[negative_size]) +
         ", but must be >= 0");
    return result;
  }
  if (negative_stride >= 0 && !empty) {
    fail(prefix() + " stride " + std::to_string(negative_stride) + " is " +
         std::to_string(tensor.strides[negative_stride]) + ", but must be >= 0");
    return result;
  }
  const Size span_bytes = empty ? Size(0) : span * element_bytes;
  if (!(elements * element_bytes).within_limit()) {
    fail(prefix() + " " + to_string(tensor) + " has more bytes than the limit of 2^56, repeated elements counted");
  } else if (!span_bytes.within_limit()) {
    fail(prefix() + " " + to_string(tensor) + " spans more bytes than the limit of 2^56");
  } else if (tensor.data == nullptr && !empty) {
    fail(prefix() + " has null data, but " + std::to_string(tensor.num_elements()) + " elements: " + to_string(tensor));
  } else if (!empty && !is_aligned(tensor, element_bytes)) {
    const auto beyond = reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(element_bytes);
    fail(prefix() + " " + to_string(tensor) + " lies " + std::to_string(beyond) + " beyond a multiple of " +
         std::to_string(element_bytes) + " bytes, but elements must lie at multiples of their size");
  }
  if (num_seen_ == kMaxTensors) {
    fail(prefix() + " is one tensor more than a check holds");
  } else {
    new (&seen_[num_seen_++].seen) Seen{name, tensor, span_bytes.value()};
  }
  return result;
}

ShapeCheck::TensorCheck ShapeCheck::output(const char* name, const ConstTensor& tensor) {
  const int num_before = num_seen_;
  TensorCheck result = this->tensor(name, tensor);
  if (!ok()) return result;
  if (may_alias_itself(tensor)) {
    std::string strides;
    for (int i = 0; i < tensor.rank; ++i) strides += (i > 0 ? ", " : "") + std::to_string(tensor.strides[i]);
    fail(std::string(name) + " " + to_string(tensor) + " has strides [" + strides +
         "], with which elements share addresses, but every element of an output needs its own");
    return result;
  }
  for (int i = 0; i < num_before; ++i) {
    const Seen& before = seen_[i].seen;
    if (cross(seen_[num_before].seen, before) && may_overlap(tensor, before.tensor)) {
      fail(std::string(name) + " " + to_string(tensor) + " overlaps " + before.name + " " + to_string(before.tensor) +
           " in memory, but an output must not");
      break;
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
  return dims(names, static_cast<size_t>(num_leading) + (last != nullptr ? 1 : 0));
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::dims(const char* const* names, size_t count) {
  if (!check_->ok()) return *this;
  if (static_cast<size_t>(tensor_.rank) != count) {
    std::string expected;
    for (size_t i = 0; i < count; ++i) expected += (i > 0 ? ", " : "") + std::string(names[i]);
    check_->fail(std::string(name_) + " has rank " + std::to_string(tensor_.rank) + ", but [" + expected +
                 "] has rank " + std::to_string(count));
    return *this;
  }
  for (int dim = 0; dim < tensor_.rank; ++dim) {
    const char* const name = names[dim];
    const int64_t size = tensor_.shape[dim];
    const auto where = [&] { return std::string(name_) + " dim " + std::to_string(dim); };
    if (const std::optional<int64_t> number = as_number(name)) {
      if (size == *number) continue;
      check_->fail(where() + " is " + std::to_string(size) + ", but must be " + name);
      return *this;
    }
    Dimension* const end = check_->dimensions_ + check_->num_dimensions_;
    const Dimension* const bound =
        std::find_if(check_->dimensions_, end, [&](const Dimension& d) { return same_name(d.name, name); });
    if (bound != end) {
      if (bound->size == size) continue;
      check_->fail(where() + " (" + name + ") is " + std::to_string(size) + ", but " + bound->tensor + " set " + name +
                   " = " + std::to_string(bound->size));
      return *this;
    }
    if (check_->num_dimensions_ == kMaxDimensions) {
      check_->fail(where() + " (" + name + ") is one name more than a check holds");
      return *this;
    }
    *end = {name, name_, size};
    ++check_->num_dimensions_;
  }
  return *this;
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::dtype(std::initializer_list<DType> allowed) {
  if (!check_->ok() || std::find(allowed.begin(), allowed.end(), tensor_.dtype) != allowed.end()) return *this;
  std::string list;
  size_t i = 0;
  for (DType dtype : allowed) {
    if (i > 0) list += i + 1 == allowed.size() ? " or " : ", ";
    list += to_string(dtype);
    ++i;
  }
  check_->fail(std::string(name_) + " is " + to_string(tensor_.dtype) + ", but must be " + list);
  return *this;
}

ShapeCheck::TensorCheck& ShapeCheck::TensorCheck::unit_inner_stride() {
  if (!check_->ok() || tensor_.rank == 0) return *this;
  const int last = tensor_.rank - 1;
  if (tensor_.shape[last] > 1 && tensor_.strides[last] != 1 && has_elements(tensor_)) {
    check_->fail(std::string(name_) + " stride " + std::to_string(last) + " is " +
                 std::to_string(tensor_.strides[last]) + ", but must be 1");
  }
  return *this;
}

}  // namespace opst
