#include "wire/transfer_frames.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/checksum.h"
#include "chunk/sha256.h"

namespace quire::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr size_t kHeadCrcEnd = 28;  // the header's own CRC covers what is before it
constexpr uint8_t kHelloSecret = 1 << 0;
constexpr uint8_t kJobLongRope = 1 << 0;
constexpr int64_t kCountMax = int64_t{1} << 40;  // of tokens, rows, heads: sums of two never wrap
constexpr int64_t kLayersMax = 65535;

Status Malformed(const std::string& what) {
  return Status(StatusCode::kCorrupt, "transfer frame: " + what);
}

bool IsCount(int64_t value) { return value >= 0 && value <= kCountMax; }

void AddInstance(FieldWriter* writer, const Instance& instance) { writer->AddBytes(instance); }

Instance TakeInstance(FieldReader* reader) {
  Instance instance{};
  const auto bytes = reader->TakeBytes(kInstanceBytes);
  std::copy(bytes.begin(), bytes.end(), instance.begin());
  return instance;
}

template <typename T>
void AddList(FieldWriter* writer, std::span<const T> list) {
  writer->Add(static_cast<uint32_t>(list.size())).AddBytes(std::as_bytes(list));
}

// The length is compared with the bytes that are there before any memory is taken.
template <typename T>
std::vector<T> TakeList(FieldReader* reader) {
  const auto count = reader->Take<uint32_t>();
  const auto bytes = reader->TakeBytes(size_t{count} * sizeof(T));
  std::vector<T> list(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(list.data(), bytes.data(), bytes.size());
  return list;
}

}  // namespace

// ---------------------------------------------------------------------------------------- header

void EncodeTransferHeader(const TransferHeader& header,
                          std::span<std::byte, kTransferHeaderBytes> out) {
  std::vector<std::byte> bytes;
  bytes.reserve(kTransferHeaderBytes);
  FieldWriter writer(&bytes);
  writer.AddText(kTransferMagic)
      .Add(kTransferFrameVersion)
      .Add(static_cast<uint8_t>(header.opcode))
      .Add(uint8_t{0})
      .Add(header.number)
      .Add(header.head_bytes)
      .Add(header.data_bytes)
      .Add(header.head_crc);
  writer.Add(Crc32c(bytes.data(), kHeadCrcEnd));
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

Result<TransferHeader> DecodeTransferHeader(std::span<const std::byte, kTransferHeaderBytes> bytes,
                                            uint64_t number, int64_t head_bytes_max) {
  FieldReader reader(bytes);
  if (TextOf(reader.TakeBytes(kTransferMagic.size())) != kTransferMagic)
    return Malformed("it does not begin with \"QTRN\"; the peer speaks another protocol");
  const auto version = reader.Take<uint16_t>();
  TransferHeader header;
  header.opcode = static_cast<TransferOpcode>(reader.Take<uint8_t>());
  const auto zero = reader.Take<uint8_t>();
  header.number = reader.Take<uint64_t>();
  header.head_bytes = reader.Take<uint32_t>();
  header.data_bytes = reader.Take<uint32_t>();
  header.head_crc = reader.Take<uint32_t>();
  if (Crc32c(bytes.data(), kHeadCrcEnd) != reader.Take<uint32_t>())
    return Malformed("the header's checksum is wrong");
  if (version != kTransferFrameVersion) {
    return Status(StatusCode::kIncompatible,
                  "transfer frame: of version " + std::to_string(version) +
                      "; this side speaks version " + std::to_string(kTransferFrameVersion));
  }
  if (header.number != number) {
    return Malformed("it has number " + std::to_string(header.number) + " where " +
                     std::to_string(number) + " was due; one was lost, repeated or moved");
  }
  if (zero != 0) return Malformed("bits that mean nothing are set");
  if (header.head_bytes > head_bytes_max) {
    return Status(StatusCode::kTooLarge,
                  "transfer frame: a head of " + std::to_string(header.head_bytes) +
                      " bytes; at most " + std::to_string(head_bytes_max) + " are taken now");
  }
  const bool is_data = header.opcode == TransferOpcode::kData;
  const bool fits = is_data ? header.head_bytes == kDataHeadBytes && header.data_bytes > 0 &&
                                  header.data_bytes <= kFrameDataBytesMax
                            : header.data_bytes == 0;
  if (!fits) return Malformed("its head and data have lengths that its kind has not");
  return header;
}

// ------------------------------------------------------------------------------------------ heads

bool IsLoad(const TransferLoad& load) {
  return IsCount(load.queued_tokens) && IsCount(load.ns_per_token);
}

std::string_view WrongOf(const TransferJob& job) {
  if (job.deadline_ns < 0) return "a job that was over before it was sent";
  if (!IsCount(job.window) || !IsCount(job.sinks)) return "a job with a window that no job has";
  const bool is_long = static_cast<int64_t>(job.salt.size()) > TransferJob::kSaltBytesMax;
  return is_long ? "a job with a salt that is too long" : "";
}

std::string_view WrongOf(const ReceiveMap& map) {
  const bool fits = map.epoch != 0 && map.count >= 1 && IsCount(map.count) &&
                    IsCount(map.first_position) && !map.kv_heads.empty() &&
                    static_cast<int64_t>(map.kv_heads.size()) <= kLayersMax &&
                    std::ranges::all_of(map.kv_heads, IsCount);
  return fits ? "" : "a map of no tokens, layers or epoch";
}

std::vector<std::byte> Encode(const TransferHello& hello) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  writer.Add(hello.version_first)
      .Add(hello.version_last)
      .Add(hello.has_secret ? kHelloSecret : uint8_t{0})
      .Add(uint8_t{0})
      .Add(uint16_t{0})
      .Add(hello.heartbeat_ms)
      .Add(hello.dead_after_ms)
      .Add(hello.lease_ms)
      .Add(hello.window_bytes)
      .AddBytes(hello.instance)
      .AddBytes(hello.nonce);
  return head;
}

