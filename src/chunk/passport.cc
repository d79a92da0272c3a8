// Passports: their canonical JSON and back. Canonical means that a passport has exactly one text,
// since the text's digest is what stores compare: keys sorted, no spaces, no floating-point
// numbers, nothing that stands for its default.
#include <algorithm>
#include <charconv>
#include <limits>

#include "base/guard.h"
#include "base/json.h"
#include "quire/chunk.h"

namespace quire {
namespace {

using Json = nlohmann::json;

constexpr int64_t kPassportVersion = 1;
constexpr size_t kTextBytesMax = 4096;  // a LongRoPE text of 128 factors has some 2500
constexpr int64_t kSizeMax = std::numeric_limits<int32_t>::max();
constexpr int64_t kLayersMax = 65535;  // layers are 16 bits wide in section tables

Status BadField(std::string_view field, const std::string& why) {
  return Status(StatusCode::kBadArgument, "Passport: " + std::string(field) + " " + why);
}

// ---- Element types

struct NamedElementType {
  std::string_view name;
  uint8_t code;
  uint8_t bits;
};

// DLPack's codes; those of float8 by number, as headers before DLPack 1.1 lack them.
constexpr uint8_t kBool = 6;
constexpr uint8_t kFloat8E4M3Fn = 10;
constexpr uint8_t kFloat8E5M2 = 12;
constexpr NamedElementType kElementTypes[] = {
    {"f16", kDLFloat, 16},
    {"bf16", kDLBfloat, 16},
    {"f32", kDLFloat, 32},
    {"f64", kDLFloat, 64},
    {"i8", kDLInt, 8},
    {"i16", kDLInt, 16},
    {"i32", kDLInt, 32},
    {"i64", kDLInt, 64},
    {"u8", kDLUInt, 8},
    {"bool", kBool, 8},
    {"f8_e4m3fn", kFloat8E4M3Fn, 8},
    {"f8_e5m2", kFloat8E5M2, 8},
};

// ---- State kinds

constexpr std::string_view kStateKindNames[] = {"attention", "latent", "recurrent", "caller"};

std::string_view StateKindName(StateKind kind) { return kStateKindNames[static_cast<int>(kind)]; }

Result<StateKind> ParseStateKind(std::string_view name) {
  for (size_t i = 0; i < std::size(kStateKindNames); ++i) {
    if (name == kStateKindNames[i]) return static_cast<StateKind>(i);
  }
  return BadField("kind",
                  "\"" + std::string(name) + "\" is none of attention, latent, recurrent, caller");
}

// ---- Shapes of callers' states

constexpr size_t kStateRankMax = TensorView::kMaxRank - 1;  // as RNNStateSpec::shape
constexpr std::string_view kScalarName = "scalar";

// "8x64x64"; a state without dimensions is "scalar", what is no caller's state is empty.
std::string StateShapeText(const PassportLayer& layer) {
  if (layer.kind != StateKind::kCaller) return "";
  std::string text;
  for (const int64_t dim : layer.state_shape)
    text += (text.empty() ? "" : "x") + std::to_string(dim);
  return text.empty() ? std::string(kScalarName) : text;
}

Result<std::vector<int64_t>> ParseStateShape(std::string_view text) {
  std::vector<int64_t> shape;
  if (text == kScalarName) return shape;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('x', begin), text.size());
    int64_t dim = 0;
    const std::from_chars_result read =
        std::from_chars(text.data() + begin, text.data() + end, dim);
    if (read.ec != std::errc() || read.ptr != text.data() + end || shape.size() == kStateRankMax) {
      return BadField("state", "\"" + std::string(text.substr(0, 64)) +
                                   "\" is neither scalar nor 1 to " +
                                   std::to_string(kStateRankMax) + " sizes joined by x");
    }
    shape.push_back(dim);
    begin = end + 1;
  }
  return shape;
}

// ---- To JSON

// What is not UTF-8 comes out differently by the two ways that the library offers to write it.
bool IsUtf8(const std::string& text) {
  const Json value(text);
  return value.dump(-1, ' ', false, Json::error_handler_t::replace) ==
         value.dump(-1, ' ', false, Json::error_handler_t::ignore);
}

Status CheckText(std::string_view field, const std::string& text) {
  if (text.size() > kTextBytesMax) {
    return BadField(field, "has " + std::to_string(text.size()) + " bytes; at most " +
                               std::to_string(kTextBytesMax) + " are taken");
  }
  return IsUtf8(text) ? Status() : BadField(field, "is not UTF-8");
}

