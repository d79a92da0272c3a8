// PendingReceives: tokens that were reserved for a sender and are not committed yet: which parts of
// their layers have come, and which of them count. Layers are of two kinds (TransferLayer): those
// with rows of tokens, and those with a state. TransferReceiver says what the parts of a state have
// to do with a reservation.
//
// Bytes go to staging memory first, a piece for each part. When they are verified, rows go from
// there to their pages, whichever heads they are, and a state to memory of its reservation, until
// that is committed; the piece is free then. They count when the sender's forward has ended. So a
// page is written by its reservation's epoch alone, and is free for others as soon as the epoch is
// over; what a channel still writes then is staging memory, which it holds itself.
//
// Neither the digest nor the copy to the pages holds the lock. Reservations are copied to at the
// same time; one of them has one copy at a time, since pages take whole rows, and parts of other
// heads of the same rows would meet there. A copy may outlast its reservation:
// - A cancel waits for no copy. The reservation is over at once, its pages are free at once, and
//   the copy is *late*. Nobody else writes to those pages before it ends: a call that takes pages
//   waits for late copies first (AwaitLateCopies), for no longer than a part takes.
// - A commit keeps the first pages, so it waits for the copy of its own reservation, and no other
//   one begins meanwhile. Where a page is written as it becomes free, a cancel waits as well.
//
// Invariants:
// - An epoch names one reservation and is never used again; a sequence has at most one.
// - For a layer with rows, `rows` counts the rows all of whose heads count; for a layer with a
//   state, `rows` is 0 or the number of tokens before the state that counts.
// - What is being copied is absent: it does not count, and cannot be completed.
// - late_ counts the copies whose reservations are over. With 0 of them, each page that is being
//   written is one of a reservation.
//
// A reservation starts in a page of its own, so nothing that a forward reads lies in a page that is
// written here. Parts may come in any order: a tile is opened, for each layer, by the first of its
// rows that comes, whichever that is. So a reservation touches no page, whatever its length, and
// what is committed lies in open tiles, since all of its rows have come.
//
// All calls from any thread; what makes or ends reservations, from one at a time. The lock is a
// leaf: a part's query holds the part's own lock and asks here, so nothing here calls a part with
// the lock held.
#ifndef QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_
#define QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/plan/forward_plan.h"
#include "kv/transfer/staging_memory.h"
#include "quire/kv_transfer.h"
#include "quire/tensor.h"

namespace quire {

// Where the rows of a part of a state go.
class ReceivedRows {
 public:
  // What a copy of some heads has of the others, since pages take whole rows.
  struct OtherHeads {
    std::vector<std::byte> tile{};    // memory for all heads of a tile's rows
    std::vector<uint8_t> is_there{};  // [row of the part][head] != 0: it is in its page already
  };
  // Copies a part of a reservation to its pages; rows are [part.count, part.head_count, dim].
  // `layer` is the part's number of it. The slots' opens_tile are 1 where the part has the first
  // row that comes to a tile, or all of one. `others`: for a part of some heads. On any thread, and
  // for several reservations at a time.
  virtual void StoreReceived(const TokenSlots& slots, int64_t layer, const ReceivePart& part,
                             const LayerKV& rows, OtherHeads& others) noexcept = 0;
  // Whether a page is written as it becomes free.
  virtual bool WritesFreedPages() const = 0;

 protected:
  ~ReceivedRows() = default;
};

// A layer as transfers see it. An attention layer has rows, one for each token. A recurrent layer
// has a state, which is sent as one row of one head: that of the last token before it. If several
// states arrive, the newest counts.
struct TransferLayer {
  const AttentionLayerSpec* rows = nullptr;  // null: the layer has a state
  int group = 0;                             // with rows: the group whose slots they get,
  ReceivedRows* pages = nullptr;             // where they go,
  int64_t layer = 0;                         // and the number of the layer there
  DType dtype = DType::kF32;                 // of the state
  int64_t elements = 0;                      // of the state

  bool is_state() const { return rows == nullptr; }
  int64_t heads() const { return is_state() ? 1 : rows->num_kv_heads; }
};

// The layout of a state, equal iff the stored bytes mean the same, heads and pages aside, made of
// that of its first parts and that of the next. A state of one part has the layout of the part.
inline uint64_t JoinLayouts(uint64_t first, uint64_t next) {
  return first * 0x9E3779B97F4A7C15u ^ next;  // 2^64 / golden ratio: equal parts do not cancel
}

class PendingReceives {
 public:
  explicit PendingReceives(std::vector<TransferLayer> layers);
  ~PendingReceives();
  PendingReceives(const PendingReceives&) = delete;
  PendingReceives& operator=(const PendingReceives&) = delete;
  const std::vector<TransferLayer>& layers() const { return layers_; }

  // Memory for a reservation of `count` tokens, which Add makes one, and its epoch. May throw
  // std::bad_alloc.
  struct Receive;
  std::shared_ptr<Receive> Prepare(int64_t seq_id, int64_t first_position, int64_t count,
                                   size_t group_count);
  // Nothing is copied to it before Open. REQUIRES: `receive` was returned by Prepare, and no other
  // one was prepared in between.
  void Add(std::shared_ptr<Receive> receive) noexcept;
  // REQUIRES: it was added, and its slots are filled in.
  void Open(Receive& receive) noexcept;
  // Ends the sequence's reservation, if it has one.
  void EndOf(int64_t seq_id) noexcept;
  void Clear() noexcept;
  // A reservation that is about to end: as long as this lives, no copy to it begins.
  class Ending {
   public:
    Ending(PendingReceives& receives, std::shared_ptr<Receive> receive)
        : receives_(receives), receive_(std::move(receive)) {}
    Ending(Ending&& other) noexcept = default;
    Ending& operator=(Ending&&) = delete;
    ~Ending();
    Receive& receive() const { return *receive_; }
    // The reservation is over.
    void End() noexcept;

