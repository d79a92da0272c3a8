// KVModel: the naive oracle of AttentionKVCache. A sequence is a list of tokens with their values;
// attention is a plain loop in double. Nothing is fast and nothing is clever, so that what it
// answers can be believed: the model tests and fuzzers run it beside the real cache and compare all
// that can be observed.
//
// It has no pages, and so always room. It knows what is right for the pages of every cache that
// keeps a token in the slot of its position: how many a call takes, and how many are in use, at
// least and at most (kv_model_pages.cc). A cache that finds too few is believed; the walker asks
// whether there were too few (FindNoRoom).
#ifndef QUIRE_KV_TESTING_KV_MODEL_H_
#define QUIRE_KV_TESTING_KV_MODEL_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_transfer.h"

namespace quire {

// x turned to `position`: the first 2 * inv_freq.size() dimensions in pairs, the others copied. In
// double.
std::vector<double> RotateReference(std::span<const double> x, const RopeFrequencies& frequencies,
                                    RopePairing pairing, int64_t position);

class KVModel final : public AttentionKVCache, public KVTransfer {
 public:
  // `beside`, where there is one, outlives it and takes each call before the model does. It is
  // asked for tokens that windows may have let go of or not: which of them lie in one page with a
  // token that another sequence needs.
  // REQUIRES: options that AttentionKVCache::Create accepts. kernel_path, runner and
  // poison_freed_pages are not read.
  explicit KVModel(const AttentionKVCacheOptions& options, AttentionKVCache* beside = nullptr);
  ~KVModel() override;

