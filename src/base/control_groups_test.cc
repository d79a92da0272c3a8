// Control groups from folders as the kernel shows them.
#include "base/control_groups.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace quire {
namespace {

namespace fs = std::filesystem;

class ControlGroupsTest : public ::testing::Test {
 protected:
  ControlGroupsTest() {
    std::string pattern = (fs::temp_directory_path() / "quire_groups_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    paths_ = {.proc = root_ + "/proc", .cgroup = root_ + "/cgroup"};
  }
  ~ControlGroupsTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }

  std::string root_;
  ControlGroupPaths paths_;
};

int AffinityCores() {
  cpu_set_t mask;
  return sched_getaffinity(0, sizeof(mask), &mask) == 0 ? CPU_COUNT(&mask) : 1;
}

TEST_F(ControlGroupsTest, AreThoseOfTheProcessAndAllAroundThem) {
  Write("proc/self/cgroup", "4:cpu,cpuacct:/one\n3:memory:/two\n0::/slice/unit\n");
  std::vector<std::string> folders;
  for (const ControlGroup& group : ControlGroupsOf("cpu", paths_))
    folders.push_back(std::to_string(group.version) + group.folder.substr(root_.size()));
  const std::vector<std::string> expected = {"2/cgroup/slice/unit", "2/cgroup/slice", "2/cgroup",
                                             "1/cgroup/cpu/one", "1/cgroup/cpu"};
  EXPECT_EQ(folders, expected);
}

TEST_F(ControlGroupsTest, WithoutQuotaTheAffinityCounts) {
  EXPECT_EQ(UsableCores(paths_), AffinityCores());
  Write("cgroup/cpu.max", "max 100000\n");
  Write("cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(UsableCores(paths_), AffinityCores());
}

TEST_F(ControlGroupsTest, AQuotaOfVersion2IsRoundedUp) {
  for (const auto& [quota, cores] :
       {std::pair("1000", 1), std::pair("100000", 1), std::pair("100001", 2)}) {
    Write("cgroup/cpu.max", std::string(quota) + " 100000\n");
    EXPECT_EQ(UsableCores(paths_), std::min(cores, AffinityCores())) << quota;
  }
}

TEST_F(ControlGroupsTest, AQuotaOfVersion1Counts) {
  Write("proc/self/cgroup", "4:cpu,cpuacct:/one\n");
  Write("cgroup/cpu/one/cpu.cfs_quota_us", "50000\n");
  Write("cgroup/cpu/one/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(UsableCores(paths_), 1);
}

TEST_F(ControlGroupsTest, TheLowestQuotaOfAllGroupsCounts) {
  Write("proc/self/cgroup", "0::/slice/unit\n");
  Write("cgroup/slice/unit/cpu.max", "6400000 100000\n");
  Write("cgroup/slice/cpu.max", "100000 100000\n");
  EXPECT_EQ(UsableCores(paths_), 1);
}

TEST_F(ControlGroupsTest, WhatIsNoQuotaIsNone) {
  for (const char* const text : {"", "x", "0 0", "5 0", "-5 100000", "100000"}) {
    Write("cgroup/cpu.max", text);
    EXPECT_EQ(UsableCores(paths_), AffinityCores()) << text;
  }
}

}  // namespace
}  // namespace quire
