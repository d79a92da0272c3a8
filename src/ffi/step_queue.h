// What the steps of an engine gave, on the way from the engine's thread to Python's. Python takes
// all steps that have ended at once; the engine is at most a few steps ahead of it.
#ifndef QUIRE_FFI_STEP_QUEUE_H_
#define QUIRE_FFI_STEP_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/options.h"
#include "quire/engine_loop.h"

namespace quire::ffi {

// Bounded by the answers themselves: it holds what they have and Python has not taken.
class StepQueue final : public StepSink {
 public:
  struct Steps {
    int64_t count = 0;
    std::vector<StepOutput> outputs;
  };

  void OnStep(std::vector<StepOutput> outputs) override;
  // The first reason stays.
  void OnEnd(const Status& why) override;
  // Waits for a step, or the end: then what OnEnd was told, after all steps were taken.
  Result<Steps> Take();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Steps steps_;
  Status why_;
};

// quire.StepQueue. It holds nothing of the engine, so that a thread that waits in it keeps no
// engine alive.
class StepQueueObj : public tvm::ffi::Object {
 public:
  explicit StepQueueObj(std::shared_ptr<StepQueue> queue) : queue_(std::move(queue)) {}

  OptionMap Take();
  // Take throws Closed from now on, whatever the engine does.
  void Close();

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.StepQueue", StepQueueObj, tvm::ffi::Object);

 private:
  const std::shared_ptr<StepQueue> queue_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_STEP_QUEUE_H_
