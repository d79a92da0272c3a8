// A request and its samples, as the engine keeps them.
//
// Invariants.
// - A sample's tokens are the prompt and then its answer. The first `computed` of them are in its
//   sequence; the rest is pending. A sample that decodes has one pending token, the one that was
//   drawn last. Nothing else tells prefill, decode, resuming after preemption and continuing behind
//   a cached prefix apart.
// - All unfinished samples of a request have an empty answer, or none has: the first draw is made
//   for all of them from the logits of the prompt's last token.
// - The first unfinished sample leads: it computes the prompt. Another unfinished sample without a
//   sequence waits until it can be forked from the leader at the prompt's end.
#ifndef QUIRE_ENGINE_REQUEST_REQUEST_H_
#define QUIRE_ENGINE_REQUEST_REQUEST_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/blending/blend_plan.h"
#include "engine/loading/layerwise_load.h"
#include "engine/loading/prefix_load.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/sampling/answer_filter.h"
#include "quire/engine.h"
#include "quire/model.h"
#include "quire/status.h"

namespace quire {

class RemoteReceive;  // engine/remote/remote_receive.h
struct PrefillJob;    // engine/remote/prefill_server.h

inline constexpr int64_t kNoSequence = -1;
inline constexpr int64_t kNoDraftState = -1;

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>>
      held_logprobs;  // of answer tokens that are not reported yet, if asked for
  int64_t sequence_id = kNoSequence;
  int64_t computed = 0;
  int64_t reported = 0;                      // answer tokens that the caller has
  int64_t approximate_from = kExactForever;  // its sequence's first token that is not exact
  StoredPrefix stored;                       // of its sequence
  int64_t last_step = 0;                     // in which it was given tokens last
  int64_t draft_state = kNoDraftState;  // what the drafter holds for it; gone with its sequence
  int64_t draft_tokens = 0;             // most guesses of the next draft; 0: as the request says
  // Of a request that has one. Between two steps it may be ahead of the answer, or not be there.
  AnswerFilter filter;
  FinishReason finish_reason = FinishReason::kNone;

  bool finished() const { return finish_reason != FinishReason::kNone; }
  bool has_sequence() const { return sequence_id != kNoSequence; }
  int64_t pending() const { return static_cast<int64_t>(tokens.size()) - computed; }
  // Its first tokens whose KV is what any request would compute.
  int64_t exact() const { return std::min(computed, approximate_from); }
};

struct Request {
  Request(int64_t request_id, std::span<const int32_t> prompt, SamplingOptions sampling);

  // The leader; null if all are finished.
  Sample* leader();
  const Sample* leader() const { return const_cast<Request*>(this)->leader(); }
  int64_t unfinished_count() const;
  // Whether the unfinished samples have answers.
  bool answer_begun() const;
  // Whether anybody is told of its tokens and its end.
  bool has_outputs() const { return learns_for == kNobody && job == nullptr; }
  bool has_window() const { return options.window != 0; }
  // In work, and its layers bring all that the prompt moves of the document that it learns.
  bool brings_document() const {
    return layers != nullptr && !comes_whole && layers->load().begin() <= document_begin &&
           layers->load().end() == prompt_tokens;
  }
  bool has_window_of(const Request& other) const {
    return options.window == other.options.window && options.sinks == other.options.sinks;
  }
  std::span<const int32_t> prompt_of(const Sample& sample) const {
    return {sample.tokens.data(), static_cast<size_t>(prompt_tokens)};
  }
  std::span<const int32_t> answer_of(const Sample& sample) const {
    return std::span<const int32_t>(sample.tokens).subspan(prompt_tokens);
  }
  // Where the job of a peer for this prompt is gone on from: it is for all but the last token, and
  // the last of its own is computed, as that of every request. And whether nobody goes on from the
  // answer, so that nothing behind that is to be kept.
  int64_t HeldEnd() const { return prompt_tokens - 2; }
  bool is_for_peer() const {
    return options.held_for_peer && options.max_tokens == 1 && options.n == 1;
  }
  RequestTimes TimesAt(int64_t now_ns) const noexcept;
  double DocumentSeconds() const noexcept;  // BlendUsage::wait_seconds
  // One of its samples begins, for the first time or again, behind what was found of it.
  void NoteFound(const Sample& sample) noexcept;
  // Its blend is not the one of its recipe: nobody else goes on from it, as nobody could tell what
  // it lacks.
  void KeepBlendForItself() noexcept { space.only_request = id; }
  void NoteStep(int64_t step) noexcept;
  // Brings the sample's filter, if the request has one, to the end of the answer.
  Status AlignFilter(Sample* sample) const;
  // Takes the memory that the samples need until they finish, or for a long time.
  void ReserveAnswers();
  // Takes memory for `count` more tokens of a sample, so that results can be stored without
  // failing.
  static void ReserveTokens(Sample* sample, int64_t count);

