#include "engine/blending/moved_rows.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/float_environment.h"
#include "kernels/kv_quantise.h"
#include "quire/rope.h"

namespace quire {
namespace {

constexpr int64_t kPlaneAlignment = 64;

int64_t PlaneBytes(int64_t row_bytes, int64_t row_count) {
  return (row_bytes * row_count + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
}

struct RowBytes {
  int64_t k = 0, v = 0, k_scale = 0, v_scale = 0;
};

RowBytes RowBytesOf(const AttentionLayerSpec& layer) {
  const auto scale_bytes = static_cast<int64_t>(sizeof(float)) * layer.num_kv_heads;
  RowBytes bytes{.k = layer.num_kv_heads * layer.qk_head_dim * DTypeBytes(layer.dtype)};
  if (IsQuantised(layer.dtype)) bytes.k_scale = scale_bytes;
  if (layer.latent) return bytes;
  bytes.v = layer.num_kv_heads * layer.v_head_dim * DTypeBytes(layer.value_dtype());
  if (IsQuantised(layer.value_dtype())) bytes.v_scale = scale_bytes;
  return bytes;
}

int64_t LayerBytes(const AttentionLayerSpec& layer, int64_t row_count) {
  const RowBytes bytes = RowBytesOf(layer);
  return PlaneBytes(bytes.k, row_count) + PlaneBytes(bytes.v, row_count) +
         PlaneBytes(bytes.k_scale, row_count) + PlaneBytes(bytes.v_scale, row_count);
}

// How the layer's keys are rotated; no frequencies: they are not, as stored.
struct LayerRotation {
  std::vector<double> now;
  std::vector<double> then;
  KeyRotation rotation;
};

void FillRotation(const AttentionKVCacheOptions& options, const AttentionLayerSpec& layer,
                  bool long_now, bool long_then, LayerRotation* out) {
  const RopeOptions& rope = layer.rope ? *layer.rope : options.rope;
  const bool is_rotated =
      layer.latent ? rope.mode != RopeMode::kNone : options.rope.mode == RopeMode::kNormal;
  if (!is_rotated) return;
  const int64_t dim = layer.latent ? layer.qk_head_dim - layer.v_head_dim : layer.qk_head_dim;
  const auto frequencies = [&](bool long_factors) {
    const Result<RopeFrequencies> found = ComputeRopeFrequencies(rope, dim, long_factors);
    QUIRE_CHECK(found.ok()) << found.status().ToString();  // the cache was made with it
    return found->inv_freq;
  };
  out->now = frequencies(long_now);
  if (long_now != long_then) out->then = frequencies(long_then);
  out->rotation = {.inv_freq = out->now,
                   .old_inv_freq = out->then,
                   .pairing = rope.pairing,
                   .first_dim = layer.latent ? layer.v_head_dim : 0};
}

// Codes and scales of [row][head] as numbers.
void Dequantise(DType dtype, const TensorView& codes, const TensorView& scales, float* numbers) {
  const int64_t heads = codes.dim(0) * codes.dim(1);
  const int64_t dim = codes.dim(2);
  const auto* code = codes.data_as<uint8_t>();
  const auto* scale = scales.data_as<float>();
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t i = 0; i < dim; ++i) *numbers++ = CodeToF32(dtype, *code++) * scale[head];
  }
}

void Quantise(DType dtype, const float* numbers, const TensorView& codes,
              const TensorView& scales) {
  const int64_t heads = codes.dim(0) * codes.dim(1);
  const int64_t dim = codes.dim(2);
  auto* code = codes.data_as<uint8_t>();
  auto* scale = scales.data_as<float>();
  for (int64_t head = 0; head < heads; ++head, numbers += dim) {
    HeadRange range;
    for (int64_t i = 0; i < dim; ++i) range.Add(numbers[i]);
    scale[head] = range.Scale(dtype);
    for (int64_t i = 0; i < dim; ++i) {
      *code++ = QuantiseElement(dtype, numbers[i], scale[head]);
    }
  }
}

}  // namespace

TensorView FirstNumbers(const TensorView& rows, int64_t count) {
  int64_t shape[] = {rows.dim(0), rows.dim(1), count};
  int64_t strides[] = {rows.stride(0), rows.stride(1), 1};
  const DLDataType types[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};
  const int at = rows.dtype() == DType::kF32 ? 0 : rows.dtype() == DType::kF16 ? 1 : 2;
  const Result<TensorView> first = TensorView::FromDLPack({.data = rows.data(),
                                                           .device = {kDLCPU, 0},
                                                           .ndim = 3,
                                                           .dtype = types[at],
                                                           .shape = shape,
                                                           .strides = strides,
                                                           .byte_offset = 0});
  QUIRE_CHECK(first.ok()) << first.status().ToString();
  return *first;
}

int64_t MovedRowsBytes(std::span<const AttentionLayerSpec> layers, int64_t row_count) {
  int64_t bytes = 0;
  int64_t floats = 0;
  for (const AttentionLayerSpec& layer : layers) {
    bytes += LayerBytes(layer, row_count);
    floats = std::max(floats, layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim));
  }
  return bytes + floats * row_count * static_cast<int64_t>(sizeof(float));
}

