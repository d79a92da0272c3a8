// Kernels of recurrent layers, and their arguments. The same rules as for the operations of
// backend.h hold: pure functions that allocate nothing and cannot fail.
//
// There is one arithmetic, token by token in float32: a token's result is a function of the state
// before it and of its own inputs, bit for bit, on every path, however the tokens are cut into
// calls and pieces.
#ifndef QUIRE_KERNELS_RECURRENCE_H_
#define QUIRE_KERNELS_RECURRENCE_H_

#include <cstdint>
#include <span>

#include "quire/seams.h"
#include "quire/tensor.h"

namespace quire {

// Consecutive tokens of one sequence. The state before them is read from `from` (null: zeros), the
// one after them is left in `to`; these may not overlap.
struct RecurrencePiece {
  int64_t first_row = 0;  // of the inputs and outputs
  int64_t row_count = 0;  // at least 1
  const float* from = nullptr;
  float* to = nullptr;
};
// Pieces [first_piece, first_piece + piece_count), one after the other.
struct RecurrenceSequence {
  int64_t first_piece = 0;
  int64_t piece_count = 0;
};
struct RecurrenceBatch {
  std::span<const RecurrenceSequence> sequences;
  const RecurrencePiece* pieces = nullptr;
};

// A state S [head][key_dim][value_dim]. For each token and head, with its decay a, key k, value v:
//   S = a S + k v^T                      (linear attention; Mamba-2)
//   S = a S;  S += k (b (v - S^T k))^T   (gated delta rule, with its b)
//   o = scale S^T q
// Per element of S: the product a S is rounded, then one fma per rank-one term. S^T k and S^T q:
// one chain of fma from zero, ascending over the key's dimensions.
struct MatrixStateShape {
  int64_t head_count = 0;
  int64_t key_head_count = 0;  // divides head_count: head h reads key and query h / (heads / this)
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool delta_rule = false;

  int64_t state_size() const { return head_count * key_dim * value_dim; }
  // A token's inputs, one after the other: k, v, a and, with the delta rule, b.
  int64_t value_offset() const { return key_head_count * key_dim; }
  int64_t decay_offset() const { return value_offset() + head_count * value_dim; }
  int64_t beta_offset() const { return decay_offset() + head_count; }
  int64_t input_size() const { return beta_offset() + (delta_rule ? head_count : 0); }
};
struct MatrixStateArgs {
  MatrixStateShape shape;
  RecurrenceBatch batch;
  const float* inputs = nullptr;  // [row][input_size]
  const float* q = nullptr;       // [row][key head][key_dim]; null: only the states are wanted
  float scale = 1;
  float* o = nullptr;  // [row][head][value_dim]
};

// A depthwise causal convolution over the last `width` tokens. The state is the inputs of the last
// width - 1 tokens, oldest first. y[c] = bias[c] + sum over j of weight[c][j] x[t - width + 1 +
// j][c], one chain of fma from the bias, j ascending; then, with `silu`, y / (1 + e^-y).
struct ConvolutionShape {
  int64_t channel_count = 0;
  int64_t width = 0;  // at least 2

  int64_t state_size() const { return (width - 1) * channel_count; }
};
struct ConvolutionArgs {
  ConvolutionShape shape;
  RecurrenceBatch batch;
  const float* x = nullptr;       // [row][channel]
  const float* weight = nullptr;  // [channel][width]; null: only the states are wanted
  const float* bias = nullptr;    // [channel] or null
  bool silu = false;
  float* y = nullptr;  // [row][channel]
};

// Mamba-2's step as a matrix state: v = dt x, a = e^(dt A) of each head.
struct DiscretizeArgs {
  int64_t row_count = 0;
  int64_t head_count = 0;
  int64_t head_dim = 0;
  const float* x = nullptr;   // [row][head][head_dim]
  const float* dt = nullptr;  // [row][head]
  const float* a = nullptr;   // [head]: A
  float* v = nullptr;         // [head][head_dim] of row r at v + r * stride
  float* decay = nullptr;     // [head] of row r at decay + r * stride
  int64_t stride = 0;
};
// o += d x, each head with its d.
struct SkipArgs {
  int64_t row_count = 0;
  int64_t head_count = 0;
  int64_t head_dim = 0;
  const float* x = nullptr;  // [row][head][head_dim]
  const float* d = nullptr;  // [head]
  float* o = nullptr;        // [row][head][head_dim]
};

// Numbers of any of the three float types, widened or rounded to nearest even.
struct ConvertRowsArgs {
  int64_t row_count = 0;
  int64_t size = 0;  // per row
  const void* from = nullptr;
  DType from_dtype = DType::kF32;
  int64_t from_stride = 0;  // in elements
  void* to = nullptr;
  DType to_dtype = DType::kF32;
  int64_t to_stride = 0;
};

struct RecurrenceKernels {
  void (*advance_matrix)(const MatrixStateArgs&, ParallelRunner&);
  void (*convolve)(const ConvolutionArgs&, ParallelRunner&);
  void (*discretize)(const DiscretizeArgs&, ParallelRunner&);
  void (*add_skip)(const SkipArgs&, ParallelRunner&);
  void (*convert_rows)(const ConvertRowsArgs&, ParallelRunner&);
};

}  // namespace quire

#endif  // QUIRE_KERNELS_RECURRENCE_H_
