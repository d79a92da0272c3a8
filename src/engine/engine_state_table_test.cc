// What every public call of Engine answers in every state of it: one row per call, one letter per
// state. A cell is tried on an engine of its own. What is refused, and every question, changes
// nothing that can be observed: the same requests end with the same answers and counts as on an
// engine that was not asked. Whatever the outcome, the engine is sound and serves on. A table
// without a row for a call of the header fails.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <semaphore>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/testing/fake_chunk_store.h"
#include "engine/testing/test_server.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/state_table.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

// The columns, in their order. They say what has happened to request kFirst; request kSecond runs
// or waits beside it from kWaiting on.
enum class When : uint8_t {
  kFresh,     // no request yet
  kWaiting,   // submitted
  kFull,      // the same, and the queue is full
  kRunning,   // one token of each answer is given out
  kLoading,   // it waits for the store, which brings its KV
  kEnding,    // it was cancelled, and no step has reported that
  kEnded,     // its answer is complete, its KV retained
  kError,     // the forward failed for it alone: it ended with kError
  kFailed,    // as kRunning, and a step has failed for want of memory
  kRefusing,  // as kRunning, with a store whose fetches and puts fail
  kClosed,    // as kRunning, with a store that was closed meanwhile
  kNoPrefix,  // kEnded without a prefix cache
  kStepping,  // as kRunning, and another thread is inside Step
};
constexpr const char* kNames[] = {"fresh",  "waiting",   "full",    "running", "loading",
                                  "ending", "ended",     "error",   "failed",  "refusing",
                                  "closed", "no prefix", "stepping"};
constexpr int kColumns = std::size(kNames);

constexpr int64_t kFirst = 0, kSecond = 1, kUnknownRequest = 77;
constexpr int64_t kMilli = 1'000'000;

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
Tokens FirstPrompt() { return Text(20, 1); }
Tokens SecondPrompt() { return Text(12, 2); }
Tokens NewPrompt() { return Text(18, 3); }
Tokens SavedPrompt() { return Text(24, 4); }

SamplingOptions Greedy() { return {.max_tokens = 6, .logprobs = 0, .ignore_eos = true}; }

Answer Cold(const Tokens& prompt) {
  return Server({.pages = 100, .prefix_cache = false}).Generate(prompt, Greedy());
}

Passport Identity() {
  Passport identity;
  identity.model = "fake";
  identity.block_tokens = 8;
  return identity;
}

// Files that all cells read.
struct Files {
  Files() {
    WriteTestModel(folder, TestModel());
    Server writer({.pages = 100});
    writer.Generate(SavedPrompt(), Greedy());
    const auto saved = writer.engine->SaveSnapshot(
        {.identity = Identity(), .tokens = SavedPrompt()}, folder.File("snapshot"));
    EXPECT_TRUE(saved.ok()) << saved.status().ToString();
  }
  TestFolder folder;
};
const Files& TheFiles() {
  static const Files files;
  return files;
}

// One way to make a call.
struct Call {
  std::function<Status()> run;
  bool changes = false;              // when it is Ok
  std::optional<int64_t> ends = {};  // this request, when it is Ok
};
using Calls = std::map<std::string, Call>;