Status CheckSize(std::string_view field, int64_t size) {
  if (size >= 1 && size <= kSizeMax) return Status();
  return BadField(field, std::to_string(size) + " is not in [1, " + std::to_string(kSizeMax) + "]");
}

Status CheckStateShape(const PassportLayer& layer) {
  const bool is_caller = layer.kind == StateKind::kCaller;
  if (!is_caller && !layer.state_shape.empty())
    return BadField("state_shape", "is given for a layer that is no caller's state");
  if (layer.state_shape.size() > kStateRankMax) {
    return BadField("state_shape", "has " + std::to_string(layer.state_shape.size()) +
                                       " dimensions; at most " + std::to_string(kStateRankMax));
  }
  for (const int64_t dim : layer.state_shape) QUIRE_RETURN_IF_ERROR(CheckSize("state_shape", dim));
  const bool is_plain = layer.kv_heads == 1 && layer.head_dim == 1 && layer.v_head_dim == 1 &&
                        !layer.v_dtype && layer.window == 0;
  if (!is_caller || is_plain) return Status();
  return BadField("layers",
                  "have a caller's state with sizes, a window or a value type beside its shape");
}

Status CheckLayers(const Passport& passport) {
  const int64_t count = static_cast<int64_t>(passport.layers.size());
  if (passport.first_layer < 0 || count < 1 || count > kLayersMax ||
      passport.first_layer > kLayersMax - count) {
    return BadField("layers", std::to_string(count) + " from layer " +
                                  std::to_string(passport.first_layer) +
                                  " on; there must be one, and none behind layer " +
                                  std::to_string(kLayersMax - 1));
  }
  for (const PassportLayer& layer : passport.layers) {
    QUIRE_RETURN_IF_ERROR(CheckSize("kv_heads", layer.kv_heads));
    QUIRE_RETURN_IF_ERROR(CheckSize("head_dim", layer.head_dim));
    QUIRE_RETURN_IF_ERROR(CheckSize("v_head_dim", layer.v_head_dim));
    if (layer.window != 0) QUIRE_RETURN_IF_ERROR(CheckSize("window", layer.window));
    QUIRE_RETURN_IF_ERROR(ElementType::Parse(layer.dtype.ToString()).status());
    QUIRE_RETURN_IF_ERROR(ElementType::Parse(layer.value_dtype().ToString()).status());
    QUIRE_RETURN_IF_ERROR(CheckStateShape(layer));
  }
  return Status();
}

struct TextField {
  std::string_view name;
  std::string Passport::*member;
  bool optional;  // absent when empty
};
constexpr TextField kTextFields[] = {
    {"model", &Passport::model, false},        {"revision", &Passport::revision, false},
    {"tokenizer", &Passport::tokenizer, true}, {"adapter", &Passport::adapter, true},
    {"rope", &Passport::rope, false},          {"quant", &Passport::quant, false},
    {"layout", &Passport::layout, false},      {"shard", &Passport::shard, false},
    {"numerics", &Passport::numerics, true},
};

// One value if all layers have the same, else the list.
template <typename F>
Json PerLayer(const std::vector<PassportLayer>& layers, F value_of) {
  Json list = Json::array();
  for (const PassportLayer& layer : layers) list.push_back(value_of(layer));
  const bool same = std::all_of(list.begin(), list.end(),
                                [&](const Json& value) { return value == list.front(); });
  return same ? Json(list.front()) : list;
}

