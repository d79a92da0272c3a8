// ChunkFetcher: brings chunks back. RAM answers at once; slower tiers are asked by threads.
#ifndef QUIRE_STORE_CHUNK_FETCHER_H_
#define QUIRE_STORE_CHUNK_FETCHER_H_

#include <memory>
#include <mutex>
#include <vector>

#include "quire/chunk_store.h"
#include "store/fetch_state.h"
#include "store/store_parts.h"

namespace quire {

class ChunkFetcher {
 public:
  explicit ChunkFetcher(std::shared_ptr<StoreParts> parts);
  ~ChunkFetcher();

  // REQUIRES: the request was checked. std::bad_alloc changes nothing.
  std::shared_ptr<ChunkFetch> Start(const FetchRequest& request, bool to_memory);
  int64_t started() const { return started_; }
  // Ends all fetches; none may be started any more.
  void Close() noexcept;

 private:
  bool TakeFromMemory(FetchState& fetch, int64_t i);
  void Locate(const std::shared_ptr<FetchState>& fetch);

  const std::shared_ptr<StoreParts> parts_;
  std::atomic<int64_t> started_{0};
};

}  // namespace quire

#endif  // QUIRE_STORE_CHUNK_FETCHER_H_
