// Recurrent layers. Included once per path, after elementwise-inl.h; see there. All of it gives the
// same bits on every path: columns of a state and channels are independent of each other, so lanes
// are a choice of order between chains.

// Columns of a state that one task takes through all tokens: four chains hide the latency of fma,
// and 64 columns of 128 keys lie in the L1.
constexpr int kColumnVectors = 4;
constexpr int64_t kColumnBlock = kColumnVectors * kLanes;

// ------------------------------------------------------------------------------------ matrix state

struct MatrixPlan {
  const MatrixStateArgs* args;
  int64_t column_blocks;
};

// Columns [column, column + count) of one head; count is kVectors * kLanes, or less with one
// vector.
struct MatrixColumns {
  int64_t head;
  int64_t key_head;
  int64_t column;
  int64_t count;
};

template <int kVectors>
QUIRE_INLINE void LoadColumns(const float* p, int64_t count, VF (&v)[kVectors]) {
  if constexpr (kVectors == 1) {
    v[0] = LoadSome(p, count);
  } else {
    QUIRE_UNROLL
    for (int u = 0; u < kVectors; ++u) v[u] = Load(p + u * kLanes);
  }
}
template <int kVectors>
QUIRE_INLINE void StoreColumns(float* p, int64_t count, const VF (&v)[kVectors]) {
  if constexpr (kVectors == 1) {
    StoreSome(p, count, v[0]);
  } else {
    QUIRE_UNROLL
    for (int u = 0; u < kVectors; ++u) Store(p + u * kLanes, v[u]);
  }
}

// What the token adds along its key: v, or with the delta rule b (v - (a S)^T k).
template <int kVectors>
QUIRE_INLINE void CorrectValue(const MatrixStateShape& shape, const MatrixColumns& at,
                               const float* from, const float* input, VF decay, VF (&v)[kVectors]) {
  VF seen[kVectors];
  QUIRE_UNROLL
  for (int u = 0; u < kVectors; ++u) seen[u] = Zero();
  const float* const key = input + at.key_head * shape.key_dim;
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    VF s[kVectors];
    LoadColumns<kVectors>(from + i * shape.value_dim, at.count, s);
    QUIRE_UNROLL
    for (int u = 0; u < kVectors; ++u) seen[u] = Fma(Mul(decay, s[u]), Set1(key[i]), seen[u]);
  }
  const VF beta = Set1(input[shape.beta_offset() + at.head]);
  QUIRE_UNROLL
  for (int u = 0; u < kVectors; ++u) v[u] = Mul(beta, Sub(v[u], seen[u]));
}

// One token: the state is read from `from` and written to `to`, which may be the same.
template <int kVectors>
QUIRE_INLINE void AdvanceToken(const MatrixStateArgs& args, const MatrixColumns& at, int64_t row,
                               const float* from, float* to) {
  const MatrixStateShape& shape = args.shape;
  const float* const input = args.inputs + row * shape.input_size();
  const float* const key = input + at.key_head * shape.key_dim;
  const VF decay = Set1(input[shape.decay_offset() + at.head]);
  VF v[kVectors];
  LoadColumns<kVectors>(input + shape.value_offset() + at.head * shape.value_dim + at.column,
                        at.count, v);
  if (shape.delta_rule) CorrectValue<kVectors>(shape, at, from, input, decay, v);
  const float* const query =
      args.q == nullptr ? nullptr
                        : args.q + (row * shape.key_head_count + at.key_head) * shape.key_dim;
  VF o[kVectors];
  QUIRE_UNROLL
  for (int u = 0; u < kVectors; ++u) o[u] = Zero();
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    VF s[kVectors];
    LoadColumns<kVectors>(from + i * shape.value_dim, at.count, s);
    const VF k = Set1(key[i]);
    QUIRE_UNROLL
    for (int u = 0; u < kVectors; ++u) s[u] = Fma(k, v[u], Mul(decay, s[u]));
    StoreColumns<kVectors>(to + i * shape.value_dim, at.count, s);
    if (query == nullptr) continue;
    const VF q = Set1(query[i]);
    QUIRE_UNROLL
    for (int u = 0; u < kVectors; ++u) o[u] = Fma(q, s[u], o[u]);
  }
  if (query == nullptr) return;
  const VF scale = Set1(args.scale);
  QUIRE_UNROLL
  for (int u = 0; u < kVectors; ++u) o[u] = Mul(scale, o[u]);
  StoreColumns<kVectors>(args.o + (row * shape.head_count + at.head) * shape.value_dim + at.column,
                         at.count, o);
}