class Scene {
 public:
  explicit Scene(When when) : when_(when) {
    server_ = MakeServer();
    Enter();
  }
  ~Scene() {
    EndStep();
    server_ = nullptr;
    EXPECT_EQ(store_->live_fetches, 0);
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  Calls AllCalls() {
    Calls calls;
    AddRequestCalls(&calls);
    AddStepCalls(&calls);
    AddQuestions(&calls);
    AddSnapshotCalls(&calls);
    AddStoreCalls(&calls);
    AddPrefillCalls(&calls);
    return calls;
  }
  // All that a caller and the store see, and the cache.
  std::vector<uint64_t> Observe() const {
    std::vector<uint64_t> seen = Counts();
    seen.push_back(server_->engine->cache().StateDigest());
    return seen;
  }
  std::vector<uint64_t> Counts() const {
    using Words = std::array<uint64_t, sizeof(EngineStats) / sizeof(uint64_t)>;
    EngineStats stats = server_->engine->Stats();
    // FlushStore offers a closed store its chunks again: each is one more that was refused.
    if (when_ == When::kClosed) stats.refused_chunks = 0;
    const auto words = std::bit_cast<Words>(stats);
    std::vector<uint64_t> seen(words.begin(), words.end());
    seen.push_back(server_->engine->Idle() ? 1 : 0);
    for (const int64_t count : {store_->fetches, std::ssize(store_->puts), store_->flushes})
      seen.push_back(static_cast<uint64_t>(count));
    return seen;
  }
  void Finish() {
    EndStep();
    server_->engine->CheckInvariants();
    server_->Finish();
  }
  const Answers& answers() const { return server_->answers; }
  // A step whose n-th allocation is refused, and whether it came to that one.
  Status StepRefusing(int64_t n, bool* refused) {
    Result<std::vector<StepOutput>> outputs = [&] {
      const RefuseAllocation refusal(n);
      auto made = server_->engine->Step();
      *refused = refusal.refused();
      return made;
    }();
    server_->engine->CheckInvariants();
    QUIRE_RETURN_IF_ERROR(outputs.status());
    server_->Take(*std::move(outputs));
    return {};
  }
  // A request after all that, whose prompt is new or that of kFirst.
  void ExpectServesOn() {
    for (const Tokens& prompt : {NewPrompt(), FirstPrompt()})
      ExpectEqual(server_->Generate(prompt, Greedy()), Cold(prompt), "a request afterwards");
    EXPECT_TRUE(server_->engine->Idle());
  }

 private:
  bool has_store() const {
    return when_ == When::kLoading || when_ == When::kRefusing || when_ == When::kClosed;
  }
  std::unique_ptr<Server> MakeServer() const {
    return std::make_unique<Server>(Sizes{.pages = 100,
                                          .waiting = when_ == When::kFull ? 2 : 100,
                                          .prefix_cache = when_ != When::kNoPrefix,
                                          .clock = clock_});
  }
  Status Attach(Engine* engine, std::shared_ptr<ChunkStore> store, int64_t timeout_ms = 1000) {
    return engine->AttachStore(std::move(store), Identity(),
                               {.chunk_tokens = 8, .load_timeout_ms = timeout_ms, .clock = clock_});
  }
  void ExpectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }

  void Enter() {
    if (when_ == When::kLoading) {
      const auto writer = MakeServer();
      ExpectOk(Attach(writer->engine.get(), store_));
      writer->Generate(FirstPrompt(), Greedy());
      store_->chunk_ns = 40 * kMilli;
    }
    if (when_ == When::kRefusing) {
      const auto refuse = [] { return Status(StatusCode::kUnavailable, "the test"); };
      store_->fetch_fault = refuse;
      store_->put_fault = refuse;
    }
    if (has_store()) ExpectOk(Attach(server_->engine.get(), store_));
    if (when_ == When::kFresh) return;
    EXPECT_EQ(server_->Submit(FirstPrompt(), Greedy()), kFirst);
    EXPECT_EQ(server_->Submit(SecondPrompt(), Greedy()), kSecond);
    if (when_ == When::kWaiting || when_ == When::kFull) return;
    if (when_ == When::kError) {
      server_->model->fault = [](std::span<const int32_t> tokens) {
        const bool is_first = tokens.front() == FirstPrompt().front();
        return is_first ? Status(StatusCode::kInternal, "the test") : Status();
      };
    }
    if (when_ == When::kClosed) store_->Close();
    ExpectOk(server_->Step());
    server_->model->fault = nullptr;
    if (when_ == When::kEnding) ExpectOk(server_->engine->Cancel(kFirst));
    if (when_ == When::kFailed) {
      EXPECT_EQ(StepWithoutMemory().code(), StatusCode::kOutOfMemory);
    }
    if (when_ == When::kEnded || when_ == When::kNoPrefix) server_->Finish();
    if (when_ == When::kStepping) BeginStep();
    ExpectState();
  }
  // That the scene is what its column says.
  void ExpectState() {
    const EngineStats stats = server_->engine->Stats();
    EXPECT_EQ(stats.loading, when_ == When::kLoading ? 1 : 0);
    EXPECT_EQ(stats.retained_sequences > 0, when_ == When::kEnded);
    const Answer& first = server_->answers[{kFirst, 0}];
    EXPECT_EQ(first.reason == FinishReason::kError, when_ == When::kError);
    const bool refuses = when_ == When::kRefusing || when_ == When::kClosed;
    EXPECT_EQ(stats.misses[static_cast<size_t>(MissReason::kUnavailable)], refuses ? 1 : 0);
  }

