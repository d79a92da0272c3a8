// A peer that is lost, late, silent or refuses, at each of its stages, and when a peer is asked at
// all: answers have the bits of an engine alone, and all pages come back.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/refuse_each.h"
#include "engine/testing/remote_pair.h"
#include "quire/engine_loop.h"

namespace quire {
namespace {

constexpr int64_t kMilli = 1'000'000;
using Stage = LostAt::Stage;

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
SamplingOptions Greedy(int64_t max_tokens) {
  return {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true};
}
Answer Alone(const Tokens& prompt, const SamplingOptions& options) {
  return Server({.prefix_cache = false}).Generate(prompt, options);
}

class RemoteLoss : public testing::Test {
 protected:
  std::string Endpoint() {
    return "unix:" + folder_.File("socket" + std::to_string(next_socket_++));
  }
  TestFolder folder_;
  int next_socket_ = 0;
};

constexpr int64_t kPrompt = 50;
const Sizes kHand = {.page_size = 5, .chunk = 12};
// Rows that have come with `calls` calls of the sink: two layers and a record for each forward.
int64_t RowsAfter(int64_t calls) { return std::min(kPrompt - 1, calls / 3 * kHand.chunk); }

// One prompt whose peer is lost as told.
struct Lost {
  Answer answer;
  StepOutput end;
  EngineStats stats;
  PrefillPeerInfo info;
  int64_t calls = 0;
};

Lost Ask(const std::string& endpoint, LostAt lost, OnPeerLoss on_loss) {
  HandServer hand(endpoint, kHand);
  Server server({.page_size = 4});
  Attach(&server,
         {.addresses = {hand.endpoint()}, .when = RemotePrefill::kAlways, .on_loss = on_loss});
  hand.Accept();
  const Tokens prompt = Text(kPrompt, 1);
  const int64_t id = server.Submit(prompt, Greedy(8));
  lost.await = [&](uint64_t epoch, int64_t rows) {
    const KVTransfer& transfer = *server.engine->caches().state().transfer();
    while (transfer.GetReceiveProgress(epoch).value().complete < rows) std::this_thread::yield();
  };
  hand.Run(lost);
  Lost result;
  for (int steps = 0; !server.engine->Idle() && steps < 100000; ++steps) {
    Result<std::vector<StepOutput>> outputs = server.engine->Step();
    server.engine->CheckInvariants();
    EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
    for (const StepOutput& output : *outputs) result.end = output;
    server.Take(*std::move(outputs));
  }
  EXPECT_TRUE(server.engine->Idle());
  hand.Join();
  result.answer = server.answers[{id, 0}];
  result.stats = server.engine->Stats();
  result.info = server.engine->PrefillPeers().front();
  result.calls = hand.calls();
  ExpectAllPagesBack(server);
  hand.peer()->Close();
  if (on_loss == OnPeerLoss::kFail) return result;  // the next one may be asked of it, and fail
  const Tokens other = Text(30, 2);                 // whatever has become of the peer
  ExpectEqual(server.Generate(other, Greedy(4)), Alone(other, Greedy(4)), "the next one");
  return result;
}

TEST_F(RemoteLoss, AtEveryCallOfTheSenderWhatHasARecordIsKept) {
  const Answer alone = Alone(Text(kPrompt, 1), Greedy(8));
  const int64_t calls = Ask(Endpoint(), {}, OnPeerLoss::kRecompute).calls;
  ASSERT_EQ(calls, (kPrompt - 1 + kHand.chunk - 1) / kHand.chunk * 3);
  for (int64_t call = 0; call <= calls; ++call) {
    SCOPED_TRACE(call);
    const Lost lost = Ask(Endpoint(), {.call = call}, OnPeerLoss::kRecompute);
    ExpectEqual(lost.answer, alone, "lost");
    const bool is_whole = call == calls;
    EXPECT_EQ(lost.end.remote_tokens, RowsAfter(call));
    // The rest of the prompt, and the answer's tokens but for the last.
    EXPECT_EQ(lost.stats.computed_tokens, kPrompt - RowsAfter(call) + 7);
    EXPECT_EQ(lost.stats.remote_losses, is_whole ? 0 : 1);
    EXPECT_EQ(lost.stats.remote_timeouts, 0);
    EXPECT_EQ(lost.stats.remote_tokens, lost.end.remote_tokens);
    EXPECT_EQ(lost.info.losses, is_whole ? 0 : 1);
    EXPECT_EQ(lost.info.prompts, is_whole ? 1 : 0);
    EXPECT_EQ(lost.end.remote_tokens == kPrompt - 1, is_whole);
  }
}

TEST_F(RemoteLoss, BeforeTheFirstRowOrByAWord) {
  const Answer alone = Alone(Text(kPrompt, 1), Greedy(8));
  for (const Stage stage : {Stage::kBeforeJob, Stage::kBeforeMark, Stage::kRefused}) {
    SCOPED_TRACE(static_cast<int>(stage));
    const Lost lost = Ask(Endpoint(), {.stage = stage}, OnPeerLoss::kRecompute);
    ExpectEqual(lost.answer, alone, "lost");
    EXPECT_EQ(lost.end.remote_tokens, 0);
    if (stage == Stage::kBeforeJob) continue;  // then it may not have been asked
    EXPECT_EQ(lost.stats.remote_losses, 1);
    EXPECT_FALSE(lost.info.error.empty());
    if (stage != Stage::kRefused) continue;
    EXPECT_NE(lost.info.error.find("no room at all"), std::string::npos) << lost.info.error;
    EXPECT_TRUE(lost.info.connected);
  }
}

TEST_F(RemoteLoss, FailEndsTheRequestAndNothingElse) {
  for (const LostAt& at : {LostAt{.stage = Stage::kBeforeMark}, LostAt{.stage = Stage::kRefused},
                           LostAt{.call = 1}, LostAt{.call = 4}}) {
    const Lost lost = Ask(Endpoint(), at, OnPeerLoss::kFail);
    EXPECT_EQ(lost.answer.reason, FinishReason::kError);
    EXPECT_NE(lost.answer.error.find("on_loss is fail"), std::string::npos) << lost.answer.error;
    EXPECT_TRUE(lost.answer.tokens.empty());
  }
}

// A step that asks a peer, with each of its allocations refused. A request that waits had a
// sequence afterwards, and the next step stopped the process. The peer is gone by then.
TEST_F(RemoteLoss, AnyAllocationOfTheStepThatAsksMayBeRefused) {
  const Tokens prompt = Text(kPrompt, 1);
  const Answer alone = Alone(prompt, Greedy(8));
  int64_t asked = 0;
  RefuseEach("Step", StatusCode::kOk, [&]() -> Status {
    std::unique_ptr<HandServer> hand;
    std::unique_ptr<Server> server;
    int64_t id = 0;
    {
      const AllocationsAllowed allowed;
      hand = std::make_unique<HandServer>(Endpoint(), kHand);
      server = std::make_unique<Server>(Sizes{.page_size = 4});
      Attach(server.get(), {.addresses = {hand->endpoint()}, .when = RemotePrefill::kAlways});
      hand->Accept();
      id = server->Submit(prompt, Greedy(8));
    }
    Result<std::vector<StepOutput>> outputs = server->engine->Step();
    const AllocationsAllowed allowed;
    server->engine->CheckInvariants();
    asked += server->engine->Stats().remote_waiting;
    hand->peer()->Close();
    if (outputs.ok()) server->Take(*std::move(outputs));
    server->Finish();
    const Answer& answer = server->answers[{id, 0}];
    if (answer.reason != FinishReason::kError) ExpectEqual(answer, alone, "computed here");
    ExpectAllPagesBack(*server);
    server = nullptr;  // here nothing is refused
    hand = nullptr;
    return AllocationRefused() ? Status::OutOfMemory() : outputs.status();
  });
  EXPECT_GT(asked, 0) << "no step came to what is refused";
}

// The engine's clock says when: the peer has the job and never answers.
TEST_F(RemoteLoss, ASilentPeerIsGivenUpWhenItsTimeIsOver) {
  for (const OnPeerLoss on_loss : {OnPeerLoss::kRecompute, OnPeerLoss::kFail}) {
    const auto clock = std::make_shared<FakeClock>();
    HandServer hand(Endpoint(), kHand);
    Server server({.page_size = 4, .clock = clock});
    Attach(&server, {.addresses = {hand.endpoint()},
                     .when = RemotePrefill::kAlways,
                     .on_loss = on_loss,
                     .timeout_ms = 60'000});
    hand.Accept();
    const Tokens prompt = Text(kPrompt, 1);
    const int64_t id = server.Submit(prompt, Greedy(8));
    hand.Run({.stage = Stage::kSilent});
    std::thread time([&] {
      hand.Join();             // it has the job: one that is cancelled before is given to nobody
      clock->AwaitWaiters(2);  // the thread that connects, and the step
      clock->Advance(59'999 * kMilli);
    });
    ASSERT_TRUE(server.Step().ok());
    time.join();
    EXPECT_EQ(server.engine->Stats().remote_waiting, 1) << "a millisecond is left";
    EXPECT_EQ(server.engine->Stats().remote_losses, 0);
    clock->Advance(kMilli);
    server.Finish();
    EXPECT_EQ(server.engine->Stats().remote_losses, 1);
    EXPECT_EQ(server.engine->Stats().remote_timeouts, 1);
    const Answer& answer = server.answers[{id, 0}];
    if (on_loss == OnPeerLoss::kRecompute) {
      ExpectEqual(answer, Alone(prompt, Greedy(8)), "computed here");
    } else {
      EXPECT_EQ(answer.reason, FinishReason::kError);
      EXPECT_NE(answer.error.find("PrefillPeerOptions::timeout_ms"), std::string::npos)
          << answer.error;
    }
    hand.Join();
    while (hand.peer()->stats().sends_open > 0) std::this_thread::yield();  // it is told
    EXPECT_EQ(hand.peer()->SendStatus(1).code(), StatusCode::kTimeout) << "its only epoch";
    ExpectAllPagesBack(server);
  }
}

// The peer is in a forward of the prompt when its time is over. A prompt whose time is over before
// the peer has begun it is tried again with another one.
TEST_F(RemoteLoss, BothSidesCountPromptsWhoseTimeIsOver) {
  Server prefill({.page_size = 8, .chunk = 12});
  Server server({.page_size = 4});
  Attach(&server, {.addresses = {Serve(&prefill, Endpoint())},
                   .when = RemotePrefill::kAlways,
                   .timeout_ms = 50});
  const auto step = [](Server* one) {
    if (one->engine->Idle()) return;
    EXPECT_TRUE(one->Step().ok());
  };
  prefill.model->fault = [&](std::span<const int32_t>) {
    while (!server.engine->Idle()) step(&server);
    while (prefill.engine->Idle()) std::this_thread::yield();  // its connection tells of the end
    return Status();
  };
  for (uint64_t seed = 1; prefill.engine->Stats().served_losses == 0; ++seed) {
    const Tokens prompt = Text(kPrompt, seed);
    const int64_t id = server.Submit(prompt, Greedy(8));
    while (!server.engine->Idle() || !prefill.engine->Idle()) {
      step(&server);
      step(&prefill);
    }
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(8)), "computed here");
  }
  const EngineStats here = server.engine->Stats();
  EXPECT_GE(here.remote_losses, 1);
  EXPECT_EQ(here.remote_timeouts, here.remote_losses);
  const EngineStats there = prefill.engine->Stats();
  EXPECT_EQ(there.served_losses, 1);
  EXPECT_EQ(there.served_timeouts, 1);
  ExpectAllPagesBack(server);
  ExpectAllPagesBack(prefill);
}

// Each token takes a millisecond here. What the peer says of itself decides.
TEST_F(RemoteLoss, AutoAsksThePeerThatIsPredictedToBeFaster) {
  struct Case {
    TransferLoad load;
    bool is_asked;
  };
  for (const Case& one : {Case{{.queued_tokens = 0, .ns_per_token = 900'000}, true},
                          Case{{.queued_tokens = 0, .ns_per_token = 1'100'000}, false},
                          Case{{.queued_tokens = 4, .ns_per_token = 900'000}, true},
                          Case{{.queued_tokens = 7, .ns_per_token = 900'000}, false},
                          Case{{.queued_tokens = 0, .ns_per_token = 0}, false}}) {
    SCOPED_TRACE(testing::Message() << one.load.queued_tokens << " " << one.load.ns_per_token);
    const auto clock = std::make_shared<FakeClock>();
    HandServer hand(Endpoint(), kHand);
    Server server({.page_size = 4, .clock = clock});
    server.model->fault = [&](std::span<const int32_t> tokens) {
      clock->Advance(std::ssize(tokens) * kMilli);
      return Status();
    };
    Attach(&server, {.addresses = {hand.endpoint()}});
    hand.Accept(one.load);
    // Nothing is known of the speed here yet, so the first one is computed here.
    const Tokens first = Text(64, 7);
    ExpectEqual(server.Generate(first, Greedy(2)), Alone(first, Greedy(2)), "first");
    ASSERT_DOUBLE_EQ(server.engine->Stats().compute_seconds_per_token, 1e-3);
    EXPECT_EQ(server.engine->Stats().remote_tokens, 0);
    const double speed = static_cast<double>(one.load.ns_per_token) * 1e-9;
    while (server.engine->PrefillPeers()[0].seconds_per_token != speed) std::this_thread::yield();
    while (server.engine->PrefillPeers()[0].queued_tokens != one.load.queued_tokens)
      std::this_thread::yield();
    const Tokens prompt = Text(kPrompt, 1);
    if (one.is_asked) hand.Run({});
    const int64_t id = server.Submit(prompt, Greedy(8));
    StepOutput end;
    while (!server.engine->Idle()) {
      Result<std::vector<StepOutput>> outputs = server.engine->Step();
      ASSERT_TRUE(outputs.ok());
      if (!outputs->empty()) end = outputs->back();
      server.Take(*std::move(outputs));
    }
    hand.Join();
    ExpectEqual(server.answers[{id, 0}], Alone(prompt, Greedy(8)), "second");
    const int64_t wanted = kPrompt - 1 - end.cached_tokens;
    EXPECT_EQ(end.remote_tokens, one.is_asked ? wanted : 0);
    if (!one.is_asked) continue;
    EXPECT_DOUBLE_EQ(end.predicted_here_seconds, 1e-3 * static_cast<double>(wanted));
    EXPECT_DOUBLE_EQ(end.predicted_remote_seconds,
                     speed * static_cast<double>(wanted + one.load.queued_tokens));
  }
}

// Its connections would live on, and prompts wait for their time to be over.
TEST_F(RemoteLoss, AnEngineWhoseLoopHasEndedComputesForNobody) {
  class BrokenSink final : public StepSink {
   public:
    explicit BrokenSink(const Engine* engine) : engine_(*engine) {}
    void OnStep(std::vector<StepOutput>) override {
      if (engine_.Stats().computed_tokens > 0) throw std::runtime_error("broken");
    }
    void OnEnd(const Status& why) override { EXPECT_EQ(why.code(), StatusCode::kInternal); }

   private:
    const Engine& engine_;
  };
  Server prefill({.page_size = 8, .chunk = 12});
  const std::string endpoint = Serve(&prefill, Endpoint());
  const auto sink = std::make_shared<BrokenSink>(prefill.engine.get());
  const std::unique_ptr<EngineLoop> loop =
      EngineLoop::Create(std::move(prefill.engine), sink).value();
  Server server({.page_size = 4});
  Attach(&server, {.addresses = {endpoint}, .when = RemotePrefill::kAlways, .timeout_ms = 20'000});
  const Tokens prompt = Text(kPrompt, 1);
  ExpectEqual(server.Generate(prompt, Greedy(8)), Alone(prompt, Greedy(8)), "computed here");
  EXPECT_EQ(server.engine->Stats().remote_losses, 1);
  const PrefillPeerInfo info = server.engine->PrefillPeers()[0];
  EXPECT_FALSE(info.connected);
  EXPECT_EQ(info.error.find("timeout_ms"), std::string::npos) << info.error;
  ExpectAllPagesBack(server);
}

// What is in work is finished, what comes is computed where it was asked for, and nobody else
// connects.
TEST_F(RemoteLoss, AnEngineThatEndsFinishesWhatItHasBegun) {
  Server prefill({.page_size = 8, .chunk = 12});
  Server server({.page_size = 4});
  const PrefillPeerOptions use{.addresses = {Serve(&prefill, Endpoint())},
                               .when = RemotePrefill::kAlways};
  Attach(&server, use);
  const auto step = [](Server* one) {
    if (one->engine->Idle()) return;
    EXPECT_TRUE(one->Step().ok());
  };
  const Tokens first = Text(kPrompt, 1), second = Text(kPrompt, 2);
  const int64_t begun = server.Submit(first, Greedy(8));
  while (prefill.engine->Stats().computed_tokens == 0) {
    step(&server);
    step(&prefill);
  }
  ASSERT_LT(prefill.engine->Stats().computed_tokens, kPrompt - 1);
  prefill.engine->EndPrefill(false);
  const int64_t late = server.Submit(second, Greedy(8));
  while (!server.engine->Idle()) {
    step(&server);
    step(&prefill);
  }
  ExpectEqual(server.answers[{begun, 0}], Alone(first, Greedy(8)), "in work");
  ExpectEqual(server.answers[{late, 0}], Alone(second, Greedy(8)), "refused");
  EXPECT_EQ(server.engine->Stats().remote_tokens, kPrompt - 1);
  EXPECT_EQ(server.engine->Stats().remote_losses, 1);
  const PrefillPeerInfo info = server.engine->PrefillPeers()[0];
  EXPECT_NE(info.error.find("is ending"), std::string::npos) << info.error;
  while (prefill.engine->Stats().served_waiting > 0) step(&prefill);  // its last row has come
  Server other({.page_size = 4});
  Attach(&other, use);
  EXPECT_FALSE(other.engine->PrefillPeers()[0].connected);
  EXPECT_TRUE(server.engine->PrefillPeers()[0].connected);
  prefill.engine->EndPrefill(true);
  while (server.engine->PrefillPeers()[0].connected) std::this_thread::yield();
  ExpectAllPagesBack(prefill);
}

// The last word of an engine that has nothing more to do is that.
TEST_F(RemoteLoss, AnIdlePeerHasNoQueue) {
  const auto clock = std::make_shared<FakeClock>();
  Server prefill({.page_size = 8, .clock = clock});
  prefill.model->fault = [&](std::span<const int32_t> tokens) {
    clock->Advance(std::ssize(tokens) * kMilli);
    return Status();
  };
  const std::string endpoint = Serve(&prefill, Endpoint());
  prefill.Generate(Text(64, 7), Greedy(1));  // a step's beginning has a queue, its end has none
  Server server;
  Attach(&server, {.addresses = {endpoint}});
  while (server.engine->PrefillPeers()[0].seconds_per_token == 0) std::this_thread::yield();
  EXPECT_DOUBLE_EQ(server.engine->PrefillPeers()[0].seconds_per_token, 1e-3);
  EXPECT_EQ(server.engine->PrefillPeers()[0].queued_tokens, 0);
}

// No loss: the connection does not carry what keeps tenants apart.
TEST_F(RemoteLoss, ASaltGoesOverNoOpenConnection) {
  Server prefill({.page_size = 8});
  Server server({.page_size = 4});
  Attach(&server, {.addresses = {Serve(&prefill, "127.0.0.1:0")}, .when = RemotePrefill::kAlways});
  SamplingOptions options = Greedy(5);
  options.cache_salt = "tenant";
  const Tokens prompt = Text(40, 3);
  ExpectEqual(server.Generate(prompt, options), Alone(prompt, options), "here");
  EXPECT_EQ(server.engine->Stats().remote_tokens, 0);
  EXPECT_EQ(server.engine->Stats().remote_losses, 1);
  const PrefillPeerInfo info = server.engine->PrefillPeers()[0];
  EXPECT_NE(info.error.find("salt"), std::string::npos) << info.error;
  EXPECT_EQ(info.losses, 0) << "the peer has lost nothing";
  EXPECT_TRUE(info.connected);
}

// One flag of one peer once failed each step of the engine from then on.
TEST_F(RemoteLoss, AJobThatTheModelCannotComputeIsRefusedAndNoStepFails) {
  Server prefill({.page_size = 8});
  const std::string endpoint = Serve(&prefill, Endpoint());
  const FakeModel model;
  const std::unique_ptr<AttentionKVCache> cache = MakeCache(model, kHand, kHand.pages);
  KVTransfer* const transfer = cache->transfer();
  const Passport passport = CachePassport(SequenceStates(*cache), PairIdentity(), false).value();
  const auto peer = TransferPeer::Connect(endpoint, Patient({.passport = passport})).value();
  ASSERT_TRUE(peer->SetReceiver(transfer).ok());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = transfer->DisaggPrepareRecv(0, 8).value();
  const TransferJob job{.id = 1, .tokens = Text(8, 1), .long_rope = true};
  ASSERT_TRUE(peer->Request(job, map).ok());
  Status why;
  while (why.ok()) {
    const Status step = prefill.Step();
    ASSERT_TRUE(step.ok()) << step.ToString();
    why = transfer->GetReceiveProgress(map.epoch)->failure;
    std::this_thread::yield();
  }
  EXPECT_EQ(why.code(), StatusCode::kBadArgument);
  EXPECT_NE(why.message().find("LongRoPE"), std::string::npos) << why.ToString();
  const Tokens prompt = Text(20, 2);
  ExpectEqual(prefill.Generate(prompt, Greedy(3)), Alone(prompt, Greedy(3)), "its own");
  ASSERT_TRUE(peer->SetReceiver(nullptr).ok());
}

// Asks an engine for a prompt by hand, and takes no part of it as long as all staging memory is
// held.
struct SlowTaker {
  SlowTaker(const std::string& endpoint, int64_t tokens, int64_t window_bytes)
      : transfer(cache->transfer()) {
    const Passport passport = CachePassport(SequenceStates(*cache), PairIdentity(), false).value();
    EXPECT_TRUE(transfer->SetStagingLimit(window_bytes).ok());
    peer = TransferPeer::Connect(endpoint,
                                 Patient({.passport = passport, .window_bytes = window_bytes}))
               .value();
    EXPECT_TRUE(peer->SetReceiver(transfer).ok());
    EXPECT_TRUE(cache->AddSequence(0).ok());
    map = transfer->DisaggPrepareRecv(0, tokens).value();
    for (;;) {
      Result<ReceiveView> view = transfer->View(map.epoch, 0, {.count = 1, .head_count = 1});
      if (!view.ok()) {
        EXPECT_EQ(view.status().code(), StatusCode::kFull);
        break;
      }
      held.push_back(std::move(view).value());
    }
  }
  ~SlowTaker() { EXPECT_TRUE(peer->SetReceiver(nullptr).ok()); }

  const FakeModel model;
  const std::unique_ptr<AttentionKVCache> cache = MakeCache(model, kHand, kHand.pages);
  KVTransfer* const transfer;
  std::shared_ptr<TransferPeer> peer;
  ReceiveMap map;
  std::vector<ReceiveView> held;
};

// A request of the engine's own that needed the pages of such a prompt ended the process.
TEST_F(RemoteLoss, APromptWhosePeerTakesNothingGivesItsPagesToOthers) {
  constexpr int64_t kTokens = 40, kChunk = 16;
  constexpr int64_t kTokenBytes = FakeModel::kLayers * 2 * FakeModel::kDim * int64_t{sizeof(float)};
  Server prefill({.pages = 22, .page_size = 4, .chunk = kChunk});
  // Room for its first forward, and for no other one.
  SlowTaker taker(Serve(&prefill, Endpoint()), kTokens, kTokenBytes * (kChunk + 4));
  std::atomic<int64_t> rings = 0;
  prefill.engine->SetWake([&] { ++rings; });
  const Tokens own = Text(8, 7);
  const int64_t id = prefill.Submit(own, Greedy(70));
  ASSERT_TRUE(prefill.Step().ok());
  const TransferJob job{.id = 1, .tokens = Text(kTokens, 1)};
  ASSERT_TRUE(taker.peer->Request(job, taker.map).ok());
  while (prefill.engine->Stats().served_waiting == 0) {
    const int64_t before = rings;
    ASSERT_TRUE(prefill.Step().ok());
    while (prefill.engine->Stats().served_waiting == 0 && rings == before)
      std::this_thread::yield();
  }
  EXPECT_EQ(prefill.engine->Cancel(id + 1).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(prefill.engine->Stop(id + 1, 0, 0).code(), StatusCode::kUnknownSequence);
  while (prefill.answers[{id, 0}].reason == FinishReason::kNone) {
    const Status step = prefill.Step();
    ASSERT_TRUE(step.ok()) << step.ToString();
  }
  ExpectEqual(prefill.answers[{id, 0}], Alone(own, Greedy(70)), "its own");
  EXPECT_GE(prefill.engine->Stats().preemptions, 1);
  taker.held.clear();
  for (;;) {
    const Result<ReceiveProgress> progress = taker.transfer->GetReceiveProgress(taker.map.epoch);
    ASSERT_TRUE(progress.ok() && progress->failure.ok());
    if (progress->complete == kTokens) break;
    std::this_thread::yield();
    if (prefill.engine->Idle()) continue;
    ASSERT_TRUE(prefill.Step().ok());
  }
  EXPECT_EQ(prefill.answers.size(), 1U);
  prefill.engine->SetWake(nullptr);
}

// Requests that begin alike waited for such a prompt as long as for one that is being computed.
TEST_F(RemoteLoss, NobodyWaitsForAPromptWhosePeerTakesNothing) {
  constexpr int64_t kTokens = 40, kChunk = 16;
  constexpr int64_t kTokenBytes = FakeModel::kLayers * 2 * FakeModel::kDim * int64_t{sizeof(float)};
  Server prefill({.page_size = 4, .chunk = kChunk});
  SlowTaker taker(Serve(&prefill, Endpoint()), kTokens, kTokenBytes * (kChunk + 4));
  const Tokens prompt = Text(kTokens, 1);
  ASSERT_TRUE(taker.peer->Request({.id = 1, .tokens = prompt}, taker.map).ok());
  while (prefill.engine->Stats().computed_tokens < kChunk) {
    std::this_thread::yield();
    if (prefill.engine->Idle()) continue;
    ASSERT_TRUE(prefill.Step().ok());
  }
  const int64_t id = prefill.Submit(prompt, Greedy(4));
  for (int step = 0; step < 100 && prefill.answers[{id, 0}].reason == FinishReason::kNone; ++step)
    ASSERT_TRUE(prefill.Step().ok());
  ExpectEqual(prefill.answers[{id, 0}], Alone(prompt, Greedy(4)), "its own");
  EXPECT_EQ(prefill.engine->Stats().served_waiting, 1);
}

TEST_F(RemoteLoss, OptionsAreCheckedByName) {
  Server server;
  const auto refuse = [&](PrefillPeerOptions options, const char* word) {
    const Status status = server.engine->AttachPrefillPeers(PairIdentity(), options);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << status.ToString();
    EXPECT_NE(status.ToString().find(word), std::string::npos) << status.ToString();
  };
  refuse({}, "0 addresses");
  refuse({.addresses = std::vector<std::string>(65, "127.0.0.1:1")}, "65 addresses");
  refuse({.addresses = {"127.0.0.1:1", "127.0.0.1:1"}}, "twice");
  refuse({.addresses = {"127.0.0.1:1", "localhost:1"}}, "localhost:1 is given twice");
  refuse({.addresses = {"127.0.0.1:1"}, .timeout_ms = 0}, "timeout_ms is 0");
  refuse({.addresses = {"127.0.0.1:1"}, .timeout_ms = 86'400'001}, "timeout_ms");
  refuse({.addresses = {"nonsense"}}, "nonsense");
  EXPECT_TRUE(server.engine->PrefillPeers().empty());
  // Nobody is there yet: that is no mistake.
  Attach(&server, {.addresses = {Endpoint()}, .when = RemotePrefill::kAlways});
  EXPECT_EQ(server.engine->AttachPrefillPeers(PairIdentity(), {.addresses = {Endpoint()}}).code(),
            StatusCode::kBadState);
  const Tokens prompt = Text(20, 1);
  ExpectEqual(server.Generate(prompt, Greedy(3)), Alone(prompt, Greedy(3)), "here");
  Serve(&server, Endpoint());
  EXPECT_EQ(server.engine->ServePrefill(PairIdentity(), {.endpoint = Endpoint()}).status().code(),
            StatusCode::kBadState);
}

// It would hold the pages of a prompt twice, and wait for itself.
TEST_F(RemoteLoss, AnEngineDoesNotAskItself) {
  Server server;
  const std::string own = Serve(&server, "127.0.0.1:0");
  const std::string also_own = "localhost" + own.substr(own.rfind(':'));
  Status refused = server.engine->AttachPrefillPeers(PairIdentity(), {.addresses = {also_own}});
  EXPECT_EQ(refused.code(), StatusCode::kBadArgument);
  EXPECT_NE(refused.message().find(also_own), std::string::npos) << refused.ToString();
  Server other;
  const std::string later = Endpoint();
  Attach(&other, {.addresses = {later}});
  refused = other.engine->ServePrefill(PairIdentity(), {.endpoint = later}).status();
  EXPECT_EQ(refused.code(), StatusCode::kBadArgument);
  EXPECT_NE(refused.message().find(later), std::string::npos) << refused.ToString();
  Serve(&other, Endpoint());
}

}  // namespace
}  // namespace quire
