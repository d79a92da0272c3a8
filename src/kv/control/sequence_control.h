// SequenceControl: which sequences a state has, which of them are retained, and which are in the
// batch of the open forward; the rules of the calls that depend on these, and their messages. Each
// state that keeps sequences has one.
//
// Invariants:
// - No batch is planned while a forward is open. So the members of the open forward are the
//   sequences that the last planning named: their Sequence::batch is its number.
// - A member is active. It stays so, and it exists, until the forward ends: calls that remove or
//   retain a sequence find it with FindOutsideBatch.
// - At most max_num_sequences sequences are active: calls that add an active one have asked
//   CheckNew or CheckRoomForActive.
#ifndef QUIRE_KV_CONTROL_SEQUENCE_CONTROL_H_
#define QUIRE_KV_CONTROL_SEQUENCE_CONTROL_H_

#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "base/check.h"
#include "kv/pages/sequence_table.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// Positions are handed to kernels and callers as int32.
inline constexpr int64_t kPositionsMax = std::numeric_limits<int32_t>::max();

// The first words of a message: "call: sequence 7 ".
std::string OfSequence(const char* call, int64_t seq_id);

// BadState for a call that needs an idle state.
Status ForwardIsOpen(const char* call);
// UnknownSequence for a call that names a sequence.
Status NoSuchSequence(const char* call, int64_t seq_id);

class SequenceControl {
 public:
  explicit SequenceControl(int64_t max_num_sequences) : max_num_sequences_(max_num_sequences) {}

  SequenceTable& table() { return table_; }
  const SequenceTable& table() const { return table_; }
  Sequence& operator[](int32_t index) { return table_[index]; }
  const Sequence& operator[](int32_t index) const { return table_[index]; }
  int64_t active_count() const { return table_.count() - table_.retained_count(); }

  // ---- Sequences. Each returns an index in the table, or the error of a call with this name.
  // In line, as are other checks that nearly always pass.
  Result<int32_t> Find(const char* call, int64_t seq_id) const {
    const int32_t index = table_.Find(seq_id);
    if (index != SequenceTable::kAbsent) return index;
    return NoSuchSequence(call, seq_id);
  }
  // The same for a call that changes the sequence or forks it.
  Result<int32_t> FindOutsideBatch(const char* call, int64_t seq_id) const {
    const int32_t index = table_.Find(seq_id);
    if (index != SequenceTable::kAbsent && !InBatch(index)) return index;
    return RefuseToChange(call, seq_id, index);
  }
  // Whether a sequence with this id can be added.
  Status CheckNew(const char* call, int64_t seq_id) const {
    const bool is_new = seq_id >= 0 && table_.Find(seq_id) == SequenceTable::kAbsent;
    return is_new && HasRoomForActive() ? Status() : RefuseNew(call, seq_id);
  }
  Status CheckRoomForActive(const char* call, int64_t seq_id) const;
  Status RequireActive(const char* call, int32_t index) const;

  // ---- The open forward.
  bool in_forward() const { return in_forward_; }
  bool InBatch(int32_t index) const { return in_forward_ && IsNamed(index); }
  Status RequireIdle(const char* call) const {
    return in_forward_ ? ForwardIsOpen(call) : Status();
  }
  // BadState also after a failure in this forward.
  Status RequireForward(const char* call) const {
    return in_forward_ && !failed_ ? Status() : RefuseForward(call);
  }
  // The last planning's batch is that of the forward.
  void OpenForward() noexcept {
    QUIRE_DCHECK(!in_forward_);
    in_forward_ = true;
    failed_ = false;
    batch_ = planning_;
  }
  void CloseForward() noexcept {
    QUIRE_DCHECK(in_forward_);
    in_forward_ = false;
  }
  // An attention call sets it before it begins and resets it when it succeeds.
  void set_failed(bool failed) noexcept {
    QUIRE_DCHECK(in_forward_);
    failed_ = failed;
  }
  void Clear() noexcept;

