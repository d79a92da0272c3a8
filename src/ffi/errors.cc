#include "ffi/errors.h"

#include <tvm/ffi/error.h>

#include <exception>
#include <iterator>
#include <new>

namespace quire::ffi {
namespace {

constexpr ErrorKind kErrorKinds[] = {
    ErrorKind{StatusCode::kUnknownSequence, "quire.UnknownSequenceError"},
    ErrorKind{StatusCode::kSequenceExists, "quire.SequenceExistsError"},
    ErrorKind{StatusCode::kBadArgument, "quire.BadArgumentError"},
    ErrorKind{StatusCode::kBadState, "quire.BadStateError"},
    ErrorKind{StatusCode::kOutOfPages, "quire.OutOfPagesError"},
    ErrorKind{StatusCode::kOutOfMemory, "quire.OutOfMemoryError"},
    ErrorKind{StatusCode::kTooLarge, "quire.TooLargeError"},
    ErrorKind{StatusCode::kNeedsReplay, "quire.NeedsReplayError"},
    ErrorKind{StatusCode::kNotFound, "quire.NotFoundError"},
    ErrorKind{StatusCode::kTimeout, "quire.TimeoutError"},
    ErrorKind{StatusCode::kFull, "quire.FullError"},
    ErrorKind{StatusCode::kClosed, "quire.ClosedError"},
    ErrorKind{StatusCode::kWrongRole, "quire.WrongRoleError"},
    ErrorKind{StatusCode::kRemote, "quire.RemoteError"},
    ErrorKind{StatusCode::kUnavailable, "quire.UnavailableError"},
    ErrorKind{StatusCode::kCorrupt, "quire.CorruptError"},
    ErrorKind{StatusCode::kIncompatible, "quire.IncompatibleError"},
    ErrorKind{StatusCode::kIoError, "quire.IoError"},
    ErrorKind{StatusCode::kCancelled, "quire.CancelledError"},
    ErrorKind{StatusCode::kInternal, "quire.InternalError"},
};

// Lookup is by position; a new code without an entry, or one out of order, does not compile.
constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kErrorKinds); ++i) {
    if (static_cast<size_t>(kErrorKinds[i].code) != i + 1) return false;
  }
  return true;
}
static_assert(std::size(kErrorKinds) == static_cast<size_t>(kStatusCodeCount) - 1);
static_assert(InOrder());

}  // namespace

std::span<const ErrorKind> ErrorKinds() { return kErrorKinds; }

void Throw(const Status& status) {
  const ErrorKind& entry = kErrorKinds[static_cast<size_t>(status.code()) - 1];
  // No backtrace: it would name this line for every error.
  throw tvm::ffi::Error(std::string(entry.kind), std::string(status.message()), std::string());
}

void ThrowBadArgument(std::string message) {
  Throw(Status(StatusCode::kBadArgument, std::move(message)));
}

void FaultLatch::RefuseAfterFault() {
  if (!faulted_.load(std::memory_order_acquire)) return;
  std::string message = "this object refuses further use after an internal error: ";
  {
    const std::lock_guard lock(mutex_);
    message += fault_;
  }
  Throw(Status(StatusCode::kInternal, std::move(message)));
}

void FaultLatch::ThrowNoting(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInternal) {
    const std::lock_guard lock(mutex_);
    if (!faulted_.load(std::memory_order_relaxed)) fault_ = status.message();
    faulted_.store(true, std::memory_order_release);
  }
  Throw(status);
}

void FaultLatch::ThrowCurrent() {
  try {
    throw;
  } catch (const tvm::ffi::Error&) {
    throw;  // ours, from the reading of arguments
  } catch (const std::bad_alloc&) {
    Throw(Status::OutOfMemory());
  } catch (const std::exception& error) {
    const Status status(StatusCode::kInternal, error.what());
    ThrowNoting(status);
    Throw(status);
  }
}

}  // namespace quire::ffi
