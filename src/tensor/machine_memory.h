// How much memory this process may use, and how much of it is free.
#ifndef QUIRE_TENSOR_MACHINE_MEMORY_H_
#define QUIRE_TENSOR_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

#include "base/control_groups.h"

namespace quire {

struct MachineMemory {
  // The machine's physical memory, or the lowest limit of the control groups that hold this
  // process.
  int64_t total_bytes = 0;
  // What may still be taken without swapping: free memory and file pages that the kernel drops on
  // demand, in the machine and in every control group with a limit. At most total_bytes.
  int64_t available_bytes = 0;
};

// Reads the files of control groups of version 1 and 2 at each call: a hundred microseconds or two,
// most of them for the free memory. A file that is missing or invalid is no limit.
MachineMemory ReadMachineMemory(const ControlGroupPaths& paths = {});

// ReadMachineMemory().total_bytes, from the limits alone: HostMemory asks for every large tensor.
int64_t MachineMemoryBytes();

// As errors say sizes: "1.5 GiB". Two digits after the point, rounded.
std::string GiBText(double bytes);

}  // namespace quire

#endif  // QUIRE_TENSOR_MACHINE_MEMORY_H_
