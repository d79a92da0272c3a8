// Recurrent parts plan a call and commit it without fail; the attention cache, which does both in
// one, is asked between the two. So there is one attention cache at most, and it decides last.
#include "quire/composite_state.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "kv/composite/joint_transfer.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "quire/recurrent_cache.h"

namespace quire {
namespace {

Status Apply(const ControlCall& call, AttentionKVCache& cache) {
  switch (call.kind) {
    case ControlCall::Kind::kClear:
      return cache.Clear();
    case ControlCall::Kind::kAdd:
      return cache.AddSequence(call.seq_id);
    case ControlCall::Kind::kRemove:
      return cache.RemoveSequence(call.seq_id);
    case ControlCall::Kind::kFork:
      return cache.ForkSequence(call.seq_id, call.child_id, call.count);
    case ControlCall::Kind::kPop:
      return cache.PopN(call.seq_id, call.count);
    case ControlCall::Kind::kRetain:
      return cache.SetRetained(call.seq_id, call.retained);
    case ControlCall::Kind::kBegin:
      return call.loads.empty()
                 ? cache.BeginForward(call.seq_ids, call.append_lengths)
                 : cache.BeginLoadingForward(call.seq_ids, call.append_lengths, call.loads);
    case ControlCall::Kind::kEnd:
      return cache.EndForward();
    case ControlCall::Kind::kBeginTree:
      return cache.BeginTreeForward(call.seq_ids, call.append_lengths, call.parents);
    case ControlCall::Kind::kCommitTree:
      return cache.CommitAcceptedTokenTreeNodes(call.seq_ids, call.leaves);
    case ControlCall::Kind::kImport:
      return cache.ImportVisibleKV(call.seq_id, *call.kv);
    case ControlCall::Kind::kAbort:
      break;
  }
  return cache.AbortForward();
}

class JointState final : public ControlledState<CompositeState> {
 public:
  JointState(Parts parts, std::vector<PlannedState*> planned)
      : parts_(std::move(parts)),
        planned_(std::move(planned)),
        transfer_(parts_, planned_, gate_) {}

  const Parts& parts() const override { return parts_; }
  KVTransfer* transfer() override { return &transfer_; }
  Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const override;
  Status ImportState(int64_t seq_id, int64_t position, const KVImport& kv,
                     std::span<const std::vector<TensorView>> states) override;
  Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths,
                             std::span<const LayerLoad> loads) override;
  bool HasSequence(int64_t seq_id) const override { return first().HasSequence(seq_id); }
  int64_t sequence_count() const override { return first().sequence_count(); }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override {
    return first().GetSequenceLength(seq_id);
  }
  Result<int64_t> GetTreeSize(int64_t seq_id) const override { return first().GetTreeSize(seq_id); }
  uint64_t StateDigest() const override;
  Status CheckInvariants() const override;

 private:
  Status Run(const ControlCall& call) override;
  Status RunOnAll(const ControlCall& call);
  Status CheckLoadable() const;
  Status CheckImportEnd(int64_t seq_id, int64_t position, const KVImport& kv) const;
  Status ExplainReplay(const ControlCall& call, const Status& status) const;
  const RecurrentState& first() const { return *parts_.recurrent.front(); }

  const Parts parts_;
  const std::vector<PlannedState*> planned_;  // the recurrent parts
  CallGate gate_;
  JointTransfer transfer_;
};

Status JointState::Run(const ControlCall& call) {
  return gate_.Enter(call.name(), [&] { return RunOnAll(call); });
}

Status JointState::RunOnAll(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(transfer_.Check(call));
  PlannedParts planned(planned_);
  const Status status = planned.Plan([&](size_t) -> const ControlCall& { return call; });
  if (status.code() == StatusCode::kNeedsReplay) return ExplainReplay(call, status);
  QUIRE_RETURN_IF_ERROR(status);
  if (parts_.attention != nullptr)
    QUIRE_RETURN_IF_ERROR(Apply(transfer_.ForAttention(call), *parts_.attention));
  planned.Commit();
  transfer_.Finish(call);
  return Status();
}

Status JointState::CheckLoadable() const {
  const auto bad = [](const std::string& what) {
    return Status(StatusCode::kBadArgument, "BeginLoadingForward: " + what);
  };
  if (parts_.recurrent.size() != 1)
    return bad("there are " + std::to_string(parts_.recurrent.size()) +
               " recurrent parts; a source has the states of one");
  if (dynamic_cast<const RecurrentCache*>(parts_.recurrent[0].get()) != nullptr) return Status();
  return bad(
      "the recurrent part is an RNNState, whose layers the caller runs; call ImportState "
      "before the forward");
}

Status BadImport(const std::string& what) {
  return Status(StatusCode::kBadArgument, "ImportState: " + what);
}

// REQUIRES: the sequence may get an import.
Status JointState::CheckImportEnd(int64_t seq_id, int64_t position, const KVImport& kv) const {
  QUIRE_ASSIGN_OR_RETURN(int64_t end, GetSequenceLength(seq_id));
  for (const int64_t tokens : kv.tokens) {
    if (tokens < 0 || tokens > position - end)
      return BadImport("a block of " + std::to_string(tokens) + " tokens behind position " +
                       std::to_string(end) + "; the states are those at position " +
                       std::to_string(position));
    end += tokens;
  }
  if (parts_.attention == nullptr || end == position) return Status();
  return BadImport("the keys and values end at position " + std::to_string(end) +
                   ", the states are those at position " + std::to_string(position));
}

Status JointState::ImportState(int64_t seq_id, int64_t position, const KVImport& kv,
                               std::span<const std::vector<TensorView>> states) {
  return gate_.Enter("ImportState", [&]() -> Status {
    if (states.size() != parts_.recurrent.size()) {
      return BadImport("states of " + std::to_string(states.size()) +
                       " recurrent parts; there are " + std::to_string(parts_.recurrent.size()));
    }
    ControlCall call{
        .kind = ControlCall::Kind::kImport, .seq_id = seq_id, .count = position, .kv = &kv};
    QUIRE_RETURN_IF_ERROR(transfer_.Check(call));
    PlannedParts planned(planned_);
    QUIRE_RETURN_IF_ERROR(planned.Plan([&](size_t part) {
      call.states = states[part];
      return call;
    }));
    QUIRE_RETURN_IF_ERROR(CheckImportEnd(seq_id, position, kv));
    if (parts_.attention != nullptr) QUIRE_RETURN_IF_ERROR(Apply(call, *parts_.attention));
    planned.Commit();
    return Status();
  });
}

Status JointState::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                       std::span<const int64_t> append_lengths,
                                       std::span<const LayerLoad> loads) {
  return gate_.Enter("BeginLoadingForward", [&]() -> Status {
    if (!loads.empty()) QUIRE_RETURN_IF_ERROR(CheckLoadable());
    return RunOnAll({.kind = ControlCall::Kind::kBegin,
                     .seq_ids = seq_ids,
                     .append_lengths = append_lengths,
                     .loads = loads});
  });
}

