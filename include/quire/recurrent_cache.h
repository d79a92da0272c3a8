// RecurrentCache: recurrent layers that Quire computes itself: linear attention with decay, the
// gated delta rule, Mamba-2's state space, and the short causal convolutions before them. Their
// states live here and can be taken back to earlier positions.
//
// One forward, in calls:
//   BeginForward(ids, lengths);
//   for every layer: the one call of its kind;
//   EndForward();
//
// Exact: the output row of a token depends, bit for bit, on the tokens before it in its sequence
// and on its own inputs (and on nothing else, the kernel path included), not on the batch, the cut
// of the prompt, forks, pops or the number of threads. There is one arithmetic, token by token in
// float32 (docs/recurrent.md).
#ifndef QUIRE_RECURRENT_CACHE_H_
#define QUIRE_RECURRENT_CACHE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/recurrent_state.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

enum class RecurrentLayerKind : uint8_t {
  kLinearAttention,
  kGatedDelta,
  kStateSpace,
  kConvolution,
};

struct RecurrentLayerSpec {
  RecurrentLayerKind kind = RecurrentLayerKind::kLinearAttention;
  // All but kConvolution: a state [num_heads, key_dim, value_dim]. num_heads is a multiple of
  // num_key_heads: head h reads keys and queries of head h / (num_heads / num_key_heads).
  // kStateSpace: heads, groups, state size and head size.
  int64_t num_heads = 0;
  int64_t num_key_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  // kConvolution: each channel over the last `width` tokens, a state [width - 1, num_channels].
  int64_t num_channels = 0;
  int64_t width = 0;

  bool operator==(const RecurrentLayerSpec&) const = default;
};

// Positions at multiples of this get a checkpoint, and replaying takes fewer tokens: few enough
// that going back costs no more than a short prefill, enough that checkpoints are not most of the
// work.
inline constexpr int64_t kRecurrentCheckpointInterval = 64;

struct RecurrentCacheOptions {
  std::vector<RecurrentLayerSpec> layers;
  int64_t max_num_sequences = 0;   // that are not retained
  int64_t prefill_chunk_size = 0;  // most new tokens of one forward
  // Newest checkpoints of a sequence. All inputs since the oldest of these are kept.
  int64_t recent_checkpoints = 4;
  // Older ones, without inputs, the denser the nearer they are to the end.
  int64_t thinned_checkpoints = 4;
  int64_t max_tree_size = 256;  // uncommitted nodes of one sequence (BeginTreeForward)
  // Uncommitted nodes of all sequences together: each has a state, in a slot that is there for such
  // states alone. BeginTreeForward is OutOfPages when there would be more.
  int64_t max_tree_slots = 0;
  int64_t max_retained_slots = 0;  // see SetRetained
  int64_t max_loads = 0;           // sequences of a forward that load their states: a slot each
  int64_t max_slots = 0;           // 0 = so many that every forward finds room
  std::string kernel_path;         // "" = the best of this CPU, else a name from KernelPaths()
  std::shared_ptr<ParallelRunner> runner;  // null = CreateThreadPool(0)
  bool poison_freed_slots = false;         // tests: free slots and fresh scratch are NaN
};

// What a RecurrentCache takes from the machine at most.
struct RecurrentMemory {
  int64_t slot_bytes = 0;     // one state of all layers
  int64_t storage_bytes = 0;  // states and inputs, mapped at creation
  int64_t scratch_bytes = 0;  // in a forward of prefill_chunk_size tokens
};
// BadArgument for options out of range. Takes and maps nothing.
Result<RecurrentMemory> MeasureRecurrentCache(const RecurrentCacheOptions& options);

// Reached by ForkSequence and PopN: every position from the oldest recent checkpoint on, by
// computing fewer than kRecurrentCheckpointInterval tokens in the call (OutOfPages without a free
// slot for the result); the thinned checkpoints; 0. The initial state is zero.
class RecurrentCache : public RecurrentState {
 public:
  // BadArgument for options out of range, OutOfMemory when the states cannot be mapped. Options are
  // copied.
  static Result<std::unique_ptr<RecurrentCache>> Create(RecurrentCacheOptions options);

  // What it was created with; kernel_path and runner are those in use.
  virtual const RecurrentCacheOptions& options() const = 0;

  // ---- FORWARD only; n = new tokens of the forward, in the order of the batch. Tensors are
  // float32, float16 or bfloat16 and contiguous but for the first axis, with m >= n rows; rows
  // after n are ignored and left unwritten. A layer that is called again is computed again.
  // Outputs may be in the memory of inputs; rows of an output share no byte with each other.
  // H = num_heads, G = num_key_heads, K = key_dim, V = value_dim.

  // S = decay S + k v^T; o = sm_scale S^T q.
  // q, k: [m, G, K]; v, o: [m, H, V]; decay, the factor itself: [m, H], or [H] for all tokens.
  virtual Status LinearAttention(int64_t layer, const TensorView& q, const TensorView& k,
                                 const TensorView& v, const TensorView& decay, const TensorView& o,
                                 double sm_scale) = 0;
  // S = decay S; S += k (beta (v - S^T k))^T; o = sm_scale S^T q.
  // As above; beta: [m, H].
  virtual Status GatedDelta(int64_t layer, const TensorView& q, const TensorView& k,
                            const TensorView& v, const TensorView& decay, const TensorView& beta,
                            const TensorView& o, double sm_scale) = 0;
  // S = e^(dt a) S + b (dt x)^T; o = S^T c + d x.
  // x, o: [m, H, V]; dt: [m, H], as it is used (after bias and softplus); a: [H], negative;
  // b, c: [m, G, K]; d: [H] or null.
  virtual Status StateSpace(int64_t layer, const TensorView& x, const TensorView& dt,
                            const TensorView& a, const TensorView& b, const TensorView& c,
                            const TensorView* d, const TensorView& o) = 0;
  // o[c] = bias[c] + sum over j of weight[c][j] x[t - width + 1 + j][c]; with `silu`, silu of it.
  // x, o: [m, num_channels]; weight: [num_channels, width]; bias: [num_channels] or null.
  virtual Status Convolution(int64_t layer, const TensorView& x, const TensorView& weight,
                             const TensorView* bias, bool silu, const TensorView& o) = 0;

  // A copy of the current state, at any time; in FORWARD that of before the forward.
  // o: float32 [num_heads, key_dim, value_dim] or [width - 1, num_channels].
  virtual Status DebugGet(int64_t layer, int64_t seq_id, const TensorView& o) = 0;
};

}  // namespace quire

#endif  // QUIRE_RECURRENT_CACHE_H_
