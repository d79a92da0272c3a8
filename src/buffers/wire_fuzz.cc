// Bytes from a stranger: as they are into the server's state machine and the decoders, and as the
// choices of a peer that knows the protocol and breaks it.
#include <cstddef>
#include <cstdint>
#include <span>

#include "buffers/testing/hostile_peer.h"
#include "wire/wire_format.h"

namespace {

void Decode(std::span<const std::byte> bytes) {
  if (bytes.size() >= quire::wire::kHeaderBytes) {
    const auto header = quire::wire::DecodeHeader(bytes.first<quire::wire::kHeaderBytes>(), 0,
                                                  quire::wire::kHeadBytesMax);
    static_cast<void>(header.ok());
  }
  const auto tensors = quire::wire::DecodeTensorHeaders(bytes, 2, bytes.size());
  static_cast<void>(tensors.ok());
  const auto keys = quire::wire::DecodeKeys(bytes);
  static_cast<void>(keys.ok());
  const auto client = quire::wire::DecodeClientHello(bytes);
  static_cast<void>(client.ok());
  const auto server = quire::wire::DecodeServerHello(bytes);
  static_cast<void>(server.ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  Decode(bytes);
  quire::HostilePeer peer(size % 2 == 0 ? "" : "secret");
  peer.SendRaw(bytes);
  size_t at = 0;
  // Two bytes a choice; behind the last one everything is 0.
  peer.RunSession([&](int64_t bound) -> int64_t {
    if (at + 2 > size) return 0;
    const int64_t value = data[at] | data[at + 1] << 8;
    at += 2;
    return value % bound;
  });
  return 0;
}
