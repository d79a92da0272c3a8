#include "wire/wire_format.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "chunk/sha256.h"
#include "quire/store_buffer.h"

namespace quire::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr size_t kMagicAt = 0;
constexpr size_t kVersionAt = 4;
constexpr size_t kOpcodeAt = 6;
constexpr size_t kFlagsAt = 7;
constexpr size_t kRequestAt = 8;
constexpr size_t kNumberAt = 16;
constexpr size_t kStatusAt = 24;
constexpr size_t kReservedAt = 26;
constexpr size_t kTensorCountAt = 28;
constexpr size_t kHeadBytesAt = 32;
constexpr size_t kFieldBytesAt = 36;
constexpr size_t kDataBytesAt = 40;
constexpr size_t kHeadCrcAt = 44;
constexpr size_t kPositionAt = 48;
constexpr size_t kDataCrcAt = 56;
constexpr size_t kHeaderCrcAt = 60;

constexpr uint8_t kFlagsKnown = kFlagReply | kFlagContinued | kFlagAborted;
constexpr size_t kTensorFixedBytes = 8;

template <typename T>
void Store(std::span<std::byte> out, size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof(T));
}

template <typename T>
T Load(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

Status Corrupt(const std::string& what) { return Status(StatusCode::kCorrupt, "frame: " + what); }

Status CheckSizes(const FrameHeader& header, int64_t head_bytes_max) {
  if (header.head_bytes > head_bytes_max) {
    return Status(StatusCode::kTooLarge, "frame: a head of " + std::to_string(header.head_bytes) +
                                             " bytes; at most " + std::to_string(head_bytes_max) +
                                             " are taken now");
  }
  const int64_t bytes = static_cast<int64_t>(kHeaderBytes) + header.head_bytes + header.data_bytes;
  if (bytes > kFrameBytesMax) {
    return Corrupt("its parts have " + std::to_string(bytes) + " bytes; a frame has at most " +
                   std::to_string(kFrameBytesMax));
  }
  if (header.field_bytes > header.head_bytes) return Corrupt("the fields are longer than the head");
  if (header.position > uint64_t{kDataBytesMax}) return Corrupt("data of more than 2^62 bytes");
  if (header.is_continued()) {
    const bool has_head = header.head_bytes > 0 || header.tensor_count > 0;
    if (has_head && !header.is_aborted()) return Corrupt("a continuation has a head");
    if (header.data_bytes == 0 && !header.is_aborted()) return Corrupt("a continuation is empty");
  } else if (header.data_bytes > header.position) {
    return Corrupt("more data than the message has");
  }
  if (header.is_aborted() && (header.data_bytes > 0 || !header.is_continued())) {
    return Corrupt("an aborted message has data in its last frame or never began");
  }
  return {};
}

// Elements times their size, or nothing over the limit. Dimensions of 0 do not hide large ones, as
// their product is taken somewhere.
std::optional<uint64_t> TensorBytes(std::span<const int64_t> shape, uint64_t element_bytes) {
  uint64_t bytes = element_bytes;
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      is_empty = true;
    } else if (static_cast<uint64_t>(size) > uint64_t{kDataBytesMax} / bytes) {
      return std::nullopt;
    } else {
      bytes *= static_cast<uint64_t>(size);
    }
  }
  return is_empty ? 0 : bytes;
}

Result<TensorHeader> DecodeTensorHeader(FieldReader* reader) {
  TensorHeader header;
  header.dtype.code = reader->Take<uint8_t>();
  header.dtype.bits = reader->Take<uint8_t>();
  const auto rank = reader->Take<uint8_t>();
  const auto zero = reader->Take<uint8_t>();
  const auto name_bytes = reader->Take<uint16_t>();
  const auto more_zeros = reader->Take<uint16_t>();
  const size_t rest = size_t{rank} * sizeof(int64_t) + name_bytes;
  if (reader->is_short() || reader->left() < rest) return Corrupt("a tensor header is cut off");
  if (zero != 0 || more_zeros != 0) return Corrupt("a tensor header has bits that mean nothing");
  if (header.dtype.bits == 0 || header.dtype.bits % 8 != 0) {
    return Corrupt("a tensor has elements of " + std::to_string(header.dtype.bits) + " bits");
  }
  for (int i = 0; i < rank; ++i) header.shape.push_back(reader->Take<int64_t>());
  header.name = TextOf(reader->TakeBytes(name_bytes));
  const std::optional<uint64_t> bytes = TensorBytes(header.shape, header.dtype.bits / 8U);
  if (!bytes) return Corrupt("a tensor has a size below 0 or more than 2^62 bytes");
  header.bytes = static_cast<int64_t>(*bytes);
  return header;
}

}  // namespace

