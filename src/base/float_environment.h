// The float environment is part of the arithmetic: a host may have set flush-to-zero or another
// rounding mode.
#ifndef QUIRE_BASE_FLOAT_ENVIRONMENT_H_
#define QUIRE_BASE_FLOAT_ENVIRONMENT_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace quire {

// While it lives, the calling thread rounds to nearest even, keeps subnormal numbers and masks all
// exceptions; then the thread's own environment is back, its sticky flags included.
class ScopedFloatEnvironment {
 public:
#if defined(__x86_64__)
  ScopedFloatEnvironment() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~ScopedFloatEnvironment() { _mm_setcsr(saved_); }
#else
  ScopedFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedFloatEnvironment() { std::fesetenv(&saved_); }
#endif
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefaultMxcsr = 0x1F80;  // the value after reset: all exceptions masked
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace quire

#endif  // QUIRE_BASE_FLOAT_ENVIRONMENT_H_
