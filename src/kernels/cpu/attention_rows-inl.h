// Rows of attention in and out: queries are loaded, rotated and laid side by side, finished rows
// are written. Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_ROWS_INL_H_

#include "kernels/cpu/attention_call-inl.h"
#include "kernels/cpu/rotary-inl.h"

// Walks the query rows of a unit: which row of q and o, which query head of the group.
class RowWalker {
 public:
  RowWalker(const AttentionCall& call, int64_t query_row, int64_t sequence)
      : call_(call),
        sequence_(sequence),
        plan_row_(query_row / call.schedule->group_size()),
        head_in_group_(query_row % call.schedule->group_size()) {
    FindSequence();
  }
  const AttentionSequence& sequence() const {
    return call_.args->sequences[static_cast<size_t>(sequence_)];
  }
  int64_t row() const { return sequence().first_row + row_in_sequence(); }
  RowView view() const { return ViewOf(*call_.args, sequence(), row_in_sequence()); }
  int64_t head(int64_t kv_head) const {
    return kv_head * call_.schedule->group_size() + head_in_group_;
  }
  // REQUIRES: there is a next row.
  void Next() {
    if (++head_in_group_ < call_.schedule->group_size()) return;
    head_in_group_ = 0;
    ++plan_row_;
    is_behind_ = true;
  }
  // To be called after Next, before the row is looked at.
  void Settle() {
    if (is_behind_) FindSequence();
  }

 private:
  int64_t row_in_sequence() const {
    return plan_row_ - call_.schedule->plan_row_begin()[sequence_];
  }
  void FindSequence() {
    while (plan_row_ >= call_.schedule->plan_row_begin()[sequence_ + 1]) ++sequence_;
    is_behind_ = false;
  }

  const AttentionCall& call_;
  int64_t sequence_;
  int64_t plan_row_;
  int64_t head_in_group_;
  bool is_behind_ = false;
};

static void WidenRow(const void* from, DType dtype, int64_t offset, int count, float* to) {
  int i = 0;
  if (dtype == DType::kF32) {
    __builtin_memcpy(to, static_cast<const float*>(from) + offset,
                     static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* half = static_cast<const uint16_t*>(from) + offset;
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadBits16AsHigh(half + i));
    for (; i < count; ++i) to[i] = Bf16ToF32(half[i]);
  } else {
    for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadF16(half + i));
    for (; i < count; ++i) to[i] = F16ToF32(half[i]);
  }
}

static void NarrowRow(const float* from, int count, void* to, DType dtype, int64_t offset) {
  int i = 0;
  if (dtype == DType::kF32) {
    __builtin_memcpy(static_cast<float*>(to) + offset, from,
                     static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* half = static_cast<uint16_t*>(to) + offset;
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= count; i += kLanes) StoreBF16(half + i, Load(from + i));
    for (; i < count; ++i) half[i] = F32ToBf16(from[i]);
  } else {
    for (; i + kLanes <= count; i += kLanes) StoreF16(half + i, Load(from + i));
    for (; i < count; ++i) half[i] = F32ToF16(from[i]);
  }
}

// Puts the steps of a row `stride` steps apart.
template <typename Step>
static void SpreadSteps(const std::byte* row, int64_t steps, int64_t stride, std::byte* to) {
  for (int64_t d = 0; d < steps; ++d) {
    __builtin_memcpy(to + d * stride * static_cast<int64_t>(sizeof(Step)),
                     row + d * static_cast<int64_t>(sizeof(Step)), sizeof(Step));
  }
}

