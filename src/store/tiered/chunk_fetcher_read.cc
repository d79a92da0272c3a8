// Reading chunks that were found.
#include <algorithm>
#include <utility>

#include "store/tiered/chunk_fetcher.h"

namespace quire {
namespace {

MissReason ReasonOf(StatusCode code) {
  constexpr std::pair<StatusCode, MissReason> kReasons[] = {
      {StatusCode::kNotFound, MissReason::kNotStored},
      {StatusCode::kCorrupt, MissReason::kCorrupt},
      {StatusCode::kIncompatible, MissReason::kIncompatible},
      {StatusCode::kTimeout, MissReason::kTimeout},
      {StatusCode::kCancelled, MissReason::kCancelled},
      {StatusCode::kFull, MissReason::kNoRoom},
      {StatusCode::kTooLarge, MissReason::kNoRoom},
      {StatusCode::kOutOfMemory, MissReason::kNoRoom}};
  for (const auto& [each, reason] : kReasons)
    if (each == code) return reason;
  return MissReason::kUnavailable;
}

// A tier that ends a read of its own accord is asked once more, but not for ever.
constexpr int kRetriesMax = 2;

}  // namespace

// What a tier tells about the loads of one read.
class ChunkFetcher::Sink final : public TierReadSink {
 public:
  explicit Sink(ChunkFetcher* fetcher, SlowTier* tier) : fetcher_(fetcher), tier_(tier) {}

  struct Item {
    Load load = nullptr;
    std::vector<int32_t> tokens{};  // that were asked for
    TierRead read{};
  };
  std::vector<Item> items{};
  int64_t begin_ns = 0;
  int64_t bytes_read = 0;  // of what came whole
  bool failed = false;     // something did not
  std::optional<CircuitBreaker::Call> call{};
  size_t ended = 0;

  Result<std::span<std::byte>> OnHeader(size_t item, const ChunkHeader& header) override {
    ChunkLoad& load = *items[item].load;
    // The tier checked it; serving wrong bytes is bad enough to look twice.
    QUIRE_RETURN_IF_ERROR(CheckChunk(header, items[item].read.expected));
    if (!load.budget->Take(header.total_bytes))
      return Status(StatusCode::kFull, "ChunkStore::Fetch: fetch_bytes_max is out");
    std::shared_ptr<StoredChunk> chunk;
    std::span<std::byte> bytes;
    std::map<int64_t, int64_t> pending;
    std::vector<bool> verified;
    try {
      for (const Section& section : header.sections) ++pending[section.layer_first];
      verified.resize(header.sections.size());
      chunk = SpareChunks::Make(fetcher_->parts_->spares, header, &bytes);
    } catch (const std::bad_alloc&) {
      load.budget->Give(header.total_bytes);
      return Status::OutOfMemory();
    }
    const std::lock_guard lock(fetcher_->parts_->fetch_mutex);
    load.reserved_bytes += header.total_bytes;
    load.chunk.swap(chunk);
    load.pending.swap(pending);
    load.verified.swap(verified);
    return bytes;
  }

  std::shared_ptr<const void> OwnerOf(size_t item) override {
    const std::lock_guard lock(fetcher_->parts_->fetch_mutex);
    return items[item].load->chunk;
  }

  void OnSection(size_t item, int64_t section) override {
    const std::lock_guard lock(fetcher_->parts_->fetch_mutex);
    ChunkLoad& load = *items[item].load;
    const size_t at = static_cast<size_t>(section);
    if (load.chunk == nullptr || at >= load.verified.size() || load.verified[at]) return;
    load.verified[at] = true;
    const auto layer = load.pending.find(load.chunk->header().sections[at].layer_first);
    if (--layer->second > 0) return;
    load.pending.erase(layer);
    for (const ChunkLoad::Waiter& waiter : load.waiters) waiter.fetch->LayerCame();
  }

  void OnEnd(size_t item, const Status& status) override {
    if (!fetcher_->IsUnderWay(items[item].load)) return;
    const int64_t now = fetcher_->parts_->clock->SteadyNs();
    tier_->Count(status);
    if (status.ok()) {
      bytes_read += items[item].load->reserved_bytes;
    } else {
      failed = true;
    }
    if (call) call->Report(status);  // one call is one sign of health, for all its chunks
    // Before the last one is told: a caller that has its chunks finds the measure of them.
    if (++ended == items.size() && !failed && bytes_read > 0)
      tier_->predictor.Measured(bytes_read, static_cast<double>(now - begin_ns) * 1e-9);
    fetcher_->Finish(*tier_, items[item].load, status);
  }

