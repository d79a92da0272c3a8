#include "engine/step/answer_drawer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kernels/backend.h"

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

AnswerDrawer::AnswerDrawer(const Model* model, const Backend& backend,
                           std::shared_ptr<ParallelRunner> runner, int64_t rows_max)
    : model_(*model), runner_(std::move(runner)) {
  const int64_t vocab_size = model_.info().vocab_size;
  logits_.reserve(static_cast<size_t>(rows_max * vocab_size));
  scratch_.reserve(static_cast<size_t>(runner_->worker_count()));
  for (int i = 0; i < runner_->worker_count(); ++i) scratch_.emplace_back(vocab_size, backend);
}

float* AnswerDrawer::Logits(int64_t row_count) {
  logits_.resize(static_cast<size_t>(row_count * model_.info().vocab_size));
  return logits_.data();
}

int64_t AnswerDrawer::bytes() const {
  auto bytes = static_cast<int64_t>(logits_.capacity() * sizeof(float));
  for (const DrawScratch& scratch : scratch_) bytes += scratch.bytes();
  return bytes;
}

Result<Drawn> AnswerDrawer::Prepare(Request* request, Sample* sample, int64_t row,
                                    int64_t draws_max) const {
  Request::ReserveTokens(sample, draws_max);
  Drawn drawn{.request = request, .sample = sample, .row = row};
  // A filter's own error ends its sample, as one of the draw does, and leaves the others alone.
  if (draws_max > 0) drawn.filter_status = request->AlignFilter(sample);
  if (drawn.filter_status.code() == StatusCode::kOutOfMemory) return drawn.filter_status;
  drawn.draws.resize(static_cast<size_t>(draws_max));
  for (Draw& draw : drawn.draws) {
    ReserveLogprobs(request->options, model_.info().vocab_size, &draw);
  }
  drawn.output.request_id = request->id;
  drawn.output.sample = sample - request->samples.data();
  const size_t tokens_max =
      request->answer_of(*sample).size() - sample->reported + static_cast<size_t>(draws_max);
  drawn.output.tokens.reserve(tokens_max);
  if (request->options.logprobs >= 0) drawn.output.logprobs.reserve(tokens_max);
  return drawn;
}

// One draw behind the sample's tokens, which its filter follows unless it has failed.
void AnswerDrawer::DrawNext(Drawn* drawn, DrawScratch* scratch) const noexcept {
  const auto vocab_size = static_cast<size_t>(model_.info().vocab_size);
  const Request& request = *drawn->request;
  QUIRE_CHECK(drawn->count < std::ssize(drawn->draws)) << "more is drawn than was prepared";
  QUIRE_CHECK((drawn->row + drawn->last_node + 1) * model_.info().vocab_size <=
              std::ssize(logits_));
  Draw& draw = drawn->draws[static_cast<size_t>(drawn->count++)];
  const auto row = static_cast<size_t>(drawn->row + drawn->last_node);
  DrawInput input{.logits = {logits_.data() + row * vocab_size, vocab_size},
                  .prompt = request.prompt_of(*drawn->sample),
                  .answer = request.answer_of(*drawn->sample),
                  .options = &request.options,
                  .stream = drawn->output.sample};
  if (request.options.filter == nullptr) return DrawToken(input, scratch, &draw);
  if (!drawn->filter_status.ok()) {
    draw.error = DrawError::kFilterFailed;
    return;
  }
  AnswerFilter& filter = drawn->sample->filter;
  drawn->filter_status = GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(filter.FillMask(scratch->mask));
    input.mask = scratch->mask;
    DrawToken(input, scratch, &draw);
    if (draw.error != DrawError::kNone || IsEnd(model_.info(), request.options, draw.token))
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
void AnswerDrawer::DrawPath(Drawn* drawn, DrawScratch* scratch) const noexcept {
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
    if (guess == kDraftRoot || IsEnd(model_.info(), request.options, draw.token)) break;
    tokens.push_back(draw.token);  // there is room: a path ends before the answer is full
    if (StopMatchLength(request.answer_of(*drawn->sample), request.options.stop) > 0) break;
  }
  tokens.resize(tokens_before);
}

void AnswerDrawer::DrawAll(std::vector<Drawn>* draws) {
  runner_->ParallelFor(static_cast<int64_t>(draws->size()), [&](int64_t index, int worker) {
    DrawPath(&(*draws)[static_cast<size_t>(index)], &scratch_[static_cast<size_t>(worker)]);
  });
  for (Drawn& drawn : *draws) {
    if (drawn.count == 0) continue;
    const DrawError error = drawn.draws[static_cast<size_t>(drawn.count - 1)].error;
    if (error == DrawError::kNone) continue;
    const auto position = static_cast<int64_t>(drawn.sample->tokens.size()) + drawn.count - 1;
    drawn.output.error =
        DescribeDrawError(error, drawn.filter_status, drawn.output.sample, position);
    if (error == DrawError::kFilterFailed || error == DrawError::kNoneAllowed) {
      drawn.output.error_detail.option = "filter";
    }
  }
}

}  // namespace quire
