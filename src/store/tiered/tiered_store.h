// TieredStore: the class behind ChunkStore. It checks arguments and calls its parts: MemoryTier,
// ChunkFetcher (bringing back), WriteQueue (one a slow tier), StoreKeeper (what happens by itself).
#ifndef QUIRE_STORE_TIERED_TIERED_STORE_H_
#define QUIRE_STORE_TIERED_TIERED_STORE_H_

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/chunk_store.h"
#include "store/tiered/chunk_fetcher.h"
#include "store/tiered/put_state.h"
#include "store/tiered/store_keeper.h"
#include "store/tiered/store_parts.h"

namespace quire {

// BadArgument for an option by name and value.
Status CheckStoreOptions(const ChunkStoreOptions& options, bool has_slow_tier);

class TieredStore final : public ChunkStore {
 public:
  // With these slow tiers in place of those that the options name. REQUIRES: options.clock.
  static Result<std::unique_ptr<ChunkStore>> Create(ChunkStoreOptions options, SlowTiers slow);
  explicit TieredStore(std::shared_ptr<StoreParts> parts);
  ~TieredStore() override;

  Status AddPassport(const Passport& passport) override;
  Result<std::shared_ptr<ChunkFetch>> Fetch(const FetchRequest& request) override;
  Result<std::vector<std::shared_ptr<ChunkFetch>>> FetchAll(
      std::span<const FetchRequest> requests) override;
  int64_t KnownPrefix(const KeySpace& keys, std::span<const ChunkKey> chain) override;
  Result<std::shared_ptr<ChunkFetch>> Prefetch(const FetchRequest& request) override;
  std::vector<bool> Wanted(const KeySpace& keys, std::span<const ChunkKey> chain) override;
  Result<std::shared_ptr<ChunkPut>> Put(const KeySpace& keys, ChunkBuffer sealed,
                                        const PutOptions& options) override;
  int64_t Pin(std::span<const ChunkKey> chunks) override;
  int64_t Unpin(std::span<const ChunkKey> chunks) override;
  void Touch(std::span<const ChunkKey> chunks) override;
  Result<int64_t> SetTtl(std::span<const ChunkKey> chunks, int64_t ttl_ms) override;
  Result<int64_t> SetPriority(std::span<const ChunkKey> chunks, int priority) override;
  Status SetQuota(const KeySpace& keys, const ChunkQuota& quota) override;
  Result<std::vector<Passport>> Passports() override;
  Result<int64_t> Remove(std::span<const ChunkKey> chunks) override;
  Result<int64_t> Clear(const KeySpace& keys) override;
  Result<std::vector<ChunkListing>> List(TierKind tier) override;
  Result<std::shared_ptr<const StoredChunk>> Get(TierKind tier, const ChunkKey& key) override;
  Result<int64_t> Verify(TierKind tier) override;
  Result<int64_t> CollectGarbage(TierKind tier) override;
  Status Flush(int64_t until_ns) override;
  void Close() noexcept override;
  ChunkStoreStatistics Statistics() const override;
  std::vector<ChunkEvent> TakeEvents() override;

 private:
  Status CheckOpen(const char* call) const;
  // Open, with these keys' passport added.
  Status CheckKeys(const char* call, const KeySpace& keys) const;
  Status CheckTier(const char* call, TierKind tier) const;
  Result<std::vector<std::shared_ptr<ChunkFetch>>> StartFetches(
      const char* call, std::span<const FetchRequest> requests, bool to_memory);
  // Calls in_memory(MemoryTier&, key), which is true if RAM has the chunk, and in_tier(ChunkTier&,
  // key, deadline_ns), NotFound if the tier does not, for all tiers; a tier that timed out is not
  // asked again. How many chunks were there; an error of a tier when all are done.
  template <typename InMemory, typename InTier>
  Result<int64_t> ForEachOf(std::span<const ChunkKey> chunks, InMemory in_memory, InTier in_tier);
  Result<KeptChunk> Admit(const KeySpace& keys, ChunkBuffer sealed, const PutOptions& options);

  // Whether a put is acknowledged only when this tier has written it.
  bool IsAwaited(TierKind tier) const;
  std::shared_ptr<PutState> Distribute(const KeptChunk& kept);
  // Nothing that is on its way between tiers, or waits to be written, brings back what is being
  // removed. Timeout: some of it is being written still.
  Status Settle(const char* call, const Removals::Scope& removal);
  Status WriteBackOne(const ChunkId& id, WriteQueue** full, int64_t* bytes);
  // Hands what only RAM has to the queues of the slow tiers, as room comes.
  Status WriteBack(int64_t until_ns);

  const std::shared_ptr<StoreParts> parts_;
  ChunkFetcher fetcher_;
  StoreKeeper keeper_;
  std::atomic<int64_t> prefetches_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_TIERED_STORE_H_
