// RecurrentBase: what every RecurrentState of this library shares beside its history: the calls of
// the interface, one at a time, and the counters.
#ifndef QUIRE_KV_RECURRENT_RECURRENT_BASE_H_
#define QUIRE_KV_RECURRENT_RECURRENT_BASE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "kv/recurrent/state_history.h"

namespace quire {

// Plan, Commit and Drop are the history's; a derived class adds to PlanCall and CommitCall what
// concerns the bytes.
template <typename Interface>
class RecurrentBase : public ControlledState<Interface>, public PlannedState {
 public:
  Status Plan(const ControlCall& call) final {
    const auto lock = gate_.Lock();
    return PlanCall(call);
  }
  void Commit() noexcept final {
    const auto lock = gate_.Lock();
    CommitCall();
  }
  void Drop() noexcept final {
    const auto lock = gate_.Lock();
    history_.Drop();
  }

  Status ImportState(int64_t seq_id, int64_t position,
                     std::span<const TensorView> states) override {
    return Run({.kind = ControlCall::Kind::kImport,
                .seq_id = seq_id,
                .count = position,
                .states = states});
  }
  Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const override {
    return gate_.Ask([&] { return history_.ReplayStart(seq_id, position); });
  }
  bool HasSequence(int64_t seq_id) const override {
    const auto lock = gate_.Lock();
    return history_.table().Find(seq_id) != SequenceTable::kAbsent;
  }
  int64_t sequence_count() const override {
    const auto lock = gate_.Lock();
    return history_.table().count();
  }
  int64_t retained_sequence_count() const override {
    const auto lock = gate_.Lock();
    return history_.table().retained_count();
  }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override {
    return gate_.Ask([&] { return history_.Length("GetSequenceLength", seq_id); });
  }
  Result<int64_t> GetTreeSize(int64_t seq_id) const override {
    return gate_.Ask([&] { return history_.TreeSize("GetTreeSize", seq_id); });
  }
  StateSlotCounts slot_counts() const override {
    const auto lock = gate_.Lock();
    return {.total = history_.slots().slot_count(),
            .free = history_.slots().free_count(),
            .retained = history_.retained_slot_count()};
  }
  uint64_t StateDigest() const override {
    const auto lock = gate_.Lock();
    std::vector<int64_t> facts;
    history_.AppendFacts(facts);
    AppendFacts(facts);
    return Hash64(facts.data(), facts.size() * sizeof(facts[0]));
  }
  Status CheckInvariants() const override {
    return gate_.Ask([&] { return history_.CheckInvariants(); });
  }

 protected:
  explicit RecurrentBase(const StateHistoryOptions& options) : history_(options) {}

  // Plan and Commit, for derived classes.
  virtual Status PlanCall(const ControlCall& call) { return history_.Plan(call); }
  virtual void CommitCall() noexcept { history_.Commit(); }
  // What can be observed beside the history.
  virtual void AppendFacts(std::vector<int64_t>& facts) const = 0;

  template <typename F>
  std::invoke_result_t<F> Enter(const char* call, F&& body) const {
    return gate_.Enter(call, std::forward<F>(body));
  }
  Status Run(const ControlCall& call) override {
    return gate_.EnterAlone(call.name(), [&]() -> Status {
      QUIRE_RETURN_IF_ERROR(PlanCall(call));
      CommitCall();
      return Status();
    });
  }

  StateHistory history_;
  CallGate gate_;
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_RECURRENT_BASE_H_
