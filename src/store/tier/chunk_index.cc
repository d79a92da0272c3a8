#include "store/tier/chunk_index.h"

#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "store/tier/eviction_policy.h"

namespace quire {
namespace {

struct Root;

// An id that the index knows: a chunk, the missing context of one, or one that is remembered.
struct Node {
  ChunkId id{};
  bool present = false;
  IndexedChunk chunk{};
  Standing standing{};
  int64_t pins = 0;
  int64_t children = 0;  // chunks whose context it is
  Node* parent = nullptr;
  Root* root = nullptr;
  // Its element of the list of remembered ones, which needs no memory when it goes there.
  std::list<Node*> memory{this};
  const std::list<Node*>::iterator place = memory.begin();

  Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  bool IsFree() const { return pins == 0 && children == 0; }
};

// How a lane is sorted: what cannot go stands last.
struct Rank {
  bool stays = false;
  int priority = 0;
  double value = 0;
  uint64_t order = 0;
  const Node* node = nullptr;

  static Rank Of(const Node& node, bool stays) {
    return {stays, node.chunk.priority, node.standing.value, node.standing.order, &node};
  }
  bool operator<(const Rank& other) const {
    return std::tie(stays, priority, value, order) <
           std::tie(other.stays, other.priority, other.value, other.order);
  }
};
using Ranks = std::set<Rank>;

// The chunk of a root that goes first in a lane.
struct Head {
  Rank rank{};
  const Root* root = nullptr;
  bool operator<(const Head& other) const { return rank < other.rank; }
};
using Heads = std::set<Head>;

// What one salt has. Lives while it has chunks or a quota.
struct Root {
  ChunkKey key{};
  ChunkQuota quota{};
  int64_t bytes = 0;
  std::array<Ranks, kLaneCount> lanes{};
  std::array<Heads::iterator, kLaneCount> heads{};   // valid where `spare` is empty
  std::array<Heads::node_type, kLaneCount> spare{};  // of a lane without a candidate
};

// Keys first, as they are distinct but for forged ones.
struct KeyFirst {
  bool operator()(const ChunkId& a, const ChunkId& b) const {
    return std::tie(a.key, a.root, a.fingerprint) < std::tie(b.key, b.root, b.fingerprint);
  }
};

constexpr int64_t kNoExpiry = std::numeric_limits<int64_t>::max();

// Looks for victims without changing anything: it goes through the sorted lanes and keeps apart
// what the chunks that it took make free.
class VictimSearch {
 public:
  VictimSearch(const EvictionPolicy& policy, const std::array<Heads, kLaneCount>& heads,
               int64_t probation_bytes, int64_t bytes_max)
      : policy_(policy), heads_(heads), probation_bytes_(probation_bytes), bytes_max_(bytes_max) {
    for (int lane = 0; lane < kLaneCount; ++lane) next_[At(lane)] = heads[At(lane)].begin();
  }

  // Takes the next victim of `root` alone. False if there is none.
  bool TakeFrom(const Root& root) {
    Draft& draft = Visit(root);
    const Rank* victim = Choose(draft.first[kProbation], draft.first[kMain]);
    if (victim == nullptr) return false;
    Take(*victim, draft);
    return true;
  }
  // Takes the next victim of all roots but those that would fall below their share; `mine` may.
  bool Take(const Root* mine) {
    const std::optional<Rank> probation = First(kProbation, mine);
    const std::optional<Rank> main = First(kMain, mine);
    const Rank* victim = Choose(probation, main);
    if (victim == nullptr) return false;
    Take(*victim, Visit(*victim->node->root));
    return true;
  }

  int64_t bytes() const { return bytes_; }
  std::vector<ChunkId> victims() && { return std::move(victims_); }

 private:
  // What is left of a root.
  struct Draft {
    int64_t bytes = 0;
    std::array<Ranks::const_iterator, kLaneCount> next{};
    std::array<Ranks, kLaneCount> freed{};  // parents whose last child was taken
    std::array<std::optional<Rank>, kLaneCount> first{};
  };
  static size_t At(int lane) { return static_cast<size_t>(lane); }

