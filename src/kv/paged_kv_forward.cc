// The forward of PagedKVCache: planning, attention, end.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>

#include "base/check.h"
#include "base/float_environment.h"
#include "kv/kv_memory.h"
#include "kv/paged_kv_cache.h"
#include "kv/reserve.h"

namespace quire {
namespace {

constexpr double kLog2E = 1.4426950408889634074;
constexpr size_t kScratchAlignment = 64;  // a cache line; backend.h asks for it

// Members from one look at what planning needs of one to the next: planning so many takes about as
// long as memory does.
constexpr size_t kLookAhead = 16;

constexpr int64_t kPositionsMax = std::numeric_limits<int32_t>::max();

Status BadBatch(StatusCode code, const char* call, const std::string& why) {
  return Status(code, std::string(call) + ": " + why);
}

}  // namespace

// ---------------------------------------------------------------------- planning

// Why the sequence may not get new rows.
Status PagedKVCache::RefuseMember(const char* call, int64_t seq_id, int32_t index,
                                  int64_t append_length) const {
  if (index == SequenceTable::kAbsent) return FindSequence(call, seq_id).status();
  const Sequence& sequence = sequences_[index];
  const std::string name = "sequence " + std::to_string(seq_id);
  if (sequence.batch == planning_) {
    return BadBatch(StatusCode::kBadArgument, call, name + " is in the batch twice");
  }
  if (sequence.retained) {
    return BadBatch(StatusCode::kBadState, call,
                    name + " is retained; make it active with SetRetained, or fork it");
  }
  if (append_length < 1) {
    return BadBatch(
        StatusCode::kBadArgument, call,
        name + " is to get " + std::to_string(append_length) + " tokens; the least is 1");
  }
  return BadBatch(StatusCode::kTooLarge, call,
                  "with the " + std::to_string(append_length) + " tokens of " + name +
                      " the batch has more than prefill_chunk_size, " +
                      std::to_string(options_.prefill_chunk_size) +
                      "; append them in several forwards");
}

// What is asked of a member that is no plain one. `load`: of the sequence, or null.
Status PagedKVCache::CheckSpecial(const char* call, int64_t seq_id, int32_t index,
                                  int64_t append_length, const LayerLoad* load,
                                  std::span<GroupAppend> groups) const {
  const Sequence& sequence = sequences_[index];
  if (sequence.reserved > 0) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  const std::string name = "sequence " + std::to_string(seq_id);
  if (load != nullptr && (load->tokens < 1 || load->source == nullptr)) {
    return BadBatch(StatusCode::kBadArgument, call,
                    name + " is to import " + std::to_string(load->tokens) + " tokens from " +
                        (load->source == nullptr ? "no" : "a") +
                        " source; the least is 1, and a source is needed");
  }
  const int64_t imported = load == nullptr ? 0 : load->tokens;
  const int64_t length = tree_.End(sequence.last);
  const int64_t room = kPositionsMax - length;
  if (imported > room || append_length > room - imported) {
    return BadBatch(StatusCode::kTooLarge, call,
                    name + " of length " + std::to_string(length) + " cannot get " +
                        std::to_string(append_length) + " more tokens behind " +
                        std::to_string(imported) + " imported ones: positions end at 2^31");
  }
  if (load != nullptr && load->only_visible) {
    const int64_t end = length + imported;
    QUIRE_RETURN_IF_ERROR(CheckWindows(call, sequence, SequenceWindows(), end));
    LeaveOutHidden({}, length, end, groups);
  }
  return Status();
}

Status PagedKVCache::StartBatch(const char* call, std::span<const int64_t> seq_ids,
                                std::span<const int64_t> append_lengths, ForwardPlan& plan) {
  QUIRE_RETURN_IF_ERROR(RequireIdle(call));
  if (seq_ids.size() != append_lengths.size()) {
    return BadBatch(StatusCode::kBadArgument, call,
                    std::to_string(seq_ids.size()) + " sequence ids, but " +
                        std::to_string(append_lengths.size()) + " append lengths");
  }
  if (seq_ids.empty()) return BadBatch(StatusCode::kBadArgument, call, "the batch is empty");
  ++planning_;
  tree_.BeginPlanning();
  plan.ClearBatch();
  ReserveGrowing(plan.members, seq_ids.size());
  plan.group_appends.resize(seq_ids.size() * groups_.size());
  page_counts_.assign(groups_.size(), 0);
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
      const int32_t index = looks_[i % kSlots].index = cache_.sequences_.Find(seq_ids_[i]);
      if (index != SequenceTable::kAbsent) cache_.sequences_.Prefetch(index);
    }
  }
  void LookForEnds(size_t at) {
    for (size_t i = at; i < EndOf(at); ++i) {
      Look& look = looks_[i % kSlots];
      const bool is_known = look.index != SequenceTable::kAbsent;
      look.last = is_known ? cache_.sequences_[look.index].last : kNoBlock;
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
                               std::span<const LayerLoad> loads, ForwardPlan& plan) {
  QUIRE_RETURN_IF_ERROR(StartBatch(call, seq_ids, append_lengths, plan));
  const size_t group_count = groups_.size();
  GroupAppend* groups = plan.group_appends.data();
  int64_t* const page_counts = page_counts_.data();
  LookAhead ahead(*this, seq_ids);
  int64_t row_count = 0;
  int64_t import_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const int32_t index = ahead.IndexOf(i);
    const int64_t append_length = append_lengths[i];
    if (!TakeMember(index, append_length, row_count))
      return RefuseMember(call, seq_ids[i], index, append_length);
    const Sequence& sequence = sequences_[index];
    const int64_t length = tree_.End(sequence.last);
    const LayerLoad* load = nullptr;
    if (!loads.empty() && loads.front().seq_id == seq_ids[i]) {
      load = &loads.front();
      loads = loads.subspan(1);
    }
    const std::span<GroupAppend> of_groups(groups, group_count);
    if (load != nullptr || sequence.reserved > 0 || append_length > kPositionsMax - length) {
      QUIRE_RETURN_IF_ERROR(CheckSpecial(call, seq_ids[i], index, append_length, load, of_groups));
    }
    const int64_t imported = load == nullptr ? 0 : load->tokens;
    // In its place: to copy it there would wait for the stores of its parts.
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
  if (loads.empty()) return Status();
  return BadBatch(StatusCode::kBadArgument, call,
                  "the load of sequence " + std::to_string(loads.front().seq_id) +
                      " is of no member of the batch, or loads are in another order than it");
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
  return Enter("PagesNeeded", [&]() -> Result<int64_t> {
    // Planning changes nothing that can be observed, and a cache is never created const.
    PagedKVCache* self = const_cast<PagedKVCache*>(this);
    QUIRE_RETURN_IF_ERROR(
        self->PlanBatch("PagesNeeded", seq_ids, append_lengths, {}, self->query_));
    return *std::max_element(page_counts_.begin(), page_counts_.end());
  });
}

// `more_rows`: that each member gets beyond its plan.
Status PagedKVCache::ReserveRope(const char* call, int64_t more_rows) {
  if (ropes_.empty()) return Status();
  const BatchTotals& totals = plan_.totals();
  const int64_t rows = totals.rows;
  const int64_t short_end = totals.short_end > 0 ? totals.short_end + more_rows : 0;
  const int64_t long_end = totals.long_end > 0 ? totals.long_end + more_rows : 0;
  const bool has_sinks = totals.has_sinks;
  int64_t table_end = rope_limits_.table_positions;
  const int64_t end_of_all = std::max(short_end, long_end);
  if (options_.rope.mode == RopeMode::kInline) {
    table_end = rope_limits_.inline_positions;
    if (end_of_all > table_end) {
      return BadBatch(StatusCode::kTooLarge, call,
                      "a sequence would have " + std::to_string(end_of_all) +
                          " positions; with RopeMode::kInline, which needs the angles of all of "
                          "them, the most are " +
                          std::to_string(table_end) + ": take RopeMode::kNormal");
    }
  }
  for (Rope& rope : ropes_) {
    if (has_sinks) ReserveSlidAngles(rope.short_table.pair_count(), rows);
    rope.short_table.Grow(std::min(short_end, table_end), *options_.runner);
    rope.long_table.Grow(std::min(long_end, table_end), *options_.runner);
    if (end_of_all > table_end)
      rope.far_rows.Reserve(has_sinks ? 2 * rows : rows, rope.short_table.pair_count());
    ReserveGrowing(rope.angles, static_cast<size_t>(rows));
    ReserveGrowing(rope.sink_angles, static_cast<size_t>(rows));
  }
  return Status();
}

void PagedKVCache::ReserveScratch() {
  const int64_t sequence_count = static_cast<int64_t>(plan_.members.size());
  const size_t bytes =
      AttentionScratchBytes(*backend_, groups_, options_.layers, plan_.totals().rows,
                            sequence_count, options_.runner->worker_count());
  GrowScratch(bytes);
}

void PagedKVCache::GrowScratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return;
  scratch_.reset(new std::byte[bytes + kScratchAlignment]);
  scratch_bytes_ = bytes;
}

