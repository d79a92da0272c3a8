// ChunkLoad: one chunk on its way from a slow tier, shared by all fetches that want it.
#ifndef QUIRE_STORE_TIERED_CHUNK_LOAD_H_
#define QUIRE_STORE_TIERED_CHUNK_LOAD_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "quire/chunk_store.h"
#include "store/tier/byte_budget.h"
#include "store/tier/chunk_tier.h"
#include "store/tiered/pin_board.h"

namespace quire {

class FetchState;

struct ChunkLoad {
  struct Waiter {
    std::shared_ptr<FetchState> fetch;
    int64_t slot = 0;
  };

  ChunkLoad(std::shared_ptr<ByteBudget> fetch_budget, const ChunkId& chunk_id, TierKind from)
      : budget(std::move(fetch_budget)), id(chunk_id), tier(from) {}
  ChunkLoad(const ChunkLoad&) = delete;
  ChunkLoad& operator=(const ChunkLoad&) = delete;
  ~ChunkLoad() { budget->Give(reserved_bytes); }

  const std::shared_ptr<ByteBudget> budget;
  const ChunkId id;
  const TierKind tier;

  // Whether all layers up to this one are verified. A MAC is over the whole: before its end nothing
  // is.
  bool HasLayers(int64_t layer) const {
    return chunk != nullptr && !chunk->header().has_mac &&
           (pending.empty() || pending.begin()->first > layer);
  }

  // ---- Under StoreParts::fetch_mutex
  int64_t reserved_bytes = 0;                    // of the budget; as long as a fetch refers to it
  std::shared_ptr<StoredChunk> chunk = nullptr;  // since its header was verified
  std::vector<bool> verified{};                  // sections that are there
  std::map<int64_t, int64_t> pending{};          // first layer -> sections that are not there yet
  std::vector<Waiter> waiters{};                 // fetches that still want it
  bool to_memory = false;                        // one of them wants it in RAM
  bool is_removed = false;                       // since it was begun: no tier gets it
  PinBoard::Ticket pin = 0;                      // in its tier
  int retries = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_CHUNK_LOAD_H_
