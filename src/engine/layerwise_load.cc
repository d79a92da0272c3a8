#include "engine/layerwise_load.h"

#include <algorithm>
#include <utility>

#include "base/guard.h"
#include "quire/kv_export.h"

namespace quire {

LayerwiseLoad::LayerwiseLoad(StoreLink* link, const PrefixSpace& space,
                             std::unique_ptr<PrefixLoad> load, int64_t begin, int64_t end)
    : link_(link), space_(space), load_(std::move(load)), begin_(begin), end_(end) {}

int64_t LayerwiseLoad::TokensOf(const PrefixLoad::Chunk& chunk) const {
  if (chunk.begin < begin_) return 0;
  return std::max<int64_t>(0, std::min(chunk.end, end_) - chunk.begin);
}

Result<std::span<const LayerKV>> LayerwiseLoad::Load(int64_t layer) {
  const int64_t begin_ns = link_->now_ns();
  if (layer == 0) {
    waited_ns_ = overlap_ns_ = 0;
  } else if (!load_->complete()) {
    overlap_ns_ += begin_ns - last_ns_;
  }
  const Status status = GuardEntry([&] { return LoadBlocks(layer); });
  failure_ = status.code();
  last_ns_ = link_->now_ns();
  waited_ns_ += last_ns_ - begin_ns;
  if (!status.ok()) return status;
  return std::span<const LayerKV>(blocks_);
}

Status LayerwiseLoad::LoadBlocks(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(load_->WaitLayer(layer));
  views_.reserve(load_->chunks().size());
  blocks_.clear();
  size_t next = 0;
  for (const PrefixLoad::Chunk& chunk : load_->chunks()) {
    const int64_t count = TokensOf(chunk);
    if (count == 0) continue;
    if (next == views_.size()) {
      QUIRE_ASSIGN_OR_RETURN(ChunkView view, link_->Open(space_, load_->tokens(), chunk));
      views_.push_back(std::move(view));
    }
    QUIRE_ASSIGN_OR_RETURN(const LayerKV kv, link_->LayerOf(views_[next++], layer, chunk.begin));
    blocks_.push_back(SomeTokens(kv, 0, count));
  }
  return {};
}

}  // namespace quire
