#include "kv/cache/kv_importer.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kv/cache/layer_kv.h"
#include "kv/pages/kv_export_rows.h"

namespace quire {
namespace {

// Empty for the values of a latent layer.
HeadRows RowsOf(const TensorView& tensor) {
  if (tensor.rank() != 3) return {};
  return {.data = tensor.data(),
          .dtype = tensor.dtype(),
          .row_stride = tensor.stride(0),
          .head_stride = tensor.stride(1)};
}

const void* RowAt(const HeadRows& rows, int64_t row) {
  QUIRE_DCHECK(row >= 0);
  if (rows.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(rows.data) + row * rows.row_stride * DTypeBytes(rows.dtype);
}

// Null where there are none.
const float* ScalesFrom(const TensorView& scales, int64_t row) {
  if (scales.rank() == 0) return nullptr;
  return scales.data_as<float>() + row * scales.stride(0);
}

// The number of tokens of [begin, end) that lie in `absent`.
int64_t CountAbsent(const AbsentRange& absent, int64_t begin, int64_t end) {
  return std::max<int64_t>(std::min(absent.end, end) - std::max(absent.begin, begin), 0);
}

// `planned`: tokens that are not left out.
Status CheckLoaded(const AttentionCall& call, const ForwardMember& member, int64_t planned,
                   std::span<const LayerKV> blocks) {
  int64_t total = 0;
  for (const LayerKV& block : blocks) {
    const int64_t count = TokenCount(block);
    QUIRE_RETURN_IF_ERROR(CheckLayerKV(call.name, call.layer, call.spec, block, count));
    total += count;
  }
  if (total == planned) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    ": the source of sequence " + std::to_string(member.id) + " gave " +
                    std::to_string(total) + " tokens; " + std::to_string(planned) +
                    " were planned");
}

}  // namespace

// The number of tokens that all blocks stand for.
Result<int64_t> KVImporter::CheckTokens(const char* call, const Sequence& sequence,
                                        const KVImport& import) const {
  if (import.blocks.empty() || import.blocks.size() != import.tokens.size()) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(import.blocks.size()) + " blocks and " +
                      std::to_string(import.tokens.size()) +
                      " counts of tokens; there must be as many, and at least one");
  }
  int64_t total = 0;
  for (const int64_t count : import.tokens) {
    const int64_t end = kv_.tree.End(sequence.last) + total;
    if (count < 1 || count > kPositionsMax - end) {
      return Status(count < 1 ? StatusCode::kBadArgument : StatusCode::kTooLarge,
                    std::string(call) + ": a block of " + std::to_string(count) + " tokens after " +
                        std::to_string(end) + "; the least is 1, and positions end at 2^31");
    }
    total += count;
  }
  return total;
}

// Each layer has the rows of its tokens that are not left out.
Status KVImporter::CheckBlocks(const char* call, int64_t start, const KVImport& import,
                               std::span<const GroupAppend> groups) const {
  QUIRE_DCHECK(groups.size() == kv_.groups.size());
  for (size_t b = 0; b < import.blocks.size(); ++b) {
    const KVBlock& block = import.blocks[b];
    if (block.size() != kv_.options.layers.size()) {
      return Status(StatusCode::kBadArgument,
                    std::string(call) + ": a block has " + std::to_string(block.size()) +
                        " layers; this cache has " + std::to_string(kv_.options.layers.size()));
    }
    const int64_t end = start + import.tokens[b];
    for (size_t l = 0; l < block.size(); ++l) {
      const AbsentRange& absent = groups[static_cast<size_t>(kv_.layer_groups[l])].absent;
      const int64_t count = import.tokens[b] - CountAbsent(absent, start, end);
      if (count == 0 && TokenCount(block[l]) == 0) continue;
      QUIRE_RETURN_IF_ERROR(
          CheckLayerKV(call, static_cast<int64_t>(l), kv_.options.layers[l], block[l], count));
    }
    start = end;
  }
  return Status();
}

