// SlottedRNNState: the RNNState of this library. A history says which slots hold which states; here
// are their bytes and what the open forward has set.
#ifndef QUIRE_KV_RECURRENT_RNN_STATE_H_
#define QUIRE_KV_RECURRENT_RNN_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/recurrent/recurrent_base.h"
#include "quire/rnn_state.h"
#include "tensor/host_memory.h"

namespace quire {

class SlottedRNNState final : public RecurrentBase<RNNState>, private SlotFreeListener {
 public:
  static Result<std::unique_ptr<RNNState>> Create(const RNNStateOptions& options);

  const RNNStateOptions& options() const override { return options_; }
  int64_t storage_bytes() const override { return static_cast<int64_t>(storage_.size()); }

  Status Get(int64_t layer, int64_t state, const TensorView& o) override;
  Status Set(int64_t layer, int64_t state, const TensorView& data) override;
  Status GetBefore(int64_t layer, int64_t state, std::span<const int64_t> rows,
                   const TensorView& o) override;
  Status GetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
               const TensorView& o) override;
  Status SetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
               const TensorView& data) override;
  Status DebugGet(int64_t layer, int64_t state, int64_t seq_id, const TensorView& o) override;
  Status ExportState(int64_t tensor, int64_t seq_id, int64_t position,
                     const TensorView& o) override;

 private:
  struct StateLayout {
    size_t bytes = 0;                      // of one sequence's state in one layer
    size_t offset = 0;                     // of layer 0 in a slot
    std::unique_ptr<std::byte[]> initial;  // [bytes]
  };

  SlottedRNNState(const RNNStateOptions& options, const StateHistoryOptions& history,
                  std::vector<StateLayout> layouts, size_t slot_bytes, HostMemory storage);

  void OnSlotFreed(int32_t slot) noexcept override;
  void AppendFacts(std::vector<int64_t>& facts) const override;

  Status PlanCall(const ControlCall& call) override;
  Status PlanImport(const ControlCall& call);
  Status CheckState(const char* call, int64_t layer, int64_t state) const;
  // `tensor` is [count, *shape], or shape if count is -1.
  Status CheckTensor(const char* call, int64_t state, int64_t count,
                     const TensorView& tensor) const;
  Status CheckRows(const char* call, std::span<const int64_t> rows) const;
  Status CheckRoomForRows(std::span<const int64_t> rows) const;
  Status CheckAllSet() const;
  Status CheckSlotSet(const StateMember& member, int32_t slot, const std::string& where) const;

  std::byte* StateIn(int32_t slot, int64_t layer, int64_t state) const;
  // The bytes of the state in a slot; those of the initial state for slot -1.
  const std::byte* StateOrInitial(int32_t slot, int64_t layer, int64_t state) const;
  int64_t state_count() const { return static_cast<int64_t>(layouts_.size()); }
  size_t BytesOf(int64_t state) const { return layouts_[static_cast<size_t>(state)].bytes; }
  uint8_t& IsSet(int32_t slot, int64_t layer, int64_t state);
  uint8_t IsSet(int32_t slot, int64_t layer, int64_t state) const;
  void Store(int32_t slot, int64_t layer, int64_t state, const std::byte* from) noexcept;

  const RNNStateOptions options_;  // RNNStateSpec::initial without data
  const std::vector<StateLayout> layouts_;
  const size_t slot_bytes_;
  const HostMemory storage_;     // [slot][layer][state]
  std::vector<uint8_t> is_set_;  // [slot][layer][state]: written since the slot was taken
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_RNN_STATE_H_
