// One thread serves all connections. It never waits for one of them: a take that finds nothing is
// an entry in a list, and what a peer does not read stays where it is.
#include <algorithm>
#include <atomic>
#include <limits>
#include <list>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/guard.h"
#include "base/random.h"
#include "base/start_thread.h"
#include "buffers/server_session.h"
#include "buffers/socket_turns.h"
#include "net/socket.h"
#include "quire/remote_buffers.h"

namespace quire {
namespace {

// Queries that arrive at once, of the largest size, over all connections; and those that wait for
// an entry, in the form in which they are compared: eight bytes for each token.
constexpr int64_t kQueriesAtOnce = 4;
constexpr int64_t kQueriesWaiting = 64;
// A process without a file descriptor left is told of each newcomer again and again.
constexpr int64_t kAcceptAgainNs = 500 * kNsPerMs;

class SocketServer final : public BufferServer {
 public:
  SocketServer(ServedBuffers served, std::unique_ptr<LocalLookupBuffer> lookup,
               std::unique_ptr<StoreBuffer> store, Endpoint endpoint, Socket listener, Waker waker,
               int64_t connections_max)
      : lookup_(std::move(lookup)),
        store_(std::move(store)),
        served_(std::move(served)),
        endpoint_(std::move(endpoint)),
        name_(endpoint_.ToString()),
        listener_(std::move(listener)),
        waker_(std::move(waker)),
        connections_max_(connections_max),
        read_buffer_(kReadBytes),
        thread_([this] { Run(); }) {}
  ~SocketServer() override {
    Close();
    thread_.join();
  }

  const std::string& endpoint() const override { return name_; }
  LookupBuffer* lookup() override { return lookup_.get(); }
  StoreBuffer* store() override { return store_.get(); }
  int64_t connections() const override { return open_connections_; }

  void Close() noexcept override {
    if (lookup_ != nullptr) lookup_->Close();
    if (store_ != nullptr) store_->Close();
    is_closing_ = true;
    waker_.Signal();
  }

 private:
  struct Connection {
    Socket socket;
    std::atomic<bool> is_woken = false;
    std::unique_ptr<ServerSession> session{};
  };
  using Connections = std::list<Connection>;

  void Run() noexcept {
    std::vector<PollEntry> entries;
    while (!is_closing_) {
      try {
        Turn(&entries);
      } catch (const std::bad_alloc&) {
        // The peers hold what there is no memory for; without them there is some.
        connections_.clear();
      }
    }
    for (Connection& connection : connections_) SayGoodbye(&connection);
    connections_.clear();
    open_connections_ = 0;
    RemoveSocketFile(endpoint_);
    listener_ = Socket();
  }

  void Turn(std::vector<PollEntry>* entries) {
    const bool has_room = static_cast<int64_t>(connections_.size()) < connections_max_;
    const int64_t now = clock_->SteadyNs();
    const bool may_accept = now >= accept_from_ns_;
    entries->clear();
    entries->push_back({.fd = waker_.fd(), .wants_read = true});
    entries->push_back({.fd = listener_.fd(), .wants_read = has_room && may_accept});
    int64_t deadline = may_accept ? kNever : accept_from_ns_;
    for (const Connection& connection : connections_) {
      entries->push_back({.fd = connection.socket.fd(),
                          .wants_read = connection.session->accepts_input(),
                          .wants_write = connection.session->has_output()});
      deadline = std::min(deadline, connection.session->next_deadline());
    }
    PollSockets(*entries, deadline == kNever ? kNever : std::max<int64_t>(0, deadline - now));
    if ((*entries)[0].can_read) waker_.Clear();
    size_t i = 2;
    for (auto place = connections_.begin(); place != connections_.end(); ++i) {
      place = Serve(&*place, (*entries)[i]) ? std::next(place) : connections_.erase(place);
    }
    open_connections_ = std::count_if(connections_.begin(), connections_.end(),
                                      [](const Connection& c) { return c.session->is_open(); });
    if ((*entries)[1].can_read) Accept();
  }

