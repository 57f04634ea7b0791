// What AddressSanitizer is told about memory that this library hands out in pieces. Nothing in other builds.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__has_feature)
#define OPST_HAS_ADDRESS_SANITIZER __has_feature(address_sanitizer)
#else
#define OPST_HAS_ADDRESS_SANITIZER 0
#endif

namespace opst {

#if defined(__SANITIZE_ADDRESS__) || OPST_HAS_ADDRESS_SANITIZER
inline constexpr bool kWatched = true;
extern "C" void __asan_poison_memory_region(void const volatile* data, size_t bytes);
extern "C" void __asan_unpoison_memory_region(void const volatile* data, size_t bytes);
// Whoever reads or writes these bytes from now on is reported.
inline void forbid(const void* data, int64_t bytes) { __asan_poison_memory_region(data, static_cast<size_t>(bytes)); }
inline void allow(const void* data, int64_t bytes) { __asan_unpoison_memory_region(data, static_cast<size_t>(bytes)); }
#else
inline constexpr bool kWatched = false;
inline void forbid(const void*, int64_t) {}
inline void allow(const void*, int64_t) {}
#endif

}  // namespace opst
