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
namespace {

// As BeginTreeForward takes them.
struct TreeNodes {
  std::vector<int64_t> ids, lengths, parents;
};

// Each sample's last token is the root, its guesses are the other nodes.
template <typename Batch>
TreeNodes NodesOf(const Batch& trees) {
  TreeNodes nodes;
  for (const auto& work : trees) {
    nodes.ids.push_back(work.sample->sequence_id);
    nodes.lengths.push_back(1 + (work.guesses == nullptr ? 0 : work.guesses->size()));
    nodes.parents.push_back(-1);
    if (work.guesses == nullptr) continue;
    for (const int64_t parent : work.guesses->parents) nodes.parents.push_back(parent + 1);
  }
  return nodes;
}

}  // namespace

// Moves the works for which something is guessed from the batch to the trees.
//
// `plan_anew`: the draft model failed, and the first request that asked it has ended with the
// error.
Status EngineImpl::PlanTrees(Batch* batch, TreeBatch* trees, bool* plan_anew) {
  if (speculator_.nodes_max() < 2) return {};
  std::vector<Speculator::Candidate> candidates;
  for (const Work& work : *batch) {
    const bool may_draft = work.layers == nullptr;
    candidates.push_back(may_draft ? Speculator::Candidate{work.request, work.sample}
                                   : Speculator::Candidate{});
  }
  const std::vector<DraftJob> jobs = speculator_.MakeJobs(candidates, &trees->guesses);
  if (jobs.empty()) return {};
  const Status status = speculator_.Guess(jobs, drawer_.scratch(), clock_.get());
  if (status.code() == StatusCode::kOutOfMemory) return status;
  if (!status.ok()) {
    const auto of_model = std::find_if(jobs.begin(), jobs.end(), [](const DraftJob& job) {
      return job.draft == DraftKind::kModel;  // n-grams fail for want of memory alone
    });
    EndRequest(requests_.Find(of_model->request_id), FinishReason::kError,
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
  if (batch->empty() || !decodes_only || nodes + std::ssize(*batch) > speculator_.nodes_max()) {
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
      QUIRE_ASSIGN_OR_RETURN(
          draws.emplace_back(),
          drawer_.Prepare(work.request, work.sample, std::ssize(token_ids), 1 + levels));
      draws.back().guesses = work.guesses;
      token_ids.push_back(work.sample->tokens.back());
      if (work.guesses == nullptr) continue;
      token_ids.insert(token_ids.end(), work.guesses->tokens.begin(), work.guesses->tokens.end());
    }
    std::vector<int64_t> rows(token_ids.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    due_.reserve(due_.size() + draws.size());
    QUIRE_RETURN_IF_ERROR(state_.kv().BeginTreeForward(nodes.ids, nodes.lengths, nodes.parents));
    OpenForward forward(&state_.kv());
    QUIRE_RETURN_IF_ERROR(model_->Forward({cache_.get(), recurrent_.get()}, token_ids, rows,
                                          drawer_.Logits(std::ssize(rows))));
    drawer_.DrawAll(&draws);
    std::vector<int64_t> leaves;
    for (const Drawn& drawn : draws) leaves.push_back(drawn.last_node);
    QUIRE_RETURN_IF_ERROR(forward.End());
    const Status committed = state_.kv().CommitAcceptedTokenTreeNodes(nodes.ids, leaves);
    if (!committed.ok()) {
      // Without memory for its lists. Then the trees go with their sequences, and the samples are
      // computed again, like preempted ones.
      for (const Work& work : trees.works) sequences_.Remove(*work.request, work.sample);
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

}  // namespace quire
