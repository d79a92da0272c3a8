#include "model/weights/gguf.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace quire {
namespace {

constexpr uint32_t kF32Type = 0;
constexpr uint32_t kQ4Type = 2;
constexpr uint32_t kQ8KType = 15;

template <typename T>
std::string Bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
std::string Text(std::string_view text) { return Bytes<uint64_t>(text.size()) + std::string(text); }
std::string TextEntry(std::string_view key, std::string_view value) {
  return Text(key) + Bytes<uint32_t>(8) + Text(value);
}
std::string IntEntry(std::string_view key, uint32_t value) {
  return Text(key) + Bytes<uint32_t>(4) + Bytes(value);
}

template <typename T>
std::string Entry(std::string_view key, uint32_t type, T value) {
  return Text(key) + Bytes(type) + Bytes(value);
}

struct Tensor {
  std::string name;
  std::vector<uint64_t> dimensions;  // the fastest first
  uint32_t type = kF32Type;
  uint64_t offset = 0;
};

struct File {
  uint32_t version = 3;
  std::vector<std::string> metadata = {TextEntry("general.architecture", "llama"),
                                       IntEntry("llama.attention.head_count", 2),
                                       IntEntry("llama.attention.head_count_kv", 1)};
  std::vector<Tensor> tensors = {{"output_norm.weight", {32}, kF32Type, 0},
                                 {"blk.0.attn_q.weight", {32, 8}, kQ4Type, 128},
                                 {"blk.10.attn_k.weight", {32, 4}, kQ4Type, 288},
                                 {"rope_freqs.weight", {4}, kQ8KType, 384}};
  uint64_t data_bytes = 384;

