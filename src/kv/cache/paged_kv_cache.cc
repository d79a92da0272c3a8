// Creation, the calls that change sequences, and counters. The forward is in paged_kv_forward.cc,
// what tests and tools look at in paged_kv_debug.cc.
#include "kv/cache/paged_kv_cache.h"

#include <algorithm>
#include <numbers>
#include <string>
#include <utility>

#include "base/float_environment.h"
#include "kv/cache/layer_kv.h"
#include "kv/pages/sliding_window.h"
#include "quire/kernel_paths.h"

namespace quire {

std::vector<std::string> KernelPaths() {
  std::vector<std::string> names;
  for (const Backend* backend : Backends()) names.emplace_back(backend->name);
  return names;
}

std::string RefusedKernelPath() {
  const std::string_view reason = TilesRefused();
  return reason.empty() ? "" : "avx512_amx: " + std::string(reason);
}

Result<std::unique_ptr<AttentionKVCache>> AttentionKVCache::Create(
    AttentionKVCacheOptions options) {
  return PagedKVCache::Create(std::move(options));
}

// ---------------------------------------------------------------------- creation

Result<std::unique_ptr<AttentionKVCache>> PagedKVCache::Create(AttentionKVCacheOptions options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<AttentionKVCache>> {
    QUIRE_ASSIGN_OR_RETURN(std::vector<LayerGroup> groups, MakeLayerGroups(options));
    const Result<const Backend*> backend = FindBackend(options.kernel_path);
    if (!backend.ok()) {
      return Status(backend.status().code(), "AttentionKVCacheOptions: kernel_path: " +
                                                 std::string(backend.status().message()));
    }
    QUIRE_ASSIGN_OR_RETURN(std::vector<RopeLayers> ropes, MakeRopeLayers(options, groups));
    QUIRE_ASSIGN_OR_RETURN(auto storage, PageStorage::Create(groups, options.poison_freed_pages));
    if (options.runner == nullptr) {
      QUIRE_ASSIGN_OR_RETURN(options.runner, CreateThreadPool(0));
    }
    QUIRE_ASSIGN_OR_RETURN(auto receive_runner, CreateThreadPool(1));
    options.kernel_path = (*backend)->name;
    return std::unique_ptr<AttentionKVCache>(new PagedKVCache(std::move(options), std::move(groups),
                                                              std::move(ropes), std::move(storage),
                                                              *backend, std::move(receive_runner)));
  });
}

PagedKVCache::PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
                           std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
                           const Backend* backend, std::shared_ptr<ParallelRunner> receive_runner)
    : kv_(std::move(options), std::move(groups), std::move(storage)),
      backend_(backend),
      gate_(kv_.tree),
      steps_(kv_.options.layers.size()),
      ropes_(kv_.options, kv_.groups, std::move(ropes), kv_.control.table(), kv_.tree),
      scratch_(kv_.options, kv_.groups, *backend_),
      windows_(kv_, plan_),
      planner_(kv_, windows_),
      trees_(kv_, planner_, windows_),
      importer_(kv_, windows_, steps_, *backend_),
      sender_(kv_),
      blending_(kv_, importer_, sender_, ropes_, plan_),
      receiver_(kv_, importer_, windows_, std::move(receive_runner)),
      transfer_(gate_, kv_, sender_, receiver_),
      stored_(kv_, windows_, steps_, plan_) {
  const ScopedFloatEnvironment environment;
  for (const AttentionLayerSpec& spec : kv_.options.layers) {
    std::vector<float>& sinks = head_sinks_log2_.emplace_back();
    for (const float logit : spec.head_sinks)
      sinks.push_back(static_cast<float>(static_cast<double>(logit) * std::numbers::log2e));
    if (!kv_.options.allow_skipped_layers) continue;
    const auto dims = static_cast<size_t>(std::max(spec.qk_head_dim, spec.v_head_dim));
    zero_row_.resize(std::max(zero_row_.size(), dims), 0.0F);
  }
}

// ---------------------------------------------------------------------- sequences

Status PagedKVCache::Clear() {
  return gate_.EnterAlone("Clear", [&]() -> Status {
    sender_.FinishForward(plan_, SendMarks::Outcome::kAborted);
    for (size_t i = 0; i < kv_.control.table().entries().size(); ++i)
      sender_.Stop(static_cast<int32_t>(i), "the cache was cleared");
    receiver_.Clear();
    plan_.Clear();
    query_.Clear();
    trees_.Clear();
    scratch_.Clear();
    ropes_.Clear();
    blending_.Clear();
    ragged_ = {};
    mask_ = {};
    kv_.Clear();
    return Status();
  });
}

Status PagedKVCache::AddSequence(int64_t seq_id) {
  return gate_.EnterAlone("AddSequence", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew("AddSequence", seq_id));
    kv_.control.table().ReserveOne();
    kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
    kv_.control[kv_.control.table().Insert(seq_id)].long_factors =
        kv_.options.rope.use_long_factors;
    return Status();
  });
}

