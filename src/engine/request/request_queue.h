// The requests of an engine: those that wait, and those in work.
//
// Invariants.
// - Those that wait stand in the order in which they may come in. Groups (SamplingOptions) take
//   turns: each request has the turn after the last one of its group that waits, and of those in
//   work; what lies between two turns of a group is 1 / its weight. So a group with many requests
//   that wait holds up another one of its weight by one request, and a request that waits is
//   overtaken by one of each other group at most in a turn.
// - Those in work stand in the order in which they came in. One that is preempted waits in front.
// - Idle ones have no turn. They come in, in their order, when no other request waits or is in
//   work.
#ifndef QUIRE_ENGINE_REQUEST_REQUEST_QUEUE_H_
#define QUIRE_ENGINE_REQUEST_REQUEST_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "engine/request/request.h"

namespace quire {

class RequestQueue {
 public:
  const std::deque<std::unique_ptr<Request>>& waiting() const { return waiting_; }
  const std::vector<std::unique_ptr<Request>>& running() const { return running_; }
  bool empty() const { return waiting_.empty() && running_.empty(); }
  // Null if it is not there.
  Request* Find(int64_t request_id) const;
  // The same, but for the engine's own requests and those of other processes: callers have no ids
  // of them.
  Request* FindAsked(int64_t request_id) const;
  // Samples in work that have not ended.
  int64_t running_samples() const;

  // Those that wait and are not idle.
  int64_t waiting_in_turn() const;
  // Those that wait and are the engine's own, for documents of others; and those that are not.
  int64_t waiting_learners() const;
  int64_t waiting_asked() const { return std::ssize(waiting_) - waiting_learners(); }
  // Those of callers that have not come in yet.
  int64_t waiting_new() const;

  void Add(std::unique_ptr<Request> request);
  // Whether a document is still to be learnt for the request that does not come layer by layer with
  // a request in work, for both to be in one forward.
  bool WaitsForDocuments(const Request& request) const;
  // The first of the first `count` that wait which is not held back; null if there is none. Those
  // that wait for documents to be learnt let others pass.
  Request* NextToAdmit(size_t count) const;
  void ReserveAdmission() { running_.reserve(running_.size() + 1); }
  // REQUIRES: `request` waits; ReserveAdmission.
  void Admit(const Request& request) noexcept;
  // The youngest in work waits again. `release` gives back what it has; it may not fail.
  template <typename F>
  void PreemptYoungest(F&& release) {
    waiting_.emplace_front();  // may throw, so it comes first
    release(*running_.back());
    waiting_.front() = std::move(running_.back());
    running_.pop_back();
  }
  void Erase(const Request* request) noexcept;
  // Those in work whose samples have all ended.
  void EraseEnded() noexcept;

 private:
  // 0: none waits.
  int64_t LastTurnOf(const SamplingOptions& group) const;

  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> running_;
  int64_t turn_ = 0;  // the highest of requests that came in
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_REQUEST_QUEUE_H_
