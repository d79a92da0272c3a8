#include "chunk/sha256.h"

#define OPENSSL_SUPPRESS_DEPRECATED  // OpenSSL 3 names EVP instead
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <new>

namespace quire {
namespace {

template <typename State>
SHA256_CTX* ContextIn(State& state) {
  static_assert(sizeof(SHA256_CTX) <= sizeof(State) && alignof(SHA256_CTX) <= alignof(uint64_t));
  return std::launder(reinterpret_cast<SHA256_CTX*>(state.data()));
}

}  // namespace

// None of these fails: their results tell of errors that SHA-256 does not have.
Sha256::Sha256() { SHA256_Init(new (state_.data()) SHA256_CTX); }

Sha256& Sha256::Update(std::span<const std::byte> bytes) {
  SHA256_Update(ContextIn(state_), bytes.data(), bytes.size());
  return *this;
}

Digest Sha256::Finish() {
  static_assert(SHA256_DIGEST_LENGTH == sizeof(Digest));
  Digest digest;
  SHA256_Final(digest.bytes.data(), ContextIn(state_));
  return digest;
}

HmacSha256::HmacSha256(std::string_view key) {
  std::array<std::byte, SHA256_CBLOCK> block{};
  if (key.size() > block.size()) {
    const Digest hashed = Sha256().Update(key).Finish();
    std::ranges::copy(std::as_bytes(std::span(hashed.bytes)), block.begin());
  } else {
    std::ranges::copy(std::as_bytes(std::span(key.data(), key.size())), block.begin());
  }
  for (std::byte& byte : block) byte ^= std::byte{0x36};
  inner_.Update(block);
  for (std::byte& byte : block) byte ^= std::byte{0x36 ^ 0x5c};
  outer_.Update(block);
}

bool EqualInConstantTime(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.bytes.data(), b.bytes.data(), sizeof(Digest)) == 0;
}

}  // namespace quire
