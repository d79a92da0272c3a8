#include "model/config/latent_config.h"

#include <cmath>
#include <optional>
#include <string>

namespace quire {
namespace {

// Bounds far above published models; products of three of them and four bytes stay within 63 bits.
constexpr int64_t kMaxLatentDim = int64_t{1} << 13;  // of a head; largest known 128
constexpr int64_t kMaxRank = int64_t{1} << 13;  // 1 536; with the rotated part it is a head's size

// What transformers takes for fields that are absent.
constexpr int64_t kDefaultQRank = 1536;
constexpr int64_t kDefaultKVRank = 512;
constexpr int64_t kDefaultDim = 128;
constexpr int64_t kDefaultRopeDim = 64;

}  // namespace

Result<LatentConfig> ReadLatentConfig(const JsonValue& json) {
  LatentConfig config;
  if (!json.json().contains("q_lora_rank")) {
    config.q_rank = kDefaultQRank;
  } else {
    // null: there is no such step.
    QUIRE_ASSIGN_OR_RETURN(config.q_rank, json.GetIntOr("q_lora_rank", 0, 1, kMaxRank));
  }
  QUIRE_ASSIGN_OR_RETURN(config.kv_rank,
                         json.GetIntOr("kv_lora_rank", kDefaultKVRank, 1, kMaxRank));
  QUIRE_ASSIGN_OR_RETURN(config.nope_dim,
                         json.GetIntOr("qk_nope_head_dim", kDefaultDim, 1, kMaxLatentDim));
  QUIRE_ASSIGN_OR_RETURN(config.rope_dim,
                         json.GetIntOr("qk_rope_head_dim", kDefaultRopeDim, 2, kMaxLatentDim));
  QUIRE_ASSIGN_OR_RETURN(config.v_dim, json.GetIntOr("v_head_dim", kDefaultDim, 1, kMaxLatentDim));
  if (config.rope_dim % 2 == 0) return config;
  return Status(StatusCode::kBadArgument,
                json.path() + ".qk_rope_head_dim: " + std::to_string(config.rope_dim) +
                    " is odd; rotated dimensions come in pairs");
}

double LatentScale(const LatentConfig& config, const RopeOptions& rope) {
  const double plain = 1.0 / std::sqrt(static_cast<double>(config.q_dim()));
  if (rope.scaling != RopeScaling::kYarn || rope.mscale_all_dim == 0 || rope.factor <= 1) {
    return plain;
  }
  const double factor = 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1.0;
  return plain * factor * factor;
}

}  // namespace quire
