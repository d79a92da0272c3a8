// Creation, sequences and counters. The forward is in paged_kv_forward.cc, Debug* in
// paged_kv_debug.cc.
#include "kv/paged_kv_cache.h"

#include <algorithm>
#include <numbers>

#include "base/float_environment.h"
#include "kv/page_counts.h"

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
    std::vector<Rope> ropes;
    for (const AttentionLayerSpec& layer : options.layers) {
      const bool known = std::any_of(ropes.begin(), ropes.end(),
                                     [&](const Rope& rope) { return rope.IsOf(layer); });
      const RopeOptions* const of_layer = RopeOf(options, layer);
      if (known || of_layer == nullptr) continue;
      const int64_t dim = RopeDim(layer);
      QUIRE_ASSIGN_OR_RETURN(RopeFrequencies short_set,
                             ComputeRopeFrequencies(*of_layer, dim, false));
      QUIRE_ASSIGN_OR_RETURN(RopeFrequencies long_set,
                             ComputeRopeFrequencies(*of_layer, dim, true));
      ropes.push_back({.head_dim = dim,
                       .options = layer.rope,
                       .short_table = RopeTable(std::move(short_set)),
                       .long_table = RopeTable(std::move(long_set))});
    }
    QUIRE_ASSIGN_OR_RETURN(auto storage, PageStorage::Create(groups, options.poison_freed_pages));
    if (options.runner == nullptr) options.runner = CreateThreadPool(0);
    options.kernel_path = (*backend)->name;
    return std::unique_ptr<AttentionKVCache>(new PagedKVCache(
        std::move(options), std::move(groups), std::move(ropes), std::move(storage), *backend));
  });
}

const RopeOptions* PagedKVCache::RopeOf(const AttentionKVCacheOptions& options,
                                        const AttentionLayerSpec& layer) {
  const RopeOptions& rope = layer.rope ? *layer.rope : options.rope;
  return rope.mode == RopeMode::kNone || RopeDim(layer) == 0 ? nullptr : &rope;
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
                           std::vector<Rope> ropes, std::unique_ptr<PageStorage> storage,
                           const Backend* backend)
    : options_(std::move(options)),
      groups_(std::move(groups)),
      storage_(std::move(storage)),
      backend_(backend),
      ropes_(std::move(ropes)),
      layers_(options_.layers.size()),
      tree_(MakePools(groups_, storage_.get())),
      receives_(options_.layers, GroupsOfLayers(groups_, options_.layers.size()), this),
      receive_runner_(CreateThreadPool(1)) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const int64_t layer : groups_[g].layers)
      layers_[static_cast<size_t>(layer)].group = static_cast<int>(g);
  }
  has_windows_ = AnyWindow(groups_);
  const ScopedFloatEnvironment environment;
  for (size_t l = 0; l < layers_.size(); ++l) {
    for (const float logit : options_.layers[l].head_sinks)
      layers_[l].head_sinks_log2.push_back(
          static_cast<float>(static_cast<double>(logit) * std::numbers::log2e));
    const AttentionLayerSpec& spec = options_.layers[l];
    if (!spec.latent) layers_[l].mode = options_.rope.mode;
    if (spec.latent) layers_[l].rope_first_dim = static_cast<int>(spec.v_head_dim);
    const RopeOptions* const rope = RopeOf(options_, spec);
    if (rope == nullptr) continue;
    layers_[l].interleaved = rope->pairing == RopePairing::kInterleaved;
    for (size_t r = 0; r < ropes_.size(); ++r) {
      if (ropes_[r].IsOf(spec)) layers_[l].rope = static_cast<int>(r);
    }
  }
}

// ---------------------------------------------------------------------- checks

namespace {

std::string OfSequence(const char* call, int64_t seq_id) {
  return std::string(call) + ": sequence " + std::to_string(seq_id) + " ";
}

}  // namespace

