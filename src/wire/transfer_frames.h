// The frames of a transfer between processes: docs/formats/transfer-wire.md as code. Pure: bytes
// in, bytes out. Nothing here allocates more than the bytes that it is given.
#ifndef QUIRE_WIRE_TRANSFER_FRAMES_H_
#define QUIRE_WIRE_TRANSFER_FRAMES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/kv_transfer.h"
#include "quire/status.h"
#include "quire/transfer_peer.h"
#include "wire/wire_format.h"

namespace quire::wire {

inline constexpr std::string_view kTransferMagic = "QTRN";
// The version of frames: it stands in each of them, whatever messages both sides speak.
inline constexpr uint16_t kTransferFrameVersion = 2;
// The versions of messages: what this side speaks. The hellos agree on one.
inline constexpr uint16_t kTransferVersionFirst = 2;
inline constexpr uint16_t kTransferVersion = 3;
// From this version on a connection may have several streams.
inline constexpr uint16_t kStreamsVersion = 3;
inline constexpr size_t kTransferHeaderBytes = 32;
// A frame with its header: what a peer may make others wait behind (design.md section 6).
inline constexpr int64_t kTransferFrameBytesMax = int64_t{1} << 20;
inline constexpr int64_t kTransferHeadBytesMax =
    kTransferFrameBytesMax - static_cast<int64_t>(kTransferHeaderBytes);
// What a stranger may send in one head.
inline constexpr int64_t kOpeningHeadBytesMax = kErrorTextBytesMax + 64;
// A passport, once the secret is proven.
inline constexpr int64_t kPassportBytesMax = int64_t{48} << 10;
// A part: as large as a section of a chunk may be.
inline constexpr int64_t kPartBytesMax = int64_t{64} << 20;
// How often a receiver may ask for one part again.
inline constexpr int kPartAgainMax = 2;
inline constexpr size_t kInstanceBytes = 16;
using Instance = std::array<std::byte, kInstanceBytes>;
// Streams of one connection, as this side takes part in it.
inline constexpr int64_t kStreamsMax = 16;
// Bytes of a direction that go over one stream before the next one has its turn.
inline constexpr uint64_t kStripeBytes = uint64_t{64} << 10;
// What a listener draws for a connection that is to have several streams: the side that brings
// one knows it.
inline constexpr size_t kTokenBytes = 32;
using StreamToken = std::array<std::byte, kTokenBytes>;

enum class TransferOpcode : uint8_t {
  kHello = 1,
  kProve = 2,
  kPassport = 3,
  kJob = 4,
  kMap = 5,
  kPart = 6,
  kData = 7,
  kRecord = 8,
  kCredit = 9,
  kCancel = 10,  // from the receiver of a transfer
  kStop = 11,    // from the sender
  kLease = 12,
  kHeartbeat = 13,
  kGoodbye = 14,
  kLoad = 15,
  kStreams = 16,
  kJoin = 17,     // in place of a hello: the socket becomes a stream of a connection
  kStriped = 18,  // what follows goes over all streams
};

struct TransferHeader {
  TransferOpcode opcode{};
  uint64_t number = 0;  // of the frame, counted from 0 in each direction
  uint32_t head_bytes = 0;
  uint32_t data_bytes = 0;  // of kData frames alone
  uint32_t head_crc = 0;
};

void EncodeTransferHeader(const TransferHeader& header,
                          std::span<std::byte, kTransferHeaderBytes> out);
// Corrupt for what no sender of this version writes in the frame that has this number, Incompatible
// for another version, TooLarge for a head of more than head_bytes_max.
Result<TransferHeader> DecodeTransferHeader(std::span<const std::byte, kTransferHeaderBytes> bytes,
                                            uint64_t number, int64_t head_bytes_max);

struct TransferHello {
  uint16_t version_first = kTransferVersionFirst;
  uint16_t version_last = kTransferVersion;
  bool has_secret = false;
  uint32_t heartbeat_ms = 0;
  uint32_t dead_after_ms = 0;
  uint32_t lease_ms = 0;
  uint64_t window_bytes = 0;
  // Drawn by this side for this connection: epochs begin at 1 in every process.
  Instance instance{};
  std::array<std::byte, kNonceBytes> nonce{};
};

// From the connecting side: how many streams it wants, without a token. From the listener: how many
// it gets.
struct TransferStreams {
  uint16_t count = 0;  // 1 at least
  StreamToken token{};
};

struct TransferJoin {
  Instance connection{};  // the listener's instance of it
  uint16_t stream = 0;    // from 1 on: stream 0 is the connection's own
  Digest proof{};         // JoinProof
};

struct TransferMap {
  uint64_t job = 0;
  ReceiveMap map{};
};

struct TransferPart {
  Instance receiver{};
  uint64_t epoch = 0;
  int64_t layer = 0;
  ReceivePart part{};
  uint64_t number = 0;  // the sender's, from 1 on; the same when it is sent again
  int64_t bytes = 0;
  uint32_t digest = 0;  // DigestOfHeads
};

struct TransferRecord {
  Instance receiver{};
  uint64_t epoch = 0;
  int64_t first_row = 0;
  int64_t count = 0;
  bool is_aborted = false;
};

struct TransferCredit {
  uint64_t number = 0;
  bool wants_again = false;
};

// The head of kCancel, kStop and, with epoch 0, kGoodbye.
struct TransferEnd {
  uint64_t epoch = 0;
  StatusCode code = StatusCode::kOk;
  std::string text{};  // PrintableText

