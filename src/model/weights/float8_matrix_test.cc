#include "model/weights/float8_matrix.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "model/testing/raw_checkpoint.h"
#include "model/weights/weights.h"
#include "tensor/float8.h"
#include "tensor/half.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr FolderQuantisation kOneScale{.scheme = FolderScheme::kFloat8};
constexpr FolderQuantisation kBlocks{
    .scheme = FolderScheme::kFloat8, .block_outputs = 16, .block_inputs = 32};

std::vector<uint8_t> RandomCodes(int64_t count) {
  RandomSequence random(3);
  std::vector<uint8_t> codes;
  while (std::ssize(codes) < count) {
    const auto code = static_cast<uint8_t>(random.Below(256));
    if ((code & 0x7F) != 0x7F) codes.push_back(code);
  }
  return codes;
}

class Float8MatrixTest : public ::testing::Test {
 protected:
  Result<std::vector<float>> Read(const RawCheckpoint& file, const FolderQuantisation& quantisation,
                                  int64_t n, int64_t k, int64_t begin = 0) {
    file.Write(folder_);
    QUIRE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder_.path()));
    QUIRE_ASSIGN_OR_RETURN(const Float8Matrix matrix,
                           Float8Matrix::Open(checkpoint, quantisation, "a", n, k));
    std::vector<float> values(static_cast<size_t>((n - begin) * k));
    QUIRE_RETURN_IF_ERROR(matrix.Read(begin, n - begin, values.data(), *runner_));
    return values;
  }
  void ExpectRefused(const RawCheckpoint& file, const FolderQuantisation& quantisation,
                     StatusCode code, const std::string& message) {
    const auto result = Read(file, quantisation, 40, 72);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), code);
    EXPECT_NE(result.status().message().find(message), std::string::npos)
        << result.status().message();
  }

  TestFolder folder_;
  std::shared_ptr<ParallelRunner> runner_ = CreateThreadPool(2).value();
};

// Blocks that the matrix does not fill, at its right and lower edges.
TEST_F(Float8MatrixTest, EachBlockHasItsScale) {
  const std::vector<uint8_t> codes = RandomCodes(40 * 72);
  const std::vector<float> scales{0.5F, 2, 3, 0.1F, 5, 6, 7, 8, 0.3F};
  RawCheckpoint file;
  file.Add("a.weight", "F8_E4M3", {40, 72}, codes);
  file.Add("a.weight_scale_inv", "F32", {3, 3}, scales);
  for (const int64_t begin : {0, 1, 17}) {
    const auto values = Read(file, kBlocks, 40, 72, begin);
    ASSERT_TRUE(values.ok()) << values.status().ToString();
    for (int64_t row = begin; row < 40; ++row) {
      for (int64_t i = 0; i < 72; ++i) {
        const float scale = scales[static_cast<size_t>(row / 16 * 3 + i / 32)];
        const float code = F8E4M3ToF32(codes[static_cast<size_t>(row * 72 + i)]);
        EXPECT_EQ((*values)[static_cast<size_t>((row - begin) * 72 + i)], code * scale);
      }
    }
  }
}

TEST_F(Float8MatrixTest, ScalesOfOutputsAndOfAll) {
  const std::vector<uint8_t> codes = RandomCodes(4 * 8);
  const std::vector<uint16_t> scales{F32ToBf16(1), F32ToBf16(2), F32ToBf16(0.25F), F32ToBf16(3)};
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4}, {4, 1}, {1}, {}}) {
    const bool one = shape.empty() || shape[0] == 1;
    RawCheckpoint file;
    file.Add("a.weight", "F8_E4M3", {4, 8}, codes);
    file.Add("a.weight_scale", "BF16", shape, one ? std::vector<uint16_t>{scales[2]} : scales);
    const auto values = Read(file, kOneScale, 4, 8);
    ASSERT_TRUE(values.ok()) << values.status().ToString();
    for (size_t i = 0; i < codes.size(); ++i) {
      EXPECT_EQ((*values)[i], F8E4M3ToF32(codes[i]) * Bf16ToF32(scales[one ? 2 : i / 8]));
    }
  }
}

