// KVImporter: tokens that come with their keys and values instead of being computed.
//
// There is one way in, for imports, receives and loading forwards:
//   reserve   plan the tokens and take memory for the rest; what can fail, fails here
//   commit    the tokens get their slots: they are on the sequence's path
//   fill      their rows are stored in these slots, layer by layer, in any order
//   complete  windows slide past them (WindowBook)
// Reserve and Commit are for a sequence alone. A loading forward reserves and commits its imported
// tokens with those of its rows, and each layer is filled before its first row is stored or read.
#ifndef QUIRE_KV_CACHE_KV_IMPORTER_H_
#define QUIRE_KV_CACHE_KV_IMPORTER_H_

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/attention_tensors.h"
#include "kv/plan/forward_plan.h"
#include "quire/attention_kv_cache.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class KVImporter {
 public:
  // All must outlive it.
  KVImporter(PagedSequences& kv, WindowBook& windows, LayerSteps& steps, const Backend& backend)
      : kv_(kv), windows_(windows), steps_(steps), backend_(backend) {}

  // ---- The whole way in two halves: ImportKV and, if `leaves_out`, ImportVisibleKV. What `import`
  // refers to stays until CommitImport, or DropImport, which gives up what is planned. REQUIRES: no
  // forward is open.
  Status PlanImport(const char* call, int32_t index, const KVImport& import, bool leaves_out);
  void CommitImport() noexcept;
  void DropImport() noexcept { import_ = {}; }

  // ---- The parts, for `count` tokens without rows after those of the sequence.
  enum class FirstPage : uint8_t { kShared, kOwn };
  // `plan`: started for one member; its appends say what is left out. OutOfPages. May throw
  // std::bad_alloc.
  Status Reserve(const char* call, const Sequence& sequence, int64_t count, FirstPage first,
                 ForwardPlan* plan);
  // REQUIRES: Reserve. The tokens' slots are then the plan's imports.
  void Commit(int32_t index, ForwardPlan* plan) noexcept;
  // Rows `rows` of `kv` become the tokens from `first` on of these slots.
  void Fill(const TokenSlots& slots, int64_t layer, int64_t first, const LayerKV& kv,
            TokenRange rows, ParallelRunner& runner) noexcept;

  // The same in slots that are not those of imports; keys may be float32 in place of the layer's
  // dtype, and are rounded or quantised then.
  void FillSlots(std::span<const AppendTarget> targets, std::span<const uint8_t> opens_tile,
                 int64_t layer, int64_t first, const LayerKV& kv, TokenRange rows,
                 ParallelRunner& runner) noexcept;

  // Fills the layer's imported tokens of the open forward from their sources, once. They stand
  // before the first row, so whatever stores or reads tokens of the layer calls this first.
  Status LoadLayer(const AttentionCall& call, const ForwardPlan& plan);

 private:
  Result<int64_t> CheckTokens(const char* call, const Sequence& sequence,
                              const KVImport& import) const;
  Status CheckBlocks(const char* call, int64_t start, const KVImport& import,
                     std::span<const GroupAppend> groups) const;
  void FillBlocks(const ForwardPlan& plan, int64_t start, const KVImport& import) noexcept;

  // From PlanImport to its end.
  struct PlannedImport {
    int32_t index = SequenceTable::kAbsent;
    KVImport kv{};
    bool sets_windows = false;
    ForwardPlan plan{};  // of one sequence that gets no rows
  };

  PagedSequences& kv_;
  WindowBook& windows_;
  LayerSteps& steps_;
  const Backend& backend_;
  PlannedImport import_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_IMPORTER_H_
