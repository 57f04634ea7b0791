// Tensor, ConstTensor: non-owning strided views. Buffer: owned, aligned memory.
//
// A tensor is a data pointer, a dtype, a shape and strides counted in elements (DLPack's meaning). Layout is strides:
// BSND, BNSD, BSH, SBH are views of one another, and no kernel knows a layout by name. Where a dimension has several
// indices, strides of inputs are any value >= 0 (0 repeats an element), and those of outputs keep elements apart.
//
// An optional tensor of a call is absent without data: Tensor{} is. (Matmul and quantisation refuse one that states
// elements. Of a tensor that must be there, only one without elements may have none.)
//
// Threads: tensors are plain values. A Buffer has no lock: one thread moves or frees it while no other uses its memory.
//
//   float q[2 * 5 * 4 * 64];                                     // stored [batch, seq, heads, head_dim]
//   Tensor bsnd = Tensor::contiguous(DType::f32, {2, 5, 4, 64}, q);
//   Tensor bnsd = bsnd.transposed(1, 2);                         // [2, 4, 5, 64], the same bytes
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "opst/dtype.h"
#include "opst/status.h"

namespace opst {

int64_t size_bytes(DType dtype);
// "f32", "bf16", ... "bool"
const char* to_string(DType dtype);

inline constexpr int kMaxRank = 5;

template <bool kConst>
struct BasicTensor {
  using Data = std::conditional_t<kConst, const void*, void*>;

  DType dtype = DType::f32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in elements
  Data data = nullptr;             // at a multiple of size_bytes(dtype), where there are elements

  BasicTensor() = default;
  // Whether an optional tensor is there.
  explicit operator bool() const { return data != nullptr; }
  // A mutable view may be read as a const one.
  template <bool kOther>
  requires(kConst && !kOther) BasicTensor(const BasicTensor<kOther>& other)
      : dtype(other.dtype), rank(other.rank), data(other.data) {
    for (int i = 0; i < kMaxRank; ++i) shape[i] = other.shape[i], strides[i] = other.strides[i];
  }

  // Row-major view of `data`. More than kMaxRank dimensions give a rank-0 view.
  static BasicTensor contiguous(DType dtype, std::initializer_list<int64_t> shape, Data data) {
    BasicTensor tensor;
    tensor.dtype = dtype;
    if (shape.size() > static_cast<size_t>(kMaxRank)) return tensor;
    tensor.data = data;
    tensor.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
    int64_t stride = 1;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      tensor.strides[i] = stride;
      // A shape too large for any memory saturates here; ShapeCheck refuses it with its name.
      if (__builtin_mul_overflow(stride, std::max<int64_t>(tensor.shape[i], 1), &stride)) stride = INT64_MAX;
    }
    return tensor;
  }

  // The same memory with two dimensions exchanged.
  BasicTensor transposed(int a, int b) const {
    BasicTensor view = *this;
    std::swap(view.shape[a], view.shape[b]);
    std::swap(view.strides[a], view.strides[b]);
    return view;
  }
  // Indices [begin, begin + length) of one dimension. The caller keeps them within the shape.
  BasicTensor narrowed(int dim, int64_t begin, int64_t length) const {
    using Byte = std::conditional_t<kConst, const char, char>;
    BasicTensor view = *this;
    view.shape[dim] = length;
    if (data != nullptr) view.data = static_cast<Byte*>(data) + begin * strides[dim] * opst::size_bytes(dtype);
    return view;
  }
  // One index of one dimension; the dimension disappears.
  BasicTensor selected(int dim, int64_t index) const {
    BasicTensor view = narrowed(dim, index, 0);
    view.rank = rank - 1;
    for (int i = dim; i < view.rank; ++i) view.shape[i] = shape[i + 1], view.strides[i] = strides[i + 1];
    view.shape[view.rank] = view.strides[view.rank] = 0;
    return view;
  }

  // The product of the sizes; INT64_MAX where int64_t cannot hold it.
  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank && i < kMaxRank; ++i) {
      if (shape[i] == 0) return 0;
      if (__builtin_mul_overflow(n, shape[i], &n)) n = INT64_MAX;
    }
    return n;
  }
  bool is_contiguous() const {
    if (num_elements() == 0) return true;
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return false;
      // Beyond every stride that a checked tensor may have.
      if (__builtin_mul_overflow(expected, shape[i], &expected)) expected = INT64_MAX;
    }
    return true;
  }
  // Whether the data lie at a multiple of an element's size, as C++ demands of memory that is read as that type.
  bool is_aligned() const {  // sizes are powers of two
    return (reinterpret_cast<uintptr_t>(data) & (static_cast<uintptr_t>(opst::size_bytes(dtype)) - 1)) == 0;
  }
};

using Tensor = BasicTensor<false>;
using ConstTensor = BasicTensor<true>;

// "f32 [2, 4, 5, 64]"
std::string to_string(const ConstTensor& tensor);

// Owned memory, aligned to 64 bytes. From 2 MiB on it asks the system for huge pages. Movable, not copyable.
// Or a piece of a larger allocation, which lives until its last piece is gone.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Uninitialised memory. size_bytes = 0 gives an empty buffer with a null pointer.
  static Result<Buffer> allocate(int64_t size_bytes);
  // `whole` keeps [data, data + size_bytes) alive.
  static Buffer part_of(std::shared_ptr<void> whole, void* data, int64_t size_bytes);

  void* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  // A contiguous tensor at the start of this buffer.
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) const {
    return Tensor::contiguous(dtype, shape, data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  std::shared_ptr<void> whole_;  // of a piece
};

}  // namespace opst
