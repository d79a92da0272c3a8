#include "engine/step/step_planner.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/guard.h"

namespace quire {
namespace {

// `match`: what was found of the prompt as its request is admitted; `exact`: of its space. The last
// token has to be computed whatever is known. Needs no memory.
PrefixMiss MissOf(const Request& request, const PrefixSpace& exact, const PrefixMatch& match,
                  const PrefixCache& cache) {
  const std::span<const int32_t> prompt = request.prompt_of(request.samples.front());
  const std::span<const int32_t> usable = prompt.first(prompt.size() - 1);
  const int64_t loading = request.layers == nullptr ? 0 : request.layers->tokens();
  const int64_t there = request.cached.total() + loading;
  if (there >= std::ssize(usable)) return {};
  if (request.miss != MissReason::kNone) {
    return {.kind = PrefixMissKind::kStore, .position = there};
  }
  const int64_t known = std::max(match.known, there);
  if (const std::optional<int64_t> ago = cache.EvictedAgo(usable, exact, known)) {
    return {.kind = PrefixMissKind::kEvicted, .position = known, .evicted_ms = *ago / 1'000'000};
  }
  const bool differs = match.goes_on && match.known == known && known > 0;
  return {.kind = differs ? PrefixMissKind::kDiffers : PrefixMissKind::kNew, .position = known};
}

}  // namespace

Result<StepBatch> StepPlanner::Plan(bool may_admit) {
  for (;;) {
    QUIRE_RETURN_IF_ERROR(GiveSequences());
    if (may_admit) owners_.traffic.StartLoads();
    StepBatch works;
    QUIRE_ASSIGN_OR_RETURN(const std::vector<RunnableSample> running, ViewRunning(&works));
    const int64_t of_loads = PagesOfLoads(works, options_.page_size);
    const Decision decision = DecideNext(
        {.token_budget = options_.prefill_chunk,
         .piece_rows = options_.blend_piece,
         .step_seconds = static_cast<double>(options_.max_step_ms) * 1e-3,
         .seconds_per_token = pace_.seconds_per_token(),
         .page_size = options_.page_size,
         .pages_free = holders_.state.pages_free() - of_loads,
         .sequences_free = options_.max_num_sequences - holders_.requests.running_samples(),
         .pages_evictable_max = holders_.prefix_cache.page_count_max(),
         .standing = StandingRequests(works),
         .running = running,
         .head = may_admit ? ViewHead() : std::nullopt});
    switch (decision.kind) {
      case Decision::Kind::kAdmit: {
        QUIRE_ASSIGN_OR_RETURN(const bool admitted, AdmitHead());
        may_admit = may_admit && admitted;
        break;
      }
      case Decision::Kind::kEvict:
        holders_.prefix_cache.Evict(decision.pages + of_loads);
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
        StepBatch batch;
        for (const Take& take : decision.takes) {
          QUIRE_CHECK(take.tokens >= 1);
          QUIRE_CHECK(take.tokens <= running[static_cast<size_t>(take.index)].pending);
          batch.push_back(works[take.index]);
          batch.back().tokens = take.tokens;
        }
        return batch;
      }
    }
  }
}

// Requests in work of which no sample is in `works`, that ViewRunning made.
int64_t StepPlanner::StandingRequests(const StepBatch& works) const {
  int64_t standing = std::ssize(holders_.requests.running());
  const Request* before = nullptr;
  for (const StepWork& work : works) {
    standing -= work.request != before ? 1 : 0;
    before = work.request;
  }
  QUIRE_CHECK(standing >= 0) << "works of one request do not stand together";
  return standing;
}

