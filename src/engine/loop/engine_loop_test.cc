// The loop against the engine alone: whatever threads ask for at whatever time, each answer is that
// of the request alone by ==, and every request learns how it ended.
#include "quire/engine_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <semaphore>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/fake_clock.h"
#include "base/testing/threads_of_process.h"
#include "engine/testing/test_server.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/state_table.h"

namespace quire {
namespace {

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
SamplingOptions Greedy(int64_t max_tokens = 6) {
  return {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true};
}
Answer Cold(const Tokens& prompt, const SamplingOptions& options = Greedy()) {
  return Server({.pages = 100, .prefix_cache = false}).Generate(prompt, options);
}

// Keeps what it is told. Allocates nothing: the memory is there from the beginning.
class Recorder final : public StepSink {
 public:
  Recorder() { steps_.reserve(100'000); }

  void OnStep(std::vector<StepOutput> outputs) override {
    if (on_step) on_step(outputs);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const StepOutput& output : outputs) {
      if (output.finish_reason != FinishReason::kNone) ++ends_;
    }
    steps_.push_back(std::move(outputs));
    changed_.notify_all();
  }
  void OnEnd(const Status& why) override {
    if (on_end) on_end();
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_TRUE(why_.ok()) << "OnEnd was called twice";
    EXPECT_FALSE(why.ok());
    why_ = why;
    changed_.notify_all();
  }

  // Waits until `count` samples have ended, or the loop.
  void AwaitEnds(int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ends_ >= count || !why_.ok(); });
  }
  void AwaitSteps(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return steps_.size() >= count || !why_.ok(); });
  }
  Status why() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }
  Answers answers() {
    Answers answers;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::vector<StepOutput>& outputs : steps_) {
      for (const StepOutput& output : outputs) {
        Answer& answer = answers[{output.request_id, output.sample}];
        EXPECT_EQ(answer.reason, FinishReason::kNone) << "an output after the end";
        answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
        answer.logprobs.insert(answer.logprobs.end(), output.logprobs.begin(),
                               output.logprobs.end());
        answer.reason = output.finish_reason;
        answer.error = output.error;
        answer.prompt_tokens = output.prompt_tokens;
        answer.completion_tokens = output.completion_tokens;
      }
    }
    return answers;
  }

  std::function<void(const std::vector<StepOutput>&)> on_step;
  std::function<void()> on_end;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<StepOutput>> steps_;
  int64_t ends_ = 0;
  Status why_;
};

// Engine calls pass through; a test decides what Step does.
class ScriptedEngine final : public Engine {
 public:
  explicit ScriptedEngine(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  std::function<Status()> before_step;
  std::function<Status()> before_cancel;
  std::function<Status()> before_describe;
  std::atomic<int64_t> lessons = 0;  // that wait beside other requests
  std::atomic<int64_t> steps = 0;
  std::atomic<int64_t> descriptions = 0;

  const ModelInfo& model_info() const override { return engine_->model_info(); }
  const std::string& kernel_path() const override { return engine_->kernel_path(); }
  const std::string& numa() const override { return engine_->numa(); }
  Status CheckSubmit(std::span<const int32_t> prompt,
                     const SamplingOptions& options) const override {
    return engine_->CheckSubmit(prompt, options);
  }
  int64_t max_waiting() const override { return engine_->max_waiting(); }
  Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options) override {
    return engine_->Submit(prompt, options);
  }
  Status Cancel(int64_t request_id) override {
    if (before_cancel) QUIRE_RETURN_IF_ERROR(before_cancel());
    return engine_->Cancel(request_id);
  }
  Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) override {
    return engine_->Stop(request_id, sample, answer_tokens);
  }
  Result<std::vector<StepOutput>> Step() override {
    ++steps;
    if (before_step) QUIRE_RETURN_IF_ERROR(before_step());
    return engine_->Step();
  }
  bool Idle() const override { return engine_->Idle(); }
  Status Logits(std::span<const std::span<const int32_t>> prompts,
                std::span<float* const> logits) override {
    return engine_->Logits(prompts, logits);
  }
  Result<int64_t> SaveSnapshot(const SnapshotContents& contents, const std::string& path) override {
    return engine_->SaveSnapshot(contents, path);
  }
  Result<SnapshotInfo> LoadSnapshot(const Passport& identity, const std::string& path,
                                    const SnapshotLoadOptions& options) override {
    return engine_->LoadSnapshot(identity, path, options);
  }
  Status AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                     const StoreUseOptions& options) override {
    return engine_->AttachStore(std::move(store), identity, options);
  }
  Status FlushStore(int64_t timeout_ms) override { return engine_->FlushStore(timeout_ms); }
  Status AttachPrefillPeers(const Passport& identity, const PrefillPeerOptions& options) override {
    return engine_->AttachPrefillPeers(identity, options);
  }
  std::vector<PrefillPeerInfo> PrefillPeers() const override { return engine_->PrefillPeers(); }
  Result<std::string> ServePrefill(const Passport& identity,
                                   const TransferListenerOptions& options) override {
    return engine_->ServePrefill(identity, options);
  }
  Status LastPrefillRefusal() const override { return engine_->LastPrefillRefusal(); }
  void EndPrefill(bool at_once) noexcept override { engine_->EndPrefill(at_once); }
  void SetWake(std::function<void()> wake) override { engine_->SetWake(std::move(wake)); }
  Status SetKeptPart(const std::string& cache_salt, int64_t pages) override {
    return engine_->SetKeptPart(cache_salt, pages);
  }
  EngineStats Stats() const override {
    EngineStats stats = engine_->Stats();
    stats.waiting += lessons;
    stats.learning += lessons;
    return stats;
  }
  Result<EngineDescription> Describe() override {
    ++descriptions;
    if (before_describe) QUIRE_RETURN_IF_ERROR(before_describe());
    return engine_->Describe();
  }

 private:
  const std::unique_ptr<Engine> engine_;
};

