// Chunks of a running request whose layers are still on their way: the source of its first forward.
#ifndef QUIRE_ENGINE_LOADING_LAYERWISE_LOAD_H_
#define QUIRE_ENGINE_LOADING_LAYERWISE_LOAD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/loading/prefix_load.h"
#include "engine/loading/store_link.h"
#include "engine/prefix/prefix_cache.h"
#include "quire/attention_kv_cache.h"
#include "quire/chunk.h"

namespace quire {

class LayerwiseLoad final : public LayerSource {
 public:
  // Tokens [begin, end) of the load's. REQUIRES: load->usable(), and its chunks reach to `end` or
  // beyond; `begin` is the begin of one of them. `link` outlives this.
  LayerwiseLoad(StoreLink* link, const PrefixSpace& space, std::unique_ptr<PrefixLoad> load,
                int64_t begin, int64_t end);
  LayerwiseLoad(const LayerwiseLoad&) = delete;
  LayerwiseLoad& operator=(const LayerwiseLoad&) = delete;

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  int64_t tokens() const { return end_ - begin_; }
  PrefixLoad& load() { return *load_; }
  std::unique_ptr<PrefixLoad> TakeLoad() { return std::move(load_); }  // nothing follows
  // Why a layer did not come; kOk as long as none has failed.
  StatusCode failure() const { return failure_; }
  // How many of its tokens the chunk brings.
  int64_t TokensOf(const PrefixLoad::Chunk& chunk) const;

  // Before each forward that takes the layers.
  void StartForward() { waited_ns_ = overlap_ns_ = 0, any_taken_ = false; }
  Result<std::span<const LayerKV>> Load(int64_t layer) override;
  Result<TensorView> LoadState(int64_t layer) override;
  // The same layers with all tokens of the load's chunks, [load().begin(), load().end()), for
  // another sequence of the forward.
  LayerSource& whole() { return whole_; }

  // ---- Of the forward that took its layers last.
  int64_t waited_ns() const { return waited_ns_; }  // in Load
  // Between these calls while layers were on their way: what was computed meanwhile.
  int64_t overlap_ns() const { return overlap_ns_; }
  int64_t last_ns() const { return last_ns_; }  // when the last layer was there

 private:
  class Whole final : public LayerSource {
   public:
    explicit Whole(LayerwiseLoad* load) : load_(*load) {}
    Result<std::span<const LayerKV>> Load(int64_t layer) override;

   private:
    Status LoadBlocks(int64_t layer);

    LayerwiseLoad& load_;
    std::vector<ChunkView> views_;  // of all chunks, once a layer was asked for
    std::vector<LayerKV> blocks_;   // of the layer that was asked for last
  };

  // Measures it.
  template <typename F>
  Status Take(F&& load);
  // Waits for the chunks' layer.
  Status WaitLayer(int64_t layer);
  Status LoadBlocks(int64_t layer);
  // Views of those of the load's chunks that are `wanted`.
  template <typename F>
  Status Open(F&& wanted, std::vector<ChunkView>* views) const;

  StoreLink* link_;
  PrefixSpace space_;
  std::unique_ptr<PrefixLoad> load_;
  int64_t begin_;
  int64_t end_;
  std::vector<ChunkView> views_;  // of the chunks that bring tokens, once a layer was asked for
  std::vector<LayerKV> blocks_;   // of the layer that was asked for last
  TensorView state_;              // of the recurrent layer that was asked for last
  Whole whole_{this};
  StatusCode failure_ = StatusCode::kOk;
  bool any_taken_ = false;
  int64_t waited_ns_ = 0;
  int64_t overlap_ns_ = 0;
  int64_t last_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_LOADING_LAYERWISE_LOAD_H_
