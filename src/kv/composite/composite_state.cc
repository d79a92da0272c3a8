// Every part plans a call, then every part commits it, which cannot fail. The order of the parts
// only decides which one's error is returned if several would refuse the call.
#include "quire/composite_state.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "kv/composite/joint_transfer.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "quire/recurrent_cache.h"

namespace quire {
namespace {

// One part of a composite, in the order in which calls are planned.
struct StatePart {
  PlannedState* planned = nullptr;
  AttentionKVCache* attention = nullptr;  // or
  RecurrentState* recurrent = nullptr;

  template <typename F>
  auto Ask(F&& f) const {
    QUIRE_DCHECK((attention != nullptr) != (recurrent != nullptr)) << "a part is of one kind";
    return attention != nullptr ? f(*attention) : f(*recurrent);
  }
};

std::vector<PlannedState*> PlannedOf(std::span<const StatePart> parts) {
  std::vector<PlannedState*> planned;
  for (const StatePart& part : parts) planned.push_back(part.planned);
  return planned;
}

class JointState final : public ControlledState<CompositeState> {
 public:
  // `all`: the recurrent parts, then the attention caches.
  JointState(Parts parts, std::vector<StatePart> all)
      : parts_(std::move(parts)),
        all_(std::move(all)),
        planned_(PlannedOf(all_)),
        transfer_(*this, std::span(planned_).first(parts_.recurrent.size()), gate_) {}

  const Parts& parts() const override { return parts_; }
  KVTransfer* transfer() override { return &transfer_; }
  Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const override;
  Status ImportState(int64_t seq_id, int64_t position, const KVImport& kv,
                     std::span<const std::vector<TensorView>> states) override;
  Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths,
                             std::span<const LayerLoad> loads) override;
  bool HasSequence(int64_t seq_id) const override {
    return first().Ask([&](const auto& part) { return part.HasSequence(seq_id); });
  }
  int64_t sequence_count() const override {
    return first().Ask([](const auto& part) { return part.sequence_count(); });
  }
  Result<int64_t> GetSequenceLength(int64_t seq_id) const override;
  Result<int64_t> GetTreeSize(int64_t seq_id) const override {
    return first().Ask([&](const auto& part) { return part.GetTreeSize(seq_id); });
  }
  uint64_t StateDigest() const override;
  Status CheckInvariants() const override;

 private:
  Status Run(const ControlCall& call) override;
  Status RunOnAll(const ControlCall& call);
  Status CheckLoadable() const;
  Status CheckImportEnd(int64_t seq_id, int64_t position, const KVImport& kv) const;
  Result<std::vector<std::vector<KVBlock>>> BlocksOfCaches(const KVImport& kv) const;
  Status ExplainReplay(const ControlCall& call, const Status& status) const;
  const StatePart& first() const { return all_.front(); }
  std::span<const StatePart> caches() const {
    QUIRE_DCHECK(parts_.recurrent.size() <= all_.size());
    return std::span(all_).subspan(parts_.recurrent.size());
  }

