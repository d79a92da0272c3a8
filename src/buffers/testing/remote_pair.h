// A served buffer and its client as one buffer, so that one test reads both kinds.
#ifndef QUIRE_BUFFERS_TESTING_REMOTE_PAIR_H_
#define QUIRE_BUFFERS_TESTING_REMOTE_PAIR_H_

#include <chrono>
#include <memory>
#include <utility>

#include "quire/remote_buffers.h"

namespace quire {

// No connection is lost because the machine is busy.
inline BufferServerOptions Patient(BufferServerOptions options) {
  options.dead_after = std::chrono::minutes(1);
  return options;
}
inline RemoteBufferOptions Patient(RemoteBufferOptions options) {
  options.connect_timeout = std::chrono::minutes(1);
  return options;
}

// Producers are in the server, consumers behind the socket.
class RemoteLookupPair final : public LookupBuffer {
 public:
  explicit RemoteLookupPair(const LookupBufferOptions& options)
      : server_(BufferServer::Start(Patient(BufferServerOptions{.lookup = options})).value()),
        client_(ConnectLookupBuffer(server_->endpoint(), Patient(RemoteBufferOptions())).value()) {}

  Status Insert(LookupEntry entry, Timeout timeout) override {
    return server_->lookup()->Insert(std::move(entry), timeout);
  }
  Result<std::optional<LookupEntry>> DropSelect(const LookupQuery& query,
                                                Timeout timeout) override {
    return client_->DropSelect(query, timeout);
  }
  Result<std::optional<Handover>> Take(const LookupQuery& query, Timeout timeout) override {
    return client_->Take(query, timeout);
  }
  void Close() noexcept override {
    server_->Close();
    client_->Close();
  }
  // Through the client, behind what it sent before.
  int64_t used_bytes() const override { return client_->used_bytes(); }
  int64_t capacity_bytes() const override { return client_->capacity_bytes(); }
  int64_t size() const override { return client_->size(); }
  int64_t waiting() const override { return client_->waiting(); }

 private:
  std::unique_ptr<BufferServer> server_;
  std::unique_ptr<LookupBuffer> client_;
};

class RemoteStorePair final : public StoreBuffer {
 public:
  explicit RemoteStorePair(const StoreBufferOptions& options)
      : server_(BufferServer::Start(Patient(BufferServerOptions{.store = options})).value()),
        client_(ConnectStoreBuffer(server_->endpoint(), Patient(RemoteBufferOptions())).value()) {}

  Status Put(std::string_view key, HostTensor value) override {
    return client_->Put(key, std::move(value));
  }
  Result<bool> Delete(std::string_view key) override { return client_->Delete(key); }
  Result<std::optional<HostTensor>> Get(std::string_view key) const override {
    return client_->Get(key);
  }
  Result<bool> Exists(std::string_view key) const override { return client_->Exists(key); }
  Result<std::vector<std::optional<HostTensor>>> MultiGet(
      std::span<const std::string_view> keys) const override {
    return client_->MultiGet(keys);
  }
  Result<std::vector<bool>> MultiExists(std::span<const std::string_view> keys) const override {
    return client_->MultiExists(keys);
  }
  Result<int64_t> PrefixHits(std::span<const std::string_view> keys) const override {
    return client_->PrefixHits(keys);
  }
  void Close() noexcept override { client_->Close(); }
  int64_t used_bytes() const override { return client_->used_bytes(); }
  int64_t capacity_bytes() const override { return client_->capacity_bytes(); }
  int64_t size() const override { return client_->size(); }

 private:
  std::unique_ptr<BufferServer> server_;
  std::unique_ptr<StoreBuffer> client_;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_TESTING_REMOTE_PAIR_H_
