// PrefixIndex: which of many token sequences match a query, in time of the query's length.
//
// A radix tree: a node stands for a run of tokens, the path from the root to it for a beginning
// that all sequences below it share. Two sequences match iff one is a beginning of the other, so a
// query matches the sequences that end on its path and, if the query ends first, all below that
// place. Every node knows the smallest id below it, so nothing is scanned.
//
// Ids are distinct; a smaller one is older. Sequences are not empty. Not for several threads.
#ifndef QUIRE_BUFFERS_PREFIX_INDEX_H_
#define QUIRE_BUFFERS_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

namespace quire {

// Tokens in the form in which they are compared. Sequences of different types never match.
struct MaskedTokens {
  uint16_t type = 0;  // one for all integers, one for each float type
  std::vector<uint64_t> values{};
};

class PrefixIndex {
 public:
  using Id = int64_t;

  PrefixIndex() = default;
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // std::bad_alloc leaves everything as it was.
  void Insert(std::shared_ptr<const MaskedTokens> tokens, Id id);
  // REQUIRES: inserted with these tokens.
  void Erase(const MaskedTokens& tokens, Id id) noexcept;

  // The oldest sequence that matches, and the oldest of those that match in most tokens.
  std::optional<Id> FindOldest(const MaskedTokens& query) const noexcept;
  std::optional<Id> FindLongest(const MaskedTokens& query) const noexcept;

  bool empty() const { return roots_.empty(); }
  // Walks the tree; ends the process at a violated invariant.
  void CheckInvariants() const;

 private:
  static constexpr Id kNone = std::numeric_limits<Id>::max();

  struct Node {
    std::shared_ptr<const MaskedTokens> source;  // some sequence through here
    size_t begin = 0;                            // the node's run is source->values[begin, end)
    size_t end = 0;
    Node* parent = nullptr;
    std::map<uint64_t, std::unique_ptr<Node>> children;      // by their first token
    std::map<Id, std::shared_ptr<const MaskedTokens>> ends;  // sequences that end here
    std::set<Id> oldest_of_children;                         // one id for each child

    Id oldest() const;
    size_t MatchRun(std::span<const uint64_t> tokens) const;
    uint64_t first_token() const { return source->values[begin]; }
  };
  // Where the walk along a sequence ends.
  struct Place {
    Node* node = nullptr;   // the last one that was entered
    size_t matched = 0;     // tokens of its run that are equal
    size_t position = 0;    // tokens of the sequence that are equal
    Id oldest_end = kNone;  // of sequences that end above `node`
    Id deepest_end = kNone;
  };

  static Place Walk(const Node& root, std::span<const uint64_t> tokens) noexcept;
  std::optional<Id> Find(const MaskedTokens& query, bool longest) const noexcept;
  static void ReplaceOldest(Node* node, Id before) noexcept;
  static Node* MergeWithOnlyChild(Node* node) noexcept;
  static void RefreshSources(Node* node) noexcept;
  static void CheckNode(const Node& node);

  std::map<uint16_t, Node> roots_;  // by type; with an empty run, and never without children
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_PREFIX_INDEX_H_
