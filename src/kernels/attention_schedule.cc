#include "kernels/attention_schedule.h"

#include <algorithm>

#include "base/round_up.h"
#include "kernels/row_view.h"

namespace quire {
namespace {

// Units per worker that a group should have, so that workers end at about the same time.
constexpr int64_t kUnitsPerWorker = 4;
// Smaller blocks would spend their time on loading keys and values.
constexpr int64_t kSmallestBlock = 72;
// Blocks are a multiple of the rows that the kernels hold in registers (2, 4, 8 or 12), but for the
// last of a sequence.
constexpr int64_t kRowsTogether = 24;
static_assert(kSmallestBlock % kRowsTogether == 0 && kUnitRows % kRowsTogether == 0);
// Query rows of a unit that reads all heads in memory order: their scores (1 KiB each) stay in L2.
constexpr int64_t kDecodeUnitRows = 128;
// The arena holds this many full units' partial states per worker: with 32 query heads of dimension
// 128 that is 32 segments and 0.5 MiB, enough that the barrier between waves does not show.
constexpr int64_t kArenaUnitsPerWorker = 4;
constexpr int64_t kPiecesPerWorker = 16;
constexpr int64_t kPieceSegmentsMax = 8;
constexpr size_t kAlignment = 64;

size_t Aligned(size_t bytes) { return RoundUp(bytes, kAlignment); }

// Sizes of the arrays in scratch, in the order in which they lie there.
struct ScratchParts {
  size_t row_begin, units, pieces, parts, arena;

  ScratchParts(const KVLayout& layout, int num_qo_heads, int64_t row_count, int64_t sequence_count,
               int worker_count) {
    const int64_t group_size = num_qo_heads / layout.num_kv_heads;
    // Per kv head, a sequence (or span) of n query rows has at most n / kSmallestBlock + 1 units.
    const int64_t unit_count =
        layout.num_kv_heads * (row_count * group_size / kSmallestBlock + sequence_count + 1);
    const int64_t piece_count = kPiecesPerWorker * worker_count;
    row_begin = Aligned(static_cast<size_t>(sequence_count + 1) * sizeof(int64_t));
    units = Aligned(static_cast<size_t>(unit_count) * sizeof(AttentionUnit));
    pieces = Aligned(static_cast<size_t>(piece_count) * sizeof(AttentionPiece));
    parts = Aligned(static_cast<size_t>(piece_count) * sizeof(AttentionWavePart));
    arena = Aligned(static_cast<size_t>(kArenaUnitsPerWorker * worker_count * kUnitRows) *
                    (layout.v_dim() + 2) * sizeof(float));
  }
};

template <typename T>
T* Take(std::byte** scratch, size_t bytes) {
  T* begin = reinterpret_cast<T*>(*scratch);
  *scratch += bytes;
  return begin;
}

}  // namespace

size_t AttentionSchedule::ScratchBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count,
                                       int64_t sequence_count, int worker_count) {
  const ScratchParts parts(layout, num_qo_heads, row_count, sequence_count, worker_count);
  return parts.row_begin + parts.units + parts.pieces + parts.parts + parts.arena;
}

AttentionSchedule::AttentionSchedule(const AttentionArgs& args, int worker_count,
                                     std::byte* scratch) noexcept
    : args_(args),
      sequences_(args.sequences),
      shared_(args.shared),
      kv_heads_(args.pages.layout.num_kv_heads),
      group_size_(args.num_qo_heads / args.pages.layout.num_kv_heads),
      v_dim_(static_cast<size_t>(args.pages.layout.v_dim())),
      has_windows_(args.layer_window != kNoWindow ||
                   std::any_of(args.sequences.begin(), args.sequences.end(),
                               [](const AttentionSequence& sequence) {
                                 return sequence.window != SequenceWindow{};
                               })),
      worker_count_(worker_count) {
  const ScratchParts parts(args.pages.layout, args.num_qo_heads, args.row_count,
                           static_cast<int64_t>(sequences_.size()), worker_count);
  row_begin_ = Take<int64_t>(&scratch, parts.row_begin);
  units_ = Take<AttentionUnit>(&scratch, parts.units);
  pieces_ = Take<AttentionPiece>(&scratch, parts.pieces);
  parts_ = Take<AttentionWavePart>(&scratch, parts.parts);
  arena_ = Take<float>(&scratch, parts.arena);
  row_begin_[0] = 0;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    row_begin_[i + 1] = row_begin_[i] + sequences_[i].row_count;
  }
}

