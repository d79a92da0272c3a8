// Which rows of a batch are recomputed.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "blend/blend_view.h"
#include "quire/blend.h"

namespace quire {
namespace {

bool IsRatio(double ratio) { return ratio >= 0 && ratio <= 1; }

Status CheckDocuments(const SelectionBatch& batch) {
  const std::span<const int32_t> starts = batch.query_start_loc;
  int64_t end = 0;
  for (size_t i = 0; i < batch.documents.size(); ++i) {
    const BlendDocument& document = batch.documents[i];
    const std::string name = "document " + std::to_string(i);
    if (document.first_row < end) {
      return BlendError(name + " begins at row " + std::to_string(document.first_row) +
                        ", before row " + std::to_string(end) +
                        "; documents ascend and do not overlap");
    }
    const auto request_end = std::upper_bound(starts.begin(), starts.end(), document.first_row);
    const int64_t rows_end = request_end == starts.end() ? starts.back() : *request_end;
    if (document.row_count < 0 || document.row_count > rows_end - document.first_row) {
      return BlendError(name + " has " + std::to_string(document.row_count) + " rows from row " +
                        std::to_string(document.first_row) +
                        " on; they do not lie within one request");
    }
    if (document.ratio && !IsRatio(*document.ratio)) {
      return BlendError(name + ": its ratio is " + std::to_string(*document.ratio) +
                        ", not in [0, 1]");
    }
    end = document.first_row + document.row_count;
  }
  return {};
}

Status CheckSelectionBatch(const SelectionBatch& batch) {
  const auto row_count = static_cast<int64_t>(batch.kinds.size());
  QUIRE_RETURN_IF_ERROR(CheckQueryStartLoc(batch.query_start_loc, row_count));
  if (batch.deviations.size() != batch.kinds.size()) {
    return BlendError("there are " + std::to_string(row_count) + " rows, but " +
                      std::to_string(batch.deviations.size()) + " deviations");
  }
  for (size_t row = 0; row < batch.kinds.size(); ++row) {
    if (batch.kinds[row] > kRowExact) {
      return BlendError("row " + std::to_string(row) + " is of kind " +
                        std::to_string(batch.kinds[row]) +
                        ", not 0 (invalid), 1 (moved) or 2 (exact)");
    }
  }
  return CheckDocuments(batch);
}

// Selects in one batch. Marks of rows are bytes: one pass over them gives the ascending list.
class RowSelector {
 public:
  RowSelector(const SelectionBatch& batch, const BlendOptions& options, size_t check_index)
      : batch_(batch),
        options_(options),
        ratio_(options.ratios[check_index]),
        threshold_(options.thresholds.empty() ? 0.0F : options.thresholds[check_index]),
        is_candidate_(batch.kinds.size(), batch.candidates ? 0 : 1),
        has_own_budget_(batch.kinds.size()),
        selected_(batch.kinds.size()) {}

  Result<TokenSelection> Select() {
    QUIRE_RETURN_IF_ERROR(MarkCandidates());
    for (const BlendDocument& document : batch_.documents) {
      if (!document.ratio) continue;
      const auto first = has_own_budget_.begin() + document.first_row;
      std::fill(first, first + document.row_count, uint8_t{1});
    }
    SelectLinkTokens();
    for (size_t request = 0; request + 1 < batch_.query_start_loc.size(); ++request) {
      SelectInRequest(batch_.query_start_loc[request], batch_.query_start_loc[request + 1]);
    }
    return SelectedRows();
  }

 private:
  Status MarkCandidates() {
    if (!batch_.candidates) return {};
    QUIRE_RETURN_IF_ERROR(CheckRows(*batch_.candidates, static_cast<int64_t>(batch_.kinds.size())));
    for (const int64_t row : *batch_.candidates) is_candidate_[static_cast<size_t>(row)] = 1;
    for (size_t row = 0; row < batch_.kinds.size(); ++row) {
      if (batch_.kinds[row] != kRowInvalid || is_candidate_[row] != 0) continue;
      return BlendError("row " + std::to_string(row) +
                        " is invalid and not among the candidates; such rows are computed in "
                        "every layer");
    }
    return {};
  }

  void SelectInRequest(int64_t begin, int64_t end) {
    if (begin == end) return;
    const bool is_short = end - begin < options_.min_tokens;
    if (!is_short) SelectTop(begin, end, false, ratio_);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t kind = batch_.kinds[static_cast<size_t>(row)];
      if (kind == kRowInvalid || (is_short && kind == kRowMoved)) Force(row);
    }
    if (options_.force_last) Force(end - 1);
  }

  // And the budgets of documents that have one of their own. Before all others: link tokens are
  // ranked by nobody, so that a ratio selects as many rows whether or not they deviate most.
  void SelectLinkTokens() {
    int64_t request_end = 0;  // of the request of the last document with rows
    for (const BlendDocument& document : batch_.documents) {
      if (document.row_count == 0) continue;
      const int64_t end = document.first_row + document.row_count;
      int64_t link_count = std::min(options_.link_tokens, document.row_count);
      if (document.first_row >= request_end) {
        const auto starts = batch_.query_start_loc;
        request_end = *std::upper_bound(starts.begin(), starts.end(), document.first_row);
        link_count = 0;  // the first one of its request
      }
      for (int64_t i = 0; i < link_count; ++i) {
        const int64_t row = document.first_row + i;
        if (batch_.kinds[static_cast<size_t>(row)] != kRowExact) Force(row);
      }
      if (document.ratio) SelectTop(document.first_row, end, true, *document.ratio);
    }
  }