Status KVImporter::PlanImport(const char* call, int32_t index, const KVImport& import,
                              bool leaves_out) {
  QUIRE_DCHECK(import_.index == SequenceTable::kAbsent) << "an import is planned already";
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  const Sequence& sequence = kv_.control[index];
  QUIRE_ASSIGN_OR_RETURN(const int64_t count, CheckTokens(call, sequence, import));
  const int64_t start = kv_.tree.End(sequence.last);
  const int64_t end = start + count;
  ForwardPlan plan;
  QUIRE_DCHECK(count > 0 && end <= kPositionsMax);
  plan.StartBatch(1, kv_.groups.size());
  if (leaves_out) {
    QUIRE_RETURN_IF_ERROR(windows_.CheckImport(call, sequence, import.windows, end));
    windows_.LeaveOutHidden(import.windows, start, end, plan.group_appends);
  }
  QUIRE_RETURN_IF_ERROR(CheckBlocks(call, start, import, plan.group_appends));
  QUIRE_RETURN_IF_ERROR(Reserve(call, sequence, count, FirstPage::kShared, &plan));
  const bool sets_windows = leaves_out && import.windows != WindowSettings();
  if (sets_windows) kv_.tree.hidden().Track(kv_.control.table().entries().size());
  import_ = {.index = index, .kv = import, .sets_windows = sets_windows, .plan = std::move(plan)};
  return Status();
}

void KVImporter::CommitImport() noexcept {
  QUIRE_DCHECK(import_.index != SequenceTable::kAbsent) << "no import is planned";
  const int32_t index = import_.index;
  const int64_t start = kv_.tree.End(kv_.control[index].last);
  Commit(index, &import_.plan);
  FillBlocks(import_.plan, start, import_.kv);
  if (import_.sets_windows) {
    windows_.Set(index, import_.kv.windows);
  } else {
    windows_.SlideTo(index);
  }
  windows_.FreeHidden();
  import_ = {};
}

Status KVImporter::Reserve(const char* call, const Sequence& sequence, int64_t count,
                           FirstPage first, ForwardPlan* plan) {
  QUIRE_DCHECK(count > 0);
  QUIRE_DCHECK(plan->members.empty());
  QUIRE_DCHECK(sequence.reserved == 0) << "sequence " << sequence.id << " is not committed";
  kv_.tree.BeginPlanning();
  ForwardMember& member = plan->members.emplace_back();
  member.id = sequence.id;
  member.imported = count;
  member.append = first == FirstPage::kOwn
                      ? kv_.tree.PlanAppendToOwnPage(sequence.last, count, plan->group_appends)
                      : kv_.tree.PlanAppend(sequence.last, count, plan->group_appends);
  member.append.active = !sequence.retained;
  for (size_t g = 0; g < kv_.groups.size(); ++g)
    plan->page_counts[g] = plan->group_appends[g].page_count;
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(call, plan->page_counts));
  kv_.tree.Reserve(AppendPlans(member.append), plan->group_appends);
  plan->Reserve(kv_.tree);
  return Status();
}

void KVImporter::Commit(int32_t index, ForwardPlan* plan) noexcept {
  QUIRE_DCHECK(plan->members.size() == 1);
  const AppendPlan& append = plan->members[0].append;
  kv_.tree.hidden().Unhide(index);
  const BlockIndex last = kv_.tree.Append(append, plan->group_appends);
  kv_.control[index].last = plan->members[0].last = last;
  QUIRE_DCHECK(kv_.tree.End(last) == append.length + append.count);
  plan->Fill(kv_.tree);
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const GroupPlan& group = plan->group(g);
    kv_.storage->Copy(g, group.copy_from, group.copy_to, group.copy_opens_tile.data());
  }
  if (append.copies()) kv_.tree.ReleaseOldPath(append, last);
}

