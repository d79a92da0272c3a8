// ExportKV and ImportKV of PagedKVCache, and what a forward loads.
#include <algorithm>
#include <initializer_list>

#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/kv_export_rows.h"

namespace quire {
namespace {

Status BadTensor(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 const std::string& wanted) {
  return Status(StatusCode::kBadArgument, std::string(call) + ": layer " + std::to_string(layer) +
                                              ": " + name + " is " + tensor.ToString() +
                                              "; it must be " + wanted);
}

Status CheckRows(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 DType dtype, std::initializer_list<int64_t> shape) {
  const bool fits = std::ranges::equal(tensor.shape(), shape) && tensor.dtype() == dtype &&
                    tensor.is_contiguous();
  if (!fits) {
    std::string wanted;
    for (const int64_t dim : shape) wanted += (wanted.empty() ? "[" : ", ") + std::to_string(dim);
    return BadTensor(call, layer, name, tensor,
                     "contiguous " + std::string(DTypeName(dtype)) + " " + wanted + "]");
  }
  if (tensor.data() != nullptr) return Status();
  return BadTensor(call, layer, name, tensor, "in memory: its pointer is null");
}

// All tensors are of `count` tokens of the layer.
Status CheckLayer(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                  const LayerKV& kv, int64_t count) {
  const int64_t heads = spec.num_kv_heads;
  QUIRE_RETURN_IF_ERROR(
      CheckRows(call, layer, "k", kv.k, spec.dtype, {count, heads, spec.qk_head_dim}));
  if (!spec.latent) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "v", kv.v, spec.value_dtype(), {count, heads, spec.v_head_dim}));
  }
  if (IsQuantised(spec.dtype)) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "k_scale", kv.k_scale, DType::kF32, {count, heads}));
  }
  if (spec.latent || !IsQuantised(spec.value_dtype())) return Status();
  return CheckRows(call, layer, "v_scale", kv.v_scale, DType::kF32, {count, heads});
}

// Empty for the values of a latent layer.
HeadRows RowsOf(const TensorView& tensor) {
  if (tensor.rank() != 3) return {};
  return {.data = tensor.data(),
          .dtype = tensor.dtype(),
          .row_stride = tensor.stride(0),
          .head_stride = tensor.stride(1)};
}

const void* RowAt(const HeadRows& rows, int64_t row) {
  if (rows.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(rows.data) + row * rows.row_stride * DTypeBytes(rows.dtype);
}

// Null where there are none.
const float* ScalesFrom(const TensorView& scales, int64_t row) {
  if (scales.rank() == 0) return nullptr;
  return scales.data_as<float>() + row * scales.stride(0);
}

int64_t TokenCount(const LayerKV& kv) { return kv.k.rank() == 3 ? kv.k.dim(0) : 0; }

}  // namespace

Status PagedKVCache::ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) {
  return gate_.Enter("ExportKV", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("ExportKV", seq_id));
    if (layer < 0 || layer >= static_cast<int64_t>(layers_.size())) {
      return Status(StatusCode::kBadArgument, "ExportKV: no layer " + std::to_string(layer) +
                                                  "; this cache has " +
                                                  std::to_string(layers_.size()));
    }
    const BlockIndex last = control_[index].last;
    const int64_t count = TokenCount(to);
    const int64_t length = CommittedLength(control_[index]);
    if (start >= 0 && count > length - start)
      QUIRE_RETURN_IF_ERROR(RequireCommitted("ExportKV", index));
    if (start < 0 || count < 1 || count > length - start) {
      return Status(StatusCode::kBadArgument,
                    "ExportKV: " + std::to_string(count) + " tokens from " + std::to_string(start) +
                        " on are not in sequence " + std::to_string(seq_id) + " of length " +
                        std::to_string(length));
    }
    const size_t l = static_cast<size_t>(layer);
    QUIRE_RETURN_IF_ERROR(
        CheckHeld("ExportKV", control_[index], layers_[l].group, start, start + count));
    QUIRE_RETURN_IF_ERROR(RequireStored("ExportKV", index, l, start + count));
    QUIRE_RETURN_IF_ERROR(CheckLayer("ExportKV", layer, options_.layers[l], to, count));
    const AttentionLayerSpec& spec = options_.layers[l];
    QUIRE_RETURN_IF_ERROR(CheckOutputs(
        {.name = "ExportKV", .layer = layer},
        {{"k", &to.k},
         {"v", spec.latent ? nullptr : &to.v},
         {"k_scale", IsQuantised(spec.dtype) ? &to.k_scale : nullptr},
         {"v_scale", !spec.latent && IsQuantised(spec.value_dtype()) ? &to.v_scale : nullptr}},
        {}, -1));
    std::vector<AppendTarget> slots(static_cast<size_t>(count));
    FillSlots(last, layers_[l].group, start, slots);
    ReadRows(storage_->layer(layer), slots,
             {.k = to.k.data(),
              .v = to.v.data(),
              .k_scale = to.k_scale.data_as<float>(),
              .v_scale = to.v_scale.data_as<float>()},
             *options_.runner);
    return Status();
  });
}

