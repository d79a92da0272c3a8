#include "engine/request/request_queue.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace quire {
namespace {

// The turn of a group of weight 1: large beside the largest weight, so that each takes its part to
// a sixteenth, and small enough for 2^39 turns.
constexpr int64_t kTurn = int64_t{1} << 24;
static_assert(kTurn / SamplingOptions::kTurnWeightMax == 16);

bool AreOfOneGroup(const SamplingOptions& a, const SamplingOptions& b) {
  const bool is_named = !a.turn_group.empty();
  if (is_named != !b.turn_group.empty()) return false;
  return is_named ? a.turn_group == b.turn_group : a.cache_salt == b.cache_salt;
}

}  // namespace

Request* RequestQueue::Find(int64_t request_id) const {
  const auto has_id = [&](const auto& request) { return request->id == request_id; };
  const auto running = std::find_if(running_.begin(), running_.end(), has_id);
  if (running != running_.end()) return running->get();
  const auto waiting = std::find_if(waiting_.begin(), waiting_.end(), has_id);
  return waiting == waiting_.end() ? nullptr : waiting->get();
}

Request* RequestQueue::FindAsked(int64_t request_id) const {
  Request* const request = Find(request_id);
  return request == nullptr || !request->has_outputs() ? nullptr : request;
}

int64_t RequestQueue::running_samples() const {
  int64_t samples = 0;
  for (const auto& request : running_) samples += request->unfinished_count();
  return samples;
}

int64_t RequestQueue::waiting_in_turn() const {
  return std::count_if(waiting_.begin(), waiting_.end(),
                       [](const auto& request) { return !request->is_idle; });
}

int64_t RequestQueue::waiting_learners() const {
  return std::count_if(waiting_.begin(), waiting_.end(),
                       [](const auto& request) { return request->learns_for != Request::kNobody; });
}

int64_t RequestQueue::waiting_new() const {
  return std::count_if(waiting_.begin(), waiting_.end(), [](const auto& request) {
    return request->has_outputs() && !request->admitted_before;
  });
}

// What the group has waiting is all that counts: requests that were cancelled owe nobody a turn.
int64_t RequestQueue::LastTurnOf(const SamplingOptions& group) const {
  const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(), [&](const auto& other) {
    return !other->is_idle && AreOfOneGroup(other->options, group);
  });
  return last == waiting_.rend() ? 0 : (*last)->turn;
}

void RequestQueue::Add(std::unique_ptr<Request> request) {
  QUIRE_DCHECK(Find(request->id) == nullptr) << "request " << request->id << " is queued twice";
  if (request->is_idle) return waiting_.push_back(std::move(request));
  const SamplingOptions& options = request->options;
  const int64_t last = LastTurnOf(options);
  const int64_t turn = std::max(last, turn_) + kTurn / options.turn_weight;
  QUIRE_CHECK(turn > turn_) << "request " << request->id << " would pass one that came in";
  request->turn = turn;
  auto place = waiting_.end();
  const auto is_behind = [&](const Request& other) { return other.is_idle || other.turn > turn; };
  while (place != waiting_.begin() && is_behind(**std::prev(place))) --place;
  waiting_.insert(place, std::move(request));
}

bool RequestQueue::WaitsForDocuments(const Request& request) const {
  const std::vector<int64_t>& learners = request.learners;
  return std::any_of(learners.begin(), learners.end(), [this](int64_t id) {
    const Request* const learner = Find(id);
    return learner != nullptr && !learner->brings_document();
  });
}

Request* RequestQueue::NextToAdmit(size_t count) const {
  const bool all_idle = running_.empty() && waiting_in_turn() == 0;
  for (const auto& request : waiting_) {
    if (count == 0) return nullptr;
    if (request->is_idle && !all_idle) continue;
    if (WaitsForDocuments(*request)) continue;
    if (!request->held_back) return request.get();
    --count;
  }
  return nullptr;
}

void RequestQueue::Admit(const Request& request) noexcept {
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& other) { return other.get() == &request; });
  QUIRE_CHECK(place != waiting_.end()) << "request " << request.id << " does not wait";
  QUIRE_CHECK(running_.size() < running_.capacity()) << "ReserveAdmission was left out";
  QUIRE_CHECK(!request.is_idle || running_.empty()) << "an idle request comes in beside others";
  turn_ = std::max(turn_, request.turn);
  running_.push_back(std::move(*place));
  waiting_.erase(place);
}

void RequestQueue::Erase(const Request* request) noexcept {
  const auto is_request = [&](const auto& other) { return other.get() == request; };
  const bool was_running = std::erase_if(running_, is_request) > 0;
  const bool was_there = was_running || std::erase_if(waiting_, is_request) > 0;
  QUIRE_CHECK(was_there) << "a request that is not in the queue has ended";
}

void RequestQueue::EraseEnded() noexcept {
  std::erase_if(running_, [](const auto& request) { return request->leader() == nullptr; });
}

}  // namespace quire
