// What both ends of a transfer do with rows and maps: quire/kv_transfer.h.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"
#include "base/guard.h"
#include "kv/transfer/slot_runs.h"
#include "quire/kv_transfer.h"

namespace quire {
namespace {

// The tensors of a layer that there are, in the order of digests.
template <typename F>
void ForEachTensor(const LayerKV& kv, F&& f) {
  for (const TensorView LayerKV::*member :
       {&LayerKV::k, &LayerKV::v, &LayerKV::k_scale, &LayerKV::v_scale}) {
    if ((kv.*member).rank() >= 2) f(member);
  }
}

std::byte* HeadOf(const TensorView& tensor, int64_t row, int64_t head) {
  return tensor.data_as<std::byte>() +
         (row * tensor.stride(0) + head * tensor.stride(1)) * DTypeBytes(tensor.dtype());
}

size_t HeadBytes(const TensorView& tensor, int64_t heads) {
  QUIRE_DCHECK(heads >= 0 && heads <= tensor.dim(1));
  return static_cast<size_t>(heads * tensor.stride(1) * DTypeBytes(tensor.dtype()));
}

}  // namespace

uint32_t DigestOfHeads(const LayerKV& rows, int64_t first_head, int64_t head_count) {
  uint32_t crc = 0;
  ForEachTensor(rows, [&](const TensorView LayerKV::*member) {
    const TensorView& tensor = rows.*member;
    for (int64_t row = 0; row < tensor.dim(0); ++row)
      crc = Crc32c(HeadOf(tensor, row, first_head), HeadBytes(tensor, head_count), crc);
  });
  return crc;
}

LayerKV RowsOf(const LayerKV& rows, int64_t first, int64_t count) {
  const auto part = [&](const TensorView& all) {
    if (all.rank() == 0) return all;
    QUIRE_DCHECK(first >= 0 && count <= all.dim(0) - first);
    int64_t shape[TensorView::kMaxRank];
    std::ranges::copy(all.shape(), shape);
    shape[0] = count;
    return TensorView(all.data_as<std::byte>() + first * all.stride(0) * DTypeBytes(all.dtype()),
                      all.dtype(), std::span<const int64_t>(shape, all.shape().size()));
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
    QUIRE_DCHECK((to.*member).dim(0) >= source.dim(0)) << "the receiver has other rows";
    QUIRE_DCHECK((to.*member).dtype() == source.dtype());
    for (int64_t row = 0; row < source.dim(0); ++row) {
      std::memcpy(HeadOf(to.*member, row, to_head), HeadOf(source, row, from_head),
                  HeadBytes(source, head_count));
    }
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
