#include "blend/testing/blend_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace quire {
namespace {

void RotateBy(std::vector<double>& head, double position, std::span<const double> inv_freq,
              const KeyRotation& rotation) {
  const size_t pair_count = inv_freq.size();
  const auto first_dim = static_cast<size_t>(rotation.first_dim);
  for (size_t i = 0; i < pair_count; ++i) {
    const bool halves = rotation.pairing == RopePairing::kHalfSplit;
    double& x = head[first_dim + (halves ? i : 2 * i)];
    double& y = head[first_dim + (halves ? i + pair_count : 2 * i + 1)];
    const double angle = position * inv_freq[i];
    const double x0 = x;
    const double y0 = y;
    x = x0 * std::cos(angle) - y0 * std::sin(angle);
    y = y0 * std::cos(angle) + x0 * std::sin(angle);
  }
}

// The rows of a request or document that have the budget, the most deviating ones first.
std::vector<int64_t> RankedRows(const SelectionBatch& batch, const std::set<int64_t>& rows) {
  std::vector<int64_t> ranked(rows.begin(), rows.end());
  const auto deviation_of = [&](int64_t row) {
    const float deviation = batch.deviations[static_cast<size_t>(row)];
    return std::isnan(deviation) ? std::numeric_limits<float>::infinity() : deviation;
  };
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](int64_t a, int64_t b) { return deviation_of(a) > deviation_of(b); });
  return ranked;
}

void AddTop(const SelectionBatch& batch, const std::set<int64_t>& moved,
            const std::set<int64_t>& links, const std::set<int64_t>& candidates, double ratio,
            float threshold, std::set<int64_t>* selected) {
  auto budget = static_cast<int64_t>(static_cast<double>(moved.size()) * ratio + 1e-6);
  for (const int64_t row : RankedRows(batch, moved)) {
    const bool below = batch.deviations[static_cast<size_t>(row)] < threshold;
    if (budget == 0 || below || links.contains(row) || !candidates.contains(row)) continue;
    selected->insert(row);
    --budget;
  }
}

std::set<int64_t> Candidates(const SelectionBatch& batch) {
  std::set<int64_t> rows;
  for (size_t row = 0; row < batch.kinds.size(); ++row) rows.insert(static_cast<int64_t>(row));
  if (batch.candidates) rows = {batch.candidates->begin(), batch.candidates->end()};
  return rows;
}

}  // namespace

std::vector<double> RotatedHead(std::span<const double> head, int64_t old_position,
                                int64_t new_position, const KeyRotation& rotation) {
  std::vector<double> rotated(head.begin(), head.end());
  const auto old_frequencies =
      rotation.old_inv_freq.empty() ? rotation.inv_freq : rotation.old_inv_freq;
  RotateBy(rotated, -static_cast<double>(old_position), old_frequencies, rotation);
  RotateBy(rotated, static_cast<double>(new_position), rotation.inv_freq, rotation);
  return rotated;
}

double RowDeviationReference(DeviationMetric metric, int64_t head_count,
                             std::span<const double> fresh, std::span<const double> cached) {
  const size_t dim = fresh.size() / static_cast<size_t>(head_count);
  double sum = 0;
  for (size_t head = 0; head < static_cast<size_t>(head_count); ++head) {
    double squares = 0;
    double product = 0;
    double fresh_squares = 0;
    double cached_squares = 0;
    for (size_t i = head * dim; i < (head + 1) * dim; ++i) {
      squares += (fresh[i] - cached[i]) * (fresh[i] - cached[i]);
      product += fresh[i] * cached[i];
      fresh_squares += fresh[i] * fresh[i];
      cached_squares += cached[i] * cached[i];
    }
    if (metric != DeviationMetric::kCosine) {
      sum += squares / static_cast<double>(fresh.size());
    } else if (fresh_squares == 0 || cached_squares == 0) {
      sum += fresh_squares == cached_squares ? 0 : 1.0 / static_cast<double>(head_count);
    } else {
      sum += (1 - product / std::sqrt(fresh_squares * cached_squares)) /
             static_cast<double>(head_count);
    }
  }
  return sum;
}

std::vector<int64_t> SelectedRowsReference(const SelectionBatch& batch, const BlendOptions& options,
                                           size_t check_index) {
  const std::set<int64_t> candidates = Candidates(batch);
  const float threshold = options.thresholds.empty() ? 0.0F : options.thresholds[check_index];
  std::set<int64_t> selected;
  for (size_t request = 0; request + 1 < batch.query_start_loc.size(); ++request) {
    const int64_t begin = batch.query_start_loc[request];
    const int64_t end = batch.query_start_loc[request + 1];
    std::set<int64_t> moved;  // without a budget of their own
    std::set<int64_t> links;
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t kind = batch.kinds[static_cast<size_t>(row)];
      const bool is_short = end - begin < options.min_tokens;
      if (kind == kRowInvalid || (kind == kRowMoved && is_short)) selected.insert(row);
      if (kind == kRowMoved) moved.insert(row);
    }
    if (options.force_last && begin < end) selected.insert(end - 1);
    bool is_first = true;
    for (const BlendDocument& document : batch.documents) {
      const int64_t document_end = document.first_row + document.row_count;
      if (document.row_count == 0 || document.first_row < begin || document_end > end) continue;
      std::set<int64_t> own;
      for (int64_t row = document.first_row; row < document_end; ++row) {
        const bool exact = batch.kinds[static_cast<size_t>(row)] == kRowExact;
        if (!is_first && !exact && row < document.first_row + options.link_tokens) {
          links.insert(row);
        }
        if (document.ratio && moved.erase(row) > 0) own.insert(row);
      }
      if (document.ratio) {
        AddTop(batch, own, links, candidates, *document.ratio, threshold, &selected);
      }
      is_first = false;
    }
    selected.insert(links.begin(), links.end());
    AddTop(batch, moved, links, candidates, options.ratios[check_index], threshold, &selected);
  }
  std::vector<int64_t> rows;
  std::set_intersection(selected.begin(), selected.end(), candidates.begin(), candidates.end(),
                        std::back_inserter(rows));
  return rows;
}

}  // namespace quire
