// The thread works in rounds: take what others asked for, carry it out, step, tell the sink.
//
// Invariants.
// - What is marked as the thread's is touched by the loop's thread alone, and so is `engine_`, but
//   for what it tells all threads; `mutex_` guards the rest. No call of the sink is made with the
//   mutex held, and none of the engine but Stats and Idle, which wait for nothing.
// - A request is in `live_` from Submit until its last end is reported. Its cancel and its stops
//   are marks in there, so they need no memory and there is at most one of each.
// - What a round could not do for want of memory stays where it is, and the next round begins with
//   it. After kTries rounds without success all requests end with kError; after three times as many
//   the loop ends.
#include "quire/engine_loop.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "base/start_thread.h"

namespace quire {
namespace {

// Memory that is not there now is rarely there a moment later, unless the engine itself gave some
// back meanwhile; a failed step tells nobody anything, so there are few.
constexpr int kTries = 3;

// People see no more of it than that, and a description delays a step.
constexpr int64_t kDescriptionNs = 500'000'000;

constexpr int64_t kNotGiven = -1;  // Live::engine_id: the engine does not have it yet
constexpr int64_t kNoStop = -1;

// What leaves `f` becomes a value: a failed check where the host's handler throws, and what a sink
// throws.
template <typename F>
Status Contained(F&& f) noexcept {
  try {
    try {
      return std::forward<F>(f)();
    } catch (const std::bad_alloc&) {
      return Status::OutOfMemory();
    } catch (const std::exception& error) {
      return Status(StatusCode::kInternal, error.what());
    } catch (...) {
      return Status(StatusCode::kInternal, "an exception that is no std::exception");
    }
  } catch (const std::bad_alloc&) {  // the message had no room
    return Status::OutOfMemory();
  }
}

// The engine's own requests, by which documents of others are learnt, are none that anybody waits
// for in its queue.
int64_t AskedOf(const EngineStats& stats) { return stats.waiting - stats.learning; }

struct SampleState {
  int64_t given = 0;  // tokens that the sink has
  bool ended = false;
  bool stopped = false;  // Stop was called
  int64_t stop_due = kNoStop;
};

struct Live {
  int64_t id = 0;
  int64_t engine_id = kNotGiven;
  std::vector<SampleState> samples;
  int64_t unfinished = 0;
  double waited_seconds = 0;  // for the thread to give it to the engine
  bool cancelled = false;     // Cancel was called
  bool cancel_due = false;    // and is not carried out
  Status failure;             // the thread ends it for this
  bool is_asked = false;      // it is in the list of those of which something is due
  Live* next_asked = nullptr;
};

struct NewRequest {
  int64_t id = 0;
  std::vector<int32_t> prompt;
  SamplingOptions options;
  int64_t submitted_ns = 0;
};

// A thread that waits in Run.
struct WaitingCall {
  const std::function<Status(Engine&)>* call;
  Status result = {};
  bool done = false;
};

// A cancel, or the stop of a sample.
struct Due {
  int64_t engine_id = kNotGiven;
  int64_t sample = 0;
  int64_t answer_tokens = kNoStop;  // kNoStop: a cancel
};

class EngineThread final : public EngineLoop {
 public:
  using Description = std::shared_ptr<const EngineDescription>;

  // `description`: of the engine as it is.
  EngineThread(std::unique_ptr<Engine> engine, std::shared_ptr<StepSink> sink,
               const EngineLoopOptions& options, Description description)
      : engine_(std::move(engine)),
        sink_(std::move(sink)),
        max_calls_(options.max_calls),
        max_waiting_(engine_->max_waiting()),
        clock_(options.clock ? options.clock : MachineTime()),
        description_(std::move(description)),
        described_ns_(clock_->SteadyNs()) {
    engine_->SetWake([this] {  // a peer asks for a prompt
      const std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_one();
    });
  }
  ~EngineThread() override {
    const Status closed = Close();
    QUIRE_CHECK(closed.ok()) << "an EngineLoop was destroyed on its own thread";
    engine_->SetWake(nullptr);  // the engine outlives what it wakes
  }

