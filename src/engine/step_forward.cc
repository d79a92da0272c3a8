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

std::string DescribeDrawError(DrawError error, const Status& filter_status, int64_t sample,
                              int64_t position) {
  const std::string place =
      " for token " + std::to_string(position) + " of sample " + std::to_string(sample);
  if (error == DrawError::kFilterFailed) {
    return filter_status.ToString() + "; SamplingOptions::filter failed" + place;
  }
  if (error == DrawError::kNoneAllowed) {
    return "BadArgument: SamplingOptions::filter allows no token" + place +
           ", not even the end of the answer";
  }
  return "Internal: the logits" + place +
         (error == DrawError::kNotANumber ? " hold NaN or +infinity" : " are all -infinity") +
         "; the model's weights or KV are damaged";
}

}  // namespace

Status EngineImpl::RunStep() {
  for (bool may_admit = true;;) {
    QUIRE_ASSIGN_OR_RETURN(Batch batch, PlanBatch(may_admit));
    if (batch.empty()) {
      if (!may_admit || !AwaitLoad()) return {};
      continue;
    }
    bool plan_anew = false;
    TreeBatch trees;
    QUIRE_RETURN_IF_ERROR(PlanTrees(&batch, &trees, &plan_anew));
    if (plan_anew) continue;
    RunTrees(trees, &batch);
    const Status status = batch.empty() ? Status() : RunBatch(batch, &plan_anew);
    if (plan_anew) continue;
    if (status.ok()) StoreComputed();
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
  *plan_anew = DropFailedLayers(batch);
  if (!*plan_anew && status.code() != StatusCode::kOutOfPages) {
    Batch alone;
    std::copy_if(batch.begin(), batch.end(), std::back_inserter(alone),
                 [&](const Work& work) { return work.request == first; });
    if (alone.size() < batch.size()) {
      status = Attempt(alone);
      if (status.ok()) return status;
      *plan_anew = DropFailedLayers(alone);
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
    for (const Work& work : batch) {
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
    QUIRE_RETURN_IF_ERROR(loads.empty() ? state_.kv().BeginForward(sequence_ids, lengths)
                                        : state_.BeginLoadingForward(sequence_ids, lengths, loads));
    OpenForward forward(&state_.kv());
    QUIRE_RETURN_IF_ERROR(Forward(batch));
    DrawAll(&draws);
    const int64_t computed_ns = clock_->SteadyNs();
    StoreSeen(batch);
    QUIRE_RETURN_IF_ERROR(forward.End());
    int64_t waited_ns = 0;
    for (const Work& work : batch)
      waited_ns += work.layers == nullptr ? 0 : work.layers->waited_ns();
    MeasureSpeed(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
                 computed_ns - start_ns - waited_ns);
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
  logits_.resize(logit_rows.size() * model_->info().vocab_size);
  return model_->Forward({cache_.get(), recurrent_.get()}, token_ids, logit_rows, logits_.data());
}

Result<EngineImpl::Drawn> EngineImpl::PrepareDrawn(Request* request, Sample* sample, int64_t row,
                                                   int64_t draws_max) const {
  Request::ReserveTokens(sample, draws_max);
  if (draws_max > 0) QUIRE_RETURN_IF_ERROR(request->AlignFilter(sample));
  Drawn drawn{.request = request, .sample = sample, .row = row};
  drawn.draws.resize(static_cast<size_t>(draws_max));
  for (Draw& draw : drawn.draws) {
    ReserveLogprobs(request->options, model_->info().vocab_size, &draw);
  }
  drawn.output.request_id = request->id;
  drawn.output.sample = sample - request->samples.data();
  const size_t tokens_max =
      request->answer_of(*sample).size() - sample->reported + static_cast<size_t>(draws_max);
  drawn.output.tokens.reserve(tokens_max);
  if (request->options.logprobs >= 0) drawn.output.logprobs.reserve(tokens_max);
  return drawn;
}

// One draw for each sample whose pending tokens end in this batch; for all unfinished samples of a
// request where its prompt ends. None for a request that is its prompt alone.
Result<std::vector<EngineImpl::Drawn>> EngineImpl::PrepareDraws(const Batch& batch) const {
  std::vector<Drawn> draws;
  int64_t row = 0;
  for (const Work& work : batch) {
    if (!work.ends_pending()) continue;
    const int64_t draws_max = std::min<int64_t>(work.request->options.max_tokens, 1);
    if (work.request->answer_begun()) {
      QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(), PrepareDrawn(work.request, work.sample, row, 1));
    } else {
      for (Sample& sample : work.request->samples) {
        if (sample.finished()) continue;
        QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(),
                               PrepareDrawn(work.request, &sample, row, draws_max));
      }
    }
    ++row;
  }
  return draws;
}

// One draw behind the sample's tokens, which its filter follows.
void EngineImpl::DrawNext(Drawn* drawn, DrawScratch* scratch) const noexcept {
  const auto vocab_size = static_cast<size_t>(model_->info().vocab_size);
  const Request& request = *drawn->request;
  Draw& draw = drawn->draws[static_cast<size_t>(drawn->count++)];
  const auto row = static_cast<size_t>(drawn->row + drawn->last_node);
  DrawInput input{.logits = {logits_.data() + row * vocab_size, vocab_size},
                  .prompt = request.prompt_of(*drawn->sample),
                  .answer = request.answer_of(*drawn->sample),
                  .options = &request.options,
                  .stream = drawn->output.sample};
  if (request.options.filter == nullptr) return DrawToken(input, scratch, &draw);
  AnswerFilter& filter = drawn->sample->filter;
  drawn->filter_status = GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(filter.FillMask(scratch->mask));
    input.mask = scratch->mask;
    DrawToken(input, scratch, &draw);
    if (draw.error != DrawError::kNone || IsEnd(model_->info(), request.options, draw.token))
      return {};
    QUIRE_ASSIGN_OR_RETURN(const bool accepted, filter.Accept(draw.token));
    if (accepted) return {};
    return Status(StatusCode::kInternal,
                  "its mask has token " + std::to_string(draw.token) + ", and Accept refuses it");
  });
  if (!drawn->filter_status.ok()) draw.error = DrawError::kFilterFailed;
}

