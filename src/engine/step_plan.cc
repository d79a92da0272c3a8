// The first half of a step: who computes what. Every decision is carried out whole before the next
// one is asked for, so an error between two leaves a state from which the next step goes on.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace quire {
namespace {

// The better of two; the first on a tie.
PrefixMatch Longer(const PrefixMatch& a, const PrefixMatch& b) {
  return b.length > a.length ? b : a;
}

}  // namespace

Result<EngineImpl::Batch> EngineImpl::PlanBatch(bool may_admit) {
  for (;;) {
    QUIRE_RETURN_IF_ERROR(GiveSequences());
    if (may_admit) StartLoads();
    Batch works;
    QUIRE_ASSIGN_OR_RETURN(const std::vector<RunnableSample> running, ViewRunning(&works));
    const int64_t of_loads = PagesOfLoads(works);
    const double speed = counters_.compute_seconds_per_token;
    const Decision decision =
        DecideNext({.token_budget = options_.prefill_chunk,
                    .step_seconds = static_cast<double>(options_.max_step_ms) * 1e-3,
                    .seconds_per_token = speed,
                    .page_size = options_.page_size,
                    .pages_free = state_.pages_free() - of_loads,
                    .sequences_free = SequencesFree(),
                    .pages_evictable_max = prefix_cache_.page_count_max(),
                    .running = running,
                    .head = may_admit ? ViewHead() : std::nullopt});
    switch (decision.kind) {
      case Decision::Kind::kAdmit:
        QUIRE_RETURN_IF_ERROR(AdmitHead());
        break;
      case Decision::Kind::kEvict:
        prefix_cache_.Evict(decision.pages + of_loads);
        break;
      case Decision::Kind::kPreempt:
        PreemptYoungest();
        may_admit = false;  // else the pages that were just won could go to a newcomer
        break;
      case Decision::Kind::kRestart:
        RestartOrFail();
        break;
      case Decision::Kind::kRun:
      case Decision::Kind::kNothing: {
        Batch batch;
        for (const Take& take : decision.takes) {
          batch.push_back(works[take.index]);
          batch.back().tokens = take.tokens;
        }
        return batch;
      }
    }
  }
}

// Leaders without a sequence get one; the other samples are forked as soon as their leader has
// computed the prompt.
Status EngineImpl::GiveSequences() {
  for (const auto& request : running_) {
    Sample* const leader = request->leader();
    if (!leader->has_sequence()) {
      QUIRE_RETURN_IF_ERROR(GiveSequence(*request, leader, FindPrefix(*request, *leader)));
    }
    // Another sample leads now, and begins elsewhere or has another answer.
    if (LayersOf(*request, *leader) == nullptr) request->layers = nullptr;
    if (!request->answer_begun() || leader->computed < request->prompt_tokens) continue;
    for (Sample& sample : request->samples) {
      if (sample.finished() || sample.has_sequence()) continue;
      QUIRE_RETURN_IF_ERROR(GiveSequence(*request, &sample, FindFork(*request, *leader, sample)));
    }
  }
  return {};
}

Status EngineImpl::GiveSequence(const Request& request, Sample* sample, const PrefixMatch& from) {
  const int64_t sequence_id = next_sequence_id_;
  QUIRE_RETURN_IF_ERROR(from.length == 0
                            ? state_.AddSequence(sequence_id, request.space.long_rope)
                            : state_.kv().ForkSequence(from.sequence_id, sequence_id, from.length));
  if (request.has_window() && !from.has_window) {
    QUIRE_RETURN_IF_ERROR(
        state_.EnableWindow(sequence_id, request.options.window, request.options.sinks));
  }
  ++next_sequence_id_;
  prefix_cache_.Touch(from.sequence_id);
  sample->sequence_id = sequence_id;
  sample->computed = from.length;
  sample->stored = {};
  return {};
}

// Where the sample's tokens begin in the cache: among what is retained, and in the sequences of
// running samples. Its last token is left out, because it has to be computed for the logits behind
// it. With a window, tokens that see all before them are those of any text, and later ones those of
// texts with the same window.
PrefixMatch EngineImpl::FindPrefix(const Request& request, const Sample& sample,
                                   int64_t border) const {
  if (!options_.prefix_cache || request.restarted) return {};
  const auto tokens = std::span<const int32_t>(sample.tokens).first(sample.tokens.size() - 1);
  const auto seeing_all =
      request.has_window()
          ? tokens.first(std::min(tokens.size(), static_cast<size_t>(request.options.window)))
          : tokens;
  PrefixMatch best = prefix_cache_.Find(seeing_all, request.space, border);
  for (const auto& other : running_) {
    const bool has_same_window = other->has_window_of(request);
    if (other->space != request.space || (other->has_window() && !has_same_window)) continue;
    const auto usable = has_same_window ? tokens : seeing_all;
    for (const Sample& candidate : other->samples) {
      if (!candidate.has_sequence() || &candidate == &sample) continue;
      const auto computed = std::span<const int32_t>(candidate.tokens).first(candidate.computed);
      const int64_t common = CommonPrefix(usable, computed);
      best.known = std::max(best.known, common);
      if (common <= best.length) continue;
      const int64_t length = state_.ForkBorder(candidate.sequence_id, common, border);
      if (length <= best.length) continue;
      best.sequence_id = candidate.sequence_id;
      best.length = length;
      best.has_window = other->has_window();
    }
  }
  return best;
}

