// AttentionKVCache: paged keys and values of many sequences, and attention over them. After TVM's
// interface of the same name (relax.vm.AttentionKVCache).
//
// One forward, in calls:
//   BeginForward(ids, lengths);
//   for every layer:
//     AttentionWithFusedQKV(layer, qkv, o, sm_scale);   // or Append(layer, k, v), then
//                                                       // Attend(layer, q, o, lse, sm_scale)
//   EndForward();
//
// Exact: the output row of a token depends, bit for bit, on the tokens that it may see (and on
// build and kernel path) and not on the batch, the cut of the prompt, page size, forks, pops or the
// number of threads (docs/exactness.md).
#ifndef QUIRE_ATTENTION_KV_CACHE_H_
#define QUIRE_ATTENTION_KV_CACHE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "quire/kv_state.h"
#include "quire/rope.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

class KVTransfer;  // quire/kv_transfer.h

// What one attention layer keeps. MHA, GQA and MQA: num_qo_heads is a multiple of num_kv_heads.
struct AttentionLayerSpec {
  int64_t num_qo_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t qk_head_dim = 0;
  int64_t v_head_dim = 0;
  // The type of stored keys, and of values unless v_dtype is set: kF32, kF16, kBF16, or kI8 and
  // kF8E4M3, which are codes with a scale for each token and head (docs/exactness.md).
  DType dtype = DType::kF32;
  std::optional<DType> v_dtype = std::nullopt;
  int64_t window = 0;  // a query at position p sees (p - window, p]; 0: all. Pages that slid out of
                       // every sequence's sight are freed when a forward ends
  double soft_cap = 0;  // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  // A logit per query head that takes part in the softmax without a value ("attention sink" as a
  // parameter). Empty: none.
  std::vector<float> head_sinks = {};
  // Replaces AttentionKVCacheOptions::rope for this layer, with the same mode and pairing; neither
  // kDynamic nor kLongRope.
  std::optional<RopeOptions> rope = {};
  // Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), absorbed: each token keeps
  // one vector [kv_lora_rank + rope part], the key of all query heads; its first v_head_dim =
  // kv_lora_rank elements are the value. num_kv_heads is 1, v_head_dim at most qk_head_dim, v_dtype
  // absent. Whatever the cache's RopeMode, the caller gives the rope part of keys and queries
  // rotated, by GetQueryPositions(). `rope` (of any mode and pairing), else the cache's, tells how,
  // over qk_head_dim - v_head_dim dimensions: windows with sinks rotate queries back by it. If it
  // is kNone, sinks are scored at their own positions.
  bool latent = false;

  DType value_dtype() const { return v_dtype.value_or(dtype); }
  bool operator==(const AttentionLayerSpec&) const = default;
};

struct AttentionKVCacheOptions {
  std::vector<AttentionLayerSpec> layers;  // layers of equal num_kv_heads, dims, dtype, window
                                           // and rope share one page table (a group)
  int64_t max_num_sequences = 0;           // that are not retained
  int64_t token_capacity = 0;              // pages per group: ceil(token_capacity / page_size) + 1
  int64_t prefill_chunk_size = 0;          // most new tokens of one forward
  int64_t page_size = 0;  // tokens; 0 = per group, see DefaultPageSize. Multiples of 16 are fastest
  int64_t max_tree_size = 256;  // uncommitted nodes of one sequence (BeginTreeForward). They lie in
                                // pages of their own; those of the deepest path are kept free
  // Tokens that PopN can take back under windows: pages are kept until they are hidden also from a
  // query that many tokens before the end. At most max_pop + page_size - 1 more tokens of a
  // sequence are held for it in each group with a window.
  int64_t max_pop = 16;
  RopeOptions rope;
  std::string kernel_path;  // "" = the best of this CPU, else a name from KernelPaths()
  std::shared_ptr<ParallelRunner> runner;  // null = CreateThreadPool(0)
  bool poison_freed_pages = false;  // tests: freed pages and fresh scratch are filled with NaN
  // Windows of sequences as in TVM, for its drop-in (docs/tvm.md): a window says what is kept when
  // a forward ends, the sinks and the last window - sinks tokens, and a row sees that and all new
  // tokens up to its own: one more than the window in decode. Forks begin without a window.
  bool tvm_window_span = false;
  // EndForward stores zeros for the forward's new tokens in every layer that has not stored any, so
  // a forward may run some of the layers alone. Later forwards may run the others: attention then
  // sees those zeros as keys and values. False: EndForward is BadState until every layer has run.
  // Recurrent layers beside it (CompositeState) must all run: their states have no such option.
  bool allow_skipped_layers = false;
};

