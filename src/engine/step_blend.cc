// Pieces of blended prompts: which documents are known, their rows for a forward, and what came of
// them.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace quire {
namespace {

// Fewer tokens are computed along with any step; to move them costs more than it saves.
constexpr int64_t kMovedTokensMin = 16;

int64_t SmallestWindow(std::span<const AttentionLayerSpec> layers) {
  int64_t window = std::numeric_limits<int64_t>::max();
  for (const AttentionLayerSpec& layer : layers) {
    if (layer.window > 0) window = std::min(window, layer.window);
  }
  return window;
}

}  // namespace

// What is known of the movable documents in the piece. A document is known as far as a sequence
// with its anchor goes; where layers have windows, what they still see at its end.
std::vector<MovedPiece::Part> EngineImpl::FindDocuments(const Request& request,
                                                        const BlendPiece& piece) {
  std::vector<MovedPiece::Part> parts;
  if (request.restarted) return parts;
  const auto prompt = request.prompt_of(request.samples.front());
  const int64_t window = SmallestWindow(cache_->options().layers);
  for (const PromptDocument& document : MovableDocuments(request.blend->documents())) {
    if (document.end <= piece.begin || document.begin >= piece.end) continue;
    const BlendPlan::Chain chain = request.blend->ChainOf(prompt, document);
    PrefixSpace space = request.space.exact();
    PrefixMatch match = finder_.FindExact(chain.tokens, space);
    bool long_factors = space.long_rope;
    if (HasLongSet(model_->info().rope.scaling)) {
      space.long_rope = !space.long_rope;
      const PrefixMatch other = finder_.FindExact(chain.tokens, space);
      if (other.length > match.length) match = other, long_factors = space.long_rope;
    }
    prefix_cache_.Touch(match.sequence_id);
    const int64_t held = window > match.length ? 0 : match.length - (window - 1);
    const int64_t known_begin = document.begin + std::max<int64_t>(0, held - chain.anchor_tokens);
    const int64_t known_end = document.begin + match.length - chain.anchor_tokens;
    const int64_t begin = std::max(piece.begin, known_begin);
    const int64_t end = std::min(piece.end, known_end);
    if (begin >= end) continue;
    parts.push_back({.rows = {begin - piece.begin, end - piece.begin},
                     .seq_id = match.sequence_id,
                     .from = chain.anchor_tokens + begin - document.begin,
                     .long_factors = long_factors});
  }
  int64_t tokens = 0;
  for (const MovedPiece::Part& part : parts) tokens += part.rows.count();
  if (tokens < kMovedTokensMin) parts.clear();
  return parts;
}

// They are given up last if pages must be found.
void EngineImpl::TouchDocuments(const Request& request) {
  if (request.blend != nullptr) FindDocuments(request, {0, request.prompt_tokens});
}

// The piece in which the position is, if some of it can be moved; else it is computed like any
// other tokens.
std::optional<BlendPlan::Found> EngineImpl::PieceAt(const Request& request, int64_t length) {
  BlendPlan::Found found;
  if (request.blend == nullptr || !request.blend->FindPiece(length, &found)) return {};
  if (FindDocuments(request, found.rest).empty()) return {};
  return found;
}

// A prompt of its own for each document that is not known: its KV is computed behind the anchor, or
// comes from the store, and is kept and stored like that of any prompt.
std::vector<std::unique_ptr<Request>> EngineImpl::MakeLearners(const Request& request) {
  // With the factors of a prompt of this length, as any other request would compute it.
  const auto space_of = [&](std::span<const int32_t> chain) {
    PrefixSpace space = request.space.exact();
    space.long_rope = NeedsLongRope(model_->info(), std::ssize(chain));
    return space;
  };
  std::vector<std::unique_ptr<Request>> learners;
  const auto chains = request.blend->Unknown(
      request.prompt_of(request.samples.front()), [&](std::span<const int32_t> chain) {
        return finder_.FindExact(chain, space_of(chain)).length >= std::ssize(chain) - 1;
      });
  for (const std::vector<int32_t>& chain : chains) {
    SamplingOptions options{.max_tokens = 0, .cache_salt = request.space.salt};
    const bool fits = limits_.CheckFits(std::ssize(chain), options).ok();
    if (!fits) continue;  // with the begin token it is one too many: it is computed in its place
    auto learner = std::make_unique<Request>(next_learner_id_--, chain, std::move(options));
    learner->submitted_ns = request.submitted_ns;
    learner->space = space_of(chain);
    learner->learns_for = request.id;
    learners.push_back(std::move(learner));
  }
  return learners;
}

