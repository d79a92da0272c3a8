// A ChunkTier in memory that a test can slow down, hold, break and make lie.
#ifndef QUIRE_STORE_TESTING_FAKE_TIER_H_
#define QUIRE_STORE_TESTING_FAKE_TIER_H_

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/fake_clock.h"
#include "store/tier/chunk_tier.h"

namespace quire {

class FakeTier final : public ChunkTier {
 public:
  enum class Lie {
    kNone,
    kPrefix,       // says that it has everything
    kNoEnd,        // ends no read
    kNoSections,   // ends reads as complete without a section
    kOtherHeader,  // begins another chunk than was asked for
    kCancelled,    // ends reads as cancelled, though they were not
    kShortWrite,   // says of no chunk what became of it
  };
  struct Script {
    bool knows = true;                                     // without I/O; else Knows is -1
    bool left_alone = false;                               // by breakers of its own
    Status prefix{}, read{}, write{};                      // what calls fail with
    Status control{};                                      // SetExpiry, SetPriority and Remove, too
    Status expiry{};                                       // SetExpiry alone
    bool hold_prefix = false, hold_writes = false;         // until released or the deadline
    bool hold_upkeep = false;                              // Clear, List, CollectGarbage
    bool durable = true;                                   // else no put is known to be done
    int64_t events_dropped = 0;                            // that it says
    int64_t layers = std::numeric_limits<int64_t>::max();  // that reads get to before they are held
    int64_t read_ns = 0, read_ns_per_kib = 0;              // that pass on the clock
    Lie lie = Lie::kNone;
    std::set<ChunkKey> damaged{};
  };
  struct Calls {
    int64_t prefix = 0, reads = 0, writes = 0, controls = 0, upkeeps = 0;
    int64_t upkeep_deadline_ns = kNever;  // the first one
    int64_t unwanted = 0;                 // chunks that nobody waited for in the middle of a read
    int64_t asks = 0;                     // calls of Prefixes, each with those of Prefix in it
    int64_t collisions = 0;               // reads that found a chunk of another key
    std::map<ChunkKey, int64_t> chunk_reads{}, chunk_writes{};
  };

  // It finds chunks by the first `key_bits` bits of their keys, at most 8, and by no salt; 0 = by
  // whole ids.
  FakeTier(TierKind kind, std::shared_ptr<FakeClock> clock, int key_bits = 0)
      : kind_(kind), clock_(std::move(clock)), key_bits_(key_bits) {}