  // Once, before all other calls. Unavailable: the system has no thread to give.
  Status Start(std::function<void(const std::function<void()>&)> around) {
    return StartThread("an engine's loop", &thread_,
                       [this, around = std::move(around)] { Main(around); });
  }

  Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options) override;
  Status Cancel(int64_t request_id) override;
  Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) override;
  Status Run(const std::function<Status(Engine&)>& call) override;
  Status Settle() override;
  Status Close() override;
  Status CheckSubmit(std::span<const int32_t> prompt,
                     const SamplingOptions& options) const override {
    return engine_->CheckSubmit(prompt, options);
  }
  EngineStats Stats() const override;
  Description Describe() override;
  std::vector<PrefillPeerInfo> PrefillPeers() const override { return engine_->PrefillPeers(); }
  const ModelInfo& model_info() const override { return engine_->model_info(); }
  const std::string& kernel_path() const override { return engine_->kernel_path(); }
  const std::string& numa() const override { return engine_->numa(); }

 private:
  // On any thread, with the mutex.
  Status CheckOpen(std::string_view call) const;
  Live* FindLive(int64_t request_id);
  void Ask(Live* live);
  int64_t waiting() const;

  bool is_loop_thread() const { return thread_id_.load() == std::this_thread::get_id(); }

  // On the loop's thread.
  void Main(const std::function<void(const std::function<void()>&)>& around) noexcept;
  void ServeWithin(const std::function<void(const std::function<void()>&)>& around) noexcept;
  Status Serve() noexcept;
  bool TakeCommands();
  Status RunRound();
  Status GiveRequests();
  bool NextDue(Due* due);
  void NoteDone(const Due& due);
  Status CarryOutDue();
  Status MakeCalls();
  Status MakeDescription();
  void NoteSettled();
  template <typename F>
  Status CallEngine(F&& call);
  Status Deliver();
  void ForgetEnded(Live* live);
  void FailRequest(const NewRequest& request, const Status& why);
  void FailAll(const Status& why) noexcept;
  void End(const Status& why) noexcept;

  const std::unique_ptr<Engine> engine_;
  const std::shared_ptr<StepSink> sink_;
  const int64_t max_calls_;
  const int64_t max_waiting_;
  const std::shared_ptr<Clock> clock_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // there is work, or the loop closes
  std::condition_variable settled_;  // a call is done, or a round is carried out
  bool closing_ = false;
  Status ended_;  // why every call is refused; Ok while the thread serves
  int64_t next_id_ = 0;
  std::map<int64_t, Live> live_;
  std::list<NewRequest> queue_;     // not seen by the thread
  std::list<NewRequest> requests_;  // taken by it, and not given to the engine
  int64_t engine_waiting_ = 0;      // AskedOf the engine
  Live* asked_ = nullptr;           // of these something is due, last asked first
  std::list<WaitingCall*> calls_;
  Description description_;  // the last one
  int64_t described_ns_;
  bool description_due_ = false;
  int64_t accepted_ = 0;  // calls of Submit, Cancel and Stop that were Ok, and due descriptions
  int64_t settled_count_ = 0;

  // The thread's.
  std::map<int64_t, int64_t> ids_;   // of requests, by the engine's
  Live* due_ = nullptr;              // as asked_, taken
  std::list<WaitingCall*> to_call_;  // as calls_, taken
  int64_t taken_ = 0;                // accepted_ when the round began
  std::vector<StepOutput> outputs_;  // of the engine, not delivered
  std::vector<StepOutput> failed_;   // of requests that the engine did not take, not delivered
  Status fault_;                     // the engine or the sink cannot be used any more

  std::atomic<std::thread::id> thread_id_ = {};
  std::mutex join_mutex_;
  std::thread thread_;  // joined under join_mutex_
};

