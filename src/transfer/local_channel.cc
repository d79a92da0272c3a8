// The channel between caches of one process. What OnLayerAppended writes goes to the receiver's
// pages by way of its staging memory, and counts for nothing until OnForwardEnded says so: an
// aborted forward leaves nothing behind that would have to be taken back.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/guard.h"
#include "quire/transfer.h"
#include "transfer/part_runs.h"

namespace quire {
namespace {

class LocalChannelImpl final : public LocalChannel {
 public:
  Status Connect(int64_t peer, KVTransfer* receiver) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      if (receiver == nullptr || peer < 0) {
        return Status(StatusCode::kBadArgument,
                      "Connect: peer " + std::to_string(peer) +
                          (receiver == nullptr ? " has no receiver" : " is negative"));
      }
      if (!peers_.try_emplace(peer, Peer{receiver, {}}).second) {
        return Status(StatusCode::kBadArgument, "Connect: peer " + std::to_string(peer) +
                                                    " is connected already; call Disconnect first");
      }
      return Status();
    });
  }

  Status Disconnect(int64_t peer) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      if (peers_.erase(peer) > 0) return Status();
      return Status(StatusCode::kNotFound,
                    "Disconnect: peer " + std::to_string(peer) + " is not connected");
    });
  }

  Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      for (const SendRange& range : ranges) {
        QUIRE_ASSIGN_OR_RETURN(Peer * peer, Find(range.peer));
        // As many rows at a time as the receiver has room for.
        const int64_t row_bytes = std::max<int64_t>(1, RowBytes(range.local, range.head_count));
        const int64_t rows_max = std::max<int64_t>(1, peer->receiver->staging().limit / row_bytes);
        for (int64_t first = 0, count = 0; first < range.count; first += count) {
          count = RowsOfPart(range.first_row + first, range.count - first, rows_max);
          QUIRE_RETURN_IF_ERROR(Give(*peer, layer, range, first, count));
        }
      }
      return Status();
    });
  }

  Status OnForwardEnded(std::span<const SendRecord> records) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      for (const SendRecord& record : records) {
        QUIRE_ASSIGN_OR_RETURN(Peer * peer, Find(record.peer));
        Status status;
        for (const Given& given : peer->given) {
          if (!IsOf(given, record) || !status.ok()) continue;
          status = peer->receiver->Complete(given.epoch, given.layer, given.part);
        }
        Forget(*peer, record);
        QUIRE_RETURN_IF_ERROR(status);
      }
      return Status();
    });
  }

  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      for (const SendRecord& record : records) {
        const auto peer = peers_.find(record.peer);
        if (peer != peers_.end()) Forget(peer->second, record);
      }
      return Status();
    });
  }

  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      Status status;
      for (const SendRecord& record : records) {
        const Result<Peer*> peer = Find(record.peer);
        const Status told =
            peer.ok() ? (*peer)->receiver->FailReceive(record.epoch, why) : peer.status();
        if (status.ok()) status = told;
      }
      return status;
    });
  }

 private:
  // A part that is stored and not completed yet.
  struct Given {
    uint64_t epoch;
    int64_t layer;
    ReceivePart part;
  };
  struct Peer {
    KVTransfer* receiver;
    std::vector<Given> given;
  };

  // Rows [first, first + count) of the range.
  static Status Give(Peer& peer, int64_t layer, const SendRange& range, int64_t first,
                     int64_t count) {
    const ReceivePart part{.first_row = range.first_row + first,
                           .count = count,
                           .first_head = range.remote_head,
                           .head_count = range.head_count};
    peer.given.reserve(peer.given.size() + 1);
    QUIRE_ASSIGN_OR_RETURN(const ReceiveView view, peer.receiver->View(range.epoch, layer, part));
    QUIRE_DCHECK(view.rows.k.dim(0) == count) << "the view is of other rows";
    const LayerKV local = RowsOf(range.local, first, count);
    CopyHeads(local, range.local_head, view.rows, 0, range.head_count);
    const uint32_t digest = DigestOfHeads(local, range.local_head, range.head_count);
    QUIRE_RETURN_IF_ERROR(peer.receiver->Store(range.epoch, layer, part, view, digest));
    peer.given.push_back({.epoch = range.epoch, .layer = layer, .part = part});
    return Status();
  }
  Result<Peer*> Find(int64_t peer) {
    const auto found = peers_.find(peer);
    if (found != peers_.end()) return &found->second;
    return Status(StatusCode::kUnavailable,
                  "LocalChannel: peer " + std::to_string(peer) + " is not connected");
  }
  static bool IsOf(const Given& given, const SendRecord& record) {
    return given.epoch == record.epoch && given.part.first_row >= record.first_row &&
           given.part.first_row < record.first_row + record.count;
  }
  static void Forget(Peer& peer, const SendRecord& record) {
    std::erase_if(peer.given, [&](const Given& given) { return IsOf(given, record); });
  }

  std::mutex mutex_;
  std::map<int64_t, Peer> peers_;
};

}  // namespace

std::shared_ptr<LocalChannel> CreateLocalChannel() { return std::make_shared<LocalChannelImpl>(); }

}  // namespace quire
