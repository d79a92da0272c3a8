#include "engine/machine_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "model/test_checkpoint.h"

namespace quire {
namespace {

TEST(MachineMemory, IsTheLowerOfTheMachineAndTheControlGroup) {
  const int64_t machine = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const TestFolder folder;
  EXPECT_EQ(MachineMemoryBytes(folder.path()), machine) << "no control group";
  folder.Write("memory.max", "max\n");
  EXPECT_EQ(MachineMemoryBytes(folder.path()), machine);
  folder.Write("memory.max", "9223372036854771712\n");
  EXPECT_EQ(MachineMemoryBytes(folder.path()), machine);
  folder.Write("memory.max", "1048576\n");
  EXPECT_EQ(MachineMemoryBytes(folder.path()), 1048576);
  EXPECT_LE(MachineMemoryBytes(), machine);
  EXPECT_GT(MachineMemoryBytes(), 0);
}

}  // namespace
}  // namespace quire
