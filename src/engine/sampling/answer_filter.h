// The filter of one sample: a fork of its request's, which follows the tokens that are drawn or
// guessed for the answer.
#ifndef QUIRE_ENGINE_SAMPLING_ANSWER_FILTER_H_
#define QUIRE_ENGINE_SAMPLING_ANSWER_FILTER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// After an error the fork is dropped, as nobody knows where it stands: the next Align makes
// another one, which accepts the whole answer again.
class AnswerFilter {
 public:
  // Brings it to the end of the answer. REQUIRES: what it has accepted, as far as the answer goes,
  // is the answer.
  Status Align(const TokenFilter& of_request, std::span<const int32_t> answer);
  // The following REQUIRE Align, and no error since.
  Status FillMask(std::span<uint32_t> mask);
  Result<bool> Accept(int32_t token);
  // Back to the first `count` tokens that it has accepted.
  Status RollbackTo(int64_t count);
  int64_t accepted() const { return accepted_; }
  bool is_there() const { return filter_ != nullptr; }
  // Whether a fork was dropped for an error of its own. One that fails for a guess may well fail
  // for the next one, and is worth no guesses.
  bool has_failed() const { return has_failed_; }
  void Drop() noexcept;

 private:
  void DropFor(const Status& error) noexcept;

  std::unique_ptr<TokenFilter> filter_;  // null: not made yet, or dropped
  int64_t accepted_ = 0;
  bool has_failed_ = false;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_SAMPLING_ANSWER_FILTER_H_
