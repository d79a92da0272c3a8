#include "store/write_queue.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace quire {
namespace {

// Enough to keep a disk or a pipeline busy; small enough that a chunk does not wait long for
// others.
constexpr size_t kBatchChunks = 16;
constexpr int64_t kBatchBytes = int64_t{32} << 20;

int64_t BytesOf(const KeptChunk& kept) { return static_cast<int64_t>(kept.chunk->bytes().size()); }

}  // namespace

WriteQueue::WriteQueue(SlowTier* tier, std::shared_ptr<Clock> clock, int64_t bytes_max)
    : tier_(tier), clock_(std::move(clock)), bytes_max_(bytes_max) {
  batch_.reserve(kBatchChunks);
  writer_ = std::thread([this] { Run(); });
}

Status WriteQueue::Dropped(StatusCode code, const char* why) {
  ++tier_->dropped_writes;
  return Status(code, "ChunkStore::Put: " + std::string(TierName(tier_->kind)) + " " + why);
}

Status WriteQueue::Push(const KeptChunk& kept, std::shared_ptr<PutState> put) {
  const std::lock_guard lock(mutex_);
  const int64_t bytes = BytesOf(kept);
  if (closing_) return Dropped(StatusCode::kClosed, "is closed");
  if (const auto at = by_id_.find(kept.id); at != by_id_.end()) {
    if (put != nullptr) jobs_.find(at->second)->second.puts.push_back(std::move(put));
    ++tier_->deduplicated;
    return {};
  }
  // Under the lock: who was written leaves the queue after the tier knows it, so that it is found
  // either there or here.
  if (tier_->tier->Knows(kept.id) == 1) {
    ++tier_->deduplicated;
    if (put != nullptr) put->Report({});
    return {};
  }
  if (!tier_->usable())
    return Dropped(StatusCode::kUnavailable, "did not answer and is left alone for a while");
  if (bytes > bytes_max_ - bytes_)
    return Dropped(StatusCode::kFull, "is written slower than it is put to");
  const auto at = by_id_.emplace(kept.id, last_ + 1).first;
  try {
    Job job{kept};
    if (put != nullptr) job.puts.push_back(std::move(put));
    jobs_.emplace_hint(jobs_.end(), last_ + 1, std::move(job));
  } catch (...) {
    by_id_.erase(at);
    throw;
  }
  ++last_;
  bytes_ += bytes;
  changed_.notify_all();
  return {};
}

bool WriteQueue::AwaitRoom(int64_t bytes, int64_t until_ns) {
  if (bytes > bytes_max_) return false;
  std::unique_lock lock(mutex_);
  return WaitUntil(*clock_, changed_, lock, until_ns,
                   [&] { return closing_ || bytes <= bytes_max_ - bytes_; });
}

bool WriteQueue::Has(const ChunkId& id) const {
  const std::lock_guard lock(mutex_);
  return by_id_.contains(id);
}

int64_t WriteQueue::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

bool WriteQueue::Forget(const Removals::Scope& removal, int64_t until_ns) {
  std::unique_lock lock(mutex_);
  std::vector<Jobs::node_type> forgotten;
  forgotten.reserve(jobs_.size());
  for (auto at = std::next(jobs_.begin(), static_cast<std::ptrdiff_t>(writing_));
       at != jobs_.end();) {
    const auto job = at++;
    if (!removal.Covers(job->second.kept.id)) continue;
    by_id_.erase(job->second.kept.id);
    bytes_ -= BytesOf(job->second.kept);
    forgotten.push_back(jobs_.extract(job));
  }
  changed_.notify_all();
  const bool is_settled = WaitUntil(*clock_, changed_, lock, until_ns, [&] {
    const auto end = std::next(jobs_.begin(), static_cast<std::ptrdiff_t>(writing_));
    return std::none_of(jobs_.begin(), end,
                        [&](const auto& job) { return removal.Covers(job.second.kept.id); });
  });
  lock.unlock();
  for (Jobs::node_type& job : forgotten) {
    Finish(job.mapped(), Status(StatusCode::kCancelled,
                                "ChunkStore::Put: the chunk was removed before it was written to " +
                                    std::string(TierName(tier_->kind))));
  }
  return is_settled;
}

bool WriteQueue::Drain(int64_t until_ns) {
  std::unique_lock lock(mutex_);
  const uint64_t last = last_;
  return WaitUntil(*clock_, changed_, lock, until_ns,
                   [&] { return jobs_.empty() || jobs_.begin()->first > last; });
}

void WriteQueue::Close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
}

void WriteQueue::Run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    WriteSome(lock);
  }
}

// Writes the oldest jobs. They stay in the queue meanwhile, so that the same chunk is not written
// twice and their bytes count.
void WriteQueue::WriteSome(std::unique_lock<std::mutex>& lock) noexcept {
  batch_.clear();
  int64_t bytes = 0;
  for (const auto& [number, job] : jobs_) {
    if (batch_.size() == kBatchChunks || (bytes > 0 && bytes + BytesOf(job.kept) > kBatchBytes))
      break;
    bytes += BytesOf(job.kept);
    batch_.push_back({.id = job.kept.id,
                      .chunk = job.kept.chunk.get(),
                      .recompute_seconds = job.kept.worth.recompute_seconds,
                      .priority = job.kept.worth.priority});
  }
  writing_ = batch_.size();
  lock.unlock();
  std::vector<Status> outcomes;
  Status all;
  try {
    const int64_t deadline = clock_->SteadyNs() + tier_->io_timeout_ns;
    if (auto call = tier_->Admit(deadline)) {
      outcomes = tier_->tier->Write(batch_, deadline);
      if (outcomes.size() == batch_.size()) {
        call->Report(outcomes.front());  // one call is one sign of health, for all its chunks
      } else {
        all =
            Status(StatusCode::kInternal, "ChunkStore::Put: " + std::string(TierName(tier_->kind)) +
                                              " did not say what became of each chunk");
      }
    } else {
      all = Status(StatusCode::kUnavailable,
                   "ChunkStore::Put: " + std::string(TierName(tier_->kind)) +
                       " did not answer and is left alone for a while");
    }
  } catch (...) {
    all = Status::OutOfMemory();
  }
  lock.lock();
  for (size_t i = 0; i < batch_.size(); ++i) {
    Jobs::node_type job = jobs_.extract(jobs_.begin());
    --writing_;
    by_id_.erase(job.mapped().kept.id);
    bytes_ -= BytesOf(job.mapped().kept);
    lock.unlock();
    const Status& status = all.ok() ? outcomes[i] : all;
    tier_->Count(status);
    Finish(job.mapped(), status);
    job = {};
    lock.lock();
  }
  changed_.notify_all();
}

void WriteQueue::Finish(Job& job, const Status& status) noexcept {
  if (status.ok()) {
    ++tier_->writes;
    tier_->bytes_written += BytesOf(job.kept);
  } else {
    ++tier_->dropped_writes;
  }
  for (const std::shared_ptr<PutState>& put : job.puts) put->Report(status);
}

}  // namespace quire
