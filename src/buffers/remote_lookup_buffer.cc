#include <algorithm>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/guard.h"
#include "buffers/handover_ledger.h"
#include "buffers/remote_connection.h"
#include "quire/remote_buffers.h"

namespace quire {
namespace {

using wire::Message;

// An entry that this process has and the server keeps until it is acknowledged.
class RemoteLedger final : public Handover::Ledger {
 public:
  RemoteLedger(std::shared_ptr<RemoteConnection> connection,
               std::shared_ptr<RemoteConnection::Call> take, LookupEntry entry)
      : connection_(std::move(connection)), take_(std::move(take)), entry_(std::move(entry)) {}

  LookupEntry* entry() { return &entry_; }
  LookupEntry Complete(int64_t) noexcept override {
    connection_->Acknowledge(*take_);
    return std::move(entry_);
  }
  void Fail(int64_t) noexcept override { connection_->PutBack(*take_); }

 private:
  const std::shared_ptr<RemoteConnection> connection_;
  const std::shared_ptr<RemoteConnection::Call> take_;
  LookupEntry entry_;
};

class RemoteLookupBuffer final : public LookupBuffer {
 public:
  explicit RemoteLookupBuffer(std::shared_ptr<RemoteConnection> connection)
      : connection_(std::move(connection)) {}
  ~RemoteLookupBuffer() override { connection_->Close(); }

  Status Insert(LookupEntry, Timeout) override {
    return Status(StatusCode::kWrongRole,
                  "LookupBuffer::Insert: this is the consumer's side of a remote buffer; insert in "
                  "the process that serves it");
  }

  Result<std::optional<LookupEntry>> DropSelect(const LookupQuery& query,
                                                Timeout timeout) override {
    return GuardEntry([&]() -> Result<std::optional<LookupEntry>> {
      QUIRE_ASSIGN_OR_RETURN(std::optional<Handover> taken, TakeOnce(query, timeout));
      if (!taken) return std::optional<LookupEntry>();
      return std::optional<LookupEntry>(taken->Complete());
    });
  }

  Result<std::optional<Handover>> Take(const LookupQuery& query, Timeout timeout) override {
    return GuardEntry([&] { return TakeOnce(query, timeout); });
  }

  void Close() noexcept override { connection_->Close(); }
  int64_t used_bytes() const override { return connection_->Stat(0); }
  int64_t capacity_bytes() const override { return connection_->Stat(1); }
  int64_t size() const override { return connection_->Stat(2); }
  int64_t waiting() const override { return connection_->Stat(3); }

 private:
  Result<std::optional<Handover>> TakeOnce(const LookupQuery& query, Timeout timeout) {
    const int64_t until =
        timeout ? MomentAfter(clock_->SteadyNs(), std::max<int64_t>(0, timeout->count())) : kNever;
    Message message;
    if (query.tokens) message.tensors.emplace_back("tokens", *query.tokens);
    if (query.tokens && query.roi) message.tensors.emplace_back("roi", *query.roi);
    auto call = connection_->StartTake(std::move(message), until);
    if (call.status().code() == StatusCode::kTimeout) return std::optional<Handover>();
    if (!call.ok()) return call.status();
    QUIRE_ASSIGN_OR_RETURN(Message answer, connection_->Await(*call));
    if (answer.tensors.empty()) return std::optional<Handover>();
    if (answer.tensors.size() < 2) {
      connection_->PutBack(**call);
      return Status(StatusCode::kRemote,
                    "LookupBuffer::Take: the server sent an entry without roi");
    }
    LookupEntry entry{.tokens = std::move(answer.tensors[0].second),
                      .roi = std::move(answer.tensors[1].second),
                      .tensors = {}};
    entry.tensors.assign(std::make_move_iterator(answer.tensors.begin() + 2),
                         std::make_move_iterator(answer.tensors.end()));
    const auto ledger =
        std::make_shared<RemoteLedger>(connection_, *std::move(call), std::move(entry));
    return std::optional<Handover>(Handover(ledger, 0, ledger->entry()));
  }

  const std::shared_ptr<Clock> clock_ = MachineTime();
  const std::shared_ptr<RemoteConnection> connection_;
};

}  // namespace

Result<std::unique_ptr<LookupBuffer>> ConnectLookupBuffer(const std::string& endpoint,
                                                          const RemoteBufferOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<LookupBuffer>> {
    QUIRE_ASSIGN_OR_RETURN(auto connection,
                           RemoteConnection::Open(endpoint, options, wire::kServiceLookup));
    return std::unique_ptr<LookupBuffer>(
        std::make_unique<RemoteLookupBuffer>(std::move(connection)));
  });
}

}  // namespace quire
