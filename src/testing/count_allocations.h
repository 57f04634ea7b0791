// Counts what a program takes from the heap, in whichever form of new. Included by one source file of the program.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace opst::test {

inline std::atomic<int64_t> num_allocations{0};

inline void* counted_allocation(std::size_t size) noexcept {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size > 0 ? size : 1);
}
inline void* counted_allocation(std::size_t size, std::align_val_t alignment) noexcept {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  const auto step = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(step, (size + step - 1) / step * step);
}
inline void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
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
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