int64_t AttentionSchedule::SequenceOf(int64_t query_row) const noexcept {
  const int64_t* begin = row_begin_;
  const int64_t* end = begin + sequences_.size() + 1;
  return std::upper_bound(begin, end, query_row / group_size_) - begin - 1;
}

bool AttentionSchedule::NextGroup() noexcept {
  if (final_group_) return false;
  unit_count_ = 0;
  if (next_shared_ < shared_.size()) {
    // Spans that begin at the same segment are of different sequences.
    const int64_t segment = shared_[next_shared_].segment_begin;
    size_t end = next_shared_;
    int64_t query_rows = 0;
    for (; end < shared_.size() && shared_[end].segment_begin == segment; ++end) {
      const SharedSpan& span = shared_[end];
      query_rows += (row_begin_[span.first + span.count] - row_begin_[span.first]) * group_size_;
    }
    ChooseBlockRows(query_rows);
    for (; next_shared_ < end; ++next_shared_) AddSharedUnits(shared_[next_shared_]);
  } else {
    final_group_ = true;
    ChooseBlockRows(total_rows());
    for (size_t i = 0; i < sequences_.size(); ++i) AddPrivateUnits(static_cast<int64_t>(i));
  }
  ChooseCuts();
  return true;
}

void AttentionSchedule::ChooseBlockRows(int64_t query_rows) noexcept {
  const int64_t wanted = CeilDiv(query_rows * kv_heads_, kUnitsPerWorker * worker_count_);
  block_rows_ = std::clamp(RoundUp(wanted, kRowsTogether), kSmallestBlock, kUnitRows);
}

void AttentionSchedule::AddSharedUnits(const SharedSpan& span) noexcept {
  AttentionUnit unit = {};
  unit.row_begin = row_begin_[span.first] * group_size_;
  unit.row_end = row_begin_[span.first + span.count] * group_size_;
  unit.segment_begin = span.segment_begin;
  unit.segment_end = span.segment_end;
  unit.sequence = span.first;
  unit.shared = true;
  AddUnits(unit);
}

void AttentionSchedule::AddPrivateUnits(int64_t sequence) noexcept {
  AttentionUnit unit = {};
  unit.row_begin = row_begin_[sequence] * group_size_;
  unit.row_end = row_begin_[sequence + 1] * group_size_;
  unit.segment_begin = sequences_[static_cast<size_t>(sequence)].private_segment;
  unit.sequence = sequence;
  AddUnits(unit);
}

int64_t AttentionSchedule::SegmentsSeenBy(int64_t sequence, int64_t query_row) const noexcept {
  const AttentionSequence& of = sequences_[static_cast<size_t>(sequence)];
  const int64_t row = query_row / group_size_ - row_begin_[sequence];
  // Depths of nodes are in no order, but the rows of a tree end within a few tiles of each other.
  const int64_t seen = of.tree != nullptr ? LastPosition(of) + 1 : args_.SeenEnd(of, row);
  return CeilDiv(std::max<int64_t>(seen, 0), kSegmentPositions);
}

// A row sees a head, [.., head_end), and a tail, [tail_begin, ..), of which either may be all. What
// lies between all heads and all tails is left out, in whole segments. Both ends of a sequence's
// rows answer for those between.
void AttentionSchedule::LeaveOutHidden(AttentionUnit* unit) const noexcept {
  int64_t head_end = 0;
  int64_t tail_begin = INT64_MAX;
  const auto look_at = [&](const RowView& view) {
    const HiddenRange hidden = HiddenOf(view);
    head_end = std::max(head_end, hidden.begin);
    tail_begin = std::min(tail_begin, hidden.end);
  };
  const int64_t first = unit->row_begin / group_size_;
  const int64_t last = (unit->row_end - 1) / group_size_;
  for (int64_t s = unit->sequence; s < std::ssize(sequences_) && row_begin_[s] <= last; ++s) {
    if (row_begin_[s] == row_begin_[s + 1]) continue;
    const AttentionSequence& sequence = sequences_[static_cast<size_t>(s)];
    if (sequence.tree != nullptr) {
      for (const int64_t position : {FirstPosition(sequence), LastPosition(sequence)})
        look_at(ViewOfRow(sequence.window, args_.layer_window, position));
      continue;
    }
    look_at(ViewOf(args_, sequence, std::max(first - row_begin_[s], int64_t{0})));
    look_at(ViewOf(args_, sequence, std::min(last, row_begin_[s + 1] - 1) - row_begin_[s]));
  }
  const int64_t begin = std::max(unit->segment_begin, CeilDiv(head_end, kSegmentPositions));
  const int64_t end = std::min(unit->segment_end, tail_begin / kSegmentPositions);
  if (begin >= end) return;
  unit->gap_begin = begin;
  unit->gap_count = end - begin;
  unit->segment_end -= unit->gap_count;
}