MovedPiece::MovedPiece(const AttentionKVCacheOptions& options, int64_t first_position,
                       int64_t row_count, bool long_factors)
    : options_(options),
      first_position_(first_position),
      long_factors_(long_factors),
      kinds_(static_cast<size_t>(row_count), kRowInvalid),
      reached_(options.layers.size()) {
  int64_t bytes = kPlaneAlignment;
  for (const AttentionLayerSpec& layer : options.layers) bytes += LayerBytes(layer, row_count);
  memory_.reset(new std::byte[static_cast<size_t>(bytes)]);  // not cleared: rows are marked
  void* place = memory_.get();
  auto space = static_cast<size_t>(bytes);
  auto* next = static_cast<std::byte*>(std::align(kPlaneAlignment, 1, place, space));
  for (const AttentionLayerSpec& layer : options.layers) {
    const RowBytes row = RowBytesOf(layer);
    const auto plane = [&](int64_t row_bytes) {
      return Plane{std::exchange(next, next + PlaneBytes(row_bytes, row_count)), row_bytes};
    };
    planes_.push_back({.k = plane(row.k),
                       .v = plane(row.v),
                       .k_scale = plane(row.k_scale),
                       .v_scale = plane(row.v_scale)});
  }
}

LayerKV MovedPiece::RowsOf(int64_t layer, const TokenRange& rows) const {
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  const LayerPlanes& planes = planes_[static_cast<size_t>(layer)];
  const int64_t n = rows.count();
  const auto at = [&](const Plane& plane) { return plane.data + rows.begin * plane.row_bytes; };
  LayerKV kv{.k = TensorView(at(planes.k), spec.dtype, {n, spec.num_kv_heads, spec.qk_head_dim})};
  if (IsQuantised(spec.dtype)) {
    kv.k_scale = TensorView(at(planes.k_scale), DType::kF32, {n, spec.num_kv_heads});
  }
  if (spec.latent) return kv;
  kv.v = TensorView(at(planes.v), spec.value_dtype(), {n, spec.num_kv_heads, spec.v_head_dim});
  if (IsQuantised(spec.value_dtype())) {
    kv.v_scale = TensorView(at(planes.v_scale), DType::kF32, {n, spec.num_kv_heads});
  }
  return kv;
}

Status MovedPiece::Take(AttentionKVCache& cache, const Part& part) {
  QUIRE_CHECK(part.rows.begin >= 0 && part.rows.end <= row_count() && part.rows.count() > 0);
  QUIRE_CHECK(parts_.empty() || parts_.back().end <= part.rows.begin);
  parts_.reserve(parts_.size() + 1);
  const auto layer_count = static_cast<int64_t>(options_.layers.size());
  for (int64_t layer = 0; layer < layer_count; ++layer) {
    const Status status = cache.ExportKV(part.seq_id, layer, part.from, RowsOf(layer, part.rows));
    if (status.code() == StatusCode::kBadArgument) {
      return Status(StatusCode::kNotFound,
                    "blend: layer " + std::to_string(layer) +
                        " does not hold the document any more: " + std::string(status.message()));
    }
    QUIRE_RETURN_IF_ERROR(status);
  }
  for (int64_t layer = 0; layer < layer_count && IsMoved(part); ++layer) {
    QUIRE_RETURN_IF_ERROR(MoveKeys(layer, part));
  }
  Count(part);
  return {};
}

// REQUIRES: parts_ has room.
void MovedPiece::Count(const Part& part) noexcept {
  std::fill(kinds_.begin() + part.rows.begin, kinds_.begin() + part.rows.end, kRowMoved);
  parts_.push_back(part.rows);
  moved_count_ += part.rows.count();
  for (const LayerPlanes& planes : planes_) {
    moved_bytes_ += part.rows.count() * (planes.k.row_bytes + planes.v.row_bytes +
                                         planes.k_scale.row_bytes + planes.v_scale.row_bytes);
  }
}

void MovedPiece::Expect(const Coming& coming) {
  const Part& part = coming.part;
  QUIRE_CHECK(part.rows.begin >= 0 && part.rows.end <= row_count() && part.rows.count() > 0);
  QUIRE_CHECK(parts_.empty() || parts_.back().end <= part.rows.begin);
  QUIRE_CHECK(part.from >= coming.source_begin) << "rows that the source does not give";
  parts_.reserve(parts_.size() + 1);
  coming_.push_back(coming);
  Count(part);
}

Status MovedPiece::Reach(int64_t layer) {
  if (reached_[static_cast<size_t>(layer)]) return {};
  for (const Coming& coming : coming_) {
    QUIRE_ASSIGN_OR_RETURN(const std::span<const LayerKV> blocks, coming.source->Load(layer));
    const int64_t begin_ns = coming.clock->SteadyNs();
    QUIRE_RETURN_IF_ERROR(Copy(layer, coming, blocks));
    if (IsMoved(coming.part)) QUIRE_RETURN_IF_ERROR(MoveKeys(layer, coming.part));
    reach_ns_ += coming.clock->SteadyNs() - begin_ns;
  }
  reached_[static_cast<size_t>(layer)] = true;
  return {};
}

