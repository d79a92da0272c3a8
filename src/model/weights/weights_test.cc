// Packed matrices are read back by multiplying them with the unit vectors: products with zeros and
// sums of zeros are exact.
#include "model/weights/weights.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "base/random.h"
#include "model/testing/test_checkpoint.h"
#include "model/testing/test_gguf.h"

namespace quire {
namespace {

constexpr int64_t kInputs = 20;

TestTensor RandomTensor(const std::string& name, std::vector<int64_t> shape, DType dtype,
                        uint64_t seed) {
  RandomSequence random(seed);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.Normal()));
  return {name, std::move(shape), RoundedTo(dtype, values), dtype};
}

// q [6, 20], k [3, 20], v [3, 20] with biases.
std::vector<TestTensor> Projections(DType q, DType k, DType v) {
  return {RandomTensor("q.weight", {6, kInputs}, q, 1),
          RandomTensor("k.weight", {3, kInputs}, k, 2),
          RandomTensor("v.weight", {3, kInputs}, v, 3),
          RandomTensor("q.bias", {6}, q, 4),
          RandomTensor("k.bias", {3}, k, 5),
          RandomTensor("v.bias", {3}, v, 6)};
}

const std::vector<LinearPart> kParts = {{"q", 6}, {"k", 3}, {"v", 3}};

class WeightsTest : public testing::Test {
 protected:
  WeightsTest() : backend_(**FindBackend("")), runner_(CreateThreadPool(2).value()) {}

  void Write(std::span<const TestTensor> tensors, size_t misalignment = 0) {
    WriteBytes(SafetensorsBytes(tensors, misalignment));
  }
  void WriteBytes(std::string_view bytes) {
    folder_.Write("model.safetensors", bytes);
    auto checkpoint = Checkpoint::Open(folder_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    checkpoint_ = std::make_unique<Checkpoint>(*std::move(checkpoint));
  }
  WeightLoader Loader(DType compute_dtype) {
    return WeightLoader(*checkpoint_, backend_, *runner_, compute_dtype);
  }

  // What loading q, k and v with their biases notes.
  std::vector<TensorToWrite> RecordOfParts() {
    std::vector<TensorToWrite> record;
    WeightLoader loader = Loader(DType::kBF16);
    loader.RecordTo(&record);
    EXPECT_TRUE(loader.Linear(kParts, kInputs, true).ok());
    return record;
  }

  // The matrix [n][k] of packed weights, its bias added to each column.
  std::vector<float> Unpack(const LinearWeights& weights) {
    const int64_t n = weights.packed().n;
    const int64_t k = weights.packed().k;
    std::vector<float> x(static_cast<size_t>(k * k));
    for (int64_t i = 0; i < k; ++i) x[static_cast<size_t>(i * k + i)] = 1.0F;
    std::vector<float> columns(static_cast<size_t>(k * n));
    auto scratch =
        *HostMemory::Allocate(backend_.linear_scratch_bytes(k, n, k, runner_->worker_count()));
    backend_.linear({.w = weights.packed(),
                     .row_count = k,
                     .x = x.data(),
                     .x_stride = k,
                     .y = columns.data(),
                     .y_stride = n,
                     .scratch = scratch.data()},
                    *runner_);
    std::vector<float> rows(columns.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        rows[static_cast<size_t>(i * k + j)] = columns[static_cast<size_t>(j * n + i)];
      }
    }
    return rows;
  }