  std::string Write() const {
    std::string bytes = "GGUF" + Bytes(version) + Bytes<uint64_t>(tensors.size()) +
                        Bytes<uint64_t>(metadata.size());
    for (const std::string& entry : metadata) bytes += entry;
    for (const Tensor& tensor : tensors) {
      bytes += Text(tensor.name) + Bytes(static_cast<uint32_t>(tensor.dimensions.size()));
      for (const uint64_t size : tensor.dimensions) bytes += Bytes(size);
      bytes += Bytes(tensor.type) + Bytes(tensor.offset);
    }
    bytes.resize((bytes.size() + 31) / 32 * 32);
    return bytes + std::string(data_bytes, '\1');
  }
};

Result<StoredTensors> Parse(const std::string& bytes) {
  return ParseGguf(std::as_bytes(std::span(bytes)), "test.gguf");
}

void ExpectRefused(const File& file, StatusCode code, const std::string& part) {
  const auto stored = Parse(file.Write());
  ASSERT_FALSE(stored.ok()) << part;
  EXPECT_EQ(stored.status().code(), code) << stored.status().message();
  EXPECT_NE(stored.status().message().find(part), std::string::npos) << stored.status().message();
  EXPECT_NE(stored.status().message().find("test.gguf"), std::string::npos);
}

TEST(Gguf, NormsOfGemmaHaveNamesOfTheirOwnAndAreOneTooLarge) {
  File file;
  file.metadata = {TextEntry("general.architecture", "gemma2")};
  file.tensors = {{"output_norm.weight", {32}, kF32Type, 0},
                  {"blk.3.attn_norm.weight", {8}, kF32Type, 128},
                  {"blk.3.post_attention_norm.weight", {8}, kF32Type, 160},
                  {"blk.3.ffn_norm.weight", {8}, kF32Type, 192},
                  {"blk.3.post_ffw_norm.weight", {8}, kF32Type, 224},
                  {"blk.3.attn_q.weight", {8, 4}, kF32Type, 256}};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  const std::string layer = "model.layers.3.";
  for (const std::string& name :
       {std::string("model.norm"), layer + "input_layernorm", layer + "post_attention_layernorm",
        layer + "pre_feedforward_layernorm", layer + "post_feedforward_layernorm"}) {
    const StoredTensor* const tensor = stored->Find(name + ".weight");
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(tensor->value_offset, -1.0F);
  }
  const StoredTensor* const queries = stored->Find(layer + "self_attn.q_proj.weight");
  ASSERT_NE(queries, nullptr);
  EXPECT_EQ(queries->value_offset, 0.0F);
  EXPECT_EQ(queries->rotary_head_rows, 0);
}

TEST(Gguf, TensorsHaveTheNamesAndShapesOfACheckpoint) {
  const auto stored = Parse(File{}.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  ASSERT_EQ(stored->tensors.size(), 4U);
  const StoredTensor* const norm = stored->Find("model.norm.weight");
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->dtype, DType::kF32);
  EXPECT_EQ(norm->shape, std::vector<int64_t>{32});
  EXPECT_EQ(norm->end - norm->begin, 128);
  EXPECT_EQ(norm->rotary_head_rows, 0);
  const StoredTensor* const q = stored->Find("model.layers.0.self_attn.q_proj.weight");
  ASSERT_NE(q, nullptr);
  EXPECT_EQ(q->format, WeightFormat::kQ4_0);
  EXPECT_EQ(q->dtype, std::nullopt);
  EXPECT_EQ(q->shape, (std::vector<int64_t>{8, 32}));
  EXPECT_EQ(q->begin, 128);
  EXPECT_EQ(q->end - q->begin, 8 * 18);
  EXPECT_EQ(q->rotary_head_rows, 4);
  const StoredTensor* const k = stored->Find("model.layers.10.self_attn.k_proj.weight");
  ASSERT_NE(k, nullptr);
  EXPECT_EQ(k->rotary_head_rows, 4);
  const StoredTensor* const other = stored->Find("rope_freqs.weight");
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(other->type_name, "Q8_K");
  EXPECT_FALSE(other->dtype || other->format);
}

TEST(Gguf, OtherArchitecturesKeepTheOrderOfRows) {
  File file;
  file.metadata = {TextEntry("general.architecture", "qwen3")};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_EQ(stored->Find("model.layers.0.self_attn.q_proj.weight")->rotary_head_rows, 0);
}

TEST(Gguf, Phi3HasFusedMatrices) {
  File file;
  file.metadata = {TextEntry("general.architecture", "phi3")};
  file.tensors = {{"blk.3.attn_qkv.weight", {32, 8}, kQ4Type, 0},
                  {"blk.3.ffn_up.weight", {32, 8}, kQ4Type, 160}};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_NE(stored->Find("model.layers.3.self_attn.qkv_proj.weight"), nullptr);
  EXPECT_NE(stored->Find("model.layers.3.mlp.gate_up_proj.weight"), nullptr);
}

TEST(Gguf, LatentAttentionHasAMatrixOfAllHeads) {
  File file;
  file.metadata = {TextEntry("general.architecture", "deepseek2")};
  file.tensors = {{"blk.3.attn_k_b.weight", {32, 4, 2}, kQ4Type, 0},
                  {"blk.3.attn_q_a_norm.weight", {8}, kF32Type, 160},
                  {"blk.3.exp_probs_b.bias", {8}, kF32Type, 192},
                  {"blk.3.ffn_up_shexp.weight", {32, 4}, kF32Type, 224},
                  {"blk.3.attn_v_b.weight", {1ULL << 60, 1ULL << 60, 1ULL << 60}, kQ8KType, 736}};
  file.data_bytes = 768;
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  const std::string layer = "model.layers.3.";
  const StoredTensor* const keys = stored->Find(layer + "self_attn.k_b_proj.weight");
  ASSERT_NE(keys, nullptr);
  EXPECT_EQ(keys->shape, (std::vector<int64_t>{8, 32}));
  EXPECT_NE(stored->Find(layer + "self_attn.q_a_layernorm.weight"), nullptr);
  EXPECT_NE(stored->Find(layer + "mlp.gate.e_score_correction_bias"), nullptr);
  EXPECT_NE(stored->Find(layer + "mlp.shared_experts.up_proj.weight"), nullptr);
  EXPECT_EQ(stored->Find(layer + "self_attn.v_b_proj.weight")->shape.size(), 3U);
}

TEST(Gguf, Mamba2HasNamesAndShapesOfItsOwn) {
  File file;
  file.metadata = {TextEntry("general.architecture", "mamba2")};
  file.tensors = {{"output_norm.weight", {8}, kF32Type, 0},
                  {"blk.2.attn_norm.weight", {8}, kF32Type, 32},
                  {"blk.2.ssm_a", {1, 8}, kF32Type, 64},
                  {"blk.2.ssm_dt.bias", {8}, kF32Type, 96},
                  {"blk.2.ssm_conv1d.weight", {4, 8}, kF32Type, 128},
                  {"blk.2.ssm_norm.weight", {4, 2}, kF32Type, 256},
                  {"blk.2.ssm_b", {8}, kF32Type, 288}};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  const auto shape = [&](const std::string& name) {
    const StoredTensor* const tensor = stored->Find(name);
    return tensor == nullptr ? std::vector<int64_t>() : tensor->shape;
  };
  const std::string layer = "backbone.layers.2.";
  EXPECT_EQ(shape("backbone.norm_f.weight"), std::vector<int64_t>{8});
  EXPECT_EQ(shape(layer + "norm.weight"), std::vector<int64_t>{8});
  EXPECT_EQ(shape(layer + "mixer.A"), std::vector<int64_t>{8});
  EXPECT_EQ(shape(layer + "mixer.dt_bias"), std::vector<int64_t>{8});
  EXPECT_EQ(shape(layer + "mixer.conv1d.weight"), (std::vector<int64_t>{8, 1, 4}));
  EXPECT_EQ(shape(layer + "mixer.norm.weight"), std::vector<int64_t>{8});
  EXPECT_EQ(shape("blk.2.ssm_b"), std::vector<int64_t>{8});
}

TEST(Gguf, Qwen3NextHasNamesAndNormsOfItsOwn) {
  File file;
  file.metadata = {TextEntry("general.architecture", "qwen3next")};
  file.tensors = {{"output_norm.weight", {8}, kF32Type, 0},
                  {"blk.2.post_attention_norm.weight", {8}, kF32Type, 32},
                  {"blk.2.ssm_a", {8}, kF32Type, 64},
                  {"blk.2.ssm_dt.bias", {8}, kF32Type, 96},
                  {"blk.2.ssm_conv1d.weight", {4, 8}, kF32Type, 128},
                  {"blk.2.ssm_norm.weight", {8}, kF32Type, 256},
                  {"blk.2.ssm_in.weight", {32, 2}, kQ4Type, 288},
                  {"blk.2.ssm_ba.weight", {8, 2}, kF32Type, 352},
                  {"blk.2.ssm_out.weight", {32, 2}, kQ4Type, 416}};
  file.data_bytes = 480;
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  const auto offset = [&](const std::string& name) {
    const StoredTensor* const tensor = stored->Find("model." + name);
    return tensor == nullptr ? 9 : tensor->value_offset;
  };
  EXPECT_EQ(offset("norm.weight"), -1);
  EXPECT_EQ(offset("layers.2.post_attention_layernorm.weight"), -1);
  const std::string mixer = "layers.2.linear_attn.";
  for (const char* const name : {"norm.weight", "A", "dt_bias", "conv1d.weight",
                                 "in_proj_qkvz.weight", "in_proj_ba.weight", "out_proj.weight"}) {
    EXPECT_EQ(offset(mixer + name), 0) << name;
  }
  EXPECT_EQ(stored->Find("model." + mixer + "conv1d.weight")->shape,
            (std::vector<int64_t>{8, 1, 4}));
  EXPECT_EQ(stored->Find("model." + mixer + "in_proj_qkvz.weight")->format, WeightFormat::kQ4_0);
}

File FileOfExperts() {
  File file;
  file.metadata = {TextEntry("general.architecture", "qwen2moe"),
                   IntEntry("qwen2moe.expert_count", 3)};
  file.tensors = {{"blk.7.ffn_down_exps.weight", {32, 2, 3}, kQ4Type, 0},
                  {"blk.7.ffn_gate_inp_shexp.weight", {32}, kF32Type, 128},
                  {"blk.7.ffn_gate_inp.weight", {8, 3}, kF32Type, 256}};
  return file;
}

TEST(Gguf, TensorsOfAllExpertsAreMatricesOfEach) {
  const auto stored = Parse(FileOfExperts().Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_EQ(stored->tensors.size(), 5U);
  const std::string mlp = "model.layers.7.mlp.";
  for (int64_t i = 0; i < 3; ++i) {
    const StoredTensor* const down =
        stored->Find(mlp + "experts." + std::to_string(i) + ".down_proj.weight");
    ASSERT_NE(down, nullptr) << i;
    EXPECT_EQ(down->format, WeightFormat::kQ4_0);
    EXPECT_EQ(down->shape, (std::vector<int64_t>{2, 32}));
    EXPECT_EQ(down->begin, i * 2 * 18);
    EXPECT_EQ(down->end, (i + 1) * 2 * 18);
  }
  const StoredTensor* const gate = stored->Find(mlp + "shared_expert_gate.weight");
  ASSERT_NE(gate, nullptr);
  EXPECT_EQ(gate->shape, (std::vector<int64_t>{1, 32}));
  EXPECT_NE(stored->Find(mlp + "gate.weight"), nullptr);
}

TEST(Gguf, GateAndUpOfExpertsMayBeOneTensor) {
  for (const bool is_mixtral : {false, true}) {
    File file = FileOfExperts();
    if (is_mixtral) {
      file.metadata = {TextEntry("general.architecture", "llama"),
                       IntEntry("llama.expert_count", 3)};
    }
    file.tensors = {{"blk.7.ffn_gate_up_exps.weight", {32, 4, 3}, kQ4Type, 0},
                    {"blk.7.ffn_gate_inp.weight", {8, 3}, kF32Type, 224}};
    const auto stored = Parse(file.Write());
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    EXPECT_EQ(stored->tensors.size(), 7U);
    const std::string block = is_mixtral ? "block_sparse_moe." : "mlp.";
    EXPECT_NE(stored->Find("model.layers.7." + block + "gate.weight"), nullptr);
    for (int64_t i = 0; i < 6; ++i) {
      std::string name = i % 2 == 0 ? "gate_proj" : "up_proj";
      if (is_mixtral) name = i % 2 == 0 ? "w1" : "w3";
      const std::string expert = block + "experts." + std::to_string(i / 2) + ".";
      const StoredTensor* const found = stored->Find("model.layers.7." + expert + name + ".weight");
      ASSERT_NE(found, nullptr) << expert << name;
      EXPECT_EQ(found->format, WeightFormat::kQ4_0);
      EXPECT_EQ(found->shape, (std::vector<int64_t>{2, 32}));
      EXPECT_EQ(found->begin, i * 2 * 18);
      EXPECT_EQ(found->end, (i + 1) * 2 * 18);
    }
  }
}

TEST(Gguf, ExpertsOfTheLlamaArchitectureHaveTheNamesOfMixtral) {
  File file = FileOfExperts();
  file.metadata = {TextEntry("general.architecture", "llama"), IntEntry("llama.expert_count", 3)};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  const std::string block = "model.layers.7.block_sparse_moe.";
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_NE(stored->Find(block + "experts." + std::to_string(i) + ".w2.weight"), nullptr) << i;
  }
  EXPECT_NE(stored->Find(block + "gate.weight"), nullptr);
}

// Whatever their number: no bytes bound it.
TEST(Gguf, ExpertsOfATypeThatIsNotReadAreOne) {
  File file = FileOfExperts();
  file.metadata.back() = IntEntry("qwen2moe.expert_count", 1U << 31);
  file.tensors[0] = {"blk.7.ffn_down_exps.weight", {32, 1, 1ULL << 31}, kQ8KType, 0};
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_EQ(stored->tensors.size(), 3U);
  const StoredTensor* const first = stored->Find("model.layers.7.mlp.experts.0.down_proj.weight");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->type_name, "Q8_K");
  file.tensors[0] = {"blk.7.ffn_gate_up_exps.weight", {32, 2, 1ULL << 31}, kQ8KType, 0};
  const auto fused = Parse(file.Write());
  ASSERT_TRUE(fused.ok()) << fused.status().message();
  EXPECT_EQ(fused->tensors.size(), 4U);
}

