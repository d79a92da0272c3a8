// SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104): the digests of keys, passports and signed
// chunks. OpenSSL's libcrypto hashes, with the processor's instructions for it.
//
// By its functions SHA256_Init, _Update and _Final, not by EVP: these take no memory, cannot fail
// and need no set-up of the library, so that a key can be made in a commit and while the process
// ends. The same holds for HMAC, which is two hashes.
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
  Sha256();
  Sha256& Update(std::span<const std::byte> bytes);
  Sha256& Update(std::string_view text) {
    return Update(std::as_bytes(std::span(text.data(), text.size())));
  }
  Sha256& Update(const Digest& digest) { return Update(std::as_bytes(std::span(digest.bytes))); }
  // The digest of all parts. The object is used up.
  Digest Finish();

 private:
  // A SHA256_CTX, whose header is not for users of this one.
  alignas(uint64_t) std::array<std::byte, 112> state_;
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  HmacSha256& Update(std::span<const std::byte> bytes) {
    inner_.Update(bytes);
    return *this;
  }
  Digest Finish() { return outer_.Update(inner_.Finish()).Finish(); }

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// Takes the same time wherever the two differ, so that a MAC cannot be guessed byte by byte.
bool EqualInConstantTime(const Digest& a, const Digest& b);

}  // namespace quire

#endif  // QUIRE_CHUNK_SHA256_H_
