#include "transfer/byte_channel.h"

#include "base/copied_checksum.h"

namespace quire {

Result<size_t> ByteChannel::ReadSummed(std::span<const std::span<std::byte>> into, uint32_t* crc) {
  QUIRE_ASSIGN_OR_RETURN(const size_t count, Read(into));
  *crc = Crc32cOfPieces(into, count, *crc);
  return count;
}

}  // namespace quire
