// How much of a sweep a test takes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "core/sanitizers.h"
#include "testing/random.h"

namespace opst::test {

// Code under a sanitizer is about ten times as slow.
inline constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

// The share of the usual sample that is taken.
inline constexpr double kEffort = kSanitized ? 0.15 : 1;

// One of `count` cases, 0 to count - 1, by this run's seed: the part of a test that is computed where all of them take
// too long. Draws of different names are independent.
inline int64_t drawn_case(std::string_view name, int64_t count) {
  return Random(seed() + std::hash<std::string_view>()(name)).integer(0, count - 1);
}

// Everything, not a sample: OPST_EXHAUSTIVE=1.
inline bool exhaustive() {
  const char* text = std::getenv("OPST_EXHAUSTIVE");
  return text != nullptr && *text != '\0' && *text != '0';
}

}  // namespace opst::test