// A defect shows as an exception, where the host's handler throws, or as Internal.
template <typename F>
Status EngineThread::CallEngine(F&& call) {
  const Status status = Contained([&] { return call(*engine_); });
  if (status.code() == StatusCode::kInternal) fault_ = status;
  return status;
}

// ---- On any thread

Status EngineThread::CheckOpen(std::string_view call) const {
  if (ended_.ok() && !closing_) return {};
  const std::string why = ended_.ok() ? "it was closed" : std::string(ended_.message());
  return Status(ended_.ok() ? StatusCode::kClosed : ended_.code(),
                "EngineLoop::" + std::string(call) + ": " + why);
}

Live* EngineThread::FindLive(int64_t request_id) {
  const auto found = live_.find(request_id);
  return found == live_.end() || found->second.unfinished == 0 ? nullptr : &found->second;
}

void EngineThread::Ask(Live* live) {
  ++accepted_;
  if (!std::exchange(live->is_asked, true)) live->next_asked = std::exchange(asked_, live);
  changed_.notify_one();
}

int64_t EngineThread::waiting() const {
  QUIRE_DCHECK(engine_waiting_ >= 0);
  return static_cast<int64_t>(queue_.size() + requests_.size()) + engine_waiting_;
}

Result<int64_t> EngineThread::Submit(std::span<const int32_t> prompt,
                                     const SamplingOptions& options) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckSubmit(prompt, options));
    // All memory is taken before the mutex.
    std::list<NewRequest> request;
    request.push_back({.prompt = {prompt.begin(), prompt.end()},
                       .options = options,
                       .submitted_ns = clock_->SteadyNs()});
    std::map<int64_t, Live> live;
    Live& state = live[0];
    state.samples.resize(static_cast<size_t>(options.n));
    state.unfinished = options.n;
    const std::lock_guard<std::mutex> lock(mutex_);
    QUIRE_RETURN_IF_ERROR(CheckOpen("Submit"));
    if (waiting() >= max_waiting_) {
      return Status(StatusCode::kFull, "EngineLoop::Submit: " + std::to_string(waiting()) +
                                           " requests wait (EngineOptions::max_waiting); submit "
                                           "again when some have ended");
    }
    const int64_t id = next_id_++;
    auto node = live.extract(0);
    node.key() = node.mapped().id = request.front().id = id;
    live_.insert(std::move(node));
    queue_.splice(queue_.end(), request);
    ++accepted_;
    changed_.notify_one();
    return id;
  });
}

Status EngineThread::Cancel(int64_t request_id) {
  return GuardEntry([&]() -> Status {
    const std::lock_guard<std::mutex> lock(mutex_);
    QUIRE_RETURN_IF_ERROR(CheckOpen("Cancel"));
    Live* const live = FindLive(request_id);
    if (live == nullptr || live->cancelled) {
      return Status(StatusCode::kUnknownSequence,
                    "EngineLoop::Cancel: request " + std::to_string(request_id) +
                        " is not there; it has ended, was cancelled or was never submitted");
    }
    live->cancelled = live->cancel_due = true;
    Ask(live);
    return {};
  });
}

Status EngineThread::Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) {
  return GuardEntry([&]() -> Status {
    const std::lock_guard<std::mutex> lock(mutex_);
    QUIRE_RETURN_IF_ERROR(CheckOpen("Stop"));
    Live* const live = FindLive(request_id);
    const bool has_sample = live != nullptr && sample >= 0 && sample < std::ssize(live->samples);
    SampleState* const state = has_sample ? &live->samples[static_cast<size_t>(sample)] : nullptr;
    if (state == nullptr || state->ended || state->stopped || live->cancelled) {
      return Status(StatusCode::kUnknownSequence,
                    "EngineLoop::Stop: sample " + std::to_string(sample) + " of request " +
                        std::to_string(request_id) +
                        " is not there; it has ended, was stopped or cancelled, or was never "
                        "submitted");
    }
    if (answer_tokens < 0 || answer_tokens > state->given) {
      return Status(StatusCode::kBadArgument,
                    "EngineLoop::Stop: answer_tokens is " + std::to_string(answer_tokens) +
                        "; it must be in [0, " + std::to_string(state->given) +
                        "], what was given out of sample " + std::to_string(sample));
    }
    state->stopped = true;
    state->stop_due = answer_tokens;
    Ask(live);
    return {};
  });
}

