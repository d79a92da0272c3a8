#include "engine/step/prompt_blender.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "kernels/backend.h"

namespace quire {
namespace {

// Fewer tokens are computed along with any step; to move them costs more than it saves.
constexpr int64_t kMovedTokensMin = 16;
// Idle lessons that wait at a time. An engine that is never idle would have more and more of them.
constexpr int64_t kIdleLessonsMax = 256;
// All lessons for one prompt have at most these, each with its anchor: 64 MB. Thousands of small
// documents behind a long anchor would be thousands of long prompts.
constexpr int64_t kLessonTokensMax = int64_t{1} << 24;
// And those of all prompts that wait, each of which may be a hundredth of its lessons.
constexpr int64_t kAllLessonTokensMax = 2 * kLessonTokensMax;
// What a request takes beside its tokens, in tokens.
constexpr int64_t kLessonTokensMore = 512;

int64_t SmallestWindow(std::span<const AttentionLayerSpec> layers) {
  int64_t window = kNoWindow;
  for (const AttentionLayerSpec& layer : layers) {
    if (layer.window > 0) window = std::min(window, layer.window);
  }
  return window;
}

// Something for each anchor, and each set of factors, that it is asked about.
template <typename T>
class ByAnchor {
 public:
  // `make(anchor, space)` the first time.
  template <typename F>
  const T& Of(std::span<const int32_t> anchor, const PrefixSpace& space, F&& make) {
    const Key key{anchor.data(), anchor.size(), space.long_rope};
    const auto found = made_.find(key);
    return found == made_.end() ? made_.emplace(key, make(anchor, space)).first->second
                                : found->second;
  }

