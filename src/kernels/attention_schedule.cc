#include "kernels/attention_schedule.h"

#include <algorithm>
#include <functional>

#include "base/round_up.h"
#include "kernels/row_view.h"

namespace quire {
namespace {

// Units per worker that a group should have, so that workers end at about the same time; and those
// that make it sure, where some worker would end a tenth of its time after the mean.
constexpr int64_t kUnitsPerWorker = 4;
constexpr int64_t kFineUnitsPerWorker = 12;
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

// Whether the longest worker takes at most a tenth longer than the mean of all.
bool IsBalanced(int64_t longest, int64_t total, int64_t worker_count) {
  return 10 * longest * worker_count <= 11 * total;
}

// Loading a segment costs about as much as computing with a few rows.
int64_t CostOf(const AttentionUnit& unit) {
  return (unit.row_count() + 4) * unit.head_count() * unit.segment_count();
}

// Ranges of about equal size into which the heads of a unit are divided, at most `divisor`.
int64_t HeadsOfRange(const AttentionUnit& unit, int64_t divisor) {
  return CeilDiv(unit.head_count(), divisor);
}
int64_t HeadRanges(const AttentionUnit& unit, int64_t divisor) {
  return CeilDiv(unit.head_count(), HeadsOfRange(unit, divisor));
}

// Sizes of the arrays in scratch, in the order in which they lie there.
struct ScratchParts {
  size_t row_begin, units, pieces, parts, loads, arena;

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
    loads = Aligned(static_cast<size_t>(worker_count) * sizeof(int64_t));
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
  return parts.row_begin + parts.units + parts.pieces + parts.parts + parts.loads + parts.arena;
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
  loads_ = Take<int64_t>(&scratch, parts.loads);
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
  DivideHeads();
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
      unit.cost = CostOf(unit);
      units_[unit_count_++] = unit;
    }
  }
}

// Fewer heads per unit where there are too few segments to keep all workers busy. Where there are
// enough, a unit reads the heads of a tile one after the other, as they lie in memory.
void AttentionSchedule::DivideHeads() noexcept {
  if (worker_count_ == 1) return;
  int64_t divisor = 1;
  for (bool more = true; more; divisor *= 2) {
    int64_t items = 0;  // segments of the units that come out
    more = false;
    for (int64_t i = 0; i < unit_count_; ++i) {
      items += units_[i].segment_count() * HeadRanges(units_[i], divisor);
      more = more || divisor < units_[i].head_count();
    }
    if (IsBalanced(CeilDiv(items, worker_count_), items, worker_count_)) break;
  }
  if (divisor == 1) return;
  int64_t to = 0;
  for (int64_t i = 0; i < unit_count_; ++i) to += HeadRanges(units_[i], divisor);
  const int64_t count = to;
  // From the last one on: what comes out of a unit never lies before it.
  for (int64_t i = unit_count_; i-- > 0;) {
    const AttentionUnit unit = units_[i];
    const auto heads = static_cast<int32_t>(HeadsOfRange(unit, divisor));
    for (int64_t range = HeadRanges(unit, divisor); range-- > 0;) {
      AttentionUnit& part = units_[--to];
      part = unit;
      part.head_begin = unit.head_begin + static_cast<int32_t>(range) * heads;
      part.head_end = std::min(part.head_begin + heads, unit.head_end);
      part.cost = CostOf(part);
    }
  }
  unit_count_ = count;
}

void AttentionSchedule::ChooseCuts() noexcept {
  int64_t total = 0;
  for (int64_t i = 0; i < unit_count_; ++i) total += units_[i].cost;
  CutUnits(total, kUnitsPerWorker * worker_count_);
  if (!EndTogether(total)) CutUnits(total, kFineUnitsPerWorker * worker_count_);
  is_first_wave_ = true;
  wave_unit_ = 0;
  wave_segment_ = cut_count_ > 0 ? units_[0].segment_begin : 0;
}