  // ---- Planning a batch.
  Status CheckBatch(const char* call, std::span<const int64_t> seq_ids,
                    std::span<const int64_t> append_lengths) const;
  // No sequence is named any more. Planning is const: names are marks that no call can see.
  void StartPlanning() const noexcept {
    QUIRE_DCHECK(!in_forward_);
    ++planning_;
  }
  bool IsNamed(int32_t index) const { return table_[index].batch == planning_; }
  void Name(int32_t index) const noexcept {
    QUIRE_DCHECK(table_[index].id >= 0) << "entry " << index << " is free";
    QUIRE_DCHECK(!IsNamed(index)) << "sequence " << table_[index].id << " is named twice";
    table_[index].batch = planning_;
  }
  // Whether the sequence may get rows. `index`: what the table finds for its id.
  bool MayTake(int32_t index) const {
    return index != SequenceTable::kAbsent && !IsNamed(index) && !table_[index].retained;
  }
  // Why it may not; OK if it may.
  Status CheckMember(const char* call, int64_t seq_id, int32_t index) const;
  // Whether no batch has been planned since the last forward was opened.
  bool HasBatchOfLastForward() const { return batch_ == planning_; }

  // ---- Token trees.
  // BadArgument for a sequence that this call has named before; names it.
  Status NameOnce(const char* call, int32_t index) const;

 private:
  bool HasRoomForActive() const {
    QUIRE_DCHECK(active_count() <= max_num_sequences_);
    return active_count() < max_num_sequences_;
  }
  // Why FindOutsideBatch, CheckNew and RequireForward have said no.
  Status RefuseToChange(const char* call, int64_t seq_id, int32_t index) const;
  Status RefuseNew(const char* call, int64_t seq_id) const;
  Status RefuseForward(const char* call) const;

  const int64_t max_num_sequences_;
  SequenceTable table_;
  bool in_forward_ = false;
  bool failed_ = false;  // an attention call of this forward has failed
  mutable uint64_t planning_ =
      0;                // number of the last planning; sequences that it has named carry it
  uint64_t batch_ = 0;  // the planning of the last forward
};

// ---------------------------------------------------------------------- rows and loads of a member

// BadArgument below 1.
Status CheckRowCount(const char* call, int64_t seq_id, int64_t row_count);
// TooLarge if `imported` tokens and `row_count` further ones after `length` pass 2^31 positions.
Status CheckPositions(const char* call, int64_t seq_id, int64_t length, int64_t row_count,
                      int64_t imported);
// The same for a reservation of `count` tokens, of which there must be one.
Status CheckReceiveCount(const char* call, int64_t seq_id, int64_t length, int64_t count);

// The load of the next member of the batch, taken from the front of `loads`; null: it has none.
inline const LayerLoad* TakeLoad(int64_t seq_id, std::span<const LayerLoad>& loads) {
  if (loads.empty() || loads.front().seq_id != seq_id) return nullptr;
  const LayerLoad* const load = &loads.front();
  loads = loads.subspan(1);
  return load;
}
Status CheckLoad(const char* call, const LayerLoad& load);
// What is left after all members have taken theirs.
Status RequireNoLoadLeft(const char* call, std::span<const LayerLoad> loads);

// ---------------------------------------------------------------------- token trees

// BadState if the sequence has an uncommitted tree.
Status RequireNoTree(const char* call, int64_t seq_id, int64_t tree_size);
// TooLarge if `count` more nodes pass the limit.
Status CheckTreeSize(const char* call, int64_t seq_id, int64_t tree_size, int64_t count,
                     int64_t max_tree_size);
Status CheckLeafCount(const char* call, std::span<const int64_t> seq_ids,
                      std::span<const int64_t> leaves);
// Whether a commit may accept the path to this leaf of a tree.
Status CheckLeaf(const char* call, int64_t seq_id, int64_t tree_size, int64_t leaf);

// The parents of a call's new nodes, those of each member after those of the one before.
class NodeParents {
 public:
  NodeParents(const char* call, std::span<const int64_t> parents)
      : call_(call), parents_(parents) {}
  // Those of the next member. A count below 1 takes none.
  Result<std::span<const int64_t>> Take(int64_t seq_id, int64_t count);
  Status RequireNoneLeft() const;

 private:
  const char* const call_;
  const std::span<const int64_t> parents_;
  size_t taken_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CONTROL_SEQUENCE_CONTROL_H_
