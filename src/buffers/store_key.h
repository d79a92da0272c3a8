// What a key of a StoreBuffer may be, on this side of a connection and on the other.
#ifndef QUIRE_BUFFERS_STORE_KEY_H_
#define QUIRE_BUFFERS_STORE_KEY_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "quire/store_buffer.h"

namespace quire {

// BadArgument for a size out of range.
inline Status CheckStoreKey(const char* call, std::string_view key) {
  const auto bytes = static_cast<int64_t>(key.size());
  if (bytes >= 1 && bytes <= kStoreKeyBytesMax) return {};
  return Status(StatusCode::kBadArgument, std::string("StoreBuffer::") + call + ": the key has " +
                                              std::to_string(bytes) + " bytes; 1 to " +
                                              std::to_string(kStoreKeyBytesMax) + " are allowed");
}

}  // namespace quire

#endif  // QUIRE_BUFFERS_STORE_KEY_H_