// Cuts the units that are more than one of `parts` equal parts of the group.
void AttentionSchedule::CutUnits(int64_t total, int64_t parts) noexcept {
  const auto is_cut = [&](const AttentionUnit& unit) {
    return worker_count_ > 1 && unit.segment_count() > 1 && unit.cost * parts > total;
  };
  cut_count_ = std::partition(units_, units_ + unit_count_, is_cut) - units_;
  std::sort(units_ + cut_count_, units_ + unit_count_,
            [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
}

// Whether the whole units balance what the cut ones leave, which is divided equally.
bool AttentionSchedule::EndTogether(int64_t total) noexcept {
  int64_t cut = 0;
  for (int64_t i = 0; i < cut_count_; ++i) cut += units_[i].cost;
  std::fill_n(loads_, worker_count_, CeilDiv(cut, worker_count_));
  for (const AttentionUnit& unit : whole_units()) GiveToFirstFree(unit.cost);
  return IsBalanced(*std::max_element(loads_, loads_ + worker_count_), total, worker_count_);
}

// Simulates how a runner gives out tasks. `loads_` is a heap, the least load first.
void AttentionSchedule::GiveToFirstFree(int64_t cost) noexcept {
  int64_t* const end = loads_ + worker_count_;
  std::pop_heap(loads_, end, std::greater<>());
  end[-1] += cost;
  std::push_heap(loads_, end, std::greater<>());
}

bool AttentionSchedule::NextWave() noexcept {
  // A part has a piece that is not full: half of all, if all the others are.
  const int64_t parts_max = kPiecesPerWorker * worker_count_ / 2;
  const int64_t segments_max = parts_max * kPieceSegmentsMax;
  const size_t arena_floats =
      static_cast<size_t>(kArenaUnitsPerWorker * worker_count_ * kUnitRows) * (v_dim_ + 2);
  size_t used = 0;
  int64_t segments = 0;
  part_count_ = 0;
  while (wave_unit_ < cut_count_ && part_count_ < parts_max) {
    const AttentionUnit& unit = units_[wave_unit_];
    const size_t slot = SlotFloats(unit);
    const int64_t room =
        std::min(static_cast<int64_t>((arena_floats - used) / slot), segments_max - segments);
    if (room == 0) break;
    const int64_t end = std::min(unit.segment_end, wave_segment_ + room);
    const int64_t count = end - wave_segment_;
    parts_[part_count_++] = {wave_unit_, wave_segment_, end, used, end == unit.segment_end};
    used += static_cast<size_t>(count) * slot;
    segments += count;
    wave_segment_ = end;
    if (end < unit.segment_end) continue;
    if (++wave_unit_ < cut_count_) wave_segment_ = units_[wave_unit_].segment_begin;
  }
  if (wave_unit_ < cut_count_) segments -= GiveBack(segments % worker_count_);
  CutParts(segments);
  return piece_count_ > 0;
}

// The last segments go into the next wave, so that this one keeps all workers busy to its end: it
// has more than that, four full slots for each worker.
int64_t AttentionSchedule::GiveBack(int64_t count) noexcept {
  for (int64_t left = count; left > 0;) {
    AttentionWavePart& part = parts_[part_count_ - 1];
    const int64_t taken = std::min(left, part.segment_end - part.segment_begin);
    part.segment_end -= taken;
    part.last = false;
    left -= taken;
    wave_unit_ = part.unit;
    wave_segment_ = part.segment_end;
    if (part.segment_begin == part.segment_end) --part_count_;
  }
  return count;
}

// Into the longest pieces that keep the workers equally busy.
void AttentionSchedule::CutParts(int64_t segments) noexcept {
  const auto count_of = [&](int64_t length) {
    int64_t count = 0;
    for (const AttentionWavePart& part : parts()) {
      count += CeilDiv(part.segment_end - part.segment_begin, length);
    }
    return count;
  };
  int64_t length =
      std::clamp(CeilDiv(segments, kUnitsPerWorker * worker_count_), int64_t{1}, kPieceSegmentsMax);
  while (length > 1 && count_of(length - 1) <= kPiecesPerWorker * worker_count_ &&
         !PiecesEndTogether(length)) {
    --length;
  }
  piece_count_ = 0;
  for (int64_t p = 0; p < part_count_; ++p) {
    for (int64_t s = parts_[p].segment_begin; s < parts_[p].segment_end; s += length) {
      pieces_[piece_count_++] = {p, s, std::min(s + length, parts_[p].segment_end)};
    }
  }
  is_first_wave_ = false;
}

// Whether pieces of this length balance the wave, with the whole units before those of the first.
bool AttentionSchedule::PiecesEndTogether(int64_t length) noexcept {
  std::fill_n(loads_, worker_count_, 0);
  int64_t total = 0;
  const auto give = [&](int64_t cost) {
    total += cost;
    GiveToFirstFree(cost);
  };
  if (is_first_wave_) {
    for (const AttentionUnit& unit : whole_units()) give(unit.cost);
  }
  for (const AttentionWavePart& part : parts()) {
    const int64_t cost = units_[part.unit].cost / units_[part.unit].segment_count();
    for (int64_t s = part.segment_begin; s < part.segment_end; s += length) {
      give(cost * std::min(length, part.segment_end - s));
    }
  }
  return IsBalanced(*std::max_element(loads_, loads_ + worker_count_), total, worker_count_);
}

}  // namespace quire