Status PagedKVCache::RemoveSequence(int64_t seq_id) {
  return gate_.EnterAlone("RemoveSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index,
                           kv_.control.FindOutsideBatch("RemoveSequence", seq_id));
    if (kv_.trees.Find(index) != nullptr) trees_.DropNodes(index, 0);
    sender_.Stop(index, "its sequence was removed");
    if (kv_.control[index].pending > 0) receiver_.End(index, 0);
    kv_.tree.hidden().Unhide(index);
    kv_.tree.Release(kv_.control[index].last, !kv_.control[index].retained);
    kv_.control.table().Erase(index);
    windows_.FreeHidden();
    if (!kv_.control.in_forward()) ropes_.DropUnneeded();
    return Status();
  });
}

Status PagedKVCache::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  return gate_.EnterAlone("ForkSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t parent,
                           kv_.control.FindOutsideBatch("ForkSequence", parent_id));
    QUIRE_RETURN_IF_ERROR(kv_.control.CheckNew("ForkSequence", child_id));
    const int64_t length = kv_.LengthOf(parent);
    if (fork_pos < -1 || fork_pos > length) {
      return Status(StatusCode::kBadArgument, OfSequence("ForkSequence", parent_id) + "of length " +
                                                  std::to_string(length) + " cannot be forked at " +
                                                  std::to_string(fork_pos));
    }
    const int64_t position = fork_pos < 0 ? length : fork_pos;
    if (position > kv_.CommittedLength(kv_.control[parent]))
      QUIRE_RETURN_IF_ERROR(
          kv_.RequireCommitted("ForkSequence behind the committed tokens", parent));
    QUIRE_RETURN_IF_ERROR(windows_.CheckEnd("ForkSequence", kv_.control[parent], position));
    kv_.control.table().ReserveOne();
    kv_.tree.hidden().ReserveSequences(kv_.control.table().entries().size());
    kv_.tree.ReserveSplit();
    const BlockIndex last = kv_.tree.ForkAt(kv_.control[parent].last, position);
    const int32_t index = kv_.control.table().Insert(child_id);
    Sequence& child = kv_.control[index];
    child.last = last;
    child.long_factors = kv_.control[parent].long_factors;
    windows_.MoveEnd(kv_.control[parent], position, &child);
    windows_.UpdateHidden(index);
    return Status();
  });
}

Status PagedKVCache::PopN(int64_t seq_id, int64_t n) {
  return gate_.EnterAlone("PopN", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch("PopN", seq_id));
    Sequence& sequence = kv_.control[index];
    const int64_t length = kv_.LengthOf(index);
    if (n < 0 || n > length) {
      return Status(StatusCode::kBadArgument, OfSequence("PopN", seq_id) + "of length " +
                                                  std::to_string(length) + " cannot lose " +
                                                  std::to_string(n) + " tokens");
    }
    const int64_t committed = kv_.CommittedLength(sequence);
    if (n > 0 && sequence.pending > n) QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted("PopN", index));
    const int64_t nodes = std::max<int64_t>(length - n - committed, 0);
    const int64_t end = std::min(length - n, committed);
    QUIRE_RETURN_IF_ERROR(windows_.CheckEnd("PopN", sequence, end));
    kv_.tree.ReserveSplit();
    if (kv_.trees.Find(index) != nullptr) trees_.DropNodes(index, nodes);
    if (n > 0 && sequence.pending > 0) receiver_.End(index, 0);
    sender_.ShortenTo(index, end);
    if (end < committed) {
      kv_.tree.hidden().Unhide(index);
      sequence.last = kv_.tree.Pop(sequence.last, end, !sequence.retained);
      windows_.MoveEnd(sequence, end, &sequence);
      windows_.UpdateHidden(index);
    }
    windows_.FreeHidden();
    if (!kv_.control.in_forward()) ropes_.DropUnneeded();
    return Status();
  });
}

Status PagedKVCache::SetRetained(int64_t seq_id, bool retained) {
  return gate_.EnterAlone("SetRetained", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index,
                           kv_.control.FindOutsideBatch("SetRetained", seq_id));
    if (retained) QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted("SetRetained", index));
    if (!retained && kv_.control[index].retained) {
      QUIRE_RETURN_IF_ERROR(kv_.control.CheckRoomForActive("SetRetained", seq_id));
    }
    if (retained != kv_.control[index].retained)
      kv_.tree.SetActive(kv_.control[index].last, !retained);
    kv_.control.table().SetRetained(index, retained);
    plan_.ForbidRepeat();
    return Status();
  });
}

Status PagedKVCache::SelectLongRope(int64_t seq_id, bool use_long_factors) {
  return gate_.EnterAlone("SelectLongRope", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index,
                           kv_.control.FindOutsideBatch("SelectLongRope", seq_id));
    if (kv_.options.rope.mode == RopeMode::kNone || !HasLongSet(kv_.options.rope.scaling)) {
      return Status(StatusCode::kBadState,
                    "SelectLongRope: this cache was not created with RopeScaling::kLongRope or "
                    "kDynamic");
    }
    const int64_t length = kv_.LengthOf(index);
    if (length != 0) {
      return Status(StatusCode::kBadState, OfSequence("SelectLongRope", seq_id) + "has " +
                                               std::to_string(length) +
                                               " tokens already, whose keys are rotated; add an "
                                               "empty one and select before its first forward");
    }
    kv_.control[index].long_factors = use_long_factors;
    return Status();
  });
}

