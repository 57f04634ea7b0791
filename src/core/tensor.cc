#include "opst/tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/text.h"

namespace opst {

int64_t size_bytes(DType dtype) {
  static constexpr int64_t kBytes[] = {4, 8, 2, 2, 1, 1, 4, 8, 1};  // in the order of DType
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kBytes) ? kBytes[index] : 0;
}

const char* to_string(DType dtype) {
  return name_of(dtype, {"f32", "f64", "bf16", "f16", "i8", "u8", "i32", "i64", "bool"});
}

std::string to_string(const ConstTensor& tensor) {
  std::string shape;
  for (int i = 0; i < tensor.rank && i < kMaxRank; ++i) shape += (i > 0 ? ", " : "") + std::to_string(tensor.shape[i]);
  return text(to_string(tensor.dtype), " [", shape, "]");
}

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::contiguous(DType dtype, std::initializer_list<int64_t> shape, Data data) {
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

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::transposed(int a, int b) const {
  BasicTensor view = *this;
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::narrowed(int dim, int64_t begin, int64_t length) const {
  using Byte = std::conditional_t<kConst, const char, char>;
  BasicTensor view = *this;
  view.shape[dim] = length;
  if (data != nullptr) view.data = static_cast<Byte*>(data) + begin * strides[dim] * opst::size_bytes(dtype);
  return view;
}

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::selected(int dim, int64_t index) const {
  BasicTensor view = narrowed(dim, index, 0);
  view.rank = rank - 1;
  for (int i = dim; i < view.rank; ++i) view.shape[i] = shape[i + 1], view.strides[i] = strides[i + 1];
  view.shape[view.rank] = view.strides[view.rank] = 0;
  return view;
}

template <bool kConst>
bool BasicTensor<kConst>::is_contiguous() const {
  if (num_elements() == 0) return true;
  int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    // Beyond every stride that a checked tensor may have.
    if (__builtin_mul_overflow(expected, shape[i], &expected)) expected = INT64_MAX;
  }
  return true;
}

template struct BasicTensor<false>;
template struct BasicTensor<true>;

// Small buffers come from operator new, as all other memory of the library. Buffers of a huge page or more are mappings
// of their own: aligned to the huge pages they ask for, and gone from this process as soon as they are freed.
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kAlignmentBytes = 64;

void* map_huge(int64_t bytes) {
  const auto mapped_bytes = static_cast<size_t>(bytes + kHugePageBytes);
  void* const base = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  const size_t head_bytes = -reinterpret_cast<uintptr_t>(base) % kHugePageBytes;  // before the first huge page
  char* const data = static_cast<char*>(base) + head_bytes;
  if (head_bytes > 0) munmap(base, head_bytes);
  munmap(data + bytes, kHugePageBytes - head_bytes);
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: failure changes nothing but speed
  return data;
}

void release(void* data, int64_t size_bytes) {
  if (size_bytes >= kHugePageBytes) {
    munmap(data, static_cast<size_t>(round_up(size_bytes, kHugePageBytes)));
  } else {
    ::operator delete (data, std::align_val_t{kAlignmentBytes});
  }
}

}  // namespace

Result<Buffer> Buffer::allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return guarded([&] {
      return Status::invalid_argument(text("Buffer::allocate: size_bytes is ", size_bytes, ", but must be >= 0"));
    });
  }
  Buffer buffer;
  if (size_bytes == 0) return buffer;
  if (size_bytes > INT64_MAX - 2 * kHugePageBytes) return Status::out_of_memory();
  buffer.data_ = size_bytes >= kHugePageBytes ? map_huge(round_up(size_bytes, kHugePageBytes))
                                              : ::operator new (static_cast<size_t>(size_bytes),
                                                                std::align_val_t{kAlignmentBytes}, std::nothrow);
  if (buffer.data_ == nullptr) return Status::out_of_memory();
  buffer.size_bytes_ = size_bytes;
  return buffer;
}

Buffer Buffer::part_of(std::shared_ptr<void> whole, void* data, int64_t size_bytes) {
  Buffer buffer;
  buffer.data_ = data;
  buffer.size_bytes_ = size_bytes;
  buffer.whole_ = std::move(whole);
  return buffer;
}

Buffer::~Buffer() {
  if (!whole_) release(data_, size_bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(whole_, other.whole_);
  return *this;
}

}  // namespace opst