  Status Step() {
    if (when_ == When::kStepping && thread_.joinable()) return server_->engine->Step().status();
    return server_->Step();
  }
  // The first allocation of the step is refused.
  Status StepWithoutMemory() {
    bool refused = false;
    return StepRefusing(0, &refused);
  }
  // A thread that stands in the forward until EndStep.
  void BeginStep() {
    server_->model->fault = [this](std::span<const int32_t>) {
      inside_.release();
      leave_.acquire();
      return Status();
    };
    thread_ = std::thread([this] {
      ExpectOk(server_->Step());
      inside_.release();  // also if it has not come to the forward
    });
    inside_.acquire();
  }
  void EndStep() {
    if (!thread_.joinable()) return;
    leave_.release();
    thread_.join();
    server_->model->fault = nullptr;
  }

  void AddRequestCalls(Calls* calls) {
    Calls& c = *calls;
    Engine& e = *server_->engine;
    const auto submit = [&e](const Tokens& prompt, const SamplingOptions& options) {
      return Answered(e.Submit(prompt, options));
    };
    c["Submit"] = {[=] { return submit(NewPrompt(), Greedy()); }, true};
    c["Submit: no tokens"] = {[=] { return submit({}, Greedy()); }};
    c["Submit: a token outside of the vocabulary"] = {[=] {
      return submit({1, static_cast<int32_t>(FakeModel::kVocabSize)}, Greedy());
    }};
    c["Submit: an option out of range"] = {[=] { return submit({1}, {.max_tokens = -1}); }};
    c["Submit: longer than the cache"] = {[=] { return submit({1}, {.max_tokens = 1000}); }};
    c["Cancel"] = {[&e] { return e.Cancel(kFirst); }, true, kFirst};
    c["Cancel: another"] = {[&e] { return e.Cancel(kSecond); }, true, kSecond};
    c["Cancel: an id that was not given"] = {[&e] { return e.Cancel(kUnknownRequest); }};
    c["Stop"] = {[&e] { return e.Stop(kFirst, 0, 0); }, true, kFirst};
    c["Stop: another"] = {[&e] { return e.Stop(kSecond, 0, 0); }, true, kSecond};
    c["Stop: behind what was given out"] = {[&e] { return e.Stop(kFirst, 0, 100); }};
    c["Stop: a sample that is not there"] = {[&e] { return e.Stop(kFirst, 1, 0); }};
  }
  void AddStepCalls(Calls* calls) {
    (*calls)["Step"] = {[this] { return Step(); }, true};
    (*calls)["Step: without memory"] = {[this] { return StepWithoutMemory(); }, true};
  }
  void AddQuestions(Calls* calls) {
    Calls& c = *calls;
    Engine& e = *server_->engine;
    c["model_info"] = {[&e] {
      EXPECT_EQ(e.model_info().vocab_size, FakeModel::kVocabSize);
      return Status();
    }};
    c["kernel_path"] = {[&e] {
      EXPECT_FALSE(e.kernel_path().empty());
      return Status();
    }};
    c["numa"] = {[&e] {
      EXPECT_EQ(e.numa(), "");
      return Status();
    }};
    c["max_waiting"] = {[this, &e] {
      EXPECT_EQ(e.max_waiting(), when_ == When::kFull ? 2 : 100);
      return Status();
    }};
    c["CheckSubmit"] = {[&e] { return e.CheckSubmit(NewPrompt(), Greedy()); }};
    c["CheckSubmit: no tokens"] = {[&e] { return e.CheckSubmit({}, Greedy()); }};
    c["CheckSubmit: longer than the cache"] = {
        [&e] { return e.CheckSubmit(NewPrompt(), {.max_tokens = 1000}); }};
    c["Idle"] = {[this, &e] {
      const bool none = when_ == When::kFresh || when_ == When::kEnded || when_ == When::kNoPrefix;
      EXPECT_EQ(e.Idle(), none);
      return Status();
    }};
    c["Stats"] = {[&e] {
      EXPECT_EQ(e.Stats().pages_in_use + e.Stats().pages_free, e.Stats().pages_total);
      return Status();
    }};
    c["SetKeptPart"] = {[&e] { return e.SetKeptPart("a", 3); }};
    c["SetKeptPart: a negative number"] = {[&e] { return e.SetKeptPart("a", -1); }};
    c["Describe"] = {[&e]() -> Status {
      QUIRE_ASSIGN_OR_RETURN(const EngineDescription description, e.Describe());
      EXPECT_FALSE(description.cut);
      return {};
    }};
    const auto logits = [this, &e](const Tokens& prompt) {
      logits_.assign(prompt.size() * FakeModel::kVocabSize, 0);
      const std::span<const int32_t> tokens(prompt);
      float* const to = logits_.data();
      return e.Logits({&tokens, 1}, {&to, 1});
    };
    c["Logits"] = {[=] { return logits(NewPrompt()); }};
    c["Logits: no tokens"] = {[=] { return logits({}); }};
    EngineOptions options{.model_directory = TheFiles().folder.path(),
                          .dtype = DType::kF32,
                          .threads = 1,
                          .kv_bytes = 1 << 20};
    c["PlanMemory"] = {[=] { return Answered(Engine::PlanMemory(options)); }};
    c["Create"] = {[=] { return Answered(Engine::Create(options)); }};
    options.model_directory = TheFiles().folder.File("none");
    c["PlanMemory: a folder that is not there"] = {
        [=] { return Answered(Engine::PlanMemory(options)); }};
    c["Create: a folder that is not there"] = {[=] { return Answered(Engine::Create(options)); }};
  }
  void AddSnapshotCalls(Calls* calls) {
    Calls& c = *calls;
    Engine& e = *server_->engine;
    const std::string out = folder_.File("out"), lost = folder_.File("none/out");
    const std::string in = TheFiles().folder.File("snapshot");
    const auto save = [&e](const Tokens& tokens, const std::string& path) {
      return Answered(e.SaveSnapshot({.identity = Identity(), .tokens = tokens}, path));
    };
    const auto load = [&e](const std::string& model, const std::string& path) {
      Passport identity = Identity();
      identity.model = model;
      return Answered(e.LoadSnapshot(identity, path, {}));
    };
    c["SaveSnapshot"] = {[=] { return save(FirstPrompt(), out); }};
    c["SaveSnapshot: tokens that nobody computed"] = {[=] { return save(NewPrompt(), out); }};
    c["SaveSnapshot: a folder that is not there"] = {[=] { return save(FirstPrompt(), lost); }};
    c["LoadSnapshot"] = {[=] { return load("fake", in); }, true};
    c["LoadSnapshot: a file that is not there"] = {[=] { return load("fake", lost); }};
    c["LoadSnapshot: of another model"] = {[=] { return load("another", in); }};
  }
  void AddStoreCalls(Calls* calls) {
    Calls& c = *calls;
    Engine& e = *server_->engine;
    c["AttachStore"] = {[this, &e] { return Attach(&e, other_); }, true};
    c["AttachStore: none"] = {[this, &e] { return Attach(&e, nullptr); }};
    c["AttachStore: an option out of range"] = {[this, &e] { return Attach(&e, other_, 0); }};
    c["AttachStore: a closed store"] = {[this, &e] {
      other_->Close();
      return Attach(&e, other_);
    }};
    const auto flush = [&e](int64_t timeout_ms) { return e.FlushStore(timeout_ms); };
    c["FlushStore"] = {[=] { return flush(10); }, true};
    c["FlushStore: no time"] = {[=] { return flush(0); }, true};
    c["FlushStore: a time out of range"] = {[=] { return flush(-1); }};
    c["FlushStore: a time that overflows"] = {
        [=] { return flush(std::numeric_limits<int64_t>::max()); }};
  }
  void AddPrefillCalls(Calls* calls) {
    Calls& c = *calls;
    Engine& e = *server_->engine;
    const std::string here = "unix:" + folder_.File("here");
    const auto attach = [&e](std::vector<std::string> addresses) {
      return e.AttachPrefillPeers(Identity(), {.addresses = std::move(addresses)});
    };
    const auto serve = [&e](const std::string& endpoint) {
      return Answered(e.ServePrefill(Identity(), {.endpoint = endpoint}));
    };
    c["AttachPrefillPeers: one that is not there"] = {[=] { return attach({here}); }, true};
    c["AttachPrefillPeers: none"] = {[=] { return attach({}); }};
    c["AttachPrefillPeers: a second time"] = {[=] {
                                                static_cast<void>(attach({here}));
                                                return attach({here});
                                              },
                                              true};
    c["PrefillPeers"] = {[&e] {
      EXPECT_TRUE(e.PrefillPeers().empty());
      return Status();
    }};
    c["ServePrefill"] = {[=] { return serve(here); }, true};
    c["ServePrefill: no address"] = {[=] { return serve("nowhere"); }};
    c["ServePrefill: a second time"] = {[=] {
                                          static_cast<void>(serve(here));
                                          return serve(here + "2");
                                        },
                                        true};
    c["LastPrefillRefusal"] = {[&e] { return e.LastPrefillRefusal(); }};
    c["EndPrefill"] = {[&e] {
      e.EndPrefill(false);
      return Status();
    }};
    c["SetWake"] = {[&e] {
      e.SetWake([] {});
      return Status();
    }};
  }

