// The float environment is part of the arithmetic: a host may have set flush-to-zero or another
// rounding mode.
#ifndef QUIRE_BASE_FLOAT_ENVIRONMENT_H_
#define QUIRE_BASE_FLOAT_ENVIRONMENT_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
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
#elif defined(__aarch64__)
  // Not fesetenv: glibc's default environment keeps the bits for default NaNs and for flushing
  // float16, and the alternative form of float16.
  ScopedFloatEnvironment() noexcept {
    __asm__ volatile("mrs %0, fpcr" : "=r"(control_));
    __asm__ volatile("mrs %0, fpsr" : "=r"(status_));
    __asm__ volatile("msr fpcr, %0" : : "r"(kDefaultFpcr) : "memory");
  }
  ~ScopedFloatEnvironment() {
    __asm__ volatile("msr fpcr, %0" : : "r"(control_) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(status_) : "memory");
  }
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
#elif defined(__aarch64__)
  static constexpr uint64_t kDefaultFpcr = 0;
  uint64_t control_;
  uint64_t status_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace quire

#endif  // QUIRE_BASE_FLOAT_ENVIRONMENT_H_
