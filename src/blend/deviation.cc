// How far cached KV is from fresh KV, a number for each token.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/float_environment.h"
#include "base/guard.h"
#include "blend/blend_view.h"
#include "blend/half_blocks.h"
#include "quire/blend.h"

namespace quire {
namespace {

constexpr int64_t kSumLanes = 16;

// Sums in lanes: one chain of additions for each lane, which are independent of each other.
struct LaneSums {
  float lanes[kSumLanes] = {};

  // Adds term(i) for i < count. REQUIRES: count is a multiple of kSumLanes, but in the last call.
  template <typename Term>
  void Add(int64_t count, Term term) {
    int64_t i = 0;
    for (; i + kSumLanes <= count; i += kSumLanes) {
      for (int64_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += term(i + lane);
    }
    for (; i < count; ++i) lanes[i % kSumLanes] += term(i);
  }
  float Total() const {
    float sums[kSumLanes];
    std::copy_n(lanes, kSumLanes, sums);
    for (int64_t width = kSumLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    }
    return sums[0];
  }
};

// The numbers of one head, fresh and cached, in blocks as float32: visit(fresh, cached, count).
template <typename Visit>
void VisitHead(const BlendView& fresh, int64_t fresh_row, const BlendView& cached,
               int64_t cached_row, int64_t head, Visit visit) {
  const std::byte* const a = fresh.row(fresh_row, head);
  const std::byte* const b = cached.row(cached_row, head);
  for (int64_t i = 0; i < fresh.dim; i += kBlendBlock) {
    const int64_t count = std::min(kBlendBlock, fresh.dim - i);
    float fresh_block[kBlendBlock];
    float cached_block[kBlendBlock];
    WidenBlock(a + i * fresh.element_bytes(), fresh.dtype, count, fresh_block);
    WidenBlock(b + i * cached.element_bytes(), cached.dtype, count, cached_block);
    visit(fresh_block, cached_block, count);
  }
}

double SquaresOfRow(const BlendView& fresh, int64_t fresh_row, const BlendView& cached,
                    int64_t cached_row) {
  double sum = 0;
  for (int64_t head = 0; head < fresh.head_count; ++head) {
    LaneSums squares;
    VisitHead(fresh, fresh_row, cached, cached_row, head,
              [&](const float* a, const float* b, int64_t count) {
                squares.Add(count, [=](int64_t i) {
                  const float difference = a[i] - b[i];
                  return difference * difference;
                });
              });
    sum += static_cast<double>(squares.Total());
  }
  return sum;
}

// 1 - cos of one head. Two zeros have the same direction.
double AngleOfHead(const BlendView& fresh, int64_t fresh_row, const BlendView& cached,
                   int64_t cached_row, int64_t head) {
  LaneSums product;
  LaneSums fresh_squares;
  LaneSums cached_squares;
  VisitHead(fresh, fresh_row, cached, cached_row, head,
            [&](const float* a, const float* b, int64_t count) {
              product.Add(count, [=](int64_t i) { return a[i] * b[i]; });
              fresh_squares.Add(count, [=](int64_t i) { return a[i] * a[i]; });
              cached_squares.Add(count, [=](int64_t i) { return b[i] * b[i]; });
            });
  const auto a = static_cast<double>(fresh_squares.Total());
  const auto b = static_cast<double>(cached_squares.Total());
  if (a == 0 && b == 0) return 0;
  if (a == 0 || b == 0) return 1;
  return 1 - static_cast<double>(product.Total()) / (std::sqrt(a) * std::sqrt(b));
}

double AngleOfRow(const BlendView& fresh, int64_t fresh_row, const BlendView& cached,
                  int64_t cached_row) {
  double sum = 0;
  for (int64_t head = 0; head < fresh.head_count; ++head) {
    sum += AngleOfHead(fresh, fresh_row, cached, cached_row, head);
  }
  return sum / static_cast<double>(fresh.head_count);
}

// The views that a metric reads.
struct ComparedViews {
  bool keys = false;
  bool values = false;
  BlendView fresh_k, cached_k, fresh_v, cached_v;
};

Status ReadBlendPair(std::string_view name, const TensorView& fresh, const TensorView& cached,
                     int token_axis, int64_t fresh_count, int64_t cached_count,
                     BlendView* fresh_out, BlendView* cached_out) {
  QUIRE_ASSIGN_OR_RETURN(*fresh_out,
                         ReadBlendView("fresh " + std::string(name), fresh, token_axis, 0));
  QUIRE_ASSIGN_OR_RETURN(*cached_out,
                         ReadBlendView("cached " + std::string(name), cached, token_axis, 0));
  if (fresh_out->token_count != fresh_count || cached_out->token_count != cached_count ||
      fresh_out->head_count != cached_out->head_count || fresh_out->dim != cached_out->dim) {
    return BlendError("fresh " + std::string(name) + " is " + fresh.ToString() + ", cached " +
                      cached.ToString() + "; there are " + std::to_string(fresh_count) +
                      " fresh and " + std::to_string(cached_count) + " cached tokens");
  }
  if (fresh_out->head_count * fresh_out->dim == 0 && fresh_count > 0) {
    return BlendError("fresh " + std::string(name) + " is " + fresh.ToString() +
                      ": its tokens have no numbers");
  }
  return {};
}

// SplitMix64 of the row, 24 bits of it.
float RandomOfRow(size_t row) {
  uint64_t bits = (static_cast<uint64_t>(row) + 1) * 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
  return static_cast<float>((bits ^ (bits >> 31)) >> 40) * 0x1p-24F;
}

double RowDeviation(const ComparedViews& views, DeviationMetric metric, int64_t fresh_row,
                    int64_t cached_row) {
  if (metric == DeviationMetric::kCosine) {
    return AngleOfRow(views.fresh_v, fresh_row, views.cached_v, cached_row);
  }
  double sum = 0;
  int64_t count = 0;
  if (views.keys) {
    sum += SquaresOfRow(views.fresh_k, fresh_row, views.cached_k, cached_row);
    count += views.fresh_k.head_count * views.fresh_k.dim;
  }
  if (views.values) {
    sum += SquaresOfRow(views.fresh_v, fresh_row, views.cached_v, cached_row);
    count += views.fresh_v.head_count * views.fresh_v.dim;
  }
  return sum / static_cast<double>(count);
}

void FillDeviations(const ComparedViews& views, DeviationMetric metric,
                    std::optional<std::span<const int64_t>> rows, std::span<const uint8_t> kinds,
                    std::span<float> deviations) noexcept {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const ScopedFloatEnvironment environment;
  std::fill(deviations.begin(), deviations.end(), -kInfinity);
  const size_t count = rows ? rows->size() : kinds.size();
  for (size_t i = 0; i < count; ++i) {
    const size_t row = rows ? static_cast<size_t>((*rows)[i]) : i;
    if (kinds[row] != kRowMoved) continue;
    if (metric == DeviationMetric::kRandom) {
      deviations[row] = RandomOfRow(row);
      continue;
    }
    const auto deviation = static_cast<float>(
        RowDeviation(views, metric, static_cast<int64_t>(i), static_cast<int64_t>(row)));
    deviations[row] = std::isnan(deviation) ? kInfinity : deviation;
  }
}

}  // namespace

Result<DeviationMetric> ParseDeviationMetric(std::string_view name) {
  return GuardEntry([&]() -> Result<DeviationMetric> {
    if (name == "v_l2") return DeviationMetric::kVL2;
    if (name == "k_l2") return DeviationMetric::kKL2;
    if (name == "kv_l2") return DeviationMetric::kKVL2;
    if (name == "cosine") return DeviationMetric::kCosine;
    if (name == "random") return DeviationMetric::kRandom;
    return BlendError("metric: there is no \"" + std::string(name) +
                      "\"; give v_l2, k_l2, kv_l2, cosine or random");
  });
}

Status ComputeDeviations(DeviationMetric metric, int token_axis, const KVRows& fresh,
                         const KVRows& cached, std::optional<std::span<const int64_t>> rows,
                         std::span<const uint8_t> kinds, std::span<float> deviations) {
  return GuardEntry([&]() -> Status {
    const auto row_count = static_cast<int64_t>(kinds.size());
    if (deviations.size() != kinds.size()) {
      return BlendError("there are " + std::to_string(row_count) + " rows, but " +
                        std::to_string(deviations.size()) + " deviations");
    }
    if (rows) QUIRE_RETURN_IF_ERROR(CheckRows(*rows, row_count));
    const int64_t fresh_count = rows ? static_cast<int64_t>(rows->size()) : row_count;
    ComparedViews views;
    views.keys = metric == DeviationMetric::kKL2 || metric == DeviationMetric::kKVL2;
    views.values = metric != DeviationMetric::kKL2 && metric != DeviationMetric::kRandom;
    if (views.keys) {
      QUIRE_RETURN_IF_ERROR(ReadBlendPair("k", fresh.k, cached.k, token_axis, fresh_count,
                                          row_count, &views.fresh_k, &views.cached_k));
    }
    if (views.values) {
      QUIRE_RETURN_IF_ERROR(ReadBlendPair("v", fresh.v, cached.v, token_axis, fresh_count,
                                          row_count, &views.fresh_v, &views.cached_v));
    }
    FillDeviations(views, metric, rows, kinds, deviations);
    return {};
  });
}

}  // namespace quire