  const When when_;
  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const std::shared_ptr<FakeChunkStore> store_ = std::make_shared<FakeChunkStore>(clock_);
  const std::shared_ptr<FakeChunkStore> other_ = std::make_shared<FakeChunkStore>(clock_);
  TestFolder folder_;
  std::vector<float> logits_;
  std::unique_ptr<Server> server_;
  std::counting_semaphore<2> inside_{0}, leave_{0};
  std::thread thread_;
};

// How a scene ends on which no call is made.
struct Ended {
  Answers answers;
  std::vector<uint64_t> counts;
};
Ended EndOf(When when) {
  Scene scene(when);
  scene.Finish();
  Ended ended{scene.answers(), scene.Counts()};
  scene.ExpectServesOn();
  for (const auto& [key, answer] : ended.answers) {
    if (answer.reason != FinishReason::kLength) continue;
    const Answer want = Cold(key.first == kFirst ? FirstPrompt() : SecondPrompt());
    ExpectEqual(answer, want, "request " + std::to_string(key.first));
  }
  return ended;
}

// `cut`: the request was ended before.
void ExpectAnswer(const Answer& answer, const Answer& want, bool cut) {
  if (!cut) {
    ExpectEqual(answer, want, "all of the answer");
    return;
  }
  EXPECT_NE(answer.reason, FinishReason::kNone);
  ASSERT_LE(answer.tokens.size(), want.tokens.size());
  const auto count = static_cast<std::ptrdiff_t>(answer.tokens.size());
  EXPECT_EQ(answer.tokens, Tokens(want.tokens.begin(), want.tokens.begin() + count));
}