// Leaders without a sequence get one; the other samples are forked as soon as their leader has
// computed the prompt.
Status StepPlanner::GiveSequences() {
  for (const auto& request : holders_.requests.running()) {
    Sample* const leader = request->leader();
    QUIRE_CHECK(leader != nullptr) << "request " << request->id << " has ended and is in work";
    if (!leader->has_sequence()) {
      QUIRE_RETURN_IF_ERROR(
          holders_.sequences.Give(*request, leader, holders_.finder.Find(*request, *leader)));
      request->NoteFound(*leader);
    }
    if (request->job != nullptr) QUIRE_RETURN_IF_ERROR(owners_.traffic.prefill.Mark(request.get()));
    // Another sample leads now, and begins elsewhere or has another answer.
    if (owners_.traffic.store.LayersOf(*request, *leader) == nullptr) request->layers = nullptr;
    if (!request->answer_begun() || leader->computed < request->prompt_tokens) continue;
    for (Sample& sample : request->samples) {
      if (sample.finished() || sample.has_sequence()) continue;
      QUIRE_RETURN_IF_ERROR(holders_.sequences.Give(
          *request, &sample, holders_.finder.FindFork(*request, *leader, sample)));
      request->NoteFound(sample);  // where the leader cannot be forked, it begins further ahead
    }
  }
  return {};
}

