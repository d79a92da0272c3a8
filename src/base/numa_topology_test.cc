// Nodes from a folder as the kernel shows them, and what they divide.
#include "base/numa_topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/control_groups.h"

namespace quire {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int>;

class NumaTopologyTest : public ::testing::Test {
 protected:
  NumaTopologyTest() {
    std::string pattern = (fs::temp_directory_path() / "quire_numa_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    paths_ = {.nodes = root_ + "/node", .status = root_ + "/status"};
    for (int cpu = 0; cpu < 16; ++cpu) cpus_.push_back(cpu);
  }
  ~NumaTopologyTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }
  void WriteNode(int id, const std::string& cpus, const std::string& distances = "") {
    Write("node/node" + std::to_string(id) + "/cpulist", cpus);
    if (!distances.empty()) {
      Write("node/node" + std::to_string(id) + "/distance", distances);
    }
  }
  // Nodes 0 to 3 of four CPUs each.
  void WriteFour() {
    Write("node/online", "0-3\n");
    Write("node/has_memory", "0-3\n");
    for (int id = 0; id < 4; ++id) {
      WriteNode(id, std::to_string(4 * id) + "-" + std::to_string(4 * id + 3) + "\n");
    }
  }
  NumaTopology Read() const { return ReadNumaTopology(cpus_, paths_); }

  std::string root_;
  NumaPaths paths_;
  Ids cpus_;
};

TEST_F(NumaTopologyTest, HasTheNodesAndTheirCpus) {
  Write("node/online", "0-1\n");
  Write("node/has_memory", "0-1\n");
  WriteNode(0, "0-1,4-5\n");
  WriteNode(1, "2-3,6-7\n");
  const std::vector<NumaNode> nodes = {{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}};
  EXPECT_EQ(Read().nodes, nodes);
  EXPECT_EQ(Read().why_none, "");
}

TEST_F(NumaTopologyTest, FourNodesOfWhichOneHasNoCpuThatMayBeUsed) {
  WriteFour();
  cpus_ = {0, 1, 2, 3, 4, 8, 9};  // of node 3 none: affinity, a cpuset, or they are offline
  const std::vector<NumaNode> nodes = {{0, {0, 1, 2, 3}}, {1, {4}}, {2, {8, 9}}};
  EXPECT_EQ(Read().nodes, nodes);
}

TEST_F(NumaTopologyTest, ANodeWhoseCpusAreOfflineHasNone) {
  WriteFour();
  WriteNode(2, "\n");
  const std::vector<NumaNode> nodes = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}, {3, {12, 13, 14, 15}}};
  EXPECT_EQ(Read().nodes, nodes);
}

TEST_F(NumaTopologyTest, CpusOfANodeWithoutMemoryCountToTheNearestWithSome) {
  WriteFour();
  Write("node/has_memory", "0,2\n");
  WriteNode(1, "4-7\n", "20 10 15 30\n");
  WriteNode(3, "12-15\n", "12 20 30 10\n");
  std::vector<NumaNode> nodes = {{0, {0, 1, 2, 3, 12, 13, 14, 15}},
                                 {2, {4, 5, 6, 7, 8, 9, 10, 11}}};
  EXPECT_EQ(Read().nodes, nodes);
  for (const char* const garbage : {"", "near far\n", "7\n"}) {
    for (const char* const node : {"1", "3"}) {
      fs::remove(root_ + "/node/node" + node + "/distance");
    }
    WriteNode(1, "4-7\n", garbage);
    nodes = {{0, {0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15}}, {2, {8, 9, 10, 11}}};
    EXPECT_EQ(Read().nodes, nodes) << "the first one: " << garbage;
  }
}

TEST_F(NumaTopologyTest, MemoryThatACpusetForbidsIsNone) {
  WriteFour();
  Write("status", "Name:\tquire\nMems_allowed:\t5\nMems_allowed_list:\t1,3\nThreads:\t1\n");
  const NumaTopology topology = Read();
  ASSERT_EQ(topology.nodes.size(), 2);
  EXPECT_EQ(topology.nodes[0].id, 1);
  EXPECT_EQ(topology.nodes[1].id, 3);
  for (const char* const silent : {"Name:\tquire\n", "\nMems_allowed_list:\tall\n", ""}) {
    Write("status", silent);
    EXPECT_EQ(Read().nodes.size(), 4) << silent;
  }
}

TEST_F(NumaTopologyTest, GarbageIsNoNode) {
  const auto expect_none = [&](const std::string& file) {
    const NumaTopology topology = Read();
    EXPECT_TRUE(topology.nodes.empty());
    EXPECT_NE(topology.why_none.find(root_ + "/" + file), std::string::npos) << topology.why_none;
  };
  expect_none("node/online");
  WriteFour();
  for (const std::string& file : {std::string("node/online"), std::string("node/has_memory"),
                                  std::string("node/node2/cpulist")}) {
    for (const char* const garbage : {"many\n", "0-", "3-1\n", "-1\n", "0-1024\n", "0;1\n",
                                      "99999999999999999999\n", "0,\n", "0 1\n"}) {
      WriteFour();
      Write(file, garbage);
      expect_none(file);
    }
    WriteFour();
    fs::remove(root_ + "/" + file);
    expect_none(file);
  }
}

