#include "transfer/transfer_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "chunk/sha256.h"
#include "transfer/passport_match.h"

namespace quire {
namespace {

using wire::TransferOpcode;

// A load that changes with every step is told no more often.
constexpr int64_t kLoadEveryNs = 50 * kNsPerMs;
// An opening and an ending are a few frames: a stranger does not stay longer, however patient this
// side is with its peers.
constexpr int64_t kFewFramesNs = 10'000 * kNsPerMs;
// Signs of life for each time after which the peer takes this side for dead, and the least time
// between two, whatever it says.
constexpr int64_t kHeartbeatsPerLife = 3;
constexpr int64_t kHeartbeatMinNs = 10 * kNsPerMs;
// Answers that a peer lets wait before nothing more is read from it.
constexpr size_t kAnswersWaitingMax = 4096;

uint32_t Milliseconds(int64_t ns) {
  return static_cast<uint32_t>(std::clamp<int64_t>(ns / kNsPerMs, 1, UINT32_MAX));
}

Status PeerBreach(const std::string& what) {
  return Status(StatusCode::kCorrupt, "transfer: the peer " + what);
}

template <typename Decoded, typename F>
Status With(Result<Decoded> decoded, F&& f) {
  QUIRE_RETURN_IF_ERROR(decoded.status());
  return f(*std::move(decoded));
}

}  // namespace

TransferSession::TransferSession(Owner* owner, Options options, int64_t now_ns)
    : owner_(owner),
      options_(std::move(options)),
      own_hello_{.version_last = options_.version,
                 .has_secret = !options_.secret.empty(),
                 .heartbeat_ms = Milliseconds(options_.heartbeat_ns),
                 .dead_after_ms = Milliseconds(options_.dead_after_ns),
                 .lease_ms = Milliseconds(options_.lease_ns),
                 .window_bytes = static_cast<uint64_t>(options_.window_bytes),
                 .instance = options_.instance,
                 .nonce = options_.nonce},
      reader_(this),
      receives_(&writer_, {.instance = options_.instance,
                           .window_bytes = options_.window_bytes,
                           .lease_ns = options_.lease_ns,
                           .carries_salts = options_.carries_salts,
                           .poll_ns = options_.heartbeat_ns}),
      sends_(&writer_, owner, options_.lease_ns),
      heartbeat_ns_(options_.heartbeat_ns),
      told_ns_(now_ns),
      now_ns_(now_ns),
      heard_ns_(now_ns),
      sent_ns_(now_ns),
      end_deadline_ns_(MomentAfter(now_ns, std::min(options_.dead_after_ns, kFewFramesNs))) {
  QUIRE_CHECK(options_.heartbeat_ns > 0 && options_.dead_after_ns > 0 && options_.lease_ns > 0);
  QUIRE_CHECK(options_.window_bytes > 0) << "no part could come";
  QUIRE_CHECK(options_.streams >= 1 && options_.streams <= wire::kStreamsMax);
  // All of the opening is in one queue with what may pass rows: a request would come before it.
  writer_.QueueUrgent(TransferOpcode::kHello, wire::Encode(own_hello_));
}

// ------------------------------------------------------------------------------------- in and out

void TransferSession::OnRead(const FrameRead& read, int64_t now_ns) {
  QUIRE_CHECK(!receives_.has_due()) << "a part is not stored and more is read";
  now_ns_ = now_ns;
  heard_ns_ = now_ns;
  if (!is_reading()) return;
  const Status status = reader_.OnRead(read);
  if (!status.ok()) Close(status, now_ns);
}

void TransferSession::Receive(std::span<const std::byte> bytes, int64_t now_ns) {
  while (!bytes.empty() && is_reading()) {
    FrameRead read = BeginRead();
    const std::span<std::byte> place = read.places.front();
    const size_t count = std::min(bytes.size(), place.size());
    std::memcpy(place.data(), bytes.data(), count);
    bytes = bytes.subspan(count);
    read.Check(count);
    OnRead(read, now_ns);
    if (!receives_.has_due()) continue;
    ReceiveHalf::DueStore due = receives_.TakeDue();
    const Status stored = due.Store();
    receives_.OnStored(due, stored);
  }
}

bool TransferSession::is_reading() const {
  return state_ != State::kJoined && state_ != State::kEnding && state_ != State::kOver;
}

// What is striped cannot be read before the streams are there.
bool TransferSession::accepts_input() const {
  return is_reading() && (!is_striped_ || state_ != State::kJoins) &&
         writer_.urgent_count() < kAnswersWaitingMax && !receives_.waits_for_room();
}

void TransferSession::Sent(size_t bytes, int64_t now_ns) {
  now_ns_ = now_ns;
  sent_ns_ = now_ns;
  writer_.Consume(bytes);
  if (state_ == State::kEnding && !writer_.has_output()) state_ = State::kOver;
}

void TransferSession::Tick(int64_t now_ns) {
  now_ns_ = now_ns;
  if (state_ == State::kOver || state_ == State::kJoined) return;
  if (state_ == State::kEnding) {
    if (now_ns >= end_deadline_ns_) state_ = State::kOver;
    return;
  }
  if (state_ != State::kOpen) {
    if (now_ns < end_deadline_ns_) return;
    return Close(Status(StatusCode::kTimeout,
                        state_ == State::kJoins
                            ? "transfer: not all streams of the connection came in the time allowed"
                            : "transfer: the peer did not open the connection in the time allowed"),
                 now_ns);
  }
  if (accepts_input() && now_ns >= MomentAfter(heard_ns_, options_.dead_after_ns)) {
    return Lose(Status(StatusCode::kUnavailable,
                       "transfer: the peer gives no sign of life; it is taken for dead"));
  }
  if (has_output() && now_ns >= MomentAfter(sent_ns_, options_.lease_ns)) {
    return Lose(Status(StatusCode::kUnavailable, "transfer: the peer takes no bytes"));
  }
  if (sends_.IsStuck(now_ns)) {
    return Close(Status(StatusCode::kTimeout,
                        "transfer: in the time of the lease the peer has taken fewer than 16 MiB "
                        "of the rows that were sent, and not all of them"),
                 now_ns);
  }
  const bool was_waiting = receives_.waits_for_room();
  receives_.Tick(now_ns);
  // What the peer has said meanwhile is read from now on.
  if (was_waiting && !receives_.waits_for_room()) heard_ns_ = now_ns;
  sends_.Tick(now_ns);
  if (load_ != told_load_ && now_ns >= MomentAfter(told_ns_, kLoadEveryNs)) {
    writer_.QueueUrgent(TransferOpcode::kLoad, wire::Encode(load_));
    told_load_ = load_;
    told_ns_ = now_ns;
  }
  if (!has_output() && now_ns >= MomentAfter(sent_ns_, heartbeat_ns_))
    writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
}

int64_t TransferSession::next_deadline() const {
  if (state_ == State::kOver || state_ == State::kJoined) return kNever;
  if (state_ != State::kOpen) return end_deadline_ns_;
  int64_t next = std::min(receives_.next_deadline(), sends_.next_deadline());
  if (load_ != told_load_) next = std::min(next, MomentAfter(told_ns_, kLoadEveryNs));
  if (accepts_input()) next = std::min(next, MomentAfter(heard_ns_, options_.dead_after_ns));
  return std::min(next, MomentAfter(sent_ns_, has_output() ? options_.lease_ns : heartbeat_ns_));
}

void TransferSession::Close(const Status& why, int64_t now_ns) {
  now_ns_ = now_ns;
  if (state_ == State::kEnding || state_ == State::kOver) return;
  writer_.End(wire::EncodeEnd(0, why));
  state_ = State::kEnding;
  end_deadline_ns_ = MomentAfter(now_ns, std::min(options_.dead_after_ns, kFewFramesNs));
  End(why);
}

void TransferSession::Lose(const Status& why) {
  if (state_ == State::kOver) return;
  const bool is_first = state_ != State::kEnding;
  state_ = State::kOver;
  if (is_first) End(why);
}

void TransferSession::End(const Status& why) {
  QUIRE_CHECK(!why.ok()) << "a thread that waits would take it for success";
  QUIRE_DCHECK(state_ == State::kEnding || state_ == State::kOver);
  QUIRE_DCHECK(status_.ok()) << "it has ended before";
  status_ = why;
  owner_->OnOver(why);
  receives_.EndAll(why);
  sends_.EndAll(why);
}

// ---------------------------------------------------------------------------------------- opening

Status TransferSession::OnFrame(const wire::TransferHeader& header,
                                std::span<const std::byte> head) {
  if (header.opcode == TransferOpcode::kGoodbye) {
    QUIRE_ASSIGN_OR_RETURN(const wire::TransferEnd end, wire::DecodeTransferEnd(head));
    const bool is_refusal = end.code == StatusCode::kIncompatible;
    Lose(Status(is_refusal ? StatusCode::kIncompatible : StatusCode::kRemote,
                "transfer: the peer ended the connection: " + end.status().ToString()));
    return Status();
  }
  if (state_ != State::kOpen) return OnOpening(header.opcode, head);
  if (awaits_striped_) {
    if (header.opcode == TransferOpcode::kStriped) return OnStriped(head);
    return PeerBreach("sends a message of kind " + std::to_string(static_cast<int>(header.opcode)) +
                      " where all streams were to begin");
  }
  return OnMessage(header, head);
}

Status TransferSession::OnOpening(TransferOpcode opcode, std::span<const std::byte> head) {
  if (state_ == State::kHello && opcode == TransferOpcode::kHello) return OnHello(head);
  if (state_ == State::kProve && opcode == TransferOpcode::kProve) return OnProve(head);
  if (state_ == State::kPassport && opcode == TransferOpcode::kPassport) return OnPassport(head);
  if (state_ == State::kStreams && opcode == TransferOpcode::kStreams) return OnStreams(head);
  if (state_ == State::kJoins && awaits_striped_ && opcode == TransferOpcode::kStriped)
    return OnStriped(head);
  if (state_ == State::kHello && opcode == TransferOpcode::kJoin && !options_.is_connector)
    return OnJoin(head);
  return PeerBreach("sends a message of kind " + std::to_string(static_cast<int>(opcode)) +
                    " before the connection is open");
}

Status TransferSession::OnHello(std::span<const std::byte> head) {
  QUIRE_ASSIGN_OR_RETURN(peer_hello_, wire::DecodeTransferHello(head));
  if (peer_hello_.version_first > own_hello_.version_last ||
      peer_hello_.version_last < own_hello_.version_first) {
    return Status(StatusCode::kIncompatible,
                  "transfer: version: " + std::to_string(own_hello_.version_first) + " to " +
                      std::to_string(own_hello_.version_last) + " here, " +
                      std::to_string(peer_hello_.version_first) + " to " +
                      std::to_string(peer_hello_.version_last) + " there");
  }
  version_ = std::min(own_hello_.version_last, peer_hello_.version_last);
  if (peer_hello_.instance == own_hello_.instance)
    return PeerBreach("gives our own instance as its own");
  if (peer_hello_.has_secret != own_hello_.has_secret) {
    return Status(StatusCode::kRemote,
                  own_hello_.has_secret ? "transfer: this side has a secret and the peer has none"
                                        : "transfer: the peer has a secret and this side has none");
  }
  if (!own_hello_.has_secret) {
    SendPassport();
    return Status();
  }
  const bool connects = options_.is_connector;
  const Digest proof = wire::TransferProof(
      options_.secret, connects ? wire::kConnectorProofLabel : wire::kListenerProofLabel,
      connects ? own_hello_ : peer_hello_, connects ? peer_hello_ : own_hello_);
  const auto bytes = std::as_bytes(std::span(proof.bytes));
  writer_.QueueUrgent(TransferOpcode::kProve, {bytes.begin(), bytes.end()});
  state_ = State::kProve;
  return Status();
}

Status TransferSession::OnProve(std::span<const std::byte> head) {
  Digest shown;
  if (head.size() != sizeof(shown.bytes)) return PeerBreach("sends a proof of the wrong length");
  std::memcpy(shown.bytes.data(), head.data(), head.size());
  const bool connects = options_.is_connector;
  const Digest due = wire::TransferProof(
      options_.secret, connects ? wire::kListenerProofLabel : wire::kConnectorProofLabel,
      connects ? own_hello_ : peer_hello_, connects ? peer_hello_ : own_hello_);
  if (!EqualInConstantTime(shown, due))
    return Status(StatusCode::kRemote, "transfer: the peer has another secret");
  SendPassport();
  return Status();
}

// A peer without the secret does not even learn the model's name.
void TransferSession::SendPassport() {
  QUIRE_DCHECK(state_ == (own_hello_.has_secret ? State::kProve : State::kHello))
      << "the peer has not shown the secret";
  const auto bytes = std::as_bytes(std::span(options_.passport.data(), options_.passport.size()));
  writer_.QueueUrgent(TransferOpcode::kPassport, {bytes.begin(), bytes.end()});
  state_ = State::kPassport;
  reader_.set_head_bytes_max(wire::kPassportBytesMax);
  // With the passport, so that one stream takes no time of its own.
  if (!options_.is_connector || version_ < wire::kStreamsVersion) return;
  writer_.QueueUrgent(TransferOpcode::kStreams,
                      wire::Encode(wire::TransferStreams{static_cast<uint16_t>(options_.streams)}));
}

Status TransferSession::OnPassport(std::span<const std::byte> head) {
  const Status match = MatchPassports(options_.passport, wire::TextOf(head));
  if (!match.ok() && match.code() != StatusCode::kIncompatible)
    return PeerBreach("sends no passport: " + wire::PrintableText(match.message()));
  QUIRE_RETURN_IF_ERROR(match);
  reader_.set_head_bytes_max(wire::kOpeningHeadBytesMax);
  const bool is_one = options_.is_connector && options_.streams == 1;
  if (version_ < wire::kStreamsVersion || is_one) {
    Open();
  } else {
    state_ = State::kStreams;
  }
  return Status();
}

Status TransferSession::OnStreams(std::span<const std::byte> head) {
  QUIRE_ASSIGN_OR_RETURN(wire::TransferStreams streams, wire::DecodeTransferStreams(head));
  if (options_.is_connector) {
    if (streams.count > options_.streams)
      return PeerBreach("gives more streams than were asked for");
    AwaitStreams(streams);
    return Status();
  }
  if (streams.token != wire::StreamToken{}) return PeerBreach("draws the token of streams itself");
  if (streams.count == 1) {
    Open();
    return Status();
  }
  streams.count = static_cast<uint16_t>(std::min<int64_t>(streams.count, options_.streams));
  streams.token = options_.token;
  writer_.QueueUrgent(TransferOpcode::kStreams, wire::Encode(streams));
  AwaitStreams(streams);
  return Status();
}

void TransferSession::AwaitStreams(const wire::TransferStreams& granted) {
  if (granted.count == 1) return Open();
  state_ = State::kJoins;
  awaits_striped_ = options_.is_connector;
  owner_->OnStreams(
      {.connection = options_.is_connector ? peer_hello_.instance : own_hello_.instance,
       .key = wire::JoinKey(granted.token, options_.secret),
       .count = granted.count});
}

void TransferSession::OnJoined() {
  if (state_ != State::kJoins) return;  // it has ended meanwhile
  QUIRE_CHECK(!has_joined_) << "streams join once";
  has_joined_ = true;
  if (!options_.is_connector || is_striped_) BeginStripes();
}

// The listener sees that all streams are there, and says so first; the connecting side answers.
void TransferSession::BeginStripes() {
  reads_striped_ = options_.is_connector;
  awaits_striped_ = !options_.is_connector;
  writer_.QueueUrgent(TransferOpcode::kStriped, {});
  Open();
}

Status TransferSession::OnStriped(std::span<const std::byte> head) {
  if (!head.empty()) return PeerBreach("sends the begin of all streams with fields");
  awaits_striped_ = false;
  if (!options_.is_connector) {
    reads_striped_ = true;
    return Status();
  }
  is_striped_ = true;
  if (has_joined_) BeginStripes();
  return Status();
}

Status TransferSession::OnJoin(std::span<const std::byte> head) {
  QUIRE_ASSIGN_OR_RETURN(const wire::TransferJoin join, wire::DecodeTransferJoin(head));
  if (has_output()) return PeerBreach("joins before it has read what its proof is made of");
  QUIRE_RETURN_IF_ERROR(owner_->OnJoin(join, own_hello_));
  state_ = State::kJoined;
  return Status();
}

void TransferSession::Open() {
  state_ = State::kOpen;
  receives_.SetSenderLease(int64_t{peer_hello_.lease_ms} * kNsPerMs);
  // The peer may be less patient than this side knew.
  const int64_t due_ns = int64_t{peer_hello_.dead_after_ms} * kNsPerMs / kHeartbeatsPerLife;
  heartbeat_ns_ = std::min(heartbeat_ns_, std::max(due_ns, kHeartbeatMinNs));
  reader_.set_head_bytes_max(wire::kTransferHeadBytesMax);
  // What this side holds for it is bounded by this side, whatever it allows.
  const int64_t held_max = options_.send_bytes > 0
                               ? options_.send_bytes
                               : std::max(options_.window_bytes, wire::kPartBytesMax);
  owner_->OnOpen(std::min(static_cast<int64_t>(peer_hello_.window_bytes), held_max),
                 peer_hello_.instance);
}

// --------------------------------------------------------------------------------------- messages

Status TransferSession::OnMessage(const wire::TransferHeader& header,
                                  std::span<const std::byte> head) {
  switch (header.opcode) {
    case TransferOpcode::kJob:
      return With(wire::DecodeTransferJob(head), [&](TransferJob job) {
        if (!job.salt.empty() && !options_.carries_salts)
          return PeerBreach("sends a salt where others could have read it");
        return sends_.OnJob(std::move(job));
      });
    case TransferOpcode::kMap:
      return With(wire::DecodeTransferMap(head),
                  [&](wire::TransferMap map) { return sends_.OnMap(std::move(map), now_ns_); });
    case TransferOpcode::kCredit:
      return With(wire::DecodeTransferCredit(head),
                  [&](const wire::TransferCredit& credit) { return sends_.OnCredit(credit); });
    case TransferOpcode::kPart:
      return With(wire::DecodeTransferPart(head),
                  [&](const wire::TransferPart& part) { return receives_.OnPart(part, now_ns_); });
    case TransferOpcode::kData:
      return With(wire::DecodeTransferData(head), [&](const wire::TransferData& data) {
        return receives_.OnDataFrame(data, header.data_bytes);
      });
    case TransferOpcode::kRecord:
      return With(wire::DecodeTransferRecord(head),
                  [&](const wire::TransferRecord& record) { return receives_.OnRecord(record); });
    case TransferOpcode::kCancel:
      return With(wire::DecodeTransferEnd(head), [&](const wire::TransferEnd& cancel) {
        sends_.OnCancel(cancel);
        return Status();
      });
    case TransferOpcode::kStop:
      return With(wire::DecodeTransferEnd(head), [&](const wire::TransferEnd& stop) {
        receives_.OnStop(stop);
        return Status();
      });
    case TransferOpcode::kLease:
      return With(wire::DecodeTransferLease(head), [&](const wire::TransferLease& lease) {
        sends_.OnLease(lease, now_ns_);
        return Status();
      });
    case TransferOpcode::kLoad:
      return With(wire::DecodeTransferLoad(head), [&](const TransferLoad& load) {
        owner_->OnLoad(load);
        return Status();
      });
    case TransferOpcode::kHeartbeat:
      return head.empty() ? Status() : PeerBreach("sends a heartbeat with fields");
    case TransferOpcode::kHello:
    case TransferOpcode::kProve:
    case TransferOpcode::kPassport:
    case TransferOpcode::kGoodbye:
    case TransferOpcode::kStreams:
    case TransferOpcode::kJoin:
    case TransferOpcode::kStriped:
      break;
  }
  return PeerBreach("sends a message of kind " + std::to_string(static_cast<int>(header.opcode)) +
                    ", which has no place here");
}

void TransferSession::DataPlaces(size_t count, std::vector<std::span<std::byte>>* places,
                                 FrameRead* read) {
  QUIRE_DCHECK(state_ == State::kOpen) << "no data are taken before and after";
  receives_.DataPlaces(count, places, read);
}

Status TransferSession::OnData(size_t count, uint32_t crc) { return receives_.OnData(count, crc); }

}  // namespace quire