// What may be computed of a sample behind its first `length` tokens before the next decision. Where
// not all positions can be forked, a leader stops at the end of the prompt, at which samples
// without a sequence are forked, and with recurrent layers all stop where chunks end.
int64_t StepPlanner::PendingNow(const Request& request, const Sample& sample,
                                int64_t length) const {
  int64_t pending = static_cast<int64_t>(sample.tokens.size()) - length;
  if (request.blend != nullptr) {
    pending = std::min(pending, request.blend->NextBorder(length) - length);
  }
  if (holders_.finder.ForksAnywhere(request)) return pending;
  if (!request.has_window()) {
    const int64_t stop = owners_.traffic.store.NextStop(length, request.prompt_tokens);
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

// Whether the next token of each opens a page; all end at the same position, inside a page. If
// several end in the same slot, as samples do that were just forked, only the first can go on
// there: those behind it are said to open a page.
Result<std::vector<bool>> StepPlanner::WhichOpenPages(std::span<const int64_t> sequence_ids) const {
  const std::vector<int64_t> ones(sequence_ids.size(), 1);
  const auto pages_of = [&](size_t first, size_t count) {
    return holders_.state.PagesNeeded(sequence_ids.subspan(first, count),
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

// `works` gets the sample behind each entry. Requests in work that were to be computed along with
// documents which did not come stand: these are learnt first, by requests that came in before them.
Result<std::vector<RunnableSample>> StepPlanner::ViewRunning(StepBatch* works) {
  std::vector<RunnableSample> view;
  owners_.traffic.BeginPlan();
  std::map<int64_t, std::vector<size_t>> inside_pages;  // places in `view`, by length
  for (const auto& request : holders_.requests.running()) {
    if (holders_.requests.WaitsForDocuments(*request)) continue;
    for (Sample& sample : request->samples) {
      if (sample.finished() || !sample.has_sequence()) continue;
      const bool can_run = owners_.traffic.CanRun(*request, sample);
      request->waits_for_peer = request->job != nullptr && !can_run;
      if (!can_run) continue;
      LayerwiseLoad* const layers = owners_.traffic.store.LayersOf(*request, sample);
      const int64_t length = layers == nullptr ? sample.computed : layers->end();
      if (layers == nullptr && length % options_.page_size != 0)
        inside_pages[length].push_back(view.size());
      const std::optional<BlendPlan::Found> piece = owners_.blender.PieceAt(request.get(), length);
      const int64_t pending = PendingNow(*request, sample, length);
      view.push_back({.request_id = request->id,
                      .length = length,
                      .pending = piece ? piece->rest.count() : pending,
                      .opens_page = false,
                      .last_step = sample.last_step,
                      .piece_cost = piece ? piece->cost : 0});
      works->push_back({.request = request.get(),
                        .sample = &sample,
                        .tokens = 0,
                        .layers = layers,
                        .piece = piece});
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

std::optional<WaitingHead> StepPlanner::ViewHead() {
  Request* const request = owners_.traffic.NextToAdmit();
  if (request == nullptr) return {};
  const Sample& leader = *request->leader();
  const StoreTraffic::Start start = owners_.traffic.store.FindStart(*request);
  if (holders_.finder.IsBeingComputed(*request, leader, start.end)) return {};
  // What it is about to use goes last if pages must be found for it.
  holders_.prefix_cache.Touch(start.from.sequence_id);
  owners_.blender.Touch(*request);
  int64_t pending = static_cast<int64_t>(leader.tokens.size()) - start.from.length;
  if (request->has_window())
    pending =
        std::min(pending, owners_.limits.PagesOfWindow(request->options) * options_.page_size);
  return WaitingHead{
      .matched = start.from.length, .pending = pending, .samples = request->unfinished_count()};
}

// False: pages were too few for what a peer is to send, and the request waits on.
Result<bool> StepPlanner::AdmitHead() {
  Request& request = *owners_.traffic.NextToAdmit();
  request.ReserveAnswers();
  holders_.requests.ReserveAdmission();
  const PrefixSpace exact = request.space.exact();
  const StoreTraffic::Start start = owners_.traffic.store.FindStart(request);
  std::unique_ptr<LayerwiseLoad> layers = owners_.traffic.store.MakeLayerwise(&request, start);
  const Status given = holders_.sequences.Give(request, request.leader(), start.from);
  if (!given.ok()) {
    if (layers != nullptr) request.load = layers->TakeLoad();
    return given;
  }
  request.layers = std::move(layers);
  owners_.traffic.store.ImportChunks(&request, start);
  const Result<bool> started = GuardEntry([&]() -> Result<bool> {
    return owners_.traffic.remote.Start(&request,
                                        owners_.traffic.store.compute_seconds_per_token());
  });
  if (!started.ok() || !*started) {  // it waits on, and a request that waits has no sequence
    holders_.sequences.RemoveAll(&request);
    request.cached = {};
    return started;
  }
  request.NoteFound(*request.leader());
  if (!request.admitted_before)
    request.prefix_miss = MissOf(request, exact, start.from, holders_.prefix_cache);
  owners_.traffic.store.NoteStart(&request, start.from.known);
  if (request.admitted_ns == Request::kNotYet) request.admitted_ns = owners_.clock.SteadyNs();
  holders_.requests.Admit(request);
  return true;
}

// The request goes on later where it was: its samples keep their tokens, so what is computed again
// are the same bits. Its KV is retained, and given up from the tail as far as the pages are needed.
void StepPlanner::PreemptYoungest() {
  QUIRE_CHECK(!holders_.requests.running().empty());
  holders_.requests.PreemptYoungest([this](Request& request) {
    owners_.traffic.NotePreempted(&request);
    for (Sample& sample : request.samples) {
      holders_.speculator.Forget(request, &sample);
      if (!sample.has_sequence()) continue;
      owners_.traffic.store.StoreWhole(request, &sample);
      holders_.sequences.Retain(request, &sample, options_.prefix_cache);
    }
  });
  ++preemptions_;
}

// The only running request does not fit although it did at Submit. Pages that it shares in part
// with what is gone by now hold less of it than pages of its own would; computed again it takes
// what CheckFits counted.
void StepPlanner::RestartOrFail() {
  QUIRE_CHECK(holders_.requests.running().size() == 1);
  Request& request = *holders_.requests.running().front();
  if (request.restarted) {
    owners_.answers.End(&request, FinishReason::kError,
                        "OutOfPages: the request runs alone, and the cache has no page left for "
                        "its next token; raise EngineOptions::kv_bytes or lower max_tokens or n");
    return;
  }
  request.restarted = true;
  owners_.traffic.prefill.NotePreempted(&request);
  holders_.sequences.RemoveAll(&request);
}

// After BeginForward found too few pages, against the scheduler's count.
void StepPlanner::MakeRoom() {
  ++short_counts_;
  if (!holders_.prefix_cache.empty()) {
    holders_.prefix_cache.Evict(holders_.state.pages_free() + 1);
  } else if (holders_.requests.running().size() > 1) {
    PreemptYoungest();
  } else {
    RestartOrFail();
  }
}

}  // namespace quire