  const Backend& backend_;
  std::shared_ptr<ParallelRunner> runner_;
  TestFolder folder_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

// What Unpack must give for q, k and v as `matrix_dtype` holds them; biases stay as they are
// stored.
std::vector<float> Expected(std::span<const TestTensor> tensors, DType matrix_dtype, bool bias) {
  std::vector<float> expected;
  for (size_t part = 0; part < 3; ++part) {
    const std::vector<float> values = RoundedTo(matrix_dtype, tensors[part].values);
    for (size_t i = 0; i < values.size(); ++i) {
      expected.push_back(values[i] + (bias ? tensors[part + 3].values[i / kInputs] : 0.0F));
    }
  }
  return expected;
}

TEST_F(WeightsTest, FusesPartsInOrderAndKeepsTheirType) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    const auto tensors = Projections(dtype, dtype, dtype);
    Write(tensors);
    for (const bool bias : {false, true}) {
      const auto weights = Loader(DType::kF32).Linear(kParts, kInputs, bias);
      ASSERT_TRUE(weights.ok()) << weights.status().ToString();
      EXPECT_EQ(weights->packed().dtype, dtype);
      EXPECT_EQ(weights->packed().n, 12);
      EXPECT_EQ(weights->packed().bias != nullptr, bias);
      EXPECT_EQ(Unpack(*weights), Expected(tensors, dtype, bias));
    }
  }
}

TEST_F(WeightsTest, RoundsFloat32OnceToBfloat16) {
  const auto tensors = Projections(DType::kF32, DType::kF32, DType::kF32);
  Write(tensors);
  const auto weights = Loader(DType::kBF16).Linear(kParts, kInputs, true);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->packed().dtype, DType::kBF16);
  EXPECT_EQ(Unpack(*weights), Expected(tensors, DType::kBF16, true));
}

TEST_F(WeightsTest, KeepsFloat16WithBfloat16Computing) {
  const auto tensors = Projections(DType::kF16, DType::kF16, DType::kF16);
  Write(tensors);
  const auto weights = Loader(DType::kBF16).Linear(kParts, kInputs, false);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->packed().dtype, DType::kF16);
  EXPECT_EQ(Unpack(*weights), Expected(tensors, DType::kF16, false));
}

TEST_F(WeightsTest, WidensPartsOfDifferentTypesExactly) {
  const auto tensors = Projections(DType::kF16, DType::kBF16, DType::kF32);
  Write(tensors);
  const auto weights = Loader(DType::kF32).Linear(kParts, kInputs, true);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->packed().dtype, DType::kF32);
  EXPECT_EQ(Unpack(*weights), Expected(tensors, DType::kF32, true));
}

TEST_F(WeightsTest, ReadsDataThatBeginsAtAnOddByte) {
  for (const size_t misalignment : {1, 2, 3}) {
    SCOPED_TRACE(misalignment);
    const auto tensors = Projections(DType::kF32, DType::kBF16, DType::kF16);
    Write(tensors, misalignment);
    WeightLoader loader = Loader(DType::kF32);
    const auto fused = loader.Linear(kParts, kInputs, true);
    ASSERT_TRUE(fused.ok());
    EXPECT_EQ(Unpack(*fused), Expected(tensors, DType::kF32, true));
    const auto single = loader.Linear({{"q", 6}}, kInputs, false);
    ASSERT_TRUE(single.ok());
    EXPECT_EQ(Unpack(*single), tensors[0].values);
    const auto table = loader.Rows("q.weight", 6, kInputs);
    ASSERT_TRUE(table.ok());
    EXPECT_EQ(std::memcmp(table->data.get(), tensors[0].values.data(), 6 * kInputs * sizeof(float)),
              0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(table->data.get()) % alignof(float), 0u);
  }
}

TEST_F(WeightsTest, PackedViewsSurviveMoves) {
  const auto tensors = Projections(DType::kBF16, DType::kBF16, DType::kBF16);
  Write(tensors);
  auto weights = Loader(DType::kF32).Linear(kParts, kInputs, true);
  ASSERT_TRUE(weights.ok());
  std::vector<LinearWeights> kept;
  kept.push_back(*std::move(weights));
  kept.reserve(kept.capacity() + 1);
  EXPECT_EQ(Unpack(kept.front()), Expected(tensors, DType::kBF16, true));
}