// Draws from the root, then from each right guess, up to where plain decoding would end the sample.
// The guesses stand behind the sample's tokens meanwhile: each draw sees the history of its path.
void EngineImpl::DrawPath(Drawn* drawn, DrawScratch* scratch) const noexcept {
  const Request& request = *drawn->request;
  std::vector<int32_t>& tokens = drawn->sample->tokens;
  const size_t tokens_before = tokens.size();
  if (drawn->draws.empty()) return;
  for (int64_t guess = kDraftRoot;;) {
    drawn->last_node = guess + 1;
    DrawNext(drawn, scratch);
    const Draw& draw = drawn->draws[static_cast<size_t>(drawn->count - 1)];
    if (drawn->guesses == nullptr || draw.error != DrawError::kNone) break;
    guess = drawn->guesses->FindChild(guess, draw.token);
    if (guess == kDraftRoot || IsEnd(model_->info(), request.options, draw.token)) break;
    tokens.push_back(draw.token);  // there is room: a path ends before the answer is full
    if (StopMatchLength(request.answer_of(*drawn->sample), request.options.stop) > 0) break;
  }
  tokens.resize(tokens_before);
}

void EngineImpl::DrawAll(std::vector<Drawn>* draws) {
  runner_->ParallelFor(static_cast<int64_t>(draws->size()), [&](int64_t index, int worker) {
    DrawPath(&(*draws)[static_cast<size_t>(index)], &draw_scratch_[static_cast<size_t>(worker)]);
  });
  for (Drawn& drawn : *draws) {
    if (drawn.count == 0) continue;
    const DrawError error = drawn.draws[static_cast<size_t>(drawn.count - 1)].error;
    if (error == DrawError::kNone) continue;
    const auto position = static_cast<int64_t>(drawn.sample->tokens.size()) + drawn.count - 1;
    drawn.output.error =
        DescribeDrawError(error, drawn.filter_status, drawn.output.sample, position);
  }
}

void EngineImpl::Commit(const Batch& batch, std::vector<Drawn>* draws) noexcept {
  ++counters_.steps;
  for (const Work& work : batch) {
    if (work.layers != nullptr) CommitLayers(work);
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
      NoteGuesses(drawn);
    }
    for (int64_t i = 0; i < drawn.count; ++i) {
      ApplyDraw(&drawn, &drawn.draws[static_cast<size_t>(i)]);
    }
    const bool says_something =
        !drawn.output.tokens.empty() || drawn.output.finish_reason != FinishReason::kNone;
    if (says_something) due_.push_back(std::move(drawn.output));
  }
  std::erase_if(running_, [](const auto& request) { return request->leader() == nullptr; });
}

}  // namespace quire
