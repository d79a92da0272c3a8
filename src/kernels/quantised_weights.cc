#include "kernels/quantised_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "base/numa_nodes.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr int64_t kSuperInputs = kQuantGroup * kSuperGroups;

// One block of a row in parts that every format has: a byte per input, and scales per group.
struct BlockParts {
  int8_t codes[kSuperInputs];       // of 8 bits signed, else 0 ... 63
  uint8_t scales[kSuperGroups][2];  // kPairs: s, t; kHalves, kHalfPairs: of each half, as strips
                                    // have them; kGroups: s - 32, signed
  uint16_t d = 0, m = 0;            // float16, with kPowerOfTwo bfloat16
  uint32_t word = 0;                // kWord, kWordWithZero
};

uint16_t ReadF16(const uint8_t* bytes) { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); }

// Bytes side by side, which are shifted and masked together. A mask leaves no bit that a shift
// brought from the byte beside.
template <typename Word>
Word LoadBytesOf(const void* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}
template <typename Word>
constexpr Word InEachByte(int mask) {
  return static_cast<Word>(~Word{0} / 255 * static_cast<Word>(mask));
}
template <typename Word>
Word BitsOfBytes(Word bytes, int first, int mask) {
  return static_cast<Word>(bytes >> first) & InEachByte<Word>(mask);
}
constexpr int64_t kEightBytes = sizeof(uint64_t);

// `count`: a multiple of 8.
void ReadNibbles(const uint8_t* bytes, int8_t* low, int8_t* high, int64_t count) {
  for (int64_t i = 0; i < count; i += kEightBytes) {
    const auto both = LoadBytesOf<uint64_t>(bytes + i);
    const uint64_t lower = BitsOfBytes(both, 0, 15);
    const uint64_t upper = BitsOfBytes(both, 4, 15);
    std::memcpy(low + i, &lower, sizeof(lower));
    std::memcpy(high + i, &upper, sizeof(upper));
  }
}

// Adds bits to eight codes, from bit `shift` on.
void RaiseCodes(uint64_t bits, int shift, int8_t* codes) {
  const uint64_t raised = LoadBytesOf<uint64_t>(codes) | bits << shift;
  std::memcpy(codes, &raised, sizeof(raised));
}

// Byte i of 32 holds a bit of input i of all eight groups: bit `shift` of their codes.
void RaiseByBitsOfGroups(const uint8_t* bytes, int shift, int8_t* codes) {
  for (int64_t i = 0; i < kQuantGroup; i += kEightBytes) {
    const auto bits = LoadBytesOf<uint64_t>(bytes + i);
    for (int g = 0; g < kSuperGroups; ++g) {
      RaiseCodes(BitsOfBytes(bits, g, 1), shift, codes + g * kQuantGroup + i);
    }
  }
}

// The 6-bit scales of kQ4_K: twelve bytes hold eight s and eight t. The first four of each have
// bytes of their own, whose upper two bits belong to the last four.
void ReadSixBitScales(const uint8_t* bytes, BlockParts* parts) {
  for (int g = 0; g < 4; ++g) {
    parts->scales[g][0] = bytes[g] & 63;
    parts->scales[g][1] = bytes[4 + g] & 63;
    parts->scales[4 + g][0] = static_cast<uint8_t>((bytes[8 + g] & 15) | (bytes[g] >> 6) << 4);
    parts->scales[4 + g][1] = static_cast<uint8_t>(bytes[8 + g] >> 4 | (bytes[4 + g] >> 6) << 4);
  }
}

