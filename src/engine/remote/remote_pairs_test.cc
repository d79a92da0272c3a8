// Several peers at once, tenants that share one, connections with little room, and prompts with a
// window that are preempted at the peer: answers have the bits of an engine alone, and what a peer
// keeps of one tenant helps no other.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/fake_clock.h"
#include "engine/engine_caches.h"
#include "engine/testing/remote_pair.h"

namespace quire {
namespace {

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
SamplingOptions Greedy(int64_t max_tokens, const std::string& salt = "") {
  SamplingOptions options{.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true};
  options.cache_salt = salt;
  return options;
}
Answer Alone(const Tokens& prompt, const SamplingOptions& options) {
  return Server({.prefix_cache = false}).Generate(prompt, options);
}

class RemotePairs : public testing::Test {
 protected:
  std::string Endpoint() {
    return "unix:" + folder_.File("socket" + std::to_string(next_socket_++));
  }
  // Steps of all, in turns, until the first one has nothing to do.
  static void Finish(Server* server, const std::vector<Server*>& peers) {
    for (int64_t turn = 0; !server->engine->Idle(); ++turn) {
      ASSERT_LT(turn, 200'000) << "no progress";
      ASSERT_TRUE(server->Step().ok());
      for (Server* const peer : peers) {
        if (peer->engine->Idle()) continue;
        ASSERT_TRUE(peer->Step().ok());
      }
    }
  }
  // They learn that nothing more is wanted.
  static void Settle(Server* peer) {
    while (peer->engine->Stats().served_waiting > 0) {
      if (peer->engine->Idle()) continue;
      ASSERT_TRUE(peer->Step().ok());
    }
    ExpectAllPagesBack(*peer);
  }

  TestFolder folder_;
  int next_socket_ = 0;
};

TEST_F(RemotePairs, SeveralPeersComputeAtOnce) {
  Server first({.page_size = 8}), second({.page_size = 5, .chunk = 9}), third({.chunk = 17});
  const std::vector<Server*> peers = {&first, &second, &third};
  PrefillPeerOptions use{.when = RemotePrefill::kAlways};
  for (Server* const peer : peers) use.addresses.push_back(Serve(peer, Endpoint()));
  Server server({.page_size = 4, .sequences = 16});
  Attach(&server, use);
  std::map<int64_t, Tokens> asked;
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    const Tokens prompt = Text(40 + static_cast<int64_t>(seed), seed);
    asked[server.Submit(prompt, Greedy(6))] = prompt;
  }
  Finish(&server, peers);
  for (const auto& [id, prompt] : asked)
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(6)), "request " + std::to_string(id));
  EXPECT_EQ(server.engine->Stats().remote_losses, 0);
  int64_t tokens = 0;
  for (const PrefillPeerInfo& info : server.engine->PrefillPeers()) {
    EXPECT_GT(info.prompts, 0) << info.address << ": 16 prompts are spread over 3 peers";
    tokens += info.tokens;
  }
  EXPECT_EQ(tokens, server.engine->Stats().remote_tokens);
  for (Server* const peer : peers) Settle(peer);
  ExpectAllPagesBack(server);
}