Status PagedKVCache::ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) {
  return gate_.EnterAlone("ImportKV", [&]() -> Status {
    std::vector<int64_t> tokens;
    for (const KVBlock& block : blocks) tokens.push_back(block.empty() ? 0 : TokenCount(block[0]));
    return Import("ImportKV", seq_id, {.blocks = blocks, .tokens = tokens}, false);
  });
}

Status PagedKVCache::ImportVisibleKV(int64_t seq_id, const KVImport& import) {
  const char* call = "ImportVisibleKV";
  return gate_.EnterAlone(call, [&] { return Import(call, seq_id, import, true); });
}

// The number of tokens that all blocks stand for.
Result<int64_t> PagedKVCache::CheckTokens(const char* call, const Sequence& sequence,
                                          const KVImport& import) const {
  if (import.blocks.empty() || import.blocks.size() != import.tokens.size()) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(import.blocks.size()) + " blocks and " +
                      std::to_string(import.tokens.size()) +
                      " counts of tokens; there must be as many, and at least one");
  }
  int64_t total = 0;
  for (const int64_t count : import.tokens) {
    const int64_t end = tree_.End(sequence.last) + total;
    if (count < 1 || count > kPositionsMax - end) {
      return Status(count < 1 ? StatusCode::kBadArgument : StatusCode::kTooLarge,
                    std::string(call) + ": a block of " + std::to_string(count) + " tokens after " +
                        std::to_string(end) + "; the least is 1, and positions end at 2^31");
    }
    total += count;
  }
  return total;
}

// Whether a sequence of `length` tokens can be in this state.
Status PagedKVCache::CheckWindows(const char* call, const Sequence& sequence,
                                  const SequenceWindows& windows, int64_t length) const {
  const SequenceWindows none;
  const bool has_own =
      sequence.window.window != kNoWindow || sequence.slid > 0 || sequence.span.tokens != kNoWindow;
  if (tree_.End(sequence.last) > 0 || has_own) {
    if (windows == none && !has_own) return Status();
    return Status(StatusCode::kBadState,
                  std::string(call) + ": sequence " + std::to_string(sequence.id) +
                      " is not empty, or has a window; only one that is both new and empty can be "
                      "given the windows of another");
  }
  const auto is_window = [](int64_t window, int64_t sinks) {
    return window == 0 || (window > sinks && window < kNoWindow);
  };
  const bool hides = windows.window > 0 || windows.slid > 0;
  const int64_t slid_max =
      windows.window > 0 ? std::max(windows.lost, length + 1 - windows.window) : windows.lost;
  const bool fits = windows.window >= 0 && windows.sinks >= 0 &&
                    is_window(windows.window, windows.sinks) && (hides || windows.sinks == 0) &&
                    windows.lost >= 0 && windows.slid >= windows.lost && windows.slid <= slid_max &&
                    (windows.slid == 0 || windows.slid <= length - windows.sinks);
  const bool span_fits = windows.span >= 0 && windows.span_sinks >= 0 &&
                         is_window(windows.span, windows.span_sinks) &&
                         (windows.span == 0 ? windows.span_sinks == 0
                                            : options_.tvm_window_span && windows.window == 0);
  if (fits && span_fits) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": no sequence of " + std::to_string(length) +
                    " tokens can have the windows: window " + std::to_string(windows.window) +
                    ", sinks " + std::to_string(windows.sinks) + ", lost " +
                    std::to_string(windows.lost) + ", slid " + std::to_string(windows.slid) +
                    ", span " + std::to_string(windows.span) + " with sinks " +
                    std::to_string(windows.span_sinks));
}

// Windows of layers and `windows` hide tokens of [start, end) from what stands behind them.
void PagedKVCache::LeaveOutHidden(const SequenceWindows& windows, int64_t start, int64_t end,
                                  std::span<GroupAppend> groups) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const TokenRange hidden = HiddenTokens(windows, groups_[g].window, end);
    const AbsentRange absent = {std::max(hidden.begin, start), hidden.end};
    if (absent.begin < absent.end) groups[g].absent = absent;
  }
}