void AddLayers(const Passport& passport, Json& json) {
  const std::vector<PassportLayer>& layers = passport.layers;
  json["layers"] = {passport.first_layer,
                    passport.first_layer + static_cast<int64_t>(layers.size())};
  json["dtype"] = PerLayer(layers, [](const auto& layer) { return layer.dtype.ToString(); });
  json["kv_heads"] = PerLayer(layers, [](const auto& layer) { return layer.kv_heads; });
  json["head_dim"] = PerLayer(layers, [](const auto& layer) { return layer.head_dim; });
  const auto differs = [](const auto& layer) { return layer.v_head_dim != layer.head_dim; };
  if (std::any_of(layers.begin(), layers.end(), differs))
    json["v_head_dim"] = PerLayer(layers, [](const auto& layer) { return layer.v_head_dim; });
  const auto mixed = [](const auto& layer) { return layer.v_dtype.has_value(); };
  if (std::any_of(layers.begin(), layers.end(), mixed)) {
    json["v_dtype"] =
        PerLayer(layers, [](const auto& layer) { return layer.value_dtype().ToString(); });
  }
  const auto special = [](const auto& layer) { return layer.kind != StateKind::kAttention; };
  if (std::any_of(layers.begin(), layers.end(), special))
    json["kind"] = PerLayer(layers, [](const auto& layer) { return StateKindName(layer.kind); });
  const auto windowed = [](const auto& layer) { return layer.window != 0; };
  if (std::any_of(layers.begin(), layers.end(), windowed))
    json["window"] = PerLayer(layers, [](const auto& layer) { return layer.window; });
  const auto shaped = [](const auto& layer) { return layer.kind == StateKind::kCaller; };
  if (std::any_of(layers.begin(), layers.end(), shaped))
    json["state"] = PerLayer(layers, [](const auto& layer) { return StateShapeText(layer); });
}

// ---- From JSON

// The value of `layer` in a field that stands once or as a list.
Result<JsonValue> ValueOfLayer(const JsonValue& field, size_t layer, size_t count) {
  if (!field.json().is_array()) return field;
  QUIRE_ASSIGN_OR_RETURN(const size_t size, field.ArraySize());
  if (size != count) {
    return BadField(field.path(), "lists " + std::to_string(size) + " values for " +
                                      std::to_string(count) + " layers");
  }
  return field.At(layer);
}

Result<int64_t> SizeOfLayer(const JsonValue& field, size_t layer, size_t count) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue value, ValueOfLayer(field, layer, count));
  return value.Int(1, kSizeMax);
}

Result<std::string> TextOfLayer(const JsonValue& field, size_t layer, size_t count) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue value, ValueOfLayer(field, layer, count));
  return value.String();
}

Status ReadLayers(const JsonValue& json, Passport& passport) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue range, json.Get("layers"));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue first, range.At(0));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue end, range.At(1));
  QUIRE_ASSIGN_OR_RETURN(passport.first_layer, first.Int(0, kLayersMax - 1));
  QUIRE_ASSIGN_OR_RETURN(const int64_t last, end.Int(passport.first_layer + 1, kLayersMax));
  const size_t count = static_cast<size_t>(last - passport.first_layer);
  QUIRE_ASSIGN_OR_RETURN(const JsonValue dtype, json.Get("dtype"));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue kv_heads, json.Get("kv_heads"));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue head_dim, json.Get("head_dim"));
  QUIRE_ASSIGN_OR_RETURN(const auto v_head_dim, json.Find("v_head_dim"));
  QUIRE_ASSIGN_OR_RETURN(const auto v_dtype, json.Find("v_dtype"));
  QUIRE_ASSIGN_OR_RETURN(const auto kind, json.Find("kind"));
  QUIRE_ASSIGN_OR_RETURN(const auto window, json.Find("window"));
  QUIRE_ASSIGN_OR_RETURN(const auto state, json.Find("state"));
  passport.layers.resize(count);
  for (size_t i = 0; i < count; ++i) {
    PassportLayer& layer = passport.layers[i];
    QUIRE_ASSIGN_OR_RETURN(const std::string dtype_name, TextOfLayer(dtype, i, count));
    QUIRE_ASSIGN_OR_RETURN(layer.dtype, ElementType::Parse(dtype_name));
    QUIRE_ASSIGN_OR_RETURN(layer.kv_heads, SizeOfLayer(kv_heads, i, count));
    QUIRE_ASSIGN_OR_RETURN(layer.head_dim, SizeOfLayer(head_dim, i, count));
    QUIRE_ASSIGN_OR_RETURN(layer.v_head_dim, SizeOfLayer(v_head_dim.value_or(head_dim), i, count));
    if (v_dtype) {
      QUIRE_ASSIGN_OR_RETURN(const std::string v_dtype_name, TextOfLayer(*v_dtype, i, count));
      QUIRE_ASSIGN_OR_RETURN(const ElementType v_type, ElementType::Parse(v_dtype_name));
      if (!(v_type == layer.dtype)) layer.v_dtype = v_type;
    }
    if (window) {
      QUIRE_ASSIGN_OR_RETURN(const JsonValue value, ValueOfLayer(*window, i, count));
      QUIRE_ASSIGN_OR_RETURN(layer.window, value.Int(0, kSizeMax));
    }
    if (!kind) continue;
    QUIRE_ASSIGN_OR_RETURN(const std::string kind_name, TextOfLayer(*kind, i, count));
    QUIRE_ASSIGN_OR_RETURN(layer.kind, ParseStateKind(kind_name));
    if (layer.kind != StateKind::kCaller) continue;
    if (!state) return BadField("state", "is missing, and a layer is a caller's state");
    QUIRE_ASSIGN_OR_RETURN(const std::string shape, TextOfLayer(*state, i, count));
    QUIRE_ASSIGN_OR_RETURN(layer.state_shape, ParseStateShape(shape));
  }
  return Status();
}

