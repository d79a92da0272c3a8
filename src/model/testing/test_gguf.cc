#include "model/testing/test_gguf.h"

#include <cstddef>
#include <utility>

#include "base/check.h"
#include "base/random.h"
#include "base/round_up.h"
#include "kernels/testing/quantised_rows.h"

namespace quire {
namespace {

constexpr size_t kAlignment = 32;
constexpr uint32_t kUint32Value = 4;
constexpr uint32_t kStringValue = 8;

template <typename T>
std::string Bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
std::string Text(std::string_view text) { return Bytes<uint64_t>(text.size()) + std::string(text); }
std::string IntEntry(std::string_view key, int64_t value) {
  return Text(key) + Bytes(kUint32Value) + Bytes(static_cast<uint32_t>(value));
}

std::string GgufName(std::string name) {
  static const std::pair<std::string_view, std::string_view> kParts[] = {
      {"model.embed_tokens.", "token_embd."},
      {"model.norm.", "output_norm."},
      {"lm_head.", "output."},
      {"model.layers.", "blk."},
      {"input_layernorm.", "attn_norm."},
      {"post_attention_layernorm.", "ffn_norm."},
      {"self_attn.q_proj.", "attn_q."},
      {"self_attn.k_proj.", "attn_k."},
      {"self_attn.v_proj.", "attn_v."},
      {"self_attn.o_proj.", "attn_output."},
      {"mlp.gate_proj.", "ffn_gate."},
      {"mlp.up_proj.", "ffn_up."},
      {"mlp.down_proj.", "ffn_down."},
  };
  for (const auto& [ours, stored] : kParts) {
    const size_t at = name.find(ours);
    if (at != name.npos) name.replace(at, ours.size(), stored);
  }
  return name;
}

uint32_t GgufTypeOf(WeightFormat format) {
  for (uint32_t type = 0; type < 64; ++type) {
    if (WeightFormatOfGguf(type) == format) return type;
  }
  QUIRE_CHECK(false);
}

std::string RandomMatrix(WeightFormat format, int64_t rows, int64_t columns, uint64_t seed) {
  const std::vector<std::byte> bytes = RandomQuantisedRows(format, rows, columns, 0.16F, seed);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

void WriteGgufModel(const TestFolder& folder, const TestModel& model,
                    std::span<const WeightFormat> formats) {
  std::string infos;
  std::string data;
  size_t matrices = 0;
  const std::vector<TestTensor> tensors = TestTensors(model);
  for (const TestTensor& tensor : tensors) {
    uint32_t type = 0;
    std::string values(reinterpret_cast<const char*>(tensor.values.data()),
                       tensor.values.size() * sizeof(float));
    if (tensor.shape.size() == 2) {
      const WeightFormat format = formats[matrices++ % formats.size()];
      type = GgufTypeOf(format);
      values = RandomMatrix(format, tensor.shape[0], tensor.shape[1], model.seed + matrices);
    }
    infos += Text(GgufName(tensor.name)) + Bytes(static_cast<uint32_t>(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;) infos += Bytes(tensor.shape[i]);
    infos += Bytes(type) + Bytes<uint64_t>(data.size());
    data += values;
    data.resize(RoundUp(data.size(), kAlignment));
  }
  std::string header = "GGUF" + Bytes<uint32_t>(3) + Bytes<uint64_t>(tensors.size()) +
                       Bytes<uint64_t>(3) + Text("general.architecture") + Bytes(kStringValue) +
                       Text("llama") +
                       IntEntry("llama.attention.head_count", model.num_attention_heads) +
                       IntEntry("llama.attention.head_count_kv", model.num_key_value_heads) + infos;
  header.resize(RoundUp(header.size(), kAlignment));
  folder.Write("config.json", TestConfig(model).dump());
  folder.Write("model.gguf", header + data);
}

}  // namespace quire
