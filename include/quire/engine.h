// The serving engine: many requests over one model and one KV cache, token ids in, token ids out.
//
// Exact: nothing that the scheduler does (batching, chunking, prefix reuse, preemption) can be seen
// in an answer. Threads: one thread at a time calls the engine; a second one meanwhile gets
// BadState. Stats and Idle are open to all threads at all times and tell how things stood after the
// last call, but that Idle is false, too, when another process asks for a prompt. The engine
// computes on the model's runner.
//
// Order of calls: Submit any number of requests at any time, Step until Idle.
#ifndef QUIRE_ENGINE_H_
#define QUIRE_ENGINE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/blend.h"
#include "quire/chunk_store.h"
#include "quire/model.h"
#include "quire/seams.h"
#include "quire/snapshot.h"
#include "quire/status.h"
#include "quire/tensor.h"
#include "quire/transfer_peer.h"

namespace quire {

// What guesses the next tokens of an answer. A guess is verified with others in one forward and
// kept where it is what is drawn there, so no answer depends on it (docs/engine.md).
enum class DraftKind : uint8_t {
  kNone,
  kNGram,  // what followed where prompt and answer ended like this before
  kModel,  // EngineOptions::draft_model_directory
};

struct Speculation {
  DraftKind draft = DraftKind::kNone;
  // The most guesses of a step, in [1, kDraftTokensMax]; fewer while few of them are right.
  int64_t draft_tokens = 8;
  // In [1, kBranchesMax]: earlier places to follow, or the draft model's best tokens at each place.
  int64_t branches = 2;

  static constexpr int64_t kDraftTokensMax = 255;  // nodes of a tree, but its root
  static constexpr int64_t kBranchesMax = 16;
};

// The values that an option may have.
struct IntegerRange {
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
};

struct EngineOptions {
  std::string model_directory = {};
  DType dtype = DType::kBF16, activations = DType::kI8;  // see ModelOptions
  // Types of stored keys and values; nullopt = `dtype`. Latent attention takes one for both.
  std::optional<DType> k_dtype = std::nullopt;
  std::optional<DType> v_dtype = std::nullopt;
  int threads = 0;           // 0 = one per usable core; ignored when runner is given, as is numa
  std::string numa = "off";  // "auto": threads and memory by NUMA nodes, where there are several
  std::shared_ptr<ParallelRunner> runner = nullptr;
  std::string kernel_path = {};
  int64_t page_size = 0;        // 0 = default
  int64_t prefill_chunk = 512;  // most new tokens of one step
  // While samples decode, prompts are cut so that few steps take longer, as far as steps before
  // tell (at least 16 tokens of a step): the most that the next tokens of others wait for them.
  int64_t max_step_ms = 100;
  int64_t max_num_sequences = 64;  // samples that are worked on at a time
  int64_t max_waiting = 65536;     // requests in the queue; they cost the memory of their prompts
  bool prefix_cache = true;        // keep the KV of answers, reuse the longest common prefix
  // Bytes of KV pages; 0 = as much as one sequence of max_position_embeddings, at most a quarter of
  // the machine's memory, and no more than leaves a sixteenth of what is free.
  int64_t kv_bytes = 0;
  // Models with recurrent layers: bytes of states that the prefix cache keeps, beside those of
  // samples in work; 0 = at most 128 states and an eighth of the free memory.
  int64_t state_bytes = 0;
  // Keys and values on their way from AttachPrefillPeers, before they are in their pages: the most
  // that they hold at a time. 0 = 64 MiB, which the plan has not counted.
  int64_t staging_bytes = 0;
  // The same and states on their way to peers (ServePrefill), a quarter at most to one. 0 =
  // kSendingBytesDefault, which the plan has not counted.
  int64_t sending_bytes = 0;
  static constexpr int64_t kSendingBytesDefault = int64_t{128} << 20;
  Speculation speculation = {};  // of requests that do not say
  // A smaller model with the same tokens, for DraftKind::kModel; computed like the other one.
  std::string draft_model_directory = {};
  // Nodes of all samples' token trees in a step: guesses, and a root for each sample that has some.
  // Recurrent layers keep a state for each. 0 = 64 with `speculation` or a draft model, else none:
  // then no request can speculate.
  int64_t max_tree_nodes = 0;
  // Tokens of a piece of a blended prompt, at most (BlendRequest); a step takes as many beside
  // prefill_chunk others. 0 = no request can blend.
  int64_t blend_piece = 0;
};

// Calls f(name, member[, range]) for each option but `runner`; limits keep sizes within 63 bits.
template <typename F>
void ForEachOption(EngineOptions& options, F&& f) {
  f("model_directory", options.model_directory);
  f("dtype", options.dtype);
  f("activations", options.activations);
  f("k_dtype", options.k_dtype);
  f("v_dtype", options.v_dtype);
  f("threads", options.threads, IntegerRange{0, kThreadCountMax});
  f("numa", options.numa);
  f("kernel_path", options.kernel_path);
  f("page_size", options.page_size, IntegerRange{});
  f("prefill_chunk", options.prefill_chunk, IntegerRange{1, int64_t{1} << 20});
  f("max_step_ms", options.max_step_ms, IntegerRange{1, 3'600'000});
  f("max_num_sequences", options.max_num_sequences, IntegerRange{1, int64_t{1} << 20});
  f("max_waiting", options.max_waiting, IntegerRange{1});
  f("prefix_cache", options.prefix_cache);
  f("kv_bytes", options.kv_bytes, IntegerRange{});
  f("state_bytes", options.state_bytes, IntegerRange{});
  f("staging_bytes", options.staging_bytes, IntegerRange{0, int64_t{1} << 40});
  f("sending_bytes", options.sending_bytes, IntegerRange{0, int64_t{1} << 40});
  f("speculation", options.speculation);
  f("draft_model_directory", options.draft_model_directory);
  f("max_tree_nodes", options.max_tree_nodes, IntegerRange{0, int64_t{1} << 16});
  f("blend_piece", options.blend_piece, IntegerRange{0, int64_t{1} << 20});
}

// Tokens [begin, end) of a prompt that are a text of their own.
struct PromptDocument {
  int64_t begin = 0;
  int64_t end = 0;
  // A budget of its own, as BlendDocument::ratio.
  std::optional<double> ratio = std::nullopt;

