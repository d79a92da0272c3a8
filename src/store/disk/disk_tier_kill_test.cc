// Processes that die while they put: what they had acknowledged is there, nothing is wrong, and
// nothing of them is left over.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/random.h"
#include "base/testing/soak.h"
#include "store/testing/test_disk.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

struct Plan {
  std::string directory;
  Durability durability = Durability::kOs;
  int64_t kill_at_call = -1;
  bool nameless = true;  // false: as on a file system without nameless files
  int64_t chain = 0;
  int64_t bytes_max = int64_t{1} << 30;
};

constexpr int64_t kChunks = 6;

DiskTierSetup SetupOf(const Plan& plan) {
  DiskTierSetup setup;
  setup.disk.directory = plan.directory;
  setup.disk.bytes_max = plan.bytes_max;
  setup.disk.durability = plan.durability;
  return setup;
}

// The child: says each put that was acknowledged, by a byte in the pipe.
[[noreturn]] void PutAndDie(const Plan& plan, int acknowledge) {
  auto files = std::make_shared<FaultyFileSystem>(CreateMachineFileSystem(false));
  if (!plan.nameless) files->FailAt(0, -EOPNOTSUPP, true, "nameless");
  if (plan.kill_at_call >= 0)
    files->CallAt(plan.kill_at_call, [](std::string_view) { ::kill(::getpid(), SIGKILL); });
  DiskTierSetup setup = SetupOf(plan);
  setup.files = files;
  auto tier = DiskTier::Open(setup);
  if (!tier.ok() || !(*tier)->AwaitScan(kNever).ok()) ::_exit(2);
  const auto chain = TestChain(kChunks, plan.chain);
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!Put(**tier, chain[i]).ok()) ::_exit(3);
    const char byte = static_cast<char>(i);
    if (::write(acknowledge, &byte, 1) != 1) ::_exit(4);
    if (i % 3 == 2) (void)(*tier)->SetExpiry(chain[i].id.key, int64_t{1} << 50, kNever);
  }
  tier->reset();
  ::_exit(0);
}

struct Child {
  pid_t process = -1;
  int acknowledged = -1;
};

Child Start(const Plan& plan) {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t process = ::fork();
  if (process == 0) {
    ::close(ends[0]);
    PutAndDie(plan, ends[1]);
  }
  ::close(ends[1]);
  return {process, ends[0]};
}

// What it had acknowledged when it was gone; *was_killed: it did not come to its end.
std::set<size_t> Await(const Child& child, bool* was_killed) {
  std::set<size_t> acknowledged;
  char byte = 0;
  while (::read(child.acknowledged, &byte, 1) == 1) acknowledged.insert(static_cast<size_t>(byte));
  ::close(child.acknowledged);
  int status = 0;
  EXPECT_EQ(::waitpid(child.process, &status, 0), child.process);
  *was_killed = WIFSIGNALED(status);
  EXPECT_TRUE(*was_killed || WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
  return acknowledged;
}

void CheckAfterwards(const Plan& plan, const std::set<size_t>& acknowledged) {
  auto tier = DiskTier::Open(SetupOf(plan));
  ASSERT_TRUE(tier.ok());
  ASSERT_TRUE((*tier)->AwaitScan(kNever).ok());
  const auto chain = TestChain(kChunks, plan.chain);
  for (size_t i = 0; i < chain.size(); ++i) {
    const Status status = ReadBack(**tier, chain[i]);
    EXPECT_TRUE(status.ok() || !acknowledged.contains(i)) << i << ": " << status.ToString();
  }
  EXPECT_EQ((*tier)->Usage().corrupt, 0);
  EXPECT_EQ(*(*tier)->Verify(kNever), 0);
  EXPECT_TRUE(fs::is_empty(plan.directory + "/tmp"));
}

TEST(DiskTierKill, AtEachCall) {
  for (const bool nameless : {true, false}) {
    for (const Durability durability : {Durability::kOs, Durability::kSync}) {
      bool was_killed = true;
      for (int64_t at = 0; was_killed; ++at) {
        // What a dead process leaves does not depend on the disk, and memory is quicker.
        const TestDirectory directory("/dev/shm");
        const Plan plan = {directory.path(), durability, at, nameless};
        const auto acknowledged = Await(Start(plan), &was_killed);
        EXPECT_TRUE(was_killed || acknowledged.size() == kChunks);
        CheckAfterwards(plan, acknowledged);
        ASSERT_FALSE(::testing::Test::HasFailure()) << "killed at call " << at;
      }
    }
  }
}

// Whenever it happens to be: after some acknowledgement and a moment.
TEST(DiskTierKill, AtRandomTimes) {
  RandomSequence random(SoakSeed(1));
  constexpr int kTrials = 20;
  ReportFigure("kills", kTrials);
  for (int trial = 0; trial < kTrials; ++trial) {
    const TestDirectory directory;
    const Plan plan = {directory.path(), trial % 2 == 0 ? Durability::kOs : Durability::kSync};
    const Child child = Start(plan);
    std::set<size_t> early;
    const int64_t wait_for = random.Below(kChunks);
    char byte = 0;
    while (std::ssize(early) < wait_for && ::read(child.acknowledged, &byte, 1) == 1)
      early.insert(static_cast<size_t>(byte));
    for (int64_t spin = random.Below(200'000); spin > 0; --spin) asm volatile("");
    ::kill(child.process, SIGKILL);
    bool was_killed = false;
    auto acknowledged = Await(child, &was_killed);
    acknowledged.merge(early);
    CheckAfterwards(plan, acknowledged);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "trial " << trial;
  }
}

// Three on one folder, one of which dies at some call: the others lose nothing, and go on.
TEST(DiskTierKill, NextToOthers) {
  for (int64_t at = 20; at < 140; at += 12) {
    const TestDirectory directory;
    std::vector<Plan> plans;
    std::vector<Child> children;
    for (int64_t i = 0; i < 3; ++i)
      plans.push_back({directory.path(), Durability::kOs, i == 0 ? at : -1, true, i / 2});
    for (const Plan& plan : plans) children.push_back(Start(plan));
    std::vector<std::set<size_t>> acknowledged;
    for (size_t i = 0; i < 3; ++i) {
      bool was_killed = false;
      acknowledged.push_back(Await(children[i], &was_killed));
      EXPECT_TRUE(i == 0 || acknowledged[i].size() == static_cast<size_t>(kChunks));
    }
    for (size_t i = 0; i < 3; ++i) CheckAfterwards(plans[i], acknowledged[i]);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "killed at call " << at;
  }
}

// Processes that share a folder keep its quota together.
TEST(DiskTierKill, OneQuotaForAll) {
  const TestDirectory directory;
  const int64_t bytes = TestChain(1)[0].stored->header().total_bytes;
  std::vector<Child> children;
  for (int64_t i = 0; i < 3; ++i)
    children.push_back(Start({directory.path(), Durability::kOs, -1, true, i, 5 * bytes}));
  for (const Child& child : children) {
    bool was_killed = false;
    EXPECT_EQ(Await(child, &was_killed).size(), static_cast<size_t>(kChunks));
  }
  EXPECT_LE(directory.ChunkFiles().size(), 5u);
  EXPECT_GT(directory.ChunkFiles().size(), 0u);
}

}  // namespace
}  // namespace quire
