// What peers ask for, and in which order it is taken.
#include "engine/remote/prefill_server.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

// Those that wait for the first of many peers to have nothing more to ask would wait for ever.
TEST(PrefillServer, PeersHaveTheirTurns) {
  constexpr int64_t kPeers = 3;
  constexpr int64_t kJobs = 4;
  const std::shared_ptr<Clock> clock = MachineTime();
  const int64_t until_ns = clock->SteadyNs() + 60 * kTestSecondNs;
  std::mutex mutex;
  std::condition_variable changed;
  const TransferPeerOptions patient{.passport = TestPassport(),
                                    .connect_timeout = std::chrono::minutes(1),
                                    .dead_after = std::chrono::minutes(1)};
  const auto server = PrefillServer::Start({.peer = patient}, [&] {
                        const std::lock_guard lock(mutex);
                        changed.notify_all();
                      }).value();
  std::vector<std::unique_ptr<TestReceiver>> receivers;
  std::vector<std::shared_ptr<TransferPeer>> peers;
  for (int64_t i = 0; i < kPeers; ++i) {
    peers.push_back(TransferPeer::Connect(server->endpoint(), patient).value());
    receivers.push_back(std::make_unique<TestReceiver>());
    ASSERT_TRUE(peers.back()->SetReceiver(receivers.back().get()).ok());
    for (uint64_t job = 1; job <= kJobs; ++job) {
      const Status asked =
          peers.back()->Request({.id = job, .tokens = {1, 2}}, receivers.back()->Reserve(1));
      ASSERT_EQ(asked.ToString(), "Ok");
    }
  }
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(WaitUntil(*clock, changed, lock, until_ns,
                          [&] { return server->open_count() == kPeers * kJobs; }));
  }
  for (int64_t turn = 0; turn < kJobs; ++turn) {
    std::vector<bool> was_taken(kPeers, false);
    for (int64_t i = 0; i < kPeers; ++i) {
      PrefillJob job;
      ASSERT_TRUE(server->Take(&job).value());
      EXPECT_EQ(job.job.id, static_cast<uint64_t>(turn + 1));
      EXPECT_FALSE(was_taken.at(static_cast<size_t>(job.connection))) << "out of turn";
      was_taken[static_cast<size_t>(job.connection)] = true;
    }
  }
  PrefillJob none;
  EXPECT_FALSE(server->Take(&none).value());
  for (const auto& peer : peers) EXPECT_TRUE(peer->SetReceiver(nullptr).ok());
}

// An engine that makes no step asks for nothing: those that come and go meanwhile hold no memory.
TEST(PrefillServer, ConnectionsThatCameAndWentAreForgottenByTheNextOne) {
  const TransferPeerOptions patient{.passport = TestPassport(),
                                    .connect_timeout = std::chrono::minutes(1),
                                    .dead_after = std::chrono::minutes(1)};
  const std::shared_ptr<Clock> clock = MachineTime();
  const int64_t until_ns = clock->SteadyNs() + 60 * kTestSecondNs;
  const auto server = PrefillServer::Start({.peer = patient}, [] {}).value();
  for (int64_t came = 0; came < 12 || server->connection_count() > 2; ++came) {
    ASSERT_LT(clock->SteadyNs(), until_ns) << server->connection_count() << " are remembered";
    const auto peer = TransferPeer::Connect(server->endpoint(), patient);
    ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  }
}

}  // namespace
}  // namespace quire
