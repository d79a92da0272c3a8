#include "model/layers/row_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/round_up.h"
#include "kernels/linear_layout.h"
#include "model/weights/cache_lines.h"

namespace quire {
namespace {

// Up to this number of rows, heads are shared out to the workers; with more, the rows of one head
// are enough for all of them. A worker then needs scratch for few rows only.
constexpr int64_t kRowsOfSharedHeads = 16;

// Row `row` of a packed matrix, whose elements lie kOutputBlock columns apart.
template <typename Element>
void ReadPackedRow(const PackedLinear& packed, int64_t row, float* values) {
  constexpr int64_t kPiece = 256;
  Element piece[kPiece];
  const auto* const block = static_cast<const Element*>(packed.data) +
                            row / kOutputBlock * PackedBlockElements(packed.dtype, packed.k);
  for (int64_t begin = 0; begin < packed.k; begin += kPiece) {
    const int64_t count = std::min(kPiece, packed.k - begin);
    for (int64_t i = 0; i < count; ++i) {
      piece[i] = block[PackedOffset(packed.dtype, row, begin + i)];
    }
    ConvertElements(piece, packed.dtype, values + begin, DType::kF32, count);
  }
}

void ReadQuantisedRow(std::span<const QuantisedLinear> parts, int64_t row, float* values) {
  const QuantisedLinear* part = parts.data();
  for (; row >= part->n; ++part) row -= part->n;
  const auto* const packed = static_cast<const std::byte*>(part->data);
  if (part->input_order == nullptr) {
    return ReadPackedQuantisedRow(part->format, packed, part->k, row, values);
  }
  std::vector<float> ordered(static_cast<size_t>(part->k));
  ReadPackedQuantisedRow(part->format, packed, part->k, row, ordered.data());
  for (int64_t i = 0; i < part->k; ++i) {
    values[part->input_order[i]] = ordered[static_cast<size_t>(i)];
  }
}

}  // namespace

float Sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

void CopyFloats(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void RowOps::Norm(const std::vector<float>& weight, float offset, float eps, const float* x,
                  int64_t row_count, float* y) const {
  backend_.rms_norm(x, weight.data(), offset, eps, row_count, static_cast<int64_t>(weight.size()),
                    y, runner_);
}

void RowOps::NormPieces(const std::vector<float>& weight, float offset, float eps,
                        int64_t row_count, int64_t row_stride, int64_t piece_count,
                        int64_t piece_size, float* x) const {
  const bool is_shared = static_cast<int64_t>(weight.size()) == piece_size;
  runner_.ParallelFor(row_count, [&](int64_t row, int) {
    SerialRunner serial;
    float* const pieces = x + row * row_stride;
    if (is_shared) {
      backend_.rms_norm(pieces, weight.data(), offset, eps, piece_count, piece_size, pieces,
                        serial);
      return;
    }
    for (int64_t piece = 0; piece < piece_count; ++piece) {
      float* const values = pieces + piece * piece_size;
      backend_.rms_norm(values, weight.data() + piece * piece_size, offset, eps, 1, piece_size,
                        values, serial);
    }
  });
}

void RowOps::Multiply(const LinearWeights& weights, const float* x, int64_t row_count, float* y,
                      bool accumulate, void* scratch) const {
  Multiply(weights, {.x = x,
                     .row_count = row_count,
                     .y = y,
                     .y_stride = weights.packed().n,
                     .accumulate = accumulate,
                     .scratch = scratch});
}

void RowOps::Multiply(const LinearWeights& weights, Product product) const {
  for (const LinearWeights& piece : weights.pieces()) {
    Multiply(piece, product);
    product.y += piece.packed().n;
  }
  if (!weights.pieces().empty()) return;
  if (!weights.quantised().empty()) {
    return activations_ == DType::kI8 ? MultiplyQuantised(weights, product)
                                      : MultiplyWidened(weights, product);
  }
  MultiplyPacked(weights.packed(), dtype_, product);
}

void RowOps::MultiplyPacked(const PackedLinear& w, DType rounding, const Product& product) const {
  const LinearArgs args{.w = w,
                        .row_count = product.row_count,
                        .x = product.x,
                        .x_stride = w.k,
                        .x_rounding = rounding,
                        .y = product.y,
                        .y_stride = product.y_stride,
                        .accumulate = product.accumulate,
                        .scratch = product.scratch};
  backend_.linear(args, runner_);
}

// Parts whose inputs stand in one order share the row's codes.
void RowOps::MultiplyQuantised(const LinearWeights& weights, Product product) const {
  const std::span<const QuantisedLinear> parts = weights.quantised();
  for (size_t begin = 0; begin < parts.size();) {
    size_t end = begin;
    int64_t outputs = 0;
    while (end < parts.size() && parts[end].input_order == parts[begin].input_order) {
      outputs += parts[end++].n;
    }
    const QuantisedLinearArgs args{.parts = parts.subspan(begin, end - begin),
                                   .row_count = product.row_count,
                                   .x = product.x,
                                   .x_stride = weights.packed().k,
                                   .y = product.y,
                                   .y_stride = product.y_stride,
                                   .accumulate = product.accumulate,
                                   .scratch = product.scratch};
    backend_.quantised_linear(args, runner_);
    product.y += outputs;
    begin = end;
  }
}

void RowOps::MultiplyWidened(const LinearWeights& weights, Product product) const {
  for (const QuantisedLinear& part : weights.quantised()) {
    const PackedLinear w{.dtype = activations_,
                         .n = part.n,
                         .k = part.k,
                         .data = part.data,
                         .bias = part.bias,
                         .blocks = part.format,
                         .input_order = part.input_order};
    MultiplyPacked(w, activations_, product);
    product.y += part.n;
  }
}

size_t RowOps::ScratchBytes(const LinearWeights& weights, int64_t row_count) const {
  size_t of_pieces = 0;
  for (const LinearWeights& piece : weights.pieces()) {
    of_pieces = std::max(of_pieces, ScratchBytes(piece, row_count));
  }
  if (!weights.pieces().empty()) return of_pieces;
  const PackedLinear& packed = weights.packed();
  if (!weights.quantised().empty() && activations_ == DType::kI8) {
    return backend_.quantised_scratch_bytes(row_count, packed.k);
  }
  return backend_.linear_scratch_bytes(row_count, packed.n, packed.k, runner_.worker_count());
}

void RowOps::GatherRows(const LinearWeights& weights, std::span<const int32_t> ids,
                        float* rows) const {
  const PackedLinear& packed = weights.packed();
  runner_.ParallelFor(static_cast<int64_t>(ids.size()), [&](int64_t index, int) {
    const int32_t row = ids[static_cast<size_t>(index)];
    float* const values = rows + index * packed.k;
    if (!weights.quantised().empty()) {
      ReadQuantisedRow(weights.quantised(), row, values);
    } else if (packed.dtype == DType::kF32) {
      ReadPackedRow<float>(packed, row, values);
    } else {
      ReadPackedRow<uint16_t>(packed, row, values);
    }
  });
}

void RowOps::GatherRows(const RowTable& table, int64_t width, std::span<const int32_t> ids,
                        float* rows) const {
  const auto row_count = static_cast<int64_t>(ids.size());
  if (!table.format) {
    return backend_.gather_rows(table.data.get(), table.dtype, ids.data(), row_count, width, rows,
                                runner_);
  }
  const int64_t row_bytes = StoredRowBytes(*table.format, width);
  runner_.ParallelFor(row_count, [&](int64_t index, int) {
    const int64_t row = ids[static_cast<size_t>(index)];
    DequantiseRow(*table.format, table.data.get() + row * row_bytes, width, rows + index * width);
  });
}

void RowOps::MultiplyHeads(std::span<const LinearWeights> weights, const HeadsView& x,
                           int64_t row_count, const HeadsView& y, void* scratch) const {
  const auto multiply = [&](int64_t head, ParallelRunner& runner, std::byte* own_scratch) {
    const LinearArgs args{.w = weights[static_cast<size_t>(head)].packed(),
                          .row_count = row_count,
                          .x = x.data + head * x.head,
                          .x_stride = x.row,
                          .x_rounding = dtype_,
                          .y = y.data + head * y.head,
                          .y_stride = y.row,
                          .accumulate = false,
                          .scratch = own_scratch};
    backend_.linear(args, runner);
  };
  auto* const bytes = static_cast<std::byte*>(scratch);
  const auto head_count = static_cast<int64_t>(weights.size());
  if (row_count > kRowsOfSharedHeads) {
    for (int64_t head = 0; head < head_count; ++head) multiply(head, runner_, bytes);
    return;
  }
  const size_t own = SerialScratchBytes(weights.front(), row_count);
  runner_.ParallelFor(head_count, [&](int64_t head, int worker) {
    SerialRunner serial;
    multiply(head, serial, bytes + static_cast<size_t>(worker) * own);
  });
}

size_t RowOps::SerialScratchBytes(const LinearWeights& weights, int64_t row_count) const {
  const PackedLinear& packed = weights.packed();
  const size_t bytes = backend_.linear_scratch_bytes(row_count, packed.n, packed.k, 1);
  return RoundUp(bytes, kCacheLine);
}

size_t RowOps::HeadsScratchBytes(std::span<const LinearWeights> weights, int64_t row_count) const {
  const LinearWeights& head = weights.front();
  if (row_count > kRowsOfSharedHeads) return ScratchBytes(head, row_count);
  return static_cast<size_t>(runner_.worker_count()) * SerialScratchBytes(head, row_count);
}

}  // namespace quire