TEST_F(Float8MatrixTest, WhatDoesNotFitIsNamed) {
  const std::vector<uint8_t> codes = RandomCodes(40 * 72);
  const auto with = [&](const std::string& type, const std::vector<int64_t>& shape, size_t count) {
    RawCheckpoint file;
    file.Add("a.weight", "F8_E4M3", {40, 72}, codes);
    file.Add("a.weight_scale", type, shape, std::vector<float>(count));
    return file;
  };
  RawCheckpoint no_scales;
  no_scales.Add("a.weight", "F8_E4M3", {40, 72}, codes);
  ExpectRefused(no_scales, kBlocks, StatusCode::kNotFound, "a.weight_scale");
  ExpectRefused(with("F32", {2, 3}, 6), kBlocks, StatusCode::kCorrupt,
                "\"a.weight_scale\" is F32 [2, 3], its matrix is [40, 72]; expected are scales of "
                "blocks of 16 outputs and 32 inputs");
  ExpectRefused(with("F32", {3, 3}, 9), kOneScale, StatusCode::kCorrupt,
                "expected are one scale, or one of each output");
  ExpectRefused(with("I32", {3, 3}, 9), kBlocks, StatusCode::kBadArgument,
                "scales must be F16, BF16 or F32");
  RawCheckpoint narrow;
  narrow.Add("a.weight", "F8_E4M3", {72, 40}, codes);
  narrow.Add("a.weight_scale", "F32", {1}, std::vector<float>(1));
  ExpectRefused(narrow, kOneScale, StatusCode::kCorrupt, "config.json asks for F8_E4M3 [40, 72]");
}

TEST_F(Float8MatrixTest, CodesThatAreNoNumbersAreDamage) {
  for (const uint8_t code : {uint8_t{0x7F}, uint8_t{0xFF}}) {
    std::vector<uint8_t> codes = RandomCodes(40 * 72);
    codes[5 * 72 + 71] = code;
    RawCheckpoint file;
    file.Add("a.weight", "F8_E4M3", {40, 72}, codes);
    file.Add("a.weight_scale", "F32", {1}, std::vector<float>{1});
    ExpectRefused(file, kOneScale, StatusCode::kCorrupt,
                  "\"a.weight\": row 5 has a code that is not a number");
  }
}

// What a matrix makes of some rows.
std::vector<float> Products(const Backend& backend, const PackedLinear& w, ParallelRunner& runner) {
  constexpr int64_t kRows = 3;
  RandomSequence random(5);
  std::vector<float> x(static_cast<size_t>(kRows * w.k));
  for (float& value : x) value = static_cast<float>(random.Uniform(-1, 1));
  std::vector<float> y(static_cast<size_t>(kRows * w.n));
  const size_t bytes = backend.linear_scratch_bytes(kRows, w.n, w.k, runner.worker_count());
  const HostMemory scratch = HostMemory::Allocate(bytes).value();
  backend.linear({.w = w,
                  .row_count = kRows,
                  .x = x.data(),
                  .x_stride = w.k,
                  .x_rounding = w.dtype,
                  .y = y.data(),
                  .y_stride = w.n,
                  .scratch = scratch.data()},
                 runner);
  return y;
}

// A matrix of several parts, stored as codes and as their numbers in float32.
struct StoredTwice {
  RawCheckpoint quantised;
  RawCheckpoint plain;
};

// Blocks of `bn` outputs and `bk` inputs; 0: all of them.
StoredTwice PartsStoredTwice(std::span<const LinearPart> parts, int64_t k, int64_t bn, int64_t bk) {
  StoredTwice both;
  for (const LinearPart& part : parts) {
    const std::vector<uint8_t> codes = RandomCodes(part.rows * k);
    const int64_t outputs = bn == 0 ? part.rows : bn;
    const int64_t inputs = bk == 0 ? k : bk;
    const int64_t columns = (k + inputs - 1) / inputs;
    const int64_t count = (part.rows + outputs - 1) / outputs * columns;
    std::vector<float> scales;
    for (int64_t i = 0; i < count; ++i) {
      scales.push_back(0.013F * static_cast<float>(i + 1 + part.rows));
    }
    std::vector<float> values;
    for (int64_t i = 0; i < std::ssize(codes); ++i) {
      const int64_t scale = i / k / outputs * columns + i % k / inputs;
      values.push_back(F8E4M3ToF32(codes[static_cast<size_t>(i)]) *
                       scales[static_cast<size_t>(scale)]);
    }
    both.quantised.Add(part.name + ".weight", "F8_E4M3", {part.rows, k}, codes);
    both.quantised.Add(part.name + ".weight_scale", "F32", {count / columns, columns}, scales);
    both.plain.Add(part.name + ".weight", "F32", {part.rows, k}, values);
  }
  return both;
}