// A loop whose parts stay within reach.
struct Served {
  explicit Served(const Sizes& sizes = {.pages = 100}, const EngineLoopOptions& options = {})
      : server(sizes) {
    engine_impl = server.engine.get();
    auto owned = std::make_unique<ScriptedEngine>(std::move(server.engine));
    engine = owned.get();
    Result<std::unique_ptr<EngineLoop>> made = EngineLoop::Create(std::move(owned), sink, options);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    loop = *std::move(made);
  }
  ~Served() { Release(); }

  int64_t Submit(const Tokens& prompt, const SamplingOptions& options = Greedy()) {
    const Result<int64_t> id = loop->Submit(prompt, options);
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    return id.ok() ? *id : -1;
  }
  // A request whose forward stands until Release. The loop is idle when this is called.
  int64_t SubmitAndStand(const Tokens& prompt, const SamplingOptions& options = Greedy()) {
    engine->before_step = [this] {
      if (!released) {
        inside.release();
        leave.acquire();
      }
      return Status();
    };
    const int64_t id = Submit(prompt, options);
    inside.acquire();
    stands = true;
    return id;
  }
  void Release() {
    if (!std::exchange(stands, false)) return;
    released = true;
    leave.release();
  }
  void CheckInvariants() {
    const Status status = loop->Run([&](Engine&) {
      engine_impl->CheckInvariants();
      return Status();
    });
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  void ExpectServesOn(uint64_t seed) {
    const Tokens prompt = Text(18, seed);
    const int64_t id = Submit(prompt);
    for (size_t steps = 1; sink->answers()[{id, 0}].reason == FinishReason::kNone; ++steps) {
      ASSERT_TRUE(sink->why().ok()) << sink->why().ToString();
      sink->AwaitSteps(steps);
    }
    ExpectEqual(sink->answers()[{id, 0}], Cold(prompt), "a request afterwards");
    CheckInvariants();
  }

  Server server;
  std::shared_ptr<Recorder> sink = std::make_shared<Recorder>();
  EngineImpl* engine_impl;
  ScriptedEngine* engine;
  std::binary_semaphore inside{0}, leave{0};
  std::atomic<bool> released = false;
  bool stands = false;
  std::unique_ptr<EngineLoop> loop;
};

// The tokens are the first of the whole answer.
void ExpectBeginningOf(const Answer& got, const Answer& whole, const std::string& what) {
  ASSERT_LE(got.tokens.size(), whole.tokens.size()) << what;
  const auto count = static_cast<std::ptrdiff_t>(got.tokens.size());
  EXPECT_EQ(got.tokens, Tokens(whole.tokens.begin(), whole.tokens.begin() + count)) << what;
}

// ---- Answers

TEST(EngineLoop, ThreadsThatSubmitCancelAndStopAtRandomGetTheAnswersOfTheEngineAlone) {
  constexpr int kThreads = 4, kRounds = 3;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::vector<Job> jobs = RandomJobs(24, 50 + seed);
    const Answers alone = Alone(jobs);
    Served served({.pages = 60, .chunk = 16});
    std::mutex mutex;
    std::map<int64_t, size_t> job_of;  // by request
    std::set<int64_t> touched;         // cancelled or stopped
    std::atomic<int64_t> samples = 0;
    const auto work = [&](int thread) {
      RandomSequence random(1000 * seed + static_cast<uint64_t>(thread));
      for (int i = 0; i < kRounds * 8; ++i) {
        const size_t job = static_cast<size_t>(random.Below(std::ssize(jobs)));
        const int64_t id = served.Submit(jobs[job].prompt, jobs[job].options);
        samples += jobs[job].options.n;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          job_of[id] = job;
        }
        if (random.Below(3) > 0) continue;
        const int64_t other = random.Below(id + 1);
        const Status asked = random.Below(2) == 0 ? served.loop->Cancel(other)
                                                  : served.loop->Stop(other, 0, random.Below(4));
        if (random.Below(4) == 0) {
          EXPECT_TRUE(served.loop->Settle().ok());
        }
        if (random.Below(8) == 0) served.CheckInvariants();
        if (!asked.ok()) continue;
        const std::lock_guard<std::mutex> lock(mutex);
        touched.insert(other);
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    served.sink->AwaitEnds(samples);
    served.CheckInvariants();
    const Answers answers = served.sink->answers();
    EXPECT_EQ(std::ssize(answers), samples);
    for (const auto& [key, answer] : answers) {
      const Answer& want = alone.at({static_cast<int64_t>(job_of.at(key.first)), key.second});
      const std::string what = "request " + std::to_string(key.first);
      if (touched.contains(key.first)) {
        ExpectBeginningOf(answer, want, what);
        EXPECT_NE(answer.reason, FinishReason::kError) << answer.error;
      } else {
        ExpectEqual(answer, want, what);
      }
    }
    const EngineStats stats = served.loop->Stats();
    EXPECT_EQ(stats.waiting + stats.running, 0);
  }
}

TEST(EngineLoop, ANewRequestJoinsTheNextStep) {
  Served served;
  const Tokens first = Text(20, 1), second = Text(12, 2);
  const int64_t a = served.SubmitAndStand(first, Greedy(30));
  // The step stands; none of these waits for it.
  const int64_t b = served.Submit(second);
  const int64_t c = served.Submit(Text(9, 3));
  EXPECT_TRUE(served.loop->Cancel(c).ok());
  EXPECT_EQ(served.loop->Stats().waiting, 3);
  served.Release();
  served.sink->AwaitEnds(3);
  Answers answers = served.sink->answers();
  ExpectEqual(answers[{a, 0}], Cold(first, Greedy(30)), "the one that ran");
  ExpectEqual(answers[{b, 0}], Cold(second), "the newcomer");
  EXPECT_EQ((answers[{c, 0}].reason), FinishReason::kCancelled);
  // Both ran together: 30 tokens of one, and 6 of the other among them.
  EXPECT_LT(served.loop->Stats().steps, 34);
}

TEST(EngineLoop, AStopCutsWhatIsBeyond) {
  Served served;
  const Tokens prompt = Text(20, 1);
  int64_t given = 0;
  served.sink->on_step = [&](const std::vector<StepOutput>& outputs) {
    for (const StepOutput& output : outputs) {
      given += std::ssize(output.tokens);
      if (given != 3 || output.tokens.empty()) continue;
      EXPECT_TRUE(served.loop->Stop(output.request_id, 0, 2).ok());
      EXPECT_EQ(served.loop->Stop(output.request_id, 0, 2).code(), StatusCode::kUnknownSequence);
    }
  };
  const int64_t id = served.Submit(prompt, Greedy(30));
  served.sink->AwaitEnds(1);
  const Answer answer = served.sink->answers()[{id, 0}];
  EXPECT_EQ(answer.reason, FinishReason::kStop);
  EXPECT_EQ(answer.completion_tokens, 2);
  EXPECT_EQ(answer.tokens.size(), 3U);
  ExpectBeginningOf(answer, Cold(prompt, Greedy(30)), "stopped");
  served.ExpectServesOn(5);
}

TEST(EngineLoop, IsStillWhileTheEngineIsIdle) {
  Served served;
  served.Submit(Text(5, 1), Greedy(3));
  served.sink->AwaitEnds(1);
  ASSERT_TRUE(served.loop->Settle().ok());
  const int64_t steps = served.engine->steps;
  // Each of these wakes the thread.
  for (int i = 0; i < 20; ++i) served.CheckInvariants();
  EXPECT_EQ(served.engine->steps, steps);
  EXPECT_EQ(steps, served.loop->Stats().steps);
}

// ---- Limits

// A prompt with many documents once filled the queue of everybody.
TEST(EngineLoop, LessonsAreNoRequestsThatWait) {
  Served served({.pages = 100, .sequences = 1, .waiting = 3});
  served.engine->lessons = 100;
  served.SubmitAndStand(Text(5, 1));
  served.Submit(Text(5, 2));
  served.Submit(Text(5, 3));
  EXPECT_EQ(served.loop->Stats().waiting, 103);
  const Status full = served.loop->Submit(Text(5, 4), Greedy()).status();
  EXPECT_EQ(full.code(), StatusCode::kFull);
  EXPECT_NE(full.message().find("Submit: 3 requests wait"), std::string::npos) << full.message();
}

TEST(EngineLoop, RequestsThatWaitAreCountedWhereverTheyAre) {
  Served served({.pages = 100, .sequences = 1, .waiting = 3});
  const int64_t first = served.SubmitAndStand(Text(5, 1));  // it has not come in yet
  served.Submit(Text(5, 2));
  served.Submit(Text(5, 3));
  const Status full = served.loop->Submit(Text(5, 4), Greedy()).status();
  EXPECT_EQ(full.code(), StatusCode::kFull);
  EXPECT_NE(full.message().find("EngineOptions::max_waiting"), std::string::npos);
  // A cancelled one leaves when the step has ended.
  EXPECT_TRUE(served.loop->Cancel(first).ok());
  EXPECT_EQ(served.loop->Submit(Text(5, 4), Greedy()).status().code(), StatusCode::kFull);
  served.Release();
  ASSERT_TRUE(served.loop->Settle().ok());
  served.Submit(Text(5, 4));
  served.sink->AwaitEnds(4);
}

// One was turned away after it had been taken, where a step had preempted another one meanwhile.
TEST(EngineLoop, WhatIsTakenIsNotTurnedAway) {
  const Tokens late = Text(9, 3);
  const Answer want = Cold(late);
  for (int64_t before = 3, taken = 0;; ++before) {
    std::atomic<int64_t> id = -1;
    Served served({.pages = 16, .sequences = 2, .waiting = 1});
    served.engine->before_step = [&] {
      // Together the first two need more pages than there are.
      if (served.engine->steps == 2) served.Submit(Text(20, 2), Greedy(24));
      if (served.engine->steps == before) {
        const Result<int64_t> submitted = served.loop->Submit(late, Greedy());
        if (submitted.ok()) id = *submitted;
        EXPECT_TRUE(submitted.ok() || submitted.status().code() == StatusCode::kFull);
      }
      return Status();
    };
    served.Submit(Text(20, 1), Greedy(24));
    served.sink->AwaitEnds(2);
    ASSERT_TRUE(served.loop->Settle().ok());
    if (served.engine->steps < before) {
      EXPECT_GT(taken, 10);
      EXPECT_GT(served.loop->Stats().preemptions, 0);
      break;
    }
    if (id < 0) continue;
    ++taken;
    served.sink->AwaitEnds(3);
    ExpectEqual(served.sink->answers()[{id, 0}], want, "before step " + std::to_string(before));
  }
}

TEST(EngineLoop, CallsThatWaitAreBounded) {
  Served served({.pages = 100}, {.max_calls = 2});
  served.SubmitAndStand(Text(5, 1));
  std::atomic<int> ok = 0, full = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const Status status = served.loop->Run([](Engine&) { return Status(); });
      if (status.code() == StatusCode::kFull) served.Release();
      (status.ok() ? ok : full) += 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ok, 2);
  EXPECT_EQ(full, 1);
}

