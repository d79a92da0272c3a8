// Two engines of one model: the one computes prompts, the other answers. Whatever model, type of
// keys and values, page size and schedule, and whatever fails on the way, answers have the bits of
// one engine alone.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/soak.h"
#include "engine/engine_impl.h"
#include "model/testing/test_model.h"
#include "quire/engine_loop.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

struct Variant {
  std::string name;
  TestModel model;
  DType dtype = DType::kF32;
  std::optional<DType> kv_dtype = std::nullopt;
};
void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

constexpr int64_t kWindow = 20;

std::vector<Variant> Variants() {
  return {
      {"Llama", {}},
      {"LlamaBfloat16", {}, DType::kBF16},
      {"LlamaInt8", {}, DType::kBF16, DType::kI8},
      {"LlamaFp8", {}, DType::kF32, DType::kF8E4M3},
      {"Gemma2",
       {.architecture = "Gemma2ForCausalLM",
        .tie_word_embeddings = true,
        .extra = {{"sliding_window", kWindow}, {"query_pre_attn_scalar", 24}}}},
      {"DeepseekV3", {.architecture = "DeepseekV3ForCausalLM"}},
      {"Mamba2", {.architecture = "Mamba2ForCausalLM"}},
      {"Qwen3Next", {.architecture = "Qwen3NextForCausalLM"}},
  };
}

Passport Identity(const std::string& model = "test") {
  Passport identity;
  identity.model = model;
  return identity;
}

// What an engine gives, by request and sample.
struct Given {
  std::map<std::pair<int64_t, int64_t>, Tokens> tokens;
  std::map<std::pair<int64_t, int64_t>, std::vector<float>> logprobs;
  std::map<int64_t, StepOutput> ends;

  void Take(std::vector<StepOutput> outputs) {
    for (StepOutput& output : outputs) {
      const auto key = std::make_pair(output.request_id, output.sample);
      Tokens& all = tokens[key];
      all.insert(all.end(), output.tokens.begin(), output.tokens.end());
      for (const auto& token : output.logprobs) logprobs[key].push_back(token.front().logprob);
      if (output.finish_reason != FinishReason::kNone) ends[output.request_id] = std::move(output);
    }
  }
};

// Steps that nobody looks at: an engine that computes for others.
class NoSink final : public StepSink {
 public:
  void OnStep(std::vector<StepOutput> outputs) override { outputs_ += std::ssize(outputs); }
  void OnEnd(const Status& why) override {
    EXPECT_EQ(why.code(), StatusCode::kClosed) << why.ToString();
  }
  int64_t outputs() const { return outputs_; }

 private:
  std::atomic<int64_t> outputs_ = 0;
};

struct Peers {
  std::string address;
  std::unique_ptr<EngineLoop> prefill;
  std::shared_ptr<NoSink> sink = std::make_shared<NoSink>();
};