// The smallest power of two of at least 16 tokens with at least 48 KiB per layer, at most 256: runs
// that long are read at memory speed.
int64_t DefaultPageSize(const AttentionLayerSpec& layer);

// Names of the kernel paths that this build has and this CPU can run, best first: "avx512_bf16",
// "avx512", "avx2", "scalar"; on aarch64 "neon", "scalar".
std::vector<std::string> KernelPaths();

// Where the pages of all groups are. A page is seen by a sequence that has a token in it, even if a
// window hides that token; in a forward, a sequence of the batch sees what it saw before as well
// (AbortForward gives it back). free + exclusive + shared + retained_only == total, at all times.
struct PageCounts {
  int64_t total = 0;
  int64_t free = 0;
  int64_t exclusive = 0;      // seen by one sequence, which is not retained
  int64_t shared = 0;         // seen by two or more sequences, not all of which are retained
  int64_t retained_only = 0;  // seen by retained sequences alone: free once these are removed

  bool operator==(const PageCounts&) const = default;
};

// Stored keys and values of consecutive tokens of one layer, contiguous, of the layer's dtypes.
// Quantised ones are codes, with their scales beside them: value = code * scale.
struct LayerKV {
  TensorView k;          // [n, Hkv, D]
  TensorView v{};        // [n, Hkv, Dv]; not read for latent layers
  TensorView k_scale{};  // float32 [n, Hkv]; not read where keys are not quantised
  TensorView v_scale{};
};
using KVBlock = std::vector<LayerKV>;  // of the same tokens, for each layer

// Keys and values that are still on their way while the forward that reads them is open.
class LayerSource {
 public:
  virtual ~LayerSource() = default;
  // Waits, for as long as the source sees fit, until the layer's tokens are there and verified, and
  // gives them in blocks, one after the other. They stay as they are until the next call or until
  // the forward has ended. Called on the thread of the attention call, once per layer; it must make
  // no call on the cache. An error becomes the attention call's.
  virtual Result<std::span<const LayerKV>> Load(int64_t layer) = 0;
  // The same for a layer of a RecurrentCache: its state after the tokens, as DebugGet writes it.
  // The default is BadState: the source has no states.
  virtual Result<TensorView> LoadState(int64_t layer);
};

// The next `tokens` tokens of a sequence, whose keys and values come out of `source`.
struct LayerLoad {
  int64_t seq_id = 0;
  int64_t tokens = 0;
  LayerSource* source = nullptr;  // lives until the forward has ended
  // The source leaves out what no later token sees, as ImportVisibleKV without windows does.
  bool only_visible = false;
};

// Positions [begin, end).
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t count() const { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};

// ---- A forward whose rows grow fewer (BeginBlendingForward).

// Keys and values that a layer has computed and stored for the rows of a member that have come so
// far. Valid until BeforeAttention returns.
struct FreshRows {
  int64_t seq_id = 0;
  // float32 [n, Hkv, D] and [n, Hkv, Dv], the stored numbers: rotated with RopeMode::kNormal; codes
  // times their scales. v is empty for latent layers.
  TensorView k{}, v{};
  std::span<const int32_t> positions{};  // [n], of the rows in the sequence, ascending
};

// The rows of a member that go on.
struct RowSelection {
  bool selects = false;  // false: all that have come so far, `rows` is not read
  // Ascending indices of the member's append rows, all among those that have come so far; at least
  // one.
  std::vector<int32_t> rows = {};
};

// Chooses which rows of a forward go on, in a layer. It is called on the thread of the attention
// call, in which it must make no call on the cache.
class LayerHook {
 public:
  virtual ~LayerHook() = default;
  // The layer has stored the keys and values of these rows and attends next. An error becomes that
  // of the attention call.
  virtual Result<RowSelection> BeforeAttention(int64_t layer, const FreshRows& fresh) = 0;
};

