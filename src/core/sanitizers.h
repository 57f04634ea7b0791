// Which sanitizers watch this build, and what AddressSanitizer is told of memory that the library hands out in pieces.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__has_feature)
#define OPST_HAS_FEATURE(name) __has_feature(name)
#else
#define OPST_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || OPST_HAS_FEATURE(thread_sanitizer)
#define OPST_THREAD_SANITIZER 1
#else
#define OPST_THREAD_SANITIZER 0
#endif

namespace opst {

inline constexpr bool kThreadSanitizer = OPST_THREAD_SANITIZER == 1;

// From forbid() to allow() AddressSanitizer reports whoever reads or writes these bytes. Nothing in other builds.
#if defined(__SANITIZE_ADDRESS__) || OPST_HAS_FEATURE(address_sanitizer)
inline constexpr bool kAddressSanitizer = true;
extern "C" void __asan_poison_memory_region(void const volatile* data, size_t bytes);
extern "C" void __asan_unpoison_memory_region(void const volatile* data, size_t bytes);
inline void forbid(const void* data, int64_t bytes) { __asan_poison_memory_region(data, static_cast<size_t>(bytes)); }
inline void allow(const void* data, int64_t bytes) { __asan_unpoison_memory_region(data, static_cast<size_t>(bytes)); }
#else
inline constexpr bool kAddressSanitizer = false;
inline void forbid(const void*, int64_t) {}
inline void allow(const void*, int64_t) {}
#endif

}  // namespace opst