Status PagedKVCache::ReserveForward(const char* call) {
  tree_.Reserve(AppendPlans(std::span<const ForwardMember>(plan_.members), &ForwardMember::append),
                plan_.group_appends);
  plan_.Reserve(tree_);
  QUIRE_RETURN_IF_ERROR(ReserveRope(call, 0));
  ReserveScratch();
  return Status();
}

// ---------------------------------------------------------------------- begin and end

Status PagedKVCache::BeginForward(std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> append_lengths) {
  return Enter("BeginForward", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle("BeginForward"));
    if (CanRepeatForward(seq_ids, append_lengths)) {
      QUIRE_RETURN_IF_ERROR(CheckPages("BeginForward", page_counts_));
      // For all else the last forward had as much as this one.
      QUIRE_RETURN_IF_ERROR(ReserveRope("BeginForward", 1));
      CommitRepeatedForward();
      return Status();
    }
    return BeginPlanned("BeginForward", seq_ids, append_lengths, {});
  });
}

Status PagedKVCache::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                         std::span<const int64_t> append_lengths,
                                         std::span<const LayerLoad> loads) {
  return Enter("BeginLoadingForward", [&]() -> Status {
    return BeginPlanned("BeginLoadingForward", seq_ids, append_lengths, loads);
  });
}

