// Ranges and records, each to the sink of its peer.
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/guard.h"
#include "quire/transfer_peer.h"

namespace quire {
namespace {

class RemoteChannelImpl final : public RemoteChannel {
 public:
  Status Connect(int64_t peer, std::shared_ptr<LayerSink> connection) override {
    return GuardEntry([&]() -> Status {
      const std::lock_guard lock(mutex_);
      if (connection == nullptr || peer < 0) {
        return Status(StatusCode::kBadArgument,
                      "Connect: peer " + std::to_string(peer) +
                          (connection == nullptr ? " has no connection" : " is negative"));
      }
      if (peers_.try_emplace(peer, std::move(connection)).second) return Status();
      return Status(StatusCode::kBadArgument, "Connect: peer " + std::to_string(peer) +
                                                  " is connected already; call Disconnect first");
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
    return ForEach(ranges, [&](LayerSink& sink, std::span<const SendRange> range) {
      return sink.OnLayerAppended(layer, range);
    });
  }
  Status OnForwardEnded(std::span<const SendRecord> records) override {
    return ForEach(records, [](LayerSink& sink, std::span<const SendRecord> record) {
      return sink.OnForwardEnded(record);
    });
  }
  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return ForEach(records, [](LayerSink& sink, std::span<const SendRecord> record) {
      return sink.OnForwardAborted(record);
    });
  }
  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return ForEach(records, [&](LayerSink& sink, std::span<const SendRecord> record) {
      return sink.OnSendStopped(record, why);
    });
  }

 private:
  // The lock is not held in the calls: a connection may wait in them.
  template <typename T, typename F>
  Status ForEach(std::span<const T> items, F&& f) {
    return GuardEntry([&]() -> Status {
      Status first;
      for (size_t i = 0; i < items.size(); ++i) {
        const std::shared_ptr<LayerSink> sink = Find(items[i].peer);
        const Status status = sink != nullptr
                                  ? f(*sink, items.subspan(i, 1))
                                  : Status(StatusCode::kUnavailable,
                                           "RemoteChannel: peer " + std::to_string(items[i].peer) +
                                               " is not connected");
        if (first.ok()) first = status;
      }
      return first;
    });
  }
  std::shared_ptr<LayerSink> Find(int64_t peer) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer);
    return found == peers_.end() ? nullptr : found->second;
  }

  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<LayerSink>> peers_;
};

}  // namespace

std::shared_ptr<RemoteChannel> CreateRemoteChannel() {
  return std::make_shared<RemoteChannelImpl>();
}

}  // namespace quire
