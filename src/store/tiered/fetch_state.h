// FetchState: the chunks of one request on their way, and the handle that a caller has of it.
//
// What changes is guarded by StoreParts::fetch_mutex. Deadlines need no thread of their own: the
// first look at a fetch after its deadline ends it.
#ifndef QUIRE_STORE_TIERED_FETCH_STATE_H_
#define QUIRE_STORE_TIERED_FETCH_STATE_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "quire/chunk_store.h"
#include "store/tiered/chunk_load.h"
#include "store/tiered/pin_board.h"
#include "store/tiered/store_parts.h"

namespace quire {

class FetchState {
 public:
  // What came of a chunk, from where.
  struct Slot {
    std::shared_ptr<const StoredChunk> chunk = nullptr;  // complete and verified
    std::shared_ptr<ChunkLoad> load = nullptr;           // that it comes or came with
    TierKind tier = TierKind::kRam;
    PinBoard::Ticket pin = 0;
  };

  FetchState(std::shared_ptr<StoreParts> parts, const FetchRequest& request,
             std::span<const ChunkKey> chain, bool to_memory);

  // ---- Does not change
  int64_t count() const { return static_cast<int64_t>(ids_.size()); }
  const ChunkId& id(int64_t i) const { return ids_[static_cast<size_t>(i)]; }
  std::span<const ChunkId> ids_from(int64_t i) const {
    return std::span(ids_).subspan(static_cast<size_t>(i));
  }
  std::span<const int32_t> tokens(int64_t i) const;
  ChunkExpectation Expect(int64_t i) const;
  int64_t chunk_tokens() const { return chunk_tokens_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  double compute_seconds_per_token() const { return compute_seconds_per_token_; }
  int priority() const { return priority_; }
  bool to_memory() const { return to_memory_; }
  StoreParts& parts() const { return *parts_; }

  // ---- Under StoreParts::fetch_mutex
  // REQUIRES: i is the first chunk that nothing was said about. False if that is of no use any
  // more.
  bool Found(int64_t i, Slot* slot) noexcept;
  // No more chunks will come than those found; `why` is what became of the next one.
  void Located(MissReason why) noexcept;
  // Chunk i will not come. Whatever follows is of no use.
  void Failed(int64_t i, MissReason why) noexcept;
  void Complete(int64_t i, std::shared_ptr<const StoredChunk> chunk) noexcept;
  // Ends all that is not there yet.
  void End(MissReason why) noexcept;
  void EndIfLate() noexcept;
  bool done() const { return located_ && ready_ == end_; }
  bool located() const { return located_; }
  int64_t found() const { return found_; }
  int64_t ready() const { return ready_; }
  int64_t end() const { return end_; }
  MissReason miss() const { return miss_; }
  const Slot& slot(int64_t i) const { return slots_[static_cast<size_t>(i)]; }
  Slot& slot(int64_t i) { return slots_[static_cast<size_t>(i)]; }
  // A layer of a chunk has come.
  void LayerCame() noexcept { WakeThoseWhoMayGoOn(); }

  // Waits until it is done, or with `layer` until this layer of all chunks is there or will not
  // come. False: `until_ns` came first. *there: chunks that have the layer. `lock` is of the mutex.
  bool WaitDone(std::unique_lock<std::mutex>& lock, int64_t until_ns);
  bool WaitLayer(std::unique_lock<std::mutex>& lock, int64_t layer, int64_t until_ns,
                 int64_t* there);

  // ---- Of the one thread that looks for its chunks
  struct Search {
    int64_t next = 0;  // chunk to look for
    // Chunks before this one are there, and the next one is not, as the tier answered.
    std::array<int64_t, kTierCount> asked_until{};
    std::array<bool, kTierCount> asked{};
    bool unavailable = false;  // some tier that was needed did not answer
    bool expired = false;
    // Loads that were begun and not handed to a thread yet.
    struct Run {
      int64_t first = 0;  // chunk of loads[0]
      int64_t bytes = 0;
      int64_t tokens = 0;
      std::vector<std::shared_ptr<ChunkLoad>> loads{};
    };
    std::array<Run, kTierCount> runs{};
  };
  Search& search() { return search_; }

  // Unpins; the handle is gone. Not under the mutex.
  void ReleasePins() noexcept;

 private:
  // A waiting thread. A chunk has many sections, and a waiter that is woken for each of them
  // takes the mutex from the thread that brings them.
  struct Waiter {
    std::optional<int64_t> layer{};  // none: until the fetch is done
    int64_t there = 0;               // leading chunks that have the layer
    Waiter* next = nullptr;
  };

  void Advance() noexcept;
  void LeaveLoads() noexcept;
  bool MayGoOn(Waiter& waiter) const noexcept;
  void WakeThoseWhoMayGoOn() noexcept;
  bool WaitAs(Waiter& waiter, std::unique_lock<std::mutex>& lock, int64_t until_ns);

  const std::shared_ptr<StoreParts> parts_;
  const Digest fingerprint_;
  const bool approximate_;
  const std::vector<int32_t> tokens_;
  const int64_t chunk_tokens_;
  const int64_t first_chunk_;
  const int64_t deadline_ns_;
  const double compute_seconds_per_token_;
  const int priority_;
  const bool to_memory_;
  std::vector<ChunkId> ids_;

  Search search_;
  std::condition_variable changed_;
  Waiter* waiters_ = nullptr;
  std::vector<Slot> slots_;
  bool located_ = false;
  bool counted_ = false;
  int64_t found_ = 0;
  int64_t end_ = 0;                      // chunks that will be ready when it is done
  int64_t ready_ = 0;                    // leading ones that are complete
  MissReason miss_ = MissReason::kNone;  // of chunk end_
};

// The caller's.
class FetchHandle final : public ChunkFetch {
 public:
  explicit FetchHandle(std::shared_ptr<FetchState> state) : state_(std::move(state)) {}
  ~FetchHandle() override;

  int64_t chunk_count() const override { return state_->count(); }
  bool located() const override;
  int64_t found() const override;
  int64_t ready() const override;
  bool done() const override;
  bool Wait(int64_t until_ns) override;
  Status WaitLayer(int64_t layer, int64_t until_ns) override;
  std::shared_ptr<const StoredChunk> chunk(int64_t i) const override;
  TierKind tier(int64_t i) const override;
  MissReason miss() const override;
  void Cancel() noexcept override;

 private:
  // Runs f with the state up to date.
  template <typename F>
  auto Look(F&& f) const;

  const std::shared_ptr<FetchState> state_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_FETCH_STATE_H_