// ---- Failures

TEST(EngineLoop, AStepThatFailsForAWhileIsMadeAgain) {
  Served served;
  int failures = 0;
  served.engine->before_step = [&] { return ++failures <= 2 ? Status::OutOfMemory() : Status(); };
  const Tokens prompt = Text(20, 1);
  const int64_t id = served.Submit(prompt);
  served.sink->AwaitEnds(1);
  ExpectEqual(served.sink->answers()[{id, 0}], Cold(prompt), "after two failures");
  EXPECT_EQ(failures, 2 + served.loop->Stats().steps);
}

TEST(EngineLoop, AStepThatFailsForGoodEndsTheRequestsWithItsError) {
  Served served;
  std::atomic<bool> fails = true;
  served.engine->before_step = [&] {
    // Requests that were ended take no memory any more.
    return fails && served.engine->Stats().waiting > 0 ? Status::OutOfMemory() : Status();
  };
  served.Submit(Text(20, 1), {.max_tokens = 5, .n = 2});
  served.Submit(Text(20, 2));
  served.sink->AwaitEnds(3);
  for (const auto& [key, answer] : served.sink->answers()) {
    EXPECT_EQ(answer.reason, FinishReason::kError);
    EXPECT_NE(answer.error.find("OutOfMemory"), std::string::npos) << answer.error;
    EXPECT_EQ(answer.prompt_tokens, 20);
  }
  EXPECT_LE(served.engine->steps, 8) << "tries without end";
  fails = false;
  served.ExpectServesOn(5);
}

