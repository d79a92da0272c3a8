#include "engine/drafts/speculator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"

namespace quire {
namespace {

// Its next token is one of the answer that has been drawn, at least two more may follow, and no
// guess made its filter fail.
bool MayDraft(const Speculator::Candidate& candidate) {
  if (candidate.request == nullptr) return false;
  const Request& request = *candidate.request;
  const auto length = static_cast<int64_t>(candidate.sample->tokens.size());
  return request.speculation.draft != DraftKind::kNone && length > request.prompt_tokens &&
         candidate.sample->pending() == 1 && !candidate.sample->filter.has_failed() &&
         request.prompt_tokens + request.options.max_tokens - length >= 2;
}

}  // namespace

Speculator::Speculator(std::unique_ptr<ModelDrafter> model_drafter, int64_t max_tree_nodes,
                       int64_t prefill_chunk)
    : model_drafter_(std::move(model_drafter)),
      max_tree_nodes_(max_tree_nodes),
      nodes_max_(std::min(max_tree_nodes, prefill_chunk)) {}

Status Speculator::CheckCanSpeculate(const SamplingOptions& options) const {
  const DraftKind draft = options.speculation ? options.speculation->draft : DraftKind::kNone;
  const bool predicts = !options.predicted_tokens.empty();
  if (draft == DraftKind::kNone && !predicts) return {};
  if (max_tree_nodes_ < 2) {
    const std::string option = predicts ? "predicted_tokens" : "speculation";
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::" + option +
                      ": this engine has no room for guesses; give it "
                      "EngineOptions::max_tree_nodes of at least 2, or a speculation of its own",
                  {option, RefusalReason::kNoGuessRoom});
  }
  if (draft == DraftKind::kModel && model_drafter_ == nullptr) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::speculation: draft is kModel and this engine has no draft "
                  "model; give EngineOptions::draft_model_directory, or take kNGram");
  }
  return {};
}

std::vector<DraftJob> Speculator::MakeJobs(std::span<const Candidate> candidates,
                                           std::vector<DraftTree>* guesses) const {
  int64_t nodes = nodes_max_;
  int64_t samples = std::count_if(candidates.begin(), candidates.end(), MayDraft);
  guesses->resize(candidates.size());
  std::vector<DraftJob> jobs;
  for (size_t i = 0; i < candidates.size() && nodes >= 2; ++i) {
    if (!MayDraft(candidates[i])) continue;
    const Request& request = *candidates[i].request;
    Sample& sample = *candidates[i].sample;
    const int64_t wanted =
        sample.draft_tokens == 0 ? request.speculation.draft_tokens : sample.draft_tokens;
    const int64_t guesses_max = std::min(wanted, std::max<int64_t>(nodes / samples--, 2) - 1);
    nodes -= 1 + guesses_max;
    QUIRE_CHECK(guesses_max >= 1);
    QUIRE_CHECK(nodes >= 0) << "the trees are larger than a forward may have them";
    // The last token that may be drawn needs no guess.
    const int64_t levels_max = request.prompt_tokens + request.options.max_tokens - 1 -
                               static_cast<int64_t>(sample.tokens.size());
    Request::ReserveTokens(&sample, guesses_max);
    // Without its filter nothing is guessed: what is wrong shows when the next token is drawn.
    if (!request.AlignFilter(&sample).ok()) continue;
    jobs.push_back({.tokens = &sample.tokens,
                    .prompt_tokens = request.prompt_tokens,
                    .request_id = request.id,
                    .stream = &sample - request.samples.data(),
                    .options = &request.options,
                    .guesses_max = guesses_max,
                    .levels_max = std::min(levels_max, guesses_max),
                    .branches = request.speculation.branches,
                    .filter = request.options.filter == nullptr ? nullptr : &sample.filter,
                    .state = &sample.draft_state,
                    .tree = &(*guesses)[i],
                    .draft = request.speculation.draft});
  }
  return jobs;
}

Status Speculator::Guess(std::span<const DraftJob> jobs, DrawScratch* scratch, Clock* clock) {
  const int64_t start_ns = clock->SteadyNs();
  const Status status = GuardEntry([&]() -> Status {
    std::vector<DraftJob> of_model;
    std::vector<DraftJob> of_ngrams;
    for (const DraftJob& job : jobs) {
      (job.draft == DraftKind::kModel ? of_model : of_ngrams).push_back(job);
    }
    QUIRE_RETURN_IF_ERROR(ngram_drafter_.Propose(of_ngrams, scratch));
    if (of_model.empty()) return {};
    QUIRE_CHECK(model_drafter_ != nullptr) << "CheckCanSpeculate let a request through";
    return model_drafter_->Propose(of_model, scratch);
  });
  seconds_ += static_cast<double>(clock->SteadyNs() - start_ns) * 1e-9;
  return status;
}

void Speculator::Note(const Candidate& candidate, const DraftTree* guesses, int64_t drawn,
                      int64_t draws_max) noexcept {
  Request& request = *candidate.request;
  QUIRE_CHECK(drawn >= 1);
  QUIRE_CHECK(drawn <= draws_max);
  ++request.decode_forwards;
  ++decode_forwards_;
  if (guesses == nullptr) return;
  const int64_t accepted = drawn - 1;
  QUIRE_CHECK(accepted <= guesses->size());
  request.drafted_tokens += guesses->size();
  request.accepted_tokens += accepted;
  drafted_tokens_ += guesses->size();
  accepted_tokens_ += accepted;
  int64_t& next = candidate.sample->draft_tokens;
  if (next == 0) next = request.speculation.draft_tokens;
  if (accepted == 0) next = std::max<int64_t>(next / 2, 1);
  if (drawn == draws_max) next = std::min(2 * next, request.speculation.draft_tokens);
  QUIRE_CHECK(next >= 1) << "request " << request.id << " would never guess again";
}

void Speculator::Forget(const Request& request, Sample* sample) noexcept {
  if (sample->draft_state == kNoDraftState) return;
  if (request.speculation.draft == DraftKind::kModel) {
    model_drafter_->Forget(&sample->draft_state);
  } else {
    ngram_drafter_.Forget(&sample->draft_state);
  }
}

int64_t Speculator::state_count() const {
  return ngram_drafter_.state_count() +
         (model_drafter_ == nullptr ? 0 : model_drafter_->state_count());
}

void Speculator::CheckInvariants() const {
  if (model_drafter_ != nullptr) model_drafter_->CheckInvariants();
}

void Speculator::Publish(EngineStats* stats) const noexcept {
  stats->drafted_tokens = drafted_tokens_;
  stats->accepted_tokens = accepted_tokens_;
  stats->decode_forwards = decode_forwards_;
  stats->draft_seconds = seconds_;
}

}  // namespace quire