TEST(Gguf, HostileExpertsAreRefused) {
  File file = FileOfExperts();
  for (const std::vector<uint64_t>& dimensions :
       {std::vector<uint64_t>{32, 3}, {32}, {32, 2, 2}, {32, 2, 1}, {32, 1, 3, 1}}) {
    file.tensors[0].dimensions = dimensions;
    ExpectRefused(file, StatusCode::kCorrupt, "3 experts that the metadata \"expert_count\"");
  }
  file = FileOfExperts();
  for (const std::vector<uint64_t>& dimensions :
       {std::vector<uint64_t>{32, 3, 3}, {32, 6}, {32}, {32, 2, 2}}) {
    file.tensors[0] = {"blk.7.ffn_gate_up_exps.weight", dimensions, kF32Type, 0};
    file.tensors[1].offset = 2048;
    file.tensors[2].offset = 4096;
    file.data_bytes = 8192;
    ExpectRefused(file, StatusCode::kCorrupt,
                  "two matrices on top of each other for each of the 3");
  }
  // Beside what it is made of.
  file = FileOfExperts();
  file.tensors[0] = {"blk.7.ffn_gate_up_exps.weight", {32, 2, 3}, kQ4Type, 0};
  file.tensors[1] = {"blk.7.ffn_up_exps.weight", {32, 1, 3}, kQ4Type, 128};
  ExpectRefused(file, StatusCode::kCorrupt, "stands twice");
  file = FileOfExperts();
  file.tensors[0] = {"blk.7.ffn_down_exps.weight", {32, 1ULL << 40, 3}, kQ4Type, 0};
  ExpectRefused(file, StatusCode::kCorrupt, "more than the file's");
  file = FileOfExperts();
  file.metadata.back() = IntEntry("qwen2moe.expert_count", 1'000'000);
  file.tensors.insert(file.tensors.begin() + 1,
                      {"blk.7.ffn_up_exps.weight", {1, 1, 1'000'000}, kF32Type, 352});
  file.tensors[0].type = kQ8KType;
  file.tensors[0].dimensions.back() = 1'000'000;
  file.data_bytes = 4'000'352;
  ExpectRefused(file, StatusCode::kTooLarge, "with its experts there are more than 1000000");
  // A name of one expert beside the tensor of all.
  file = FileOfExperts();
  file.tensors[1] = {"model.layers.7.mlp.experts.1.down_proj.weight", {32}, kF32Type, 128};
  ExpectRefused(file, StatusCode::kCorrupt, "stands twice");
}

