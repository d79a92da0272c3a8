#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/host_float_environment.h"
#include "quire/seams.h"

namespace quire {
namespace {

TEST(ThreadPool, RunsEveryIndexOnceForManyJobs) {
  for (const int threads : {1, 2, 5}) {
    const auto pool = CreateThreadPool(threads).value();
    ASSERT_EQ(pool->worker_count(), threads);
    for (const int64_t count : {0, 1, 2, 3, 17, 300}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        std::atomic<bool> worker_in_range{true};
        pool->ParallelFor(count, [&](int64_t index, int worker) {
          hits[static_cast<size_t>(index)].fetch_add(1);
          if (worker < 0 || worker >= threads) worker_in_range = false;
        });
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
        ASSERT_TRUE(worker_in_range);
      }
    }
  }
}

TEST(ThreadPool, ThreadsWorkAtTheSameTimeUnderNumbersOfTheirOwn) {
  constexpr int kThreads = 3;
  const auto pool = CreateThreadPool(kThreads).value();
  std::atomic<int> arrived{0};
  std::vector<std::atomic<int>> by_worker(kThreads);
  // Each index waits for all others, so no thread can take two.
  pool->ParallelFor(kThreads, [&](int64_t, int worker) {
    by_worker[static_cast<size_t>(worker)].fetch_add(1);
    arrived.fetch_add(1);
    while (arrived.load() < kThreads) std::this_thread::yield();
  });
  for (const auto& tasks : by_worker) EXPECT_EQ(tasks.load(), 1);
}

TEST(ThreadPool, OneThreadRunsInOrderInTheCaller) {
  const auto pool = CreateThreadPool(1).value();
  std::vector<int64_t> order;
  pool->ParallelFor(4, [&](int64_t index, int) { order.push_back(index); });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, ZeroMeansTheUsableCores) {
  EXPECT_GE(CreateThreadPool(0).value()->worker_count(), 1);
}

TEST(ThreadPool, TheChildOfAForkDoesNotJoinTheThreadsOfItsParent) {
  auto pool = CreateThreadPool(8).value();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int sum = 0;
    pool->ParallelFor(4, [&](int64_t index, int) { sum += static_cast<int>(index); });
    pool.reset();
    ::_exit(sum == 6 ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

// Where a worker comes too late for a job it is inside for an instant, in which another job's
// caller may fork; inside a task it stays there as long as the test wants.
TEST(ThreadPool, TheChildOfAForkDoesNotWaitForAWorkerThatWasInside) {
  auto pool = CreateThreadPool(2).value();
  std::atomic<int> inside{0};
  std::atomic<bool> forked{false};
  pid_t child = -1;
  pool->ParallelFor(2, [&](int64_t, int worker) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
    if (worker == 0) {
      child = ::fork();
      if (child == 0) ::alarm(600);  // a child that waits for ever ends, too
      forked = true;
    }
    while (!forked.load()) std::this_thread::yield();
  });
  if (child == 0) {
    std::atomic<int> sum{0};
    for (int job = 0; job < 3; ++job) {
      pool->ParallelFor(4, [&](int64_t index, int) { sum.fetch_add(static_cast<int>(index)); });
    }
    pool.reset();
    ::_exit(sum.load() == 18 ? 7 : 1);
  }
  ASSERT_GE(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST(ThreadPool, ANumberOfThreadsOutOfRangeIsBadArgument) {
  for (const int threads : {-1, kThreadCountMax + 1, 1 << 30, std::numeric_limits<int>::min()}) {
    const Status status = CreateThreadPool(threads).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << threads;
    EXPECT_NE(status.message().find(std::to_string(threads)), std::string_view::npos);
  }
}

TEST(ThreadPool, ATaskThatUsesThePoolDoesTheInnerTasksItself) {
  constexpr int64_t kOuter = 5;
  constexpr int64_t kInner = 7;
  const auto pool = CreateThreadPool(3).value();
  std::vector<std::atomic<int>> hits(kOuter * kInner);
  std::atomic<bool> here{true};
  pool->ParallelFor(kOuter, [&](int64_t outer, int) {
    const std::thread::id caller = std::this_thread::get_id();
    pool->ParallelFor(kInner, [&](int64_t inner, int worker) {
      hits[static_cast<size_t>(outer * kInner + inner)].fetch_add(1);
      if (worker != 0 || std::this_thread::get_id() != caller) here = false;
    });
  });
  for (const auto& hit : hits) EXPECT_EQ(hit.load(), 1);
  EXPECT_TRUE(here);
}

TEST(ThreadPool, ASecondThreadWorksAloneWhileTheWorkersAreTaken) {
  const auto pool = CreateThreadPool(2).value();
  std::atomic<int> inside{0};
  std::atomic<bool> second_done{false};
  std::thread first([&] {
    pool->ParallelFor(2, [&](int64_t, int) {
      inside.fetch_add(1);
      while (!second_done.load()) std::this_thread::yield();
    });
  });
  while (inside.load() < 2) std::this_thread::yield();
  std::vector<int64_t> order;
  pool->ParallelFor(4, [&](int64_t index, int worker) {
    EXPECT_EQ(worker, 0);
    order.push_back(index);
  });
  second_done = true;
  first.join();
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, TakesACallableByAnyReference) {
  const auto pool = CreateThreadPool(2).value();
  std::atomic<int> calls{0};
  auto count = [&](int64_t, int) { calls.fetch_add(1); };
  const auto& view = count;
  pool->ParallelFor(3, count);
  pool->ParallelFor(3, view);
  pool->ParallelFor(3, std::move(count));
  EXPECT_EQ(calls.load(), 9);
}

TEST(ThreadPool, TasksRunInTheDefaultFloatEnvironmentAndTheCallersComesBack) {
  for (const int threads : {1, 2}) {
    const HostFloatEnvironment host(kFlushSubnormals);
    const auto pool =
        CreateThreadPool(threads).value();  // workers inherit the creator's environment
    std::atomic<int> wrong{0};
    const auto look = [&](int64_t, int) {
      if (FloatControl() != kDefaultFloatControl) wrong.fetch_add(1);
    };
    pool->ParallelFor(64, look);
    pool->ParallelFor(1, look);
    EXPECT_EQ(wrong.load(), 0);
    EXPECT_TRUE(host.IsInForce());
  }
}

}  // namespace
}  // namespace quire
