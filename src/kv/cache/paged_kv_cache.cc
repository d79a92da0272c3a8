#include "kv/cache/paged_kv_cache.h"

#include <string>
#include <utility>

#include "base/check.h"
#include "kv/cache/kv_digest.h"
#include "kv/cache/kv_invariants.h"
#include "kv/cache/layer_kv.h"
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

namespace {

// Those of ForwardCalls; kClear is the cache's own, all others are of SequenceCalls.
constexpr bool IsCallOfForwards(ControlCall::Kind kind) {
  switch (kind) {
    case ControlCall::Kind::kBegin:
    case ControlCall::Kind::kBeginTree:
    case ControlCall::Kind::kEnd:
    case ControlCall::Kind::kAbort:
      return true;
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kCommitTree:
    case ControlCall::Kind::kImport:
      break;
  }
  return false;
}

}  // namespace

Result<std::unique_ptr<AttentionKVCache>> AttentionKVCache::Create(
    AttentionKVCacheOptions options) {
  return PagedKVCache::Create(std::move(options));
}

// ---------------------------------------------------------------------- creation

Result<std::unique_ptr<AttentionKVCache>> PagedKVCache::Create(
    AttentionKVCacheOptions options, std::shared_ptr<ParallelRunner> receive_runner) {
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
    if (NumaNodes* const nodes = options.runner->numa_nodes(); nodes != nullptr) {
      storage->SpreadOver(*nodes);
    }
    if (receive_runner == nullptr) {
      QUIRE_ASSIGN_OR_RETURN(receive_runner, CreateThreadPool(1));
    }
    options.kernel_path = (*backend)->name;
    return std::unique_ptr<AttentionKVCache>(
        new PagedKVCache(std::move(options), std::move(groups), std::move(ropes),
                         std::move(storage), **backend, std::move(receive_runner)));
  });
}

PagedKVCache::PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
                           std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
                           const Backend& backend, std::shared_ptr<ParallelRunner> receive_runner)
    : CacheQueries(gate_, kv_, windows_),
      kv_(std::move(options), std::move(groups), std::move(storage)),
      gate_(kv_.tree),
      steps_(kv_.options.layers.size()),
      ropes_(kv_.options, kv_.groups, std::move(ropes), kv_.control.table(), kv_.tree),
      windows_(kv_, plan_),
      trees_(kv_, windows_),
      importer_(kv_, windows_, steps_, backend),
      transfer_(gate_, kv_, importer_, windows_, std::move(receive_runner)),
      blending_(kv_, importer_, transfer_.sender(), ropes_, plan_),
      attention_({.gate = gate_,
                  .kv = kv_,
                  .plan = plan_,
                  .steps = steps_,
                  .ropes = ropes_,
                  .blending = blending_,
                  .importer = importer_,
                  .sender = transfer_.sender()},
                 backend),
      forwards_({.kv = kv_,
                 .plan = plan_,
                 .steps = steps_,
                 .ropes = ropes_,
                 .windows = windows_,
                 .trees = trees_,
                 .importer = importer_,
                 .sender = transfer_.sender(),
                 .blending = blending_,
                 .attention = attention_}),
      sequences_({.kv = kv_,
                  .plan = plan_,
                  .ropes = ropes_,
                  .windows = windows_,
                  .trees = trees_,
                  .importer = importer_,
                  .sender = transfer_.sender(),
                  .receiver = transfer_.receiver()}),
      stored_(kv_, windows_, steps_, plan_) {}

// ---------------------------------------------------------------------- calls in two halves

Status PagedKVCache::Run(const ControlCall& call) {
  return gate_.EnterAlone(call.name(), [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(PlanCall(call));
    CommitCall(call);
    return Status();
  });
}

Status PagedKVCache::Plan(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(gate_.Open(call.name()));
  planned_ = call;
  const Status planned = GuardEntry([&] { return PlanCall(planned_); });
  if (!planned.ok()) gate_.Close();
  return planned;
}

void PagedKVCache::Commit() noexcept {
  CommitCall(planned_);
  gate_.Close();
}

// What a planned forward has in plan_ is as good as nothing: the next one starts it again.
void PagedKVCache::Drop() noexcept {
  if (planned_.kind == Kind::kImport) importer_.DropImport();
  gate_.Close();
}

Status PagedKVCache::PlanCall(const ControlCall& call) {
  if (call.kind == Kind::kClear) return Status();
  return IsCallOfForwards(call.kind) ? forwards_.Plan(call) : sequences_.Plan(call);
}

void PagedKVCache::CommitCall(const ControlCall& call) noexcept {
  if (call.kind == Kind::kClear) return ClearAll();
  return IsCallOfForwards(call.kind) ? forwards_.Commit(call) : sequences_.Commit(call);
}

