#include "kv/pages/sliding_window.h"

#include <algorithm>

#include "base/check.h"

namespace quire {
SequenceWindow WindowAt(const SequenceWindow& window, int64_t length) {
  SequenceWindow cut = window;
  if (length <= window.sinks) cut.slid = 0;
  return cut.slid == 0 && cut.window == kNoWindow ? SequenceWindow{} : cut;
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
  QUIRE_DCHECK(held >= 0);
  return held;
}

HiddenPages HiddenPagesOf(const Sequence& sequence, int64_t length, int64_t max_pop,
                          const PagePool& pool, int64_t layer_window) {
  const int64_t end = std::max<int64_t>(length - max_pop, 0);
  SequenceWindow window = WindowAt(sequence.window, end);
  window.slid = std::min(sequence.slid, SlidAt(window, end));
  window.window = kNoWindow;
  const HiddenRange hidden = HiddenOf(ViewOfRow(window, layer_window, end));
  if (hidden.begin >= hidden.end) return {};
  const int64_t begin = hidden.begin;
  const HiddenPages pages = {.begin = pool.Slot(begin) == 0 ? begin : pool.RangeEnd(begin),
                             .end = pool.RangeBegin(hidden.end)};
  return pages.empty() ? HiddenPages{} : pages;
}

}  // namespace quire