Result<TransferHello> DecodeTransferHello(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferHello hello;
  hello.version_first = reader.Take<uint16_t>();
  hello.version_last = reader.Take<uint16_t>();
  const auto flags = reader.Take<uint8_t>();
  const auto zero = reader.Take<uint8_t>();
  const auto more_zeros = reader.Take<uint16_t>();
  hello.heartbeat_ms = reader.Take<uint32_t>();
  hello.dead_after_ms = reader.Take<uint32_t>();
  hello.lease_ms = reader.Take<uint32_t>();
  hello.window_bytes = reader.Take<uint64_t>();
  hello.instance = TakeInstance(&reader);
  const auto nonce = reader.TakeBytes(kNonceBytes);
  if (!reader.ok()) return Malformed("a hello of the wrong length");
  if (zero != 0 || more_zeros != 0 || (flags & ~kHelloSecret) != 0)
    return Malformed("a hello with bits that mean nothing");
  if (hello.heartbeat_ms == 0 || hello.dead_after_ms == 0 || hello.lease_ms == 0 ||
      hello.window_bytes == 0 || hello.window_bytes > static_cast<uint64_t>(kCountMax)) {
    return Malformed("a hello with limits that allow nothing");
  }
  hello.has_secret = (flags & kHelloSecret) != 0;
  std::copy(nonce.begin(), nonce.end(), hello.nonce.begin());
  return hello;
}

std::vector<std::byte> Encode(const TransferJob& job) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  writer.Add(job.id)
      .Add(job.deadline_ns)
      .Add(job.window)
      .Add(job.sinks)
      .Add(job.long_rope ? kJobLongRope : uint8_t{0});
  AddList(&writer, std::span(job.salt));
  AddList(&writer, std::span(job.tokens));
  return head;
}

Result<TransferJob> DecodeTransferJob(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferJob job;
  job.id = reader.Take<uint64_t>();
  job.deadline_ns = reader.Take<int64_t>();
  job.window = reader.Take<int64_t>();
  job.sinks = reader.Take<int64_t>();
  const auto flags = reader.Take<uint8_t>();
  const auto salt = TakeList<char>(&reader);
  job.tokens = TakeList<int32_t>(&reader);
  if (!reader.ok()) return Malformed("a job of the wrong length");
  if ((flags & ~kJobLongRope) != 0) return Malformed("a job with bits that mean nothing");
  job.long_rope = (flags & kJobLongRope) != 0;
  job.salt.assign(salt.begin(), salt.end());
  const std::string_view wrong = WrongOf(job);
  if (!wrong.empty()) return Malformed(std::string(wrong));
  return job;
}

std::vector<std::byte> Encode(const TransferMap& map) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  writer.Add(map.job)
      .Add(map.map.epoch)
      .Add(map.map.first_position)
      .Add(map.map.count)
      .Add(map.map.layout);
  AddList(&writer, std::span(map.map.kv_heads));
  AddList(&writer, std::span(map.map.slots));
  return head;
}

