// RedisRead: chunks out of Redis, layer by layer, each section verified as its bytes arrive.
#ifndef QUIRE_STORE_REDIS_REDIS_READ_H_
#define QUIRE_STORE_REDIS_REDIS_READ_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk.h"
#include "quire/status.h"
#include "store/redis/redis_cluster.h"
#include "store/redis/redis_object.h"
#include "store/tier/chunk_tier.h"

namespace quire {

// One chunk to read; `take_any`: of whatever passport and salt it is (repair tools).
struct RedisReadItem {
  const TierRead* read = nullptr;
  bool take_any = false;
};

// What was found out about an item beyond what the sink was told.
struct RedisReadOutcome {
  Status status{};
  int64_t pieces = 0;  // as far as its header says
  int64_t bytes = 0;
  // It is of no use to anybody and is to be removed: damaged, or parts of it are gone.
  bool damaged = false;
  bool incomplete = false;
};

// Headers of all items first, then their pieces: the first ones of all, then the next. From one
// thread.
class RedisRead final : private RedisObserver {
 public:
  RedisRead(RedisCluster& cluster, std::string_view prefix, std::span<const RedisReadItem> items,
            TierReadSink& sink);
  void Run(int64_t deadline_ns);
  // REQUIRES: Run returned.
  const RedisReadOutcome& outcome(size_t i) const { return states_[i].outcome; }

 private:
  struct State {
    bool ended = false;
    bool is_whole = false;  // all bytes are there, and the MAC is right if there is one
    bool doomed = false;    // it will end with outcome.status once no bytes are under way
    RedisHeader header{};
    ChunkExpectation expected{};
    std::span<std::byte> memory{};
    std::vector<bool> piece_done{};
    size_t next_piece = 0;      // leading pieces that are complete
    int64_t next_piece_at = 0;  // where the next one begins
    size_t open_ops = 0;
    int64_t verified = 0, announced = 0;  // leading sections
    RedisReadOutcome outcome{};
  };
  // Which piece of which item an op reads.
  struct PieceOp {
    size_t item;
    size_t piece;
    int64_t at;  // in the chunk
  };

  void ReadHeaders(int64_t deadline_ns);
  Status TakeHeader(size_t i, const RedisOp& op);
  void ReadPieces(int64_t deadline_ns);
  Status CheckPiece(const RedisOp& op, const PieceOp& piece, State& state);
  void Verify(size_t i, int64_t bytes_there);
  Status VerifyMac(State& state);
  void Announce();
  void AnnounceLayer(size_t i, int64_t layer);
  void Doom(size_t i, Status status);
  void EndIfQuiet(size_t i);
  void End(size_t i, const Status& status);

  void OnPlaced(size_t i, size_t count) override;
  void OnDone(size_t i) override;
  bool Cancelled(size_t i) override;

  RedisCluster& cluster_;
  const std::string_view prefix_;
  const std::span<const RedisReadItem> items_;
  TierReadSink& sink_;
  std::vector<State> states_;
  std::vector<RedisOp> ops_;
  std::vector<PieceOp> piece_ops_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_READ_H_
