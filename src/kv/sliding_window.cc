#include "kv/sliding_window.h"

#include <algorithm>

namespace quire {
namespace {

void Intersect(BlockViewers& with, int64_t begin, int64_t end) {
  with.hidden_begin = std::max(with.hidden_begin, begin);
  with.hidden_end = std::min(with.hidden_end, end);
}

// From the ends up: what a block hides is known when its last child has been added.
void IntersectUpwards(const BlockTree& tree, std::span<BlockViewers> viewers) {
  for (BlockIndex leaf = 0; leaf < tree.block_capacity(); ++leaf) {
    if (tree.block(leaf).refs == 0 || tree.block(leaf).child_count > 0) continue;
    for (BlockIndex b = leaf; tree.block(b).parent != kNoBlock; b = tree.block(b).parent) {
      const BlockViewers& child = viewers[static_cast<size_t>(b)];
      BlockViewers& parent = viewers[static_cast<size_t>(tree.block(b).parent)];
      Intersect(parent, child.hidden_begin, child.hidden_end);
      if (--parent.children_left > 0) break;
    }
  }
}

}  // namespace

SequenceWindow WindowAt(const SequenceWindow& window, int64_t length) {
  SequenceWindow cut = window;
  if (length <= window.sinks) cut.slid = 0;
  return cut.slid == 0 && cut.window == kNoWindow ? SequenceWindow{} : cut;
}

HiddenRange HiddenFrom(const Sequence& sequence, int64_t length, int64_t layer_window) {
  const SequenceWindow now = {
      .window = kNoWindow, .sinks = sequence.window.sinks, .slid = sequence.slid};
  return HiddenOf(ViewOfRow(now, layer_window, length));
}

bool CanEndAt(const BlockTree& tree, const Sequence& sequence, int group, int64_t layer_window,
              int64_t length) {
  const SequenceWindow window = WindowAt(sequence.window, length);
  // It may not end in what is hidden for good.
  if (window.slid > 0 && length < window.sinks + window.slid) return false;
  const RowView view = ViewOfRow(window, layer_window, length);
  const HiddenRange hidden = HiddenOf(view);
  return tree.IsHeld(sequence.last, group, view.begin, std::min(hidden.begin, length)) &&
         tree.IsHeld(sequence.last, group, hidden.end, length);
}

int64_t CountHeldTokens(const BlockTree& tree, BlockIndex last) {
  std::vector<HiddenRange> freed;
  for (int g = 0; g < tree.group_count(); ++g) {
    if (tree.IsHeld(last, g, 0, tree.End(last))) continue;
    tree.VisitPieces(last, g, 0, tree.End(last), [&](int64_t from, int64_t to, int32_t page) {
      if (page == kNoPage) freed.push_back({from, to});
    });
  }
  std::sort(freed.begin(), freed.end(),
            [](const HiddenRange& a, const HiddenRange& b) { return a.begin < b.begin; });
  int64_t held = tree.End(last);
  int64_t counted = 0;  // positions before it are counted
  for (const HiddenRange& range : freed) {
    held -= std::max<int64_t>(range.end - std::max(range.begin, counted), 0);
    counted = std::max(counted, range.end);
  }
  return held;
}

void FreeHiddenPages(BlockTree& tree, const SequenceTable& sequences, int group,
                     int64_t layer_window) noexcept {
  const std::span<BlockViewers> viewers = tree.viewers();
  for (BlockIndex b = 0; b < tree.block_capacity(); ++b) {
    viewers[static_cast<size_t>(b)] = {
        .children_left = tree.block(b).child_count, .hidden_begin = 0, .hidden_end = INT64_MAX};
  }
  bool any = false;
  for (const Sequence& sequence : sequences.entries()) {
    if (sequence.last == kNoBlock) continue;
    const HiddenRange hidden =
        HiddenFrom(sequence, tree.End(sequence.last) - sequence.reserved, layer_window);
    any |= hidden.end > 0;
    Intersect(viewers[static_cast<size_t>(sequence.last)], hidden.begin, hidden.end);
  }
  if (!any) return;
  IntersectUpwards(tree, viewers);
  const PagePool& pool = tree.pool(group);
  tree.FreeHidden(group, [&](BlockIndex b) -> HiddenPages {
    const BlockViewers& seen = viewers[static_cast<size_t>(b)];
    const int64_t begin = seen.hidden_begin;
    return {.begin = pool.Slot(begin) == 0 ? begin : pool.RangeEnd(begin),
            .end = pool.RangeBegin(seen.hidden_end)};
  });
}

}  // namespace quire
