// Removals: what is being removed. A chunk on its way from one tier to another, in a queue or in a
// thread's hands, would come back after a Remove that has looked everywhere: so a remover first
// tells here, and a mover looks here.
#ifndef QUIRE_STORE_TIERED_REMOVALS_H_
#define QUIRE_STORE_TIERED_REMOVALS_H_

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <span>
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
    // Returns when no move is under way that began before the scope. Those that began since see
    // it, and are not waited for: there is always one in a busy store.
    void AwaitMoves() const {
      std::unique_lock lock(removals_.mutex_);
      removals_.moved_.wait(lock, [&] {
        return removals_.oldest_ == nullptr || removals_.oldest_->number_ > last_move_;
      });
    }

   private:
    void Enter() {
      const std::lock_guard lock(removals_.mutex_);
      place_ = removals_.scopes_.insert(removals_.scopes_.end(), this);
      last_move_ = removals_.last_move_;
    }

    Removals& removals_;
    std::vector<ChunkKey> keys_;
    Digest fingerprint_{};
    ChunkKey root_{};
    bool is_space_ = false;
    std::list<const Scope*>::iterator place_;
    uint64_t last_move_ = 0;  // that began before
  };

  // Chunks are between two places while it lives: from before they leave one until they are in the
  // other or in its queue. Nothing in it waits for I/O.
  class Move {
   public:
    explicit Move(Removals& removals) : removals_(removals) {
      const std::lock_guard lock(removals_.mutex_);
      number_ = ++removals_.last_move_;
      older_ = removals_.newest_;
      (older_ != nullptr ? older_->newer_ : removals_.oldest_) = this;
      removals_.newest_ = this;
    }
    ~Move() {
      const std::lock_guard lock(removals_.mutex_);
      (older_ != nullptr ? older_->newer_ : removals_.oldest_) = newer_;
      (newer_ != nullptr ? newer_->older_ : removals_.newest_) = older_;
      if (older_ == nullptr && !removals_.scopes_.empty()) removals_.moved_.notify_all();
    }
    Move(const Move&) = delete;
    Move& operator=(const Move&) = delete;

   private:
    friend class Removals;
    Removals& removals_;
    uint64_t number_ = 0;
    Move* older_ = nullptr;  // those that are under way, in the order in which they began
    Move* newer_ = nullptr;
  };
  Move BeginMove() { return Move(*this); }
  bool Covers(const ChunkId& id) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(scopes_, [&](const Scope* scope) { return scope->Covers(id); });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable moved_;  // the oldest move has ended
  std::list<const Scope*> scopes_;
  uint64_t last_move_ = 0;
  Move* oldest_ = nullptr;
  Move* newest_ = nullptr;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_REMOVALS_H_
