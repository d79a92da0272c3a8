// The float environment of a host that has another one than Quire computes in.
#ifndef QUIRE_BASE_TESTING_HOST_FLOAT_ENVIRONMENT_H_
#define QUIRE_BASE_TESTING_HOST_FLOAT_ENVIRONMENT_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace quire {

// The bits of MXCSR or FPCR that say how the calling thread computes.
#if defined(__x86_64__)
constexpr uint64_t kDefaultFloatControl = 0x1F80;
constexpr uint64_t kFlushSubnormals = 0x8040;  // results and operands
constexpr uint64_t kRoundUpward = 0x4000;
constexpr uint64_t kRoundTowardZero = 0x6000;
inline uint64_t FloatControl() {
  constexpr unsigned kExceptionFlags = 0x3F;
  return _mm_getcsr() & ~kExceptionFlags;
}
inline void SetFloatControl(uint64_t control) { _mm_setcsr(static_cast<unsigned>(control)); }
#elif defined(__aarch64__)
constexpr uint64_t kDefaultFloatControl = 0;
constexpr uint64_t kFlushSubnormals = uint64_t{1} << 24;
constexpr uint64_t kRoundUpward = uint64_t{1} << 22;
constexpr uint64_t kRoundTowardZero = uint64_t{3} << 22;
inline uint64_t FloatControl() {
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
inline void SetFloatControl(uint64_t control) {
  __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
}
#else
#error "this architecture's float environment is not known here"
#endif

// While it lives, the calling thread has `changes` besides its own environment.
class HostFloatEnvironment {
 public:
  explicit HostFloatEnvironment(uint64_t changes) : own_(FloatControl()), changed_(own_ | changes) {
    SetFloatControl(changed_);
  }
  ~HostFloatEnvironment() { SetFloatControl(own_); }
  HostFloatEnvironment(const HostFloatEnvironment&) = delete;
  HostFloatEnvironment& operator=(const HostFloatEnvironment&) = delete;

  // Whether the thread still has them, or again.
  bool IsInForce() const { return FloatControl() == changed_; }

 private:
  uint64_t own_;
  uint64_t changed_;
};

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_HOST_FLOAT_ENVIRONMENT_H_
