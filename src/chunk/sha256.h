// SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104): the digests of keys, passports and signed
// chunks. Own code, so that the library and the wheel need no crypto library for two functions that
// FIPS pins down to the bit.
#ifndef QUIRE_CHUNK_SHA256_H_
#define QUIRE_CHUNK_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "quire/chunk.h"

namespace quire {

// Hashes bytes that come in parts.
class Sha256 {
 public:
  Sha256& Update(std::span<const std::byte> bytes);
  Sha256& Update(std::string_view text) {
    return Update(std::as_bytes(std::span(text.data(), text.size())));
  }
  Sha256& Update(const Digest& digest) { return Update(std::as_bytes(std::span(digest.bytes))); }
  // Of all parts. The object is used up.
  Digest Finish();

 private:
  static constexpr size_t kBlockBytes = 64;
  void HashBlock(const std::byte* block);

  // The first 32 bits of the fractions of the square roots of the first 8 primes.
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> pending_{};
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;

  friend class HmacSha256;
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  HmacSha256& Update(std::span<const std::byte> bytes) {
    inner_.Update(bytes);
    return *this;
  }
  Digest Finish();

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// Takes the same time wherever the two differ, so that a MAC cannot be guessed byte by byte.
bool EqualInConstantTime(const Digest& a, const Digest& b);

}  // namespace quire

#endif  // QUIRE_CHUNK_SHA256_H_