Status EngineThread::Run(const std::function<Status(Engine&)>& call) {
  return GuardEntry([&]() -> Status {
    WaitingCall waiting_call{.call = &call};
    std::list<WaitingCall*> node{&waiting_call};
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_loop_thread()) {
      QUIRE_RETURN_IF_ERROR(ended_);
      lock.unlock();
      return CallEngine(call);
    }
    QUIRE_RETURN_IF_ERROR(CheckOpen("Run"));
    if (std::ssize(calls_) >= max_calls_) {
      return Status(StatusCode::kFull,
                    "EngineLoop::Run: " + std::to_string(calls_.size()) +
                        " calls wait for the step that runs (EngineLoopOptions::max_calls)");
    }
    calls_.splice(calls_.end(), node);
    changed_.notify_one();
    settled_.wait(lock, [&] { return waiting_call.done; });
    return waiting_call.result;
  });
}

Status EngineThread::Settle() {
  return GuardEntry([&]() -> Status {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_loop_thread()) return {};
    QUIRE_RETURN_IF_ERROR(CheckOpen("Settle"));
    const int64_t until = accepted_;
    settled_.wait(lock, [&] { return settled_count_ >= until || !ended_.ok(); });
    return settled_count_ >= until ? Status() : CheckOpen("Settle");
  });
}

Status EngineThread::Close() {
  if (is_loop_thread()) {
    return GuardEntry([] {
      return Status(StatusCode::kBadState,
                    "EngineLoop::Close: called on the loop's own thread, which it would wait for; "
                    "close it on another one");
    });
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  const std::lock_guard<std::mutex> lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
  return {};
}

EngineStats EngineThread::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  EngineStats stats = engine_->Stats();
  stats.waiting = waiting() + stats.learning;
  return stats;
}

EngineThread::Description EngineThread::Describe() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_old = clock_->SteadyNs() - described_ns_ >= kDescriptionNs;
  if (is_old && !description_due_ && !closing_ && ended_.ok()) {
    description_due_ = true;
    ++accepted_;
    changed_.notify_one();
  }
  return description_;
}

// ---- On the loop's thread

void EngineThread::Main(const std::function<void(const std::function<void()>&)>& around) noexcept {
  thread_id_.store(std::this_thread::get_id());
  ServeWithin(around);
  thread_id_.store(std::thread::id());  // the system gives it to another thread after the join
}

void EngineThread::ServeWithin(
    const std::function<void(const std::function<void()>&)>& around) noexcept {
  if (!around) return End(Serve());
  bool served = false;
  const Status status = Contained([&]() -> Status {
    around([&] {
      if (!std::exchange(served, true)) End(Serve());
    });
    return {};
  });
  if (served) return;
  End(status.ok() ? Contained([]() -> Status {
    return Status(StatusCode::kInternal, "EngineLoopOptions::around did not call the body");
  })
                  : status);
}

// Why it ended.
Status EngineThread::Serve() noexcept {
  for (int failures = 0;;) {
    if (!TakeCommands()) {
      return Contained([] { return Status(StatusCode::kClosed, "it was closed"); });
    }
    const Status status = Contained([&] { return RunRound(); });
    if (!fault_.ok()) return fault_;
    if (status.ok()) {
      failures = 0;
    } else if (++failures == 3 * kTries) {
      return status;
    } else if (failures % kTries == 0) {
      FailAll(status);
    }
  }
}

