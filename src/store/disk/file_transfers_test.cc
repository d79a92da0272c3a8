// Queues and lanes: what the disk tier's speed and its patience rest on.
#include "store/disk/file_transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <latch>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/testing/fake_clock.h"
#include "base/testing/soak.h"
#include "base/testing/threads_of_process.h"
#include "store/disk/disk_tier.h"
#include "store/disk/file_session.h"
#include "store/disk/io_lane.h"
#include "store/testing/test_disk.h"

namespace quire {
namespace {

std::shared_ptr<IoWork> AnyWork() {
  return std::make_shared<IoWork>(MachineTime(), std::make_shared<std::atomic<int64_t>>(0));
}

std::string Pattern(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 31 + i / 256);
  return bytes;
}

// Reads a file in pieces through transfers of `files`.
std::string ReadAll(FileSystem& files, const std::string& path, int64_t piece) {
  const auto work = AnyWork();
  FileSession io(files, *work);
  OpenFile file;
  FileStat stat;
  EXPECT_EQ(io.Open(path, OpenMode::kRead, &file), 0);
  EXPECT_EQ(io.StatFile(file.get(), &stat), 0);
  std::string bytes(static_cast<size_t>(stat.size), 'x');
  FileTransfers transfers(files);
  int64_t next = 0;
  while (next < stat.size || !transfers.idle()) {
    while (next < stat.size && !transfers.full()) {
      transfers.StartRead(file.get(), next, piece, static_cast<size_t>(next));
      next += piece;
    }
    const auto done = transfers.Next(*work);
    EXPECT_EQ(done.error, 0);
    bytes.replace(done.tag, done.bytes.size(), reinterpret_cast<const char*>(done.bytes.data()),
                  done.bytes.size());
  }
  return bytes;
}

TEST(FileTransfers, EveryQueueReadsTheSame) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  const std::string bytes = Pattern(300'001);
  WriteFileBytes(path, bytes);
  const auto machine = CreateMachineFileSystem(true);
  const auto threads = CreateMachineFileSystem(false);
  FaultyFileSystem serial(machine);
  for (const int64_t piece : {4096, 70'001, 1 << 20}) {
    EXPECT_EQ(ReadAll(*machine, path, piece), bytes);
    EXPECT_EQ(ReadAll(*threads, path, piece), bytes);
    EXPECT_EQ(ReadAll(serial, path, piece), bytes);
  }
}

#if !defined(QUIRE_SANITIZED)  // they need more memory of their own than a limit leaves
// A container may give no more threads when a read begins: that ends neither the read nor the
// process.
TEST(FileTransfersDeathTest, ThreadsThatTheSystemDoesNotGiveAreDoneWithout) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int threads : {0, 1}) {
    const auto reads = [threads] {
      const auto files = CreateMachineFileSystem(false);
      const int file = files->Open("/proc/self/exe", OpenMode::kRead);
      std::string bytes(4, 'x');
      LeaveRoomForThreads(threads);
      const auto queue = CreateThreadQueue(*files, 4, 4);
      queue->Start({.file = file,
                    .data = reinterpret_cast<std::byte*>(bytes.data()),
                    .size = std::ssize(bytes),
                    .tag = 7});
      const FileTransferDone done = queue->Next();
      return done.tag == 7 && done.result == 4 &&
             bytes ==
                 "\x7f"
                 "ELF";
    };
    EXPECT_EXIT(std::exit(reads() ? 0 : 1), testing::ExitedWithCode(0), "");
  }
}

TEST(DiskTierDeathTest, WithoutThreadsAStoreIsNotOpened) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int threads : {0, 1, 3}) {
    const auto is_refused = [threads] {
      const TestDirectory directory;
      DiskTierSetup setup;
      setup.disk.directory = directory.path();
      LeaveRoomForThreads(threads);
      const Status status = DiskTier::Open(setup).status();
      return status.code() == StatusCode::kUnavailable &&
             status.message().find("thread") != std::string_view::npos;
    };
    EXPECT_EXIT(std::exit(is_refused() ? 0 : 1), testing::ExitedWithCode(0), "");
  }
}
#endif

