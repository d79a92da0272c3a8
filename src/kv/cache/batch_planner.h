// BatchPlanner: checks which sequences a forward may have and plans their appends.
//
// Planning changes nothing that a call can see: marks of the planning (SequenceControl, BlockTree)
// and what StartBatch of the plan empties. So PagesNeeded plans as BeginForward does, on a plan of
// its own.
#ifndef QUIRE_KV_CACHE_BATCH_PLANNER_H_
#define QUIRE_KV_CACHE_BATCH_PLANNER_H_

#include <cstdint>
#include <span>

#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/forward_plan.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

class BatchPlanner {
 public:
  // Both must outlive it.
  BatchPlanner(const PagedSequences& kv, const WindowBook& windows) : kv_(kv), windows_(windows) {}

  // Members, appends and page counts of a batch; whether there are that many pages is not asked.
  // May throw std::bad_alloc.
  Status Plan(const char* call, std::span<const int64_t> seq_ids,
              std::span<const int64_t> append_lengths, std::span<const LayerLoad> loads,
              ForwardPlan& plan) const;

  // ---- The parts of it that planning trees shares.
  Status Start(const char* call, std::span<const int64_t> seq_ids,
               std::span<const int64_t> append_lengths, ForwardPlan& plan) const;
  // Whether a sequence may get new rows; if so, it counts as a member from now on. `index`: what
  // the table finds for the id.
  bool Take(int32_t index, int64_t append_length, int64_t first_row) const noexcept {
    if (!kv_.control.MayTake(index)) return false;
    if (append_length < 1 || append_length > kv_.options.prefill_chunk_size - first_row)
      return false;
    kv_.control.Name(index);
    return true;
  }
  // Why Take has said no.
  Status Refuse(const char* call, int64_t seq_id, int32_t index, int64_t append_length) const;

 private:
  class LookAhead;  // finds the members of a batch
  // Extra checks for a member that loads KV, has a token tree or pending tokens, or comes near 2^31
  // positions. `load`: of the sequence, or null.
  Status CheckSpecial(const char* call, int64_t seq_id, int32_t index, int64_t append_length,
                      const LayerLoad* load, std::span<GroupAppend> groups) const;

  const PagedSequences& kv_;
  const WindowBook& windows_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_BATCH_PLANNER_H_
