// How one attention call is cut into units of work. Plain code for all paths; nothing in here can
// change a bit of a result: a row's segments are always folded in ascending order, whichever worker
// computes them.
//
// Rows of a kv head are counted in "query rows": plan row * group + query head in the group, where
// plan rows count the query tokens in plan order (not the rows of q, which are in the caller's
// order) and group = query heads per kv head.
//
// A unit is a block of query rows times some kv heads times a range of segments. Groups of units
// follow one another: first the shared spans by depth, then the private rest of each sequence.
// Within a group no two units touch the same (row, head), so they run in parallel. A unit that
// would keep one worker busy while others are idle is not run whole: its segments are computed one
// by one into a bounded arena, in waves, and folded after each wave; the whole units run before the
// pieces of the first wave. A segment of a block of rows of one kv head is never divided.
#ifndef QUIRE_KERNELS_ATTENTION_SCHEDULE_H_
#define QUIRE_KERNELS_ATTENTION_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace quire {

// Query rows (times heads) of a unit, at most. They share one load of a segment's keys and
// values, which with the rows' own state just fits a 1 MiB L2 at head dimension 128 (measured,
// specs: performance section 8).
inline constexpr int64_t kUnitRows = 264;
// From this number of query rows per kv head on, a unit is a block: it has one kv head, and its
// tiles are widened for all rows. Below, it has many heads, whose tiles share what is resolved per
// segment.
inline constexpr int64_t kBlockRowsMin = 32;

// Segments of a unit are counted without those that no row of it sees (windows): number s of a unit
// is segment SegmentAt(s).
struct AttentionUnit {
  int64_t row_begin;  // query rows
  int64_t row_end;
  int64_t segment_begin;
  int64_t segment_end;
  int64_t gap_begin;  // from this number on...
  int64_t gap_count;  // ...this number of segments is left out
  int64_t sequence;   // holds row_begin; its runs are read
  int64_t cost;
  int32_t head_begin;  // kv heads
  int32_t head_end;
  bool shared;  // rows of several sequences, all after the segments

  int64_t SegmentAt(int64_t number) const {
    return number < gap_begin ? number : number + gap_count;
  }
  int64_t row_count() const { return row_end - row_begin; }
  int64_t head_count() const { return head_end - head_begin; }
  int64_t segment_count() const { return segment_end - segment_begin; }
};

// A part of a cut unit in the current wave: the partial state of segment s is slot s -
// segment_begin after `arena`.
struct AttentionWavePart {
  int64_t unit;
  int64_t segment_begin;
  int64_t segment_end;
  size_t arena;  // float32 elements
  bool last;     // the unit is complete with this wave
};

struct AttentionPiece {
  int64_t part;
  int64_t segment_begin;
  int64_t segment_end;
};

class AttentionSchedule {
 public:
  // Bytes of scratch for the schedule's own arrays and the arena, for any plan of at most this
  // size.
  static size_t ScratchBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count,
                             int64_t sequence_count, int worker_count);

  // REQUIRES: `scratch` holds ScratchBytes(), is 64-byte aligned; it and `args` live as long as the
  // schedule.
  AttentionSchedule(const AttentionArgs& args, int worker_count, std::byte* scratch) noexcept;

  // Goes on to the next group of units; false after the last. All units of the group before must
  // be done.
  bool NextGroup() noexcept;
  // In the group of private rests: its units finish their rows.
  bool final_group() const { return final_group_; }
  std::span<const AttentionUnit> whole_units() const {
    return {units_ + cut_count_, static_cast<size_t>(unit_count_ - cut_count_)};
  }
  const AttentionUnit& unit(int64_t index) const { return units_[index]; }

  // Goes on to the next wave of the group's cut units; false after the last.
  bool NextWave() noexcept;
  std::span<const AttentionPiece> pieces() const {
    return {pieces_, static_cast<size_t>(piece_count_)};
  }
  std::span<const AttentionWavePart> parts() const {
    return {parts_, static_cast<size_t>(part_count_)};
  }

  float* arena() const { return arena_; }
  // Floats of the partial state of one segment: o [head][row][v_dim], m [head][row], l [head][row].
  size_t SlotFloats(const AttentionUnit& unit) const {
    return static_cast<size_t>(unit.row_count() * unit.head_count()) * (v_dim_ + 2);
  }

  int64_t group_size() const { return group_size_; }
  int64_t total_rows() const { return row_begin_[sequences_.size()] * group_size_; }
  // First plan row of a sequence; [sequence_count] is the number of plan rows.
  const int64_t* plan_row_begin() const { return row_begin_; }
  // The sequence that holds a query row.
  int64_t SequenceOf(int64_t query_row) const noexcept;

 private:
  void AddSharedUnits(const SharedSpan& span) noexcept;
  void AddPrivateUnits(int64_t sequence) noexcept;
  void AddUnits(AttentionUnit unit) noexcept;
  int64_t SegmentsSeenBy(int64_t sequence, int64_t query_row) const noexcept;
  void LeaveOutHidden(AttentionUnit* unit) const noexcept;
  void ChooseBlockRows(int64_t query_rows) noexcept;
  void DivideHeads() noexcept;
  void ChooseCuts() noexcept;
  void CutUnits(int64_t total, int64_t parts) noexcept;
  bool EndTogether(int64_t total) noexcept;
  int64_t GiveBack(int64_t count) noexcept;
  void CutParts(int64_t segments) noexcept;
  bool PiecesEndTogether(int64_t length) noexcept;
  void GiveToFirstFree(int64_t cost) noexcept;

  const AttentionArgs& args_;
  std::span<const AttentionSequence> sequences_;
  std::span<const SharedSpan> shared_;
  int64_t kv_heads_;
  int64_t group_size_;
  size_t v_dim_;
  bool has_windows_;
  int64_t worker_count_;

  int64_t* row_begin_;        // [sequence_count + 1]
  AttentionUnit* units_;      // cut units first, then whole ones, the costliest first
  AttentionPiece* pieces_;    // of the current wave
  AttentionWavePart* parts_;  // of the current wave
  int64_t* loads_;            // [worker], of simulations
  float* arena_;

  size_t next_shared_ = 0;
  bool final_group_ = false;
  int64_t block_rows_ = kUnitRows;
  int64_t unit_count_ = 0;
  int64_t cut_count_ = 0;
  bool is_first_wave_ = true;  // of the group
  int64_t wave_unit_ = 0;      // where the next wave begins
  int64_t wave_segment_ = 0;
  int64_t piece_count_ = 0;
  int64_t part_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KERNELS_ATTENTION_SCHEDULE_H_
