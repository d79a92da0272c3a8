// Included by rotation_loops.cc once for each instruction set, inside of its namespace and target
// region.

#include "blend/half_numbers-inl.h"

template <DType kType>
struct Stored {
  using Number = uint16_t;
  static float Widen(Number number) { return WidenOne<kType>(number); }
  static Number Narrow(float number) { return NarrowOne<kType>(number); }
};
template <>
struct Stored<DType::kF32> {
  using Number = float;
  static float Widen(Number number) { return number; }
  static Number Narrow(float number) { return number; }
};

// Results go to a block that nothing else points to: else the compiler makes no vectors of a loop
// over keys that turn in place. kCount is `count`, or 0: any one up to kPairBlock.
template <DType kType, int64_t kCount>
void TurnHalves(const std::byte* from_x, const std::byte* from_y, int64_t count, const float* cos,
                const float* sin, std::byte* to_x, std::byte* to_y) {
  using Number = typename Stored<kType>::Number;
  if constexpr (kCount > 0) count = kCount;
  const auto* const old_x = reinterpret_cast<const Number*>(from_x);
  const auto* const old_y = reinterpret_cast<const Number*>(from_y);
  Number x[kPairBlock];
  Number y[kPairBlock];
  for (int64_t i = 0; i < count; ++i) {
    const float x0 = Stored<kType>::Widen(old_x[i]);
    const float y0 = Stored<kType>::Widen(old_y[i]);
    x[i] = Stored<kType>::Narrow(x0 * cos[i] - y0 * sin[i]);
    y[i] = Stored<kType>::Narrow(y0 * cos[i] + x0 * sin[i]);
  }
  const size_t bytes = static_cast<size_t>(count) * sizeof(Number);
  std::memcpy(to_x, x, bytes);
  std::memcpy(to_y, y, bytes);
}

template <DType kType, int64_t kCount>
void TurnNeighbours(const std::byte* from, int64_t count, const float* cos, const float* sin,
                    std::byte* to) {
  using Number = typename Stored<kType>::Number;
  if constexpr (kCount > 0) count = kCount;
  const auto* const old = reinterpret_cast<const Number*>(from);
  Number both[2 * kPairBlock];
  for (int64_t i = 0; i < count; ++i) {
    const float x0 = Stored<kType>::Widen(old[2 * i]);
    const float y0 = Stored<kType>::Widen(old[2 * i + 1]);
    both[2 * i] = Stored<kType>::Narrow(x0 * cos[i] - y0 * sin[i]);
    both[2 * i + 1] = Stored<kType>::Narrow(y0 * cos[i] + x0 * sin[i]);
  }
  const size_t bytes = 2 * static_cast<size_t>(count) * sizeof(Number);
  std::memcpy(to, both, bytes);
}

template <DType kType>
void TurnAllHalves(const std::byte* from, int64_t pair_count, const float* cos, const float* sin,
                   std::byte* to) {
  constexpr int64_t kBytes = sizeof(typename Stored<kType>::Number);
  const int64_t half = pair_count * kBytes;
  for (int64_t i = 0; i < pair_count; i += kPairBlock) {
    const int64_t count = std::min(kPairBlock, pair_count - i);
    const auto turn = count == kPairBlock ? TurnHalves<kType, kPairBlock> : TurnHalves<kType, 0>;
    const int64_t at = i * kBytes;
    turn(from + at, from + half + at, count, cos + i, sin + i, to + at, to + half + at);
  }
}

template <DType kType>
void TurnAllNeighbours(const std::byte* from, int64_t pair_count, const float* cos,
                       const float* sin, std::byte* to) {
  constexpr int64_t kBytes = 2 * sizeof(typename Stored<kType>::Number);
  for (int64_t i = 0; i < pair_count; i += kPairBlock) {
    const int64_t count = std::min(kPairBlock, pair_count - i);
    const auto turn =
        count == kPairBlock ? TurnNeighbours<kType, kPairBlock> : TurnNeighbours<kType, 0>;
    turn(from + i * kBytes, count, cos + i, sin + i, to + i * kBytes);
  }
}

void Halves(const std::byte* from, DType dtype, int64_t pair_count, const float* cos,
            const float* sin, std::byte* to) {
  if (dtype == DType::kBF16) return TurnAllHalves<DType::kBF16>(from, pair_count, cos, sin, to);
  if (dtype == DType::kF16) return TurnAllHalves<DType::kF16>(from, pair_count, cos, sin, to);
  TurnAllHalves<DType::kF32>(from, pair_count, cos, sin, to);
}

void Neighbours(const std::byte* from, DType dtype, int64_t pair_count, const float* cos,
                const float* sin, std::byte* to) {
  if (dtype == DType::kBF16) return TurnAllNeighbours<DType::kBF16>(from, pair_count, cos, sin, to);
  if (dtype == DType::kF16) return TurnAllNeighbours<DType::kF16>(from, pair_count, cos, sin, to);
  TurnAllNeighbours<DType::kF32>(from, pair_count, cos, sin, to);
}

constexpr RotationLoops kLoops = {
    .name = QUIRE_LOOPS_NAME, .halves = Halves, .neighbours = Neighbours};