TEST(EngineLoop, OneThatCannotEndItsRequestsEnds) {
  Served served;
  served.engine->before_step = [] { return Status::OutOfMemory(); };
  served.engine->before_cancel = [] { return Status::OutOfMemory(); };
  served.Submit(Text(20, 1));
  served.sink->AwaitEnds(1);
  EXPECT_EQ(served.sink->why().code(), StatusCode::kOutOfMemory);
  EXPECT_LE(served.engine->steps, 9);
  EXPECT_EQ(served.loop->Submit(Text(5, 1), Greedy()).status().code(), StatusCode::kOutOfMemory);
}

TEST(EngineLoop, ADefectEndsIt) {
  for (const bool throws : {false, true}) {
    Served served;
    served.engine->before_step = [&]() -> Status {
      if (throws) throw std::runtime_error("check failed: the test");
      return Status(StatusCode::kInternal, "check failed: the test");
    };
    served.Submit(Text(20, 1));
    served.sink->AwaitEnds(1);
    EXPECT_EQ(served.sink->why().ToString(), "Internal: check failed: the test");
    EXPECT_EQ(served.engine->steps, 1);
    const Status refused = served.loop->Submit(Text(5, 1), Greedy()).status();
    EXPECT_EQ(refused.code(), StatusCode::kInternal);
    EXPECT_NE(refused.message().find("check failed: the test"), std::string::npos);
  }
}

