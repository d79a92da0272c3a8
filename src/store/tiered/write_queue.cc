#include "store/tiered/write_queue.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/guard.h"

namespace quire {
namespace {

// Enough to keep a disk or a pipeline busy; small enough that a chunk does not wait long for
// others.
constexpr size_t kBatchChunks = 16;
constexpr int64_t kBatchBytes = int64_t{32} << 20;
// A disk waits between the last bytes of a file and the first ones of the next: names, locks, room.
// The other writer's file fills that time. Redis is written to over one pipeline.
constexpr size_t kDiskWriters = 2;
constexpr size_t kOtherWriters = 1;

int64_t BytesOf(const KeptChunk& kept) { return static_cast<int64_t>(kept.chunk->bytes().size()); }

}  // namespace

WriteQueue::WriteQueue(SlowTier* tier, std::shared_ptr<Clock> clock, int64_t bytes_max)
    : tier_(tier), clock_(std::move(clock)), bytes_max_(bytes_max) {
  batches_.resize(tier_->kind == TierKind::kDisk ? kDiskWriters : kOtherWriters);
  writers_.reserve(batches_.size());
  try {
    for (Batch& batch : batches_) {
      batch.numbers.reserve(kBatchChunks);
      batch.writes.reserve(kBatchChunks);
      writers_.emplace_back([this, &batch] { Run(batch); });
    }
  } catch (...) {
    Close();
    throw;
  }
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
  // Under the lock: a chunk that was written leaves the queue after the tier knows it, so that it
  // is found either there or here.
  if (tier_->tier->IsStored(kept.id)) {
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
  ++untaken_;
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

void WriteQueue::SetExpiry(const ChunkKey& key, int64_t expires_ms) {
  const std::lock_guard lock(mutex_);
  for (auto& [number, job] : jobs_)
    if (job.kept.id.key == key) job.kept.expires_ms = ExpiryBeside(*job.kept.chunk, expires_ms);
}

bool WriteQueue::Forget(const Removals::Scope& removal, int64_t until_ns) {
  const Status removed(StatusCode::kCancelled,
                       "ChunkStore::Put: the chunk was removed before it was written to " +
                           std::string(TierName(tier_->kind)));
  std::unique_lock lock(mutex_);
  std::vector<Jobs::node_type> forgotten;
  forgotten.reserve(jobs_.size());  // nothing fails from here on
  const uint64_t last = last_;
  for (auto at = jobs_.begin(); at != jobs_.end();) {
    const auto job = at++;
    const ChunkId& id = job->second.kept.id;
    if (job->second.is_taken || !removal.Covers(id)) continue;
    by_id_.erase(id);
    bytes_ -= BytesOf(job->second.kept);
    --untaken_;
    forgotten.push_back(jobs_.extract(job));
  }
  changed_.notify_all();
  lock.unlock();
  for (Jobs::node_type& job : forgotten) Finish(job.mapped(), removed);
  forgotten.clear();
  lock.lock();
  return WaitUntil(*clock_, changed_, lock, until_ns, [&] {
    return std::none_of(jobs_.begin(), jobs_.upper_bound(last),
                        [&](const auto& job) { return removal.Covers(job.second.kept.id); });
  });
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
  for (std::thread& writer : writers_)
    if (writer.joinable()) writer.join();
}

void WriteQueue::Run(Batch& batch) noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || untaken_ > 0; });
    if (untaken_ == 0) return;
    TakeSome(batch);
    WriteSome(batch, lock);
  }
}

// The oldest jobs that no other writer has.
void WriteQueue::TakeSome(Batch& batch) noexcept {
  batch.numbers.clear();
  batch.writes.clear();
  int64_t bytes = 0;
  for (auto& [number, job] : jobs_) {
    if (job.is_taken) continue;
    if (batch.writes.size() == kBatchChunks ||
        (bytes > 0 && bytes + BytesOf(job.kept) > kBatchBytes))
      break;
    bytes += BytesOf(job.kept);
    job.is_taken = true;
    --untaken_;
    batch.numbers.push_back(number);
    batch.writes.push_back({.id = job.kept.id,
                            .chunk = job.kept.chunk.get(),
                            .recompute_seconds = job.kept.worth.recompute_seconds,
                            .priority = job.kept.worth.priority});
  }
}

// The jobs stay in the queue meanwhile, so that the same chunk is not written twice and their bytes
// count.
void WriteQueue::WriteSome(Batch& batch, std::unique_lock<std::mutex>& lock) noexcept {
  lock.unlock();
  std::vector<Status> outcomes;
  Status all;
  try {
    const int64_t deadline = clock_->SteadyNs() + tier_->io_timeout_ns;
    if (auto call = tier_->Admit(deadline)) {
      outcomes = tier_->tier->Write(batch.writes, deadline);
      if (outcomes.size() == batch.writes.size()) {
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
  for (size_t i = 0; i < batch.numbers.size(); ++i) {
    Status status = all.ok() ? outcomes[i] : all;
    const auto at = jobs_.find(batch.numbers[i]);
    const KeptChunk& kept = at->second.kept;
    // Its time may be set until it has left the queue; from then on it is found in the tier.
    for (int64_t set_ms = 0; status.ok() && kept.expires_ms != set_ms;) {
      set_ms = kept.expires_ms;
      lock.unlock();
      status = SetExpiryInTier(kept.id.key, set_ms);
      lock.lock();
    }
    Jobs::node_type job = jobs_.extract(at);
    by_id_.erase(job.mapped().kept.id);
    bytes_ -= BytesOf(job.mapped().kept);
    lock.unlock();
    tier_->Count(status);
    Finish(job.mapped(), status);
    job = {};
    lock.lock();
  }
  changed_.notify_all();
}

// The chunk was just written. One that would stay for longer than it may is removed.
Status WriteQueue::SetExpiryInTier(const ChunkKey& key, int64_t expires_ms) noexcept {
  return GuardEntry([&]() -> Status {
    const int64_t deadline_ns = clock_->SteadyNs() + tier_->io_timeout_ns;
    Status status = tier_->tier->SetExpiry(key, expires_ms, deadline_ns);
    if (!status.ok()) static_cast<void>(tier_->tier->Remove(key, deadline_ns));
    return status;
  });
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
