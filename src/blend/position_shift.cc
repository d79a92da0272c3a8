// Keys move to other positions: rotations compose, so one rotation by the difference is enough.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/float_environment.h"
#include "base/guard.h"
#include "blend/blend_view.h"
#include "blend/rotation_loops.h"
#include "quire/blend.h"

namespace quire {
namespace {

constexpr int64_t kPositionEnd = int64_t{1} << 31;

Status CheckRotation(const KeyRotation& rotation, const BlendView& keys) {
  const auto pair_count = static_cast<int64_t>(rotation.inv_freq.size());
  if (!rotation.old_inv_freq.empty() && rotation.old_inv_freq.size() != rotation.inv_freq.size()) {
    return BlendError("old_inv_freq has " + std::to_string(rotation.old_inv_freq.size()) +
                      " frequencies, inv_freq " + std::to_string(pair_count));
  }
  for (const std::span<const double> frequencies : {rotation.inv_freq, rotation.old_inv_freq}) {
    for (const double frequency : frequencies) {
      if (!std::isfinite(frequency)) return BlendError("a frequency is not finite");
    }
  }
  // Neither side can wrap: dim is that of a view in memory.
  if (rotation.first_dim < 0 || rotation.first_dim > keys.dim ||
      2 * pair_count > keys.dim - rotation.first_dim) {
    return BlendError("heads of " + std::to_string(keys.dim) + " numbers have no " +
                      std::to_string(2 * pair_count) + " rotated ones from number " +
                      std::to_string(rotation.first_dim) + " on");
  }
  return {};
}

Status CheckMoves(const KeyMoves& moves, int64_t token_count) {
  const auto count = static_cast<size_t>(token_count);
  if (moves.old_positions.size() != count || moves.new_positions.size() != count ||
      (!moves.valid.empty() && moves.valid.size() != count)) {
    return BlendError("there are " + std::to_string(token_count) + " keys, but " +
                      std::to_string(moves.old_positions.size()) + " old positions, " +
                      std::to_string(moves.new_positions.size()) + " new ones and " +
                      std::to_string(moves.valid.size()) + " marks of valid rows");
  }
  for (size_t t = 0; t < count; ++t) {
    if (!moves.valid.empty() && moves.valid[t] == 0) continue;
    for (const int64_t position : {moves.old_positions[t], moves.new_positions[t]}) {
      if (position < 0 || position >= kPositionEnd) {
        return BlendError("key " + std::to_string(t) + " is at position " +
                          std::to_string(position) + ", outside of [0, 2^31)");
      }
    }
  }
  return {};
}

// cos and sin of the angles by which a row is rotated; rows that move equally far share them.
class MoveAngles {
 public:
  explicit MoveAngles(const KeyRotation& rotation)
      : rotation_(rotation), cos_(rotation.inv_freq.size()), sin_(rotation.inv_freq.size()) {
    for (size_t i = 0; i < rotation.old_inv_freq.size(); ++i) {
      same_frequencies_ &= rotation.old_inv_freq[i] == rotation.inv_freq[i];
    }
  }

  // False: the row stays as it is.
  bool Set(int64_t old_position, int64_t new_position) noexcept {
    if (same_frequencies_) {
      if (new_position == old_position) return false;
      if (new_position - old_position == difference_) return true;
      difference_ = new_position - old_position;
    }
    const auto from = static_cast<double>(old_position);
    const auto to = static_cast<double>(new_position);
    for (size_t i = 0; i < cos_.size(); ++i) {
      // The difference of two integers is exact, that of two products is not.
      const double angle = same_frequencies_
                               ? (to - from) * rotation_.inv_freq[i]
                               : to * rotation_.inv_freq[i] - from * rotation_.old_inv_freq[i];
      cos_[i] = static_cast<float>(std::cos(angle));
      sin_[i] = static_cast<float>(std::sin(angle));
    }
    return true;
  }

  const float* cos() const { return cos_.data(); }
  const float* sin() const { return sin_.data(); }

 private:
  const KeyRotation& rotation_;
  bool same_frequencies_ = true;
  int64_t difference_ = 0;  // whose angles are in the tables
  std::vector<float> cos_;
  std::vector<float> sin_;
};

void CopyNumbers(const std::byte* from, std::byte* to, int64_t bytes) {
  if (from != to && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

void MoveHead(const std::byte* from, std::byte* to, const BlendView& keys, const MoveAngles& angles,
              const KeyRotation& rotation, const RotationLoops& loops) {
  const int64_t bytes = keys.element_bytes();
  const auto pair_count = static_cast<int64_t>(rotation.inv_freq.size());
  const int64_t begin = rotation.first_dim * bytes;
  const int64_t end = begin + 2 * pair_count * bytes;
  CopyNumbers(from, to, begin);
  const bool is_split = rotation.pairing == RopePairing::kHalfSplit;
  const RotationLoop rotate = is_split ? loops.halves : loops.neighbours;
  rotate(from + begin, keys.dtype, pair_count, angles.cos(), angles.sin(), to + begin);
  CopyNumbers(from + end, to + end, keys.dim * bytes - end);
}

void MoveRows(const BlendView& from, const BlendView& to, const KeyMoves& moves,
              const KeyRotation& rotation, MoveAngles& angles) noexcept {
  const ScopedFloatEnvironment environment;
  const RotationLoops& loops = *AllRotationLoops().front();
  for (int64_t t = 0; t < from.token_count; ++t) {
    const auto row = static_cast<size_t>(t);
    if (!moves.valid.empty() && moves.valid[row] == 0) continue;
    const bool moves_away = angles.Set(moves.old_positions[row], moves.new_positions[row]);
    for (int64_t head = 0; head < from.head_count; ++head) {
      if (moves_away) {
        MoveHead(from.row(t, head), to.row(t, head), from, angles, rotation, loops);
      } else {
        CopyNumbers(from.row(t, head), to.row(t, head), from.dim * from.element_bytes());
      }
    }
  }
}

}  // namespace

Status ShiftKeys(const TensorView& keys, int token_axis, const KeyMoves& moves,
                 const KeyRotation& rotation, const TensorView& moved) {
  return GuardEntry([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const BlendView from,
                           ReadBlendView("keys", keys, token_axis, rotation.head_dim));
    QUIRE_ASSIGN_OR_RETURN(const BlendView to,
                           ReadBlendView("moved", moved, token_axis, rotation.head_dim));
    if (from.dtype != to.dtype || from.token_count != to.token_count ||
        from.head_count != to.head_count || from.dim != to.dim) {
      return BlendError("moved is " + moved.ToString() + ", but the keys are " + keys.ToString());
    }
    QUIRE_RETURN_IF_ERROR(CheckRotation(rotation, from));
    QUIRE_RETURN_IF_ERROR(CheckMoves(moves, from.token_count));
    QUIRE_RETURN_IF_ERROR(CheckRowsAreApart("moved", to));
    if (!(from == to) && ShareMemory(from, to)) {
      return BlendError("moved shares memory with the keys but is another view");
    }
    MoveAngles angles(rotation);
    MoveRows(from, to, moves, rotation, angles);
    return {};
  });
}

}  // namespace quire
