// RedisTier: chunks in a Redis or a Redis Cluster that several machines share. The server may evict
// or lose anything at any time: what is not whole is a miss. docs/formats/redis.md has the layout.
//
// It is a guest there: a server that does not answer costs a call its deadline, then for a while
// nothing at all; replies are held to what the chunk's header said.
#ifndef QUIRE_STORE_REDIS_REDIS_TIER_H_
#define QUIRE_STORE_REDIS_REDIS_TIER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "store/redis/redis_cluster.h"
#include "store/redis/redis_object.h"
#include "store/redis/redis_read.h"
#include "store/redis/seen_chunks.h"
#include "store/tier/chunk_tier.h"

namespace quire {

class RedisTier final : public ChunkTier {
 public:
  // `mac_key`: what Get and Verify hold chunks to; reads bring their own. Connects to nothing yet.
  // BadArgument for an option.
  static Result<std::unique_ptr<RedisTier>> Create(const RedisTierOptions& options,
                                                   std::string mac_key,
                                                   std::shared_ptr<Clock> clock);

  Status AddPassport(const Digest& fingerprint, std::string_view passport_json) override;
  Result<std::vector<std::string>> Passports(int64_t deadline_ns) override;  // none
  bool IsUnavailable() const override { return !cluster_->available(); }
  // 1 for what was there within the last minute; else -1.
  int Knows(const ChunkId& id) const override;
  Result<int64_t> Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) override;
  std::vector<Result<int64_t>> Prefixes(std::span<const std::span<const ChunkId>> chains,
                                        int64_t deadline_ns) override;
  void Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) override;
  std::vector<Status> Write(std::span<const TierWrite> items, int64_t deadline_ns) override;
  // Nothing to do: for the server reading is using.
  void Touch(const ChunkKey& key) override;
  // The server knows no pins: whether the chunk is there.
  bool Pin(const ChunkKey& key, int change) override;
  Status SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t deadline_ns) override;
  // NotFound: the server has no priorities.
  Status SetPriority(const ChunkKey& key, int priority, int64_t deadline_ns) override;
  // Nothing: quotas are the server's.
  void SetQuota(const ChunkKey& root, const ChunkQuota& quota) override;
  Result<bool> Remove(const ChunkKey& key, int64_t deadline_ns) override;
  Result<int64_t> Clear(const Digest& fingerprint, const ChunkKey& root,
                        int64_t deadline_ns) override;
  Result<std::vector<ChunkListing>> List(int64_t deadline_ns) override;
  Result<std::shared_ptr<const StoredChunk>> Get(const ChunkKey& key, int64_t deadline_ns) override;
  Result<int64_t> Verify(int64_t deadline_ns) override;
  // Pieces that no header speaks of. What is expired the server removes itself.
  Result<int64_t> CollectGarbage(int64_t deadline_ns) override;
  // Chunks and bytes are not known: 0.
  TierUsage Usage() const override;
  void TakeEvents(std::vector<ChunkEvent>* events) override;

 private:
  using NameVisitor = std::function<Status(const std::vector<RedisName>& names)>;
  using HeaderVisitor = std::function<Status(const ChunkKey& key, const RedisHeader& header)>;
  struct WritePlan;

  RedisTier(const RedisTierOptions& options, std::string mac_key, std::shared_ptr<Clock> clock,
            std::unique_ptr<RedisCluster> cluster);

  std::vector<Status> WriteAll(std::span<const TierWrite> items, int64_t deadline_ns);
  Status PlanWrite(const TierWrite& item, int64_t deadline_ns, WritePlan* plan) const;
  std::vector<std::string> ExpiryArguments(int64_t expires_ms) const;
  Status ConcludeWrite(const TierWrite& item, const WritePlan& plan, int64_t removals);
  RedisOp HeaderExists(const ChunkKey& key) const;
  Result<int64_t> CountLeading(std::span<const ChunkId> ids, std::span<const RedisOp> ops,
                               int64_t removals);
  RedisOp RemovalOf(const ChunkKey& key, int64_t piece_count) const;
  Result<int64_t> PieceCount(const ChunkKey& key, int64_t deadline_ns);
  Result<std::shared_ptr<const StoredChunk>> ReadWhole(const ChunkKey& key, int64_t deadline_ns,
                                                       RedisReadOutcome* outcome);
  void RemoveUseless(std::span<const RedisReadItem> items, const RedisRead& read,
                     int64_t deadline_ns);
  void NoteRead(std::span<const RedisReadItem> items, const RedisRead& read, int64_t removals);
  Status ForEachName(std::string_view tail, int64_t deadline_ns, const NameVisitor& visit);
  Status VisitHeaders(std::span<const ChunkKey> keys, int64_t deadline_ns,
                      const HeaderVisitor& visit);
  Status ForEachHeader(int64_t deadline_ns, const HeaderVisitor& visit);
  Result<int64_t> OwnExpiry(const ChunkKey& key, int64_t deadline_ns);
  Result<int64_t> CollectAmong(const std::vector<RedisName>& names, int64_t deadline_ns);
  Result<bool> RemoveByKey(const ChunkKey& key, int64_t piece_count, int64_t deadline_ns);
  // `removals`: Removals() from before the server was asked. What may have been removed meanwhile
  // is not remembered: the next put would be taken for one of what is there, and lost.
  void Remember(const ChunkKey& key, int64_t removals);
  void Forget(const ChunkKey& key);
  void ForgetRemoved(const ChunkKey& key);
  int64_t Removals() const;
  void AddEvent(ChunkEvent::Kind kind, const ChunkKey& key);

  const RedisTierOptions options_;
  const std::string mac_key_;
  const std::shared_ptr<Clock> clock_;
  const std::unique_ptr<RedisCluster> cluster_;

  // Chunks that are remembered as being there.
  static constexpr size_t kSeenMax = 65536;

  mutable std::mutex mutex_;  // guards what follows
  SeenChunks seen_{kSeenMax};
  int64_t removals_ = 0;  // calls of ForgetRemoved
  std::deque<ChunkEvent> events_;
  TierUsage usage_;
};

// The tier that the options name. BadArgument for an option; in a build without Redis always, with
// the CMake option.
Result<std::unique_ptr<ChunkTier>> CreateRedisTier(const RedisTierOptions& options,
                                                   std::string mac_key,
                                                   std::shared_ptr<Clock> clock);

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_TIER_H_