Status MovedPiece::Copy(int64_t layer, const Coming& coming, std::span<const LayerKV> blocks) {
  const Part& part = coming.part;
  const LayerPlanes& planes = planes_[static_cast<size_t>(layer)];
  const int64_t end = part.from + part.rows.count();
  int64_t position = coming.source_begin;
  int64_t copied = 0;
  for (const LayerKV& block : blocks) {
    const int64_t begin = std::exchange(position, position + block.k.dim(0));
    const int64_t first = std::max(begin, part.from);
    const int64_t count = std::min(position, end) - first;
    if (count <= 0) continue;
    const int64_t row = part.rows.begin + first - part.from;
    const auto copy = [&](const Plane& plane, const TensorView& from) {
      if (plane.row_bytes == 0) return;
      const auto* bytes = static_cast<const std::byte*>(from.data());
      std::memcpy(plane.data + row * plane.row_bytes, bytes + (first - begin) * plane.row_bytes,
                  static_cast<size_t>(count * plane.row_bytes));
    };
    copy(planes.k, block.k);
    copy(planes.v, block.v);
    copy(planes.k_scale, block.k_scale);
    copy(planes.v_scale, block.v_scale);
    copied += count;
  }
  if (copied == part.rows.count()) return {};
  return Status(StatusCode::kIncompatible, "blend: layer " + std::to_string(layer) + " has " +
                                               std::to_string(copied) + " of a document's " +
                                               std::to_string(part.rows.count()) + " tokens");
}

Status MovedPiece::MoveKeys(int64_t layer, const Part& part) {
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  LayerRotation rotation;
  FillRotation(options_, spec, long_factors_, part.long_factors, &rotation);
  if (rotation.now.empty()) return {};
  const auto n = static_cast<size_t>(part.rows.count());
  std::vector<int64_t> from(n);
  std::vector<int64_t> to(n);
  std::iota(from.begin(), from.end(), part.from);
  std::iota(to.begin(), to.end(), first_position_ + part.rows.begin);
  const KeyMoves moves{.old_positions = from, .new_positions = to};
  if (IsQuantised(spec.dtype)) return MoveQuantised(layer, part, moves, rotation.rotation);
  const TensorView keys = RowsOf(layer, part.rows).k;
  return ShiftKeys(keys, 0, moves, rotation.rotation, keys);
}

// As numbers in float32, rounded once: to codes and a scale for each head. Values stay as they are.
Status MovedPiece::MoveQuantised(int64_t layer, const Part& part, const KeyMoves& moves,
                                 const KeyRotation& rotation) {
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  const LayerKV kv = RowsOf(layer, part.rows);
  k_floats_.resize(static_cast<size_t>(kv.k.element_count()));
  const ScopedFloatEnvironment environment;
  Dequantise(spec.dtype, kv.k, kv.k_scale, k_floats_.data());
  const TensorView numbers(k_floats_.data(), DType::kF32, {kv.k.dim(0), kv.k.dim(1), kv.k.dim(2)});
  QUIRE_RETURN_IF_ERROR(ShiftKeys(numbers, 0, moves, rotation, numbers));
  Quantise(spec.dtype, k_floats_.data(), kv.k, kv.k_scale);
  return {};
}

Result<std::span<const MovedRows>> MovedPiece::Load(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(Reach(layer));
  moved_.clear();
  for (const TokenRange& rows : parts_) moved_.push_back({rows, RowsOf(layer, rows)});
  return std::span<const MovedRows>(moved_);
}

KVRows MovedPiece::CachedRows(int64_t layer) {
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  const LayerKV all = RowsOf(layer, {0, row_count()});
  KVRows cached{.k = all.k, .v = spec.latent ? FirstNumbers(all.k, spec.v_head_dim) : all.v};
  if (IsQuantised(spec.dtype)) {
    cached.k = Numbers(layer, &LayerKV::k, &LayerKV::k_scale, &k_floats_);
    if (spec.latent) cached.v = FirstNumbers(cached.k, spec.v_head_dim);
  }
  if (!spec.latent && IsQuantised(spec.value_dtype())) {
    cached.v = Numbers(layer, &LayerKV::v, &LayerKV::v_scale, &v_floats_);
  }
  return cached;
}

// Codes of all rows as numbers, in `floats`.
TensorView MovedPiece::Numbers(int64_t layer, TensorView LayerKV::*codes,
                               TensorView LayerKV::*scales, std::vector<float>* floats) const {
  const TensorView all = RowsOf(layer, {0, row_count()}).*codes;
  const int64_t row = all.dim(1) * all.dim(2);
  floats->resize(static_cast<size_t>(row_count() * row));
  const ScopedFloatEnvironment environment;
  for (const TokenRange& rows : parts_) {
    const LayerKV part = RowsOf(layer, rows);
    Dequantise((part.*codes).dtype(), part.*codes, part.*scales, floats->data() + rows.begin * row);
  }
  return TensorView(floats->data(), DType::kF32, {row_count(), all.dim(1), all.dim(2)});
}

}  // namespace quire
