// Which sanitizers watch this build: the one place that asks the compiler.
#pragma once

#if defined(__has_feature)
#define OPST_HAS_FEATURE(name) __has_feature(name)
#else
#define OPST_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || OPST_HAS_FEATURE(address_sanitizer)
#define OPST_ADDRESS_SANITIZER 1
#else
#define OPST_ADDRESS_SANITIZER 0
#endif

#if defined(__SANITIZE_THREAD__) || OPST_HAS_FEATURE(thread_sanitizer)
#define OPST_THREAD_SANITIZER 1
#else
#define OPST_THREAD_SANITIZER 0
#endif

namespace opst {

inline constexpr bool kAddressSanitizer = OPST_ADDRESS_SANITIZER == 1;
inline constexpr bool kThreadSanitizer = OPST_THREAD_SANITIZER == 1;

}  // namespace opst
