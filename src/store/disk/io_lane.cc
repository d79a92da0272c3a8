#include "store/disk/io_lane.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/clock.h"

namespace quire {

IoWork::IoWork(std::shared_ptr<Clock> clock, std::shared_ptr<std::atomic<int64_t>> lane_beat_ns)
    : clock_(std::move(clock)),
      lane_beat_ns_(std::move(lane_beat_ns)),
      beat_ns_(clock_->SteadyNs()) {}

void IoWork::Beat() {
  const std::lock_guard<std::mutex> guard(mutex_);
  beat_ns_ = clock_->SteadyNs();
  lane_beat_ns_->store(beat_ns_);
}

bool IoWork::abandoned() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return abandoned_;
}

// What the threads use: a thread that hangs outlives its lane.
struct IoLane::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<IoWork>> waiting;
  std::vector<std::shared_ptr<IoWork>> current;
  int running = 0;  // threads that have not ended
  bool stopping = false;
  bool responds = true;
};

IoLane::IoLane(std::shared_ptr<Clock> clock, int thread_count, int64_t io_timeout_ns)
    : clock_(std::move(clock)),
      io_timeout_ns_(io_timeout_ns),
      beat_ns_(std::make_shared<std::atomic<int64_t>>(clock_->SteadyNs())),
      shared_(std::make_shared<Shared>()) {
  threads_.reserve(static_cast<size_t>(thread_count));
  shared_->current.reserve(static_cast<size_t>(thread_count));  // the threads take no memory for it
  try {
    while (std::ssize(threads_) < thread_count) {
      threads_.emplace_back([shared = shared_] { Serve(shared); });
      const std::lock_guard<std::mutex> guard(shared_->mutex);
      ++shared_->running;
    }
  } catch (...) {
    Stop();
    throw;
  }
}

void IoLane::Abandon(IoWork& work) noexcept {
  const std::lock_guard<std::mutex> guard(work.mutex_);
  work.abandoned_ = work.closed_ = true;
  work.changed_.notify_all();
}

void IoLane::Stop() noexcept {
  if (threads_.empty()) return;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->stopping = true;
    for (const auto& work : shared_->waiting) Abandon(*work);
    for (const auto& work : shared_->current) Abandon(*work);
    shared_->waiting.clear();
    shared_->changed.notify_all();
    try {
      ended = WaitUntil(*clock_, shared_->changed, lock, clock_->SteadyNs() + io_timeout_ns_,
                        [&] { return shared_->running == 0; });
    } catch (const std::bad_alloc&) {
      // A host's clock may take memory to wait. The threads are left behind as if they hung.
    }
  }
  for (std::thread& thread : threads_) ended ? thread.join() : thread.detach();
  threads_.clear();
}

void IoLane::Serve(const std::shared_ptr<Shared>& shared) {
  std::unique_lock<std::mutex> lock(shared->mutex);
  for (;;) {
    shared->changed.wait(lock, [&] { return shared->stopping || !shared->waiting.empty(); });
    if (shared->stopping) break;
    const std::shared_ptr<IoWork> work = std::move(shared->waiting.front());
    shared->waiting.pop_front();
    shared->current.push_back(work);
    lock.unlock();
    std::function<void(IoWork&)> run;
    work->WithCaller([&] {
      work->started_ = true;
      work->beat_ns_ = work->clock_->SteadyNs();
      work->lane_beat_ns_->store(work->beat_ns_);
      run = std::move(work->run_);
    });
    Status status;
    if (run) {
      try {
        run(*work);
      } catch (const std::bad_alloc&) {
        status = Status::OutOfMemory();
      }
      run = nullptr;  // with all that it holds, before the caller goes on
    }
    lock.lock();
    shared->responds = true;
    std::erase(shared->current, work);
    const std::lock_guard<std::mutex> guard(work->mutex_);
    work->status_ = std::move(status);
    work->done_ = true;
    work->changed_.notify_all();
  }
  --shared->running;
  shared->changed.notify_all();
}

std::shared_ptr<IoWork> IoLane::Start(std::function<void(IoWork&)> run) {
  auto work = std::make_shared<IoWork>(clock_, beat_ns_);
  work->run_ = std::move(run);
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  if (shared_->stopping) {
    Abandon(*work);
    return work;
  }
  shared_->waiting.push_back(work);
  shared_->changed.notify_all();
  return work;
}

void IoLane::Leave(IoWork& work) noexcept {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  std::erase_if(shared_->waiting, [&](const auto& other) { return other.get() == &work; });
}

Status IoLane::Await(IoWork& work, int64_t deadline_ns) {
  bool stuck = false;
  {
    std::unique_lock<std::mutex> lock(work.mutex_);
    for (;;) {
      if (work.done_) return work.status_;
      if (work.closed_) return Status(StatusCode::kClosed, "disk: the tier is closed");
      const int64_t now = clock_->SteadyNs();
      // Work that waits its turn has no beat of its own: those before it have.
      const int64_t beat_ns =
          work.started_ ? work.beat_ns_ : std::max(work.beat_ns_, beat_ns_->load());
      const int64_t patience = beat_ns + io_timeout_ns_;
      stuck = now >= patience;
      if (stuck || now >= deadline_ns) break;
      try {
        clock_->Wait(work.changed_, lock, std::min(deadline_ns, patience));
      } catch (...) {  // a host's clock may take memory to wait; its caller leaves, too
        work.abandoned_ = true;
        lock.unlock();
        Leave(work);
        throw;
      }
    }
    work.abandoned_ = true;
  }
  Leave(work);
  if (stuck) {
    const std::lock_guard<std::mutex> guard(shared_->mutex);
    shared_->responds = false;
  }
  return Status(StatusCode::kTimeout, stuck ? "disk: no answer for " +
                                                  std::to_string(io_timeout_ns_ / 1'000'000) +
                                                  " ms; the call was left behind"
                                            : std::string("disk: the deadline passed"));
}

Status IoLane::Run(std::function<void(IoWork&)> run, int64_t deadline_ns) {
  return Await(*Start(std::move(run)), deadline_ns);
}

bool IoLane::responds() const {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return shared_->responds;
}

}  // namespace quire