// Whatever is predicted, and without another one where it is not there.
TEST_F(RemotePairs, ARequestNamesThePeerThatHasItsPrompt) {
  Server first({.page_size = 8}), second({.page_size = 5, .chunk = 9});
  PrefillPeerOptions use{.when = RemotePrefill::kAuto};
  use.addresses = {Serve(&first, Endpoint()), Serve(&second, Endpoint())};
  Server server({.page_size = 4});
  SamplingOptions options = Greedy(6);
  options.prefill_peer = use.addresses[1];
  const Tokens prompt = Text(40, 1);
  const Result<int64_t> early = server.engine->Submit(prompt, options);
  EXPECT_EQ(early.status().code(), StatusCode::kBadArgument) << "no peer is attached";
  Attach(&server, use);

  options.prefill_peer += "0";
  const Status unknown = server.engine->CheckSubmit(prompt, options);
  EXPECT_EQ(unknown.code(), StatusCode::kBadArgument);
  EXPECT_NE(unknown.message().find("'" + options.prefill_peer + "'"), std::string::npos);

  for (const size_t index : {1, 0}) {
    options.prefill_peer = use.addresses[index];
    const Tokens text = Text(40, index + 1);
    const int64_t id = server.Submit(text, options);
    Finish(&server, {&first, &second});
    ExpectEqual(server.answers[{id, 0}], Alone(text, Greedy(6)), options.prefill_peer);
    EXPECT_EQ(server.engine->PrefillPeers()[index].tokens, 39);
  }

  first.engine->EndPrefill(true);
  const int64_t id = server.Submit(Text(40, 3), options);
  Finish(&server, {&second});
  ExpectEqual(server.answers[{id, 0}], Alone(Text(40, 3), Greedy(6)), "its peer is gone");
  EXPECT_EQ(server.engine->PrefillPeers()[1].tokens, 39) << "nobody else is asked";
  Settle(&second);
}

TEST_F(RemotePairs, ARequestThatNamesAPeerIsComputedHereWhereNoneIsToBeAsked) {
  Server peer({.page_size = 8});
  const PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())},
                               .when = RemotePrefill::kOff};
  Server server({.page_size = 4});
  Attach(&server, use);
  SamplingOptions options = Greedy(6);
  options.prefill_peer = use.addresses[0];
  const int64_t id = server.Submit(Text(40, 1), options);
  Finish(&server, {&peer});
  ExpectEqual(server.answers[{id, 0}], Alone(Text(40, 1), Greedy(6)), "off");
  EXPECT_EQ(server.engine->Stats().remote_tokens, 0);
}

// One that is lost does not take the prompts of the others with it.
TEST_F(RemotePairs, OneOfSeveralPeersIsLost) {
  Server first({.page_size = 8}), second({.page_size = 5, .chunk = 9});
  PrefillPeerOptions use{.when = RemotePrefill::kAlways};
  use.addresses = {Serve(&first, Endpoint()), Serve(&second, Endpoint())};
  Server server({.page_size = 4, .sequences = 16});
  Attach(&server, use);
  std::map<int64_t, Tokens> asked;
  for (uint64_t seed = 1; seed <= 12; ++seed)
    asked[server.Submit(Text(50, seed), Greedy(6))] = Text(50, seed);
  ASSERT_TRUE(server.Step().ok());
  ASSERT_EQ(server.engine->Stats().remote_waiting, 12);
  first.engine->EndPrefill(true);
  Finish(&server, {&second});
  for (const auto& [id, prompt] : asked)
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(6)), "request " + std::to_string(id));
  const std::vector<PrefillPeerInfo> infos = server.engine->PrefillPeers();
  EXPECT_GT(infos[0].losses, 0);
  EXPECT_GT(infos[1].prompts, 0);
  EXPECT_EQ(infos[1].losses, 0);
  EXPECT_EQ(infos[0].losses + infos[1].prompts, 12);
  Settle(&second);
}

// The same prompt of two tenants, asked for by two engines: what the peer has of the one is found
// by it alone.
TEST_F(RemotePairs, ATenantFindsNothingOfAnother) {
  Server peer({.page_size = 8});
  const PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())},
                               .when = RemotePrefill::kAlways};
  const Tokens prompt = Text(60, 1);
  const auto computed_for = [&](const std::string& salt) {
    const int64_t before = peer.engine->Stats().computed_tokens;
    Server server({.page_size = 4});
    Attach(&server, use);
    const int64_t id = server.Submit(prompt, Greedy(5, salt));
    Finish(&server, {&peer});
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(5)), salt);
    EXPECT_EQ(server.engine->Stats().remote_tokens, 59);
    Settle(&peer);
    return peer.engine->Stats().computed_tokens - before;
  };
  EXPECT_EQ(computed_for("ann"), 59);
  EXPECT_EQ(computed_for("bob"), 59) << "another tenant";
  EXPECT_EQ(computed_for(""), 59) << "no tenant";
  EXPECT_LT(computed_for("ann"), 59);
  EXPECT_LT(computed_for("bob"), 59);
}