// Upper bits of codes: bit i of `bits` belongs to codes[i].
void RaiseByFifthBits(const uint8_t* bits, int64_t count, int8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<int8_t>(codes[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
  }
}

// Groups of a block of 256: a pair of them shares 32 bytes, the first the low halves.
void ReadPairedNibbles(const uint8_t* bytes, int8_t* codes) {
  for (int64_t pair = 0; pair < kSuperGroups / 2; ++pair) {
    int8_t* const of_pair = codes + pair * 2 * kQuantGroup;
    ReadNibbles(bytes + pair * kQuantGroup, of_pair, of_pair + kQuantGroup, kQuantGroup);
  }
}

void ReadQ4KBlock(const uint8_t* bytes, BlockParts* parts) {
  parts->m = ReadF16(bytes + 2);
  ReadSixBitScales(bytes + 4, parts);
  ReadPairedNibbles(bytes + 16, parts->codes);
}

void ReadQ5KBlock(const uint8_t* bytes, BlockParts* parts) {
  parts->m = ReadF16(bytes + 2);
  ReadSixBitScales(bytes + 4, parts);
  ReadPairedNibbles(bytes + 48, parts->codes);
  RaiseByBitsOfGroups(bytes + 16, 4, parts->codes);
}

// The scales' lower four bits stand two in a byte, the upper two of all in two bytes before.
void ReadIq4XsBlock(const uint8_t* bytes, BlockParts* parts) {
  const int upper = bytes[2] | bytes[3] << 8;
  for (int g = 0; g < kSuperGroups; ++g) {
    const int lower = bytes[4 + g / 2] >> (g % 2 * 4) & 15;
    parts->scales[g][0] = static_cast<uint8_t>((lower | (upper >> (2 * g) & 3) << 4) - 32);
    parts->scales[g][1] = 0;
    int8_t* const codes = parts->codes + g * kQuantGroup;
    ReadNibbles(bytes + 8 + g * 16, codes, codes + 16, 16);
  }
}

// 2^(e - 128) as bfloat16; 255 stands for NaN.
uint16_t PowerOfTwo(uint8_t e) {
  if (e == 255) return 0x7FC0;
  return F32ToBf16(std::ldexp(1.0F, e - 128));
}

// Two halves of 128 inputs, each: 64 bytes with the lower four bits, 32 with the upper two.
void ReadQ6KBlock(const uint8_t* bytes, BlockParts* parts) {
  for (int64_t half = 0; half < 2; ++half) {
    int8_t* const codes = parts->codes + half * 128;
    ReadNibbles(bytes + half * 64, codes, codes + 64, 64);
    for (int64_t i = 0; i < kQuantGroup; i += kEightBytes) {
      const auto upper = LoadBytesOf<uint64_t>(bytes + 128 + half * 32 + i);
      for (int quarter = 0; quarter < 4; ++quarter) {
        RaiseCodes(BitsOfBytes(upper, 2 * quarter, 3), 4, codes + quarter * kQuantGroup + i);
      }
    }
  }
  std::memcpy(parts->scales, bytes + 192, sizeof(parts->scales));
  parts->d = ReadF16(bytes + 208);
}

// Two bits of each code: those of 128 inputs share 32 bytes, of a group all the same bits of them.
void ReadPairsOfBits(const uint8_t* bytes, int8_t* codes) {
  for (int64_t i = 0; i < kSuperInputs; i += kEightBytes) {
    const int first = static_cast<int>(i / kQuantGroup % 4 * 2);
    const auto pairs = LoadBytesOf<uint64_t>(bytes + i / 128 * 32 + i % 32);
    const uint64_t bits = BitsOfBytes(pairs, first, 3);
    std::memcpy(codes + i, &bits, sizeof(bits));
  }
}

// The lower four bits of the sixteen scales stand two in a byte, scales 0 and 8 in the first, the
// upper two of all in the four bytes behind: those of 0, 4, 8 and 12 in the first.
void ReadQ3KBlock(const uint8_t* bytes, BlockParts* parts) {
  ReadPairsOfBits(bytes + 32, parts->codes);
  RaiseByBitsOfGroups(bytes, 2, parts->codes);
  const uint8_t* const scales = bytes + 96;
  for (int s = 0; s < 2 * kSuperGroups; ++s) {
    const int lower = scales[s % 8] >> (s / 8 * 4) & 15;
    const int upper = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    parts->scales[s / 2][s % 2] = static_cast<uint8_t>((lower | upper << 4) - 32);
  }
  parts->d = ReadF16(bytes + 108);
}

void ReadQ2KBlock(const uint8_t* bytes, BlockParts* parts) {
  std::memcpy(parts->scales, bytes, sizeof(parts->scales));
  ReadPairsOfBits(bytes + 16, parts->codes);
  parts->d = ReadF16(bytes + 80);
  parts->m = ReadF16(bytes + 82);
}

// A word, then the codes of 32 or 128 inputs; 4-bit codes 32 by 32.
void ReadWordBlock(WeightFormat format, const uint8_t* bytes, BlockParts* parts) {
  std::memcpy(&parts->word, bytes, sizeof(parts->word));
  const uint8_t* const codes = bytes + sizeof(parts->word);
  const int64_t inputs = BlockInputs(format);
  if (LayoutOf(format).codes == CodeBits::kEight) {
    std::memcpy(parts->codes, codes, static_cast<size_t>(inputs));
    return;
  }
  for (int64_t i = 0; i < inputs; i += kQuantGroup) {
    ReadNibbles(codes + i / 2, parts->codes + i, parts->codes + i + 16, 16);
  }
}

void ReadBlock(WeightFormat format, const std::byte* block, BlockParts* parts) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(block);
  parts->d = ReadF16(bytes);
  switch (format) {
    case WeightFormat::kQ8_0:
      std::memcpy(parts->codes, bytes + 2, kQuantGroup);
      return;
    case WeightFormat::kQ4_0:
    case WeightFormat::kIQ4_NL:
      ReadNibbles(bytes + 2, parts->codes, parts->codes + 16, 16);
      return;
    case WeightFormat::kQ4_1:
      parts->m = ReadF16(bytes + 2);
      ReadNibbles(bytes + 4, parts->codes, parts->codes + 16, 16);
      return;
    case WeightFormat::kQ5_0:
      ReadNibbles(bytes + 6, parts->codes, parts->codes + 16, 16);
      RaiseByFifthBits(bytes + 2, kQuantGroup, parts->codes);
      return;
    case WeightFormat::kQ5_1:
      parts->m = ReadF16(bytes + 2);
      ReadNibbles(bytes + 8, parts->codes, parts->codes + 16, 16);
      RaiseByFifthBits(bytes + 4, kQuantGroup, parts->codes);
      return;
    case WeightFormat::kMXFP4:
      parts->d = PowerOfTwo(bytes[0]);
      ReadNibbles(bytes + 1, parts->codes, parts->codes + 16, 16);
      return;
    case WeightFormat::kQ4_K:
      return ReadQ4KBlock(bytes, parts);
    case WeightFormat::kQ5_K:
      return ReadQ5KBlock(bytes, parts);
    case WeightFormat::kQ6_K:
      return ReadQ6KBlock(bytes, parts);
    case WeightFormat::kIQ4_XS:
      return ReadIq4XsBlock(bytes, parts);
    case WeightFormat::kQ3_K:
      return ReadQ3KBlock(bytes, parts);
    case WeightFormat::kQ2_K:
      return ReadQ2KBlock(bytes, parts);
    case WeightFormat::kI8G:
    case WeightFormat::kI8Z:
    case WeightFormat::kI4G:
    case WeightFormat::kI4Z:
    case WeightFormat::kI8GWide:
    case WeightFormat::kI8ZWide:
    case WeightFormat::kI4GWide:
    case WeightFormat::kI4ZWide:
      return ReadWordBlock(format, bytes, parts);
  }
}

