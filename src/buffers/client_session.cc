#include "buffers/client_session.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "chunk/sha256.h"
#include "net/socket.h"

namespace quire {
namespace {

using wire::Message;
using wire::Opcode;

// Requests of the session itself; those of callers are counted from 1.
constexpr uint64_t kHelloRequest = 0;
constexpr uint64_t kPingRequest = std::numeric_limits<uint64_t>::max();
// Answers at a time: none is in the making that was not asked for.
constexpr size_t kAnswersMax = std::numeric_limits<uint32_t>::max();

// What the server says of itself is not taken for an outcome of this process.
Status StatedBy(const Message& answer) {
  std::string text(wire::TextOf(answer.fields).substr(0, wire::kErrorTextBytesMax));
  switch (answer.status) {
    case StatusCode::kBadArgument:
    case StatusCode::kTooLarge:
    case StatusCode::kFull:
    case StatusCode::kClosed:
    case StatusCode::kCancelled:
    case StatusCode::kIncompatible:
    case StatusCode::kRemote:
      return Status(answer.status, std::move(text));
    case StatusCode::kOk:
    case StatusCode::kUnknownSequence:
    case StatusCode::kSequenceExists:
    case StatusCode::kBadState:
    case StatusCode::kOutOfPages:
    case StatusCode::kOutOfMemory:
    case StatusCode::kNeedsReplay:
    case StatusCode::kNotFound:
    case StatusCode::kTimeout:
    case StatusCode::kWrongRole:
    case StatusCode::kUnavailable:
    case StatusCode::kCorrupt:
    case StatusCode::kIoError:
    case StatusCode::kInternal:
      break;
  }
  return Status(StatusCode::kRemote,
                "the server says " + std::string(StatusCodeName(answer.status)) + ": " + text);
}

}  // namespace

ClientSession::ClientSession(Owner* owner, Options options,
                             std::span<const std::byte, wire::kNonceBytes> nonce, int64_t now_ns)
    : owner_(owner),
      options_(std::move(options)),
      receiver_(this, nullptr, kAnswersMax),
      heard_ns_(now_ns),
      next_ping_ns_(kNever) {
  client_hello_.services = options_.services;
  std::copy(nonce.begin(), nonce.end(), client_hello_.nonce);
  receiver_.set_head_bytes_max(wire::kErrorTextBytesMax);
  sender_.Queue({.opcode = Opcode::kHello,
                 .request = kHelloRequest,
                 .fields = wire::EncodeFields(client_hello_)});
}

Status ClientSession::Receive(std::span<const std::byte> bytes, int64_t now_ns) {
  heard_ns_ = now_ns;
  if (!end_.ok()) return end_;
  const Status status = receiver_.Receive(bytes);
  if (!status.ok()) {
    End(Status(StatusCode::kRemote,
               "the server's answer is malformed: " + std::string(status.message())));
  }
  if (state_ == State::kOpen && next_ping_ns_ == kNever) {
    next_ping_ns_ = now_ns + hello_.heartbeat_ms * kNsPerMs;
  }
  return end_;
}

Status ClientSession::Tick(int64_t now_ns) {
  if (!end_.ok() || state_ != State::kOpen || now_ns < next_deadline()) return end_;
  if (now_ns - heard_ns_ >= hello_.dead_after_ms * kNsPerMs) {
    End(Status(StatusCode::kUnavailable, "the server gave no sign of life for " +
                                             std::to_string(hello_.dead_after_ms) + " ms"));
    return end_;
  }
  // A ping whose answer is due is sign enough that one is waited for.
  if (due_.count(kPingRequest) == 0) Send({.opcode = Opcode::kPing, .request = kPingRequest});
  next_ping_ns_ = now_ns + hello_.heartbeat_ms * kNsPerMs;
  return end_;
}

int64_t ClientSession::next_deadline() const {
  if (!end_.ok() || state_ != State::kOpen) return kNever;
  return std::min(next_ping_ns_, heard_ns_ + hello_.dead_after_ms * kNsPerMs);
}

void ClientSession::Send(Message message) {
  due_.emplace(message.request, message.opcode);
  sender_.Queue(std::move(message));
}

void ClientSession::Cancel(uint64_t request) {
  sender_.Queue({.opcode = Opcode::kCancel, .request = request});
}

void ClientSession::End(const Status& status) {
  if (end_.ok()) end_ = status;
  receiver_.Stop();
}

void ClientSession::Answer(uint64_t request, Result<Message> answer) {
  due_.erase(request);
  // A request that is refused at its head may have a rest to be sent. It must not go on beside the
  // one that takes its place. Where nothing has begun this cancels what the server does not know.
  if (!answer.ok()) {
    sender_.Abort(
        request, {.opcode = Opcode::kCancel, .request = request, .status = StatusCode::kCancelled});
  }
  if (request != kPingRequest) owner_->OnAnswer(request, std::move(answer));
}

Status ClientSession::OnBegin(const Message& message, std::span<const wire::TensorHeader> tensors,
                              int64_t data_bytes) {
  if (!message.is_reply) return Status(StatusCode::kCorrupt, "the server sent a request");
  const auto due = due_.find(message.request);
  const bool is_goodbye = message.opcode == Opcode::kGoodbye;
  const bool is_due = due != due_.end() && due->second == message.opcode;
  if (state_ == State::kOpen && !is_goodbye && !is_due) {
    return Status(StatusCode::kCorrupt, "an answer to nothing that was asked");
  }
  if (data_bytes > options_.message_bytes_max) {
    return Status(StatusCode::kTooLarge, "the answer has " + std::to_string(data_bytes) +
                                             " bytes; message_bytes_max is " +
                                             std::to_string(options_.message_bytes_max));
  }
  const bool may_have_tensors = state_ == State::kOpen && message.status == StatusCode::kOk &&
                                (message.opcode == Opcode::kTake || message.opcode == Opcode::kGet);
  if (!tensors.empty() && !may_have_tensors) {
    return Status(StatusCode::kCorrupt, "an answer with tensors where none belong");
  }
  return {};
}

void ClientSession::OnBroken(const wire::FrameHeader& header, const Status& why) {
  const auto due = due_.find(header.request);
  if (state_ != State::kOpen || !header.is_reply() || due == due_.end()) {
    return End(Status(StatusCode::kRemote,
                      "the server's answer is malformed: " + std::string(why.message())));
  }
  const bool is_take = due->second == Opcode::kTake;
  const bool is_damage = why.code() == StatusCode::kCorrupt;
  // The server has the entry on its way; it must not wait for its lease.
  if (is_take && !header.is_aborted()) Cancel(header.request);
  Answer(header.request, is_damage ? Status(StatusCode::kRemote,
                                            "the server's answer arrived "
                                            "damaged: " +
                                                std::string(why.message()))
                                   : why);
}

void ClientSession::OnMessage(Message message) {
  if (message.opcode == Opcode::kGoodbye) {
    const bool is_error = message.status != StatusCode::kOk;
    return End(is_error ? StatedBy(message)
                        : Status(StatusCode::kUnavailable, "the server said goodbye"));
  }
  if (state_ == State::kHello) return OnHello(message);
  if (state_ == State::kProve) return OnProve(message);
  const uint64_t request = message.request;
  if (message.status != StatusCode::kOk) return Answer(request, StatedBy(message));
  Answer(request, std::move(message));
}

void ClientSession::OnHello(const Message& message) {
  const auto hello = wire::DecodeServerHello(message.fields);
  if (message.opcode != Opcode::kHello || !hello.ok()) {
    return End(Status(StatusCode::kRemote, "the server's hello is malformed"));
  }
  hello_ = *hello;
  if (hello_.version != wire::kVersion || (options_.services & ~hello_.services) != 0) {
    return End(Status(StatusCode::kIncompatible, "the server speaks version " +
                                                     std::to_string(hello_.version) +
                                                     " or does not serve what was asked for"));
  }
  const bool needs_proof = (hello_.flags & wire::kHelloFlagProofNeeded) != 0;
  if (needs_proof != !options_.secret.empty()) {
    return End(Status(StatusCode::kRemote, needs_proof
                                               ? "the server asks for a secret and none was given"
                                               : "the server does not know the secret that was "
                                                 "given: it asks for none"));
  }
  if (!needs_proof) return OnOpen();
  const Digest proof = wire::Proof(options_.secret, wire::kClientProofLabel, client_hello_, hello_);
  const auto bytes = std::as_bytes(std::span(proof.bytes));
  sender_.Queue(
      {.opcode = Opcode::kProve, .request = kHelloRequest, .fields = {bytes.begin(), bytes.end()}});
  state_ = State::kProve;
}

void ClientSession::OnProve(const Message& message) {
  Digest shown;
  const Digest due = wire::Proof(options_.secret, wire::kServerProofLabel, client_hello_, hello_);
  const bool has_size = message.fields.size() == sizeof(shown.bytes);
  if (has_size) std::memcpy(shown.bytes.data(), message.fields.data(), sizeof(shown.bytes));
  if (message.opcode != Opcode::kProve || !has_size || !EqualInConstantTime(shown, due)) {
    return End(Status(StatusCode::kRemote, "the server has another secret than this client"));
  }
  OnOpen();
}

void ClientSession::OnOpen() {
  state_ = State::kOpen;
  receiver_.set_head_bytes_max(wire::kHeadBytesMax);
}

}  // namespace quire
