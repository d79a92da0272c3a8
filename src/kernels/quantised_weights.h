// Weights in blocks of codes that share scales: the bytes as GGUF stores them, row by row (or as
// the loader of quantised folders writes them), and as the kernels read them. Repacking moves bits
// and loses none.
#ifndef QUIRE_KERNELS_QUANTISED_WEIGHTS_H_
#define QUIRE_KERNELS_QUANTISED_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "quire/seams.h"

namespace quire {

// A block is the number of inputs after which a row's bytes repeat. `value` is a table's number of
// a 4-bit code (kNearlyNormal, kTinyFloat):
//   kQ8_0, 32 inputs:   float16 d; int8 q[32].                     w = d q
//   kQ4_0, 32 inputs:   float16 d; 4-bit q[32].                    w = d (q - 8)
//   kQ4_1, 32 inputs:   float16 d, m; 4-bit q[32].                 w = d q + m
//   kQ5_0, 32 inputs:   float16 d; 5-bit q[32].                    w = d (q - 16)
//   kQ5_1, 32 inputs:   float16 d, m; 5-bit q[32].                 w = d q + m
//   kIQ4_NL, 32 inputs: float16 d; 4-bit q[32].                    w = d value(q)
//   kMXFP4, 32 inputs:  8-bit e; 4-bit q[32].                      w = 2^(e - 128) value(q)
//   kQ4_K, 256 inputs:  float16 d, m; per 32 inputs 6-bit s, t;
//                       4-bit q[256].                              w = d s q - m t
//   kQ5_K, 256 inputs:  float16 d, m; per 32 inputs 6-bit s, t;
//                       5-bit q[256].                              w = d s q - m t
//   kQ6_K, 256 inputs:  6-bit q[256]; per 16 inputs int8 s;
//                       float16 d.                                 w = d s (q - 32)
//   kIQ4_XS, 256 inputs: float16 d; per 32 inputs 6-bit s;
//                       4-bit q[256].                              w = d (s - 32) value(q)
//   kQ3_K, 256 inputs:  3-bit q[256]; per 16 inputs 6-bit s;
//                       float16 d.                                 w = d (s - 32) (q - 4)
//   kQ2_K, 256 inputs:  per 16 inputs 4-bit s, t; 2-bit q[256];
//                       float16 d, m.                              w = d s q - m t
// Not of GGUF but of Hugging Face folders; G and Z: of 32 inputs, Wide: of 128. z is an integer of
// its own for each block:
//   kI8G, kI8GWide:     float32 d; int8 q[32 or 128].              w = d q
//   kI8Z, kI8ZWide:     word of d and z; int8 q[32 or 128].        w = d (q - z)
//   kI4G, kI4GWide:     float32 d; 4-bit q[32 or 128].             w = d (q - 8)
//   kI4Z, kI4ZWide:     word of d and z; 4-bit q[32 or 128].       w = d (q - z)
enum class WeightFormat : uint8_t {
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIQ4_NL,
  kMXFP4,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_XS,
  kQ3_K,
  kQ2_K,
  kI8G,
  kI8Z,
  kI4G,
  kI4Z,
  kI8GWide,
  kI8ZWide,
  kI4GWide,
  kI4ZWide,
};

inline constexpr WeightFormat kWeightFormats[] = {
    WeightFormat::kQ8_0,   WeightFormat::kQ4_0,    WeightFormat::kQ4_1,    WeightFormat::kQ5_0,
    WeightFormat::kQ5_1,   WeightFormat::kIQ4_NL,  WeightFormat::kMXFP4,   WeightFormat::kQ4_K,
    WeightFormat::kQ5_K,   WeightFormat::kQ6_K,    WeightFormat::kIQ4_XS,  WeightFormat::kQ3_K,
    WeightFormat::kQ2_K,   WeightFormat::kI8G,     WeightFormat::kI8Z,     WeightFormat::kI4G,
    WeightFormat::kI4Z,    WeightFormat::kI8GWide, WeightFormat::kI8ZWide, WeightFormat::kI4GWide,
    WeightFormat::kI4ZWide};

// Values of 4-bit codes. The second are the numbers of a sign, two bits of exponent and one of
// mantissa, times two.
inline constexpr int8_t kNearlyNormal[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                             1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kTinyFloat[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The parts of a format.
enum class CodeBits : uint8_t { kEight, kFour, kFive, kSix, kThree, kTwo };
enum class BlockScales : uint8_t {
  kOwn,             // d of a block of 32
  kOwnWithSummand,  // and m
  kPowerOfTwo,      // 2^(e - 128) of a block of 32
  kPairs,           // d and m of a block of 256; s, t of a group
  kHalves,          // d of a block of 256; s of 16 inputs
  kHalfPairs,       // d and m of a block of 256; s, t of 16 inputs, four bits each
  kGroups,          // d of a block of 256; s of a group
  kWord,            // float32 d of a block of 32 or 128
  kWordWithZero,    // d and z of a block of 32 or 128, in 32 bits
};
inline constexpr uint32_t kNotOfGguf = 0xFFFFFFFF;
struct WeightLayout {
  std::string_view name;
  uint32_t gguf_type;  // the number of the type in GGUF files, or kNotOfGguf
  int64_t block_inputs;
  int64_t block_bytes;
  CodeBits codes;
  BlockScales scales;
  int offset_bits = 0;             // z of w = d (q - z) is 2^offset_bits; 0: z is 0
  const int8_t* values = nullptr;  // of 4-bit codes; null: the codes themselves
};

// In the order of WeightFormat.
inline constexpr WeightLayout kWeightLayouts[] = {
    {"Q8_0", 8, 32, 34, CodeBits::kEight, BlockScales::kOwn},
    {"Q4_0", 2, 32, 18, CodeBits::kFour, BlockScales::kOwn, 3},
    {"Q4_1", 3, 32, 20, CodeBits::kFour, BlockScales::kOwnWithSummand},
    {"Q5_0", 6, 32, 22, CodeBits::kFive, BlockScales::kOwn, 4},
    {"Q5_1", 7, 32, 24, CodeBits::kFive, BlockScales::kOwnWithSummand},
    {"IQ4_NL", 20, 32, 18, CodeBits::kFour, BlockScales::kOwn, 0, kNearlyNormal},
    {"MXFP4", 39, 32, 17, CodeBits::kFour, BlockScales::kPowerOfTwo, 0, kTinyFloat},
    {"Q4_K", 12, 256, 144, CodeBits::kFour, BlockScales::kPairs},
    {"Q5_K", 13, 256, 176, CodeBits::kFive, BlockScales::kPairs},
    {"Q6_K", 14, 256, 210, CodeBits::kSix, BlockScales::kHalves, 5},
    {"IQ4_XS", 23, 256, 136, CodeBits::kFour, BlockScales::kGroups, 0, kNearlyNormal},
    {"Q3_K", 11, 256, 110, CodeBits::kThree, BlockScales::kHalves, 2},
    {"Q2_K", 10, 256, 84, CodeBits::kTwo, BlockScales::kHalfPairs},
    {"I8G", kNotOfGguf, 32, 36, CodeBits::kEight, BlockScales::kWord},
    {"I8Z", kNotOfGguf, 32, 36, CodeBits::kEight, BlockScales::kWordWithZero},
    {"I4G", kNotOfGguf, 32, 20, CodeBits::kFour, BlockScales::kWord, 3},
    {"I4Z", kNotOfGguf, 32, 20, CodeBits::kFour, BlockScales::kWordWithZero},
    {"I8GWide", kNotOfGguf, 128, 132, CodeBits::kEight, BlockScales::kWord},
    {"I8ZWide", kNotOfGguf, 128, 132, CodeBits::kEight, BlockScales::kWordWithZero},
    {"I4GWide", kNotOfGguf, 128, 68, CodeBits::kFour, BlockScales::kWord, 3},
    {"I4ZWide", kNotOfGguf, 128, 68, CodeBits::kFour, BlockScales::kWordWithZero},
};
constexpr const WeightLayout& LayoutOf(WeightFormat format) {
  return kWeightLayouts[static_cast<int>(format)];
}
constexpr bool IsOfGguf(WeightFormat format) { return LayoutOf(format).gguf_type != kNotOfGguf; }
// Groups have scales of their own beside those of a block of 256.
constexpr bool HasSupers(WeightFormat format) { return LayoutOf(format).block_inputs == 256; }
// The scale of a block is a word of 32 bits.
constexpr bool HasWords(WeightFormat format) {
  const BlockScales scales = LayoutOf(format).scales;
  return scales == BlockScales::kWord || scales == BlockScales::kWordWithZero;
}
// The word of kWordWithZero: the upper 19 bits are those of a float32 d whose lower 13 are zero, as
// they are in every float16 and bfloat16 number that is widened; the lower ones hold z + 128.
inline constexpr uint32_t kZeroBits = 0x1FFF;
inline constexpr int kZeroRaised = 128;
inline constexpr int64_t kWideInputs = 128;
constexpr bool IsWide(WeightFormat format) { return LayoutOf(format).block_inputs == kWideInputs; }
// Each half of a group has scales of its own.
constexpr bool HasHalves(WeightFormat format) {
  const BlockScales scales = LayoutOf(format).scales;
  return scales == BlockScales::kHalves || scales == BlockScales::kHalfPairs;
}
// w has a summand beside the product.
constexpr bool HasSummand(WeightFormat format) {
  const BlockScales scales = LayoutOf(format).scales;
  return scales == BlockScales::kOwnWithSummand || scales == BlockScales::kPairs ||
         scales == BlockScales::kHalfPairs;
}

std::string_view WeightFormatName(WeightFormat format);  // "Q8_0", ...; static storage
// By the number of the type in GGUF files.
std::optional<WeightFormat> WeightFormatOfGguf(uint32_t type);

// Inputs and bytes of one block as stored.
int64_t BlockInputs(WeightFormat format);
int64_t BlockBytes(WeightFormat format);
// REQUIRES: k is a multiple of BlockInputs(format).
int64_t StoredRowBytes(WeightFormat format, int64_t k);

// A row as stored, as float32: products of exact factors, each rounded once, then the difference.
void DequantiseRow(WeightFormat format, const std::byte* row, int64_t k, float* values);

// -------------------------------------------------------------------------------------------------
// as the kernels read them

// Inputs whose products are summed as integers; the activations of a row have one scale per group.
inline constexpr int64_t kQuantGroup = 32;
inline constexpr int64_t kSuperGroups = 8;  // groups of a block of 256

// A strip is 16 outputs, whose bytes lie side by side; outputs from n on are zeros. Its bytes are
// in the order in which a kernel reads them, so that memory sees one stream:
//   per 8 groups (the last may be a part of them), scales of a block of 256: float16 d[16], then
//     m[16] (kPairs, kHalfPairs) or 32 zeros, so that all parts begin with a cache line; Wide
//     formats: words of both blocks of 128, each [16]
//   per pair of groups (the last may be half empty):
//     scales of both, each: float16 d[16], with kOwnWithSummand m[16]; kPowerOfTwo: bfloat16 d[16];
//       kPairs: uint8 s[16], t[16]; kHalves: int8 s[2][16], of kQ3_K s - 32; kHalfPairs: uint8
//       (s + 16 t)[2][16]; kGroups: int8 (s - 32)[16], 16 zeros; words of blocks of 32: [16]; Wide
//       formats: nothing
//     codes of both, each:
//       8 bits: [8][16 outputs][4 inputs] int8
//       4 bits: [4][16 outputs][4], the low half of a byte input 4 i + j, the high half 16 + 4 i +
//         j
//       5 bits: as 4 bits; then [16 outputs][4]: bit b of byte j is the fifth of input 4 b + j
//       6 bits: as 4 bits; then [2][16 outputs][4]: bits 2 b, 2 b + 1 of byte (i, j) are the upper
//         two of input 16 i + 4 b + j
//       2 bits: [2][16 outputs][4]: bits 2 b, 2 b + 1 of byte (i, j) are those of input 16 i + 4 b
//         + j
//       3 bits: as 2 bits; then [16 outputs][4]: bit b of byte j is the third of input 4 b + j
inline constexpr int64_t kStripOutputs = 16;

constexpr int64_t GroupCodeBytes(WeightFormat format) {
  switch (LayoutOf(format).codes) {
    case CodeBits::kEight:
      return 512;
    case CodeBits::kFour:
      return 256;
    case CodeBits::kFive:
      return 320;
    case CodeBits::kSix:
      return 384;
    case CodeBits::kThree:
      return 192;
    case CodeBits::kTwo:
      return 128;
  }
  return 0;
}
constexpr int64_t GroupScaleBytes(WeightFormat format) {
  if (HasWords(format)) return IsWide(format) ? 0 : 64;
  return LayoutOf(format).scales == BlockScales::kOwnWithSummand ? 64 : 32;
}
constexpr int64_t SuperScaleBytes(WeightFormat format) {
  if (IsWide(format)) return 128;
  return HasSupers(format) ? 64 : 0;
}
constexpr int64_t PairBytes(WeightFormat format) {
  return 2 * (GroupCodeBytes(format) + GroupScaleBytes(format));
}
// The bytes of 8 groups.
constexpr int64_t RunBytes(WeightFormat format) {
  return SuperScaleBytes(format) + kSuperGroups / 2 * PairBytes(format);
}
constexpr int64_t StripBytes(WeightFormat format, int64_t k) {
  const int64_t groups = k / kQuantGroup;
  const int64_t left = groups % kSuperGroups;
  const int64_t part = left == 0 ? 0 : SuperScaleBytes(format) + (left + 1) / 2 * PairBytes(format);
  return groups / kSuperGroups * RunBytes(format) + part;
}
constexpr int64_t Strips(int64_t n) { return (n + kStripOutputs - 1) / kStripOutputs; }

size_t PackedQuantisedBytes(WeightFormat format, int64_t n, int64_t k);

// Packs n stored rows, one after the other, into strips (64-byte aligned, zero before).
// rotary_head_rows = h > 0: rows of each head lie as pairs (0, h / 2), (1, h / 2 + 1), ... and are
// packed as 0, 1, ..., h - 1. REQUIRES: h is even and divides n.
void PackQuantised(WeightFormat format, const std::byte* rows, int64_t n, int64_t k,
                   int64_t rotary_head_rows, std::byte* packed, ParallelRunner& runner);
// Packs `count` stored rows, 16 at most, into one strip of such.
void PackQuantisedStrip(WeightFormat format, const std::byte* rows, int64_t count, int64_t k,
                        std::byte* strip);
// Where row `row` of a head-wise reordered matrix lies among the stored rows.
int64_t StoredRowOf(int64_t row, int64_t rotary_head_rows);

// One row of packed strips as float32, the same numbers as DequantiseRow gives.
void ReadPackedQuantisedRow(WeightFormat format, const std::byte* packed, int64_t k, int64_t row,
                            float* values);

}  // namespace quire

#endif  // QUIRE_KERNELS_QUANTISED_WEIGHTS_H_
