// Attention over paged keys and values. docs/exactness.md has the arithmetic; attention_schedule.h
// how the work is cut. Included after simd-inl.h, inside a path's namespace and target region; the
// including file includes before it: base/float_environment.h, kernels/attention_schedule.h,
// kernels/backend.h, kernels/kv_slot.h, kernels/segment_tiles.h, tensor/half.h.
//
// Two loop nests compute a segment for a unit's rows, from the same chains (chain-inl.h):
// attention_block-inl.h and attention_decode-inl.h.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_INL_H_

#include "kernels/cpu/attention_block-inl.h"
#include "kernels/cpu/attention_decode-inl.h"

// -------------------------------------------------------------------------------------------------
// units

// Whether a unit's heads are computed one after the other, all tiles of a segment at once. Keys
// that are rotated want their angles, which are those of all heads, to be loaded once. Where pairs
// are widened by loops of one tile, few rows lose 5 % by it (AVX2 on Zen 5).
static bool RunsByHead(const AttentionCall& call, const AttentionUnit& unit) {
  const int64_t rows = unit.row_count();
  if (rows >= kBlockRowsMin || OnTiles(call, unit)) return true;
  const bool widens = QueryKind(call, unit) == WeightKind::kRoundedF32;
  return rows >= kHeadRowsMin && !RotatesKeys(call, unit) && (kTilesAtOnce > 1 || !widens);
}

// Segments [begin, end) of a unit.
static void RunSegments(const AttentionCall& call, const AttentionUnit& unit, int64_t begin,
                        int64_t end, SegmentSink sink, WorkerSpace& space) {
  if (begin >= end) return;
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const auto run = RunsByHead(call, unit) ? BlockSegment : DecodeSegment;
  const auto resolve = [&](int64_t s, SegmentTiles* to) {
    const int64_t segment = unit.SegmentAt(s);
    ResolveSegment(call.args->pages, sequence, segment, PositionsEnd(call, unit, sequence, segment),
                   to);
  };
  SegmentTiles* const tiles = space.tiles;
  SegmentTiles* const next = space.tiles + 1;
  LoadQueries(call, unit, KeyDType(call, unit), space);
  resolve(begin, tiles);
  for (int64_t s = begin; s < end; ++s) {
    const bool has_next = s + 1 < end;
    if (has_next) resolve(s + 1, next);
    space.is_first_segment = s == begin;
    run(call, unit, unit.SegmentAt(s), has_next, sink, space);
    if (has_next) *tiles = *next;
    if (sink.slot != nullptr) sink.slot += call.schedule->SlotFloats(unit);
  }
}

// A unit from its first to its last segment. Only rows that also see shared segments need states
// that outlive the task.
static void RunWholeUnit(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionUnit& unit = schedule.whole_units()[static_cast<size_t>(index)];
  WorkerSpace space = SpaceOf(call, worker);
  const bool is_alone = schedule.final_group() && unit.segment_begin == 0;
  const int64_t count = unit.row_count() * unit.head_count();
  const UnitStates states =
      is_alone ? UnitStates{StatesIn(space.states, count, call.layout().v_dim()), unit.row_count()}
               : SharedStates(call, unit);
  if (unit.segment_begin == 0) ClearUnitStates(call, unit, states);
  RunSegments(call, unit, unit.segment_begin, unit.segment_end, {states, nullptr}, space);
  if (schedule.final_group()) FinishRows(call, unit, states, 0, count, space);
}

// Some segments of a cut unit, each into its slot of the arena.
static void RunPiece(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionPiece& piece = schedule.pieces()[static_cast<size_t>(index)];
  const AttentionWavePart& part = schedule.parts()[static_cast<size_t>(piece.part)];
  const AttentionUnit& unit = schedule.unit(part.unit);
  WorkerSpace space = SpaceOf(call, worker);
  float* slot =
      schedule.arena() + part.arena +
      static_cast<size_t>(piece.segment_begin - part.segment_begin) * schedule.SlotFloats(unit);
  RunSegments(call, unit, piece.segment_begin, piece.segment_end, {{}, slot}, space);
}

