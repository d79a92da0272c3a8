#include "tensor/machine_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace quire {
namespace {

// A machine's /proc and /sys/fs/cgroup in a folder.
class MachineMemoryTest : public testing::Test {
 protected:
  MachineMemoryTest() { Write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:  1024 kB\n"); }
  ~MachineMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  MachineMemory Read() const {
    return ReadMachineMemory(
        {.proc = (root_ / "proc").string(), .cgroup = (root_ / "cgroup").string()});
  }

  const std::filesystem::path root_ = std::filesystem::path(testing::TempDir()) /
                                      ("quire_machine_memory_test_" + std::to_string(getpid()));
  const int64_t machine_ = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
};

TEST_F(MachineMemoryTest, WithoutAControlGroupIsTheMachine) {
  EXPECT_EQ(Read().total_bytes, machine_);
  EXPECT_EQ(Read().available_bytes, 1024 * 1024);
}

TEST_F(MachineMemoryTest, WithoutMeminfoAllIsAvailable) {
  std::filesystem::remove(root_ / "proc/meminfo");
  EXPECT_EQ(Read().available_bytes, machine_);
}

TEST_F(MachineMemoryTest, NoLimitIsTheMachine) {
  for (const char* const text : {"max\n", "9223372036854771712\n", "", "x"}) {
    Write("cgroup/memory.max", text);
    EXPECT_EQ(Read().total_bytes, machine_) << text;
  }
}

TEST_F(MachineMemoryTest, OfVersion2TheLowestLimitOfAllGroupsCounts) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("cgroup/a/b/memory.max", "max\n");
  Write("cgroup/a/memory.max", "500000\n");
  EXPECT_EQ(Read().total_bytes, 500000) << "of the group that the own group lies in";
  EXPECT_EQ(Read().available_bytes, 500000);
  Write("cgroup/a/b/memory.max", "400000\n");
  EXPECT_EQ(Read().total_bytes, 400000);
  Write("cgroup/memory.max", "300000\n");
  EXPECT_EQ(Read().total_bytes, 300000) << "a container's own group, at the root";
}

TEST_F(MachineMemoryTest, OfVersion1TheMemoryControllersPathCounts) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/c\n4:memory:/a/b\n0::/d\n");
  Write("cgroup/memory/a/memory.limit_in_bytes", "400000\n");
  Write("cgroup/memory/c/memory.limit_in_bytes", "1\n");
  EXPECT_EQ(Read().total_bytes, 400000);
  Write("cgroup/memory/memory.limit_in_bytes", "300000\n");
  EXPECT_EQ(Read().total_bytes, 300000);
}

TEST_F(MachineMemoryTest, WhatAGroupUsesIsNotAvailableButForItsFilePages) {
  Write("proc/self/cgroup", "0::/a\n");
  Write("cgroup/a/memory.max", "500000\n");
  Write("cgroup/a/memory.current", "400000\n");
  EXPECT_EQ(Read().available_bytes, 100000);
  Write("cgroup/a/memory.stat", "anon 1\ninactive_file 50000\nactive_file 20000\n");
  EXPECT_EQ(Read().available_bytes, 170000);
  Write("cgroup/a/memory.current", "900000\n");
  EXPECT_EQ(Read().available_bytes, 0);
  EXPECT_EQ(Read().total_bytes, 500000);
  Write("cgroup/a/memory.current", "1\n");
  EXPECT_EQ(Read().available_bytes, 500000) << "more file pages than usage";
}

TEST_F(MachineMemoryTest, PathsOutsideTheContainerAreItsRoot) {
  Write("proc/self/cgroup", "0::/../../x\n");
  Write("x/memory.max", "1\n");
  Write("cgroup/memory.max", "300000\n");
  EXPECT_EQ(Read().total_bytes, 300000);
}

TEST(MachineMemory, OfThisMachineIsPositive) {
  const MachineMemory memory = ReadMachineMemory();
  EXPECT_EQ(MachineMemoryBytes(), memory.total_bytes);
  EXPECT_GT(memory.available_bytes, 0);
  EXPECT_LE(memory.available_bytes, memory.total_bytes);
}

TEST(MachineMemory, SizesAreSaidInGiB) {
  EXPECT_EQ(GiBText(0x1p30), "1.00 GiB");
  EXPECT_EQ(GiBText(1.5 * 0x1p30), "1.50 GiB");
  EXPECT_EQ(GiBText(0x1p62), "4294967296.00 GiB");
}

}  // namespace
}  // namespace quire