// q - z, or the table's value of q.
float ValueOf(const WeightLayout& layout, const BlockParts& parts, int8_t code) {
  if (layout.values != nullptr) return layout.values[code];
  if (layout.scales == BlockScales::kWordWithZero) {
    return static_cast<float>(code - (static_cast<int>(parts.word & kZeroBits) - kZeroRaised));
  }
  const int offset = layout.offset_bits > 0 ? 1 << layout.offset_bits : 0;
  return static_cast<float>(code - offset);
}

float ScaleOf(const WeightLayout& layout, const BlockParts& parts, int64_t i) {
  const uint8_t* const scales = parts.scales[i / kQuantGroup];
  switch (layout.scales) {
    case BlockScales::kOwn:
    case BlockScales::kOwnWithSummand:
      return F16ToF32(parts.d);
    case BlockScales::kPowerOfTwo:
      return Bf16ToF32(parts.d);
    case BlockScales::kPairs:
      return F16ToF32(parts.d) * static_cast<float>(scales[0]);
    case BlockScales::kHalves:
      return F16ToF32(parts.d) *
             static_cast<float>(static_cast<int8_t>(scales[i % kQuantGroup / 16]));
    case BlockScales::kHalfPairs:
      return F16ToF32(parts.d) * static_cast<float>(scales[i % kQuantGroup / 16] & 15);
    case BlockScales::kGroups:
      return F16ToF32(parts.d) * static_cast<float>(static_cast<int8_t>(scales[0]));
    case BlockScales::kWord:
      return std::bit_cast<float>(parts.word);
    case BlockScales::kWordWithZero:
      return std::bit_cast<float>(parts.word & ~kZeroBits);
  }
  return 0;
}

