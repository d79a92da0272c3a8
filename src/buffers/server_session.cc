#include "buffers/server_session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "chunk/sha256.h"

namespace quire {
namespace {

using wire::FieldReader;
using wire::FieldWriter;
using wire::Message;
using wire::Opcode;

// Answers that wait for a peer, for each request it may have open, before nothing more is read
// from it: those to the requests, and as many to pings and acknowledgements.
constexpr int64_t kAnswersPerRequest = 2;

Status Malformed(const std::string& what) {
  return Status(StatusCode::kRemote, "the request is malformed: " + what);
}

Status FieldError(const Message& message) {
  return Malformed("wrong fields for " +
                   std::string(wire::OpcodeName(static_cast<uint8_t>(message.opcode))));
}

}  // namespace

ServerSession::ServerSession(ServedBuffers* served,
                             std::span<const std::byte, wire::kNonceBytes> nonce,
                             std::function<void()> wake, int64_t now_ns)
    : served_(served),
      wake_(std::move(wake)),
      stored_(served->store != nullptr ? served->store->capacity_bytes() : 0),
      receiver_(this, &served->budget, static_cast<size_t>(served->requests_max)),
      now_ns_(now_ns),
      heard_ns_(now_ns),
      sent_ns_(now_ns),
      state_deadline_ns_(MomentAfter(now_ns, served->dead_after_ns)) {
  hello_.requests_max = static_cast<uint32_t>(served->requests_max);
  hello_.heartbeat_ms =
      static_cast<uint32_t>(std::max<int64_t>(1, served->heartbeat_ns / kNsPerMs));
  hello_.dead_after_ms =
      static_cast<uint32_t>(std::max<int64_t>(1, served->dead_after_ns / kNsPerMs));
  hello_.services = (served->lookup != nullptr ? wire::kServiceLookup : 0) |
                    (served->store != nullptr ? wire::kServiceStore : 0);
  hello_.flags = served->secret.empty() ? 0 : wire::kHelloFlagProofNeeded;
  const int64_t store_bytes = served->store != nullptr ? served->store->capacity_bytes() : 0;
  hello_.message_bytes_max = static_cast<uint64_t>(
      std::min(std::max(store_bytes, served->query_bytes_max), wire::kDataBytesMax));
  std::copy(nonce.begin(), nonce.end(), hello_.nonce);
  receiver_.set_head_bytes_max(wire::kHelloHeadBytesMax);
}

// ------------------------------------------------------------------------------------ in and out

void ServerSession::Receive(std::span<const std::byte> bytes, int64_t now_ns) {
  now_ns_ = now_ns;
  heard_ns_ = now_ns;
  if (state_ == State::kEnding || state_ == State::kOver) return;
  const Status status = receiver_.Receive(bytes);
  if (!status.ok()) Fail(status);
}

bool ServerSession::accepts_input() const {
  if (state_ == State::kEnding || state_ == State::kOver) return false;
  const auto answers = static_cast<int64_t>(sender_.queued() + gets_.size());
  return answers < kAnswersPerRequest * served_->requests_max;
}

void ServerSession::Sent(size_t bytes, int64_t now_ns) {
  now_ns_ = now_ns;
  sent_ns_ = now_ns;
  sender_.Consume(bytes);
  AnswerGets();
  if (state_ == State::kEnding && !sender_.has_output()) state_ = State::kOver;
}

void ServerSession::Wake(int64_t now_ns) {
  now_ns_ = now_ns;
  PollTakes();
}

void ServerSession::Tick(int64_t now_ns) {
  now_ns_ = now_ns;
  if (state_ == State::kOver || now_ns < next_deadline()) return;
  if (state_ == State::kEnding) {
    state_ = State::kOver;
  } else if (state_ != State::kOpen) {
    Fail(Status(StatusCode::kTimeout, "no complete hello within the time allowed"));
  } else if (accepts_input() && now_ns >= MomentAfter(heard_ns_, served_->dead_after_ns)) {
    takes_.clear();
    state_ = State::kOver;
  } else if (ExpireTakes() ||
             (has_output() && now_ns >= MomentAfter(sent_ns_, served_->lease_ns))) {
    takes_.clear();
    state_ = State::kOver;
  }
}

int64_t ServerSession::next_deadline() const {
  if (state_ == State::kOver) return kNever;
  if (state_ != State::kOpen) return state_deadline_ns_;
  int64_t next = kNever;
  if (accepts_input()) next = MomentAfter(heard_ns_, served_->dead_after_ns);
  if (has_output()) next = std::min(next, MomentAfter(sent_ns_, served_->lease_ns));
  for (const auto& [request, taking] : takes_) next = std::min(next, taking.deadline_ns);
  return next;
}

void ServerSession::Close(int64_t now_ns) {
  now_ns_ = now_ns;
  if (state_ == State::kEnding || state_ == State::kOver) return;
  Fail(Status(StatusCode::kClosed, "the server of the buffer was closed"));
}

// Says why and ends. What waits for an answer learns it from the goodbye.
void ServerSession::Fail(const Status& status) {
  takes_.clear();
  gets_.clear();
  sender_.End(wire::ErrorReply(Opcode::kGoodbye, 0, status));
  receiver_.Stop();
  state_ = State::kEnding;
  state_deadline_ns_ = MomentAfter(now_ns_, served_->dead_after_ns);
}

int64_t ServerSession::memory_bytes() const {
  return static_cast<int64_t>(sizeof(*this) + takes_.size() * sizeof(*takes_.begin()) +
                              sender_.queued() * (sizeof(Message) + wire::kErrorTextBytesMax) +
                              gets_.size() * (sizeof(Message) + kStoreKeyBytesMax)) +
         receiver_.memory_bytes();
}

// -------------------------------------------------------------------------------------- requests

Status ServerSession::OnBegin(const Message& message, std::span<const wire::TensorHeader> tensors,
                              int64_t data_bytes) {
  QUIRE_RETURN_IF_ERROR(CheckOpcode(message));
  return CheckBody(message, tensors.size(), data_bytes);
}

Status ServerSession::CheckOpcode(const Message& message) const {
  const auto name = std::string(wire::OpcodeName(static_cast<uint8_t>(message.opcode)));
  if (message.is_reply) return Malformed("an answer where a request is due");
  if (message.opcode == Opcode::kHello || message.opcode == Opcode::kProve) {
    const State due = message.opcode == Opcode::kHello ? State::kHello : State::kProve;
    return state_ == due ? Status() : Malformed("\"" + name + "\" at the wrong time");
  }
  if (state_ != State::kOpen) return Malformed("\"" + name + "\" before the hello is done");
  const bool is_lookup = message.opcode == Opcode::kTake || message.opcode == Opcode::kAcknowledge;
  const bool is_store = message.opcode == Opcode::kPut || message.opcode == Opcode::kGet ||
                        message.opcode == Opcode::kDelete || message.opcode == Opcode::kExists;
  if (is_lookup && served_->lookup == nullptr) return Malformed("no lookup buffer is served here");
  if (is_store && served_->store == nullptr) return Malformed("no store is served here");
  return {};
}

Status ServerSession::CheckBody(const Message& message, size_t tensor_count,
                                int64_t data_bytes) const {
  if (message.opcode == Opcode::kPut) {
    if (tensor_count != 1 || message.fields.empty() ||
        static_cast<int64_t>(message.fields.size()) > kStoreKeyBytesMax) {
      return FieldError(message);
    }
    if (data_bytes <= served_->store->capacity_bytes()) return {};
    return Status(StatusCode::kTooLarge, "the tensor has " + std::to_string(data_bytes) +
                                             " bytes and the store " +
                                             std::to_string(served_->store->capacity_bytes()));
  }
  if (message.opcode == Opcode::kTake) {
    if (tensor_count > 2 || message.fields.size() > sizeof(int64_t)) return FieldError(message);
    if (data_bytes <= served_->query_bytes_max) return {};
    return Status(StatusCode::kTooLarge,
                  "tokens and roi of the query have " + std::to_string(data_bytes) +
                      " bytes; at most " + std::to_string(served_->query_bytes_max) + " are taken");
  }
  return tensor_count == 0 ? Status() : FieldError(message);
}

void ServerSession::OnBroken(const wire::FrameHeader& header, const Status& why) {
  const bool is_damage = why.code() == StatusCode::kCorrupt;
  const Status status = is_damage ? Malformed(std::string(why.message())) : why;
  if (state_ != State::kOpen || header.is_reply()) return Fail(status);
  sender_.Queue(wire::ErrorReply(static_cast<Opcode>(header.opcode), header.request, status));
}

void ServerSession::OnMessage(Message message) {
  switch (message.opcode) {
    case Opcode::kHello:
      return OnHello(message);
    case Opcode::kProve:
      return OnProve(message);
    case Opcode::kPing:
      return Reply(message, {}, {});
    case Opcode::kCancel:
      return OnCancel(message);
    case Opcode::kTake:
      return OnTake(std::move(message));
    case Opcode::kAcknowledge:
      return OnAcknowledge(message);
    case Opcode::kPut:
      return OnPut(std::move(message));
    case Opcode::kGet:
      return OnGet(std::move(message));
    case Opcode::kDelete:
      return OnDelete(message);
    case Opcode::kExists:
      return OnExists(message);
    case Opcode::kStats:
      return OnStats(message);
    case Opcode::kGoodbye:
      return Fail(Status(StatusCode::kCancelled, "the peer said goodbye"));
  }
  ReplyError(message,
             Malformed("there is no request " + std::to_string(static_cast<int>(message.opcode)) +
                       " in version 1"));
}

void ServerSession::Reply(const Message& request, std::vector<std::byte> fields,
                          TensorBundle tensors, wire::ByteBudget::Hold hold) {
  sender_.Queue({.opcode = request.opcode,
                 .is_reply = true,
                 .request = request.request,
                 .fields = std::move(fields),
                 .tensors = std::move(tensors)},
                std::move(hold));
}

void ServerSession::ReplyError(const Message& request, const Status& status) {
  sender_.Queue(wire::ErrorReply(request.opcode, request.request, status));
}

void ServerSession::OnHello(const Message& message) {
  const auto hello = wire::DecodeClientHello(message.fields);
  if (!hello.ok()) return Fail(Malformed(std::string(hello.status().message())));
  if (hello->version_first > wire::kVersion || hello->version_last < wire::kVersion) {
    return Fail(Status(StatusCode::kIncompatible,
                       "the client speaks versions " + std::to_string(hello->version_first) +
                           " to " + std::to_string(hello->version_last) + ", the server 1"));
  }
  if ((hello->services & ~hello_.services) != 0) {
    return Fail(Status(StatusCode::kBadArgument,
                       served_->store == nullptr ? "the server has a lookup buffer and no store"
                                                 : "the server has a store and no lookup buffer"));
  }
  client_hello_ = *hello;
  Reply(message, wire::EncodeFields(hello_), {});
  if (!served_->secret.empty()) {
    state_ = State::kProve;
    return;
  }
  state_ = State::kOpen;
  receiver_.set_head_bytes_max(wire::kHeadBytesMax);
}

void ServerSession::OnProve(const Message& message) {
  Digest shown;
  const Digest due = wire::Proof(served_->secret, wire::kClientProofLabel, client_hello_, hello_);
  if (message.fields.size() != sizeof(shown.bytes)) return Fail(FieldError(message));
  std::memcpy(shown.bytes.data(), message.fields.data(), sizeof(shown.bytes));
  if (!EqualInConstantTime(shown, due)) {
    return Fail(Status(StatusCode::kRemote, "the client has another secret than the server"));
  }
  const Digest own = wire::Proof(served_->secret, wire::kServerProofLabel, client_hello_, hello_);
  const auto bytes = std::as_bytes(std::span(own.bytes));
  Reply(message, {bytes.begin(), bytes.end()}, {});
  state_ = State::kOpen;
  receiver_.set_head_bytes_max(wire::kHeadBytesMax);
}

// ---------------------------------------------------------------------------------- lookup buffer

void ServerSession::OnTake(Message message) {
  FieldReader reader(message.fields);
  const auto timeout_ns = reader.Take<int64_t>();
  if (!reader.ok() || timeout_ns < -1) return ReplyError(message, FieldError(message));
  if (takes_.count(message.request) > 0) {
    return Fail(Malformed("request " + std::to_string(message.request) + " is open already"));
  }
  // Entries that wait for their acknowledgement do not count: the client has its answer.
  const int64_t searching = std::count_if(takes_.begin(), takes_.end(), [](const auto& take) {
    return take.second.pending != nullptr;
  });
  if (searching >= served_->requests_max) {
    return ReplyError(
        message, Status(StatusCode::kFull, std::to_string(searching) + " takes are open already"));
  }
  LookupQuery query;
  const int64_t tokens = message.tensors.empty() ? 0 : message.tensors[0].second.element_count();
  if (!message.tensors.empty()) query.tokens = std::move(message.tensors[0].second);
  if (message.tensors.size() > 1) query.roi = std::move(message.tensors[1].second);
  auto pending = served_->lookup->StartTake(query, wake_);
  if (!pending.ok()) return ReplyError(message, pending.status());
  Taking taking{.pending = *std::move(pending),
                .deadline_ns = timeout_ns < 0 ? kNever : MomentAfter(now_ns_, timeout_ns)};
  const auto place = takes_.emplace(message.request, std::move(taking)).first;
  if (PollTake(place->first, &place->second)) {
    takes_.erase(place);
  } else if (place->second.pending != nullptr) {
    Hold(place, tokens);
  }
}

// What arrives has its bytes of the other budget back by now; the tokens stay, to be compared.
void ServerSession::Hold(Takes::iterator place, int64_t tokens) {
  const int64_t bytes = tokens * static_cast<int64_t>(sizeof(uint64_t));
  auto hold = served_->waiting.Take(bytes);
  if (hold) {
    place->second.query = *std::move(hold);
    return;
  }
  sender_.Queue(wire::ErrorReply(
      Opcode::kTake, place->first,
      Status(StatusCode::kFull, "the query takes " + std::to_string(bytes) +
                                    " bytes while it waits, and there is room for " +
                                    std::to_string(served_->waiting.left()) +
                                    " beside others; try again, or do not wait")));
  takes_.erase(place);
}

void ServerSession::PollTakes() {
  for (auto place = takes_.begin(); place != takes_.end();) {
    const bool is_over = place->second.pending != nullptr && PollTake(place->first, &place->second);
    place = is_over ? takes_.erase(place) : std::next(place);
  }
}

bool ServerSession::PollTake(uint64_t request, Taking* taking) {
  auto found = taking->pending->Poll();
  if (!found.ok()) {
    sender_.Queue(wire::ErrorReply(Opcode::kTake, request, found.status()));
    return true;
  }
  if (found->has_value()) {
    SendEntry(request, taking, **std::move(found));
    return !taking->handover.has_value();
  }
  if (now_ns_ < taking->deadline_ns) return false;
  sender_.Queue({.opcode = Opcode::kTake, .is_reply = true, .request = request});
  return true;
}

void ServerSession::SendEntry(uint64_t request, Taking* taking, Handover handover) {
  taking->pending.reset();
  taking->query = {};
  const LookupEntry& entry = handover.entry();
  Message reply{.opcode = Opcode::kTake, .is_reply = true, .request = request};
  reply.tensors.emplace_back("tokens", entry.tokens);
  reply.tensors.emplace_back("roi", entry.roi);
  reply.tensors.insert(reply.tensors.end(), entry.tensors.begin(), entry.tensors.end());
  const Status status = wire::CheckHead(reply);
  if (!status.ok()) return sender_.Queue(wire::ErrorReply(Opcode::kTake, request, status));
  taking->handover = std::move(handover);
  taking->deadline_ns = MomentAfter(now_ns_, served_->lease_ns);
  sender_.Queue(std::move(reply));
}

void ServerSession::OnAcknowledge(const Message& message) {
  const auto place = takes_.find(message.request);
  if (place == takes_.end() || !place->second.handover || sender_.is_sending(message.request)) {
    return ReplyError(message, Status(StatusCode::kNotFound, "no entry is on its way for request " +
                                                                 std::to_string(message.request) +
                                                                 "; its lease may be over"));
  }
  place->second.handover->Complete();
  takes_.erase(place);
  Reply(message, {}, {});
}

void ServerSession::OnCancel(const Message& message) {
  const auto place = takes_.find(message.request);
  if (place == takes_.end()) return;
  Message cancelled = wire::ErrorReply(Opcode::kTake, message.request,
                                       Status(StatusCode::kCancelled, "the request was cancelled"));
  if (!place->second.handover) {
    sender_.Queue(std::move(cancelled));
  } else {
    sender_.Abort(message.request, std::move(cancelled));
  }
  takes_.erase(place);  // puts the entry back
}

// Ends what waited or was on its way for too long. True if the peer does not take its bytes.
bool ServerSession::ExpireTakes() {
  for (auto place = takes_.begin(); place != takes_.end();) {
    auto& [request, taking] = *place;
    bool is_over = false;
    if (now_ns_ < taking.deadline_ns) {
      is_over = false;
    } else if (taking.pending != nullptr) {
      is_over = PollTake(request, &taking);
    } else if (!sender_.is_sending(request)) {
      is_over = true;
    } else if (now_ns_ < MomentAfter(sent_ns_, served_->lease_ns)) {
      taking.deadline_ns = MomentAfter(sent_ns_, served_->lease_ns);
    } else {
      return true;
    }
    place = is_over ? takes_.erase(place) : std::next(place);
  }
  return false;
}

// ------------------------------------------------------------------------------------------ store

void ServerSession::OnPut(Message message) {
  const std::string key(wire::TextOf(message.fields));
  const Status status = served_->store->Put(key, std::move(message.tensors[0].second));
  if (!status.ok()) return ReplyError(message, status);
  Reply(message, {}, {});
}

void ServerSession::OnGet(Message message) {
  // A key that no store takes may be large: its get is refused at once, and never waits.
  const bool is_key = static_cast<int64_t>(message.fields.size()) <= kStoreKeyBytesMax;
  const bool has_turn = gets_.empty() || !is_key;
  if (!has_turn || !AnswerGet(message)) gets_.push_back(std::move(message));
}

void ServerSession::AnswerGets() {
  while (!gets_.empty() && AnswerGet(gets_.front())) gets_.pop_front();
}

bool ServerSession::AnswerGet(const Message& get) {
  auto value = served_->store->Get(wire::TextOf(get.fields));
  TensorBundle tensors;
  wire::ByteBudget::Hold hold;
  if (!value.ok()) {
    ReplyError(get, value.status());
    return true;
  }
  if (value->has_value()) {
    auto taken = stored_.Take((*value)->bytes());
    if (!taken) return false;
    hold = *std::move(taken);
    tensors.emplace_back("", **std::move(value));
  }
  Reply(get, {}, std::move(tensors), std::move(hold));
  return true;
}

void ServerSession::OnDelete(const Message& message) {
  const auto was_there = served_->store->Delete(wire::TextOf(message.fields));
  if (!was_there.ok()) return ReplyError(message, was_there.status());
  Reply(message, {static_cast<std::byte>(*was_there)}, {});
}

void ServerSession::OnExists(const Message& message) {
  const auto keys = wire::DecodeKeys(message.fields);
  if (!keys.ok()) return ReplyError(message, FieldError(message));
  const auto found = served_->store->MultiExists(*keys);
  if (!found.ok()) return ReplyError(message, found.status());
  std::vector<std::byte> fields;
  for (const bool is_there : *found) fields.push_back(static_cast<std::byte>(is_there));
  Reply(message, std::move(fields), {});
}

void ServerSession::OnStats(const Message& message) {
  std::vector<std::byte> fields;
  FieldWriter writer(&fields);
  const LookupBuffer* const lookup = served_->lookup;
  const StoreBuffer* const store = served_->store;
  for (const int64_t value : {lookup ? lookup->used_bytes() : 0,
                              lookup ? lookup->capacity_bytes() : 0, lookup ? lookup->size() : 0,
                              lookup ? lookup->waiting() : 0, store ? store->used_bytes() : 0,
                              store ? store->capacity_bytes() : 0, store ? store->size() : 0}) {
    writer.Add(value);
  }
  Reply(message, std::move(fields), {});
}

}  // namespace quire
