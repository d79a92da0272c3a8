// quire.LookupBuffer, quire.StoreBuffer (of this process, or of another one that serves them) and
// quire.BufferServer for tvm-ffi. Methods and functions may wait: tvm-ffi lets go of Python's lock
// for them. For a constructor it does not, and none waits.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/tensors.h"
#include "quire/lookup_buffer.h"
#include "quire/remote_buffers.h"
#include "quire/store_buffer.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// A copy, or with `owned` a contiguous tensor of the CPU itself, which nobody may write to any
// more.
HostTensor HostTensorOf(const tf::Tensor& tensor, bool owned) {
  const DLTensor dl = DLTensorOf(tensor);
  if (!owned || dl.device.device_type != kDLCPU || dl.dtype.lanes != 1 || dl.dtype.bits % 8 != 0 ||
      !tensor.IsContiguous()) {
    return ValueOrThrow(HostTensor::CopyOf(dl));
  }
  const auto* data = static_cast<const std::byte*>(dl.data) + dl.byte_offset;
  return ValueOrThrow(HostTensor::Share(
      ElementType(dl.dtype.code, dl.dtype.bits), {tensor.shape().begin(), tensor.shape().end()},
      std::shared_ptr<const std::byte[]>(data, [tensor](const std::byte*) {})));
}

std::optional<HostTensor> HostTensorOf(const tf::Optional<tf::Tensor>& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return HostTensorOf(*tensor, false);
}

// Negative: for ever.
Timeout TimeoutOf(int64_t nanoseconds) {
  if (nanoseconds < 0) return std::nullopt;
  return std::chrono::nanoseconds(nanoseconds);
}

constexpr std::string_view kSelectOrderNames[] = {"fifo", "longest"};

LookupBufferOptions ReadLookupOptions(OptionsReader* reader) {
  LookupBufferOptions options;
  reader->Read("capacity_bytes", &options.capacity_bytes);
  reader->ReadEnum("prefer", kSelectOrderNames, &options.prefer);
  return options;
}

StoreBufferOptions ReadStoreOptions(OptionsReader* reader) {
  StoreBufferOptions options;
  reader->Read("capacity_bytes", &options.capacity_bytes);
  return options;
}

RemoteBufferOptions ReadRemoteOptions(OptionsReader* reader) {
  RemoteBufferOptions options;
  int64_t timeout_ns = options.connect_timeout.count();
  reader->Read("secret", &options.secret);
  reader->Read("connect_timeout_ns", &timeout_ns);
  reader->Read("message_bytes_max", &options.message_bytes_max);
  options.connect_timeout = std::chrono::nanoseconds(timeout_ns);
  return options;
}

// The buffer at "connect", or without it one of this process.
Result<std::unique_ptr<LookupBuffer>> OpenLookupBuffer(const OptionMap& fields) {
  OptionsReader reader("LookupBuffer", fields);
  if (const auto endpoint = reader.Get<tf::String>("connect")) {
    const RemoteBufferOptions options = ReadRemoteOptions(&reader);
    reader.Finish();
    return ConnectLookupBuffer(std::string(*endpoint), options);
  }
  const LookupBufferOptions options = ReadLookupOptions(&reader);
  reader.Finish();
  return LookupBuffer::Create(options);
}

Result<std::unique_ptr<StoreBuffer>> OpenStoreBuffer(const OptionMap& fields) {
  OptionsReader reader("StoreBuffer", fields);
  if (const auto endpoint = reader.Get<tf::String>("connect")) {
    const RemoteBufferOptions options = ReadRemoteOptions(&reader);
    reader.Finish();
    return ConnectStoreBuffer(std::string(*endpoint), options);
  }
  const StoreBufferOptions options = ReadStoreOptions(&reader);
  reader.Finish();
  return StoreBuffer::Create(options);
}

class LookupBufferObj : public tf::Object {
 public:
  explicit LookupBufferObj(const OptionMap& fields)
      : buffer_(latch_.Run([&] { return OpenLookupBuffer(fields); })) {}
  explicit LookupBufferObj(std::shared_ptr<LookupBuffer> buffer) : buffer_(std::move(buffer)) {}

