// One thread accepts connections; each has a thread of its own from then on, so that a stranger
// that says nothing holds up nobody. Nor do many strangers: where all places are taken, the
// connection that has been opening for the longest time makes room for the next one. A connection
// that may have several streams has a place for each of them until they have joined it.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/guard.h"
#include "base/start_thread.h"
#include "transfer/peer_connection.h"

namespace quire {
namespace {

// For how long an opening keeps its place in any case: many times what a peer takes.
constexpr int64_t kOpeningLeastNs = 50 * kNsPerMs;

// Connections of a socket, with TLS if there is a context.
class SocketListener final : public ByteListener {
 public:
  SocketListener(Endpoint endpoint, Socket socket, std::shared_ptr<const TlsContext> tls)
      : endpoint_(std::move(endpoint)), tls_(std::move(tls)), socket_(std::move(socket)) {}
  ~SocketListener() override { RemoveSocketFile(endpoint_); }

  Result<std::unique_ptr<ByteChannel>> Accept() override {
    Result<Socket> socket = socket_.Accept();
    if (!socket.ok()) return socket.status();
    if (!socket->is_open()) return std::unique_ptr<ByteChannel>();
    if (endpoint_.is_unix) return AcceptSharedMemory(*std::move(socket));
    socket->KeepAlive();
    if (tls_ == nullptr) return StreamChannel(*std::move(socket));
    QUIRE_ASSIGN_OR_RETURN(auto secured, tls_->Start(socket->fd(), ""));
    return TlsChannel(*std::move(socket), std::move(secured));
  }
  ByteChannel::Wait PrepareWait() override {
    return {.entry = {.fd = socket_.fd(), .wants_read = true}};
  }

 private:
  const Endpoint endpoint_;
  const std::shared_ptr<const TlsContext> tls_;  // null: none
  Socket socket_;
};

Result<std::unique_ptr<ByteListener>> Listen(PeerEndpoint* endpoint,
                                             std::shared_ptr<const TlsContext> tls) {
  if (endpoint->is_ucx) return ListenUcx(&endpoint->address);
  QUIRE_ASSIGN_OR_RETURN(Socket socket, Socket::Listen(&endpoint->address));
  return std::unique_ptr<ByteListener>(
      std::make_unique<SocketListener>(endpoint->address, std::move(socket), std::move(tls)));
}

class PeerListener final : public TransferListener {
 public:
  PeerListener(std::string name, std::unique_ptr<ByteListener> listener,
               std::shared_ptr<const Waker> waker, TransferSession::Options options,
               const TransferListenerOptions& given)
      : name_(std::move(name)),
        options_(std::move(options)),
        peers_max_(static_cast<size_t>(given.peers_max)),
        on_refused_(given.on_refused),
        waker_(std::move(waker)),
        listener_(std::move(listener)) {}
  ~PeerListener() override {
    Close();
    if (thread_.joinable()) thread_.join();
  }
  Status Start() {
    return StartThread("a listener of transfers", &thread_, [this] { Run(); });
  }

  const std::string& endpoint() const override { return name_; }

  Result<std::optional<std::shared_ptr<TransferPeer>>> Accept(Clock& clock,
                                                              int64_t until_ns) override {
    return GuardEntry([&]() -> Result<std::optional<std::shared_ptr<TransferPeer>>> {
      std::unique_lock lock(mutex_);
      WaitUntil(clock, changed_, lock, until_ns, [&] { return is_closed_ || !open_.empty(); });
      if (is_closed_) {
        return Status(StatusCode::kClosed,
                      "TransferListener: " + name_ + " was closed by this process");
      }
      if (open_.empty()) return std::optional<std::shared_ptr<TransferPeer>>();
      std::optional<std::shared_ptr<TransferPeer>> peer = std::move(open_.front());
      open_.pop_front();
      return peer;
    });
  }
  int64_t refused() const override {
    const std::lock_guard lock(mutex_);
    return refused_;
  }
  Status last_refusal() const override {
    const std::lock_guard lock(mutex_);
    return last_refusal_;
  }
  void Close() noexcept override {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
    waker_->Signal();
  }

