#include "model/weights/quantised_folder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "model/testing/raw_checkpoint.h"
#include "model/testing/test_checkpoint.h"
#include "model/weights/weights.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// A matrix quantised by whatever means: codes from 0 on, offsets among them, and scales.
struct Matrix {
  int64_t n, k, group;
  int bits;
  std::vector<int> codes;  // [n][k]
  std::vector<int> zeros;  // [n][groups]
  std::vector<float> scales;
  std::vector<int32_t> group_of;  // [k]

  explicit Matrix(int code_bits = 4, int64_t outputs = 24, int64_t inputs = 192,
                  int64_t group_size = 64)
      : n(outputs), k(inputs), group(group_size), bits(code_bits) {
    RandomSequence random(5);
    const uint64_t range = uint64_t{1} << bits;
    for (int64_t i = 0; i < n * k; ++i) codes.push_back(static_cast<int>(random.Below(range)));
    for (int64_t i = 0; i < n * groups(); ++i) {
      zeros.push_back(static_cast<int>(random.Below(range)));
      scales.push_back(F16ToF32(F32ToF16(static_cast<float>(random.Uniform(-1, 1)))));
    }
    for (int64_t i = 0; i < k; ++i) group_of.push_back(static_cast<int32_t>(i / group));
  }

  int64_t groups() const { return (k + group - 1) / group; }
  // Groups of inputs that are strewn over the row.
  void Strew() {
    RandomSequence random(6);
    for (int64_t i = k - 1; i > 0; --i) {
      std::swap(group_of[static_cast<size_t>(i)],
                group_of[random.Below(static_cast<uint64_t>(i) + 1)]);
    }
  }
  int code(int64_t output, int64_t input) const {
    return codes[static_cast<size_t>(output * k + input)];
  }
  size_t place(int64_t output, int64_t at) const {
    return static_cast<size_t>(output * groups() + at);
  }
  float Weight(int64_t output, int64_t input) const {
    const size_t at = place(output, group_of[static_cast<size_t>(input)]);
    return scales[at] * static_cast<float>(code(output, input) - zeros[at]);
  }
};

// [rows][columns] of codes -> words that run along the columns; nibbles in the order given.
std::vector<uint32_t> Words(int64_t rows, int64_t columns, int bits,
                            const std::function<int(int64_t, int64_t)>& code,
                            const std::vector<int64_t>& order = {}) {
  const int64_t per = 32 / bits;
  std::vector<uint32_t> words;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < columns; begin += per) {
      uint32_t word = 0;
      for (int64_t i = 0; i < per && begin + i < columns; ++i) {
        const int64_t from = begin + (order.empty() ? i : order[static_cast<size_t>(i)]);
        word |= static_cast<uint32_t>(code(row, from)) << (i * bits);
      }
      words.push_back(word);
    }
  }
  return words;
}

// [rows][columns] of words, columns first: those of a matrix that was packed along its columns.
std::vector<uint32_t> Turned(const std::vector<uint32_t>& words, int64_t rows, int64_t columns) {
  std::vector<uint32_t> turned;
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < rows; ++j)
      turned.push_back(words[static_cast<size_t>(j * columns + i)]);
  }
  return turned;
}

std::vector<uint16_t> Halves(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(F32ToF16(value));
  return halves;
}

// [groups][n] of [n][groups].
template <typename T>
std::vector<T> ByGroup(const Matrix& m, const std::vector<T>& values) {
  std::vector<T> turned;
  for (int64_t group = 0; group < m.groups(); ++group) {
    for (int64_t output = 0; output < m.n; ++output)
      turned.push_back(values[m.place(output, group)]);
  }
  return turned;
}

void AddGptqInOrder(RawCheckpoint& file, const Matrix& m, int raise = 1) {
  const int64_t per = 32 / m.bits;
  const auto codes = Words(m.n, m.k, m.bits, [&](int64_t o, int64_t i) { return m.code(o, i); });
  file.Add("a.qweight", "I32", {m.k / per, m.n}, Turned(codes, m.n, m.k / per));
  const auto zeros = Words(m.groups(), m.n, m.bits, [&](int64_t group, int64_t output) {
    return m.zeros[m.place(output, group)] - raise;
  });
  file.Add("a.qzeros", "I32", {m.groups(), m.n / per}, zeros);
  file.Add("a.scales", "F16", {m.groups(), m.n}, Halves(ByGroup(m, m.scales)));
}

