// Outcomes as values. Every public call of Quire returns a Status or a Result<T>; only the language
// bindings throw.
#ifndef QUIRE_STATUS_H_
#define QUIRE_STATUS_H_

#include <cassert>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace quire {

// The closed list of outcomes. There is no "unsupported": what is asked for is done right.
enum class StatusCode : int {
  kOk = 0,
  kUnknownSequence,  // no sequence (or request) with this id
  kSequenceExists,   // the id is taken
  kBadArgument,      // a value is out of range or of the wrong shape or dtype
  kBadState,         // the call is not legal now
  kOutOfPages,       // the cache has too few free pages; remove or pop sequences and call again
  kOutOfMemory,      // the host's allocator refused
  kTooLarge,         // over a configured limit
  kNeedsReplay,  // the state at that position is gone; recompute from the position in the message
  kNotFound,
  kTimeout,
  kFull,
  kClosed,
  kWrongRole,
  kRemote,
  kUnavailable,
  kCorrupt,       // bytes that fail their checks
  kIncompatible,  // sound bytes of another model, version or layout
  kIoError,
  kCancelled,
  kInternal,  // a defect of Quire
};
inline constexpr int kStatusCodeCount = static_cast<int>(StatusCode::kInternal) + 1;

// The code's name as it stands in messages: "UnknownSequence", ...
std::string_view StatusCodeName(StatusCode code);

// Why an option was refused, where a caller has to tell the causes apart.
enum class RefusalReason : int {
  kOther,            // its value is wrong, or what the message says
  kNoGuessRoom,      // the engine has no room for guesses: EngineOptions::max_tree_nodes
  kUnknownPeer,      // no address of an attached peer: PrefillPeerOptions::addresses
  kNoBlendRoom,      // the engine has no room for blended prompts: EngineOptions::blend_piece
  kKeepsNoKV,        // the engine keeps no KV between requests: EngineOptions::prefix_cache
  kUnverifiedBlend,  // the model has no verdict, or one against it: BlendRequest::unverified
};
inline constexpr int kRefusalReasonCount = static_cast<int>(RefusalReason::kUnverifiedBlend) + 1;

// A word for programs: "no_guess_room", ...; empty for kOther.
std::string_view RefusalReasonName(RefusalReason reason);

// What an error is about, for programs: the words of a message are for people, and may change.
struct StatusDetail {
  std::string option = {};  // the member of the caller's options: "predicted_tokens"; may be empty
  RefusalReason reason = RefusalReason::kOther;
};

// Code, message and detail. Cheap to return when ok (one null pointer). Copies share them.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  // A code that is none of an error (kOk, or out of the list) becomes kInternal, with a message
  // that says so.
  Status(StatusCode code, std::string message, StatusDetail detail = {});

  // Needs no memory, so that it can be returned when there is none.
  static Status OutOfMemory() noexcept;

  bool ok() const noexcept { return rep_ == nullptr; }
  StatusCode code() const noexcept;
  std::string_view message() const noexcept;
  const StatusDetail& detail() const noexcept;
  std::string ToString() const;  // "OutOfPages: BeginForward: ..." or "Ok"

 private:
  struct Rep;
  std::shared_ptr<const Rep> rep_;
};

// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!status_.ok());
  }

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }
  // REQUIRES: ok()
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace quire

#define QUIRE_CONCAT_INNER_(a, b) a##b
#define QUIRE_CONCAT_(a, b) QUIRE_CONCAT_INNER_(a, b)

#define QUIRE_RETURN_IF_ERROR(expr)                \
  do {                                             \
    ::quire::Status quire_status_ = (expr);        \
    if (!quire_status_.ok()) return quire_status_; \
  } while (false)

// QUIRE_ASSIGN_OR_RETURN(auto x, F()): x from the Result of F(), or return its Status.
#define QUIRE_ASSIGN_OR_RETURN(declaration, expr) \
  QUIRE_ASSIGN_OR_RETURN_(QUIRE_CONCAT_(quire_result_, __LINE__), declaration, expr)
#define QUIRE_ASSIGN_OR_RETURN_(result, declaration, expr) \
  auto result = (expr);                                    \
  if (!result.ok()) return result.status();                \
  declaration = *std::move(result)

#endif  // QUIRE_STATUS_H_
