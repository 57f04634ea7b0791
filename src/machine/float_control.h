// DefaultFloatControl: rounding, flush-to-zero and exception masks at their defaults for a scope, then as they were.
//
// Results must not depend on the mode that a caller happens to run in, nor differ between its thread and the workers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace opst {

class DefaultFloatControl {
 public:
#if defined(__x86_64__)
  DefaultFloatControl() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatControl() { _mm_setcsr(saved_); }
#else
  DefaultFloatControl() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatControl() { std::fesetenv(&saved_); }
#endif
  DefaultFloatControl(const DefaultFloatControl&) = delete;
  DefaultFloatControl& operator=(const DefaultFloatControl&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nearest, no flush to zero
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace opst
