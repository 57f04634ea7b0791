#include "opst/tensor.h"

#include <sys/mman.h>

#include <iterator>
#include <new>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/text.h"

namespace opst {

int64_t size_bytes(DType dtype) {
  static constexpr int64_t kBytes[] = {4, 8, 2, 2, 1, 1, 4, 8, 1, 1, 1};  // in the order of DType
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kBytes) ? kBytes[index] : 0;
}

const char* to_string(DType dtype) {
  return name_of(dtype, {"f32", "f64", "bf16", "f16", "i8", "u8", "i32", "i64", "bool", "f8_e4m3", "f8_e5m2"});
}

std::string to_string(const ConstTensor& tensor) {
  const auto sizes = joined(std::min(tensor.rank, kMaxRank), [&](int i) { return tensor.shape[i]; });
  return text(to_string(tensor.dtype), " [", sizes, "]");
}

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

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(whole_, other.whole_);
  return *this;
}

}  // namespace opst
