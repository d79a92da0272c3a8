#include "model/config/rope_config.h"

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config/config_bounds.h"

namespace quire {
namespace {

constexpr double kMinTheta = 1.0;
constexpr double kMaxTheta = 1e12;

struct Family {
  std::string_view name;
  RopeScaling scaling;
};

constexpr Family kFamilies[] = {
    {"default", RopeScaling::kNone},      {"linear", RopeScaling::kLinear},
    {"dynamic", RopeScaling::kDynamic},   {"llama3", RopeScaling::kLlama3},
    {"longrope", RopeScaling::kLongRope}, {"yarn", RopeScaling::kYarn},
};

// Where the parameters stand: the configuration, and the object inside it that has those of the
// scaling family (or the configuration again where there is none).
struct Source {
  const JsonValue& config;
  JsonValue parameters;
  int64_t head_dim;
  int64_t max_position_embeddings;
};

Result<Source> FindSource(const JsonValue& config, int64_t head_dim,
                          int64_t max_position_embeddings) {
  // transformers 5 lets rope_scaling, if it is there, replace rope_parameters.
  for (const std::string_view key : {"rope_scaling", "rope_parameters"}) {
    QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> found, config.Find(key));
    if (!found) continue;
    if (!found->json().is_object()) {
      return Status(StatusCode::kBadArgument, found->path() + ": expected an object or null");
    }
    if (!found->json().empty()) {
      return Source{config, *found, head_dim, max_position_embeddings};
    }
  }
  return Source{config, config, head_dim, max_position_embeddings};
}

Result<double> CheckedNumber(const JsonValue& value, double min, double max) {
  QUIRE_ASSIGN_OR_RETURN(const double number, value.Number());
  if (number >= min && number <= max) return number;
  return Status(StatusCode::kBadArgument, value.path() + ": " + std::to_string(number) +
                                              " is not in [" + std::to_string(min) + ", " +
                                              std::to_string(max) + "]");
}

// The object's own field first, the configuration's second.
Result<double> NumberNearOrFar(const Source& source, std::string_view key, double fallback,
                               double min, double max) {
  QUIRE_ASSIGN_OR_RETURN(std::optional<JsonValue> value, source.parameters.Find(key));
  if (!value) {
    QUIRE_ASSIGN_OR_RETURN(value, source.config.Find(key));
  }
  if (!value) return fallback;
  return CheckedNumber(*value, min, max);
}

// Bounds that hold every published value with room; what a family needs beyond them
// ComputeRopeFrequencies checks.
constexpr double kMaxFactor = 1e6;

Result<double> FactorOr(const Source& source, std::string_view key, double fallback) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> value, source.parameters.Find(key));
  if (!value) return fallback;
  return CheckedNumber(*value, 0.0, kMaxFactor);
}

Result<double> RequiredFactor(const Source& source, std::string_view key) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue value, source.parameters.Get(key));
  return CheckedNumber(value, 0.0, kMaxFactor);
}

// transformers gives the configuration's own field precedence over the one in the object (Phi-3 has
// it there).
Result<int64_t> OriginalLength(const Source& source) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> outer, source.config.Find(kKey));
  if (outer) return outer->Int(1, kMaxPositions);
  return source.parameters.GetIntOr(kKey, source.max_position_embeddings, 1, kMaxPositions);
}

// Published configurations leave the factor out where it is the ratio of the two lengths.
Result<double> FactorOrRatio(const Source& source, int64_t original_length) {
  return FactorOr(
      source, "factor",
      static_cast<double>(source.max_position_embeddings) / static_cast<double>(original_length));
}

Result<std::vector<double>> FactorList(const Source& source, std::string_view key) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue list, source.parameters.Get(key));
  QUIRE_ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
  std::vector<double> factors;
  for (size_t i = 0; i < size; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue entry, list.At(i));
    QUIRE_ASSIGN_OR_RETURN(const double factor, CheckedNumber(entry, 0.0, kMaxFactor));
    factors.push_back(factor);
  }
  return factors;
}

Status ReadLlama3(const Source& source, RopeOptions& rope) {
  QUIRE_ASSIGN_OR_RETURN(rope.factor, RequiredFactor(source, "factor"));
  QUIRE_ASSIGN_OR_RETURN(rope.low_freq_factor, RequiredFactor(source, "low_freq_factor"));
  QUIRE_ASSIGN_OR_RETURN(rope.high_freq_factor, RequiredFactor(source, "high_freq_factor"));
  QUIRE_ASSIGN_OR_RETURN(rope.original_max_position_embeddings, OriginalLength(source));
  return Status();
}