  const Parts parts_;
  const std::vector<StatePart> all_;
  const std::vector<PlannedState*> planned_;  // of all parts
  CallGate gate_;
  JointTransfer transfer_;
};

Status JointState::Run(const ControlCall& call) {
  return gate_.Enter(call.name(), [&] { return RunOnAll(call); });
}

Status JointState::RunOnAll(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(transfer_.Check(call));
  const ControlCall for_attention = transfer_.ForAttention(call);
  PlannedParts planned(planned_);
  const Status status = planned.Plan([&](size_t part) -> const ControlCall& {
    return all_[part].attention != nullptr ? for_attention : call;
  });
  if (status.code() == StatusCode::kNeedsReplay) return ExplainReplay(call, status);
  QUIRE_RETURN_IF_ERROR(status);
  planned.Commit();
  transfer_.Finish(call);
  QUIRE_DCHECK(std::ranges::all_of(all_, [&](const StatePart& part) {
    return part.Ask([](const auto& s) { return s.sequence_count(); }) == sequence_count();
  })) << "the parts hold different sequences";
  return Status();
}

Status JointState::CheckLoadable() const {
  const auto bad = [](const std::string& what) {
    return Status(StatusCode::kBadArgument, "BeginLoadingForward: " + what);
  };
  if (!parts_.more_attention.empty())
    return bad("there are several attention caches; a source has the layers of one");
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

// All parts would end at the same position. REQUIRES: the sequence may get an import.
Status JointState::CheckImportEnd(int64_t seq_id, int64_t position, const KVImport& kv) const {
  QUIRE_ASSIGN_OR_RETURN(int64_t end, GetSequenceLength(seq_id));
  for (const int64_t tokens : kv.tokens) {
    if (tokens < 0 || tokens > position - end)
      return BadImport("a block of " + std::to_string(tokens) + " tokens after position " +
                       std::to_string(end) + "; the states are those at position " +
                       std::to_string(position));
    end += tokens;
  }
  if (caches().empty() || end == position) return Status();
  return BadImport("the keys and values end at position " + std::to_string(end) +
                   ", the states are those at position " + std::to_string(position));
}

// Each cache's layers of each block: [cache][block].
Result<std::vector<std::vector<KVBlock>>> JointState::BlocksOfCaches(const KVImport& kv) const {
  std::vector<std::vector<KVBlock>> blocks(caches().size());
  for (const KVBlock& block : kv.blocks) {
    size_t next = 0;
    for (size_t c = 0; c < blocks.size(); ++c) {
      const size_t begin = std::min(next, block.size());
      next += caches()[c].attention->options().layers.size();
      const size_t end = std::min(next, block.size());
      blocks[c].emplace_back(block.begin() + static_cast<std::ptrdiff_t>(begin),
                             block.begin() + static_cast<std::ptrdiff_t>(end));
    }
    if (next != block.size() && !blocks.empty()) {
      return BadImport("a block has " + std::to_string(block.size()) + " layers; the " +
                       std::to_string(blocks.size()) + " attention caches have " +
                       std::to_string(next));
    }
  }
  return blocks;
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
    QUIRE_ASSIGN_OR_RETURN(const auto blocks, BlocksOfCaches(kv));
    std::vector<KVImport> imports(blocks.size(), kv);
    for (size_t c = 0; c < blocks.size(); ++c) {
      QUIRE_DCHECK(blocks[c].size() == kv.blocks.size());
      imports[c].blocks = blocks[c];
    }
    PlannedParts planned(planned_);
    QUIRE_RETURN_IF_ERROR(planned.Plan([&](size_t part) {
      const bool is_cache = part >= states.size();
      call.states = is_cache ? std::span<const TensorView>() : states[part];
      call.kv = is_cache ? &imports[part - states.size()] : nullptr;
      return call;
    }));
    QUIRE_RETURN_IF_ERROR(CheckImportEnd(seq_id, position, kv));
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

// A cache counts pending tokens, a recurrent part has none.
Result<int64_t> JointState::GetSequenceLength(int64_t seq_id) const {
  QUIRE_ASSIGN_OR_RETURN(const int64_t length, first().Ask([&](const auto& part) {
    return part.GetSequenceLength(seq_id);
  }));
  return first().attention == nullptr ? length : length - transfer_.PendingOf(seq_id);
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
    QUIRE_DCHECK(position <= reached) << "the search would not end";
  }
  return position;
}

uint64_t JointState::StateDigest() const {
  std::vector<uint64_t> digests;
  for (const StatePart& part : all_)
    digests.push_back(part.Ask([](const auto& state) { return state.StateDigest(); }));
  std::vector<int64_t> facts;
  transfer_.AppendFacts(&facts);
  digests.insert(digests.end(), facts.begin(), facts.end());
  return Hash64(digests.data(), digests.size() * sizeof(digests[0]));
}

Status JointState::CheckInvariants() const {
  for (const StatePart& part : all_) {
    QUIRE_RETURN_IF_ERROR(part.Ask([](const auto& state) { return state.CheckInvariants(); }));
    if (part.Ask([](const auto& state) { return state.sequence_count(); }) != sequence_count())
      return Status(StatusCode::kInternal, "CompositeState: parts hold different sequences");
  }
  return Status();
}

Status BadParts(const std::string& what) {
  return Status(StatusCode::kBadArgument, "CompositeState: " + what);
}

// Adds the part, of which `state` is the interface, to `all`.
template <typename State>
Status AddPart(const std::string& name, State* state, StatePart part, std::vector<StatePart>* all) {
  part.planned = dynamic_cast<PlannedState*>(state);
  if (part.planned == nullptr) return BadParts(name + " is null or no state of this library");
  const bool twice = std::ranges::any_of(
      *all, [&](const StatePart& other) { return other.planned == part.planned; });
  if (twice) return BadParts(name + " is given twice");
  if (state->sequence_count() != 0) {
    return BadParts(name + " has " + std::to_string(state->sequence_count()) +
                    " sequences; give an empty one");
  }
  all->push_back(part);
  return Status();
}

}  // namespace

Result<std::unique_ptr<CompositeState>> CompositeState::Create(Parts parts) {
  return GuardEntry([&]() -> Result<std::unique_ptr<CompositeState>> {
    std::vector<StatePart> all;
    const auto name = [](const char* list, size_t i) {
      return std::string(list) + "[" + std::to_string(i) + "]";
    };
    for (size_t i = 0; i < parts.recurrent.size(); ++i) {
      RecurrentState* const part = parts.recurrent[i].get();
      QUIRE_RETURN_IF_ERROR(AddPart(name("recurrent", i), part, {.recurrent = part}, &all));
    }
    AttentionKVCache* const attention = parts.attention.get();
    if (attention != nullptr)
      QUIRE_RETURN_IF_ERROR(AddPart("attention", attention, {.attention = attention}, &all));
    if (all.empty()) return BadParts("no part; give a cache or a recurrent state");
    if (attention == nullptr && !parts.more_attention.empty())
      return BadParts("more_attention without attention; give the first cache as attention");
    for (size_t i = 0; i < parts.more_attention.size(); ++i) {
      AttentionKVCache* const part = parts.more_attention[i].get();
      QUIRE_RETURN_IF_ERROR(AddPart(name("more_attention", i), part, {.attention = part}, &all));
    }
    return std::unique_ptr<CompositeState>(
        std::make_unique<JointState>(std::move(parts), std::move(all)));
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
