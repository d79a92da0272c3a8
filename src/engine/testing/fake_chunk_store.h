// Test only: a chunk store in memory whose time is a FakeClock: a caller that waits for it makes
// time pass. It can be slow, hang, lose, damage and refuse.
#ifndef QUIRE_ENGINE_TESTING_FAKE_CHUNK_STORE_H_
#define QUIRE_ENGINE_TESTING_FAKE_CHUNK_STORE_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/testing/fake_clock.h"
#include "quire/chunk_store.h"

namespace quire {

class FakeChunkStore final : public ChunkStore {
 public:
  explicit FakeChunkStore(std::shared_ptr<FakeClock> clock) : clock_(std::move(clock)) {}

  // ---- The script.
  int64_t call_ns = 0;   // until a call is answered, one call after another
  int64_t chunk_ns = 0;  // that each chunk of a fetch takes, one after another
  // > 0: instead, the layers of all chunks of a fetch come one after another, in this time each;
  // what has not come is garbage.
  int64_t layer_ns = 0;
  int64_t whole_chunks = 0;                          // but the first ones are whole at once
  std::function<Status(int64_t layer)> layer_fault;  // asked by each WaitLayer
  bool hangs = false;      // fetches are never done, not even when their deadline has passed
  bool read_only = false;  // nothing is wanted
  bool has_ram = false;    // it tells that it has a RAM tier
  TierKind tier = TierKind::kDisk;
  std::function<Status()> fetch_fault;  // asked by each Fetch
  std::function<Status()> put_fault;
  std::function<bool()>
      is_damaged;  // asked for each chunk when it is fetched; one byte differs then
  double compute_seconds_per_token = -1;  // of the last fetch

  // ---- What happened.
  int64_t calls = 0;    // that began fetches
  int64_t fetches = 0;  // prefetches too
  int64_t prefetches = 0;
  int64_t live_fetches = 0;
  int64_t cancelled = 0;  // fetches that were not done
  int64_t flushes = 0;
  int64_t polls = 0;                    // of fetches, whether they are done
  std::vector<const ChunkKey*> chains;  // where those lay that were given
  std::map<ChunkKey, int64_t> served;   // by key: how often it was given to a fetch
  std::vector<ChunkKey> puts;           // in order
  std::map<ChunkKey, std::shared_ptr<const StoredChunk>> chunks;

  class Fetched final : public ChunkFetch {
   public:
    Fetched(FakeChunkStore* store, const FetchRequest& request, int64_t start_ns)
        : store_(store), layer_ns_(store->layer_ns), start_ns_(start_ns) {
      deadline_ns_ = request.deadline_ns;
      const std::span<const ChunkKey> chain = request.chain;
      wanted_ = static_cast<int64_t>(chain.size()) - request.first_chunk;
      for (size_t i = static_cast<size_t>(request.first_chunk); i < chain.size(); ++i) {
        const auto found = store_->chunks.find(chain[i]);
        if (found == store_->chunks.end()) break;
        ++store_->served[chain[i]];
        const bool damaged = store_->is_damaged && store_->is_damaged();
        chunks_.push_back(damaged ? Damaged(*found->second) : found->second);
        if (layer_ns_ > 0) arriving_.emplace_back(*chunks_.back());
      }
      ++store_->fetches;
      ++store_->live_fetches;  // nothing fails behind this
    }
    ~Fetched() override { --store_->live_fetches; }

    int64_t chunk_count() const override { return wanted_; }
    bool located() const override { return Now() >= start_ns_; }
    int64_t found() const override { return static_cast<int64_t>(chunks_.size()); }
    int64_t ready() const override {
      if (store_->hangs || !located()) return 0;
      const int64_t now_ns = std::min(Now(), deadline_ns_);
      if (layer_ns_ > 0)
        return LayersThere() == LayerCount() ? found() : std::min(found(), store_->whole_chunks);
      if (store_->chunk_ns == 0) return found();
      return std::min(found(), (now_ns - start_ns_) / store_->chunk_ns);
    }
    bool done() const override {
      ++store_->polls;
      return IsDone();
    }
    bool IsDone() const {
      if (store_->hangs) return false;
      return cancelled_ || (located() && ready() == found()) || Now() >= deadline_ns_;
    }
    bool Wait(int64_t until_ns) override {
      if (!IsDone()) {
        const int64_t end_ns =
            layer_ns_ > 0 ? LayerNs(LayerCount() - 1) : start_ns_ + found() * store_->chunk_ns;
        const int64_t over_ns = store_->hangs ? until_ns : std::min(end_ns, until_ns);
        store_->clock_->Advance(std::max<int64_t>(0, over_ns - Now()));
      }
      return IsDone();
    }
    Status WaitLayer(int64_t layer, int64_t until_ns) override {
      if (layer_ns_ == 0 || store_->hangs || found() == 0) {
        Wait(until_ns);
        return ready() == found() ? Status() : Status(StatusCode::kTimeout, "fake");
      }
      if (store_->layer_fault) QUIRE_RETURN_IF_ERROR(store_->layer_fault(layer));
      if (cancelled_) return Status(StatusCode::kCancelled, "fake");
      const int64_t over_ns = std::min({LayerNs(layer), until_ns, deadline_ns_});
      store_->clock_->Advance(std::max<int64_t>(0, over_ns - Now()));
      if (LayersThere() <= layer) return Status(StatusCode::kTimeout, "fake");
      for (Arriving& chunk : arriving_) chunk.FillTo(LayersThere());
      return {};
    }
    std::shared_ptr<const StoredChunk> chunk(int64_t i) const override {
      QUIRE_CHECK(i < ready() || (i < found() && LayersThere() > 0));
      const auto at = static_cast<size_t>(i);
      return i < ready() ? chunks_[at] : arriving_[at].chunk;
    }
    TierKind tier(int64_t) const override { return store_->tier; }
    MissReason miss() const override {
      if (ready() == wanted_) return MissReason::kNone;
      if (ready() == found() || !IsDone()) return MissReason::kNotStored;
      return cancelled_ ? MissReason::kCancelled : MissReason::kTimeout;
    }
    void Cancel() noexcept override {
      if (!IsDone()) ++store_->cancelled;
      cancelled_ = true;
    }