  // ---- The test's side
  // One that has the same chunks and follows the same script, for a store that is opened again.
  std::unique_ptr<FakeTier> Copy() const {
    const std::lock_guard lock(mutex_);
    auto copy = std::make_unique<FakeTier>(kind_, clock_, key_bits_);
    copy->script_ = script_;
    copy->chunks_ = chunks_;
    return copy;
  }
  void Change(const std::function<void(Script&)>& change) {
    const std::lock_guard lock(mutex_);
    change(script_);
    changed_.notify_all();
  }
  Calls calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  int64_t expires_ms(const ChunkId& id) const {
    const std::lock_guard lock(mutex_);
    const auto at = chunks_.find(Cut(id));
    return at == chunks_.end() ? -1 : at->second.expires_ms;
  }
  int64_t pins() const {
    const std::lock_guard lock(mutex_);
    int64_t pins = 0;
    for (const auto& [id, entry] : chunks_) pins += entry.pins;
    return pins;
  }
  // Returns once `count` calls are held.
  void AwaitHeld(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_ >= count; });
  }
  void Drop(const ChunkKey& key) {
    const std::lock_guard lock(mutex_);
    std::erase_if(chunks_, [&](const auto& entry) { return entry.first.key == Cut(key); });
  }

  // ---- ChunkTier
  Status AddPassport(const Digest&, std::string_view) override { return {}; }
  Result<std::vector<std::string>> Passports(int64_t) override {
    return std::vector<std::string>();
  }
  bool IsUnavailable() const override {
    const std::lock_guard lock(mutex_);
    return script_.left_alone;
  }
  int Knows(const ChunkId& id) const override {
    const std::lock_guard lock(mutex_);
    if (!script_.knows) return -1;
    return Find(id) != nullptr ? 1 : 0;
  }
  bool IsStored(const ChunkId& id) const override { return Knows(id) == 1 && IsDurable(); }
  std::optional<ChunkWorth> Worth(const ChunkId& id) const override {
    const std::lock_guard lock(mutex_);
    const Entry* const entry = Find(id);
    return entry == nullptr ? std::nullopt : std::optional(entry->worth);
  }
  Result<int64_t> Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    ++calls_.prefix;
    if (!Hold(lock, deadline_ns, [&] { return !script_.hold_prefix; })) return Late();
    if (!script_.prefix.ok()) return script_.prefix;
    if (script_.lie == Lie::kPrefix) return static_cast<int64_t>(ids.size()) + 7;
    int64_t there = 0;
    for (const ChunkId& id : ids) {
      if (Find(id) == nullptr) break;
      ++there;
    }
    return there;
  }
  std::vector<Result<int64_t>> Prefixes(std::span<const std::span<const ChunkId>> chains,
                                        int64_t deadline_ns) override {
    {
      const std::lock_guard lock(mutex_);
      ++calls_.asks;
    }
    return ChunkTier::Prefixes(chains, deadline_ns);
  }
  void Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) override {
    std::vector<Reading> readings(items.size());
    Script script;
    {
      std::unique_lock lock(mutex_);
      ++calls_.reads;
      script = script_;
      for (size_t i = 0; i < items.size(); ++i) {
        ++calls_.chunk_reads[items[i].id.key];
        const Entry* entry = Find(items[i].id);
        if (entry == nullptr) continue;
        readings[i].chunk = entry->chunk;
        calls_.collisions += entry->chunk->header().key != items[i].id.key ? 1 : 0;
      }
    }
    int64_t ns = script.read_ns;
    for (const Reading& reading : readings)
      if (reading.chunk != nullptr)
        ns += script.read_ns_per_kib * static_cast<int64_t>(reading.chunk->bytes().size()) / 1024;
    if (ns > 0) clock_->Advance(ns);
    if (script.lie == Lie::kNoEnd) return;
    for (size_t i = 0; i < items.size(); ++i) Begin(items[i], i, script, sink, &readings[i]);
    for (int64_t layer = 0; Continues(readings); ++layer) {
      const bool in_time = HoldLayer(items.size(), layer, deadline_ns, sink);
      for (size_t i = 0; i < items.size(); ++i)
        if (!readings[i].ended) {
          Status status = in_time ? ReadLayer(i, layer, &readings[i], sink) : Late();
          if (sink.Cancelled(i)) {
            status = Status(StatusCode::kCancelled, "fake: cancelled");
            const std::lock_guard lock(mutex_);
            ++calls_.unwanted;
          }
          if (!status.ok() || readings[i].sections_left == 0) End(i, status, sink, &readings[i]);
        }
    }
  }
  std::vector<Status> Write(std::span<const TierWrite> items, int64_t deadline_ns) override {
    std::vector<Status> outcomes;
    std::unique_lock lock(mutex_);
    ++calls_.writes;
    for (const TierWrite& item : items) ++calls_.chunk_writes[item.id.key];
    if (!Hold(lock, deadline_ns, [&] { return !script_.hold_writes; }))
      return std::vector<Status>(items.size(), Late());
    if (script_.lie == Lie::kShortWrite) return outcomes;
    for (const TierWrite& item : items) {
      if (script_.write.ok()) {
        ChunkBuffer copy(static_cast<int64_t>(item.chunk->bytes().size()));
        std::memcpy(copy.bytes().data(), item.chunk->bytes().data(), copy.bytes().size());
        chunks_.try_emplace(Cut(item.id), Entry{.chunk = std::make_shared<StoredChunk>(
                                                    item.chunk->header(), std::move(copy)),
                                                .worth = {item.recompute_seconds, item.priority}});
      }
      outcomes.push_back(script_.write);
    }
    return outcomes;
  }
  void Touch(const ChunkKey&) override {}
  bool Pin(const ChunkKey& key, int change) override {
    const std::lock_guard lock(mutex_);
    const auto at = FindKey(key);
    if (at == chunks_.end() || at->second.pins + change < 0) return false;
    at->second.pins += change;
    return true;
  }
  Status SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t) override {
    const std::lock_guard lock(mutex_);
    ++calls_.controls;
    if (!script_.control.ok()) return script_.control;
    if (!script_.expiry.ok()) return script_.expiry;
    const auto at = FindKey(key);
    if (at == chunks_.end()) return Status(StatusCode::kNotFound, "fake: not there");
    at->second.expires_ms = expires_ms;
    return {};
  }
  Status SetPriority(const ChunkKey& key, int priority, int64_t) override {
    const std::lock_guard lock(mutex_);
    ++calls_.controls;
    if (!script_.control.ok()) return script_.control;
    const auto at = FindKey(key);
    if (at == chunks_.end()) return Status(StatusCode::kNotFound, "fake: not there");
    at->second.worth.priority = priority;
    return {};
  }
  void SetQuota(const ChunkKey&, const ChunkQuota&) override {}
  Result<bool> Remove(const ChunkKey& key, int64_t) override {
    const std::lock_guard lock(mutex_);
    ++calls_.controls;
    if (!script_.control.ok()) return script_.control;
    const auto at = FindKey(key);
    if (at == chunks_.end()) return false;
    chunks_.erase(at);
    return true;
  }
  Result<int64_t> Clear(const Digest& fingerprint, const ChunkKey& root,
                        int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    if (!HoldUpkeep(lock, deadline_ns)) return Late();
    return static_cast<int64_t>(std::erase_if(chunks_, [&](const auto& entry) {
      return entry.first.fingerprint == fingerprint &&
             entry.first.root == Cut({.fingerprint = fingerprint, .root = root}).root;
    }));
  }
  Result<std::vector<ChunkListing>> List(int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    if (!HoldUpkeep(lock, deadline_ns)) return Late();
    std::vector<ChunkListing> listings;
    for (const auto& [id, entry] : chunks_)
      listings.push_back({.tier = kind_,
                          .key = id.key,
                          .fingerprint = id.fingerprint,
                          .bytes = static_cast<int64_t>(entry.chunk->bytes().size())});
    return listings;
  }
  Result<std::shared_ptr<const StoredChunk>> Get(const ChunkKey& key, int64_t) override {
    const std::lock_guard lock(mutex_);
    ++calls_.chunk_reads[key];
    for (const auto& [id, entry] : chunks_)
      if (id.key == Cut(key)) return std::shared_ptr<const StoredChunk>(entry.chunk);
    return Status(StatusCode::kNotFound, "fake: not there");
  }
  Result<int64_t> Verify(int64_t) override { return int64_t{0}; }
  Result<int64_t> CollectGarbage(int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    if (!HoldUpkeep(lock, deadline_ns)) return Late();
    return int64_t{0};
  }
  void Close() noexcept override {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }
  TierUsage Usage() const override {
    const std::lock_guard lock(mutex_);
    TierUsage usage;
    usage.chunks = static_cast<int64_t>(chunks_.size());
    usage.events_dropped = script_.events_dropped;
    return usage;
  }
  void TakeEvents(std::vector<ChunkEvent>* events) override {
    const std::lock_guard lock(mutex_);
    events->insert(events->end(), events_.begin(), events_.end());
    events_.clear();
  }

 private:
  struct Entry {
    std::shared_ptr<StoredChunk> chunk;
    int64_t pins = 0;
    ChunkWorth worth{};
    int64_t expires_ms = 0;
  };
  struct Reading {
    std::shared_ptr<StoredChunk> chunk;
    std::span<std::byte> target{};
    int64_t sections_left = 0;
    bool damaged = false;
    bool ended = false;
  };

  static Status Late() { return Status(StatusCode::kTimeout, "fake: the deadline passed"); }
  static bool Continues(const std::vector<Reading>& readings) {
    return std::any_of(readings.begin(), readings.end(), [](const Reading& r) { return !r.ended; });
  }
  static void End(size_t i, const Status& status, TierReadSink& sink, Reading* reading) {
    reading->ended = true;
    sink.OnEnd(i, status);
  }
  ChunkKey Cut(const ChunkKey& key) const {
    if (key_bits_ == 0) return key;
    ChunkKey cut;
    cut.digest.bytes[0] = static_cast<uint8_t>(key.digest.bytes[0] >> (8 - key_bits_));
    return cut;
  }
  ChunkId Cut(const ChunkId& id) const {
    if (key_bits_ == 0) return id;
    return {.fingerprint = id.fingerprint, .root = {}, .key = Cut(id.key)};
  }
  std::map<ChunkId, Entry>::iterator FindKey(const ChunkKey& key) {
    return std::ranges::find_if(chunks_,
                                [&](const auto& entry) { return entry.first.key == Cut(key); });
  }
  const Entry* Find(const ChunkId& id) const {
    const auto at = chunks_.find(Cut(id));
    if (at == chunks_.end()) return nullptr;
    const bool expired = at->second.expires_ms != 0 && at->second.expires_ms <= clock_->WallMs();
    return expired ? nullptr : &at->second;
  }
  template <typename F>
  bool Hold(std::unique_lock<std::mutex>& lock, int64_t deadline_ns, F&& is_released) {
    if (is_released()) return true;
    ++held_;
    changed_.notify_all();
    const bool released = WaitUntil(*clock_, changed_, lock, deadline_ns, is_released);
    --held_;
    return released;
  }
  // Those that end in time are counted.
  bool HoldUpkeep(std::unique_lock<std::mutex>& lock, int64_t deadline_ns) {
    calls_.upkeep_deadline_ns = std::min(calls_.upkeep_deadline_ns, deadline_ns);
    if (!Hold(lock, deadline_ns, [&] { return is_closed_ || !script_.hold_upkeep; })) return false;
    ++calls_.upkeeps;
    return true;
  }
  bool IsDurable() const {
    const std::lock_guard lock(mutex_);
    return script_.durable;
  }
  // Until the script lets reads get to this layer, or nobody wants them any more.
  bool HoldLayer(size_t count, int64_t layer, int64_t deadline_ns, const TierReadSink& sink) {
    for (;;) {
      std::unique_lock lock(mutex_);
      const int64_t poll = clock_->SteadyNs() + 1;  // a cancel is noticed when time passes
      if (Hold(lock, std::min(deadline_ns, poll), [&] { return layer < script_.layers; }))
        return true;
      lock.unlock();
      if (clock_->SteadyNs() >= deadline_ns) return false;
      bool wanted = false;
      for (size_t i = 0; i < count; ++i) wanted = wanted || !sink.Cancelled(i);
      if (!wanted) return true;
    }
  }
  void Begin(const TierRead& item, size_t i, const Script& script, TierReadSink& sink,
             Reading* reading) {
    if (!script.read.ok()) return End(i, script.read, sink, reading);
    if (script.lie == Lie::kCancelled)
      return End(i, Status(StatusCode::kCancelled, "fake: a lie"), sink, reading);
    if (reading->chunk == nullptr)
      return End(i, Status(StatusCode::kNotFound, "fake: not there"), sink, reading);
    ChunkHeader header = reading->chunk->header();
    if (script.lie == Lie::kOtherHeader) header.tokens.front() ^= 1;
    Result<std::span<std::byte>> target = sink.OnHeader(i, header);
    if (!target.ok()) return End(i, target.status(), sink, reading);
    reading->target = *target;
    std::memset(reading->target.data(), 0xAB, reading->target.size());
    std::memcpy(reading->target.data(), reading->chunk->bytes().data(),
                static_cast<size_t>(header.header_bytes));
    reading->sections_left = static_cast<int64_t>(header.sections.size());
    reading->damaged = script.damaged.contains(item.id.key);
    if (script.lie == Lie::kNoSections) End(i, {}, sink, reading);
  }
  static Status ReadLayer(size_t i, int64_t layer, Reading* reading, TierReadSink& sink) {
    if (reading->damaged && layer > 0) return Status(StatusCode::kCorrupt, "fake: damaged");
    const ChunkHeader& header = reading->chunk->header();
    for (size_t s = 0; s < header.sections.size(); ++s) {
      const Section& section = header.sections[s];
      if (section.layer_first != layer) continue;
      std::memcpy(reading->target.data() + section.offset,
                  reading->chunk->bytes().data() + section.offset,
                  static_cast<size_t>(section.length));
      --reading->sections_left;
      sink.OnSection(i, static_cast<int64_t>(s));
    }
    return {};
  }

  const TierKind kind_;
  const std::shared_ptr<FakeClock> clock_;
  const int key_bits_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Script script_;
  Calls calls_;
  int held_ = 0;
  bool is_closed_ = false;
  std::map<ChunkId, Entry> chunks_;
  std::vector<ChunkEvent> events_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_FAKE_TIER_H_
