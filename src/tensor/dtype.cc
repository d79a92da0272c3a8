#include "base/guard.h"
#include "quire/tensor.h"

namespace quire {
namespace {

// kDLFloat8_e4m3fn of DLPack 1.1; older headers lack the name.
constexpr uint8_t kFloat8E4M3Code = 10;

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::string_view short_name;
  std::string_view safetensors_name;
  uint8_t code;
  uint8_t bits;
};

constexpr DTypeInfo kInfos[] = {
    {DType::kF32, "float32", "f32", "F32", kDLFloat, 32},
    {DType::kF16, "float16", "f16", "F16", kDLFloat, 16},
    {DType::kBF16, "bfloat16", "bf16", "BF16", kDLBfloat, 16},
    {DType::kI32, "int32", "i32", "I32", kDLInt, 32},
    {DType::kI64, "int64", "i64", "I64", kDLInt, 64},
    {DType::kU8, "uint8", "u8", "U8", kDLUInt, 8},
    {DType::kI8, "int8", "i8", "I8", kDLInt, 8},
    {DType::kF8E4M3, "float8_e4m3fn", "fp8", "F8_E4M3", kFloat8E4M3Code, 8},
};

const DTypeInfo& Info(DType dtype) { return kInfos[static_cast<int>(dtype)]; }

std::string AllNames() {
  std::string names;
  for (const DTypeInfo& info : kInfos) {
    if (!names.empty()) names += ", ";
    names += info.name;
  }
  return names;
}

}  // namespace

int64_t DTypeBytes(DType dtype) { return Info(dtype).bits / 8; }

std::string_view DTypeName(DType dtype) { return Info(dtype).name; }

Result<DType> ParseDType(std::string_view name) {
  for (const DTypeInfo& info : kInfos) {
    if (name == info.name || name == info.short_name || name == info.safetensors_name) {
      return info.dtype;
    }
  }
  return GuardEntry([&] {
    return Status(StatusCode::kBadArgument,
                  "unknown element type \"" + std::string(name) + "\"; Quire has " + AllNames());
  });
}

DLDataType ToDLDataType(DType dtype) {
  const DTypeInfo& info = Info(dtype);
  return DLDataType{info.code, info.bits, 1};
}

namespace {

// "float64", "complex64", "bool", ...: as NumPy says it, where it does.
std::string DLPackName(DLDataType dtype) {
  std::string name;
  if (dtype.code == kDLFloat) name = "float";
  if (dtype.code == kDLInt) name = "int";
  if (dtype.code == kDLUInt) name = "uint";
  if (dtype.code == kDLComplex) name = "complex";
  constexpr int kBoolCode = 6;  // kDLBool of later versions of DLPack
  if (dtype.code == kBoolCode && dtype.bits == 8 && dtype.lanes == 1) return "bool";
  if (name.empty()) name = "of DLPack code " + std::to_string(dtype.code) + " and bits ";
  name += std::to_string(dtype.bits);
  if (dtype.lanes != 1) name += " of " + std::to_string(dtype.lanes) + " lanes";
  return name;
}

}  // namespace

Result<DType> FromDLDataType(DLDataType dtype) {
  for (const DTypeInfo& info : kInfos) {
    if (dtype.lanes == 1 && dtype.code == info.code && dtype.bits == info.bits) return info.dtype;
  }
  return GuardEntry([&] {
    return Status(StatusCode::kBadArgument, "the element type " + DLPackName(dtype) +
                                                " is not taken; convert it, for example to "
                                                "float32: Quire has " +
                                                AllNames());
  });
}

}  // namespace quire