void AddGptq(RawCheckpoint& file, const Matrix& m, int raise = 1) {
  AddGptqInOrder(file, m, raise);
  file.Add("a.g_idx", "I32", {m.k}, m.group_of);
}

void AddAwq(RawCheckpoint& file, const Matrix& m) {
  const std::vector<int64_t> order = {0, 2, 4, 6, 1, 3, 5, 7};
  file.Add("a.qweight", "I32", {m.k, m.n / 8},
           Words(
               m.k, m.n, 4, [&](int64_t i, int64_t o) { return m.code(o, i); }, order));
  file.Add(
      "a.qzeros", "I32", {m.groups(), m.n / 8},
      Words(
          m.groups(), m.n, 4, [&](int64_t g, int64_t o) { return m.zeros[m.place(o, g)]; }, order));
  file.Add("a.scales", "F16", {m.groups(), m.n}, Halves(ByGroup(m, m.scales)));
}

void AddCompressed(RawCheckpoint& file, const Matrix& m, bool has_zeros) {
  const int64_t per = 32 / m.bits;
  file.Add("a.weight_packed", "I32", {m.n, m.k / per},
           Words(m.n, m.k, m.bits, [&](int64_t o, int64_t i) { return m.code(o, i); }));
  file.Add("a.weight_shape", "I64", {2}, std::vector<int64_t>{m.n, m.k});
  file.Add("a.weight_scale", "F16", {m.n, m.groups()}, Halves(m.scales));
  if (!has_zeros) return;
  const int64_t rows = (m.n + per - 1) / per;
  const auto words =
      Words(m.groups(), m.n, m.bits, [&](int64_t g, int64_t o) { return m.zeros[m.place(o, g)]; });
  file.Add("a.weight_zero_point", "I32", {rows, m.groups()}, Turned(words, m.groups(), rows));
}

void AddBytes(RawCheckpoint& file, const Matrix& m, bool has_zeros) {
  std::vector<int8_t> codes;
  std::vector<int8_t> zeros;
  for (const int code : m.codes) codes.push_back(static_cast<int8_t>(code - 128));
  for (const int zero : m.zeros) zeros.push_back(static_cast<int8_t>(zero - 128));
  file.Add("a.weight", "I8", {m.n, m.k}, codes);
  file.Add("a.weight_scale", "F16", {m.n, m.groups()}, Halves(m.scales));
  if (has_zeros) file.Add("a.weight_zero_point", "I8", {m.n, m.groups()}, zeros);
}

const FolderQuantisation kCompressed{};
FolderQuantisation Gptq(const Matrix& m, int raise = 1) {
  return {
      .scheme = FolderScheme::kGptq, .bits = m.bits, .group_size = m.group, .zero_raise = raise};
}
FolderQuantisation Awq(const Matrix& m) {
  return {.scheme = FolderScheme::kAwq, .bits = 4, .group_size = m.group};
}

class QuantisedFolderTest : public testing::Test {
 protected:
  Result<FolderMatrix> Open(const RawCheckpoint& file, const FolderQuantisation& quantisation,
                            int64_t n, int64_t k) {
    file.Write(folder_);
    checkpoint_ = std::make_unique<Checkpoint>(Checkpoint::Open(folder_.path()).value());
    EXPECT_TRUE(FolderMatrix::IsStored(*checkpoint_, quantisation, "a"));
    EXPECT_FALSE(FolderMatrix::IsStored(*checkpoint_, quantisation, "b"));
    return FolderMatrix::Open(*checkpoint_, quantisation, "a", n, k);
  }

  // What packing gives is the formula's weights, bit for bit.
  void Check(const RawCheckpoint& file, const FolderQuantisation& quantisation, const Matrix& m,
             WeightFormat format) {
    auto matrix = Open(file, quantisation, m.n, m.k);
    ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
    EXPECT_EQ(matrix->format(), format);
    auto order = matrix->InputOrder();
    ASSERT_TRUE(order.ok()) << order.status().ToString();
    const HostMemory packed = HostMemory::Allocate(PackedQuantisedBytes(format, m.n, m.k)).value();
    const auto pool = CreateThreadPool(2).value();
    const Status status = matrix->Pack(*order, packed.data(), *pool);
    ASSERT_TRUE(status.ok()) << status.ToString();
    if (order->empty()) {
      order->resize(static_cast<size_t>(m.k));
      std::iota(order->begin(), order->end(), 0);
    }
    std::vector<float> row(static_cast<size_t>(m.k));
    for (int64_t output = 0; output < m.n; ++output) {
      ReadPackedQuantisedRow(format, packed.data(), m.k, output, row.data());
      for (int64_t i = 0; i < m.k; ++i) {
        const float expected = m.Weight(output, (*order)[static_cast<size_t>(i)]);
        ASSERT_EQ(row[static_cast<size_t>(i)], expected) << output << ' ' << i;
      }
    }
    matrix->Release();
  }