TEST(FileTransfers, ShortAndInterruptedOnesAreGoneOnWith) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  const std::string bytes = Pattern(100'000);
  WriteFileBytes(path, bytes);
  for (const int error : {1, -EINTR}) {
    FaultyFileSystem files(CreateMachineFileSystem(false));
    files.FailAt(0, error, error == 1, "read");
    EXPECT_EQ(ReadAll(files, path, 10'000), bytes);
  }
}

TEST(FileTransfers, AnErrorIsOfItsOwnTransfer) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  WriteFileBytes(path, Pattern(8192));
  const auto work = AnyWork();
  FaultyFileSystem files(CreateMachineFileSystem(false));
  FileSession io(files, *work);
  OpenFile file;
  ASSERT_EQ(io.Open(path, OpenMode::kRead, &file), 0);
  FileTransfers transfers(files);
  files.FailAt(1, -EIO, false, "read");
  for (const size_t tag : {0, 1, 2}) transfers.StartRead(file.get(), 0, 4096, tag);
  for (const size_t tag : {0, 1, 2}) {
    const auto done = transfers.Next(*work);
    EXPECT_EQ(done.tag, tag);
    EXPECT_EQ(done.error, tag == 1 ? -EIO : 0);
  }
  EXPECT_TRUE(transfers.idle());
}

// As the disk of a virtual machine: all that it was asked for is done at once.
class AtOnceQueue final : public FileQueue {
 public:
  AtOnceQueue(FileSystem& files, size_t depth, int64_t* most)
      : files_(files), depth_(depth), most_(most) {}
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override {
    waiting_.push_back(transfer);
    under_way_ += transfer.size;
    *most_ = std::max(*most_, under_way_);
  }
  FileTransferDone Next() override {
    if (done_.empty()) {
      for (const FileTransfer& transfer : waiting_) done_.push_back(RunTransfer(files_, transfer));
      waiting_.clear();
      under_way_ = 0;
    }
    return *Poll();
  }
  std::optional<FileTransferDone> Poll() override {
    if (done_.empty()) return std::nullopt;
    const FileTransferDone done = done_.front();
    done_.pop_front();
    return done;
  }

 private:
  FileSystem& files_;
  const size_t depth_;
  int64_t* const most_;
  int64_t under_way_ = 0;
  std::vector<FileTransfer> waiting_;
  std::deque<FileTransferDone> done_;
};

class AtOnceFileSystem final : public FaultyFileSystem {
 public:
  using FaultyFileSystem::FaultyFileSystem;
  std::unique_ptr<FileQueue> CreateQueue(size_t depth) override {
    return std::make_unique<AtOnceQueue>(*this, depth, &most_under_way);
  }
  int64_t most_under_way = 0;  // bytes
};

// The disk gets its next requests before what came is handled, and never more than that much.
TEST(FileTransfers, WhatIsDoneIsNoLongerUnderWay) {
  constexpr int64_t kPiece = FileTransfers::kBytesMax;
  constexpr int64_t kAtOnce = FileTransfers::kBytesUnderWay / kPiece;
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  const std::string bytes = Pattern(static_cast<size_t>(3 * kAtOnce * kPiece));
  WriteFileBytes(path, bytes);
  AtOnceFileSystem files(CreateMachineFileSystem(false));
  EXPECT_EQ(ReadAll(files, path, kPiece), bytes);
  EXPECT_EQ(files.most_under_way, FileTransfers::kBytesUnderWay);

  const auto work = AnyWork();
  FileSession io(files, *work);
  OpenFile file;
  ASSERT_EQ(io.Open(path, OpenMode::kRead, &file), 0);
  FileTransfers transfers(files);
  int64_t started = 0;
  const auto fill = [&] {
    for (; !transfers.full(); ++started)
      transfers.StartRead(file.get(), started * kPiece, kPiece, static_cast<size_t>(started));
  };
  fill();
  EXPECT_EQ(started, kAtOnce);
  for (int64_t next = 0; next < started; ++next) {
    const auto done = transfers.Next(*work);
    if (next == 0) {
      fill();
      EXPECT_EQ(started, 2 * kAtOnce) << "the others are done, too";
    }
    EXPECT_EQ(done.tag, static_cast<size_t>(next));
    const std::string_view want = std::string_view(bytes).substr(done.tag * kPiece, kPiece);
    EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(done.bytes.data()), kPiece), want)
        << "its buffer was given to another one";
  }
  EXPECT_TRUE(transfers.idle());
}

