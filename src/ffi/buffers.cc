// quire.LookupBuffer and quire.StoreBuffer for tvm-ffi. Calls may block; tvm-ffi has let go of
// Python's lock then.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
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
  return HostTensor(ElementType(dl.dtype.code, dl.dtype.bits),
                    {tensor.shape().begin(), tensor.shape().end()},
                    std::shared_ptr<const std::byte[]>(data, [tensor](const std::byte*) {}));
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

class LookupBufferObj : public tf::Object {
 public:
  explicit LookupBufferObj(const OptionMap& fields)
      : buffer_(latch_.Run([&] { return LookupBuffer::Create(ReadOptions(fields)); })) {}

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

  void Close() { buffer_->Close(); }
  int64_t UsedBytes() { return buffer_->used_bytes(); }
  int64_t CapacityBytes() { return buffer_->capacity_bytes(); }
  int64_t Size() { return buffer_->size(); }
  int64_t Waiting() { return buffer_->waiting(); }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.LookupBuffer", LookupBufferObj, tf::Object);

 private:
  static LookupBufferOptions ReadOptions(const OptionMap& fields) {
    LookupBufferOptions options;
    OptionsReader reader("LookupBuffer", fields);
    reader.Read("capacity_bytes", &options.capacity_bytes);
    reader.ReadEnum("prefer", kSelectOrderNames, &options.prefer);
    reader.Finish();
    return options;
  }

  FaultLatch latch_;
  std::unique_ptr<LookupBuffer> buffer_;
};

class StoreBufferObj : public tf::Object {
 public:
  explicit StoreBufferObj(const OptionMap& fields)
      : buffer_(latch_.Run([&] { return StoreBuffer::Create(ReadOptions(fields)); })) {}

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

  void Close() { buffer_->Close(); }
  int64_t UsedBytes() { return buffer_->used_bytes(); }
  int64_t CapacityBytes() { return buffer_->capacity_bytes(); }
  int64_t Size() { return buffer_->size(); }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.StoreBuffer", StoreBufferObj, tf::Object);

 private:
  static StoreBufferOptions ReadOptions(const OptionMap& fields) {
    StoreBufferOptions options;
    OptionsReader reader("StoreBuffer", fields);
    reader.Read("capacity_bytes", &options.capacity_bytes);
    reader.Finish();
    return options;
  }
  static std::string_view TextOf(const tf::String& text) { return {text.data(), text.size()}; }

  FaultLatch latch_;
  std::unique_ptr<StoreBuffer> buffer_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<LookupBufferObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("insert", &LookupBufferObj::Insert)
      .def("drop_select", &LookupBufferObj::DropSelect)
      .def("close", &LookupBufferObj::Close)
      .def("used_bytes", &LookupBufferObj::UsedBytes)
      .def("capacity_bytes", &LookupBufferObj::CapacityBytes)
      .def("size", &LookupBufferObj::Size)
      .def("waiting", &LookupBufferObj::Waiting);
  tf::reflection::ObjectDef<StoreBufferObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("put", &StoreBufferObj::Put)
      .def("delete", &StoreBufferObj::Delete)
      .def("get", &StoreBufferObj::Get)
      .def("exists", &StoreBufferObj::Exists)
      .def("prefix_hits", &StoreBufferObj::PrefixHits)
      .def("close", &StoreBufferObj::Close)
      .def("used_bytes", &StoreBufferObj::UsedBytes)
      .def("capacity_bytes", &StoreBufferObj::CapacityBytes)
      .def("size", &StoreBufferObj::Size);
}

}  // namespace
}  // namespace quire::ffi
