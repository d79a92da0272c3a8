// Operations row by row. Included once per path, after simd-inl.h and linear-inl.h; see there. All
// of them give the same bits on every path.

// Tasks take whole rows, so many that a task is worth handing over.
constexpr int64_t kElementsPerTask = 16384;

struct RowTasks {
  int64_t row_count;
  int64_t rows_per_task;
};

QUIRE_INLINE RowTasks CutRows(int64_t row_count, int64_t dim) {
  const int64_t rows = kElementsPerTask / (dim > 0 ? dim : 1);
  return {row_count, rows > 0 ? rows : 1};
}
QUIRE_INLINE int64_t TaskCount(const RowTasks& tasks) {
  return CeilDivide(tasks.row_count, tasks.rows_per_task);
}
QUIRE_INLINE int64_t EndRow(const RowTasks& tasks, int64_t index) {
  const int64_t end = (index + 1) * tasks.rows_per_task;
  return end < tasks.row_count ? end : tasks.row_count;
}

// Up to kLanes numbers; lanes from `count` on are `rest`.
QUIRE_INLINE VF LoadSome(const float* p, int64_t count, float rest = 0) {
  if (count >= kLanes) return Load(p);
  float lanes[kLanes];
  Store(lanes, Set1(rest));
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return Load(lanes);
}
QUIRE_INLINE void StoreSome(float* p, int64_t count, VF v) {
  if (count >= kLanes) {
    Store(p, v);
    return;
  }
  float lanes[kLanes];
  Store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// ---------------------------------------------------------------------------------------- RMS norm

struct RmsNormPlan {
  RowTasks tasks;
  const float* x;
  const float* w;
  float weight_offset;
  float eps;
  int64_t dim;
  float* y;
};

// Squares are summed lane by lane in two turns (element i in lane i mod 32), then over one tree.
static void RmsNormRow(const RmsNormPlan& plan, const float* x, float* y) {
  VF even = Zero();
  VF odd = Zero();
  for (int64_t i = 0; i < plan.dim; i += 2 * kLanes) {
    const VF a = LoadSome(x + i, plan.dim - i);
    even = Fma(a, a, even);
    if (i + kLanes < plan.dim) {
      const VF b = LoadSome(x + i + kLanes, plan.dim - i - kLanes);
      odd = Fma(b, b, odd);
    }
  }
  const float mean = ReduceAdd(Add(even, odd)) / static_cast<float>(plan.dim);
  const VF scale = Set1(1.0F / __builtin_sqrtf(mean + plan.eps));
  const VF offset = Set1(plan.weight_offset);
  for (int64_t i = 0; i < plan.dim; i += kLanes) {
    const int64_t left = plan.dim - i;
    const VF weight = Add(LoadSome(plan.w + i, left), offset);
    StoreSome(y + i, left, Mul(Mul(LoadSome(x + i, left), scale), weight));
  }
}

static void RmsNormTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const RmsNormPlan*>(context);
  const int64_t end = EndRow(plan.tasks, index);
  for (int64_t row = index * plan.tasks.rows_per_task; row < end; ++row) {
    RmsNormRow(plan, plan.x + row * plan.dim, plan.y + row * plan.dim);
  }
}

static void RmsNorm(const float* x, const float* w, float weight_offset, float eps,
                    int64_t row_count, int64_t dim, float* y, ParallelRunner& runner) {
  RmsNormPlan plan{CutRows(row_count, dim), x, w, weight_offset, eps, dim, y};
  runner.Run(TaskCount(plan.tasks), RmsNormTask, &plan);
}

// ------------------------------------------------------------------------------- gated activations

// e^-a for a >= 0, NaN for NaN; both activations and the soft cap are made of it. The product with
// log2(e) is carried in two parts: rounded to one, its error would be as large as a times half an
// ulp.
QUIRE_INLINE VF ExpMinus(VF a) {
  constexpr float kLog2EHigh = 1.4426950216293335F;
  constexpr float kLog2ELow = 1.925963033500011e-8F;
  constexpr float kLn2 = 0.6931471805599453F;
  // Beyond 200 the result is zero; the bound keeps the error term finite. NaN passes, see Min.
  const VF x = Sub(Zero(), Min(Set1(200.0F), a));
  const VF high = Mul(x, Set1(kLog2EHigh));
  const VF low = Fma(x, Set1(kLog2ELow), Fma(x, Set1(kLog2EHigh), Sub(Zero(), high)));
  const VF power = Exp2(high);
  return Fma(power, Mul(low, Set1(kLn2)), power);
}

// g / (1 + e^-z), through e^-|z|, which cannot overflow. z has the sign of g.
QUIRE_INLINE VF TimesSigmoid(VF g, VF z) {
  const VF e = ExpMinus(Max(Sub(Zero(), z), z));
  const VF numerator = Select(NotLess(z, Zero()), g, Mul(g, e));
  return Div(numerator, Add(Set1(1.0F), e));
}