void KVImporter::FillBlocks(const ForwardPlan& plan, int64_t start,
                            const KVImport& import) noexcept {
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const GroupPlan& group = plan.group(g);
    const AbsentRange& absent = plan.group_appends[static_cast<size_t>(g)].absent;
    for (const int64_t layer : kv_.groups[static_cast<size_t>(g)].layers) {
      int64_t first = 0;  // of the block, counted from `start`
      for (size_t b = 0; b < import.blocks.size(); first += import.tokens[b++]) {
        const LayerKV& kv = import.blocks[b][static_cast<size_t>(layer)];
        const int64_t end = first + import.tokens[b];
        const int64_t hole = std::clamp(absent.begin - start, first, end);
        const int64_t hole_end = std::clamp(absent.end - start, hole, end);
        const int64_t before = hole - first;
        Fill(group.imports, layer, first, kv, {0, before}, *kv_.options.runner);
        Fill(group.imports, layer, hole_end, kv, {before, before + end - hole_end},
             *kv_.options.runner);
      }
      QUIRE_DCHECK(first == plan.members[0].append.count) << "tokens of no block were planned";
    }
  }
}

void KVImporter::Fill(const TokenSlots& slots, int64_t layer, int64_t first, const LayerKV& kv,
                      TokenRange rows, ParallelRunner& runner) noexcept {
  FillSlots(slots.targets, slots.opens_tile, layer, first, kv, rows, runner);
}

// The rows of `kv`, as tokens from `first` on. What fills whole tiles is moved so; the rows before
// and behind them one by one, as all are whose keys are to be rounded.
void KVImporter::FillSlots(std::span<const AppendTarget> all_targets,
                           std::span<const uint8_t> all_opens_tile, int64_t layer, int64_t first,
                           const LayerKV& kv, TokenRange rows, ParallelRunner& runner) noexcept {
  QUIRE_DCHECK(first + rows.count() <= std::ssize(all_targets));
  const KVPages pages = kv_.storage->layer(layer);
  const auto targets =
      all_targets.subspan(static_cast<size_t>(first), static_cast<size_t>(rows.count()));
  const bool as_stored = kv.k.dtype() == pages.layout.dtype;
  for (int64_t done = 0; done < rows.count();) {
    const auto rest = targets.subspan(static_cast<size_t>(done));
    const uint8_t* const opens_tile = all_opens_tile.data() + first + done;
    const RowRun run = as_stored ? FirstRun(pages.layout, rest, opens_tile)
                                 : RowRun{.rows = rows.count(), .whole_tiles = false};
    QUIRE_DCHECK(run.rows > 0 && run.rows <= rows.count() - done);
    const int64_t row = rows.begin + done;
    HeadRows k = RowsOf(kv.k);
    HeadRows v = pages.layout.latent ? HeadRows{} : RowsOf(kv.v);
    k.data = RowAt(k, row);
    v.data = RowAt(v, row);
    const float* const k_scale = as_stored ? ScalesFrom(kv.k_scale, row) : nullptr;
    const float* const v_scale = ScalesFrom(kv.v_scale, row);
    if (run.whole_tiles) {
      WriteTiles(pages, rest.first(static_cast<size_t>(run.rows)),
                 {.k = k.data, .v = v.data, .k_scale = k_scale, .v_scale = v_scale}, runner);
    } else {
      backend_.append_kv({.pages = pages,
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

Status KVImporter::LoadLayer(const AttentionCall& call, const ForwardPlan& plan) {
  const int group = kv_.group_of(call.layer);
  if (steps_.loaded(call.layer) || plan.import_count() == 0) return Status();
  QUIRE_DCHECK(!steps_.appended(call.layer)) << "rows were stored before what they follow";
  for (size_t m = 0; m < plan.members.size(); ++m) {
    const ForwardMember& member = plan.members[m];
    if (member.imported == 0) continue;
    // A window leaves out the first ones.
    const AbsentRange& absent =
        plan.group_appends[m * kv_.groups.size() + static_cast<size_t>(group)].absent;
    const int64_t left_out = CountAbsent(absent, member.old_length(), member.base());
    QUIRE_DCHECK(member.source != nullptr) << "sequence " << member.id;
    QUIRE_DCHECK(left_out <= member.imported);
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
      Fill(plan.group(group).imports, call.layer, first, block, {0, TokenCount(block)},
           *kv_.options.runner);
      first += TokenCount(block);
    }
  }
  steps_.SetLoaded(call.layer);
  return Status();
}

}  // namespace quire
