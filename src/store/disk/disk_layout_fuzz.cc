// What a folder of the disk tier holds besides chunks, from anywhere.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/check.h"
#include "store/disk/disk_layout.h"

namespace {

using quire::disk_layout::EncodeManifest;
using quire::disk_layout::EncodeUsage;
using quire::disk_layout::EncodeWorth;

void ReadManifest(std::string_view text) {
  const auto manifest = quire::disk_layout::ParseManifest(text);
  if (manifest.ok())
    QUIRE_CHECK(EncodeManifest(manifest->fingerprint, manifest->passport_json) == text);
}

void ReadNames(std::string_view name) {
  const auto key = quire::disk_layout::ParseChunkName(name);
  QUIRE_CHECK(!key || quire::disk_layout::ChunkName(*key) == name);
  const auto digest = quire::disk_layout::ParseShortDigest(name);
  QUIRE_CHECK(!digest || digest->ToHex().starts_with(name));
}

void ReadUsage(std::span<const std::byte> record) {
  const auto bytes = quire::disk_layout::ParseUsage(record);
  if (bytes) QUIRE_CHECK(quire::disk_layout::ParseUsage(EncodeUsage(*bytes)) == bytes);
}

void ReadWorth(std::span<const std::byte> record) {
  const auto worth = quire::disk_layout::ParseWorth(record);
  if (worth) QUIRE_CHECK(quire::disk_layout::ParseWorth(EncodeWorth(*worth)) == worth);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  ReadManifest(text);
  // Also with the digest that belongs to it, as an attacker would write it.
  const auto manifest = EncodeManifest(quire::FingerprintOf(text), text);
  QUIRE_CHECK(quire::disk_layout::ParseManifest(manifest).ok());
  ReadNames(text);
  ReadUsage(std::as_bytes(std::span(data, size)));
  ReadWorth(std::as_bytes(std::span(data, size)));
  return 0;
}
