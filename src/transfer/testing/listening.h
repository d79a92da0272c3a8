// A listener for tests on a port of its own, with the refusals that it tells.
#ifndef QUIRE_TRANSFER_TESTING_LISTENING_H_
#define QUIRE_TRANSFER_TESTING_LISTENING_H_

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "net/socket.h"
#include "quire/transfer_peer.h"
#include "transfer/testing/test_session.h"

namespace quire {

class Listening {
 public:
  explicit Listening(const TransferPeerOptions& options, std::string endpoint = "127.0.0.1:0",
                     int64_t peers_max = 64) {
    TransferListenerOptions all{
        .endpoint = std::move(endpoint), .peer = options, .peers_max = peers_max};
    all.on_refused = [this](const Status& why) {
      const std::lock_guard lock(mutex_);
      refusals_.push_back(why);
      changed_.notify_all();
    };
    listener = TransferListener::Start(all).value();
  }
  Result<std::shared_ptr<TransferPeer>> Connect(const TransferPeerOptions& options) const {
    return TransferPeer::Connect(listener->endpoint(), options);
  }
  std::shared_ptr<TransferPeer> Accept() const {
    return listener->Accept(*clock, clock->SteadyNs() + kMinuteNs).value().value_or(nullptr);
  }
  // The oldest refusal that was not returned.
  Status Refusal() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !refusals_.empty(); });
    const Status refusal = refusals_.front();
    refusals_.pop_front();
    return refusal;
  }
  // A socket to its port that nothing was said on.
  Socket Stranger() const {
    Socket socket = Socket::Connect(Endpoint::Parse(listener->endpoint()).value()).value();
    PollEntry entry{.fd = socket.fd(), .wants_write = true};
    PollSockets(std::span(&entry, 1), kMinuteNs);
    EXPECT_TRUE(socket.ConnectError().ok());
    return socket;
  }

  const std::shared_ptr<Clock> clock = MachineTime();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Status> refusals_;

 public:
  std::unique_ptr<TransferListener> listener;  // its thread uses what stands before
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_LISTENING_H_
