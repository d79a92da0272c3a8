// One number between a format of 16 bits and float32, without a branch, so that a loop over it is
// made of vectors; the 16 bits are the upper ones until the end, so that vectors of them are packed
// once. Included in the namespace and the target region of each file that has such loops.

// The selects are between masks, not branches: SSE2 has no conditional move of vectors.
constexpr uint32_t MaskIf(bool condition) { return 0U - static_cast<uint32_t>(condition); }
constexpr uint32_t Select(bool condition, uint32_t a, uint32_t b) {
  return (a & MaskIf(condition)) | (b & ~MaskIf(condition));
}

template <DType kType>
float WidenOne(uint16_t bits) {
  if constexpr (kType == DType::kBF16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{bits & 0x7FFFu} << 13;
  // The exponents of the two formats are 112 apart. The product is exact, and normal where the
  // half was subnormal; infinity and NaN have the largest exponent, 112 further on.
  const uint32_t product = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
  const uint32_t further = MaskIf(static_cast<int32_t>(magnitude) >= 0x0F800000) & 112U << 23;
  return std::bit_cast<float>(sign | (product + further));
}

template <DType kType>
uint16_t NarrowOne(float number) {
  const uint32_t bits = std::bit_cast<uint32_t>(number);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const bool is_nan = static_cast<int32_t>(magnitude) > 0x7F800000;
  if constexpr (kType == DType::kBF16) {
    const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return static_cast<uint16_t>(Select(is_nan, bits | 0x400000, rounded) >> 16);
  }
  // To the sum of the number and a power of two 13 binary places above its last kept one: the
  // addition rounds. Below 2^-14 that place is the one of 2^-24, as for subnormal halves.
  const float infinite_from_65520 = std::bit_cast<float>(magnitude) * 0x1p112F * 0x1p-110F;
  const uint32_t exponent = magnitude & 0x7F800000;
  const uint32_t power =
      Select(static_cast<int32_t>(exponent) < 0x38800000, 0x38800000, exponent) + 0x07800000;
  const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(power) + infinite_from_65520);
  const uint32_t value = (sum << 3 & 0x7C000000) + (sum << 16 & 0x0FFF0000);
  const uint32_t nan = 0x7E000000 | (bits << 3 & 0x03FF0000);
  return static_cast<uint16_t>(((bits & 0x80000000) | Select(is_nan, nan, value)) >> 16);
}