 private:
  void Run() noexcept {
    while (!Turn()) continue;
    opening_.clear();
    joining_.clear();
    {
      const std::lock_guard lock(mutex_);
      open_.clear();
    }
    listener_.reset();
  }

  // Whether it is closed.
  bool Turn() {
    // Room comes back without a word when the host lets a connection go.
    constexpr int64_t kLookAgainNs = 500 * kNsPerMs;
    const int64_t wait_ns =
        is_short_ ? kLookAgainNs : std::min(kLookAgainNs, RoomAt() - clock_->SteadyNs());
    const bool has_room = wait_ns <= 0;
    PollEntry entries[2] = {{.fd = waker_->fd(), .wants_read = true}, {}};
    bool is_ready = false;
    if (has_room) {
      const ByteChannel::Wait wait = listener_->PrepareWait();
      entries[1] = wait.entry;
      is_ready = wait.is_ready;
    }
    PollSockets(entries, is_ready ? 0 : has_room ? kNever : wait_ns);
    if (entries[0].can_read) waker_->Clear();
    const Status status = GuardEntry([&]() -> Status {
      SortOut();
      return is_ready || entries[1].can_read ? AcceptOne() : Status();
    });
    is_short_ = !status.ok();
    const std::lock_guard lock(mutex_);
    if (!status.ok()) last_refusal_ = status;
    return is_closed_;
  }

  bool is_full() const {
    return accepted_.size() + joining_.size() + opening_.size() >= peers_max_ + book_->due();
  }
  // From when on a connection finds a place; kNever: not before one is over.
  int64_t RoomAt() const { return is_full() ? OldestGoesAt() : 0; }
  int64_t OldestGoesAt() const {
    return opening_.empty() ? kNever : opening_.front().since_ns + kOpeningLeastNs;
  }

  Status AcceptOne() {
    // What has opened meanwhile keeps its place. Places for streams may go at any time: one look.
    const bool takes_a_place = is_full();
    if (takes_a_place && OldestGoesAt() > clock_->SteadyNs()) return Status();
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<ByteChannel> channel, listener_->Accept());
    if (channel == nullptr) return Status();
    opening_.reserve(opening_.size() + 1);
    QUIRE_ASSIGN_OR_RETURN(auto peer, PeerConnection::Start(
                                          std::move(channel), name_, options_,
                                          [waker = waker_] { waker->Signal(); }, book_));
    if (takes_a_place) LetGoOldest();
    opening_.push_back({.peer = std::move(peer), .since_ns = clock_->SteadyNs()});
    return Status();
  }

  void LetGoOldest() {
    const Status own = opening_.front().peer->status();
    const bool has_joined = opening_.front().peer->has_joined();
    const Status why(StatusCode::kTimeout,
                     "transfer: the peer had not opened the connection when another one came, and "
                     "all places, " +
                         std::to_string(peers_max_) + " (peers_max), were taken");
    opening_.erase(opening_.begin());
    if (!has_joined) Refuse(own.ok() ? why : own);
  }

  void Refuse(const Status& why) {
    if (on_refused_) on_refused_(why);
    const std::lock_guard lock(mutex_);
    ++refused_;
    last_refusal_ = why;
  }

  // Nobody has taken them, and may not for long: each holds a socket, and the memory of its rings.
  // They end without the lock, as their threads do.
  std::vector<std::shared_ptr<PeerConnection>> TakeEnded() {
    std::vector<std::shared_ptr<PeerConnection>> ended;
    const std::lock_guard lock(mutex_);
    ended.reserve(open_.size());
    std::erase_if(open_, [&](std::shared_ptr<PeerConnection>& peer) {
      if (!peer->is_over()) return false;
      ended.push_back(std::move(peer));
      return true;
    });
    return ended;
  }