  void ExpectRefused(const RawCheckpoint& file, const FolderQuantisation& quantisation,
                     StatusCode code, std::string_view message, int64_t n = 24, int64_t k = 192) {
    const auto matrix = Open(file, quantisation, n, k);
    Status status = matrix.status();
    if (status.ok()) {
      const auto order = matrix->InputOrder();
      status = order.status();
      if (status.ok()) {
        const HostMemory packed =
            HostMemory::Allocate(PackedQuantisedBytes(matrix->format(), n, k)).value();
        status = matrix->Pack(*order, packed.data(), *CreateThreadPool(1).value());
      }
    }
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.message().find(message), std::string::npos) << status.ToString();
  }

  TestFolder folder_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(QuantisedFolderTest, GptqIsReadToTheBit) {
  for (const int bits : {4, 8}) {
    for (const int raise : {0, 1}) {
      Matrix m(bits);
      for (int& zero : m.zeros) zero += raise;  // up to 16 and 256
      RawCheckpoint file;
      AddGptq(file, m, raise);
      Check(file, Gptq(m, raise), m, bits == 4 ? WeightFormat::kI4Z : WeightFormat::kI8Z);
    }
    Matrix wide(bits, 16, 384, 128);
    RawCheckpoint file;
    AddGptq(file, wide, 0);
    Check(file, Gptq(wide, 0), wide, bits == 4 ? WeightFormat::kI4ZWide : WeightFormat::kI8ZWide);
  }
}

// The last group of a row may be a short one.
TEST_F(QuantisedFolderTest, GptqGroupsInTheOrderOfActivationsAreReadToTheBit) {
  for (const int64_t k : {192, 160}) {
    Matrix m(4, 24, k);
    m.Strew();
    RawCheckpoint file;
    AddGptq(file, m, 0);
    Check(file, Gptq(m, 0), m, WeightFormat::kI4Z);
  }
}

// Without them the weights would be others.
TEST_F(QuantisedFolderTest, GroupsOfStrewnInputsMustBeThere) {
  const Matrix m;
  RawCheckpoint file;
  AddGptqInOrder(file, m, 0);
  Check(file, Gptq(m, 0), m, WeightFormat::kI4Z);
  FolderQuantisation strewn = Gptq(m, 0);
  strewn.is_strewn = true;
  ExpectRefused(file, strewn, StatusCode::kNotFound, "\"a.g_idx\" is in none");
  // One group has all inputs.
  const Matrix whole(4, 24, 192, 192);
  RawCheckpoint one;
  AddGptqInOrder(one, whole, 0);
  for (const int64_t size : {int64_t{0}, whole.k}) {
    strewn.group_size = size;
    Check(one, strewn, whole, WeightFormat::kI4Z);
  }
}

TEST_F(QuantisedFolderTest, AwqIsReadToTheBit) {
  const Matrix m;
  RawCheckpoint file;
  AddAwq(file, m);
  Check(file, Awq(m), m, WeightFormat::kI4Z);
  Matrix whole(4, 8, 96, 96);
  FolderQuantisation quantisation = Awq(whole);
  quantisation.group_size = 0;
  RawCheckpoint second;
  AddAwq(second, whole);
  Check(second, quantisation, whole, WeightFormat::kI4Z);
}

TEST_F(QuantisedFolderTest, CompressedTensorsAreReadToTheBit) {
  for (const int bits : {4, 8}) {
    for (const bool has_zeros : {false, true}) {
      Matrix m(bits, 19);
      if (!has_zeros) std::ranges::fill(m.zeros, bits == 4 ? 8 : 128);
      const WeightFormat sym = bits == 4 ? WeightFormat::kI4G : WeightFormat::kI8G;
      const WeightFormat asym = bits == 4 ? WeightFormat::kI4Z : WeightFormat::kI8Z;
      RawCheckpoint packed;
      AddCompressed(packed, m, has_zeros);
      Check(packed, kCompressed, m, has_zeros ? asym : sym);
      if (bits == 4) continue;
      RawCheckpoint bytes;
      AddBytes(bytes, m, has_zeros);
      Check(bytes, kCompressed, m, has_zeros ? asym : sym);
    }
  }
}

