// Weights in blocks of codes that share scales: the bytes as GGUF stores them, row by row, and as
// the kernels read them. Repacking moves bits and loses none.
#ifndef QUIRE_KERNELS_QUANTISED_WEIGHTS_H_
#define QUIRE_KERNELS_QUANTISED_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "quire/seams.h"

namespace quire {

// A block is the number of inputs after which a row's bytes repeat:
//   kQ8_0, 32 inputs:  float16 d; int8 q[32].                     w = d q
//   kQ4_0, 32 inputs:  float16 d; 4-bit q[32].                    w = d (q - 8)
//   kQ4_1, 32 inputs:  float16 d, m; 4-bit q[32].                 w = d q + m
//   kQ4_K, 256 inputs: float16 d, m; per 32 inputs 6-bit s, t;
//                      4-bit q[256].                              w = d s q - m t
//   kQ6_K, 256 inputs: 6-bit q[256]; per 16 inputs int8 s;
//                      float16 d.                                 w = d s (q - 32)
enum class WeightFormat : uint8_t { kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ6_K };

inline constexpr WeightFormat kWeightFormats[] = {WeightFormat::kQ8_0, WeightFormat::kQ4_0,
                                                  WeightFormat::kQ4_1, WeightFormat::kQ4_K,
                                                  WeightFormat::kQ6_K};

std::string_view WeightFormatName(WeightFormat format);  // "Q8_0", ...; static storage
// The number of the type in GGUF files.
std::optional<WeightFormat> WeightFormatOfGguf(uint32_t type);

// Inputs and bytes of one block as stored.
int64_t BlockInputs(WeightFormat format);
int64_t BlockBytes(WeightFormat format);
// REQUIRES: k is a multiple of BlockInputs(format).
int64_t StoredRowBytes(WeightFormat format, int64_t k);

// A row as stored, as float32: products of exact factors, each rounded once, then the difference.
void DequantiseRow(WeightFormat format, const std::byte* row, int64_t k, float* values);

// ----------------------------------------------------------------------------------------------------
// as the kernels read them

// Inputs whose products are summed as integers; the activations of a row have one scale per group.
inline constexpr int64_t kQuantGroup = 32;
inline constexpr int64_t kSuperGroups = 8;  // groups of a block of 256

// A strip is 16 outputs, whose bytes lie side by side; outputs from n on are zeros. Its bytes are
// in the order in which a kernel reads them, so that memory sees one stream:
//   per 8 groups, scales of a block of 256: kQ4_K: float16 d[16], m[16]; kQ6_K: float16 d[16], 32
//     zeros, so that all parts begin with a cache line
//   per pair of groups (the last may be half empty):
//     scales of both, each: float16 d[16]; kQ4_1: and m[16]; kQ4_K: uint8 s[16], t[16]; kQ6_K: int8
//       s[2][16]
//     codes of both, each:
//       kQ8_0: [8][16 outputs][4 inputs] int8
//       4 bits: [4][16 outputs][4], the low half of a byte input 4 i + j, the high half 16 + 4 i +
//       j kQ6_K: as 4 bits; then [2][16 outputs][4]: bits 2 b, 2 b + 1 of byte (i, j) are the upper
//              two of input 16 i + 4 b + j
inline constexpr int64_t kStripOutputs = 16;

constexpr int64_t GroupCodeBytes(WeightFormat format) {
  return format == WeightFormat::kQ8_0 ? 512 : format == WeightFormat::kQ6_K ? 384 : 256;
}
constexpr int64_t GroupScaleBytes(WeightFormat format) {
  return format == WeightFormat::kQ4_1 ? 64 : 32;
}
constexpr int64_t SuperScaleBytes(WeightFormat format) {
  return format == WeightFormat::kQ4_K || format == WeightFormat::kQ6_K ? 64 : 0;
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
  return groups / kSuperGroups * RunBytes(format) +
         (groups % kSuperGroups + 1) / 2 * PairBytes(format);
}
constexpr int64_t Strips(int64_t n) { return (n + kStripOutputs - 1) / kStripOutputs; }

size_t PackedQuantisedBytes(WeightFormat format, int64_t n, int64_t k);

// Packs n stored rows, one after the other, into strips (64-byte aligned, zero before).
// rotary_head_rows = h > 0: rows of each head lie as pairs (0, h / 2), (1, h / 2 + 1), ... and are
// packed as 0, 1, ..., h - 1. REQUIRES: h is even and divides n.
void PackQuantised(WeightFormat format, const std::byte* rows, int64_t n, int64_t k,
                   int64_t rotary_head_rows, std::byte* packed, ParallelRunner& runner);
// Where row `row` of a head-wise reordered matrix lies among the stored rows.
int64_t StoredRowOf(int64_t row, int64_t rotary_head_rows);

// One row of packed strips as float32, the same numbers as DequantiseRow gives.
void ReadPackedQuantisedRow(WeightFormat format, const std::byte* packed, int64_t k, int64_t row,
                            float* values);

}  // namespace quire

#endif  // QUIRE_KERNELS_QUANTISED_WEIGHTS_H_
