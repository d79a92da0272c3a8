#include "engine/step/answer_reporter.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace quire {

namespace {

// Prompt tokens that were found are exact up to where the sequence became approximate.
BlendUsage BlendUsageOf(const Request& request) noexcept {
  BlendUsage usage = request.blend->Usage();
  usage.approximate = request.approximate;
  const int64_t found = std::min(request.cached.total(), request.found_again);
  usage.exact_tokens = std::min(found, request.exact_start);
  usage.kept_tokens = found - usage.exact_tokens;
  usage.learned_tokens = request.learned_tokens;
  usage.loaded_tokens = request.documents_loaded;
  usage.miss = request.documents_miss;
  usage.wait_seconds = request.DocumentSeconds();
  usage.computed_tokens = request.prompt_tokens - found - usage.moved_tokens;
  QUIRE_DCHECK(usage.computed_tokens >= 0) << "tokens were found and moved";
  return usage;
}

// Fills what an output has about its whole request.
void NoteUsage(const Request& request, int64_t now_ns, StepOutput* output) noexcept {
  output->prompt_tokens = request.prompt_tokens;
  output->completion_tokens = request.completion_tokens;
  output->cached = request.cached;
  output->cached_tokens = request.cached.total();
  output->recomputed_tokens = request.recomputed;
  output->miss = request.miss;
  output->prefix_miss = request.prefix_miss;
  output->load_seconds = request.load_seconds;
  output->remote_tokens = request.remote_tokens;
  output->remote_seconds = request.remote_seconds;
  output->predicted_remote_seconds = request.predicted_remote_seconds;
  output->predicted_here_seconds = request.predicted_here_seconds;
  output->drafted_tokens = request.drafted_tokens;
  output->accepted_tokens = request.accepted_tokens;
  output->decode_forwards = request.decode_forwards;
  output->times = request.TimesAt(now_ns);
  if (request.blend != nullptr) output->blend = BlendUsageOf(request);
}

}  // namespace