// Those of unpacked codes are left out where all are zero.
TEST_F(QuantisedFolderTest, OffsetsOfPackedCodesMustBeThere) {
  for (const int bits : {4, 8}) {
    Matrix m(bits);
    RawCheckpoint with;
    AddCompressed(with, m, true);
    const FolderQuantisation quantisation{.has_offsets = true};
    Check(with, quantisation, m, bits == 4 ? WeightFormat::kI4Z : WeightFormat::kI8Z);
    RawCheckpoint without;
    AddCompressed(without, m, false);
    ExpectRefused(without, quantisation, StatusCode::kNotFound,
                  "\"a.weight_zero_point\" is in none");
    if (bits == 4) continue;
    std::ranges::fill(m.zeros, 128);
    RawCheckpoint in_bytes;
    AddBytes(in_bytes, m, false);
    Check(in_bytes, quantisation, m, WeightFormat::kI8G);
  }
}

// Codes of a sign, two bits of exponent and one of mantissa, two in a byte, with exponents of two.
void AddMxfp4(RawCheckpoint& file, const Matrix& m, const std::vector<uint8_t>& exponents) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < m.codes.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(m.codes[i] | m.codes[i + 1] << 4));
  }
  file.Add("a.weight_packed", "U8", {m.n, m.k / 2}, bytes);
  file.Add("a.weight_scale", "U8", {m.n, m.groups()}, exponents);
}

