// How a blended prompt is cut into forwards: by the request alone, so that what is selected does
// not depend on what else runs.
#ifndef QUIRE_ENGINE_BLENDING_BLEND_PIECES_H_
#define QUIRE_ENGINE_BLENDING_BLEND_PIECES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/blend.h"
#include "quire/engine.h"

namespace quire {

// Tokens [begin, end) of a prompt that are computed in one forward.
struct BlendPiece {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t count() const { return end - begin; }
  bool operator==(const BlendPiece&) const = default;
};

// The documents whose KV can be moved: all but one that stands right behind the anchor, where it is
// the prompt's own beginning.
std::span<const PromptDocument> MovableDocuments(std::span<const PromptDocument> documents);

// From the first movable document to the end of the last one; what stands between two documents
// goes with the one before it. As many documents as fit in `piece_max` share a piece; a longer one
// is cut at multiples of piece_max from its begin.
// REQUIRES: documents ascending and disjoint, piece_max >= 1.
std::vector<BlendPiece> CutPieces(std::span<const PromptDocument> movable, int64_t piece_max);

// What a piece costs of a step's budget, in tokens that are computed in all layers: rows x layers.
// Up to the first check layer all rows are computed, behind it those that are selected, at most.
// REQUIRES: options that CheckBlendOptions accepts for `layer_count`.
int64_t PieceCost(const BlendPiece& piece, std::span<const PromptDocument> documents,
                  const BlendOptions& options, int64_t layer_count);

}  // namespace quire

#endif  // QUIRE_ENGINE_BLENDING_BLEND_PIECES_H_