void AnswerReporter::Commit(std::vector<Drawn>* draws) noexcept {
  QUIRE_CHECK(due_.capacity() - due_.size() >= draws->size()) << "Reserve was left out";
  const int64_t now_ns = owners_.clock.SteadyNs();
  for (Drawn& drawn : *draws) {
    QUIRE_CHECK(drawn.count <= std::ssize(drawn.draws));
    CountBlend(drawn.request);
    if (drawn.count > 0 && drawn.request->first_token_ns == Request::kNotYet)
      drawn.request->first_token_ns = now_ns;
    if (drawn.draws.empty()) {
      Finish(drawn.request, drawn.sample, FinishReason::kLength, &drawn.output);
    } else {
      owners_.holders.speculator.Note({drawn.request, drawn.sample}, drawn.guesses, drawn.count,
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
  owners_.holders.requests.EraseEnded();
}

void AnswerReporter::Publish(EngineStats* stats) const noexcept {
  stats->completion_tokens = tokens_;
  stats->blend_exact_tokens = blend_exact_tokens_;
  stats->blend_kept_tokens = blend_kept_tokens_;
  stats->blend_computed_tokens = blend_computed_tokens_;
}

// What is drawn stands behind the prompt, of which all is there.
void AnswerReporter::CountBlend(Request* request) noexcept {
  if (request->blend == nullptr || std::exchange(request->blend_counted, true)) return;
  const BlendUsage usage = BlendUsageOf(*request);
  blend_exact_tokens_ += usage.exact_tokens;
  blend_kept_tokens_ += usage.kept_tokens;
  blend_computed_tokens_ += usage.computed_tokens;
}

std::vector<StepOutput> AnswerReporter::Take() { return std::exchange(due_, {}); }

void AnswerReporter::ApplyDraw(Drawn* drawn, Draw* draw) noexcept {
  Sample& sample = *drawn->sample;
  QUIRE_CHECK(!sample.finished()) << "a token was drawn behind the end of its sample";
  const SamplingOptions& options = drawn->request->options;
  const auto answer_length = [&] {
    return static_cast<int64_t>(sample.tokens.size()) - drawn->request->prompt_tokens;
  };
  if (draw->error != DrawError::kNone) {
    Report(answer_length(), drawn);
    return Finish(drawn->request, &sample, FinishReason::kError, &drawn->output);
  }
  if (IsEnd(owners_.model.info(), options, draw->token)) {
    Report(answer_length(), drawn);
    return Finish(drawn->request, &sample, FinishReason::kStop, &drawn->output);
  }
  QUIRE_CHECK(sample.tokens.size() < sample.tokens.capacity()) << "Prepare took too little memory";
  sample.tokens.push_back(draw->token);
  if (options.logprobs >= 0) sample.held_logprobs.push_back(std::move(draw->logprobs));
  const std::span<const int32_t> answer = drawn->request->answer_of(sample);
  if (const int64_t match = StopMatchLength(answer, options.stop); match > 0) {
    Report(answer_length() - match, drawn);
    return Finish(drawn->request, &sample, FinishReason::kStop, &drawn->output);
  }
  if (answer_length() == options.max_tokens) {
    Report(answer_length(), drawn);
    return Finish(drawn->request, &sample, FinishReason::kLength, &drawn->output);
  }
  Report(answer_length() - HeldBackLength(answer, options.stop), drawn);
}

// Gives out the answer up to `answer_length`.
void AnswerReporter::Report(int64_t answer_length, Drawn* drawn) noexcept {
  Sample& sample = *drawn->sample;
  const int64_t count = answer_length - sample.reported;
  QUIRE_CHECK(count >= 0) << "a token was given out that belongs to a stop sequence";
  QUIRE_CHECK(answer_length <= std::ssize(drawn->request->answer_of(sample)));
  const auto first = drawn->request->answer_of(sample).begin() + sample.reported;
  drawn->output.tokens.insert(drawn->output.tokens.end(), first, first + count);
  if (drawn->request->options.logprobs >= 0) {
    QUIRE_CHECK(count <= std::ssize(sample.held_logprobs));
    const auto begin = sample.held_logprobs.begin();
    drawn->output.logprobs.insert(drawn->output.logprobs.end(), std::make_move_iterator(begin),
                                  std::make_move_iterator(begin + count));
    sample.held_logprobs.erase(begin, begin + count);
  }
  sample.reported += count;
  drawn->request->completion_tokens += count;
  tokens_ += count;
}

// The answer is what was reported: what was drawn beyond it is popped, so that state and usage are
// as if the sample had stopped at once.
void AnswerReporter::Finish(Request* request, Sample* sample, FinishReason reason,
                            StepOutput* output) noexcept {
  QUIRE_CHECK(reason != FinishReason::kNone);
  QUIRE_CHECK(!sample->finished()) << "a sample ends twice";
  QUIRE_CHECK(request->prompt_tokens + sample->reported <= std::ssize(sample->tokens));
  sample->finish_reason = reason;
  sample->tokens.resize(request->prompt_tokens + sample->reported);
  output->finish_reason = reason;
  NoteUsage(*request, owners_.clock.SteadyNs(), output);
  if (request->learns_for != Request::kNobody) owners_.blender.NoteLearnt(*request);
  owners_.holders.speculator.Forget(*request, sample);
  sample->filter.Drop();
  owners_.traffic.prefill.NoteEnd(request);
  if (sample->has_sequence()) ReleaseSequence(request, sample);
  QUIRE_CHECK(!sample->has_sequence()) << "a sample that has ended holds a sequence";
}

// The sequence goes to the next leader if that one still waits to be forked from it, else it is
// retained.
void AnswerReporter::ReleaseSequence(Request* request, Sample* sample) noexcept {
  RemoteTraffic::GiveUp(request, *sample);
  Sample* const heir = request->leader();
  const bool inherits =
      heir != nullptr && !heir->has_sequence() && sample->computed >= request->prompt_tokens;
  // What is retained may be less than all, where only that is held; what is inherited may not.
  const int64_t kept =
      inherits ? request->prompt_tokens
               : owners_.holders.state.ForkStart(
                     sample->sequence_id,
                     std::min(sample->computed, static_cast<int64_t>(sample->tokens.size())));
  QUIRE_CHECK(kept <= sample->computed);
  const Status popped =
      owners_.holders.state.kv().PopN(sample->sequence_id, sample->computed - kept);
  // What is wrong with an answer may be wrong with its KV: others that draw from it will show it.
  const bool is_kept = inherits || sample->finish_reason != FinishReason::kError;
  if (!popped.ok() || !is_kept) return owners_.holders.sequences.Remove(*request, sample);
  sample->computed = kept;
  if (!inherits) {
    owners_.traffic.store.StoreWhole(*request, sample);
    if (heir == nullptr) owners_.traffic.prefill.CutHeld(*request, sample);
    owners_.holders.sequences.Retain(*request, sample, owners_.retains);
    if (heir == nullptr) owners_.traffic.prefill.Hold(*request, request->prompt_of(*sample));
    return;
  }
  heir->sequence_id = std::exchange(sample->sequence_id, kNoSequence);
  heir->stored = {};
  heir->computed = std::exchange(sample->computed, 0);
  heir->approximate_from = std::exchange(sample->approximate_from, kExactForever);
}

// Outputs first: they need memory.
void AnswerReporter::End(Request* request, FinishReason reason, const std::string& error) {
  std::vector<StepOutput> outputs;
  owners_.traffic.prefill.NoteFailure(request, error);
  for (const Sample& sample : request->samples) {
    if (sample.finished() || !request->has_outputs()) continue;
    StepOutput& output = outputs.emplace_back();
    output.request_id = request->id;
    output.sample = &sample - request->samples.data();
    output.finish_reason = reason;
    output.error = error;
    NoteUsage(*request, owners_.clock.SteadyNs(), &output);
  }
  due_.insert(due_.end(), std::make_move_iterator(outputs.begin()),
              std::make_move_iterator(outputs.end()));
  Forget(request, reason, error);
}

// With it the lessons that are learnt for it: nobody waits for them any more.
void AnswerReporter::Forget(Request* request, FinishReason reason, const std::string& error) {
  const std::vector<int64_t> learners = std::move(request->learners);
  owners_.holders.sequences.RemoveAll(request);
  owners_.holders.requests.Erase(request);
  for (const int64_t id : learners) {
    if (Request* const learner = owners_.holders.requests.Find(id)) End(learner, reason, error);
  }
}

Status AnswerReporter::Stop(int64_t request_id, int64_t sample_index, int64_t answer_tokens) {
  Request* const request = owners_.holders.requests.FindAsked(request_id);
  const bool is_there = request != nullptr && sample_index >= 0 &&
                        sample_index < static_cast<int64_t>(request->samples.size()) &&
                        !request->samples[sample_index].finished();
  if (!is_there) {
    return Status(StatusCode::kUnknownSequence,
                  "Engine::Stop: sample " + std::to_string(sample_index) + " of request " +
                      std::to_string(request_id) +
                      " is not there; it has finished or was never submitted");
  }
  Sample& sample = request->samples[sample_index];
  if (answer_tokens < 0 || answer_tokens > sample.reported) {
    return Status(StatusCode::kBadArgument,
                  "Engine::Stop: answer_tokens is " + std::to_string(answer_tokens) +
                      "; it must be in [0, " + std::to_string(sample.reported) +
                      "], what was given out of sample " + std::to_string(sample_index));
  }
  StepOutput output;
  output.request_id = request_id;
  output.sample = sample_index;
  Reserve(1);
  const int64_t surplus = sample.reported - answer_tokens;
  sample.reported -= surplus;
  request->completion_tokens -= surplus;
  tokens_ -= surplus;
  Finish(request, &sample, FinishReason::kStop, &output);
  due_.push_back(std::move(output));
  if (request->leader() == nullptr) Forget(request, FinishReason::kStop, "");
  return {};
}

}  // namespace quire
