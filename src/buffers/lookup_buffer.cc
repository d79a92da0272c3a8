#include "quire/lookup_buffer.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "buffers/handover_ledger.h"
#include "buffers/local_lookup_buffer.h"
#include "buffers/masked_tokens.h"
#include "buffers/prefix_index.h"

namespace quire {
namespace {

using SteadyClock = std::chrono::steady_clock;

// When a call gives up. Times too far away to be added to now are for ever.
std::optional<SteadyClock::time_point> DeadlineOf(Timeout timeout) {
  const SteadyClock::time_point now = SteadyClock::now();
  if (!timeout || *timeout > SteadyClock::time_point::max() - now) return std::nullopt;
  return now + *timeout;
}

Status ClosedError(const char* call) {
  return Status(StatusCode::kClosed,
                std::string("LookupBuffer::") + call + ": the buffer is closed");
}

Status CheckNames(const TensorBundle& tensors) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    if (names.insert(name).second) continue;
    return Status(StatusCode::kBadArgument, "LookupBuffer::Insert: two tensors have the name \"" +
                                                name + "\"; names must be distinct");
  }
  return {};
}

// All state of a buffer. Entries carry ids in the order of insertion. An entry is in exactly one of
// `entries_` (it can be taken) and `on_the_way_` (a Handover refers to it). An entry in `entries_`
// matches no waiting query: it would have been given to it.
class LocalLedger final : public Handover::Ledger,
                          public std::enable_shared_from_this<LocalLedger> {
  template <typename F>
  auto Locked(F&& f) const {
    const std::lock_guard lock(mutex_);
    return f();
  }

 public:
  explicit LocalLedger(const LookupBufferOptions& options) : options_(options) {}

  Status Insert(LookupEntry entry, Timeout timeout);
  Result<std::optional<Handover>> Take(const char* call, const LookupQuery& query, Timeout timeout);
  Result<std::unique_ptr<PendingTake>> StartTake(const LookupQuery& query,
                                                 std::function<void()> wake);
  LookupEntry Complete(int64_t id) noexcept override;
  void Fail(int64_t id) noexcept override;
  void Close() noexcept;

  int64_t used_bytes() const {
    return Locked([&] { return used_bytes_; });
  }
  int64_t capacity_bytes() const { return options_.capacity_bytes; }
  int64_t size() const {
    return Locked([&] { return static_cast<int64_t>(entries_.size()); });
  }
  int64_t waiting() const {
    return Locked(
        [&] { return static_cast<int64_t>(waiting_queries_.size() + waiting_inserts_.size()); });
  }

 private:
  using Tokens = std::shared_ptr<const MaskedTokens>;

  struct Stored {
    LookupEntry entry;
    Tokens tokens;
    int64_t bytes = 0;
    bool indexed = false;
  };
  using Entries = std::map<int64_t, Stored>;

  struct WaitingInsert {
    int64_t bytes = 0;
    bool admitted = false;  // its bytes are counted
    std::condition_variable changed{};
  };
  struct WaitingQuery {
    Tokens tokens;       // null: any entry
    int64_t given = -1;  // id of an entry in on_the_way_
    std::condition_variable changed{};
    std::function<void()> wake{};  // in place of `changed` when no thread waits

    void Notify() noexcept {
      if (wake) return wake();
      changed.notify_one();
    }
  };
  class Pending;

  // Waits until `done` or the deadline, or the buffer is closed.
  template <typename F>
  void WaitFor(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
               std::optional<SteadyClock::time_point> deadline, F&& done) {
    const auto is_over = [&] { return closed_ || done(); };
    if (deadline) {
      changed.wait_until(lock, *deadline, is_over);
    } else {
      changed.wait(lock, is_over);
    }
  }

  static Result<Tokens> TokensOf(const char* call, const LookupQuery& query);
  Status ReserveBytes(std::unique_lock<std::mutex>& lock, int64_t bytes, Timeout timeout);
  void FreeBytes(int64_t bytes) noexcept;
  void AdmitInserts() noexcept;
  void Publish(Entries::node_type stored);
  std::optional<int64_t> FindWaiting(const Tokens& tokens) const noexcept;
  std::optional<int64_t> FindEntry(const Tokens& tokens) const noexcept;
  void Index(int64_t id, Stored* stored);
  void IndexReturned();
  void RemoveEntry(int64_t id) noexcept;
  int64_t StartWaiting(WaitingQuery* query);
  void StopWaiting(int64_t query_id) noexcept;
  std::optional<Handover> HandOver(int64_t id) noexcept;

  const LookupBufferOptions options_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  int64_t used_bytes_ = 0;
  int64_t next_id_ = 0;
  Entries entries_;
  Entries on_the_way_;
  PrefixIndex index_;                          // of entries_, but for those that compare nothing
  int64_t not_indexed_ = 0;                    // of entries_: put back when there was no memory
  std::list<WaitingInsert*> waiting_inserts_;  // in the order of their calls
  int64_t next_query_id_ = 0;
  std::map<int64_t, WaitingQuery*> waiting_queries_;
  std::set<int64_t> waiting_for_any_;
  PrefixIndex waiting_index_;
};

