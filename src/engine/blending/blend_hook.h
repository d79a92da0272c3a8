// Which rows of a piece go on behind its check layers: those whose cached KV is furthest from what
// the layer has just computed.
#ifndef QUIRE_ENGINE_BLENDING_BLEND_HOOK_H_
#define QUIRE_ENGINE_BLENDING_BLEND_HOOK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/blending/blend_pieces.h"
#include "engine/blending/moved_rows.h"
#include "quire/blend.h"
#include "quire/engine.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// What became of the moved rows of a piece.
struct PieceCounts {
  int64_t moved = 0;
  int64_t recomputed = 0;  // in all layers
  int64_t moved_bytes = 0;
  double deviation_max = 0;  // of those that were not
  double deviation_sum = 0;
  int64_t move_ns = 0;
  int64_t select_ns = 0;

  // Whether some KV of the piece is not what prefill gives.
  bool any_left() const { return recomputed < moved; }
};

class BlendHook final : public LayerHook {
 public:
  struct Parts {
    MovedPiece* piece = nullptr;  // outlives this
    const BlendOptions* options = nullptr;
    std::span<const PromptDocument> documents = {};  // of the prompt, those that can be moved
    BlendPiece range = {};
    bool ends_prompt = false;  // its last row's logits are wanted
    int64_t move_ns = 0;       // that reading and moving the rows took
    const Clock* clock = nullptr;
  };
  // Takes the memory for a row's deviation, kind and place. May throw std::bad_alloc.
  explicit BlendHook(const Parts& parts);

  // Selects in the layers of options->check_layers.
  Result<RowSelection> BeforeAttention(int64_t layer, const FreshRows& fresh) override;

  // Since it was made, of the check layers so far.
  const PieceCounts& counts() const { return counts_; }

 private:
  Result<RowSelection> Select(size_t check_index, int64_t layer, const FreshRows& fresh);
  void NoteDropped(std::span<const int64_t> selected);

  Parts parts_;
  BlendOptions options_;
  // A row before those of the piece stands for the text before it, which is in no ratio: with it
  // the piece's first document has link tokens, too. 0 where the piece goes on in a document.
  int64_t rows_before_ = 0;
  std::vector<uint8_t> kinds_;            // [rows_before_ + row_count]
  std::vector<float> deviations_;         // of the same rows
  std::vector<BlendDocument> documents_;  // of the same rows
  std::vector<int64_t> candidates_;       // rows that are computed, once some were dropped
  bool selected_before_ = false;
  PieceCounts counts_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_BLENDING_BLEND_HOOK_H_