// Prompts of all tenants were one group at a peer: a tenant's many held up those of another.
TEST_F(RemotePairs, TenantsTakeTurnsAtAPeer) {
  Server peer({.page_size = 8, .chunk = 64, .sequences = 1});
  std::atomic<int64_t> rings = 0;
  peer.engine->SetWake([&] { ++rings; });
  const PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())},
                               .when = RemotePrefill::kAlways};
  Server ann({.page_size = 4}), bob({.page_size = 4});
  Attach(&ann, use);
  Attach(&bob, use);
  // It is at work for itself until all have come.
  const int64_t own = peer.Submit(Text(8, 9), Greedy(1000));
  ASSERT_TRUE(peer.Step().ok());
  for (int32_t i = 1; i <= 5; ++i) {
    Server* const server = i < 5 ? &ann : &bob;
    Tokens prompt = Text(40, static_cast<uint64_t>(i));
    prompt.front() = i;
    server->Submit(prompt, Greedy(2, i < 5 ? "ann" : "bob"));
    ASSERT_TRUE(server->Step().ok());
    while (peer.engine->Stats().served_waiting < i) {
      const int64_t before = rings;
      ASSERT_TRUE(peer.Step().ok());
      while (peer.engine->Stats().served_waiting < i && rings == before) std::this_thread::yield();
    }
  }
  ASSERT_TRUE(peer.engine->Cancel(own).ok());
  std::string order;
  peer.model->fault = [&](std::span<const int32_t> tokens) {
    order += std::to_string(tokens.front());
    return Status();
  };
  Finish(&ann, {&peer, &bob});
  Finish(&bob, {&peer});
  EXPECT_EQ(order, "15234");
  Settle(&peer);
  peer.engine->SetWake(nullptr);
}

// ---- A router asks two servers

SamplingOptions Held() {
  SamplingOptions options = Greedy(1);
  options.held_for_peer = true;
  return options;
}

class HeldPrompts : public RemotePairs {
 protected:
  // A server with few pages that has computed the prompt, which is held.
  std::unique_ptr<Server> Computed(const std::shared_ptr<Clock>& clock = nullptr) {
    auto peer = std::make_unique<Server>(
        Sizes{.pages = 40, .page_size = 4, .clock = clock, .recurrent = recurrent_});
    address_ = Serve(peer.get(), Endpoint());
    peer->Generate(prompt_, Held());
    EXPECT_EQ(peer->engine->Stats().held_prompts, 1);
    EXPECT_EQ(peer->engine->Stats().held_pages, 15);
    return peer;
  }
  // Tokens that the peer computes when another engine asks for the prompt.
  int64_t ComputedAgain(Server* peer) {
    const int64_t before = peer->engine->Stats().computed_tokens;
    Server server({.page_size = 8, .recurrent = recurrent_});
    Attach(&server, {.addresses = {address_}, .when = RemotePrefill::kAlways});
    const int64_t id = server.Submit(prompt_, Greedy(6));
    Finish(&server, {peer});
    ExpectEqual(server.answers[{id, 0}], AloneAsThese(prompt_, Greedy(6)), "of the second server");
    Settle(peer);
    return peer->engine->Stats().computed_tokens - before;
  }

  Answer AloneAsThese(const Tokens& prompt, const SamplingOptions& options) const {
    Server server({.prefix_cache = false, .recurrent = recurrent_});
    return server.Generate(prompt, options);
  }

  const Tokens prompt_ = Text(60, 1);
  bool recurrent_ = false;
  std::string address_;
};

TEST_F(HeldPrompts, OthersDoNotPushAPromptOutBeforeThePeerHasIt) {
  for (const bool recurrent : {false, true}) {
    SCOPED_TRACE(recurrent);
    recurrent_ = recurrent;
    const std::unique_ptr<Server> peer = Computed();
    for (uint64_t seed = 2; seed < 8; ++seed) {
      const Tokens other = Text(60, seed);
      ExpectEqual(peer->Generate(other, Greedy(4)), AloneAsThese(other, Greedy(4)), "beside it");
    }
    EXPECT_EQ(ComputedAgain(peer.get()), 1) << "the token before the last one";
    const EngineStats stats = peer->engine->Stats();
    EXPECT_EQ(stats.held_prompts, 0);
    EXPECT_EQ(stats.held_pages, 0);
    EXPECT_EQ(stats.held_used, 1);
    EXPECT_EQ(stats.held_overdue + stats.held_given_up, 0);
  }
}

