#include "kv/recurrent/state_history_options.h"

#include <algorithm>

namespace quire {
namespace {

// The most that one call adds, of states or of blocks of inputs: each sequence has one at its end,
// and `more_max` before it. Sequences share the rows: the first of those takes two of them (one
// before the border, one behind it), each further one an interval. So the small ones first, as many
// as there may be.
int64_t AddedMax(const StateHistoryOptions& options, int64_t rows_max, int64_t more_max) {
  if (options.keep.interval == 0) return options.max_num_sequences * (more_max + 1);
  const int64_t ends = std::min(options.max_num_sequences, rows_max);
  if (more_max == 0) return ends;
  const int64_t firsts = std::min(ends, rows_max - ends);
  const int64_t others = (rows_max - ends - firsts) / options.keep.interval;
  return ends + firsts + std::min(firsts * (more_max - 1), others);
}

}  // namespace

int64_t StateSlotCount(const StateHistoryOptions& options) {
  if (options.slot_count != 0) return options.slot_count + options.max_tree_slots;
  // Before the forward: history and checkpoints.
  const int64_t checkpoints = options.keep.recent + options.keep.thinned;
  return options.max_num_sequences * (options.keep.history + checkpoints) +
         AddedMax(options, options.max_rows, checkpoints) + options.max_loads +
         options.max_retained_slots + options.max_tree_slots;
}

int64_t InputBlockCount(const StateHistoryOptions& options) {
  if (options.keep.interval == 0) return 0;
  // Inputs since the oldest recent checkpoint lie in one block more than there are such. A commit
  // of trees adds those of the accepted nodes.
  const int64_t for_inputs =
      options.max_num_sequences * (options.keep.recent + 1) +
      AddedMax(options, std::max(options.max_rows, options.max_tree_slots), options.keep.recent);
  if (options.max_tree_slots == 0) return for_inputs;
  // Each tree's last block may hold a single node.
  return for_inputs + options.max_tree_slots / options.keep.interval +
         std::min(options.max_num_sequences, options.max_tree_slots);
}

}  // namespace quire