// Borders of parts are in the middle of blocks of outputs, or at their ends. Codes stay codes, and
// the products are those of the numbers.
TEST_F(Float8MatrixTest, PartsComputeAsTheirNumbers) {
  struct Form {
    int64_t bn, bk;
    bool has_scales_of_outputs;  // as the kernels have them
    std::vector<LinearPart> parts;
  };
  const std::vector<LinearPart> odd = {{"q", 300}, {"k", 20}, {"v", 7}};
  const std::vector<LinearPart> whole = {{"q", 256}, {"k", 64}, {"v", 7}};
  const Form forms[] = {{1, 0, true, odd},        {0, 0, true, odd},      {0, 0, false, whole},
                        {64, 32, false, whole},   {64, 128, true, odd},   {48, 50, true, whole},
                        {128, 128, false, whole}, {128, 7, false, whole}, {1, 0, true, whole}};
  constexpr int64_t kInputs = 300;
  const Backend& backend = **FindBackend("");
  for (const Form& form : forms) {
    const StoredTwice both = PartsStoredTwice(form.parts, kInputs, form.bn, form.bk);
    FolderQuantisation quantisation{.scheme = FolderScheme::kFloat8};
    if (form.bk > 0) {
      quantisation.block_outputs = form.bn;
      quantisation.block_inputs = form.bk;
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<std::vector<float>> products;
      for (const RawCheckpoint* const file : {&both.quantised, &both.plain}) {
        file->Write(folder_);
        const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
        ASSERT_TRUE(checkpoint.ok());
        WeightLoader measured(*checkpoint, backend, *runner_, dtype, WeightUse::kMeasure);
        WeightLoader loader(*checkpoint, backend, *runner_, dtype);
        measured.ReadQuantised(quantisation);
        loader.ReadQuantised(quantisation);
        ASSERT_TRUE(measured.Linear(form.parts, kInputs, false).ok());
        const auto weights = loader.Linear(form.parts, kInputs, false);
        ASSERT_TRUE(weights.ok()) << weights.status().ToString();
        EXPECT_EQ(measured.weight_bytes(), loader.weight_bytes());
        EXPECT_EQ(weights->packed().dtype, dtype);
        products.push_back(Products(backend, weights->packed(), *runner_));
        const bool is_float8 = file == &both.quantised;
        EXPECT_EQ(loader.weight_types().at(0).name, DTypeName(is_float8 ? DType::kF8E4M3 : dtype));
        EXPECT_EQ(weights->packed().float8.data != nullptr, is_float8);
        EXPECT_EQ(weights->packed().float8.of_outputs, is_float8 && form.has_scales_of_outputs);
      }
      EXPECT_EQ(products[0], products[1]) << form.bn << " x " << form.bk;
    }
  }
}

TEST_F(Float8MatrixTest, ScalesThatNoNumberFitsAreDamage) {
  for (const float scale : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 0x1p120F}) {
    RawCheckpoint file;
    file.Add("a.weight", "F8_E4M3", {40, 72}, RandomCodes(40 * 72));
    file.Add("a.weight_scale", "F32", {1}, std::vector<float>{scale});
    ExpectRefused(file, kOneScale, StatusCode::kCorrupt, "a scale is at most 2^119 in magnitude");
    file.Write(folder_);
    const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
    WeightLoader loader(*checkpoint, **FindBackend(""), *runner_, DType::kF32);
    loader.ReadQuantised(kOneScale);
    EXPECT_EQ(loader.Linear({{"a", 40}}, 72, false).status().code(), StatusCode::kCorrupt);
  }
}

