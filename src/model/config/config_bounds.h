// What the readers of config.json share: bounds far above published models, and the error of a
// field. Together the bounds keep every product of two sizes and four bytes within 63 bits.
#ifndef QUIRE_MODEL_CONFIG_CONFIG_BOUNDS_H_
#define QUIRE_MODEL_CONFIG_CONFIG_BOUNDS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/json.h"
#include "quire/status.h"

namespace quire {

inline constexpr int64_t kMaxHeads = int64_t{1} << 14;         // largest known 128
inline constexpr int64_t kMaxHeadDim = int64_t{1} << 14;       // 512
inline constexpr int64_t kMaxIntermediate = int64_t{1} << 24;  // 73 728
inline constexpr int64_t kMaxInterval = int64_t{1} << 20;      // layers between two of a kind
inline constexpr int64_t kMaxPositions = std::numeric_limits<int32_t>::max();

// BadArgument that names the field by its path.
inline Status BadField(const JsonValue& json, std::string_view field, const std::string& why) {
  return Status(StatusCode::kBadArgument, json.path() + "." + std::string(field) + ": " + why);
}

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_CONFIG_BOUNDS_H_
