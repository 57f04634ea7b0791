// How much of a sweep a test takes.
#pragma once

#include <cstdlib>

#include "core/sanitizers.h"

namespace opst::test {

// Code under a sanitizer is about ten times as slow.
inline constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

// The share of the usual sample that is taken.
inline constexpr double kEffort = kSanitized ? 0.15 : 1;

// Everything, not a sample: OPST_EXHAUSTIVE=1.
inline bool exhaustive() {
  const char* text = std::getenv("OPST_EXHAUSTIVE");
  return text != nullptr && *text != '\0' && *text != '0';
}

}  // namespace opst::test