  void Insert(const tf::Tensor& tokens, const tf::Tensor& roi, const tf::Array<tf::String>& names,
              const tf::Array<tf::Tensor>& tensors, bool owned, int64_t timeout) {
    latch_.Run([&] {
      LookupEntry entry{
          .tokens = HostTensorOf(tokens, owned), .roi = HostTensorOf(roi, owned), .tensors = {}};
      for (size_t i = 0; i < names.size(); ++i) {
        entry.tensors.emplace_back(std::string(names[i]), HostTensorOf(tensors[i], owned));
      }
      return buffer_->Insert(std::move(entry), TimeoutOf(timeout));
    });
  }

  // [tokens, roi, names, tensors], or nothing.
  tf::Array<tf::Any> DropSelect(const tf::Optional<tf::Tensor>& tokens,
                                const tf::Optional<tf::Tensor>& roi, int64_t timeout) {
    return latch_.Run([&]() -> tf::Array<tf::Any> {
      std::optional<LookupEntry> entry = ValueOrThrow(buffer_->DropSelect(
          {.tokens = HostTensorOf(tokens), .roi = HostTensorOf(roi)}, TimeoutOf(timeout)));
      if (!entry) return {};
      tf::Array<tf::String> names;
      tf::Array<tf::Tensor> tensors;
      for (const auto& [name, tensor] : entry->tensors) {
        names.push_back(tf::String(name));
        tensors.push_back(TensorSharing(tensor));
      }
      return {TensorSharing(entry->tokens), TensorSharing(entry->roi), names, tensors};
    });
  }

  // Also after an internal error: calls that wait must end.
  void Close() { buffer_->Close(); }
  int64_t UsedBytes() {
    return latch_.Run([&] { return buffer_->used_bytes(); });
  }
  int64_t CapacityBytes() {
    return latch_.Run([&] { return buffer_->capacity_bytes(); });
  }
  int64_t Size() {
    return latch_.Run([&] { return buffer_->size(); });
  }
  int64_t Waiting() {
    return latch_.Run([&] { return buffer_->waiting(); });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.LookupBuffer", LookupBufferObj, tf::Object);

 private:
  FaultLatch latch_;
  std::shared_ptr<LookupBuffer> buffer_;
};

class StoreBufferObj : public tf::Object {
 public:
  explicit StoreBufferObj(const OptionMap& fields)
      : buffer_(latch_.Run([&] { return OpenStoreBuffer(fields); })) {}
  explicit StoreBufferObj(std::shared_ptr<StoreBuffer> buffer) : buffer_(std::move(buffer)) {}

  void Put(const tf::String& key, const tf::Tensor& value) {
    latch_.Run([&] { return buffer_->Put(TextOf(key), HostTensorOf(value, false)); });
  }
  bool Delete(const tf::String& key) {
    return latch_.Run([&] { return buffer_->Delete(TextOf(key)); });
  }
  tf::Optional<tf::Tensor> Get(const tf::String& key) {
    return latch_.Run([&]() -> tf::Optional<tf::Tensor> {
      const std::optional<HostTensor> value = ValueOrThrow(buffer_->Get(TextOf(key)));
      if (!value) return std::nullopt;
      return TensorCopyOf(*value);
    });
  }
  bool Exists(const tf::String& key) {
    return latch_.Run([&] { return buffer_->Exists(TextOf(key)); });
  }
  int64_t PrefixHits(const tf::Array<tf::String>& keys) {
    return latch_.Run([&] {
      std::vector<std::string> texts;
      for (const tf::String& key : keys) texts.emplace_back(key);
      const std::vector<std::string_view> views(texts.begin(), texts.end());
      return buffer_->PrefixHits(views);
    });
  }

