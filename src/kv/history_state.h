// HistoryState: what every RecurrentState of this library shares beside its history: the calls of
// the interface, one at a time, and the counters.
#ifndef QUIRE_KV_HISTORY_STATE_H_
#define QUIRE_KV_HISTORY_STATE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "kv/control_call.h"
#include "kv/state_history.h"

namespace quire {

// Plan, Commit and Drop are the history's; a derived class adds to them what concerns the bytes.
template <typename Interface>
class HistoryState : public ControlledState<Interface>, public PlannedState {
 public:
  Status Plan(const ControlCall& call) override { return history_.Plan(call); }
  void Commit() noexcept override { history_.Commit(); }
  void Drop() noexcept override { history_.Drop(); }

  Status ImportState(int64_t seq_id, int64_t position,
                     std::span<const TensorView> states) override {
    return Run({.kind = ControlCall::Kind::kImport,
                .seq_id = seq_id,
                .count = position,
                .states = states});
  }
  Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const override {
    return GuardEntry([&] { return history_.ReplayStart(seq_id, position); });
  }
  bool HasSequence(int64_t seq_id) const override {
    return history_.table().Find(seq_id) != SequenceTable::kAbsent;
  }
  int64_t sequence_count() const override { return history_.table().count(); }
  int64_t retained_sequence_count() const override { return history_.table().retained_count(); }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override {
    return GuardEntry([&] { return history_.Length("GetSequenceLength", seq_id); });
  }
  Result<int64_t> GetTreeSize(int64_t seq_id) const override {
    return GuardEntry([&] { return history_.TreeSize("GetTreeSize", seq_id); });
  }
  StateSlotCounts slot_counts() const override {
    return {.total = history_.slots().slot_count(),
            .free = history_.slots().free_count(),
            .retained = history_.retained_slot_count()};
  }
  uint64_t StateDigest() const override {
    std::vector<int64_t> facts;
    history_.AppendFacts(facts);
    AppendFacts(facts);
    return Hash64(facts.data(), facts.size() * sizeof(facts[0]));
  }
  Status CheckInvariants() const override { return history_.CheckInvariants(); }

 protected:
  explicit HistoryState(const StateHistoryOptions& options) : history_(options) {}

  // What can be observed beside the history.
  virtual void AppendFacts(std::vector<int64_t>& facts) const = 0;

  template <typename F>
  std::invoke_result_t<F> Enter(const char* call, F&& body) const {
    return gate_.Enter(call, std::forward<F>(body));
  }
  Status Run(const ControlCall& call) override {
    return Enter(call.name(), [&]() -> Status {
      QUIRE_RETURN_IF_ERROR(Plan(call));
      Commit();
      return Status();
    });
  }

  StateHistory history_;

 private:
  CallGate gate_;
};

}  // namespace quire

#endif  // QUIRE_KV_HISTORY_STATE_H_