// ----------------------------------------------------------------------------------------
// insertion

Status LocalLedger::Insert(LookupEntry entry, Timeout timeout) {
  QUIRE_RETURN_IF_ERROR(CheckNames(entry.tensors));
  QUIRE_ASSIGN_OR_RETURN(MaskedTokens masked, MaskTokens("Insert", entry.tokens, &entry.roi));
  const int64_t bytes = entry.bytes();
  if (bytes > options_.capacity_bytes) {
    return Status(StatusCode::kTooLarge, "LookupBuffer::Insert: the entry has " +
                                             std::to_string(bytes) + " bytes and the buffer " +
                                             std::to_string(options_.capacity_bytes));
  }
  Entries single;
  single.emplace(0, Stored{.entry = std::move(entry),
                           .tokens = std::make_shared<const MaskedTokens>(std::move(masked)),
                           .bytes = bytes});
  std::unique_lock lock(mutex_);
  QUIRE_RETURN_IF_ERROR(ReserveBytes(lock, bytes, timeout));
  Entries::node_type stored = single.extract(single.begin());
  stored.key() = next_id_;
  try {
    Publish(std::move(stored));
  } catch (const std::bad_alloc&) {
    FreeBytes(bytes);
    throw;
  }
  ++next_id_;
  return {};
}

// Counts `bytes` as used, once they fit and no earlier call waits for room.
Status LocalLedger::ReserveBytes(std::unique_lock<std::mutex>& lock, int64_t bytes,
                                 Timeout timeout) {
  if (closed_) return ClosedError("Insert");
  WaitingInsert self{.bytes = bytes};
  const auto place = waiting_inserts_.insert(waiting_inserts_.end(), &self);
  AdmitInserts();
  if (!self.admitted) {
    WaitFor(lock, self.changed, DeadlineOf(timeout), [&] { return self.admitted; });
  }
  if (self.admitted && !closed_) return {};
  if (self.admitted) {
    FreeBytes(bytes);
    return ClosedError("Insert");
  }
  waiting_inserts_.erase(place);
  AdmitInserts();  // those behind may be smaller
  if (closed_) return ClosedError("Insert");
  return Status(StatusCode::kFull, "LookupBuffer::Insert: no room for " + std::to_string(bytes) +
                                       " bytes within the time allowed; " +
                                       std::to_string(used_bytes_) + " of " +
                                       std::to_string(options_.capacity_bytes) + " are used");
}

void LocalLedger::AdmitInserts() noexcept {
  while (!closed_ && !waiting_inserts_.empty()) {
    WaitingInsert* const first = waiting_inserts_.front();
    if (used_bytes_ + first->bytes > options_.capacity_bytes) return;
    used_bytes_ += first->bytes;
    first->admitted = true;
    waiting_inserts_.pop_front();
    first->changed.notify_one();
  }
}

