#include "engine/remote/prefill_server.h"

#include <utility>

#include "base/clock.h"
#include "base/guard.h"
#include "base/start_thread.h"

namespace quire {

Result<std::unique_ptr<PrefillServer>> PrefillServer::Start(const TransferListenerOptions& options,
                                                            std::function<void()> wake) {
  QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<TransferListener> listener,
                         TransferListener::Start(options));
  std::unique_ptr<PrefillServer> server(new PrefillServer(std::move(listener), std::move(wake)));
  QUIRE_RETURN_IF_ERROR(StartThread("those that ask for prompts", &server->thread_,
                                    [here = server.get()] { here->Accept(); }));
  return server;
}

PrefillServer::PrefillServer(std::unique_ptr<TransferListener> listener, std::function<void()> wake)
    : listener_(std::move(listener)), wake_(std::move(wake)) {}

PrefillServer::~PrefillServer() {
  listener_->Close();
  if (thread_.joinable()) thread_.join();
  for (auto& [number, connection] : connections_) {
    connection.peer->SetWake(nullptr);
    connection.peer->Close();
  }
}

// Ends when the listener is closed. A connection for which there is no memory is closed, which its
// other side sees.
void PrefillServer::Accept() noexcept {
  for (;;) {
    Result<std::optional<std::shared_ptr<TransferPeer>>> accepted =
        listener_->Accept(*clock_, kNever);
    if (!accepted.ok()) {
      if (accepted.status().code() == StatusCode::kOutOfMemory) continue;
      return;
    }
    if (!*accepted) continue;
    const std::shared_ptr<TransferPeer> peer = **std::move(accepted);
    if (!GuardEntry([&] { return Add(peer); }).ok()) {
      peer->Close();
      continue;
    }
    wake_();  // it may have asked before there was a `wake` to call
  }
}

Status PrefillServer::Add(const std::shared_ptr<TransferPeer>& peer) {
  ForgetEnded();  // the engine may make no step for long
  peer->SetWake(wake_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_) return Status(StatusCode::kClosed, "PrefillServer: it was ended");
  const int64_t number = next_connection_++;
  connections_[number] = {.peer = peer, .window = peer->send_room()};
  const Status connected = channel_->Connect(number, peer);
  if (!connected.ok()) {
    connections_.erase(number);
    return connected;
  }
  static_cast<void>(peer->SetLoad(told_));  // a connection that is over is found by Take
  return {};
}

void PrefillServer::End(bool at_once) noexcept {
  is_ending_.store(true, std::memory_order_release);
  listener_->Close();
  if (!at_once) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  for (auto& [number, connection] : connections_) connection.peer->Close();
}

int64_t PrefillServer::open_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t count = 0;
  for (const auto& [number, connection] : connections_)
    count += connection.peer->stats().sends_open;
  return count;
}

Result<bool> PrefillServer::Take(PrefillJob* job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto place = connections_.upper_bound(taken_from_);
  for (size_t left = connections_.size(); left > 0; --left, ++place) {
    if (place == connections_.end()) place = connections_.begin();
    const auto& [number, connection] = *place;
    // What has not come by now rings again.
    Result<std::optional<TransferRequest>> request = connection.peer->NextRequest(*clock_, 0);
    if (request.status().code() == StatusCode::kOutOfMemory) return request.status();
    if (!request.ok() || !*request) continue;
    *job = {.peer = connection.peer,
            .connection = number,
            .window = connection.window,
            .job = std::move((*request)->job),
            .map = std::move((*request)->map)};
    taken_from_ = number;
    return true;
  }
  return false;
}

// A connection ends with its thread, which may take a moment: without the lock.
void PrefillServer::ForgetEnded() noexcept {
  std::map<int64_t, Connection> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto place = connections_.begin(); place != connections_.end();) {
      const auto here = place++;
      if (here->second.peer->status().ok()) continue;
      static_cast<void>(channel_->Disconnect(here->first));  // it is there
      ended.insert(connections_.extract(here));
    }
  }
  for (auto& [number, connection] : ended) connection.peer->SetWake(nullptr);
}

int64_t PrefillServer::connection_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(connections_.size());
}

int64_t PrefillServer::sending_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [number, connection] : connections_)
    bytes += connection.window - connection.peer->send_room();
  return bytes;
}

void PrefillServer::TellLoad(const TransferLoad& load) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (load == told_) return;
  told_ = load;
  for (auto& [number, connection] : connections_) {
    // A connection that is over is found by Take.
    static_cast<void>(connection.peer->SetLoad(load));
  }
}

}  // namespace quire