Result<Passport> ReadPassport(const JsonValue& json) {
  Passport passport;
  QUIRE_ASSIGN_OR_RETURN(const int64_t version,
                         json.GetInt("v", 1, std::numeric_limits<int32_t>::max()));
  if (version > kPassportVersion) {
    return Status(StatusCode::kIncompatible, "Passport: version " + std::to_string(version) +
                                                 " is newer than this build, which reads " +
                                                 std::to_string(kPassportVersion));
  }
  for (const TextField& field : kTextFields) {
    std::string& text = passport.*field.member;
    if (field.optional) {
      QUIRE_ASSIGN_OR_RETURN(text, json.GetStringOr(field.name, ""));
    } else {
      QUIRE_ASSIGN_OR_RETURN(text, json.GetString(field.name));
    }
  }
  QUIRE_ASSIGN_OR_RETURN(passport.block_tokens, json.GetInt("block", 1, kSizeMax));
  QUIRE_RETURN_IF_ERROR(ReadLayers(json, passport));
  return passport;
}

// ---- RoPE

std::string ShortestDecimal(double value) {
  char text[32];  // the shortest form of a double has at most 24 characters
  const std::to_chars_result end = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end.ptr);
}

// "name=value" joined by semicolons.
class FieldText {
 public:
  FieldText& Add(std::string_view name, std::string_view value) {
    if (!text_.empty()) text_ += ';';
    text_ += name;
    text_ += '=';
    text_ += value;
    return *this;
  }
  FieldText& Add(std::string_view name, double value) { return Add(name, ShortestDecimal(value)); }
  FieldText& Add(std::string_view name, int64_t value) { return Add(name, std::to_string(value)); }
  FieldText& Add(std::string_view name, const std::vector<double>& values) {
    std::string list;
    for (const double value : values) {
      if (!list.empty()) list += ',';
      list += ShortestDecimal(value);
    }
    return Add(name, list);
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

constexpr std::string_view kScalingNames[] = {"none",   "linear",   "dynamic", "llama3",
                                              "llama4", "longrope", "yarn"};

}  // namespace

// ---------------------------------------------------------------------- element types

std::string ElementType::ToString() const {
  for (const NamedElementType& type : kElementTypes) {
    if (code == type.code && bits == type.bits) return std::string(type.name);
  }
  return "code" + std::to_string(code) + "." + std::to_string(bits);
}

Result<ElementType> ElementType::Parse(std::string_view name) {
  return GuardEntry([&]() -> Result<ElementType> {
    std::string known;
    for (const NamedElementType& type : kElementTypes) {
      if (name == type.name) return ElementType(type.code, type.bits);
      known += known.empty() ? "" : ", ";
      known += type.name;
    }
    return Status(StatusCode::kBadArgument, "element type \"" + std::string(name) +
                                                "\" has no name in passports; there are " + known);
  });
}

// ---------------------------------------------------------------------- passports

Result<std::string> Passport::ToJson() const {
  return GuardEntry([&]() -> Result<std::string> {
    Json json{{"v", kPassportVersion}, {"block", block_tokens}};
    for (const TextField& field : kTextFields) {
      const std::string& text = this->*field.member;
      QUIRE_RETURN_IF_ERROR(CheckText(field.name, text));
      if (!field.optional || !text.empty()) json[std::string(field.name)] = text;
    }
    QUIRE_RETURN_IF_ERROR(CheckSize("block_tokens", block_tokens));
    QUIRE_RETURN_IF_ERROR(CheckLayers(*this));
    AddLayers(*this, json);
    return json.dump();
  });
}

Result<Passport> Passport::FromJson(std::string_view text) {
  return GuardEntry([&]() -> Result<Passport> {
    QUIRE_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "Passport"));
    QUIRE_ASSIGN_OR_RETURN(Passport passport, ReadPassport(JsonValue(json, "Passport")));
    // A field that this build does not know would be lost here, and with it a difference.
    QUIRE_ASSIGN_OR_RETURN(const std::string canonical, passport.ToJson());
    if (canonical == text) return passport;
    return Status(StatusCode::kBadArgument,
                  "Passport: not the canonical text of a passport of version 1: a field that this "
                  "build does not know, other order or spaces; this build writes " +
                      canonical);
  });
}

