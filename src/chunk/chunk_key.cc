#include <algorithm>

#include "base/guard.h"
#include "chunk/sha256.h"
#include "quire/chunk.h"

namespace quire {
namespace {

int HexValue(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return -1;
}

// What a key hashes: fields one after the other, numbers little-endian, lists behind their lengths.
class KeyHash {
 public:
  explicit KeyHash(std::string_view domain) { hash_.Update(domain); }

  KeyHash& Add(const Digest& digest) {
    hash_.Update(digest);
    return *this;
  }
  KeyHash& AddBytes(std::string_view bytes) {
    AddNumber(static_cast<uint32_t>(bytes.size()));
    hash_.Update(bytes);
    return *this;
  }
  // Tokens lie in memory as the format has them: 32 bits, little-endian.
  KeyHash& AddTokens(std::span<const int32_t> tokens) {
    AddNumber(static_cast<uint32_t>(tokens.size()));
    hash_.Update(std::as_bytes(tokens));
    return *this;
  }
  ChunkKey Finish() { return ChunkKey{hash_.Finish()}; }

 private:
  void AddNumber(uint32_t number) { hash_.Update(std::as_bytes(std::span(&number, 1))); }

  Sha256 hash_;
};

using namespace std::string_view_literals;
// The domains keep the kinds of keys apart; the trailing NUL keeps one from being another's begin.
constexpr std::string_view kExactDomain = "quire/kv/1\0"sv;
constexpr std::string_view kApproximateDomain = "quire/kv/1/approximate\0"sv;
constexpr std::string_view kPrefixDomain = "\x01"sv;
constexpr std::string_view kSegmentDomain = "\x02"sv;

}  // namespace

std::string Digest::ToHex() const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

Result<Digest> Digest::FromHex(std::string_view hex) {
  return GuardEntry([&]() -> Result<Digest> {
    Digest digest;
    const bool is_hex =
        std::all_of(hex.begin(), hex.end(), [](char c) { return HexValue(c) >= 0; });
    if (hex.size() != 2 * digest.bytes.size() || !is_hex) {
      return Status(StatusCode::kBadArgument,
                    "a digest is written as 64 lower-case hexadecimal digits; this text of " +
                        std::to_string(hex.size()) + " bytes is none");
    }
    for (size_t i = 0; i < digest.bytes.size(); ++i) {
      digest.bytes[i] = static_cast<uint8_t>(HexValue(hex[2 * i]) << 4 | HexValue(hex[2 * i + 1]));
    }
    return digest;
  });
}

KeySpace::KeySpace(const Digest& fingerprint, std::string_view salt, bool approximate)
    : fingerprint_(fingerprint),
      root_(KeyHash(approximate ? kApproximateDomain : kExactDomain)
                .Add(fingerprint)
                .AddBytes(salt)
                .Finish()),
      approximate_(approximate) {}

ChunkKey KeySpace::Next(const ChunkKey& previous, std::span<const int32_t> tokens,
                        std::string_view extras) const {
  return KeyHash(kPrefixDomain).Add(previous.digest).AddTokens(tokens).AddBytes(extras).Finish();
}

Result<std::vector<ChunkKey>> KeySpace::Chain(std::span<const int32_t> tokens, int64_t block_tokens,
                                              bool tail,
                                              std::span<const std::string> extras) const {
  return GuardEntry([&]() -> Result<std::vector<ChunkKey>> {
    if (block_tokens < 1) {
      return Status(StatusCode::kBadArgument, "KeySpace::Chain: block_tokens is " +
                                                  std::to_string(block_tokens) +
                                                  "; it must be at least 1");
    }
    const size_t block = static_cast<size_t>(block_tokens);
    const bool has_tail = tail && tokens.size() % block > 0;
    const size_t chunk_count = tokens.size() / block + (has_tail ? 1 : 0);
    if (extras.size() > chunk_count) {
      return Status(StatusCode::kBadArgument, "KeySpace::Chain: there are extras of " +
                                                  std::to_string(extras.size()) + " chunks, and " +
                                                  std::to_string(chunk_count) + " chunks");
    }
    std::vector<ChunkKey> keys;
    keys.reserve(chunk_count);
    const ChunkKey* previous = &root_;
    while (keys.size() < chunk_count) {
      const size_t count = std::min(block, tokens.size());
      const size_t i = keys.size();
      keys.push_back(Next(*previous, tokens.first(count),
                          i < extras.size() ? std::string_view(extras[i]) : std::string_view()));
      previous = &keys.back();
      tokens = tokens.subspan(count);
    }
    return keys;
  });
}

ChunkKey KeySpace::Segment(std::span<const int32_t> tokens) const {
  return KeyHash(kSegmentDomain).Add(root_.digest).AddTokens(tokens).Finish();
}

Digest FingerprintOf(std::string_view passport_json) {
  return Sha256().Update(passport_json).Finish();
}

uint64_t ShortId(std::string_view text) {
  if (text.empty()) return 0;
  const Digest digest = Sha256().Update(text).Finish();
  uint64_t id = 0;
  for (size_t i = 0; i < sizeof(id); ++i) id |= uint64_t{digest.bytes[i]} << 8 * i;
  return id;
}

}  // namespace quire
