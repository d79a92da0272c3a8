// Remembers which tokens the KV of finished sequences stands for, so that a new request starts
// behind the longest prefix that is there, to the token.
//
// Retained sequences stay in the KV cache under ids of their own; a request forks the one that
// matches (which copies nothing). They are given up when pages run out: least recently used first,
// from the tail, because the beginning of a sequence is what others share.
//
// The sequences are kept in lexicographic order of their tokens, where the longest common prefix
// with any text is at one of the two neighbours of that text's place. So an ordered set is enough:
// a radix tree would store the same tokens with a node for each branch and answer the same
// question.
//
// A salt may have a part: as long as what is kept with it takes no more pages, it is given up only
// when nothing else is left. So whatever others compute, a tenant keeps that much of its own. Each
// part has an order of use of its own, so that what is given up next is found among the first ones.
//
// Only requests of the same PrefixSpace reuse each other's KV; each space has an order of its own.
//
// A sequence that somebody is about to ask for may have leases. It then has its place in an order
// of its own, of what is given up when all but the parts of salts is gone: the oldest lease ends
// first, and its sequence is as others are. So leases are few, and never keep pages from a request.
//
// Where layers have windows, a sequence can be forked where it ends and at the positions that it
// still sees; where layers are recurrent, where it ends and at its checkpoints. A text that is a
// prefix of another may then be the only one to be forked at its end, so both are kept, and all are
// looked through.
//
// Invariants: where sequences fork anywhere, in one order no sequence's tokens are a prefix of
// another's; the shorter one would hold a slot for nothing. No order is empty. The KV cache counts
// exactly the sequences that are here as retained.
#ifndef QUIRE_ENGINE_PREFIX_PREFIX_CACHE_H_
#define QUIRE_ENGINE_PREFIX_PREFIX_CACHE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/prefix/engine_states.h"
#include "engine/prefix/evicted_prefixes.h"
#include "engine/prefix/prefix_space.h"
#include "quire/seams.h"

namespace quire {

// Length of the longest common prefix.
int64_t CommonPrefix(std::span<const int32_t> a, std::span<const int32_t> b);

// No token of a sequence is approximate.
inline constexpr int64_t kExactForever = std::numeric_limits<int64_t>::max();

struct PrefixMatch {
  int64_t sequence_id = -1;
  int64_t length = 0;       // tokens in common, where the sequence can be forked; 0 = no match
  int64_t known = 0;        // most tokens in common with any sequence, fork or not
  bool goes_on = false;     // no sequence that has `known` tokens ends there
  bool has_window = false;  // the sequence has the window of the request that looks
  int64_t approximate_from = kExactForever;  // the sequence's first token that may be approximate
};

// Takes note of a sequence of `length` tokens that has `common` of them with the text looked for.
void NoteKnown(int64_t common, int64_t length, PrefixMatch* best) noexcept;

class PrefixCache {
 public:
  // What is retained at most. Sequences that share pages have more tokens together than there is
  // room for in the pages, and their texts take memory, too.
  struct Limits {
    int64_t sequences;  // >= 1
    int64_t tokens;
  };
  // What `state` views outlives this.
  PrefixCache(EngineStates state, int64_t page_size, const Limits& limits,
              std::shared_ptr<Clock> clock = MachineTime());

  // A retained sequence. `stored`: its first tokens that the owner has written elsewhere.
  struct Retained {
    int64_t sequence_id;
    std::span<const int32_t> tokens;
    const PrefixSpace& space;
    int64_t& stored;
  };
  // Called with each sequence of which a part is about to be given up for want of room, the last
  // chance to write it elsewhere. Must not throw or call the prefix cache.
  std::function<void(const Retained&)> before_eviction;

  // Takes over a sequence of the cache that holds exactly `tokens`. When memory is short the
  // sequence is removed instead.
  void Retain(int64_t sequence_id, std::vector<int32_t> tokens, const PrefixSpace& space = {},
              int64_t stored = 0) noexcept;

  // The longest match of a beginning of `tokens` at which the cache can fork, at a multiple of
  // `border`. The match is as good as used now: Touch it before it may be evicted.
  PrefixMatch Find(std::span<const int32_t> tokens, const PrefixSpace& space = {},
                   int64_t border = 1) const;
  // What is retained behind one beginning, for many texts that go on from it: the beginning is
  // compared once for all of them. Valid until the prefix cache changes.
  class Family;
  Family FamilyOf(std::span<const int32_t> beginning, const PrefixSpace& space) const;
  void Touch(int64_t sequence_id) noexcept;
  // How long ago KV behind the first `known` of these tokens was given up for want of room;
  // nothing: it was not, as far as is remembered.
  std::optional<int64_t> EvictedAgo(std::span<const int32_t> tokens, const PrefixSpace& space,
                                    int64_t known) const;

