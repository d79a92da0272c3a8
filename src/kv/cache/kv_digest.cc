#include "kv/cache/kv_digest.h"

#include <algorithm>
#include <vector>

#include "base/checksum.h"

namespace quire {
namespace {

void AppendSequence(const PagedSequences& kv, const KVSender& sender, int32_t index,
                    std::vector<int64_t>& facts) {
  const Sequence& sequence = kv.control[index];
  facts.insert(facts.end(),
               {sequence.id, kv.tree.End(sequence.last), sequence.long_factors, sequence.retained,
                kv.control.InBatch(index), sequence.window.window, sequence.window.sinks,
                sequence.window.slid, sequence.slid, sequence.span.tokens, sequence.span.sinks,
                sequence.reserved, kv.trees.SizeOf(index), sequence.pending,
                static_cast<int64_t>(sequence.receive)});
  sender.AppendFacts(sequence.id, &facts);
  if (const TokenTree* tree = kv.trees.Find(index)) {
    facts.insert(facts.end(), tree->parents.begin(), tree->parents.end());
    for (const TokenTree::Group& group : tree->groups)
      facts.insert(facts.end(), group.pages.begin(), group.pages.end());
  }
  for (int g = 0; g < kv.tree.group_count(); ++g) {
    int32_t below = kNoPage;
    kv.tree.VisitPieces(sequence.last, g, 0, kv.tree.End(sequence.last),
                        [&](int64_t from, int64_t, int32_t page) {
                          if (page == below) {
                            facts.back() = from;  // another piece of the same page
                          } else {
                            facts.insert(facts.end(), {page, from});
                          }
                          below = page;
                        });
  }
}

}  // namespace

uint64_t DigestState(const PagedSequences& kv, const KVSender& sender, const LayerSteps& steps) {
  const bool in_forward = kv.control.in_forward();
  std::vector<int64_t> facts{in_forward, kv.control.table().count(),
                             kv.tree.distinct_token_count()};
  for (const int32_t index : kv.control.table().SortedById())
    AppendSequence(kv, sender, index, facts);
  for (int g = 0; g < kv.tree.group_count(); ++g) {
    std::vector<int32_t> free = kv.tree.pool(g).free_pages();
    std::sort(free.begin(), free.end());
    facts.insert(facts.end(), free.begin(), free.end());
    facts.push_back(kNoPage);
  }
  for (int64_t layer = 0; layer < steps.count(); ++layer) {
    facts.push_back(in_forward && steps.appended(layer));
    facts.push_back(in_forward && steps.attended(layer));
  }
  return Hash64(facts.data(), facts.size() * sizeof(facts[0]));
}

}  // namespace quire