  bool operator==(const PromptDocument&) const = default;
};

// When documents are computed behind the anchor that are not known there.
enum class DocumentLearning : uint8_t {
  kOff,    // they are computed where they stand in the prompt, and stay unknown
  kFirst,  // before the prompt, which waits for them; what a store has is loaded
  kIdle,   // where they stand in the prompt, and behind the anchor when no other request is there
};

// Whether documents are looked for in the prompt's tokens: those that earlier blended requests with
// the same cache_salt have named, whole or in parts of at least kFoundTokensMin tokens.
enum class DocumentSearch : uint8_t {
  kOff,       // BlendRequest::documents are all
  kAnchored,  // those whose anchor is the beginning of this prompt
  kAnywhere,  // also those whose KV was computed behind another anchor
};

// Use KV of documents wherever they stand in the prompt (CacheBlend, docs/blend.md). The answer is
// APPROXIMATE (`verdict` or `unverified` must allow it), unless all is recomputed or none is found.
//
// What stands before the first document is the anchor; where nothing does, the model's begin token.
// A document is known if the prefix cache holds anchor + document as a prompt's beginning. The
// first document behind an anchor is such a beginning of the prompt itself, and exact; with a store
// it is learnt, whatever `learn` says, for what the store has of its end.
struct BlendRequest {
  std::vector<PromptDocument> documents;  // ascending, disjoint, none empty; none with `search`
  // force_last does not count: the prompt's last token is always computed. Prompts of fewer than
  // min_tokens are computed, too.
  BlendOptions options = {.link_tokens = 8};
  DocumentLearning learn = DocumentLearning::kFirst;
  DocumentSearch search = DocumentSearch::kOff;
  std::optional<BlendVerdict> verdict = std::nullopt;  // of the model; nothing: not measured
  bool unverified = false;  // blend whatever the verdict says, or without one
  static constexpr int64_t kFoundTokensMin = 16;
};

// How the next token is drawn. Defaults are greedy. A draw is a function of (logits, history, seed,
// position) only. Order: filter, penalties, bias, then greedy, or temperature, top_k, top_p, min_p
// (each on what the one before left). Equal logits: the lower id comes first.
struct SamplingOptions {
  // >= 0. 0: the prompt alone is computed, its KV kept and stored; samples end with kLength.
  int64_t max_tokens = 128;
  float temperature = 0.0F;  // >= 0; 0 = greedy
  int64_t top_k = 0;         // >= 0; 0 = off
  float top_p = 1.0F;        // in (0, 1]; 1 = off
  float min_p = 0.0F;        // in [0, 1], as a part of the best token's probability; 0 = off
  // > 0; for a token of prompt or answer: a positive logit is divided by it, another multiplied.
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;   // subtracted once for a token of the answer
  float frequency_penalty = 0.0F;  // subtracted for each time that the token is in the answer
  std::vector<std::pair<int32_t, float>> logit_bias = {};  // (token, what is added); a token once
  uint64_t seed = 0;
  int64_t n = 1;          // samples; sample i draws with stream i of the seed
  int64_t logprobs = -1;  // -1: none; 0: of the chosen token; k: also of the k best
  // Else a token of ModelInfo::eos_token_ids ends the answer and is not part of it.
  bool ignore_eos = false;
  // Token sequences that end the answer. The match is cut from it: tokens that may begin one are
  // given out only when it is known that they do not.
  std::vector<std::vector<int32_t>> stop = {};
  // Requests with equal salts reuse each other's KV, in every tier; others never do. Any bytes.
  std::string cache_salt = {};
  // Requests that wait come in by turns of their groups: in a turn of a group of weight 1 one of
  // weight w has w requests. Any bytes; empty: requests of one salt are a group.
  std::string turn_group = {};
  int64_t turn_weight = 1;  // in [1, kTurnWeightMax]
  // One of PrefillPeerOptions::addresses. Unless the engine never asks peers, this one is asked for
  // the prompt if it is there, and no other one, whatever is predicted. Empty: the engine chooses.
  std::string prefill_peer = {};
  // A peer is about to ask for the prompt (ServePrefill): its KV is given up last until it has, or
  // the time of a transfer's lease is over.
  bool held_for_peer = false;
  std::optional<Speculation> speculation = {};  // nothing: EngineOptions::speculation
  // A text that the answer is likely to repeat in parts: DraftKind::kNGram guesses from it, too. It
  // changes no answer. Where the request has no speculation of its own, it is kNGram.
  std::vector<int32_t> predicted_tokens = {};
  // Endless text: a token sees the first `sinks` tokens and the last window - sinks, as by
  // AttentionKVCache::EnableSlidingWindowForSeq. Pages are those of the window, and prompt +
  // max_tokens may pass the model's positions, up to kEndlessTokensMax. 0 = a token sees all.
  int64_t window = 0;  // at most the model's positions
  int64_t sinks = 0;   // in [0, window)
  // Tokens that it does not allow are never drawn: their logits are -infinity before all else, and
  // log-probabilities are those of the allowed ones. Where it allows nothing, or fails, the sample
  // ends with kError. It takes the place of ignore_eos. Null: all are allowed.
  std::shared_ptr<const TokenFilter> filter = nullptr;
  std::optional<BlendRequest> blend = {};  // nothing: exact
  static constexpr int64_t kBlendDocumentsMax = 4096;

