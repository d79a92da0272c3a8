// Creation, sequences and counters. The forward is in paged_kv_forward.cc, Debug* in
// paged_kv_debug.cc.
#include "kv/cache/paged_kv_cache.h"

#include <algorithm>
#include <numbers>

#include "base/float_environment.h"

namespace quire {

std::vector<std::string> KernelPaths() {
  std::vector<std::string> names;
  for (const Backend* backend : Backends()) names.emplace_back(backend->name);
  return names;
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

std::vector<PagePool> PagedKVCache::MakePools(const std::vector<LayerGroup>& groups,
                                              PageStorage* storage) {
  std::vector<PagePool> pools;
  for (const LayerGroup& group : groups) {
    pools.emplace_back(group.layout.page_size, group.page_count);
    pools.back().set_listener(storage, static_cast<int>(pools.size()) - 1);
  }
  return pools;
}

namespace {

std::vector<int> GroupsOfLayers(const std::vector<LayerGroup>& groups, size_t layer_count) {
  std::vector<int> group_of(layer_count);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int64_t layer : groups[g].layers)
      group_of[static_cast<size_t>(layer)] = static_cast<int>(g);
  }
  return group_of;
}

bool AnyWindow(const std::vector<LayerGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const LayerGroup& group) { return group.window != kNoWindow; });
}

}  // namespace

PagedKVCache::PagedKVCache(AttentionKVCacheOptions options, std::vector<LayerGroup> groups,
                           std::vector<RopeLayers> ropes, std::unique_ptr<PageStorage> storage,
                           const Backend* backend, std::shared_ptr<ParallelRunner> receive_runner)
    : options_(std::move(options)),
      groups_(std::move(groups)),
      storage_(std::move(storage)),
      backend_(backend),
      layers_(options_.layers.size()),
      control_(options_.max_num_sequences),
      tree_(MakePools(groups_, storage_.get())),
      ropes_(options_, groups_, std::move(ropes), control_.table(), tree_),
      scratch_(options_, groups_, *backend_),
      receives_(options_.layers, GroupsOfLayers(groups_, options_.layers.size()), this),
      receive_runner_(std::move(receive_runner)),
      gate_(tree_) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const int64_t layer : groups_[g].layers)
      layers_[static_cast<size_t>(layer)].group = static_cast<int>(g);
  }
  if (AnyWindow(groups_)) tree_.TrackHidden(0);
  const ScopedFloatEnvironment environment;
  for (size_t l = 0; l < layers_.size(); ++l) {
    for (const float logit : options_.layers[l].head_sinks)
      layers_[l].head_sinks_log2.push_back(
          static_cast<float>(static_cast<double>(logit) * std::numbers::log2e));
    const AttentionLayerSpec& spec = options_.layers[l];
    if (options_.allow_skipped_layers) {
      const auto dims = static_cast<size_t>(std::max(spec.qk_head_dim, spec.v_head_dim));
      zero_row_.resize(std::max(zero_row_.size(), dims), 0.0F);
    }
  }
}

// ---------------------------------------------------------------------- sequences

Status PagedKVCache::Clear() {
  return gate_.EnterAlone("Clear", [&]() -> Status {
    FinishSends(Outcome::kAborted);
    for (size_t i = 0; i < control_.table().entries().size(); ++i)
      StopSend(static_cast<int32_t>(i), "the cache was cleared");
    receives_.Clear();
    plan_.Clear();
    query_.Clear();
    scratch_.Clear();
    ropes_.Clear();
    ragged_ = {};
    mask_ = {};
    tree_.Clear();
    trees_.Clear();
    control_.Clear();
    if (AnyWindow(groups_)) tree_.TrackHidden(control_.table().entries().size());
    return Status();
  });
}

Status PagedKVCache::AddSequence(int64_t seq_id) {
  return gate_.EnterAlone("AddSequence", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(control_.CheckNew("AddSequence", seq_id));
    control_.table().ReserveOne();
    tree_.ReserveSequences(control_.table().entries().size());
    control_[control_.table().Insert(seq_id)].long_factors = options_.rope.use_long_factors;
    return Status();
  });
}

Status PagedKVCache::RemoveSequence(int64_t seq_id) {
  return gate_.EnterAlone("RemoveSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index,
                           control_.FindOutsideBatch("RemoveSequence", seq_id));
    if (trees_.Find(index) != nullptr) DropNodes(index, 0);
    StopSend(index, "its sequence was removed");
    if (control_[index].pending > 0) EndReceive(index, 0);
    tree_.Unhide(index);
    tree_.Release(control_[index].last, !control_[index].retained);
    control_.table().Erase(index);
    FreeHidden();
    if (!control_.in_forward()) ropes_.DropUnneeded();
    return Status();
  });
}

