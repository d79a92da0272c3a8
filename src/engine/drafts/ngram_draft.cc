#include "engine/drafts/ngram_draft.h"

#include <algorithm>
#include <utility>

#include "base/checksum.h"

namespace quire {

uint64_t NGramIndex::Key(std::span<const int32_t> text, int64_t end, int64_t length) {
  const std::span<const int32_t> run =
      text.subspan(static_cast<size_t>(end - length), static_cast<size_t>(length));
  return Hash64(run.data(), run.size_bytes());
}

void NGramIndex::Extend(std::span<const int32_t> text) {
  // The entry of a position is made last, so one that was interrupted is made again: its runs then
  // point to themselves, which is caught below.
  for (auto end = static_cast<int64_t>(previous_.size()); end <= std::ssize(text); ++end) {
    std::array<int32_t, kLengths> before{};
    for (size_t i = 0; i < kLengths; ++i) {
      const int64_t length = kLeast + static_cast<int64_t>(i);
      if (end < length) continue;
      int32_t& last = last_[Key(text, end, length)];
      before[i] = last == end ? 0 : last;
      last = static_cast<int32_t>(end);
    }
    previous_.push_back(before);
  }
}

std::vector<int64_t> NGramIndex::FindContinuations(std::span<const int32_t> text,
                                                   int64_t count) const {
  struct Place {
    int64_t agreement;
    int64_t end;
  };
  std::vector<Place> places;
  const int64_t size = std::ssize(text);
  for (int64_t length = std::min(kMost, size); length >= kLeast; --length) {
    const auto i = static_cast<size_t>(length - kLeast);
    int64_t looked_at = 0;
    for (int64_t end = previous_[static_cast<size_t>(size)][i];
         end > 0 && looked_at < kPlacesMax && std::ssize(places) < kPlacesMax;
         end = previous_[static_cast<size_t>(end)][i], ++looked_at) {
      int64_t agreement = 0;
      while (agreement < std::min(kAgreementMax, end) &&
             text[static_cast<size_t>(end - 1 - agreement)] ==
                 text[static_cast<size_t>(size - 1 - agreement)]) {
        ++agreement;
      }
      const bool is_known = std::any_of(places.begin(), places.end(),
                                        [&](const Place& place) { return place.end == end; });
      if (agreement >= length && !is_known) places.push_back({agreement, end});
    }
    if (std::ssize(places) >= count) break;
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& a, const Place& b) { return a.agreement > b.agreement; });
  std::vector<int64_t> ends;
  for (const Place& place : places) {
    if (std::ssize(ends) == count) break;
    ends.push_back(place.end);
  }
  return ends;
}

namespace {

// What follows at the places, as branches. Each place gets an equal part of the guesses that are
// left; where it agrees with those before it, it takes none and goes on behind them. At the end of
// the text it is followed by its own guesses, so a text that repeats itself goes on doing so. What
// the filter refuses ends a branch.
Status Merge(std::span<const int32_t> text, std::span<const int64_t> places, const DraftJob& job) {
  std::vector<int32_t> path;
  const int64_t filtered = job.filter == nullptr ? 0 : job.filter->accepted();
  for (size_t i = 0; i < places.size(); ++i) {
    int64_t left = (job.guesses_max - job.tree->size()) / static_cast<int64_t>(places.size() - i);
    int64_t parent = kDraftRoot;
    path.clear();
    for (int64_t level = 0; level < job.levels_max; ++level) {
      const int64_t position = places[i] + level;
      const int64_t beyond = position - std::ssize(text);
      const int32_t token =
          beyond < 0 ? text[static_cast<size_t>(position)] : path[static_cast<size_t>(beyond)];
      if (job.tree->FindChild(parent, token) == kDraftRoot && left-- == 0) break;
      if (job.filter != nullptr) {
        QUIRE_ASSIGN_OR_RETURN(const bool may_come, job.filter->Accept(token));
        if (!may_come) break;
      }
      parent = job.tree->AddChild(parent, token);
      path.push_back(token);
    }
    if (job.filter != nullptr) QUIRE_RETURN_IF_ERROR(job.filter->RollbackTo(filtered));
  }
  return {};
}

}  // namespace

// The prediction stands behind the prompt's end, so that the first token of the answer already
// finds where it goes on.
std::span<const int32_t> NGramDrafter::TextOf(const DraftJob& job, Known* known) {
  const std::span<const int32_t> tokens = *job.tokens;
  const std::vector<int32_t>& predicted = job.options->predicted_tokens;
  if (predicted.empty()) return tokens;
  std::vector<int32_t>& text = known->text;
  if (text.empty()) {
    const auto prompt = tokens.first(static_cast<size_t>(job.prompt_tokens));
    const auto end = prompt.last(std::min(prompt.size(), static_cast<size_t>(NGramIndex::kMost)));
    std::vector<int32_t> before(end.begin(), end.end());
    before.insert(before.end(), predicted.begin(), predicted.end());
    text = std::move(before);
  }
  text.insert(text.end(), tokens.begin() + known->own, tokens.end());
  known->own = std::ssize(tokens);
  return text;
}

Status NGramDrafter::Propose(std::span<const DraftJob> jobs, DrawScratch* /*scratch*/) {
  for (const DraftJob& job : jobs) {
    if (*job.state == kNoDraftState) {
      known_.try_emplace(next_state_);
      *job.state = next_state_++;
    }
    Known& known = known_.at(*job.state);
    NGramIndex& index = known.index;
    const std::span<const int32_t> whole = TextOf(job, &known);
    if (std::ssize(whole) - known.begin > kTextMax) {
      index = NGramIndex();
      known.begin = std::ssize(whole) - kTextMax / 2;
    }
    const std::span<const int32_t> text = whole.subspan(static_cast<size_t>(known.begin));
    index.Extend(text);
    // A filter that fails is dropped, and its sample gets no more guesses (Speculator).
    if (!Merge(text, index.FindContinuations(text, job.branches), job).ok()) job.tree->Truncate(0);
  }
  return {};
}

void NGramDrafter::Forget(int64_t* state) noexcept {
  known_.erase(*state);
  *state = kNoDraftState;
}

}  // namespace quire
