// ChunkFetcher: brings chunks back. RAM answers at once; slower tiers are asked by threads.
//
// A fetch is looked for chunk by chunk, from the fastest tier to the slowest one, by one thread at
// a time: first the caller's, as far as no disk or network has to be asked, then a thread of the
// tier that has to be. What is found in a slow tier becomes a ChunkLoad; fetches that want the same
// chunk share it. Loads of one fetch from one tier are read together, layer by layer, and only if
// that is predicted to be faster than computing them. Fetches that begin together are asked for,
// and read, together.
#ifndef QUIRE_STORE_TIERED_CHUNK_FETCHER_H_
#define QUIRE_STORE_TIERED_CHUNK_FETCHER_H_

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "quire/chunk_store.h"
#include "store/tiered/fetch_state.h"
#include "store/tiered/read_queue.h"
#include "store/tiered/store_parts.h"

namespace quire {

class ChunkFetcher {
 public:
  // std::system_error without threads.
  explicit ChunkFetcher(std::shared_ptr<StoreParts> parts);
  ~ChunkFetcher();

  // REQUIRES: the request was checked. std::bad_alloc changes nothing.
  Result<std::vector<std::shared_ptr<ChunkFetch>>> Start(std::span<const FetchRequest> requests,
                                                         bool to_memory);
  int64_t started() const { return started_; }
  // What is on its way to a fetch reaches that fetch, and no tier. By the time this returns all
  // such loads know.
  void Disown(const Removals::Scope& removal) noexcept;
  // Ends all fetches; none may be started any more.
  void Close() noexcept;

 private:
  using Fetch = std::shared_ptr<FetchState>;
  using Load = std::shared_ptr<ChunkLoad>;
  class Sink;
  enum class Answer { kNo, kYes, kAsk };

  using Fetches = std::vector<Fetch>;

  // Goes on looking. Returns when all was found or somebody else goes on.
  void Search(Fetches fetches) noexcept;
  std::array<Fetches, kTierCount> SearchWithoutWaiting(const Fetches& fetches) noexcept;
  SlowTier* SearchSome(const Fetch& fetch);
  bool TakeFromMemory(FetchState& fetch, int64_t i);
  Answer AskWithoutWaiting(FetchState& fetch, SlowTier& tier, int64_t i);
  // False: the tier cannot be asked.
  bool PushAsk(SlowTier& tier, const Fetches& fetches) noexcept;
  // By a thread of the tier: how many of the next chunks it has.
  void Ask(SlowTier& tier, Fetches fetches) noexcept;
  // The chunk comes from the tier, or from where it is on its way already.
  bool Claim(const Fetch& fetch, int64_t i, SlowTier* tier);
  bool Begin(const Fetch& fetch, int64_t i, SlowTier& tier, PinBoard::Ticket* pin);
  bool Join(const Fetch& fetch, int64_t i, const Load& load);
  void StartRuns(const Fetches& fetches);
  bool DropIfUnwanted(const Load& load) noexcept;
  void PushRead(SlowTier& tier, int priority, std::vector<Load> loads) noexcept;

  // By a thread of the tier.
  void Read(SlowTier& tier, const std::vector<Load>& loads) noexcept;
  std::optional<ChunkLoad::Waiter> AnyWaiter(const ChunkLoad& load, int64_t* deadline_ns) const;
  bool PlanRead(const std::vector<Load>& loads, Sink* sink, std::vector<TierRead>* reads,
                int64_t* deadline_ns);
  bool IsUnderWay(const Load& load) const noexcept;
  void Finish(SlowTier& tier, const Load& load, const Status& status) noexcept;
  // Brings a complete chunk to all fetches that wait for it.
  void Serve(const Load& load) noexcept;
  void Promote(const ChunkLoad& load) noexcept;
  // Reads it from the next tier, or the same once more. False if there is none to try.
  bool Retry(const Load& load, StatusCode why) noexcept;
  std::optional<TierKind> NextTier(const ChunkLoad& load, StatusCode why) const;
  void Fail(const Load& load, MissReason why) noexcept;
  static void EndLateWaiters(ChunkLoad& load) noexcept;
  void ReleasePin(ChunkLoad& load) noexcept;

  const std::shared_ptr<StoreParts> parts_;
  std::atomic<int64_t> started_{0};
  std::map<ChunkId, Load> loads_;  // on their way; under StoreParts::fetch_mutex
  std::array<std::unique_ptr<ReadQueue>, kTierCount> queues_{};
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_CHUNK_FETCHER_H_