void EngineImpl::AddWithLearners(std::unique_ptr<Request> request,
                                 std::vector<std::unique_ptr<Request>> learners) {
  for (const auto& learner : learners) request->learners.push_back(learner->id);
  const std::vector<int64_t> ids = request->learners;
  try {
    for (auto& learner : learners) requests_.Add(std::move(learner));
    requests_.Add(std::move(request));
  } catch (...) {  // without memory nothing has changed
    for (const int64_t id : ids) {
      if (const Request* const added = requests_.Find(id)) requests_.Erase(added);
    }
    throw;
  }
}

void EngineImpl::NoteLearnt(const Request& learner) noexcept {
  Request* const request = requests_.Find(learner.learns_for);
  if (request != nullptr) {
    request->learned_tokens += learner.prompt_tokens - learner.cached.total();
  }
}

// Reads what is moved in the batch. What is not held any more is computed.
Result<std::vector<EngineImpl::OpenPiece>> EngineImpl::OpenPieces(const Batch& batch) {
  std::vector<OpenPiece> pieces;
  for (const Work& work : batch) {
    if (!work.piece) continue;
    const BlendPiece& range = work.piece->rest;
    const int64_t begin_ns = clock_->SteadyNs();
    auto rows = std::make_unique<MovedPiece>(cache_->options(), range.begin, range.count(),
                                             work.request->space.long_rope);
    for (const MovedPiece::Part& part : FindDocuments(*work.request, range)) {
      const Status taken = rows->Take(*cache_, part);
      if (!taken.ok() && taken.code() != StatusCode::kNotFound) return taken;
    }
    if (rows->moved_count() == 0) continue;
    auto hook = std::make_unique<BlendHook>(
        BlendHook::Parts{.piece = rows.get(),
                         .options = &work.request->blend->options(),
                         .documents = work.request->blend->documents(),
                         .range = range,
                         .ends_prompt = range.end == work.request->prompt_tokens,
                         .move_ns = clock_->SteadyNs() - begin_ns,
                         .clock = clock_.get()});
    pieces.push_back({&work, std::move(rows), std::move(hook)});
  }
  return pieces;
}

// How far the sequence is exact once the work's tokens are in it. Rows of the piece before the
// first one that was left as it was moved are exact, too; but what others find of this prompt, and
// so how they are blended, must not depend on which rows this request selected.
int64_t EngineImpl::ExactEnd(const Work& work, std::span<const OpenPiece> pieces) {
  for (const OpenPiece& piece : pieces) {
    if (piece.work != &work || !piece.hook->counts().any_left()) continue;
    return work.piece->rest.begin;
  }
  return kExactForever;
}

void EngineImpl::CommitPieces(std::span<const OpenPiece> pieces) noexcept {
  for (const OpenPiece& piece : pieces) {
    const Work& work = *piece.work;
    const PieceCounts& counts = piece.hook->counts();
    work.sample->approximate_from = std::min(work.sample->approximate_from, ExactEnd(work, pieces));
    work.request->approximate |= counts.any_left();
    work.request->blend->NotePiece(work.piece->index, counts);
    counters_.blend_moved_tokens += counts.moved;
    counters_.blend_recomputed_tokens += counts.recomputed;
  }
}

}  // namespace quire