// Cuts the rows of `unit` into blocks and the kv heads into ranges.
void AttentionSchedule::AddUnits(AttentionUnit unit) noexcept {
  const int64_t rows = unit.row_count();
  if (rows == 0) return;
  const bool blocks = rows >= kBlockRowsMin;
  const int64_t heads = blocks ? 1 : std::clamp(kDecodeUnitRows / rows, int64_t{1}, kv_heads_);
  // Blocks of about equal size.
  const int64_t block_rows =
      blocks ? RoundUp(CeilDiv(rows, CeilDiv(rows, block_rows_)), kRowsTogether) : rows;
  const int64_t end = unit.row_end;
  const int64_t shared_end = unit.segment_end;
  for (; unit.row_begin < end; unit.row_begin += block_rows) {
    unit.row_end = std::min(unit.row_begin + block_rows, end);
    unit.gap_begin = unit.gap_count = 0;
    if (unit.shared) {
      unit.sequence = SequenceOf(unit.row_begin);
      unit.segment_end = shared_end;
    } else {
      unit.segment_end =
          std::max(unit.segment_begin, SegmentsSeenBy(unit.sequence, unit.row_end - 1));
    }
    if (has_windows_) LeaveOutHidden(&unit);
    for (int64_t head = 0; head < kv_heads_; head += heads) {
      unit.head_begin = static_cast<int32_t>(head);
      unit.head_end = static_cast<int32_t>(std::min(head + heads, kv_heads_));
      // Loading a segment costs about as much as computing with a few rows.
      unit.cost =
          (unit.row_count() + 4) * unit.head_count() * (unit.segment_end - unit.segment_begin);
      units_[unit_count_++] = unit;
    }
  }
}

void AttentionSchedule::ChooseCuts() noexcept {
  int64_t total = 0;
  for (int64_t i = 0; i < unit_count_; ++i) total += units_[i].cost;
  const int64_t parts = kUnitsPerWorker * worker_count_;
  const auto is_cut = [&](const AttentionUnit& unit) {
    return worker_count_ > 1 && unit.segment_end - unit.segment_begin > 1 &&
           unit.cost * parts > total;
  };
  cut_count_ = std::partition(units_, units_ + unit_count_, is_cut) - units_;
  std::sort(units_ + cut_count_, units_ + unit_count_,
            [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  int64_t cut_segments = 0;
  for (int64_t i = 0; i < cut_count_; ++i) {
    cut_segments += units_[i].segment_end - units_[i].segment_begin;
  }
  piece_segments_ = std::clamp(CeilDiv(cut_segments, parts), int64_t{1}, kPieceSegmentsMax);
  wave_unit_ = 0;
  wave_segment_ = cut_count_ > 0 ? units_[0].segment_begin : 0;
}

bool AttentionSchedule::NextWave() noexcept {
  const int64_t pieces_max = kPiecesPerWorker * worker_count_;
  const size_t arena_floats =
      static_cast<size_t>(kArenaUnitsPerWorker * worker_count_ * kUnitRows) * (v_dim_ + 2);
  size_t used = 0;
  piece_count_ = 0;
  part_count_ = 0;
  while (wave_unit_ < cut_count_ && piece_count_ < pieces_max) {
    const AttentionUnit& unit = units_[wave_unit_];
    const size_t slot = SlotFloats(unit);
    const int64_t room = static_cast<int64_t>((arena_floats - used) / slot);
    if (room == 0) break;
    AttentionWavePart* part = &parts_[part_count_];
    *part = {wave_unit_, wave_segment_, wave_segment_, used, false};
    const int64_t end = std::min(unit.segment_end, wave_segment_ + room);
    while (wave_segment_ < end && piece_count_ < pieces_max) {
      const int64_t piece_end = std::min(wave_segment_ + piece_segments_, end);
      pieces_[piece_count_++] = {part_count_, wave_segment_, piece_end};
      wave_segment_ = piece_end;
    }
    part->segment_end = wave_segment_;
    part->last = wave_segment_ == unit.segment_end;
    used += static_cast<size_t>(wave_segment_ - part->segment_begin) * slot;
    ++part_count_;
    if (!part->last) continue;
    if (++wave_unit_ < cut_count_) wave_segment_ = units_[wave_unit_].segment_begin;
  }
  return piece_count_ > 0;
}

}  // namespace quire