  void Force(int64_t row) {
    const auto at = static_cast<size_t>(row);
    if (is_candidate_[at] != 0) selected_[at] = 1;
  }

  float DeviationOf(int64_t row) const {
    const float deviation = batch_.deviations[static_cast<size_t>(row)];
    return std::isnan(deviation) ? std::numeric_limits<float>::infinity() : deviation;
  }

  // The moved rows of [begin, end) that deviate most, `ratio` of them, with or without a budget of
  // their own.
  void SelectTop(int64_t begin, int64_t end, bool own_budget, double ratio) {
    int64_t moved_count = 0;
    ranked_.clear();
    for (int64_t row = begin; row < end; ++row) {
      const auto at = static_cast<size_t>(row);
      if (batch_.kinds[at] != kRowMoved || (has_own_budget_[at] != 0) != own_budget) continue;
      ++moved_count;
      if (selected_[at] != 0) continue;
      if (is_candidate_[at] != 0 && DeviationOf(row) >= threshold_) ranked_.push_back(row);
    }
    // 1e-6: a product such as 100 * 0.53 may end just below its whole number.
    const auto budget =
        static_cast<size_t>(std::floor(static_cast<double>(moved_count) * ratio + 1e-6));
    const size_t count = std::min(budget, ranked_.size());
    if (count == 0) return;
    const auto last = ranked_.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    std::nth_element(ranked_.begin(), last, ranked_.end(), [this](int64_t a, int64_t b) {
      const float deviation_a = DeviationOf(a);
      const float deviation_b = DeviationOf(b);
      return deviation_a != deviation_b ? deviation_a > deviation_b : a < b;
    });
    for (auto row = ranked_.begin(); row <= last; ++row) selected_[static_cast<size_t>(*row)] = 1;
  }

  TokenSelection SelectedRows() const {
    TokenSelection selection;
    selection.query_start_loc.reserve(batch_.query_start_loc.size());
    selection.query_start_loc.push_back(0);
    for (size_t request = 0; request + 1 < batch_.query_start_loc.size(); ++request) {
      for (int64_t row = batch_.query_start_loc[request]; row < batch_.query_start_loc[request + 1];
           ++row) {
        if (selected_[static_cast<size_t>(row)] != 0) selection.rows.push_back(row);
      }
      selection.query_start_loc.push_back(static_cast<int32_t>(selection.rows.size()));
    }
    return selection;
  }

  const SelectionBatch& batch_;
  const BlendOptions& options_;
  const double ratio_;
  const float threshold_;
  std::vector<uint8_t> is_candidate_;    // [row]
  std::vector<uint8_t> has_own_budget_;  // [row]
  std::vector<uint8_t> selected_;        // [row]
  std::vector<int64_t> ranked_;          // of one SelectTop
};

Status CheckSchedule(const BlendOptions& options, int64_t layer_count) {
  int64_t previous = -1;
  for (const int64_t layer : options.check_layers) {
    if (layer <= previous || layer >= layer_count) {
      return BlendError("check_layers: " + std::to_string(layer) +
                        "; layers ascend and are below " + std::to_string(layer_count));
    }
    previous = layer;
  }
  double most = 1;
  for (const double ratio : options.ratios) {
    if (!IsRatio(ratio) || ratio > most) {
      return BlendError("ratios: " + std::to_string(ratio) +
                        "; each is in [0, 1] and not above the one before it");
    }
    most = ratio;
  }
  for (const float threshold : options.thresholds) {
    if (!(threshold >= 0)) {
      return BlendError("thresholds: " + std::to_string(threshold) + " is not at least 0");
    }
  }
  return {};
}

}  // namespace

Status CheckBlendOptions(const BlendOptions& options, int64_t layer_count) {
  return GuardEntry([&]() -> Status {
    const size_t checks = options.check_layers.size();
    if (checks == 0 || options.ratios.size() != checks ||
        (!options.thresholds.empty() && options.thresholds.size() != checks)) {
      return BlendError("there are " + std::to_string(checks) + " check_layers, " +
                        std::to_string(options.ratios.size()) + " ratios and " +
                        std::to_string(options.thresholds.size()) +
                        " thresholds; give one ratio, and one or no threshold, for each of at "
                        "least one layer");
    }
    if (options.link_tokens < 0 || options.min_tokens < 0) {
      return BlendError("link_tokens is " + std::to_string(options.link_tokens) + ", min_tokens " +
                        std::to_string(options.min_tokens) + "; both are at least 0");
    }
    return CheckSchedule(options, layer_count);
  });
}

Result<TokenSelection> SelectTokens(const SelectionBatch& batch, const BlendOptions& options,
                                    size_t check_index) {
  return GuardEntry([&]() -> Result<TokenSelection> {
    QUIRE_RETURN_IF_ERROR(CheckBlendOptions(options, std::numeric_limits<int64_t>::max()));
    if (check_index >= options.check_layers.size()) {
      return BlendError("there is no check layer of index " + std::to_string(check_index) +
                        ", only " + std::to_string(options.check_layers.size()));
    }
    QUIRE_RETURN_IF_ERROR(CheckSelectionBatch(batch));
    return RowSelector(batch, options, check_index).Select();
  });
}

}  // namespace quire
