// A cache and its oracle side by side, and the operations of a random walk over them; two of them,
// with other pages, between which tokens go (kv_walk_test.cc, kv_walk_transfer.cc).
#ifndef QUIRE_KV_TESTING_KV_WALKER_H_
#define QUIRE_KV_TESTING_KV_WALKER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/feature_pairs.h"
#include "kv/testing/kv_model.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/transfer.h"

namespace quire::kv_walk {

enum class Kind : uint8_t {
  kAdd,
  kRemove,
  kFork,
  kPop,
  kBegin,
  kLayer,
  kEnd,
  kAbort,
  kForward,
  kDebugGet,
  kDebugSet,
  kClear,
  kPagesNeeded,
  kSelectLongRope,
  kBadTensor,
  kRetain,
  kDecode,
  kImport,
  kWindow,
  kShared,
  kLoading,
  kTree,
  kCommit,
  kForkAndLoad,
  kSwitch,
  kTransfer,
  kSend,
  kReceive,
};
constexpr size_t kKindCount = 28;

struct WalkOp {
  Kind kind;
  uint32_t a, b, c;
};

struct WalkSetting {
  AttentionKVCacheOptions options;
  ForwardStyle style;    // dtypes; how a layer is called is drawn per call
  int64_t id_count = 0;  // ids are below it; more than fit, so that some calls find no room
  // Whether forks are made of the newest child and both sides go on at once, so that a page range
  // comes to lie in ever more pages.
  bool chains = false;
  bool has_windows = false;     // of layers or sequences
  bool evicts = false;          // whether a forward that finds too few pages removes a sequence
  uint32_t halved_layers = 0;   // bit l: the layer has half of the heads that the other cache has
  int64_t fresh_period = 0;     // one of this number of forwards is compared with a fresh cache
  int64_t batch_max = 6;        // members of a batch
  bool has_bad_tokens = false;  // one new token of 128 has a number that is not finite
};

template <typename T>
T OneOf(RandomSequence& random, std::initializer_list<T> values) {
  return values.begin()[random.Below(static_cast<int64_t>(values.size()))];
}

struct Batch {
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
};

// What DebugSetKV wrote for one token, or nothing.
struct KnownToken {
  uint64_t number = 0;
  std::shared_ptr<const std::pair<TestTensor, TestTensor>> set;  // [layers, 1, Hkv, D or Dv]
  std::shared_ptr<const TestTensor> latent_set = nullptr;        // [layers, 1, D]
  bool has_lost_inputs = false;  // its heads came from different tokens
};

// What is kept of a reservation, beside its maps in the cache and in the model.
struct Incoming {
  int64_t id = 0;
  std::array<ReceiveMap, 2> maps;
  // What the sender had, or each of two that have half of the heads: [row].
  std::vector<std::array<std::optional<KnownToken>, 2>> tokens;
};

// A mark: from where on, and as which of those that send, to which epochs of the other cache.
struct Outgoing {
  int64_t begin = 0;
  int64_t rank = 0;
  std::vector<uint64_t> epochs;
  int64_t first_row = 0;
};

// What a member of a forward loads: its number in the batch, the tokens' keys and values in the
// cache and in the model, and where these come from.
struct WalkLoad {
  size_t member = 0;
  std::vector<KnownToken> tokens;
  std::array<std::vector<StoredRows>, 2> parts;
  std::array<std::unique_ptr<BlockSource>, 2> sources;
};

// The nodes of a sequence's uncommitted tree.
struct WalkTree {
  std::vector<int64_t> parents;
  std::vector<uint64_t> tokens;
};

class Walker {
 public:
  // `first_token`: of those that it makes up.
  explicit Walker(const WalkSetting& setting, uint64_t first_token = 1);
  // From here on tokens go to the other one.
  void SendTo(Walker* other);