Result<TransferMap> DecodeTransferMap(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferMap map;
  map.job = reader.Take<uint64_t>();
  map.map.epoch = reader.Take<uint64_t>();
  map.map.first_position = reader.Take<int64_t>();
  map.map.count = reader.Take<int64_t>();
  map.map.layout = reader.Take<uint64_t>();
  map.map.kv_heads = TakeList<int64_t>(&reader);
  map.map.slots = TakeList<int64_t>(&reader);
  if (!reader.ok()) return Malformed("a map of the wrong length");
  const std::string_view wrong = WrongOf(map.map);
  if (!wrong.empty()) return Malformed(std::string(wrong));
  return map;
}

std::vector<std::byte> Encode(const TransferPart& part) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  AddInstance(&writer, part.receiver);
  writer.Add(part.epoch)
      .Add(part.layer)
      .Add(part.part.first_row)
      .Add(part.part.count)
      .Add(part.part.first_head)
      .Add(part.part.head_count)
      .Add(part.number)
      .Add(part.bytes)
      .Add(part.digest);
  return head;
}

Result<TransferPart> DecodeTransferPart(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferPart part;
  part.receiver = TakeInstance(&reader);
  part.epoch = reader.Take<uint64_t>();
  part.layer = reader.Take<int64_t>();
  part.part.first_row = reader.Take<int64_t>();
  part.part.count = reader.Take<int64_t>();
  part.part.first_head = reader.Take<int64_t>();
  part.part.head_count = reader.Take<int64_t>();
  part.number = reader.Take<uint64_t>();
  part.bytes = reader.Take<int64_t>();
  part.digest = reader.Take<uint32_t>();
  if (!reader.ok()) return Malformed("a part of the wrong length");
  const bool fits = part.layer >= 0 && part.layer < kLayersMax && part.part.count >= 1 &&
                    part.part.head_count >= 1 && IsCount(part.part.first_row) &&
                    IsCount(part.part.count) && IsCount(part.part.first_head) &&
                    IsCount(part.part.head_count) && part.number > 0;
  if (!fits) return Malformed("a part of no rows, heads or layer");
  if (part.bytes >= 1 && part.bytes <= kPartBytesMax) return part;
  return Status(StatusCode::kTooLarge, "transfer frame: a part of " + std::to_string(part.bytes) +
                                           " bytes; it must have 1 to " +
                                           std::to_string(kPartBytesMax));
}

std::vector<std::byte> Encode(const TransferRecord& record) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  AddInstance(&writer, record.receiver);
  writer.Add(record.epoch)
      .Add(record.first_row)
      .Add(record.count)
      .Add(static_cast<uint8_t>(record.is_aborted ? 1 : 0));
  return head;
}

Result<TransferRecord> DecodeTransferRecord(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferRecord record;
  record.receiver = TakeInstance(&reader);
  record.epoch = reader.Take<uint64_t>();
  record.first_row = reader.Take<int64_t>();
  record.count = reader.Take<int64_t>();
  const auto kind = reader.Take<uint8_t>();
  if (!reader.ok()) return Malformed("a record of the wrong length");
  if (!IsCount(record.first_row) || !IsCount(record.count) || kind > 1)
    return Malformed("a record of no tokens or of no known kind");
  record.is_aborted = kind == 1;
  return record;
}

std::vector<std::byte> Encode(const TransferCredit& credit) {
  std::vector<std::byte> head;
  FieldWriter(&head).Add(credit.number).Add(static_cast<uint8_t>(credit.wants_again ? 1 : 0));
  return head;
}

Result<TransferCredit> DecodeTransferCredit(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferCredit credit;
  credit.number = reader.Take<uint64_t>();
  const auto again = reader.Take<uint8_t>();
  if (!reader.ok() || again > 1) return Malformed("a credit of the wrong length or kind");
  credit.wants_again = again == 1;
  return credit;
}

std::vector<std::byte> EncodeEnd(uint64_t epoch, const Status& status) {
  std::vector<std::byte> head;
  const std::string_view text = status.message();
  FieldWriter(&head)
      .Add(epoch)
      .Add(static_cast<uint16_t>(status.code()))
      .AddText(text.substr(0, static_cast<size_t>(kErrorTextBytesMax)));
  return head;
}