  static constexpr int64_t kEndlessTokensMax = int64_t{1} << 30;  // positions are int32
  static constexpr int64_t kLogprobsMax = 256;                    // 2 KiB per token of the answer
  static constexpr int64_t kStopSequencesMax = 64;                // each is compared at every token
  static constexpr int64_t kStopTokensMax = 256;       // of one; as many tokens may be held back
  static constexpr int64_t kCacheSaltBytesMax = 4096;  // a tenant's name or key; of a group too
  static constexpr int64_t kTurnWeightMax = int64_t{1} << 20;
  static constexpr int64_t kPredictedTokensMax = int64_t{1} << 16;  // each is hashed three times
};

// Calls f(name, member) for each option, for bindings.
template <typename F>
void ForEachOption(SamplingOptions& options, F&& f) {
  f("max_tokens", options.max_tokens);
  f("temperature", options.temperature);
  f("top_k", options.top_k);
  f("top_p", options.top_p);
  f("min_p", options.min_p);
  f("repetition_penalty", options.repetition_penalty);
  f("presence_penalty", options.presence_penalty);
  f("frequency_penalty", options.frequency_penalty);
  f("logit_bias", options.logit_bias);
  f("seed", options.seed);
  f("n", options.n);
  f("logprobs", options.logprobs);
  f("ignore_eos", options.ignore_eos);
  f("stop", options.stop);
  f("cache_salt", options.cache_salt);
  f("turn_group", options.turn_group);
  f("turn_weight", options.turn_weight);
  f("prefill_peer", options.prefill_peer);
  f("held_for_peer", options.held_for_peer);
  f("speculation", options.speculation);
  f("predicted_tokens", options.predicted_tokens);
  f("window", options.window);
  f("sinks", options.sinks);
  f("filter", options.filter);
  f("blend", options.blend);
}

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t token;
  // Natural log of the softmax of the model's logits, before all sampling options but `filter`.
  float logprob;
};

