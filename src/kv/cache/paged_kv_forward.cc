// The forward of PagedKVCache: planning, attention, end.
#include <algorithm>
#include <array>
#include <memory>

#include "base/float_environment.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

// Members from one look at what planning needs of one to the next: planning so many takes about as
// long as memory does.
constexpr size_t kLookAhead = 16;

}  // namespace

// ---------------------------------------------------------------------- planning

// Why the sequence may not get new rows.
Status PagedKVCache::RefuseMember(const char* call, int64_t seq_id, int32_t index,
                                  int64_t append_length) const {
  QUIRE_RETURN_IF_ERROR(control_.CheckMember(call, seq_id, index));
  QUIRE_RETURN_IF_ERROR(CheckRowCount(call, seq_id, append_length));
  return Status(
      StatusCode::kTooLarge,
      std::string(call) + ": with the " + std::to_string(append_length) + " tokens of sequence " +
          std::to_string(seq_id) + " the batch has more than prefill_chunk_size, " +
          std::to_string(options_.prefill_chunk_size) + "; append them in several forwards");
}

// Extra checks for a member that loads KV, has a token tree or pending tokens, or comes near 2^31
// positions. `load`: of the sequence, or null.
Status PagedKVCache::CheckSpecial(const char* call, int64_t seq_id, int32_t index,
                                  int64_t append_length, const LayerLoad* load,
                                  std::span<GroupAppend> groups) const {
  const Sequence& sequence = control_[index];
  if (sequence.reserved > 0) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  if (load != nullptr) QUIRE_RETURN_IF_ERROR(CheckLoad(call, *load));
  const int64_t imported = load == nullptr ? 0 : load->tokens;
  const int64_t length = tree_.End(sequence.last);
  QUIRE_RETURN_IF_ERROR(CheckPositions(call, seq_id, length, append_length, imported));
  if (load != nullptr && load->only_visible) {
    const int64_t end = length + imported;
    QUIRE_RETURN_IF_ERROR(CheckWindows(call, sequence, SequenceWindows(), end));
    LeaveOutHidden({}, length, end, groups);
  }
  return Status();
}

Status PagedKVCache::StartBatch(const char* call, std::span<const int64_t> seq_ids,
                                std::span<const int64_t> append_lengths, ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(control_.CheckBatch(call, seq_ids, append_lengths));
  control_.StartPlanning();
  tree_.BeginPlanning();
  plan.StartBatch(seq_ids.size(), groups_.size());
  return Status();
}

// Every look leads to the next address, and one member after the other would wait for memory at
// each. So while some members are planned, the pages of as many behind them, the ends of the next
// ones and the sequences of those behind these are on their way.
class PagedKVCache::LookAhead {
 public:
  LookAhead(const PagedKVCache& cache, std::span<const int64_t> seq_ids)
      : cache_(cache), seq_ids_(seq_ids) {
    for (size_t at = 0; at < 3 * kLookAhead; at += kLookAhead) LookForSequences(at);
    for (size_t at = 0; at < 2 * kLookAhead; at += kLookAhead) LookForEnds(at);
    LookForPages(0);
  }
  // The index of member i. For each i once, ascending.
  int32_t IndexOf(size_t i) {
    if (i % kLookAhead == 0) {
      LookForSequences(i + 3 * kLookAhead);
      LookForEnds(i + 2 * kLookAhead);
      LookForPages(i + kLookAhead);
    }
    return looks_[i % kSlots].index;
  }

 private:
  static constexpr size_t kSlots = 4 * kLookAhead;
  struct Look {
    int32_t index;
    BlockIndex last;
  };

  // These are about members [at, at + kLookAhead), as far as there are any.
  size_t EndOf(size_t at) const { return std::min(at + kLookAhead, seq_ids_.size()); }
  void LookForSequences(size_t at) {
    for (size_t i = at; i < EndOf(at); ++i) {
      const int32_t index = looks_[i % kSlots].index = cache_.control_.table().Find(seq_ids_[i]);
      if (index != SequenceTable::kAbsent) cache_.control_.table().Prefetch(index);
    }
  }
  void LookForEnds(size_t at) {
    for (size_t i = at; i < EndOf(at); ++i) {
      Look& look = looks_[i % kSlots];
      const bool is_known = look.index != SequenceTable::kAbsent;
      look.last = is_known ? cache_.control_[look.index].last : kNoBlock;
      cache_.tree_.PrefetchEnd(look.last);
    }
  }
  void LookForPages(size_t at) const {
    for (size_t i = at; i < EndOf(at); ++i) cache_.tree_.PrefetchPages(looks_[i % kSlots].last);
  }

