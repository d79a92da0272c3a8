// CRC-32C (base/checksum.h) of bytes that lie in pieces, or are copied.
#ifndef QUIRE_BASE_COPIED_CHECKSUM_H_
#define QUIRE_BASE_COPIED_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

// That of the first `count` bytes of the pieces, one after the other, behind `crc`.
uint32_t Crc32cOfPieces(std::span<const std::span<std::byte>> pieces, size_t count, uint32_t crc);

// Copies `size` bytes, which do not overlap, and returns the checksum of the copy: each byte is
// read once, so that others may write to `from` meanwhile. Takes little more time than one of the
// two.
uint32_t CopyCrc32c(void* to, const void* from, size_t size, uint32_t crc = 0);

}  // namespace quire

#endif  // QUIRE_BASE_COPIED_CHECKSUM_H_
