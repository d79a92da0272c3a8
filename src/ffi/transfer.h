// quire.LocalChannel and the maps of transfers as values of tvm-ffi.
#ifndef QUIRE_FFI_TRANSFER_H_
#define QUIRE_FFI_TRANSFER_H_

#include <tvm/ffi/object.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/options.h"
#include "quire/transfer.h"

namespace quire::ffi {

OptionMap ReceiveMapFields(const ReceiveMap& map);
ReceiveMap ReadReceiveMap(const OptionMap& fields);
OptionMap ReceiveProgressFields(const ReceiveProgress& progress);
OptionMap SendProgressFields(const SendProgress& progress);

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

class LocalChannelObj : public tvm::ffi::Object {
 public:
  LocalChannelObj() : channel_(CreateLocalChannel()) {}
  const std::shared_ptr<LocalChannel>& channel() const { return channel_; }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.LocalChannel", LocalChannelObj, tvm::ffi::Object);

 private:
  std::shared_ptr<LocalChannel> channel_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TRANSFER_H_
