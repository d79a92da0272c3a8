#include "engine/sampling/answer_filter.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/check.h"

namespace quire {

void AnswerFilter::Drop() noexcept {
  filter_ = nullptr;
  accepted_ = 0;
}

void AnswerFilter::DropFor(const Status& error) noexcept {
  Drop();
  if (error.code() != StatusCode::kOutOfMemory) has_failed_ = true;
}

Status AnswerFilter::Align(const TokenFilter& of_request, std::span<const int32_t> answer) {
  if (filter_ == nullptr) {
    QUIRE_ASSIGN_OR_RETURN(filter_, of_request.Fork());
    if (filter_ == nullptr)
      return Status(StatusCode::kInternal, "SamplingOptions::filter: Fork gave no filter");
  }
  QUIRE_RETURN_IF_ERROR(RollbackTo(std::min(accepted_, std::ssize(answer))));
  while (accepted_ < std::ssize(answer)) {
    const int32_t token = answer[static_cast<size_t>(accepted_)];
    QUIRE_ASSIGN_OR_RETURN(const bool accepted, Accept(token));
    if (accepted) continue;
    const std::string place = std::to_string(accepted_);
    Drop();
    return Status(StatusCode::kInternal,
                  "SamplingOptions::filter refuses token " + std::to_string(token) +
                      ", which it allowed as number " + place + " of the answer");
  }
  return {};
}

Status AnswerFilter::FillMask(std::span<uint32_t> mask) {
  QUIRE_CHECK(is_there());
  Status status = filter_->FillMask(mask);
  if (!status.ok()) DropFor(status);
  return status;
}

Result<bool> AnswerFilter::Accept(int32_t token) {
  QUIRE_CHECK(is_there());
  Result<bool> accepted = filter_->Accept(token);
  if (!accepted.ok()) {
    DropFor(accepted.status());
  } else if (*accepted) {
    ++accepted_;
  }
  return accepted;
}

Status AnswerFilter::RollbackTo(int64_t count) {
  if (count == accepted_) return {};
  QUIRE_CHECK(is_there() && count < accepted_) << "to " << count << " from " << accepted_;
  Status status = filter_->Rollback(accepted_ - count);
  if (status.ok()) {
    accepted_ = count;
  } else {
    DropFor(status);
  }
  return status;
}

}  // namespace quire