Result<TransferEnd> DecodeTransferEnd(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferEnd end;
  end.epoch = reader.Take<uint64_t>();
  const auto code = reader.Take<uint16_t>();
  if (reader.is_short() || reader.left() > static_cast<size_t>(kErrorTextBytesMax))
    return Malformed("an end of the wrong length");
  if (code >= kStatusCodeCount) return Malformed("an end with a status that there is not");
  end.code = static_cast<StatusCode>(code);
  end.text = PrintableText(TextOf(reader.TakeBytes(reader.left())));
  return end;
}

std::string PrintableText(std::string_view text) {
  std::string line(text);
  std::ranges::replace_if(
      line, [](char c) { return c < ' ' || c > '~'; }, '?');
  return line;
}

Status TransferEnd::status() const {
  return Status(code == StatusCode::kOk ? StatusCode::kCancelled : code, text);
}

std::vector<std::byte> Encode(const TransferLease& lease) {
  std::vector<std::byte> head;
  FieldWriter(&head).Add(lease.epoch);
  return head;
}

Result<TransferLease> DecodeTransferLease(std::span<const std::byte> head) {
  FieldReader reader(head);
  const TransferLease lease{.epoch = reader.Take<uint64_t>()};
  if (!reader.ok()) return Malformed("a lease of the wrong length");
  return lease;
}

std::vector<std::byte> Encode(const TransferLoad& load) {
  std::vector<std::byte> head;
  FieldWriter(&head).Add(load.queued_tokens).Add(load.ns_per_token);
  return head;
}

Result<TransferLoad> DecodeTransferLoad(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferLoad load;
  load.queued_tokens = reader.Take<int64_t>();
  load.ns_per_token = reader.Take<int64_t>();
  if (!reader.ok() || !IsLoad(load))
    return Malformed("a load of the wrong length, or of what nobody computes");
  return load;
}

std::vector<std::byte> Encode(const TransferStreams& streams) {
  std::vector<std::byte> head;
  FieldWriter(&head).Add(streams.count).AddBytes(streams.token);
  return head;
}

Result<TransferStreams> DecodeTransferStreams(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferStreams streams;
  streams.count = reader.Take<uint16_t>();
  const auto token = reader.TakeBytes(kTokenBytes);
  if (!reader.ok() || streams.count < 1) return Malformed("streams of the wrong length, or none");
  std::copy(token.begin(), token.end(), streams.token.begin());
  return streams;
}

std::vector<std::byte> Encode(const TransferJoin& join) {
  std::vector<std::byte> head;
  FieldWriter writer(&head);
  AddInstance(&writer, join.connection);
  writer.Add(join.stream).AddBytes(std::as_bytes(std::span(join.proof.bytes)));
  return head;
}

Result<TransferJoin> DecodeTransferJoin(std::span<const std::byte> head) {
  FieldReader reader(head);
  TransferJoin join;
  join.connection = TakeInstance(&reader);
  join.stream = reader.Take<uint16_t>();
  const auto proof = reader.TakeBytes(sizeof(join.proof.bytes));
  if (!reader.ok()) return Malformed("a join of the wrong length");
  std::memcpy(join.proof.bytes.data(), proof.data(), proof.size());
  return join;
}

std::vector<std::byte> Encode(const TransferData& data) {
  std::vector<std::byte> head;
  FieldWriter(&head).Add(data.part).Add(data.offset);
  return head;
}

Result<TransferData> DecodeTransferData(std::span<const std::byte> head) {
  FieldReader reader(head);
  const auto part = reader.Take<uint64_t>();
  const auto offset = reader.Take<int64_t>();
  if (!reader.ok() || offset < 0 || offset > kPartBytesMax)
    return Malformed("data of no place in a part");
  return TransferData{.part = part, .offset = offset};
}

Digest TransferProof(std::string_view secret, std::string_view label,
                     const TransferHello& connector, const TransferHello& listener) {
  return HmacSha256(secret)
      .Update(std::as_bytes(std::span(label.data(), label.size())))
      .Update(Encode(connector))
      .Update(Encode(listener))
      .Finish();
}

// The token has one length, so no two pairs are one key.
std::string JoinKey(const StreamToken& token, std::string_view secret) {
  return std::string(TextOf(token)) + std::string(secret);
}

Digest JoinProof(std::string_view key, const Instance& connection, uint16_t stream,
                 const TransferHello& listener) {
  return HmacSha256(key)
      .Update(std::as_bytes(std::span(kJoinProofLabel.data(), kJoinProofLabel.size())))
      .Update(connection)
      .Update(std::as_bytes(std::span(&stream, 1)))
      .Update(Encode(listener))
      .Finish();
}

}  // namespace quire::wire
