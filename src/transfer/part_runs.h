// The bytes of a part in the order in which they travel: of some heads of some rows the keys, then
// the values, then the scales, row by row. DigestOfHeads hashes them in this order.
#ifndef QUIRE_TRANSFER_PART_RUNS_H_
#define QUIRE_TRANSFER_PART_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "quire/kv_transfer.h"

namespace quire {

// Bytes of one row of these heads.
int64_t RowBytes(const LayerKV& rows, int64_t head_count);
// The memory of rows [part.first_row, ...) as few runs, in order. May throw std::bad_alloc.
// REQUIRES: the part is one of `rows`.
std::vector<std::span<std::byte>> PartRuns(const LayerKV& rows, const ReceivePart& part);

}  // namespace quire

#endif  // QUIRE_TRANSFER_PART_RUNS_H_