   private:
    PendingReceives& receives_;
    std::shared_ptr<Receive> receive_;
  };
  // The reservation, whose first n tokens must be complete. NotFound for an epoch that is over;
  // BadState, with the layer that lacks something, unless the first n rows of all layers with rows
  // are complete and all states are those after token n. n = 0: whatever has come.
  Result<Ending> Take(const char* call, uint64_t epoch, int64_t n);
  // Until no copy writes to a page of a reservation that is over: before free pages are taken.
  void AwaitLateCopies() const noexcept;

  struct Claim {
    int64_t seq_id = -1;
    int64_t count = 0;
  };
  Result<Claim> Find(const char* call, uint64_t epoch) const;
  int64_t count() const;       // reservations
  uint64_t any_epoch() const;  // of one of them; 0: there are none
  // Tokens that are reserved for the sequence; 0: it has no reservation.
  int64_t PendingOf(int64_t seq_id) const;
  // What a digest of the state has of the reservations.
  void AppendFacts(std::vector<int64_t>* facts) const;

  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part);
  Status Store(uint64_t epoch, int64_t layer, const ReceivePart& part, const ReceiveView& view,
               std::optional<uint32_t> digest);
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part);
  Status SetStagingLimit(int64_t bytes);
  StagingUse staging() const { return staging_->use(); }
  Status Fail(uint64_t epoch, const Status& why);
  Result<ReceiveProgress> Progress(uint64_t epoch) const;
  Status Wait(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const;

  struct Layer {
    TensorView state;           // [1, 1, elements] of a state, in `states`
    std::vector<uint8_t> head;  // [row][head] of rows: kAbsent, kStored or kCounts
    std::vector<uint8_t> row;   // [row] of rows, 1: all heads count
    int64_t rows = 0;           // see the invariants above
    int64_t leading = 0;        // rows before the first that is not complete
    int64_t stored = -1;        // of a state: the row whose state it is
  };
  struct Receive {
    uint64_t epoch = 0;
    int64_t seq_id = -1;
    int64_t first_position = 0;
    int64_t count = 0;
    std::vector<TokenSlots> slots;        // [group]
    std::unique_ptr<std::byte[]> states;  // memory of theirs
    std::vector<Layer> layers;
    Status failure;
    int64_t awaited = std::numeric_limits<int64_t>::max();  // the fewest rows ever waited for
    bool is_over = false;
    bool is_copying = false;  // a part, without the lock; opens_tile of `slots` is the copy's
    bool is_awaited = true;   // no copy begins
  };

 private:
  std::shared_ptr<Receive> FindLocked(uint64_t epoch) const;
  Result<std::shared_ptr<Receive>> RequireLocked(const char* call, uint64_t epoch) const;
  Result<std::shared_ptr<Receive>> FindPart(const char* call, uint64_t epoch, int64_t layer,
                                            const ReceivePart& part) const;
  Status RequireCompleteLocked(const char* call, const Receive& receive, int64_t n) const;
  // Until the reservation is not copied to.
  void AwaitCopy(std::unique_lock<std::mutex>& lock, Receive& receive) noexcept;
  // REQUIRES: the caller holds it.
  void EndLocked(Receive& receive) noexcept;
  const TransferLayer& LayerAt(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  static Layer& LayerOf(Receive& receive, int64_t layer) {
    return receive.layers[static_cast<size_t>(layer)];
  }
  // A copy: what it needs, its beginning, the copy itself, its end.
  ReceivedRows::OtherHeads OtherHeadsOf(int64_t layer, const ReceivePart& part) const;
  void BeginCopyLocked(Receive& receive, int64_t layer, const ReceivePart& part,
                       ReceivedRows::OtherHeads* others) noexcept;
  void OpenTilesLocked(Receive& receive, int64_t layer, const ReceivePart& part) noexcept;
  void Copy(Receive& receive, int64_t layer, const ReceivePart& part, const LayerKV& rows,
            ReceivedRows::OtherHeads& others) const noexcept;
  void EndCopyLocked(Receive& receive, int64_t layer, const ReceivePart& part) noexcept;
  Status CompleteRows(Receive& receive, int64_t layer, const ReceivePart& part);

  const std::vector<TransferLayer> layers_;
  const bool writes_freed_pages_;
  const std::shared_ptr<StagingMemory> staging_ = std::make_shared<StagingMemory>();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // for those that wait for rows
  mutable std::condition_variable copied_;   // a copy has ended, or may begin
  std::atomic<int64_t> late_ = 0;            // changes under the lock
  uint64_t next_epoch_ = 1;
  std::vector<std::shared_ptr<Receive>> receives_;
};

// Contiguous tensors of `count` tokens of a layer, one behind the other in `memory`, which holds
// LayerBytes of it.
int64_t LayerBytes(const AttentionLayerSpec& spec, int64_t count);
LayerKV LayerRowsIn(std::byte* memory, const AttentionLayerSpec& spec, int64_t count);

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_