Status ReadLongRope(const Source& source, RopeOptions& rope) {
  QUIRE_ASSIGN_OR_RETURN(rope.original_max_position_embeddings, OriginalLength(source));
  QUIRE_ASSIGN_OR_RETURN(rope.factor, FactorOrRatio(source, rope.original_max_position_embeddings));
  QUIRE_ASSIGN_OR_RETURN(rope.attention_factor, FactorOr(source, "attention_factor", 0.0));
  QUIRE_ASSIGN_OR_RETURN(rope.short_factors, FactorList(source, "short_factor"));
  QUIRE_ASSIGN_OR_RETURN(rope.long_factors, FactorList(source, "long_factor"));
  return Status();
}

Status ReadYarn(const Source& source, RopeOptions& rope) {
  QUIRE_ASSIGN_OR_RETURN(rope.original_max_position_embeddings, OriginalLength(source));
  QUIRE_ASSIGN_OR_RETURN(rope.factor, FactorOrRatio(source, rope.original_max_position_embeddings));
  QUIRE_ASSIGN_OR_RETURN(rope.attention_factor, FactorOr(source, "attention_factor", 0.0));
  QUIRE_ASSIGN_OR_RETURN(rope.beta_fast, FactorOr(source, "beta_fast", 32.0));
  QUIRE_ASSIGN_OR_RETURN(rope.beta_slow, FactorOr(source, "beta_slow", 1.0));
  QUIRE_ASSIGN_OR_RETURN(rope.mscale, FactorOr(source, "mscale", 0.0));
  QUIRE_ASSIGN_OR_RETURN(rope.mscale_all_dim, FactorOr(source, "mscale_all_dim", 0.0));
  QUIRE_ASSIGN_OR_RETURN(rope.truncate, source.parameters.GetBoolOr("truncate", true));
  return Status();
}

Status ReadFamily(const Source& source, RopeOptions& rope) {
  switch (rope.scaling) {
    case RopeScaling::kNone:
      return Status();
    case RopeScaling::kLinear: {
      QUIRE_ASSIGN_OR_RETURN(rope.factor, RequiredFactor(source, "factor"));
      return Status();
    }
    case RopeScaling::kDynamic: {
      QUIRE_ASSIGN_OR_RETURN(rope.factor, RequiredFactor(source, "factor"));
      rope.original_max_position_embeddings = source.max_position_embeddings;
      return Status();
    }
    case RopeScaling::kLlama3:
      return ReadLlama3(source, rope);
    case RopeScaling::kLongRope:
      return ReadLongRope(source, rope);
    case RopeScaling::kYarn:
      return ReadYarn(source, rope);
    case RopeScaling::kLlama4:  // no name in kFamilies leads to it
      break;
  }
  return Status(StatusCode::kInternal, "ReadRopeOptions: a scaling family without a reader");
}

Status BadFamily(const JsonValue& value, const std::string& name) {
  std::string known;
  for (const Family& family : kFamilies) {
    known += (known.empty() ? "" : ", ") + std::string(family.name);
  }
  return Status(StatusCode::kBadArgument,
                value.path() + ": \"" + name + "\" is no known scaling; known are " + known);
}

Result<RopeScaling> ReadScaling(const Source& source) {
  const bool is_own_object = &source.parameters.json() != &source.config.json();
  if (!is_own_object) return RopeScaling::kNone;
  QUIRE_ASSIGN_OR_RETURN(std::optional<JsonValue> value, source.parameters.Find("rope_type"));
  if (!value) {
    QUIRE_ASSIGN_OR_RETURN(value, source.parameters.Find("type"));
  }
  if (!value) return RopeScaling::kNone;
  QUIRE_ASSIGN_OR_RETURN(const std::string name, value->String());
  for (const Family& family : kFamilies) {
    if (family.name == name) return family.scaling;
  }
  return BadFamily(*value, name);
}

// Models that mix windows and full attention give one object per kind of layer.
Status CheckNotPerLayer(const Source& source) {
  for (const std::string_view kind : {"full_attention", "sliding_attention"}) {
    QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> found, source.parameters.Find(kind));
    if (!found) continue;
    return Status(StatusCode::kBadArgument,
                  found->path() +
                      ": rotary parameters per kind of layer are not known for this "
                      "architecture; give one rope_parameters object for all layers");
  }
  return Status();
}

