// quire.TransferPeer, quire.TransferListener and quire.RemoteChannel for tvm-ffi. Methods and
// functions may wait: tvm-ffi lets go of Python's lock for them. For a constructor it does not, and
// none waits.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "ffi/tensors.h"
#include "ffi/transfer.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

TransferPeerOptions ReadPeerOptions(OptionsReader* reader) {
  TransferPeerOptions options;
  std::string passport;
  reader->Read("passport", &passport);
  options.passport = ValueOrThrow(Passport::FromJson(passport));
  reader->Read("secret", &options.secret);
  ReadTls(reader, &options);
  ReadTime(reader, "connect_timeout_ns", &options.connect_timeout);
  ReadTime(reader, "heartbeat_ns", &options.heartbeat);
  ReadTime(reader, "dead_after_ns", &options.dead_after);
  ReadTime(reader, "lease_ns", &options.lease);
  reader->Read("window_bytes", &options.window_bytes);
  reader->Read("streams", &options.streams);
  ReadTime(reader, "send_wait_ns", &options.send_wait);
  return options;
}

Result<std::shared_ptr<TransferPeer>> OpenPeer(const std::string& endpoint,
                                               const OptionMap& fields) {
  OptionsReader reader("TransferPeer", fields);
  const TransferPeerOptions options = ReadPeerOptions(&reader);
  reader.Finish();
  return TransferPeer::Connect(endpoint, options);
}

TransferJob ReadJob(const OptionMap& fields) {
  TransferJob job;
  OptionsReader reader("TransferPeer.request", fields);
  reader.Read("id", &job.id);
  reader.Read("deadline_ns", &job.deadline_ns);
  if (const auto tokens = reader.Get<tf::Tensor>("tokens"))
    job.tokens = TokenIds(tf::TensorView(*tokens));
  if (const auto salt = reader.Get<tf::Bytes>("salt")) job.salt.assign(salt->data(), salt->size());
  reader.Finish();
  return job;
}

OptionMap RequestFields(const TransferRequest& request) {
  tf::Array<int64_t> tokens;
  tokens.reserve(static_cast<int64_t>(request.job.tokens.size()));
  for (const int32_t token : request.job.tokens) tokens.push_back(token);
  return {{"id", static_cast<int64_t>(request.job.id)},
          {"tokens", tokens},
          {"salt", tf::Bytes(request.job.salt)},
          {"deadline_ns", request.job.deadline_ns},
          {"map", ReceiveMapFields(request.map)}};
}

class TransferListenerObj : public tf::Object {
 public:
  explicit TransferListenerObj(const OptionMap& fields)
      : listener_(latch_.Run([&] { return Start(fields); })) {}

  tf::String Endpoint() { return tf::String(listener_->endpoint()); }
  tf::Optional<tf::ObjectRef> Accept(int64_t timeout_ns) {
    const auto clock = MachineTime();
    auto peer =
        latch_.Run([&] { return listener_->Accept(*clock, clock->SteadyNs() + timeout_ns); });
    if (!peer) return std::nullopt;
    return tf::ObjectRef(tf::make_object<TransferPeerObj>(*std::move(peer)));
  }
  int64_t Refused() { return listener_->refused(); }
  tf::String LastRefusal() {
    const Status status = listener_->last_refusal();
    return status.ok() ? tf::String("") : tf::String(status.ToString());
  }
  void Close() { listener_->Close(); }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.TransferListener", TransferListenerObj, tf::Object);

 private:
  static Result<std::unique_ptr<TransferListener>> Start(const OptionMap& fields) {
    TransferListenerOptions options;
    OptionsReader reader("TransferListener", fields);
    reader.Read("endpoint", &options.endpoint);
    reader.Read("peers_max", &options.peers_max);
    options.peer = ReadPeerOptions(&reader);
    reader.Finish();
    return TransferListener::Start(options);
  }

  FaultLatch latch_;
  std::unique_ptr<TransferListener> listener_;
};

