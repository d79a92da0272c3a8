// An engine with a thread of its own: requests come in from any thread, and the outputs of each
// step go to a sink.
//
// The thread steps the engine while there is work, and sleeps otherwise. What other threads ask for
// is carried out between two steps: no call but Run, Settle and Close waits for a step. Answers are
// those of the engine alone, bit for bit.
//
// Order of calls: Create, any calls from any threads, Close (or the destructor).
#ifndef QUIRE_ENGINE_LOOP_H_
#define QUIRE_ENGINE_LOOP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/engine.h"
#include "quire/model.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// Receives what the steps give. It is called on the loop's thread, between two steps, and must not
// wait: the next step begins when it returns. It may make all calls of the loop but Close. What it
// throws ends the loop with Internal.
class StepSink {
 public:
  virtual ~StepSink() = default;
  // After each step: all of its outputs, none for a part of a prompt.
  virtual void OnStep(std::vector<StepOutput> outputs) = 0;
  // The last call: requests that have not ended by now have no further outputs. `why` is never Ok:
  // Closed after Close; OutOfMemory or Internal if the loop could not go on.
  virtual void OnEnd(const Status& why) = 0;
};

struct EngineLoopOptions {
  int64_t max_calls = 256;  // >= 1; threads that wait in Run
  // Called on the loop's thread with what the thread does, which it calls once: a host puts here
  // what each of its threads needs around it. Null: nothing.
  std::function<void(const std::function<void()>& body)> around = nullptr;
  std::shared_ptr<Clock> clock = nullptr;  // null = MachineTime()
};

class EngineLoop {
 public:
  // The engine is the loop's from now on. BadArgument for a missing engine or sink, an engine with
  // requests, or an option by name and value; Unavailable if the system has no thread to give.
  static Result<std::unique_ptr<EngineLoop>> Create(std::unique_ptr<Engine> engine,
                                                    std::shared_ptr<StepSink> sink,
                                                    const EngineLoopOptions& options = {});
  // As Close. Not on the loop's thread.
  virtual ~EngineLoop() = default;

  // Queues a request for the next step; its id, which its outputs have. As Engine::Submit, whose
  // errors come at once: BadArgument, TooLarge, and Full while EngineOptions::max_waiting requests
  // wait, in the engine or for it. If the engine then has no memory for it, it ends with kError.
  virtual Result<int64_t> Submit(std::span<const int32_t> prompt,
                                 const SamplingOptions& options) = 0;
  // Ends a request before the next step, after which its unfinished samples are reported with
  // kCancelled, if they do not end by themselves in the step that runs. UnknownSequence if its end
  // was reported, or it was cancelled before. Needs no memory.
  virtual Status Cancel(int64_t request_id) = 0;
  // As Engine::Stop, before the next step; `answer_tokens` are those of the sink. What the sink is
  // given of the sample beyond them is surplus. UnknownSequence if its end was reported, or it was
  // stopped before. Needs no memory.
  virtual Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) = 0;

  // Calls `call` between two steps, after all that was asked for before, and waits for what it
  // returns: for Logits, snapshots and the store. It must not Submit, Cancel, Stop or Step. From
  // the sink, or inside of `call`, it is called at once. Full while max_calls threads wait.
  virtual Status Run(const std::function<Status(Engine&)>& call) = 0;
  // Waits until all that was asked for before is carried out. Ok from the sink.
  virtual Status Settle() = 0;

  // Ends all requests and the thread: waits for the step that runs, cancels, tells the sink, joins.
  // Every later call gets Closed. Closing twice is Ok. BadState on the loop's thread.
  virtual Status Close() = 0;

  // The following are open to all threads at all times, also after Close.
  virtual Status CheckSubmit(std::span<const int32_t> prompt,
                             const SamplingOptions& options) const = 0;  // as Engine::CheckSubmit
  // How things stood after the last step; requests that the engine has not yet count as waiting.
  virtual EngineStats Stats() const = 0;
  // The last description that was made (Engine::Describe, with the loop's ids); never null. If it
  // is older than half a second, the next one is made before the next step.
  virtual std::shared_ptr<const EngineDescription> Describe() = 0;
  virtual std::vector<PrefillPeerInfo> PrefillPeers() const = 0;  // as Engine::PrefillPeers
  virtual const ModelInfo& model_info() const = 0;
  virtual const std::string& kernel_path() const = 0;
  virtual const std::string& numa() const = 0;  // as Engine::numa
};

}  // namespace quire

#endif  // QUIRE_ENGINE_LOOP_H_