// Waits for work. False when the loop closes.
bool EngineThread::TakeCommands() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_work = [&] {
    return closing_ || !queue_.empty() || asked_ != nullptr || !calls_.empty() ||
           description_due_ || !requests_.empty() || due_ != nullptr || !to_call_.empty() ||
           !outputs_.empty() || !failed_.empty() || !engine_->Idle();
  };
  changed_.wait(lock, has_work);
  if (closing_) return false;
  requests_.splice(requests_.end(), queue_);
  while (asked_ != nullptr) {
    Live* const live = std::exchange(asked_, asked_->next_asked);
    QUIRE_DCHECK(live->is_asked) << "request " << live->id;
    live->next_asked = std::exchange(due_, live);
  }
  to_call_.splice(to_call_.end(), calls_);
  taken_ = accepted_;
  return true;
}

Status EngineThread::RunRound() {
  QUIRE_DCHECK(is_loop_thread());
  QUIRE_RETURN_IF_ERROR(GiveRequests());
  QUIRE_RETURN_IF_ERROR(CarryOutDue());
  QUIRE_RETURN_IF_ERROR(MakeDescription());
  NoteSettled();
  QUIRE_RETURN_IF_ERROR(MakeCalls());
  bool stepped = false;
  if (outputs_.empty() && !engine_->Idle()) {
    QUIRE_RETURN_IF_ERROR(CallEngine([&](Engine& engine) -> Status {
      QUIRE_ASSIGN_OR_RETURN(outputs_, engine.Step());
      return {};
    }));
    stepped = true;
  }
  if (stepped || !outputs_.empty() || !failed_.empty()) QUIRE_RETURN_IF_ERROR(Deliver());
  if (engine_->Idle() && !ids_.empty()) {
    fault_ =
        Status(StatusCode::kInternal, "the engine is idle, but request " +
                                          std::to_string(ids_.begin()->second) + " has not ended");
  }
  return fault_;
}

Status EngineThread::GiveRequests() {
  while (!requests_.empty()) {
    const NewRequest& request = requests_.front();
    std::map<int64_t, int64_t> entry{{0, request.id}};
    const Status status = CallEngine([&](Engine& engine) -> Status {
      QUIRE_ASSIGN_OR_RETURN(const int64_t engine_id,
                             engine.Submit(request.prompt, request.options));
      auto node = entry.extract(0);
      node.key() = engine_id;
      ids_.insert(std::move(node));
      const std::lock_guard<std::mutex> lock(mutex_);
      Live& live = live_.at(request.id);
      live.engine_id = engine_id;
      live.waited_seconds = static_cast<double>(clock_->SteadyNs() - request.submitted_ns) * 1e-9;
      return {};
    });
    if (status.code() == StatusCode::kOutOfMemory || !fault_.ok()) return status;
    if (!status.ok()) FailRequest(request, status);
    const std::lock_guard<std::mutex> lock(mutex_);
    requests_.pop_front();
    engine_waiting_ = AskedOf(engine_->Stats());
  }
  return {};
}

bool EngineThread::NextDue(Due* due) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (due_ != nullptr) {
    Live* const live = due_;
    for (size_t i = 0; i < live->samples.size() && live->unfinished > 0; ++i) {
      const int64_t stop = live->samples[i].stop_due;
      if (stop == kNoStop && !live->cancel_due) continue;
      *due = {.engine_id = live->engine_id, .sample = static_cast<int64_t>(i)};
      due->answer_tokens = live->cancel_due ? kNoStop : stop;
      return true;
    }
    live->is_asked = false;
    due_ = std::exchange(live->next_asked, nullptr);
    if (live->unfinished == 0) live_.erase(live->id);
  }
  return false;
}