// Tokens of a prompt that were not computed, by where their KV came from.
struct CachedTokens {
  int64_t memory = 0;                          // the prefix cache, or a request that ran
  std::array<int64_t, kTierCount> tiers = {};  // of the chunk store, by TierKind

  int64_t total() const;
  bool operator==(const CachedTokens&) const = default;
};

// How the engine uses a chunk store.
struct StoreUseOptions {
  // 0 = 256, or 1024 where 256 tokens are under 1 MiB or layers are recurrent
  int64_t chunk_tokens = 0;
  int64_t load_timeout_ms = 2000;  // > 0; the most that a request waits for the store
  // Also load what is predicted to be slower to load than to compute.
  bool load_always = false;
  bool write = true;  // put what was computed; false: only look up
  // Keep the end of a prompt after its last whole chunk, too: the same prompt finds all of itself.
  bool tails = true;
  std::string mac_key = {};                // ChunkStoreOptions::mac_key of the store
  std::shared_ptr<Clock> clock = nullptr;  // the store's; null = MachineTime()
};

// When a prompt is computed by another process.
enum class RemotePrefill : uint8_t {
  kAuto,    // when that is predicted to be faster than to compute it here
  kAlways,  // when a peer is there
  kOff,
};

// What becomes of a request whose prompt a peer does not finish: it is gone, late, or refuses.
enum class OnPeerLoss : uint8_t {
  kRecompute,  // what came is kept, and the rest computed here: the same answer
  kFail,       // the request ends with kError
};

// Processes that compute prompts for this one (Engine::AttachPrefillPeers).
struct PrefillPeerOptions {
  std::vector<std::string> addresses = {};  // as TransferPeer::Connect takes them; 1 to 64
  RemotePrefill when = RemotePrefill::kAuto;
  OnPeerLoss on_loss = OnPeerLoss::kRecompute;
  int64_t timeout_ms = 120'000;   // of one prompt, from asking to the last row; up to a day
  TransferPeerOptions peer = {};  // without a passport
};

// One of them, as things stand.
struct PrefillPeerInfo {
  std::string address;
  bool connected = false;
  std::string error;             // of the last connection or prompt that failed; empty: none did
  int64_t queued_tokens = 0;     // that the peer has to compute
  double seconds_per_token = 0;  // that it computes prompts in; 0: not measured yet
  double bytes_per_second = 0;   // that came from it at least; 0: nothing did yet
  int64_t prompts = 0, tokens = 0, bytes = 0;  // that came from it
  int64_t losses = 0;                          // prompts that it did not finish
  int64_t streams = 0;                         // of its connection; 0: there is none
};

// Where the time of a request went: three parts, one after the other, whose sum is all of it, by
// the engine's clock. One that waits again after preemption does so in the part that it was in.
struct RequestTimes {
  double queue_seconds = 0;   // submitted to admitted
  double prompt_seconds = 0;  // to its first token: queue and prompt are the time to first token
  double decode_seconds = 0;  // to the end of the sample
  int64_t steps = 0;          // forwards that computed some of its tokens
};