TEST_F(QuantisedFolderTest, Mxfp4OfCompressedTensorsIsReadToTheBit) {
  constexpr float kNumbers[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  Matrix m(4, 19, 192, 32);
  std::vector<uint8_t> exponents;
  for (int64_t i = 0; i < m.n * m.groups(); ++i) {
    exponents.push_back(static_cast<uint8_t>(i % 17 == 0 ? 254 - i % 3 : 100 + i % 40));
  }
  exponents[3] = 0;
  RawCheckpoint file;
  AddMxfp4(file, m, exponents);
  const auto matrix = Open(file, kCompressed, m.n, m.k);
  ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
  EXPECT_EQ(matrix->format(), WeightFormat::kMXFP4);
  EXPECT_FALSE(matrix->has_groups_of_inputs());
  std::vector<float> values(static_cast<size_t>(m.n * m.k));
  ASSERT_TRUE(matrix->Read({}, values.data(), *CreateThreadPool(1).value()).ok());
  const HostMemory packed =
      HostMemory::Allocate(PackedQuantisedBytes(WeightFormat::kMXFP4, m.n, m.k)).value();
  ASSERT_TRUE(matrix->Pack({}, packed.data(), *CreateThreadPool(2).value()).ok());
  std::vector<float> row(static_cast<size_t>(m.k));
  for (int64_t output = 0; output < m.n; ++output) {
    ReadPackedQuantisedRow(WeightFormat::kMXFP4, packed.data(), m.k, output, row.data());
    for (int64_t i = 0; i < m.k; ++i) {
      const int code = m.code(output, i);
      const float size = std::ldexp(kNumbers[code & 7], exponents[m.place(output, i / 32)] - 127);
      const float expected = code < 8 ? size : -size;
      ASSERT_EQ(row[static_cast<size_t>(i)], expected) << output << ' ' << i;
      ASSERT_EQ(values[static_cast<size_t>(output * m.k + i)], expected) << output << ' ' << i;
    }
  }
}

TEST_F(QuantisedFolderTest, Mxfp4OfOtherShapesOrTypesIsNamed) {
  const Matrix m(4, 4, 64, 32);
  const std::vector<uint8_t> exponents(8, 127);
  RawCheckpoint narrow;
  AddMxfp4(narrow, m, exponents);
  ExpectRefused(narrow, kCompressed, StatusCode::kCorrupt, "\"a.weight_packed\" is U8 [4, 32]", 4,
                128);
  RawCheckpoint scales;
  scales.Add("a.weight_packed", "U8", {4, 32}, std::vector<uint8_t>(128));
  scales.Add("a.weight_scale", "F8_E4M3", {4, 2}, exponents);
  ExpectRefused(scales, kCompressed, StatusCode::kCorrupt, "\"a.weight_scale\" is F8_E4M3 [4, 2]",
                4, 64);
  RawCheckpoint groups;  // of 16 inputs
  groups.Add("a.weight_packed", "U8", {4, 32}, std::vector<uint8_t>(128));
  groups.Add("a.weight_scale", "U8", {4, 4}, std::vector<uint8_t>(16));
  ExpectRefused(groups, kCompressed, StatusCode::kCorrupt, "\"a.weight_scale\" is U8 [4, 4]", 4,
                64);
  RawCheckpoint alone;
  alone.Add("a.weight_packed", "U8", {4, 32}, std::vector<uint8_t>(128));
  ExpectRefused(alone, kCompressed, StatusCode::kNotFound, "\"a.weight_scale\" is in none", 4, 64);
}

TEST_F(QuantisedFolderTest, ScalesOfOutputsOrOfAllAreReadToTheBit) {
  Matrix m(8, 19, 256, 256);
  std::ranges::fill(m.zeros, 128);
  RawCheckpoint file;
  AddBytes(file, m, false);
  Check(file, kCompressed, m, WeightFormat::kI8GWide);
  std::ranges::fill(m.scales, 0.3F);  // of all its bits
  std::vector<int8_t> codes;
  for (const int code : m.codes) codes.push_back(static_cast<int8_t>(code - 128));
  RawCheckpoint one;
  one.Add("a.weight", "I8", {m.n, m.k}, codes);
  one.Add("a.weight_scale", "F32", {1}, std::vector<float>{0.3F});
  Check(one, kCompressed, m, WeightFormat::kI8GWide);
}

TEST_F(QuantisedFolderTest, CompressedGroupsInAnotherOrderAreReadToTheBit) {
  Matrix m;
  m.Strew();
  RawCheckpoint file;
  AddCompressed(file, m, true);
  file.Add("a.weight_g_idx", "I32", {m.k}, m.group_of);
  Check(file, kCompressed, m, WeightFormat::kI4Z);
}

TEST_F(QuantisedFolderTest, OffsetsOfFourBitsMayBeBytes) {
  const Matrix m;
  std::vector<int8_t> zeros;
  for (const int zero : m.zeros) zeros.push_back(static_cast<int8_t>(zero - 8));
  RawCheckpoint file;
  AddCompressed(file, m, false);
  file.Add("a.weight_zero_point", "I8", {m.n, m.groups()}, zeros);
  Check(file, kCompressed, m, WeightFormat::kI4Z);
  zeros[7] = -9;
  RawCheckpoint beyond;
  AddCompressed(beyond, m, false);
  beyond.Add("a.weight_zero_point", "I8", {m.n, m.groups()}, zeros);
  ExpectRefused(beyond, kCompressed, StatusCode::kCorrupt, "the offset of output 2 is -9");
}

TEST_F(QuantisedFolderTest, MissingAndMisshapenTensorsAreNamed) {
  const Matrix m;
  RawCheckpoint alone;
  alone.Add("a.qweight", "I32", {24, 24}, std::vector<int32_t>(576));
  ExpectRefused(alone, Gptq(m), StatusCode::kNotFound, "\"a.qzeros\" is in none");
  ExpectRefused(alone, Awq(m), StatusCode::kCorrupt, "\"a.qweight\" is I32 [24, 24]");
  RawCheckpoint file;
  AddGptq(file, m, 0);
  FolderQuantisation other = Gptq(m);
  other.group_size = 32;
  ExpectRefused(file, other, StatusCode::kCorrupt, "\"a.qzeros\" is I32 [3, 3]");
  other = Gptq(m);
  other.bits = 8;
  ExpectRefused(file, other, StatusCode::kCorrupt, "config.json asks for I32 [48, 24]");
  ExpectRefused(file, Gptq(m), StatusCode::kBadArgument, "190 inputs", 24, 190);
  ExpectRefused(file, Gptq(m), StatusCode::kBadArgument, "no multiple of the 8", 22);
  RawCheckpoint compressed;
  AddCompressed(compressed, m, true);
  ExpectRefused(compressed, kCompressed, StatusCode::kCorrupt, "\"a.weight_scale\" is F16 [24, 3]",
                48);
  const Matrix narrow(4, 24, 192, 16);
  RawCheckpoint short_groups;
  AddCompressed(short_groups, narrow, true);
  ExpectRefused(short_groups, kCompressed, StatusCode::kBadArgument, "groups of 16 inputs");
}

TEST_F(QuantisedFolderTest, TypesThatAreNotReadAreNamed) {
  const Matrix m(8, 4, 64, 64);
  RawCheckpoint file;
  file.Add("a.weight", "F8_E4M3", {4, 64}, std::vector<int8_t>(256));
  file.Add("a.weight_scale", "F16", {4, 1}, std::vector<uint16_t>(4));
  ExpectRefused(file, kCompressed, StatusCode::kCorrupt, "\"a.weight\" is F8_E4M3 [4, 64]", 4, 64);
  RawCheckpoint scales;
  scales.Add("a.weight", "I8", {4, 64}, std::vector<int8_t>(256));
  scales.Add("a.weight_scale", "I32", {4, 1}, std::vector<int32_t>(4));
  ExpectRefused(scales, kCompressed, StatusCode::kBadArgument,
                "\"a.weight_scale\" is stored as I32; scales must be", 4, 64);
  RawCheckpoint precise;
  precise.Add("a.weight", "I8", {4, 64}, std::vector<int8_t>(256));
  precise.Add("a.weight_scale", "F32", {4, 1}, std::vector<float>{0.5F, 0.3F, 1, 1});
  precise.Add("a.weight_zero_point", "I8", {4, 1}, std::vector<int8_t>(4));
  ExpectRefused(precise, kCompressed, StatusCode::kBadArgument, "the scale of output 1", 4, 64);
}

TEST_F(QuantisedFolderTest, GroupsThatAreNoGroupsAreRefused) {
  for (const int32_t hostile : {-1, 3, 1 << 30, std::numeric_limits<int32_t>::min(), 2}) {
    Matrix m;
    m.group_of[5] = hostile;  // 2: that group is one too large
    RawCheckpoint file;
    AddGptq(file, m, 0);
    ExpectRefused(file, Gptq(m, 0), StatusCode::kCorrupt, "there are 3 groups of 64 inputs each");
  }
  Matrix m(4, 24, 160);
  m.group_of[5] = 2;  // a group of 32, one too large
  RawCheckpoint file;
  AddGptq(file, m, 0);
  ExpectRefused(file, Gptq(m, 0), StatusCode::kCorrupt, "input 159 is in group 2", 24, 160);
}

// Matrices of single heads, some of them turned: those of the numbers.
TEST_F(QuantisedFolderTest, HeadsAreCutAsThoseOfTheirNumbers) {
  constexpr int64_t kHeads = 3;
  const HeadSlice slices[] = {{.rows = 3, .transposed = true}, {.rows = 5, .transposed = false}};
  const Backend& backend = **FindBackend("");
  const auto pool = CreateThreadPool(2).value();
  const auto cut = [&](const RawCheckpoint& file, const FolderQuantisation& quantisation) {
    file.Write(folder_);
    const Checkpoint checkpoint = Checkpoint::Open(folder_.path()).value();
    WeightLoader loader(checkpoint, backend, *pool, DType::kF32);
    loader.ReadQuantised(quantisation);
    const auto matrices = loader.LinearSlices("a", kHeads, slices, 192);
    EXPECT_TRUE(matrices.ok()) << matrices.status().ToString();
    std::string bytes;
    for (const auto& heads : *matrices) {
      for (const LinearWeights& head : heads) {
        const PackedLinear& packed = head.packed();
        bytes.append(static_cast<const char*>(packed.data),
                     backend.packed_linear_bytes(packed.dtype, packed.n, packed.k));
      }
    }
    return bytes;
  };
  for (const bool strewn : {false, true}) {
    Matrix m;
    if (strewn) m.Strew();
    std::vector<float> numbers;
    for (int64_t output = 0; output < m.n; ++output) {
      for (int64_t i = 0; i < m.k; ++i) numbers.push_back(m.Weight(output, i));
    }
    RawCheckpoint plain;
    plain.Add("a.weight", "F32", {m.n, m.k}, numbers);
    RawCheckpoint gptq;
    AddGptq(gptq, m, 0);
    EXPECT_EQ(cut(gptq, Gptq(m, 0)), cut(plain, Gptq(m, 0)));
    if (strewn) continue;
    RawCheckpoint awq;
    AddAwq(awq, m);
    EXPECT_EQ(cut(awq, Awq(m)), cut(plain, Awq(m)));
  }
}

}  // namespace
}  // namespace quire