   private:
    // A copy of a chunk whose sections are written as their layers come.
    struct Arriving {
      explicit Arriving(const StoredChunk& from) : source(from) {
        ChunkBuffer buffer(static_cast<int64_t>(from.bytes().size()));
        bytes = buffer.bytes();
        std::memset(bytes.data(), 0xFF, bytes.size());
        std::memcpy(bytes.data(), from.bytes().data(),
                    static_cast<size_t>(from.header().sections.front().offset));
        chunk = std::make_shared<StoredChunk>(from.header(), std::move(buffer));
      }
      void FillTo(int64_t layers) {
        for (const Section& section : source.header().sections) {
          if (section.layer_first >= layers) continue;
          std::memcpy(bytes.data() + section.offset, source.bytes().data() + section.offset,
                      static_cast<size_t>(section.length));
        }
      }
      const StoredChunk& source;  // which the fetch holds
      std::span<std::byte> bytes;
      std::shared_ptr<const StoredChunk> chunk;
    };

    int64_t Now() const { return store_->clock_->SteadyNs(); }
    int64_t LayerCount() const {
      return found() == 0 ? 0 : chunks_[0]->header().sections.back().layer_first + 1;
    }
    int64_t LayerNs(int64_t layer) const { return start_ns_ + (layer + 1) * layer_ns_; }
    int64_t LayersThere() const {
      if (layer_ns_ == 0 || !located()) return 0;
      return std::min(LayerCount(), (std::min(Now(), deadline_ns_) - start_ns_) / layer_ns_);
    }
    static std::shared_ptr<const StoredChunk> Damaged(const StoredChunk& sound) {
      ChunkBuffer bytes(static_cast<int64_t>(sound.bytes().size()));
      std::memcpy(bytes.bytes().data(), sound.bytes().data(), sound.bytes().size());
      const Section& last = sound.header().sections.back();
      bytes.bytes()[static_cast<size_t>(last.offset)] ^= std::byte{1};
      return std::make_shared<StoredChunk>(sound.header(), std::move(bytes));
    }

    FakeChunkStore* store_;
    const int64_t layer_ns_;
    std::vector<Arriving> arriving_;  // by layers
    const int64_t start_ns_;
    int64_t deadline_ns_ = 0;
    int64_t wanted_ = 0;
    bool cancelled_ = false;
    std::vector<std::shared_ptr<const StoredChunk>> chunks_;
  };

  class Done final : public ChunkPut {
   public:
    bool done() const override { return true; }
    bool Wait(int64_t) override { return true; }
    Status status() const override { return {}; }
  };

