// What lasts between the tokens of an engine's sequences: KV of attention layers, states of
// recurrent ones, or both, which then change together.
//
// KV comes in pages, which are counted and given out by the scheduler. States come in slots: those
// of active sequences are there from the beginning, so that no forward lacks one; retained
// sequences share a number of them, and the oldest gives way (PrefixCache).
#ifndef QUIRE_ENGINE_PREFIX_ENGINE_STATES_H_
#define QUIRE_ENGINE_PREFIX_ENGINE_STATES_H_

#include <cstdint>
#include <memory>
#include <span>

#include "quire/attention_kv_cache.h"
#include "quire/composite_state.h"
#include "quire/kv_state.h"
#include "quire/recurrent_cache.h"
#include "quire/status.h"

namespace quire {

// Free pages where no layer has KV: more than the tokens of all requests there will be, and few
// enough to be multiplied by a page's tokens.
inline constexpr int64_t kPagesUnlimited = int64_t{1} << 40;

// Both as one; null without recurrent layers. REQUIRES: both are empty.
std::unique_ptr<CompositeState> JoinStates(const std::shared_ptr<AttentionKVCache>& attention,
                                           const std::shared_ptr<RecurrentCache>& recurrent);

// Bytes of the states of recurrent layers at one position: of all, and of the largest one.
struct StateSizes {
  int64_t all = 0;
  int64_t largest = 0;
};
StateSizes StateSizesOf(std::span<const RecurrentLayerSpec> layers);

// A view: the objects belong to its maker.
class EngineStates {
 public:
  EngineStates(AttentionKVCache* attention);  // NOLINT: it is nothing but that
  EngineStates(CompositeState* composite);    // NOLINT

  KVState& kv() const { return *kv_; }
  // Null without attention layers.
  AttentionKVCache* attention() const { return attention_; }
  bool is_recurrent() const { return composite_ != nullptr; }
  // All parts together.
  KVTransfer* transfer() const {
    return composite_ != nullptr ? composite_->transfer() : attention_->transfer();
  }
  // Whether a sequence can be forked at each of its positions: no recurrent layers, no windows.
  bool forks_anywhere() const { return forks_anywhere_; }
  bool has_windows() const { return has_windows_; }

  // With the long factors of LongRoPE, or the short ones.
  Status AddSequence(int64_t sequence_id, bool long_rope) const;
  // REQUIRES: the sequence has just been made; it is removed again if this fails.
  // REQUIRES: attention layers.
  Status EnableWindow(int64_t sequence_id, int64_t window, int64_t sinks) const;
  // Switches the sequence's window off, if nothing has slid out of it: then all its tokens are what
  // they would be without one. False if something has, or without memory.
  bool DropWindow(int64_t sequence_id) const noexcept;
  Status SetRetained(int64_t sequence_id, bool retained) const;
  // REQUIRES: the sequence is there and in no forward.
  void RemoveSequence(int64_t sequence_id) const noexcept;
  // With sources that give what is seen behind the loaded tokens.
  Status BeginLoadingForward(std::span<const int64_t> sequence_ids,
                             std::span<const int64_t> lengths,
                             std::span<const LayerLoad> loads) const;
  // The largest position <= `position` at which the sequence can be forked, and to which it can be
  // popped; 0 if there is none, or no such sequence.
  int64_t ForkStart(int64_t sequence_id, int64_t position) const noexcept;
  // The largest such position that is a multiple of `border`.
  int64_t ForkBorder(int64_t sequence_id, int64_t position, int64_t border) const noexcept;
  Result<int64_t> GetSequenceLength(int64_t sequence_id) const;
  int64_t sequence_count() const;
  int64_t retained_sequence_count() const;
  Status CheckInvariants() const;

  // Free pages of KV.
  int64_t pages_free() const;
  int64_t retained_pages() const;
  Result<int64_t> PagesNeeded(std::span<const int64_t> sequence_ids,
                              std::span<const int64_t> lengths) const;
  Result<int64_t> PagesNeededForTree(std::span<const int64_t> sequence_ids,
                                     std::span<const int64_t> lengths,
                                     std::span<const int64_t> parents) const;

  // Slots of states, all recurrent parts together; zeros without any.
  StateSlotCounts slot_counts() const;

 private:
  KVState* kv_;
  AttentionKVCache* attention_;
  CompositeState* composite_;
  bool has_windows_;
  bool forks_anywhere_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_ENGINE_STATES_H_