void Dequantise(WeightFormat format, const BlockParts& parts, float* values) {
  const WeightLayout& layout = LayoutOf(format);
  const float m = F16ToF32(parts.m);
  for (int64_t i = 0; i < BlockInputs(format); ++i) {
    const float product = ScaleOf(layout, parts, i) * ValueOf(layout, parts, parts.codes[i]);
    if (layout.scales == BlockScales::kPairs) {
      values[i] = product - m * static_cast<float>(parts.scales[i / kQuantGroup][1]);
    } else if (layout.scales == BlockScales::kHalfPairs) {
      const int t = parts.scales[i / kQuantGroup][i % kQuantGroup / 16] >> 4;
      values[i] = product - m * static_cast<float>(t);
    } else if (layout.scales == BlockScales::kOwnWithSummand) {
      values[i] = product + m;
    } else {
      values[i] = product;
    }
  }
}

// -------------------------------------------------------------------------------------------------
// strips

template <typename Byte>
Byte* StripAt(Byte* packed, WeightFormat format, int64_t k, int64_t row) {
  return packed + row / kStripOutputs * StripBytes(format, k);
}

// The bytes of a group, and the scales of its block of 256.
template <typename Byte>
struct GroupBytes {
  GroupBytes(Byte* strip, WeightFormat format, int64_t group)
      : supers(strip + group / kSuperGroups * RunBytes(format)) {
    Byte* const pair =
        supers + SuperScaleBytes(format) + group % kSuperGroups / 2 * PairBytes(format);
    scales = pair + group % 2 * GroupScaleBytes(format);
    codes = pair + 2 * GroupScaleBytes(format) + group % 2 * GroupCodeBytes(format);
    words = IsWide(format) ? supers + group % kSuperGroups / (kSuperGroups / 2) * 64 : scales;
  }

  Byte* codes;
  Byte* scales;
  Byte* words;  // where HasWords(format)
  Byte* supers;
};

// Four inputs of one output lie side by side, then those of the next output.
constexpr int64_t PlaceOf(int64_t input, int64_t output) {
  return input / 4 * kStripOutputs * 4 + output * 4 + input % 4;
}

// Bits of codes that do not lie in nibbles, one of each code or two: `count` from bit `first` on,
// in the bytes from `begin` of a group on.
struct BitField {
  int64_t begin;
  int first, count;

  int64_t PlaceOf(int64_t input, int64_t output) const {
    return begin + (count == 2 ? input / 16 * 64 : 0) + output * 4 + input % 4;
  }
  int ShiftOf(int64_t input) const {
    return static_cast<int>(count == 2 ? input % 16 / 4 * 2 : input / 4);
  }
  int mask() const { return (1 << count) - 1; }
  int64_t inputs() const { return 32 / count; }  // whose bits share four bytes
};
constexpr BitField kFifthBits[] = {{256, 4, 1}};
constexpr BitField kUpperOfSix[] = {{256, 4, 2}};
constexpr BitField kThreeBits[] = {{0, 0, 2}, {128, 2, 1}};
constexpr BitField kTwoBits[] = {{0, 0, 2}};

constexpr std::span<const BitField> FieldsOf(CodeBits bits) {
  switch (bits) {
    case CodeBits::kEight:
    case CodeBits::kFour:
      return {};
    case CodeBits::kFive:
      return kFifthBits;
    case CodeBits::kSix:
      return kUpperOfSix;
    case CodeBits::kThree:
      return kThreeBits;
    case CodeBits::kTwo:
      return kTwoBits;
  }
  return {};
}
constexpr bool HasNibbles(CodeBits bits) {
  return bits == CodeBits::kFour || bits == CodeBits::kFive || bits == CodeBits::kSix;
}

