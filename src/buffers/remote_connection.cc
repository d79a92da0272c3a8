#include "buffers/remote_connection.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/guard.h"
#include "base/random.h"
#include "base/start_thread.h"
#include "buffers/socket_turns.h"

namespace quire {
namespace {

using wire::Message;
using wire::Opcode;

}  // namespace

Result<std::shared_ptr<RemoteConnection>> RemoteConnection::Open(const std::string& name,
                                                                 const RemoteBufferOptions& options,
                                                                 uint32_t services,
                                                                 std::shared_ptr<Clock> clock) {
  QUIRE_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::Parse(name));
  if (options.connect_timeout.count() < 1 || options.message_bytes_max < 1) {
    return Status(StatusCode::kBadArgument,
                  "RemoteBufferOptions: connect_timeout and message_bytes_max must be above 0");
  }
  QUIRE_ASSIGN_OR_RETURN(Waker waker, Waker::Create());
  QUIRE_ASSIGN_OR_RETURN(const auto connection, ThreadOrStatus("a remote buffer", [&] {
                           return std::make_shared<RemoteConnection>(std::move(endpoint), options,
                                                                     services, std::move(clock),
                                                                     std::move(waker));
                         }));
  std::unique_lock lock(connection->mutex_);
  // The connection's thread has begun already, and may be done.
  QUIRE_RETURN_IF_ERROR(connection->AwaitAttempt(lock, 0));
  return connection;
}

RemoteConnection::RemoteConnection(Endpoint endpoint, const RemoteBufferOptions& options,
                                   uint32_t services, std::shared_ptr<Clock> clock, Waker waker)
    : endpoint_(std::move(endpoint)),
      options_(options),
      services_(services),
      clock_(std::move(clock)),
      waker_(std::move(waker)),
      read_buffer_(kReadBytes),
      thread_([this] { Run(); }) {}

RemoteConnection::~RemoteConnection() {
  Close();
  thread_.join();
}

// --------------------------------------------------------------------------------------- requests

Status RemoteConnection::EnsureOpen(std::unique_lock<std::mutex>& lock) {
  if (!is_open()) {
    is_wanted_ = true;
    waker_.Signal();
  }
  return AwaitAttempt(lock, attempts_over_);
}

Status RemoteConnection::AwaitAttempt(std::unique_lock<std::mutex>& lock, uint64_t over_before) {
  changed_.wait(lock, [&] { return is_closed_ || is_open() || attempts_over_ != over_before; });
  if (is_closed_) return closed_error_;
  return is_open() ? Status() : last_error_;
}

std::shared_ptr<RemoteConnection::Call> RemoteConnection::Send(Message message, uint64_t request) {
  auto call = std::make_shared<Call>();
  call->request = request;
  call->epoch = attempts_over_;
  message.request = request;
  const auto place = calls_.emplace(request, call).first;
  try {
    session_->Send(std::move(message));
  } catch (const std::bad_alloc&) {
    calls_.erase(place);
    throw;
  }
  waker_.Signal();
  return call;
}

// Timeout when until_ns comes before one of the places for requests is free.
Status RemoteConnection::AwaitPlace(std::unique_lock<std::mutex>& lock, int64_t until_ns) {
  const auto has_place = [&] {
    return static_cast<int64_t>(calls_.size()) < session_->requests_max();
  };
  if (!WaitUntil(*clock_, changed_, lock, until_ns,
                 [&] { return is_closed_ || !is_open() || has_place(); })) {
    return Status(StatusCode::kTimeout, "the server's " + std::to_string(session_->requests_max()) +
                                            " requests of a connection are open");
  }
  if (is_closed_) return closed_error_;
  return is_open() ? Status() : last_error_;
}

Result<std::shared_ptr<RemoteConnection::Call>> RemoteConnection::Start(Message message) {
  QUIRE_RETURN_IF_ERROR(wire::CheckHead(message));
  std::unique_lock lock(mutex_);
  QUIRE_RETURN_IF_ERROR(EnsureOpen(lock));
  // Questions about the buffer go through while takes fill all places.
  if (message.opcode != Opcode::kStats) QUIRE_RETURN_IF_ERROR(AwaitPlace(lock, kNever));
  return Send(std::move(message), next_request_++);
}

Result<std::shared_ptr<RemoteConnection::Call>> RemoteConnection::StartTake(Message query,
                                                                            int64_t until_ns) {
  QUIRE_RETURN_IF_ERROR(wire::CheckHead(query));
  std::unique_lock lock(mutex_);
  QUIRE_RETURN_IF_ERROR(EnsureOpen(lock));
  QUIRE_RETURN_IF_ERROR(AwaitPlace(lock, until_ns));
  query.opcode = Opcode::kTake;
  // Below 0 is for ever.
  const int64_t left =
      until_ns == kNever ? -1 : std::max<int64_t>(0, until_ns - clock_->SteadyNs());
  wire::FieldWriter(&query.fields).Add(left);
  return Send(std::move(query), next_request_++);
}

Result<Message> RemoteConnection::Await(const std::shared_ptr<Call>& call) {
  std::unique_lock lock(mutex_);
  call->answered.wait(lock, [&] { return call->answer.has_value(); });
  return *std::exchange(call->answer, std::nullopt);
}

Result<Message> RemoteConnection::Request(Message message) {
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<Call> call, Start(std::move(message)));
  return Await(call);
}

