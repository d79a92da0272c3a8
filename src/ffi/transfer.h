// quire.LocalChannel, quire.TransferPeer and the maps of transfers as values of tvm-ffi.
#ifndef QUIRE_FFI_TRANSFER_H_
#define QUIRE_FFI_TRANSFER_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/kv_state.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "quire/kv_export.h"
#include "quire/transfer.h"
#include "quire/transfer_peer.h"

namespace quire::ffi {

OptionMap ReceiveMapFields(const ReceiveMap& map);
ReceiveMap ReadReceiveMap(const OptionMap& fields);
OptionMap ReceiveProgressFields(const ReceiveProgress& progress);
OptionMap SendProgressFields(const SendProgress& progress);

// A time in nanoseconds.
void ReadTime(OptionsReader* reader, const char* name, std::chrono::nanoseconds* out);
void ReadTls(OptionsReader* reader, TransferPeerOptions* options);

// A peer's place in a channel; gives it back when it goes.
class ChannelPlace {
 public:
  // Throws as LocalChannel::Connect returns.
  ChannelPlace(std::shared_ptr<LocalChannel> channel, int64_t peer, KVTransfer* receiver);
  ~ChannelPlace();
  ChannelPlace(const ChannelPlace&) = delete;
  ChannelPlace& operator=(const ChannelPlace&) = delete;

  bool Is(const std::shared_ptr<LocalChannel>& channel, int64_t peer) const {
    return channel_ == channel && peer_ == peer;
  }

 private:
  std::shared_ptr<LocalChannel> channel_;
  int64_t peer_;
};

// Keeps a connection's receiver set; when it goes, all transfers to here end.
class ReceiverPlace {
 public:
  // Throws as TransferPeer::SetReceiver returns.
  ReceiverPlace(std::shared_ptr<TransferPeer> peer, KVTransfer* receiver);
  ~ReceiverPlace();
  ReceiverPlace(const ReceiverPlace&) = delete;
  ReceiverPlace& operator=(const ReceiverPlace&) = delete;

  bool IsOver() const { return !peer_->status().ok(); }

 private:
  std::shared_ptr<TransferPeer> peer_;
};

// What sends: all that `send_through` takes.
class LayerSinkObj : public tvm::ffi::Object {
 public:
  virtual ~LayerSinkObj() = default;
  virtual std::shared_ptr<LayerSink> sink() const = 0;

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO("quire.LayerSink", LayerSinkObj, tvm::ffi::Object);
};

class LocalChannelObj : public LayerSinkObj {
 public:
  LocalChannelObj() : channel_(CreateLocalChannel()) {}
  const std::shared_ptr<LocalChannel>& channel() const { return channel_; }
  std::shared_ptr<LayerSink> sink() const override { return channel_; }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.LocalChannel", LocalChannelObj, LayerSinkObj);

 private:
  std::shared_ptr<LocalChannel> channel_;
};

// A connection to another process, from a listener or made here.
class TransferPeerObj : public LayerSinkObj {
 public:
  TransferPeerObj(const tvm::ffi::String& endpoint, const OptionMap& options);
  explicit TransferPeerObj(std::shared_ptr<TransferPeer> peer) : peer_(std::move(peer)) {}
  const std::shared_ptr<TransferPeer>& peer() const { return peer_; }
  std::shared_ptr<LayerSink> sink() const override { return peer_; }

  tvm::ffi::String Endpoint() { return tvm::ffi::String(peer_->endpoint()); }
  // "" while it is open.
  tvm::ffi::String Failure();
  tvm::ffi::Map<tvm::ffi::String, int64_t> Stats();
  void Close() { peer_->Close(); }
  void Request(const OptionMap& job, const OptionMap& map);
  void Cancel(int64_t epoch);
  // Nothing until the time is over.
  tvm::ffi::Optional<OptionMap> NextRequest(int64_t timeout_ns);
  void Refuse(int64_t epoch, const tvm::ffi::String& why);

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.TransferPeer", TransferPeerObj, LayerSinkObj);

