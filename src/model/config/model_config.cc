#include "model/config/model_config.h"

#include <algorithm>
#include <utility>

#include "base/json.h"
#include "model/config/architecture.h"
#include "model/config/config_bounds.h"
#include "model/config/quantisation_config.h"
#include "model/config/rope_config.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// Bounds as in config_bounds.h.
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;  // largest known 262 144
constexpr int64_t kMaxHiddenSize = int64_t{1} << 20;  // 18 432
constexpr int64_t kMaxLayers = 10'000;                // 126
constexpr size_t kMaxEosTokens = 1024;
constexpr double kMaxSoftCap = 1e6;  // 50; that of AttentionLayerSpec

// What transformers takes for fields that are absent.
constexpr int64_t kDefaultMaxWindowLayers = 28;
constexpr int64_t kGemmaHeadDim = 256;
constexpr int64_t kHybridHeadDim = 256;
constexpr int64_t kGemmaQueryScalar = 256;
constexpr int64_t kGemmaWindow = 4096;
constexpr double kGemma2AttentionCap = 50;
constexpr double kGemma2LogitCap = 30;

Result<std::string> ReadArchitecture(const JsonValue& config) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue list, config.Get("architectures"));
  QUIRE_ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
  if (size == 0) return BadField(config, "architectures", "the list is empty; name one class");
  QUIRE_ASSIGN_OR_RETURN(const JsonValue first, list.At(0));
  return first.String();
}

Status ReadNormEps(const JsonValue& json, std::string_view field, double fallback,
                   ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.rms_norm_eps, json.GetNumberOr(field, fallback));
  if (config.rms_norm_eps >= 0 && config.rms_norm_eps < 1) return Status();
  return BadField(json, field, std::to_string(config.rms_norm_eps) + " is not in [0, 1)");
}

Status ReadSizes(const JsonValue& json, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.vocab_size, json.GetInt("vocab_size", 1, kMaxVocabulary));
  QUIRE_ASSIGN_OR_RETURN(config.hidden_size, json.GetInt("hidden_size", 1, kMaxHiddenSize));
  QUIRE_ASSIGN_OR_RETURN(config.num_hidden_layers, json.GetInt("num_hidden_layers", 1, kMaxLayers));
  return Status();
}

// What state space models do without.
Status ReadAttentionSizes(const JsonValue& json, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.intermediate_size,
                         json.GetInt("intermediate_size", 1, kMaxIntermediate));
  QUIRE_ASSIGN_OR_RETURN(config.max_position_embeddings,
                         json.GetInt("max_position_embeddings", 1, kMaxPositions));
  return ReadNormEps(json, "rms_norm_eps", 1e-6, config);
}

// `default_dim` 0: hidden_size over the number of heads.
Status ReadHeads(const JsonValue& json, int64_t default_dim, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.num_attention_heads,
                         json.GetInt("num_attention_heads", 1, kMaxHeads));
  const int64_t heads = config.num_attention_heads;
  QUIRE_ASSIGN_OR_RETURN(config.num_key_value_heads,
                         json.GetIntOr("num_key_value_heads", heads, 1, kMaxHeads));
  if (heads % config.num_key_value_heads != 0) {
    return BadField(json, "num_key_value_heads",
                    std::to_string(config.num_key_value_heads) +
                        " does not divide num_attention_heads, " + std::to_string(heads));
  }
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> head_dim, json.Find("head_dim"));
  if (head_dim) {
    QUIRE_ASSIGN_OR_RETURN(config.head_dim, head_dim->Int(1, kMaxHeadDim));
    return Status();
  }
  if (default_dim != 0) {
    config.head_dim = default_dim;
    return Status();
  }
  if (config.hidden_size % heads != 0 || config.hidden_size / heads > kMaxHeadDim) {
    return BadField(json, "head_dim",
                    "it is missing, and hidden_size " + std::to_string(config.hidden_size) +
                        " over num_attention_heads " + std::to_string(heads) +
                        " is no size of a head; add the field");
  }
  config.head_dim = config.hidden_size / heads;
  return Status();
}

