#include "chunk/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace quire {
namespace {

// The first 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t LoadBigEndian(const std::byte* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof(value));
  return __builtin_bswap32(value);  // the build is little-endian: base/checksum.cc asserts it
}

template <typename T>
void StoreBigEndian(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i)
    to[i] = static_cast<std::byte>(value >> 8 * (sizeof(T) - 1 - i));
}

// The schedule of one block: its 16 words and 48 that follow from them.
std::array<uint32_t, 64> MessageSchedule(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = LoadBigEndian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15];
    const uint32_t b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  return w;
}

}  // namespace

void Sha256::HashBlock(const std::byte* block) {
  const std::array<uint32_t, 64> w = MessageSchedule(block);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t sum_e = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t t1 = h + sum_e + choice + kRoundConstants[i] + w[i];
    const uint32_t sum_a = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + sum_a + majority;
  }
  const std::array<uint32_t, 8> add{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

Sha256& Sha256::Update(std::span<const std::byte> bytes) {
  total_bytes_ += bytes.size();
  if (pending_bytes_ > 0) {
    const size_t take = std::min(bytes.size(), kBlockBytes - pending_bytes_);
    std::copy_n(bytes.begin(), take, pending_.begin() + static_cast<ptrdiff_t>(pending_bytes_));
    pending_bytes_ += take;
    bytes = bytes.subspan(take);
    if (pending_bytes_ < kBlockBytes) return *this;
    HashBlock(pending_.data());
    pending_bytes_ = 0;
  }
  for (; bytes.size() >= kBlockBytes; bytes = bytes.subspan(kBlockBytes)) HashBlock(bytes.data());
  std::copy(bytes.begin(), bytes.end(), pending_.begin());
  pending_bytes_ = bytes.size();
  return *this;
}

Digest Sha256::Finish() {
  const uint64_t bit_count = total_bytes_ * 8;
  std::array<std::byte, kBlockBytes + 8> padding{std::byte{0x80}};
  // Up to 8 bytes before the end of a block, where the length stands.
  const size_t zeros_end = (kBlockBytes + 56 - pending_bytes_ - 1) % kBlockBytes + 1;
  StoreBigEndian(padding.data() + zeros_end, bit_count);
  Update(std::span(padding).first(zeros_end + 8));
  Digest digest;
  for (size_t i = 0; i < 8; ++i) {
    StoreBigEndian(std::as_writable_bytes(std::span(digest.bytes)).data() + 4 * i, state_[i]);
  }
  return digest;
}

HmacSha256::HmacSha256(std::string_view key) {
  std::array<std::byte, Sha256::kBlockBytes> block{};
  if (key.size() > block.size()) {
    const Digest hashed = Sha256().Update(key).Finish();
    std::memcpy(block.data(), hashed.bytes.data(), hashed.bytes.size());
  } else if (!key.empty()) {
    std::memcpy(block.data(), key.data(), key.size());
  }
  for (std::byte& byte : block) byte ^= std::byte{0x36};
  inner_.Update(block);
  for (std::byte& byte : block) byte ^= std::byte{0x36 ^ 0x5c};
  outer_.Update(block);
}

Digest HmacSha256::Finish() { return outer_.Update(inner_.Finish()).Finish(); }

bool EqualInConstantTime(const Digest& a, const Digest& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.bytes.size(); ++i)
    difference = static_cast<uint8_t>(difference | (a.bytes[i] ^ b.bytes[i]));
  return difference == 0;
}

}  // namespace quire