// The row is that of its tensor, not of all parts.
TEST_F(Float8MatrixTest, APartWithoutNumbersIsNamed) {
  std::vector<uint8_t> codes = RandomCodes(20 * 64);
  codes[3 * 64 + 5] = 0xFF;
  RawCheckpoint file;
  file.Add("q.weight", "F8_E4M3", {40, 64}, RandomCodes(40 * 64));
  file.Add("k.weight", "F8_E4M3", {20, 64}, codes);
  file.Add("q.weight_scale", "F32", {1}, std::vector<float>{1});
  file.Add("k.weight_scale", "F32", {1}, std::vector<float>{1});
  file.Write(folder_);
  const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
  WeightLoader loader(*checkpoint, **FindBackend(""), *runner_, DType::kF32);
  loader.ReadQuantised(kOneScale);
  const Status status = loader.Linear({{"q", 40}, {"k", 20}}, 64, false).status();
  EXPECT_NE(status.message().find("\"k.weight\": row 3 has a code that is not a number"),
            std::string::npos)
      << status.ToString();
}

// Matrices of single heads, some of them turned.
TEST_F(Float8MatrixTest, HeadsAreCutAsThoseOfTheirNumbers) {
  constexpr int64_t kHeads = 3, kInputs = 40;
  const HeadSlice slices[] = {{.rows = 8, .transposed = true}, {.rows = 5, .transposed = false}};
  const int64_t rows = kHeads * 13;
  const std::vector<uint8_t> codes = RandomCodes(rows * kInputs);
  RawCheckpoint quantised;
  quantised.Add("a.weight", "F8_E4M3", {rows, kInputs}, codes);
  quantised.Add("a.weight_scale", "F32", {1}, std::vector<float>{0.3F});
  std::vector<float> values;
  for (const uint8_t code : codes) values.push_back(F8E4M3ToF32(code) * 0.3F);
  RawCheckpoint plain;
  plain.Add("a.weight", "F32", {rows, kInputs}, values);
  const Backend& backend = **FindBackend("");
  std::vector<std::string> bytes;
  for (const RawCheckpoint* const file : {&quantised, &plain}) {
    file->Write(folder_);
    const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
    WeightLoader loader(*checkpoint, backend, *runner_, DType::kF32);
    loader.ReadQuantised(kOneScale);
    const auto matrices = loader.LinearSlices("a", kHeads, slices, kInputs);
    ASSERT_TRUE(matrices.ok()) << matrices.status().ToString();
    std::string all;
    for (const auto& heads : *matrices) {
      for (const LinearWeights& head : heads) {
        const PackedLinear& packed = head.packed();
        all.append(static_cast<const char*>(packed.data),
                   backend.packed_linear_bytes(packed.dtype, packed.n, packed.k));
      }
    }
    bytes.push_back(std::move(all));
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

// A part that is stored as it is becomes a piece of its own, and one that is absent is missed.
TEST_F(Float8MatrixTest, PartsMayBePlain) {
  RawCheckpoint file;
  file.Add("q.weight", "F8_E4M3", {4, 64}, RandomCodes(4 * 64));
  file.Add("q.weight_scale", "F32", {1}, std::vector<float>{1});
  file.Add("k.weight", "F32", {4, 64}, std::vector<float>(4 * 64));
  file.Write(folder_);
  const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
  WeightLoader loader(*checkpoint, **FindBackend(""), *runner_, DType::kF32);
  loader.ReadQuantised(kOneScale);
  const auto mixed = loader.Linear({{"q", 4}, {"k", 4}}, 64, false);
  ASSERT_TRUE(mixed.ok()) << mixed.status().ToString();
  EXPECT_EQ(mixed->packed().n, 8);
  ASSERT_EQ(mixed->pieces().size(), 2U);
  EXPECT_NE(mixed->pieces()[0].packed().float8.data, nullptr);
  EXPECT_EQ(mixed->pieces()[1].packed().float8.data, nullptr);
  EXPECT_EQ(loader.parameter_count(), 8 * 64);
  const auto absent = loader.Linear({{"q", 4}, {"v", 4}}, 64, false);
  EXPECT_EQ(absent.status().code(), StatusCode::kNotFound);
  EXPECT_NE(absent.status().message().find("\"v.weight\""), std::string::npos);
}

}  // namespace
}  // namespace quire
