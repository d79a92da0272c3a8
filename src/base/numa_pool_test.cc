// The pool whose threads belong to NUMA nodes, over a kernel that is a fake.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/numa_nodes.h"
#include "base/testing/fake_numa_calls.h"
#include "base/thread_pool.h"

namespace quire {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

class NumaPool : public ::testing::Test {
 protected:
  std::shared_ptr<ParallelRunner> Make(int threads, const NumaTopology& topology) {
    return CreateNumaThreadPool(threads, topology, calls_).value();
  }
  const std::shared_ptr<FakeNumaCalls> calls_ = std::make_shared<FakeNumaCalls>();
};

TEST_F(NumaPool, BindsAllThreadsButTheCallersToTheirNodes) {
  const auto pool = Make(5, NodesOfEqualSize(2, 4));
  const std::vector<int> first = {0, 1, 2, 3};
  const std::vector<int> second = {4, 5, 6, 7};
  EXPECT_EQ(calls_->bound(), (std::vector{first, first, second, second}));
  ASSERT_NE(pool->numa_nodes(), nullptr);
  EXPECT_EQ(pool->numa_nodes()->Text(), "2 nodes: node 0 with 3 threads, node 1 with 2 threads");
}

TEST_F(NumaPool, FewerThanTwoNodesWithThreadsAreNone) {
  EXPECT_EQ(Make(4, NodesOfEqualSize(1, 4))->numa_nodes(), nullptr);
  EXPECT_EQ(Make(1, NodesOfEqualSize(2, 4))->numa_nodes(), nullptr);
  EXPECT_EQ(Make(4, {})->numa_nodes(), nullptr);
  EXPECT_TRUE(calls_->bound().empty());
  EXPECT_EQ(CreateThreadPool(4).value()->numa_nodes(), nullptr);
  EXPECT_EQ(CreateNumaThreadPool(-1, NodesOfEqualSize(2, 4), calls_).status().code(),
            StatusCode::kBadArgument);
}

TEST_F(NumaPool, RunsEveryIndexOnceInBothOrders) {
  for (const int nodes : {2, 3, 4}) {
    const auto pool = Make(5, NodesOfEqualSize(nodes, 2));
    for (const int64_t count : {0, 1, 2, 3, 17, 300}) {
      for (ParallelRunner* const runner : {pool.get(), &Along(*pool)}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        runner->ParallelFor(count, [&](int64_t index, int worker) {
          hits[static_cast<size_t>(index)].fetch_add(1);
          EXPECT_LT(worker, 5);
        });
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
      }
    }
  }
}

// Four tasks wait for each other, so each is a thread's first: of the run of its node.
TEST_F(NumaPool, AThreadBeginsWithTheRunOfItsNode) {
  const auto pool = Make(4, NodesOfEqualSize(2, 2));
  for (const int caller : {0, 1}) {
    // The caller takes part where it is: then one of that node's own finds nothing left there.
    calls_->current_cpu = 2 * caller;
    std::atomic<int> arrived{0};
    std::vector<std::atomic<int>> worker_of(4);
    Along(*pool).ParallelFor(4, [&](int64_t index, int worker) {
      worker_of[static_cast<size_t>(index)] = worker;
      arrived.fetch_add(1);
      while (arrived.load() < 4) std::this_thread::yield();
    });
    const auto runs = [&](int worker, int first, int second) {
      return worker_of[static_cast<size_t>(first)] == worker ||
             worker_of[static_cast<size_t>(second)] == worker;
    };
    if (caller == 0) {
      EXPECT_TRUE(runs(0, 0, 1));
      EXPECT_TRUE(runs(1, 0, 1));
      EXPECT_TRUE(runs(2, 2, 3));
      EXPECT_TRUE(runs(3, 2, 3));
    } else {
      EXPECT_TRUE(runs(1, 0, 1)) << "alone on the first node";
    }
  }
}

TEST_F(NumaPool, ThreadsGoOnWithWhatOtherNodesHaveLeft) {
  const auto pool = Make(2, NodesOfEqualSize(2, 1));
  std::atomic<int> others{0};
  // Task 0 lasts until all others are done, those of its own node too.
  Along(*pool).ParallelFor(10, [&](int64_t index, int) {
    if (index != 0) {
      others.fetch_add(1);
      return;
    }
    while (others.load() < 9) std::this_thread::yield();
  });
  EXPECT_EQ(others.load(), 9);
}

TEST_F(NumaPool, ATaskOfARunAlongNodesUsesThePoolAlone) {
  const auto pool = Make(3, NodesOfEqualSize(2, 2));
  std::atomic<int> inner{0};
  Along(*pool).ParallelFor(4, [&](int64_t, int) {
    Along(*pool).ParallelFor(5, [&](int64_t, int worker) {
      EXPECT_EQ(worker, 0);
      inner.fetch_add(1);
    });
  });
  EXPECT_EQ(inner.load(), 20);
}

TEST_F(NumaPool, PlacesMemoryWhereItsTasksRun) {
  const auto pool = Make(4, NodesOfEqualSize(2, 2));
  auto* const memory = reinterpret_cast<std::byte*>(16 * kHugePage);  // never touched
  pool->numa_nodes()->Divide(memory, 8 * kHugePage, {});
  pool->numa_nodes()->Spread(memory, kHugePage);
  pool->numa_nodes()->Spread(memory, 0);
  const auto placed = calls_->placed();
  ASSERT_EQ(placed.size(), 3);
  EXPECT_EQ(placed[0].memory, memory);
  EXPECT_EQ(placed[0].bytes, 4 * kHugePage);
  EXPECT_EQ(placed[0].nodes, std::vector<int>{0});
  EXPECT_EQ(placed[1].memory, memory + 4 * kHugePage);
  EXPECT_EQ(placed[1].bytes, 4 * kHugePage);
  EXPECT_EQ(placed[1].nodes, std::vector<int>{1});
  EXPECT_EQ(placed[2].nodes, (std::vector<int>{0, 1}));
}

TEST_F(NumaPool, WhatTheSystemRefusesIsSaidAndNotAskedAgain) {
  calls_->bind_error = EINVAL;
  calls_->place_error = EPERM;
  const auto pool = Make(2, NodesOfEqualSize(2, 1));
  NumaNodes& nodes = *pool->numa_nodes();
  EXPECT_EQ(nodes.Text(),
            "2 nodes: node 0 with 1 thread, node 1 with 1 thread; threads are not bound to them, "
            "since the system refused: Invalid argument");
  auto* const memory = reinterpret_cast<std::byte*>(16 * kHugePage);
  nodes.Divide(memory, 8 * kHugePage, {});
  nodes.Spread(memory, kHugePage);
  EXPECT_EQ(calls_->placed().size(), 1);
  EXPECT_NE(nodes.Text().find("; memory lies where it is written first, since mbind was refused: "
                              "Operation not permitted"),
            std::string::npos)
      << nodes.Text();
  int64_t sum = 0;
  std::atomic<int64_t> total{0};
  for (int64_t i = 0; i < 100; ++i) sum += i;
  Along(*pool).ParallelFor(100, [&](int64_t index, int) { total.fetch_add(index); });
  EXPECT_EQ(total.load(), sum);
}

}  // namespace
}  // namespace quire