template <int kVectors>
static void AdvanceColumns(const MatrixStateArgs& args, const RecurrenceSequence& sequence,
                           const MatrixColumns& at) {
  const MatrixStateShape& shape = args.shape;
  const int64_t offset = at.head * shape.key_dim * shape.value_dim + at.column;
  for (int64_t p = 0; p < sequence.piece_count; ++p) {
    const RecurrencePiece& piece = args.batch.pieces[sequence.first_piece + p];
    float* const to = piece.to + offset;
    const float* from = to;
    if (piece.from != nullptr) {
      from = piece.from + offset;
    } else {
      for (int64_t i = 0; i < shape.key_dim; ++i) {
        for (int64_t c = 0; c < at.count; ++c) to[i * shape.value_dim + c] = 0.0F;
      }
    }
    for (int64_t r = 0; r < piece.row_count; ++r) {
      AdvanceToken<kVectors>(args, at, piece.first_row + r, from, to);
      from = to;
    }
  }
}

static void AdvanceMatrixTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const MatrixPlan*>(context);
  const MatrixStateArgs& args = *plan.args;
  const MatrixStateShape& shape = args.shape;
  const int64_t head = index / plan.column_blocks % shape.head_count;
  const RecurrenceSequence& sequence =
      args.batch.sequences[static_cast<size_t>(index / plan.column_blocks / shape.head_count)];
  MatrixColumns at{head, head / (shape.head_count / shape.key_head_count),
                   index % plan.column_blocks * kColumnBlock, kColumnBlock};
  const int64_t left = shape.value_dim - at.column;
  if (left >= kColumnBlock) {
    AdvanceColumns<kColumnVectors>(args, sequence, at);
    return;
  }
  const int64_t end = at.column + left;
  for (; at.column < end; at.column += kLanes) {
    at.count = end - at.column < kLanes ? end - at.column : kLanes;
    AdvanceColumns<1>(args, sequence, at);
  }
}

static void AdvanceMatrix(const MatrixStateArgs& args, ParallelRunner& runner) {
  MatrixPlan plan{&args, CeilDivide(args.shape.value_dim, kColumnBlock)};
  const auto sequences = static_cast<int64_t>(args.batch.sequences.size());
  runner.Run(sequences * args.shape.head_count * plan.column_blocks, AdvanceMatrixTask, &plan);
}

// ------------------------------------------------------------------------------------- convolution

// Channels of one task: rows of x are read `width` times over, so they should stay in the L1.
constexpr int64_t kChannelBlock = 256;

struct ConvolutionPlan {
  const ConvolutionArgs* args;
  int64_t channel_blocks;
};

// The input `back` tokens before row r of the piece (back 0: of r itself), or null before the first
// token of all.
QUIRE_INLINE const float* InputBefore(const ConvolutionArgs& args, const RecurrencePiece& piece,
                                      int64_t r, int64_t back) {
  const ConvolutionShape& shape = args.shape;
  if (back <= r) return args.x + (piece.first_row + r - back) * shape.channel_count;
  if (piece.from == nullptr) return nullptr;
  return piece.from + (shape.width - 1 - (back - r)) * shape.channel_count;
}

QUIRE_INLINE void ConvolveVector(const ConvolutionArgs& args, const RecurrencePiece& piece,
                                 int64_t r, int64_t channel, int64_t count) {
  const ConvolutionShape& shape = args.shape;
  VF y = args.bias == nullptr ? Zero() : LoadSome(args.bias + channel, count);
  for (int64_t j = 0; j < shape.width; ++j) {
    const float* const x = InputBefore(args, piece, r, shape.width - 1 - j);
    float weights[kLanes] = {};
    for (int64_t c = 0; c < count; ++c) weights[c] = args.weight[(channel + c) * shape.width + j];
    y = Fma(Load(weights), x == nullptr ? Zero() : LoadSome(x + channel, count), y);
  }
  if (args.silu) y = Silu(y);
  StoreSome(args.y + (piece.first_row + r) * shape.channel_count + channel, count, y);
}

// The last width - 1 inputs after the piece's last row.
QUIRE_INLINE void KeepInputs(const ConvolutionArgs& args, const RecurrencePiece& piece,
                             int64_t channel, int64_t count) {
  const ConvolutionShape& shape = args.shape;
  for (int64_t j = 0; j + 1 < shape.width; ++j) {
    const float* const x = InputBefore(args, piece, piece.row_count - 1, shape.width - 2 - j);
    float* const to = piece.to + j * shape.channel_count + channel;
    for (int64_t c = 0; c < count; ++c) to[c] = x == nullptr ? 0.0F : x[channel + c];
  }
}

static void ConvolveTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const ConvolutionPlan*>(context);
  const ConvolutionArgs& args = *plan.args;
  const RecurrenceSequence& sequence =
      args.batch.sequences[static_cast<size_t>(index / plan.channel_blocks)];
  const int64_t first = index % plan.channel_blocks * kChannelBlock;
  const int64_t left = args.shape.channel_count - first;
  const int64_t end = first + (left < kChannelBlock ? left : kChannelBlock);
  for (int64_t p = 0; p < sequence.piece_count; ++p) {
    const RecurrencePiece& piece = args.batch.pieces[sequence.first_piece + p];
    for (int64_t r = 0; args.weight != nullptr && r < piece.row_count; ++r) {
      for (int64_t c = first; c < end; c += kLanes) {
        ConvolveVector(args, piece, r, c, end - c < kLanes ? end - c : kLanes);
      }
    }
    KeepInputs(args, piece, first, end - first);
  }
}