// How a blended prompt was made. exact + kept + moved + computed is all of it.
struct BlendUsage {
  bool approximate = false;       // whether some KV is not what full prefill gives
  int64_t documents = 0;          // of the prompt: named, or found
  int64_t exact_tokens = 0;       // found as prefill would give them
  int64_t kept_tokens = 0;        // left by an earlier request with the same blend, or by itself
  int64_t moved_tokens = 0;       // KV of documents at another place
  int64_t recomputed_tokens = 0;  // of the moved ones: computed again in all layers
  int64_t computed_tokens = 0;
  int64_t learned_tokens = 0;  // computed for BlendRequest::learn, before the prompt itself
  // How far the cached KV of moved tokens that were not recomputed is from fresh KV, at the check
  // layer that dropped them (BlendOptions::metric): largest, and mean over left_tokens.
  double deviation_max = 0, deviation_mean = 0;
  int64_t moved_bytes = 0;    // of keys and values that were read
  double move_seconds = 0;    // that reading and rotating them took
  double select_seconds = 0;  // that comparing and ranking took
  double wait_seconds = 0;    // of queue_seconds: from the first document's begin to the last end
  // What the store brought for documents before the prompt, and the first reason for no more.
  std::array<int64_t, kTierCount> loaded_tokens = {};  // with their anchors, by TierKind
  MissReason miss = MissReason::kNone;                 // not kNotStored if there is another one

  int64_t left_tokens() const { return moved_tokens - recomputed_tokens; }
};

// Why not all KV of a prompt was there when it was admitted, as far as requests of its salt tell.
enum class PrefixMissKind : uint8_t {
  kNone,     // all was there that can be used: the last token is always computed
  kNew,      // nothing is known behind the first `position` tokens
  kDiffers,  // what is known departs from it at token `position`
  kEvicted,  // what was known behind the first `position` tokens was given up for want of room
  kStore,    // the chunk store did not bring more than `position` tokens: StepOutput::miss
};

struct PrefixMiss {
  PrefixMissKind kind = PrefixMissKind::kNone;
  int64_t position = 0;
  int64_t evicted_ms = 0;  // kEvicted: how long ago

  bool operator==(const PrefixMiss&) const = default;
};

// What one step gave to one sample of one request.
struct StepOutput {
  int64_t request_id = 0;
  int64_t sample = 0;
  std::vector<int32_t> tokens;  // new ones
  // Per new token: the chosen one, then the best ones; fewer where a filter allows fewer.
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;          // kError
  StatusDetail error_detail;  // what it is about
  // The rest is about the whole request, and set with a finish_reason and with the first tokens.
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;      // of the prompt, not computed: cached.total()
  int64_t completion_tokens = 0;  // of all samples so far: final with the last sample that finishes
  // Prompt tokens that the prefix cache knew and that were computed all the same: where the text
  // departs from the known one, no recurrent state is kept, or a window has slid past.
  int64_t recomputed_tokens = 0;
  CachedTokens cached;
  // The reason for the first chunk that the store was asked for and did not bring; kNone if it
  // brought all, or was not asked.
  MissReason miss = MissReason::kNone;
  PrefixMiss prefix_miss;
  double load_seconds = 0;  // that the store took for the chunks
  // Tokens of the prompt that a peer computed, the time that they took to come, and what was
  // predicted for them there and here; 0: no peer was asked, or speeds are not known.
  int64_t remote_tokens = 0;
  double remote_seconds = 0;
  double predicted_remote_seconds = 0, predicted_here_seconds = 0;
  // Sums over all samples so far: guessed tokens, the right ones among them, and forwards that drew
  // tokens of an answer, counted per sample.
  int64_t drafted_tokens = 0, accepted_tokens = 0, decode_forwards = 0;
  RequestTimes times;               // so far
  std::optional<BlendUsage> blend;  // of a request that has SamplingOptions::blend
};

// Upper bounds of the classes in which EngineStats counts steps; one more class has all above.
inline constexpr std::array<double, 14> kStepSecondsBounds = {
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30};

