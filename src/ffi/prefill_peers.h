// Prompts that other processes compute for an engine, and it for them, as values of tvm-ffi.
#ifndef QUIRE_FFI_PREFILL_PEERS_H_
#define QUIRE_FFI_PREFILL_PEERS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/options.h"
#include "quire/engine.h"
#include "quire/status.h"
#include "quire/transfer_peer.h"

namespace quire::ffi {

// Why connections were refused, on the way from the listener's thread to Python's. All calls from
// any thread.
class RefusalQueue {
 public:
  // Never waits. The oldest one that nobody has taken makes room for a new one.
  void Add(const Status& why) noexcept;
  // The oldest one; waits for it, or for the end: then Closed.
  Result<std::string> Take();
  void Close() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> texts_;
  bool is_closed_ = false;
};

// quire.RefusalQueue. It holds nothing of the engine, so that a thread that waits in it keeps no
// engine alive.
class RefusalQueueObj : public tvm::ffi::Object {
 public:
  const std::shared_ptr<RefusalQueue>& queue() const { return queue_; }
  tvm::ffi::String Take();
  void Close() { queue_->Close(); }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.RefusalQueue", RefusalQueueObj, tvm::ffi::Object);

 private:
  const std::shared_ptr<RefusalQueue> queue_ = std::make_shared<RefusalQueue>();
};

class RefusalQueueRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(RefusalQueueRef, tvm::ffi::ObjectRef, RefusalQueueObj);
};

// addresses, when, on_loss, timeout_ms, secret, heartbeat_ns, dead_after_ns.
PrefillPeerOptions ReadPrefillPeerOptions(const OptionMap& fields);
// listen, peers_max, secret, heartbeat_ns, dead_after_ns. Refusals go into the queue.
TransferListenerOptions ReadPrefillServeOptions(const OptionMap& fields,
                                                const std::shared_ptr<RefusalQueue>& refusals);
tvm::ffi::Array<OptionMap> PrefillPeerFields(const std::vector<PrefillPeerInfo>& peers);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_PREFILL_PEERS_H_