// A router that asks both servers at once: the peer may have the prompt before its lease begins.
TEST_F(HeldPrompts, APromptThatThePeerHasIsNotHeldForIt) {
  for (const bool recurrent : {false, true}) {
    SCOPED_TRACE(recurrent);
    recurrent_ = recurrent;
    const auto clock = std::make_shared<FakeClock>();
    Server peer({.pages = 40, .page_size = 4, .clock = clock, .recurrent = recurrent});
    address_ = Serve(&peer, Endpoint());
    EXPECT_EQ(ComputedAgain(&peer), 59);
    ExpectEqual(peer.Generate(prompt_, Held()), AloneAsThese(prompt_, Held()), "of the first one");
    EXPECT_EQ(peer.engine->Stats().computed_tokens, 60) << "what the peer got was made once";
    EXPECT_EQ(peer.engine->Stats().held_prompts, 0);
    EXPECT_EQ(peer.engine->Stats().held_used, 1);
    if (recurrent) continue;  // it goes on from the job's end, and none goes on from before that
    peer.Generate(prompt_, Held());
    EXPECT_EQ(peer.engine->Stats().held_prompts, 1) << "for one that will ask";
    EXPECT_EQ(ComputedAgain(&peer), 1);
    EXPECT_EQ(peer.engine->Stats().held_prompts, 0);
    EXPECT_EQ(peer.engine->Stats().held_used, 2);
    // What was asked for long ago was for another answer.
    ComputedAgain(&peer);
    clock->Advance(30'000 * kNsPerMs);
    peer.Generate(prompt_, Held());
    EXPECT_EQ(peer.engine->Stats().held_prompts, 1);
    EXPECT_EQ(peer.engine->Stats().held_used, 2);
    EXPECT_EQ(peer.engine->Stats().held_overdue, 0);
  }
}

// What goes on from an answer is kept to its end, which no job goes on from; and a prompt of two
// tokens has nothing before its last two.
TEST_F(HeldPrompts, WhatCannotBeGoneOnFromIsNotHeld) {
  Server peer({.pages = 60, .page_size = 4, .recurrent = true});
  Serve(&peer, Endpoint());
  SamplingOptions longer = Greedy(90);
  longer.held_for_peer = true;
  peer.Generate(prompt_, longer);
  peer.Generate(Text(2, 3), Held());
  EXPECT_EQ(peer.engine->Stats().held_prompts, 0);
  EXPECT_EQ(peer.engine->Stats().retained_sequences, 2);
}

TEST_F(HeldPrompts, ARequestThatNeedsThePagesHasThem) {
  const std::unique_ptr<Server> peer = Computed();
  const Tokens large = Text(100, 2);
  ExpectEqual(peer->Generate(large, Greedy(30)), Alone(large, Greedy(30)), "in its place");
  EXPECT_EQ(peer->engine->Stats().preemptions, 0);
  EXPECT_EQ(peer->engine->Stats().held_given_up, 1);
  EXPECT_EQ(peer->engine->Stats().held_prompts, 0);
  EXPECT_GT(ComputedAgain(peer.get()), 1);
  EXPECT_EQ(peer->engine->Stats().held_used, 0);
}

TEST_F(HeldPrompts, ALeaseEndsInTimeAndWithServing) {
  const auto clock = std::make_shared<FakeClock>();
  const std::unique_ptr<Server> peer = Computed(clock);
  clock->Advance(29'999 * kNsPerMs);
  ASSERT_TRUE(peer->Step().ok());
  EXPECT_EQ(peer->engine->Stats().held_prompts, 1);
  clock->Advance(kNsPerMs);
  ASSERT_TRUE(peer->Step().ok());
  EXPECT_EQ(peer->engine->Stats().held_prompts, 0);
  EXPECT_EQ(peer->engine->Stats().held_overdue, 1);

  peer->Generate(prompt_, Held());
  peer->engine->EndPrefill(false);
  ASSERT_TRUE(peer->Step().ok());
  EXPECT_EQ(peer->engine->Stats().held_prompts, 0);
  EXPECT_EQ(peer->engine->Stats().held_given_up, 1);
  peer->Generate(prompt_, Held());
  EXPECT_EQ(peer->engine->Stats().held_prompts, 0) << "nobody can ask any more";
}

TEST_F(HeldPrompts, NothingIsHeldWhereNobodyAsks) {
  Server server;
  server.Generate(prompt_, Held());
  EXPECT_EQ(server.engine->Stats().held_prompts, 0);
}

// Whichever of the two begins, the other one goes on from what it has computed.
TEST_F(RemotePairs, APromptThatBothServersAreAskedForIsComputedOnce) {
  for (const auto& [job_is_first, recurrent] :
       {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
    SCOPED_TRACE(testing::Message() << job_is_first << recurrent);
    Server peer({.page_size = 8, .chunk = 12, .recurrent = recurrent});
    const PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())},
                                 .when = RemotePrefill::kAlways};
    Server server({.page_size = 4, .recurrent = recurrent});
    Attach(&server, use);
    const Tokens prompt = Text(60, 1);
    const int64_t asked = server.Submit(prompt, Greedy(6));
    ASSERT_TRUE(server.Step().ok());
    while (peer.engine->Idle()) std::this_thread::yield();  // the job is on its way
    if (job_is_first) {
      ASSERT_TRUE(peer.Step().ok());
    }
    const int64_t here = peer.Submit(prompt, Held());
    ASSERT_TRUE(peer.Step().ok());
    EXPECT_EQ(peer.engine->Stats().served_waiting, 1) << "both are there";
    EXPECT_EQ(peer.engine->Stats().waiting, 1) << "one of them waits for the other one";
    Finish(&server, {&peer});
    while (!peer.engine->Idle()) ASSERT_TRUE(peer.Step().ok());
    Server alone({.prefix_cache = false, .recurrent = recurrent});
    ExpectEqual(server.answers[{asked, 0}], alone.Generate(prompt, Greedy(6)), "of the second");
    ExpectEqual(peer.answers[{here, 0}], alone.Generate(prompt, Held()), "of the first server");
    EXPECT_EQ(peer.engine->Stats().computed_tokens, job_is_first ? 60 : 61);
    EXPECT_EQ(server.engine->Stats().remote_tokens, 59);
    EXPECT_EQ(peer.engine->Stats().held_prompts, 0);
    EXPECT_EQ(peer.engine->Stats().held_used, 1);
    Settle(&peer);
  }
}

