// Memory whose neighbours cannot be touched: reading or writing past it is a fault, not luck.
//
//   GuardedBuffer buffer(n * 4, Guard::after);      // the byte behind the last one is on a forbidden page
//   Tensor out = buffer.tensor(DType::f32, {n});    // filled with NaN
//   ...
//   EXPECT_TRUE(buffer.slack_intact());             // nothing was written on the side without the close guard
#pragma once

#include <cstdint>
#include <initializer_list>

#include "opst/tensor.h"

namespace opst::test {

enum class Guard : uint8_t { after, before };
enum class Prefill : uint8_t {
  nan,  // bytes 0xff: NaN in every floating point type, -1 in integers
  x7f,  // bytes 0x7f: huge numbers
};

class GuardedBuffer {
 public:
  // Ends the process where the memory cannot be had. Alignment is what the size leaves: with Guard::after the data ends
  // at a page's end, so a size that is no multiple of 64 gives an unaligned start.
  explicit GuardedBuffer(int64_t size_bytes, Guard guard = Guard::after, Prefill prefill = Prefill::nan);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;

  void* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) const {
    return Tensor::contiguous(dtype, shape, data_);
  }
  // The bytes between the data and the farther forbidden page still hold what they were filled with.
  bool slack_intact() const;
  // No more writing: a later write to the data is a fault. For inputs.
  void make_read_only();

 private:
  char* pages_ = nullptr;  // accessible ones
  int64_t pages_bytes_ = 0;
  char* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace opst::test