Status PagedKVCache::BeginPlanned(const char* call, std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> append_lengths,
                                  std::span<const LayerLoad> loads) {
  QUIRE_RETURN_IF_ERROR(PlanBatch(call, seq_ids, append_lengths, loads, plan_));
  QUIRE_RETURN_IF_ERROR(CheckPages(call, page_counts_));
  tree_.PrefetchPlanned(page_counts_);
  QUIRE_RETURN_IF_ERROR(ReserveForward(call));
  CommitForward();
  return Status();
}

void PagedKVCache::CommitForward() noexcept {
  batch_ = planning_;
  plan_.ClearArrays();
  const size_t group_count = groups_.size();
  const GroupAppend* appends = plan_.group_appends.data();
  for (ForwardMember& member : plan_.members) {
    const std::span<const GroupAppend> groups(appends, group_count);
    appends += group_count;
    member.last = member.appends() ? tree_.Append(member.append, groups) : member.append.last;
    sequences_[member.sequence].last = member.last;
    if (member.is_tree()) AddNodes(member, groups);
  }
  plan_.Fill(tree_);
  tree_.DeferMerges();
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& plan = plan_.group(g);
    storage_->Copy(g, plan.copy_from, plan.copy_to, plan.copy_opens_tile.data());
  }
  OpenForward();
}

bool PagedKVCache::CanRepeatForward(std::span<const int64_t> seq_ids,
                                    std::span<const int64_t> append_lengths) {
  page_counts_.assign(groups_.size(), 0);
  return plan_.CanRepeat(seq_ids, append_lengths, tree_, page_counts_);
}

