#include "ffi/errors.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "quire/check_failure.h"

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

// Length of the well-formed UTF-8 character that the text begins with; 0 if it begins with none.
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (length == 0 || lead > 0xF4 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Longer than needed, surrogates, beyond U+10FFFF.
  if (lead == 0xE0 && byte(1) < 0xA0) return 0;
  if (lead == 0xED && byte(1) > 0x9F) return 0;
  if (lead == 0xF0 && byte(1) < 0x90) return 0;
  return lead == 0xF4 && byte(1) > 0x8F ? 0 : length;
}

// The message with bytes that are not UTF-8 as \xNN: messages quote files and paths, and Python
// takes UTF-8 alone.
std::string AsUtf8(std::string_view message) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  while (!message.empty()) {
    const size_t length = Utf8Length(message);
    if (length > 0) {
      text += message.substr(0, length);
    } else {
      const auto byte = static_cast<unsigned char>(message[0]);
      text += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
    message.remove_prefix(std::max<size_t>(length, 1));
  }
  return text;
}

constexpr std::string_view kInternalKind = "quire.InternalError";
static_assert(kErrorKinds[static_cast<size_t>(StatusCode::kInternal) - 1].kind == kInternalKind);

thread_local int check_scopes = 0;

void ThrowInScope(std::string_view message) {
  if (check_scopes > 0 && std::uncaught_exceptions() == 0) {
    throw tvm::ffi::Error(std::string(kInternalKind), AsUtf8(message), std::string());
  }
  std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()), message.data());
  std::fflush(stderr);
}

// Set as the library is loaded. What it replaces is the default: the library has a copy of Quire of
// its own.
[[maybe_unused]] const CheckFailureHandler kHandlerBefore = SetCheckFailureHandler(&ThrowInScope);

}  // namespace

CheckScope::CheckScope() { ++check_scopes; }
CheckScope::~CheckScope() { --check_scopes; }

std::span<const ErrorKind> ErrorKinds() { return kErrorKinds; }

void Throw(const Status& status) {
  const ErrorKind& entry = kErrorKinds[static_cast<size_t>(status.code()) - 1];
  const StatusDetail& detail = status.detail();
  std::optional<tvm::ffi::ObjectRef> context;
  if (!detail.option.empty() || detail.reason != RefusalReason::kOther) {
    using tvm::ffi::String;
    context = tvm::ffi::Map<String, String>{
        {"option", String(detail.option)},
        {"reason", String(std::string(RefusalReasonName(detail.reason)))}};
  }
  // No backtrace: it would name this line for every error.
  throw tvm::ffi::Error(std::string(entry.kind), AsUtf8(status.message()), std::string(),
                        std::nullopt, std::move(context));
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
  message += "; create a new one";
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
  } catch (const tvm::ffi::Error& error) {
    // A failed check; all others are ours too, from the reading of arguments.
    if (error.kind() == kInternalKind) ThrowNoting(Status(StatusCode::kInternal, error.message()));
    throw;
  } catch (const std::bad_alloc&) {
    Throw(Status::OutOfMemory());
  } catch (const std::exception& error) {
    const Status status(StatusCode::kInternal, error.what());
    ThrowNoting(status);
    Throw(status);
  }
}

}  // namespace quire::ffi