void EngineThread::NoteDone(const Due& due) {
  const std::lock_guard<std::mutex> lock(mutex_);
  QUIRE_DCHECK(due_ != nullptr && due_->engine_id == due.engine_id);
  for (SampleState& sample : due_->samples) {
    if (due_->cancel_due || &sample == &due_->samples[static_cast<size_t>(due.sample)])
      sample.stop_due = kNoStop;
  }
  if (due.answer_tokens == kNoStop) due_->cancel_due = false;
  engine_waiting_ = AskedOf(engine_->Stats());
}

// What has ended in the step that ran meanwhile is not there any more, and its end is reported.
Status EngineThread::CarryOutDue() {
  Due due;
  while (NextDue(&due)) {
    const Status status = CallEngine([&](Engine& engine) {
      return due.answer_tokens == kNoStop
                 ? engine.Cancel(due.engine_id)
                 : engine.Stop(due.engine_id, due.sample, due.answer_tokens);
    });
    if (!status.ok() && status.code() != StatusCode::kUnknownSequence) return status;
    NoteDone(due);
  }
  return {};
}

Status EngineThread::MakeCalls() {
  while (!to_call_.empty()) {
    WaitingCall* const waiting_call = to_call_.front();
    const Status result = CallEngine(*waiting_call->call);
    to_call_.pop_front();
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_call->result = result;
    waiting_call->done = true;
    settled_.notify_all();
    if (!fault_.ok()) return fault_;
  }
  return {};
}

// Without memory the last one stays.
Status EngineThread::MakeDescription() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!description_due_) return {};
  }
  Description made;
  const Status status = CallEngine([&](Engine& engine) -> Status {
    QUIRE_ASSIGN_OR_RETURN(EngineDescription description, engine.Describe());
    for (DescribedSequence& sequence : description.sequences) {
      if (sequence.request_id >= 0) sequence.request_id = ids_.at(sequence.request_id);
    }
    for (DescribedRequest& request : description.waiting) {
      request.request_id = ids_.at(request.request_id);
    }
    made = std::make_shared<const EngineDescription>(std::move(description));
    return {};
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status.ok()) description_.swap(made);
  described_ns_ = clock_->SteadyNs();
  description_due_ = false;
  return fault_;
}

void EngineThread::NoteSettled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  QUIRE_DCHECK(settled_count_ <= taken_ && taken_ <= accepted_);
  settled_count_ = taken_;
  settled_.notify_all();
}

// All that needs memory comes first, and may be repeated.
Status EngineThread::Deliver() {
  outputs_.reserve(outputs_.size() + failed_.size());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (StepOutput& output : outputs_) {
      const auto id = ids_.find(output.request_id);
      QUIRE_CHECK(id != ids_.end()) << "an output of a request that was not submitted to the loop";
      if (output.finish_reason != FinishReason::kCancelled) continue;
      const Live& live = live_.at(id->second);
      if (live.failure.ok()) continue;
      output.error = live.failure.ToString();
      output.error_detail = live.failure.detail();
      output.finish_reason = FinishReason::kError;
    }
    for (StepOutput& output : outputs_) {
      const auto id = ids_.find(output.request_id);
      output.request_id = id->second;
      Live& live = live_.at(id->second);
      SampleState& sample = live.samples[static_cast<size_t>(output.sample)];
      QUIRE_DCHECK(!sample.ended) << "sample " << output.sample << " of " << live.id << " goes on";
      sample.given += std::ssize(output.tokens);
      if (output.prompt_tokens > 0) output.times.queue_seconds += live.waited_seconds;
      if (output.finish_reason == FinishReason::kNone) continue;
      sample.ended = true;
      QUIRE_DCHECK(live.unfinished > 0);
      if (--live.unfinished > 0) continue;
      ids_.erase(id);
      ForgetEnded(&live);
    }
    for (const StepOutput& output : failed_) {
      Live& live = live_.at(output.request_id);
      if (--live.unfinished == 0) ForgetEnded(&live);
    }
    engine_waiting_ = AskedOf(engine_->Stats());
  }
  std::move(failed_.begin(), failed_.end(), std::back_inserter(outputs_));
  failed_.clear();
  const Status told = Contained([&]() -> Status {
    sink_->OnStep(std::exchange(outputs_, {}));
    return {};
  });
  if (!told.ok()) fault_ = told;  // what it was told is lost
  return told;
}

