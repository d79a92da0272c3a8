#include "transfer/part_runs.h"

#include <algorithm>

#include "base/check.h"
#include "base/round_up.h"
#include "tensor/layer_runs.h"

namespace quire {
namespace {

// A reservation begins with a tile, so the tiles of a transfer are of such rows.
constexpr int64_t kTileRows = 16;

int64_t SizeOf(std::span<const std::span<std::byte>> runs) {
  int64_t bytes = 0;
  for (const std::span<std::byte>& run : runs) bytes += std::ssize(run);
  return bytes;
}

}  // namespace

int64_t RowBytes(const LayerKV& rows, int64_t head_count) {
  int64_t bytes = 0;
  ForEachTensor(rows, [&](const TensorView LayerKV::*tensor) {
    bytes += BytesOfHeads(rows.*tensor, head_count);
  });
  return bytes;
}

int64_t RowsOfPart(int64_t first, int64_t left, int64_t rows_max) {
  QUIRE_DCHECK(first >= 0 && left > 0 && rows_max > 0);
  if (left <= rows_max || rows_max < kTileRows) return std::min(left, rows_max);
  const int64_t most = rows_max / kTileRows * kTileRows;
  const int64_t parts = CeilDiv(left, most);
  return RoundUp(CeilDiv(left, parts), kTileRows) - first % kTileRows;
}

std::vector<std::span<std::byte>> PartRuns(const LayerKV& rows, const ReceivePart& part) {
  std::vector<std::span<std::byte>> runs;
  ForEachRun(rows, part, [&](std::span<std::byte> run) {
    // Tensors may lie side by side.
    if (!runs.empty() && runs.back().data() + runs.back().size() == run.data()) {
      runs.back() = {runs.back().data(), runs.back().size() + run.size()};
    } else {
      runs.push_back(run);
    }
  });
  QUIRE_DCHECK(SizeOf(runs) == part.count * RowBytes(rows, part.head_count));
  return runs;
}

}  // namespace quire