PrefixMatch EngineImpl::FindFork(const Request& request, const Sample& leader,
                                 const Sample& sample) const {
  const PrefixMatch found = FindPrefix(request, sample);
  // A leader that found more than the prompt may not be held at the prompt's end any more: the
  // sample then computes the prompt by itself.
  const int64_t end = state_.ForkStart(leader.sequence_id, request.prompt_tokens);
  if (end != request.prompt_tokens) return found;
  return Longer({.sequence_id = leader.sequence_id,
                 .length = request.prompt_tokens,
                 .has_window = request.has_window()},
                found);
}

// Whether a running sample is about to compute more of this one's beginning than is there now. To
// wait for it costs a few steps and saves all that work; a page is the least that is worth it, as
// that is what a fork costs.
bool EngineImpl::IsPrefixBeingComputed(const Request& request, const Sample& sample,
                                       int64_t matched) const {
  if (!options_.prefix_cache) return false;
  const auto tokens = std::span<const int32_t>(sample.tokens).first(sample.tokens.size() - 1);
  for (const auto& other : running_) {
    if (other->space != request.space || !other->has_window_of(request)) continue;
    for (const Sample& candidate : other->samples) {
      if (!candidate.has_sequence() || candidate.pending() <= 1) continue;
      const int64_t common = CommonPrefix(tokens, candidate.tokens);
      // Of what a candidate has gone past nothing can be forked, or nothing for sure.
      const auto end = static_cast<int64_t>(candidate.tokens.size());
      if (!ForksAnywhere(request) && common != end) continue;
      if (common - matched >= options_.page_size) return true;
    }
  }
  return false;
}

// What may be computed of a sample behind its first `length` tokens before the next decision. Where
// not all positions can be forked, a leader stops at the end of the prompt, at which samples
// without a sequence are forked, and with recurrent layers all stop where chunks end.
int64_t EngineImpl::PendingNow(const Request& request, const Sample& sample, int64_t length) const {
  int64_t pending = static_cast<int64_t>(sample.tokens.size()) - length;
  if (ForksAnywhere(request)) return pending;
  if (store_ != nullptr && !request.has_window()) {
    const int64_t stop = store_->NextStop(length, request.prompt_tokens);
    pending = std::min(pending, stop - length);
  }
  const int64_t to_prompt_end = request.prompt_tokens - length;
  if (to_prompt_end <= 0) return pending;
  const bool has_followers =
      std::any_of(request.samples.begin(), request.samples.end(), [&](const Sample& other) {
        return &other != &sample && !other.finished() && !other.has_sequence();
      });
  return has_followers ? std::min(pending, to_prompt_end) : pending;
}

// Whether the next token of each opens a page; all end at the same position, inside a page. Of
// sequences that end in the same slot, as samples do that were just forked, only the first can go
// on there: those behind it are said to open a page.
Result<std::vector<bool>> EngineImpl::WhichOpenPages(std::span<const int64_t> sequence_ids) const {
  const std::vector<int64_t> ones(sequence_ids.size(), 1);
  const auto pages_of = [&](size_t first, size_t count) {
    return state_.PagesNeeded(sequence_ids.subspan(first, count),
                              std::span(ones).subspan(first, count));
  };
  std::vector<bool> opens(sequence_ids.size());
  int64_t alone = 0;
  for (size_t i = 0; i < opens.size(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t pages, pages_of(i, 1));
    opens[i] = pages > 0;
    alone += pages;
  }
  // No step has more of them than a chunk has tokens.
  const size_t asked = std::min(opens.size(), static_cast<size_t>(options_.prefill_chunk));
  std::fill(opens.begin() + static_cast<ptrdiff_t>(asked), opens.end(), true);
  if (asked == 1) return opens;
  QUIRE_ASSIGN_OR_RETURN(const int64_t together, pages_of(0, asked));
  if (asked == opens.size() && together <= alone) return opens;
  int64_t before = 0;
  for (size_t i = 0; i < asked; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t pages, pages_of(0, i + 1));
    if (pages > before) opens[i] = true;
    before = pages;
  }
  return opens;
}