  // KV of this salt has a part of `pages` pages from now on; 0: none. A page that several sequences
  // share counts for each. Looks at all that is kept. May throw std::bad_alloc.
  void SetPart(const std::string& salt, int64_t pages);

  // ---- Leases. What is over is looked for by EndOverdueLeases alone.
  struct LeaseLimits {
    int64_t leases = 0;  // 0: none are given
    int64_t pages = 0;   // of all sequences that have some; a shared page counts for each
  };
  struct LeaseCounts {
    int64_t used = 0;      // EndLease
    int64_t overdue = 0;   // its time was over
    int64_t given_up = 0;  // for want of room, or with EndLeases
  };
  void SetLeaseLimits(const LeaseLimits& limits) { lease_limits_ = limits; }
  // What is retained of exactly these tokens, and stands before others perhaps, is about to be
  // asked for. Nothing where they are not retained to their end, and without memory: a lease is a
  // favour. Where it was asked for before (EndLease), the lease is used as it begins.
  void AddLease(std::span<const int32_t> tokens, const PrefixSpace& space,
                int64_t until_ns) noexcept;
  // They were asked for, perhaps but for the last token: the oldest lease of these ends. Without
  // one, this is remembered for the next one, if that begins before `until_ns`.
  void EndLease(std::span<const int32_t> tokens, const PrefixSpace& space,
                int64_t until_ns) noexcept;
  void EndOverdueLeases() noexcept;
  void EndLeases() noexcept;
  int64_t lease_count() const { return static_cast<int64_t>(leases_.size()); }
  int64_t leased_pages() const { return leased_.pages_kept; }
  const LeaseCounts& lease_counts() const { return lease_counts_; }

  // Gives up retained KV until `pages` are free or nothing is left.
  void Evict(int64_t pages) noexcept;

  // Least recently used first. `visit` must not call the prefix cache.
  void ForEach(const std::function<void(const Retained&)>& visit);

  // What is there to be told of a retained sequence.
  struct Facts {
    int64_t sequence_id;
    int64_t tokens;
    int64_t stored;
    const std::string& salt;
  };
  // The `count` most recently used ones, the last used first. `visit` must not call the prefix
  // cache.
  void ForNewest(int64_t count, const std::function<void(const Facts&)>& visit) const;

  bool empty() const { return by_use_.empty(); }
  int64_t sequence_count() const { return static_cast<int64_t>(by_use_.size()); }
  int64_t token_count() const { return token_count_; }
  // Evicting everything frees at most this number of pages; fewer if sequences share some.
  int64_t page_count_max() const { return page_count_max_; }
  // The first violated invariant stops the process. For tests.
  void CheckInvariants() const;

 private:
  struct Part;
  struct Entry {
    int64_t sequence_id;
    std::vector<int32_t> tokens;
    PrefixSpace space;
    int64_t stored;
    Part* part;  // of its salt, or that of all salts without one; with leases: leased_
    uint64_t used = 0;
    int64_t leases = 0;
  };
  using Entries = std::list<Entry>;  // least recently used first
  struct Part {
    int64_t pages = 0;
    int64_t pages_kept = 0;
    std::map<uint64_t, Entries::iterator> by_use = {};  // its entries

    bool is_beyond() const { return pages_kept > pages; }
  };
  struct Lease {
    Entries::iterator entry;
    int64_t tokens;  // of the entry's first ones
    int64_t until_ns;
  };
  using Leases = std::list<Lease>;  // the oldest first
  // Tokens that were asked for when they had no lease.
  struct Asked {
    PrefixSpace space;
    int64_t tokens;
    uint64_t hash;
    int64_t until_ns;
  };