struct NamedActivation {
  std::string_view name;  // of transformers
  Activation activation;
};

constexpr NamedActivation kActivations[] = {
    {"silu", Activation::kSilu},
    {"swish", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_new", Activation::kGeluTanh},
    {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"relu", Activation::kRelu},
    {"relu2", Activation::kRelu2},
    {"quick_gelu", Activation::kQuickGelu},
};

Status ReadActivation(const JsonValue& json, bool is_gemma, ModelConfig& config) {
  const std::string_view field = is_gemma ? "hidden_activation" : "hidden_act";
  QUIRE_ASSIGN_OR_RETURN(const std::string name,
                         json.GetStringOr(field, is_gemma ? "gelu_pytorch_tanh" : "silu"));
  std::string known;
  for (const NamedActivation& named : kActivations) {
    config.activation = named.activation;
    if (named.name == name) return Status();
    known += (known.empty() ? "" : ", ") + std::string(named.name);
  }
  return BadField(json, field, "\"" + name + "\" is not known; known are " + known);
}

// Where the field is that of the convolutions of recurrent layers, too.
Status RequireSilu(const JsonValue& json, const ModelConfig& config) {
  if (config.activation == Activation::kSilu) return Status();
  return BadField(json, "hidden_act",
                  "it must be silu for this architecture, whose convolutions know no other");
}

Status ReadFlags(const JsonValue& json, bool is_gemma, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                         json.GetBoolOr("tie_word_embeddings", is_gemma));
  QUIRE_ASSIGN_OR_RETURN(config.attention_bias, json.GetBoolOr("attention_bias", false));
  QUIRE_ASSIGN_OR_RETURN(config.mlp_bias, json.GetBoolOr("mlp_bias", false));
  return ReadActivation(json, is_gemma, config);
}

Status ReadLayerTypes(const JsonValue& json, int64_t layer_count, WindowConfig& window) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> types, json.Find("layer_types"));
  if (!types) return Status();
  QUIRE_ASSIGN_OR_RETURN(const size_t size, types->ArraySize());
  if (static_cast<int64_t>(size) != layer_count) {
    return Status(StatusCode::kBadArgument, types->path() + ": " + std::to_string(size) +
                                                " entries for num_hidden_layers " +
                                                std::to_string(layer_count));
  }
  for (size_t i = 0; i < size; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue entry, types->At(i));
    QUIRE_ASSIGN_OR_RETURN(const std::string type, entry.String());
    window.layer_types.push_back(type == "sliding_attention");
    if (!window.layer_types.back() && type != "full_attention") {
      return Status(StatusCode::kBadArgument,
                    entry.path() + ": \"" + type +
                        "\" is not known; known are full_attention and sliding_attention");
    }
  }
  return Status();
}

Status ReadWindow(const JsonValue& json, bool is_gemma, int64_t layer_count, WindowConfig& window) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> size, json.Find("sliding_window"));
  if (size) {
    QUIRE_ASSIGN_OR_RETURN(window.size, size->Int(1, kMaxPositions));
  } else if (is_gemma && !json.json().contains("sliding_window")) {
    window.size = kGemmaWindow;  // null is no window, only absence is the default
  }
  QUIRE_ASSIGN_OR_RETURN(window.enabled, json.GetBoolOr("use_sliding_window", false));
  QUIRE_ASSIGN_OR_RETURN(window.first_layer, json.GetIntOr("max_window_layers",
                                                           kDefaultMaxWindowLayers, 0, kMaxLayers));
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> pattern,
                         json.Find("sliding_window_pattern"));
  if (pattern) {
    QUIRE_ASSIGN_OR_RETURN(window.pattern, pattern->Int(1, kMaxLayers));
  }
  return ReadLayerTypes(json, layer_count, window);
}