Result<Digest> Passport::Fingerprint() const {
  QUIRE_ASSIGN_OR_RETURN(const std::string json, ToJson());
  return FingerprintOf(json);
}

std::string RopePassport(const RopeOptions& rope, bool long_factors) {
  if (rope.mode == RopeMode::kNone) return "none";
  FieldText text;
  text.Add("mode", rope.mode == RopeMode::kNormal ? "normal" : "inline")
      .Add("pairing", rope.pairing == RopePairing::kHalfSplit ? "half" : "interleaved")
      .Add("theta", rope.theta)
      .Add("position_scale", rope.position_scale)
      .Add("rotary_dim", rope.rotary_dim)
      .Add("scaling", kScalingNames[static_cast<int>(rope.scaling)]);
  if (rope.scaling == RopeScaling::kNone) return text.Take();
  // All of them, also those that the family does not read: a needless miss is harmless, a wrong hit
  // is not.
  text.Add("factor", rope.factor)
      .Add("low_freq_factor", rope.low_freq_factor)
      .Add("high_freq_factor", rope.high_freq_factor)
      .Add("beta_fast", rope.beta_fast)
      .Add("beta_slow", rope.beta_slow)
      .Add("mscale", rope.mscale)
      .Add("mscale_all_dim", rope.mscale_all_dim)
      .Add("truncate", int64_t{rope.truncate})
      .Add("attention_factor", rope.attention_factor)
      .Add("original", rope.original_max_position_embeddings);
  // The long set of kDynamic is what KV of earlier builds has, whose texts name no set.
  if (rope.scaling == RopeScaling::kDynamic && !long_factors) text.Add("set", "short");
  if (rope.scaling == RopeScaling::kLongRope) {
    text.Add("set", long_factors ? "long" : "short")
        .Add("factors", long_factors ? rope.long_factors : rope.short_factors);
  }
  return text.Take();
}

namespace {

// A line says both values, so neither may be of any length.
std::string ValueText(const Json& value) {
  constexpr size_t kLengthMax = 160;
  std::string text = value.dump();
  if (text.size() > kLengthMax) text = text.substr(0, kLengthMax) + "...";
  return text;
}

std::string BothValues(const std::string& field, const Json& mine, const Json& other) {
  return field + ": " + ValueText(mine) + " here, " + ValueText(other) + " there";
}

// The first layer in which a field differs that has a value for each layer, on one side at least.
// Empty: one side has fewer layers, which is another field's difference.
std::string LayerDifference(const std::string& field, const Json& mine, const Json& other) {
  if (mine.is_array() && other.is_array() && mine.size() != other.size()) return "";
  const size_t layers = mine.is_array() ? mine.size() : other.size();
  for (size_t layer = 0; layer < layers; ++layer) {
    const Json& of_mine = mine.is_array() ? mine[layer] : mine;
    const Json& of_other = other.is_array() ? other[layer] : other;
    if (of_mine != of_other)
      return BothValues(field, of_mine, of_other) + ", of layer " + std::to_string(layer);
  }
  return "";
}

}  // namespace

std::string PassportDifference(std::string_view ours_json, std::string_view theirs_json) {
  const Result<Json> ours = ParseJson(ours_json, "our passport");
  if (!ours.ok()) return std::string(ours.status().message());
  const Result<Json> theirs = ParseJson(theirs_json, "their passport");
  if (!theirs.ok()) return std::string(theirs.status().message());
  if (!ours->is_object() || !theirs->is_object()) return "a passport is no JSON object";
  Json fields = *ours;
  fields.update(*theirs);
  for (const auto& [field, unused] : fields.items()) {
    const Json mine = ours->value(field, Json());
    const Json other = theirs->value(field, Json());
    if (mine == other) continue;
    const bool is_by_layer = field != "layers" && (mine.is_array() || other.is_array()) &&
                             !mine.is_null() && !other.is_null();
    std::string difference =
        is_by_layer ? LayerDifference(field, mine, other) : BothValues(field, mine, other);
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace quire
