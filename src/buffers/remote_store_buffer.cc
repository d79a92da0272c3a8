#include <algorithm>
#include <memory>
#include <utility>

#include "base/guard.h"
#include "buffers/remote_connection.h"
#include "buffers/store_key.h"
#include "quire/remote_buffers.h"

namespace quire {
namespace {

using wire::Message;
using wire::Opcode;

// Keys of one question: as many of the largest size, with their lengths, as a head holds.
constexpr size_t kKeysPerRequest =
    static_cast<size_t>(wire::kHeadBytesMax / (kStoreKeyBytesMax + 2));

Message KeyMessage(Opcode opcode, std::string_view key) {
  Message message{.opcode = opcode};
  wire::FieldWriter(&message.fields).AddText(key);
  return message;
}

Status MalformedAnswer(const char* call) {
  return Status(StatusCode::kRemote,
                std::string("StoreBuffer::") + call + ": the server's answer has the wrong length");
}

class RemoteStoreBuffer final : public StoreBuffer {
 public:
  explicit RemoteStoreBuffer(std::shared_ptr<RemoteConnection> connection)
      : connection_(std::move(connection)) {}
  ~RemoteStoreBuffer() override { connection_->Close(); }

  Status Put(std::string_view key, HostTensor value) override {
    return GuardEntry([&]() -> Status {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Put", key));
      Message message = KeyMessage(Opcode::kPut, key);
      message.tensors.emplace_back("", std::move(value));
      return connection_->Request(std::move(message)).status();
    });
  }

  Result<bool> Delete(std::string_view key) override {
    return GuardEntry([&]() -> Result<bool> {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Delete", key));
      QUIRE_ASSIGN_OR_RETURN(const Message answer,
                             connection_->Request(KeyMessage(Opcode::kDelete, key)));
      if (answer.fields.size() != 1) return MalformedAnswer("Delete");
      return answer.fields[0] != std::byte{0};
    });
  }

  Result<std::optional<HostTensor>> Get(std::string_view key) const override {
    return GuardEntry([&]() -> Result<std::optional<HostTensor>> {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Get", key));
      return TensorOf(connection_->Request(KeyMessage(Opcode::kGet, key)));
    });
  }

  Result<bool> Exists(std::string_view key) const override {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<bool> exists, MultiExists({&key, 1}));
    return exists[0];
  }

  Result<std::vector<std::optional<HostTensor>>> MultiGet(
      std::span<const std::string_view> keys) const override {
    return GuardEntry([&]() -> Result<std::vector<std::optional<HostTensor>>> {
      for (const std::string_view key : keys) QUIRE_RETURN_IF_ERROR(CheckStoreKey("MultiGet", key));
      std::vector<std::shared_ptr<RemoteConnection::Call>> calls;
      for (const std::string_view key : keys) {
        QUIRE_ASSIGN_OR_RETURN(auto call, connection_->Start(KeyMessage(Opcode::kGet, key)));
        calls.push_back(std::move(call));
      }
      std::vector<std::optional<HostTensor>> values;
      for (const auto& call : calls) {
        QUIRE_ASSIGN_OR_RETURN(auto value, TensorOf(connection_->Await(call)));
        values.push_back(std::move(value));
      }
      return values;
    });
  }

  Result<std::vector<bool>> MultiExists(std::span<const std::string_view> keys) const override {
    return GuardEntry([&]() -> Result<std::vector<bool>> {
      for (const std::string_view key : keys) QUIRE_RETURN_IF_ERROR(CheckStoreKey("Exists", key));
      std::vector<bool> exists;
      while (!keys.empty()) {
        const auto some = keys.first(std::min(keys.size(), kKeysPerRequest));
        Message message{.opcode = Opcode::kExists};
        wire::EncodeKeys(some, &message.fields);
        QUIRE_ASSIGN_OR_RETURN(const Message answer, connection_->Request(std::move(message)));
        if (answer.fields.size() != some.size()) return MalformedAnswer("Exists");
        for (const std::byte is_there : answer.fields) exists.push_back(is_there != std::byte{0});
        keys = keys.subspan(some.size());
      }
      return exists;
    });
  }

  Result<int64_t> PrefixHits(std::span<const std::string_view> keys) const override {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<bool> exists, MultiExists(keys));
    return std::find(exists.begin(), exists.end(), false) - exists.begin();
  }

  void Close() noexcept override { connection_->Close(); }
  int64_t used_bytes() const override { return connection_->Stat(4); }
  int64_t capacity_bytes() const override { return connection_->Stat(5); }
  int64_t size() const override { return connection_->Stat(6); }

 private:
  static Result<std::optional<HostTensor>> TensorOf(Result<Message> answer) {
    if (!answer.ok()) return answer.status();
    if (answer->tensors.size() > 1) return MalformedAnswer("Get");
    if (answer->tensors.empty()) return std::optional<HostTensor>();
    return std::optional<HostTensor>(std::move(answer->tensors[0].second));
  }

  const std::shared_ptr<RemoteConnection> connection_;
};

}  // namespace

Result<std::unique_ptr<StoreBuffer>> ConnectStoreBuffer(const std::string& endpoint,
                                                        const RemoteBufferOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<StoreBuffer>> {
    QUIRE_ASSIGN_OR_RETURN(auto connection,
                           RemoteConnection::Open(endpoint, options, wire::kServiceStore));
    return std::unique_ptr<StoreBuffer>(std::make_unique<RemoteStoreBuffer>(std::move(connection)));
  });
}

}  // namespace quire
