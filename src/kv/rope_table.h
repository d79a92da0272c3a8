// RopeTable: cos and sin of positions, for one set of frequencies. RopeRows: those of a few.
#ifndef QUIRE_KV_ROPE_TABLE_H_
#define QUIRE_KV_ROPE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "quire/rope.h"
#include "quire/seams.h"

namespace quire {

// How far tables grow.
struct RopeLimits {
  // Where only a forward's own rows are rotated: 32 MiB with 64 pairs. Rows behind it are computed
  // when they are needed, so a text without an end takes no more. 2 us each, of which a decode has
  // one.
  int64_t table_positions = 65536;
  // RopeMode::kInline, where attention reads the angles of all keys by position: 8 GiB with 64
  // pairs. A forward behind it is TooLarge.
  int64_t inline_positions = int64_t{1} << 24;
};

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
  // Row `position`, whether the table has it or not: pair_count() numbers each.
  void ComputeRow(int64_t position, float* cos, float* sin) const noexcept;

 private:
  RopeFrequencies frequencies_;
  std::vector<float> cos_;
  std::vector<float> sin_;
  int64_t position_count_ = 0;
};

// Angles of single positions: from the table, or computed where it ends before.
class RopeRows {
 public:
  // Room for so many rows. Pointers from before are void. May throw std::bad_alloc.
  void Reserve(int64_t row_count, int64_t pair_count);
  void Clear() noexcept { size_ = 0; }
  // Valid until Clear, or until the table grows.
  RotaryAngles At(const RopeTable& table, int64_t position) noexcept {
    if (position >= table.position_count()) return Compute(table, position);
    const int64_t first = position * table.pair_count();
    return {table.cos() + first, table.sin() + first};
  }

 private:
  RotaryAngles Compute(const RopeTable& table, int64_t position) noexcept;

  std::vector<float> cos_;
  std::vector<float> sin_;
  size_t size_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_ROPE_TABLE_H_