class RemoteChannelObj : public LayerSinkObj {
 public:
  RemoteChannelObj() : channel_(CreateRemoteChannel()) {}
  std::shared_ptr<LayerSink> sink() const override { return channel_; }
  void Connect(int64_t peer, const LayerSinkObj* connection) {
    latch_.Run([&] { return channel_->Connect(peer, connection->sink()); });
  }
  void Disconnect(int64_t peer) {
    latch_.Run([&] { return channel_->Disconnect(peer); });
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.RemoteChannel", RemoteChannelObj, LayerSinkObj);

 private:
  FaultLatch latch_;
  std::shared_ptr<RemoteChannel> channel_;
};

}  // namespace

void ReadTime(OptionsReader* reader, const char* name, std::chrono::nanoseconds* out) {
  int64_t count = out->count();
  reader->Read(name, &count);
  *out = std::chrono::nanoseconds(count);
}

void ReadTls(OptionsReader* reader, TransferPeerOptions* options) {
  reader->Read("tls_ca_file", &options->tls_ca_file);
  reader->Read("tls_cert_file", &options->tls_cert_file);
  reader->Read("tls_key_file", &options->tls_key_file);
  reader->Read("tls_server_name", &options->tls_server_name);
}

TransferPeerObj::TransferPeerObj(const tf::String& endpoint, const OptionMap& options)
    : peer_(latch_.Run([&] { return OpenPeer(std::string(endpoint), options); })) {}

tf::String TransferPeerObj::Failure() {
  const Status status = peer_->status();
  return status.ok() ? tf::String("") : tf::String(status.ToString());
}

tf::Map<tf::String, int64_t> TransferPeerObj::Stats() {
  const TransferPeerStats stats = peer_->stats();
  return {{"parts_sent", stats.parts_sent},         {"parts_sent_again", stats.parts_sent_again},
          {"bytes_sent", stats.bytes_sent},         {"parts_received", stats.parts_received},
          {"bytes_received", stats.bytes_received}, {"sends_open", stats.sends_open},
          {"receives_open", stats.receives_open},   {"streams", stats.streams}};
}

void TransferPeerObj::Request(const OptionMap& job, const OptionMap& map) {
  latch_.Run([&] { return peer_->Request(ReadJob(job), ReadReceiveMap(map)); });
}

void TransferPeerObj::Cancel(int64_t epoch) {
  latch_.Run([&] {
    const Status why(StatusCode::kCancelled, "the receiver cancelled it");
    return peer_->Cancel(static_cast<uint64_t>(epoch), why);
  });
}

tf::Optional<OptionMap> TransferPeerObj::NextRequest(int64_t timeout_ns) {
  const auto clock = MachineTime();
  auto request =
      latch_.Run([&] { return peer_->NextRequest(*clock, clock->SteadyNs() + timeout_ns); });
  if (!request) return std::nullopt;
  return RequestFields(*request);
}

void TransferPeerObj::Refuse(int64_t epoch, const tf::String& why) {
  latch_.Run([&] {
    return peer_->Refuse(static_cast<uint64_t>(epoch),
                         Status(StatusCode::kCancelled, std::string(why)));
  });
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef().def(
      "quire.TransferPeer.create", [](const tf::String& endpoint, const OptionMap& options) {
        return tf::ObjectRef(tf::make_object<TransferPeerObj>(endpoint, options));
      });
  tf::reflection::ObjectDef<TransferPeerObj>()
      .def("endpoint", &TransferPeerObj::Endpoint)
      .def("failure", &TransferPeerObj::Failure)
      .def("stats", &TransferPeerObj::Stats)
      .def("close", &TransferPeerObj::Close)
      .def("request", &TransferPeerObj::Request)
      .def("cancel", &TransferPeerObj::Cancel)
      .def("next_request", &TransferPeerObj::NextRequest)
      .def("refuse", &TransferPeerObj::Refuse);
  tf::reflection::ObjectDef<TransferListenerObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("endpoint", &TransferListenerObj::Endpoint)
      .def("accept", &TransferListenerObj::Accept)
      .def("refused", &TransferListenerObj::Refused)
      .def("last_refusal", &TransferListenerObj::LastRefusal)
      .def("close", &TransferListenerObj::Close);
  tf::reflection::ObjectDef<RemoteChannelObj>()
      .def(tf::reflection::init<>())
      .def("connect", &RemoteChannelObj::Connect)
      .def("disconnect", &RemoteChannelObj::Disconnect);
}

}  // namespace quire::ffi
