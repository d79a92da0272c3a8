#include "model/config/quantisation_config.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "model/config/config_bounds.h"

namespace quire {
namespace {

constexpr std::string_view kAdvice = ": save the model dequantised, without quantization_config";

Status NotRead(const JsonValue& json, std::string_view field, const std::string& value,
               std::string_view read) {
  return BadField(json, field, value + " is not read; " + std::string(read) + std::string(kAdvice));
}

// The field, or `fallback` where it is absent; one of `known`, in any case of letters.
Result<std::string> ReadName(const JsonValue& json, std::string_view field,
                             std::string_view fallback, std::span<const std::string_view> known) {
  QUIRE_ASSIGN_OR_RETURN(const std::string given, json.GetStringOr(field, fallback));
  std::string name = given;
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (std::ranges::find(known, name) != known.end()) return name;
  std::string read;
  for (const std::string_view one : known) read += (read.empty() ? "" : ", ") + std::string(one);
  return NotRead(json, field, "\"" + given + "\"", "read are " + read);
}

Result<int64_t> ReadBits(const JsonValue& json, std::string_view field, bool takes_8) {
  QUIRE_ASSIGN_OR_RETURN(const int64_t bits, json.GetInt(field));
  if (bits == 4 || (takes_8 && bits == 8)) return bits;
  return NotRead(json, field, std::to_string(bits), takes_8 ? "read are 4 and 8" : "read is 4");
}

// 0 for -1: all inputs of a matrix.
Result<int64_t> ReadGroupSize(const JsonValue& json, std::string_view field) {
  QUIRE_ASSIGN_OR_RETURN(const int64_t size, json.GetInt(field));
  if (size == -1) return 0;
  if (size > 0 && size <= kMaxIntermediate && size % kQuantGroup == 0) return size;
  return NotRead(json, field, std::to_string(size),
                 "read are multiples of " + std::to_string(kQuantGroup) + ", and -1");
}

Status RefuseFlag(const JsonValue& json, std::string_view field, bool refused, bool fallback) {
  QUIRE_ASSIGN_OR_RETURN(const bool value, json.GetBoolOr(field, fallback));
  if (value != refused) return Status();
  return NotRead(json, field, value ? "true" : "false", value ? "read is false" : "read is true");
}

Result<FolderQuantisation> ReadGptq(const JsonValue& json) {
  constexpr std::string_view kForms[] = {"gptq", "gptq_v2"};
  constexpr std::string_view kWords[] = {"int32"};
  FolderQuantisation quantisation{.scheme = FolderScheme::kGptq};
  QUIRE_ASSIGN_OR_RETURN(quantisation.bits, ReadBits(json, "bits", true));
  QUIRE_ASSIGN_OR_RETURN(quantisation.group_size, ReadGroupSize(json, "group_size"));
  QUIRE_ASSIGN_OR_RETURN(const std::string form,
                         ReadName(json, "checkpoint_format", "gptq", kForms));
  QUIRE_RETURN_IF_ERROR(ReadName(json, "pack_dtype", "int32", kWords).status());
  QUIRE_RETURN_IF_ERROR(RefuseFlag(json, "is_marlin_format", true, false));
  quantisation.zero_raise = form == "gptq" ? 1 : 0;
  // Groups that are cut before the inputs are ordered lie as the inputs do.
  QUIRE_ASSIGN_OR_RETURN(const bool has_order, json.GetBoolOr("desc_act", false));
  QUIRE_ASSIGN_OR_RETURN(const bool has_static_groups, json.GetBoolOr("static_groups", false));
  quantisation.is_strewn = has_order && !has_static_groups;
  return quantisation;
}

Result<FolderQuantisation> ReadAwq(const JsonValue& json) {
  constexpr std::string_view kVersions[] = {"gemm"};
  FolderQuantisation quantisation{.scheme = FolderScheme::kAwq};
  const bool is_short = json.json().contains("w_bit");  // what AutoAWQ itself writes
  QUIRE_ASSIGN_OR_RETURN(quantisation.bits, ReadBits(json, is_short ? "w_bit" : "bits", false));
  QUIRE_ASSIGN_OR_RETURN(quantisation.group_size,
                         ReadGroupSize(json, is_short ? "q_group_size" : "group_size"));
  QUIRE_RETURN_IF_ERROR(ReadName(json, "version", "gemm", kVersions).status());
  QUIRE_RETURN_IF_ERROR(RefuseFlag(json, "zero_point", false, true));
  return quantisation;
}

// An object that says nothing: absent, or without the member that would.
Status RefuseMember(const JsonValue& json, std::string_view field, std::string_view member,
                    std::string_view harmless) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> object, json.Find(field));
  if (!object || !object->json().is_object()) return Status();
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> value, object->Find(member));
  if (!value || value->json().empty() || value->json() == harmless) return Status();
  return NotRead(*object, member, value->json().dump(), "it must be absent");
}

// A pair of sizes: outputs and inputs of the blocks that have one scale.
Status ReadBlocks(const JsonValue& json, std::string_view field, FolderQuantisation* quantisation) {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue value, json.Get(field));
  QUIRE_ASSIGN_OR_RETURN(const size_t count, value.ArraySize());
  if (count != 2) return BadField(json, field, "expected two sizes");
  int64_t sizes[2];
  for (size_t i = 0; i < 2; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue size, value.At(i));
    QUIRE_ASSIGN_OR_RETURN(sizes[i], size.Int(1, kMaxIntermediate));
  }
  const int64_t before[] = {quantisation->block_outputs, quantisation->block_inputs};
  if (before[0] != 0 && !std::ranges::equal(before, sizes)) {
    return NotRead(json, field, value.json().dump(), "read is one size of blocks for all groups");
  }
  quantisation->block_outputs = sizes[0];
  quantisation->block_inputs = sizes[1];
  return Status();
}

