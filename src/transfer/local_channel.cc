// The channel between caches of one process. What OnLayerAppended writes goes to the receiver's
// pages by way of its staging memory, and counts for nothing until OnForwardEnded says so: an
// aborted forward leaves nothing behind that would have to be taken back.
//
// Several senders may give at a time, to one receiver too: the lock is let go while a receiver is
// called. A peer that is disconnected stays until the calls of its receiver are over.
#include <algorithm>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

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
      if (receiver == nullptr || peer < 0) {
        return Status(StatusCode::kBadArgument,
                      "Connect: peer " + std::to_string(peer) +
                          (receiver == nullptr ? " has no receiver" : " is negative"));
      }
      const auto made = std::make_shared<Peer>(receiver);
      const std::lock_guard lock(mutex_);
      if (peers_.try_emplace(peer, made).second) return Status();
      return Status(StatusCode::kBadArgument, "Connect: peer " + std::to_string(peer) +
                                                  " is connected already; call Disconnect first");
    });
  }

  Status Disconnect(int64_t peer) override {
    return GuardEntry([&]() -> Status {
      std::unique_lock lock(mutex_);
      const auto found = peers_.find(peer);
      if (found == peers_.end()) {
        return Status(StatusCode::kNotFound,
                      "Disconnect: peer " + std::to_string(peer) + " is not connected");
      }
      const std::shared_ptr<Peer> leaving = std::move(found->second);
      peers_.erase(found);
      // The receiver may be gone when this returns.
      called_.wait(lock, [&] { return leaving->calls == 0; });
      return Status();
    });
  }

  Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) override {
    return GuardEntry([&]() -> Status {
      for (const SendRange& range : ranges) {
        QUIRE_RETURN_IF_ERROR(
            WithPeer(range.peer, [&](Peer& peer) { return GiveAll(peer, layer, range); }));
      }
      return Status();
    });
  }

  Status OnForwardEnded(std::span<const SendRecord> records) override {
    return GuardEntry([&]() -> Status {
      for (const SendRecord& record : records) {
        const Status status = WithPeer(record.peer, [&](Peer& peer) -> Status {
          for (const Given& given : Take(peer, record))
            QUIRE_RETURN_IF_ERROR(peer.receiver->Complete(given.epoch, given.layer, given.part));
          return Status();
        });
        QUIRE_RETURN_IF_ERROR(status);
      }
      return Status();
    });
  }

  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return GuardEntry([&]() -> Status {
      for (const SendRecord& record : records) {
        const std::lock_guard lock(mutex_);
        const auto peer = peers_.find(record.peer);
        if (peer != peers_.end()) TakeLocked(*peer->second, record);
      }
      return Status();
    });
  }

  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return GuardEntry([&]() -> Status {
      Status status;
      for (const SendRecord& record : records) {
        const Status told = WithPeer(
            record.peer, [&](Peer& peer) { return peer.receiver->FailReceive(record.epoch, why); });
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
    explicit Peer(KVTransfer* to) : receiver(to) {}

    KVTransfer* const receiver;
    std::list<Given> given{};
    int64_t calls = 0;  // of the receiver, which are not over
  };

  // Without the lock.
  template <typename F>
  Status WithPeer(int64_t number, F&& f) {
    std::shared_ptr<Peer> peer;
    {
      const std::lock_guard lock(mutex_);
      const auto found = peers_.find(number);
      if (found == peers_.end()) {
        return Status(StatusCode::kUnavailable,
                      "LocalChannel: peer " + std::to_string(number) + " is not connected");
      }
      peer = found->second;
      ++peer->calls;
    }
    const Status status = GuardEntry([&] { return f(*peer); });
    const std::lock_guard lock(mutex_);
    --peer->calls;
    called_.notify_all();
    return status;
  }

  Status GiveAll(Peer& peer, int64_t layer, const SendRange& range) {
    // As many rows at a time as the receiver has room for.
    const int64_t row_bytes = std::max<int64_t>(1, RowBytes(range.local, range.head_count));
    const int64_t rows_max = std::max<int64_t>(1, peer.receiver->staging().limit / row_bytes);
    for (int64_t first = 0, count = 0; first < range.count; first += count) {
      count = RowsOfPart(range.first_row + first, range.count - first, rows_max);
      QUIRE_RETURN_IF_ERROR(Give(peer, layer, range, first, count));
    }
    return Status();
  }

  // Rows [first, first + count) of the range.
  Status Give(Peer& peer, int64_t layer, const SendRange& range, int64_t first, int64_t count) {
    const ReceivePart part{.first_row = range.first_row + first,
                           .count = count,
                           .first_head = range.remote_head,
                           .head_count = range.head_count};
    // Its memory comes first: what is stored is known.
    std::list<Given> given;
    given.push_back({.epoch = range.epoch, .layer = layer, .part = part});
    QUIRE_ASSIGN_OR_RETURN(const ReceiveView view, peer.receiver->View(range.epoch, layer, part));
    QUIRE_DCHECK(view.rows.k.dim(0) == count) << "the view is of other rows";
    const LayerKV local = RowsOf(range.local, first, count);
    CopyHeads(local, range.local_head, view.rows, 0, range.head_count);
    const uint32_t digest = DigestOfHeads(local, range.local_head, range.head_count);
    QUIRE_RETURN_IF_ERROR(peer.receiver->Store(range.epoch, layer, part, view, digest));
    const std::lock_guard lock(mutex_);
    peer.given.splice(peer.given.end(), given);
    return Status();
  }

  static bool IsOf(const Given& given, const SendRecord& record) {
    return given.epoch == record.epoch && given.part.first_row >= record.first_row &&
           given.part.first_row < record.first_row + record.count;
  }
  // What the record is about: it is given no more.
  std::list<Given> Take(Peer& peer, const SendRecord& record) {
    const std::lock_guard lock(mutex_);
    return TakeLocked(peer, record);
  }
  static std::list<Given> TakeLocked(Peer& peer, const SendRecord& record) {
    std::list<Given> taken;
    for (auto place = peer.given.begin(); place != peer.given.end();) {
      const auto here = place++;
      if (IsOf(*here, record)) taken.splice(taken.end(), peer.given, here);
    }
    return taken;
  }

  std::mutex mutex_;  // of all that follows, and of what peers have been given
  std::condition_variable called_;
  std::map<int64_t, std::shared_ptr<Peer>> peers_;
};

}  // namespace

std::shared_ptr<LocalChannel> CreateLocalChannel() { return std::make_shared<LocalChannelImpl>(); }

}  // namespace quire
