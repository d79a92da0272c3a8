// Rotary position embedding: which dimensions are turned by which angle. Su et al. 2021 (arXiv
// 2104.09864); the scaling families as Hugging Face transformers computes them.
#ifndef QUIRE_ROPE_H_
#define QUIRE_ROPE_H_

#include <cstdint>
#include <vector>

#include "quire/status.h"

namespace quire {

enum class RopeMode : uint8_t {
  kNone,    // nothing is rotated
  kNormal,  // keys are rotated, rounded to the cache's dtype and stored; queries are rotated before
            // attention
  kInline,  // keys are stored as given; rotated in float32 when attention reads them
};

enum class RopePairing : uint8_t {
  kHalfSplit,    // pairs (i, i + rotary_dim / 2): Llama, Qwen, Mistral
  kInterleaved,  // pairs (2i, 2i + 1): GPT-J
};

enum class RopeScaling : uint8_t {
  kNone,      // inv_freq(i) = theta^(-2i / rotary_dim)
  kLinear,    // divided by factor
  kDynamic,   // "dynamic NTK": theta as it is, or as for a sequence of
              // original_max_position_embeddings * factor tokens, chosen per sequence
  kLlama3,    // low frequencies divided by factor, a ramp between
  kLlama4,    // as kLlama3; a step where high_freq_factor == low_freq_factor; interleaved pairs
  kLongRope,  // per-dimension factors, a long and a short set, chosen per sequence
  kYarn,      // NTK by parts with an attention factor; Peng et al. 2023 (arXiv 2309.00071)
};

// Whether there are two sets of frequencies, a short and a long one, of which each sequence has one
// (AttentionKVCache::SelectLongRope): that of kDynamic with the larger theta is the long one.
inline bool HasLongSet(RopeScaling scaling) {
  return scaling == RopeScaling::kDynamic || scaling == RopeScaling::kLongRope;
}

// REQUIRES of each field are checked when a cache is created (BadArgument).
struct RopeOptions {
  RopeMode mode = RopeMode::kNone;
  RopePairing pairing = RopePairing::kHalfSplit;
  RopeScaling scaling = RopeScaling::kNone;
  double theta = 10000.0;
  double position_scale =
      1.0;  // TVM's rotary_scale: the angle is position * position_scale * inv_freq
  int64_t rotary_dim =
      0;  // even, at most qk_head_dim; 0 = qk_head_dim. Dimensions after it are copied
  double factor = 1.0;            // linear, dynamic, llama3, llama4, longrope, yarn
  double low_freq_factor = 1.0;   // llama3, llama4
  double high_freq_factor = 4.0;  // llama3, llama4
  double beta_fast = 32.0;        // yarn
  double beta_slow = 1.0;         // yarn
  double mscale =
      0.0;  // yarn: attention factor is m(factor, mscale) / m(factor, mscale_all_dim), 0 = absent
  double mscale_all_dim = 0.0;  // yarn
  bool truncate = true;         // yarn: floor and ceil of the ramp's ends
  double attention_factor =
      0.0;  // longrope, yarn: multiplies cos and sin; 0 = the family's own formula
  int64_t original_max_position_embeddings = 0;  // dynamic, llama3, llama4, longrope, yarn
  std::vector<double> short_factors;             // longrope, rotary_dim / 2 entries
  std::vector<double> long_factors;              // longrope, rotary_dim / 2 entries
  bool use_long_factors = false;  // dynamic, longrope: what a new sequence starts with

  bool operator==(const RopeOptions&) const = default;
};

// Frequencies of one set of factors. Angles of position p: p * inv_freq[i], in double; cos and sin
// times amplitude.
struct RopeFrequencies {
  std::vector<double> inv_freq;  // [rotary_dim / 2], position_scale included
  double amplitude = 1.0;
};

// BadArgument with the field's name. `long_factors`: the long set, where there are two.
Result<RopeFrequencies> ComputeRopeFrequencies(const RopeOptions& options, int64_t head_dim,
                                               bool long_factors);

}  // namespace quire

#endif  // QUIRE_ROPE_H_
