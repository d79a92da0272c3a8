// A composite state and a naive model of it side by side, and the operations of a random walk over
// them; two of them, between which tokens and states go (composite_walk_transfer.cc).
#ifndef QUIRE_KV_TESTING_COMPOSITE_WALKER_H_
#define QUIRE_KV_TESTING_COMPOSITE_WALKER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "kv/testing/saboteur.h"
#include "quire/composite_state.h"
#include "quire/rnn_state.h"
#include "quire/transfer.h"

namespace quire::composite_walk {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

// ---------------------------------------------------------------------- the model

// Positions whose state one recurrent part holds.
struct HeldStates {
  std::set<int64_t> ends;         // of forwards, the newest max_history
  std::set<int64_t> checkpoints;  // kept
  int64_t input_start = 0;        // of a RecurrentCache

  // As it is, or computed from the inputs behind an earlier one.
  bool Reaches(int64_t position, int64_t length, bool has_inputs) const {
    return position == 0 || position == length || ends.count(position) != 0 ||
           checkpoints.count(position) != 0 || (has_inputs && position > input_start);
  }
};

struct ModelSequence {
  Tokens tokens;  // that its states are of
  Tokens kv;      // whose keys and values it has; others only where a sender's were other tokens
  bool retained = false;
  HeldStates rnn;
  HeldStates cache;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

// What has come of one recurrent layer's state.
struct ModelArrival {
  int64_t row = -1;  // of the map: the last token before it
  bool complete = false;
  Tokens tokens{};  // that it is of

  int64_t rows() const { return complete ? row + 1 : 0; }
};

struct ModelReceive {
  int64_t seq_id = 0;
  int64_t first_position = 0;
  ReceiveMap map;
  std::vector<std::optional<uint64_t>> rows;  // keys and values that have come, as tokens
  std::vector<ModelArrival> arrivals;         // [state tensor]
  StatusCode failure = StatusCode::kOk;
};

struct ModelMark {
  int64_t begin = 0;
  int64_t end = 0;
  uint64_t epoch = 0;
  int64_t left_out = -1;  // a row that the receiver does not store
  int64_t next = 0;       // of keys and values
  int64_t given = 0;      // in the open forward, up to here; 0: none
  int64_t sent = 0;       // position of the states that are sent; 0: none
  bool has_rows = false;  // keys and values go as well
  StatusCode failure = StatusCode::kOk;

  // States may be ahead of rows: any forward's end sends them, and the sequence's own sends rows.
  bool active() const {
    return failure == StatusCode::kOk && (sent < end || (has_rows && next < end));
  }
};

// ---------------------------------------------------------------------- the walk

struct WalkSetting {
  bool with_attention = false;
  bool with_rnn = false;
  bool with_cache = false;
  bool cache_first = false;  // of the recurrent parts
  RNNStateOptions rnn;
  RecurrentCacheOptions cache;
  AttentionKVCacheOptions attention;
  int64_t longest_append = 0;
};

WalkSetting DrawSetting(RandomSequence& random);
// The setting of a state that can send to one of `setting` and receive from it.
WalkSetting DrawPeerSetting(const WalkSetting& setting, RandomSequence& random);

class CompositeWalk {
 public:
  CompositeWalk(const WalkSetting& setting, uint64_t seed);
  // Its marks end with it, and the other one may be gone.
  ~CompositeWalk();
  // From here on tokens go to the other one too.
  void ConnectTo(CompositeWalk* other);

  void Step();
  // All that can be observed, against the model.
  void Check();

  int64_t replay_count() const { return replay_count_; }
  int64_t refusal_count() const { return refusal_count_; }
  int64_t committed_count() const { return committed_count_; }
  int64_t stopped_count() const { return stopped_count_; }

 private:
  enum class Part : uint8_t { kRnn, kCache };

  RecurrentCacheOptions AloneOptions() const;
  int64_t AnyId() { return random_.Below(7); }
  // Compares a status with what the model expects; true if the call worked.
  bool Expect(const Status& status, StatusCode expected, uint64_t digest);
  bool Known(int64_t id) const { return model_.count(id) != 0; }
  bool IsMember(int64_t id) const;
  bool Full() const;
  bool Reaches(const ModelSequence& s, int64_t position) const;
  void Add();
  void AddId(int64_t id);
  StatusCode OfOutsider(int64_t id) const;
  void Remove();
  void RemoveId(int64_t id);
  void Clear();
  int64_t DrawPosition(int64_t length);
  static void CutTo(HeldStates& held, int64_t position, bool has_inputs);
  static void CutTo(ModelSequence& s, int64_t position);
  void Fork();
  void Pop();
  void PopTokens(int64_t id, int64_t n);
  void ExpectReplayStart(int64_t id, int64_t position);
  void Retain();

