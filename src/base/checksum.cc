#include "base/checksum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "base/copied_checksum.h"

namespace quire {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian");

template <typename T>
T Load(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// The five primes of XXH64.
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;

uint64_t Round(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

uint64_t MergeLane(uint64_t hash, uint64_t lane) {
  return (hash ^ Round(0, lane)) * kPrime1 + kPrime4;
}

// Consumes whole stripes of 32 bytes and returns their hash.
uint64_t HashStripes(const unsigned char*& from, size_t& left, uint64_t seed) {
  uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (; left >= 32; from += 32, left -= 32) {
    for (int i = 0; i < 4; ++i) lanes[i] = Round(lanes[i], Load<uint64_t>(from + 8 * i));
  }
  uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                  std::rotl(lanes[3], 18);
  for (uint64_t lane : lanes) hash = MergeLane(hash, lane);
  return hash;
}

uint64_t HashTail(const unsigned char* from, size_t left, uint64_t hash) {
  for (; left >= 8; from += 8, left -= 8) {
    hash = std::rotl(hash ^ Round(0, Load<uint64_t>(from)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ Load<uint32_t>(from) * kPrime1, 23) * kPrime2 + kPrime3;
    from += 4;
    left -= 4;
  }
  for (; left > 0; ++from, --left) hash = std::rotl(hash ^ *from * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

// The reflected polynomial of CRC-32C.
constexpr uint32_t kCastagnoli = 0x82F63B78;

constexpr std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kCastagnoli : 0);
    table[byte] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = MakeCrcTable();

#if defined(__x86_64__)
// The instruction takes 3 cycles and a new one can start each cycle, so three stripes of the input
// are summed side by side and put together: three times the speed of one chain. Memory is read
// ahead within stripes, so long ones come first: from memory they are twice as fast as short ones,
// by which sections of a few KiB gain, too.
constexpr size_t kLongStripeBytes = 16384;
constexpr size_t kMiddleStripeBytes = 4096;
constexpr size_t kShortStripeBytes = 1024;

// Linear maps of 32 bits, column i the image of bit i.
using BitMatrix = std::array<uint32_t, 32>;

constexpr uint32_t Apply(const BitMatrix& matrix, uint32_t bits) {
  uint32_t sum = 0;
  for (size_t i = 0; i < 32; ++i) sum ^= bits >> i & 1 ? matrix[i] : 0;
  return sum;
}

// What kStripeBytes zeros after it do to a checksum's state, by the byte of the state.
using ShiftTables = std::array<std::array<uint32_t, 256>, 4>;
template <size_t kStripeBytes>
constexpr ShiftTables MakeShiftTables() {
  static_assert(std::has_single_bit(kStripeBytes), "the loop below doubles");
  BitMatrix zeros{};  // one byte of them, then two, four, ...
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t bit = uint32_t{1} << i;
    zeros[i] = bit >> 8 ^ kCrcTable[bit & 0xFF];
  }
  for (size_t bytes = 1; bytes < kStripeBytes; bytes *= 2) {
    const BitMatrix half = zeros;
    for (uint32_t& column : zeros) column = Apply(half, column);
  }
  ShiftTables tables{};
  for (size_t place = 0; place < 4; ++place) {
    for (uint32_t byte = 0; byte < 256; ++byte)
      tables[place][byte] = Apply(zeros, byte << 8 * place);
  }
  return tables;
}

template <size_t kStripeBytes>
uint64_t ShiftByStripe(uint64_t state) {
  static constexpr ShiftTables kTables = MakeShiftTables<kStripeBytes>();
  return kTables[0][state & 0xFF] ^ kTables[1][state >> 8 & 0xFF] ^ kTables[2][state >> 16 & 0xFF] ^
         kTables[3][state >> 24 & 0xFF];
}

// The next word; where it is copied, exactly the word that is written is returned, whatever others
// write to `from` meanwhile.
template <bool kCopies, typename T>
T Take(const unsigned char* from, [[maybe_unused]] unsigned char* to) {
  T word = Load<T>(from);
  if constexpr (kCopies) {
    asm volatile("" : "+r"(word));  // it is not loaded a second time
    std::memcpy(to, &word, sizeof(word));
  }
  return word;
}

// Input that is summed, and copied where kCopies says so.
template <bool kCopies>
struct Input {
  const unsigned char* from;
  unsigned char* to;
  size_t left;

  template <typename T>
  T At(size_t offset) const {
    return Take<kCopies, T>(from + offset, kCopies ? to + offset : nullptr);
  }
  void Skip(size_t bytes) {
    from += bytes;
    if constexpr (kCopies) to += bytes;
    left -= bytes;
  }
};

// Consumes whole triples of stripes and returns the state after them.
template <size_t kStripeBytes, bool kCopies>
__attribute__((target("sse4.2"))) uint64_t SumStripes(Input<kCopies>& input, uint64_t state) {
  for (; input.left >= 3 * kStripeBytes; input.Skip(3 * kStripeBytes)) {
    const Input<kCopies> here = input;  // in registers: for all that is known, `to` could be there
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t at = 0; at < kStripeBytes; at += 8) {
      state = _mm_crc32_u64(state, here.template At<uint64_t>(at));
      second = _mm_crc32_u64(second, here.template At<uint64_t>(at + kStripeBytes));
      third = _mm_crc32_u64(third, here.template At<uint64_t>(at + 2 * kStripeBytes));
    }
    state = ShiftByStripe<kStripeBytes>(ShiftByStripe<kStripeBytes>(state) ^ second) ^ third;
  }
  return state;
}

template <bool kCopies>
__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(Input<kCopies> input, uint32_t crc) {
  uint64_t state = ~crc;
  state = SumStripes<kLongStripeBytes>(input, state);
  state = SumStripes<kMiddleStripeBytes>(input, state);
  state = SumStripes<kShortStripeBytes>(input, state);
  for (; input.left >= 8; input.Skip(8))
    state = _mm_crc32_u64(state, input.template At<uint64_t>(0));
  uint32_t state32 = static_cast<uint32_t>(state);
  for (; input.left > 0; input.Skip(1))
    state32 = _mm_crc32_u8(state32, input.template At<uint8_t>(0));
  return ~state32;
}

bool HasSse42() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#endif

}  // namespace

uint64_t Hash64(const void* data, size_t size, uint64_t seed) {
  const auto* from = static_cast<const unsigned char*>(data);
  size_t left = size;
  uint64_t hash = size >= 32 ? HashStripes(from, left, seed) : seed + kPrime5;
  return HashTail(from, left, hash + size);
}

uint32_t Crc32cPortable(const void* data, size_t size, uint32_t crc) {
  const auto* from = static_cast<const unsigned char*>(data);
  uint32_t state = ~crc;
  for (size_t i = 0; i < size; ++i) state = state >> 8 ^ kCrcTable[(state ^ from[i]) & 0xFF];
  return ~state;
}

uint32_t Crc32c(const void* data, size_t size, uint32_t crc) {
#if defined(__x86_64__)
  if (HasSse42()) {
    return Crc32cSse42(
        Input<false>{.from = static_cast<const unsigned char*>(data), .to = nullptr, .left = size},
        crc);
  }
#endif
  return Crc32cPortable(data, size, crc);
}

uint32_t Crc32cOfPieces(std::span<const std::span<std::byte>> pieces, size_t count, uint32_t crc) {
  for (const std::span<std::byte>& piece : pieces) {
    const size_t here = std::min(count, piece.size());
    crc = Crc32c(piece.data(), here, crc);
    count -= here;
  }
  return crc;
}

uint32_t CopyCrc32c(void* to, const void* from, size_t size, uint32_t crc) {
#if defined(__x86_64__)
  if (HasSse42()) {
    return Crc32cSse42(Input<true>{.from = static_cast<const unsigned char*>(from),
                                   .to = static_cast<unsigned char*>(to),
                                   .left = size},
                       crc);
  }
#endif
  if (size > 0) std::memcpy(to, from, size);
  return Crc32c(to, size, crc);
}

}  // namespace quire
