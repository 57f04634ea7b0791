// Integer arithmetic on sizes, defined for every size that a caller can state.
//
// A tensor with strides of 0 needs no memory for its size, so a size from outside may be any int64_t, and the product
// of two sizes may be larger than any. Plans therefore add and multiply in Size, which stops at a limit where int64_t
// would wrap:
//
//   const Size bytes = Size(rows) * row_bytes + Size(blocks) * block_bytes;
//   return {.scratch_bytes = bytes.value()};        // kMaxBytes where there were more: no workspace has them
#pragma once

#include <compare>
#include <cstdint>

namespace opst {

// The one limit on bytes, and on elements, of a tensor, of what its strides span and of a plan's memory: half of the
// largest address space (57 bits) that x86-64 and Arm give. ShapeCheck refuses a tensor beyond it, and a workspace of
// so many bytes is out_of_memory. Sums of a hundred such sizes stay within int64_t.
inline constexpr int64_t kMaxBytes = int64_t{1} << 56;

// For b > 0 and every a: a + b - 1 could wrap.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }
// The multiple of b from a on; where int64_t has none, the largest that it has.
constexpr int64_t round_up(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(ceil_div(a, b), b, &result) ? INT64_MAX / b * b : result;
}

// A count of bytes or elements, whose value is at most kMaxBytes; sums and products stop where int64_t ends, so that
// plans of short calls pay a branch that is never taken and no more.
class Size {
 public:
  constexpr Size(int64_t n) : n_(n) {}  // n >= 0
  constexpr int64_t value() const { return n_ < kMaxBytes ? n_ : kMaxBytes; }
  constexpr bool within_limit() const { return n_ < kMaxBytes; }

  friend constexpr Size operator+(Size a, Size b) {
    int64_t sum = 0;
    return __builtin_add_overflow(a.n_, b.n_, &sum) ? INT64_MAX : sum;
  }
  friend constexpr Size operator*(Size a, Size b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a.n_, b.n_, &product) ? INT64_MAX : product;
  }
  constexpr Size& operator+=(Size b) { return *this = *this + b; }
  constexpr Size& operator*=(Size b) { return *this = *this * b; }
  friend constexpr auto operator<=>(Size, Size) = default;

 private:
  int64_t n_;
};

}  // namespace opst