void PagedKVCache::CommitRepeatedForward() noexcept {
  if (batch_ != planning_) {  // another batch has been asked about since
    batch_ = ++planning_;
    for (const ForwardMember& member : plan_.members) sequences_[member.sequence].batch = batch_;
  }
  plan_.Repeat(tree_);
  ++repeated_forward_count_;
  tree_.DeferMerges();
  OpenForward();
}

void PagedKVCache::OpenForward() noexcept {
  FillRope();
  for (Layer& layer : layers_) layer.loaded = layer.appended = layer.attended = false;
  in_forward_ = true;
  failed_ = false;
}

// The rows' own angles, and for RopeMode::kInline the tables of all positions.
void PagedKVCache::FillRope() noexcept {
  for (Rope& rope : ropes_) {
    rope.far_rows.Clear();
    rope.angles.resize(static_cast<size_t>(plan_.row_count()));
    for (const ForwardMember& member : plan_.members) {
      const RopeTable& table = rope.table(member.long_factors);
      RotaryAngles* angles = rope.angles.data() + member.first_row;
      for (const int64_t p : PositionsOf(member)) *angles++ = rope.far_rows.At(table, p);
    }
    FillSinkAngles(rope);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Layer& layer = layers_[static_cast<size_t>(groups_[g].layers[0])];
    if (layer.mode != RopeMode::kInline) continue;
    Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
    std::vector<AttentionSequence>& sequences = plan_.group(static_cast<int>(g)).sequences;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const ForwardMember& member = plan_.members[static_cast<size_t>(plan_.order()[i])];
      sequences[i].inline_cos = rope.table(member.long_factors).cos();
      sequences[i].inline_sin = rope.table(member.long_factors).sin();
    }
  }
}

Status PagedKVCache::EndForward() {
  return Enter("EndForward", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireForward("EndForward"));
    for (size_t l = 0; l < layers_.size(); ++l) {
      if (layers_[l].appended && layers_[l].attended) continue;
      const char* missing = layers_[l].appended ? "Attend" : "Append";
      return Status(StatusCode::kBadState, "EndForward: layer " + std::to_string(l) +
                                               " lacks its " + missing +
                                               "; run every layer, or call AbortForward");
    }
    CloseForward();
    FinishSends(Outcome::kEnded);
    return Status();
  });
}

void PagedKVCache::CloseForward() noexcept {
  in_forward_ = false;
  if (plan_.totals().copying > 0) {
    for (const ForwardMember& member : plan_.members) {
      if (member.append.copies()) tree_.Release(member.append.last);
    }
    hides_more_ = true;  // they have left their old paths to others
  }
  tree_.RunDeferredMerges();
  if (!has_windows_) return;
  for (const ForwardMember& member : plan_.members) {
    if (member.is_tree()) continue;  // what is rejected is seen from the committed end
    SlideTo(&sequences_[member.sequence], member.old_length());
  }
  FreeHidden();
}

Status PagedKVCache::AbortForward() {
  return Enter("AbortForward", [&]() -> Status {
    if (!in_forward_) return RequireForward("AbortForward");
    RollBackForward();
    FinishSends(Outcome::kAborted);
    return Status();
  });
}