void LocalLedger::FreeBytes(int64_t bytes) noexcept {
  used_bytes_ -= bytes;
  AdmitInserts();
}

// Gives the entry to the oldest query that waits for it, else keeps it. Without memory `stored` is
// lost and nothing has changed.
void LocalLedger::Publish(Entries::node_type stored) {
  const std::optional<int64_t> query = FindWaiting(stored.mapped().tokens);
  if (query) {
    WaitingQuery* const waiting = waiting_queries_.find(*query)->second;
    waiting->given = stored.key();
    on_the_way_.insert(std::move(stored));
    StopWaiting(*query);
    waiting->Notify();
    return;
  }
  Index(stored.key(), &stored.mapped());
  entries_.insert(std::move(stored));
}

std::optional<int64_t> LocalLedger::FindWaiting(const Tokens& tokens) const noexcept {
  std::optional<int64_t> found = waiting_index_.FindOldest(*tokens);
  if (waiting_for_any_.empty()) return found;
  const int64_t any = *waiting_for_any_.begin();
  return found ? std::min(*found, any) : any;
}

void LocalLedger::Index(int64_t id, Stored* stored) {
  if (!stored->tokens->values.empty()) index_.Insert(stored->tokens, id);
  stored->indexed = true;
}

// ----------------------------------------------------------------------------------------
// selection

Result<LocalLedger::Tokens> LocalLedger::TokensOf(const char* call, const LookupQuery& query) {
  if (!query.tokens) return Tokens();
  QUIRE_ASSIGN_OR_RETURN(MaskedTokens masked,
                         MaskTokens(call, *query.tokens, query.roi ? &*query.roi : nullptr));
  return Tokens(std::make_shared<const MaskedTokens>(std::move(masked)));
}

Result<std::optional<Handover>> LocalLedger::Take(const char* call, const LookupQuery& query,
                                                  Timeout timeout) {
  QUIRE_ASSIGN_OR_RETURN(Tokens tokens, TokensOf(call, query));
  std::unique_lock lock(mutex_);
  if (closed_) return ClosedError(call);
  IndexReturned();
  if (const std::optional<int64_t> id = FindEntry(tokens)) {
    RemoveEntry(*id);
    return HandOver(*id);
  }
  WaitingQuery self{.tokens = std::move(tokens)};
  const int64_t query_id = StartWaiting(&self);
  WaitFor(lock, self.changed, DeadlineOf(timeout), [&] { return self.given >= 0; });
  if (self.given >= 0) return HandOver(self.given);
  StopWaiting(query_id);
  if (closed_) return ClosedError(call);
  return std::optional<Handover>();
}

// A query in the list of those that wait, or with its entry.
class LocalLedger::Pending final : public PendingTake {
 public:
  Pending(std::shared_ptr<LocalLedger> ledger, Tokens tokens, std::function<void()> wake)
      : ledger_(std::move(ledger)), query_{.tokens = std::move(tokens), .wake = std::move(wake)} {}
  ~Pending() override {
    {
      const std::lock_guard lock(ledger_->mutex_);
      if (id_ >= 0 && query_.given < 0) ledger_->StopWaiting(id_);
    }
    if (query_.given >= 0 && !is_done_) ledger_->Fail(query_.given);
  }

  // REQUIRES: the ledger's lock is held.
  void Start() {
    if (const std::optional<int64_t> found = ledger_->FindEntry(query_.tokens)) {
      ledger_->RemoveEntry(*found);
      query_.given = *found;
      id_ = 0;
    } else {
      id_ = ledger_->StartWaiting(&query_);
    }
  }

  Result<std::optional<Handover>> Poll() override {
    const std::lock_guard lock(ledger_->mutex_);
    if (query_.given >= 0) {
      is_done_ = true;
      return ledger_->HandOver(query_.given);
    }
    if (ledger_->closed_) return ClosedError("Take");
    return std::optional<Handover>();
  }

