// How much of a sweep a test takes.
#pragma once

#include <cstdlib>

namespace opst::test {

// Code under a sanitizer is about ten times as slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

// The share of the usual sample that is taken.
inline constexpr double kEffort = kSanitized ? 0.15 : 1;

// Everything, not a sample: OPST_EXHAUSTIVE=1.
inline bool exhaustive() {
  const char* text = std::getenv("OPST_EXHAUSTIVE");
  return text != nullptr && *text != '\0' && *text != '0';
}

}  // namespace opst::test