// 0 for null: no cap.
Result<double> ReadCap(const JsonValue& json, std::string_view field, double fallback) {
  if (!json.json().contains(field)) return fallback;
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> value, json.Find(field));
  if (!value) return 0.0;
  QUIRE_ASSIGN_OR_RETURN(const double cap, value->Number());
  if (cap > 0 && cap <= kMaxSoftCap) return cap;
  return BadField(
      json, field,
      std::to_string(cap) + " is not in (0, " + std::to_string(kMaxSoftCap) + "]; null is no cap");
}

// What only the Gemma family has.
Status ReadGemma(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  const bool has_cap = architecture.attention_cap;
  QUIRE_ASSIGN_OR_RETURN(config.query_scalar,
                         json.GetNumberOr("query_pre_attn_scalar", kGemmaQueryScalar));
  if (!(config.query_scalar > 0)) {
    return BadField(json, "query_pre_attn_scalar",
                    std::to_string(config.query_scalar) + " is not above 0");
  }
  QUIRE_ASSIGN_OR_RETURN(config.attention_cap, ReadCap(json, "attn_logit_softcapping",
                                                       has_cap ? kGemma2AttentionCap : 0.0));
  if (!has_cap && config.attention_cap != 0) {
    return BadField(json, "attn_logit_softcapping",
                    std::to_string(config.attention_cap) +
                        "; scores of this architecture have no cap: set it to null");
  }
  QUIRE_ASSIGN_OR_RETURN(config.logit_cap,
                         ReadCap(json, "final_logit_softcapping", has_cap ? kGemma2LogitCap : 0.0));
  QUIRE_ASSIGN_OR_RETURN(const bool sees_ahead,
                         json.GetBoolOr("use_bidirectional_attention", false));
  if (!sees_ahead) return Status();
  return BadField(json, "use_bidirectional_attention",
                  "true; attention is computed to tokens before, not behind");
}

// With kDynamic the field says how far theta is as it was trained; the larger theta reaches
// further. So does kYarn, which users add to the configuration and leave the field as it was.
void ExtendPositions(ModelConfig& config) {
  const RopeOptions& rope = config.rope;
  if (rope.scaling != RopeScaling::kDynamic && rope.scaling != RopeScaling::kYarn) return;
  const double reached = std::min(
      static_cast<double>(rope.original_max_position_embeddings) * std::max(rope.factor, 1.0),
      static_cast<double>(kMaxPositions));
  config.max_position_embeddings =
      std::max(config.max_position_embeddings, static_cast<int64_t>(reached));
}

Status ReadRope(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  if (!architecture.local_rope) {
    QUIRE_ASSIGN_OR_RETURN(
        config.rope,
        ReadRopeOptions(json, config.head_dim, config.max_position_embeddings, architecture.rope));
    ExtendPositions(config);
    return Status();
  }
  QUIRE_ASSIGN_OR_RETURN(LayerRopes ropes,
                         ReadLayerRopes(json, config.head_dim, config.max_position_embeddings));
  config.rope = std::move(ropes.full);
  ExtendPositions(config);
  config.local_rope = std::move(ropes.sliding);
  return Status();
}

Status ReadStateSpace(const JsonValue& json, ModelConfig& config) {
  config.max_position_embeddings = kMaxPositions;
  QUIRE_RETURN_IF_ERROR(ReadNormEps(json, "layer_norm_epsilon", 1e-5, config));
  QUIRE_RETURN_IF_ERROR(ReadFlags(json, false, config));
  QUIRE_RETURN_IF_ERROR(RequireSilu(json, config));
  QUIRE_ASSIGN_OR_RETURN(config.state_space, ReadStateSpaceConfig(json, config.hidden_size));
  config.mixers.assign(static_cast<size_t>(config.num_hidden_layers), MixerKind::kStateSpace);
  return Status();
}

Status ReadExperts(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.experts, ReadExpertConfig(json, architecture.experts));
  QUIRE_ASSIGN_OR_RETURN(config.sparse_layers,
                         ReadSparseLayers(json, config.num_hidden_layers, config.experts));
  return Status();
}