// In the reverse order of the batch, so that pages come back to the free list as they left it.
void PagedKVCache::RollBackForward() noexcept {
  in_forward_ = false;
  for (size_t m = plan_.members.size(); m-- > 0;) {
    const ForwardMember& member = plan_.members[m];
    const AppendPlan& append = member.append;
    if (member.is_tree()) DropNodes(member.sequence, member.first_node());
    if (!member.appends()) continue;
    BlockIndex& last = sequences_[member.sequence].last;
    last = tree_.Pop(last, append.cut);
    if (!append.copies()) continue;
    tree_.Release(last);
    last = append.last;
  }
  tree_.RunDeferredMerges();
  FreeHidden();
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryPositions() const {
  return GuardEntry([&]() -> Result<std::span<const int32_t>> {
    if (!in_forward_) return RequireForward("GetQueryPositions");
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
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, false));
    QUIRE_RETURN_IF_ERROR(LoadLayer(call));
    RunAppend(layer, rows.k, rows.v);
    RunAttend(layer, Sees::kUpToOwn, rows.q, Rotated::kNo, o_rows, nullptr, sm_scale, masks);
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
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, true));
    const Layer& state = layers_[static_cast<size_t>(layer)];
    const Rotated rotated = call.spec.latent ? TakeRotated(state) : Rotated::kNo;
    RunAttend(layer, Sees::kUpToOwn, q_rows, rotated, o_rows, lse, sm_scale, masks);
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
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(AppendLatent(call, kv));
    const Layer& state = layers_[static_cast<size_t>(layer)];
    RunAttend(layer, Sees::kUpToOwn, q_rows, TakeRotated(state), o_rows, nullptr, sm_scale, masks);
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
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(RequireAppended(call, true));
    Layer& source = layers_[static_cast<size_t>(source_layer)];
    const bool attended = source.attended;
    RunAttend(source_layer, Sees::kUpToOwn, q_rows, TakeRotated(source), o_rows, lse, sm_scale,
              masks);
    source.attended = attended;  // this was another layer's
    return Status();
  });
}

PagedKVCache::Rotated PagedKVCache::TakeRotated(const Layer& layer) noexcept {
  if (layer.mode == RopeMode::kInline) return Rotated::kNo;
  FillSlidAngles(layer);
  return Rotated::kYes;
}

RotaryRows PagedKVCache::RotaryOfRows(const Layer& layer) const {
  if (layer.rope < 0) return {};
  const Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
  return {.angles = rope.angles.data(),
          .rotary_dim = static_cast<int>(2 * rope.short_table.pair_count()),
          .interleaved = layer.interleaved,
          .first_dim = layer.rope_first_dim};
}

void PagedKVCache::RunAppend(int64_t index, const HeadRows& k, const HeadRows& v) noexcept {
  Layer& layer = layers_[static_cast<size_t>(index)];
  const GroupPlan& plan = plan_.group(layer.group);
  AppendArgs args{.pages = storage_->layer(index),
                  .row_count = plan_.row_count(),
                  .k = k,
                  .v = v,
                  .rotary = {},
                  .targets = plan.rows.targets.data(),
                  .opens_tile = plan.rows.opens_tile.data()};
  if (layer.mode == RopeMode::kNormal) args.rotary = RotaryOfRows(layer);
  backend_->append_kv(args, *options_.runner);
  layer.appended = true;
  SendLayer(index);
}

void* PagedKVCache::Scratch() noexcept {
  void* scratch = scratch_.get();
  size_t space = scratch_bytes_ + kScratchAlignment;
  if (scratch == nullptr) return nullptr;
  scratch = std::align(kScratchAlignment, scratch_bytes_, scratch, space);
  if (options_.poison_freed_pages) std::memset(scratch, kPoisonByte, scratch_bytes_);
  return scratch;
}

PagedKVCache::QueryAngles PagedKVCache::AnglesOf(const Layer& layer,
                                                 Rotated rotated) const noexcept {
  QueryAngles angles{.rows = RotaryOfRows(layer)};
  if (rotated == Rotated::kYes) {
    angles.rows.angles = nullptr;
    angles.sinks = slid_angles_.empty() ? nullptr : slid_angles_.data();
  } else if (layer.rope >= 0) {
    const Rope& rope = ropes_[static_cast<size_t>(layer.rope)];
    angles.sinks = rope.sink_angles.empty() ? nullptr : rope.sink_angles.data();
  }
  return angles;
}

void PagedKVCache::RunAttend(int64_t index, Sees sees, const HeadRows& q, Rotated rotated,
                             const MutableHeadRows& o, const TensorView* lse, double sm_scale,
                             const RowMask* masks) noexcept {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(index)];
  const QueryAngles angles = AnglesOf(layer, rotated);
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
  args.scratch = Scratch();
  backend_->attention(args, *options_.runner);
  layer.attended = true;
}

}  // namespace quire