// All that would be given out without the call is given out, but of the request that it ended.
void ExpectAnswers(const Answers& got, const Ended& ended, std::optional<int64_t> ends) {
  for (const auto& [key, want] : ended.answers) {
    SCOPED_TRACE("request " + std::to_string(key.first));
    ASSERT_TRUE(got.contains(key));
    ExpectAnswer(got.at(key), want, key.first == ends);
  }
  for (const auto& [key, answer] : got) {
    if (!ended.answers.contains(key)) ExpectEqual(answer, Cold(NewPrompt()), "the new request");
  }
}

void ExpectCell(const TableRow& row, When when, char expected, const Ended& ended) {
  Scene scene(when);
  const Calls calls = scene.AllCalls();
  const Call& call = calls.at(row.call);
  const std::vector<uint64_t> before = scene.Observe();
  const Status status = call.run();
  EXPECT_EQ(LetterOf(status), expected) << status.ToString();
  const bool kept = !status.ok() || !call.changes;
  if (kept) {
    EXPECT_EQ(scene.Observe(), before) << "a refused call, or a question, changed something";
  }
  scene.Finish();
  if (kept) {
    EXPECT_EQ(scene.Counts(), ended.counts) << "a refused call, or a question, has an effect";
  }
  ExpectAnswers(scene.answers(), ended, status.ok() ? call.ends : std::nullopt);
  scene.ExpectServesOn();
}

