// How a layer's rows are cut into parts, and the bytes of a part in the order in which they travel
// (tensor/layer_runs.h).
#ifndef QUIRE_TRANSFER_PART_RUNS_H_
#define QUIRE_TRANSFER_PART_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "quire/kv_transfer.h"
#include "wire/transfer_frames.h"

namespace quire {

// Rows are sent in parts of at most this size, so that each travels in one frame; only a row that
// is longer makes a longer part.
inline constexpr int64_t kPartBytes = wire::kFrameDataBytesMax;

// Bytes of one row of these heads.
int64_t RowBytes(const LayerKV& rows, int64_t head_count);
// How many of `left` rows, the first of which is row `first` of the transfer, make the next part,
// if one holds rows_max: parts end where a cache's tiles do, which it stores whole then, and are of
// about the same size.
int64_t RowsOfPart(int64_t first, int64_t left, int64_t rows_max);
// The memory of rows [part.first_row, ...) as few runs, in order. May throw std::bad_alloc.
// REQUIRES: the part is one of `rows`.
std::vector<std::span<std::byte>> PartRuns(const LayerKV& rows, const ReceivePart& part);

}  // namespace quire

#endif  // QUIRE_TRANSFER_PART_RUNS_H_
