// Names of what chunk_store.h enumerates.
#include "quire/chunk_store.h"

#include <array>

namespace quire {

std::string_view TierName(TierKind tier) {
  constexpr std::array<std::string_view, kTierCount> kNames = {"ram", "disk", "redis"};
  return kNames[static_cast<size_t>(tier)];
}

std::string_view MissReasonName(MissReason reason) {
  constexpr std::array<std::string_view, 10> kNames = {
      "none",      "not stored", "expired",     "corrupt",   "incompatible",
      "not worth", "timeout",    "unavailable", "cancelled", "no room"};
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace quire