// MXFP4: groups of 32 with a power of two each.
Status CheckFloat4Group(const JsonValue& weights) {
  constexpr std::string_view kStrategies[] = {"group"};
  QUIRE_RETURN_IF_ERROR(ReadName(weights, "strategy", "tensor", kStrategies).status());
  QUIRE_ASSIGN_OR_RETURN(const int64_t size, weights.GetInt("group_size"));
  if (size == kQuantGroup) return Status();
  return NotRead(weights, "group_size", std::to_string(size),
                 "with float weights of 4 bits read is " + std::to_string(kQuantGroup));
}

Status ReadFloatGroup(const JsonValue& weights, FolderQuantisation* quantisation) {
  constexpr std::string_view kStrategies[] = {"block", "channel", "tensor"};
  QUIRE_ASSIGN_OR_RETURN(const int64_t bits, weights.GetInt("num_bits"));
  if (bits == 4) return CheckFloat4Group(weights);
  if (bits != 8) return NotRead(weights, "num_bits", std::to_string(bits), "read are 4 and 8");
  QUIRE_ASSIGN_OR_RETURN(const std::string strategy,
                         ReadName(weights, "strategy", "tensor", kStrategies));
  if (strategy != "block") return Status();
  return ReadBlocks(weights, "block_structure", quantisation);
}

Status ReadCompressedGroup(const JsonValue& group, FolderQuantisation* quantisation) {
  constexpr std::string_view kForms[] = {"pack-quantized", "int-quantized", "float-quantized",
                                         "naive-quantized", "mxfp4-pack-quantized"};
  constexpr std::string_view kTypes[] = {"float", "int"};
  constexpr std::string_view kStrategies[] = {"channel", "group", "tensor"};
  QUIRE_RETURN_IF_ERROR(ReadName(group, "format", kForms[0], kForms).status());
  QUIRE_ASSIGN_OR_RETURN(const JsonValue weights, group.Get("weights"));
  QUIRE_ASSIGN_OR_RETURN(const std::string type, ReadName(weights, "type", "int", kTypes));
  if (type == "float") {
    quantisation->has_offsets = false;
    return ReadFloatGroup(weights, quantisation);
  }
  QUIRE_RETURN_IF_ERROR(ReadBits(weights, "num_bits", true).status());
  QUIRE_ASSIGN_OR_RETURN(const std::string strategy,
                         ReadName(weights, "strategy", "tensor", kStrategies));
  QUIRE_ASSIGN_OR_RETURN(const bool is_symmetric, weights.GetBoolOr("symmetric", true));
  // The one offset of a whole matrix is left out where it is 0.
  if (is_symmetric || strategy == "tensor") quantisation->has_offsets = false;
  if (strategy != "group") return Status();
  return ReadGroupSize(weights, "group_size").status();
}

Result<FolderQuantisation> ReadCompressed(const JsonValue& json) {
  constexpr std::string_view kForms[] = {"pack-quantized",
                                         "int-quantized",
                                         "float-quantized",
                                         "naive-quantized",
                                         "mxfp4-pack-quantized",
                                         "mixed-precision",
                                         "dense"};
  QUIRE_RETURN_IF_ERROR(ReadName(json, "format", "dense", kForms).status());
  QUIRE_RETURN_IF_ERROR(RefuseMember(json, "sparsity_config", "format", "dense"));
  QUIRE_RETURN_IF_ERROR(RefuseMember(json, "transform_config", "config_groups", ""));
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> groups, json.Find("config_groups"));
  if (!groups) return FolderQuantisation{};
  if (!groups->json().is_object()) {
    return BadField(json, "config_groups", "expected an object");
  }
  FolderQuantisation quantisation{.has_offsets = !groups->json().empty()};
  for (const auto& [name, value] : groups->json().items()) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue group, groups->Get(name));
    QUIRE_RETURN_IF_ERROR(ReadCompressedGroup(group, &quantisation));
  }
  return quantisation;
}

// Activations are not quantised here, so what the field activation_scheme asks for is not needed.
Result<FolderQuantisation> ReadFloat8(const JsonValue& json) {
  constexpr std::string_view kTypes[] = {"e4m3"};
  FolderQuantisation quantisation{.scheme = FolderScheme::kFloat8};
  QUIRE_RETURN_IF_ERROR(ReadName(json, "fmt", "e4m3", kTypes).status());
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> blocks, json.Find("weight_block_size"));
  if (!blocks) return quantisation;
  QUIRE_RETURN_IF_ERROR(ReadBlocks(json, "weight_block_size", &quantisation));
  return quantisation;
}

}  // namespace

Result<FolderQuantisation> ReadQuantisation(const JsonValue& json) {
  constexpr std::string_view kMethods[] = {"awq", "compressed-tensors", "fbgemm_fp8", "fp8",
                                           "gptq"};
  QUIRE_ASSIGN_OR_RETURN(const std::string method, ReadName(json, "quant_method", "", kMethods));
  if (method == "gptq") return ReadGptq(json);
  if (method == "fp8" || method == "fbgemm_fp8") return ReadFloat8(json);
  return method == "awq" ? ReadAwq(json) : ReadCompressed(json);
}

}  // namespace quire
