// Merging two results of attention over disjoint sets of keys. Included after attention-inl.h,
// whose folds and rows it uses, inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_MERGE_INL_H_
#define QUIRE_KERNELS_CPU_MERGE_INL_H_

// Rows per task: with some tens of heads enough work for the handing over.
constexpr int64_t kMergeRows = 8;
// Output dimensions at a time, in a row of floats on the stack.
constexpr int kMergeDims = 256;

// Weights of the two outputs, with sum 1 but for rounding, and the joint lse; all NaN if an lse is.
struct MergeWeights {
  float first;
  float second;
  float lse;
};

// REQUIRES: neither is -inf.
static MergeWeights WeighOutputs(float lse, float other) {
  const VF common = Max(Set1(lse), Set1(other));
  float a[kLanes];
  float b[kLanes];
  float m[kLanes];
  Store(a, FoldFactor(Set1(lse), common));
  Store(b, FoldFactor(Set1(other), common));
  Store(m, common);
  const float nan_or_zero = (lse + other) * 0.0F;  // a fold factor hides NaN
  const float sum = a[0] + b[0] + nan_or_zero;
  return {a[0] / sum, b[0] / sum, FinishLse(m[0], sum)};
}

// One head of one row in both results.
struct MergePlace {
  int64_t to;
  int64_t from;
};

// The output that stands there is of no keys: it becomes the other one, or zero.
static void ReplaceOutput(const MergeArgs& args, MergePlace place, bool other_is_empty) {
  float row[kMergeDims] = {};
  for (int d = 0; d < args.dim; d += kMergeDims) {
    const int count = args.dim - d < kMergeDims ? args.dim - d : kMergeDims;
    if (!other_is_empty) {
      WidenRow(args.other_o.data, args.other_o.dtype, place.from + d, count, row);
    }
    NarrowRow(row, count, args.o.data, args.o.dtype, place.to + d);
  }
}

static void MixOutputs(const MergeArgs& args, MergePlace place, const MergeWeights& w) {
  float first[kMergeDims] = {};
  float second[kMergeDims] = {};
  for (int d = 0; d < args.dim; d += kMergeDims) {
    const int count = args.dim - d < kMergeDims ? args.dim - d : kMergeDims;
    WidenRow(args.o.data, args.o.dtype, place.to + d, count, first);
    WidenRow(args.other_o.data, args.other_o.dtype, place.from + d, count, second);
    for (int i = 0; i < count; i += kLanes) {
      const VF own = Mul(Load(first + i), Set1(w.first));
      Store(first + i, Canonical(Fma(Load(second + i), Set1(w.second), own)));
    }
    NarrowRow(first, count, args.o.data, args.o.dtype, place.to + d);
  }
}

static void MergeRow(const MergeArgs& args, int64_t row, int64_t head) {
  float* const lse = args.lse + row * args.lse_row_stride + head;
  const float other_lse = args.other_lse[row * args.other_lse_row_stride + head];
  const MergePlace place = {
      .to = row * args.o.row_stride + head * args.o.head_stride,
      .from = row * args.other_o.row_stride + head * args.other_o.head_stride};
  const bool other_is_empty = other_lse == NegativeInfinity();
  if (*lse == NegativeInfinity()) {
    ReplaceOutput(args, place, other_is_empty);
    *lse = other_lse;
  } else if (!other_is_empty) {
    const MergeWeights w = WeighOutputs(*lse, other_lse);
    MixOutputs(args, place, w);
    *lse = w.lse;
  }
}

static void RunMergeRows(void* context, int64_t index, int /*worker*/) {
  const ScopedFloatEnvironment environment;
  const MergeArgs& args = *static_cast<const MergeArgs*>(context);
  const int64_t end = SmallerOf((index + 1) * kMergeRows, args.row_count);
  for (int64_t row = index * kMergeRows; row < end; ++row) {
    for (int64_t head = 0; head < args.head_count; ++head) MergeRow(args, row, head);
  }
}

static void MergeAttention(const MergeArgs& args, ParallelRunner& runner) {
  MergeArgs call = args;
  runner.Run((args.row_count + kMergeRows - 1) / kMergeRows, RunMergeRows, &call);
}

#endif  // QUIRE_KERNELS_CPU_MERGE_INL_H_
