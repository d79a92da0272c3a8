// A place in a test where a thread is held up.
#ifndef QUIRE_TRANSFER_TESTING_GATE_H_
#define QUIRE_TRANSFER_TESTING_GATE_H_

#include <atomic>
#include <chrono>
#include <future>

namespace quire {

// Holds up the first thread that comes, and no other one.
class Gate {
 public:
  void Pass() {
    if (passed_++ > 0) return;
    inside_.set_value();
    may_go_.wait();
  }
  // Once.
  bool AwaitInside() {
    return inside_.get_future().wait_for(std::chrono::minutes(1)) == std::future_status::ready;
  }
  void Release() { go_.set_value(); }
  int passed() const { return passed_; }  // with the one that is held up

 private:
  std::atomic<int> passed_ = 0;
  std::promise<void> inside_, go_;
  const std::shared_future<void> may_go_ = go_.get_future().share();
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_GATE_H_
