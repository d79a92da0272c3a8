#include "buffers/masked_tokens.h"

#include <cstring>
#include <limits>
#include <string>

namespace quire {
namespace {

Status Refuse(const char* call, const std::string& what) {
  return Status(StatusCode::kBadArgument, std::string("LookupBuffer::") + call + ": " + what);
}

bool IsInteger(ElementType type) {
  return type.code == kDLInt || type.code == kDLUInt || type.code == kDLPackBool;
}

bool IsComparable(ElementType type) {
  const bool is_float = type.code == kDLFloat || type.code == kDLBfloat;
  return (IsInteger(type) || is_float) &&
         (type.bits == 8 || type.bits == 16 || type.bits == 32 || type.bits == 64);
}

// The bits of element i; integers with a sign are widened with it.
uint64_t ElementBits(const HostTensor& tensor, int64_t i) {
  const ElementType type = tensor.dtype();
  const auto bytes = static_cast<size_t>(type.bytes());
  uint64_t bits = 0;  // little endian, as the elements are
  std::memcpy(&bits, tensor.data() + static_cast<size_t>(i) * bytes, bytes);
  if (type.code != kDLInt || type.bits == 64) return bits;
  const int unused = 64 - type.bits;
  return static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
}

Status CheckVector(const char* call, const char* name, const HostTensor& tensor) {
  if (tensor.shape().size() == 1) return {};
  return Refuse(call, std::string(name) + " has " + std::to_string(tensor.shape().size()) +
                          " dimensions; it must have one");
}

Status CheckRoi(const char* call, const HostTensor& roi, int64_t length) {
  QUIRE_RETURN_IF_ERROR(CheckVector(call, "roi", roi));
  if (roi.element_count() != length) {
    return Refuse(call, "roi has " + std::to_string(roi.element_count()) + " elements and tokens " +
                            std::to_string(length) + "; they must be equal");
  }
  if (!IsInteger(roi.dtype()) || !IsComparable(roi.dtype())) {
    return Refuse(
        call, "roi is of type " + roi.dtype().ToString() + "; it must be bool or integers 0 and 1");
  }
  for (int64_t i = 0; i < length; ++i) {
    if (ElementBits(roi, i) > 1) {
      return Refuse(call, "roi[" + std::to_string(i) + "] is neither 0 nor 1");
    }
  }
  return {};
}

}  // namespace

Result<MaskedTokens> MaskTokens(const char* call, const HostTensor& tokens, const HostTensor* roi) {
  QUIRE_RETURN_IF_ERROR(CheckVector(call, "tokens", tokens));
  const ElementType type = tokens.dtype();
  if (!IsComparable(type)) {
    return Refuse(call, "tokens are of type " + type.ToString() +
                            "; they must be integers or floats of at most 64 bits");
  }
  if (roi != nullptr) QUIRE_RETURN_IF_ERROR(CheckRoi(call, *roi, tokens.element_count()));
  MaskedTokens masked;
  // Types of floats by code and width; integers are one type, whatever their width.
  masked.type = IsInteger(type) ? 0 : static_cast<uint16_t>(type.code << 8 | type.bits);
  masked.values.reserve(static_cast<size_t>(tokens.element_count()));
  for (int64_t i = 0; i < tokens.element_count(); ++i) {
    if (roi != nullptr && ElementBits(*roi, i) == 0) continue;
    const uint64_t bits = ElementBits(tokens, i);
    if (type.code == kDLUInt && bits > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return Refuse(call, "tokens[" + std::to_string(i) + "] is " + std::to_string(bits) +
                              "; ids must be below 2^63");
    }
    masked.values.push_back(bits);
  }
  return masked;
}

}  // namespace quire
