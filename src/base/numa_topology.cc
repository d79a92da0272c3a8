#include "base/numa_topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/round_up.h"

namespace quire {
namespace {

// The kernel has at most 1024 nodes. A list of larger numbers is no list of nodes, nor one of CPUs
// that a cpu_set_t can name.
constexpr int kIdsMax = 1024;

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

std::optional<std::vector<int>> ReadIdList(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  return text ? ParseIdList(*text) : std::nullopt;
}

// A number of the list, and what follows it.
std::optional<int> TakeId(std::string_view* text) {
  int id = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), id);
  if (error != std::errc() || id < 0 || id >= kIdsMax) return std::nullopt;
  text->remove_prefix(static_cast<size_t>(end - text->data()));
  return id;
}

std::vector<int> Common(std::span<const int> a, std::span<const int> b) {
  std::vector<int> common;
  std::ranges::set_intersection(a, b, std::back_inserter(common));
  return common;
}

// The nodes from which this process may take memory; absent: the kernel does not say, and it may
// from all.
std::optional<std::vector<int>> AllowedMemory(const NumaPaths& paths) {
  constexpr std::string_view kLine = "\nMems_allowed_list:";
  const std::optional<std::string> text = ReadFile(paths.status);
  const size_t line = text ? text->find(kLine) : std::string::npos;
  if (line == std::string::npos) return std::nullopt;
  std::string_view list = std::string_view(*text).substr(line + kLine.size());
  list = list.substr(0, list.find('\n'));
  list.remove_prefix(std::min(list.find_first_not_of(" \t"), list.size()));
  return ParseIdList(list);
}

std::string NodeFile(const NumaPaths& paths, int node, const char* name) {
  return paths.nodes + "/node" + std::to_string(node) + "/" + name;
}

// The one of `nodes` that is nearest to node `from`; the first one where no distance is known.
size_t NearestNode(const NumaPaths& paths, int from, std::span<const NumaNode> nodes,
                   std::span<const int> online) {
  std::istringstream distances(ReadFile(NodeFile(paths, from, "distance")).value_or(""));
  size_t nearest = 0;
  int least = 0;
  for (const int id : online) {
    int distance = 0;
    if (!(distances >> distance)) break;
    const auto node = std::ranges::find(nodes, id, &NumaNode::id);
    if (node == nodes.end() || (least != 0 && distance >= least)) continue;
    nearest = static_cast<size_t>(node - nodes.begin());
    least = distance;
  }
  return nearest;
}

}  // namespace

std::optional<std::vector<int>> ParseIdList(std::string_view text) {
  std::vector<int> ids;
  if (text.ends_with('\n')) text.remove_suffix(1);
  while (!text.empty()) {
    const std::optional<int> first = TakeId(&text);
    std::optional<int> last = first;
    if (first && text.starts_with('-')) {
      text.remove_prefix(1);
      last = TakeId(&text);
    }
    if (!last || *last < *first) return std::nullopt;
    for (int id = *first; id <= *last; ++id) ids.push_back(id);
    if (text.empty()) break;
    if (!text.starts_with(',') || text.size() == 1) return std::nullopt;
    text.remove_prefix(1);
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

NumaTopology ReadNumaTopology(std::span<const int> usable_cpus, const NumaPaths& paths) {
  NumaTopology topology;
  const auto none = [&](const std::string& path) {
    return NumaTopology{.nodes = {}, .why_none = path + " is missing or no list of numbers"};
  };
  const std::string online_path = paths.nodes + "/online";
  const std::optional<std::vector<int>> online = ReadIdList(online_path);
  if (!online) return none(online_path);
  const std::string memory_path = paths.nodes + "/has_memory";
  const std::optional<std::vector<int>> memory = ReadIdList(memory_path);
  if (!memory) return none(memory_path);
  const std::vector<int> usable_memory = Common(*memory, AllowedMemory(paths).value_or(*memory));
  std::vector<NumaNode> without_memory;
  for (const int id : *online) {
    const std::string cpus_path = NodeFile(paths, id, "cpulist");
    const std::optional<std::vector<int>> cpus = ReadIdList(cpus_path);
    if (!cpus) return none(cpus_path);
    NumaNode node{.id = id, .cpus = Common(*cpus, usable_cpus)};
    const bool has_memory = std::ranges::binary_search(usable_memory, id);
    if (!node.cpus.empty()) {
      (has_memory ? topology.nodes : without_memory).push_back(std::move(node));
    }
  }
  if (topology.nodes.empty()) {
    topology.why_none = paths.nodes + " has no node with memory and CPUs that this process may use";
    return topology;
  }
  for (const NumaNode& node : without_memory) {
    std::vector<int>& cpus =
        topology.nodes[NearestNode(paths, node.id, topology.nodes, *online)].cpus;
    cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
    std::ranges::sort(cpus);
  }
  return topology;
}

std::vector<int> ThreadsOfNodes(std::span<const NumaNode> nodes, int thread_count) {
  int64_t cpu_count = 0;
  for (const NumaNode& node : nodes) cpu_count += std::ssize(node.cpus);
  std::vector<int> threads;
  int64_t cpus = 0;
  int64_t before = 0;
  for (const NumaNode& node : nodes) {
    cpus += std::ssize(node.cpus);
    const int64_t end = (thread_count * cpus + cpu_count / 2) / cpu_count;
    threads.push_back(static_cast<int>(end - before));
    before = end;
  }
  return threads;
}

NodeShares::NodeShares(std::span<const int> threads) {
  int64_t end = 0;
  for (const int count : threads) ends_.push_back(end += count);
}

int64_t NodeShares::Begin(size_t node, int64_t count) const {
  return node == 0 ? 0 : count * ends_[node - 1] / ends_.back();
}

size_t NodeShares::NodeOfWorker(int worker) const {
  const auto node = std::ranges::upper_bound(ends_, worker) - ends_.begin();
  return std::min(static_cast<size_t>(node), ends_.size() - 1);
}

std::vector<NodeShares::Part> NodeShares::Divide(uintptr_t begin, size_t bytes,
                                                 const TaskRange& range, size_t unit) const {
  const double bytes_per_task =
      static_cast<double>(bytes) / static_cast<double>(range.end - range.begin);
  // Where the tasks of a node and of those before it end.
  const auto border = [&](size_t node) {
    const double tasks =
        static_cast<double>(range.count) * static_cast<double>(ends_[node]) / ends_.back();
    const double offset = (tasks - static_cast<double>(range.begin)) * bytes_per_task;
    const bool is_last = node + 1 == ends_.size();
    const auto within =
        is_last ? bytes : static_cast<size_t>(std::clamp(offset, 0.0, static_cast<double>(bytes)));
    return RoundUp(begin + within, unit);
  };
  std::vector<Part> parts;
  uintptr_t at = RoundUp(begin, unit);
  for (size_t node = 0; node < ends_.size(); ++node) {
    const uintptr_t end = border(node);
    if (end > at) parts.push_back({at, end, node});
    at = std::max(at, end);
  }
  return parts;
}

}  // namespace quire