 private:
  using Key = std::tuple<const int32_t*, size_t, bool>;
  std::map<Key, T> made_;
};

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
  int64_t tokens = 0;
  for (const PromptDocument& document : blend.documents) {
    const BlendPlan::Chain chain = request->blend->ChainOf(prompt, document);
    tokens += chain.size();
    if (tokens > DocumentIndex::kTokensMax) break;  // it would push out those before it
    index_.Add(salt, chain.tokens(), chain.document_begin);
  }
}

// The request that brings all of a document layer by layer; null if there is none.
Request* PromptBlender::BringerOf(const Request& request, const BlendPlan::Chain& chain) const {
  for (const int64_t id : request.learners) {
    Request* const learner = parts_.requests->Find(id);
    if (learner == nullptr || !learner->brings_document()) continue;
    if (chain.IsOf(learner->prompt_of(learner->samples.front()))) return learner;
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
  const PrefixSpace space = request.space.exact();
  PrefixSpace other_space = space;  // of the other factors
  other_space.long_rope = !space.long_rope;
  ByAnchor<PrefixFinder::Anchored> behind;
  const auto find = [&](const BlendPlan::Chain& chain, const PrefixSpace& where) {
    const auto begin = [&](const auto&... what) { return parts_.finder->FindBehind(what...); };
    return behind.Of(chain.anchor, where, begin).Find(chain.rest);
  };
  for (size_t i = 0; i < movable.size(); ++i) {
    const PromptDocument& document = movable[i];
    if (document.end <= piece.begin || document.begin >= piece.end) continue;
    const BlendPlan::Chain chain = request.blend->MovableChain(prompt, i);
    PrefixMatch match = find(chain, space);
    bool long_factors = space.long_rope;
    if (HasLongSet(model().rope.scaling)) {
      const PrefixMatch other = find(chain, other_space);
      if (other.length > match.length) match = other, long_factors = other_space.long_rope;
    }
    LayerwiseLoad* layers = nullptr;
    if (match.length < chain.size()) {
      if (const Request* const learner = BringerOf(request, chain)) {
        layers = learner->layers.get();
        match = {.length = chain.size()};
        long_factors = learner->space.long_rope;
      }
    }
    parts_.prefix_cache->Touch(match.sequence_id);
    found.has_all &= match.length == chain.size();
    const int64_t held = window > match.length ? 0 : match.length - (window - 1);
    const int64_t known_begin = document.begin + std::max<int64_t>(0, held - chain.document_begin);
    const int64_t known_end = document.begin + match.length - chain.document_begin;
    const int64_t begin = std::max(piece.begin, known_begin);
    const int64_t end = std::min(piece.end, known_end);
    if (begin >= end) continue;
    QUIRE_CHECK(end - document.begin + chain.document_begin <= match.length)
        << "rows that are not known would be moved";
    parts.push_back({.part = {.rows = {begin - piece.begin, end - piece.begin},
                              .seq_id = match.sequence_id,
                              .from = chain.document_begin + begin - document.begin,
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
PrefixSpace PromptBlender::LearnerSpace(const Request& request, int64_t tokens) const {
  PrefixSpace space = request.space.exact();
  space.long_rope = NeedsLongRope(model(), tokens);
  return space;
}

// How much of the prompt is retained, or in the store, as prefill gives it. Should it be gone when
// the prompt comes in, documents in it are computed in their places.
int64_t PromptBlender::ExactTokens(Request* request) const {
  const auto prompt = request->prompt_of(request->samples.front());
  const int64_t held = parts_.prefix_cache->Find(prompt, request->space.exact()).length;
  return std::max(held, parts_.store->KnownTokens(request));
}

// A prompt of its own for each document that is not known: its KV is computed behind the anchor, or
// comes from the store, and is kept and stored like that of any prompt. The prompt's own beginning
// needs one only for its tail chunk: the prompt goes on behind it, so neither asks the store for
// that chunk nor gives it to the store. It has one also where nothing is learnt before: its tokens
// are the prompt's own, which takes them from there.
std::vector<std::unique_ptr<Request>> PromptBlender::MakeLearners(const Request& request,
                                                                  int64_t exact) {
  std::vector<std::unique_ptr<Request>> learners;
  const bool has_windows = SmallestWindow(model().layers) != kNoWindow;
  // As a whole, and retained: with less of it the blend would be another one. What a request in
  // work holds may be gone before it is moved: that one is cancelled, or its windows go on past the
  // document's end. A learner forks it if it is still there.
  ByAnchor<PrefixCache::Family> kept;
  const auto knows = [&](const BlendPlan::Chain& chain) {
    const auto begin = [&](const auto&... what) { return parts_.prefix_cache->FamilyOf(what...); };
    const PrefixCache::Family& family =
        kept.Of(chain.anchor, LearnerSpace(request, chain.size()), begin);
    return family.Find(chain.rest).length == chain.size();
  };
  const auto prompt = request.prompt_of(request.samples.front());
  const bool is_idle = request.blend->request().learn == DocumentLearning::kIdle;
  const auto& waiting = parts_.requests->waiting();
  int64_t lesson_tokens = 0;
  int64_t lesson_tokens_max = kAllLessonTokensMax;
  for (const auto& other : waiting) {
    if (other->learns_for == Request::kNobody) continue;
    lesson_tokens_max -= other->prompt_tokens + kLessonTokensMore;
  }
  lesson_tokens_max = std::min(lesson_tokens_max, kLessonTokensMax);
  int64_t idle_count = std::ssize(waiting) - parts_.requests->waiting_in_turn();
  const auto is_to_be_learnt = [&](const BlendPlan::Chain& chain, const PrefixSpace& space) {
    return std::any_of(waiting.begin(), waiting.end(), [&](const auto& other) {
      return other->is_idle && other->space == space &&
             chain.IsOf(other->prompt_of(other->samples.front()));
    });
  };
  const int64_t own_end = request.blend->own_end();
  const bool with_own = own_end < request.prompt_tokens && parts_.store->EndsInTail(own_end);
  for (const BlendPlan::Chain& chain : request.blend->Unknown(prompt, exact, with_own, knows)) {
    const PrefixSpace space = LearnerSpace(request, chain.size());
    const bool waits_for_others = is_idle && !chain.is_own;
    if (waits_for_others && idle_count >= kIdleLessonsMax) break;
    if (waits_for_others && is_to_be_learnt(chain, space)) continue;
    SamplingOptions options{.max_tokens = 0,
                            .cache_salt = request.space.salt,
                            .turn_group = request.options.turn_group,
                            .turn_weight = request.options.turn_weight};
    // One that does not fit is computed in its place: with the begin token it may be one too many.
    const int64_t tokens = chain.size() + kLessonTokensMore;
    const bool fits = lesson_tokens + tokens <= lesson_tokens_max &&
                      parts_.limits->CheckFits(chain.size(), options).ok();
    if (!fits) continue;
    lesson_tokens += tokens;
    auto learner =
        std::make_unique<Request>(next_learner_id_--, chain.tokens(), std::move(options));
    learner->submitted_ns = request.submitted_ns;
    learner->space = space;
    learner->learns_for = request.id;
    learner->is_idle = waits_for_others;
    learner->document_begin = chain.document_begin;
    // What a window hides at a document's end is not in its chunks.
    learner->comes_whole = chain.is_own || has_windows;
    learners.push_back(std::move(learner));
    idle_count += waits_for_others ? 1 : 0;
  }
  return learners;
}

void PromptBlender::Add(std::unique_ptr<Request> request) {
  // Nobody waits for idle lessons, and other prompts may move what they learn.
  const bool learns_first = request->blend->request().learn == DocumentLearning::kFirst;
  const int64_t exact = learns_first ? ExactTokens(request.get()) : 0;
  std::vector<std::unique_ptr<Request>> learners = MakeLearners(*request, exact);
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
  std::erase(request->learners, learner.id);  // else it is looked for in every step
  request->learned_tokens += learner.prompt_tokens - learner.cached.total();
  for (size_t tier = 0; tier < learner.cached.tiers.size(); ++tier) {
    request->documents_loaded[tier] += learner.cached.tiers[tier];
  }
  // Most documents that a store does not have were never there: other reasons tell more.
  const bool says_little = request->documents_miss == MissReason::kNone ||
                           request->documents_miss == MissReason::kNotStored;
  if (says_little && learner.miss != MissReason::kNone) request->documents_miss = learner.miss;
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
    // Less than it was planned with where guesses have got the pages of a document since.
    const FoundRows found = FindDocuments(*work.request, range);
    if (!found.has_all) work.request->KeepBlendForItself();
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