TEST_F(NumaTopologyTest, NoNodeForThisProcessSaysSo) {
  WriteFour();
  cpus_.clear();
  EXPECT_TRUE(Read().nodes.empty());
  EXPECT_NE(Read().why_none.find("no node with memory and CPUs"), std::string::npos);
}

TEST_F(NumaTopologyTest, TheMachinesOwnHaveAllCpusOfThisProcess) {
  const Ids usable = UsableCpus();
  ASSERT_FALSE(usable.empty());
  const NumaTopology topology = ReadNumaTopology(usable);
  Ids cpus;
  for (const NumaNode& node : topology.nodes) {
    cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
  }
  std::ranges::sort(cpus);
  if (topology.nodes.empty()) {
    EXPECT_NE(topology.why_none, "");
  } else {
    EXPECT_EQ(cpus, usable);
  }
}

TEST(IdList, HasNumbersAndRanges) {
  EXPECT_EQ(ParseIdList("0-3,8\n"), (Ids{0, 1, 2, 3, 8}));
  EXPECT_EQ(ParseIdList("5,1-2,2"), (Ids{1, 2, 5}));
  EXPECT_EQ(ParseIdList("\n"), Ids());
  EXPECT_EQ(ParseIdList(""), Ids());
}

// ---------------------------------------------------------------- what nodes divide

std::vector<NumaNode> NodesWith(const std::vector<int>& cpu_counts) {
  std::vector<NumaNode> nodes;
  int cpu = 0;
  for (const int count : cpu_counts) {
    nodes.push_back({.id = static_cast<int>(nodes.size()), .cpus = {}});
    for (int i = 0; i < count; ++i) nodes.back().cpus.push_back(cpu++);
  }
  return nodes;
}

TEST(ThreadsOfNodes, AreInProportionToTheCpus) {
  EXPECT_EQ(ThreadsOfNodes(NodesWith({8, 8}), 16), (Ids{8, 8}));
  EXPECT_EQ(ThreadsOfNodes(NodesWith({8, 8}), 5), (Ids{3, 2}));
  EXPECT_EQ(ThreadsOfNodes(NodesWith({12, 4}), 8), (Ids{6, 2}));
  EXPECT_EQ(ThreadsOfNodes(NodesWith({1, 1, 1, 1}), 64), (Ids{16, 16, 16, 16}));
  EXPECT_EQ(ThreadsOfNodes(NodesWith({4, 4}), 1), (Ids{1, 0}));
  for (int threads = 1; threads <= 70; ++threads) {
    int sum = 0;
    for (const int count : ThreadsOfNodes(NodesWith({3, 16, 1, 7}), threads)) {
      EXPECT_GE(count, 0);
      sum += count;
    }
    EXPECT_EQ(sum, threads);
  }
}

TEST(NodeShares, TasksAndWorkersAreDividedInOrder) {
  const NodeShares shares(std::vector<int>{3, 1});
  EXPECT_EQ(shares.Begin(0, 100), 0);
  EXPECT_EQ(shares.Begin(1, 100), 75);
  EXPECT_EQ(shares.Begin(2, 100), 100);
  EXPECT_EQ(shares.Begin(1, 1), 0);
  const std::vector<size_t> nodes = {0, 0, 0, 1, 1};
  for (int worker = 0; worker < 5; ++worker) EXPECT_EQ(shares.NodeOfWorker(worker), nodes[worker]);
}

using Parts = std::vector<NodeShares::Part>;

TEST(NodeShares, MemoryIsDividedAsTheTasksAre) {
  const NodeShares shares(std::vector<int>{1, 1});
  EXPECT_EQ(shares.Divide(0, 800, {}, 8), (Parts{{0, 400, 0}, {400, 800, 1}}));
  EXPECT_EQ(shares.Divide(1000, 800, {}, 100), (Parts{{1000, 1400, 0}, {1400, 1800, 1}}));
  // Outputs 0 to 29 of 40: 20 of them are the first node's.
  EXPECT_EQ(shares.Divide(0, 300, {0, 30, 40}, 1), (Parts{{0, 200, 0}, {200, 300, 1}}));
  EXPECT_EQ(shares.Divide(0, 100, {30, 40, 40}, 1), (Parts{{0, 100, 1}}));
  EXPECT_EQ(shares.Divide(0, 100, {0, 10, 40}, 1), (Parts{{0, 100, 0}}));
  const NodeShares uneven(std::vector<int>{1, 2, 1});
  EXPECT_EQ(uneven.Divide(0, 400, {}, 1), (Parts{{0, 100, 0}, {100, 300, 1}, {300, 400, 2}}));
}

// Matrices lie side by side: each unit belongs to one part of one of them.
TEST(NodeShares, PartsOfNeighboursShareNoUnit) {
  const NodeShares shares(std::vector<int>{2, 3, 1});
  constexpr size_t kUnit = 64;
  uintptr_t begin = 4096;
  uintptr_t covered = begin;
  for (size_t bytes = 1; bytes < 3000; bytes += 61) {
    for (const NodeShares::Part& part : shares.Divide(begin, bytes, {}, kUnit)) {
      EXPECT_EQ(part.begin, covered);
      EXPECT_EQ(part.end % kUnit, 0);
      EXPECT_GT(part.end, part.begin);
      covered = part.end;
    }
    begin += bytes;
    EXPECT_GE(covered, begin);
    EXPECT_LT(covered, begin + kUnit);
  }
}

}  // namespace
}  // namespace quire