// clang-format off
constexpr TableRow kRows[] = {
  // fresh wait full run load ending ended error failed refus closed nopref step
  {"model_info",                                "o o o o o o o o o o o o o"},
  {"kernel_path",                               "o o o o o o o o o o o o o"},
  {"numa",                                      "o o o o o o o o o o o o o"},
  {"Idle",                                      "o o o o o o o o o o o o o"},
  {"Stats",                                     "o o o o o o o o o o o o o"},
  {"Describe",                                  "o o o o o o o o o o o o S"},
  {"SetKeptPart",                               "o o o o o o o o o o o S S"},
  {"SetKeptPart: a negative number",            "A A A A A A A A A A A S S"},
  {"PlanMemory",                                "o o o o o o o o o o o o o"},
  {"PlanMemory: a folder that is not there",    "N N N N N N N N N N N N N"},
  {"Create",                                    "o o o o o o o o o o o o o"},
  {"Create: a folder that is not there",        "N N N N N N N N N N N N N"},
  {"max_waiting",                               "o o o o o o o o o o o o o"},
  {"CheckSubmit",                               "o o o o o o o o o o o o o"},
  {"CheckSubmit: no tokens",                    "A A A A A A A A A A A A A"},
  {"CheckSubmit: longer than the cache",        "L L L L L L L L L L L L L"},
  {"Submit",                                    "o o F o o o o o o o o o S"},
  {"Submit: no tokens",                         "A A A A A A A A A A A A S"},
  {"Submit: a token outside of the vocabulary", "A A A A A A A A A A A A S"},
  {"Submit: an option out of range",            "A A A A A A A A A A A A S"},
  {"Submit: longer than the cache",             "L L L L L L L L L L L L S"},
  {"Cancel",                                    "U o o o o U U U o o o U S"},
  {"Cancel: another",                           "U o o o o o U o o o o U S"},
  {"Cancel: an id that was not given",          "U U U U U U U U U U U U S"},
  {"Stop",                                      "U o o o o U U U o o o U S"},
  {"Stop: another",                             "U o o o o o U o o o o U S"},
  {"Stop: behind what was given out",           "U A A A A U U U A A A U S"},
  {"Stop: a sample that is not there",          "U U U U U U U U U U U U S"},
  {"Step",                                      "o o o o o o o o o o o o S"},
  {"Step: without memory",                      "o M M M M M o M M M M o -"},
  {"Logits",                                    "o o o o o o o o o o o o S"},
  {"Logits: no tokens",                         "A A A A A A A A A A A A S"},
  {"SaveSnapshot",                              "N N N N N N o N N N N S S"},
  {"SaveSnapshot: tokens that nobody computed", "N N N N N N N N N N N S S"},
  {"SaveSnapshot: a folder that is not there",  "N N N N N N N N N N N S S"},
  {"LoadSnapshot",                              "o o o o o o o o o o o S S"},
  {"LoadSnapshot: a file that is not there",    "N N N N N N N N N N N S S"},
  {"LoadSnapshot: of another model",            "I I I I I I I I I I I S S"},
  {"AttachStore",                               "o o o o S o o o o S S o S"},
  {"AttachStore: none",                         "A A A A S A A A A S S A S"},
  {"AttachStore: an option out of range",       "A A A A S A A A A S S A S"},
  {"AttachStore: a closed store",               "X X X X S X X X X S S X S"},
  {"FlushStore",                                "o o o o o o o o o o X o S"},
  {"FlushStore: no time",                       "o o o o o o o o o o X o S"},
  {"FlushStore: a time out of range",           "A A A A A A A A A A A A S"},
  {"FlushStore: a time that overflows",         "A A A A A A A A A A A A S"},
  {"AttachPrefillPeers: one that is not there", "o o o o o o o o o o o o S"},
  {"AttachPrefillPeers: none",                  "A A A A A A A A A A A A S"},
  {"AttachPrefillPeers: a second time",         "S S S S S S S S S S S S S"},
  {"PrefillPeers",                              "o o o o o o o o o o o o o"},
  {"ServePrefill",                              "o o o o o o o o o o o o S"},
  {"ServePrefill: no address",                  "A A A A A A A A A A A A S"},
  {"ServePrefill: a second time",               "S S S S S S S S S S S S S"},
  {"LastPrefillRefusal",                        "o o o o o o o o o o o o o"},
  {"EndPrefill",                                "o o o o o o o o o o o o o"},
  {"SetWake",                                   "o o o o o o o o o o o o o"},
};
// clang-format on