void PagedKVCache::ClearAll() noexcept {
  transfer_.Clear();
  forwards_.Clear();
  trees_.Clear();
  attention_.Clear();
  ropes_.Clear();
  blending_.Clear();
  kv_.Clear();
  QUIRE_DCHECK(kv_.control.table().count() == 0 && !kv_.control.in_forward());
}

// ---------------------------------------------------------------------- forwards

Status PagedKVCache::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                         std::span<const int64_t> append_lengths,
                                         std::span<const LayerLoad> loads) {
  return Run(
      {.kind = Kind::kBegin, .seq_ids = seq_ids, .append_lengths = append_lengths, .loads = loads});
}

Status PagedKVCache::BeginBlendingForward(std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths,
                                          std::span<const LayerLoad> loads,
                                          std::span<const BlendMember> blends) {
  return gate_.EnterAlone("BeginBlendingForward", [&] {
    return forwards_.BeginBlending(seq_ids, append_lengths, loads, blends);
  });
}

Result<int64_t> PagedKVCache::PagesNeeded(std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths) const {
  return gate_.Ask([&] { return forwards_.PagesNeeded("PagesNeeded", seq_ids, append_lengths); });
}

Result<int64_t> PagedKVCache::PagesNeededForTree(
    std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
    std::span<const int64_t> token_tree_parents) const {
  return gate_.Ask([&] {
    return forwards_.PagesNeededForTree("PagesNeededForTree", seq_ids, append_lengths,
                                        token_tree_parents);
  });
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryRows() const {
  return gate_.Ask([&] { return forwards_.QueryRows("GetQueryRows"); });
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryPositions() const {
  return gate_.Ask([&] { return forwards_.QueryPositions("GetQueryPositions"); });
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

// ---------------------------------------------------------------------- for tests and tools

Status PagedKVCache::DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                                const TensorView& v) {
  return gate_.Enter("DebugGetKV",
                     [&] { return stored_.Get("DebugGetKV", seq_id, start, end, k, &v); });
}

Status PagedKVCache::DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end,
                                   const TensorView& kv) {
  return gate_.Enter("DebugGetKVMLA",
                     [&] { return stored_.Get("DebugGetKVMLA", seq_id, start, end, kv, nullptr); });
}

Status PagedKVCache::DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                                const TensorView& v) {
  return gate_.EnterAlone("DebugSetKV",
                          [&] { return stored_.Set("DebugSetKV", seq_id, start, k, &v); });
}

Status PagedKVCache::DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) {
  return gate_.EnterAlone("DebugSetKVMLA",
                          [&] { return stored_.Set("DebugSetKVMLA", seq_id, start, kv, nullptr); });
}

Result<std::string> PagedKVCache::DebugPlan() const {
  return gate_.Ask([&]() -> Result<std::string> {
    if (!kv_.control.in_forward()) return kv_.control.RequireForward("DebugPlan");
    std::string text = plan_.ToString(kv_.tree);
    if (blending_.is_open()) text += blending_.queries().ToString(plan_);
    return text;
  });
}

uint64_t PagedKVCache::StateDigest() const {
  const auto lock = gate_.Lock();
  return DigestState(kv_, transfer_.sender(), steps_);
}

Status PagedKVCache::CheckInvariants() const {
  return gate_.Ask([&]() -> Status {
    std::vector<int64_t> windows;
    for (const LayerGroup& group : kv_.groups) windows.push_back(group.window);
    QUIRE_RETURN_IF_ERROR(CheckKVInvariants(kv_.tree, kv_.control.table(), forwards_.members(),
                                            &kv_.trees, windows, kv_.options.max_pop));
    QUIRE_RETURN_IF_ERROR(transfer_.receiver().CheckInvariants());
    const std::string difference =
        kv_.control.in_forward() ? plan_.DifferenceFromNew(kv_.tree) : "";
    if (difference.empty()) return Status();
    return Status(StatusCode::kInternal, "invariant violated: the plan " + difference);
  });
}

PagedKVCache::Figures PagedKVCache::figures() const {
  return {.repeated_forwards = forwards_.repeated_count(),
          .blocks_visited = kv_.tree.hidden().blocks_visited(),
          .page_entries = kv_.tree.tables().entry_count(),
          .storage_bytes = kv_.storage->bytes(),
          .scratch_bytes = attention_.scratch_bytes(),
          .blend_bytes = blending_.bytes(),
          .angle_bytes = ropes_.bytes(),
          .angle_bytes_max = ropes_.bytes_max(),
          .table_bytes = kv_.tree.memory_bytes(),
          .tiles_received = transfer_.receiver().tiles_opened()};
}

}  // namespace quire