Result<bool> PagedKVCache::UsesLongRope(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<bool> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("UsesLongRope", seq_id));
    return kv_.control[index].long_factors;
  });
}

// ---------------------------------------------------------------------- windows

Status PagedKVCache::EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
  const char* call = "EnableSlidingWindowForSeq";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch(call, seq_id));
    return windows_.Enable(call, index, window, sinks);
  });
}

Status PagedKVCache::DisableSlidingWindowForSeq(int64_t seq_id) {
  const char* call = "DisableSlidingWindowForSeq";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch(call, seq_id));
    return windows_.Disable(call, index);
  });
}

bool PagedKVCache::CanFork(int64_t seq_id, int64_t position) const {
  const auto lock = gate_.Lock();
  const int32_t index = kv_.control.table().Find(seq_id);
  if (index == SequenceTable::kAbsent || position < 0) return false;
  return windows_.CanEnd(kv_.control[index], position);
}

Result<int64_t> PagedKVCache::HeldTokens(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("HeldTokens", seq_id));
    const Sequence& sequence = kv_.control[index];
    return CountHeldTokens(kv_.tree, sequence.last) - sequence.reserved + kv_.trees.SizeOf(index);
  });
}

Result<TokenRange> PagedKVCache::SlidRange(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<TokenRange> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("SlidRange", seq_id));
    const Sequence& sequence = kv_.control[index];
    if (sequence.slid == 0) return TokenRange();
    return TokenRange{sequence.window.sinks, sequence.window.sinks + sequence.slid};
  });
}

Result<SequenceWindows> PagedKVCache::GetWindows(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<SequenceWindows> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetWindows", seq_id));
    return windows_.Of(kv_.control[index]);
  });
}

// ---------------------------------------------------------------------- token trees

Status PagedKVCache::CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                                  std::span<const int64_t> leaf_indices) {
  const char* call = "CommitAcceptedTokenTreeNodes";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(CheckLeafCount(call, seq_ids, leaf_indices));
    kv_.control.StartPlanning();
    for (size_t i = 0; i < seq_ids.size(); ++i)
      QUIRE_RETURN_IF_ERROR(trees_.PlanLeaf(call, seq_ids[i], leaf_indices[i]));
    for (size_t i = 0; i < seq_ids.size(); ++i) {
      trees_.CommitPath(kv_.control.table().Find(seq_ids[i]), leaf_indices[i]);
    }
    windows_.FreeHidden();
    return Status();
  });
}

Result<int64_t> PagedKVCache::GetTreeSize(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetTreeSize", seq_id));
    return kv_.trees.SizeOf(index);
  });
}

// ---------------------------------------------------------------------- export and import

Status PagedKVCache::ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) {
  return gate_.EnterAlone("ImportKV", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle("ImportKV"));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("ImportKV", seq_id));
    std::vector<int64_t> tokens;
    for (const KVBlock& block : blocks) tokens.push_back(block.empty() ? 0 : TokenCount(block[0]));
    return importer_.Import("ImportKV", index, {.blocks = blocks, .tokens = tokens}, false);
  });
}

Status PagedKVCache::ImportVisibleKV(int64_t seq_id, const KVImport& import) {
  const char* call = "ImportVisibleKV";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
    return importer_.Import(call, index, import, true);
  });
}

Status PagedKVCache::ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) {
  return gate_.Enter("ExportKV",
                     [&] { return stored_.Export("ExportKV", seq_id, layer, start, to); });
}

// ---------------------------------------------------------------------- counters

int64_t PagedKVCache::GetNumAvailablePages() const {
  const auto lock = gate_.Lock();
  int64_t least = kv_.tree.pool(0).free_count();
  for (int g = 1; g < kv_.tree.group_count(); ++g)
    least = std::min(least, kv_.tree.pool(g).free_count());
  return least;
}

int64_t PagedKVCache::GetTotalSequenceLength() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (const Sequence& sequence : kv_.control.table().entries())
    total += kv_.CommittedLength(sequence) + sequence.pending;
  return total + kv_.trees.node_count();
}

int64_t PagedKVCache::pages_in_use() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (int g = 0; g < kv_.tree.group_count(); ++g) total += kv_.tree.pool(g).used_count();
  return total;
}

int64_t PagedKVCache::pages_allocated() const {
  int64_t total = 0;
  for (int g = 0; g < kv_.tree.group_count(); ++g) total += kv_.tree.pool(g).page_count();
  return total;
}

Result<int64_t> PagedKVCache::GetSequenceLength(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetSequenceLength", seq_id));
    return kv_.LengthOf(index);
  });
}

}  // namespace quire