Status ReadHybrid(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  QUIRE_RETURN_IF_ERROR(ReadAttentionSizes(json, config));
  QUIRE_RETURN_IF_ERROR(ReadHeads(json, kHybridHeadDim, config));
  QUIRE_RETURN_IF_ERROR(ReadFlags(json, false, config));
  QUIRE_RETURN_IF_ERROR(RequireSilu(json, config));
  QUIRE_ASSIGN_OR_RETURN(config.gated_delta, ReadGatedDeltaConfig(json));
  QUIRE_ASSIGN_OR_RETURN(config.mixers, ReadMixers(json, config.num_hidden_layers));
  QUIRE_RETURN_IF_ERROR(ReadExperts(json, architecture, config));
  return ReadRope(json, architecture, config);
}

// Key heads are the query heads: what is kept of a token is expanded to as many.
Status ReadLatentHeads(const JsonValue& json, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.num_attention_heads,
                         json.GetInt("num_attention_heads", 1, kMaxHeads));
  QUIRE_ASSIGN_OR_RETURN(
      config.num_key_value_heads,
      json.GetIntOr("num_key_value_heads", config.num_attention_heads, 1, kMaxHeads));
  if (config.num_key_value_heads == config.num_attention_heads) return Status();
  return BadField(json, "num_key_value_heads",
                  std::to_string(config.num_key_value_heads) + " is not num_attention_heads, " +
                      std::to_string(config.num_attention_heads) +
                      "; heads of latent attention all have keys of their own");
}

Status ReadLatentRope(const JsonValue& json, ModelConfig& config) {
  LatentConfig& latent = *config.latent;
  QUIRE_ASSIGN_OR_RETURN(config.rope,
                         ReadRopeOptions(json, latent.rope_dim, config.max_position_embeddings));
  if (HasLongSet(config.rope.scaling)) {  // chosen per sequence; the model's layers see rows
    const bool dynamic = config.rope.scaling == RopeScaling::kDynamic;
    return BadField(json, "rope_scaling",
                    std::string(dynamic ? "dynamic" : "longrope") +
                        " is not known for latent attention; known are default, linear, llama3 "
                        "and yarn");
  }
  QUIRE_ASSIGN_OR_RETURN(const bool interleaved, json.GetBoolOr("rope_interleave", true));
  config.rope.pairing = interleaved ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  latent.scale = LatentScale(latent, config.rope);
  return Status();
}

Status ReadLatent(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  QUIRE_RETURN_IF_ERROR(ReadAttentionSizes(json, config));
  QUIRE_RETURN_IF_ERROR(ReadLatentHeads(json, config));
  QUIRE_RETURN_IF_ERROR(ReadFlags(json, false, config));
  QUIRE_ASSIGN_OR_RETURN(config.latent, ReadLatentConfig(json));
  config.head_dim = config.latent->rope_dim;  // as transformers has it
  QUIRE_RETURN_IF_ERROR(ReadLatentRope(json, config));
  QUIRE_ASSIGN_OR_RETURN(config.experts, ReadGroupedExpertConfig(json, architecture.expert_scores));
  config.experts.has_shared_bias = HasBias(architecture.mlp_bias, config);
  QUIRE_ASSIGN_OR_RETURN(config.sparse_layers, ReadSparseLayersBehindDense(
                                                   json, config.num_hidden_layers, config.experts));
  config.mixers.assign(static_cast<size_t>(config.num_hidden_layers), MixerKind::kLatentAttention);
  return Status();
}

// Which layers of mixtures of experts of the Qwen family have windows is told in several ways. No
// published model has any.
Status RequireNoWindow(const JsonValue& json) {
  QUIRE_ASSIGN_OR_RETURN(const bool enabled, json.GetBoolOr("use_sliding_window", false));
  if (!enabled) return Status();
  return BadField(json, "use_sliding_window",
                  "true; windows are not computed for this architecture");
}

// What transformers takes the names of other scalings for differs from release to release.
Status RequireKnownToPhi3(const JsonValue& json, const ModelConfig& config) {
  const RopeScaling scaling = config.rope.scaling;
  if (scaling == RopeScaling::kNone || scaling == RopeScaling::kLongRope) return Status();
  return BadField(json, "rope_scaling", "it must be default or longrope for this architecture");
}