QUIRE_INLINE VF Silu(VF g) { return TimesSigmoid(g, g); }
QUIRE_INLINE VF QuickGelu(VF g) { return TimesSigmoid(g, Mul(g, Set1(1.702F))); }

// g / (1 + e^-2z) with z = sqrt(2 / pi) (g + 0.044715 g^3), which is g / 2 (1 + tanh(z)) without
// the cancellation where z is negative.
QUIRE_INLINE VF GeluTanh(VF g) {
  constexpr float kLinear = 1.5957691216057308F;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.07135481627159999F;  // 0.044715 of it
  return TimesSigmoid(g, Mul(g, Fma(Mul(g, g), Set1(kCubic), Set1(kLinear))));
}

// g P(g) with the normal distribution's P(g) = 1 - Q(|g|) for g >= 0, Q(|g|) otherwise, and Q(a) =
// erfc(a / sqrt(2)) / 2 = e^(-a^2 / 2) R(a). R is t times a polynomial in t = 1 / (1 + 0.3 a),
// fitted for the least relative error over [0, 14.5], which is 0.06 * 2^-24; after it Q is 0.
QUIRE_INLINE VF Gelu(VF g) {
  constexpr float kTerms[] = {0.11968669295310974F, 0.11957181245088577F,  0.11023542284965515F,
                              0.07838966697454453F, 0.0961567834019661F,   -0.07942340523004532F,
                              0.19178442656993866F, -0.22821351885795593F, 0.11243557929992676F,
                              -0.0206234622746706F};
  const VF one = Set1(1.0F);
  // NaN passes, see Min; the bound keeps the error term of the square finite.
  const VF a = Min(Set1(30.0F), Max(Sub(Zero(), g), g));
  const VF t = Div(one, Fma(a, Set1(0.3F), one));
  VF ratio = Set1(kTerms[9]);
  for (int i = 8; i >= 0; --i) ratio = Fma(ratio, t, Set1(kTerms[i]));
  ratio = Mul(ratio, t);
  const VF square = Mul(a, a);
  const VF rest = Fma(a, a, Sub(Zero(), square));
  VF power = ExpMinus(Mul(square, Set1(0.5F)));
  power = Fma(power, Mul(rest, Set1(-0.5F)), power);
  const VF q = Mul(power, ratio);
  return Mul(g, Select(NotLess(g, Zero()), Sub(one, q), q));
}

QUIRE_INLINE VF Relu(VF g) { return Select(NotLess(g, Zero()), g, Zero()); }  // NaN for NaN

struct GatedPlan {
  RowTasks tasks;
  const float* gate_up;
  int64_t dim;
  float* y;
};

template <Activation kActivation>
QUIRE_INLINE VF Activate(VF g) {
  if constexpr (kActivation == Activation::kSilu) return Silu(g);
  if constexpr (kActivation == Activation::kGelu) return Gelu(g);
  if constexpr (kActivation == Activation::kGeluTanh) return GeluTanh(g);
  if constexpr (kActivation == Activation::kQuickGelu) return QuickGelu(g);
  if constexpr (kActivation == Activation::kRelu) return Relu(g);
  return Mul(Relu(g), Relu(g));  // kRelu2
}

template <Activation kActivation>
static void GatedTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const GatedPlan*>(context);
  const int64_t end = EndRow(plan.tasks, index);
  for (int64_t row = index * plan.tasks.rows_per_task; row < end; ++row) {
    const float* const gate = plan.gate_up + row * 2 * plan.dim;
    const float* const up = gate + plan.dim;
    float* const y = plan.y + row * plan.dim;
    for (int64_t i = 0; i < plan.dim; i += kLanes) {
      const int64_t left = plan.dim - i;
      const VF g = LoadSome(gate + i, left);
      StoreSome(y + i, left, Mul(Activate<kActivation>(g), LoadSome(up + i, left)));
    }
  }
}

static ParallelRunner::Task TaskOf(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return GatedTask<Activation::kSilu>;
    case Activation::kGelu:
      return GatedTask<Activation::kGelu>;
    case Activation::kGeluTanh:
      return GatedTask<Activation::kGeluTanh>;
    case Activation::kQuickGelu:
      return GatedTask<Activation::kQuickGelu>;
    case Activation::kRelu:
      return GatedTask<Activation::kRelu>;
    case Activation::kRelu2:
      break;
  }
  return GatedTask<Activation::kRelu2>;
}

static void GatedMul(Activation activation, const float* gate_up, int64_t row_count, int64_t dim,
                     float* y, ParallelRunner& runner) {
  GatedPlan plan{CutRows(row_count, dim), gate_up, dim, y};
  runner.Run(TaskCount(plan.tasks), TaskOf(activation), &plan);
}