 private:
  FaultLatch latch_;
  std::shared_ptr<TransferPeer> peer_;
};

// A state that takes part in transfers; "transfer()" of `State` has the calls.
template <typename State>
class TransferObject : public StateObject<State> {
 public:
  // From any thread, beside each other too: tvm-ffi has let go of Python's lock. Places are taken
  // and given back outside of the mutex, since that waits for calls of the channel's or the
  // connection's threads.
  void ConnectChannel(const LocalChannelObj* channel, int64_t peer) {
    KVTransfer* const receiver = this->latch_.Run([&] { return this->state_->transfer(); });
    std::list<ChannelPlace> place;
    place.emplace_back(channel->channel(), peer, receiver);
    const std::lock_guard<std::mutex> lock(mutex_);
    places_.splice(places_.end(), place);
  }
  void DisconnectChannel(const LocalChannelObj* channel, int64_t peer) {
    this->latch_.Run([&]() -> Status {
      std::list<ChannelPlace> left;
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto place = std::ranges::find_if(
          places_, [&](const ChannelPlace& p) { return p.Is(channel->channel(), peer); });
      if (place == places_.end()) {
        return Status(StatusCode::kNotFound, "disconnect_channel: this state is not peer " +
                                                 std::to_string(peer) + " of the channel");
      }
      left.splice(left.end(), places_, place);
      return Status();
    });
  }
  void SendThrough(const LayerSinkObj* channel) {
    this->latch_.Run([&] { return this->state_->transfer()->SetLayerSink(channel->sink()); });
  }
  void ReceiveFrom(const TransferPeerObj* peer) {
    DropOver();
    KVTransfer* const receiver = this->latch_.Run([&] { return this->state_->transfer(); });
    std::list<ReceiverPlace> place;
    place.emplace_back(peer->peer(), receiver);
    const std::lock_guard<std::mutex> lock(mutex_);
    receivers_.splice(receivers_.end(), place);
  }
  // What both sides of a connection must hold, as canonical JSON.
  tvm::ffi::String TransferPassport(const OptionMap& identity) {
    return this->latch_.Run([&]() -> Result<tvm::ffi::String> {
      QUIRE_ASSIGN_OR_RETURN(const Passport passport,
                             CachePassport(*this->state_, ReadIdentity(identity), false));
      QUIRE_ASSIGN_OR_RETURN(const std::string json, passport.ToJson());
      return tvm::ffi::String(json);
    });
  }
  void SendNowhere() {
    this->latch_.Run([&] { return this->state_->transfer()->SetLayerSink(nullptr); });
  }
  OptionMap DisaggPrepareRecv(int64_t seq_id, int64_t count) {
    return ReceiveMapFields(this->Control("DisaggPrepareRecv", [&] {
      return this->state_->transfer()->DisaggPrepareRecv(seq_id, count);
    }));
  }
  void DisaggCommitRecv(int64_t epoch, int64_t n) {
    this->Control("DisaggCommitRecv", [&] {
      return this->state_->transfer()->DisaggCommitRecv(static_cast<uint64_t>(epoch), n);
    });
  }
  void DisaggCancelRecv(int64_t epoch) {
    this->Control("DisaggCancelRecv", [&] {
      return this->state_->transfer()->DisaggCancelRecv(static_cast<uint64_t>(epoch));
    });
  }
  OptionMap ReceiveProgress(int64_t epoch) {
    return ReceiveProgressFields(this->latch_.Run([&] {
      return this->state_->transfer()->GetReceiveProgress(static_cast<uint64_t>(epoch));
    }));
  }
  void SetStagingLimit(int64_t bytes) {
    this->latch_.Run([&] { return this->state_->transfer()->SetStagingLimit(bytes); });
  }
  tvm::ffi::Map<tvm::ffi::String, int64_t> Staging() {
    const StagingUse use = this->state_->transfer()->staging();
    return {{"limit", use.limit}, {"held", use.held}, {"largest", use.largest}};
  }
  void WaitReceived(int64_t epoch, int64_t n, int64_t timeout_ns) {
    const auto clock = MachineTime();
    const int64_t until = clock->SteadyNs() + timeout_ns;
    this->latch_.Run([&] {
      return this->state_->transfer()->WaitReceived(static_cast<uint64_t>(epoch), n, *clock, until);
    });
  }
  void DisaggMarkSend(int64_t seq_id, int64_t begin, const tvm::ffi::Array<OptionMap>& maps,
                      int64_t peer, int64_t rank, int64_t first_row) {
    std::vector<ReceiveMap> read;
    for (const OptionMap& map : maps) read.push_back(ReadReceiveMap(map));
    this->latch_.Run([&] {
      return this->state_->transfer()->DisaggMarkSend(seq_id, begin, read, peer, rank, first_row);
    });
  }
  void DisaggUnmarkSend(int64_t seq_id) {
    this->latch_.Run([&] { return this->state_->transfer()->DisaggUnmarkSend(seq_id); });
  }
  int64_t DisaggDetachSend(int64_t seq_id) {
    return this->latch_.Run([&] { return this->state_->transfer()->DisaggDetachSend(seq_id); });
  }
  void DisaggFlushSend(int64_t seq_id) {
    this->latch_.Run([&] { return this->state_->transfer()->DisaggFlushSend(seq_id); });
  }
  OptionMap SendProgress(int64_t seq_id) {
    return SendProgressFields(
        this->latch_.Run([&] { return this->state_->transfer()->GetSendProgress(seq_id); }));
  }

 protected:
  using StateObject<State>::StateObject;

 private:
  // Gives back the places at connections that are over.
  void DropOver() {
    std::list<ReceiverPlace> over;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto place = receivers_.begin(); place != receivers_.end();) {
      const auto next = std::next(place);
      if (place->IsOver()) over.splice(over.end(), receivers_, place);
      place = next;
    }
  }

  std::mutex mutex_;
  // Guarded by mutex_; given back before the state goes.
  std::list<ChannelPlace> places_;
  std::list<ReceiverPlace> receivers_;
};

// The methods of a TransferObject in Python.
template <typename Object>
void DefineTransfer(tvm::ffi::reflection::ObjectDef<Object>& object) {
  object.def("connect_channel", &Object::ConnectChannel)
      .def("disconnect_channel", &Object::DisconnectChannel)
      .def("receive_from", &Object::ReceiveFrom)
      .def("transfer_passport", &Object::TransferPassport)
      .def("send_through", &Object::SendThrough)
      .def("send_nowhere", &Object::SendNowhere)
      .def("disagg_prepare_recv", &Object::DisaggPrepareRecv)
      .def("disagg_commit_recv", &Object::DisaggCommitRecv)
      .def("disagg_cancel_recv", &Object::DisaggCancelRecv)
      .def("receive_progress", &Object::ReceiveProgress)
      .def("staging", &Object::Staging)
      .def("set_staging_limit", &Object::SetStagingLimit)
      .def("wait_received", &Object::WaitReceived)
      .def("disagg_mark_send", &Object::DisaggMarkSend)
      .def("disagg_unmark_send", &Object::DisaggUnmarkSend)
      .def("disagg_detach_send", &Object::DisaggDetachSend)
      .def("disagg_flush_send", &Object::DisaggFlushSend)
      .def("send_progress", &Object::SendProgress);
}

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TRANSFER_H_