  Draft& Visit(const Root& root) {
    const auto [at, is_new] = drafts_.try_emplace(&root);
    Draft& draft = at->second;
    if (is_new) {
      draft.bytes = root.bytes;
      for (size_t lane = 0; lane < kLaneCount; ++lane) draft.next[lane] = root.lanes[lane].begin();
      Refresh(root, draft);
    }
    return draft;
  }
  void Refresh(const Root& root, Draft& draft) {
    for (size_t lane = 0; lane < kLaneCount; ++lane) {
      if (draft.first[lane]) open_[lane].erase({*draft.first[lane], &root});
      draft.first[lane].reset();
      const auto next = draft.next[lane];
      if (next != root.lanes[lane].end() && !next->stays) draft.first[lane] = *next;
      const Ranks& freed = draft.freed[lane];
      if (!freed.empty() && (!draft.first[lane] || *freed.begin() < *draft.first[lane]))
        draft.first[lane] = *freed.begin();
      if (draft.first[lane]) open_[lane].insert({*draft.first[lane], &root});
    }
  }
  // The first candidate of a lane over all roots that may lose it.
  std::optional<Rank> First(int lane, const Root* mine) {
    Heads::const_iterator& next = next_[At(lane)];
    Heads& open = open_[At(lane)];
    const Heads::const_iterator end = heads_[At(lane)].end();
    for (;;) {
      while (next != end && drafts_.contains(next->root)) ++next;
      if (next != end && (open.empty() || *next < *open.begin())) Visit(*next->root);
      if (open.empty()) return std::nullopt;
      const Head head = *open.begin();
      if (head.root == mine || Visit(*head.root).bytes - head.rank.node->chunk.bytes >=
                                   head.root->quota.bytes_guaranteed)
        return head.rank;
      open.erase(open.begin());  // and not again: its root only gets smaller
    }
  }
  const Rank* Choose(const std::optional<Rank>& probation, const std::optional<Rank>& main) const {
    if (!probation || !main) return probation ? &*probation : main ? &*main : nullptr;
    if (probation->priority != main->priority)
      return probation->priority < main->priority ? &*probation : &*main;
    return policy_.PreferredLane(probation_bytes_, bytes_max_) == kProbation ? &*probation : &*main;
  }
  void Take(const Rank rank, Draft& draft) {
    const Node& node = *rank.node;
    const size_t lane = At(node.standing.lane);
    victims_.push_back(node.id);
    if (draft.freed[lane].erase(rank) == 0) ++draft.next[lane];
    draft.bytes -= node.chunk.bytes;
    bytes_ += node.chunk.bytes;
    if (node.standing.lane == kProbation) probation_bytes_ -= node.chunk.bytes;
    const Node* parent = node.parent;
    if (parent != nullptr && ++children_taken_[parent] == parent->children && parent->present &&
        parent->pins == 0)
      draft.freed[At(parent->standing.lane)].insert(Rank::Of(*parent, false));
    Refresh(*node.root, draft);
  }

  const EvictionPolicy& policy_;
  const std::array<Heads, kLaneCount>& heads_;
  int64_t probation_bytes_;
  const int64_t bytes_max_;
  std::array<Heads::const_iterator, kLaneCount> next_{};
  std::array<Heads, kLaneCount> open_{};  // the first ones of the roots in drafts_
  std::map<const Root*, Draft> drafts_;
  std::map<const Node*, int64_t> children_taken_;
  std::vector<ChunkId> victims_;
  int64_t bytes_ = 0;
};

class ChunkIndexImpl final : public ChunkIndex {
 public:
  ChunkIndexImpl(EvictionKind eviction, int64_t bytes_max)
      : policy_(EvictionPolicy::Create(eviction)), bytes_max_(bytes_max) {}

  void Insert(const IndexedChunk& chunk) override;
  const IndexedChunk* Find(const ChunkId& id) const override {
    const Node* node = FindNode(id);
    return node == nullptr ? nullptr : &node->chunk;
  }
  const IndexedChunk* FindKey(const ChunkKey& key) const override {
    for (auto at = nodes_.lower_bound({{}, {}, key}); at != nodes_.end() && at->first.key == key;
         ++at)
      if (at->second.present) return &at->second.chunk;
    return nullptr;
  }
  void Use(const ChunkId& id) noexcept override {
    Node* node = FindNode(id);
    if (node == nullptr) return;
    Change(*node, [&] {
      const int before = node->standing.lane;
      policy_->Use(node->chunk, ++stamp_, &node->standing);
      if (before == kProbation && node->standing.lane == kMain)
        probation_bytes_ -= node->chunk.bytes;
    });
  }
  bool Pin(const ChunkId& id, int change) noexcept override {
    Node* node = FindNode(id);
    if (node == nullptr || node->pins + change < 0) return false;
    Change(*node, [&] { node->pins += change; });
    return true;
  }
  int64_t pins(const ChunkId& id) const override {
    const Node* node = FindNode(id);
    return node == nullptr ? 0 : node->pins;
  }
  void SetExpiry(const ChunkId& id, int64_t expires_ms) noexcept override {
    Node* node = FindNode(id);
    if (node == nullptr) return;
    auto place = expiries_.extract({ExpiryOf(node->chunk), node});
    node->chunk.expires_ms = expires_ms;
    place.value() = {ExpiryOf(node->chunk), node};
    expiries_.insert(std::move(place));
  }
  void SetPriority(const ChunkId& id, int priority) noexcept override {
    Node* node = FindNode(id);
    if (node == nullptr) return;
    Change(*node, [&] { node->chunk.priority = priority; });
  }
  void SetBytes(const ChunkId& id, int64_t bytes) noexcept override {
    Node* node = FindNode(id);
    if (node == nullptr) return;
    const int64_t more = bytes - std::exchange(node->chunk.bytes, bytes);
    bytes_ += more;
    node->root->bytes += more;
    if (node->standing.lane == kProbation) probation_bytes_ += more;
  }
  bool Erase(const ChunkId& id) noexcept override;