TEST_F(WeightsTest, CountsATiedTensorOnce) {
  Write(Projections(DType::kBF16, DType::kBF16, DType::kBF16));
  WeightLoader loader = Loader(DType::kF32);
  ASSERT_TRUE(loader.Rows("q.weight", 6, kInputs).ok());
  ASSERT_TRUE(loader.Linear({{"q", 6}}, kInputs, false).ok());
  ASSERT_TRUE(loader.Vector("q.bias", 6).ok());
  EXPECT_EQ(loader.parameter_count(), 6 * kInputs + 6);
  EXPECT_GE(loader.weight_bytes(), 2 * 6 * kInputs * 2 + 6 * 4);
  const std::vector<WeightType> types = loader.weight_types();
  ASSERT_EQ(types.size(), 2u);
  EXPECT_EQ(types[0].name, "bfloat16");
  EXPECT_EQ(types[1].name, "float32");
  EXPECT_EQ(types[1].bytes, 6 * 4);
  EXPECT_EQ(types[0].bytes + types[1].bytes, loader.weight_bytes());
}

// What lies on a cache line is read in place, what does not is copied to one.
TEST_F(WeightsTest, ReadsPackedMatrices) {
  const auto tensors = Projections(DType::kBF16, DType::kBF16, DType::kBF16);
  Write(tensors);
  const std::vector<TensorToWrite> record = RecordOfParts();
  ASSERT_EQ(record.size(), 4u);  // three biases and a matrix
  const TensorToWrite matrix = record.back();
  EXPECT_EQ(matrix.name, "q+k+v.packed");
  EXPECT_EQ(matrix.shape, (std::vector<int64_t>{1, kInputs, 32}));
  const std::string data(reinterpret_cast<const char*>(matrix.data.get()), matrix.bytes());
  for (const size_t misalignment : {0, 2, 63}) {
    SCOPED_TRACE(misalignment);
    std::string header = R"({"q+k+v.packed":{"dtype":"BF16","shape":[1,20,32],)"
                         R"("data_offsets":[0,1280]}})";
    header.resize(128 - 8 + misalignment, ' ');
    WriteBytes(SafetensorsBytes(header, data));
    const auto weights = Loader(DType::kF32).Linear(kParts, kInputs, false);
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weights->packed().data) % 64, 0u);
    const auto stored = checkpoint_->Find("q+k+v.packed");
    EXPECT_EQ(weights->packed().data == stored->bytes.data(), misalignment == 0);
    EXPECT_EQ(Unpack(*weights), Expected(tensors, DType::kBF16, false));
  }
  const auto other = Loader(DType::kF32).Linear(kParts, kInputs + 2, false);
  EXPECT_EQ(other.status().code(), StatusCode::kCorrupt);
  EXPECT_NE(other.status().message().find("BF16 [1, 20, 32], config.json asks for [1, 22, 32]"),
            std::string::npos)
      << other.status().ToString();
}

TEST_F(WeightsTest, PackedMatricesOutliveTheCheckpoint) {
  const auto tensors = Projections(DType::kBF16, DType::kBF16, DType::kBF16);
  Write(tensors);
  const std::vector<TensorToWrite> record = RecordOfParts();
  const TestFolder packed;
  ASSERT_TRUE(WriteSafetensors(packed.File("model.safetensors"), "test", record).ok());
  checkpoint_ = std::make_unique<Checkpoint>(*Checkpoint::Open(packed.path()));
  const auto weights = Loader(DType::kBF16).Linear(kParts, kInputs, true);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  checkpoint_.reset();
  EXPECT_EQ(Unpack(*weights), Expected(tensors, DType::kBF16, true));
}