// ---------------------------------------------------------------------------------------- soft cap

// (1 - u) / (1 + u) with u = e^-2|t|, and the sign of t; near zero, where 1 - u has few digits, the
// Taylor series, whose next term is below half an ulp there.
QUIRE_INLINE VF Tanh(VF t) {
  constexpr float kNearZero = 0.25F;
  const VF one = Set1(1.0F);
  const VF square = Mul(t, t);
  VF series = Fma(square, Set1(62.0F / 2835), Set1(-17.0F / 315));
  series = Fma(series, square, Set1(2.0F / 15));
  series = Fma(series, square, Set1(-1.0F / 3));
  const VF near_zero = Fma(Mul(series, square), t, t);
  const VF size = Max(Sub(Zero(), t), t);
  const VF u = ExpMinus(Add(size, size));
  const VF far = Div(Sub(one, u), Add(one, u));
  const VF with_sign = Select(NotLess(t, Zero()), far, Sub(Zero(), far));
  return Select(NotLess(size, Set1(kNearZero)), with_sign, near_zero);
}

struct SoftCapPlan {
  RowTasks tasks;
  const float* x;
  float cap;
  int64_t dim;
  float* y;
};

static void SoftCapTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const SoftCapPlan*>(context);
  const int64_t begin = index * plan.tasks.rows_per_task * plan.dim;
  const int64_t end = EndRow(plan.tasks, index) * plan.dim;
  const VF cap = Set1(plan.cap);
  for (int64_t i = begin; i < end; i += kLanes) {
    StoreSome(plan.y + i, end - i, Mul(Tanh(Div(LoadSome(plan.x + i, end - i), cap)), cap));
  }
}

static void SoftCap(const float* x, float cap, int64_t row_count, int64_t dim, float* y,
                    ParallelRunner& runner) {
  SoftCapPlan plan{CutRows(row_count, dim), x, cap, dim, y};
  runner.Run(TaskCount(plan.tasks), SoftCapTask, &plan);
}

// ------------------------------------------------------------------------------------------ gather

struct GatherPlan {
  RowTasks tasks;
  const void* table;
  DType dtype;
  const int32_t* ids;
  int64_t dim;
  float* y;
};

static void GatherTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const GatherPlan*>(context);
  const int64_t end = EndRow(plan.tasks, index);
  for (int64_t row = index * plan.tasks.rows_per_task; row < end; ++row) {
    const int64_t from = plan.ids[row] * plan.dim;
    float* const y = plan.y + row * plan.dim;
    int64_t i = 0;
    for (; i + kLanes <= plan.dim; i += kLanes)
      Store(y + i, LoadAs(plan.dtype, plan.table, from + i));
    for (; i < plan.dim; ++i) y[i] = LoadOneAs(plan.dtype, plan.table, from + i);
  }
}

static void GatherRows(const void* table, DType dtype, const int32_t* ids, int64_t row_count,
                       int64_t dim, float* y, ParallelRunner& runner) {
  GatherPlan plan{CutRows(row_count, dim), table, dtype, ids, dim, y};
  runner.Run(TaskCount(plan.tasks), GatherTask, &plan);
}

// ------------------------------------------------------------------------- a row of logits to draw

// Whole blocks are compared first, so only one is looked through for the index.
static int64_t ArgMax(const float* x, int64_t count) {
  constexpr int64_t kBlock = 64 * kLanes;
  constexpr float kInfinity = __builtin_inff();
  const ScopedFloatEnvironment environment;
  float greatest = -kInfinity;
  int64_t block = 0;
  VF not_finite = Zero();  // in each lane the last that is NaN or +infinity
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    VF best = Set1(-kInfinity);
    for (int64_t i = begin; i < end; i += kLanes) {
      const VF v = LoadSome(x + i, end - i, -kInfinity);
      best = Max(v, best);
      not_finite = Select(NotLess(v, Set1(kInfinity)), v, not_finite);
    }
    const float block_greatest = ReduceMax(best);
    if (block_greatest > greatest) {
      greatest = block_greatest;
      block = begin;
    }
  }
  float lanes[kLanes];
  Store(lanes, not_finite);
  for (const float lane : lanes) {
    if (!(lane < kInfinity)) return -1;
  }
  int64_t index = block;
  while (x[index] != greatest) ++index;
  return index;
}

static void Exp2Scaled(const float* x, int64_t count, float greatest, float scale_log2, float* y) {
  const ScopedFloatEnvironment environment;
  const VF most = Set1(greatest);
  const VF scale = Set1(scale_log2);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    StoreSome(y + i, left, Exp2(Mul(Sub(LoadSome(x + i, left), most), scale)));
  }
}