int64_t RemoteConnection::Stat(size_t index) {
  const auto stats = GuardEntry([&] { return Request({.opcode = Opcode::kStats}); });
  if (!stats.ok()) return 0;
  wire::FieldReader reader(stats->fields);
  for (size_t i = 0; i < index; ++i) reader.Take<int64_t>();
  return reader.Take<int64_t>();
}

void RemoteConnection::OnAnswer(uint64_t request, Result<Message> answer) {
  const auto place = calls_.find(request);
  place->second->answer.emplace(std::move(answer));
  place->second->answered.notify_all();
  calls_.erase(place);
  changed_.notify_all();
}

void RemoteConnection::Acknowledge(const Call& take) noexcept {
  try {
    std::shared_ptr<Call> call;
    {
      const std::lock_guard lock(mutex_);
      if (!is_open() || take.epoch != attempts_over_) return;
      call = Send({.opcode = Opcode::kAcknowledge}, take.request);
    }
    // Waited for, so that the server has freed the bytes when the consumer has the entry. If it
    // fails the entry is handed out again, as after any lost acknowledgement.
    static_cast<void>(Await(call));
  } catch (const std::bad_alloc&) {  // then the lease ends it
  }
}

void RemoteConnection::PutBack(const Call& take) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (!is_open() || take.epoch != attempts_over_) return;
    session_->Cancel(take.request);
    waker_.Signal();
  } catch (const std::bad_alloc&) {  // then the lease ends it
  }
}

void RemoteConnection::Close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  Lose(closed_error_);
  waker_.Signal();
}

// ------------------------------------------------------------------------------------- the thread

void RemoteConnection::Run() noexcept {
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    try {
      Turn(lock);
    } catch (const std::bad_alloc&) {
      if (!lock.owns_lock()) lock.lock();
      Lose(Status::OutOfMemory());
    }
  }
}

void RemoteConnection::Turn(std::unique_lock<std::mutex>& lock) {
  PollEntry entries[2] = {{.fd = waker_.fd(), .wants_read = true}, {}};
  int64_t deadline = kNever;
  if (socket_.is_open()) {
    entries[1] = {.fd = socket_.fd(),
                  .wants_read = session_ != nullptr,
                  .wants_write = session_ == nullptr || session_->has_output()};
    deadline = is_open() ? session_->next_deadline() : open_deadline_ns_;
  } else if (is_wanted_) {
    deadline = 0;
  }
  const size_t entry_count = socket_.is_open() ? 2 : 1;  // Close may take it away from here on
  lock.unlock();
  const int64_t now = clock_->SteadyNs();
  PollSockets(std::span(entries).first(entry_count),
              deadline == kNever ? kNever : std::max<int64_t>(0, deadline - now));
  if (entries[0].can_read) waker_.Clear();
  lock.lock();
  if (is_closed_) return;
  const Status status = Work(entries[1], clock_->SteadyNs());
  if (!status.ok()) Lose(status);
}

Status RemoteConnection::Work(const PollEntry& entry, int64_t now_ns) {
  if (!socket_.is_open()) {
    if (!is_wanted_) return {};
    open_deadline_ns_ = MomentAfter(now_ns, options_.connect_timeout.count());
    QUIRE_ASSIGN_OR_RETURN(socket_, Socket::Connect(endpoint_));
    return {};
  }
  if (!is_open() && now_ns >= open_deadline_ns_) {
    return Status(StatusCode::kUnavailable,
                  "no answer from " + endpoint_.ToString() + " within connect_timeout");
  }
  if (session_ == nullptr) return entry.can_write ? StartSession(now_ns) : Status();
  const bool was_open = is_open();
  QUIRE_RETURN_IF_ERROR(ReadAndWrite(entry, now_ns));
  if (is_open() != was_open) changed_.notify_all();
  return {};
}

Status RemoteConnection::StartSession(int64_t now_ns) {
  QUIRE_RETURN_IF_ERROR(socket_.ConnectError());
  std::byte nonce[wire::kNonceBytes];
  FillRandom(nonce);
  session_ = std::make_unique<ClientSession>(
      static_cast<ClientSession::Owner*>(this),
      ClientSession::Options{.secret = options_.secret,
                             .services = services_,
                             .message_bytes_max = options_.message_bytes_max},
      nonce, now_ns);
  return {};
}

Status RemoteConnection::ReadAndWrite(const PollEntry& entry, int64_t now_ns) {
  if (entry.can_read) {
    const Result<size_t> count = socket_.Read(read_buffer_);
    if (!count.ok()) return count.status();
    QUIRE_RETURN_IF_ERROR(session_->Receive(std::span(read_buffer_).first(*count), now_ns));
  }
  for (int i = 0; i < kFramesPerTurn && session_->has_output(); ++i) {
    // What the server said before it closed says why; the next read finds it.
    const Result<size_t> count = socket_.Write(session_->Gather());
    if (!count.ok() && !entry.can_read) return {};
    if (!count.ok()) return count.status();
    if (*count == 0) break;
    session_->Sent(*count);
  }
  return session_->Tick(now_ns);
}

void RemoteConnection::Lose(const Status& why) noexcept {
  for (const auto& [request, call] : calls_) {
    call->answer.emplace(why);
    call->answered.notify_all();
  }
  calls_.clear();
  session_.reset();
  socket_ = Socket();
  is_wanted_ = false;
  last_error_ = why;
  ++attempts_over_;
  changed_.notify_all();
}

}  // namespace quire