  Status status() const;  // kCancelled for kOk
};

struct TransferLease {
  uint64_t epoch = 0;
};

// Whether a message can say it: its numbers are none that a peer would refuse.
bool IsLoad(const TransferLoad& load);
// Why it can be no message: a part of a sentence; empty for one that can be sent.
std::string_view WrongOf(const TransferJob& job);
std::string_view WrongOf(const ReceiveMap& map);

std::vector<std::byte> Encode(const TransferHello& hello);
std::vector<std::byte> Encode(const TransferJob& job);
std::vector<std::byte> Encode(const TransferMap& map);
std::vector<std::byte> Encode(const TransferPart& part);
std::vector<std::byte> Encode(const TransferRecord& record);
std::vector<std::byte> Encode(const TransferCredit& credit);
// Long texts are cut.
std::vector<std::byte> EncodeEnd(uint64_t epoch, const Status& status);
std::vector<std::byte> Encode(const TransferLease& lease);
std::vector<std::byte> Encode(const TransferLoad& load);
std::vector<std::byte> Encode(const TransferStreams& streams);
std::vector<std::byte> Encode(const TransferJoin& join);

// Corrupt for what no sender of this version writes.
Result<TransferHello> DecodeTransferHello(std::span<const std::byte> head);
Result<TransferJob> DecodeTransferJob(std::span<const std::byte> head);
Result<TransferMap> DecodeTransferMap(std::span<const std::byte> head);
Result<TransferPart> DecodeTransferPart(std::span<const std::byte> head);
Result<TransferRecord> DecodeTransferRecord(std::span<const std::byte> head);
Result<TransferCredit> DecodeTransferCredit(std::span<const std::byte> head);
Result<TransferEnd> DecodeTransferEnd(std::span<const std::byte> head);
Result<TransferLease> DecodeTransferLease(std::span<const std::byte> head);
Result<TransferLoad> DecodeTransferLoad(std::span<const std::byte> head);
Result<TransferStreams> DecodeTransferStreams(std::span<const std::byte> head);
Result<TransferJoin> DecodeTransferJoin(std::span<const std::byte> head);

// What a peer says, a stranger perhaps, for messages and logs: one line of ASCII, anything else as
// '?'.
std::string PrintableText(std::string_view text);

// Before the bytes of a part in a kData frame.
struct TransferData {
  uint64_t part = 0;
  int64_t offset = 0;
};
inline constexpr size_t kDataHeadBytes = 16;
inline constexpr int64_t kFrameDataBytesMax =
    kTransferHeadBytesMax - static_cast<int64_t>(kDataHeadBytes);
std::vector<std::byte> Encode(const TransferData& data);
Result<TransferData> DecodeTransferData(std::span<const std::byte> head);

// What shows that a side has the secret. `label` tells the two directions apart, so that neither
// side's proof is one of the other's.
inline constexpr std::string_view kConnectorProofLabel = "quire/transfer/1 connector";
inline constexpr std::string_view kListenerProofLabel = "quire/transfer/1 listener";
Digest TransferProof(std::string_view secret, std::string_view label,
                     const TransferHello& connector, const TransferHello& listener);

// What shows that a socket is brought by the side that was given the token. `listener` is what the
// listener has said on this socket, so that no proof can be used twice.
inline constexpr std::string_view kJoinProofLabel = "quire/transfer/3 join";
std::string JoinKey(const StreamToken& token, std::string_view secret);
Digest JoinProof(std::string_view key, const Instance& connection, uint16_t stream,
                 const TransferHello& listener);

}  // namespace quire::wire

#endif  // QUIRE_WIRE_TRANSFER_FRAMES_H_