class RemoteEngine : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override { WriteTestModel(folder_, GetParam().model); }

  EngineOptions Options(int64_t page_size = 0) const {
    return {.model_directory = folder_.path(),
            .dtype = GetParam().dtype,
            .k_dtype = GetParam().kv_dtype,
            .v_dtype = GetParam().kv_dtype,
            .threads = 1,
            .page_size = page_size,
            .prefill_chunk = 32,
            .max_num_sequences = 8,
            .kv_bytes = 8 << 20};
  }
  static std::unique_ptr<Engine> Create(const EngineOptions& options) {
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  // No peer is lost because the machine is busy.
  static TransferPeerOptions Patient() {
    return {.connect_timeout = std::chrono::minutes(1), .dead_after = std::chrono::minutes(1)};
  }
  // The address at which the engine computes for others, in its steps.
  std::string Listen(Engine* engine) {
    const std::string path = socket_folder_.path() + "/" + std::to_string(next_socket_++);
    const Result<std::string> endpoint =
        engine->ServePrefill(Identity(), {.endpoint = "unix:" + path, .peer = Patient()});
    EXPECT_TRUE(endpoint.ok()) << endpoint.status().ToString();
    return endpoint.value();
  }
  // An engine that computes for others on a thread of its own.
  Peers Serve(const EngineOptions& options) {
    Peers peers;
    std::unique_ptr<Engine> engine = Create(options);
    peers.address = Listen(engine.get());
    Result<std::unique_ptr<EngineLoop>> loop = EngineLoop::Create(std::move(engine), peers.sink);
    EXPECT_TRUE(loop.ok()) << loop.status().ToString();
    peers.prefill = *std::move(loop);
    return peers;
  }
  static std::unique_ptr<Engine> Attached(const EngineOptions& options, const std::string& address,
                                          PrefillPeerOptions use = {}) {
    std::unique_ptr<Engine> engine = Create(options);
    use.addresses = {address};
    use.peer = Patient();
    if (use.when == RemotePrefill::kAuto) use.when = RemotePrefill::kAlways;
    const Status attached = engine->AttachPrefillPeers(Identity(), use);
    EXPECT_TRUE(attached.ok()) << attached.ToString();
    return engine;
  }
  static int64_t Submit(Engine* engine, const Tokens& prompt, const SamplingOptions& options) {
    const Result<int64_t> id = engine->Submit(prompt, options);
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    return id.ok() ? *id : -1;
  }
  static void Step(Engine* engine, Given* given) {
    Result<std::vector<StepOutput>> outputs = engine->Step();
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    static_cast<EngineImpl*>(engine)->CheckInvariants();
    given->Take(*std::move(outputs));
  }
  static Given Finish(Engine* engine) {
    Given given;
    for (int steps = 0; !engine->Idle() && steps < 20000; ++steps) Step(engine, &given);
    EXPECT_TRUE(engine->Idle()) << "no progress";
    return given;
  }
  Tokens Text(int64_t count, uint64_t seed) const {
    return RandomTokens(count, GetParam().model.vocab_size, seed);
  }
  static SamplingOptions Sampled(int64_t max_tokens, int64_t n = 1) {
    return {.max_tokens = max_tokens,
            .temperature = 1,
            .seed = 5,
            .n = n,
            .logprobs = 0,
            .ignore_eos = true};
  }
  // The answer of an engine that has nothing else to do.
  Given Alone(const Tokens& prompt, const SamplingOptions& options) const {
    EngineOptions alone = Options();
    alone.prefix_cache = false;
    const std::unique_ptr<Engine> engine = Create(alone);
    Submit(engine.get(), prompt, options);
    return Finish(engine.get());
  }
  void ExpectAlone(const Given& given, int64_t id, const Tokens& prompt,
                   const SamplingOptions& options) const {
    const Given want = Alone(prompt, options);
    for (int64_t sample = 0; sample < options.n; ++sample) {
      const auto key = std::make_pair(id, sample);
      EXPECT_EQ(given.tokens.at(key), want.tokens.at({0, sample})) << "sample " << sample;
      EXPECT_EQ(given.logprobs.at(key), want.logprobs.at({0, sample})) << "sample " << sample;
    }
    EXPECT_EQ(given.ends.at(id).finish_reason, FinishReason::kLength) << given.ends.at(id).error;
  }
  static EngineStats Quiet(Peers* peers) {
    EXPECT_TRUE(peers->prefill->Settle().ok());
    return peers->prefill->Stats();
  }

  TestFolder folder_;
  TestFolder socket_folder_;
  int next_socket_ = 0;
};

TEST_P(RemoteEngine, APromptOfAnyLengthIsComputedThereAndAnsweredHere) {
  Peers peers = Serve(Options(16));
  EngineOptions little = Options(64);
  little.staging_bytes = 16 << 10;  // the longest prompt has many times as much, or states
  const std::unique_ptr<Engine> engine = Attached(little, peers.address);
  int64_t remote = 0;
  for (const int64_t length : {1, 2, 15, 16, 17, 31, 33, 64, 65, 130, 300}) {
    SCOPED_TRACE(length);
    const Tokens prompt = Text(length, static_cast<uint64_t>(length));
    const int64_t id = Submit(engine.get(), prompt, Sampled(6));
    const Given given = Finish(engine.get());
    ExpectAlone(given, id, prompt, Sampled(6));
    // Two random texts may begin alike.
    EXPECT_EQ(given.ends.at(id).remote_tokens + given.ends.at(id).cached_tokens, length - 1);
    remote += given.ends.at(id).remote_tokens;
  }
  EXPECT_EQ(engine->Stats().remote_tokens, remote);
  EXPECT_EQ(engine->Stats().remote_losses, 0);
  EXPECT_EQ(engine->Stats().staging_bytes, 0);
  EXPECT_GT(engine->Stats().staging_bytes_largest, 0);
  EXPECT_LE(engine->Stats().staging_bytes_largest, little.staging_bytes);
  EXPECT_EQ(peers.sink->outputs(), 0) << "prompts of others have no outputs";
  const std::vector<PrefillPeerInfo> infos = engine->PrefillPeers();
  ASSERT_EQ(infos.size(), 1U);
  EXPECT_EQ(infos[0].tokens, remote);
  EXPECT_TRUE(infos[0].connected);
}