// `works` gets the sample behind each entry.
Result<std::vector<RunnableSample>> EngineImpl::ViewRunning(Batch* works) const {
  std::vector<RunnableSample> view;
  std::map<int64_t, std::vector<size_t>> inside_pages;  // places in `view`, by length
  for (const auto& request : running_) {
    for (Sample& sample : request->samples) {
      if (sample.finished() || !sample.has_sequence()) continue;
      LayerwiseLoad* const layers = LayersOf(*request, sample);
      const int64_t length = layers == nullptr ? sample.computed : layers->end();
      if (layers == nullptr && length % options_.page_size != 0)
        inside_pages[length].push_back(view.size());
      view.push_back({.request_id = request->id,
                      .length = length,
                      .pending = PendingNow(*request, sample, length),
                      .opens_page = false,
                      .last_step = sample.last_step});
      works->push_back(
          {.request = request.get(), .sample = &sample, .tokens = 0, .layers = layers});
    }
  }
  for (const auto& [length, places] : inside_pages) {
    std::vector<int64_t> ids;
    for (const size_t place : places) ids.push_back((*works)[place].sample->sequence_id);
    QUIRE_ASSIGN_OR_RETURN(const std::vector<bool> opens, WhichOpenPages(ids));
    for (size_t i = 0; i < places.size(); ++i) view[places[i]].opens_page = opens[i];
  }
  return view;
}

// That the tokens which are still to be loaded will take; the scheduler sees them as held.
int64_t EngineImpl::PagesOfLoads(const Batch& works) const {
  int64_t pages = 0;
  for (const Work& work : works) {
    const int64_t length = work.sample->computed;
    pages +=
        PagesForAppend(length, work.loaded(), options_.page_size, length % options_.page_size != 0);
  }
  return pages;
}

// The first that waits, but those for which a store is bringing something: they let others pass.
// Null if there is none among the first few, for which the store was asked.
Request* EngineImpl::NextToAdmit() const {
  const size_t count = store_ == nullptr ? 1 : static_cast<size_t>(kLoadsMax);
  for (size_t i = 0; i < std::min(count, waiting_.size()); ++i) {
    if (!waiting_[i]->held_back) return waiting_[i].get();
  }
  return nullptr;
}

std::optional<WaitingHead> EngineImpl::ViewHead() {
  Request* const request = NextToAdmit();
  if (request == nullptr) return {};
  const Sample& leader = *request->leader();
  const Start start = FindStart(*request);
  if (IsPrefixBeingComputed(*request, leader, start.end)) return {};
  // What it is about to use goes last if pages must be found for it.
  prefix_cache_.Touch(start.from.sequence_id);
  int64_t pending = static_cast<int64_t>(leader.tokens.size()) - start.from.length;
  if (request->has_window())
    pending = std::min(pending, PagesOfWindow(request->options) * options_.page_size);
  return WaitingHead{
      .matched = start.from.length, .pending = pending, .samples = request->unfinished_count()};
}

Status EngineImpl::AdmitHead() {
  Request& request = *NextToAdmit();
  request.ReserveAnswers();
  running_.reserve(running_.size() + 1);
  const Start start = FindStart(request);
  std::unique_ptr<LayerwiseLoad> layers = MakeLayerwise(&request, start);
  const Status given = GiveSequence(request, request.leader(), start.from);
  if (!given.ok()) {
    if (layers != nullptr) request.load = layers->TakeLoad();
    return given;
  }
  request.layers = std::move(layers);
  ImportChunks(&request, start);
  NoteStart(&request, start.from.known);
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& other) { return other.get() == &request; });
  turn_ = std::max(turn_, request.turn);
  if (request.admitted_ns == Request::kNotYet) request.admitted_ns = clock_->SteadyNs();
  running_.push_back(std::move(*place));
  waiting_.erase(place);
  return {};
}

// The request goes on later where it was: its samples keep their tokens, so what is computed again
// are the same bits. Its KV is retained, and given up from the tail as far as the pages are needed.
void EngineImpl::PreemptYoungest() {
  waiting_.emplace_front();  // may throw, so it comes first
  Request& request = *running_.back();
  request.layers = nullptr;
  for (Sample& sample : request.samples) {
    ForgetDraft(request, &sample);
    if (sample.has_sequence()) RetainOrRemove(request, &sample);
  }
  waiting_.front() = std::move(running_.back());
  running_.pop_back();
  ++counters_.preemptions;
}

// The only running request does not fit although it did at Submit. Pages that it shares in part
// with what is gone by now hold less of it than pages of its own would; computed anew it takes what
// CheckFits counted.
void EngineImpl::RestartOrFail() {
  Request& request = *running_.front();
  if (request.restarted) {
    EndRequest(&request, FinishReason::kError,
               "OutOfPages: request " + std::to_string(request.id) +
                   " runs alone and the cache has no page left for its next token");
    return;
  }
  request.restarted = true;
  DropSequences(&request);
}

// After BeginForward found too few pages, against the scheduler's count.
void EngineImpl::MakeRoom() {
  ++short_counts_;
  if (!prefix_cache_.empty()) {
    prefix_cache_.Evict(state_.pages_free() + 1);
  } else if (running_.size() > 1) {
    PreemptYoungest();
  } else {
    RestartOrFail();
  }
}

}  // namespace quire
