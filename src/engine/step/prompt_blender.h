// Blended prompts of an engine: which documents are known, requests that learn the others, and the
// rows of documents in forwards.
#ifndef QUIRE_ENGINE_STEP_PROMPT_BLENDER_H_
#define QUIRE_ENGINE_STEP_PROMPT_BLENDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/blending/blend_hook.h"
#include "engine/blending/blend_plan.h"
#include "engine/blending/document_index.h"
#include "engine/blending/moved_rows.h"
#include "engine/prefix/engine_states.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/request/prefix_finder.h"
#include "engine/request/request_limits.h"
#include "engine/request/request_queue.h"
#include "engine/traffic/store_traffic.h"
#include "quire/engine.h"

namespace quire {

class PromptBlender {
 public:
  // What is pointed to, and what `state` views, outlives this. Models without attention layers have
  // no requests that blend.
  struct Parts {
    EngineStates state;
    PrefixCache* prefix_cache;
    RequestQueue* requests;
    const PrefixFinder* finder;
    const RequestLimits* limits;
    const StoreTraffic* store;
    const Clock* clock;
    int64_t piece_max;
  };
  // A piece of a prompt in a forward.
  struct Work {
    Request* request;
    Sample* sample;
    BlendPlan::Found piece;
  };
  // The same with its moved rows.
  struct OpenPiece {
    Work work;
    std::unique_ptr<MovedPiece> rows;
    std::unique_ptr<BlendHook> hook;
  };
  using OpenPieces = std::vector<OpenPiece>;

  explicit PromptBlender(const Parts& parts) : parts_(parts) {}

  // Gives the request, whose prompt is `prompt`, its plan; the documents that it names are known to
  // searches from now on. Throws std::bad_alloc. REQUIRES: CheckBlend is ok.
  void Plan(Request* request, std::span<const int32_t> prompt);
  // Adds the request to those that wait, behind prompts of the engine's own for the documents that
  // are not known. Throws std::bad_alloc, and nothing has changed then. REQUIRES: it blends.
  void Add(std::unique_ptr<Request> request);
  // Such a prompt has ended.
  void NoteLearnt(const Request& learner) noexcept;
  // The documents of the request, if it blends, are given up last if pages must be found.
  void Touch(const Request& request);
  // The piece in which the position is, if some of it can be moved; else it is computed like any
  // other tokens. The request keeps its blend for itself if a document is not known as a whole.
  std::optional<BlendPlan::Found> PieceAt(Request* request, int64_t length);

  // Reads what is moved. What is not held any more is computed. REQUIRES: no forward is open.
  Result<OpenPieces> Open(std::span<const Work> works);
  Status Begin(std::span<const int64_t> sequence_ids, std::span<const int64_t> lengths,
               std::span<const LayerLoad> loads, const OpenPieces& pieces) const;
  // How far the sample is exact once the forward's tokens are in it.
  static int64_t ExactEnd(const Sample& sample, const OpenPieces& pieces);
  // The forward has ended.
  void Commit(const OpenPieces& pieces) noexcept;
  void Publish(EngineStats* stats) const noexcept;

 private:
  // Rows of a piece, and what brings them if they are not in pages yet.
  struct DocumentRows {
    MovedPiece::Part part;
    LayerwiseLoad* layers = nullptr;
  };
  struct FoundRows {
    std::vector<DocumentRows> parts;
    bool has_all = true;  // each document in the piece is known to its end
  };
  FoundRows FindDocuments(const Request& request, const BlendPiece& piece);
  Request* BringerOf(const Request& request, const BlendPlan::Chain& chain) const;
  // But for documents in the prompt's first `exact` tokens.
  std::vector<std::unique_ptr<Request>> MakeLearners(const Request& request, int64_t exact);
  int64_t ExactTokens(Request* request) const;
  PrefixSpace LearnerSpace(const Request& request, int64_t tokens) const;
  const ModelInfo& model() const { return parts_.limits->model->info(); }

  const Parts parts_;
  DocumentIndex index_;
  int64_t next_learner_id_ = -2;                      // downwards
  int64_t moved_tokens_ = 0, recomputed_tokens_ = 0;  // as in EngineStats
};

}  // namespace quire

#endif  // QUIRE_ENGINE_STEP_PROMPT_BLENDER_H_