Result<int64_t> ReadRotaryDim(const Source& source, double default_part) {
  QUIRE_ASSIGN_OR_RETURN(const double part,
                         NumberNearOrFar(source, "partial_rotary_factor", default_part, 0.0, 1.0));
  const auto rotary_dim = static_cast<int64_t>(static_cast<double>(source.head_dim) * part);
  if (rotary_dim >= 2 && rotary_dim % 2 == 0) return rotary_dim;
  return Status(StatusCode::kBadArgument,
                source.config.path() + ": head_dim " + std::to_string(source.head_dim) +
                    " with partial_rotary_factor " + std::to_string(part) + " rotates " +
                    std::to_string(rotary_dim) +
                    " dimensions; it must be an even number of at least 2");
}

Result<RopeOptions> ReadFrom(const Source& source, double theta, double default_part = 1.0) {
  RopeOptions rope;
  rope.mode = RopeMode::kNormal;
  rope.theta = theta;
  QUIRE_ASSIGN_OR_RETURN(rope.rotary_dim, ReadRotaryDim(source, default_part));
  QUIRE_ASSIGN_OR_RETURN(rope.scaling, ReadScaling(source));
  QUIRE_RETURN_IF_ERROR(ReadFamily(source, rope));
  const Result<RopeFrequencies> check = ComputeRopeFrequencies(rope, source.head_dim, true);
  if (!check.ok()) {
    return Status(StatusCode::kBadArgument,
                  source.parameters.path() + ": " + std::string(check.status().message()));
  }
  return rope;
}

// The object of one kind of layer in rope_parameters, if it is there.
Result<std::optional<JsonValue>> FindLayerKind(const JsonValue& config, std::string_view kind) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> parameters, config.Find("rope_parameters"));
  if (!parameters || !parameters->json().is_object()) return std::optional<JsonValue>();
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> found, parameters->Find(kind));
  if (!found || found->json().is_object()) return found;
  return Status(StatusCode::kBadArgument, found->path() + ": expected an object or null");
}

// `kind` names the layers in rope_parameters, `theta_key` the base in the configuration itself.
Result<RopeOptions> ReadLayerKind(const Source& outside, std::string_view kind,
                                  std::string_view theta_key, double default_theta) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> own, FindLayerKind(outside.config, kind));
  const Source source{outside.config, own ? *own : outside.parameters, outside.head_dim,
                      outside.max_position_embeddings};
  std::optional<JsonValue> theta;
  if (own) {
    QUIRE_ASSIGN_OR_RETURN(theta, own->Find("rope_theta"));
  }
  if (!theta) {
    QUIRE_ASSIGN_OR_RETURN(theta, outside.config.Find(theta_key));
  }
  double base = default_theta;
  if (theta) {
    QUIRE_ASSIGN_OR_RETURN(base, CheckedNumber(*theta, kMinTheta, kMaxTheta));
  }
  QUIRE_ASSIGN_OR_RETURN(RopeOptions rope, ReadFrom(source, base));
  if (rope.scaling != RopeScaling::kLongRope) return rope;
  return Status(StatusCode::kBadArgument,
                source.parameters.path() +
                    ": longrope is not known for an architecture with rotary parameters per kind "
                    "of layer");
}

}  // namespace

Result<RopeOptions> ReadRopeOptions(const JsonValue& config, int64_t head_dim,
                                    int64_t max_position_embeddings, const RopeDefaults& defaults) {
  QUIRE_ASSIGN_OR_RETURN(const Source source,
                         FindSource(config, head_dim, max_position_embeddings));
  QUIRE_RETURN_IF_ERROR(CheckNotPerLayer(source));
  QUIRE_ASSIGN_OR_RETURN(const double theta, NumberNearOrFar(source, "rope_theta", defaults.theta,
                                                             kMinTheta, kMaxTheta));
  return ReadFrom(source, theta, defaults.part);
}

Result<LayerRopes> ReadLayerRopes(const JsonValue& config, int64_t head_dim,
                                  int64_t max_position_embeddings) {
  constexpr double kFullTheta = 1e6;
  constexpr double kSlidingTheta = 10000.0;
  QUIRE_ASSIGN_OR_RETURN(const Source scaled,
                         FindSource(config, head_dim, max_position_embeddings));
  LayerRopes ropes;
  QUIRE_ASSIGN_OR_RETURN(ropes.full,
                         ReadLayerKind(scaled, "full_attention", "rope_theta", kFullTheta));
  // rope_scaling is that of full attention.
  const Source plain{config, config, head_dim, max_position_embeddings};
  QUIRE_ASSIGN_OR_RETURN(ropes.sliding, ReadLayerKind(plain, "sliding_attention",
                                                      "rope_local_base_freq", kSlidingTheta));
  if (ropes.sliding.scaling != RopeScaling::kDynamic) return ropes;
  return Status(StatusCode::kBadArgument,
                config.path() +
                    ": dynamic is not known for the rotary parameters of sliding_attention layers");
}

}  // namespace quire