  void SetQuota(const ChunkKey& root, const ChunkQuota& quota) override {
    RootOf(root).quota = quota;
    ForgetIfEmpty(root);
  }
  ChunkQuota quota(const ChunkKey& root) const override {
    const auto at = roots_.find(root);
    return at == roots_.end() ? ChunkQuota{} : at->second.quota;
  }
  int64_t bytes_of(const ChunkKey& root) const override {
    const auto at = roots_.find(root);
    return at == roots_.end() ? 0 : at->second.bytes;
  }

  std::vector<ChunkKey> OverQuota() const override {
    std::vector<ChunkKey> over;
    for (const auto& [key, root] : roots_)
      if (root.quota.bytes_max > 0 && root.bytes > root.quota.bytes_max) over.push_back(key);
    return over;
  }

  std::optional<std::vector<ChunkId>> Victims(const ChunkKey& root, int64_t bytes,
                                              int64_t unknown) const override;
  std::vector<ChunkId> Expired(int64_t now_ms) const override {
    std::vector<ChunkId> expired;
    for (const auto& [expiry, node] : expiries_) {
      if (expiry > now_ms || expiry == kNoExpiry) break;
      if (node->pins == 0) expired.push_back(node->id);
    }
    return expired;
  }
  std::vector<IndexedChunk> All() const override {
    std::vector<IndexedChunk> all;
    all.reserve(static_cast<size_t>(size_));
    for (const auto& [id, node] : nodes_)
      if (node.present) all.push_back(node.chunk);
    return all;
  }

  int64_t size() const override { return size_; }
  int64_t bytes() const override { return bytes_; }
  int64_t bytes_max() const override { return bytes_max_; }
  std::string_view CheckInvariants() const override;

 private:
  using Nodes = std::map<ChunkId, Node, KeyFirst>;

  static size_t At(int lane) { return static_cast<size_t>(lane); }
  static int64_t ExpiryOf(const IndexedChunk& chunk) {
    return chunk.expires_ms == 0 ? kNoExpiry : chunk.expires_ms;
  }
  const Node* FindNode(const ChunkId& id) const {
    const auto at = nodes_.find(id);
    return at == nodes_.end() || !at->second.present ? nullptr : &at->second;
  }
  Node* FindNode(const ChunkId& id) { return const_cast<Node*>(std::as_const(*this).FindNode(id)); }
  Root& RootOf(const ChunkKey& key);
  Node& NodeOf(const ChunkId& id) {
    Node& node = nodes_.try_emplace(id).first->second;
    node.id = id;
    return node;
  }
  void ForgetIfEmpty(const ChunkKey& root) noexcept;
  void ForgetIfUnused(Node& node) noexcept;
  void UpdateHead(Root& root, size_t lane) noexcept;
  void Remember(Node& node) noexcept;
  void Forget(Node& node) noexcept;
  bool IsRemembered(const Node& node) const { return node.memory.empty(); }

  // Changes what the rank of a present node comes from.
  template <typename F>
  void Change(Node& node, F&& change) noexcept {
    Root& root = *node.root;
    const size_t before = At(node.standing.lane);
    auto place = root.lanes[before].extract(Rank::Of(node, !node.IsFree()));
    change();
    place.value() = Rank::Of(node, !node.IsFree());
    const size_t after = At(node.standing.lane);
    root.lanes[after].insert(std::move(place));
    UpdateHead(root, before);
    if (after != before) UpdateHead(root, after);
  }

