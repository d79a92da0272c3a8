// The second half of a step: one forward of the planned batch, the draws behind it, and the commit.
#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/guard.h"
#include "engine/engine_impl.h"
#include "engine/prefix/open_forward.h"

namespace quire {

namespace {

// Drops the loads of the batch whose layers did not come; whether there were any.
template <typename Batch>
bool DropFailedLayers(const Batch& batch, StoreTraffic* store) noexcept {
  bool any = false;
  for (const auto& work : batch) {
    if (work.layers != nullptr) any |= store->DropFailedLayers(work.request);
  }
  return any;
}

}  // namespace

Status EngineImpl::RunStep() {
  const RequestEnder end = [this](Request* request, FinishReason reason, const std::string& why) {
    EndRequest(request, reason, why);
  };
  QUIRE_RETURN_IF_ERROR(prefill_traffic_.TakeJobs(store_traffic_.compute_seconds_per_token(), end,
                                                  [this](const auto& job) { return AddJob(job); }));
  for (bool may_admit = true;;) {
    remote_traffic_.Poll(end);
    QUIRE_ASSIGN_OR_RETURN(Batch batch, PlanBatch(may_admit));
    if (batch.empty()) {
      if (!may_admit) return {};
      const bool any = store_traffic_.AwaitLoad() || remote_traffic_.Await() ||
                       prefill_traffic_.AwaitRoom(clock_.get());
      if (!any) return {};
      continue;
    }
    bool plan_anew = false;
    TreeBatch trees;
    QUIRE_RETURN_IF_ERROR(PlanTrees(&batch, &trees, &plan_anew));
    if (plan_anew) continue;
    RunTrees(trees, &batch);
    const Status status = batch.empty() ? Status() : RunBatch(batch, &plan_anew);
    if (plan_anew) continue;
    if (status.ok()) store_traffic_.StoreComputed();
    if (status.ok()) remote_traffic_.NoteComputed();
    if (status.code() != StatusCode::kOutOfPages) return status;
    MakeRoom();
    may_admit = false;
  }
}

// A batch that fails is tried again with its first request alone: what is wrong with one request
// must not end others, and a step always gets somewhere.
//
// `plan_anew`: nothing was run, and requests whose layers did not come will compute them.
Status EngineImpl::RunBatch(const Batch& batch, bool* plan_anew) {
  Status status = Attempt(batch);
  if (status.ok()) return status;  // requests of the batch may be gone
  Request* const first = batch.front().request;
  *plan_anew = DropFailedLayers(batch, &store_traffic_);
  if (!*plan_anew && status.code() != StatusCode::kOutOfPages) {
    Batch alone;
    std::copy_if(batch.begin(), batch.end(), std::back_inserter(alone),
                 [&](const Work& work) { return work.request == first; });
    if (alone.size() < batch.size()) {
      status = Attempt(alone);
      if (status.ok()) return status;
      *plan_anew = DropFailedLayers(alone, &store_traffic_);
    }
  }
  if (*plan_anew) return {};
  if (status.code() == StatusCode::kOutOfPages) return status;
  EndRequest(first, FinishReason::kError, status.ToString());
  return {};
}

Status EngineImpl::Attempt(const Batch& batch) {
  return GuardEntry([&]() -> Status {
    std::vector<int64_t> sequence_ids;
    std::vector<int64_t> lengths;
    std::vector<LayerLoad> loads;
    std::vector<PromptBlender::Work> to_blend;
    for (const Work& work : batch) {
      if (work.piece) to_blend.push_back({work.request, work.sample, *work.piece});
      sequence_ids.push_back(work.sample->sequence_id);
      lengths.push_back(work.tokens);
      if (work.layers == nullptr) continue;
      work.layers->StartForward();
      loads.push_back({.seq_id = work.sample->sequence_id,
                       .tokens = work.layers->tokens(),
                       .source = work.layers,
                       .only_visible = true});
    }
    const int64_t start_ns = clock_->SteadyNs();
    QUIRE_ASSIGN_OR_RETURN(std::vector<Drawn> draws, PrepareDraws(batch));
    due_.reserve(due_.size() + draws.size());
    QUIRE_ASSIGN_OR_RETURN(const PromptBlender::OpenPieces pieces, blender_.Open(to_blend));
    QUIRE_RETURN_IF_ERROR(blender_.Begin(sequence_ids, lengths, loads, pieces));
    OpenForward forward(&state_.kv());
    QUIRE_RETURN_IF_ERROR(Forward(batch));
    drawer_.DrawAll(&draws);
    const int64_t computed_ns = clock_->SteadyNs();
    for (const Work& work : batch) {
      const int64_t seen = work.sample->computed + work.loaded() + work.tokens;
      store_traffic_.StoreSeen(*work.request, work.sample,
                               std::min(seen, PromptBlender::ExactEnd(*work.sample, pieces)));
    }
    QUIRE_RETURN_IF_ERROR(forward.End());
    int64_t waited_ns = 0;
    for (const Work& work : batch)
      waited_ns += work.layers == nullptr ? 0 : work.layers->waited_ns();
    const int64_t cost =
        std::accumulate(batch.begin(), batch.end(), int64_t{0},
                        [](int64_t sum, const Work& work) { return sum + work.cost(); });
    store_traffic_.MeasureSpeed(cost, computed_ns - start_ns - waited_ns);
    PromptBlender::Commit(pieces, &counters_);
    Commit(batch, &draws);
    return {};
  });
}

Status EngineImpl::Forward(const Batch& batch) {
  std::vector<int32_t> token_ids;
  std::vector<int64_t> logit_rows;
  for (const Work& work : batch) {
    const auto first = work.sample->tokens.begin() + work.sample->computed + work.loaded();
    token_ids.insert(token_ids.end(), first, first + work.tokens);
    if (work.ends_pending()) {
      logit_rows.push_back(static_cast<int64_t>(token_ids.size()) - 1);
    }
  }
  return model_->Forward({cache_.get(), recurrent_.get()}, token_ids, logit_rows,
                         drawer_.Logits(std::ssize(logit_rows)));
}

// One draw for each sample whose pending tokens end in this batch; for all unfinished samples of a
// request where its prompt ends. None for a request that is its prompt alone.
Result<std::vector<Drawn>> EngineImpl::PrepareDraws(const Batch& batch) const {
  std::vector<Drawn> draws;
  int64_t row = 0;
  for (const Work& work : batch) {
    if (!work.ends_pending()) continue;
    const int64_t draws_max = std::min<int64_t>(work.request->options.max_tokens, 1);
    if (work.request->answer_begun()) {
      QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(),
                             drawer_.Prepare(work.request, work.sample, row, 1));
    } else {
      for (Sample& sample : work.request->samples) {
        if (sample.finished()) continue;
        QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(),
                               drawer_.Prepare(work.request, &sample, row, draws_max));
      }
    }
    ++row;
  }
  return draws;
}

