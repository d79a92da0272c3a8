#include "ffi/transfer.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>

#include <string>
#include <utility>

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

tf::Shape ShapeOf(const std::vector<int64_t>& numbers) {
  return tf::Shape(numbers.begin(), numbers.end());
}

std::vector<int64_t> NumbersOf(OptionsReader& reader, const char* name) {
  const auto shape = reader.Get<tf::Shape>(name);
  if (!shape) return {};
  return {shape->begin(), shape->end()};
}

// "" for ok.
tf::String TextOf(const Status& status) {
  return status.ok() ? tf::String("") : tf::String(status.ToString());
}

}  // namespace

// Epoch and layout are the signed numbers of the same bits: tvm-ffi has no unsigned ones.
OptionMap ReceiveMapFields(const ReceiveMap& map) {
  return {{"epoch", static_cast<int64_t>(map.epoch)}, {"slots", ShapeOf(map.slots)},
          {"first_position", map.first_position},     {"count", map.count},
          {"kv_heads", ShapeOf(map.kv_heads)},        {"layout", static_cast<int64_t>(map.layout)}};
}

ReceiveMap ReadReceiveMap(const OptionMap& fields) {
  ReceiveMap map;
  OptionsReader reader("ReceiveMap", fields);
  reader.Read("epoch", &map.epoch);
  map.slots = NumbersOf(reader, "slots");
  reader.Read("first_position", &map.first_position);
  reader.Read("count", &map.count);
  map.kv_heads = NumbersOf(reader, "kv_heads");
  reader.Read("layout", &map.layout);
  reader.Finish();
  return map;
}

OptionMap ReceiveProgressFields(const ReceiveProgress& progress) {
  return {{"count", progress.count},
          {"layer_rows", ShapeOf(progress.layer_rows)},
          {"complete", progress.complete},
          {"failure", TextOf(progress.failure)}};
}

OptionMap SendProgressFields(const SendProgress& progress) {
  return {{"begin", progress.begin},
          {"count", progress.count},
          {"sent", progress.sent},
          {"active", progress.active},
          {"failure", TextOf(progress.failure)}};
}

ChannelPlace::ChannelPlace(std::shared_ptr<LocalChannel> channel, int64_t peer,
                           KVTransfer* receiver)
    : channel_(std::move(channel)), peer_(peer) {
  ThrowIfError(channel_->Connect(peer, receiver));
}

ChannelPlace::~ChannelPlace() {
  const Status status = channel_->Disconnect(peer_);
  static_cast<void>(status);  // the place is this object's, so it is there
}

ReceiverPlace::ReceiverPlace(std::shared_ptr<TransferPeer> peer, KVTransfer* receiver)
    : peer_(std::move(peer)) {
  ThrowIfError(peer_->SetReceiver(receiver));
}

ReceiverPlace::~ReceiverPlace() {
  const Status status = peer_->SetReceiver(nullptr);
  static_cast<void>(status);  // the receiver has left; without memory the connection is over
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<LayerSinkObj>();
  tf::reflection::ObjectDef<LocalChannelObj>().def(tf::reflection::init<>());
}

}  // namespace quire::ffi
