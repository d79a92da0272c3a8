// EngineOptions::numa on the nodes that this machine has. `./test numa` runs this on a machine of
// two nodes that it boots; where there is one, the half that needs two is skipped.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/control_groups.h"
#include "base/numa_nodes.h"
#include "base/thread_pool.h"
#include "model/testing/test_model.h"
#include "quire/engine.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

constexpr int kThreads = 4;
constexpr size_t kHugePage = size_t{2} << 20;

class NumaEngine : public testing::Test {
 protected:
  const NumaTopology topology_ = ReadNumaTopology(UsableCpus());
};

// A model with a head of 16 MiB, so that nodes have whole huge pages of it.
TestModel LargeHead() { return {.vocab_size = 8192, .hidden_size = 512, .num_hidden_layers = 1}; }

EngineOptions OptionsOf(const TestFolder& folder, const std::string& numa) {
  return {.model_directory = folder.path(),
          .dtype = DType::kF32,
          .threads = kThreads,
          .numa = numa,
          .kv_bytes = int64_t{8} << 20};
}

std::vector<float> LogitsOf(Engine& engine) {
  const std::vector<int32_t> tokens = RandomTokens(150, engine.model_info().vocab_size, 3);
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.model_info().vocab_size));
  const std::span<const int32_t> prompts[] = {tokens};
  float* const buffers[] = {logits.data()};
  const Status status = engine.Logits(prompts, buffers);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return logits;
}

// Pages of this process's memory by what they prefer and by where they are, as the kernel counts.
std::map<std::pair<std::string, std::string>, int64_t> PagesOfPolicies() {
  std::map<std::pair<std::string, std::string>, int64_t> pages;
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string address, policy;
    words >> address >> policy;
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      if (word[0] != 'N' || equals == std::string::npos) continue;
      pages[{policy, word.substr(1, equals - 1)}] += std::atoll(word.c_str() + equals + 1);
    }
  }
  return pages;
}

// The node of each page of `memory`, which is written.
std::vector<int> NodesOfPages(const std::byte* memory, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<const void*> pages;
  for (size_t at = 0; at < bytes; at += page) pages.push_back(memory + at);
  std::vector<int> nodes(pages.size(), -1);
  const long result =
      syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0);
  EXPECT_EQ(result, 0);
  return nodes;
}

// The calling thread runs on these CPUs alone.
class OnCpus {
 public:
  explicit OnCpus(const std::vector<int>& cpus) {
    EXPECT_EQ(sched_getaffinity(0, sizeof(before_), &before_), 0);
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int cpu : cpus) CPU_SET(cpu, &mask);
    EXPECT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
  }
  ~OnCpus() { EXPECT_EQ(sched_setaffinity(0, sizeof(before_), &before_), 0); }
  OnCpus(const OnCpus&) = delete;
  OnCpus& operator=(const OnCpus&) = delete;

 private:
  cpu_set_t before_;
};

int NodeOfThisThread() {
  unsigned cpu = 0;
  unsigned node = 0;
  EXPECT_EQ(syscall(SYS_getcpu, &cpu, &node, nullptr), 0);
  return static_cast<int>(node);
}

TEST_F(NumaEngine, AnswersAndPlansAreThoseOfOneNode) {
  const TestFolder folder;
  WriteTestModel(folder, LargeHead());
  const TestFolder packed;
  PackTestModel(folder, DType::kF32, packed);
  const auto off = Engine::Create(OptionsOf(folder, "off")).value();
  EXPECT_EQ(off->numa(), "off");
  const std::vector<float> want = LogitsOf(*off);
  for (const TestFolder* const source : {&folder, &packed}) {
    const auto placed = Engine::Create(OptionsOf(*source, "auto")).value();
    EXPECT_TRUE(LogitsOf(*placed) == want);
    EXPECT_EQ(placed->numa().starts_with("off: "), topology_.nodes.size() < 2) << placed->numa();
    MemoryPlan plans[2];
    for (const bool with_nodes : {false, true}) {
      plans[with_nodes] =
          Engine::PlanMemory(OptionsOf(*source, with_nodes ? "auto" : "off")).value();
    }
    EXPECT_EQ(plans[0].weight_bytes, plans[1].weight_bytes);
    EXPECT_EQ(plans[0].total_bytes, plans[1].total_bytes);
  }
}