struct EngineStats {
  int64_t pages_total = 0, pages_free = 0, pages_in_use = 0;
  // What the prefix cache keeps; its pages are in use and given up when others need them.
  // retained_pages: those that only retained sequences hold.
  int64_t retained_sequences = 0, retained_tokens = 0, retained_pages = 0;
  // Requests; of those that wait, the engine's own, by which documents of others are learnt.
  int64_t waiting = 0, running = 0, learning = 0;
  int64_t steps = 0, prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, preemptions = 0;
  // Tokens of prompts and answers, by steps that ended: how far a long prompt is. What was
  // preempted counts again, a wrong guess not at all.
  int64_t computed_tokens = 0;
  // Calls of Step that computed something, by the time that they took, and all of that time.
  std::array<int64_t, kStepSecondsBounds.size() + 1> step_counts = {};
  double step_seconds = 0;
  int64_t kv_bytes = 0, kv_bytes_per_token = 0, weight_bytes = 0, page_size = 0;
  // Models with recurrent layers: states that there is room for, that are free, and that the prefix
  // cache keeps; the bytes of all; prompt tokens that were known and computed again.
  int64_t states_total = 0, states_free = 0, retained_states = 0, state_bytes = 0;
  int64_t recomputed_tokens = 0;
  // What the chunk store did: requests that wait for it now, loads that ended, the tokens they
  // brought, why each brought no more, and their time; chunks that were put, or refused by it.
  int64_t loading = 0, loads = 0;
  std::array<int64_t, kTierCount> loaded_tokens = {};  // by TierKind
  std::array<int64_t, kMissReasonCount> misses = {};   // by MissReason
  double load_seconds = 0;
  // Those loads whose layers a forward computed with while later ones were on their way, and the
  // time that was computed meanwhile: what the overlap saved, at least.
  int64_t layer_loads = 0;
  double overlap_seconds = 0;
  int64_t stored_chunks = 0, stored_bytes = 0, refused_chunks = 0;
  double compute_seconds_per_token = 0;  // of prompts, measured: what a load must beat; 0: not yet
  // Prompts that peers computed for this engine: tokens and bytes that came, requests that wait
  // now, time computed for others meanwhile, prompts not finished, of these past deadline or lease.
  int64_t remote_tokens = 0, remote_bytes = 0, remote_waiting = 0, remote_losses = 0;
  int64_t remote_timeouts = 0;
  // Bytes of them between their arrival and their page: now, and the most there ever were.
  int64_t staging_bytes = 0, staging_bytes_largest = 0;
  double remote_overlap_seconds = 0;
  // Prompts that this engine computes for peers: connections; in work or queued; sent whole, and
  // their tokens; refused or broken off; of these past deadline or lease, or not taken in time.
  int64_t served_peers = 0, served_waiting = 0, served_prompts = 0, served_tokens = 0;
  int64_t served_losses = 0, served_timeouts = 0;
  int64_t sending_bytes = 0;  // of rows that peers have not taken yet
  // Prompts that are held for peers (SamplingOptions::held_for_peer) and their pages, now; those
  // that were asked for, whose time was over, and that made room or met the end of serving.
  int64_t held_prompts = 0, held_pages = 0;
  int64_t held_used = 0, held_overdue = 0, held_given_up = 0;
  // As in StepOutput, over all requests, and the time that guessing took. Tokens of answers per
  // decode_forwards are what speculation saves at most.
  int64_t drafted_tokens = 0, accepted_tokens = 0, decode_forwards = 0;
  double draft_seconds = 0;
  // As in BlendUsage: moved ones by steps that ended, the others once a prompt was computed.
  int64_t blend_moved_tokens = 0, blend_recomputed_tokens = 0;
  int64_t blend_exact_tokens = 0, blend_kept_tokens = 0, blend_computed_tokens = 0;
};

// ---- How things stand between two steps, to be shown to people: what holds which KV. No text.

// At most this number of blocks, of sequences and of requests that wait are described.
inline constexpr int64_t kDescribedMax = 1000;

// A range of tokens that the same sequences see. Salts are told by digests, HMAC-SHA-256 with
// EngineDescription::salt_key of which 16 hexadecimal digits are kept; "": no salt.
struct DescribedBlock {
  int64_t parent = -1;           // index of the block before it; -1: none, or it was left out
  int64_t begin = 0, end = 0;    // positions
  int64_t bytes = 0;             // of the pages that begin in it
  int64_t sequences = 0;         // described ones that see it
  int64_t stored_tokens = 0;     // of its first tokens, those that the chunk store has as well
  std::string salt_digest = {};  // for requests with this salt
};
struct DescribedSequence {
  static constexpr int64_t kRetained = -1;  // by the prefix cache
  static constexpr int64_t kInternal = -2;  // of a prompt of another process, or of a document
  int64_t request_id = kRetained;
  int64_t sample = 0;
  int64_t tokens = 0;
  int64_t block = -1;  // index of the one in which it ends; -1: none, or it was left out
  std::string salt_digest = {};
};
struct DescribedRequest {
  int64_t request_id = 0;
  int64_t prompt_tokens = 0;
  double seconds = 0;  // since it was submitted
  std::string salt_digest = {};
};
struct EngineDescription {
  EngineStats stats;
  std::vector<DescribedBlock> blocks;        // parents come before their children
  std::vector<DescribedSequence> sequences;  // of requests, then retained ones, last used first
  std::vector<DescribedRequest> waiting;     // in their order
  bool cut = false;                          // something was left out
  int64_t visited = 0;  // blocks and sequences that were looked at: what it has cost
  // Random, the same for the engine's life. With it salts can be tried: it stays in the process.
  std::string salt_key = {};
};