// A disk that is faster than the thread is never waited for, and lives.
TEST(FileTransfers, WhatWasDoneAlreadyIsASignOfLife) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  WriteFileBytes(path, Pattern(4096));
  const auto clock = std::make_shared<FakeClock>();
  const auto beat_ns = std::make_shared<std::atomic<int64_t>>(0);
  IoWork work(clock, beat_ns);
  AtOnceFileSystem files(CreateMachineFileSystem(false));
  FileSession io(files, work);
  OpenFile file;
  ASSERT_EQ(io.Open(path, OpenMode::kRead, &file), 0);
  FileTransfers transfers(files);
  for (const size_t tag : {0, 1, 2}) transfers.StartRead(file.get(), 0, 4096, tag);
  while (!transfers.idle()) {
    clock->Advance(1000);
    static_cast<void>(transfers.Next(work));
    EXPECT_EQ(beat_ns->load(), clock->SteadyNs());
  }
}

// Buffers are held by what is under way, by what is done, and by what is being handled.
TEST(FileTransfers, ABufferComesBackWithWhatWasHandled) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/file";
  WriteFileBytes(path, Pattern(4096));
  const auto work = AnyWork();
  AtOnceFileSystem files(CreateMachineFileSystem(false));
  FileSession io(files, *work);
  OpenFile file;
  ASSERT_EQ(io.Open(path, OpenMode::kRead, &file), 0);
  FileTransfers transfers(files);
  size_t started = 0;
  for (; !transfers.full(); ++started) transfers.StartRead(file.get(), 0, 4096, started);
  EXPECT_EQ(started, FileTransfers::kBuffers);
  {
    const auto done = transfers.Next(*work);
    EXPECT_TRUE(transfers.full());
    EXPECT_FALSE(transfers.full_in_place());
  }
  EXPECT_FALSE(transfers.full());
  transfers.Drain(*work);
  EXPECT_TRUE(transfers.idle());
}

TEST(FileTransfers, ADirectReadGoesOnAligned) {
  EXPECT_EQ(ResumeAfter(4096, 8192), 4096u);
  EXPECT_EQ(ResumeAfter(5000, 8192), 4096u);
  EXPECT_EQ(ResumeAfter(100, 8192), 100u);
  EXPECT_EQ(ResumeAfter(8192, 8192), 8192u);
}

constexpr int64_t kTimeoutNs = 1'000'000;