// One of which something is due is erased when that is looked at.
void EngineThread::ForgetEnded(Live* live) {
  QUIRE_DCHECK(live->unfinished == 0);
  if (!live->is_asked) live_.erase(live->id);
}

void EngineThread::FailRequest(const NewRequest& request, const Status& why) {
  std::vector<StepOutput> outputs(static_cast<size_t>(request.options.n));
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].request_id = request.id;
    outputs[i].sample = static_cast<int64_t>(i);
    outputs[i].finish_reason = FinishReason::kError;
    outputs[i].error = why.ToString();
    outputs[i].error_detail = why.detail();
    outputs[i].prompt_tokens = std::ssize(request.prompt);
  }
  failed_.reserve(failed_.size() + outputs.size());
  std::move(outputs.begin(), outputs.end(), std::back_inserter(failed_));
}

// What cannot be ended for want of memory goes on, or is ended the next time.
void EngineThread::FailAll(const Status& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [engine_id, id] : ids_) live_.at(id).failure = why;
  }
  for (const auto& entry : ids_) {
    static_cast<void>(CallEngine([&](Engine& engine) { return engine.Cancel(entry.first); }));
    if (!fault_.ok()) return;
  }
  static_cast<void>(Contained([&]() -> Status {
    while (!requests_.empty()) {
      FailRequest(requests_.front(), why);
      const std::lock_guard<std::mutex> lock(mutex_);
      requests_.pop_front();
    }
    return {};
  }));
}

void EngineThread::End(const Status& why) noexcept {
  engine_->EndPrefill(/*at_once=*/true);  // peers would wait for steps that do not come
  if (fault_.ok()) {
    for (const auto& entry : ids_) {
      static_cast<void>(CallEngine([&](Engine& engine) { return engine.Cancel(entry.first); }));
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = why;
    to_call_.splice(to_call_.end(), calls_);
    for (WaitingCall* const waiting_call : to_call_) {
      waiting_call->result = why;
      waiting_call->done = true;
    }
    settled_.notify_all();
  }
  static_cast<void>(Contained([&]() -> Status {
    sink_->OnEnd(why);
    return {};
  }));
}

}  // namespace

Result<std::unique_ptr<EngineLoop>> EngineLoop::Create(std::unique_ptr<Engine> engine,
                                                       std::shared_ptr<StepSink> sink,
                                                       const EngineLoopOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<EngineLoop>> {
    if (engine == nullptr || sink == nullptr) {
      return Status(StatusCode::kBadArgument, std::string("EngineLoop::Create: the ") +
                                                  (engine == nullptr ? "engine" : "sink") +
                                                  " is null");
    }
    if (!engine->Idle()) {
      return Status(StatusCode::kBadArgument,
                    "EngineLoop::Create: the engine has requests, whose outputs nobody would "
                    "know; step it until it is idle");
    }
    if (options.max_calls < 1) {
      return Status(StatusCode::kBadArgument, "EngineLoopOptions::max_calls is " +
                                                  std::to_string(options.max_calls) +
                                                  "; it must be at least 1");
    }
    QUIRE_ASSIGN_OR_RETURN(EngineDescription description, engine->Describe());
    auto loop = std::make_unique<EngineThread>(
        std::move(engine), std::move(sink), options,
        std::make_shared<const EngineDescription>(std::move(description)));
    QUIRE_RETURN_IF_ERROR(loop->Start(options.around));
    return std::unique_ptr<EngineLoop>(std::move(loop));
  });
}

}  // namespace quire