// The receiver takes few bytes at a time: the peer computes when there is room, and nothing is
// lost.
TEST_F(RemotePairs, SmallWindowsSlowAPromptDownAndLoseNothing) {
  constexpr int64_t kRowBytes = 2 * FakeModel::kDim * int64_t{sizeof(float)};  // of a layer
  for (const int64_t rows : {1, 2, 5, 12, 100}) {
    SCOPED_TRACE(rows);
    Server peer({.page_size = 8, .chunk = 12});
    PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())}, .when = RemotePrefill::kAlways};
    use.peer.window_bytes = rows * kRowBytes;
    Server server({.page_size = 4});
    Attach(&server, use);
    std::map<int64_t, Tokens> asked;
    for (uint64_t seed = 1; seed <= 4; ++seed)
      asked[server.Submit(Text(70, seed), Greedy(6))] = Text(70, seed);
    Finish(&server, {&peer});
    for (const auto& [id, prompt] : asked)
      ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(6)), std::to_string(id));
    const EngineStats stats = server.engine->Stats();
    // A forward waits for room, and gives a prompt up when the other side makes none.
    EXPECT_GT(stats.remote_tokens, 0);
    Settle(&peer);
    ExpectAllPagesBack(server);
  }
}

// A receiver that asks for a prompt and takes nothing of it: others hold its staging memory.
class SlowReader {
 public:
  static constexpr int64_t kRowBytes = 2 * FakeModel::kDim * int64_t{sizeof(float)};  // of a layer
  static constexpr int64_t kWindowBytes = 256 * kRowBytes;