TEST_F(WeightsTest, NamesWhatDoesNotFit) {
  WriteBytes(
      SafetensorsBytes(R"({"q.weight":{"dtype":"I32","shape":[6,20],"data_offsets":[0,480]}})",
                       std::string(480, '\0')));
  const std::string file = folder_.File("model.safetensors");
  const auto integer = Loader(DType::kF32).Linear({{"q", 6}}, kInputs, false);
  EXPECT_EQ(integer.status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(integer.status().message(),
            file +
                ": tensor \"q.weight\" is stored as I32; weights must be F32, F16 or BF16 "
                "(matrices of a GGUF file also Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, Q4_K, "
                "Q5_K, Q6_K, IQ4_XS, Q3_K, Q2_K): save the model in one of these types");

  Write(Projections(DType::kF32, DType::kF32, DType::kF32));
  WeightLoader loader = Loader(DType::kF32);
  const auto shape = loader.Linear({{"q", 7}}, kInputs, false);
  EXPECT_EQ(shape.status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(shape.status().message(),
            file +
                ": tensor \"q.weight\" is F32 [6, 20], config.json asks for [7, 20]; the two do "
                "not belong together");
  EXPECT_EQ(loader.Vector("q.weight", 120).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(loader.Vector("o.bias", 6).status().code(), StatusCode::kNotFound);
}

TEST_F(WeightsTest, NamesQuantisedMatricesOfOtherShapes) {
  WriteGgufModel(folder_, {.hidden_size = 256, .intermediate_size = 512, .head_dim = 64},
                 std::array{WeightFormat::kQ8_0});
  checkpoint_ = std::make_unique<Checkpoint>(*Checkpoint::Open(folder_.path()));
  const std::string name = "model.layers.0.mlp.up_proj";
  const std::string tensor = folder_.File("model.gguf") + ": tensor \"" + name + ".weight\" is ";
  WeightLoader loader = Loader(DType::kF32);
  const Status matrix = loader.Linear({{name, 500}}, 256, false).status();
  EXPECT_EQ(matrix.code(), StatusCode::kCorrupt);
  EXPECT_EQ(matrix.message(), tensor +
                                  "Q8_0 [512, 256], config.json asks for [500, 256]; the two do "
                                  "not belong together");
  EXPECT_EQ(loader.Rows(name + ".weight", 512, 128).status().code(), StatusCode::kCorrupt);
  // No vector is read from blocks.
  EXPECT_EQ(loader.Vector(name + ".weight", 500).status().code(), StatusCode::kBadArgument);
}

TEST_F(WeightsTest, CutsAMatrixHeadByHead) {
  constexpr int64_t kHeads = 2;
  const HeadSlice slices[] = {{.rows = 3, .transposed = true}, {.rows = 4, .transposed = false}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t misalignment : {0, 1}) {
      const TestTensor tensor = RandomTensor("kv.weight", {kHeads * 7, kInputs}, dtype, 1);
      Write(std::span(&tensor, 1), misalignment);
      WeightLoader loader = Loader(DType::kF32);
      const auto parts = loader.LinearSlices("kv", kHeads, slices, kInputs);
      ASSERT_TRUE(parts.ok()) << parts.status().ToString();
      EXPECT_EQ(loader.parameter_count(), kHeads * 7 * kInputs);
      for (int64_t head = 0; head < kHeads; ++head) {
        const float* const rows = tensor.values.data() + head * 7 * kInputs;
        const std::vector<float> turned = Unpack((*parts)[0][static_cast<size_t>(head)]);
        for (int64_t i = 0; i < 3 * kInputs; ++i) {
          EXPECT_EQ(turned[static_cast<size_t>(i % kInputs * 3 + i / kInputs)], rows[i]);
        }
        EXPECT_EQ(Unpack((*parts)[1][static_cast<size_t>(head)]),
                  std::vector<float>(rows + 3 * kInputs, rows + 7 * kInputs));
      }
    }
  }
  EXPECT_EQ(Loader(DType::kF32).LinearSlices("kv", 3, slices, kInputs).status().code(),
            StatusCode::kCorrupt);
}

}  // namespace
}  // namespace quire
