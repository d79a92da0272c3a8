// Which peer is asked for a prompt, and what is predicted.
#include "engine/remote/remote_peers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace quire {
namespace {

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

}  // namespace
}  // namespace quire