  SlowReader(const std::string& address, const Tokens& prompt, bool recurrent = false)
      : caches_(MakeCaches(&model_, recurrent)) {
    KVTransfer& transfer = *caches_.state().transfer();
    EXPECT_TRUE(transfer.SetStagingLimit(kWindowBytes).ok());
    TransferPeerOptions options = Patient({});
    options.lease = std::chrono::hours(1);
    options.window_bytes = kWindowBytes;
    options.passport = CachePassport(caches_.states(), PairIdentity(), false).value();
    EXPECT_TRUE(caches_.state().AddSequence(0, false).ok());
    const ReceiveMap map = transfer.DisaggPrepareRecv(0, std::ssize(prompt)).value();
    held_ = transfer.View(map.epoch, 0, {.count = 256, .head_count = 1}).value();
    EXPECT_EQ(transfer.staging().held, kWindowBytes);
    peer_ = TransferPeer::Connect(address, options).value();
    EXPECT_TRUE(peer_->SetReceiver(&transfer).ok());
    EXPECT_TRUE(peer_->Request({.id = 1, .tokens = prompt}, map).ok());
  }

 private:
  static EngineCaches MakeCaches(FakeModel* model, bool recurrent) {
    if (!recurrent) return EngineCaches(MakeCache(*model, Sizes(), 2000), nullptr);
    model->AddRecurrentLayers();
    return EngineCaches(MakeCache(*model, Sizes(), 2000), MakeStates(*model, Sizes()));
  }

  FakeModel model_;
  const EngineCaches caches_;
  ReceiveView held_;
  std::shared_ptr<TransferPeer> peer_;  // ends before the caches
};