// The same for four rows, whose steps lie side by side after it.
static void SpreadFourRows(const std::byte* rows, size_t row_bytes, int64_t steps, int64_t stride,
                           std::byte* to) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  int64_t d = 0;
  for (; d + 4 <= steps; d += 4) {
    Four in[4];
    QUIRE_UNROLL
    for (int r = 0; r < 4; ++r) {
      __builtin_memcpy(&in[r], rows + static_cast<size_t>(r) * row_bytes + d * 4, sizeof(Four));
    }
    const Four low01 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
    const Four low23 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
    const Four high01 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
    const Four high23 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
    const Four out[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                         __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                         __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                         __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      __builtin_memcpy(to + (d + i) * stride * 4, &out[i], sizeof(Four));
    }
  }
  for (int r = 0; r < 4; ++r) {
    SpreadSteps<uint32_t>(rows + static_cast<size_t>(r) * row_bytes + d * 4, steps - d, stride,
                          to + d * stride * 4 + r * 4);
  }
}

// Rows [first, first + row_count) of the `count` rows of one head, whose weights lie at `to` for
// chains of `steps` steps. The rows of a group stand side by side, so that a chain's step finds
// them at fixed distances. REQUIRES: all are of one group.
static void StoreQueries(const std::byte* rows, int64_t row_count, size_t row_bytes, int64_t steps,
                         int64_t first, int64_t count, std::byte* to) {
  const int64_t together = GroupRows(count);
  const int64_t group_first = first / together * together;
  const int64_t group = SmallerOf(together, count - group_first);
  const size_t step_bytes = row_bytes / static_cast<size_t>(steps);
  std::byte* const at = to + static_cast<size_t>(group_first) * row_bytes +
                        static_cast<size_t>(first - group_first) * step_bytes;
  if (group == 1) {
    __builtin_memcpy(at, rows, row_bytes);
  } else if (step_bytes == sizeof(uint32_t) && row_count == 4) {
    SpreadFourRows(rows, row_bytes, steps, group, at);
  } else {
    for (int64_t r = 0; r < row_count; ++r) {
      const std::byte* const row = rows + static_cast<size_t>(r) * row_bytes;
      std::byte* const to_row = at + static_cast<size_t>(r) * step_bytes;
      if (step_bytes == sizeof(uint64_t)) {
        SpreadSteps<uint64_t>(row, steps, group, to_row);
      } else {
        SpreadSteps<uint32_t>(row, steps, group, to_row);
      }
    }
  }
}

// One row as products of tiles take it.
static void StoreQueryRow(const AttentionCall& call, const AttentionUnit& unit,
                          const std::byte* weights, std::byte* to) {
#if defined(QUIRE_SIMD_TILES)
  if (OnByteTiles(call, unit)) return SplitQuery(weights, call.layout().k_dim(), to);
#endif
  __builtin_memcpy(to, weights, QueryRowBytes(call, unit));
}

// Calls f(begin, count) for the groups in which StoreQueries puts rows.
template <typename F>
static void ForEachGroup(int64_t rows, const F& f) {
  if (rows == 0) return;
  const int64_t together = GroupRows(rows);
  for (int64_t r = 0; r < rows; r += together) {
    f(r, static_cast<int>(SmallerOf(together, rows - r)));
  }
}

// The rows of one of the unit's heads: rotated, as weights for `keys`.
static void LoadHead(const AttentionCall& call, const AttentionUnit& unit, int64_t h,
                     const RotaryRows& rotary, DType keys, UnitQueries to, WorkerSpace& space) {
  const HeadRows& q = call.args->q;
  const int k_dim = call.layout().k_dim();
  const WeightKind kind = QueryKind(call, unit);
  const size_t row_bytes = QueryRowBytes(call, unit);
  const int64_t rows = unit.row_count();
  const int64_t together = GroupRows(rows);
  const bool by_row = OnTiles(call, unit);
  int64_t waiting = 0;  // rows in space.weights
  RowWalker walker(call, unit.row_begin, unit.sequence);
  for (int64_t r = 0; r < rows; ++r, walker.Next()) {
    walker.Settle();
    WidenRow(q.data, q.dtype,
             walker.row() * q.row_stride + walker.head(unit.head_begin + h) * q.head_stride,
             call.layout().qk_head_dim, space.row);
    RotateRow(space.row, rotary, walker.row());
    std::byte* const weights = space.weights + static_cast<size_t>(waiting) * row_bytes;
    if (kind == WeightKind::kI16) {
      to.scales[h * rows + r] =
          QuantiseWeights(space.row, KVLayout::RoundUp(k_dim, kLanes), MostI16(k_dim), weights);
    } else {
      for (int i = 0; i < k_dim; i += kLanes) StoreWeights(kind, weights, i, Load(space.row + i));
    }
    if (by_row) {
      StoreQueryRow(call, unit, weights,
                    to.weights + static_cast<size_t>(h * rows + r) * row_bytes);
      continue;
    }
    if (++waiting < kRowsWaiting && (r + 1) % together != 0 && r + 1 < rows) continue;
    StoreQueries(space.weights, waiting, row_bytes, ScoreSteps(call, keys), r + 1 - waiting, rows,
                 to.weights + static_cast<size_t>(h * rows) * row_bytes);
    waiting = 0;
  }
}