  const PagedKVCache& cache_;
  const std::span<const int64_t> seq_ids_;
  std::array<Look, kSlots> looks_;
};

// Leaves only marks that no call can see (the numbers of this planning), and the plan's members,
// which are read in FORWARD only.
Status PagedKVCache::PlanBatch(const char* call, std::span<const int64_t> seq_ids,
                               std::span<const int64_t> append_lengths,
                               std::span<const LayerLoad> loads, ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(StartBatch(call, seq_ids, append_lengths, plan));
  const size_t group_count = groups_.size();
  GroupAppend* groups = plan.group_appends.data();
  int64_t* const page_counts = plan.page_counts.data();
  LookAhead ahead(*this, seq_ids);
  int64_t row_count = 0;
  int64_t import_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const int32_t index = ahead.IndexOf(i);
    const int64_t append_length = append_lengths[i];
    if (!TakeMember(index, append_length, row_count))
      return RefuseMember(call, seq_ids[i], index, append_length);
    const Sequence& sequence = control_[index];
    const int64_t length = tree_.End(sequence.last);
    const LayerLoad* const load = TakeLoad(seq_ids[i], loads);
    const std::span<GroupAppend> of_groups(groups, group_count);
    if (load != nullptr || sequence.reserved > 0 || append_length > kPositionsMax - length) {
      QUIRE_RETURN_IF_ERROR(CheckSpecial(call, seq_ids[i], index, append_length, load, of_groups));
    }
    const int64_t imported = load == nullptr ? 0 : load->tokens;
    // Built in place: building a local and copying it stalls on store forwarding.
    ForwardMember& member = plan.members.emplace_back();
    member.id = seq_ids[i];
    member.sequence = index;
    member.first_row = row_count;
    member.append.last = sequence.last;
    member.append.length = member.append.cut = length;
    member.append.count = imported + append_length;
    member.long_factors = sequence.long_factors;
    member.window = sequence.window;
    member.imported = imported;
    member.first_import = import_count;
    member.source = load == nullptr ? nullptr : load->source;
    tree_.PlanAppend(member.append, of_groups);
    for (size_t g = 0; g < group_count; ++g) page_counts[g] += groups[g].page_count;
    row_count += append_length;
    import_count += imported;
    groups += group_count;
  }
  return RequireNoLoadLeft(call, loads);
}

Status PagedKVCache::CheckPages(const char* call, std::span<const int64_t> page_counts) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const PagePool& pool = tree_.pool(static_cast<int>(g));
    if (page_counts[g] <= pool.free_count()) continue;
    return Status(StatusCode::kOutOfPages,
                  std::string(call) + ": needs " + std::to_string(page_counts[g]) + " pages of " +
                      std::to_string(pool.page_size()) + " tokens in the group of layer " +
                      std::to_string(groups_[g].layers.front()) + ", " +
                      std::to_string(pool.free_count()) + " of " +
                      std::to_string(pool.page_count()) +
                      " are free; remove or pop sequences and call again");
  }
  return Status();
}

Result<int64_t> PagedKVCache::PagesNeeded(std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(PlanBatch("PagesNeeded", seq_ids, append_lengths, {}, query_));
    return std::ranges::max(query_.page_counts);
  });
}

void PagedKVCache::ReserveForward() {
  tree_.Reserve(AppendPlans(std::span<const ForwardMember>(plan_.members), &ForwardMember::append),
                plan_.group_appends);
  plan_.Reserve(tree_);
  ropes_.Reserve(plan_, false);
  scratch_.Reserve(plan_.totals().rows, plan_.totals().members);
}

// ---------------------------------------------------------------------- begin and end

Status PagedKVCache::BeginForward(std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> append_lengths) {
  return gate_.EnterAlone("BeginForward", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(control_.RequireIdle("BeginForward"));
    if (plan_.CanRepeat(seq_ids, append_lengths, tree_)) {
      QUIRE_RETURN_IF_ERROR(CheckPages("BeginForward", plan_.page_counts));
      // For all else the last forward had as much as this one.
      ropes_.Reserve(plan_, true);
      scratch_.ReserveAgain();
      CommitRepeatedForward();
      return Status();
    }
    return BeginPlanned("BeginForward", seq_ids, append_lengths, {});
  });
}

