#include "engine/loading/layerwise_load.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "quire/kv_export.h"

namespace quire {

LayerwiseLoad::LayerwiseLoad(StoreLink* link, const PrefixSpace& space,
                             std::unique_ptr<PrefixLoad> load, int64_t begin, int64_t end)
    : link_(link), space_(space), load_(std::move(load)), begin_(begin), end_(end) {
  QUIRE_CHECK(load_ != nullptr);
  QUIRE_CHECK(begin < end) << "a forward would load nothing";
}

int64_t LayerwiseLoad::TokensOf(const PrefixLoad::Chunk& chunk) const {
  if (chunk.begin < begin_) return 0;
  return std::max<int64_t>(0, std::min(chunk.end, end_) - chunk.begin);
}

template <typename F>
Status LayerwiseLoad::Take(F&& load) {
  const int64_t begin_ns = link_->now_ns();
  if (any_taken_ && !load_->complete()) overlap_ns_ += begin_ns - last_ns_;
  any_taken_ = true;
  const Status status = GuardEntry(load);
  failure_ = status.code();
  last_ns_ = link_->now_ns();
  waited_ns_ += last_ns_ - begin_ns;
  return status;
}

Result<std::span<const LayerKV>> LayerwiseLoad::Load(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(Take([&] { return LoadBlocks(layer); }));
  return std::span<const LayerKV>(blocks_);
}

Result<TensorView> LayerwiseLoad::LoadState(int64_t layer) {
  const Status status = Take([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(WaitLayer(link_->attention_layer_count() + layer));
    QUIRE_CHECK(!views_.empty()) << "no chunk brings the tokens of the load";
    QUIRE_ASSIGN_OR_RETURN(state_, link_->StateOf(views_.back(), layer));
    return {};
  });
  if (!status.ok()) return status;
  return state_;
}

Status LayerwiseLoad::WaitLayer(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(load_->WaitLayer(layer));
  return Open([this](const PrefixLoad::Chunk& chunk) { return TokensOf(chunk) > 0; }, &views_);
}

template <typename F>
Status LayerwiseLoad::Open(F&& wanted, std::vector<ChunkView>* views) const {
  if (!views->empty()) return {};
  std::vector<ChunkView> opened;
  for (const PrefixLoad::Chunk& chunk : load_->chunks()) {
    if (!wanted(chunk)) continue;
    QUIRE_ASSIGN_OR_RETURN(ChunkView view, link_->Open(space_, load_->tokens(), chunk));
    opened.push_back(std::move(view));
  }
  *views = std::move(opened);
  return {};
}

Status LayerwiseLoad::LoadBlocks(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(WaitLayer(layer));
  blocks_.clear();
  size_t next = 0;
  for (const PrefixLoad::Chunk& chunk : load_->chunks()) {
    if (TokensOf(chunk) == 0) continue;
    QUIRE_CHECK(next < views_.size()) << "chunks were found after the first layer";
    QUIRE_ASSIGN_OR_RETURN(const LayerKV kv,
                           link_->LayerOf(views_[next++], layer, chunk.begin, end_));
    if (kv.k.rank() > 0) blocks_.push_back(kv);
  }
  return {};
}

// What fails here fails the load, as if the sequence that takes it had asked.
Result<std::span<const LayerKV>> LayerwiseLoad::Whole::Load(int64_t layer) {
  QUIRE_RETURN_IF_ERROR(load_.Take([&] { return LoadBlocks(layer); }));
  return std::span<const LayerKV>(blocks_);
}

Status LayerwiseLoad::Whole::LoadBlocks(int64_t layer) {
  PrefixLoad& load = load_.load();
  QUIRE_RETURN_IF_ERROR(load.WaitLayer(layer));
  QUIRE_RETURN_IF_ERROR(load_.Open([](const PrefixLoad::Chunk&) { return true; }, &views_));
  blocks_.clear();
  for (size_t i = 0; i < views_.size(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(
        const LayerKV kv,
        load_.link_->LayerOf(views_[i], layer, load.chunks()[i].begin, load.end()));
    if (kv.k.rank() > 0) blocks_.push_back(kv);
  }
  return {};
}

}  // namespace quire