std::string_view OpcodeName(uint8_t opcode) {
  static constexpr std::string_view kNames[] = {"0",      "hello",       "prove",  "ping", "cancel",
                                                "take",   "acknowledge", "put",    "get",  "delete",
                                                "exists", "stats",       "goodbye"};
  return opcode < std::size(kNames) ? kNames[opcode] : "of an unknown kind";
}

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out) {
  std::memcpy(out.data() + kMagicAt, kMagic.data(), kMagic.size());
  Store(out, kVersionAt, kVersion);
  Store(out, kOpcodeAt, header.opcode);
  Store(out, kFlagsAt, header.flags);
  Store(out, kRequestAt, header.request);
  Store(out, kNumberAt, header.number);
  Store(out, kStatusAt, static_cast<uint16_t>(header.status));
  Store(out, kReservedAt, uint16_t{0});
  Store(out, kTensorCountAt, header.tensor_count);
  Store(out, kHeadBytesAt, header.head_bytes);
  Store(out, kFieldBytesAt, header.field_bytes);
  Store(out, kDataBytesAt, header.data_bytes);
  Store(out, kHeadCrcAt, header.head_crc);
  Store(out, kPositionAt, header.position);
  Store(out, kDataCrcAt, header.data_crc);
  Store(out, kHeaderCrcAt, Crc32c(out.data(), kHeaderCrcAt));
}

Result<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes, uint64_t number,
                                 int64_t head_bytes_max) {
  if (TextOf(bytes.first(kMagic.size())) != kMagic) {
    return Corrupt("it does not begin with \"QWIR\"; the peer speaks another protocol");
  }
  if (Crc32c(bytes.data(), kHeaderCrcAt) != Load<uint32_t>(bytes, kHeaderCrcAt)) {
    return Corrupt("the header's checksum is wrong");
  }
  const auto version = Load<uint16_t>(bytes, kVersionAt);
  if (version != kVersion) {
    return Status(StatusCode::kIncompatible, "frame: of version " + std::to_string(version) +
                                                 "; this side speaks version " +
                                                 std::to_string(kVersion));
  }
  FrameHeader header;
  header.opcode = Load<uint8_t>(bytes, kOpcodeAt);
  header.flags = Load<uint8_t>(bytes, kFlagsAt);
  header.request = Load<uint64_t>(bytes, kRequestAt);
  header.number = Load<uint64_t>(bytes, kNumberAt);
  const auto status = Load<uint16_t>(bytes, kStatusAt);
  header.status = static_cast<StatusCode>(status);
  header.tensor_count = Load<uint32_t>(bytes, kTensorCountAt);
  header.head_bytes = Load<uint32_t>(bytes, kHeadBytesAt);
  header.field_bytes = Load<uint32_t>(bytes, kFieldBytesAt);
  header.data_bytes = Load<uint32_t>(bytes, kDataBytesAt);
  header.head_crc = Load<uint32_t>(bytes, kHeadCrcAt);
  header.position = Load<uint64_t>(bytes, kPositionAt);
  header.data_crc = Load<uint32_t>(bytes, kDataCrcAt);
  if (header.number != number) {
    return Corrupt("it has number " + std::to_string(header.number) + " where " +
                   std::to_string(number) + " is due: one was lost, repeated or moved");
  }
  if (Load<uint16_t>(bytes, kReservedAt) != 0 || (header.flags & ~kFlagsKnown) != 0 ||
      status >= kStatusCodeCount) {
    return Corrupt("bits are set that mean nothing in version 1");
  }
  QUIRE_RETURN_IF_ERROR(CheckSizes(header, head_bytes_max));
  return header;
}

void EncodeTensorHeader(std::string_view name, const HostTensor& tensor,
                        std::vector<std::byte>* head) {
  FieldWriter writer(head);
  writer.Add(tensor.dtype().code).Add(tensor.dtype().bits);
  writer.Add(static_cast<uint8_t>(tensor.shape().size())).Add(uint8_t{0});
  writer.Add(static_cast<uint16_t>(name.size())).Add(uint16_t{0});
  for (const int64_t size : tensor.shape()) writer.Add(size);
  writer.AddText(name);
}

