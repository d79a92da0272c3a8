// Tokens that a cache has reserved for a sender and not taken over yet: their slots, the staging
// memory in which they arrive, and which parts of it are verified.
//
// Bytes go to staging memory first and to pages only from there, row by row, when all heads of a
// row are verified. So a page is written under the lock alone and by its reservation's epoch alone,
// and is free for others as soon as the epoch is over; what a channel still writes then is staging
// memory, which it holds itself.
//
// A reservation starts in a page of its own, so nothing that a forward reads lies in a page that is
// written here. Parts may come in any order: every tile of the slots is opened when they are
// reserved.
//
// All calls from any thread; pages and slots are read and written under the lock.
#ifndef QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_
#define QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kv/plan/forward_plan.h"
#include "quire/kv_transfer.h"

namespace quire {

class PendingReceives {
 public:
  // Moves rows [first, first + rows.k.dim(0)) of a reservation to their pages; the slots'
  // opens_tile are 1 where all of a tile is among them.
  class Pages {
   public:
    virtual void StoreReceived(const TokenSlots& slots, int64_t layer, int64_t first,
                               const LayerKV& rows) noexcept = 0;

   protected:
    ~Pages() = default;
  };

  PendingReceives(std::span<const AttentionLayerSpec> layers, std::vector<int> layer_groups,
                  Pages* pages)
      : specs_(layers), layer_groups_(std::move(layer_groups)), pages_(pages) {}

  // Memory for a reservation of `count` tokens, which Add makes one. May throw std::bad_alloc.
  struct Receive;
  std::shared_ptr<Receive> Prepare(int64_t seq_id, int64_t count, size_t group_count);
  // REQUIRES: of Prepare, with its slots filled in, no other call in between.
  uint64_t Add(std::shared_ptr<Receive> receive) noexcept;
  // Its epoch is over. REQUIRES: there is one.
  void End(uint64_t epoch) noexcept;
  void Clear() noexcept;

  struct Claim {
    int64_t seq_id = -1;
    int64_t count = 0;
  };
  Result<Claim> Find(const char* call, uint64_t epoch) const;
  // BadState, with the layer that lacks one, unless the first n rows are complete.
  Status RequireComplete(const char* call, uint64_t epoch, int64_t n) const;
  int64_t count() const;
  // Of all of them.
  int64_t token_count() const;

  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part);
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part, uint32_t digest);
  Status Fail(uint64_t epoch, const Status& why);
  Result<ReceiveProgress> Progress(uint64_t epoch) const;
  Status Wait(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const;

  struct Layer {
    LayerKV staging;            // [count, heads, dim]
    std::vector<uint8_t> head;  // [row][head], 1: verified
    std::vector<uint8_t> row;   // [row], 1: all heads are
    int64_t rows = 0;           // that are
  };
  struct Receive {
    uint64_t epoch = 0;
    int64_t seq_id = -1;
    int64_t count = 0;
    std::vector<TokenSlots> slots;  // [group]
    std::shared_ptr<std::byte[]> memory;
    std::vector<Layer> layers;
    Status failure;
  };

 private:
  std::shared_ptr<Receive> FindLocked(uint64_t epoch) const;
  Result<std::shared_ptr<Receive>> RequireLocked(const char* call, uint64_t epoch) const;
  Result<std::shared_ptr<Receive>> FindPart(const char* call, uint64_t epoch, int64_t layer,
                                            const ReceivePart& part) const;
  void StoreRows(Receive& receive, int64_t layer, int64_t first, int64_t count) noexcept;

  const std::span<const AttentionLayerSpec> specs_;
  const std::vector<int> layer_groups_;
  Pages* const pages_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t next_epoch_ = 1;
  std::vector<std::shared_ptr<Receive>> receives_;
};

// FailReceive, where a reservation notes it: the first failure stays. BadArgument for an ok status.
Status NoteFailure(uint64_t epoch, const Status& why, Status* failure);

// Rows [first, first + count) of contiguous tensors [n, heads, dim].
LayerKV RowsOf(const LayerKV& rows, int64_t first, int64_t count);

// Contiguous tensors of `count` tokens of a layer, one behind the other in `memory`, which holds
// LayerBytes of it.
int64_t LayerBytes(const AttentionLayerSpec& spec, int64_t count);
LayerKV LayerRowsIn(std::byte* memory, const AttentionLayerSpec& spec, int64_t count);

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_PENDING_RECEIVES_H_
