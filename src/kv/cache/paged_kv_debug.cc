// What tests and tools look at: Debug*, the digest of the state and its invariants.
#include <algorithm>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "kv/cache/kv_invariants.h"
#include "kv/cache/paged_kv_cache.h"

namespace quire {
namespace {

// [layers, count, dim] as [layers, count, 1, dim]; others stay as they are, and are refused.
TensorView WithHead(const TensorView& kv) {
  if (kv.rank() != 3) return kv;
  int64_t shape[] = {kv.dim(0), kv.dim(1), 1, kv.dim(2)};
  int64_t strides[] = {kv.stride(0), kv.stride(1), kv.dim(2), kv.stride(2)};
  const Result<TensorView> view = TensorView::FromDLPack({.data = kv.data(),
                                                          .device = {kDLCPU, 0},
                                                          .ndim = 4,
                                                          .dtype = ToDLDataType(kv.dtype()),
                                                          .shape = shape,
                                                          .strides = strides,
                                                          .byte_offset = 0});
  return view.ok() ? *view : kv;
}

}  // namespace

Status PagedKVCache::DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                                const TensorView& v) {
  return gate_.Enter("DebugGetKV",
                     [&] { return stored_.Get("DebugGetKV", seq_id, start, end, k, &v); });
}

Status PagedKVCache::DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end,
                                   const TensorView& kv) {
  return gate_.Enter("DebugGetKVMLA", [&] {
    return stored_.Get("DebugGetKVMLA", seq_id, start, end, WithHead(kv), nullptr);
  });
}

Status PagedKVCache::DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                                const TensorView& v) {
  return gate_.EnterAlone("DebugSetKV",
                          [&] { return stored_.Set("DebugSetKV", seq_id, start, k, &v); });
}

Status PagedKVCache::DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) {
  return gate_.EnterAlone("DebugSetKVMLA", [&] {
    return stored_.Set("DebugSetKVMLA", seq_id, start, WithHead(kv), nullptr);
  });
}

Result<std::string> PagedKVCache::DebugPlan() const {
  return gate_.Ask([&]() -> Result<std::string> {
    if (!kv_.control.in_forward()) return kv_.control.RequireForward("DebugPlan");
    std::string text = plan_.ToString(kv_.tree);
    if (blending_.is_open()) text += blending_.queries().ToString(plan_);
    return text;
  });
}

// Independent of what cannot be observed: how tokens are cut into blocks, the order of free pages,
// whether an attention call has failed.
uint64_t PagedKVCache::StateDigest() const {
  const auto lock = gate_.Lock();
  std::vector<int64_t> facts{kv_.control.in_forward(), kv_.control.table().count(),
                             kv_.tree.distinct_token_count()};
  for (const int32_t index : kv_.control.table().SortedById()) {
    const Sequence& sequence = kv_.control[index];
    facts.insert(facts.end(),
                 {sequence.id, kv_.tree.End(sequence.last), sequence.long_factors,
                  sequence.retained, kv_.control.InBatch(index), sequence.window.window,
                  sequence.window.sinks, sequence.window.slid, sequence.slid, sequence.span.tokens,
                  sequence.span.sinks, sequence.reserved, kv_.trees.SizeOf(index), sequence.pending,
                  static_cast<int64_t>(sequence.receive)});
    sender_.AppendFacts(index, &facts);
    if (const TokenTree* tree = kv_.trees.Find(index)) {
      facts.insert(facts.end(), tree->parents.begin(), tree->parents.end());
      for (const TokenTree::Group& group : tree->groups) {
        facts.insert(facts.end(), group.pages.begin(), group.pages.end());
      }
    }
    for (int g = 0; g < kv_.tree.group_count(); ++g) {
      int32_t below = kNoPage;
      kv_.tree.VisitPieces(sequence.last, g, 0, kv_.tree.End(sequence.last),
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
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    std::vector<int32_t> free = kv_.tree.pool(g).free_pages();
    std::sort(free.begin(), free.end());
    facts.insert(facts.end(), free.begin(), free.end());
    facts.push_back(kNoPage);
  }
  for (int64_t layer = 0; layer < steps_.count(); ++layer) {
    facts.push_back(kv_.control.in_forward() && steps_.appended(layer));
    facts.push_back(kv_.control.in_forward() && steps_.attended(layer));
  }
  return Hash64(facts.data(), facts.size() * sizeof(facts[0]));
}

Status PagedKVCache::CheckInvariants() const {
  return gate_.Ask([&]() -> Status {
    std::vector<int64_t> windows;
    for (const LayerGroup& group : kv_.groups) windows.push_back(group.window);
    QUIRE_RETURN_IF_ERROR(CheckKVInvariants(kv_.tree, kv_.control.table(), Batch(), &kv_.trees,
                                            windows, kv_.options.max_pop));
    QUIRE_RETURN_IF_ERROR(receiver_.CheckInvariants());
    const std::string difference =
        kv_.control.in_forward() ? plan_.DifferenceFromNew(kv_.tree) : "";
    if (difference.empty()) return Status();
    return Status(StatusCode::kInternal, "invariant violated: the plan " + difference);
  });
}

}  // namespace quire
