// Names and small records of a disk tier's folder: docs/formats/disk.md as code. No I/O.
#ifndef QUIRE_STORE_DISK_DISK_LAYOUT_H_
#define QUIRE_STORE_DISK_DISK_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "store/tier/chunk_tier.h"

namespace quire::disk_layout {

inline constexpr std::string_view kLockName = "lock";
inline constexpr std::string_view kTemporaryName = "tmp";
inline constexpr std::string_view kQuarantineName = "quarantine";
inline constexpr std::string_view kManifestName = "passport";

// The id as the folder knows it: of the root only the 8 bytes in the folder's name. Keys commit to
// passport and salt in full, so this decides about accounting alone.
ChunkId ShortRoot(ChunkId id);
ChunkKey ShortRoot(ChunkKey root);

std::string PassportFolder(const std::string& directory, const Digest& fingerprint);
std::string RootFolder(const std::string& directory, const Digest& fingerprint,
                       const ChunkKey& root);
// The folder that the chunk's file is in, and the file.
std::string LeafFolder(const std::string& directory, const ChunkId& id);
std::string ChunkPath(const std::string& directory, const ChunkId& id);
std::string ChunkName(const ChunkKey& key);

// 16 hexadecimal digits of a digest's first 8 bytes; the rest is zero.
std::optional<Digest> ParseShortDigest(std::string_view name);
bool IsLeafName(std::string_view name);  // two hexadecimal digits
std::optional<ChunkKey> ParseChunkName(std::string_view name);

// A passport with its digest, so that damage is told from another passport.
std::string EncodeManifest(const Digest& fingerprint, std::string_view passport_json);
struct Manifest {
  Digest fingerprint{};
  std::string_view passport_json{};  // of the text that was parsed
};
// Corrupt; Incompatible for a newer version of the folder.
Result<Manifest> ParseManifest(std::string_view text);
inline constexpr int64_t kManifestBytesMax = int64_t{16} << 20;

// How many bytes all chunk files together have. Stands in the lock file.
inline constexpr size_t kUsageBytes = 24;
std::array<std::byte, kUsageBytes> EncodeUsage(int64_t bytes);
std::optional<int64_t> ParseUsage(std::span<const std::byte> record);

// What was said of a chunk's worth. Goes with its file as the extended attribute user.quire.worth.
inline constexpr size_t kWorthBytes = 24;
std::array<std::byte, kWorthBytes> EncodeWorth(const ChunkWorth& worth);
std::optional<ChunkWorth> ParseWorth(std::span<const std::byte> record);

}  // namespace quire::disk_layout

#endif  // QUIRE_STORE_DISK_DISK_LAYOUT_H_