TEST(EngineStateTableRows, HasARowForEachCallOfTheHeader) {
  std::set<std::string> declared = MethodsOf("engine.h", "Engine", "virtual");
  declared.merge(MethodsOf("engine.h", "Engine", "static"));
  std::set<std::string> found, rows, made;
  for (const TableRow& row : kRows) {
    EXPECT_TRUE(rows.insert(row.call).second) << row.call << " is there twice";
    found.insert(MethodOf(row.call));
  }
  EXPECT_EQ(found, declared) << "rows, and what the header declares";
  for (const auto& [name, call] : Scene(When::kFresh).AllCalls()) made.insert(name);
  EXPECT_EQ(rows, made) << "rows, and calls that are tried";
}

// Each allocation of a step, one after another: the step fails and can be made again, or does
// without, or ends a request with kError. No token is wrong or given twice.
TEST(EngineAllocations, AnyAllocationOfAStepMayBeRefused) {
  for (const When when : {When::kWaiting, When::kRunning, When::kLoading, When::kEnding,
                          When::kRefusing, When::kClosed}) {
    const Ended ended = EndOf(when);
    bool refused = true;
    for (int64_t n = 0; refused; ++n) {
      SCOPED_TRACE(kNames[static_cast<size_t>(when)] + std::string(", allocation ") +
                   std::to_string(n));
      Scene scene(when);
      const Status status = scene.StepRefusing(n, &refused);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kOutOfMemory) << status.ToString();
      scene.Finish();
      for (const auto& [key, want] : ended.answers) {
        const bool failed = scene.answers().at(key).reason == FinishReason::kError;
        ExpectAnswer(scene.answers().at(key), want, failed);
      }
      scene.ExpectServesOn();
      EXPECT_TRUE(refused || n > 10) << "a step allocates more: " << n;
    }
  }
}

class EngineStateTable : public testing::TestWithParam<int> {};

TEST_P(EngineStateTable, EachCellIsAsStated) {
  const int column = GetParam();
  const Ended ended = EndOf(static_cast<When>(column));
  for (const TableRow& row : kRows) {
    SCOPED_TRACE(std::string(row.call) + ", " + kNames[column]);
    std::istringstream outcomes(row.outcomes);
    std::vector<char> letters;
    for (char letter = 0; outcomes >> letter;) letters.push_back(letter);
    ASSERT_EQ(std::ssize(letters), kColumns);
    const char expected = letters[static_cast<size_t>(column)];
    if (expected != '-') ExpectCell(row, static_cast<When>(column), expected, ended);
  }
}

INSTANTIATE_TEST_SUITE_P(Columns, EngineStateTable, testing::Range(0, kColumns));

}  // namespace
}  // namespace quire