  // Stands behind all texts that begin so.
  struct Beginning {
    std::span<const int32_t> tokens;
  };
  struct LexicographicOrder {
    using is_transparent = void;
    static std::span<const int32_t> Key(Entries::iterator entry) { return entry->tokens; }
    static std::span<const int32_t> Key(std::span<const int32_t> tokens) { return tokens; }
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      const std::span<const int32_t> x = Key(a);
      const std::span<const int32_t> y = Key(b);
      return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end());
    }
    bool operator()(const Beginning& a, Entries::iterator b) const {
      const std::span<const int32_t> y = b->tokens;
      return (*this)(a.tokens, y.first(std::min(y.size(), a.tokens.size())));
    }
  };
  using Index = std::set<Entries::iterator, LexicographicOrder>;

  static Retained ViewOf(Entry& entry) {
    return {entry.sequence_id, entry.tokens, entry.space, entry.stored};
  }
  void CheckOrder(const PrefixSpace& space, const Index& by_tokens) const;
  int64_t PagesOf(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  Index& IndexOf(const Entry& entry) { return by_space_.find(entry.space)->second; }
  Part* PartOf(const std::string& salt);
  bool IsOfAll(const Part& part) const { return &part == &part_of_all_; }
  // The entries of the salt, but for those with leases.
  void MoveTo(Part* part, const std::string& salt) noexcept;
  void Move(Entries::iterator entry, Part* part) noexcept;
  Leases::iterator EndLease(Leases::iterator lease, int64_t* count) noexcept;
  // Where there are more than the limits allow.
  void EndSurplusLeases() noexcept;
  void NoteAsked(std::span<const int32_t> tokens, const PrefixSpace& space,
                 int64_t until_ns) noexcept;
  // Whether they were asked for; forgets it.
  bool TakeAsked(std::span<const int32_t> tokens, const PrefixSpace& space) noexcept;
  // A longer sequence replaces one that may have leases.
  void PassLeases(Entries::iterator from, Entries::iterator to) noexcept;
  void MakeNewest(Entries::iterator entry) noexcept;
  // The entry is not in its order of tokens any more.
  void Forget(Entries::iterator entry) noexcept;
  void Count(const Entry& entry, int64_t tokens, int64_t sign) noexcept;
  // Pages of the entry that may be given up before its salt has less than its part; at most
  // `missing`, and all of these where nothing else is left.
  int64_t PagesToGive(const Entry& entry, int64_t missing) const;
  // The least recently used entry that is beyond the part of its salt; else that of the oldest
  // lease; else the least recently used one. REQUIRES: not empty.
  Entries::iterator Victim() const noexcept;
  // The next one to be given up. Leases end until it has none.
  Entries::iterator TakeVictim() noexcept;
  void Insert(Entries entry);
  // Whether the sequence is retained now. Where states are short, older sequences give way.
  bool MakeRetained(int64_t sequence_id) noexcept;
  void GiveUpOldest() noexcept;
  void Remove(Entries::iterator entry) noexcept;
  void NoteEvicted(const Entry& entry, int64_t kept) noexcept;
  // Cuts the tail that holds `pages` pages; false if the entry is gone thereby.
  bool CutTail(Entries::iterator entry, int64_t pages) noexcept;

  const EngineStates state_;
  int64_t page_size_;
  int64_t sequences_max_;
  int64_t tokens_max_;
  Entries by_use_;
  std::map<int64_t, Entries::iterator> by_id_;
  std::map<PrefixSpace, Index> by_space_;
  std::map<std::string, Part> parts_;  // by salt
  Part part_of_all_;                   // of salts without a part of their own
  Part leased_;                        // of entries with leases, of all salts
  Leases leases_;
  std::deque<Asked> asked_;  // the oldest first; at most as many as leases
  LeaseLimits lease_limits_;
  LeaseCounts lease_counts_;
  uint64_t last_used_ = 0;
  int64_t token_count_ = 0;
  int64_t page_count_max_ = 0;
  const std::shared_ptr<Clock> clock_;
  EvictedPrefixes evicted_;
};

class PrefixCache::Family {
 public:
  // The longest match of the beginning and `rest` that has tokens of the rest; else none. Tells
  // `sequence_id` and `length` alone.
  PrefixMatch Find(std::span<const int32_t> rest) const;
  // Tokens that were looked at so far. For tests.
  int64_t compared() const { return compared_; }

 private:
  friend class PrefixCache;
  Family(const EngineStates& state, std::span<const int32_t> beginning)
      : state_(state), length_(std::ssize(beginning)) {}
  std::span<const int32_t> RestOf(Entries::const_iterator member) const {
    return std::span(member->tokens).subspan(static_cast<size_t>(length_));
  }
  int64_t Common(std::span<const int32_t> rest, Entries::const_iterator member) const;

  const EngineStates state_;
  const int64_t length_;
  std::vector<Entries::const_iterator> members_;  // in the order of their tokens
  mutable int64_t compared_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_PREFIX_CACHE_H_
