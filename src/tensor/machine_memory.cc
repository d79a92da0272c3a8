#include "tensor/machine_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string_view>

namespace quire {
namespace {

// What a version of control groups calls its files.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive_file;  // in memory.stat: file pages of the group and the groups in it
  const char* active_file;
};
constexpr CgroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                   "total_inactive_file", "total_active_file"};

// "max", as version 2 says for no limit, is none.
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (!(file >> number) || number < 0) return std::nullopt;
  return number;
}

// The number after `key` in lines of "key number ...".
std::optional<int64_t> ReadKey(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.size() <= key.size() || !line.starts_with(key)) continue;
    if (line[key.size()] != ' ' && line[key.size()] != ':') continue;
    return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10);
  }
  return std::nullopt;
}

const CgroupFiles& FilesOf(const ControlGroup& group) {
  return group.version == 2 ? kVersion2 : kVersion1;
}

int64_t PhysicalBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

std::optional<int64_t> LimitOf(const ControlGroup& group) {
  const std::optional<int64_t> limit = ReadNumber(group.folder + "/" + FilesOf(group).limit);
  return limit && *limit > 0 ? limit : std::nullopt;
}

// Lowers `memory` to what the group allows.
void ApplyGroup(const ControlGroup& group, MachineMemory* memory) {
  const std::optional<int64_t> limit = LimitOf(group);
  if (!limit) return;
  memory->total_bytes = std::min(memory->total_bytes, *limit);
  const CgroupFiles& files = FilesOf(group);
  const std::optional<int64_t> usage = ReadNumber(group.folder + "/" + files.usage);
  if (!usage) return;
  const std::string stat = group.folder + "/memory.stat";
  const int64_t file_pages =
      ReadKey(stat, files.inactive_file).value_or(0) + ReadKey(stat, files.active_file).value_or(0);
  const int64_t held = std::max<int64_t>(*usage - file_pages, 0);
  memory->available_bytes = std::min(memory->available_bytes, std::max<int64_t>(*limit - held, 0));
}

}  // namespace

MachineMemory ReadMachineMemory(const ControlGroupPaths& paths) {
  MachineMemory memory;
  memory.total_bytes = PhysicalBytes();
  memory.available_bytes = memory.total_bytes;
  const std::optional<int64_t> available_kib = ReadKey(paths.proc + "/meminfo", "MemAvailable");
  if (available_kib) {
    memory.available_bytes = std::min(memory.available_bytes, *available_kib * 1024);
  }
  for (const ControlGroup& group : ControlGroupsOf("memory", paths)) ApplyGroup(group, &memory);
  memory.available_bytes = std::min(memory.available_bytes, memory.total_bytes);
  return memory;
}

int64_t MachineMemoryBytes() {
  int64_t bytes = PhysicalBytes();
  for (const ControlGroup& group : ControlGroupsOf("memory"))
    bytes = std::min(bytes, LimitOf(group).value_or(bytes));
  return bytes;
}

std::string GiBText(double bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.2f GiB", bytes / 0x1p30);
  return text;
}

}  // namespace quire
