#include "engine/traffic/sample_sequences.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/check.h"

namespace quire {

Status SampleSequences::Give(const Request& request, Sample* sample, const PrefixMatch& from) {
  QUIRE_CHECK(!sample->has_sequence()) << "sequence " << sample->sequence_id << " would be lost";
  QUIRE_CHECK(from.length < std::ssize(sample->tokens)) << "the last token has to be computed";
  const int64_t sequence_id = next_id_;
  QUIRE_RETURN_IF_ERROR(from.length == 0
                            ? state_.AddSequence(sequence_id, request.space.long_rope)
                            : state_.kv().ForkSequence(from.sequence_id, sequence_id, from.length));
  if (request.has_window() && !from.has_window) {
    QUIRE_RETURN_IF_ERROR(
        state_.EnableWindow(sequence_id, request.options.window, request.options.sinks));
  }
  ++next_id_;
  prefix_cache_.Touch(from.sequence_id);
  sample->sequence_id = sequence_id;
  sample->computed = from.length;
  sample->approximate_from =
      from.approximate_from < from.length ? from.approximate_from : kExactForever;
  sample->stored = {};
  return {};
}

void SampleSequences::Remove(const Request& request, Sample* sample) noexcept {
  speculator_.Forget(request, sample);
  QUIRE_CHECK(sample->draft_state == kNoDraftState) << "a draft outlives its sequence";
  if (!sample->has_sequence()) return;
  state_.RemoveSequence(sample->sequence_id);
  sample->sequence_id = kNoSequence;
  sample->computed = 0;
  sample->approximate_from = kExactForever;
}

void SampleSequences::RemoveAll(Request* request) noexcept {
  request->layers = nullptr;
  request->remote = nullptr;
  for (Sample& sample : request->samples) Remove(*request, &sample);
}

// What stands before the first approximate token is what any request would compute.
void SampleSequences::RetainExactBeginning(const Request& request, const Sample& sample,
                                           int64_t sequence_id, int64_t exact, int64_t stored) {
  const int64_t length = state_.ForkStart(sequence_id, exact);
  QUIRE_CHECK(length <= exact) << "approximate tokens would be found by any request";
  if (length == 0) return;
  std::vector<int32_t> tokens(sample.tokens.begin(), sample.tokens.begin() + length);
  const PrefixSpace space = request.space.exact();
  if (!state_.kv().ForkSequence(sequence_id, next_id_, length).ok()) return;
  prefix_cache_.Retain(next_id_++, std::move(tokens), space, std::min(stored, length));
}

void SampleSequences::Retain(const Request& request, Sample* sample, bool kept) noexcept {
  QUIRE_CHECK(sample->has_sequence());
  QUIRE_CHECK(sample->computed <= std::ssize(sample->tokens)) << "KV of tokens that are gone";
  const int64_t sequence_id = std::exchange(sample->sequence_id, kNoSequence);
  const int64_t exact = sample->exact();
  const int64_t computed = std::exchange(sample->computed, 0);
  sample->approximate_from = kExactForever;
  // What was stored may be more than what is left: the surplus behind a stop was popped.
  const int64_t stored = std::min(std::exchange(sample->stored, {}).tokens, exact);
  // No other request can use KV from behind a window.
  const bool is_plain = !request.has_window() || state_.DropWindow(sequence_id);
  if (kept && is_plain) {
    try {
      const bool is_exact = exact == computed;
      if (!is_exact) RetainExactBeginning(request, *sample, sequence_id, exact, stored);
      const bool is_of_one = request.space.only_request != PrefixSpace::kAnybody;
      if (is_exact || !is_of_one || !sample->finished()) {
        return prefix_cache_.Retain(sequence_id,
                                    {sample->tokens.begin(), sample->tokens.begin() + computed},
                                    is_exact ? request.space.exact() : request.space, stored);
      }
    } catch (const std::bad_alloc&) {  // then it is removed: retaining is a favour
    }
  }
  state_.RemoveSequence(sequence_id);
}

}  // namespace quire
