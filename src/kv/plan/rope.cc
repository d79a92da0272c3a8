// Frequencies of rotary position embedding. b_i = theta^(-2i / R), R = rotary_dim, L =
// original_max_position_embeddings. Formulas are those of Hugging Face transformers
// (modeling_rope_utils), computed in double; tests/golden/rope.json holds its values. One choice is
// ours: behind L positions the "dynamic" family there changes theta with the length of the running
// sequence, which would give a token's key a value that depends on tokens after it. Quire's short
// set, for sequences up to L, leaves theta as it is, as transformers does; the long set fixes the
// length at L * factor, the longest that the model is extended to: theta is multiplied by (factor^2
// - factor + 1)^(R / (R - 2)).
#include "quire/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/check.h"
#include "base/float_environment.h"

namespace quire {
namespace {

Status BadField(const std::string& field, const std::string& value, const std::string& need) {
  return Status(StatusCode::kBadArgument,
                "RopeOptions." + field + " is " + value + "; it must be " + need);
}

Status CheckPositive(const char* field, double value) {
  if (std::isfinite(value) && value > 0) return Status();
  return BadField(field, std::to_string(value), "finite and above 0");
}

Status CheckNotNegative(const char* field, double value) {
  if (std::isfinite(value) && value >= 0) return Status();
  return BadField(field, std::to_string(value), "finite and at least 0");
}

Status CheckOriginalLength(const RopeOptions& options, int64_t least) {
  if (options.original_max_position_embeddings >= least) return Status();
  return BadField("original_max_position_embeddings",
                  std::to_string(options.original_max_position_embeddings),
                  "at least " + std::to_string(least) + " with this scaling family");
}

// RopeOptions may come from a binding or a file, so that the enums can hold any byte.
Status CheckEnums(const RopeOptions& options) {
  if (options.mode > RopeMode::kInline) {
    return BadField("mode", std::to_string(static_cast<int>(options.mode)), "a RopeMode");
  }
  if (options.pairing > RopePairing::kInterleaved) {
    return BadField("pairing", std::to_string(static_cast<int>(options.pairing)), "a RopePairing");
  }
  if (options.scaling > RopeScaling::kYarn) {
    return BadField("scaling", std::to_string(static_cast<int>(options.scaling)), "a RopeScaling");
  }
  return Status();
}

Status CheckLlama(const RopeOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckPositive("low_freq_factor", options.low_freq_factor));
  QUIRE_RETURN_IF_ERROR(CheckPositive("high_freq_factor", options.high_freq_factor));
  QUIRE_RETURN_IF_ERROR(CheckOriginalLength(options, 1));
  const bool llama4 = options.scaling == RopeScaling::kLlama4;
  const double low = options.low_freq_factor;
  const double high = options.high_freq_factor;
  if (high < low || (high == low && !llama4)) {
    return BadField(
        "high_freq_factor", std::to_string(high),
        std::string(llama4 ? "at least" : "above") + " low_freq_factor, " + std::to_string(low));
  }
  if (llama4 && options.pairing != RopePairing::kInterleaved) {
    return BadField("pairing", "kHalfSplit", "kInterleaved with kLlama4");
  }
  return Status();
}

Status CheckFactors(const char* field, const std::vector<double>& factors, int64_t pair_count) {
  if (static_cast<int64_t>(factors.size()) != pair_count) {
    return BadField(field, std::to_string(factors.size()) + " entries long",
                    std::to_string(pair_count) + " long, rotary_dim / 2");
  }
  for (size_t i = 0; i < factors.size(); ++i) {
    const std::string entry = std::string(field) + "[" + std::to_string(i) + "]";
    QUIRE_RETURN_IF_ERROR(CheckPositive(entry.c_str(), factors[i]));
  }
  return Status();
}

Status CheckLongRope(const RopeOptions& options, int64_t pair_count) {
  QUIRE_RETURN_IF_ERROR(CheckFactors("short_factors", options.short_factors, pair_count));
  QUIRE_RETURN_IF_ERROR(CheckFactors("long_factors", options.long_factors, pair_count));
  QUIRE_RETURN_IF_ERROR(CheckNotNegative("attention_factor", options.attention_factor));
  // The amplitude divides by ln L.
  const bool needs_log = options.attention_factor == 0 && options.factor > 1;
  return CheckOriginalLength(options, needs_log ? 2 : 1);
}

Status CheckYarn(const RopeOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckPositive("beta_fast", options.beta_fast));
  QUIRE_RETURN_IF_ERROR(CheckPositive("beta_slow", options.beta_slow));
  if (options.beta_fast < options.beta_slow) {
    return BadField("beta_fast", std::to_string(options.beta_fast),
                    "at least beta_slow, " + std::to_string(options.beta_slow));
  }
  QUIRE_RETURN_IF_ERROR(CheckNotNegative("mscale", options.mscale));
  QUIRE_RETURN_IF_ERROR(CheckNotNegative("mscale_all_dim", options.mscale_all_dim));
  QUIRE_RETURN_IF_ERROR(CheckNotNegative("attention_factor", options.attention_factor));
  if (options.theta <= 1) {  // the ramp's ends divide by ln theta
    return BadField("theta", std::to_string(options.theta), "above 1 with kYarn");
  }
  return CheckOriginalLength(options, 1);
}

Status CheckFamily(const RopeOptions& options, int64_t pair_count) {
  switch (options.scaling) {
    case RopeScaling::kNone:
    case RopeScaling::kLinear:
      return Status();
    case RopeScaling::kDynamic:
      return CheckOriginalLength(options, 1);
    case RopeScaling::kLlama3:
    case RopeScaling::kLlama4:
      return CheckLlama(options);
    case RopeScaling::kLongRope:
      return CheckLongRope(options, pair_count);
    case RopeScaling::kYarn:
      return CheckYarn(options);
  }
  return Status();
}