// Keys and values for append rows [rows.begin, rows.end) of a member that were computed elsewhere
// and belong to the positions at which they come to stand now.
struct MovedRows {
  TokenRange rows{};
  // As stored, rows.count() tokens. Keys may be float32 whatever the layer's dtype is: they are
  // rounded, or quantised, as they are stored; k_scale is not read then.
  LayerKV kv{};
};

// Where the rows that do not go on get their keys and values from.
class MovedSource {
 public:
  virtual ~MovedSource() = default;
  // Waits until the layer's rows are there and gives them, ascending; what overlaps the rows that
  // go on is not read. They stay as they are until the next call or until the forward has ended.
  // Called on the thread of the attention call, once for each layer behind one in which the hook
  // has left rows out; it must make no call on the cache. An error becomes the attention call's.
  virtual Result<std::span<const MovedRows>> Load(int64_t layer) = 0;
};

// A member of a blending forward some of whose rows may stop before the last layer. The hook and
// the source live until the forward has ended; the layers are copied.
struct BlendMember {
  int64_t seq_id = 0;
  LayerHook* hook = nullptr;
  MovedSource* source = nullptr;
  std::span<const int64_t> check_layers{};  // ascending, at least one: where the hook is asked
};

// What windows hide from a sequence. Lengths in tokens; 0 = none.
struct WindowSettings {
  int64_t window = 0;  // of EnableSlidingWindowForSeq, sinks included
  int64_t sinks = 0;
  int64_t lost = 0;  // hidden after the sinks for good, whatever the window says
  int64_t slid = 0;  // hidden after the sinks from a next query, as of the last forward; >= lost
  int64_t span = 0;  // the window of AttentionKVCacheOptions::tvm_window_span and its sinks
  int64_t span_sinks = 0;

  bool operator==(const WindowSettings&) const = default;
};

// The positions of a sequence of `length` tokens that its next query does not see in a layer with
// the window `layer_window` (0 = none), by what had slid in its last forward.
TokenRange HiddenTokens(const WindowSettings& windows, int64_t layer_window, int64_t length);

// Tokens to import. Rows that every window hides once the import is complete may be left out.
struct KVImport {
  std::span<const KVBlock> blocks{};
  std::span<const int64_t> tokens{};  // [block]: positions that it stands for
  // Windows of the sequence after the import; only an empty sequence may get any.
  WindowSettings windows{};
};

class AttentionKVCache : public KVState {
 public:
  // BadArgument for options out of range, OutOfMemory when the pages cannot be mapped. Options are
  // copied.
  static Result<std::unique_ptr<AttentionKVCache>> Create(AttentionKVCacheOptions options);

  // What it was created with; kernel_path and runner are those in use.
  virtual const AttentionKVCacheOptions& options() const = 0;

  // Retained: kept for its tokens alone (a prefix cache holds it). It does not count against
  // max_num_sequences and cannot be in a batch; all else is as before, and forks of it are not
  // retained. New sequences are not. TooLarge for making one active again when max_num_sequences
  // are; BadState for a member of the batch.
  virtual Status SetRetained(int64_t seq_id, bool retained) = 0;

