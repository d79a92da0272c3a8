// The one rule of visibility: which positions a row sees. Causality, ancestry, the window of a
// layer, the window of a sequence with its sinks and a caller's mask come together here, and
// nowhere else.
#ifndef QUIRE_KERNELS_ROW_VIEW_H_
#define QUIRE_KERNELS_ROW_VIEW_H_

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"

namespace quire {

// [begin, end) without [gap_begin, gap_end), which lies inside or is empty, and without what the
// mask hides. Positions before sink_end are sinks of a window that has slid:
// AttentionArgs::sink_angles.
struct RowView {
  int64_t begin;
  int64_t end;
  int64_t gap_begin;
  int64_t gap_end;
  int64_t sink_end;
  RowMask mask = {};
};

// How many positions after the sinks a row at `position` does not see.
inline int64_t SlidAt(const SequenceWindow& window, int64_t position) {
  return std::max(window.slid, position + 1 - window.window);
}

inline RowView ViewOfRow(const SequenceWindow& window, int64_t layer_window, int64_t position) {
  const int64_t end = std::max<int64_t>(position + 1, 0);
  const int64_t begin = std::max<int64_t>(end - layer_window, 0);
  const int64_t slid = SlidAt(window, position);
  if (slid == 0) return {begin, end, INT64_MAX, INT64_MAX, 0};
  const int64_t behind = window.sinks + slid;
  if (begin >= window.sinks) return {std::max(begin, behind), end, INT64_MAX, INT64_MAX, 0};
  return {begin, end, window.sinks, behind, window.sinks};
}

// Where row r of a sequence stands, and where the first and the last of its rows do.
inline int64_t PositionOfRow(const AttentionSequence& sequence, int64_t r) {
  if (sequence.tree == nullptr) return sequence.base + r;
  return sequence.base + sequence.tree->depths[sequence.tree->first_node + r];
}
inline int64_t FirstPosition(const AttentionSequence& sequence) {
  return sequence.base + (sequence.tree == nullptr ? 0 : sequence.tree->min_depth);
}
inline int64_t LastPosition(const AttentionSequence& sequence) {
  return sequence.base +
         (sequence.tree == nullptr ? sequence.row_count - 1 : sequence.tree->max_depth);
}
// The end of what all rows read where the runs say.
inline int64_t RunsEnd(const AttentionSequence& sequence) {
  return sequence.base + (sequence.tree == nullptr ? sequence.row_count : 0);
}

// Hides all before `begin` and all from `end` on.
inline void KeepBetween(int64_t begin, int64_t end, RowView* view) {
  view->begin = std::max(view->begin, begin);
  view->end = std::min(view->end, std::max<int64_t>(end, 0));
  view->sink_end = std::min(view->sink_end, view->end);
  if (view->gap_begin <= view->begin) view->begin = std::max(view->begin, view->gap_end);
  if (view->gap_begin <= view->begin || view->gap_begin >= view->end)
    view->gap_begin = view->gap_end = INT64_MAX;
}

// What row `row` of a sequence sees in a call.
inline RowView ViewOf(const AttentionArgs& args, const AttentionSequence& sequence, int64_t row) {
  RowView view = ViewOfRow(sequence.window, args.layer_window, PositionOfRow(sequence, row));
  if (args.masks != nullptr) view.mask = args.masks[sequence.first_row + row];
  const TokenTreeView* const tree = sequence.tree;
  const bool new_only = tree != nullptr && tree->new_only;
  if (!args.cached_only && !new_only) return view;
  const int64_t first_new = sequence.base + (tree == nullptr ? 0 : tree->old_levels[row]);
  KeepBetween(new_only ? first_new : 0, args.cached_only ? first_new : view.end, &view);
  return view;
}

// What a row and all later ones of its sequence do not see, after its sinks: [begin, end).
struct HiddenRange {
  int64_t begin;
  int64_t end;
};
inline HiddenRange HiddenOf(const RowView& view) {
  if (view.gap_begin < view.gap_end) return {view.gap_begin, view.gap_end};
  return {0, view.begin};
}

inline bool Sees(const RowView& view, int64_t position) {
  const bool in_gap = view.gap_begin <= position && position < view.gap_end;
  if (position < view.begin || position >= view.end || in_gap) return false;
  const int64_t tile = position / kTilePositions;
  if (view.mask.tiles == nullptr || tile < view.mask.first_tile) return true;
  return (view.mask.tiles[tile - view.mask.first_tile] >> position % kTilePositions & 1) != 0;
}

}  // namespace quire

#endif  // QUIRE_KERNELS_ROW_VIEW_H_
