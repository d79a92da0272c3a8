#include "store/disk/disk_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checksum.h"
#include "quire/chunk.h"

namespace quire::disk_layout {
namespace {

constexpr std::string_view kManifestBegin = "quire-disk ";
constexpr std::string_view kManifestVersion = "1 ";
constexpr std::string_view kChunkSuffix = ".qkv";
constexpr std::string_view kUsageMagic = "QKVUSE01";
constexpr std::string_view kWorthMagic = "QKVWTH01";
constexpr size_t kShortBytes = 8;  // of a digest, in names of folders
constexpr size_t kDigestDigits = 64;

std::string ShortHex(const Digest& digest) { return digest.ToHex().substr(0, 2 * kShortBytes); }

// Upper-case digits are not what this tier writes: one name per chunk.
bool IsHex(std::string_view text) {
  return std::ranges::all_of(
      text, [](char c) { return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f'); });
}

std::optional<Digest> ParseDigest(std::string_view text) {
  if (text.size() != kDigestDigits || !IsHex(text)) return std::nullopt;
  const Result<Digest> digest = Digest::FromHex(text);
  if (!digest.ok()) return std::nullopt;
  return *digest;
}

Status Corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "passport file of the disk tier: " + why);
}

}  // namespace

ChunkKey ShortRoot(ChunkKey root) {
  std::ranges::fill(std::span(root.digest.bytes).subspan(kShortBytes), uint8_t{0});
  return root;
}

ChunkId ShortRoot(ChunkId id) {
  id.root = ShortRoot(id.root);
  return id;
}

std::string PassportFolder(const std::string& directory, const Digest& fingerprint) {
  return directory + "/" + ShortHex(fingerprint);
}

std::string RootFolder(const std::string& directory, const Digest& fingerprint,
                       const ChunkKey& root) {
  return PassportFolder(directory, fingerprint) + "/" + ShortHex(root.digest);
}

std::string LeafFolder(const std::string& directory, const ChunkId& id) {
  return RootFolder(directory, id.fingerprint, id.root) + "/" + id.key.digest.ToHex().substr(0, 2);
}

std::string ChunkName(const ChunkKey& key) {
  return key.digest.ToHex() + std::string(kChunkSuffix);
}

std::string ChunkPath(const std::string& directory, const ChunkId& id) {
  return LeafFolder(directory, id) + "/" + ChunkName(id.key);
}

std::optional<Digest> ParseShortDigest(std::string_view name) {
  if (name.size() != 2 * kShortBytes) return std::nullopt;
  return ParseDigest(std::string(name) + std::string(kDigestDigits - name.size(), '0'));
}

bool IsLeafName(std::string_view name) { return name.size() == 2 && IsHex(name); }

std::optional<ChunkKey> ParseChunkName(std::string_view name) {
  if (!name.ends_with(kChunkSuffix)) return std::nullopt;
  const auto digest = ParseDigest(name.substr(0, name.size() - kChunkSuffix.size()));
  if (!digest) return std::nullopt;
  return ChunkKey{*digest};
}

std::string EncodeManifest(const Digest& fingerprint, std::string_view passport_json) {
  std::string text(kManifestBegin);
  text += kManifestVersion;
  text += fingerprint.ToHex();
  text += '\n';
  text += passport_json;
  return text;
}

Result<Manifest> ParseManifest(std::string_view text) {
  const auto skip = [&](std::string_view part) {
    if (!text.starts_with(part)) return false;
    text.remove_prefix(part.size());
    return true;
  };
  if (!skip(kManifestBegin)) return Corrupt("it does not begin with its magic");
  const bool is_version_1 = skip(kManifestVersion);
  // A newer version may have other lines; what every version has is a digest of its last one.
  const size_t line_end = text.find('\n');
  if (line_end == std::string_view::npos || line_end < kDigestDigits)
    return Corrupt("its first line is cut");
  const auto digest = ParseDigest(text.substr(line_end - kDigestDigits, kDigestDigits));
  if (!digest) return Corrupt("it has no digest");
  const std::string_view json = text.substr(line_end + 1);
  if (FingerprintOf(json) != *digest) return Corrupt("its digest is not that of its passport");
  if (!is_version_1 || line_end != kDigestDigits) {
    return Status(StatusCode::kIncompatible,
                  "passport file of the disk tier: it is of a newer version of Quire; use another "
                  "directory");
  }
  return Manifest{*digest, json};
}

std::array<std::byte, kUsageBytes> EncodeUsage(int64_t bytes) {
  std::array<std::byte, kUsageBytes> record{};
  std::memcpy(record.data(), kUsageMagic.data(), kUsageMagic.size());
  std::memcpy(record.data() + 8, &bytes, sizeof(bytes));
  const uint32_t crc = Crc32c(record.data(), 16);
  std::memcpy(record.data() + 16, &crc, sizeof(crc));
  return record;
}

std::optional<int64_t> ParseUsage(std::span<const std::byte> record) {
  if (record.size() != kUsageBytes) return std::nullopt;
  if (std::memcmp(record.data(), kUsageMagic.data(), kUsageMagic.size()) != 0) return std::nullopt;
  int64_t bytes = 0;
  uint32_t crc = 0;
  std::memcpy(&bytes, record.data() + 8, sizeof(bytes));
  std::memcpy(&crc, record.data() + 16, sizeof(crc));
  if (Crc32c(record.data(), 16) != crc || bytes < 0) return std::nullopt;
  return bytes;
}

std::array<std::byte, kWorthBytes> EncodeWorth(const ChunkWorth& worth) {
  std::array<std::byte, kWorthBytes> record{};
  const auto priority = static_cast<int32_t>(worth.priority);
  std::memcpy(record.data(), kWorthMagic.data(), kWorthMagic.size());
  std::memcpy(record.data() + 8, &worth.recompute_seconds, sizeof(worth.recompute_seconds));
  std::memcpy(record.data() + 16, &priority, sizeof(priority));
  const uint32_t crc = Crc32c(record.data(), 20);
  std::memcpy(record.data() + 20, &crc, sizeof(crc));
  return record;
}

std::optional<ChunkWorth> ParseWorth(std::span<const std::byte> record) {
  if (record.size() != kWorthBytes) return std::nullopt;
  if (std::memcmp(record.data(), kWorthMagic.data(), kWorthMagic.size()) != 0) return std::nullopt;
  ChunkWorth worth;
  int32_t priority = 0;
  uint32_t crc = 0;
  std::memcpy(&worth.recompute_seconds, record.data() + 8, sizeof(worth.recompute_seconds));
  std::memcpy(&priority, record.data() + 16, sizeof(priority));
  std::memcpy(&crc, record.data() + 20, sizeof(crc));
  worth.priority = priority;
  const bool is_sound = Crc32c(record.data(), 20) == crc &&
                        std::isfinite(worth.recompute_seconds) && worth.recompute_seconds >= 0 &&
                        0 <= priority && priority <= 100;
  if (!is_sound) return std::nullopt;
  return worth;
}

}  // namespace quire::disk_layout