  // False: it is over.
  bool Serve(Connection* connection, const PollEntry& entry) {
    ServerSession& session = *connection->session;
    try {
      const int64_t now = clock_->SteadyNs();
      if (connection->is_woken.exchange(false)) session.Wake(now);
      if (entry.can_read) {
        const Result<size_t> count = connection->socket.Read(read_buffer_);
        if (!count.ok()) return false;
        const bool was_open = session.is_open();
        if (*count > 0) session.Receive(std::span(read_buffer_).first(*count), now);
        // Before the peer hears that it is connected.
        if (!was_open && session.is_open()) ++open_connections_;
      }
      if (!Write(connection)) return false;
      session.Tick(clock_->SteadyNs());
      return !session.is_over();
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  bool Write(Connection* connection) {
    ServerSession& session = *connection->session;
    for (int i = 0; i < kFramesPerTurn && session.has_output(); ++i) {
      const Result<size_t> count = connection->socket.Write(session.Gather());
      if (!count.ok()) return false;
      if (*count == 0) break;
      session.Sent(*count, clock_->SteadyNs());
    }
    return true;
  }

  void Accept() {
    Result<Socket> socket = listener_.Accept();
    if (!socket.ok()) accept_from_ns_ = clock_->SteadyNs() + kAcceptAgainNs;
    if (!socket.ok() || !socket->is_open()) return;
    std::byte nonce[wire::kNonceBytes];
    FillRandom(nonce);
    Connection& connection = connections_.emplace_back();
    connection.socket = *std::move(socket);
    const auto wake = [this, &connection] {
      connection.is_woken = true;
      waker_.Signal();
    };
    try {
      connection.session =
          std::make_unique<ServerSession>(&served_, nonce, wake, clock_->SteadyNs());
    } catch (const std::bad_alloc&) {
      connections_.pop_back();
    }
  }

  // What the peer takes at once.
  void SayGoodbye(Connection* connection) noexcept {
    try {
      connection->session->Close(clock_->SteadyNs());
      Write(connection);
    } catch (const std::bad_alloc&) {  // then it sees the connection end
    }
  }

  const std::shared_ptr<Clock> clock_ = MachineTime();
  const std::unique_ptr<LocalLookupBuffer> lookup_;
  const std::unique_ptr<StoreBuffer> store_;
  ServedBuffers served_;
  const Endpoint endpoint_;
  const std::string name_;
  Socket listener_;
  const Waker waker_;
  const int64_t connections_max_;
  int64_t accept_from_ns_ = 0;  // of the thread
  std::vector<std::byte> read_buffer_;
  Connections connections_;  // of the thread
  std::atomic<int64_t> open_connections_ = 0;
  std::atomic<bool> is_closing_ = false;
  std::thread thread_;
};

Status CheckOption(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return {};
  return Status(StatusCode::kBadArgument, "BufferServerOptions::" + std::string(name) + " is " +
                                              std::to_string(value) + "; it must be from 1 to " +
                                              std::to_string(most));
}

Status CheckOptions(const BufferServerOptions& options) {
  // Times travel as milliseconds in 32 bits.
  constexpr int64_t kTimeMax = int64_t{1'000'000} * std::numeric_limits<int32_t>::max();
  constexpr int64_t kCountMax = int64_t{1} << 20;
  constexpr int64_t kBytesMax = int64_t{1} << 40;
  QUIRE_RETURN_IF_ERROR(CheckOption("connections_max", options.connections_max, kCountMax));
  QUIRE_RETURN_IF_ERROR(CheckOption("requests_max", options.requests_max, kCountMax));
  QUIRE_RETURN_IF_ERROR(CheckOption("query_bytes_max", options.query_bytes_max, kBytesMax));
  QUIRE_RETURN_IF_ERROR(CheckOption("heartbeat", options.heartbeat.count(), kTimeMax));
  QUIRE_RETURN_IF_ERROR(CheckOption("dead_after", options.dead_after.count(), kTimeMax));
  QUIRE_RETURN_IF_ERROR(CheckOption("lease", options.lease.count(), kTimeMax));
  if (options.lookup || options.store) return {};
  return Status(
      StatusCode::kBadArgument,
      "BufferServerOptions: neither lookup nor store is given; there is nothing to serve");
}

}  // namespace

Result<std::unique_ptr<BufferServer>> BufferServer::Start(const BufferServerOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<BufferServer>> {
    QUIRE_RETURN_IF_ERROR(CheckOptions(options));
    QUIRE_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::Parse(options.endpoint));
    if (!endpoint.is_local() && options.secret.empty()) {
      return Status(StatusCode::kBadArgument,
                    "BufferServerOptions: " + endpoint.ToString() +
                        " can be reached from other machines, and secret is empty: set one, or "
                        "serve at 127.0.0.1 or unix:PATH");
    }
    ServedBuffers served{.secret = options.secret,
                         .requests_max = options.requests_max,
                         .query_bytes_max = options.query_bytes_max,
                         .heartbeat_ns = options.heartbeat.count(),
                         .dead_after_ns = options.dead_after.count(),
                         .lease_ns = options.lease.count()};
    std::unique_ptr<LocalLookupBuffer> lookup;
    std::unique_ptr<StoreBuffer> store;
    int64_t budget = kQueriesAtOnce * options.query_bytes_max;
    if (options.lookup) {
      QUIRE_ASSIGN_OR_RETURN(lookup, LocalLookupBuffer::Create(*options.lookup));
    }
    if (options.store) {
      QUIRE_ASSIGN_OR_RETURN(store, StoreBuffer::Create(*options.store));
      constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
      budget += std::min(options.store->capacity_bytes, kMost - budget);
    }
    served.lookup = lookup.get();
    served.store = store.get();
    served.budget = wire::ByteBudget(budget);
    served.waiting = wire::ByteBudget(kQueriesWaiting * options.query_bytes_max);
    QUIRE_ASSIGN_OR_RETURN(Waker waker, Waker::Create());
    QUIRE_ASSIGN_OR_RETURN(Socket listener, Socket::Listen(&endpoint));
    auto server = ThreadOrStatus("a server of buffers", [&] {
      return std::make_unique<SocketServer>(std::move(served), std::move(lookup), std::move(store),
                                            endpoint, std::move(listener), std::move(waker),
                                            options.connections_max);
    });
    if (server.ok()) return std::unique_ptr<BufferServer>(*std::move(server));
    RemoveSocketFile(endpoint);
    return server.status();
  });
}

}  // namespace quire