// The whole units, the costliest first, then the pieces of a wave, which fill up what those leave.
static void RunUnitOrPiece(void* context, int64_t index, int worker) {
  const int64_t whole = static_cast<const AttentionCall*>(context)->whole_units;
  if (index < whole) return RunWholeUnit(context, index, worker);
  RunPiece(context, index - whole, worker);
}

// Tasks per cut unit for the folds after a wave.
constexpr int64_t kFoldTasks = 8;

// A share of the rows of a wave's part: folds their segments in order, and finishes them after the
// last wave.
static void RunFold(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionWavePart& part = schedule.parts()[static_cast<size_t>(index / kFoldTasks)];
  const AttentionUnit& unit = schedule.unit(part.unit);
  const int v_dim = call.layout().v_dim();
  const int64_t rows = unit.row_count();
  const int64_t count = rows * unit.head_count();
  const int64_t begin = count * (index % kFoldTasks) / kFoldTasks;
  const int64_t end = count * (index % kFoldTasks + 1) / kFoldTasks;
  const UnitStates states = SharedStates(call, unit);
  for (int64_t i = begin; i < end;) {
    const int64_t stop = SmallerOf(end, (i / rows + 1) * rows);
    const RowStates into = StatesAt(states.first, i / rows * states.head_rows + i % rows, v_dim);
    if (part.segment_begin == 0) ClearStates(into, stop - i, v_dim);
    float* slot = schedule.arena() + part.arena;
    for (int64_t s = part.segment_begin; s < part.segment_end; ++s) {
      FoldRows(into, StatesAt(StatesIn(slot, count, v_dim), i, v_dim), stop - i, v_dim);
      slot += schedule.SlotFloats(unit);
    }
    i = stop;
  }
  if (!schedule.final_group() || !part.last) return;
  WorkerSpace space = SpaceOf(call, worker);
  FinishRows(call, unit, states, begin, end, space);
}

// -------------------------------------------------------------------------------------------------
// entry points

static size_t StateBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count) {
  return Align64(static_cast<size_t>(row_count * num_qo_heads) *
                 static_cast<size_t>(layout.v_dim() + 2) * sizeof(float));
}

static size_t AttentionScratchBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count,
                                    int64_t sequence_count, int worker_count) {
  return AttentionSchedule::ScratchBytes(layout, num_qo_heads, row_count, sequence_count,
                                         worker_count) +
         StateBytes(layout, num_qo_heads, row_count) +
         WorkerBytes(layout) * static_cast<size_t>(worker_count);
}

static void Attention(const AttentionArgs& args, ParallelRunner& runner) {
  const KVLayout& layout = args.pages.layout;
  const int workers = runner.worker_count();
  auto* scratch = static_cast<std::byte*>(args.scratch);
  AttentionSchedule schedule(args, workers, scratch);
  scratch += AttentionSchedule::ScratchBytes(layout, args.num_qo_heads, args.row_count,
                                             static_cast<int64_t>(args.sequences.size()), workers);
  AttentionCall call = {
      .args = &args,
      .schedule = &schedule,
      .places = TilePlaces(args.pages),
      .stream = StreamPrefetchOfCpu(),
      .p_weights = WeightKindOf(layout.v_dtype()),
      .scales_keys = IsQuantised(layout.dtype),
      .scales_values = IsQuantised(layout.v_dtype()),
      .states = StatesIn(reinterpret_cast<float*>(scratch), args.row_count * args.num_qo_heads,
                         layout.v_dim()),
      .workers = scratch + StateBytes(layout, args.num_qo_heads, args.row_count),
      .worker_bytes = WorkerBytes(layout),
      .whole_units = 0,
  };
  while (schedule.NextGroup()) {
    call.whole_units = static_cast<int64_t>(schedule.whole_units().size());
    while (schedule.NextWave()) {
      const auto pieces = static_cast<int64_t>(schedule.pieces().size());
      runner.Run(call.whole_units + pieces, RunUnitOrPiece, &call);
      call.whole_units = 0;
      runner.Run(static_cast<int64_t>(schedule.parts().size()) * kFoldTasks, RunFold, &call);
    }
    if (call.whole_units > 0) runner.Run(call.whole_units, RunWholeUnit, &call);
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_INL_H_