  Status AddPassport(const Passport& passport) override {
    QUIRE_RETURN_IF_ERROR(CheckOpen());
    return passport.ToJson().status();
  }
  Result<std::shared_ptr<ChunkFetch>> Fetch(const FetchRequest& request) override {
    QUIRE_ASSIGN_OR_RETURN(const auto begun, FetchAll(std::span(&request, 1)));
    return begun.front();
  }
  Result<std::vector<std::shared_ptr<ChunkFetch>>> FetchAll(
      std::span<const FetchRequest> requests) override {
    QUIRE_RETURN_IF_ERROR(CheckOpen());
    for (const FetchRequest& request : requests) {
      compute_seconds_per_token = request.compute_seconds_per_token;
      if (fetch_fault) QUIRE_RETURN_IF_ERROR(fetch_fault());
      QUIRE_ASSIGN_OR_RETURN(
          const std::vector<ChunkKey> chain,
          request.keys->Chain(request.tokens, request.chunk_tokens, request.tail));
      QUIRE_CHECK(std::ranges::equal(request.chain, chain)) << "keys of other tokens";
      chains.push_back(request.chain.data());
    }
    ++calls;
    answered_ns_ = std::max(answered_ns_, clock_->SteadyNs()) + call_ns;
    std::vector<std::shared_ptr<ChunkFetch>> begun;
    for (size_t i = 0; i < requests.size(); ++i) {
      begun.push_back(std::make_shared<Fetched>(this, requests[i], answered_ns_));
    }
    return begun;
  }
  int64_t KnownPrefix(const KeySpace&, std::span<const ChunkKey> chain) override {
    chains.push_back(chain.data());
    const auto missing = [&](const ChunkKey& key) { return !chunks.contains(key); };
    return std::find_if(chain.begin(), chain.end(), missing) - chain.begin();
  }
  Result<std::shared_ptr<ChunkFetch>> Prefetch(const FetchRequest& request) override {
    ++prefetches;
    return Fetch(request);
  }
  std::vector<bool> Wanted(const KeySpace&, std::span<const ChunkKey> chain) override {
    std::vector<bool> wanted;
    for (const ChunkKey& key : chain) wanted.push_back(!read_only && !chunks.contains(key));
    return wanted;
  }
  // Takes sound chunks of the space only.
  Result<std::shared_ptr<ChunkPut>> Put(const KeySpace& keys, ChunkBuffer sealed,
                                        const PutOptions&) override {
    QUIRE_RETURN_IF_ERROR(CheckOpen());
    if (put_fault) QUIRE_RETURN_IF_ERROR(put_fault());
    const Result<int64_t> size = ChunkHeaderBytes(sealed.bytes(), {});
    QUIRE_CHECK(size.ok());
    Result<ChunkHeader> header =
        DecodeChunkHeader(sealed.bytes().first(static_cast<size_t>(*size)), {});
    QUIRE_CHECK(header.ok()) << header.status().ToString();
    const ChunkKey key = header->key;
    QUIRE_CHECK(keys.Next({.digest = header->context}, header->tokens) == key);
    const Result<ChunkView> view = ChunkView::Open(
        sealed.bytes(), {.key = key, .fingerprint = keys.fingerprint()}, ChunkLimits{});
    QUIRE_CHECK(view.ok()) << view.status().ToString();
    QUIRE_CHECK(view->CheckAll().ok());
    puts.push_back(key);
    chunks[key] = std::make_shared<StoredChunk>(*std::move(header), std::move(sealed));
    return std::shared_ptr<ChunkPut>(std::make_shared<Done>());
  }

  int64_t Pin(std::span<const ChunkKey>) override { return 0; }
  int64_t Unpin(std::span<const ChunkKey>) override { return 0; }
  void Touch(std::span<const ChunkKey>) override {}
  Result<int64_t> SetTtl(std::span<const ChunkKey>, int64_t) override { return int64_t{0}; }
  Result<int64_t> SetPriority(std::span<const ChunkKey>, int) override { return int64_t{0}; }
  Result<std::vector<Passport>> Passports() override { return std::vector<Passport>(); }
  Status SetQuota(const KeySpace&, const ChunkQuota&) override { return {}; }
  Result<int64_t> Remove(std::span<const ChunkKey> keys) override {
    int64_t count = 0;
    for (const ChunkKey& key : keys) count += static_cast<int64_t>(chunks.erase(key));
    return count;
  }
  Result<int64_t> Clear(const KeySpace&) override {
    return static_cast<int64_t>(std::exchange(chunks, {}).size());
  }
  Result<std::vector<ChunkListing>> List(TierKind) override { return std::vector<ChunkListing>(); }
  Result<std::shared_ptr<const StoredChunk>> Get(TierKind, const ChunkKey& key) override {
    const auto found = chunks.find(key);
    if (found == chunks.end()) return Status(StatusCode::kNotFound, "fake");
    return found->second;
  }
  Result<int64_t> Verify(TierKind) override { return int64_t{0}; }
  Result<int64_t> CollectGarbage(TierKind) override { return int64_t{0}; }
  Status Flush(int64_t) override {
    QUIRE_RETURN_IF_ERROR(CheckOpen());
    ++flushes;
    return {};
  }
  void Close() noexcept override { closed_ = true; }
  ChunkStoreStatistics Statistics() const override {
    ChunkStoreStatistics statistics;
    statistics.tiers[static_cast<size_t>(TierKind::kRam)].present = has_ram;
    return statistics;
  }
  std::vector<ChunkEvent> TakeEvents() override { return {}; }

 private:
  Status CheckOpen() const {
    return closed_ ? Status(StatusCode::kClosed, "the fake store is closed") : Status();
  }

  std::shared_ptr<FakeClock> clock_;
  int64_t answered_ns_ = 0;  // the last call
  bool closed_ = false;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_FAKE_CHUNK_STORE_H_
