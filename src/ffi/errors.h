// The one place where outcomes become exceptions: a table from StatusCode to the kind of a tvm-ffi
// error. Python declares an exception class for every kind (python/quire/errors.py); a test walks
// both lists.
#ifndef QUIRE_FFI_ERRORS_H_
#define QUIRE_FFI_ERRORS_H_

#include <atomic>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "quire/status.h"

namespace quire::ffi {

struct ErrorKind {
  StatusCode code;
  std::string_view
      kind;  // "quire.OutOfPagesError": prefixed, because kinds are one list for the whole process
};

// One entry per code but kOk, in the order of StatusCode.
std::span<const ErrorKind> ErrorKinds();

// Throws the tvm-ffi error of `status`. REQUIRES: !status.ok()
[[noreturn]] void Throw(const Status& status);
[[noreturn]] void ThrowBadArgument(std::string message);

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) Throw(status);
}

template <typename T>
T ValueOrThrow(Result<T> result) {
  ThrowIfError(result.status());
  return std::move(result).value();
}

// While it lives, a failed check on this thread is an exception, which becomes
// quire.InternalError. On all other threads (workers, tiers) no call of Python's could receive it:
// there the process ends with the message.
class CheckScope {
 public:
  CheckScope();
  ~CheckScope();
  CheckScope(const CheckScope&) = delete;
  CheckScope& operator=(const CheckScope&) = delete;
};

// For the functions that belong to no object: calls `f` in a CheckScope. tvm-ffi passes on what it
// throws.
template <typename F>
auto CallChecked(F&& f) {
  const CheckScope scope;
  return std::forward<F>(f)();
}

// Runs the calls of one object and remembers a defect: after the first Internal outcome, a failed
// check, or an exception that Quire does not throw, its state cannot be trusted and every later
// call is refused. Calls may come from any thread.
class FaultLatch {
 public:
  // f returns Status, Result<T> or a plain value; what comes back is nothing, T or the value.
  // Throws otherwise.
  template <typename F>
  auto Run(F&& f) {
    using R = std::invoke_result_t<F>;
    RefuseAfterFault();
    if constexpr (std::is_same_v<R, Status>) {
      const Status status = Guarded(std::forward<F>(f));
      ThrowNoting(status);
    } else if constexpr (IsResult<R>::value) {
      R result = Guarded(std::forward<F>(f));
      ThrowNoting(result.status());
      return std::move(result).value();
    } else {
      return Guarded(std::forward<F>(f));
    }
  }

 private:
  template <typename T>
  struct IsResult : std::false_type {};
  template <typename T>
  struct IsResult<Result<T>> : std::true_type {};

  template <typename F>
  auto Guarded(F&& f) -> std::invoke_result_t<F> {
    try {
      const CheckScope scope;
      return std::forward<F>(f)();
    } catch (...) {
      ThrowCurrent();
    }
  }

  void RefuseAfterFault();
  void ThrowNoting(const Status& status);
  // From a handler: throws what stands for the exception that is being handled.
  [[noreturn]] void ThrowCurrent();

  std::atomic<bool> faulted_{false};
  std::mutex mutex_;
  std::string fault_;  // message of the first one, guarded by mutex_
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_ERRORS_H_
