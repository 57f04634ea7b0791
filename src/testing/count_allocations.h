// Counts what a program takes from the heap, in whichever form of new. Included by one source file of the program.
// With fail_allocations.h chosen allocations are refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

namespace opst::test {

inline std::atomic<int64_t> num_allocations{0};
inline std::atomic<int64_t> live_allocations{0};  // those that nobody has freed
// Allocations [first_refused, last_refused], counted from 1 at the program's start, fail.
inline std::atomic<int64_t> first_refused{std::numeric_limits<int64_t>::max()}, last_refused{0};

// Gives the next allocation its number; false where that one fails.
inline bool allocation_granted() noexcept {
  const int64_t number = num_allocations.fetch_add(1, std::memory_order_relaxed) + 1;
  return number < first_refused.load(std::memory_order_relaxed) ||
         number > last_refused.load(std::memory_order_relaxed);
}

inline void* live(void* memory) noexcept {
  if (memory != nullptr) live_allocations.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
inline void* counted_allocation(std::size_t size) noexcept {
  return allocation_granted() ? live(std::malloc(size > 0 ? size : 1)) : nullptr;
}
inline void* counted_allocation(std::size_t size, std::align_val_t alignment) noexcept {
  const auto step = static_cast<std::size_t>(alignment);
  return allocation_granted() ? live(std::aligned_alloc(step, (size + step - 1) / step * step)) : nullptr;
}
inline void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
inline void counted_free(void* p) noexcept {
  if (p != nullptr) live_allocations.fetch_sub(1, std::memory_order_relaxed);
  std::free(p);
}

}  // namespace opst::test

// Not inlined: the compiler would see memory of `new` go to `free`.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return opst::test::counted_allocation(size);
}
[[gnu::noinline]] void* operator new(std::size_t size) {
  return opst::test::or_throw(opst::test::counted_allocation(size));
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return opst::test::counted_allocation(size, alignment);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return opst::test::or_throw(opst::test::counted_allocation(size, alignment));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { opst::test::counted_free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { opst::test::counted_free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { opst::test::counted_free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { opst::test::counted_free(p); }