// What an engine takes from the machine, in bytes, known before it is made.
struct MemoryPlan {
  int64_t weight_bytes = 0;  // as ModelInfo::weight_bytes
  int64_t kv_bytes_per_token = 0;
  int64_t page_size = 0;  // tokens; without attention layers, those between two checkpoints
  int64_t page_bytes = 0;
  int64_t page_count = 0;
  int64_t kv_bytes = 0;  // mapped for the pages: page_count * page_bytes, a byte for each 16 tokens
                         // of a layer, and the rest of the last page of the machine
  int64_t state_bytes = 0;    // mapped for the states of recurrent layers
  int64_t scratch_bytes = 0;  // of the largest step: activations, attention, logits, sampling
  int64_t draft_bytes = 0;    // all of the draft model: weights, KV, states, scratch
  // EngineOptions::staging_bytes, and with recurrent layers the states of prompts that come.
  int64_t staging_bytes = 0;
  int64_t sending_bytes = 0;    // EngineOptions::sending_bytes, or more for one large state
  int64_t total_bytes = 0;      // weights, KV, states, scratch, draft, staging, sending
  int64_t machine_bytes = 0;    // memory of this machine, or of the control group it runs in
  int64_t available_bytes = 0;  // of it, free when the plan was made; the plan fits up to this
  bool kv_shrunk = false;       // kv_bytes was 0, and there are fewer pages so that the plan fits
  int64_t longest_context = 0;  // tokens of prompt and answer of a request of one sample
};

class Engine {
 public:
  // The sizes of the engine that Create would make. Reads config.json and the headers of the
  // safetensors files; nothing large is allocated or read. Errors are those of Create, but a plan
  // that is larger than the free memory is no error here.
  static Result<MemoryPlan> PlanMemory(const EngineOptions& options);
  // NotFound, Corrupt, BadArgument: the folder or an option, by name and value. OutOfMemory: the
  // plan is larger than the free memory, or the system refused.
  static Result<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;

  // Its layers are those of the cache.
  virtual const ModelInfo& model_info() const = 0;
  virtual const std::string& kernel_path() const = 0;
  virtual const std::string& numa() const = 0;  // for people: the nodes, or why there are none

