// What quire/blend.h says, as naive loops in double over plain vectors: the oracle of its tests.
#ifndef QUIRE_BLEND_TESTING_BLEND_REFERENCE_H_
#define QUIRE_BLEND_TESTING_BLEND_REFERENCE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/blend.h"

namespace quire {

// One head, rotated from its old position to its new one: back to position 0, then on.
std::vector<double> RotatedHead(std::span<const double> head, int64_t old_position,
                                int64_t new_position, const KeyRotation& rotation);

// The deviation of one row, [head][dim] each; with kKVL2, k and v one after the other.
double RowDeviationReference(DeviationMetric metric, int64_t head_count,
                             std::span<const double> fresh, std::span<const double> cached);

// The rows of SelectTokens, by sorting all rows of each request.
std::vector<int64_t> SelectedRowsReference(const SelectionBatch& batch, const BlendOptions& options,
                                           size_t check_index);

}  // namespace quire

#endif  // QUIRE_BLEND_TESTING_BLEND_REFERENCE_H_
