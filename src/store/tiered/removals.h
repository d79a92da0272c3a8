// Removals: what is being removed. A chunk on its way from one tier to another, in a queue or in a
// thread's hands, would come back after a Remove that has looked everywhere: so a remover first
// tells here, and a mover looks here.
#ifndef QUIRE_STORE_TIERED_REMOVALS_H_
#define QUIRE_STORE_TIERED_REMOVALS_H_

#include <algorithm>
#include <list>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

#include "store/tier/chunk_tier.h"

namespace quire {

class Removals {
 public:
  // One Remove or Clear, from before it looks anywhere until it is over.
  class Scope {
   public:
    Scope(Removals& removals, std::span<const ChunkKey> keys)
        : removals_(removals), keys_(keys.begin(), keys.end()) {
      std::ranges::sort(keys_);
      Enter();
    }
    // Everything of a key space.
    Scope(Removals& removals, const Digest& fingerprint, const ChunkKey& root)
        : removals_(removals), fingerprint_(fingerprint), root_(root), is_space_(true) {
      Enter();
    }
    ~Scope() {
      const std::lock_guard lock(removals_.mutex_);
      removals_.scopes_.erase(place_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    bool Covers(const ChunkId& id) const {
      if (is_space_) return id.fingerprint == fingerprint_ && id.root == root_;
      return std::ranges::binary_search(keys_, id.key);
    }
    // Returns when no move is under way that began before the scope.
    void AwaitMoves() const { const std::unique_lock lock(removals_.moving_); }

   private:
    void Enter() {
      const std::lock_guard lock(removals_.mutex_);
      place_ = removals_.scopes_.insert(removals_.scopes_.end(), this);
    }

    Removals& removals_;
    std::vector<ChunkKey> keys_;
    Digest fingerprint_{};
    ChunkKey root_{};
    bool is_space_ = false;
    std::list<const Scope*>::iterator place_;
  };

  // Chunks are between two places while it lives: from before they leave one until they are in the
  // other or in its queue. Nothing in it waits for I/O.
  using Move = std::shared_lock<std::shared_mutex>;
  Move BeginMove() { return Move(moving_); }
  bool Covers(const ChunkId& id) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(scopes_, [&](const Scope* scope) { return scope->Covers(id); });
  }

 private:
  std::shared_mutex moving_;
  mutable std::mutex mutex_;
  std::list<const Scope*> scopes_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_REMOVALS_H_