TEST(Gguf, MetadataOfAnyTypeIsSkipped) {
  File file;
  file.metadata.push_back(Text("a") + Bytes<uint32_t>(9) + Bytes<uint32_t>(8) + Bytes<uint64_t>(2) +
                          Text("x") + Text("yy"));
  file.metadata.push_back(Text("b") + Bytes<uint32_t>(9) + Bytes<uint32_t>(5) + Bytes<uint64_t>(3) +
                          std::string(12, '\0'));
  file.metadata.push_back(Text("c") + Bytes<uint32_t>(12) + Bytes(1.0));
  file.metadata.push_back(Text("d") + Bytes<uint32_t>(7) + Bytes<uint8_t>(1));
  EXPECT_TRUE(Parse(file.Write()).ok());
}

// Entries of the number in every type of integers.
std::vector<std::string> EntriesOfAllIntegers(std::string_view key, int value) {
  return {Entry(key, 0, static_cast<uint8_t>(value)),   Entry(key, 1, static_cast<int8_t>(value)),
          Entry(key, 2, static_cast<uint16_t>(value)),  Entry(key, 3, static_cast<int16_t>(value)),
          Entry(key, 4, static_cast<uint32_t>(value)),  Entry(key, 5, static_cast<int32_t>(value)),
          Entry(key, 10, static_cast<uint64_t>(value)), Entry(key, 11, int64_t{value})};
}

