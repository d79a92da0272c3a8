// What both ends of a transfer do with rows and maps: quire/kv_transfer.h.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/check.h"
#include "base/checksum.h"
#include "base/guard.h"
#include "kv/transfer/slot_runs.h"
#include "quire/kv_transfer.h"
#include "tensor/layer_runs.h"

namespace quire {

uint32_t DigestOfHeads(const LayerKV& rows, int64_t first_head, int64_t head_count) {
  const ReceivePart all{
      .first_row = 0, .count = rows.k.dim(0), .first_head = first_head, .head_count = head_count};
  uint32_t crc = 0;
  ForEachRun(rows, all,
             [&](std::span<const std::byte> run) { crc = Crc32c(run.data(), run.size(), crc); });
  return crc;
}

LayerKV RowsOf(const LayerKV& rows, int64_t first, int64_t count) {
  const auto part = [&](const TensorView& all) {
    if (all.rank() == 0) return all;
    QUIRE_DCHECK(first >= 0 && count <= all.dim(0) - first);
    int64_t shape[TensorView::kMaxRank];
    std::ranges::copy(all.shape(), shape);
    shape[0] = count;
    return TensorView(all.data_as<std::byte>() + first * BytesPerRow(all), all.dtype(),
                      std::span<const int64_t>(shape, all.shape().size()));
  };
  return {.k = part(rows.k),
          .v = part(rows.v),
          .k_scale = part(rows.k_scale),
          .v_scale = part(rows.v_scale)};
}

void CopyHeads(const LayerKV& from, int64_t from_head, const LayerKV& to, int64_t to_head,
               int64_t head_count) {
  ForEachTensor(from, [&](const TensorView LayerKV::*member) {
    const TensorView& source = from.*member;
    const TensorView& target = to.*member;
    QUIRE_DCHECK(target.dim(0) >= source.dim(0)) << "the receiver has other rows";
    QUIRE_DCHECK(target.dtype() == source.dtype());
    const int64_t rows = source.dim(0);
    const int64_t rows_at_once =
        std::min(RowsPerRun(source, head_count, rows), RowsPerRun(target, head_count, rows));
    const auto bytes = static_cast<size_t>(rows_at_once * BytesOfHeads(source, head_count));
    for (int64_t row = 0; row < rows; row += rows_at_once)
      std::memcpy(HeadAt(target, row, to_head), HeadAt(source, row, from_head), bytes);
  });
}

Result<std::vector<int64_t>> DecodeSlots(std::span<const int64_t> slots, int64_t count_max) {
  return GuardEntry([&]() -> Result<std::vector<int64_t>> {
    QUIRE_ASSIGN_OR_RETURN(const SlotRuns runs, SlotRuns::Decode(slots, count_max));
    std::vector<int64_t> decoded(static_cast<size_t>(runs.count()));
    runs.Fill(0, decoded);
    return decoded;
  });
}

}  // namespace quire
