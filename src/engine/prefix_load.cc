#include "engine/prefix_load.h"

#include <algorithm>
#include <utility>

namespace quire {

PrefixLoad::PrefixLoad(std::shared_ptr<ChunkFetch> fetch, std::vector<ChunkKey> keys,
                       std::vector<int32_t> tokens, int64_t chunk_tokens, int64_t first_chunk,
                       int64_t start_ns, int64_t deadline_ns)
    : fetch_(std::move(fetch)),
      keys_(std::move(keys)),
      tokens_(std::move(tokens)),
      chunk_tokens_(chunk_tokens),
      first_chunk_(first_chunk),
      start_ns_(start_ns),
      deadline_ns_(deadline_ns) {}

PrefixLoad::~PrefixLoad() {
  if (fetch_ != nullptr) fetch_->Cancel();
}

void PrefixLoad::Poll(int64_t now_ns) {
  if (ended()) return;
  const bool done = fetch_->done();  // asked first: what is ready may still grow otherwise
  if (!done && now_ns < deadline_ns_) return;
  const int64_t count = static_cast<int64_t>(keys_.size());
  const int64_t ready = std::min(fetch_->ready(), count);
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < ready; ++i) {
    const int64_t begin = (first_chunk_ + i) * chunk_tokens_;
    const int64_t end = std::min(begin + chunk_tokens_, static_cast<int64_t>(tokens_.size()));
    chunks.push_back(
        {fetch_->chunk(i), keys_[static_cast<size_t>(i)], fetch_->tier(i), begin, end});
  }
  chunks_ = std::move(chunks);
  if (ready < count) miss_ = done ? fetch_->miss() : MissReason::kTimeout;
  end_ns_ = now_ns;
  if (!done) fetch_->Cancel();
  fetch_ = nullptr;
}

void PrefixLoad::Wait(int64_t until_ns) {
  if (!ended()) fetch_->Wait(std::min(until_ns, deadline_ns_));
}

}  // namespace quire