TEST(Gguf, NumbersAreReadFromEveryTypeOfIntegers) {
  for (const std::string& entry : EntriesOfAllIntegers("llama.attention.head_count", 2)) {
    File file;
    file.metadata[1] = entry;
    const auto stored = Parse(file.Write());
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    EXPECT_EQ(stored->Find("model.layers.0.self_attn.q_proj.weight")->rotary_head_rows, 4);
  }
  for (const std::string& entry : EntriesOfAllIntegers("llama.attention.head_count_kv", 2)) {
    File file;
    file.metadata[2] = entry;
    const auto stored = Parse(file.Write());
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    EXPECT_EQ(stored->Find("model.layers.10.self_attn.k_proj.weight")->rotary_head_rows, 2);
  }
  for (const std::string& entry : EntriesOfAllIntegers("qwen2moe.expert_count", 3)) {
    File file = FileOfExperts();
    file.metadata[1] = entry;
    const auto stored = Parse(file.Write());
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    EXPECT_EQ(stored->tensors.size(), 5U);
  }
  for (const std::string& entry : EntriesOfAllIntegers("general.alignment", 4)) {
    File file;
    file.metadata.push_back(entry);
    file.tensors = {{"output_norm.weight", {32}, kF32Type, 0}, {"x", {32}, kF32Type, 132}};
    const auto stored = Parse(file.Write());
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    EXPECT_EQ(stored->Find("x")->begin, 132);
  }
}