Status PagedKVCache::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                         std::span<const int64_t> append_lengths,
                                         std::span<const LayerLoad> loads) {
  return gate_.EnterAlone("BeginLoadingForward", [&]() -> Status {
    return BeginPlanned("BeginLoadingForward", seq_ids, append_lengths, loads);
  });
}

Status PagedKVCache::BeginPlanned(const char* call, std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> append_lengths,
                                  std::span<const LayerLoad> loads) {
  QUIRE_RETURN_IF_ERROR(PlanBatch(call, seq_ids, append_lengths, loads, plan_));
  QUIRE_RETURN_IF_ERROR(CheckPages(call, plan_.page_counts));
  tree_.PrefetchPlanned(plan_.page_counts);
  ReserveForward();
  CommitForward();
  return Status();
}

void PagedKVCache::CommitForward() noexcept {
  plan_.ClearArrays();
  const size_t group_count = groups_.size();
  const GroupAppend* appends = plan_.group_appends.data();
  for (ForwardMember& member : plan_.members) {
    const std::span<const GroupAppend> groups(appends, group_count);
    appends += group_count;
    if (member.appends() && !member.append.extends) tree_.Unhide(member.sequence);
    member.last = member.appends() ? tree_.Append(member.append, groups) : member.append.last;
    control_[member.sequence].last = member.last;
    if (member.is_tree()) AddNodes(member, groups);
  }
  plan_.Fill(tree_);
  tree_.DeferMerges();
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& plan = plan_.group(g);
    storage_->Copy(g, plan.copy_from, plan.copy_to, plan.copy_opens_tile.data());
  }
  OpenForward(false);
}

void PagedKVCache::CommitRepeatedForward() noexcept {
  if (!control_.HasBatchOfLastForward()) {  // another batch has been asked about since
    control_.StartPlanning();
    for (const ForwardMember& member : plan_.members) control_.Name(member.sequence);
  }
  plan_.Repeat(tree_);
  ++repeated_forward_count_;
  tree_.DeferMerges();
  OpenForward(true);
}

void PagedKVCache::OpenForward(bool repeats) noexcept {
  ropes_.Fill(plan_, repeats);
  for (Layer& layer : layers_) layer.loaded = layer.appended = layer.attended = false;
  control_.OpenForward();
}

Status PagedKVCache::RequireAllLayers() const {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].appended && layers_[l].attended) continue;
    const char* missing = layers_[l].appended ? "Attend" : "Append";
    return Status(StatusCode::kBadState,
                  "EndForward: layer " + std::to_string(l) + " lacks its " + missing +
                      "; run every layer, call AbortForward, or create the cache with "
                      "allow_skipped_layers");
  }
  return Status();
}

// The new tokens of layers that have not stored any become zeros, without rotation: 0 * cos(a) may
// be -0. What they import is loaded first, as their Append would have; that alone can fail.
Status PagedKVCache::FillSkippedLayers() {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].appended) continue;
    const Status loaded = LoadLayer({.name = "EndForward",
                                     .layer = static_cast<int64_t>(l),
                                     .spec = options_.layers[l],
                                     .row_count = plan_.row_count()});
    control_.set_failed(!loaded.ok());
    QUIRE_RETURN_IF_ERROR(loaded);
  }
  // Of all rows and heads.
  const HeadRows zeros{.data = zero_row_.data(), .dtype = DType::kF32};
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (!layers_[l].appended) StoreRows(static_cast<int64_t>(l), zeros, zeros, {});
  }
  return Status();
}

Status PagedKVCache::EndForward() {
  return gate_.EnterAlone("EndForward", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(control_.RequireForward("EndForward"));
    QUIRE_RETURN_IF_ERROR(options_.allow_skipped_layers ? FillSkippedLayers() : RequireAllLayers());
    CloseForward();
    FinishSends(Outcome::kEnded);
    return Status();
  });
}