namespace {

// Of [begin, end) what lies in `absent`.
int64_t CountAbsent(const AbsentRange& absent, int64_t begin, int64_t end) {
  return std::max<int64_t>(std::min(absent.end, end) - std::max(absent.begin, begin), 0);
}

}  // namespace

// Each layer has the rows of its tokens that are not left out.
Status PagedKVCache::CheckBlocks(const char* call, int64_t start, const KVImport& import,
                                 std::span<const GroupAppend> groups) const {
  for (size_t b = 0; b < import.blocks.size(); ++b) {
    const KVBlock& block = import.blocks[b];
    if (block.size() != layers_.size()) {
      return Status(StatusCode::kBadArgument,
                    std::string(call) + ": a block has " + std::to_string(block.size()) +
                        " layers; this cache has " + std::to_string(layers_.size()));
    }
    const int64_t end = start + import.tokens[b];
    for (size_t l = 0; l < block.size(); ++l) {
      const AbsentRange& absent = groups[static_cast<size_t>(layers_[l].group)].absent;
      const int64_t count = import.tokens[b] - CountAbsent(absent, start, end);
      if (count == 0 && TokenCount(block[l]) == 0) continue;
      QUIRE_RETURN_IF_ERROR(
          CheckLayer(call, static_cast<int64_t>(l), options_.layers[l], block[l], count));
    }
    start = end;
  }
  return Status();
}

Status PagedKVCache::Import(const char* call, int64_t seq_id, const KVImport& import,
                            bool leaves_out) {
  QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call));
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find(call, seq_id));
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  Sequence& sequence = control_[index];
  QUIRE_ASSIGN_OR_RETURN(const int64_t count, CheckTokens(call, sequence, import));
  const int64_t start = tree_.End(sequence.last);
  const int64_t end = start + count;
  ForwardPlan plan;  // of one sequence that gets no rows
  plan.StartBatch(1, groups_.size());
  if (leaves_out) {
    QUIRE_RETURN_IF_ERROR(CheckWindows(call, sequence, import.windows, end));
    LeaveOutHidden(import.windows, start, end, plan.group_appends);
  }
  QUIRE_RETURN_IF_ERROR(CheckBlocks(call, start, import, plan.group_appends));
  QUIRE_RETURN_IF_ERROR(PlanImport(call, sequence, count, FirstPage::kShared, &plan));
  const bool sets_windows = leaves_out && import.windows != SequenceWindows();
  if (sets_windows) tree_.TrackHidden(control_.table().entries().size());
  CommitImport(index, &plan);
  StoreImport(plan, start, import);
  if (sets_windows) {
    SetWindows(index, import.windows);
  } else {
    SlideTo(index);
  }
  FreeHidden();
  return Status();
}

Status PagedKVCache::PlanImport(const char* call, const Sequence& sequence, int64_t count,
                                FirstPage first, ForwardPlan* plan) {
  tree_.BeginPlanning();
  ForwardMember& member = plan->members.emplace_back();
  member.id = sequence.id;
  member.imported = count;
  member.append = first == FirstPage::kOwn
                      ? tree_.PlanAppendToOwnPage(sequence.last, count, plan->group_appends)
                      : tree_.PlanAppend(sequence.last, count, plan->group_appends);
  member.append.active = !sequence.retained;
  for (size_t g = 0; g < groups_.size(); ++g)
    plan->page_counts[g] = plan->group_appends[g].page_count;
  QUIRE_RETURN_IF_ERROR(CheckPages(call, plan->page_counts));
  tree_.Reserve(AppendPlans(member.append), plan->group_appends);
  plan->Reserve(tree_);
  return Status();
}

void PagedKVCache::CommitImport(int32_t index, ForwardPlan* plan) noexcept {
  const AppendPlan& append = plan->members[0].append;
  tree_.Unhide(index);
  const BlockIndex last = tree_.Append(append, plan->group_appends);
  control_[index].last = plan->members[0].last = last;
  plan->Fill(tree_);
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& group = plan->group(g);
    storage_->Copy(g, group.copy_from, group.copy_to, group.copy_opens_tile.data());
  }
  if (append.copies()) tree_.ReleaseOldPath(append, last);
}