// As little as is taken: a state of recurrent layers alone may be larger than all of it.
TEST_P(RemoteEngine, LittleSendingMemorySlowsAPromptDownAndLosesNothing) {
  EngineOptions options = Options(16);
  options.sending_bytes = std::max<int64_t>(1, 4 * Create(options)->Stats().kv_bytes_per_token);
  const int64_t planned = Engine::PlanMemory(options).value().sending_bytes;
  const std::unique_ptr<Engine> peer = Create(options);
  TransferPeerOptions patient = Patient();
  patient.send_wait = std::chrono::minutes(1);
  const std::string path = socket_folder_.path() + "/little";
  const auto address =
      peer->ServePrefill(Identity(), {.endpoint = "unix:" + path, .peer = patient});
  ASSERT_TRUE(address.ok()) << address.status().ToString();
  const std::unique_ptr<Engine> engine = Attached(Options(64), *address);
  for (const int64_t length : {2, 40, 65}) {
    SCOPED_TRACE(length);
    const Tokens prompt = Text(length, static_cast<uint64_t>(length));
    const int64_t id = Submit(engine.get(), prompt, Sampled(3));
    Given given, of_peer;
    for (int steps = 0; !engine->Idle() && steps < 200'000; ++steps) {
      ASSERT_NO_FATAL_FAILURE(Step(engine.get(), &given));
      ASSERT_NO_FATAL_FAILURE(Step(peer.get(), &of_peer));
      ASSERT_LE(peer->Stats().sending_bytes, planned);
    }
    ASSERT_TRUE(engine->Idle()) << "no progress";
    ExpectAlone(given, id, prompt, Sampled(3));
    EXPECT_EQ(given.ends.at(id).remote_tokens + given.ends.at(id).cached_tokens, length - 1);
  }
  EXPECT_EQ(engine->Stats().remote_losses, 0);
  EXPECT_EQ(peer->Stats().served_losses, 0);
}

TEST_P(RemoteEngine, StagingMemoryThatTakesNoRowIsRefusedByName) {
  EngineOptions options = Options();
  options.staging_bytes = 1;
  const std::unique_ptr<Engine> engine = Create(options);
  const Status refused = engine->AttachPrefillPeers(Identity(), {.addresses = {"127.0.0.1:1"}});
  EXPECT_EQ(refused.code(), StatusCode::kBadArgument);
  EXPECT_NE(refused.message().find("staging_bytes is 1"), std::string::npos) << refused.ToString();
}

TEST_P(RemoteEngine, SamplesAndRequestsBesideEachOther) {
  Peers peers = Serve(Options());
  const std::unique_ptr<Engine> engine = Attached(Options(16), peers.address);
  std::map<int64_t, std::pair<Tokens, SamplingOptions>> all;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Tokens prompt = Text(40 + static_cast<int64_t>(seed) * 23, seed);
    const SamplingOptions options = Sampled(5 + static_cast<int64_t>(seed), 1 + seed % 3);
    all[Submit(engine.get(), prompt, options)] = {prompt, options};
  }
  const Given given = Finish(engine.get());
  for (const auto& [id, asked] : all) ExpectAlone(given, id, asked.first, asked.second);
  EXPECT_GT(engine->Stats().remote_tokens, 0);
}

TEST_P(RemoteEngine, WhatEitherSideHasIsNotComputedOrSentAgain) {
  Peers peers = Serve(Options());
  const std::unique_ptr<Engine> engine = Attached(Options(), peers.address);
  Tokens text = Text(150, 3);
  for (int turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE(turn);
    const int64_t id = Submit(engine.get(), text, Sampled(7));
    const Given given = Finish(engine.get());
    ExpectAlone(given, id, text, Sampled(7));
    const StepOutput& end = given.ends.at(id);
    EXPECT_EQ(end.cached_tokens > 0, turn > 0);
    EXPECT_EQ(end.cached_tokens + end.remote_tokens, std::ssize(text) - 1);
    const Tokens& answer = given.tokens.at({id, 0});
    text.insert(text.end(), answer.begin(), answer.end());
    const Tokens more = Text(60, static_cast<uint64_t>(turn) + 10);
    text.insert(text.end(), more.begin(), more.end());
  }
}

TEST_P(RemoteEngine, AWindowOfTheRequest) {
  if (GetParam().model.architecture == "Mamba2ForCausalLM") return;  // no attention
  Peers peers = Serve(Options(16));
  const std::unique_ptr<Engine> engine = Attached(Options(), peers.address);
  SamplingOptions options = Sampled(30);
  options.window = 48;
  options.sinks = 4;
  for (const int64_t length : {20, 49, 200}) {
    SCOPED_TRACE(length);
    const Tokens prompt = Text(length, 9);
    const Result<int64_t> id = engine->Submit(prompt, options);
    if (!id.ok()) return;  // a model that cannot have a window
    ExpectAlone(Finish(engine.get()), *id, prompt, options);
  }
}

