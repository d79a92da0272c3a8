#include "buffers/prefix_index.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace quire {

PrefixIndex::Id PrefixIndex::Node::oldest() const {
  const Id own = ends.empty() ? kNone : ends.begin()->first;
  return oldest_of_children.empty() ? own : std::min(own, *oldest_of_children.begin());
}

size_t PrefixIndex::Node::MatchRun(std::span<const uint64_t> tokens) const {
  const auto run = std::span(source->values).subspan(begin, end - begin);
  return static_cast<size_t>(
      std::mismatch(run.begin(), run.end(), tokens.begin(), tokens.end()).first - run.begin());
}

PrefixIndex::Place PrefixIndex::Walk(const Node& root, std::span<const uint64_t> tokens) noexcept {
  Place place;
  place.node = const_cast<Node*>(&root);  // NOLINT: only Insert and Erase change what they find
  while (place.position < tokens.size()) {
    const auto child = place.node->children.find(tokens[place.position]);
    if (child == place.node->children.end()) break;
    place.node = child->second.get();
    place.matched = place.node->MatchRun(tokens.subspan(place.position));
    place.position += place.matched;
    if (place.matched < place.node->end - place.node->begin) break;
    if (place.node->ends.empty()) continue;
    place.deepest_end = place.node->ends.begin()->first;
    place.oldest_end = std::min(place.oldest_end, place.deepest_end);
  }
  return place;
}

std::optional<PrefixIndex::Id> PrefixIndex::Find(const MaskedTokens& query,
                                                 bool longest) const noexcept {
  const auto root = roots_.find(query.type);
  if (root == roots_.end() || query.values.empty()) return std::nullopt;
  const Place place = Walk(root->second, query.values);
  Id found = longest ? place.deepest_end : place.oldest_end;
  // The whole query is a beginning of everything below.
  if (place.position == query.values.size()) {
    found = longest ? place.node->oldest() : std::min(found, place.node->oldest());
  }
  if (found == kNone) return std::nullopt;
  return found;
}

std::optional<PrefixIndex::Id> PrefixIndex::FindOldest(const MaskedTokens& query) const noexcept {
  return Find(query, false);
}

std::optional<PrefixIndex::Id> PrefixIndex::FindLongest(const MaskedTokens& query) const noexcept {
  return Find(query, true);
}

// Whatever can fail is made first: nodes of the containers are taken out of temporary ones and only
// linked in at the end.
void PrefixIndex::Insert(std::shared_ptr<const MaskedTokens> tokens, Id id) {
  const std::span<const uint64_t> values = tokens->values;
  QUIRE_CHECK(!values.empty()) << "sequence " << id;
  std::map<uint16_t, Node> new_root;
  auto root = roots_.find(tokens->type);
  const bool is_first = root == roots_.end();
  if (is_first) root = new_root.try_emplace(tokens->type).first;
  const Place place = Walk(root->second, values);
  Node* const node = place.node;
  const bool splits = place.matched < node->end - node->begin;
  const bool branches = place.position < values.size();

  std::map<Id, std::shared_ptr<const MaskedTokens>> end_node = {{id, tokens}};
  std::set<Id> oldest_node;
  std::map<uint64_t, std::unique_ptr<Node>> child_node;
  std::unique_ptr<Node> leaf;
  std::unique_ptr<Node> middle;
  if (branches) {
    leaf = std::make_unique<Node>();
    leaf->source = tokens;
    leaf->begin = place.position;
    leaf->end = values.size();
    child_node.emplace(values[place.position], nullptr);
    oldest_node.insert(id);
  }
  if (splits) {
    middle = std::make_unique<Node>();
    middle->children.emplace(node->source->values[node->begin + place.matched], nullptr);
    middle->oldest_of_children.insert(node->oldest());
  }

  // Commit.
  if (is_first) root = roots_.insert(new_root.extract(new_root.begin())).position;
  Node* target = node;
  if (splits) {
    target = middle.get();
    std::unique_ptr<Node>& slot = node->parent->children.find(node->first_token())->second;
    middle->source = node->source;
    middle->begin = node->begin;
    middle->end = node->begin + place.matched;
    middle->parent = node->parent;
    node->begin = middle->end;
    node->parent = target;
    middle->children.begin()->second = std::move(slot);
    slot = std::move(middle);
  }
  const Id before = target->oldest();
  if (branches) {
    leaf->parent = target;
    leaf->ends.insert(end_node.extract(end_node.begin()));
    child_node.begin()->second = std::move(leaf);
    target->children.insert(child_node.extract(child_node.begin()));
    target->oldest_of_children.insert(oldest_node.extract(oldest_node.begin()));
  } else {
    target->ends.insert(end_node.extract(end_node.begin()));
  }
  ReplaceOldest(target, before);
  RefreshSources(target);
}