Status PagedKVCache::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  return gate_.EnterAlone("ForkSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t parent,
                           control_.FindOutsideBatch("ForkSequence", parent_id));
    QUIRE_RETURN_IF_ERROR(control_.CheckNew("ForkSequence", child_id));
    const int64_t length = LengthOf(parent);
    if (fork_pos < -1 || fork_pos > length) {
      return Status(StatusCode::kBadArgument, OfSequence("ForkSequence", parent_id) + "of length " +
                                                  std::to_string(length) + " cannot be forked at " +
                                                  std::to_string(fork_pos));
    }
    const int64_t position = fork_pos < 0 ? length : fork_pos;
    if (position > CommittedLength(control_[parent]))
      QUIRE_RETURN_IF_ERROR(RequireCommitted("ForkSequence behind the committed tokens", parent));
    QUIRE_RETURN_IF_ERROR(CheckEnd("ForkSequence", control_[parent], position));
    control_.table().ReserveOne();
    tree_.ReserveSequences(control_.table().entries().size());
    tree_.ReserveSplit();
    const BlockIndex last = tree_.ForkAt(control_[parent].last, position);
    const int32_t index = control_.table().Insert(child_id);
    Sequence& child = control_[index];
    child.last = last;
    child.long_factors = control_[parent].long_factors;
    MoveEnd(control_[parent], position, &child);
    UpdateHidden(index);
    return Status();
  });
}

Status PagedKVCache::PopN(int64_t seq_id, int64_t n) {
  return gate_.EnterAlone("PopN", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.FindOutsideBatch("PopN", seq_id));
    Sequence& sequence = control_[index];
    const int64_t length = LengthOf(index);
    if (n < 0 || n > length) {
      return Status(StatusCode::kBadArgument, OfSequence("PopN", seq_id) + "of length " +
                                                  std::to_string(length) + " cannot lose " +
                                                  std::to_string(n) + " tokens");
    }
    const int64_t committed = CommittedLength(sequence);
    if (n > 0 && sequence.pending > n) QUIRE_RETURN_IF_ERROR(RequireCommitted("PopN", index));
    const int64_t nodes = std::max<int64_t>(length - n - committed, 0);
    const int64_t end = std::min(length - n, committed);
    QUIRE_RETURN_IF_ERROR(CheckEnd("PopN", sequence, end));
    tree_.ReserveSplit();
    if (trees_.Find(index) != nullptr) DropNodes(index, nodes);
    if (n > 0 && sequence.pending > 0) EndReceive(index, 0);
    marks_.ShortenTo(index, end);
    if (end < committed) {
      tree_.Unhide(index);
      sequence.last = tree_.Pop(sequence.last, end, !sequence.retained);
      MoveEnd(sequence, end, &sequence);
      UpdateHidden(index);
    }
    FreeHidden();
    if (!control_.in_forward()) ropes_.DropUnneeded();
    return Status();
  });
}

Status PagedKVCache::SetRetained(int64_t seq_id, bool retained) {
  return gate_.EnterAlone("SetRetained", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.FindOutsideBatch("SetRetained", seq_id));
    if (retained) QUIRE_RETURN_IF_ERROR(RequireCommitted("SetRetained", index));
    if (!retained && control_[index].retained) {
      QUIRE_RETURN_IF_ERROR(control_.CheckRoomForActive("SetRetained", seq_id));
    }
    if (retained != control_[index].retained) tree_.SetActive(control_[index].last, !retained);
    control_.table().SetRetained(index, retained);
    plan_.ForbidRepeat();
    return Status();
  });
}

Status PagedKVCache::SelectLongRope(int64_t seq_id, bool use_long_factors) {
  return gate_.EnterAlone("SelectLongRope", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index,
                           control_.FindOutsideBatch("SelectLongRope", seq_id));
    if (options_.rope.mode == RopeMode::kNone || !HasLongSet(options_.rope.scaling)) {
      return Status(StatusCode::kBadState,
                    "SelectLongRope: this cache was not created with RopeScaling::kLongRope or "
                    "kDynamic");
    }
    const int64_t length = LengthOf(index);
    if (length != 0) {
      return Status(StatusCode::kBadState, OfSequence("SelectLongRope", seq_id) + "has " +
                                               std::to_string(length) +
                                               " tokens already, whose keys are rotated; add an "
                                               "empty one and select before its first forward");
    }
    control_[index].long_factors = use_long_factors;
    return Status();
  });
}

Result<bool> PagedKVCache::UsesLongRope(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<bool> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("UsesLongRope", seq_id));
    return control_[index].long_factors;
  });
}

// ---------------------------------------------------------------------- counters

int64_t PagedKVCache::GetNumAvailablePages() const {
  const auto lock = gate_.Lock();
  int64_t least = tree_.pool(0).free_count();
  for (int g = 1; g < tree_.group_count(); ++g) least = std::min(least, tree_.pool(g).free_count());
  return least;
}

int64_t PagedKVCache::GetTotalSequenceLength() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (const Sequence& sequence : control_.table().entries())
    total += CommittedLength(sequence) + sequence.pending;
  return total + trees_.node_count();
}

int64_t PagedKVCache::pages_in_use() const {
  const auto lock = gate_.Lock();
  int64_t total = 0;
  for (int g = 0; g < tree_.group_count(); ++g) total += tree_.pool(g).used_count();
  return total;
}

int64_t PagedKVCache::pages_allocated() const {
  int64_t total = 0;
  for (int g = 0; g < tree_.group_count(); ++g) total += tree_.pool(g).page_count();
  return total;
}

Result<int64_t> PagedKVCache::GetSequenceLength(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("GetSequenceLength", seq_id));
    return LengthOf(index);
  });
}

}  // namespace quire