Status ReadLlamaLike(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  const bool is_gemma = architecture.is_gemma;
  QUIRE_RETURN_IF_ERROR(ReadAttentionSizes(json, config));
  QUIRE_RETURN_IF_ERROR(ReadHeads(json, is_gemma ? kGemmaHeadDim : 0, config));
  QUIRE_RETURN_IF_ERROR(ReadFlags(json, is_gemma, config));
  const bool has_experts = architecture.experts.count > 0;
  if (has_experts) QUIRE_RETURN_IF_ERROR(ReadExperts(json, architecture, config));
  if (has_experts && architecture.window == WindowRule::kNone) {
    QUIRE_RETURN_IF_ERROR(RequireNoWindow(json));
  } else {
    QUIRE_RETURN_IF_ERROR(ReadWindow(json, is_gemma, config.num_hidden_layers, config.window));
  }
  config.mixers.assign(static_cast<size_t>(config.num_hidden_layers), MixerKind::kPlainAttention);
  config.query_scalar = static_cast<double>(config.head_dim);
  if (is_gemma) QUIRE_RETURN_IF_ERROR(ReadGemma(json, architecture, config));
  QUIRE_RETURN_IF_ERROR(ReadRope(json, architecture, config));
  return architecture.fused ? RequireKnownToPhi3(json, config) : Status();
}

Status ReadByMixers(const JsonValue& json, const Architecture& architecture, ModelConfig& config) {
  switch (architecture.mixers) {
    case MixerRule::kPlainAttention:
      return ReadLlamaLike(json, architecture, config);
    case MixerRule::kStateSpace:
      return ReadStateSpace(json, config);
    case MixerRule::kLatent:
      return ReadLatent(json, architecture, config);
    case MixerRule::kHybrid:
      break;
  }
  return ReadHybrid(json, architecture, config);
}

// A token id or a list of them.
Result<std::vector<int64_t>> ReadTokenIds(const JsonValue& value, int64_t vocab_size) {
  std::vector<int64_t> ids;
  if (!value.json().is_array()) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t id, value.Int(0, vocab_size - 1));
    ids.push_back(id);
    return ids;
  }
  QUIRE_ASSIGN_OR_RETURN(const size_t size, value.ArraySize());
  if (size > kMaxEosTokens) {
    return Status(StatusCode::kBadArgument, value.path() + ": " + std::to_string(size) +
                                                " ids, at most " + std::to_string(kMaxEosTokens));
  }
  for (size_t i = 0; i < size; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue entry, value.At(i));
    QUIRE_ASSIGN_OR_RETURN(const int64_t id, entry.Int(0, vocab_size - 1));
    ids.push_back(id);
  }
  return ids;
}

// Fields that are absent here leave what is in `config`.
Status ReadSpecialTokens(const JsonValue& json, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> eos, json.Find("eos_token_id"));
  if (eos) {
    QUIRE_ASSIGN_OR_RETURN(config.eos_token_ids, ReadTokenIds(*eos, config.vocab_size));
  }
  QUIRE_ASSIGN_OR_RETURN(config.bos_token_id, json.GetIntOr("bos_token_id", config.bos_token_id, -1,
                                                            config.vocab_size - 1));
  return Status();
}