  // ---- forwards
  void Forward();
  void ForwardOf(const Ids& ids, const Ids& lengths);
  StatusCode ExpectedOfForward(const Ids& ids, const Ids& lengths) const;
  // All layers of all parts; when the forward will be aborted, some of them only. Between them,
  // control calls for others, and ends that come too early.
  void RunLayers(const std::vector<Tokens>& tokens, const Tokens& all,
                 std::vector<std::set<int64_t>>& added, bool aborts);
  void RunRnn(const std::vector<Tokens>& tokens, std::vector<std::set<int64_t>>& added);
  void CheckOutputs(const std::vector<Tokens>& tokens, const RecurrentOutputs& outputs);
  std::vector<float> RunAlone(const Tokens& tokens, RecurrentOutputs* outputs);
  void Extend(ModelSequence& s, const Tokens& tokens, const std::set<int64_t>& added);
  void ExtendCache(HeldStates& held, int64_t base, int64_t end) const;

  // ---- what can be observed of all sequences
  void CheckAll();
  void CheckKV(int64_t id, const ModelSequence& s);

  // ---- tokens and states between two (composite_walk_transfer.cc)
  void TransferStep();
  void Transfer();
  int64_t DrawReceiver(int64_t longest);
  uint64_t AnyEpoch();
  int64_t AnyMarked();
  uint64_t Reserve(int64_t id, int64_t count);
  StatusCode ExpectedOfReserve(int64_t id, int64_t count) const;
  void MarkSend(int64_t id, uint64_t epoch, int64_t first_row = 0);
  StatusCode ExpectedOfMark(int64_t id, int64_t begin, const ReceiveMap& map,
                            size_t map_count) const;
  void MarkAgain(int64_t id);
  void Unmark(int64_t id);
  void Resume(int64_t id);
  void Flush(int64_t id);
  StatusCode FlushModel(int64_t id);
  void Settle(uint64_t epoch);
  void Commit(uint64_t epoch, int64_t n);
  StatusCode ExpectedOfCommit(uint64_t epoch, int64_t n) const;
  void Cancel(uint64_t epoch);
  void EndReceive(uint64_t epoch);
  void EndReceiveOf(int64_t id);
  void TransferInForward();
  // The receive that the model's mark fills.
  ModelReceive* ReceiverOf(const ModelMark& mark);
  StatusCode GiveOutcome(const ModelMark& mark, int64_t layer);
  StatusCode ViewOutcome(const ModelMark& mark);
  void Refuse(int64_t layer);
  void GiveRows(int64_t id, int64_t end);
  void FinishRows(int64_t id, bool ended);
  void SendStates(int64_t id);
  bool HoldsState(Part part, const ModelSequence& s, int64_t position) const;
  void Stop(ModelMark& mark, StatusCode why);
  void DropMark(int64_t id);
  void CutMark(int64_t id);
  bool IsPending(int64_t id) const;
  void CheckTransfers();
  void CheckReceive(uint64_t epoch, const ModelReceive& receive);
  StatusCode ExpectedOfWait(const ModelReceive& receive, int64_t n) const;
  void CheckMark(int64_t id, const ModelMark& mark);

  RandomSequence random_;
  const WalkSetting setting_;
  const std::unique_ptr<RecurrentCache> alone_;
  std::shared_ptr<AttentionKVCache> attention_;
  std::shared_ptr<RNNState> rnn_;
  std::shared_ptr<RecurrentCache> cache_;
  std::unique_ptr<CompositeState> state_;
  std::vector<Part> tensor_parts_;  // [state tensor]
  std::map<int64_t, ModelSequence> model_;
  Ids batch_;
  int64_t cut_id_ =
      -1;  // the sequence that was forked, popped or received last, until it is checked
  uint64_t next_token_ = 0;
  int64_t replay_count_ = 0;
  int64_t refusal_count_ = 0;

  CompositeWalk* other_ = nullptr;
  const std::shared_ptr<LocalChannel> channel_ = CreateLocalChannel();  // to the other one
  const std::shared_ptr<Saboteur> sink_ = std::make_shared<Saboteur>(channel_);
  int64_t refused_layer_ = -1;
  bool is_cut_off_ = false;                    // nobody is connected
  std::map<uint64_t, ModelReceive> receives_;  // by epoch
  std::map<int64_t, ModelMark> marks_;         // by sequence
  uint64_t ended_epoch_ = 1 << 20;
  int64_t committed_count_ = 0;  // reservations
  int64_t stopped_count_ = 0;    // marks that failed
};

}  // namespace quire::composite_walk

#endif  // QUIRE_KV_TESTING_COMPOSITE_WALKER_H_