Result<std::vector<TensorHeader>> DecodeTensorHeaders(std::span<const std::byte> bytes,
                                                      uint32_t count, uint64_t data_bytes) {
  if (count > bytes.size() / kTensorFixedBytes) return Corrupt("fewer tensor headers than stated");
  FieldReader reader(bytes);
  std::vector<TensorHeader> headers;
  headers.reserve(count);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    QUIRE_ASSIGN_OR_RETURN(TensorHeader header, DecodeTensorHeader(&reader));
    sum += static_cast<uint64_t>(header.bytes);  // both are at most 2^62
    if (sum > data_bytes) break;
    headers.push_back(std::move(header));
  }
  if (sum != data_bytes) return Corrupt("the tensors have other sizes than the data");
  if (!reader.ok()) return Corrupt("bytes follow the last tensor header");
  return headers;
}

std::vector<std::byte> EncodeFields(const ClientHello& hello) {
  std::vector<std::byte> fields;
  FieldWriter(&fields)
      .Add(hello.version_first)
      .Add(hello.version_last)
      .Add(hello.services)
      .AddBytes(hello.nonce);
  return fields;
}

std::vector<std::byte> EncodeFields(const ServerHello& hello) {
  std::vector<std::byte> fields;
  FieldWriter(&fields)
      .Add(hello.version)
      .Add(hello.flags)
      .Add(hello.services)
      .Add(hello.requests_max)
      .Add(hello.heartbeat_ms)
      .Add(hello.dead_after_ms)
      .Add(uint32_t{0})
      .Add(hello.message_bytes_max)
      .AddBytes(hello.nonce);
  return fields;
}

Result<ClientHello> DecodeClientHello(std::span<const std::byte> fields) {
  FieldReader reader(fields);
  ClientHello hello;
  hello.version_first = reader.Take<uint16_t>();
  hello.version_last = reader.Take<uint16_t>();
  hello.services = reader.Take<uint32_t>();
  const auto nonce = reader.TakeBytes(kNonceBytes);
  if (!reader.ok()) return Corrupt("a hello of the wrong length");
  std::copy(nonce.begin(), nonce.end(), hello.nonce);
  return hello;
}

Result<ServerHello> DecodeServerHello(std::span<const std::byte> fields) {
  FieldReader reader(fields);
  ServerHello hello;
  hello.version = reader.Take<uint16_t>();
  hello.flags = reader.Take<uint16_t>();
  hello.services = reader.Take<uint32_t>();
  hello.requests_max = reader.Take<uint32_t>();
  hello.heartbeat_ms = reader.Take<uint32_t>();
  hello.dead_after_ms = reader.Take<uint32_t>();
  const auto zero = reader.Take<uint32_t>();
  hello.message_bytes_max = reader.Take<uint64_t>();
  const auto nonce = reader.TakeBytes(kNonceBytes);
  if (!reader.ok() || zero != 0) return Corrupt("a hello of the wrong length");
  if (hello.requests_max == 0 || hello.heartbeat_ms == 0 || hello.dead_after_ms == 0 ||
      hello.message_bytes_max > uint64_t{kDataBytesMax}) {
    return Corrupt("a hello with limits that allow nothing");
  }
  std::copy(nonce.begin(), nonce.end(), hello.nonce);
  return hello;
}

Digest Proof(std::string_view secret, std::string_view label, const ClientHello& client,
             const ServerHello& server) {
  return HmacSha256(secret)
      .Update(std::as_bytes(std::span(label.data(), label.size())))
      .Update(EncodeFields(client))
      .Update(EncodeFields(server))
      .Finish();
}

void EncodeKeys(std::span<const std::string_view> keys, std::vector<std::byte>* fields) {
  FieldWriter writer(fields);
  for (const std::string_view key : keys) {
    writer.Add(static_cast<uint16_t>(key.size())).AddText(key);
  }
}

Result<std::vector<std::string_view>> DecodeKeys(std::span<const std::byte> fields) {
  FieldReader reader(fields);
  std::vector<std::string_view> keys;
  while (reader.left() > 0) {
    const auto bytes = reader.Take<uint16_t>();
    keys.push_back(TextOf(reader.TakeBytes(bytes)));
    if (reader.is_short()) return Corrupt("a key is cut off");
    if (bytes == 0 || bytes > kStoreKeyBytesMax) {
      return Corrupt("a key of " + std::to_string(bytes) + " bytes");
    }
  }
  return keys;
}

}  // namespace quire::wire