Status PagedKVCache::RequireIdle(const char* call) const {
  if (!in_forward_) return Status();
  return Status(
      StatusCode::kBadState,
      std::string(call) + ": a forward is open; end it with EndForward or AbortForward first");
}

Status PagedKVCache::RequireForward(const char* call) const {
  if (!in_forward_) {
    return Status(StatusCode::kBadState,
                  std::string(call) + ": no forward is open; call BeginForward first");
  }
  if (!failed_) return Status();
  return Status(
      StatusCode::kBadState,
      std::string(call) + ": an attention call of this forward has failed; call AbortForward");
}

Result<int32_t> PagedKVCache::FindSequence(const char* call, int64_t seq_id) const {
  const int32_t index = sequences_.Find(seq_id);
  if (index != SequenceTable::kAbsent) return index;
  return Status(StatusCode::kUnknownSequence, OfSequence(call, seq_id) + "does not exist");
}

Result<int32_t> PagedKVCache::FindOutsideBatch(const char* call, int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence(call, seq_id));
  if (!InBatch(sequences_[index])) return index;
  return Status(
      StatusCode::kBadState,
      OfSequence(call, seq_id) + "is in the batch of the open forward; end or abort that first");
}

Status PagedKVCache::CheckNewSequence(const char* call, int64_t seq_id) const {
  if (seq_id < 0) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": " + std::to_string(seq_id) +
                                                " is no sequence id; ids are 0 or above");
  }
  if (HasSequence(seq_id)) {
    return Status(StatusCode::kSequenceExists, OfSequence(call, seq_id) + "exists already");
  }
  return CheckRoomForActive(call, seq_id);
}

Status PagedKVCache::CheckRoomForActive(const char* call, int64_t seq_id) const {
  const int64_t active_count = sequences_.count() - sequences_.retained_count();
  if (active_count < options_.max_num_sequences) return Status();
  return Status(StatusCode::kTooLarge, OfSequence(call, seq_id) +
                                           "would be one more than max_num_sequences, " +
                                           std::to_string(options_.max_num_sequences) +
                                           "; remove or retain another one first");
}

// ---------------------------------------------------------------------- sequences

Status PagedKVCache::Clear() {
  return Enter("Clear", [&]() -> Status {
    FinishSends(Outcome::kAborted);
    for (size_t i = 0; i < sequences_.entries().size(); ++i)
      StopSend(static_cast<int32_t>(i), "the cache was cleared");
    receives_.Clear();
    in_forward_ = false;
    failed_ = false;
    plan_.Clear();
    tree_.Clear();
    trees_.Clear();
    sequences_.Clear();
    has_windows_ = AnyWindow(groups_);
    hides_more_ = false;
    return Status();
  });
}

Status PagedKVCache::AddSequence(int64_t seq_id) {
  return Enter("AddSequence", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckNewSequence("AddSequence", seq_id));
    sequences_.ReserveOne();
    sequences_[sequences_.Insert(seq_id)].long_factors = options_.rope.use_long_factors;
    return Status();
  });
}

Status PagedKVCache::RemoveSequence(int64_t seq_id) {
  return Enter("RemoveSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch("RemoveSequence", seq_id));
    if (trees_.Find(index) != nullptr) DropNodes(index, 0);
    StopSend(index, "its sequence was removed");
    if (sequences_[index].pending > 0) EndReceive(&sequences_[index], 0);
    tree_.Release(sequences_[index].last);
    sequences_.Erase(index);
    hides_more_ = true;
    FreeHidden();
    return Status();
  });
}

