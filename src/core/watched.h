// What AddressSanitizer is told about memory that this library hands out in pieces. Nothing in other builds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sanitizers.h"

namespace opst {

inline constexpr bool kWatched = kAddressSanitizer;

#if OPST_ADDRESS_SANITIZER
extern "C" void __asan_poison_memory_region(void const volatile* data, size_t bytes);
extern "C" void __asan_unpoison_memory_region(void const volatile* data, size_t bytes);
// Whoever reads or writes these bytes from now on is reported.
inline void forbid(const void* data, int64_t bytes) { __asan_poison_memory_region(data, static_cast<size_t>(bytes)); }
inline void allow(const void* data, int64_t bytes) { __asan_unpoison_memory_region(data, static_cast<size_t>(bytes)); }
#else
inline void forbid(const void*, int64_t) {}
inline void allow(const void*, int64_t) {}
#endif

}  // namespace opst
