// Options of a StateHistory, and how many slots and blocks it has for them.
#ifndef QUIRE_KV_RECURRENT_STATE_HISTORY_OPTIONS_H_
#define QUIRE_KV_RECURRENT_STATE_HISTORY_OPTIONS_H_

#include <cstdint>

#include "kv/recurrent/state_tracks.h"

namespace quire {

struct StateHistoryOptions {
  int64_t max_num_sequences = 0;
  int64_t max_retained_slots = 0;
  int64_t slot_count = 0;      // 0: so many that every forward finds room
  int64_t max_tree_size = 0;   // nodes of a sequence
  int64_t max_tree_slots = 0;  // nodes of all sequences; slots and blocks beside the others
  int64_t max_rows = 0;        // of a forward, where checkpoints have an interval
  int64_t max_loads = 0;       // members of a forward that load
  KeepPolicy keep;
};

// Slots for states, and blocks for inputs: as many as every forward finds room in.
int64_t StateSlotCount(const StateHistoryOptions& options);
int64_t InputBlockCount(const StateHistoryOptions& options);

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_STATE_HISTORY_OPTIONS_H_