  // Empty, or what differs.
  std::string Step(const WalkOp& op);
  // Those of kSend, kReceive and kTransfer, which concern the other one, too.
  std::string StepOfTransfer(const WalkOp& op);
  // Step's comparisons alone.
  std::string Compare();
  std::string Finish();
  // How often each call ended with each code.
  using Seen = std::map<std::string, std::map<StatusCode, int64_t>>;
  const Seen& seen() const { return seen_; }
  int64_t fresh_comparisons() const { return fresh_comparisons_; }
  int64_t slid_tokens() const { return slid_tokens_; }
  int64_t tree_comparisons() const { return tree_comparisons_; }
  int64_t later_rounds() const { return later_rounds_; }
  int64_t received_tokens() const { return received_tokens_; }
  int64_t joined_tokens() const { return joined_tokens_; }
  int64_t skipped_layers() const { return skipped_layers_; }
  // Compared outputs that are not finite.
  int64_t bad_numbers() const { return bad_numbers_; }
  int64_t largest_batch() const { return largest_batch_; }
  const FeaturePairs& pairs() const { return pairs_; }
  int64_t repeated_forwards() const {
    return static_cast<const PagedKVCache&>(*cache_).figures().repeated_forwards;
  }

 private:
  using History = std::vector<KnownToken>;
  class Sink;

  int64_t PickId(uint32_t draw) const;
  Batch DrawBatch(uint32_t seed, bool with_trees = false) const;
  std::string Apply(const WalkOp& op);
  std::string Compare(const char* what, const Status& cache, const Status& model);
  // `f` of the cache and of the model: both must answer alike. A call that works takes of pages and
  // tokens what the model expects; one that fails has changed nothing, and where it finds too few
  // pages there may be too few.
  std::string Call(const char* what, const KVModel::Taken& taken,
                   const std::function<Status(AttentionKVCache&)>& f, Status* status);
  struct Room {
    int64_t available = 0;
    int64_t in_use = 0;
    int64_t tokens = 0;
  };
  Room RoomNow() const;
  std::string CheckRoom(const Status& status, const Room& before, const KVModel::Taken& taken);
  std::string ComparePages();
  std::string CompareCounters();
  std::string Add(const WalkOp& op);
  std::string Remove(const WalkOp& op);
  std::string RemoveId(int64_t id);
  std::string Fork(const WalkOp& op);
  std::string ForkOnce(const WalkOp& op);
  std::string ForkTo(int64_t parent, int64_t child, int64_t position, bool* forked);
  std::string Pop(const WalkOp& op);
  std::string PopTokens(int64_t id, int64_t n);
  std::string PopToCommon(const std::vector<int64_t>& ids, bool* done);
  std::string SameNeeds(const char* call,
                        const std::function<Result<int64_t>(const AttentionKVCache&)>& ask,
                        const std::function<KVModel::Taken()>& expect, KVModel::Taken* taken);
  // A batch has begun, which had this room before.
  void Opened(const Batch& batch, const Room& before);
  std::string PagesNeeded(const Batch& batch, KVModel::Taken* taken);
  std::string Begin(const WalkOp& op);
  std::string BeginBatch(const Batch& batch, const WalkOp& op, std::vector<WalkLoad> loads = {});
  std::string Layer(size_t layer, uint32_t draw);
  FeatureSet FeaturesOfMember(int64_t id) const;
  std::string Compared(size_t layer, const LayerOutputs& cache, const LayerOutputs& model,
                       const FeatureSet& call);
  void CountPairs(size_t layer, const FeatureSet& call);
  std::string Fused(size_t layer, const std::vector<uint64_t>& rows);
  std::string FusedMasked(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw);
  std::string Append(size_t layer, const std::vector<uint64_t>& rows);
  std::string Attend(size_t layer, const std::vector<uint64_t>& rows);
  std::string AttendMasked(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw);
  TestTensor DrawMask(uint32_t draw) const;
  std::array<LayerOutputs, 2> TwoOutputs(const AttentionLayerSpec& spec, int64_t n) const;
  std::string Pieces(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw);
  std::string Merge(const LayerOutputs& self, const LayerOutputs& cross);
  std::string CompareOutputs(size_t layer, const LayerOutputs& cache, const LayerOutputs& model);
  std::string End(uint32_t draw);
  std::string CompareFresh(uint32_t draw);
  std::string RunFresh(const History& history, size_t old_length,
                       std::vector<LayerOutputs>* outputs);
  std::string Abort();
  std::string Forward(const WalkOp& op);
  std::string RunRest(const WalkOp& op);
  std::string DebugGet(const WalkOp& op);
  std::string DebugSet(const WalkOp& op);
  std::string DebugGetLatents(int64_t id, int64_t start, int64_t count, DType dtype);
  std::string DebugSetLatents(int64_t id, int64_t start, int64_t count);
  // The layers of one kind: how many, the first (else layer 0), the number of the i-th.
  int64_t CountOf(bool latent) const { return std::ranges::count(layers_, latent, LatentOf); }
  const AttentionLayerSpec& FirstOf(bool latent) const {
    const auto found = std::ranges::find(layers_, latent, LatentOf);
    return found == layers_.end() ? layers_[0] : *found;
  }
  int64_t LayerOfKind(int64_t i, bool latent) const;
  static bool LatentOf(const AttentionLayerSpec& layer) { return layer.latent; }
  bool DebugsLatents(uint32_t draw) const;
  std::string Clear();
  std::string SelectLongRope(const WalkOp& op);
  std::string BadTensor(const WalkOp& op);
  std::string Retain(const WalkOp& op);
  std::string Decode(const WalkOp& op);
  std::string Import(const WalkOp& op);
  std::string Loading(const WalkOp& op);
  std::string LoadingBehindFork(const WalkOp& op);
  std::string LoadFromFork(int64_t parent, bool parent_loads, RandomSequence& random,
                           const WalkOp& op);
  std::string DrawLoad(const Batch& batch, size_t member, const WalkOp& op,
                       std::vector<WalkLoad>* loads);
  std::string MakeLoad(int64_t from, const Batch& batch, size_t member, RandomSequence& random,
                       std::vector<WalkLoad>* loads);
  std::string Tree(const WalkOp& op);
  std::string TreeOf(const Batch& batch, RandomSequence& random, const WalkOp& op);
  std::vector<int64_t> DrawParents(const Batch& batch, RandomSequence& random) const;
  std::string CommitTrees(const WalkOp& op);
  History PathTo(int64_t id, int64_t node) const;
  std::string Window(const WalkOp& op);
  std::string Shared(const WalkOp& op);
  std::string MakeFreshWindow(const WindowSettings& window, size_t* done,
                              const std::vector<uint64_t>& numbers);
  std::string ExportPart(int64_t id, int64_t start, int64_t count,
                         std::array<std::vector<StoredRows>, 2>* parts);
  std::vector<uint64_t> RowsWithPadding(uint32_t draw) const;
  uint64_t NewToken(int64_t id);

