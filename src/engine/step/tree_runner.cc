#include "engine/step/tree_runner.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "engine/prefix/open_forward.h"

namespace quire {
namespace {

// As BeginTreeForward takes them.
struct TreeNodes {
  std::vector<int64_t> ids, lengths, parents;
};

// Each sample's last token is the root, its guesses are the other nodes.
TreeNodes NodesOf(const StepBatch& trees) {
  TreeNodes nodes;
  for (const StepWork& work : trees) {
    nodes.ids.push_back(work.sample->sequence_id);
    nodes.lengths.push_back(1 + (work.guesses == nullptr ? 0 : work.guesses->size()));
    nodes.parents.push_back(-1);
    if (work.guesses == nullptr) continue;
    for (const int64_t parent : work.guesses->parents) nodes.parents.push_back(parent + 1);
  }
  return nodes;
}

}  // namespace

Status TreeRunner::Plan(StepBatch* batch, TreeBatch* trees, bool* plan_anew) {
  if (holders_.speculator.nodes_max() < 2) return {};
  std::vector<Speculator::Candidate> candidates;
  for (const StepWork& work : *batch) {
    const bool may_draft = work.layers == nullptr;
    candidates.push_back(may_draft ? Speculator::Candidate{work.request, work.sample}
                                   : Speculator::Candidate{});
  }
  const std::vector<DraftJob> jobs = holders_.speculator.MakeJobs(candidates, &trees->guesses);
  if (jobs.empty()) return {};
  const Status status = holders_.speculator.Guess(jobs, owners_.drawer.scratch(), &owners_.clock);
  if (status.code() == StatusCode::kOutOfMemory) return status;
  if (!status.ok()) {
    const auto of_model = std::find_if(jobs.begin(), jobs.end(), [](const DraftJob& job) {
      return job.draft == DraftKind::kModel;  // n-grams fail for want of memory alone
    });
    owners_.answers.End(holders_.requests.Find(of_model->request_id), FinishReason::kError,
                        "the draft model: " + status.ToString());
    *plan_anew = true;
    return {};
  }
  for (;;) {
    StepBatch plain;
    trees->works.clear();
    for (size_t i = 0; i < batch->size(); ++i) {
      const DraftTree& guesses = trees->guesses[i];
      StepWork& work = (guesses.size() > 0 ? trees->works : plain).emplace_back((*batch)[i]);
      if (guesses.size() > 0) work.guesses = &guesses;
    }
    if (trees->works.empty()) return {};
    QUIRE_ASSIGN_OR_RETURN(const bool fit, Fit(trees->works, plain));
    if (fit) {
      *batch = std::move(plain);
      return Join(batch, trees);
    }
    for (DraftTree& guesses : trees->guesses) guesses.Truncate(guesses.size() / 2);
  }
}

// Whether the pages suffice for the trees and what is run behind them. Retained KV is given up for
// them, but nothing that is being worked on.
Result<bool> TreeRunner::Fit(const StepBatch& trees, const StepBatch& plain) {
  const TreeNodes nodes = NodesOf(trees);
  QUIRE_ASSIGN_OR_RETURN(const int64_t of_trees, holders_.state.PagesNeededForTree(
                                                     nodes.ids, nodes.lengths, nodes.parents));
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  for (const StepWork& work : plain) {
    ids.push_back(work.sample->sequence_id);
    lengths.push_back(work.tokens);
  }
  int64_t of_plain = 0;
  if (!plain.empty()) {
    QUIRE_ASSIGN_OR_RETURN(of_plain, holders_.state.PagesNeeded(ids, lengths));
  }
  // A page whose free slots a tree's path takes may be one in which another sequence would have
  // gone on behind it; each path does so to one sequence at most.
  const int64_t displaced = std::min(std::ssize(trees), std::ssize(plain));
  const int64_t pages = of_trees + of_plain + displaced + PagesOfLoads(plain, owners_.page_size);
  if (pages > holders_.state.pages_free()) holders_.prefix_cache.Evict(pages);
  return pages <= holders_.state.pages_free();
}

// A second forward reads all weights once more. Where all that is left are single tokens, they join
// the trees as roots without guesses, if there is room for them.
Status TreeRunner::Join(StepBatch* batch, TreeBatch* trees) {
  int64_t nodes = 0;
  for (const StepWork& work : trees->works) nodes += 1 + work.guesses->size();
  const bool decodes_only = std::all_of(batch->begin(), batch->end(),
                                        [](const StepWork& work) { return work.decodes(); });
  if (batch->empty() || !decodes_only ||
      nodes + std::ssize(*batch) > holders_.speculator.nodes_max()) {
    return {};
  }
  StepBatch all = trees->works;
  all.insert(all.end(), batch->begin(), batch->end());
  QUIRE_ASSIGN_OR_RETURN(const bool fit, Fit(all, {}));
  if (!fit) return {};
  trees->works = std::move(all);
  batch->clear();
  return {};
}

void TreeRunner::Run(const TreeBatch& trees, StepBatch* batch) {
  if (trees.works.empty()) return;
  batch->reserve(batch->size() + trees.works.size());
  if (Attempt(trees).ok()) return;
  for (const StepWork& work : trees.works) {
    if (!work.sample->has_sequence()) continue;
    batch->push_back(work);
    batch->back().guesses = nullptr;
  }
}

Status TreeRunner::Attempt(const TreeBatch& trees) {
  return GuardEntry([&]() -> Status {
    const TreeNodes nodes = NodesOf(trees.works);
    std::vector<int32_t> token_ids;
    std::vector<Drawn> draws;
    QUIRE_CHECK(std::ssize(nodes.parents) <= holders_.speculator.nodes_max());
    for (const StepWork& work : trees.works) {
      QUIRE_CHECK(work.sample->pending() == 1) << "a tree hangs at the last token";
      QUIRE_CHECK(work.layers == nullptr);
      const int64_t levels = work.guesses == nullptr ? 0 : work.guesses->levels();
      QUIRE_ASSIGN_OR_RETURN(
          draws.emplace_back(),
          owners_.drawer.Prepare(work.request, work.sample, std::ssize(token_ids), 1 + levels));
      draws.back().guesses = work.guesses;
      token_ids.push_back(work.sample->tokens.back());
      if (work.guesses == nullptr) continue;
      token_ids.insert(token_ids.end(), work.guesses->tokens.begin(), work.guesses->tokens.end());
    }
    std::vector<int64_t> rows(token_ids.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    owners_.answers.Reserve(draws.size());
    QUIRE_RETURN_IF_ERROR(
        holders_.state.kv().BeginTreeForward(nodes.ids, nodes.lengths, nodes.parents));
    OpenForward forward(&holders_.state.kv());
    QUIRE_RETURN_IF_ERROR(owners_.model.Forward(owners_.caches, token_ids, rows,
                                                owners_.drawer.Logits(std::ssize(rows))));
    owners_.drawer.DrawAll(&draws);
    std::vector<int64_t> leaves;
    for (const Drawn& drawn : draws) {
      QUIRE_CHECK(drawn.last_node < nodes.lengths[leaves.size()]) << "a leaf of another tree";
      leaves.push_back(drawn.last_node);
    }
    QUIRE_RETURN_IF_ERROR(forward.End());
    const Status committed = holders_.state.kv().CommitAcceptedTokenTreeNodes(nodes.ids, leaves);
    if (!committed.ok()) {
      // Without memory for its lists. Then the trees go with their sequences, and the samples are
      // computed again, like preempted ones.
      for (const StepWork& work : trees.works)
        holders_.sequences.Remove(*work.request, work.sample);
      return committed;
    }
    owners_.counter.NoteForward();
    for (const Drawn& drawn : draws) {
      owners_.counter.NoteWork(drawn.request, drawn.sample, drawn.count);
    }
    owners_.answers.Commit(&draws);
    return {};
  });
}

}  // namespace quire