template <CodeBits kBits>
void PackCodes(const int8_t* codes, int64_t output, std::byte* group) {
  if constexpr (kBits == CodeBits::kEight) {
    for (int64_t i = 0; i < kQuantGroup; i += 4) {
      std::memcpy(group + PlaceOf(i, output), codes + i, 4);
    }
    return;
  }
  if constexpr (HasNibbles(kBits)) {
    for (int64_t i = 0; i < kQuantGroup / 2; i += 4) {
      const uint32_t lower = BitsOfBytes(LoadBytesOf<uint32_t>(codes + i), 0, 15);
      const uint32_t upper = BitsOfBytes(LoadBytesOf<uint32_t>(codes + 16 + i), 0, 15);
      const uint32_t both = lower | upper << 4;
      std::memcpy(group + PlaceOf(i, output), &both, sizeof(both));
    }
  }
  for (const BitField& field : FieldsOf(kBits)) {
    for (int64_t i = 0; i < kQuantGroup; i += field.inputs()) {
      uint32_t together = 0;
      for (int64_t j = i; j < i + field.inputs(); j += 4) {
        const auto four = LoadBytesOf<uint32_t>(codes + j);
        together |= BitsOfBytes(four, field.first, field.mask()) << field.ShiftOf(j);
      }
      std::memcpy(group + field.PlaceOf(i, output), &together, sizeof(together));
    }
  }
}

void UnpackCodes(CodeBits bits, const std::byte* group, int64_t output, int8_t* codes) {
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    if (bits == CodeBits::kEight) {
      codes[i] = static_cast<int8_t>(group[PlaceOf(i, output)]);
      continue;
    }
    int code = 0;
    if (HasNibbles(bits)) {
      const auto both = static_cast<int>(group[PlaceOf(i % 16, output)]);
      code = i < 16 ? both & 15 : both >> 4;
    }
    for (const BitField& field : FieldsOf(bits)) {
      const auto byte = static_cast<int>(group[field.PlaceOf(i, output)]);
      code |= (byte >> field.ShiftOf(i) & field.mask()) << field.first;
    }
    codes[i] = static_cast<int8_t>(code);
  }
}

template <CodeBits kBits>
void PackBlock(WeightFormat format, const BlockParts& parts, int64_t block, int64_t output,
               std::byte* strip) {
  const int64_t groups = BlockInputs(format) / kQuantGroup;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t group = block * groups + g;
    const GroupBytes<std::byte> bytes(strip, format, group);
    PackCodes<kBits>(parts.codes + g * kQuantGroup, output, bytes.codes);
    std::byte* const scales = bytes.scales;
    if (HasWords(format)) {
      std::memcpy(bytes.words + 4 * output, &parts.word, sizeof(parts.word));
    } else if (HasSupers(format)) {
      scales[output] = static_cast<std::byte>(parts.scales[g][0]);
      scales[kStripOutputs + output] = static_cast<std::byte>(parts.scales[g][1]);
    } else {
      std::memcpy(scales + 2 * output, &parts.d, 2);
      if (HasSummand(format)) {
        std::memcpy(scales + 2 * (kStripOutputs + output), &parts.m, 2);
      }
    }
  }
  if (!HasSupers(format)) return;
  std::byte* const supers = GroupBytes<std::byte>(strip, format, block * groups).supers;
  std::memcpy(supers + 2 * output, &parts.d, 2);
  if (HasSummand(format)) {
    std::memcpy(supers + 2 * (kStripOutputs + output), &parts.m, 2);
  }
}

void UnpackBlock(WeightFormat format, const std::byte* strip, int64_t block, int64_t output,
                 BlockParts* parts) {
  const int64_t groups = BlockInputs(format) / kQuantGroup;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t group = block * groups + g;
    const GroupBytes<const std::byte> bytes(strip, format, group);
    UnpackCodes(LayoutOf(format).codes, bytes.codes, output, parts->codes + g * kQuantGroup);
    const std::byte* const scales = bytes.scales;
    if (HasWords(format)) {
      std::memcpy(&parts->word, bytes.words + 4 * output, sizeof(parts->word));
    } else if (HasSupers(format)) {
      parts->scales[g][0] = static_cast<uint8_t>(scales[output]);
      parts->scales[g][1] = static_cast<uint8_t>(scales[kStripOutputs + output]);
    } else {
      std::memcpy(&parts->d, scales + 2 * output, 2);
      if (HasSummand(format)) {
        std::memcpy(&parts->m, scales + 2 * (kStripOutputs + output), 2);
      }
    }
  }
  if (!HasSupers(format)) return;
  const std::byte* const supers = GroupBytes<const std::byte>(strip, format, block * groups).supers;
  std::memcpy(&parts->d, supers + 2 * output, 2);
  if (HasSummand(format)) {
    std::memcpy(&parts->m, supers + 2 * (kStripOutputs + output), 2);
  }
}