 private:
  std::shared_ptr<LocalLedger> ledger_;
  WaitingQuery query_;
  int64_t id_ = -1;  // of the query; below 0 before Start
  bool is_done_ = false;
};

Result<std::unique_ptr<PendingTake>> LocalLedger::StartTake(const LookupQuery& query,
                                                            std::function<void()> wake) {
  QUIRE_ASSIGN_OR_RETURN(Tokens tokens, TokensOf("Take", query));
  auto pending =
      std::make_unique<Pending>(weak_from_this().lock(), std::move(tokens), std::move(wake));
  const std::lock_guard lock(mutex_);
  if (closed_) return ClosedError("Take");
  IndexReturned();
  pending->Start();
  return std::unique_ptr<PendingTake>(std::move(pending));
}

std::optional<int64_t> LocalLedger::FindEntry(const Tokens& tokens) const noexcept {
  if (tokens == nullptr) {
    return entries_.empty() ? std::nullopt : std::optional(entries_.begin()->first);
  }
  return options_.prefer == SelectOrder::kLongest ? index_.FindLongest(*tokens)
                                                  : index_.FindOldest(*tokens);
}

// From entries_ to on_the_way_.
void LocalLedger::RemoveEntry(int64_t id) noexcept {
  Entries::node_type stored = entries_.extract(id);
  if (!stored.mapped().tokens->values.empty()) index_.Erase(*stored.mapped().tokens, id);
  stored.mapped().indexed = false;
  on_the_way_.insert(std::move(stored));
}

std::optional<Handover> LocalLedger::HandOver(int64_t id) noexcept {
  return Handover(weak_from_this().lock(), id, &on_the_way_.find(id)->second.entry);
}

int64_t LocalLedger::StartWaiting(WaitingQuery* query) {
  const int64_t id = next_query_id_;
  waiting_queries_.emplace(id, query);
  try {
    if (query->tokens == nullptr) {
      waiting_for_any_.insert(id);
    } else if (!query->tokens->values.empty()) {
      waiting_index_.Insert(query->tokens, id);
    }
  } catch (const std::bad_alloc&) {
    waiting_queries_.erase(id);
    throw;
  }
  ++next_query_id_;
  return id;
}

void LocalLedger::StopWaiting(int64_t query_id) noexcept {
  const auto place = waiting_queries_.find(query_id);
  const Tokens& tokens = place->second->tokens;
  if (tokens == nullptr) {
    waiting_for_any_.erase(query_id);
  } else if (!tokens->values.empty()) {
    waiting_index_.Erase(*tokens, query_id);
  }
  waiting_queries_.erase(place);
}

// ----------------------------------------------------------------------------------- after
// handover

LookupEntry LocalLedger::Complete(int64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto place = on_the_way_.find(id);
  LookupEntry entry = std::move(place->second.entry);
  const int64_t bytes = place->second.bytes;
  on_the_way_.erase(place);
  FreeBytes(bytes);
  return entry;
}

void LocalLedger::Fail(int64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  Entries::node_type stored = on_the_way_.extract(id);
  if (closed_ || !options_.put_back) return FreeBytes(stored.mapped().bytes);
  if (FindWaiting(stored.mapped().tokens)) return Publish(std::move(stored));
  try {
    Index(id, &stored.mapped());
  } catch (const std::bad_alloc&) {  // the next call that selects indexes it, or says why not
    ++not_indexed_;
  }
  entries_.insert(std::move(stored));
}

void LocalLedger::IndexReturned() {
  if (not_indexed_ == 0) return;
  for (auto& [id, stored] : entries_) {
    if (stored.indexed) continue;
    Index(id, &stored);
    --not_indexed_;
  }
}

void LocalLedger::Close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  while (!entries_.empty()) {
    Entries::node_type stored = entries_.extract(entries_.begin());
    used_bytes_ -= stored.mapped().bytes;
    if (stored.mapped().indexed && !stored.mapped().tokens->values.empty()) {
      index_.Erase(*stored.mapped().tokens, stored.key());
    }
  }
  not_indexed_ = 0;
  for (WaitingInsert* insert : waiting_inserts_) insert->changed.notify_one();
  for (const auto& [id, query] : waiting_queries_) query->Notify();
}

}  // namespace