// Each of them has a window of as much as the sender may hold for all: what is computed for them
// waits, and the prompt of one that reads goes on.
TEST_F(RemotePairs, PeersThatReadSlowlyHoldNoMoreThanTheSendingMemory) {
  constexpr int64_t kSending = SlowReader::kWindowBytes;
  constexpr int64_t kChunk = 8;
  constexpr int64_t kForward = kChunk * FakeModel::kLayers * SlowReader::kRowBytes;
  Server peer({.page_size = 8, .chunk = kChunk, .sending_bytes = kSending});
  const std::string address = Serve(&peer, Endpoint(), {.lease = std::chrono::hours(1)});
  std::vector<std::unique_ptr<SlowReader>> readers;
  for (uint64_t seed = 1; seed <= 3; ++seed)
    readers.push_back(std::make_unique<SlowReader>(address, Text(400, seed)));
  const auto step = [&] {
    ASSERT_TRUE(peer.Step().ok());
    EXPECT_LE(peer.engine->Stats().sending_bytes, kSending);
  };
  // Each has all but what a forward more would take.
  while (peer.engine->Stats().sending_bytes <= 3 * (kSending / 4 - kForward))
    ASSERT_NO_FATAL_FAILURE(step());
  EXPECT_EQ(peer.engine->Stats().served_waiting, 3);

  Server server({.page_size = 4});
  Attach(&server, {.addresses = {address}, .when = RemotePrefill::kAlways});
  const int64_t id = server.Submit(Text(60, 9), Greedy(6));
  for (int64_t turn = 0; !server.engine->Idle(); ++turn) {
    ASSERT_LT(turn, 200'000) << "no progress";
    ASSERT_TRUE(server.Step().ok());
    ASSERT_NO_FATAL_FAILURE(step());
  }
  ExpectEqual(server.answers[{id, 0}], Alone(Text(60, 9), Greedy(6)), "beside slow readers");
  EXPECT_EQ(server.engine->Stats().remote_tokens, 59);
  readers.clear();
  Settle(&peer);
  ASSERT_TRUE(peer.Step().ok());
  EXPECT_EQ(peer.engine->Stats().sending_bytes, 0);
}

// A forward that had room for its rows alone would wait for that of its states, and lose the
// prompt.
TEST_F(RemotePairs, StatesHaveTheirRoomInTheSendingMemory) {
  constexpr int64_t kChunk = 8;
  const auto peer_sizes = [](int64_t bytes) {
    return Sizes{.page_size = 8, .chunk = kChunk, .recurrent = true, .sending_bytes = bytes};
  };
  FakeModel model;
  model.AddRecurrentLayers();
  const int64_t states = StateSizesOf(model.info().recurrent_layers).all;
  const int64_t rows = kChunk * FakeModel::kLayers * SlowReader::kRowBytes;
  ASSERT_GT(states, 0);
  // A quarter takes three forwards, and the rows of a fourth one.
  const int64_t sending = 4 * (3 * (rows + states) + rows + states / 2);
  Server peer(peer_sizes(sending));
  const std::string address = Serve(&peer, Endpoint(), {.lease = std::chrono::hours(1)});
  std::vector<std::unique_ptr<SlowReader>> readers;
  for (uint64_t seed = 1; seed <= 6; ++seed)
    readers.push_back(std::make_unique<SlowReader>(address, Text(400, seed), true));
  const int64_t forwards = sending / (rows + states);
  const auto step = [&] {
    ASSERT_TRUE(peer.Step().ok());
    ASSERT_LE(peer.engine->Stats().sending_bytes, sending);
    ASSERT_EQ(peer.engine->Stats().served_losses, 0);
  };
  while (peer.engine->Stats().served_waiting < 6) ASSERT_NO_FATAL_FAILURE(step());
  for (int64_t turn = 0; turn < 6 * forwards; ++turn) ASSERT_NO_FATAL_FAILURE(step());
  EXPECT_EQ(peer.engine->Stats().served_waiting, 6);
  EXPECT_EQ(peer.engine->Stats().sending_bytes, forwards * (rows + states));
  readers.clear();
  Settle(&peer);
}

TEST_F(RemotePairs, SendingMemoryThatTakesNoTokensIsRefusedByName) {
  Server server({.sending_bytes = 255});
  const Result<std::string> refused =
      server.engine->ServePrefill(PairIdentity(), {.endpoint = Endpoint()});
  EXPECT_EQ(refused.status().code(), StatusCode::kBadArgument);
  EXPECT_NE(refused.status().message().find("sending_bytes is 255"), std::string::npos);
}

// Rows that slid out of the window and were sent are not sent again; the rest is.
TEST_F(RemotePairs, APromptWithAWindowGoesOnAfterItWasPreemptedThere) {
  for (const int64_t window : {int64_t{0}, int64_t{16}}) {
    SCOPED_TRACE(window);
    // Its own answer needs the pages of the prompt that came later.
    Server peer({.pages = 22, .page_size = 4, .chunk = 2});
    const PrefillPeerOptions use{.addresses = {Serve(&peer, Endpoint())},
                                 .when = RemotePrefill::kAlways};
    Server server({.page_size = 4});
    Attach(&server, use);
    const Tokens own = Text(8, 7), prompt = Text(64, 1);
    const int64_t kept = peer.Submit(own, Greedy(70));
    ASSERT_TRUE(peer.Step().ok());
    SamplingOptions options = Greedy(6);
    options.window = window;
    options.sinks = window > 0 ? 2 : 0;
    const int64_t id = server.Submit(prompt, options);
    Finish(&server, {&peer});
    while (!peer.engine->Idle()) ASSERT_TRUE(peer.Step().ok());
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, options), "remote");
    ExpectEqual(peer.answers[{kept, 0}], Alone(own, Greedy(70)), "its own");
    EXPECT_EQ(server.engine->Stats().remote_tokens, 63);
    EXPECT_EQ(server.engine->Stats().remote_losses, 0);
    EXPECT_GT(peer.engine->Stats().preemptions, 0);
    Settle(&peer);
  }
}

}  // namespace
}  // namespace quire
