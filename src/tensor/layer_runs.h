// The bytes of a layer's rows in the order in which they travel and are hashed: the keys, then the
// values, then the scales of what is quantised, row by row.
#ifndef QUIRE_TENSOR_LAYER_RUNS_H_
#define QUIRE_TENSOR_LAYER_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "quire/kv_transfer.h"
#include "quire/tensor.h"

namespace quire {

// f(const TensorView LayerKV::*) for each tensor that there is.
template <typename F>
void ForEachTensor(const LayerKV& rows, F&& f) {
  for (const TensorView LayerKV::*tensor :
       {&LayerKV::k, &LayerKV::v, &LayerKV::k_scale, &LayerKV::v_scale}) {
    if ((rows.*tensor).rank() >= 2) f(tensor);
  }
}

inline int64_t BytesPerRow(const TensorView& tensor) {
  return tensor.stride(0) * DTypeBytes(tensor.dtype());
}

// Bytes of `heads` heads of one row.
inline int64_t BytesOfHeads(const TensorView& tensor, int64_t heads) {
  QUIRE_DCHECK(heads >= 0 && heads <= tensor.dim(1));
  return heads * tensor.stride(1) * DTypeBytes(tensor.dtype());
}

inline std::byte* HeadAt(const TensorView& tensor, int64_t row, int64_t head) {
  return tensor.data_as<std::byte>() + row * BytesPerRow(tensor) + BytesOfHeads(tensor, head);
}

// How many of `count` rows, of `heads` heads each, lie in one run of bytes: all, or one.
inline int64_t RowsPerRun(const TensorView& tensor, int64_t heads, int64_t count) {
  return BytesOfHeads(tensor, heads) == BytesPerRow(tensor) ? count : 1;
}

// f(std::span<std::byte>) for the memory of the part's heads and rows, run by run. REQUIRES: the
// part is one of `rows`.
template <typename F>
void ForEachRun(const LayerKV& rows, const ReceivePart& part, F&& f) {
  ForEachTensor(rows, [&](const TensorView LayerKV::*member) {
    const TensorView& tensor = rows.*member;
    QUIRE_DCHECK(part.first_row >= 0 && part.count <= tensor.dim(0) - part.first_row);
    QUIRE_DCHECK(part.first_head >= 0 && part.head_count <= tensor.dim(1) - part.first_head);
    const int64_t rows_at_once = RowsPerRun(tensor, part.head_count, part.count);
    const int64_t bytes = rows_at_once * BytesOfHeads(tensor, part.head_count);
    for (int64_t row = 0; row < part.count; row += rows_at_once) {
      f(std::span(HeadAt(tensor, part.first_row + row, part.first_head),
                  static_cast<size_t>(bytes)));
    }
  });
}

}  // namespace quire

#endif  // QUIRE_TENSOR_LAYER_RUNS_H_
