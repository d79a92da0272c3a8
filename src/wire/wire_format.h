// The frames between a buffer's server and its clients: docs/formats/wire.md as code. Pure: bytes
// in, bytes out.
#ifndef QUIRE_WIRE_WIRE_FORMAT_H_
#define QUIRE_WIRE_WIRE_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/host_tensor.h"
#include "quire/status.h"

namespace quire::wire {

inline constexpr std::string_view kMagic = "QWIR";
inline constexpr uint16_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 64;
// A frame with its header: what a peer may make another one wait behind (design.md section 6).
inline constexpr int64_t kFrameBytesMax = int64_t{1} << 20;
// Fields and tensor headers of a message: several thousand tensors.
inline constexpr int64_t kHeadBytesMax = int64_t{1} << 18;
// The longest head of a message before the peer has said hello.
inline constexpr int64_t kHelloHeadBytesMax = 256;
inline constexpr int64_t kErrorTextBytesMax = 1024;
inline constexpr int64_t kDataBytesMax = int64_t{1} << 62;  // of the tensors of a message
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kProofBytes = 32;

enum class Opcode : uint8_t {
  kHello = 1,
  kProve = 2,
  kPing = 3,
  kCancel = 4,
  kTake = 5,
  kAcknowledge = 6,
  kPut = 7,
  kGet = 8,
  kDelete = 9,
  kExists = 10,
  kStats = 11,
  kGoodbye = 12,
};
std::string_view OpcodeName(uint8_t opcode);

inline constexpr uint8_t kFlagReply = 1 << 0;
inline constexpr uint8_t kFlagContinued = 1 << 1;  // not the first frame of its message
inline constexpr uint8_t kFlagAborted = 1 << 2;    // the message ends here and is void

inline constexpr uint32_t kServiceLookup = 1 << 0;
inline constexpr uint32_t kServiceStore = 1 << 1;
inline constexpr uint16_t kHelloFlagProofNeeded = 1 << 0;

struct FrameHeader {
  uint8_t opcode = 0;  // unknown ones are legal in a frame and refused as requests
  uint8_t flags = 0;
  uint64_t request = 0;
  uint64_t number = 0;  // of the frame, counted from 0 in each direction
  StatusCode status = StatusCode::kOk;
  uint32_t tensor_count = 0;
  uint32_t head_bytes = 0;   // fields and tensor headers; first frames only
  uint32_t field_bytes = 0;  // the fields' part of them
  uint32_t data_bytes = 0;
  uint64_t position = 0;  // first frame: bytes of all data of the message; then: where these begin
  uint32_t head_crc = 0;
  uint32_t data_crc = 0;

  bool is_reply() const { return (flags & kFlagReply) != 0; }
  bool is_continued() const { return (flags & kFlagContinued) != 0; }
  bool is_aborted() const { return (flags & kFlagAborted) != 0; }
};

void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out);
// Corrupt for what no sender of this version writes in the frame that has this number, Incompatible
// for another version, TooLarge for a head of more than head_bytes_max.
Result<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes, uint64_t number,
                                 int64_t head_bytes_max);

struct TensorHeader {
  std::string name{};
  ElementType dtype{};
  std::vector<int64_t> shape{};
  int64_t bytes = 0;  // computed from the two
};

// Appends to `head`.
void EncodeTensorHeader(std::string_view name, const HostTensor& tensor,
                        std::vector<std::byte>* head);
// Reads `count` headers that fill `bytes`, of tensors that have data_bytes in sum.
Result<std::vector<TensorHeader>> DecodeTensorHeaders(std::span<const std::byte> bytes,
                                                      uint32_t count, uint64_t data_bytes);

// Fields one after the other, numbers little-endian, without padding.
class FieldWriter {
 public:
  explicit FieldWriter(std::vector<std::byte>* out) : out_(out) {}
  template <typename T>
  FieldWriter& Add(T value) {
    static_assert(std::is_arithmetic_v<T>);
    return AddBytes(std::as_bytes(std::span(&value, 1)));
  }
  FieldWriter& AddBytes(std::span<const std::byte> bytes) {
    const size_t at = out_->size();
    out_->resize(at + bytes.size());
    if (!bytes.empty()) std::memcpy(out_->data() + at, bytes.data(), bytes.size());
    return *this;
  }
  FieldWriter& AddText(std::string_view text) {
    return AddBytes(std::as_bytes(std::span(text.data(), text.size())));
  }

 private:
  std::vector<std::byte>* out_;
};

// Reads past the end give zeros and make ok() false.
class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T Take() {
    T value{};
    const std::span<const std::byte> bytes = TakeBytes(sizeof(T));
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  // Empty when there are fewer.
  std::span<const std::byte> TakeBytes(size_t count) {
    if (count > bytes_.size()) {
      is_short_ = true;
      bytes_ = {};
      return {};
    }
    const std::span<const std::byte> taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  size_t left() const { return bytes_.size(); }
  // All was there and nothing is left.
  bool ok() const { return !is_short_ && bytes_.empty(); }
  bool is_short() const { return is_short_; }

 private:
  std::span<const std::byte> bytes_;
  bool is_short_ = false;
};

std::string_view TextOf(std::span<const std::byte> bytes);

struct ClientHello {
  uint16_t version_first = kVersion;
  uint16_t version_last = kVersion;
  uint32_t services = 0;  // that it wants
  std::byte nonce[kNonceBytes] = {};
};
struct ServerHello {
  uint16_t version = kVersion;
  uint16_t flags = 0;
  uint32_t services = 0;  // that it has
  uint32_t requests_max = 0;
  uint32_t heartbeat_ms = 0;
  uint32_t dead_after_ms = 0;
  uint64_t message_bytes_max = 0;
  std::byte nonce[kNonceBytes] = {};
};
std::vector<std::byte> EncodeFields(const ClientHello& hello);
std::vector<std::byte> EncodeFields(const ServerHello& hello);
Result<ClientHello> DecodeClientHello(std::span<const std::byte> fields);
Result<ServerHello> DecodeServerHello(std::span<const std::byte> fields);

// What shows that a side has the secret. `label` tells the two directions apart, so that neither
// side's proof is one of the other's.
inline constexpr std::string_view kClientProofLabel = "quire/wire/1 client";
inline constexpr std::string_view kServerProofLabel = "quire/wire/1 server";
Digest Proof(std::string_view secret, std::string_view label, const ClientHello& client,
             const ServerHello& server);

// Keys of a request, each with its length in front.
void EncodeKeys(std::span<const std::string_view> keys, std::vector<std::byte>* fields);
Result<std::vector<std::string_view>> DecodeKeys(std::span<const std::byte> fields);

}  // namespace quire::wire

#endif  // QUIRE_WIRE_WIRE_FORMAT_H_