TEST(EngineLoop, ASinkThatThrowsEndsItAndIsTold) {
  Served served;
  served.sink->on_step = [](const std::vector<StepOutput>&) {
    throw std::runtime_error("the sink");
  };
  served.Submit(Text(20, 1));
  served.sink->AwaitEnds(1);
  EXPECT_EQ(served.sink->why().ToString(), "Internal: the sink");
}

TEST(EngineLoop, AnyAllocationMayBeRefused) {
  const Tokens prompt = Text(20, 1);
  const Answer want = Cold(prompt, Greedy(3));
  bool refused = true;
  for (int64_t n = 0; refused; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    Served served;
    Result<int64_t> id = 0;
    Status settled;
    {
      const RefuseAllocation refusal(n);
      id = served.loop->Submit(prompt, Greedy(3));
      settled = served.loop->Settle();
      if (id.ok()) served.sink->AwaitEnds(1);
      refused = refusal.refused();
    }
    ASSERT_TRUE(served.sink->why().ok()) << served.sink->why().ToString();
    EXPECT_TRUE(settled.ok()) << settled.ToString();
    if (!id.ok()) {
      EXPECT_EQ(id.status().code(), StatusCode::kOutOfMemory);
    } else {
      const Answer answer = served.sink->answers()[{*id, 0}];
      if (answer.reason == FinishReason::kError) {
        EXPECT_NE(answer.error.find("OutOfMemory"), std::string::npos) << answer.error;
        ExpectBeginningOf(answer, want, "failed");
      } else {
        ExpectEqual(answer, want, "not refused");
      }
    }
    served.ExpectServesOn(5);
    EXPECT_TRUE(refused || n > 30) << "more is allocated: " << n;
  }
}

// ---- Sinks that call back

TEST(EngineLoop, ASinkMaySubmitCancelStopAndRun) {
  Served served;
  const Tokens first = Text(20, 1), second = Text(12, 2);
  std::vector<int64_t> ids;
  served.sink->on_step = [&](const std::vector<StepOutput>& outputs) {
    if (ids.size() != 1) return;
    const Result<int64_t> id = served.loop->Submit(second, Greedy());
    ASSERT_TRUE(id.ok()) << id.status().ToString();
    ids.push_back(*id);
    EXPECT_TRUE(served.loop->Cancel(outputs.at(0).request_id).ok());
    EXPECT_TRUE(served.loop->Settle().ok());
    EXPECT_TRUE(served.loop->Run([](Engine& engine) { return engine.FlushStore(0); }).ok());
    EXPECT_EQ(served.loop->Close().code(), StatusCode::kBadState);
  };
  served.engine->before_step = [&] {
    if (ids.empty()) ids.push_back(0);
    return Status();
  };
  const int64_t id = served.Submit(first, Greedy(30));
  served.sink->AwaitEnds(2);
  Answers answers = served.sink->answers();
  EXPECT_EQ((answers[{id, 0}].reason), FinishReason::kCancelled);
  ExpectEqual(answers[{ids.at(1), 0}], Cold(second), "submitted by the sink");
}

TEST(EngineLoop, TheEndIsToldOnceAndCallsInItAreRefused) {
  Served served;
  std::vector<StatusCode> codes;
  served.sink->on_end = [&] {
    codes = {served.loop->Submit(Text(3, 1), Greedy()).status().code(),
             served.loop->Cancel(0).code(), served.loop->Settle().code(),
             served.loop->Run([](Engine&) { return Status(); }).code(),
             served.loop->Close().code()};
  };
  served.Submit(Text(20, 1), Greedy(200));
  served.sink->AwaitSteps(2);
  EXPECT_TRUE(served.loop->Close().ok());
  EXPECT_TRUE(served.loop->Close().ok());
  EXPECT_EQ(codes,
            (std::vector<StatusCode>{StatusCode::kClosed, StatusCode::kClosed, StatusCode::kOk,
                                     StatusCode::kClosed, StatusCode::kBadState}));
  EXPECT_EQ(served.sink->why().code(), StatusCode::kClosed);
  EXPECT_EQ(served.loop->Stats().running, 0);
}

