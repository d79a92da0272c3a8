// Where the fields of a chunk's header stand: docs/formats/chunk.md as constants.
#ifndef QUIRE_CHUNK_CHUNK_LAYOUT_H_
#define QUIRE_CHUNK_CHUNK_LAYOUT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "base/checksum.h"
#include "quire/chunk.h"

namespace quire::chunk_layout {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

inline constexpr std::string_view kMagic = "QKVCHNK1";
inline constexpr uint16_t kVersion = 1;

inline constexpr size_t kVersionAt = 8;
inline constexpr size_t kFlagsAt = 10;
inline constexpr size_t kHeaderBytesAt = 12;
inline constexpr size_t kKeyAt = 16;
inline constexpr size_t kFingerprintAt = 48;
inline constexpr size_t kTokenCountAt = 80;
inline constexpr size_t kFirstPositionAt = 84;
inline constexpr size_t kCreatedAt = 88;
inline constexpr size_t kExpiresAt = 96;
inline constexpr size_t kContextAt = 104;
inline constexpr size_t kRopeTableAt = 136;
inline constexpr size_t kGenerationAt = 144;
inline constexpr size_t kNumericsAt = 152;
inline constexpr size_t kSectionCountAt = 156;
inline constexpr size_t kCrcAt = 160;
inline constexpr size_t kReservedAt = 164;
inline constexpr size_t kFixedBytes = 168;
static_assert(kFixedBytes == kChunkFixedBytes);

inline constexpr size_t kEntryBytes = 40;
inline constexpr size_t kEntryKindAt = 0;
inline constexpr size_t kEntryLayerFirstAt = 2;
inline constexpr size_t kEntryLayerLastAt = 4;
inline constexpr size_t kEntryDTypeAt = 6;  // DLPack type code * 256 + bits
inline constexpr size_t kEntryRankAt = 8;
inline constexpr size_t kEntryPaddingAt = 9;
inline constexpr size_t kEntryDimsAt = 12;
inline constexpr size_t kEntryOffsetAt = 28;
inline constexpr size_t kEntryLengthAt = 32;
inline constexpr size_t kEntryCrcAt = 36;
inline constexpr size_t kRankMax = 4;

inline constexpr size_t kMacBytes = 32;
inline constexpr int64_t kUnitBytes = 64;        // of offsets
inline constexpr int64_t kFileAlignment = 4096;  // what O_DIRECT asks for on any device
inline constexpr uint16_t kFlagCompressed = 1 << 0;
inline constexpr uint16_t kFlagEncrypted = 1 << 1;
inline constexpr uint16_t kFlagTail = 1 << 2;
inline constexpr uint16_t kFlagContextual = 1 << 3;
inline constexpr uint16_t kFlagApproximate = 1 << 4;
inline constexpr uint16_t kFlagMac = 1 << 5;
inline constexpr uint16_t kFlagsRead = kFlagTail | kFlagContextual | kFlagApproximate | kFlagMac;

template <typename T>
T Load(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

template <typename T>
void Store(std::span<std::byte> bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

inline int64_t RoundUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Bytes of the header that have a meaning; zeros up to its length follow.
inline int64_t HeaderContentBytes(int64_t section_count, int64_t token_count, bool has_mac) {
  return static_cast<int64_t>(kFixedBytes) + section_count * static_cast<int64_t>(kEntryBytes) +
         token_count * 4 + (has_mac ? static_cast<int64_t>(kMacBytes) : 0);
}

// Passes the header to `update` in pieces, with zeros in place of the checksum and, if mac_at is
// not 0, of the MAC: what both are taken over.
template <typename F>
void VisitHeader(std::span<const std::byte> header, size_t mac_at, F&& update) {
  constexpr std::byte kZeros[kMacBytes] = {};
  const size_t after_crc = kCrcAt + sizeof(uint32_t);
  update(header.first(kCrcAt));
  update(std::span(kZeros).first(sizeof(uint32_t)));
  if (mac_at == 0) return update(header.subspan(after_crc));
  update(header.subspan(after_crc, mac_at - after_crc));
  update(std::span(kZeros));
  update(header.subspan(mac_at + kMacBytes));
}

inline uint32_t HeaderCrc(std::span<const std::byte> header, size_t mac_at) {
  uint32_t crc = 0;
  VisitHeader(header, mac_at, [&](std::span<const std::byte> piece) {
    crc = Crc32c(piece.data(), piece.size(), crc);
  });
  return crc;
}

}  // namespace quire::chunk_layout

#endif  // QUIRE_CHUNK_CHUNK_LAYOUT_H_
