// Which sequences there are and where their tokens lie.
#include "kv/cache/paged_sequences.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "kv/pages/sliding_window.h"
#include "quire/chunk.h"

namespace quire {
namespace {

std::vector<PagePool> MakePools(const std::vector<LayerGroup>& groups, PageStorage* storage) {
  std::vector<PagePool> pools;
  for (const LayerGroup& group : groups) {
    pools.emplace_back(group.layout.page_size, group.page_count);
    pools.back().set_listener(storage, static_cast<int>(pools.size()) - 1);
  }
  return pools;
}

std::vector<int> GroupsOfLayers(const std::vector<LayerGroup>& groups, size_t layer_count) {
  std::vector<int> group_of(layer_count);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int64_t layer : groups[g].layers)
      group_of[static_cast<size_t>(layer)] = static_cast<int>(g);
    QUIRE_DCHECK(!groups[g].layers.empty());
  }
  return group_of;
}

bool AnyWindow(const std::vector<LayerGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const LayerGroup& group) { return group.window != kNoWindow; });
}

}  // namespace

PagedSequences::PagedSequences(AttentionKVCacheOptions all_options,
                               std::vector<LayerGroup> all_groups,
                               std::unique_ptr<PageStorage> page_storage)
    : options(std::move(all_options)),
      groups(std::move(all_groups)),
      layer_groups(GroupsOfLayers(groups, options.layers.size())),
      storage(std::move(page_storage)),
      control(options.max_num_sequences),
      tree(MakePools(groups, storage.get())) {
  if (AnyWindow(groups)) tree.hidden().Track(0);
}

void PagedSequences::Clear() noexcept {
  tree.Clear();
  trees.Clear();
  control.Clear();
  QUIRE_DCHECK(control.table().entries().empty()) << "Track would allocate";
  if (AnyWindow(groups)) tree.hidden().Track(0);
}

Status PagedSequences::RequireReceived(const char* call, int32_t index) const {
  const Sequence& sequence = control[index];
  if (sequence.pending == 0) return Status();
  return Status(StatusCode::kBadState,
                OfSequence(call, sequence.id) + "has " + std::to_string(sequence.pending) +
                    " pending tokens of epoch " + std::to_string(sequence.receive) +
                    "; call DisaggCommitRecv or DisaggCancelRecv first");
}

Status PagedSequences::RequireCommitted(const char* call, int32_t index) const {
  QUIRE_RETURN_IF_ERROR(RequireReceived(call, index));
  return RequireNoTree(call, control[index].id, trees.SizeOf(index));
}

Status PagedSequences::CheckHeld(const char* call, const Sequence& sequence, int group,
                                 int64_t start, int64_t end) const {
  if (tree.IsHeld(sequence.last, group, start, end)) return Status();
  return Status(StatusCode::kBadArgument,
                OfSequence(call, sequence.id) + "no longer holds all tokens of [" +
                    std::to_string(start) + ", " + std::to_string(end) + ") in layer " +
                    std::to_string(groups[static_cast<size_t>(group)].layers.front()) +
                    ": some have slid out of the window");
}

Status PagedSequences::CheckPages(const char* call, std::span<const int64_t> page_counts) const {
  QUIRE_DCHECK(page_counts.size() == groups.size());
  bool takes_some = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    const PagePool& pool = tree.pool(static_cast<int>(g));
    takes_some |= page_counts[g] > 0;
    if (page_counts[g] <= pool.free_count()) continue;
    return Status(StatusCode::kOutOfPages,
                  std::string(call) + ": needs " + std::to_string(page_counts[g]) + " pages of " +
                      std::to_string(pool.page_size()) + " tokens in the group of layer " +
                      std::to_string(groups[g].layers.front()) + ", " +
                      std::to_string(pool.free_count()) + " of " +
                      std::to_string(pool.page_count()) +
                      " are free; remove or pop sequences and call again");
  }
  if (takes_some && receives != nullptr) receives->AwaitLateCopies();
  return Status();
}

void PagedSequences::FillSlots(BlockIndex last, int group, int64_t start,
                               std::span<AppendTarget> slots) const noexcept {
  const PagePool& pool = tree.pool(group);
  const int64_t end = start + static_cast<int64_t>(slots.size());
  QUIRE_DCHECK(start >= 0);
  QUIRE_DCHECK(slots.empty() || end <= tree.End(last))
      << "no slots of [" << start << ", " << end << ")";
  tree.VisitPieces(last, group, start, end, [&](int64_t from, int64_t to, int32_t page) {
    for (int64_t p = from; p < to; ++p) {
      slots[static_cast<size_t>(p - start)] = {.page = page,
                                               .slot = static_cast<int32_t>(pool.Slot(p))};
    }
  });
}

uint64_t PagedSequences::TransferLayout(bool long_factors) const {
  std::string text = options.kernel_path;
  for (const AttentionLayerSpec& layer : options.layers) {
    text += "|" + std::string(DTypeName(layer.dtype)) + "," +
            std::string(DTypeName(layer.value_dtype())) + "," + std::to_string(layer.qk_head_dim) +
            "," + std::to_string(layer.v_head_dim) + (layer.latent ? ",latent," : ",") +
            RopePassport(layer.rope ? *layer.rope : options.rope, long_factors);
  }
  return Hash64(text);
}

}  // namespace quire
