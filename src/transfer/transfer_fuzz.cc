// Bytes from a stranger: as they are into the decoders and a session, and as the choices of a peer
// that knows the protocol and breaks it.
#include <cstddef>
#include <cstdint>
#include <span>

#include "transfer/passport_match.h"
#include "transfer/testing/hostile_transfer_peer.h"
#include "wire/transfer_frames.h"

namespace {

void DecodeAll(std::span<const std::byte> bytes) {
  namespace wire = quire::wire;
  if (bytes.size() >= wire::kTransferHeaderBytes) {
    static_cast<void>(wire::DecodeTransferHeader(bytes.first<wire::kTransferHeaderBytes>(), 0,
                                                 wire::kTransferHeadBytesMax)
                          .ok());
  }
  static_cast<void>(wire::DecodeTransferHello(bytes).ok());
  static_cast<void>(wire::DecodeTransferJob(bytes).ok());
  static_cast<void>(wire::DecodeTransferMap(bytes).ok());
  static_cast<void>(wire::DecodeTransferPart(bytes).ok());
  static_cast<void>(wire::DecodeTransferRecord(bytes).ok());
  static_cast<void>(wire::DecodeTransferCredit(bytes).ok());
  static_cast<void>(wire::DecodeTransferEnd(bytes).ok());
  static_cast<void>(wire::DecodeTransferLease(bytes).ok());
  static_cast<void>(wire::DecodeTransferData(bytes).ok());
  static_cast<void>(wire::DecodeTransferStreams(bytes).ok());
  static_cast<void>(wire::DecodeTransferJoin(bytes).ok());
  const std::string_view text = wire::TextOf(bytes);
  static_cast<void>(quire::MatchPassports(text, text).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  DecodeAll(bytes);
  quire::HostileTransferPeer peer(size % 2 == 0 ? "" : "secret");
  peer.SendRaw(bytes, size % 4 < 2);
  size_t at = 0;
  // Two bytes a choice; behind the last one everything is 0.
  const auto choose = [&](int64_t bound) -> int64_t {
    if (at + 2 > size) return 0;
    const int64_t value = data[at] | data[at + 1] << 8;
    at += 2;
    return value % bound;
  };
  peer.RunSession(choose);
  at = 0;
  peer.RunOpening(choose);
  return 0;
}