// One part's message names a position that another part may not reach.
Status JointState::ExplainReplay(const ControlCall& call, const Status& status) const {
  QUIRE_ASSIGN_OR_RETURN(const int64_t length, GetSequenceLength(call.seq_id));
  const bool pops = call.kind == ControlCall::Kind::kPop;
  const int64_t position = pops ? length - call.count : call.count;
  QUIRE_ASSIGN_OR_RETURN(const int64_t from, ReplayStart(call.seq_id, position));
  return Status(status.code(), std::string(call.name()) + ": sequence " +
                                   std::to_string(call.seq_id) + " holds no state at position " +
                                   std::to_string(position) + "; go to position " +
                                   std::to_string(from) + " and run the tokens from there again");
}

Result<int64_t> JointState::ReplayStart(int64_t seq_id, int64_t position) const {
  for (int64_t reached = -1; reached != position;) {
    reached = position;
    for (const auto& part : parts_.recurrent) {
      QUIRE_ASSIGN_OR_RETURN(position, part->ReplayStart(seq_id, position));
    }
  }
  return position;
}

uint64_t JointState::StateDigest() const {
  std::vector<uint64_t> digests;
  if (parts_.attention != nullptr) digests.push_back(parts_.attention->StateDigest());
  for (const auto& part : parts_.recurrent) digests.push_back(part->StateDigest());
  std::vector<int64_t> facts;
  transfer_.AppendFacts(&facts);
  digests.insert(digests.end(), facts.begin(), facts.end());
  return Hash64(digests.data(), digests.size() * sizeof(digests[0]));
}

Status JointState::CheckInvariants() const {
  const auto same = [&](int64_t count) {
    if (count == sequence_count()) return Status();
    return Status(StatusCode::kInternal, "CompositeState: parts hold different sequences");
  };
  if (parts_.attention != nullptr) {
    QUIRE_RETURN_IF_ERROR(parts_.attention->CheckInvariants());
    QUIRE_RETURN_IF_ERROR(same(parts_.attention->sequence_count()));
  }
  for (const auto& part : parts_.recurrent) {
    QUIRE_RETURN_IF_ERROR(part->CheckInvariants());
    QUIRE_RETURN_IF_ERROR(same(part->sequence_count()));
  }
  return Status();
}

Status BadParts(const std::string& what) {
  return Status(StatusCode::kBadArgument, "CompositeState: " + what);
}

}  // namespace

Result<std::unique_ptr<CompositeState>> CompositeState::Create(Parts parts) {
  return GuardEntry([&]() -> Result<std::unique_ptr<CompositeState>> {
    if (parts.recurrent.empty()) return BadParts("no recurrent part; give at least one");
    if (parts.attention != nullptr && parts.attention->sequence_count() != 0) {
      return BadParts("the attention cache has " +
                      std::to_string(parts.attention->sequence_count()) +
                      " sequences; give an empty one");
    }
    std::vector<PlannedState*> planned;
    for (size_t i = 0; i < parts.recurrent.size(); ++i) {
      RecurrentState* const part = parts.recurrent[i].get();
      const std::string name = "recurrent[" + std::to_string(i) + "]";
      auto* const plans = dynamic_cast<PlannedState*>(part);
      if (plans == nullptr) return BadParts(name + " is null or no state of this library");
      if (std::find(planned.begin(), planned.end(), plans) != planned.end())
        return BadParts(name + " is given twice");
      if (part->sequence_count() != 0) {
        return BadParts(name + " has " + std::to_string(part->sequence_count()) +
                        " sequences; give an empty one");
      }
      planned.push_back(plans);
    }
    return std::unique_ptr<CompositeState>(
        std::make_unique<JointState>(std::move(parts), std::move(planned)));
  });
}

Status CompositeState::BeginBlendingForward(std::span<const int64_t> /*seq_ids*/,
                                            std::span<const int64_t> /*append_lengths*/,
                                            std::span<const LayerLoad> /*loads*/,
                                            std::span<const BlendMember> /*blends*/) {
  return Status(StatusCode::kBadState,
                "BeginBlendingForward: this state has recurrent layers, which need every token in "
                "every layer; begin an ordinary forward (exact prefixes are reused)");
}

}  // namespace quire
