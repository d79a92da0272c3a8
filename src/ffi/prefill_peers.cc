#include "ffi/prefill_peers.h"

#include <tvm/ffi/reflection/registry.h>

#include <array>
#include <new>
#include <string_view>
#include <utility>

#include "ffi/errors.h"
#include "ffi/transfer.h"

namespace quire::ffi {

namespace tf = tvm::ffi;

namespace {

// In the order of the enumerations in quire/engine.h.
constexpr std::array<std::string_view, 3> kRemotePrefills = {"auto", "always", "never"};
constexpr std::array<std::string_view, 2> kPeerLosses = {"recompute", "fail"};
static_assert(kRemotePrefills.size() == static_cast<size_t>(RemotePrefill::kOff) + 1);
static_assert(kPeerLosses.size() == static_cast<size_t>(OnPeerLoss::kFail) + 1);

// Refusals that Python has not taken: some screens of lines.
constexpr size_t kRefusalsMax = 256;

void ReadConnection(OptionsReader* reader, TransferPeerOptions* options) {
  if (const auto secret = reader->Get<tf::Bytes>("secret"))
    options->secret.assign(secret->data(), secret->size());
  ReadTls(reader, options);
  ReadTime(reader, "heartbeat_ns", &options->heartbeat);
  ReadTime(reader, "dead_after_ns", &options->dead_after);
}

}  // namespace

void RefusalQueue::Add(const Status& why) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    texts_.push_back(why.ToString());
  } catch (const std::bad_alloc&) {  // TransferListener::refused counts it all the same
    return;
  }
  if (texts_.size() > kRefusalsMax) texts_.pop_front();
  changed_.notify_one();
}

Result<std::string> RefusalQueue::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return is_closed_ || !texts_.empty(); });
  if (texts_.empty()) return Status(StatusCode::kClosed, "the engine was closed");
  std::string text = std::move(texts_.front());
  texts_.pop_front();
  return text;
}

void RefusalQueue::Close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

tf::String RefusalQueueObj::Take() {
  return tf::String(CallChecked([&] { return ValueOrThrow(queue_->Take()); }));
}

PrefillPeerOptions ReadPrefillPeerOptions(const OptionMap& fields) {
  PrefillPeerOptions options;
  OptionsReader reader("Engine", fields);
  for (const tf::String& address :
       reader.Get<tf::Array<tf::String>>("addresses").value_or(tf::Array<tf::String>()))
    options.addresses.push_back(std::string(address));
  reader.ReadEnum("when", kRemotePrefills, &options.when);
  reader.ReadEnum("on_loss", kPeerLosses, &options.on_loss);
  reader.Read("timeout_ms", &options.timeout_ms);
  reader.Read("streams", &options.peer.streams);
  ReadConnection(&reader, &options.peer);
  reader.Finish();
  return options;
}

TransferListenerOptions ReadPrefillServeOptions(const OptionMap& fields,
                                                const std::shared_ptr<RefusalQueue>& refusals) {
  TransferListenerOptions options;
  OptionsReader reader("Engine.serve_prefill", fields);
  reader.Read("listen", &options.endpoint);
  reader.Read("peers_max", &options.peers_max);
  ReadConnection(&reader, &options.peer);
  reader.Finish();
  options.on_refused = [refusals](const Status& why) { refusals->Add(why); };
  return options;
}

tf::Array<OptionMap> PrefillPeerFields(const std::vector<PrefillPeerInfo>& peers) {
  tf::Array<OptionMap> found;
  for (const PrefillPeerInfo& peer : peers) {
    found.push_back({{"address", tf::String(peer.address)},
                     {"connected", peer.connected},
                     {"error", tf::String(peer.error)},
                     {"queued_tokens", peer.queued_tokens},
                     {"seconds_per_token", peer.seconds_per_token},
                     {"bytes_per_second", peer.bytes_per_second},
                     {"prompts", peer.prompts},
                     {"tokens", peer.tokens},
                     {"bytes", peer.bytes},
                     {"losses", peer.losses},
                     {"streams", peer.streams}});
  }
  return found;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<RefusalQueueObj>()
      .def(tf::reflection::init<>())
      .def("take", &RefusalQueueObj::Take)
      .def("close", &RefusalQueueObj::Close);
}

}  // namespace quire::ffi