void PagedKVCache::CloseForward() noexcept {
  control_.CloseForward();
  if (plan_.totals().copying > 0) {
    for (const ForwardMember& member : plan_.members) {
      if (member.append.copies()) tree_.ReleaseOldPath(member.append, member.last);
    }
  }
  tree_.RunDeferredMerges();
  if (!tree_.tracks_hidden()) return;
  for (const ForwardMember& member : plan_.members) {
    if (member.is_tree()) {  // what is rejected is seen from the committed end
      UpdateHidden(member.sequence);
    } else {
      SlideTo(member.sequence);
    }
  }
  FreeHidden();
}

Status PagedKVCache::AbortForward() {
  return gate_.EnterAlone("AbortForward", [&]() -> Status {
    if (!control_.in_forward()) return control_.RequireForward("AbortForward");
    RollBackForward();
    FinishSends(Outcome::kAborted);
    return Status();
  });
}

// In the reverse order of the batch, so that pages come back to the free list as they left it.
void PagedKVCache::RollBackForward() noexcept {
  control_.CloseForward();
  for (size_t m = plan_.members.size(); m-- > 0;) {
    const ForwardMember& member = plan_.members[m];
    if (member.is_tree()) DropNodes(member.sequence, member.first_node());
    if (!member.appends()) continue;
    BlockIndex& last = control_[member.sequence].last;
    tree_.Unhide(member.sequence);
    last = tree_.UndoAppend(member.append, last);
    UpdateHidden(member.sequence);
  }
  tree_.RunDeferredMerges();
  FreeHidden();
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryPositions() const {
  return gate_.Ask([&]() -> Result<std::span<const int32_t>> {
    if (!control_.in_forward()) return control_.RequireForward("GetQueryPositions");
    return plan_.positions();
  });
}

// ---------------------------------------------------------------------- attention

Status PagedKVCache::RequireAppended(const AttentionCall& call, bool appended) const {
  if (layers_[static_cast<size_t>(call.layer)].appended == appended) return Status();
  return Status(StatusCode::kBadState,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    (appended ? " has not been appended to in this forward; call Append first"
                              : " has been appended to in this forward already"));
}

Status PagedKVCache::AttentionWithFusedQKV(int64_t layer, const TensorView& qkv,
                                           const TensorView& o, double sm_scale,
                                           const TensorView* mask) {
  return RunAttention("AttentionWithFusedQKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AttentionWithMLA"));
    QUIRE_ASSIGN_OR_RETURN(const QKVRows rows, ViewFusedQKV(call, qkv));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}}, {{"qkv", &qkv}}));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, false));
    QUIRE_RETURN_IF_ERROR(LoadLayer(call));
    RunAppend(layer, rows.k, rows.v);
    RunAttend(layer, Sees::kUpToOwn, rows.q, ropes_.OfQueries(layer), o_rows, nullptr, sm_scale,
              masks);
    return Status();
  });
}

Status PagedKVCache::Append(int64_t layer, const TensorView& k, const TensorView& v) {
  return RunAttention("Append", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AppendMLAKV"));
    const int64_t heads = call.spec.num_kv_heads;
    QUIRE_ASSIGN_OR_RETURN(const HeadRows k_rows,
                           ViewHeads(call, "k", k, heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows v_rows,
                           ViewHeads(call, "v", v, heads, call.spec.v_head_dim));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, false));
    QUIRE_RETURN_IF_ERROR(LoadLayer(call));
    RunAppend(layer, k_rows, v_rows);
    return Status();
  });
}

Status PagedKVCache::Attend(int64_t layer, const TensorView& q, const TensorView& o,
                            const TensorView* lse, double sm_scale, const TensorView* mask) {
  return RunAttention("Attend", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    if (lse != nullptr) QUIRE_RETURN_IF_ERROR(CheckLse(call, *lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", lse}}, {{"q", &q}}));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, true));
    const auto angles =
        call.spec.latent ? ropes_.OfRotatedQueries(layer, plan_) : ropes_.OfQueries(layer);
    RunAttend(layer, Sees::kUpToOwn, q_rows, angles, o_rows, lse, sm_scale, masks);
    return Status();
  });
}

Status PagedKVCache::AppendLatent(const AttentionCall& call, const TensorView& kv) {
  QUIRE_ASSIGN_OR_RETURN(const HeadRows rows, ViewLatent(call, kv));
  QUIRE_RETURN_IF_ERROR(RequireAppended(call, false));
  QUIRE_RETURN_IF_ERROR(LoadLayer(call));
  RunAppend(call.layer, rows, {});
  return Status();
}

Status PagedKVCache::AppendMLAKV(int64_t layer, const TensorView& kv) {
  return RunAttention("AppendMLAKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "Append"));
    return AppendLatent(call, kv);
  });
}

