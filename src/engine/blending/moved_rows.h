// KV of documents for one piece of a prompt, keys rotated to where they will stand: read out of
// pages before the forward begins, or layer by layer while it runs, where a document is still on
// its way. Each row comes in all layers that need it, or the forward fails: what was selected stays
// right.
#ifndef QUIRE_ENGINE_BLENDING_MOVED_ROWS_H_
#define QUIRE_ENGINE_BLENDING_MOVED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/blend.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// Bytes that a piece of `row_count` rows holds at most while it is computed: keys and values of all
// layers, and what moving and comparing one layer takes. std::bad_alloc; REQUIRES: row_count >= 0.
int64_t MovedRowsBytes(std::span<const AttentionLayerSpec> layers, int64_t row_count);

// The first `count` numbers of each head of `rows` [tokens, heads, dim], float32, float16 or
// bfloat16: the value in a latent row. REQUIRES: count <= dim.
TensorView FirstNumbers(const TensorView& rows, int64_t count);

class MovedPiece final : public MovedSource {
 public:
  // A piece whose first row stands at `first_position`. Takes the memory: std::bad_alloc.
  // `long_factors`: of the sequence that is computed. `options` outlives this.
  MovedPiece(const AttentionKVCacheOptions& options, int64_t first_position, int64_t row_count,
             bool long_factors);

  // Rows of the piece, taken from tokens [from, from + rows.count()) of a sequence.
  struct Part {
    TokenRange rows;
    int64_t seq_id = 0;
    int64_t from = 0;
    bool long_factors = false;  // of that sequence
  };
  // Reads and moves the rows in all layers. NotFound if a layer does not hold them any more; after
  // an error none of them counts. REQUIRES: no forward is open, parts ascend.
  Status Take(AttentionKVCache& cache, const Part& part);
  // Rows whose layers come while the forward runs.
  struct Coming {
    Part part;                      // without seq_id: `from` is a position of the source's tokens
    LayerSource* source = nullptr;  // gives tokens from source_begin on; outlives this
    int64_t source_begin = 0;
    const Clock* clock = nullptr;
  };
  // They are moved as the forward comes to each layer. std::bad_alloc changes nothing. REQUIRES:
  // no forward is open, parts ascend.
  void Expect(const Coming& coming);
  // Waits until the layer's rows are there, and moves them. What a source fails with; Incompatible
  // if it does not give all rows.
  Status Reach(int64_t layer);
  int64_t reach_ns() const { return reach_ns_; }  // that moving took in Reach, without waiting

  int64_t row_count() const { return static_cast<int64_t>(kinds_.size()); }
  const AttentionLayerSpec& layer(int64_t layer) const {
    return options_.layers[static_cast<size_t>(layer)];
  }
  int64_t moved_count() const { return moved_count_; }
  int64_t moved_bytes() const { return moved_bytes_; }
  std::span<const uint8_t> kinds() const { return kinds_; }  // [row_count]: kRowInvalid, kRowMoved

  Result<std::span<const MovedRows>> Load(int64_t layer) override;
  // The layer's rows as numbers, [row_count, heads, dim]; undefined where kinds() says invalid. The
  // values of latent layers are the first part of their keys. Valid until the next call. REQUIRES:
  // the layer was reached.
  KVRows CachedRows(int64_t layer);

 private:
  struct Plane {
    std::byte* data = nullptr;
    int64_t row_bytes = 0;
  };
  struct LayerPlanes {
    Plane k, v, k_scale, v_scale;
  };

  LayerKV RowsOf(int64_t layer, const TokenRange& rows) const;
  bool IsMoved(const Part& part) const {
    return first_position_ + part.rows.begin != part.from || part.long_factors != long_factors_;
  }
  void Count(const Part& part) noexcept;
  Status Copy(int64_t layer, const Coming& coming, std::span<const LayerKV> blocks);
  TensorView Numbers(int64_t layer, TensorView LayerKV::*codes, TensorView LayerKV::*scales,
                     std::vector<float>* floats) const;
  Status MoveKeys(int64_t layer, const Part& part);
  Status MoveQuantised(int64_t layer, const Part& part, const KeyMoves& moves,
                       const KeyRotation& rotation);

  const AttentionKVCacheOptions& options_;
  const int64_t first_position_;
  const bool long_factors_;
  std::unique_ptr<std::byte[]> memory_;
  std::vector<LayerPlanes> planes_;
  std::vector<uint8_t> kinds_;
  std::vector<TokenRange> parts_;
  std::vector<Coming> coming_;
  std::vector<bool> reached_;  // [layer]
  int64_t reach_ns_ = 0;
  std::vector<MovedRows> moved_;  // of the layer that was asked for last
  std::vector<float> k_floats_;   // numbers of quantised and latent layers
  std::vector<float> v_floats_;
  int64_t moved_count_ = 0;
  int64_t moved_bytes_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_BLENDING_MOVED_ROWS_H_