  // What Submit says of a request whatever else there is: BadArgument, TooLarge. From any thread.
  virtual Status CheckSubmit(std::span<const int32_t> prompt,
                             const SamplingOptions& options) const = 0;
  // EngineOptions::max_waiting.
  virtual int64_t max_waiting() const = 0;
  // Queues a request; its id. With LongRoPE the long factors are used where prompt + max_tokens
  // passes the original length. BadArgument for ids outside the vocabulary, an empty prompt or
  // options out of range; TooLarge if prompt + max_tokens can never fit the cache or the model's
  // positions, or n is over max_num_sequences; Full if max_waiting requests wait.
  virtual Result<int64_t> Submit(std::span<const int32_t> prompt,
                                 const SamplingOptions& options) = 0;
  // Ends a request; its pages are free when Cancel returns. The next Step reports its unfinished
  // samples with kCancelled. UnknownSequence if it is not there (any more).
  virtual Status Cancel(int64_t request_id) = 0;
  // Ends one sample after the first `answer_tokens` tokens that it was given out, for a caller
  // that finds the end in the text (stop strings). The surplus is popped and not counted: state and
  // usage are as if it had stopped there at once. The next Step reports its end with kStop.
  // UnknownSequence if the sample is not there (any more), BadArgument for more than was given out.
  virtual Status Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) = 0;
  // One forward for whatever is due, and its outputs. Empty outputs and ok when nothing is left to
  // do. When the forward fails, the requests that it fails for even alone end with kError. An error
  // (OutOfMemory) leaves all requests as they were: Step can be called again.
  virtual Result<std::vector<StepOutput>> Step() = 0;
  virtual bool Idle() const = 0;

  // Logits of every token of every prompt, computed together in one batch (in chunks). logits[i]:
  // [prompts[i].size(), vocab_size], the caller's; after an error their content is undefined. Legal
  // between steps: it uses pages that no request holds, OutOfPages if those are too few.
  virtual Status Logits(std::span<const std::span<const int32_t>> prompts,
                        std::span<float* const> logits) = 0;

  // Snapshots (quire/snapshot.h) of what the prefix cache holds; BadState without one.
  // Writes the longest beginning of contents.tokens whose KV is there, and says how many tokens
  // that is. NotFound if there is none; else as quire::SaveSnapshot.
  virtual Result<int64_t> SaveSnapshot(const SnapshotContents& contents,
                                       const std::string& path) = 0;
  // Requests that begin with the snapshot's tokens start after them, as long as the prefix cache
  // keeps them. TooLarge if model or cache cannot hold them; else as quire::LoadSnapshot.
  virtual Result<SnapshotInfo> LoadSnapshot(const Passport& identity, const std::string& path,
                                            const SnapshotLoadOptions& options) = 0;

  // From now on KV that is not in memory is looked for in the store, and what is computed is put
  // there. `identity`: the model, as CachePassport takes it. The requests that have begun are not
  // looked up. BadArgument for an option by name and value; BadState if a store is attached.
  virtual Status AttachStore(std::shared_ptr<ChunkStore> store, const Passport& identity,
                             const StoreUseOptions& options) = 0;
  // Puts what is in memory and not in the store, and waits until it is as durable as the store
  // promises: before the engine goes. Ok without a store. Timeout.
  virtual Status FlushStore(int64_t timeout_ms) = 0;

  // From now on prompts may be computed by other processes that serve prefill (ServePrefill), whose
  // keys and values come here layer by layer; the last token is computed here. `identity`: the
  // model, as CachePassport takes it. Answers do not change. Prompts that blend are computed here.
  // Connects to each peer once and waits for that; those that do not answer are tried again in the
  // background. BadArgument for an option by name and value, BadState if peers are attached,
  // Incompatible for a peer whose model or KV is another one.
  virtual Status AttachPrefillPeers(const Passport& identity,
                                    const PrefillPeerOptions& options) = 0;
  // From any thread at any time. Empty without peers.
  virtual std::vector<PrefillPeerInfo> PrefillPeers() const = 0;
  // Computes prompts for other processes from now on, as requests beside those of Submit, and with
  // the prefix cache and the store; returns the endpoint, with the port that was taken. They have
  // no outputs. With an EngineLoop: in EngineLoop::Run, since the engine may not be idle after it.
  // BadState if it serves already; else as TransferListener::Start.
  virtual Result<std::string> ServePrefill(const Passport& identity,
                                           const TransferListenerOptions& options) = 0;
  // The last connection that was refused; Ok if none was. From any thread at any time.
  virtual Status LastPrefillRefusal() const = 0;
  // Refuses connections and prompts of others from now on. Those in work are finished, and counted
  // by served_waiting until they have arrived; `at_once`: all connections end. From any thread.
  virtual void EndPrefill(bool at_once) noexcept = 0;
  // `wake` is called, from any thread, when Idle may have become false without a call: a peer asks
  // for a prompt. It must not call the engine, but for Idle and Stats. Null: nothing is called.
  // When SetWake returns, the one before is not called any more. From any thread at any time, but
  // for within `wake`. An EngineLoop sets its own.
  virtual void SetWake(std::function<void()> wake) = 0;

  // As long as the prefix cache keeps at most `pages` pages for this salt (shared ones count for
  // each sequence), they are given up only where nothing else is left. 0: no longer. BadArgument
  // for a negative number, BadState without a prefix cache.
  virtual Status SetKeptPart(const std::string& cache_salt, int64_t pages) = 0;

  virtual EngineStats Stats() const = 0;
  // OutOfMemory.
  virtual Result<EngineDescription> Describe() = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_H_