// ---- The end

// ---- Descriptions

constexpr int64_t kHalfSecond = 500'000'000;

TEST(EngineLoop, DescribesAtMostTwiceASecondAndBetweenSteps) {
  const auto clock = std::make_shared<FakeClock>();
  Served served({.pages = 100}, {.clock = clock});
  const auto described = [&] {
    served.loop->Describe();
    EXPECT_TRUE(served.loop->Settle().ok());
    return served.loop->Describe();
  };
  EXPECT_EQ(served.engine->descriptions, 1);  // by Create
  const auto first = served.loop->Describe();
  EXPECT_TRUE(first->sequences.empty());
  for (int i = 0; i < 10; ++i) EXPECT_EQ(described(), first);
  clock->Advance(kHalfSecond - 1);
  EXPECT_EQ(described(), first);
  EXPECT_EQ(served.engine->descriptions, 1);
  clock->Advance(1);
  EXPECT_NE(described(), first);
  EXPECT_EQ(served.engine->descriptions, 2);
  for (int i = 0; i < 10; ++i) described();
  EXPECT_EQ(served.engine->descriptions, 2);

  // Inside a step the last one is given at once, and the next one comes after it.
  clock->Advance(kHalfSecond);
  served.SubmitAndStand(Text(9, 1), Greedy(4));
  const auto before = served.loop->Describe();
  EXPECT_TRUE(before->sequences.empty());
  EXPECT_EQ(served.engine->descriptions, 2);
  served.Release();
  EXPECT_TRUE(served.loop->Settle().ok());
  EXPECT_EQ(served.engine->descriptions, 3);
  EXPECT_NE(served.loop->Describe(), before);
}

// Ids of the loop and of its engine differ, as a request was refused by the engine alone.
TEST(EngineLoop, DescribesRequestsByTheIdsThatItGave) {
  const auto clock = std::make_shared<FakeClock>();
  Served served({.pages = 100, .sequences = 1}, {.clock = clock});
  EXPECT_TRUE(served.loop
                  ->Run([](Engine& engine) {  // takes the engine's first ids
                    for (int i = 0; i < 3; ++i) {
                      const Result<int64_t> id = engine.Submit(Text(3, 9), Greedy());
                      if (!id.ok()) return id.status();
                      QUIRE_RETURN_IF_ERROR(engine.Cancel(*id));
                    }
                    return engine.Step().status();
                  })
                  .ok());
  const int64_t running = served.SubmitAndStand(Text(9, 1), Greedy(4));
  const int64_t waiting = served.Submit(Text(5, 2), Greedy(4));
  clock->Advance(kHalfSecond);
  served.loop->Describe();
  served.Release();
  EXPECT_TRUE(served.loop->Settle().ok());
  const auto description = served.loop->Describe();
  ASSERT_EQ(description->sequences.size(), 1u);
  EXPECT_EQ(description->sequences[0].request_id, running);
  ASSERT_EQ(description->waiting.size(), 1u);
  EXPECT_EQ(description->waiting[0].request_id, waiting);
}

TEST(EngineLoop, ADescriptionWithoutMemoryLeavesTheLastOne) {
  const auto clock = std::make_shared<FakeClock>();
  Served served({.pages = 100}, {.clock = clock});
  served.engine->before_describe = [] { return Status::OutOfMemory(); };
  clock->Advance(kHalfSecond);
  const auto first = served.loop->Describe();
  EXPECT_TRUE(served.loop->Settle().ok());
  EXPECT_EQ(served.loop->Describe(), first);
  EXPECT_EQ(served.engine->descriptions, 2);  // and it is not tried again at once
  served.ExpectServesOn(7);
}

TEST(EngineLoop, IsDestroyedWithRequestsInAnyState) {
  for (const int64_t steps : {0, 1, 3}) {
    Served served({.pages = 100, .sequences = 2});
    for (uint64_t i = 0; i < 6; ++i) served.Submit(Text(20, i), Greedy(200));
    if (steps > 0) served.sink->AwaitSteps(static_cast<size_t>(steps));
    const std::shared_ptr<Recorder> sink = served.sink;
    served.loop = nullptr;
    EXPECT_EQ(sink->why().code(), StatusCode::kClosed);
  }
}

TEST(EngineLoop, ThreadsThatWaitLearnOfTheEnd) {
  Served served;
  served.SubmitAndStand(Text(5, 1), Greedy(100));
  std::vector<Status> found(3);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { found[0] = served.loop->Run([](Engine&) { return Status(); }); });
  threads.emplace_back([&] { found[1] = served.loop->Settle(); });
  threads.emplace_back([&] { found[2] = served.loop->Close(); });
  // The loop looks at nothing before the step has ended.
  while (served.loop->Cancel(99).code() != StatusCode::kClosed) std::this_thread::yield();
  served.Release();
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : {found[0], found[1]}) {
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kClosed) << status.ToString();
  }
  EXPECT_TRUE(found[2].ok());
}