static void Convolve(const ConvolutionArgs& args, ParallelRunner& runner) {
  ConvolutionPlan plan{&args, CeilDivide(args.shape.channel_count, kChannelBlock)};
  const auto sequences = static_cast<int64_t>(args.batch.sequences.size());
  runner.Run(sequences * plan.channel_blocks, ConvolveTask, &plan);
}

// ------------------------------------------------------------------------------- steps row by row

template <typename Args>
struct RowPlan {
  RowTasks tasks;
  const Args* args;
};

// Runs kRow(args, row) for all rows; `size` is a row's number of elements.
template <typename Args, void (*kRow)(const Args&, int64_t)>
static void RunRows(const Args& args, int64_t size, ParallelRunner& runner) {
  RowPlan<Args> plan{CutRows(args.row_count, size), &args};
  runner.Run(
      TaskCount(plan.tasks),
      [](void* context, int64_t index, int) {
        const ScopedFloatEnvironment environment;
        const auto& rows = *static_cast<const RowPlan<Args>*>(context);
        const int64_t end = EndRow(rows.tasks, index);
        for (int64_t row = index * rows.tasks.rows_per_task; row < end; ++row)
          kRow(*rows.args, row);
      },
      &plan);
}

// e^x for any x; NaN for NaN.
QUIRE_INLINE VF Exp(VF x) {
  const VF minus = Sub(Zero(), x);
  const VF e = ExpMinus(Max(minus, x));
  return Select(NotLess(Zero(), x), e, Div(Set1(1.0F), e));
}

static void DiscretizeRow(const DiscretizeArgs& args, int64_t row) {
  const float* const dt = args.dt + row * args.head_count;
  for (int64_t h = 0; h < args.head_count; h += kLanes) {
    const int64_t left = args.head_count - h;
    StoreSome(args.decay + row * args.stride + h, left,
              Exp(Mul(LoadSome(dt + h, left), LoadSome(args.a + h, left))));
  }
  for (int64_t h = 0; h < args.head_count; ++h) {
    const float* const x = args.x + (row * args.head_count + h) * args.head_dim;
    float* const v = args.v + row * args.stride + h * args.head_dim;
    for (int64_t i = 0; i < args.head_dim; i += kLanes) {
      const int64_t left = args.head_dim - i;
      StoreSome(v + i, left, Mul(Set1(dt[h]), LoadSome(x + i, left)));
    }
  }
}

static void Discretize(const DiscretizeArgs& args, ParallelRunner& runner) {
  RunRows<DiscretizeArgs, DiscretizeRow>(args, args.head_count * args.head_dim, runner);
}

static void AddSkipRow(const SkipArgs& args, int64_t row) {
  for (int64_t h = 0; h < args.head_count; ++h) {
    const int64_t at = (row * args.head_count + h) * args.head_dim;
    for (int64_t i = 0; i < args.head_dim; i += kLanes) {
      const int64_t left = args.head_dim - i;
      StoreSome(
          args.o + at + i, left,
          Fma(Set1(args.d[h]), LoadSome(args.x + at + i, left), LoadSome(args.o + at + i, left)));
    }
  }
}

static void AddSkip(const SkipArgs& args, ParallelRunner& runner) {
  RunRows<SkipArgs, AddSkipRow>(args, args.head_count * args.head_dim, runner);
}

static void ConvertRow(const ConvertRowsArgs& args, int64_t row) {
  const int64_t from = row * args.from_stride;
  const int64_t to = row * args.to_stride;
  int64_t i = 0;
  for (; i + kLanes <= args.size; i += kLanes) {
    StoreAs(args.to_dtype, args.to, to + i, LoadAs(args.from_dtype, args.from, from + i));
  }
  for (; i < args.size; ++i) {
    const float value = LoadOneAs(args.from_dtype, args.from, from + i);
    if (args.to_dtype == DType::kF32) {
      static_cast<float*>(args.to)[to + i] = value;
    } else {
      static_cast<uint16_t*>(args.to)[to + i] =
          args.to_dtype == DType::kF16 ? F32ToF16(value) : F32ToBf16(value);
    }
  }
}

static void ConvertRows(const ConvertRowsArgs& args, ParallelRunner& runner) {
  RunRows<ConvertRowsArgs, ConvertRow>(args, args.size, runner);
}

static constexpr RecurrenceKernels kRecurrence = {AdvanceMatrix, Convolve, Discretize, AddSkip,
                                                  ConvertRows};