Status PagedKVCache::AttentionWithMLA(int64_t layer, const TensorView& q_absorbed,
                                      const TensorView& kv, const TensorView& o, double sm_scale,
                                      const TensorView* mask) {
  return RunAttention("AttentionWithMLA", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "AttentionWithFusedQKV"));
    QUIRE_ASSIGN_OR_RETURN(
        const HeadRows q_rows,
        ViewHeads(call, "q_absorbed", q_absorbed, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(
        CheckApart(call, {{"o", &o}}, {{"q_absorbed", &q_absorbed}, {"kv", &kv}}));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(AppendLatent(call, kv));
    RunAttend(layer, Sees::kUpToOwn, q_rows, ropes_.OfRotatedQueries(layer, plan_), o_rows, nullptr,
              sm_scale, masks);
    return Status();
  });
}

Status PagedKVCache::AttentionWithSharedKV(int64_t source_layer, const TensorView& q,
                                           const TensorView& o, const TensorView* lse,
                                           double sm_scale, const TensorView* mask) {
  const char* name = "AttentionWithSharedKV";
  return RunAttention(name, source_layer, [&](const AttentionCall& call) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    if (lse != nullptr) QUIRE_RETURN_IF_ERROR(CheckLse(call, *lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", lse}}, {{"q", &q}}));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, true));
    Layer& source = layers_[static_cast<size_t>(source_layer)];
    const bool attended = source.attended;
    RunAttend(source_layer, Sees::kUpToOwn, q_rows, ropes_.OfRotatedQueries(source_layer, plan_),
              o_rows, lse, sm_scale, masks);
    source.attended = attended;  // this was another layer's
    return Status();
  });
}

void PagedKVCache::RunAppend(int64_t index, const HeadRows& k, const HeadRows& v) noexcept {
  StoreRows(index, k, v, ropes_.OfNewKeys(index));
}

void PagedKVCache::StoreRows(int64_t index, const HeadRows& k, const HeadRows& v,
                             const RotaryRows& rotary) noexcept {
  Layer& layer = layers_[static_cast<size_t>(index)];
  const GroupPlan& plan = plan_.group(layer.group);
  const AppendArgs args{.pages = storage_->layer(index),
                        .row_count = plan_.row_count(),
                        .k = k,
                        .v = v,
                        .rotary = rotary,
                        .targets = plan.rows.targets.data(),
                        .opens_tile = plan.rows.opens_tile.data()};
  backend_->append_kv(args, *options_.runner);
  layer.appended = true;
  SendLayer(index);
}

void PagedKVCache::RunAttend(int64_t index, Sees sees, const HeadRows& q,
                             const RopeAngles::QueryAngles& angles, const MutableHeadRows& o,
                             const TensorView* lse, double sm_scale,
                             const RowMask* masks) noexcept {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(index)];
  RunKernel(
      index,
      {.pages = storage_->layer(index),
       .num_qo_heads = static_cast<int>(spec.num_qo_heads),
       .q = q,
       .rotary = angles.rows,
       .sink_angles = angles.sinks,
       .head_sinks_log2 = layer.head_sinks_log2.empty() ? nullptr : layer.head_sinks_log2.data(),
       .o = o,
       .sequences = plan_.group(layer.group).sequences,
       .shared = plan_.shared(),
       .cached_only = sees == Sees::kCached,
       .masks = masks},
      lse, sm_scale);
}

void PagedKVCache::RunKernel(int64_t index, AttentionArgs args, const TensorView* lse,
                             double sm_scale) noexcept {
  const ScopedFloatEnvironment environment;  // scale_log2 is rounded here
  Layer& layer = layers_[static_cast<size_t>(index)];
  args.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  args.layer_window = groups_[static_cast<size_t>(layer.group)].window;
  args.soft_cap = static_cast<float>(options_.layers[static_cast<size_t>(index)].soft_cap);
  args.lse = lse == nullptr ? nullptr : lse->data_as<float>();
  args.lse_row_stride = lse == nullptr ? 0 : lse->stride(0);
  args.row_count = plan_.row_count();
  args.scratch = scratch_.Take();
  backend_->attention(args, *options_.runner);
  layer.attended = true;
}

}  // namespace quire
