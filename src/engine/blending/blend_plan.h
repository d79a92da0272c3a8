// What a request to blend comes to in an engine: its recipe and its pieces.
#ifndef QUIRE_ENGINE_BLENDING_BLEND_PLAN_H_
#define QUIRE_ENGINE_BLENDING_BLEND_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/blending/blend_hook.h"
#include "engine/blending/blend_pieces.h"
#include "engine/blending/document_index.h"
#include "engine/prefix/prefix_cache.h"
#include "quire/engine.h"
#include "quire/model.h"
#include "quire/status.h"

namespace quire {

// BadArgument by field and value for a blend that the model or the engine cannot do, and for one
// that may be approximate where no verdict allows it.
Status CheckBlend(const ModelInfo& model, int64_t prompt_tokens, const SamplingOptions& options,
                  int64_t piece_max);

// All that decides how the KV of given tokens is blended, as text: equal if and only if the same
// blend is asked for, of the same known documents. REQUIRES: CheckBlend is ok.
std::string BlendRecipe(const BlendRequest& request, std::span<const FoundDocument> found,
                        int64_t piece_max);

class BlendPlan {
 public:
  // `found`: of a request that searches, and where the known document ends that is its own
  // beginning. REQUIRES: CheckBlend is ok.
  BlendPlan(const ModelInfo& model, std::span<const int32_t> prompt, const BlendRequest& request,
            std::vector<FoundDocument> found, int64_t piece_max, int64_t found_own_end = 0);

  const BlendRequest& request() const { return request_; }
  const BlendOptions& options() const { return request_.options; }
  // Those that can be moved.
  std::span<const PromptDocument> movable() const { return movable_; }
  // Before it no token is approximate; the prompt's end if there is no piece.
  int64_t begin() const;
  // Where the document ends, named or found, that stands right behind the anchor: the prompt's own
  // beginning, which is not moved. 0 if there is none.
  int64_t own_end() const { return own_end_; }
  // The piece that begins at the position; a beginning of it is there where the sequence has more
  // exact tokens. Null: the position is in no piece.
  struct Found {
    size_t index = 0;
    BlendPiece rest;  // what is to be computed
    int64_t cost = 0;
  };
  bool FindPiece(int64_t position, Found* found) const;
  // The first position behind `length` where a piece begins or ends; kExactForever behind all.
  int64_t NextBorder(int64_t length) const;
  // The largest position up to `length` at which an approximate sequence may be gone on from: not
  // inside a piece.
  int64_t BorderBefore(int64_t length) const;

  // The tokens under which a document is known: views of the prompt, the plan and what was found.
  struct Chain {
    std::span<const int32_t> anchor = {};  // the same memory for documents behind equal anchors
    std::span<const int32_t> rest = {};    // behind it, up to the document's end
    int64_t document_begin = 0;            // tokens before the document
    bool is_own = false;                   // the prompt's own beginning

    int64_t size() const { return std::ssize(anchor) + std::ssize(rest); }
    std::vector<int32_t> tokens() const;
    // Compares the rest first: anchors are long, and most often equal.
    bool IsOf(std::span<const int32_t> tokens) const;
  };
  // For a document that the request names.
  Chain ChainOf(std::span<const int32_t> prompt, const PromptDocument& document) const;
  // For movable()[index].
  Chain MovableChain(std::span<const int32_t> prompt, size_t index) const;

  // Those that are to be learnt, but for what `knows(chain)` says is known, and what lies in the
  // first `exact` tokens, which are not moved; `with_own`: also the prompt's own beginning,
  // whatever is learnt. What is found from its middle on is used as far as it is held: to compute
  // what stands before it would be more than it saves. Reads no anchor that documents share.
  template <typename F>
  std::vector<Chain> Unknown(std::span<const int32_t> prompt, int64_t exact, bool with_own,
                             F&& knows) const {
    std::vector<Chain> chains;
    std::set<Chain, ChainOrder> added;
    const auto add = [&](const Chain& chain) {
      if (added.contains(chain) || knows(chain)) return;
      chains.push_back(chain);
      added.insert(chain);
    };
    if (with_own && own_end_ > 0) add(OwnChain(prompt));
    if (request_.learn == DocumentLearning::kOff) return chains;
    for (size_t i = 0; i < movable_.size() && !pieces_.empty(); ++i) {
      if (movable_[i].end <= exact) continue;
      if (found_.empty() || BeginsWithDocument(found_[i])) add(MovableChain(prompt, i));
    }
    return chains;
  }

  // The prompt begins, perhaps again, behind `length` tokens, of which `exact` are as prefill gives
  // them. Pieces that are to be computed, or were found exact, have no moved tokens so far.
  void NoteFound(int64_t length, int64_t exact) noexcept;
  // What came of a piece, as it was computed last.
  void NotePiece(size_t index, const PieceCounts& counts) noexcept { counts_[index] = counts; }
  BlendUsage Usage() const noexcept;

 private:
  // By their sizes, then by their ends, as those of one prompt begin alike.
  struct ChainOrder {
    bool operator()(const Chain& a, const Chain& b) const;
  };

  static bool BeginsWithDocument(const FoundDocument& found) {
    return found.from - found.anchor_tokens < BlendRequest::kFoundTokensMin;
  }
  Chain OwnChain(std::span<const int32_t> prompt) const;

  BlendRequest request_;
  std::vector<FoundDocument> found_;  // [movable document]; empty: the request names them
  std::vector<std::span<const int32_t>> found_anchors_;  // [movable document], equal ones once
  std::vector<PromptDocument> movable_;
  int64_t document_count_;
  int64_t own_end_;
  int64_t prompt_tokens_;
  std::vector<int32_t> bos_;  // the begin token, if there is one
  int64_t layer_count_;
  std::vector<BlendPiece> pieces_;
  std::vector<PieceCounts> counts_;  // [piece]
};

}  // namespace quire

#endif  // QUIRE_ENGINE_BLENDING_BLEND_PLAN_H_