TEST_F(NumaEngine, AHostsRunnerHasNoNodes) {
  const TestFolder folder;
  WriteTestModel(folder, {});
  EngineOptions options = OptionsOf(folder, "auto");
  options.runner = CreateThreadPool(2).value();
  EXPECT_EQ(Engine::Create(options).value()->numa(), "off");
}

class TwoNodes : public NumaEngine {
 protected:
  void SetUp() override {
    if (topology_.nodes.size() < 2) {
      // The machine of ./test numa has two: there, none is a failure.
      ASSERT_EQ(std::getenv("QUIRE_HAS_NUMA"), nullptr) << topology_.why_none;
      GTEST_SKIP() << "this process has one NUMA node; ./test numa boots a machine with two";
    }
    pool_ = CreateNumaThreadPool(kThreads, topology_, SystemNumaCalls()).value();
    ASSERT_NE(pool_->numa_nodes(), nullptr);
  }
  std::shared_ptr<ParallelRunner> pool_;
};

TEST_F(TwoNodes, ThePagesOfATaskLieOnTheNodeOfItsThread) {
  constexpr size_t kBytes = kThreads * 4 * kHugePage;
  const HostMemory memory = HostMemory::Allocate(kBytes).value();
  pool_->numa_nodes()->Divide(memory.data(), kBytes, {});
  std::fill_n(memory.data(), kBytes, std::byte{1});  // by this thread, on its node
  // The pool does not bind this thread. Where it is not on its node, another one takes its tasks.
  const OnCpus on_first_node(topology_.nodes[0].cpus);
  // Each task waits for the others, so each is the first of its thread.
  std::atomic<int> arrived{0};
  std::vector<int> node_of_task(kThreads, -1);
  Along(*pool_).ParallelFor(kThreads, [&](int64_t task, int) {
    arrived.fetch_add(1);
    while (arrived.load() < kThreads) std::this_thread::yield();
    node_of_task[static_cast<size_t>(task)] = NodeOfThisThread();
  });
  for (size_t task = 0; task < kThreads; ++task) {
    const size_t bytes = kBytes / kThreads;
    for (const int node : NodesOfPages(memory.data() + task * bytes, bytes)) {
      ASSERT_EQ(node, node_of_task[task]) << "task " << task;
    }
  }
}

TEST_F(TwoNodes, PagesOfKvComeFromAllNodesInTurn) {
  constexpr size_t kBytes = 32 * kHugePage;
  const HostMemory memory = HostMemory::Allocate(kBytes).value();
  pool_->numa_nodes()->Spread(memory.data(), kBytes);
  std::fill_n(memory.data(), kBytes, std::byte{1});
  std::map<int, int64_t> pages;
  int64_t total = 0;
  for (const int node : NodesOfPages(memory.data(), kBytes)) {
    ++pages[node];
    ++total;
  }
  EXPECT_EQ(pages.size(), topology_.nodes.size());
  for (const auto& [node, count] : pages) {
    EXPECT_NEAR(static_cast<double>(count) / static_cast<double>(total),
                1.0 / static_cast<double>(pages.size()), 0.1)
        << "node " << node;
  }
}

TEST_F(TwoNodes, WeightsOfAnEngineLieWhereTheyArePlaced) {
  const TestFolder folder;
  WriteTestModel(folder, LargeHead());
  const TestFolder packed;
  PackTestModel(folder, DType::kF32, packed);
  for (const TestFolder* const source : {&folder, &packed}) {
    const auto engine = Engine::Create(OptionsOf(*source, "auto")).value();
    EXPECT_EQ(engine->numa().find("refused"), std::string::npos) << engine->numa();
    EXPECT_NE(engine->numa().find(" nodes: node "), std::string::npos) << engine->numa();
    LogitsOf(*engine);
    int64_t placed = 0;
    for (const NumaNode& node : topology_.nodes) {
      const std::string id = std::to_string(node.id);
      int64_t here = 0;
      for (const auto& [where, count] : PagesOfPolicies()) {
        if (where.first != "prefer:" + id) continue;
        EXPECT_EQ(where.second, id);
        here += count;
      }
      EXPECT_GT(here, 0) << "node " << id;
      placed += here;
    }
    const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
    EXPECT_GT(placed * page, int64_t{12} << 20) << "the head has 16 MiB";
  }
}

}  // namespace
}  // namespace quire
