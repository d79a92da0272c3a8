#include "engine/blending/blend_hook.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "base/check.h"

namespace quire {

BlendHook::BlendHook(const Parts& parts) : parts_(parts), options_(*parts.options) {
  options_.force_last = parts.ends_prompt;
  options_.min_tokens = 0;  // of whole prompts
  rows_before_ =
      std::any_of(parts.documents.begin(), parts.documents.end(),
                  [&](const auto& document) {
                    return document.begin < parts.range.begin && document.end > parts.range.begin;
                  })
          ? 0
          : 1;
  kinds_.assign(static_cast<size_t>(rows_before_), kRowExact);
  if (rows_before_ == 1) documents_.push_back({.first_row = 0, .row_count = 1});
  const std::span<const uint8_t> kinds = parts.piece->kinds();
  QUIRE_CHECK(std::ssize(kinds) == parts.range.count()) << "rows of another piece";
  kinds_.insert(kinds_.end(), kinds.begin(), kinds.end());
  deviations_.resize(kinds_.size());
  candidates_.reserve(kinds_.size());
  for (const PromptDocument& document : parts.documents) {
    const int64_t begin = std::max(document.begin, parts.range.begin);
    const int64_t end = std::min(document.end, parts.range.end);
    if (begin >= end) continue;
    documents_.push_back({.first_row = rows_before_ + begin - parts.range.begin,
                          .row_count = end - begin,
                          .ratio = document.ratio});
  }
  counts_.moved = counts_.recomputed = parts.piece->moved_count();
  counts_.moved_bytes = parts.piece->moved_bytes();
  counts_.move_ns = parts.move_ns;
}

Result<RowSelection> BlendHook::BeforeAttention(int64_t layer, const FreshRows& fresh) {
  const auto check = std::find(options_.check_layers.begin(), options_.check_layers.end(), layer);
  if (check == options_.check_layers.end()) return RowSelection{};
  QUIRE_RETURN_IF_ERROR(parts_.piece->Reach(layer));
  const int64_t begin_ns = parts_.clock->SteadyNs();
  Result<RowSelection> selection =
      Select(static_cast<size_t>(check - options_.check_layers.begin()), layer, fresh);
  counts_.select_ns += parts_.clock->SteadyNs() - begin_ns;
  return selection;
}

Result<RowSelection> BlendHook::Select(size_t check_index, int64_t layer, const FreshRows& fresh) {
  std::optional<std::span<const int64_t>> candidates;
  std::vector<int64_t> rows;  // of the piece
  std::optional<std::span<const int64_t>> rows_of_piece;
  if (selected_before_) {
    candidates = candidates_;
    for (const int64_t row : candidates_) rows.push_back(row - rows_before_);
    rows_of_piece = rows;
  }
  KVRows computed{.k = fresh.k, .v = fresh.v};
  const AttentionLayerSpec& spec = parts_.piece->layer(layer);
  if (spec.latent) computed.v = FirstNumbers(fresh.k, spec.v_head_dim);
  const auto before = static_cast<size_t>(rows_before_);
  QUIRE_RETURN_IF_ERROR(ComputeDeviations(
      options_.metric, 0, computed, parts_.piece->CachedRows(layer), rows_of_piece,
      std::span(kinds_).subspan(before), std::span(deviations_).subspan(before)));
  if (before > 0) deviations_.front() = -std::numeric_limits<float>::infinity();
  std::vector<int64_t> all;  // the row before is a candidate that nothing selects
  if (candidates && before > 0) {
    all.push_back(0);
    all.insert(all.end(), candidates_.begin(), candidates_.end());
    candidates = all;
  }
  const std::array<int32_t, 2> query_start_loc = {0, static_cast<int32_t>(kinds_.size())};
  QUIRE_ASSIGN_OR_RETURN(TokenSelection selection, SelectTokens({.query_start_loc = query_start_loc,
                                                                 .kinds = kinds_,
                                                                 .deviations = deviations_,
                                                                 .documents = documents_,
                                                                 .candidates = candidates},
                                                                options_, check_index));
  if (selection.rows.empty()) {  // a forward has at least one row: the last one that is there
    selection.rows.push_back(selected_before_ ? candidates_.back() : std::ssize(kinds_) - 1);
  }
  QUIRE_CHECK(std::is_sorted(selection.rows.begin(), selection.rows.end()));
  NoteDropped(selection.rows);
  RowSelection selected{.selects = true, .rows = {}};
  selected.rows.reserve(selection.rows.size());
  for (const int64_t row : selection.rows) {
    selected.rows.push_back(static_cast<int32_t>(row - rows_before_));
  }
  candidates_.assign(selection.rows.begin(), selection.rows.end());
  selected_before_ = true;
  return selected;
}

// Moved rows that were computed up to here and are not from here on.
void BlendHook::NoteDropped(std::span<const int64_t> selected) {
  const auto drop = [&](int64_t row) {
    if (kinds_[static_cast<size_t>(row)] != kRowMoved) return;
    if (std::binary_search(selected.begin(), selected.end(), row)) return;
    --counts_.recomputed;
    QUIRE_CHECK(counts_.recomputed >= 0) << "a row is dropped twice";
    // Rows that are no numbers deviate infinitely, which JSON has no word for.
    const double deviation =
        std::min(deviations_[static_cast<size_t>(row)], std::numeric_limits<float>::max());
    counts_.deviation_sum += deviation;
    counts_.deviation_max = std::max(counts_.deviation_max, deviation);
  };
  if (selected_before_) {
    std::for_each(candidates_.begin(), candidates_.end(), drop);
  } else {
    for (size_t row = 0; row < kinds_.size(); ++row) drop(static_cast<int64_t>(row));
  }
}

}  // namespace quire
