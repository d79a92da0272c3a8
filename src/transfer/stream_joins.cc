#include "transfer/stream_joins.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "chunk/sha256.h"

namespace quire {
namespace {

Status RefusedStream(const std::string& why) {
  return Status(StatusCode::kRemote, "transfer: a stream " + why);
}

}  // namespace

// ----------------------------------------------------------------------------- the connecting side

Status StreamJoin::OnFrame(const wire::TransferHeader& header, std::span<const std::byte> head) {
  if (header.opcode == wire::TransferOpcode::kGoodbye) {
    QUIRE_ASSIGN_OR_RETURN(const wire::TransferEnd end, wire::DecodeTransferEnd(head));
    return Status(StatusCode::kRemote,
                  "transfer: the peer refuses a stream: " + end.status().ToString());
  }
  if (header.opcode != wire::TransferOpcode::kHello) {
    return Status(StatusCode::kCorrupt, "transfer: the peer sends a message of kind " +
                                            std::to_string(static_cast<int>(header.opcode)) +
                                            " on a stream that has not joined");
  }
  QUIRE_ASSIGN_OR_RETURN(const wire::TransferHello hello, wire::DecodeTransferHello(head));
  const wire::TransferJoin join{
      .connection = granted_.connection,
      .stream = stream_,
      .proof = wire::JoinProof(granted_.key, granted_.connection, stream_, hello)};
  writer_.QueueUrgent(wire::TransferOpcode::kJoin, wire::Encode(join));
  has_heard_ = true;
  return Status();
}

// ------------------------------------------------------------------------------------ the listener

StreamBook::Entry StreamBook::Expect(const TransferSession::StreamsGranted& streams, Take take) {
  QUIRE_CHECK(streams.count >= 2 && streams.count <= wire::kStreamsMax);
  const auto waiting = std::make_shared<Waiting>();
  waiting->streams = streams;
  waiting->take = std::move(take);
  const std::lock_guard lock(mutex_);
  waiting_.push_back(waiting);
  return Entry(weak_from_this().lock(), waiting);
}

void StreamBook::Entry::Leave() noexcept {
  if (waiting_ == nullptr) return;
  const std::lock_guard lock(book_->mutex_);
  std::erase(book_->waiting_, waiting_);
}

// A stranger is not told whether a connection waits.
Result<StreamBook::Claim> StreamBook::Check(const wire::TransferJoin& join,
                                            const wire::TransferHello& hello) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(waiting_, [&](const std::shared_ptr<Waiting>& waiting) {
    return waiting->streams.connection == join.connection;
  });
  const bool is_proven =
      found != waiting_.end() &&
      EqualInConstantTime(
          join.proof, wire::JoinProof((*found)->streams.key, join.connection, join.stream, hello));
  if (!is_proven) return RefusedStream("is not one that a connection waits for");
  Waiting& waiting = **found;
  const std::string name = "is number " + std::to_string(join.stream) + " of " +
                           std::to_string(waiting.streams.count) + ", counted from 0";
  if (join.stream < 1 || join.stream >= waiting.streams.count) return RefusedStream(name);
  if (waiting.is_claimed[join.stream]) return RefusedStream(name + ", and that one has joined");
  waiting.is_claimed[join.stream] = true;
  return Claim(*found, join.stream);
}

void StreamBook::Claim::Deliver(std::unique_ptr<ByteChannel> channel) const noexcept {
  waiting_->take(stream_, std::move(channel));
}

size_t StreamBook::due() const {
  const std::lock_guard lock(mutex_);
  size_t due = 0;
  for (const auto& waiting : waiting_) due += waiting->streams.count - 1U - waiting->claims_ended;
  return due;
}

}  // namespace quire
