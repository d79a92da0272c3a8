#include "transfer/part_runs.h"

#include "base/check.h"

namespace quire {
namespace {

template <typename F>
void ForEachStored(const LayerKV& rows, F&& f) {
  for (const TensorView* tensor : {&rows.k, &rows.v, &rows.k_scale, &rows.v_scale}) {
    if (tensor->rank() >= 2) f(*tensor);
  }
}

int64_t BytesOfHeads(const TensorView& tensor, int64_t heads) {
  QUIRE_DCHECK(heads >= 0 && heads <= tensor.dim(1));
  return heads * tensor.stride(1) * DTypeBytes(tensor.dtype());
}

int64_t SizeOf(std::span<const std::span<std::byte>> runs) {
  int64_t bytes = 0;
  for (const std::span<std::byte>& run : runs) bytes += std::ssize(run);
  return bytes;
}

}  // namespace

int64_t RowBytes(const LayerKV& rows, int64_t head_count) {
  int64_t bytes = 0;
  ForEachStored(rows, [&](const TensorView& tensor) { bytes += BytesOfHeads(tensor, head_count); });
  return bytes;
}

std::vector<std::span<std::byte>> PartRuns(const LayerKV& rows, const ReceivePart& part) {
  std::vector<std::span<std::byte>> runs;
  ForEachStored(rows, [&](const TensorView& tensor) {
    QUIRE_DCHECK(part.first_row >= 0 && part.count <= tensor.dim(0) - part.first_row);
    QUIRE_DCHECK(part.first_head >= 0 && part.head_count <= tensor.dim(1) - part.first_head);
    const auto bytes = static_cast<size_t>(BytesOfHeads(tensor, part.head_count));
    std::byte* const first = tensor.data_as<std::byte>() + BytesOfHeads(tensor, part.first_head) +
                             part.first_row * tensor.stride(0) * DTypeBytes(tensor.dtype());
    for (int64_t row = 0; row < part.count; ++row) {
      std::byte* const begin = first + row * tensor.stride(0) * DTypeBytes(tensor.dtype());
      if (!runs.empty() && runs.back().data() + runs.back().size() == begin) {
        runs.back() = {runs.back().data(), runs.back().size() + bytes};
      } else {
        runs.emplace_back(begin, bytes);
      }
    }
  });
  QUIRE_DCHECK(SizeOf(runs) == part.count * RowBytes(rows, part.head_count));
  return runs;
}

}  // namespace quire