TEST(IoLane, WorkIsDoneAndItsMemoryFailureIsAStatus) {
  IoLane lane(MachineTime(), 2, int64_t{10'000'000'000});
  int runs = 0;
  EXPECT_TRUE(lane.Run([&](IoWork& work) { work.WithCaller([&] { ++runs; }); }, kNever).ok());
  EXPECT_EQ(runs, 1);
  const Status status = lane.Run([](IoWork&) { throw std::bad_alloc(); }, kNever);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
}

// Work that hangs until the test lets it go.
class Hanging {
 public:
  std::function<void(IoWork&)> Run() {
    return [state = state_](IoWork& work) {
      state->is_in = true;
      state->is_in.notify_all();
      state->may_go.wait(false);
      state->reached_caller = work.WithCaller([] {});
      state->is_over = true;
      state->is_over.notify_all();
    };
  }
  void AwaitIn() { state_->is_in.wait(false); }
  bool ReleaseReachesCaller() {
    state_->may_go = true;
    state_->may_go.notify_all();
    state_->is_over.wait(false);
    return state_->reached_caller;
  }

 private:
  struct State {
    std::atomic<bool> is_in = false, may_go = false, is_over = false, reached_caller = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Two callers of a lane with one thread: the work of the first one hangs, the other's is behind it.
class TwoCalls {
 public:
  TwoCalls(IoLane* lane, Hanging* hanging, FakeClock* clock)
      : first_([this, lane, hanging] { status = lane->Run(hanging->Run(), kNever); }) {
    hanging->AwaitIn();
    second_ = std::thread([this, lane] { behind = lane->Run([](IoWork&) {}, kNever); });
    clock->AwaitWaiters(2);
  }
  void Join() {
    first_.join();
    second_.join();
  }

  Status status, behind;

 private:
  std::thread first_, second_;
};

TEST(IoLane, AnAbandonedWorkDoesNotReachItsCaller) {
  const auto clock = std::make_shared<FakeClock>();
  Hanging hanging;
  std::thread ends;
  {
    IoLane lane(clock, 1, kTimeoutNs);
    TwoCalls calls(&lane, &hanging, clock.get());
    clock->Advance(kTimeoutNs);
    calls.Join();
    EXPECT_EQ(calls.status.code(), StatusCode::kTimeout);
    EXPECT_EQ(calls.behind.code(), StatusCode::kTimeout);
    EXPECT_FALSE(lane.responds());
    // The lane can end before its thread.
    ends = std::thread([&] {
      clock->AwaitWaiters(1);
      clock->Advance(kTimeoutNs);
    });
  }
  ends.join();
  EXPECT_FALSE(hanging.ReleaseReachesCaller());
}

// A host's clock that has no memory to wait with.
class ClockWithoutMemory final : public Clock {
 public:
  int64_t WallMs() const noexcept override { return MachineTime()->WallMs(); }
  int64_t SteadyNs() const noexcept override { return MachineTime()->SteadyNs(); }
  void Wait(std::condition_variable&, std::unique_lock<std::mutex>& lock, int64_t) override {
    lock.unlock();
    begun.wait();
    lock.lock();
    throw std::bad_alloc();
  }
  std::latch begun{1};  // the work whose caller waits
};

TEST(IoLane, ACallerWhoseClockFailsHasLeft) {
  const auto clock = std::make_shared<ClockWithoutMemory>();
  std::mutex mutex;
  bool reached = true;
  {
    IoLane lane(clock, 1, 3'600'000 * kNsPerMs);
    std::unique_lock<std::mutex> hold(mutex);
    EXPECT_THROW(static_cast<void>(lane.Run(
                     [&](IoWork& work) {
                       clock->begun.count_down();
                       const std::lock_guard<std::mutex> wait(mutex);
                       reached = work.WithCaller([] {});
                     },
                     kNever)),
                 std::bad_alloc);
    hold.unlock();
    // Behind the one that was left; its caller may find it done without waiting.
    for (bool done = false; !done;) {
      try {
        done = lane.Run([](IoWork&) {}, kNever).ok();
      } catch (const std::bad_alloc&) {
        std::this_thread::yield();
      }
    }
  }
  EXPECT_FALSE(reached) << "it would have touched what the caller no longer has";
}

TEST(IoLane, AStoppedLaneAnswersClosed) {
  const auto clock = std::make_shared<FakeClock>();
  Hanging hanging;
  IoLane lane(clock, 1, kTimeoutNs);
  TwoCalls calls(&lane, &hanging, clock.get());
  std::thread stops([&] { lane.Stop(); });
  calls.Join();  // no time passes for those that wait
  EXPECT_EQ(calls.status.code(), StatusCode::kClosed);
  EXPECT_EQ(calls.behind.code(), StatusCode::kClosed);
  clock->AwaitWaiters(1);
  clock->Advance(kTimeoutNs);
  stops.join();
  bool ran = false;
  EXPECT_EQ(lane.Run([&](IoWork&) { ran = true; }, kNever).code(), StatusCode::kClosed);
  EXPECT_FALSE(ran);
  lane.Stop();
  EXPECT_FALSE(hanging.ReleaseReachesCaller());
}

TEST(IoLane, ProgressExtendsThePatience) {
  const auto clock = std::make_shared<FakeClock>();
  IoLane lane(clock, 1, kTimeoutNs);
  const Status status = lane.Run(
      [&](IoWork& work) {
        for (int i = 0; i < 10; ++i) {
          clock->Advance(kTimeoutNs - 1);
          work.Beat();
        }
      },
      kNever);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(IoLane, ADeadlineEndsEvenWorkThatProgresses) {
  const auto clock = std::make_shared<FakeClock>();
  IoLane lane(clock, 1, kTimeoutNs);
  Hanging hanging;
  Status status;
  std::thread caller([&] { status = lane.Run(hanging.Run(), clock->SteadyNs() + 10); });
  hanging.AwaitIn();
  clock->AwaitWaiters(1);
  clock->Advance(10);
  caller.join();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_TRUE(lane.responds());
  EXPECT_FALSE(hanging.ReleaseReachesCaller());
}

}  // namespace
}  // namespace quire