TEST(EngineLoop, SaysWhichThreadTheSystemDoesNotGive) {
  Server server({.pages = 100});
  const auto sink = std::make_shared<Recorder>();
  Status status;
  {
    const ScopedNoThreads no_threads;
    status = EngineLoop::Create(std::move(server.engine), sink).status();
  }
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.ToString().find("no thread for an engine's loop"), std::string::npos);
  EXPECT_TRUE(sink->why().ok()) << "there was no loop that could end";
}

TEST(EngineLoop, TheHostMayPutSomethingAroundTheThread) {
  std::atomic<int> inside = 0, most = 0;
  {
    Served served({.pages = 100}, {.around = [&](const std::function<void()>& body) {
                    most = ++inside;
                    body();
                    --inside;
                  }});
    served.ExpectServesOn(3);
    EXPECT_EQ(inside, 1);
  }
  EXPECT_EQ(inside, 0);
  EXPECT_EQ(most, 1);
}

TEST(EngineLoop, ABodyThatIsCalledTwiceServesOnce) {
  Served served({.pages = 100}, {.around = [](const std::function<void()>& body) {
                  body();
                  body();
                }});
  served.ExpectServesOn(3);
  EXPECT_TRUE(served.loop->Close().ok());  // the recorder expects one OnEnd
}

// The system gives the id of a thread that was joined to another one, which was then told that it
// is the loop's, and ended the process when it destroyed the loop.
TEST(EngineLoop, AThreadWithTheIdOfTheLoopsIsAnother) {
  Served served;
  std::thread::id loops;
  ASSERT_TRUE(served.loop
                  ->Run([&](Engine&) {
                    loops = std::this_thread::get_id();
                    return Status();
                  })
                  .ok());
  ASSERT_TRUE(served.loop->Close().ok());
  for (int tries = 0; tries < 100; ++tries) {  // as a rule it is the first one
    std::thread another([&] {
      if (std::this_thread::get_id() != loops) return;
      EXPECT_EQ(served.loop->Settle().code(), StatusCode::kClosed);
      EXPECT_TRUE(served.loop->Close().ok());
      tries = 100;
    });
    another.join();
  }
}