  static constexpr int64_t kNotYet = -1;  // a time that has not come
  int64_t id;
  int64_t prompt_tokens;
  SamplingOptions options;
  std::vector<Sample> samples;
  PrefixSpace space;
  std::unique_ptr<BlendPlan> blend;  // null: it does not blend
  bool approximate = false;          // BlendUsage::approximate
  // Requests of the engine's own that compute documents for this one, which waits for them; and
  // what they computed.
  std::vector<int64_t> learners = {};
  int64_t learned_tokens = 0;
  std::array<int64_t, kTierCount> documents_loaded = {};  // BlendUsage::loaded_tokens
  MissReason documents_miss = MissReason::kNone;          // BlendUsage::miss
  // When the first of them was begun and the last of them ended, by the engine's clock; kNotYet.
  int64_t documents_from_ns = kNotYet, documents_until_ns = kNotYet;
  int64_t learns_for = kNobody;  // of such a request: nobody is told of its end
  static constexpr int64_t kNobody = -1;
  bool is_idle = false;  // such a request that comes in when no other one is there
  // Of such a request: its tokens before the document, all of them for the prompt's own beginning;
  // and whether the document cannot be moved before it is there in all layers.
  int64_t document_begin = 0;
  bool comes_whole = false;
  // What `cached` counts is exact up to here; and was found up to here each time that a sample
  // began again: what is behind was computed, or moved, by this request.
  int64_t exact_start = kExactForever, found_again = kExactForever;
  Speculation speculation;
  int64_t drafted_tokens = 0, accepted_tokens = 0, decode_forwards = 0;  // as in StepOutput
  // While it waits: what the chunk store has of it, under way or there. Null before it was asked,
  // and if there is nothing to ask for.
  std::unique_ptr<PrefixLoad> load;
  std::shared_ptr<ChunkFetch> prefetch;  // into the store's RAM, until the load begins; or null
  bool looked_up = false;                // the store was asked since it came to wait
  std::vector<ChunkKey> prompt_keys;     // of what the store was asked for last
  int64_t asked_ns = kNotYet;            // when the store was asked first
  bool held_back = false;                // from being admitted, for what a store is bringing
  int64_t lookups = 0;
  // While it runs: chunks behind the leader's tokens, which its next forward takes layer by layer.
  std::unique_ptr<LayerwiseLoad> layers;
  // While a peer computes the leader's prompt: the leader's sequence ends in tokens that are to
  // come, and is in no forward. Null: nothing is to come.
  std::shared_ptr<RemoteReceive> remote;
  int64_t remote_tokens = 0;  // as in StepOutput
  double remote_seconds = 0;
  double predicted_remote_seconds = 0, predicted_here_seconds = 0;
  // A prompt of another process, to which its KV goes. It has no outputs. Null: one of Submit.
  std::shared_ptr<PrefillJob> job;
  bool waits_for_peer = false;  // in work, until the job's peer has room for more
  bool counts_cached = false;   // what is loaded counts as `cached`: it came in for the first time
  CachedTokens cached;
  int64_t recomputed = 0;  // StepOutput::recomputed_tokens
  MissReason miss = MissReason::kNone;
  PrefixMiss prefix_miss;
  double load_seconds = 0;
  int64_t completion_tokens = 0;
  // When, by the engine's clock; kNotYet. In how many forwards it was, and in which one last.
  int64_t submitted_ns = 0, admitted_ns = kNotYet, first_token_ns = kNotYet;
  int64_t steps = 0, last_step = kNotYet;
  bool admitted_before = false;
  int64_t turn = 0;            // in which it may come in (RequestQueue)
  bool told_usage = false;     // the outputs of its first tokens had it
  bool blend_counted = false;  // EngineStats has its blend
  bool restarted = false;      // computed again without shared pages, see Decision::kRestart
};

// Ends a request, wherever it is.
using RequestEnder =
    std::function<void(Request* request, FinishReason reason, const std::string& error)>;

// BadArgument with the field's name and value.
Status CheckSpeculation(std::string_view owner, const Speculation& speculation);
Status CheckSamplingOptions(const SamplingOptions& options, int64_t vocab_size);
// BadArgument with the position and value of the first id outside the vocabulary, or for no ids.
Status CheckTokens(std::string_view what, std::span<const int32_t> tokens, int64_t vocab_size);

// Length of the longest stop sequence that the answer ends with; 0 = none.
int64_t StopMatchLength(std::span<const int32_t> answer,
                        const std::vector<std::vector<int32_t>>& stop);
// Length of the longest end of the answer that begins a stop sequence without completing it: not to
// be given out yet.
int64_t HeldBackLength(std::span<const int32_t> answer,
                       const std::vector<std::vector<int32_t>>& stop);

// The most consecutive positions that a token of the request sees: all of them, or its window.
int64_t SpanMax(int64_t prompt_tokens, const SamplingOptions& options);
// Whether a sequence of `tokens_max` tokens takes the long factors of the model's rotation.
bool NeedsLongRope(const ModelInfo& model, int64_t tokens_max);
// Whether the token ends an answer and is not part of it.
bool IsEnd(const ModelInfo& model, const SamplingOptions& options, int32_t token) noexcept;

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_REQUEST_H_
