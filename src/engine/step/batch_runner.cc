#include "engine/step/batch_runner.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "engine/prefix/open_forward.h"

namespace quire {

namespace {

// Drops the loads of the batch whose layers did not come; whether there were any.
bool DropFailedLayers(const StepBatch& batch, StoreTraffic* store) noexcept {
  bool any = false;
  for (const StepWork& work : batch) {
    if (work.layers != nullptr) any |= store->DropFailedLayers(work.request);
  }
  return any;
}

}  // namespace

Status BatchRunner::Run(const StepBatch& batch, bool* plan_anew) {
  QUIRE_CHECK(!batch.empty());
  Status status = Attempt(batch);
  if (status.ok()) return status;  // requests of the batch may be gone
  Request* const first = batch.front().request;
  *plan_anew = DropFailedLayers(batch, &owners_.traffic.store);
  if (!*plan_anew && status.code() != StatusCode::kOutOfPages) {
    StepBatch alone;
    std::copy_if(batch.begin(), batch.end(), std::back_inserter(alone),
                 [&](const StepWork& work) { return work.request == first; });
    if (alone.size() < batch.size()) {
      status = Attempt(alone);
      if (status.ok()) return status;
      *plan_anew = DropFailedLayers(alone, &owners_.traffic.store);
    }
  }
  if (*plan_anew) return {};
  if (status.code() == StatusCode::kOutOfPages) return status;
  owners_.answers.End(first, FinishReason::kError, status.ToString());
  return {};
}

Status BatchRunner::Attempt(const StepBatch& batch) {
  return GuardEntry([&]() -> Status {
    std::vector<int64_t> sequence_ids;
    std::vector<int64_t> lengths;
    std::vector<LayerLoad> loads;
    std::vector<PromptBlender::Work> to_blend;
    for (const StepWork& work : batch) {
      QUIRE_CHECK(work.sample->has_sequence());
      QUIRE_CHECK(work.tokens >= 1);
      QUIRE_CHECK(work.loaded() + work.tokens <= work.sample->pending());
      QUIRE_CHECK(!work.piece || work.tokens == work.piece->rest.count()) << "a piece is cut";
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
    const int64_t start_ns = owners_.clock.SteadyNs();
    QUIRE_ASSIGN_OR_RETURN(std::vector<Drawn> draws, PrepareDraws(batch));
    owners_.answers.Reserve(draws.size());
    QUIRE_ASSIGN_OR_RETURN(const PromptBlender::OpenPieces pieces, owners_.blender.Open(to_blend));
    QUIRE_RETURN_IF_ERROR(owners_.blender.Begin(sequence_ids, lengths, loads, pieces));
    OpenForward forward(&owners_.holders.state.kv());
    QUIRE_RETURN_IF_ERROR(Forward(batch));
    owners_.drawer.DrawAll(&draws);
    const int64_t computed_ns = owners_.clock.SteadyNs();
    for (const StepWork& work : batch) {
      const int64_t seen = work.sample->computed + work.loaded() + work.tokens;
      owners_.traffic.store.StoreSeen(
          *work.request, work.sample,
          std::min(seen, PromptBlender::ExactEnd(*work.sample, pieces)));
    }
    QUIRE_RETURN_IF_ERROR(forward.End());
    int64_t waited_ns = 0;
    for (const StepWork& work : batch)
      waited_ns += work.layers == nullptr ? 0 : work.layers->waited_ns();
    const int64_t cost =
        std::accumulate(batch.begin(), batch.end(), int64_t{0},
                        [](int64_t sum, const StepWork& work) { return sum + work.cost(); });
    // Steps that only decode take the time of reading the weights.
    const bool has_prompts = std::any_of(batch.begin(), batch.end(),
                                         [](const StepWork& work) { return !work.decodes(); });
    if (has_prompts) owners_.traffic.store.MeasureSpeed(cost, computed_ns - start_ns - waited_ns);
    owners_.blender.Commit(pieces);
    Commit(batch, &draws);
    return {};
  });
}

Status BatchRunner::Forward(const StepBatch& batch) {
  std::vector<int32_t> token_ids;
  std::vector<int64_t> logit_rows;
  for (const StepWork& work : batch) {
    const auto first = work.sample->tokens.begin() + work.sample->computed + work.loaded();
    token_ids.insert(token_ids.end(), first, first + work.tokens);
    if (work.ends_pending()) {
      logit_rows.push_back(static_cast<int64_t>(token_ids.size()) - 1);
    }
  }
  return owners_.model.Forward(owners_.caches, token_ids, logit_rows,
                               owners_.drawer.Logits(std::ssize(logit_rows)));
}

// One draw for each sample whose pending tokens end in this batch; for all unfinished samples of a
// request where its prompt ends. None for a request that is its prompt alone.
Result<std::vector<Drawn>> BatchRunner::PrepareDraws(const StepBatch& batch) const {
  std::vector<Drawn> draws;
  int64_t row = 0;
  for (const StepWork& work : batch) {
    if (!work.ends_pending()) continue;
    const int64_t draws_max = std::min<int64_t>(work.request->options.max_tokens, 1);
    if (work.request->answer_begun()) {
      QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(),
                             owners_.drawer.Prepare(work.request, work.sample, row, 1));
    } else {
      for (Sample& sample : work.request->samples) {
        if (sample.finished()) continue;
        QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(),
                               owners_.drawer.Prepare(work.request, &sample, row, draws_max));
      }
    }
    ++row;
  }
  return draws;
}

void BatchRunner::Commit(const StepBatch& batch, std::vector<Drawn>* draws) noexcept {
  owners_.counter.NoteForward();
  for (const StepWork& work : batch) {
    if (work.layers != nullptr) owners_.traffic.store.CommitLayers(work.request, work.sample);
    owners_.counter.NoteWork(work.request, work.sample, work.tokens);
  }
  owners_.answers.Commit(draws);
}

}  // namespace quire
