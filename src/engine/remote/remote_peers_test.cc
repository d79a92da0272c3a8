// Which peer is asked for a prompt, what is predicted, and how peers are connected to.
#include "engine/remote/remote_peers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "net/socket.h"

namespace quire {
namespace {

constexpr int64_t kMinuteNs = int64_t{60} * 1'000'000'000;  // for what must come

TEST(RemotePeers, AKeyHasAnOrderOfItsOwnThatOtherPeersDoNotChange) {
  const std::vector<std::string> four = {"a:1", "b:1", "c:1", "d:1"};
  const std::vector<std::string> three = {"a:1", "b:1", "d:1"};
  std::vector<int> first(4);
  for (uint64_t key = 0; key < 400; ++key) {
    const std::vector<size_t> order = PeerOrder(key, four);
    ASSERT_EQ(order, PeerOrder(key, four));
    ++first[order.front()];
    std::vector<std::string> without;
    for (const size_t place : order)
      if (four[place] != "c:1") without.push_back(four[place]);
    std::vector<std::string> fewer;
    for (const size_t place : PeerOrder(key, three)) fewer.push_back(three[place]);
    EXPECT_EQ(without, fewer) << key;
  }
  for (const int count : first) EXPECT_GT(count, 60) << "keys are spread over the peers";
}

TEST(RemotePeers, ThePredictionIsTheQueueAndTheSlowerOfComputingAndMoving) {
  const PromptAsk ask{
      .tokens = 100, .bytes = 1000, .here_seconds = 3, .here_seconds_per_token = 0.02};
  PrefillPeerInfo peer;
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).here_seconds, 3);
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).remote_seconds, 2) << "as fast as here";
  peer.seconds_per_token = 0.01;
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).remote_seconds, 1);
  peer.queued_tokens = 50;
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).remote_seconds, 1.5);
  peer.bytes_per_second = 10000;
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).remote_seconds, 1.5) << "hidden behind computing";
  peer.bytes_per_second = 100;
  EXPECT_DOUBLE_EQ(PredictPrefill(ask, peer).remote_seconds, 10.5);
  EXPECT_DOUBLE_EQ(PredictPrefill({.tokens = 100}, peer).remote_seconds, 0) << "nothing is known";
}

// Sockets to which anybody connects and that say nothing. When each has one connection, and these
// are there at the same time, all go.
class SilentPeers {
 public:
  explicit SilentPeers(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
      listeners_.push_back(Socket::Listen(&endpoint).value());
      addresses.push_back(endpoint.ToString());
    }
    thread_ = std::thread([this] { Run(); });
  }
  ~SilentPeers() { Join(); }
  // Waits for nobody any more. Whether all connections were there together.
  bool Join() {
    nobody_comes_ = true;
    if (thread_.joinable()) thread_.join();
    return together_;
  }

  std::vector<std::string> addresses;

 private:
  void Run() {
    std::vector<Socket> held;
    for (const Socket& listener : listeners_) {
      PollEntry entry{.fd = listener.fd(), .wants_read = true};
      while (!entry.can_read && !nobody_comes_) PollSockets(std::span(&entry, 1), kMinuteNs / 600);
      held.push_back(listener.Accept().value());
    }
    together_ = std::ranges::all_of(held, [](const Socket& socket) {
      std::byte said[1000];
      return socket.is_open() && socket.Read(std::span(said)).ok() &&
             socket.Read(std::span(said)).ok();
    });
  }

  std::vector<Socket> listeners_;
  std::atomic<bool> nobody_comes_ = false;
  bool together_ = false;
  std::thread thread_;
};

// Peers that do not answer are waited for together, not one after the other.
TEST(RemotePeers, AllAreConnectedToAtTheSameTime) {
  SilentPeers silent(4);
  PrefillPeerOptions options{.addresses = silent.addresses};
  options.peer.connect_timeout = std::chrono::nanoseconds(kMinuteNs / 4);
  PassportLayer layer;
  layer.kv_heads = layer.head_dim = layer.v_head_dim = 1;
  Passport passport;
  passport.model = "test";
  passport.layers = {layer};
  const auto peers = RemotePeers::Create(options, passport, nullptr, MachineTime());
  EXPECT_TRUE(silent.Join());
  ASSERT_TRUE(peers.ok()) << peers.status().ToString();
  for (const PrefillPeerInfo& info : (*peers)->Infos()) {
    EXPECT_FALSE(info.connected);
    EXPECT_NE(info.error, "") << info.address;
  }
}

}  // namespace
}  // namespace quire