TEST(EngineLoop, CreateRefuses) {
  const auto sink = std::make_shared<Recorder>();
  EXPECT_EQ(EngineLoop::Create(nullptr, sink).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(EngineLoop::Create(std::move(Server().engine), nullptr).status().code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(EngineLoop::Create(std::move(Server().engine), sink, {.max_calls = 0}).status().code(),
            StatusCode::kBadArgument);
  Server busy;
  busy.Submit(Text(3, 1), Greedy());
  EXPECT_EQ(EngineLoop::Create(std::move(busy.engine), sink).status().code(),
            StatusCode::kBadArgument);
}

// ---- The table of calls and states

// What the loop is in: idle; inside a step; in the sink; closed; ended by a defect.
enum class When : uint8_t { kIdle, kStepping, kSink, kClosed, kFault };
constexpr int kColumns = 5;

// w: waits for the step, and is Ok. ?: Internal.
struct Row {
  const char* call;
  const char* outcomes;
};
// clang-format off
constexpr Row kRows[] = {
  //                                  idle step sink closed fault
  {"Submit",                          "o o o X ?"},
  {"Submit: no tokens",               "A A A A A"},
  {"Submit: longer than the cache",   "L L L L L"},
  {"Cancel",                          "U o o X ?"},
  {"Cancel: an id that was not given", "U U U X ?"},
  {"Stop",                            "U o o X ?"},
  {"Stop: more than was given out",   "U A A X ?"},
  {"Stop: a sample that is not there", "U U U X ?"},
  {"Run",                             "o w o X ?"},
  {"Settle",                          "o o o X ?"},
  {"Settle: after a cancel",          "o w o X ?"},
  {"Close",                           "o w S o o"},
  {"Create",                          "o o o o o"},
  {"CheckSubmit",                     "o o o o o"},
  {"CheckSubmit: no tokens",          "A A A A A"},
  {"Stats",                           "o o o o o"},
  {"Describe",                        "o o o o o"},
  {"PrefillPeers",                    "o o o o o"},
  {"model_info",                      "o o o o o"},
  {"kernel_path",                     "o o o o o"},
  {"numa",                            "o o o o o"},
};
// clang-format on

std::map<std::string, std::function<Status()>> CallsOf(EngineLoop& loop) {
  std::map<std::string, std::function<Status()>> calls;
  const auto submit = [&loop](const Tokens& prompt, int64_t max_tokens) {
    return Answered(loop.Submit(prompt, Greedy(max_tokens)));
  };
  calls["Submit"] = [=] { return submit(Text(9, 7), 3); };
  calls["Submit: no tokens"] = [=] { return submit({}, 3); };
  calls["Submit: longer than the cache"] = [=] { return submit({1}, 1000); };
  calls["Cancel"] = [&] { return loop.Cancel(0); };
  calls["Cancel: an id that was not given"] = [&] { return loop.Cancel(77); };
  calls["Stop"] = [&] { return loop.Stop(0, 0, 0); };
  calls["Stop: more than was given out"] = [&] { return loop.Stop(0, 0, 100); };
  calls["Stop: a sample that is not there"] = [&] { return loop.Stop(0, 1, 0); };
  calls["Run"] = [&] { return loop.Run([](Engine& engine) { return engine.FlushStore(0); }); };
  calls["Settle"] = [&] { return loop.Settle(); };
  calls["Settle: after a cancel"] = [&] {
    static_cast<void>(loop.Cancel(0));
    return loop.Settle();
  };
  calls["Close"] = [&] { return loop.Close(); };
  calls["Create"] = [] {
    return Answered(EngineLoop::Create(std::move(Server().engine), std::make_shared<Recorder>()));
  };
  calls["CheckSubmit"] = [&] { return loop.CheckSubmit(Text(9, 7), Greedy()); };
  calls["CheckSubmit: no tokens"] = [&] { return loop.CheckSubmit({}, Greedy()); };
  calls["Stats"] = [&] {
    EXPECT_EQ(loop.Stats().pages_total, 100);
    return Status();
  };
  calls["Describe"] = [&] {
    EXPECT_EQ(loop.Describe()->stats.pages_total, 100);
    return Status();
  };
  calls["PrefillPeers"] = [&] {
    EXPECT_TRUE(loop.PrefillPeers().empty());
    return Status();
  };
  calls["model_info"] = [&] {
    EXPECT_EQ(loop.model_info().vocab_size, FakeModel::kVocabSize);
    return Status();
  };
  calls["kernel_path"] = [&] {
    EXPECT_FALSE(loop.kernel_path().empty());
    return Status();
  };
  calls["numa"] = [&] {
    EXPECT_EQ(loop.numa(), "");
    return Status();
  };
  return calls;
}

char LetterIn(When when, const std::string& call) {
  char letter = ' ';
  bool called = false;  // as `letter`, used by the sink until the loop is gone
  Served served;
  const std::function<Status()> run = CallsOf(*served.loop).at(call);
  if (when == When::kClosed) {
    EXPECT_TRUE(served.loop->Close().ok());
  }
  if (when == When::kFault) {
    served.engine->before_step = [] { return Status(StatusCode::kInternal, "the test"); };
    served.Submit(Text(5, 1));
    served.sink->AwaitEnds(1);
    EXPECT_EQ(served.sink->why().code(), StatusCode::kInternal);
    EXPECT_TRUE(served.loop->Close().ok());  // what ends is told before it is over
  }
  if (when == When::kSink) {
    served.sink->on_step = [&](const std::vector<StepOutput>&) {
      if (!std::exchange(called, true)) letter = LetterOf(run());
    };
    served.Submit(Text(5, 1), Greedy(3));
    served.sink->AwaitEnds(1);
    return letter;
  }
  if (when != When::kStepping) return LetterOf(run());
  served.SubmitAndStand(Text(5, 1), Greedy(3));
  std::binary_semaphore done{0};
  std::thread thread([&] {
    letter = LetterOf(run());
    if (served.released) letter = letter == 'o' ? 'w' : letter;
    done.release();
  });
  const bool waits = call == "Run" || call == "Settle: after a cancel" || call == "Close";
  if (!waits) done.acquire();  // else it would not return before the step ends
  served.Release();
  thread.join();
  return letter;
}

TEST(EngineLoopTable, EachCellIsAsStated) {
  for (const Row& row : kRows) {
    std::istringstream outcomes(row.outcomes);
    for (int column = 0; column < kColumns; ++column) {
      char expected = ' ';
      ASSERT_TRUE(outcomes >> expected);
      EXPECT_EQ(LetterIn(static_cast<When>(column), row.call), expected)
          << row.call << ", column " << column;
    }
  }
}

TEST(EngineLoopTable, HasARowForEachCallOfTheHeader) {
  std::set<std::string> declared = MethodsOf("engine_loop.h", "EngineLoop", "virtual");
  declared.merge(MethodsOf("engine_loop.h", "EngineLoop", "static"));
  std::set<std::string> rows;
  for (const Row& row : kRows) rows.insert(MethodOf(row.call));
  EXPECT_EQ(rows, declared);
}

}  // namespace
}  // namespace quire