void PagedKVCache::StoreImport(ForwardPlan& plan, int64_t start, const KVImport& import) noexcept {
  for (int g = 0; g < tree_.group_count(); ++g) {
    GroupPlan& group = plan.group(g);
    const AbsentRange& absent = plan.group_appends[static_cast<size_t>(g)].absent;
    for (const int64_t layer : groups_[static_cast<size_t>(g)].layers) {
      int64_t first = 0;  // of the block, counted from `start`
      for (size_t b = 0; b < import.blocks.size(); first += import.tokens[b++]) {
        const LayerKV& kv = import.blocks[b][static_cast<size_t>(layer)];
        const int64_t end = first + import.tokens[b];
        const int64_t hole = std::clamp(absent.begin - start, first, end);
        const int64_t hole_end = std::clamp(absent.end - start, hole, end);
        const int64_t before = hole - first;
        StoreImport(group.imports, layer, first, kv, {0, before}, *options_.runner);
        StoreImport(group.imports, layer, hole_end, kv, {before, before + end - hole_end},
                    *options_.runner);
      }
    }
  }
}

// The rows of `kv`, as imported tokens from `first` on. What fills whole tiles is moved so; the
// rows before and behind them one by one.
void PagedKVCache::StoreImport(const TokenSlots& imports, int64_t layer, int64_t first,
                               const LayerKV& kv, TokenRange rows,
                               ParallelRunner& runner) noexcept {
  const KVPages pages = storage_->layer(layer);
  const std::span<const AppendTarget> targets(imports.targets.data() + first,
                                              static_cast<size_t>(rows.count()));
  for (int64_t done = 0; done < rows.count();) {
    const auto rest = targets.subspan(static_cast<size_t>(done));
    const uint8_t* const opens_tile = imports.opens_tile.data() + first + done;
    const RowRun run = FirstRun(pages.layout, rest, opens_tile);
    const int64_t row = rows.begin + done;
    HeadRows k = RowsOf(kv.k);
    HeadRows v = pages.layout.latent ? HeadRows{} : RowsOf(kv.v);
    k.data = RowAt(k, row);
    v.data = RowAt(v, row);
    const float* const k_scale = ScalesFrom(kv.k_scale, row);
    const float* const v_scale = ScalesFrom(kv.v_scale, row);
    if (run.whole_tiles) {
      WriteTiles(pages, rest.first(static_cast<size_t>(run.rows)),
                 {.k = k.data, .v = v.data, .k_scale = k_scale, .v_scale = v_scale}, runner);
    } else {
      backend_->append_kv({.pages = pages,
                           .row_count = run.rows,
                           .k = k,
                           .v = v,
                           .k_scale = k_scale,
                           .v_scale = v_scale,
                           .rotary = {},
                           .targets = rest.data(),
                           .opens_tile = opens_tile},
                          runner);
    }
    done += run.rows;
  }
}

// ---------------------------------------------------------------------- loads

// `planned`: tokens that are not left out.
Status PagedKVCache::CheckLoaded(const AttentionCall& call, const ForwardMember& member,
                                 int64_t planned, std::span<const LayerKV> blocks) const {
  int64_t total = 0;
  for (const LayerKV& block : blocks) {
    const int64_t count = TokenCount(block);
    QUIRE_RETURN_IF_ERROR(CheckLayer(call.name, call.layer, call.spec, block, count));
    total += count;
  }
  if (total == planned) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    ": the source of sequence " + std::to_string(member.id) + " gave " +
                    std::to_string(total) + " tokens; " + std::to_string(planned) +
                    " were planned");
}

Status PagedKVCache::LoadLayer(const AttentionCall& call) {
  Layer& layer = layers_[static_cast<size_t>(call.layer)];
  if (layer.loaded || plan_.import_count() == 0) return Status();
  for (size_t m = 0; m < plan_.members.size(); ++m) {
    const ForwardMember& member = plan_.members[m];
    if (member.imported == 0) continue;
    // A window leaves out the first ones.
    const AbsentRange& absent =
        plan_.group_appends[m * groups_.size() + static_cast<size_t>(layer.group)].absent;
    const int64_t left_out = CountAbsent(absent, member.old_length(), member.base());
    const Result<std::span<const LayerKV>> blocks = member.source->Load(call.layer);
    if (!blocks.ok()) {
      return Status(blocks.status().code(),
                    std::string(call.name) + ": layer " + std::to_string(call.layer) +
                        " of sequence " + std::to_string(member.id) + " was not loaded: " +
                        std::string(blocks.status().message()) + "; call AbortForward");
    }
    QUIRE_RETURN_IF_ERROR(CheckLoaded(call, member, member.imported - left_out, *blocks));
    int64_t first = member.first_import + left_out;
    for (const LayerKV& block : *blocks) {
      StoreImport(plan_.group(layer.group).imports, call.layer, first, block,
                  {0, TokenCount(block)}, *options_.runner);
      first += TokenCount(block);
    }
  }
  layer.loaded = true;
  return Status();
}

}  // namespace quire