  size_t SideOf(const AttentionKVCache& c) const { return &c == cache_.get() ? 0 : 1; }
  void ConnectPeers();
  std::string Transfer(const WalkOp& op);
  std::string Send(const WalkOp& op);
  std::string Receive(const WalkOp& op);
  std::string Settle(RandomSequence& random);
  std::string Unmark(int64_t id);
  std::string Detach(int64_t id, int64_t* sent);
  std::string Resume(int64_t id, RandomSequence& random);
  std::string Flush(int64_t id);
  std::string Cancel(uint64_t epoch);
  std::string Commit(uint64_t epoch, int64_t n);
  std::string FinishReceive(uint64_t epoch, RandomSequence& random);
  std::string Reserve(int64_t id, int64_t count, uint64_t* epoch);
  std::string MarkSend(int64_t id, const Outgoing& outgoing, RandomSequence& random, bool* marked);
  std::string CompareIncoming();
  std::string CompareProgress(int64_t id);
  void NoteSent(std::span<const SendRecord> records);
  KnownToken TokenOf(const Incoming& incoming, int64_t row) const;
  bool HasToken(const Incoming& incoming, int64_t row) const;
  int64_t DrawSender(size_t senders, RandomSequence& random) const;
  int64_t FirstHeld(int64_t id);
  bool IsPlain(int64_t id) const;
  std::string DrawReceivers(int64_t from, int64_t held, RandomSequence& random,
                            std::vector<int64_t>* ids);
  std::string AddReceiver(bool long_factors, RandomSequence& random, std::vector<int64_t>* ids);
  std::vector<int64_t> SendersLike(int64_t from, size_t count) const;
  bool IsSending(int64_t id) const;
  std::string SendingForward(int64_t id, RandomSequence& random);
  std::string SendSome(const std::vector<int64_t>& ids, RandomSequence& random);
  bool rotates_keys() const;

