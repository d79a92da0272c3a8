#include "quire/status.h"

namespace quire {

struct Status::Rep {
  StatusCode code;
  std::string_view text;
  const StatusDetail* detail;
};

namespace {

constexpr std::string_view kNames[kStatusCodeCount] = {
    "Ok",          "UnknownSequence", "SequenceExists", "BadArgument", "BadState", "OutOfPages",
    "OutOfMemory", "TooLarge",        "NeedsReplay",    "NotFound",    "Timeout",  "Full",
    "Closed",      "WrongRole",       "Remote",         "Unavailable", "Corrupt",  "Incompatible",
    "IoError",     "Cancelled",       "Internal"};

constexpr std::string_view kReasonNames[kRefusalReasonCount] = {
    "", "no_guess_room", "unknown_peer", "no_blend_room", "keeps_no_kv", "unverified_blend"};

const StatusDetail kNoDetail;

}  // namespace

std::string_view StatusCodeName(StatusCode code) {
  const int index = static_cast<int>(code);
  return index >= 0 && index < kStatusCodeCount ? kNames[index] : "UnknownStatusCode";
}

std::string_view RefusalReasonName(RefusalReason reason) {
  const int index = static_cast<int>(reason);
  return index >= 0 && index < kRefusalReasonCount ? kReasonNames[index] : std::string_view();
}

Status::Status(StatusCode code, std::string message, StatusDetail detail) {
  if (const int number = static_cast<int>(code); number <= 0 || number >= kStatusCodeCount) {
    message = "a status was made with the code " + std::to_string(number) +
              ", which is none of an error; its message: " + message;
    code = StatusCode::kInternal;
  }
  struct OwningRep {
    OwningRep(StatusCode code_in, std::string message_in, StatusDetail detail_in)
        : message(std::move(message_in)),
          detail(std::move(detail_in)),
          rep{code_in, message, &detail} {}
    const std::string message;
    const StatusDetail detail;
    const Rep rep;
  };
  auto owner = std::make_shared<const OwningRep>(code, std::move(message), std::move(detail));
  rep_ = std::shared_ptr<const Rep>(owner, &owner->rep);
}

Status Status::OutOfMemory() noexcept {
  static constexpr Rep kRep{StatusCode::kOutOfMemory,
                            "the host's allocator refused; free memory or lower the limits given "
                            "at creation, then call again",
                            &kNoDetail};
  Status status;
  // Shares ownership with nothing, so no control block is allocated.
  status.rep_ = std::shared_ptr<const Rep>(std::shared_ptr<const Rep>(), &kRep);
  return status;
}

StatusCode Status::code() const noexcept { return ok() ? StatusCode::kOk : rep_->code; }

std::string_view Status::message() const noexcept { return ok() ? std::string_view() : rep_->text; }

const StatusDetail& Status::detail() const noexcept { return ok() ? kNoDetail : *rep_->detail; }

std::string Status::ToString() const {
  std::string text(StatusCodeName(code()));
  if (!ok()) text.append(": ").append(rep_->text);
  return text;
}

}  // namespace quire