// Query rows of the unit and what each row sees.
static void LoadQueries(const AttentionCall& call, const AttentionUnit& unit, DType keys,
                        WorkerSpace& space) {
  const AttentionArgs& args = *call.args;
  for (int i = call.layout().qk_head_dim; i < call.layout().k_dim() + kLanes; ++i)
    space.row[i] = 0.0F;
  space.has_sink_q = false;
  RowWalker walker(call, unit.row_begin, unit.sequence);
  for (int64_t r = 0; r < unit.row_count(); ++r, walker.Next()) {
    walker.Settle();
    RowView& view = space.views[r];
    view = walker.view();
    if (unit.shared) view.end = INT64_MAX;
    if (args.sink_angles == nullptr) view.sink_end = 0;
    // A group's rows are scored together, so a row that has slid gives all of them such a query.
    space.has_sink_q |= view.sink_end > 0;
  }
  RotaryRows sink_rotary = args.rotary;
  sink_rotary.angles = args.sink_angles;
  for (int64_t h = 0; h < unit.head_count(); ++h) {
    LoadHead(call, unit, h, args.rotary, keys, space.queries(), space);
    if (space.has_sink_q) {
      LoadHead(call, unit, h, sink_rotary, keys, space.sink_queries(), space);
    }
  }
}

// Folds the learned logit of a head into a row's finished state, as a segment with l = 1 and o = 0.
static void FoldHeadSink(float logit_log2, const RowStates& state, int v_dim, WorkerSpace& space) {
  float m = logit_log2;
  float l = 1.0F;
  __builtin_memset(space.segment, 0, static_cast<size_t>(v_dim) * sizeof(float));
  FoldRows(state, {space.segment, &m, &l}, 1, v_dim);
}

// Writes o and lse of rows [begin, end) of the unit's heads x rows.
static void FinishRows(const AttentionCall& call, const AttentionUnit& unit, UnitStates states,
                       int64_t begin, int64_t end, WorkerSpace& space) {
  const AttentionArgs& args = *call.args;
  const int v_dim = call.layout().v_dim();
  for (int64_t i = begin; i < end;) {
    const int64_t h = i / unit.row_count();
    const int64_t stop = SmallerOf(end, (h + 1) * unit.row_count());
    const int64_t first = unit.row_begin + i % unit.row_count();
    RowWalker walker(call, first, call.schedule->SequenceOf(first));
    for (; i < stop; ++i, walker.Next()) {
      walker.Settle();
      const RowStates state =
          StatesAt(states.first, h * states.head_rows + i % unit.row_count(), v_dim);
      const int64_t head = walker.head(unit.head_begin + h);
      if (args.head_sinks_log2 != nullptr)
        FoldHeadSink(args.head_sinks_log2[head], state, v_dim, space);
      FinishRow(state.o, *state.l, v_dim, space.row);
      NarrowRow(space.row, call.layout().v_head_dim, args.o.data, args.o.dtype,
                walker.row() * args.o.row_stride + head * args.o.head_stride);
      if (args.lse != nullptr) {
        args.lse[walker.row() * args.lse_row_stride + head] = FinishLse(*state.m, *state.l);
      }
    }
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_ROWS_INL_H_