  // Also after an internal error: calls that wait must end.
  void Close() { buffer_->Close(); }
  int64_t UsedBytes() {
    return latch_.Run([&] { return buffer_->used_bytes(); });
  }
  int64_t CapacityBytes() {
    return latch_.Run([&] { return buffer_->capacity_bytes(); });
  }
  int64_t Size() {
    return latch_.Run([&] { return buffer_->size(); });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.StoreBuffer", StoreBufferObj, tf::Object);

 private:
  static std::string_view TextOf(const tf::String& text) { return {text.data(), text.size()}; }

  FaultLatch latch_;
  std::shared_ptr<StoreBuffer> buffer_;
};

// "lookup" and "store" are the options of the buffers that it serves.
class BufferServerObj : public tf::Object {
 public:
  explicit BufferServerObj(const OptionMap& fields)
      : server_(latch_.Run([&] { return BufferServer::Start(ReadOptions(fields)); })) {}

  tf::String Endpoint() { return tf::String(server_->endpoint()); }
  int64_t Connections() { return server_->connections(); }
  void Close() { server_->Close(); }
  // Nothing if it serves none. They keep the server.
  tf::Optional<tf::ObjectRef> Lookup() {
    if (server_->lookup() == nullptr) return std::nullopt;
    return tf::ObjectRef(tf::make_object<LookupBufferObj>(
        std::shared_ptr<LookupBuffer>(server_, server_->lookup())));
  }
  tf::Optional<tf::ObjectRef> Store() {
    if (server_->store() == nullptr) return std::nullopt;
    return tf::ObjectRef(
        tf::make_object<StoreBufferObj>(std::shared_ptr<StoreBuffer>(server_, server_->store())));
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.BufferServer", BufferServerObj, tf::Object);

 private:
  static BufferServerOptions ReadOptions(const OptionMap& fields) {
    BufferServerOptions options;
    OptionsReader reader("BufferServer", fields);
    reader.Read("endpoint", &options.endpoint);
    reader.Read("secret", &options.secret);
    if (const auto lookup = reader.Get<OptionMap>("lookup")) {
      OptionsReader lookup_reader("BufferServer lookup", *lookup);
      options.lookup = ReadLookupOptions(&lookup_reader);
      lookup_reader.Finish();
    }
    if (const auto store = reader.Get<OptionMap>("store")) {
      OptionsReader store_reader("BufferServer store", *store);
      options.store = ReadStoreOptions(&store_reader);
      store_reader.Finish();
    }
    reader.Finish();
    return options;
  }

  FaultLatch latch_;
  std::shared_ptr<BufferServer> server_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef()
      .def("quire.LookupBuffer.create",
           [](const OptionMap& options) {
             return tf::ObjectRef(tf::make_object<LookupBufferObj>(options));
           })
      .def("quire.StoreBuffer.create", [](const OptionMap& options) {
        return tf::ObjectRef(tf::make_object<StoreBufferObj>(options));
      });
  tf::reflection::ObjectDef<LookupBufferObj>()
      .def("insert", &LookupBufferObj::Insert)
      .def("drop_select", &LookupBufferObj::DropSelect)
      .def("close", &LookupBufferObj::Close)
      .def("used_bytes", &LookupBufferObj::UsedBytes)
      .def("capacity_bytes", &LookupBufferObj::CapacityBytes)
      .def("size", &LookupBufferObj::Size)
      .def("waiting", &LookupBufferObj::Waiting);
  tf::reflection::ObjectDef<StoreBufferObj>()
      .def("put", &StoreBufferObj::Put)
      .def("delete", &StoreBufferObj::Delete)
      .def("get", &StoreBufferObj::Get)
      .def("exists", &StoreBufferObj::Exists)
      .def("prefix_hits", &StoreBufferObj::PrefixHits)
      .def("close", &StoreBufferObj::Close)
      .def("used_bytes", &StoreBufferObj::UsedBytes)
      .def("capacity_bytes", &StoreBufferObj::CapacityBytes)
      .def("size", &StoreBufferObj::Size);
  tf::reflection::ObjectDef<BufferServerObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("endpoint", &BufferServerObj::Endpoint)
      .def("connections", &BufferServerObj::Connections)
      .def("lookup", &BufferServerObj::Lookup)
      .def("store", &BufferServerObj::Store)
      .def("close", &BufferServerObj::Close);
}

}  // namespace
}  // namespace quire::ffi
