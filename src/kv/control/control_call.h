// The calls that change which sequences there are, as values: a state plans one, then commits it.
// So several states can carry out a call together or not at all.
#ifndef QUIRE_KV_CONTROL_CONTROL_CALL_H_
#define QUIRE_KV_CONTROL_CONTROL_CALL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/check.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

struct ControlCall {
  enum class Kind : uint8_t {
    kClear,
    kAdd,
    kRemove,
    kFork,
    kPop,
    kRetain,
    kBegin,
    kEnd,
    kAbort,
    kBeginTree,
    kCommitTree,
    kImport,
  };
  Kind kind = Kind::kClear;
  int64_t seq_id = -1;    // kFork: the parent
  int64_t child_id = -1;  // kFork
  int64_t count = 0;      // kFork: the position, or -1; kPop: tokens; kImport: the position
  bool retained = false;  // kRetain
  std::span<const int64_t> seq_ids{};         // kBegin, kBeginTree, kCommitTree
  std::span<const int64_t> append_lengths{};  // kBegin, kBeginTree
  std::span<const int64_t> parents{};         // kBeginTree
  std::span<const LayerLoad> loads{};         // kBegin: of members, in the order of the batch
  std::span<const int64_t> leaves{};          // kCommitTree
  std::span<const TensorView> states{};       // kImport: [layer]
  const KVImport* kv = nullptr;               // kImport: for an attention part
  bool leaves_out = true;                     // kImport: rows that every window hides may lack
  const char* entry = nullptr;                // what the caller has called, if not that of the kind

  const char* name() const {
    if (entry != nullptr) return entry;
    if (kind == Kind::kBegin && !loads.empty()) return "BeginLoadingForward";
    return kNames[static_cast<size_t>(kind)];
  }

 private:
  // By kind.
  static constexpr std::array<const char*, 12> kNames = {"Clear",
                                                         "AddSequence",
                                                         "RemoveSequence",
                                                         "ForkSequence",
                                                         "PopN",
                                                         "SetRetained",
                                                         "BeginForward",
                                                         "EndForward",
                                                         "AbortForward",
                                                         "BeginTreeForward",
                                                         "CommitAcceptedTokenTreeNodes",
                                                         "ImportState"};
  static_assert(kNames.size() == static_cast<size_t>(Kind::kImport) + 1);
};

// A state whose control calls come in two halves.
class PlannedState {
 public:
  virtual ~PlannedState() = default;
  // All checks, allocations and reservations of the call. Nothing that can be observed changes; an
  // error, or std::bad_alloc, leaves nothing planned.
  virtual Status Plan(const ControlCall& call) = 0;
  // One of these follows each Plan that worked, with no other call in between.
  virtual void Commit() noexcept = 0;
  virtual void Drop() noexcept = 0;
};

// A call in two halves of several parts: gives up what is planned unless the call comes to an end.
template <typename Part>
class PlannedHalves {
 public:
  explicit PlannedHalves(std::span<Part* const> parts) : parts_(parts) {}
  ~PlannedHalves() {
    while (count_ > 0) parts_[--count_]->Drop();
  }
  PlannedHalves(const PlannedHalves&) = delete;
  PlannedHalves& operator=(const PlannedHalves&) = delete;
  // plan(part) -> Status: the first half of the part with that index.
  template <typename F>
  Status PlanEach(F&& plan) {
    QUIRE_DCHECK(count_ == 0) << "another call is planned";
    for (size_t part = 0; part < parts_.size(); ++part) {
      QUIRE_RETURN_IF_ERROR(plan(part));
      ++count_;
    }
    return Status();
  }
  // commit(part): the second half, which cannot fail.
  template <typename F>
  void CommitEach(F&& commit) noexcept {
    QUIRE_DCHECK(count_ == parts_.size()) << "a part has not planned the call";
    for (; count_ > 0; --count_) commit(parts_.size() - count_);
  }

 protected:
  Part& part(size_t index) const {
    QUIRE_DCHECK(index < parts_.size() && parts_[index] != nullptr);
    return *parts_[index];
  }

 private:
  std::span<Part* const> parts_;
  size_t count_ = 0;
};

// The halves of a ControlCall.
class PlannedParts : public PlannedHalves<PlannedState> {
 public:
  using PlannedHalves::PlannedHalves;
  // call_of(part): the call as it is for the part with that index.
  template <typename F>
  Status Plan(F&& call_of) {
    return PlanEach([&](size_t index) { return part(index).Plan(call_of(index)); });
  }
  void Commit() noexcept {
    CommitEach([&](size_t index) { part(index).Commit(); });
  }
};

// KVState's calls and SetRetained of `Interface`, each as one ControlCall given to Run.
template <typename Interface>
class ControlledState : public Interface {
 public:
  using Kind = ControlCall::Kind;

  Status Clear() override { return Run({.kind = Kind::kClear}); }
  Status AddSequence(int64_t seq_id) override {
    return Run({.kind = Kind::kAdd, .seq_id = seq_id});
  }
  Status RemoveSequence(int64_t seq_id) override {
    return Run({.kind = Kind::kRemove, .seq_id = seq_id});
  }
  Status ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) override {
    return Run({.kind = Kind::kFork, .seq_id = parent_id, .child_id = child_id, .count = fork_pos});
  }
  Status PopN(int64_t seq_id, int64_t n) override {
    return Run({.kind = Kind::kPop, .seq_id = seq_id, .count = n});
  }
  Status SetRetained(int64_t seq_id, bool retained) override {
    return Run({.kind = Kind::kRetain, .seq_id = seq_id, .retained = retained});
  }
  Status BeginForward(std::span<const int64_t> seq_ids,
                      std::span<const int64_t> append_lengths) override {
    return Run({.kind = Kind::kBegin, .seq_ids = seq_ids, .append_lengths = append_lengths});
  }
  Status BeginTreeForward(std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
                          std::span<const int64_t> token_tree_parents) override {
    return Run({.kind = Kind::kBeginTree,
                .seq_ids = seq_ids,
                .append_lengths = append_lengths,
                .parents = token_tree_parents});
  }
  Status CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> leaf_indices) override {
    return Run({.kind = Kind::kCommitTree, .seq_ids = seq_ids, .leaves = leaf_indices});
  }
  Status EndForward() override { return Run({.kind = Kind::kEnd}); }
  Status AbortForward() override { return Run({.kind = Kind::kAbort}); }

 protected:
  virtual Status Run(const ControlCall& call) = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CONTROL_CONTROL_CALL_H_