// Rows of outputs that stand side by side in a strip.
template <CodeBits kBits>
void PackRowsOf(WeightFormat format, std::span<const std::byte* const> rows, int64_t k,
                std::byte* strip) {
  const int64_t blocks = k / BlockInputs(format);
  BlockParts parts{};
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t output = 0;
    for (const std::byte* const row : rows) {
      ReadBlock(format, row + block * BlockBytes(format), &parts);
      PackBlock<kBits>(format, parts, block, output++, strip);
    }
  }
}

void PackRows(WeightFormat format, std::span<const std::byte* const> rows, int64_t k,
              std::byte* strip) {
  switch (LayoutOf(format).codes) {
    case CodeBits::kEight:
      return PackRowsOf<CodeBits::kEight>(format, rows, k, strip);
    case CodeBits::kSix:
      return PackRowsOf<CodeBits::kSix>(format, rows, k, strip);
    case CodeBits::kFive:
      return PackRowsOf<CodeBits::kFive>(format, rows, k, strip);
    case CodeBits::kFour:
      return PackRowsOf<CodeBits::kFour>(format, rows, k, strip);
    case CodeBits::kThree:
      return PackRowsOf<CodeBits::kThree>(format, rows, k, strip);
    case CodeBits::kTwo:
      return PackRowsOf<CodeBits::kTwo>(format, rows, k, strip);
  }
}

}  // namespace

std::string_view WeightFormatName(WeightFormat format) { return LayoutOf(format).name; }

std::optional<WeightFormat> WeightFormatOfGguf(uint32_t type) {
  if (type == kNotOfGguf) return std::nullopt;
  for (const WeightFormat format : kWeightFormats) {
    if (LayoutOf(format).gguf_type == type) return format;
  }
  return std::nullopt;
}

int64_t BlockInputs(WeightFormat format) { return LayoutOf(format).block_inputs; }

int64_t BlockBytes(WeightFormat format) { return LayoutOf(format).block_bytes; }

int64_t StoredRowBytes(WeightFormat format, int64_t k) {
  return k / BlockInputs(format) * BlockBytes(format);
}

void DequantiseRow(WeightFormat format, const std::byte* row, int64_t k, float* values) {
  BlockParts parts{};
  for (int64_t i = 0; i < k; i += BlockInputs(format)) {
    ReadBlock(format, row, &parts);
    Dequantise(format, parts, values + i);
    row += BlockBytes(format);
  }
}

size_t PackedQuantisedBytes(WeightFormat format, int64_t n, int64_t k) {
  return static_cast<size_t>(Strips(n) * StripBytes(format, k));
}

int64_t StoredRowOf(int64_t row, int64_t rotary_head_rows) {
  if (rotary_head_rows == 0) return row;
  const int64_t in_head = row % rotary_head_rows;
  const int64_t half = rotary_head_rows / 2;
  return row - in_head + 2 * (in_head % half) + in_head / half;
}

void PackQuantised(WeightFormat format, const std::byte* rows, int64_t n, int64_t k,
                   int64_t rotary_head_rows, std::byte* packed, ParallelRunner& runner) {
  const int64_t row_bytes = StoredRowBytes(format, k);
  Along(runner).ParallelFor(Strips(n), [&](int64_t strip, int) {
    const int64_t first = strip * kStripOutputs;
    const std::byte* stored[kStripOutputs];
    const int64_t count = std::min(kStripOutputs, n - first);
    for (int64_t output = 0; output < count; ++output) {
      stored[output] = rows + StoredRowOf(first + output, rotary_head_rows) * row_bytes;
    }
    PackRows(format, {stored, static_cast<size_t>(count)}, k,
             packed + strip * StripBytes(format, k));
  });
}

void PackQuantisedStrip(WeightFormat format, const std::byte* rows, int64_t count, int64_t k,
                        std::byte* strip) {
  const std::byte* stored[kStripOutputs];
  for (int64_t output = 0; output < count; ++output) {
    stored[output] = rows + output * StoredRowBytes(format, k);
  }
  PackRows(format, {stored, static_cast<size_t>(count)}, k, strip);
}

void ReadPackedQuantisedRow(WeightFormat format, const std::byte* packed, int64_t k, int64_t row,
                            float* values) {
  const std::byte* const strip = StripAt(packed, format, k, row);
  BlockParts parts{};
  for (int64_t i = 0; i < k; i += BlockInputs(format)) {
    UnpackBlock(format, strip, i / BlockInputs(format), row % kStripOutputs, &parts);
    Dequantise(format, parts, values + i);
  }
}

}  // namespace quire