  // Hands over the connections that are open, and lets go those that failed or are over.
  void SortOut() {
    TakeEnded();
    std::erase_if(accepted_, [](const auto& peer) {
      const auto held = peer.lock();
      return held == nullptr || held->is_over();
    });
    for (auto place = joining_.begin(); place != joining_.end();)
      place = IsDecided(*place) ? joining_.erase(place) : place + 1;
    for (auto place = opening_.begin(); place != opening_.end();) {
      if (!IsDecided(place->peer)) {
        const auto granted = place->peer->WaitStreams(/*until_ns=*/0);
        if (!granted.ok() || !granted->has_value()) {
          ++place;
          continue;
        }
        // Its peer is known: it makes room for no stranger.
        joining_.push_back(place->peer);
      }
      place = opening_.erase(place);
    }
  }

  // Whether the opening is over. One that is open is handed over then.
  bool IsDecided(const std::shared_ptr<PeerConnection>& peer) {
    const Status status = peer->status();
    if (status.ok() ? !peer->is_open() : !peer->is_over()) return false;
    if (status.ok()) {
      accepted_.push_back(peer);
      const std::lock_guard lock(mutex_);
      open_.push_back(peer);
      changed_.notify_all();
    } else if (!peer->has_joined()) {
      Refuse(status);
    }
    return true;
  }

  // A connection before the two sides know each other.
  struct Opening {
    std::shared_ptr<PeerConnection> peer;
    int64_t since_ns;
  };

  const std::shared_ptr<Clock> clock_ = MachineTime();
  const std::string name_;
  const TransferSession::Options options_;
  const size_t peers_max_;
  const std::function<void(const Status&)> on_refused_;
  const std::shared_ptr<const Waker> waker_;  // connections may outlive this
  const std::shared_ptr<StreamBook> book_ = std::make_shared<StreamBook>();
  std::unique_ptr<ByteListener> listener_;                // of the thread
  std::vector<Opening> opening_;                          // of the thread; the oldest first
  std::vector<std::shared_ptr<PeerConnection>> joining_;  // of the thread: they wait for streams
  std::vector<std::weak_ptr<PeerConnection>> accepted_;   // of the thread
  bool is_short_ = false;  // of the thread: of files or memory, so the last turn accepted nobody

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PeerConnection>> open_;  // that no Accept has returned
  bool is_closed_ = false;
  int64_t refused_ = 0;
  Status last_refusal_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<TransferListener>> TransferListener::Start(
    const TransferListenerOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<TransferListener>> {
    QUIRE_ASSIGN_OR_RETURN(PeerEndpoint endpoint, PeerEndpoint::Parse(options.endpoint));
    QUIRE_RETURN_IF_ERROR(CheckReach(endpoint, options.peer));
    QUIRE_ASSIGN_OR_RETURN(TransferSession::Options session, SessionOptions(options.peer));
    QUIRE_ASSIGN_OR_RETURN(auto tls, TlsOf(endpoint, options.peer, /*listens=*/true));
    session.carries_salts |= endpoint.address.is_unix || tls != nullptr;
    session.streams = endpoint.is_tcp() ? wire::kStreamsMax : 1;
    constexpr int64_t kPeersMax = 4096;
    if (options.peers_max < 1 || options.peers_max > kPeersMax) {
      return Status(StatusCode::kBadArgument,
                    "TransferListenerOptions::peers_max is " + std::to_string(options.peers_max) +
                        "; it must be from 1 to " + std::to_string(kPeersMax));
    }
    QUIRE_ASSIGN_OR_RETURN(Waker waker, Waker::Create());
    QUIRE_ASSIGN_OR_RETURN(auto listener, Listen(&endpoint, std::move(tls)));
    auto made = std::make_unique<PeerListener>(endpoint.ToString(), std::move(listener),
                                               std::make_shared<const Waker>(std::move(waker)),
                                               std::move(session), options);
    QUIRE_RETURN_IF_ERROR(made->Start());
    return std::unique_ptr<TransferListener>(std::move(made));
  });
}

}  // namespace quire
