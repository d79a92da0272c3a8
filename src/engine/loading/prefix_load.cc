#include "engine/loading/prefix_load.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

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
      deadline_ns_(deadline_ns) {
  QUIRE_CHECK(fetch_ != nullptr);
  QUIRE_CHECK(chunk_tokens >= 1);
}

PrefixLoad::~PrefixLoad() {
  if (fetch_ != nullptr) fetch_->Cancel();
}

int64_t PrefixLoad::FoundCount() const {
  return std::min(fetch_->found(), static_cast<int64_t>(keys_.size()));
}

int64_t PrefixLoad::EndOf(int64_t count) const {
  QUIRE_CHECK(count <= std::ssize(keys_)) << "more chunks than were asked for";
  return std::min((first_chunk_ + count) * chunk_tokens_, static_cast<int64_t>(tokens_.size()));
}

std::vector<PrefixLoad::Chunk> PrefixLoad::ChunksOf(int64_t count) const {
  QUIRE_DCHECK(count >= 0 && fetch_ != nullptr);
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < count; ++i) {
    chunks.push_back({fetch_->chunk(i), keys_[static_cast<size_t>(i)], fetch_->tier(i),
                      (first_chunk_ + i) * chunk_tokens_, EndOf(i + 1)});
  }
  return chunks;
}

void PrefixLoad::Poll(int64_t now_ns) {
  if (ended()) return;
  const bool done = fetch_->done();  // asked first: what is ready may still grow otherwise
  if (!done && now_ns < deadline_ns_) return;
  const int64_t count = static_cast<int64_t>(keys_.size());
  const int64_t ready = std::min(fetch_->ready(), count);
  chunks_ = ChunksOf(ready);
  if (ready < count) miss_ = done ? fetch_->miss() : MissReason::kTimeout;
  end_ns_ = now_ns;
  if (!done) fetch_->Cancel();
  fetch_ = nullptr;
}

void PrefixLoad::End(int64_t now_ns) noexcept {
  if (ended()) return;
  fetch_->Cancel();
  const auto ready = static_cast<size_t>(fetch_->ready());
  if (ready < chunks_.size())
    chunks_.erase(chunks_.begin() + static_cast<int64_t>(ready), chunks_.end());
  if (chunks_.size() < keys_.size()) miss_ = fetch_->miss();
  end_ns_ = now_ns;
  fetch_ = nullptr;
}

int64_t PrefixLoad::LayersThere(int64_t layer_count, int64_t now_ns) const {
  QUIRE_CHECK(!ended());
  if (!fetch_->located() || FoundCount() == 0) return 0;
  int64_t there = 0;  // layers come in order
  for (int64_t absent = layer_count; there < absent;) {
    const int64_t layer = there + (absent - there) / 2;
    if (fetch_->WaitLayer(layer, now_ns).ok()) {
      there = layer + 1;
    } else {
      absent = layer;
    }
  }
  return there;
}

void PrefixLoad::TakeLayers() {
  QUIRE_CHECK(!ended()) << "its chunks are there, or do not come";
  QUIRE_DCHECK(!comes_by_layers_) << "its layers are taken already";
  chunks_ = ChunksOf(FoundCount());
  comes_by_layers_ = true;
}

void PrefixLoad::AwaitLayer(int64_t layer, int64_t until_ns) {
  QUIRE_CHECK(!ended());
  const int64_t until = std::min(until_ns, deadline_ns_);
  const bool is_there = fetch_->WaitLayer(layer, until).ok() && FoundCount() > 0;
  if (!is_there) fetch_->Wait(until);
}

Status PrefixLoad::WaitLayer(int64_t layer) {
  return ended() ? Status() : fetch_->WaitLayer(layer, deadline_ns_);
}

MissReason PrefixLoad::miss() const {
  if (ended()) return miss_;
  return chunks_.size() == keys_.size() ? MissReason::kNone : fetch_->miss();
}

}  // namespace quire