  const WalkSetting setting_;
  const std::vector<AttentionLayerSpec>& layers_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::unique_ptr<AttentionKVCache> fresh_;
  KVModel model_;
  uint64_t next_token_;
  int64_t newest_child_ = -1;
  std::map<int64_t, History> history_;
  std::map<int64_t, WalkTree> trees_;  // of those that have one; history_ has committed tokens
  std::map<int64_t, WalkTree> trees_before_;  // of all, before the open forward of trees
  bool tree_forward_ = false;
  int64_t tree_comparisons_ = 0;
  int64_t later_rounds_ = 0;
  FeaturePairs pairs_;
  std::vector<FeatureSet> layer_features_;       // [layer]
  std::vector<FeatureSet> member_features_;      // of the open forward, in the order of the batch
  std::map<int64_t, FeatureSet> past_features_;  // what has happened to a sequence
  bool masked_ = false;                          // whether a layer's outputs are those with a mask
  std::map<int64_t, bool> long_factors_;
  std::set<int64_t> retained_;
  Seen seen_;
  WindowSettings fresh_window_;  // that CompareFresh is to have
  int64_t fresh_comparisons_ = 0;
  int64_t slid_tokens_ = 0;  // that some sequence did not hold, summed over steps
  Walker* other_ = nullptr;
  std::array<std::shared_ptr<LocalChannel>, 2> channels_;  // of the cache and of the model
  std::map<uint64_t, Incoming> incoming_;                  // by the cache's epoch
  std::map<int64_t, Outgoing> outgoing_;                   // by sequence
  std::map<int64_t, int64_t> halves_;                      // by sequence; absent: 0
  int64_t received_tokens_ = 0;
  int64_t joined_tokens_ = 0;          // of them, from two halves
  std::set<uint64_t> skipped_tokens_;  // that have zeros in some layer
  int64_t skipped_layers_ = 0;         // of all forwards
  int64_t bad_numbers_ = 0;
  int64_t largest_batch_ = 0;
  bool open_ = false;
  // By the open forward.
  int64_t pages_taken_ = 0;
  int64_t tokens_taken_ = 0;
  bool call_failed_ = false;
  std::map<int64_t, History> before_;
  std::map<int64_t, WindowSettings> windows_before_;  // of members of the last batch
  Batch batch_;
  std::vector<WalkLoad> loads_;  // of the forward
  std::vector<uint64_t> rows_;
  std::vector<LayerOutputs> outputs_;  // [layer]
  std::vector<char> appended_, attended_;
};

// One or two caches. kSwitch changes the one that operations are of.
class Walkers {
 public:
  explicit Walkers(uint64_t seed);
  // Empty, or what differs.
  std::string Step(const WalkOp& op);
  std::string Finish();
  const std::vector<std::unique_ptr<Walker>>& all() const { return walkers_; }

 private:
  std::vector<std::unique_ptr<Walker>> walkers_;
  size_t current_ = 0;
};

// From this seed on walks are of the second setting: wide heads, long pages, large batches, and
// tokens with numbers that are not finite.
constexpr uint64_t kWideSeed = uint64_t{1} << 40;
constexpr bool IsWide(uint64_t seed) { return seed >= kWideSeed; }

WalkSetting MakeSetting(uint64_t seed);
// The setting of the seed's other cache; nothing if it has none.
std::optional<WalkSetting> MakeOtherSetting(uint64_t seed);
std::string Differ(const char* what, int64_t cache, int64_t model);
// Whether a number of the cache is the model's: where that is not finite, it must not be finite
// either (whether it is NaN or infinite depends on the order of sums); a bound that is not finite
// says that anything is right.
bool IsWithin(double cache, double model, double bound);

// Walker::Call of a call that takes no pages, or of one that takes them.
#define QUIRE_WALK_CALL(what, status, ...) \
  QUIRE_WALK_TAKE(what, status, KVModel::Taken(), __VA_ARGS__)
#define QUIRE_WALK_TAKE(what, status, taken, ...)                                            \
  Status status;                                                                             \
  if (std::string walk_error = Call(what, taken, __VA_ARGS__, &status); !walk_error.empty()) \
  return walk_error

}  // namespace quire::kv_walk

#endif  // QUIRE_KV_TESTING_KV_WALKER_H_
