// Creation, calls in two halves, and counters. The forward is in paged_kv_forward.cc,
// what tests and tools look at in paged_kv_debug.cc.
#include "kv/cache/paged_kv_cache.h"

#include <algorithm>
#include <string>
#include <utility>

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
    return std::unique_ptr<AttentionKVCache>(
        new PagedKVCache(std::move(options), std::move(groups), std::move(ropes),
                         std::move(storage), **backend, std::move(receive_runner)));
  });
}

PagedKVCache::PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
                           std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
                           const Backend& backend, std::shared_ptr<ParallelRunner> receive_runner)
    : kv_(std::move(options), std::move(groups), std::move(storage)),
      gate_(kv_.tree),
      steps_(kv_.options.layers.size()),
      ropes_(kv_.options, kv_.groups, std::move(ropes), kv_.control.table(), kv_.tree),
      windows_(kv_, plan_),
      planner_(kv_, windows_),
      trees_(kv_, planner_, windows_),
      importer_(kv_, windows_, steps_, backend),
      sender_(kv_),
      blending_(kv_, importer_, sender_, ropes_, plan_),
      attention_({.gate = gate_,
                  .kv = kv_,
                  .plan = plan_,
                  .steps = steps_,
                  .ropes = ropes_,
                  .blending = blending_,
                  .importer = importer_,
                  .sender = sender_},
                 backend),
      receiver_(kv_, importer_, windows_, std::move(receive_runner)),
      sequences_({.kv = kv_,
                  .plan = plan_,
                  .ropes = ropes_,
                  .windows = windows_,
                  .trees = trees_,
                  .importer = importer_,
                  .sender = sender_,
                  .receiver = receiver_}),
      transfer_(gate_, kv_, sender_, receiver_),
      stored_(kv_, windows_, steps_, plan_) {}

// ---------------------------------------------------------------------- calls in two halves

Status PagedKVCache::Run(const ControlCall& call) {
  return gate_.EnterAlone(call.name(), [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(PlanCall(call));
    CommitCall();
    return Status();
  });
}

Status PagedKVCache::Plan(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(gate_.Open(call.name()));
  const Status planned = GuardEntry([&] { return PlanCall(call); });
  if (!planned.ok()) gate_.Close();
  return planned;
}

void PagedKVCache::Commit() noexcept {
  CommitCall();
  gate_.Close();
}

// What a planned forward has in plan_ is as good as nothing: the next one starts it again.
void PagedKVCache::Drop() noexcept {
  if (planned_.kind == ControlCall::Kind::kImport) importer_.DropImport();
  gate_.Close();
}

Status PagedKVCache::PlanCall(const ControlCall& call) {
  planned_.kind = call.kind;
  switch (call.kind) {
    case ControlCall::Kind::kClear:
      return Status();
    case ControlCall::Kind::kBegin:
      return PlanBegin(call);
    case ControlCall::Kind::kBeginTree:
      return PlanBeginTree(call);
    case ControlCall::Kind::kEnd:
      return PlanEnd(call);
    case ControlCall::Kind::kAbort:
      return kv_.control.in_forward() ? Status() : kv_.control.RequireForward(call.name());
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kCommitTree:
    case ControlCall::Kind::kImport:
      break;
  }
  return sequences_.Plan(call);
}

void PagedKVCache::CommitCall() noexcept {
  switch (planned_.kind) {
    case ControlCall::Kind::kClear:
      return ClearAll();
    case ControlCall::Kind::kBegin:
      return planned_.repeats ? CommitRepeatedForward() : CommitForward();
    case ControlCall::Kind::kBeginTree:
      return CommitForward();
    case ControlCall::Kind::kEnd:
      if (kv_.options.allow_skipped_layers) FillSkippedLayers();
      CloseForward();
      return sender_.FinishForward(plan_, SendMarks::Outcome::kEnded);
    case ControlCall::Kind::kAbort:
      RollBackForward();
      return sender_.FinishForward(plan_, SendMarks::Outcome::kAborted);
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kCommitTree:
    case ControlCall::Kind::kImport:
      break;
  }
  return sequences_.Commit();
}

void PagedKVCache::ClearAll() noexcept {
  sender_.FinishForward(plan_, SendMarks::Outcome::kAborted);
  for (size_t i = 0; i < kv_.control.table().entries().size(); ++i)
    sender_.Stop(static_cast<int32_t>(i), "the cache was cleared");
  receiver_.Clear();
  plan_.Clear();
  query_.Clear();
  trees_.Clear();
  attention_.Clear();
  ropes_.Clear();
  blending_.Clear();
  kv_.Clear();
}

// ---------------------------------------------------------------------- sequences

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

Result<int64_t> PagedKVCache::GetTreeSize(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find("GetTreeSize", seq_id));
    return kv_.trees.SizeOf(index);
  });
}

// ---------------------------------------------------------------------- export and import

Status PagedKVCache::ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) {
  return GuardEntry([&]() -> Status {
    std::vector<int64_t> tokens;
    for (const KVBlock& block : blocks) tokens.push_back(block.empty() ? 0 : TokenCount(block[0]));
    const KVImport import{.blocks = blocks, .tokens = tokens};
    return Run({.kind = Kind::kImport,
                .seq_id = seq_id,
                .kv = &import,
                .leaves_out = false,
                .entry = "ImportKV"});
  });
}

Status PagedKVCache::ImportVisibleKV(int64_t seq_id, const KVImport& import) {
  return Run({.kind = Kind::kImport, .seq_id = seq_id, .kv = &import, .entry = "ImportVisibleKV"});
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