  // A fetch that comes after this begins its own load: this one is about to end.
  bool Cancelled(size_t item) const override {
    const Load& load = items[item].load;
    {
      const std::lock_guard lock(fetcher_->parts_->fetch_mutex);
      EndLateWaiters(*load);
    }
    return fetcher_->DropIfUnwanted(load);
  }

 private:
  ChunkFetcher* const fetcher_;
  SlowTier* const tier_;
};

// One of the load's waiters; *deadline_ns is raised to the last moment of all of them.
std::optional<ChunkLoad::Waiter> ChunkFetcher::AnyWaiter(const ChunkLoad& load,
                                                         int64_t* deadline_ns) const {
  const std::lock_guard lock(parts_->fetch_mutex);
  if (load.waiters.empty()) return std::nullopt;
  for (const ChunkLoad::Waiter& waiter : load.waiters)
    *deadline_ns = std::max(*deadline_ns, waiter.fetch->deadline_ns());
  return load.waiters.front();
}

// What of the loads is still wanted, as the tier is asked for it. False if nothing is.
bool ChunkFetcher::PlanRead(const std::vector<Load>& loads, Sink* sink,
                            std::vector<TierRead>* reads, int64_t* deadline_ns) {
  sink->items.reserve(loads.size());
  for (const Load& load : loads) {
    std::optional<ChunkLoad::Waiter> waiter;
    while (!waiter && !DropIfUnwanted(load)) waiter = AnyWaiter(*load, deadline_ns);
    if (!waiter) continue;
    Sink::Item& item = sink->items.emplace_back();
    item.load = load;
    const std::span<const int32_t> tokens = waiter->fetch->tokens(waiter->slot);
    item.tokens.assign(tokens.begin(), tokens.end());
    item.read = {.id = load->id,
                 .expected = waiter->fetch->Expect(waiter->slot),
                 .limits = parts_->passports.Find(load->id.fingerprint)->limits};
    item.read.expected.tokens = std::span<const int32_t>(item.tokens);
  }
  for (const Sink::Item& item : sink->items) reads->push_back(item.read);
  return !reads->empty();
}

void ChunkFetcher::Read(SlowTier& tier, const std::vector<Load>& loads) noexcept {
  Sink sink(this, &tier);
  sink.begin_ns = parts_->clock->SteadyNs();
  // The status of those that the tier leaves without an end.
  Status left = Status::OutOfMemory();
  try {
    std::vector<TierRead> reads;
    int64_t deadline = 0;
    if (PlanRead(loads, &sink, &reads, &deadline)) {
      left = Status(StatusCode::kUnavailable, "ChunkStore::Fetch: the tier does not answer");
      if (auto call = tier.Admit(deadline)) {
        sink.call.emplace(*std::move(call));
        tier.tier->Read(reads, deadline, sink);
      }
    }
  } catch (const std::bad_alloc&) {
    left = Status::OutOfMemory();
  }
  for (const Load& load : loads) Finish(tier, load, left);
}

bool ChunkFetcher::IsUnderWay(const Load& load) const noexcept {
  const std::lock_guard lock(parts_->fetch_mutex);
  const auto at = loads_.find(load->id);
  return at != loads_.end() && at->second == load;
}

// Once for each load; what comes after the first time is ignored.
void ChunkFetcher::Finish(SlowTier& tier, const Load& load, const Status& status) noexcept {
  if (!IsUnderWay(load)) return;
  if (status.ok() && load->chunk != nullptr && load->pending.empty()) {
    ++tier.hits;
    tier.bytes_read += load->reserved_bytes;
    Serve(load);
    return;
  }
  if (status.code() == StatusCode::kNotFound) ++tier.misses;
  if (!Retry(load, status.code()))
    // "Ok" without all of its sections is what damage looks like from here.
    Fail(load, status.ok() ? MissReason::kCorrupt : ReasonOf(status.code()));
}

void ChunkFetcher::Serve(const Load& load) noexcept {
  // Before it leaves loads_: a fetch that does not find it there finds it in RAM.
  Promote(*load);
  ReleasePin(*load);
  std::vector<ChunkLoad::Waiter> waiters;  // ends after the lock
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    loads_.erase(load->id);
    waiters.swap(load->waiters);
    for (const ChunkLoad::Waiter& waiter : waiters) {
      // A digest that collides serves nobody other tokens.
      if (std::ranges::equal(load->chunk->header().tokens, waiter.fetch->tokens(waiter.slot))) {
        waiter.fetch->Complete(waiter.slot, load->chunk);
      } else {
        waiter.fetch->Failed(waiter.slot, MissReason::kIncompatible);
      }
    }
  }
}

