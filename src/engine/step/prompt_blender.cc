#include "engine/step/prompt_blender.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kernels/backend.h"

namespace quire {
namespace {

// Fewer tokens are computed along with any step; to move them costs more than it saves.
constexpr int64_t kMovedTokensMin = 16;

int64_t SmallestWindow(std::span<const AttentionLayerSpec> layers) {
  int64_t window = kNoWindow;
  for (const AttentionLayerSpec& layer : layers) {
    if (layer.window > 0) window = std::min(window, layer.window);
  }
  return window;
}

}  // namespace

void PromptBlender::Plan(Request* request, std::span<const int32_t> prompt) {
  QUIRE_CHECK(request->options.blend);
  QUIRE_CHECK(request->blend == nullptr) << "request " << request->id << " is planned twice";
  const BlendRequest& blend = *request->options.blend;
  const std::string& salt = request->space.salt;
  DocumentIndex::Findings found;
  if (blend.search != DocumentSearch::kOff) found = index_.Find(salt, prompt, blend.search);
  request->space.recipe = BlendRecipe(blend, found.documents, parts_.piece_max);
  request->blend = std::make_unique<BlendPlan>(model(), prompt, blend, std::move(found.documents),
                                               parts_.piece_max, found.own_end);
  for (const PromptDocument& document : blend.documents) {
    const BlendPlan::Chain chain = request->blend->ChainOf(prompt, document);
    index_.Add(salt, chain.tokens, chain.anchor_tokens);
  }
}

// The request that brings all of a document layer by layer; null if there is none.
Request* PromptBlender::BringerOf(const Request& request, std::span<const int32_t> chain) const {
  for (const int64_t id : request.learners) {
    Request* const learner = parts_.requests->Find(id);
    if (learner == nullptr || !learner->brings_document()) continue;
    if (std::ranges::equal(learner->prompt_of(learner->samples.front()), chain)) return learner;
  }
  return nullptr;
}

// What is known of the movable documents in the piece. A document is known as far as a sequence
// with its anchor goes; where layers have windows, what they still see at its end. One that comes
// with the forward is known as a whole, as it will be behind the forward.
PromptBlender::FoundRows PromptBlender::FindDocuments(const Request& request,
                                                      const BlendPiece& piece) {
  FoundRows found;
  std::vector<DocumentRows>& parts = found.parts;
  if (request.restarted) return {.parts = {}, .has_all = false};
  const auto prompt = request.prompt_of(request.samples.front());
  const int64_t window = SmallestWindow(parts_.state.attention()->options().layers);
  const std::span<const PromptDocument> movable = request.blend->movable();
  for (size_t i = 0; i < movable.size(); ++i) {
    const PromptDocument& document = movable[i];
    if (document.end <= piece.begin || document.begin >= piece.end) continue;
    const BlendPlan::Chain chain = request.blend->MovableChain(prompt, i);
    PrefixSpace space = request.space.exact();
    PrefixMatch match = parts_.finder->FindExact(chain.tokens, space);
    bool long_factors = space.long_rope;
    if (HasLongSet(model().rope.scaling)) {
      space.long_rope = !space.long_rope;
      const PrefixMatch other = parts_.finder->FindExact(chain.tokens, space);
      if (other.length > match.length) match = other, long_factors = space.long_rope;
    }
    LayerwiseLoad* layers = nullptr;
    if (match.length < std::ssize(chain.tokens)) {
      if (const Request* const learner = BringerOf(request, chain.tokens)) {
        layers = learner->layers.get();
        match = {.length = std::ssize(chain.tokens)};
        long_factors = learner->space.long_rope;
      }
    }
    parts_.prefix_cache->Touch(match.sequence_id);
    found.has_all &= match.length == std::ssize(chain.tokens);
    const int64_t held = window > match.length ? 0 : match.length - (window - 1);
    const int64_t known_begin = document.begin + std::max<int64_t>(0, held - chain.anchor_tokens);
    const int64_t known_end = document.begin + match.length - chain.anchor_tokens;
    const int64_t begin = std::max(piece.begin, known_begin);
    const int64_t end = std::min(piece.end, known_end);
    if (begin >= end) continue;
    QUIRE_CHECK(end - document.begin + chain.anchor_tokens <= match.length)
        << "rows that are not known would be moved";
    parts.push_back({.part = {.rows = {begin - piece.begin, end - piece.begin},
                              .seq_id = match.sequence_id,
                              .from = chain.anchor_tokens + begin - document.begin,
                              .long_factors = long_factors},
                     .layers = layers});
  }
  int64_t tokens = 0;
  for (const DocumentRows& rows : parts) tokens += rows.part.rows.count();
  if (tokens < kMovedTokensMin) parts.clear();
  return found;
}

void PromptBlender::Touch(const Request& request) {
  if (request.blend != nullptr) FindDocuments(request, {0, request.prompt_tokens});
}

std::optional<BlendPlan::Found> PromptBlender::PieceAt(Request* request, int64_t length) {
  BlendPlan::Found found;
  if (request->blend == nullptr || !request->blend->FindPiece(length, &found)) return {};
  const FoundRows rows = FindDocuments(*request, found.rest);
  if (!rows.has_all) request->KeepBlendForItself();
  if (rows.parts.empty()) return {};
  return found;
}

// ---- Learning

// With the factors of a prompt of this length, as any other request would compute it.
PrefixSpace PromptBlender::LearnerSpace(const Request& request,
                                        std::span<const int32_t> chain) const {
  PrefixSpace space = request.space.exact();
  space.long_rope = NeedsLongRope(model(), std::ssize(chain));
  return space;
}

// How much of the prompt is retained, or in the store, as prefill gives it. Should it be gone when
// the prompt comes in, documents in it are computed in their places.
int64_t PromptBlender::ExactTokens(const Request& request, std::span<const int32_t> prompt) const {
  const int64_t held = parts_.prefix_cache->Find(prompt, request.space.exact()).length;
  return std::max(held, parts_.store->KnownTokens(request));
}

// A prompt of its own for each document that is not known: its KV is computed behind the anchor, or
// comes from the store, and is kept and stored like that of any prompt. The prompt's own beginning
// needs one only for its tail chunk: the prompt goes on behind it, so neither asks the store for
// that chunk nor gives it to the store. It has one also where nothing is learnt before: its tokens
// are the prompt's own, which takes them from there.
std::vector<std::unique_ptr<Request>> PromptBlender::MakeLearners(const Request& request) {
  std::vector<std::unique_ptr<Request>> learners;
  const bool has_windows = SmallestWindow(model().layers) != kNoWindow;
  // As a whole, and retained: with less of it the blend would be another one. What a request in
  // work holds may be gone before it is moved: that one is cancelled, or its windows go on past the
  // document's end. A learner forks it if it is still there.
  const auto knows = [&](std::span<const int32_t> chain) {
    return parts_.prefix_cache->Find(chain, LearnerSpace(request, chain)).length ==
           std::ssize(chain);
  };
  const auto prompt = request.prompt_of(request.samples.front());
  const DocumentLearning learn = request.blend->request().learn;
  const bool is_idle = learn == DocumentLearning::kIdle;
  const auto is_to_be_learnt = [&](std::span<const int32_t> chain, const PrefixSpace& space) {
    const auto& waiting = parts_.requests->waiting();
    return std::any_of(waiting.begin(), waiting.end(), [&](const auto& other) {
      return other->is_idle && other->space == space &&
             std::ranges::equal(other->prompt_of(other->samples.front()), chain);
    });
  };
  // Nobody waits for idle lessons, and other prompts may move what they learn.
  const int64_t exact = learn == DocumentLearning::kFirst ? ExactTokens(request, prompt) : 0;
  const int64_t own_end = request.blend->own_end();
  const bool with_own = own_end < request.prompt_tokens && parts_.store->EndsInTail(own_end);
  for (const BlendPlan::Chain& document : request.blend->Unknown(prompt, exact, with_own, knows)) {
    const std::span<const int32_t> chain = document.tokens;
    const bool waits_for_others = is_idle && !document.is_own;
    if (waits_for_others && is_to_be_learnt(chain, LearnerSpace(request, chain))) continue;
    SamplingOptions options{.max_tokens = 0,
                            .cache_salt = request.space.salt,
                            .turn_group = request.options.turn_group,
                            .turn_weight = request.options.turn_weight};
    const bool fits = parts_.limits->CheckFits(std::ssize(chain), options).ok();
    if (!fits) continue;  // with the begin token it is one too many: it is computed in its place
    auto learner = std::make_unique<Request>(next_learner_id_--, chain, std::move(options));
    learner->submitted_ns = request.submitted_ns;
    learner->space = LearnerSpace(request, chain);
    learner->learns_for = request.id;
    learner->is_idle = waits_for_others;
    learner->document_begin = document.is_own ? std::ssize(chain) : document.anchor_tokens;
    // What a window hides at a document's end is not in its chunks.
    learner->comes_whole = document.is_own || has_windows;
    learners.push_back(std::move(learner));
  }
  return learners;
}

void PromptBlender::Add(std::unique_ptr<Request> request) {
  std::vector<std::unique_ptr<Request>> learners = MakeLearners(*request);
  std::vector<int64_t> ids;
  for (const auto& learner : learners) {
    ids.push_back(learner->id);
    if (!learner->is_idle) request->learners.push_back(learner->id);  // which it waits for
  }
  try {
    for (auto& learner : learners) parts_.requests->Add(std::move(learner));
    parts_.requests->Add(std::move(request));
  } catch (...) {  // without memory nothing has changed
    for (const int64_t id : ids) {
      if (const Request* const added = parts_.requests->Find(id)) parts_.requests->Erase(added);
    }
    throw;
  }
}

void PromptBlender::NoteLearnt(const Request& learner) noexcept {
  Request* const request = parts_.requests->Find(learner.learns_for);
  if (request == nullptr) return;
  request->learned_tokens += learner.prompt_tokens - learner.cached.total();
  if (learner.is_idle) return;  // nobody waited for it
  const bool was_asked = learner.asked_ns != Request::kNotYet;
  const int64_t from = was_asked ? learner.asked_ns : learner.admitted_ns;
  QUIRE_CHECK(from != Request::kNotYet) << "request " << learner.id << " ends before it begins";
  int64_t& first = request->documents_from_ns;
  first = first == Request::kNotYet ? from : std::min(first, from);
  request->documents_until_ns = parts_.clock->SteadyNs();
}

// ---- Forwards

Result<PromptBlender::OpenPieces> PromptBlender::Open(std::span<const Work> works) {
  OpenPieces pieces;
  for (const Work& work : works) {
    const BlendPiece& range = work.piece.rest;
    const int64_t begin_ns = parts_.clock->SteadyNs();
    AttentionKVCache& cache = *parts_.state.attention();
    auto rows = std::make_unique<MovedPiece>(cache.options(), range.begin, range.count(),
                                             work.request->space.long_rope);
    const FoundRows found = FindDocuments(*work.request, range);
    for (const DocumentRows& document : found.parts) {
      if (LayerwiseLoad* const layers = document.layers) {
        rows->Expect({.part = document.part,
                      .source = &layers->whole(),
                      .source_begin = layers->load().begin(),
                      .clock = parts_.clock});
        continue;
      }
      const Status taken = rows->Take(cache, document.part);
      if (!taken.ok() && taken.code() != StatusCode::kNotFound) return taken;
      if (!taken.ok()) work.request->KeepBlendForItself();
    }
    if (rows->moved_count() == 0) continue;
    auto hook = std::make_unique<BlendHook>(
        BlendHook::Parts{.piece = rows.get(),
                         .options = &work.request->blend->options(),
                         .documents = work.request->blend->movable(),
                         .range = range,
                         .ends_prompt = range.end == work.request->prompt_tokens,
                         .move_ns = parts_.clock->SteadyNs() - begin_ns,
                         .clock = parts_.clock});
    pieces.push_back({work, std::move(rows), std::move(hook)});
  }
  return pieces;
}

Status PromptBlender::Begin(std::span<const int64_t> sequence_ids, std::span<const int64_t> lengths,
                            std::span<const LayerLoad> loads, const OpenPieces& pieces) const {
  if (!pieces.empty()) {
    std::vector<BlendMember> members;
    for (const OpenPiece& piece : pieces) {
      members.push_back({.seq_id = piece.work.sample->sequence_id,
                         .hook = piece.hook.get(),
                         .source = piece.rows.get(),
                         .check_layers = piece.work.request->blend->options().check_layers});
    }
    return parts_.state.attention()->BeginBlendingForward(sequence_ids, lengths, loads, members);
  }
  if (!loads.empty()) return parts_.state.BeginLoadingForward(sequence_ids, lengths, loads);
  return parts_.state.kv().BeginForward(sequence_ids, lengths);
}

// Rows of the piece before the first one that was left as it was moved are exact, too; but what
// others find of this prompt, and so how they are blended, must not depend on which rows this
// request selected.
int64_t PromptBlender::ExactEnd(const Sample& sample, const OpenPieces& pieces) {
  for (const OpenPiece& piece : pieces) {
    if (piece.work.sample == &sample && piece.hook->counts().any_left())
      return piece.work.piece.rest.begin;
  }
  return kExactForever;
}

void PromptBlender::Commit(const OpenPieces& pieces) noexcept {
  for (const OpenPiece& piece : pieces) {
    Request& request = *piece.work.request;
    Sample& sample = *piece.work.sample;
    PieceCounts counts = piece.hook->counts();
    counts.move_ns += piece.rows->reach_ns();
    QUIRE_CHECK(counts.recomputed <= counts.moved) << "request " << request.id;
    sample.approximate_from = std::min(sample.approximate_from, ExactEnd(sample, pieces));
    // Behind a longer exact beginning it is another blend than behind the plan's own.
    const bool is_exact = sample.approximate_from == kExactForever;
    if (!is_exact && sample.approximate_from != request.blend->begin())
      request.KeepBlendForItself();
    request.approximate |= counts.any_left();
    request.blend->NotePiece(piece.work.piece.index, counts);
    moved_tokens_ += counts.moved;
    recomputed_tokens_ += counts.recomputed;
  }
}

void PromptBlender::Publish(EngineStats* stats) const noexcept {
  stats->blend_moved_tokens = moved_tokens_;
  stats->blend_recomputed_tokens = recomputed_tokens_;
}

}  // namespace quire