Status PagedKVCache::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  return Enter("ForkSequence", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t parent, FindOutsideBatch("ForkSequence", parent_id));
    QUIRE_RETURN_IF_ERROR(CheckNewSequence("ForkSequence", child_id));
    const int64_t length = LengthOf(parent);
    if (fork_pos < -1 || fork_pos > length) {
      return Status(StatusCode::kBadArgument, OfSequence("ForkSequence", parent_id) + "of length " +
                                                  std::to_string(length) + " cannot be forked at " +
                                                  std::to_string(fork_pos));
    }
    const int64_t position = fork_pos < 0 ? length : fork_pos;
    if (position > CommittedLength(sequences_[parent]))
      QUIRE_RETURN_IF_ERROR(RequireCommitted("ForkSequence behind the committed tokens", parent));
    QUIRE_RETURN_IF_ERROR(CheckEnd("ForkSequence", sequences_[parent], position));
    sequences_.ReserveOne();
    tree_.ReserveSplit();
    const BlockIndex last = tree_.ForkAt(sequences_[parent].last, position);
    Sequence& child = sequences_[sequences_.Insert(child_id)];
    child.last = last;
    child.long_factors = sequences_[parent].long_factors;
    MoveEnd(sequences_[parent], position, &child);
    return Status();
  });
}

Status PagedKVCache::PopN(int64_t seq_id, int64_t n) {
  return Enter("PopN", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch("PopN", seq_id));
    Sequence& sequence = sequences_[index];
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
    if (n > 0 && sequence.pending > 0) EndReceive(&sequence, 0);
    marks_.ShortenTo(index, end);
    if (end < committed) {
      sequence.last = tree_.Pop(sequence.last, end);
      MoveEnd(sequence, end, &sequence);
    }
    hides_more_ = true;
    FreeHidden();
    return Status();
  });
}

Status PagedKVCache::SetRetained(int64_t seq_id, bool retained) {
  return Enter("SetRetained", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch("SetRetained", seq_id));
    if (retained) QUIRE_RETURN_IF_ERROR(RequireCommitted("SetRetained", index));
    if (!retained && sequences_[index].retained) {
      QUIRE_RETURN_IF_ERROR(CheckRoomForActive("SetRetained", seq_id));
    }
    sequences_.SetRetained(index, retained);
    plan_.ForbidRepeat();
    return Status();
  });
}

Status PagedKVCache::SelectLongRope(int64_t seq_id, bool use_long_factors) {
  return Enter("SelectLongRope", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindOutsideBatch("SelectLongRope", seq_id));
    if (options_.rope.mode == RopeMode::kNone || options_.rope.scaling != RopeScaling::kLongRope) {
      return Status(StatusCode::kBadState,
                    "SelectLongRope: this cache was not created with RopeScaling::kLongRope");
    }
    const int64_t length = LengthOf(index);
    if (length != 0) {
      return Status(StatusCode::kBadState, OfSequence("SelectLongRope", seq_id) + "has " +
                                               std::to_string(length) +
                                               " tokens already, whose keys are rotated; add an "
                                               "empty one and select before its first forward");
    }
    sequences_[index].long_factors = use_long_factors;
    return Status();
  });
}

Result<bool> PagedKVCache::UsesLongRope(int64_t seq_id) const {
  return Enter("UsesLongRope", [&]() -> Result<bool> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("UsesLongRope", seq_id));
    return sequences_[index].long_factors;
  });
}

// ---------------------------------------------------------------------- counters

int64_t PagedKVCache::GetNumAvailablePages() const {
  int64_t least = tree_.pool(0).free_count();
  for (int g = 1; g < tree_.group_count(); ++g) least = std::min(least, tree_.pool(g).free_count());
  return least;
}

int64_t PagedKVCache::GetTotalSequenceLength() const {
  int64_t total = 0;
  for (const Sequence& sequence : sequences_.entries())
    total += CommittedLength(sequence) + sequence.pending;
  return total + trees_.node_count();
}

PageCounts PagedKVCache::page_counts() const {
  PageCounts counts = CountPages(tree_, sequences_, Batch());
  counts.exclusive += trees_.page_count();  // no retained sequence has a tree
  return counts;
}

int64_t PagedKVCache::pages_in_use() const {
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
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("GetSequenceLength", seq_id));
    return LengthOf(index);
  });
}

}  // namespace quire