// Those of a picture's tower say nothing about the model.
TEST(Gguf, NumbersOfOtherArchitecturesAreNotThoseOfTheModel) {
  File file;
  file.metadata.push_back(IntEntry("clip.attention.head_count", 4));
  file.metadata.push_back(IntEntry("clip.attention.head_count_kv", 4));
  const auto stored = Parse(file.Write());
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_EQ(stored->Find("model.layers.0.self_attn.q_proj.weight")->rotary_head_rows, 4);
  EXPECT_EQ(stored->Find("model.layers.10.self_attn.k_proj.weight")->rotary_head_rows, 4);
}

TEST(Gguf, NumbersThatAreNoCountsAreRefused) {
  for (const std::string key : {"general.alignment", "llama.attention.head_count",
                                "llama.attention.head_count_kv", "llama.expert_count"}) {
    const std::string entries[] = {Entry(key, 6, 2.0F), Entry(key, 7, uint8_t{1}),
                                   TextEntry(key, "2"), Entry(key, 12, 2.0),
                                   Text(key) + Bytes<uint32_t>(9) + Bytes<uint32_t>(4) +
                                       Bytes<uint64_t>(1) + Bytes<uint32_t>(2)};
    const std::string out_of_range[] = {Entry(key, 1, int8_t{-2}), Entry(key, 3, int16_t{-2}),
                                        Entry(key, 5, int32_t{-2}), Entry(key, 11, int64_t{-2}),
                                        Entry(key, 10, uint64_t{1} << 63)};
    File file;
    std::erase_if(file.metadata,
                  [&](const std::string& entry) { return entry.starts_with(Text(key)); });
    file.metadata.emplace_back();
    for (const std::string& entry : entries) {
      file.metadata.back() = entry;
      ExpectRefused(file, StatusCode::kCorrupt, "metadata \"" + key + "\" is no integer");
    }
    for (const std::string& entry : out_of_range) {
      file.metadata.back() = entry;
      ExpectRefused(file, StatusCode::kCorrupt,
                    "metadata \"" + key + "\" is negative or over 2^63");
    }
  }
}

TEST(Gguf, MetadataThatStandsTwiceIsRefused) {
  File file;
  file.metadata.push_back(IntEntry("general.alignment", 32));
  file.metadata.push_back(IntEntry("general.alignment", 4));
  ExpectRefused(file, StatusCode::kCorrupt, "metadata \"general.alignment\" stands twice");
  file = {};
  file.metadata.push_back(TextEntry("general.architecture", "qwen3"));
  ExpectRefused(file, StatusCode::kCorrupt, "metadata \"general.architecture\" stands twice");
  file.metadata.back() = TextEntry("k", "a");
  file.metadata.push_back(TextEntry("k", "a"));
  ExpectRefused(file, StatusCode::kCorrupt, "metadata \"k\" stands twice");
}