  const std::unique_ptr<EvictionPolicy> policy_;
  const int64_t bytes_max_;
  int64_t size_ = 0;
  int64_t bytes_ = 0;
  int64_t probation_bytes_ = 0;
  uint64_t stamp_ = 0;
  Nodes nodes_;
  std::map<ChunkKey, Root> roots_;
  std::array<Heads, kLaneCount> heads_;
  std::set<std::pair<int64_t, Node*>> expiries_;
  std::list<Node*> remembered_;  // oldest first; at most as many as there are chunks
};

Root& ChunkIndexImpl::RootOf(const ChunkKey& key) {
  const auto at = roots_.find(key);
  if (at != roots_.end()) return at->second;
  std::array<Heads::node_type, kLaneCount> spare;
  for (Heads::node_type& node : spare) {
    Heads one{Head{}};
    node = one.extract(one.begin());
  }
  Root& root = roots_[key];
  root.key = key;
  root.spare = std::move(spare);
  return root;
}

void ChunkIndexImpl::ForgetIfEmpty(const ChunkKey& key) noexcept {
  const auto at = roots_.find(key);
  const Root& root = at->second;
  if (root.bytes > 0 || !root.lanes[kProbation].empty() || !root.lanes[kMain].empty()) return;
  if (root.quota.bytes_max == 0 && root.quota.bytes_guaranteed == 0) roots_.erase(at);
}

void ChunkIndexImpl::ForgetIfUnused(Node& node) noexcept {
  if (!node.present && node.children == 0 && !IsRemembered(node)) nodes_.erase(node.id);
}

void ChunkIndexImpl::UpdateHead(Root& root, size_t lane) noexcept {
  const Ranks& ranks = root.lanes[lane];
  if (root.spare[lane].empty()) root.spare[lane] = heads_[lane].extract(root.heads[lane]);
  if (ranks.empty() || ranks.begin()->stays) return;
  root.spare[lane].value() = {*ranks.begin(), &root};
  root.heads[lane] = heads_[lane].insert(std::move(root.spare[lane])).position;
  root.spare[lane] = {};
}

void ChunkIndexImpl::Remember(Node& node) noexcept {
  remembered_.splice(remembered_.end(), node.memory);
}

void ChunkIndexImpl::Forget(Node& node) noexcept {
  node.memory.splice(node.memory.begin(), remembered_, node.place);
}

void ChunkIndexImpl::Insert(const IndexedChunk& chunk) {
  const bool has_parent = chunk.context != chunk.id.root && chunk.context != chunk.id.key;
  // Everything that takes memory first; what is left over after std::bad_alloc goes again.
  Node* node = nullptr;
  Node* parent = nullptr;
  Root* root = nullptr;
  Ranks rank;
  std::set<std::pair<int64_t, Node*>> expiry;
  try {
    root = &RootOf(chunk.id.root);
    node = &NodeOf(chunk.id);
    QUIRE_CHECK(!node->present) << "ChunkIndex::Insert: the chunk is there already";
    if (has_parent) parent = &NodeOf({chunk.id.fingerprint, chunk.id.root, chunk.context});
    rank.insert(Rank{});
    expiry.insert({ExpiryOf(chunk), node});
  } catch (...) {
    if (parent != nullptr) ForgetIfUnused(*parent);
    if (node != nullptr) ForgetIfUnused(*node);
    if (root != nullptr) ForgetIfEmpty(chunk.id.root);
    throw;
  }
  const bool remembered = IsRemembered(*node);
  if (remembered) Forget(*node);
  node->present = true;
  node->chunk = chunk;
  node->pins = 0;
  node->root = root;
  node->parent = parent;
  node->standing = policy_->Enter(chunk, ++stamp_, remembered);
  expiries_.merge(expiry);
  const size_t lane = At(node->standing.lane);
  auto place = rank.extract(rank.begin());
  place.value() = Rank::Of(*node, !node->IsFree());
  root->lanes[lane].insert(std::move(place));
  UpdateHead(*root, lane);
  if (parent != nullptr) {
    if (parent->present) {
      Change(*parent, [&] { ++parent->children; });
    } else {
      ++parent->children;
    }
  }
  ++size_;
  bytes_ += chunk.bytes;
  root->bytes += chunk.bytes;
  if (node->standing.lane == kProbation) probation_bytes_ += chunk.bytes;
}

bool ChunkIndexImpl::Erase(const ChunkId& id) noexcept {
  Node* node = FindNode(id);
  if (node == nullptr) return false;
  Root& root = *node->root;
  const size_t lane = At(node->standing.lane);
  const Rank rank = Rank::Of(*node, !node->IsFree());
  // To the policy, erasing the chunk that is next to go is an eviction.
  const bool was_next = !rank.stays && root.lanes[lane].begin()->node == node;
  root.lanes[lane].erase(rank);
  UpdateHead(root, lane);
  expiries_.erase({ExpiryOf(node->chunk), node});
  --size_;
  bytes_ -= node->chunk.bytes;
  root.bytes -= node->chunk.bytes;
  if (node->standing.lane == kProbation) probation_bytes_ -= node->chunk.bytes;
  node->present = false;
  if (was_next && policy_->Evicted(node->standing)) Remember(*node);
  if (Node* parent = std::exchange(node->parent, nullptr)) {
    if (parent->present) {
      Change(*parent, [&] { --parent->children; });
    } else {
      --parent->children;
      ForgetIfUnused(*parent);
    }
  }
  ForgetIfEmpty(id.root);
  ForgetIfUnused(*node);
  while (static_cast<int64_t>(remembered_.size()) > size_) {
    Node& oldest = *remembered_.front();
    Forget(oldest);
    ForgetIfUnused(oldest);
  }
  return true;
}

std::optional<std::vector<ChunkId>> ChunkIndexImpl::Victims(const ChunkKey& key, int64_t bytes,
                                                            int64_t unknown) const {
  if (bytes > bytes_max_) return std::nullopt;
  const auto at = roots_.find(key);
  const Root* root = at == roots_.end() ? nullptr : &at->second;
  VictimSearch search(*policy_, heads_, probation_bytes_, bytes_max_);
  if (root != nullptr && root->quota.bytes_max > 0) {
    while (root->bytes - search.bytes() + bytes > root->quota.bytes_max)
      if (!search.TakeFrom(*root)) return std::nullopt;
  }
  while (bytes_ + unknown - search.bytes() + bytes > bytes_max_)
    if (!search.Take(root)) return std::nullopt;
  return std::move(search).victims();
}

std::string_view ChunkIndexImpl::CheckInvariants() const {
  int64_t size = 0, bytes = 0, probation = 0;
  std::map<const Node*, int64_t> children;
  std::map<ChunkKey, int64_t> root_bytes;
  for (const auto& [id, node] : nodes_) {
    if (node.parent != nullptr) ++children[node.parent];
    if (!node.present) continue;
    ++size;
    bytes += node.chunk.bytes;
    root_bytes[id.root] += node.chunk.bytes;
    if (node.standing.lane == kProbation) probation += node.chunk.bytes;
    const Ranks& lane = node.root->lanes[At(node.standing.lane)];
    if (!lane.contains(Rank::Of(node, !node.IsFree()))) return "a chunk is not where it ranks";
    if (!expiries_.contains({ExpiryOf(node.chunk), const_cast<Node*>(&node)}))
      return "a chunk is not where it expires";
  }
  for (const auto& [id, node] : nodes_) {
    const auto at = children.find(&node);
    if (node.children != (at == children.end() ? 0 : at->second)) return "children are miscounted";
    if (!node.present && node.children == 0 && !IsRemembered(node)) return "a node is of no use";
  }
  size_t ranks = 0;
  for (const auto& [key, root] : roots_) {
    const auto at = root_bytes.find(key);
    if (root.bytes != (at == root_bytes.end() ? 0 : at->second)) return "a root is miscounted";
    for (size_t lane = 0; lane < kLaneCount; ++lane) {
      ranks += root.lanes[lane].size();
      const bool has_head = !root.lanes[lane].empty() && !root.lanes[lane].begin()->stays;
      if (has_head != root.spare[lane].empty()) return "a head is missing or left over";
      if (has_head && root.heads[lane]->rank.node != root.lanes[lane].begin()->node)
        return "a head is not the first";
    }
  }
  if (size != size_ || bytes != bytes_ || probation != probation_bytes_) return "sums are wrong";
  if (static_cast<int64_t>(ranks) != size_ || static_cast<int64_t>(expiries_.size()) != size_)
    return "a sorted set has another size";
  if (static_cast<int64_t>(remembered_.size()) > size_) return "too much is remembered";
  return "";
}

}  // namespace

std::unique_ptr<ChunkIndex> ChunkIndex::Create(EvictionKind eviction, int64_t bytes_max) {
  return std::make_unique<ChunkIndexImpl>(eviction, bytes_max);
}

}  // namespace quire