std::vector<double> BaseFrequencies(double theta, int64_t rotary_dim) {
  QUIRE_DCHECK(rotary_dim > 0 && rotary_dim % 2 == 0);
  std::vector<double> inv_freq(static_cast<size_t>(rotary_dim / 2));
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  }
  return inv_freq;
}

double DynamicTheta(const RopeOptions& options, int64_t rotary_dim) {
  // A single pair turns by b_0 = 1 whatever theta is; the exponent below would be infinite.
  if (rotary_dim == 2) return options.theta;
  const double dim = static_cast<double>(rotary_dim);
  const double growth = options.factor * options.factor - (options.factor - 1);
  return options.theta * std::pow(growth, dim / (dim - 2));
}

void ScaleLlama(const RopeOptions& options, std::vector<double>& inv_freq) {
  const double length = static_cast<double>(options.original_max_position_embeddings);
  const double low = options.low_freq_factor;
  const double high = options.high_freq_factor;
  QUIRE_DCHECK(high >= low);
  for (double& f : inv_freq) {
    const double turns = length * f / (2 * std::numbers::pi);  // within the original length
    const double keep = high == low ? (turns < low ? 0.0 : 1.0)
                                    : std::clamp((turns - low) / (high - low), 0.0, 1.0);
    f = (1 - keep) * f / options.factor + keep * f;
  }
}

// The pair index, as a real number, that makes `turns` turns within the original length.
double YarnPairOfTurns(const RopeOptions& options, double dim, double turns) {
  QUIRE_DCHECK(turns > 0 && options.theta > 1) << "logarithms of no number, or 0 to divide by";
  const double length = static_cast<double>(options.original_max_position_embeddings);
  return dim * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(options.theta));
}

void ScaleYarn(const RopeOptions& options, int64_t rotary_dim, std::vector<double>& inv_freq) {
  const double dim = static_cast<double>(rotary_dim);
  double low = YarnPairOfTurns(options, dim, options.beta_fast);
  double high = YarnPairOfTurns(options, dim, options.beta_slow);
  if (options.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // transformers' value: a step instead of 0 / 0
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / options.factor * ramp + inv_freq[i] * (1 - ramp);
  }
}

double YarnMagnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double YarnAmplitude(const RopeOptions& options) {
  if (options.attention_factor > 0) return options.attention_factor;
  if (options.mscale > 0 && options.mscale_all_dim > 0) {
    return YarnMagnitude(options.factor, options.mscale) /
           YarnMagnitude(options.factor, options.mscale_all_dim);
  }
  return YarnMagnitude(options.factor, 1.0);
}

double LongRopeAmplitude(const RopeOptions& options) {
  if (options.attention_factor > 0) return options.attention_factor;
  if (options.factor <= 1) return 1.0;
  const double length = static_cast<double>(options.original_max_position_embeddings);
  QUIRE_DCHECK(length > 1) << "its logarithm divides";
  return std::sqrt(1 + std::log(options.factor) / std::log(length));
}

RopeFrequencies Compute(const RopeOptions& options, int64_t rotary_dim, bool long_factors) {
  const ScopedFloatEnvironment environment;  // the caller may round in another direction
  const bool dynamic = options.scaling == RopeScaling::kDynamic && long_factors;
  RopeFrequencies result;
  result.inv_freq =
      BaseFrequencies(dynamic ? DynamicTheta(options, rotary_dim) : options.theta, rotary_dim);
  switch (options.scaling) {
    case RopeScaling::kNone:
    case RopeScaling::kDynamic:
      break;
    case RopeScaling::kLinear:
      for (double& f : result.inv_freq) f /= options.factor;
      break;
    case RopeScaling::kLlama3:
    case RopeScaling::kLlama4:
      ScaleLlama(options, result.inv_freq);
      break;
    case RopeScaling::kLongRope: {
      const std::vector<double>& factors =
          long_factors ? options.long_factors : options.short_factors;
      QUIRE_DCHECK(factors.size() == result.inv_freq.size());
      for (size_t i = 0; i < factors.size(); ++i) result.inv_freq[i] /= factors[i];
      result.amplitude = LongRopeAmplitude(options);
      break;
    }
    case RopeScaling::kYarn:
      ScaleYarn(options, rotary_dim, result.inv_freq);
      result.amplitude = YarnAmplitude(options);
      break;
  }
  for (double& f : result.inv_freq) f *= options.position_scale;
  return result;
}

}  // namespace

Result<RopeFrequencies> ComputeRopeFrequencies(const RopeOptions& options, int64_t head_dim,
                                               bool long_factors) {
  QUIRE_RETURN_IF_ERROR(CheckEnums(options));
  if (options.mode == RopeMode::kNone) return RopeFrequencies();
  const int64_t rotary_dim = options.rotary_dim == 0 ? head_dim : options.rotary_dim;
  if (rotary_dim <= 0 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
    return BadField("rotary_dim", std::to_string(rotary_dim),
                    "even, above 0 and at most the head dimension, " + std::to_string(head_dim));
  }
  QUIRE_RETURN_IF_ERROR(CheckPositive("theta", options.theta));
  QUIRE_RETURN_IF_ERROR(CheckPositive("position_scale", options.position_scale));
  if (options.scaling != RopeScaling::kNone) {
    QUIRE_RETURN_IF_ERROR(CheckPositive("factor", options.factor));
  }
  QUIRE_RETURN_IF_ERROR(CheckFamily(options, rotary_dim / 2));
  return Compute(options, rotary_dim, long_factors);
}

}  // namespace quire