TEST(Gguf, EveryCutFileIsRefused) {
  const std::string bytes = File{}.Write();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto stored = Parse(bytes.substr(0, size));
    ASSERT_FALSE(stored.ok()) << size;
    EXPECT_EQ(stored.status().code(), StatusCode::kCorrupt) << stored.status().message();
  }
}

TEST(Gguf, HostileHeadersAreRefused) {
  File file;
  file.version = 1;
  ExpectRefused(file, StatusCode::kBadArgument, "version 1");
  file = {};
  file.metadata[0] = TextEntry("general.architecture", "mamba");
  ExpectRefused(file, StatusCode::kBadArgument, "\"mamba\"");
  for (const uint32_t alignment : {0U, 3U, 1U << 21}) {
    file = {};
    file.metadata.push_back(IntEntry("general.alignment", alignment));
    ExpectRefused(file, StatusCode::kCorrupt, "general.alignment");
  }
  file = {};
  file.metadata.push_back(Text("k") + Bytes<uint32_t>(13));
  ExpectRefused(file, StatusCode::kCorrupt, "unknown value type 13");
  file.metadata.back() = Text("k") + Bytes<uint32_t>(8) + Bytes<uint64_t>(1ULL << 63);
  ExpectRefused(file, StatusCode::kCorrupt, "the limit is");
  for (const uint32_t type : {0U, 8U, 9U, 12U}) {
    file.metadata.back() =
        Text("k") + Bytes<uint32_t>(9) + Bytes(type) + Bytes<uint64_t>(1ULL << 62);
    ExpectRefused(file, StatusCode::kCorrupt, "\"k\" needs");
  }
  std::string nested = Text("k") + Bytes<uint32_t>(9);
  for (int i = 0; i < 5; ++i) nested += Bytes<uint32_t>(9) + Bytes<uint64_t>(1);
  file.metadata.back() = nested + std::string(64, '\0');
  ExpectRefused(file, StatusCode::kCorrupt, "nests arrays");
}

TEST(Gguf, HostileCountsAreRefused) {
  std::string bytes = File{}.Write();
  bytes.replace(8, 8, Bytes<uint64_t>(1ULL << 40));
  EXPECT_EQ(Parse(bytes).status().code(), StatusCode::kTooLarge);
  bytes = File{}.Write();
  bytes.replace(16, 8, Bytes<uint64_t>(1ULL << 60));
  EXPECT_EQ(Parse(bytes).status().code(), StatusCode::kTooLarge);
}

TEST(Gguf, HostileTensorsAreRefused) {
  const auto refuse = [](const Tensor& tensor, const std::string& part) {
    File file;
    file.tensors[1] = tensor;
    ExpectRefused(file, StatusCode::kCorrupt, part);
  };
  refuse({"x", {}, kQ4Type, 128}, "0 dimensions");
  refuse({"x", {32, 1, 1, 1, 1}, kQ4Type, 128}, "5 dimensions");
  refuse({"x", {32, 0}, kQ4Type, 128}, "a dimension that is 0");
  refuse({"x", {32, 1ULL << 63}, kQ4Type, 128}, "over 2^63");
  refuse({"x", {33, 2}, kQ4Type, 128}, "no whole blocks");
  refuse({"x", {1ULL << 40, 1ULL << 40}, kQ4Type, 128}, "more than the file's");
  refuse({"x", {32, 1ULL << 40}, kQ4Type, 128}, "more than the file's");
  refuse({"x", {32, 8}, kQ4Type, 130}, "the alignment 32");
  refuse({"x", {32, 8}, kQ4Type, 1ULL << 60}, "lies at");
  refuse({"x", {32, 8}, kQ4Type, 96}, "overlaps");
  refuse({"x", {32, 8}, kQ4Type, 384}, "the file has");
  refuse({"output_norm.weight", {32, 8}, kQ4Type, 128}, "stands twice");
  refuse({"blk.0.attn_q.weight", {32, 6}, kQ4Type, 128}, "6 rows for 2 heads");
  refuse({"blk.0.attn_q.weight", {32, 7}, kQ4Type, 128}, "7 rows for 2 heads");
  refuse({std::string(2000, 'x'), {32, 8}, kQ4Type, 128}, "2000 bytes");
}

}  // namespace
}  // namespace quire
