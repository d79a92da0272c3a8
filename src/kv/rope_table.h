// RopeTable: cos and sin of every position, for one set of frequencies.
#ifndef QUIRE_KV_ROPE_TABLE_H_
#define QUIRE_KV_ROPE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quire/rope.h"
#include "quire/seams.h"

namespace quire {

// Row p is a function of p alone: the angle is computed in double from the integer position, its
// cos and sin in double times the amplitude, rounded once to float32. So it does not matter in
// which steps the table grew. A table, because attention in RopeMode::kInline reads the angles of
// all keys, and because sines of a batch of decodes would take longer than the rest of its plan.
class RopeTable {
 public:
  explicit RopeTable(RopeFrequencies frequencies) : frequencies_(std::move(frequencies)) {}

  // Makes [0, position_count) readable. Moves the table: pointers from before are void. May throw
  // std::bad_alloc.
  void Grow(int64_t position_count, ParallelRunner& runner);

  const RopeFrequencies& frequencies() const { return frequencies_; }
  int64_t pair_count() const { return static_cast<int64_t>(frequencies_.inv_freq.size()); }
  int64_t position_count() const { return position_count_; }
  // [position_count()][pair_count()]
  const float* cos() const { return cos_.data(); }
  const float* sin() const { return sin_.data(); }

 private:
  void FillRow(int64_t position) noexcept;

  RopeFrequencies frequencies_;
  std::vector<float> cos_;
  std::vector<float> sin_;
  int64_t position_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_ROPE_TABLE_H_