  Status Clear() override;
  Status AddSequence(int64_t seq_id) override;
  Status RemoveSequence(int64_t seq_id) override;
  Status ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos = -1) override;
  Status PopN(int64_t seq_id, int64_t n) override;
  Status SetRetained(int64_t seq_id, bool retained) override;
  Status BeginForward(std::span<const int64_t> seq_ids,
                      std::span<const int64_t> append_lengths) override;
  Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths,
                             std::span<const LayerLoad> loads) override;
  Status BeginTreeForward(std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
                          std::span<const int64_t> token_tree_parents) override;
  Status BeginBlendingForward(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths,
                              std::span<const LayerLoad> loads,
                              std::span<const BlendMember> blends) override;
  Status EndForward() override;
  Status AbortForward() override;
  Status CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> leaf_indices) override;
  Result<int64_t> GetTreeSize(int64_t seq_id) const override;

  const AttentionKVCacheOptions& options() const override { return options_; }
  bool Empty() const override { return sequences_.empty(); }
  Status EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) override;
  Status DisableSlidingWindowForSeq(int64_t seq_id) override;
  bool CanFork(int64_t seq_id, int64_t position) const override;
  Result<int64_t> HeldTokens(int64_t seq_id) const override;
  Result<TokenRange> SlidRange(int64_t seq_id) const override;

  int64_t GetTotalSequenceLength() const override;
  // At least: a cache may have copied some.
  int64_t GetDistinctTokenCount() const override;
  int64_t sequence_count() const override { return static_cast<int64_t>(sequences_.size()); }
  int64_t retained_sequence_count() const override;
  PageCounts page_counts() const override { return {}; }
  int64_t GetNumAvailablePages() const override { return std::numeric_limits<int64_t>::max(); }
  int64_t pages_in_use() const override { return 0; }
  int64_t pages_allocated() const override { return 0; }
  bool HasSequence(int64_t seq_id) const override { return sequences_.count(seq_id) != 0; }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override;
  // At least; Taken has both bounds.
  Result<int64_t> PagesNeeded(std::span<const int64_t> seq_ids,
                              std::span<const int64_t> append_lengths) const override;
  Result<int64_t> PagesNeededForTree(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const int64_t> token_tree_parents) const override;

  Status SelectLongRope(int64_t seq_id, bool use_long_factors) override;
  Result<bool> UsesLongRope(int64_t seq_id) const override;

  // Outputs are rounded from double. The bounds of the last call's values are in last_bounds().
  Status AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                               double sm_scale, const TensorView* mask = nullptr) override;
  Status Append(int64_t layer, const TensorView& k, const TensorView& v) override;
  Status Attend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                double sm_scale, const TensorView* mask = nullptr) override;
  Status AttentionWithSharedKV(int64_t source_layer, const TensorView& q, const TensorView& o,
                               const TensorView* lse, double sm_scale,
                               const TensorView* mask = nullptr) override;
  Status SelfAttention(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, double sm_scale,
                       const TensorView* mask = nullptr) override;
  Status CrossAttention(int64_t layer, const TensorView& q, const TensorView& o,
                        const TensorView& lse, double sm_scale) override;
  Status MergeAttnOutputInplace(const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                                const TensorView& lse2) override;
  Status AppendMLAKV(int64_t layer, const TensorView& kv) override;
  Status AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                          const TensorView& o, double sm_scale,
                          const TensorView* mask = nullptr) override;
  Result<std::span<const int32_t>> GetQueryRows() const override;
  Result<std::span<const int32_t>> GetQueryPositions() const override;

  Status ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) override;
  Status ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) override;
  // REQUIRES: windows that such a sequence can have.
  Status ImportVisibleKV(int64_t seq_id, const KVImport& import) override;

  Status DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                    const TensorView& v) override;
  Status DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                    const TensorView& v) override;
  Status DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, const TensorView& kv) override;
  Status DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) override;

  // Row by row and from one thread; WaitReceived never waits.
  KVTransfer* transfer() override { return this; }
  Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) override;
  Status DisaggCommitRecv(uint64_t epoch, int64_t n) override;
  Status DisaggCancelRecv(uint64_t epoch) override;
  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) override;
  Status Store(uint64_t epoch, int64_t layer, const ReceivePart& part, const ReceiveView& view,
               std::optional<uint32_t> digest) override;
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) override;
  Status FailReceive(uint64_t epoch, const Status& why) override;
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const override;
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const override;
  StagingUse staging() const override { return StagingUse(); }
  Status SetStagingLimit(int64_t /*bytes*/) override { return Status(); }
  Status SetLayerSink(std::shared_ptr<LayerSink> sink) override;
  Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                        int64_t peer, int64_t rank, int64_t first_row = 0) override;
  Status DisaggUnmarkSend(int64_t seq_id) override;
  Result<int64_t> DisaggDetachSend(int64_t seq_id) override;
  Status DisaggFlushSend(int64_t seq_id) override;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const override;

  // It has no plan, and nothing that is kept twice.
  Result<std::string> DebugPlan() const override { return std::string(); }
  uint64_t StateDigest() const override { return 0; }
  Status CheckInvariants() const override { return Status(); }

  // ---- What a cache's pages are like, whichever it chooses. [group]
  struct PageBounds {
    int64_t least = 0;
    int64_t most = 0;
  };
  // What a call takes. A call that failed takes nothing.
  struct Taken {
    std::vector<PageBounds> pages;
    int64_t tokens = 0;      // new ones
    int64_t copies_max = 0;  // tokens that it may copy beside these
    bool ends = false;       // it lets go of what it copied, and of what it hides
    // Of the group that takes most, and of all groups.
    PageBounds largest() const;
    PageBounds sum() const;
  };
  // Members that cannot take part are left out. With `parents`, which are right: of nodes.
  Taken TakenByForward(std::span<const int64_t> seq_ids, std::span<const int64_t> lengths,
                       const std::span<const int64_t>* parents = nullptr) const;
  Taken TakenByImport(int64_t seq_id, int64_t count) const;
  Taken TakenByReceive(int64_t seq_id, int64_t count) const;
  Taken TakenByDebugSet(int64_t seq_id, int64_t start) const;
  PageBounds PagesInUse() const;  // of all groups
  int64_t group_count() const { return std::ssize(groups_); }
  // Whether the next call, if it is one that takes pages and has nothing else wrong with it, is to
  // find too few of them.
  void FindNoRoom(bool finds_none) { finds_no_room_ = finds_none; }

  Result<WindowSettings> GetWindows(int64_t seq_id) const override;

  // How far a correct kernel's outputs may lie from the model's: o is [row][Hq][Dv], lse [row][Hq].
  struct Bounds {
    std::vector<double> o;
    std::vector<double> lse;
  };
  const Bounds& last_bounds() const { return last_bounds_; }
  // How far a stored key element may lie from DebugGetKV's (its rotation is rounded in another
  // order); values are equal.
  double StoredKeyBound(int64_t layer, double value) const;

 private:
  // Stored values of one token, per layer; empty until the layer's Append.
  struct TokenValues {
    std::vector<std::vector<float>> k, v;
  };
  struct Token {
    std::shared_ptr<TokenValues> values;  // the same for all sequences that share the token
    std::vector<char> held;               // [group]; 0: windows have let go of it
    // Of the call that made it: the tokens that one call adds to a page range are in one page.
    int64_t call = 0;
    int64_t gathered = 0;  // a number if a cache may have copied it into a page of its own
  };
  struct Node {
    int64_t parent = -1;
    int64_t depth = 0;
    std::shared_ptr<TokenValues> values;
  };
  // `lost` tokens are hidden behind the sinks whatever the window says, `slid` from the next query,
  // as of the last forward. A span turns into lost tokens when a forward ends.
  struct Windows : WindowSettings {
    int64_t SlidAt(int64_t position) const;
    bool Sees(int64_t position, int64_t key, int64_t layer_window) const;
    void EndAt(int64_t length);
  };
  struct Sequence : Windows {
    // The last `levels` of them are places without values, the last `pending` are to be received.
    std::vector<Token> tokens;
    std::vector<Node> nodes;  // of the uncommitted tree
    int64_t levels = 0;       // of the tree
    int64_t pending = 0;
    uint64_t receive = 0;  // the epoch in which they are received
    bool long_factors = false;
    bool retained = false;

    // Without the tree and what is pending.
    int64_t length() const { return static_cast<int64_t>(tokens.size()) - levels - pending; }
    int64_t tree_size() const { return static_cast<int64_t>(nodes.size()); }
    int64_t full_length() const { return length() + tree_size() + pending; }
    bool is_committed() const { return nodes.empty() && pending == 0; }
    std::vector<int64_t> PathTo(int64_t node) const;
    void Slide();
  };
  // Layers that keep their tokens together.
  struct Group {
    int64_t first_layer = 0;
    int64_t page_size = 0;
    int64_t window = 0;
  };
  using SequenceMap = std::map<int64_t, Sequence>;
  // A sequence that gets tokens, levels or nodes.
  enum class NextPage : uint8_t { kShared, kOwn };  // kOwn: the next token opens a page
  struct Growth {
    const Sequence* sequence;
    int64_t count;  // of positions
    int64_t nodes = 0;
    NextPage next = NextPage::kShared;
  };
  // One layer's part of a TensorView argument: `heads` heads of `dim` elements per row, beginning
  // at element `offset` of the row.
  struct Rows {
    const TensorView* view;
    int64_t offset;
    int64_t dim;

    int64_t At(int64_t row, int64_t head, int64_t d) const {
      const int64_t head_stride = view->rank() == 3 ? view->stride(1) : dim;
      return row * view->stride(0) + offset + head * head_stride + d;
    }
    double Get(int64_t row, int64_t head, int64_t d) const;
    void Set(int64_t row, int64_t head, int64_t d, double value) const;
  };
  using TokenRows = std::vector<std::vector<double>>;  // [token][kv head][dim]
  struct HeadArguments {
    const AttentionLayerSpec* spec;
    size_t kv_head;
    std::vector<size_t> visible;  // indices in keys and values
    int64_t sink_end;             // before it the sink query is used
    std::vector<double> query, sink_query;
    double sm_scale;
    const float* head_sink;  // or null
    const TokenRows* keys;
    const TokenRows* values;
    DType output_dtype;
  };
  // What a sequence is to receive.
  struct Receive {
    int64_t seq_id = 0;
    int64_t count = 0;
    std::vector<StoredRows> rows;          // [layer]
    std::vector<std::vector<char>> heads;  // [layer][row * heads + head], 1: stored, 2: complete
    Status failure;
  };
  // Where a sequence's tokens go.
  struct Mark {
    int64_t begin = 0;
    int64_t peer = 0;
    int64_t rank = 0;
    std::vector<ReceiveMap> maps;
    std::vector<std::vector<int64_t>> slots;  // [map], decoded
    int64_t next = 0;                         // what is before it has been sent
    int64_t given = 0;                        // to the sink, by the open forward; 0: nothing
    Status failure;

    int64_t end() const { return begin + maps[0].count; }
    bool active() const { return failure.ok() && next < end(); }
  };
  // Which tokens a row sees: those up to its own, or those of before the forward.
  enum class Sees : uint8_t { kUpToOwn, kCached };
  // A query as the caller gives it.
  enum class Rotated : uint8_t { kNo, kYes };

  bool InBatch(int64_t seq_id) const { return before_.count(seq_id) != 0; }
  Status CheckControl(int64_t seq_id) const;
  bool IsFull() const {
    return sequence_count() - retained_sequence_count() >= options_.max_num_sequences;
  }
  Status CheckShapeOfBatch(std::span<const int64_t> seq_ids,
                           std::span<const int64_t> lengths) const;
  Status CheckMember(int64_t seq_id, int64_t length, std::set<int64_t>* seen, int64_t* room) const;
  Status CheckBatch(std::span<const int64_t> seq_ids, std::span<const int64_t> lengths) const;
  Status CheckRoom();
  void NoteGathered(Sequence& sequence, int64_t end) const;
  // New places behind the sequence's tokens, without values; those in `absent` [group] are not
  // held.
  void AddPlaces(Sequence& sequence, int64_t count, std::span<const TokenRange> absent = {});
  static int64_t LevelsWith(const Sequence& sequence, std::span<const int64_t> parents);
  void AddNodes(Sequence& sequence, std::span<const int64_t> parents);
  static void DropNodes(Sequence& sequence, int64_t size);
  Status CheckTreeBatch(std::span<const int64_t> seq_ids, std::span<const int64_t> lengths,
                        std::span<const int64_t> parents) const;
  static Status CheckTree(const Sequence& sequence, std::span<const int64_t> parents);
  // The plain sequence of the committed tokens and the path to a node.
  static Sequence PlainTo(const Sequence& sequence, int64_t node);
  Sequence SequenceOfRow(size_t member, int64_t n) const;
  void OpenForward(std::span<const int64_t> seq_ids, std::span<const int64_t> lengths);
  // ---- Pages (kv_model_pages.cc).
  Taken TakenBy(std::span<const Growth> growths) const;
  PageBounds PagesTakenBy(std::span<const Growth> growths, size_t group) const;
  int64_t RangeOf(int64_t position) const;
  // Whether the tokens before `end` in its page range may lie in as many pages as are allowed.
  bool MayGather(const Sequence& sequence, int64_t end) const;
  bool IsHeld(const Sequence& sequence, int64_t position, size_t group) const;
  bool CanEndAt(const Sequence& sequence, int64_t length) const;
  bool NeedsRange(const Sequence& sequence, const Group& group, int64_t range) const;
  bool SharesNeededRange(const Sequence& sequence, const Group& group, int64_t range) const;
  bool IsHeldBeside(int64_t seq_id, int64_t position, const Group& group) const;
  void FreeHidden();
  bool IsShared(int64_t seq_id, int64_t position) const;
  Status Import(int64_t seq_id, const KVImport& import, bool leaves_out);
  uint64_t TransferLayout(const Sequence& sequence) const;
  Result<Receive*> FindReceive(uint64_t epoch);
  Result<Receive*> FindPart(uint64_t epoch, int64_t layer, const ReceivePart& part);
  // f(row * heads + head) for each row and head of a part.
  template <typename F>
  void ForEachHead(int64_t layer, const ReceivePart& part, F&& f) const {
    const int64_t heads = options_.layers[static_cast<size_t>(layer)].num_kv_heads;
    for (int64_t row = part.first_row; row < part.first_row + part.count; ++row) {
      for (int64_t h = part.first_head; h < part.first_head + part.head_count; ++h)
        f(static_cast<size_t>(row * heads + h));
    }
  }
  int64_t CompleteRows(const Receive& receive, size_t layer, int64_t row, int64_t end) const;
  Status RequireRows(uint64_t epoch, int64_t n);
  void EndReceive(int64_t seq_id, int64_t n);
  Status CheckMark(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps, int64_t rank,
                   int64_t first_row) const;
  void SendLayer(size_t layer);
  void GiveRows(int64_t seq_id, size_t layer, int64_t end);
  Status GiveRow(int64_t seq_id, size_t layer, size_t map, int64_t position);
  // What became of the batch's marks.
  enum class Outcome : uint8_t { kEnded, kAborted };
  void FinishSends(std::span<const int64_t> seq_ids, Outcome outcome);
  void StopSend(int64_t seq_id, const Mark* next = nullptr);
  std::vector<SendRecord> RecordsOf(int64_t seq_id, int64_t first, int64_t end) const;
  int64_t PeerOf(const Mark& mark, size_t map) const;
  Status CheckAttention(int64_t layer) const;
  Status FailAttention(Status status);
  Status CheckRows(const char* name, const TensorView& view, int64_t layer, int64_t heads,
                   int64_t dim) const;
  void StoreTokens(const Sequence& sequence, size_t position, size_t layer,
                   const LayerKV& kv) const;
  Status LoadLayer(int64_t layer);
  // Stores what has come to the layer; then hooks choose what goes on.
  Status AppendRows(int64_t layer, const Rows& k, const Rows& v);
  // ---- A forward that blends (kv_model_blend.cc).
  void PackRows();
  Status StoreMoved(int64_t layer);
  Status Choose(int64_t layer);
  // The row of a call's tensors that is this append row; -1: there is none.
  int64_t InputOf(int64_t append_row) const;
  bool GoesOn(int64_t append_row) const;
  Status FillSkippedLayers();
  TokenValues& ValuesOfRow(size_t i, int64_t n, int64_t row) const;
  const RopeFrequencies& FrequenciesOf(const Sequence& sequence, size_t layer) const {
    return sequence.long_factors ? frequencies_[layer].second : frequencies_[layer].first;
  }
  TokenRows KeysOf(const Sequence& sequence, size_t layer) const;
  static TokenRows ValuesOf(const Sequence& sequence, size_t layer);
  double ScoreError(const AttentionLayerSpec& spec) const;
  void AttendHead(const HeadArguments& head, double* lse, std::span<double> o);
  void AttendRows(int64_t layer, Sees sees, const Rows& q, Rotated rotated, const Rows& o,
                  const TensorView* lse, double sm_scale, const TensorView* mask = nullptr);
  // Where the first new token of a member, or a root of its tree, stands.
  int64_t BaseOf(size_t member) const;
  // The new tokens up to row n of a member, or on its path, by position from BaseOf on; -1: a node
  // of an earlier forward.
  std::vector<int64_t> NewTokensUpTo(size_t member, int64_t n) const;
  Status CheckMask(const TensorView* mask) const;
  bool MaskShows(const TensorView* mask, size_t member, int64_t n, int64_t token) const;
  bool LseFits(const TensorView& lse, int64_t heads) const;
  Status CheckAttend(int64_t layer, const TensorView& q, const TensorView& o, const TensorView* lse,
                     const TensorView* mask);
  // The mode of the layer; the caller rotates for latent layers.
  RopeMode ModeOf(size_t layer) const {
    return options_.layers[layer].latent ? RopeMode::kNone : options_.rope.mode;
  }
  Rotated RotatedForAttend(size_t layer) const {
    return options_.layers[layer].latent ? Rotated::kYes : Rotated::kNo;
  }
  Status CheckKind(int64_t layer, bool latent) const;
  // The queries of a row at `position`, for ordinary keys and for those of sinks.
  void TurnQuery(const Sequence& sequence, size_t layer, int64_t position, Rotated rotated,
                 HeadArguments* head) const;
  enum class Stored : uint8_t { kKeys, kValues };
  // `of_latent`: of the layers that are latent.
  Status CheckDebugRows(const char* name, const TensorView& view, int64_t count, Stored of,
                        bool of_latent) const;
  // `v` is null for latent layers; kv is [layers, n, 1, D] then.
  Status GetDebug(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                  const TensorView* v) const;
  Status SetDebug(int64_t seq_id, int64_t start, const TensorView& k, const TensorView* v);

  const AttentionKVCacheOptions options_;
  std::vector<size_t> group_of_layer_;
  std::vector<std::pair<RopeFrequencies, RopeFrequencies>> frequencies_;  // [layer], short and long
  std::vector<Group> groups_;
  AttentionKVCache* const beside_;
  SequenceMap sequences_;
  int64_t calls_ = 0;
  bool finds_no_room_ = false;

  // The open forward. before_ holds the batch as it was, for AbortForward.
  bool forward_ = false;
  bool failed_ = false;
  SequenceMap before_;
  std::vector<int64_t> batch_;
  std::vector<int64_t> batch_lengths_;
  std::vector<LayerLoad> loads_;
  std::vector<int32_t> positions_;  // of all append rows
  // Append rows that go on, their positions, and those that the last layer's tensors have.
  std::vector<int32_t> query_rows_, query_positions_, input_rows_;
  struct Blend {
    size_t member = 0;
    LayerHook* hook = nullptr;
    MovedSource* source = nullptr;
    std::vector<int64_t> check_layers;
  };
  std::vector<Blend> blends_;
  bool is_blending_ = false;
  std::vector<char> loaded_, appended_, attended_;  // [layer]
  Bounds last_bounds_;

  std::map<uint64_t, Receive> receives_;  // by epoch
  uint64_t next_epoch_ = 1;
  std::map<int64_t, Mark> marks_;  // by sequence
  std::shared_ptr<LayerSink> sink_;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_KV_MODEL_H_