// The peer goes while the prompt is computed: what has come is kept. It steps here, so that it goes
// in the middle.
TEST_P(RemoteEngine, APeerThatGoesChangesNothing) {
  for (const OnPeerLoss on_loss : {OnPeerLoss::kRecompute, OnPeerLoss::kFail}) {
    std::unique_ptr<Engine> peer = Create(Options());
    const std::unique_ptr<Engine> engine =
        Attached(Options(16), Listen(peer.get()), {.on_loss = on_loss});
    const Tokens prompt = Text(1200, 4);
    const int64_t id = Submit(engine.get(), prompt, Sampled(6));
    Given given;
    while (engine->Stats().remote_waiting == 0) Step(engine.get(), &given);
    while (peer->Stats().computed_tokens < 64) {
      if (peer->Idle()) {
        std::this_thread::yield();  // the prompt is on its way
      } else {
        ASSERT_TRUE(peer->Step().ok());
      }
    }
    peer = nullptr;
    given = Finish(engine.get());
    if (on_loss == OnPeerLoss::kRecompute) {
      ExpectAlone(given, id, prompt, Sampled(6));
      EXPECT_LT(given.ends.at(id).remote_tokens, 1199);
    } else {
      EXPECT_EQ(given.ends.at(id).finish_reason, FinishReason::kError);
      EXPECT_NE(given.ends.at(id).error.find("on_loss"), std::string::npos);
    }
    EXPECT_EQ(engine->Stats().remote_losses, 1);
    // The next one is computed here.
    const Tokens next = Text(90, 5);
    const int64_t second = Submit(engine.get(), next, Sampled(3));
    ExpectAlone(Finish(engine.get()), second, next, Sampled(3));
  }
}

TEST_P(RemoteEngine, CancelAndStopGiveEverythingBackAtOnce) {
  Peers peers = Serve(Options());
  const std::unique_ptr<Engine> engine = Attached(Options(16), peers.address);
  const EngineStats before = engine->Stats();
  const Tokens prompt = Text(1500, 6);
  Given given;
  const int64_t id = Submit(engine.get(), prompt, Sampled(6, 2));
  while (engine->Stats().remote_waiting == 0) Step(engine.get(), &given);
  ASSERT_TRUE(engine->Stop(id, 0, 0).ok());  // the leader: the other sample leads now
  static_cast<EngineImpl*>(engine.get())->CheckInvariants();
  ASSERT_TRUE(engine->Cancel(id).ok());
  static_cast<EngineImpl*>(engine.get())->CheckInvariants();
  given = Finish(engine.get());
  EXPECT_EQ(engine->Stats().pages_free + engine->Stats().retained_pages, before.pages_free);
  while (peers.prefill->Stats().served_waiting > 0) std::this_thread::yield();
  const Tokens next = Text(90, 5);
  const int64_t second = Submit(engine.get(), next, Sampled(3));
  ExpectAlone(Finish(engine.get()), second, next, Sampled(3));
}

// Few pages on both sides: requests are preempted there and here.
TEST_P(RemoteEngine, FewPagesOnBothSides) {
  EngineOptions small = Options(16);
  small.kv_bytes = 192 << 10;
  Peers peers = Serve(small);
  const std::unique_ptr<Engine> engine = Attached(small, peers.address);
  std::map<int64_t, std::pair<Tokens, SamplingOptions>> all;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Tokens prompt = Text(60 + static_cast<int64_t>(seed) * 9, seed);
    all[Submit(engine.get(), prompt, Sampled(20))] = {prompt, Sampled(20)};
  }
  const Given given = Finish(engine.get());
  for (const auto& [id, asked] : all) ExpectAlone(given, id, asked.first, asked.second);
}

TEST_P(RemoteEngine, AnotherModelIsRefusedWithTheFieldAndBothValues) {
  Peers peers = Serve(Options());
  const std::unique_ptr<Engine> engine = Create(Options());
  const Status refused =
      engine->AttachPrefillPeers(Identity("other"), {.addresses = {peers.address}});
  EXPECT_EQ(refused.code(), StatusCode::kIncompatible) << refused.ToString();
  for (const char* word : {"model", "other", "test"})
    EXPECT_NE(refused.ToString().find(word), std::string::npos) << refused.ToString();
}

INSTANTIATE_TEST_SUITE_P(Models, RemoteEngine, testing::ValuesIn(Variants()),
                         [](const auto& made) { return made.param.name; });

}  // namespace
}  // namespace quire
