// Checksums of bytes. Their values are part of file and wire formats: they do not depend on machine
// or version.
#ifndef QUIRE_BASE_CHECKSUM_H_
#define QUIRE_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace quire {

// XXH64: fast and well mixed, for digests and tables. It is no defence against an attacker that can
// choose the bytes.
uint64_t Hash64(const void* data, size_t size, uint64_t seed = 0);
inline uint64_t Hash64(std::string_view bytes, uint64_t seed = 0) {
  return Hash64(bytes.data(), bytes.size(), seed);
}

// CRC-32C (Castagnoli). `crc` is that of the bytes before, so that parts can be summed one after
// the other.
uint32_t Crc32c(const void* data, size_t size, uint32_t crc = 0);

// The portable form of Crc32c, which runs where the CPU has no instruction for it.
uint32_t Crc32cPortable(const void* data, size_t size, uint32_t crc = 0);

}  // namespace quire

#endif  // QUIRE_BASE_CHECKSUM_H_
