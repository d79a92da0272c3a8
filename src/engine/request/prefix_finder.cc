#include "engine/request/prefix_finder.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "base/check.h"

namespace quire {
namespace {

// The better of two; the first on a tie.
PrefixMatch Longer(const PrefixMatch& a, const PrefixMatch& b) {
  return b.length > a.length ? b : a;
}

// visit(request, sample) for each sample in work whose sequence may have exact tokens of the space.
template <typename F>
void ForEachHolder(const RequestQueue& requests, const PrefixSpace& space, F&& visit) {
  for (const auto& request : requests.running()) {
    if (!request->space.shares_exact(space)) continue;
    for (const Sample& sample : request->samples) {
      if (sample.has_sequence()) visit(*request, sample);
    }
  }
}

}  // namespace

// Where the sample's tokens begin in the cache: among what is retained, and in the sequences of
// running samples. Its last token is left out, because it has to be computed for the logits behind
// it. With a window, tokens that see all before them are those of any text, and later ones those of
// texts with the same window.
PrefixMatch PrefixFinder::Find(const Request& request, const Sample& sample, int64_t border) const {
  if (!reuses_ || request.restarted) return {};
  const auto tokens = std::span<const int32_t>(sample.tokens).first(sample.tokens.size() - 1);
  const auto seeing_all =
      request.has_window()
          ? tokens.first(std::min(tokens.size(), static_cast<size_t>(request.options.window)))
          : tokens;
  PrefixMatch best = prefix_cache_.Find(seeing_all, request.space.exact(), border);
  ConsiderRunning(request, sample, seeing_all, border, &best);
  if (request.blend != nullptr && border == 1) ConsiderKept(request, tokens, &best);
  QUIRE_CHECK(best.length <= std::ssize(tokens)) << "the last token has to be computed";
  QUIRE_CHECK(best.length % border == 0);
  return best;
}

// What a request that blends in another way has exact is as good as any.
void PrefixFinder::ConsiderRunning(const Request& request, const Sample& sample,
                                   std::span<const int32_t> seeing_all, int64_t border,
                                   PrefixMatch* best) const {
  const auto tokens = std::span<const int32_t>(sample.tokens).first(sample.tokens.size() - 1);
  ForEachHolder(requests_, request.space, [&](const Request& other, const Sample& candidate) {
    const bool has_same_window = other.has_window_of(request);
    if (&candidate == &sample || (other.has_window() && !has_same_window)) return;
    const auto usable = has_same_window ? tokens : seeing_all;
    const bool blends_alike =
        request.blend != nullptr && border == 1 && other.space == request.space;
    const auto computed = std::span<const int32_t>(candidate.tokens)
                              .first(blends_alike ? candidate.computed : candidate.exact());
    int64_t common = CommonPrefix(usable, computed);
    NoteKnown(common, std::ssize(computed), best);
    if (common > candidate.approximate_from) common = request.blend->BorderBefore(common);
    if (common <= best->length) return;
    const int64_t length = state_.ForkBorder(candidate.sequence_id, common, border);
    if (length <= best->length) return;
    const bool is_inside_a_piece =
        length > candidate.approximate_from && request.blend->BorderBefore(length) != length;
    if (is_inside_a_piece) return;
    best->sequence_id = candidate.sequence_id;
    best->length = length;
    best->has_window = other.has_window();
    best->approximate_from = candidate.approximate_from;
  });
}

// What an equal blend has left: it goes on at the end of a piece, or behind the last one.
void PrefixFinder::ConsiderKept(const Request& request, std::span<const int32_t> tokens,
                                PrefixMatch* best) const {
  PrefixMatch kept = prefix_cache_.Find(tokens, request.space);
  const int64_t border = request.blend->BorderBefore(kept.length);
  if (border < kept.length) {
    kept = prefix_cache_.Find(tokens.first(static_cast<size_t>(border)), request.space);
  }
  if (request.blend->BorderBefore(kept.length) != kept.length) return;
  if (kept.length <= best->length) return;
  NoteKnown(best->known, best->goes_on ? best->known + 1 : best->known, &kept);
  kept.approximate_from = request.blend->begin();
  *best = kept;
}

PrefixFinder::Anchored PrefixFinder::FindBehind(std::span<const int32_t> anchor,
                                                const PrefixSpace& space) const {
  QUIRE_CHECK(reuses_) << "engines without a prefix cache blend nothing";
  Anchored found(state_, std::ssize(anchor), prefix_cache_.FamilyOf(anchor, space));
  ForEachHolder(requests_, space, [&](const Request& other, const Sample& candidate) {
    if (other.has_window()) return;
    const auto computed = std::span<const int32_t>(candidate.tokens).first(candidate.exact());
    if (CommonPrefix(anchor, computed) < std::ssize(anchor)) return;
    found.running_.push_back({candidate.sequence_id, computed.subspan(anchor.size())});
  });
  return found;
}

PrefixMatch PrefixFinder::Anchored::Find(std::span<const int32_t> document) const {
  PrefixMatch best = kept_.Find(document);
  for (const Holder& holder : running_) {
    const int64_t common = CommonPrefix(document, holder.rest);
    const int64_t end = anchor_tokens_ + common;
    const int64_t length =
        common == 0 || end <= best.length ? 0 : state_.ForkStart(holder.sequence_id, end);
    if (length > std::max(anchor_tokens_, best.length)) {
      best = {.sequence_id = holder.sequence_id, .length = length};
    }
  }
  return best;
}

PrefixMatch PrefixFinder::FindFork(const Request& request, const Sample& leader,
                                   const Sample& sample) const {
  QUIRE_CHECK(leader.has_sequence()) << "request " << request.id;
  const PrefixMatch found = Find(request, sample);
  // A leader that found more than the prompt may not be held at the prompt's end any more: the
  // sample then computes the prompt by itself.
  const int64_t end = state_.ForkStart(leader.sequence_id, request.prompt_tokens);
  if (end != request.prompt_tokens) return found;
  return Longer({.sequence_id = leader.sequence_id,
                 .length = request.prompt_tokens,
                 .has_window = request.has_window(),
                 .approximate_from = leader.approximate_from},
                found);
}

bool PrefixFinder::IsBeingComputed(const Request& request, const Sample& sample,
                                   int64_t matched) const {
  if (!reuses_) return false;
  const auto tokens = std::span<const int32_t>(sample.tokens).first(sample.tokens.size() - 1);
  for (const auto& other : requests_.running()) {
    if (!other->space.shares_exact(request.space) || !other->has_window_of(request)) continue;
    if (other->waits_for_peer) continue;  // nobody knows how long
    // Only the beginning of what is blended in another way will be of use.
    const int64_t exact_end = other->blend == nullptr || other->space == request.space
                                  ? kExactForever
                                  : other->blend->begin();
    const bool is_cut = state_.is_recurrent() && other->is_for_peer();
    for (const Sample& candidate : other->samples) {
      if (!candidate.has_sequence() || candidate.pending() <= 1) continue;
      int64_t common = std::min(exact_end, CommonPrefix(tokens, candidate.tokens));
      // A candidate that has gone past this position may no longer be forkable there; but a held
      // prompt is there to a certain position once it has ended.
      const auto end = static_cast<int64_t>(candidate.tokens.size());
      if (is_cut) common = std::min(common, other->HeldEnd());
      if (!ForksAnywhere(request) && common != (is_cut ? other->HeldEnd() : end)) continue;
      if (common - matched >= page_size_) return true;
    }
  }
  return false;
}

}  // namespace quire