void PrefixIndex::Erase(const MaskedTokens& tokens, Id id) noexcept {
  const auto root = roots_.find(tokens.type);
  QUIRE_CHECK(root != roots_.end()) << "sequence " << id;
  Node* node = Walk(root->second, tokens.values).node;
  const Id before = node->oldest();
  QUIRE_CHECK(node->ends.erase(id) == 1) << "sequence " << id;
  if (node->ends.empty() && node->children.empty()) {
    Node* const parent = node->parent;
    const Id parent_before = parent->oldest();
    parent->oldest_of_children.erase(before);
    parent->children.erase(node->first_token());
    node = parent;
    ReplaceOldest(node, parent_before);
  } else {
    ReplaceOldest(node, before);
  }
  RefreshSources(MergeWithOnlyChild(node));
  if (root->second.children.empty()) roots_.erase(root);
}

// `node`'s oldest id was `before`: tells the nodes above it.
void PrefixIndex::ReplaceOldest(Node* node, Id before) noexcept {
  for (; node->parent != nullptr && node->oldest() != before; node = node->parent) {
    const Id parent_before = node->parent->oldest();
    auto link = node->parent->oldest_of_children.extract(before);
    link.value() = node->oldest();
    node->parent->oldest_of_children.insert(std::move(link));
    before = parent_before;
  }
}

// A node in which nothing ends and nothing branches is of no use. Returns what stands in its place.
PrefixIndex::Node* PrefixIndex::MergeWithOnlyChild(Node* node) noexcept {
  if (node->parent == nullptr || !node->ends.empty() || node->children.size() != 1) return node;
  std::unique_ptr<Node>& slot = node->parent->children.find(node->first_token())->second;
  std::unique_ptr<Node> child = std::move(node->children.begin()->second);
  child->begin = node->begin;
  child->parent = node->parent;
  slot = std::move(child);
  return slot.get();
}

// A node takes its tokens from a sequence that ends in it, else from its first child, so that no
// sequence is kept once it is erased.
void PrefixIndex::RefreshSources(Node* node) noexcept {
  for (; node != nullptr; node = node->parent) {
    if (!node->ends.empty()) {
      node->source = node->ends.begin()->second;
    } else if (!node->children.empty()) {
      node->source = node->children.begin()->second->source;
    }
  }
}

void PrefixIndex::CheckInvariants() const {
  for (const auto& [type, root] : roots_) {
    QUIRE_CHECK(!root.children.empty()) << "type " << type;
    QUIRE_CHECK(root.begin == root.end && root.parent == nullptr && root.ends.empty());
    CheckNode(root);
  }
}

void PrefixIndex::CheckNode(const Node& node) {
  std::set<Id> oldest;
  for (const auto& [token, child] : node.children) {
    QUIRE_CHECK(child->parent == &node);
    QUIRE_CHECK(child->begin == node.end && child->begin < child->end);
    QUIRE_CHECK(child->end <= child->source->values.size());
    QUIRE_CHECK(child->first_token() == token);
    QUIRE_CHECK(!child->ends.empty() || child->children.size() > 1) << "a useless node";
    QUIRE_CHECK(std::equal(node.source->values.begin(), node.source->values.begin() + node.end,
                           child->source->values.begin()));
    CheckNode(*child);
    oldest.insert(child->oldest());
  }
  QUIRE_CHECK(oldest == node.oldest_of_children);
  if (node.ends.empty()) {
    QUIRE_CHECK(node.source == node.children.begin()->second->source);
    return;
  }
  QUIRE_CHECK(node.source == node.ends.begin()->second);
  for (const auto& [id, tokens] : node.ends) {
    QUIRE_CHECK(tokens->values.size() == node.end) << "sequence " << id;
  }
}

}  // namespace quire