void ChunkFetcher::Promote(const ChunkLoad& load) noexcept {
  const KeptChunk kept{load.id, load.chunk,
                       parts_->slow[At(load.tier)]->tier->Worth(load.id).value_or(
                           ChunkWorth{.priority = parts_->options.priority})};
  const Removals::Move move = parts_->removals.BeginMove();
  bool to_memory = false;
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    if (load.is_removed) return;
    to_memory = load.to_memory && parts_->has_memory();
  }
  try {
    if (to_memory) parts_->Keep(kept, /*unwritten=*/false);
    WriteQueue* disk = parts_->writes[At(TierKind::kDisk)].get();
    if (load.tier == TierKind::kRedis && disk != nullptr && parts_->options.promote)
      static_cast<void>(disk->Push(kept, nullptr));  // the queue counts what it drops
  } catch (const std::bad_alloc&) {
    // It stays where it was.
  }
}

// The tier that may have what `load` did not bring.
std::optional<TierKind> ChunkFetcher::NextTier(const ChunkLoad& load, StatusCode why) const {
  if (why == StatusCode::kTimeout || why == StatusCode::kCancelled) {
    // Another fetch's deadline or end, not that of the present waiters.
    if (load.retries < kRetriesMax) return load.tier;
    return std::nullopt;
  }
  if (why == StatusCode::kFull || why == StatusCode::kOutOfMemory || why == StatusCode::kTooLarge)
    return std::nullopt;
  for (const TierKind kind : kSlowTiers) {
    const SlowTier* tier = parts_->slow[At(kind)].get();
    if (kind > load.tier && tier != nullptr && tier->tier->Knows(load.id) != 0 && tier->usable())
      return kind;
  }
  return std::nullopt;
}

bool ChunkFetcher::Retry(const Load& load, StatusCode why) noexcept {
  try {
    Load next;
    std::vector<Load> loads(1);
    int priority = 0;
    {
      const std::lock_guard lock(parts_->fetch_mutex);
      EndLateWaiters(*load);
      // A waiter that was given a layer keeps it.
      const bool is_seen =
          std::find(load->verified.begin(), load->verified.end(), true) != load->verified.end();
      if (load->waiters.empty() || is_seen) return false;
      const std::optional<TierKind> kind = NextTier(*load, why);
      if (!kind) return false;
      next = std::make_shared<ChunkLoad>(parts_->fetch_budget, load->id, *kind);
      next->retries = load->retries + 1;
      next->to_memory = load->to_memory;
      next->is_removed = load->is_removed;
      next->waiters.swap(load->waiters);
      for (const ChunkLoad::Waiter& waiter : next->waiters) {
        priority = std::max(priority, waiter.fetch->priority());
        FetchState::Slot& slot = waiter.fetch->slot(waiter.slot);
        slot.load = next;
        slot.tier = *kind;
      }
      loads_.find(load->id)->second = next;
    }
    ReleasePin(*load);
    loads.front() = next;
    PushRead(*parts_->slow[At(next->tier)], priority, std::move(loads));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void ChunkFetcher::Fail(const Load& load, MissReason why) noexcept {
  std::vector<ChunkLoad::Waiter> waiters;  // ends after the lock
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    const auto at = loads_.find(load->id);
    if (at == loads_.end() || at->second != load) return;
    loads_.erase(at);
    waiters.swap(load->waiters);
    for (const ChunkLoad::Waiter& waiter : waiters) waiter.fetch->Failed(waiter.slot, why);
  }
  ReleasePin(*load);
}

void ChunkFetcher::EndLateWaiters(ChunkLoad& load) noexcept {
  // Each one that ends leaves the load, so that places move.
  for (size_t i = 0; i < load.waiters.size();) {
    const std::shared_ptr<FetchState> fetch = load.waiters[i].fetch;
    fetch->EndIfLate();
    if (i < load.waiters.size() && load.waiters[i].fetch == fetch) ++i;
  }
}

void ChunkFetcher::ReleasePin(ChunkLoad& load) noexcept {
  if (const auto pin = parts_->pins.Release(std::exchange(load.pin, 0))) parts_->Unpin(*pin);
}

}  // namespace quire