// -----------------------------------------------------------------------------------------
// Handover

Handover::Handover(std::shared_ptr<Ledger> ledger, int64_t id, LookupEntry* entry) noexcept
    : ledger_(std::move(ledger)), id_(id), entry_(entry) {}

Handover::Handover(Handover&& other) noexcept
    : ledger_(std::exchange(other.ledger_, nullptr)), id_(other.id_), entry_(other.entry_) {}

Handover& Handover::operator=(Handover&& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(id_, other.id_);
  std::swap(entry_, other.entry_);
  return *this;
}

Handover::~Handover() { Fail(); }

LookupEntry Handover::Complete() noexcept {
  QUIRE_CHECK(ledger_ != nullptr) << "the handover is done";
  return std::exchange(ledger_, nullptr)->Complete(id_);
}

void Handover::Fail() noexcept {
  if (ledger_ != nullptr) std::exchange(ledger_, nullptr)->Fail(id_);
}

// ------------------------------------------------------------------------------------ LookupBuffer

namespace {

class LedgerBuffer final : public LocalLookupBuffer {
 public:
  explicit LedgerBuffer(const LookupBufferOptions& options)
      : ledger_(std::make_shared<LocalLedger>(options)) {}
  ~LedgerBuffer() override { ledger_->Close(); }

  Status Insert(LookupEntry entry, Timeout timeout) override {
    return GuardEntry([&] { return ledger_->Insert(std::move(entry), timeout); });
  }

  Result<std::optional<LookupEntry>> DropSelect(const LookupQuery& query,
                                                Timeout timeout) override {
    return GuardEntry([&]() -> Result<std::optional<LookupEntry>> {
      QUIRE_ASSIGN_OR_RETURN(std::optional<Handover> taken,
                             ledger_->Take("DropSelect", query, timeout));
      if (!taken) return std::optional<LookupEntry>();
      return std::optional<LookupEntry>(taken->Complete());
    });
  }

  Result<std::optional<Handover>> Take(const LookupQuery& query, Timeout timeout) override {
    return GuardEntry([&] { return ledger_->Take("Take", query, timeout); });
  }

  Result<std::unique_ptr<PendingTake>> StartTake(const LookupQuery& query,
                                                 std::function<void()> wake) override {
    return GuardEntry([&] { return ledger_->StartTake(query, std::move(wake)); });
  }

  void Close() noexcept override { ledger_->Close(); }
  int64_t used_bytes() const override { return ledger_->used_bytes(); }
  int64_t capacity_bytes() const override { return ledger_->capacity_bytes(); }
  int64_t size() const override { return ledger_->size(); }
  int64_t waiting() const override { return ledger_->waiting(); }

 private:
  std::shared_ptr<LocalLedger> ledger_;
};

}  // namespace

int64_t LookupEntry::bytes() const {
  int64_t bytes = tokens.bytes() + roi.bytes();
  for (const auto& [name, tensor] : tensors) bytes += tensor.bytes();
  return bytes;
}

Result<std::unique_ptr<LookupBuffer>> LookupBuffer::Create(const LookupBufferOptions& options) {
  QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<LookupBuffer> buffer, LocalLookupBuffer::Create(options));
  return buffer;
}

Result<std::unique_ptr<LocalLookupBuffer>> LocalLookupBuffer::Create(
    const LookupBufferOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<LocalLookupBuffer>> {
    if (options.capacity_bytes < 1) {
      return Status(StatusCode::kBadArgument, "LookupBufferOptions::capacity_bytes is " +
                                                  std::to_string(options.capacity_bytes) +
                                                  "; it must be at least 1");
    }
    return std::unique_ptr<LocalLookupBuffer>(std::make_unique<LedgerBuffer>(options));
  });
}

}  // namespace quire