void EngineImpl::Commit(const Batch& batch, std::vector<Drawn>* draws) noexcept {
  ++counters_.steps;
  for (const Work& work : batch) {
    if (work.layers != nullptr) store_traffic_.CommitLayers(work.request, work.sample);
    work.sample->computed += work.tokens;
    counters_.computed_tokens += work.tokens;
    work.sample->last_step = counters_.steps;
    work.request->NoteStep(counters_.steps);
  }
  CommitDraws(draws);
}

void EngineImpl::CommitDraws(std::vector<Drawn>* draws) noexcept {
  const int64_t now_ns = clock_->SteadyNs();
  for (Drawn& drawn : *draws) {
    if (drawn.count > 0 && drawn.request->first_token_ns == Request::kNotYet)
      drawn.request->first_token_ns = now_ns;
    if (drawn.draws.empty()) {
      FinishSample(drawn.request, drawn.sample, FinishReason::kLength, &drawn.output);
    } else {
      speculator_.Note({drawn.request, drawn.sample}, drawn.guesses, drawn.count,
                       std::ssize(drawn.draws));
    }
    for (int64_t i = 0; i < drawn.count; ++i) {
      ApplyDraw(&drawn, &drawn.draws[static_cast<size_t>(i)]);
    }
    if (!drawn.output.tokens.empty() && !drawn.request->told_usage) {
      drawn.request->told_usage = true;
      NoteUsage(*drawn.request, now_ns, &drawn.output);
    }
    const bool says_something =
        !drawn.output.tokens.empty() || drawn.output.finish_reason != FinishReason::kNone;
    if (says_something && drawn.request->has_outputs()) due_.push_back(std::move(drawn.output));
  }
  requests_.EraseEnded();
}

}  // namespace quire