// The fields of the text model: in an object of their own where images have others beside it. What
// that object leaves out is as transformers takes it for Gemma 3, the one model that is so.
Result<nlohmann::json> TextFields(const JsonValue& json, const Architecture& architecture) {
  if (architecture.text_config.empty()) return json.json();
  QUIRE_ASSIGN_OR_RETURN(const JsonValue text, json.Get(architecture.text_config));
  const auto* const own = text.json().get_ptr<const nlohmann::json::object_t*>();
  if (own == nullptr) {
    return Status(StatusCode::kBadArgument, text.path() + ": expected an object");
  }
  nlohmann::json::object_t fields = *own;
  fields.insert({{"vocab_size", 262'208},
                 {"hidden_size", 2304},
                 {"intermediate_size", 9216},
                 {"num_hidden_layers", 26},
                 {"num_attention_heads", 8},
                 {"num_key_value_heads", 4},
                 {"max_position_embeddings", 131'072},
                 {"eos_token_id", 1},
                 {"bos_token_id", 2}});
  return nlohmann::json(std::move(fields));
}

// What holds for the whole of a model of texts and images stands outside of its text model's
// fields.
Status ReadOuter(const JsonValue& json, ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                         json.GetBoolOr("tie_word_embeddings", config.tie_word_embeddings));
  QUIRE_RETURN_IF_ERROR(ReadSpecialTokens(json, config));
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> quantised,
                         json.Find("quantization_config"));
  if (!quantised) return Status();
  QUIRE_ASSIGN_OR_RETURN(config.quantisation, ReadQuantisation(*quantised));
  return Status();
}

// Python writes Infinity, for which JSON has no number, into Mamba-2's time_step_limit. Outside of
// texts it becomes the object that transformers 5 writes in its place.
std::string WithoutBareInfinity(std::string_view text) {
  constexpr std::string_view kInfinity = "Infinity";
  std::string clean;
  bool in_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!in_text && text.substr(i).starts_with(kInfinity)) {
      clean += R"({"__float__": "Infinity"})";
      i += kInfinity.size() - 1;
      continue;
    }
    clean += text[i];
    if (text[i] == '"') in_text = !in_text;
    if (in_text && text[i] == '\\' && i + 1 < text.size()) clean += text[++i];
  }
  return clean;
}

std::string GenerationConfigPath(const std::string& config_path) {
  return config_path.substr(0, config_path.size() - std::string_view("config.json").size()) +
         "generation_config.json";
}

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view config_text,
                                     std::string_view generation_config, const std::string& path) {
  QUIRE_ASSIGN_OR_RETURN(const nlohmann::json document,
                         ParseJson(WithoutBareInfinity(config_text), path));
  const JsonValue json(document, path);
  ModelConfig config;
  config.path = path;
  QUIRE_ASSIGN_OR_RETURN(config.architecture, ReadArchitecture(json));
  // Fields mean what they mean to the architecture; the code that loads the model refuses unknown
  // ones.
  const Architecture* const known = FindArchitecture(config.architecture);
  const Architecture& architecture = known != nullptr ? *known : kLlama;
  QUIRE_ASSIGN_OR_RETURN(const nlohmann::json fields, TextFields(json, architecture));
  const std::string_view place = architecture.text_config;
  const JsonValue text(fields, place.empty() ? path : path + "." + std::string(place));
  QUIRE_RETURN_IF_ERROR(ReadSizes(text, config));
  QUIRE_RETURN_IF_ERROR(ReadByMixers(text, architecture, config));
  QUIRE_RETURN_IF_ERROR(ReadSpecialTokens(text, config));
  QUIRE_RETURN_IF_ERROR(ReadOuter(json, config));
  if (generation_config.empty()) return config;
  const std::string generation_path = GenerationConfigPath(path);
  QUIRE_ASSIGN_OR_RETURN(const nlohmann::json generation,
                         ParseJson(generation_config, generation_path));
  QUIRE_RETURN_IF_ERROR(ReadSpecialTokens(JsonValue(generation, generation_path), config));
  return config;
}

Result<ModelConfig> ReadModelConfig(const std::string& directory) {
  const std::string path = directory + "/config.json";
  const Result<MappedFile> config = MappedFile::Open(path);
  if (!config.ok() && config.status().code() == StatusCode::kNotFound) {
    return Status(StatusCode::kNotFound,
                  directory + ": there is no config.json; give a Hugging Face model folder");
  }
  if (!config.ok()) return config.status();
  const Result<MappedFile> generation = MappedFile::Open(GenerationConfigPath(path));
  if (!generation.ok()) {
    if (generation.status().code() != StatusCode::kNotFound) return generation.status();
    return ParseModelConfig(config->text(), "", path);
  }
  return ParseModelConfig(config->text(), generation->text(), path);
}

}  // namespace quire