  // ---- Windows of sequences. From the next forward on a query at position p sees the first
  // `sinks` positions and the last window - sinks, (p - (window - sinks), p]: `window` counts the
  // sinks. Positions are always absolute; lengths, fork positions and ranges count them. With
  // RopeMode kNormal and kInline, sinks are scored as if they stood right before the rest: with the
  // query rotated to p less what has slid. Forks inherit the window.
  //
  // What has slid out of every sequence's sight is freed, in whole pages, max_pop tokens later.
  // ForkSequence and PopN are legal iff all tokens are still held that a query at the new end may
  // see; else BadState. So a sequence can always be popped to max_pop tokens less than it once had,
  // unless these were lost for good (DisableSlidingWindowForSeq, tvm_window_span) or left out when
  // the sequence was imported.
  //
  // REQUIRES: 0 <= sinks < window; the sequence has no window, and if one that was switched off has
  // slid, it had as many sinks.
  virtual Status EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) = 0;
  // What had slid out of sight stays so, the rest stays in sight. BadState without a window.
  virtual Status DisableSlidingWindowForSeq(int64_t seq_id) = 0;
  // Tokens of the sequence whose keys and values are held in every layer; its length if nothing has
  // slid.
  virtual Result<int64_t> HeldTokens(int64_t seq_id) const = 0;
  // What the sequence's window hides from a next query, as of its last forward: the positions
  // after its sinks. Empty, and at 0, if nothing has slid.
  virtual Result<TokenRange> SlidRange(int64_t seq_id) const = 0;

  virtual Result<WindowSettings> GetWindows(int64_t seq_id) const = 0;

  // Whether ForkSequence(seq_id, ., position), 0 <= position <= length, finds all tokens that a
  // query there may see. False for unknown sequences and other positions.
  virtual bool CanFork(int64_t seq_id, int64_t position) const = 0;

  // ---- Counters. Lengths include the tokens of an open forward. page_counts() may be called on
  // any thread at any time, beside a forward and every other call: it gives the counts as of the
  // last call that has returned.
  virtual bool Empty() const = 0;                    // no sequences
  virtual int64_t GetNumAvailablePages() const = 0;  // free pages, the minimum over groups
  // Sum over sequences; a shared prefix counts once per sequence.
  virtual int64_t GetTotalSequenceLength() const = 0;
  virtual int64_t GetDistinctTokenCount() const = 0;  // a shared prefix counts once
  virtual int64_t sequence_count() const = 0;         // retained ones included
  virtual int64_t retained_sequence_count() const = 0;
  virtual PageCounts page_counts() const = 0;   // all groups; O(1)
  virtual int64_t pages_in_use() const = 0;     // all groups
  virtual int64_t pages_allocated() const = 0;  // in use and free, all groups
  virtual bool HasSequence(int64_t seq_id) const = 0;
  virtual Result<int64_t> GetSequenceLength(int64_t seq_id) const = 0;
  // Free pages that BeginForward(seq_ids, append_lengths) would take: the maximum over groups. Same
  // checks, same errors, but for OutOfPages.
  virtual Result<int64_t> PagesNeeded(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> append_lengths) const = 0;
  // The same for BeginTreeForward: pages of the nodes, and of the positions of new levels.
  virtual Result<int64_t> PagesNeededForTree(std::span<const int64_t> seq_ids,
                                             std::span<const int64_t> append_lengths,
                                             std::span<const int64_t> token_tree_parents) const = 0;

  // BeginForward of sequences some of which get imported tokens first, then their append_lengths
  // new ones. All of them are planned and reserved at once; rows and prefill_chunk_size count the
  // new ones only. A layer's imported tokens are taken from the sources right before the layer's
  // own are stored, so that compute of one layer and reading of the next overlap: each outcome is,
  // bit for bit, that of ImportKV before BeginForward. A source's error fails the attention call;
  // AbortForward gives back the imported tokens as well.
  // REQUIRES: as BeginForward; loads of members of the batch, in its order, of at least 1 token.
  virtual Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const LayerLoad> loads) = 0;

  // BeginLoadingForward in which rows of some members go on without others (docs/blend.md). Each
  // new token has an *append row*; *query rows* are those that go on. Layers run in ascending
  // order, and a layer is attended to before the next one is appended to.
  //   - Up to the member's first check layer, which it includes, all of its rows are computed and
  //     stored. Right after a check layer has stored its rows, the hook is given them and says
  //     which go on; the layer attends for these alone.
  //   - Behind it a layer first stores the moved rows of the source for the rows that were left
  //     out, then those that go on as the caller gives them.
  // A check layer's tensors have the rows that have come to it: outputs of rows that do not go on
  // are left unwritten. Later calls have the rows of GetQueryRows alone, one after the other.
  // What a row sees is what a whole forward would show it: equal KV gives equal bits.
  // BadState with allow_skipped_layers, and for a member whose tokens are marked to be sent; masks,
  // SelfAttention and CrossAttention are refused until the forward has ended.
  // REQUIRES: as BeginLoadingForward; blends of members of the batch, in its order.
  virtual Status BeginBlendingForward(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> append_lengths,
                                      std::span<const LayerLoad> loads,
                                      std::span<const BlendMember> blends) = 0;

  // kLongRope and kDynamic: whether the sequence's positions use the long set. Forks inherit it.
  // REQUIRES: the sequence is empty.
  virtual Status SelectLongRope(int64_t seq_id, bool use_long_factors) = 0;
  virtual Result<bool> UsesLongRope(int64_t seq_id) const = 0;

  // ---- Attention. FORWARD only; n = new tokens of the forward, in the order of the batch. Tensors
  // are float32 or of the layer's dtype (of its v_dtype, or bfloat16 where that is quantised),
  // contiguous in their last dimension. After a failed call only AbortForward and Clear are legal.
  // The n rows of an output (o, lse) share no byte with each other, with another output or with an
  // input other than `mask`: BadArgument. They may lie between the rows of another tensor.
  //
  // `mask`, where there is one, is a further condition among the new tokens: uint8 [sum of n_i^2],
  // contiguous, for each member of the batch a row per new token, with an element for each new
  // token of the member: 0 hides this one from that row. What was there before the forward stays in
  // sight. A row from which everything is hidden gets o = 0 and lse = -inf.

  // Splits qkv, rotates (RopeMode), stores k and v and attends to all tokens up to and including
  // each row's own.
  // qkv: [m, Hq + 2 Hkv, D] where D == Dv, or [m, Hq D + Hkv D + Hkv Dv].
  // o: [m, Hq, Dv] or [m, Hq Dv].
  // m >= n; rows after n are ignored and left unwritten. sm_scale is the whole factor on q.k.
  virtual Status AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                                       double sm_scale, const TensorView* mask = nullptr) = 0;

  // The halves of the fused call: k and q are given unrotated and rotated in the same way.
  // k: [m, Hkv, D], v: [m, Hkv, Dv].
  virtual Status Append(int64_t layer, const TensorView& k, const TensorView& v) = 0;
  // q: [m, Hq, D], o: [m, Hq, Dv].
  // lse, if not null: float32 [m, Hq], log2 of the sum of 2^(score log2 e).
  // BadState before the layer's Append.
  virtual Status Attend(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView* lse, double sm_scale,
                        const TensorView* mask = nullptr) = 0;

  // For latent layers alone; AttentionWithFusedQKV and Append are for the others (BadArgument).
  // Stores kv [m, D] as given; Attend, CrossAttention and AttentionWithSharedKV then take absorbed
  // queries and give outputs in latent space.
  virtual Status AppendMLAKV(int64_t layer, const TensorView& kv) = 0;
  // AppendMLAKV and Attend. Exact as AttentionWithFusedQKV: new and cached tokens alike are
  // attended to as stored. q_absorbed: [m, Hq, D], o: [m, Hq, Dv].
  virtual Status AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                                  const TensorView& o, double sm_scale,
                                  const TensorView* mask = nullptr) = 0;

  // Attends once more to the keys and values of source_layer, which must have been appended to in
  // this forward (layers that share KV; they are not layers of this cache). As Attend, but with
  // RopeMode::kNormal the caller gives q rotated. BadState before the source's Append.
  virtual Status AttentionWithSharedKV(int64_t source_layer, const TensorView& q,
                                       const TensorView& o, const TensorView* lse, double sm_scale,
                                       const TensorView* mask = nullptr) = 0;

  // ---- The pieces, for callers that combine results themselves. They store nothing; with kNormal,
  // q and k are given rotated; with kInline they are given unrotated and rotated here. Exact per
  // row: neither batch nor threads nor page size show. Their merge is that of one softmax but for
  // rounding, so where the tokens of a sequence were cut may show in the last bits.

  // Windows and the soft cap hold in both pieces; the learned sinks of heads take part in
  // CrossAttention alone, so that a merge counts them once.

  // Causal attention of the new tokens among themselves (in a tree: of a new node to the new nodes
  // on its path and itself), on keys and values as given: rounded nowhere. Heads and dimensions may
  // be other than the layer's, but for the key dimension with kInline, or with kNormal where a
  // window has slid past sinks that are among the new tokens. For latent layers this is the form
  // that is not absorbed, with the rope part last in q and k. q: [m, Hq', D'], k: [m, H', D'], v:
  // [m, H', Dv'], o: [m, Hq', Dv'], lse: float32 [m, Hq']; Hq' is a multiple of H'.
  virtual Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k,
                               const TensorView& v, const TensorView& o, const TensorView& lse,
                               double sm_scale, const TensorView* mask = nullptr) = 0;
  // The new tokens against what their sequences held before this forward: committed tokens, and of
  // a tree the ancestors from earlier forwards. Where a row sees nothing
  // of that, o = 0 and lse = -inf, or the head's learned sink times log2(e) if it has one.
  // q: [m, Hq, D], o: [m, Hq, Dv], lse: float32 [m, Hq].
  virtual Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                                const TensorView& lse, double sm_scale) = 0;
  // Attention over two disjoint sets of keys becomes that over both, written to o1 and lse1. A set
  // may be empty (lse = -inf): its output is not read, and the other's is kept bit for bit. Legal
  // at any time. The four tensors share no byte.
  // o1, o2: [n, H, D], float32, float16 or bfloat16; lse1, lse2: float32 [n, H].
  virtual Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1,
                                        const TensorView& o2, const TensorView& lse2) = 0;

  // The new tokens whose rows go on, as ascending indices of all of the forward's: all of them but
  // in a blending forward, where there may be fewer after a check layer. Valid until then, and as
  // GetQueryPositions.
  virtual Result<std::span<const int32_t>> GetQueryRows() const = 0;
  // Position of each of them, int32 [n]. Valid until the next BeginForward, AbortForward or
  // Clear, in a blending forward until the next check layer. BadState in IDLE.
  virtual Result<std::span<const int32_t>> GetQueryPositions() const = 0;

  // ---- KV as stored, bit for bit: keys are rotated with kNormal. quire/kv_export.h moves it as
  // chunks.
  // Reads as many tokens of the layer as the tensors have, from position `start` on; BadArgument
  // for tokens that are no longer held. Legal in FORWARD too; tokens of the open forward are those
  // of the layer's Append, BadState before it. The tensors share no memory.
  virtual Status ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) = 0;
  // Appends the tokens of all blocks, one after the other. Takes pages as a forward does.
  // REQUIRES: IDLE; every layer in every block; the caller answers for keys that are rotated for
  // the positions at which they come to stand.
  virtual Status ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) = 0;
  // As ImportKV, and the sequence has the import's windows then. A layer's tensors have the rows of
  // those of the block's tokens that are not in its HiddenTokens at the end, in order (none:
  // tensors of no rows, or left out); the others are as if they had slid out.
  virtual Status ImportVisibleKV(int64_t seq_id, const KVImport& import) = 0;

  // Sending tokens to other caches and receiving theirs while they are computed. Owned by the
  // cache; null for an implementation that has none.
  virtual KVTransfer* transfer() { return nullptr; }

  // ---- Debugging, of all layers that are not latent or (MLA) of all that are; they must be of
  // equal heads and dims. Layout [those layers, end - start, Hkv, D or Dv], MLA [those layers,
  // end - start, D]; float32 or the layers' dtype unless that is quantised. Keys come out as
  // stored: rotated with kNormal, codes times their scales. With an uncommitted tree the committed
  // tokens come first, then the nodes in their order.
  // REQUIRES: 0 <= start < end <= length; all tokens of the range are held in every layer; those of
  // the open forward were appended to each (else BadState); k and v share no memory.
  virtual Status DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                            const TensorView& v) = 0;
  // Overwrites positions [start, start + n) as stored. Pages that others can see are copied first,
  // for which it may lack pages: OutOfPages. REQUIRES: the tokens from `start` on are held.
  virtual Status DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                            const TensorView& v) = 0;
  virtual Status DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end,
                               const TensorView& kv) = 0;
  virtual Status DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) = 0;

  // Text of the current forward's plan: rows, runs, append targets, sharers. BadState in IDLE. For
  // people and golden tests.
  virtual Result<std::string> DebugPlan() const = 0;
  // Digest of all that can be observed: sequences, lengths, pages, counters (not KV bytes). Equal
  // before and after a failed call.
  virtual uint64_t StateDigest() const = 0;
  // Walks the whole state; Internal with the first violated invariant.
  virtual Status CheckInvariants() const = 0;
};

}  // namespace quire

#endif  // QUIRE_ATTENTION_KV_CACHE_H_
