// Speculation: samples that decode run their last token and guesses of what follows it as a token
// tree, in a forward of their own, and keep the guesses that are what is drawn there (draft.h).
//
// Guesses take what nobody else wants: pages behind those of the step's other tokens, never by
// preempting. Where a tree forward fails, its samples decode plainly in the same step.
#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "engine/engine_impl.h"
#include "engine/prefix/open_forward.h"

namespace quire {

// Its next token is one of the answer that has been drawn, and at least two more may follow.
bool EngineImpl::MayDraft(const Work& work) const {
  const Request& request = *work.request;
  const auto length = static_cast<int64_t>(work.sample->tokens.size());
  return request.speculation.draft != DraftKind::kNone && work.layers == nullptr &&
         length > request.prompt_tokens && work.sample->pending() == 1 &&
         request.prompt_tokens + request.options.max_tokens - length >= 2;
}

// Jobs of the first samples of the batch for which there is room: an equal part of the nodes that
// are left for each.
std::vector<DraftJob> EngineImpl::MakeDraftJobs(const Batch& batch,
                                                std::vector<DraftTree>* guesses) const {
  int64_t nodes = std::min(options_.max_tree_nodes, options_.prefill_chunk);
  int64_t samples = std::count_if(batch.begin(), batch.end(),
                                  [this](const Work& work) { return MayDraft(work); });
  guesses->resize(batch.size());
  std::vector<DraftJob> jobs;
  for (size_t i = 0; i < batch.size() && nodes >= 2; ++i) {
    if (!MayDraft(batch[i])) continue;
    const Request& request = *batch[i].request;
    Sample& sample = *batch[i].sample;
    const int64_t wanted =
        sample.draft_tokens == 0 ? request.speculation.draft_tokens : sample.draft_tokens;
    const int64_t guesses_max = std::min(wanted, std::max<int64_t>(nodes / samples--, 2) - 1);
    nodes -= 1 + guesses_max;
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

Status EngineImpl::Guess(std::span<const DraftJob> jobs) {
  return GuardEntry([&]() -> Status {
    std::vector<DraftJob> of_model;
    std::vector<DraftJob> of_ngrams;
    for (const DraftJob& job : jobs) {
      (job.draft == DraftKind::kModel ? of_model : of_ngrams).push_back(job);
    }
    QUIRE_RETURN_IF_ERROR(ngram_drafter_.Propose(of_ngrams, &draw_scratch_[0]));
    if (of_model.empty()) return {};
    return model_drafter_->Propose(of_model, &draw_scratch_[0]);
  });
}

// Moves the works for which something is guessed from the batch to the trees.
//
// `plan_anew`: the draft model failed, and the first request that asked it has ended with the
// error.
Status EngineImpl::PlanTrees(Batch* batch, TreeBatch* trees, bool* plan_anew) {
  const std::vector<DraftJob> jobs = MakeDraftJobs(*batch, &trees->guesses);
  if (jobs.empty()) return {};
  const int64_t start_ns = clock_->SteadyNs();
  const Status status = Guess(jobs);
  counters_.draft_seconds += static_cast<double>(clock_->SteadyNs() - start_ns) * 1e-9;
  if (status.code() == StatusCode::kOutOfMemory) return status;
  if (!status.ok()) {
    const auto of_model = std::find_if(jobs.begin(), jobs.end(), [](const DraftJob& job) {
      return job.draft == DraftKind::kModel;  // n-grams fail for want of memory alone
    });
    EndRequest(FindRequest(of_model->request_id), FinishReason::kError,
               "the draft model: " + status.ToString());
    *plan_anew = true;
    return {};
  }
  for (;;) {
    Batch plain;
    trees->works.clear();
    for (size_t i = 0; i < batch->size(); ++i) {
      const DraftTree& guesses = trees->guesses[i];
      Work& work = (guesses.size() > 0 ? trees->works : plain).emplace_back((*batch)[i]);
      if (guesses.size() > 0) work.guesses = &guesses;
    }
    if (trees->works.empty()) return {};
    QUIRE_ASSIGN_OR_RETURN(const bool fit, TreesFit(trees->works, plain));
    if (fit) {
      *batch = std::move(plain);
      return JoinTrees(batch, trees);
    }
    for (DraftTree& guesses : trees->guesses) guesses.Truncate(guesses.size() / 2);
  }
}

// Each sample's last token is the root, its guesses are the other nodes.
EngineImpl::TreeNodes EngineImpl::NodesOf(const Batch& trees) {
  TreeNodes nodes;
  for (const Work& work : trees) {
    nodes.ids.push_back(work.sample->sequence_id);
    nodes.lengths.push_back(1 + (work.guesses == nullptr ? 0 : work.guesses->size()));
    nodes.parents.push_back(-1);
    if (work.guesses == nullptr) continue;
    for (const int64_t parent : work.guesses->parents) nodes.parents.push_back(parent + 1);
  }
  return nodes;
}

// Whether the pages suffice for the trees and what is run behind them. Retained KV is given up for
// them, but nothing that is being worked on.
Result<bool> EngineImpl::TreesFit(const Batch& trees, const Batch& plain) {
  const TreeNodes nodes = NodesOf(trees);
  QUIRE_ASSIGN_OR_RETURN(const int64_t of_trees,
                         state_.PagesNeededForTree(nodes.ids, nodes.lengths, nodes.parents));
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  for (const Work& work : plain) {
    ids.push_back(work.sample->sequence_id);
    lengths.push_back(work.tokens);
  }
  int64_t of_plain = 0;
  if (!plain.empty()) {
    QUIRE_ASSIGN_OR_RETURN(of_plain, state_.PagesNeeded(ids, lengths));
  }
  // A page whose free slots a tree's path takes may be one in which another sequence would have
  // gone on behind it; each path does so to one sequence at most.
  const int64_t displaced = std::min(std::ssize(trees), std::ssize(plain));
  const int64_t pages = of_trees + of_plain + displaced + PagesOfLoads(plain);
  if (pages > state_.pages_free()) prefix_cache_.Evict(pages);
  return pages <= state_.pages_free();
}

// A second forward reads all weights once more. Where all that is left are single tokens, they join
// the trees as roots without guesses, if there is room for them.
Status EngineImpl::JoinTrees(Batch* batch, TreeBatch* trees) {
  int64_t nodes = 0;
  for (const Work& work : trees->works) nodes += 1 + work.guesses->size();
  const bool decodes_only = std::all_of(batch->begin(), batch->end(), [](const Work& work) {
    return work.layers == nullptr && work.tokens == 1 && work.ends_pending() &&
           work.request->answer_begun();
  });
  if (batch->empty() || !decodes_only ||
      nodes + std::ssize(*batch) > std::min(options_.max_tree_nodes, options_.prefill_chunk)) {
    return {};
  }
  Batch all = trees->works;
  all.insert(all.end(), batch->begin(), batch->end());
  QUIRE_ASSIGN_OR_RETURN(const bool fit, TreesFit(all, {}));
  if (!fit) return {};
  trees->works = std::move(all);
  batch->clear();
  return {};
}

// Works whose tree forward fails go back to the batch: what is wrong shows there, or nothing is.
void EngineImpl::RunTrees(const TreeBatch& trees, Batch* batch) {
  if (trees.works.empty()) return;
  batch->reserve(batch->size() + trees.works.size());
  if (AttemptTrees(trees).ok()) return;
  for (const Work& work : trees.works) {
    if (!work.sample->has_sequence()) continue;
    batch->push_back(work);
    batch->back().guesses = nullptr;
  }
}

Status EngineImpl::AttemptTrees(const TreeBatch& trees) {
  return GuardEntry([&]() -> Status {
    const TreeNodes nodes = NodesOf(trees.works);
    std::vector<int32_t> token_ids;
    std::vector<Drawn> draws;
    for (const Work& work : trees.works) {
      const int64_t levels = work.guesses == nullptr ? 0 : work.guesses->levels();
      QUIRE_ASSIGN_OR_RETURN(draws.emplace_back(), PrepareDrawn(work.request, work.sample,
                                                                std::ssize(token_ids), 1 + levels));
      draws.back().guesses = work.guesses;
      token_ids.push_back(work.sample->tokens.back());
      if (work.guesses == nullptr) continue;
      token_ids.insert(token_ids.end(), work.guesses->tokens.begin(), work.guesses->tokens.end());
    }
    std::vector<int64_t> rows(token_ids.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    due_.reserve(due_.size() + draws.size());
    logits_.resize(rows.size() * static_cast<size_t>(model_->info().vocab_size));
    QUIRE_RETURN_IF_ERROR(state_.kv().BeginTreeForward(nodes.ids, nodes.lengths, nodes.parents));
    OpenForward forward(&state_.kv());
    QUIRE_RETURN_IF_ERROR(
        model_->Forward({cache_.get(), recurrent_.get()}, token_ids, rows, logits_.data()));
    DrawAll(&draws);
    std::vector<int64_t> leaves;
    for (const Drawn& drawn : draws) leaves.push_back(drawn.last_node);
    QUIRE_RETURN_IF_ERROR(forward.End());
    const Status committed = state_.kv().CommitAcceptedTokenTreeNodes(nodes.ids, leaves);
    if (!committed.ok()) {
      // Without memory for its lists. Then the trees go with their sequences, and the samples are
      // computed again, like preempted ones.
      for (const Work& work : trees.works) RemoveSequence(*work.request, work.sample);
      return committed;
    }
    ++counters_.steps;
    for (const Drawn& drawn : draws) {
      drawn.sample->computed += drawn.count;
      counters_.computed_tokens += drawn.count;
      drawn.sample->last_step = counters_.steps;
      drawn.request->NoteStep(counters_.steps);
    }
    CommitDraws(&draws);
    return {};
  });
}

// A sample whose drafts are right in all their length gets longer ones, up to what was asked for;
// one whose drafts begin wrong gets shorter ones.
void EngineImpl::NoteGuesses(const Drawn& drawn) noexcept {
  Request& request = *drawn.request;
  ++request.decode_forwards;
  ++counters_.decode_forwards;
  if (drawn.guesses == nullptr) return;
  const int64_t accepted = drawn.count - 1;
  request.drafted_tokens += drawn.guesses->size();
  request.accepted_tokens += accepted;
  counters_.drafted_tokens += drawn.guesses->size();
  counters_.accepted_tokens += accepted;
  int64_t& next = drawn.sample->draft_tokens;
  if (next == 0) next = request.speculation.draft_tokens;
  if (accepted == 0) next = std::max<int64_t>(next / 2, 1);
  if (accepted + 1 == std::ssize(drawn.draws))
    next = std::min(2 * next, request.speculation.draft_tokens);
}

void EngineImpl::ForgetDraft(const Request& request, Sample* sample) noexcept {
  if (sample->draft_state == kNoDraftState) return;
  if (request.speculation.draft == DraftKind::kModel) {
    model_drafter_->Forget(&sample->draft_state);
  } else {
    ngram_drafter_.Forget(&sample->draft_state);
  }
}

}  // namespace quire
