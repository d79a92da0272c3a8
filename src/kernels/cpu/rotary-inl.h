// Rotary embedding in float32: x' = fma(x, cos, y * -sin), y' = fma(y, cos, x * sin), the same bits
// for one number and for 16. Included after simd-inl.h, inside a path's namespace and target
// region.
#ifndef QUIRE_KERNELS_CPU_ROTARY_INL_H_
#define QUIRE_KERNELS_CPU_ROTARY_INL_H_

QUIRE_INLINE void RotatePair(float* x, float* y, float c, float s) {
  const float x0 = *x;
  const float y0 = *y;
  *x = __builtin_fmaf(x0, c, y0 * (0.0F - s));
  *y = __builtin_fmaf(y0, c, x0 * s);
}

QUIRE_INLINE void RotatePair(VF* x, VF* y, VF c, VF s) {
  const VF x0 = *x;
  const VF y0 = *y;
  *x = Fma(x0, c, Mul(y0, Sub(Zero(), s)));
  *y = Fma(y0, c, Mul(x0, s));
}

// Index of the two dimensions of pair i.
QUIRE_INLINE int PairFirst(int i, bool interleaved) { return interleaved ? 2 * i : i; }
QUIRE_INLINE int PairSecond(int i, int rotary_dim, bool interleaved) {
  return interleaved ? 2 * i + 1 : i + rotary_dim / 2;
}

// One head of row `index`. Without angles the row is rotated already.
static void RotateRow(float* row, const RotaryRows& rotary, int64_t index) {
  if (rotary.rotary_dim == 0 || rotary.angles == nullptr) return;
  const auto [cos, sin] = rotary.angles[index];
  row += rotary.first_dim;
  const bool interleaved = rotary.interleaved;
  const int half = rotary.rotary_dim / 2;
  int i = 0;
  if (!interleaved) {
    for (; i + kLanes <= half; i += kLanes) {
      VF x = Load(row + i);
      VF y = Load(row + half + i);
      RotatePair(&x, &y, Load(cos + i), Load(sin + i));
      Store(row + i, x);
      Store(row + half + i, y);
    }
  }
  for (; i < half; ++i) {
    RotatePair(row + PairFirst(i, interleaved), row + PairSecond(i, rotary.rotary_dim, interleaved),
               cos[i], sin[i]);
  }
}

#endif  // QUIRE_KERNELS_CPU_ROTARY_INL_H_
