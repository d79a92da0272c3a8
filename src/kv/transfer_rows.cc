// What both ends of a transfer do with rows and maps: quire/kv_transfer.h.
#include <cstring>
#include <limits>
#include <string>

#include "base/checksum.h"
#include "base/guard.h"
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
  return static_cast<size_t>(heads * tensor.stride(1) * DTypeBytes(tensor.dtype()));
}

Status BadMap(const std::string& why) {
  return Status(
      StatusCode::kBadArgument,
      "DisaggMarkSend: the map is not [segments, begin, length, begin, length, ...]: " + why);
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

void CopyHeads(const LayerKV& from, int64_t from_head, const LayerKV& to, int64_t to_head,
               int64_t head_count) {
  ForEachTensor(from, [&](const TensorView LayerKV::*member) {
    const TensorView& source = from.*member;
    for (int64_t row = 0; row < source.dim(0); ++row) {
      std::memcpy(HeadOf(to.*member, row, to_head), HeadOf(source, row, from_head),
                  HeadBytes(source, head_count));
    }
  });
}

Result<std::vector<int64_t>> DecodeSlots(std::span<const int64_t> slots, int64_t count_max) {
  return GuardEntry([&]() -> Result<std::vector<int64_t>> {
    const int64_t size = static_cast<int64_t>(slots.size());
    if (size == 0 || slots[0] < 1 || slots[0] > size || 2 * slots[0] + 1 != size) {
      return BadMap(std::to_string(size) + " numbers" +
                    (size == 0 ? "" : ", the first of them " + std::to_string(slots[0])));
    }
    std::vector<int64_t> decoded;
    for (size_t i = 1; i < slots.size(); i += 2) {
      const int64_t begin = slots[i];
      const int64_t length = slots[i + 1];
      if (begin < -1 || length < 1 || length > count_max - static_cast<int64_t>(decoded.size()) ||
          begin > std::numeric_limits<int64_t>::max() - length) {
        return BadMap("segment " + std::to_string(i / 2) + " begins at " + std::to_string(begin) +
                      " and has " + std::to_string(length) + " slots, with " +
                      std::to_string(decoded.size()) + " before it; there may be " +
                      std::to_string(count_max));
      }
      for (int64_t slot = begin; slot < begin + length; ++slot) decoded.push_back(slot);
    }
    return decoded;
  });
}

}  // namespace quire
