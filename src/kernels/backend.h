// The table of operations of one device and instruction set, and their arguments. Kernels are pure
// functions over views and plan arrays: they allocate nothing, keep no state, cannot fail; the code
// that fills the arguments has validated them.
//
// Every row's result is a function of that row's inputs alone (docs/exactness.md): not of the other
// rows, of the number of workers or of how the work was cut.
#ifndef QUIRE_KERNELS_BACKEND_H_
#define QUIRE_KERNELS_BACKEND_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/activation.h"
#include "kernels/float8_weights.h"
#include "kernels/kv_layout.h"
#include "kernels/quantised_weights.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// -------------------------------------------------------------------------------------------------
// attention

// cos and sin of one position, float32 [rotary_dim / 2] each.
struct RotaryAngles {
  const float* cos;
  const float* sin;
};

// Angles by position. The tile of a position holds cos [kTilePositions][pair_count], then sin.
// Tiles lie where they lie, kAngleLeafTiles of consecutive positions after one pointer; where
// nobody looks there may be one of NaN.
inline constexpr int64_t kAngleLeafTiles = 256;
struct AngleLeaf {
  std::array<const float*, kAngleLeafTiles> tiles;
};
struct AngleTable {
  const AngleLeaf* const* leaves = nullptr;  // [position / (kAngleLeafTiles * kTilePositions)]
  int64_t pair_count = 0;

  RotaryAngles At(int64_t position) const {
    const int64_t tile = position / kTilePositions;
    const float* const angles =
        leaves[tile / kAngleLeafTiles]->tiles[static_cast<size_t>(tile % kAngleLeafTiles)];
    const float* const cos = angles + position % kTilePositions * pair_count;
    return {cos, cos + kTilePositions * pair_count};
  }
};

struct RotaryRows {
  const RotaryAngles* angles = nullptr;  // [row]; null: rows are rotated already
  int rotary_dim = 0;                    // 0: no rotation
  bool interleaved = false;              // pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2)
  int first_dim = 0;                     // of q: where the rotated dimensions begin
};

// Rows [row][head][dim] of float32, float16 or bfloat16 with strides in elements; dim is
// contiguous.
struct HeadRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};
struct MutableHeadRows {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// Where one new token is stored. page < 0: not stored.
struct AppendTarget {
  int32_t page;
  int32_t slot;
};

// Stores rows of k (rotated in float32, then rounded or quantised once to the layout's dtype) and
// v; or, where k (v) is of the layout's quantised dtype, its codes as they are and k_scale
// (v_scale) beside them. With a latent layout, v and v_scale are not read. Opening a tile (its
// first slot written is `slot` and open_tile[row] is set) first zeroes the tile's V and its
// v_nonfinite flag.
struct AppendArgs {
  KVPages pages;
  int64_t row_count = 0;
  HeadRows k, v;
  const float* k_scale = nullptr;  // [row][kv head], with codes only
  const float* v_scale = nullptr;
  RotaryRows rotary;            // identity unless RopeMode::kNormal
  const AppendTarget* targets;  // [row_count]; slots are distinct
  const uint8_t* opens_tile;    // [row_count]; 1: no slot of this tile holds a token yet
};

// No window: everything before a row is in it.
inline constexpr int64_t kNoWindow = INT64_MAX;

// A row at position p sees [0, sinks) and [sinks + slid(p), p], where slid(p) = max(slid, p + 1 -
// window): how many positions after the sinks are hidden. A function of the row, never of the
// step. What a row sees of all this stands in kernels/row_view.h.
struct SequenceWindow {
  int64_t window = kNoWindow;  // positions that a row sees at most, sinks included; > sinks
  int64_t sinks = 0;
  int64_t slid = 0;  // hidden for good: what had slid when the window was switched off

  bool operator==(const SequenceWindow&) const = default;
};

// The uncommitted token tree of a sequence. Node n stands at position base + depths[n], and its key
// and value lie in slot n mod page_size of pages[n / page_size].
struct TokenTreeView {
  const int32_t* parents = nullptr;  // [node], each before its children; -1: a root
  const int32_t* depths = nullptr;   // [node]
  const int32_t* pages = nullptr;
  int64_t first_node = 0;  // of the sequence's first row; the others follow it
  int64_t min_depth = 0;   // of the rows
  int64_t max_depth = 0;
  // How many of a row's ancestors are no rows: they stand before those that are. [row]; read where
  // the two are told apart (new_only, AttentionArgs::cached_only).
  const int32_t* old_levels = nullptr;
  bool new_only = false;  // a row sees its ancestors among the rows, and itself
};

// A caller's condition beside all others: bit i of tiles[t - first_tile] says whether position 16 t
// + i may be seen. What lies in tiles before may be; there are tiles for all else that the row
// could see.
struct RowMask {
  const uint16_t* tiles = nullptr;  // null: no condition
  int64_t first_tile = 0;
};

// One sequence of a forward: rows [first_row, first_row + row_count) of q and o, at positions base,
// base + 1, ...; row r sees positions [0, base + r], but for those that a window hides. Hidden
// positions may lie in entries without a page.
struct AttentionSequence {
  int64_t first_row;
  int64_t row_count;
  int64_t base;         // position of the first row
  const PageRun* runs;  // cover [0, base + row_count), and may go on
  int64_t run_count;
  int64_t private_segment;  // first segment that no SharedSpan with this sequence covers
  // RopeMode::kInline: of the keys, the one at position p by p + inline_base; else null.
  const AngleTable* inline_angles = nullptr;
  int64_t inline_base = 0;
  SequenceWindow window = {};
  // Null: a chain. Else row r is node tree->first_node + r; `base` tokens are committed, and of the
  // positions after these the runs may say anything: a row sees its ancestors and itself there.
  const TokenTreeView* tree = nullptr;
};

// Whole segments [segment_begin, segment_end) whose pages are the same for sequences [first, first
// + count) of the plan's order, count >= 2; every row of them lies after these positions. Spans
// are sorted by segment_begin; for one sequence they are adjacent: each begins where the one before
// ended, the first at 0.
struct SharedSpan {
  int64_t first;
  int64_t count;
  int64_t segment_begin;
  int64_t segment_end;
};

// Attention of all rows over the pages. Arithmetic: docs/exactness.md. o = 0 and lse = -inf for a
// row that sees nothing.
struct AttentionArgs {
  KVPages pages;
  int num_qo_heads =
      0;  // a multiple of pages.layout.num_kv_heads; query head h reads kv head h / (Hq / Hkv)
  float scale_log2 = 0;  // sm_scale * log2(e)
  HeadRows q;            // [row][Hq][qk_head_dim], unrotated
  RotaryRows rotary;     // of the query rows; identity for RopeMode::kNone
  // Sinks of a window that has slid are scored with the query rotated by these: for p - slid(p).
  // [row]; null: with the query as it is.
  const RotaryAngles* sink_angles = nullptr;
  int64_t layer_window = kNoWindow;  // a row at p sees only what is in (p - layer_window, p]
  float soft_cap = 0;  // scores become soft_cap * tanh(score / soft_cap) before the softmax; 0: as
                       // they are
  // A learned logit per query head, times log2(e), that takes part in the softmax without a value.
  const float* head_sinks_log2 = nullptr;  // [Hq] or null
  MutableHeadRows o;                       // [row][Hq][v_head_dim]
  float* lse = nullptr;                    // [row][Hq], base 2; null: not wanted
  int64_t lse_row_stride = 0;
  int64_t row_count = 0;
  std::span<const AttentionSequence> sequences;  // in plan order (sharers adjacent)
  std::span<const SharedSpan> shared = {};
  // Every row sees [0, base) alone, and in a tree its ancestors that are no rows.
  bool cached_only = false;
  const RowMask* masks = nullptr;  // [row] or null
  void* scratch = nullptr;         // attention_scratch_bytes() of it, 64-byte aligned

  // The end of the positions that row `row` of a sequence sees.
  int64_t SeenEnd(const AttentionSequence& sequence, int64_t row) const {
    return cached_only ? sequence.base : sequence.base + row + 1;
  }
};

// Two attention results over disjoint sets of keys become that over both, in the first pair.
struct MergeArgs {
  int64_t row_count = 0;
  int head_count = 0;
  int dim = 0;
  MutableHeadRows o;     // [row][head][dim]
  float* lse = nullptr;  // [row][head], base 2; -inf: no keys, and the output is not read
  int64_t lse_row_stride = 0;
  HeadRows other_o;
  const float* other_lse = nullptr;
  int64_t other_lse_row_stride = 0;
};

// -------------------------------------------------------------------------------------------------
// linear layers

// Weights [n outputs][k inputs] in the order in which the kernels read them. Owned by the code that
// packed them.
struct PackedLinear {
  DType dtype = DType::kF32;  // of the packed weights: kF32, kF16 or kBF16
  int64_t n = 0, k = 0;
  const void* data = nullptr;   // packed_linear_bytes() of it, 64-byte aligned
  const float* bias = nullptr;  // [n] or null
  // With scales, data are PackedFloat8Bytes() of codes that stand for weights of dtype, kF32 or
  // kBF16: the same bits come out as with those weights.
  Float8Scales float8 = {};
  // With a format, data are strips of quantised weights (quantised_weights.h), that stand for
  // weights of dtype, kF32 or kBF16, rounded once: the same bits come out as with those weights.
  std::optional<WeightFormat> blocks = std::nullopt;
  const int32_t* input_order = nullptr;  // with blocks only; as QuantisedLinear has it

  bool IsCodes() const { return float8.data != nullptr || blocks; }
};

// y = x W^T + bias. One output: products singly (kF32 rows) or in pairs (kBF16 rows on a path with
// bf16 dot products), k ascending, one float32 accumulator per block of 1024 inputs (k > 1024) or
// 512, each from zero, block sums added left to right, then the bias. bf16 rows and weights on
// avx512_amx: as the tile unit sums (docs/exactness.md).
struct LinearArgs {
  PackedLinear w;
  int64_t row_count = 0;
  const float* x = nullptr;  // [row][k], row stride x_stride
  int64_t x_stride = 0;
  DType x_rounding = DType::kF32;  // kBF16: x is rounded to bfloat16 first
  float* y = nullptr;              // [row][n], row stride y_stride
  int64_t y_stride = 0;
  bool accumulate =
      false;  // y += instead of y =: the finished output is added to y once (residual)
  void* scratch = nullptr;  // linear_scratch_bytes() of it, 64-byte aligned
};

// Quantised weights in strips (quantised_weights.h).
struct QuantisedLinear {
  WeightFormat format = WeightFormat::kQ8_0;
  int64_t n = 0, k = 0;         // k: a multiple of BlockInputs(format)
  const void* data = nullptr;   // PackedQuantisedBytes() of it, 64-byte aligned
  const float* bias = nullptr;  // [n] or null
  // [k] or null: input i of the weights is x[input_order[i]]; a permutation.
  const int32_t* input_order = nullptr;
};

// y = x W^T + bias, the row's x quantised in groups of 32 inputs, products inside a group summed as
// integers, groups added left to right (docs/exactness.md): the same bits on every path.
struct QuantisedLinearArgs {
  // Matrices of one k and one input_order, at least one; their outputs stand side by side in y. A
  // row is quantised once for all of them.
  std::span<const QuantisedLinear> parts;
  int64_t row_count = 0;
  const float* x = nullptr;  // [row][k], row stride x_stride
  int64_t x_stride = 0;
  float* y = nullptr;  // [row][n of all parts], row stride y_stride
  int64_t y_stride = 0;
  bool accumulate = false;  // as LinearArgs
  void* scratch = nullptr;  // quantised_scratch_bytes() of it, 64-byte aligned
};

// -------------------------------------------------------------------------------------------------
// the table

struct RecurrenceKernels;

struct Backend {
  std::string_view name;  // "avx512_amx", "avx512_bf16", "avx512", "avx2", "neon", "scalar"

  void (*append_kv)(const AppendArgs&, ParallelRunner&);
  // Scratch for any plan of at most row_count rows and sequence_count sequences.
  size_t (*attention_scratch_bytes)(const KVLayout&, int num_qo_heads, int64_t row_count,
                                    int64_t sequence_count, int worker_count);
  void (*attention)(const AttentionArgs&, ParallelRunner&);
  void (*merge_attention)(const MergeArgs&, ParallelRunner&);

  size_t (*packed_linear_bytes)(DType dtype, int64_t n, int64_t k);
  // Packs row-major [n][k] of `from`; `to` is kF32, kF16 or kBF16 (rounded to nearest even where
  // narrower).
  void (*pack_linear)(const void* weights, DType from, int64_t n, int64_t k, DType to, void* packed,
                      ParallelRunner&);
  size_t (*linear_scratch_bytes)(int64_t row_count, int64_t n, int64_t k, int worker_count);
  void (*linear)(const LinearArgs&, ParallelRunner&);

  // y[r] = x[r] / sqrt(mean(x[r]^2) + eps) * (w + weight_offset); rows of `dim`, contiguous; y may
  // be x.
  void (*rms_norm)(const float* x, const float* w, float weight_offset, float eps,
                   int64_t row_count, int64_t dim, float* y, ParallelRunner&);
  // y[r][i] = activation(gate_up[r][i]) * gate_up[r][dim + i].
  void (*gated_mul)(Activation, const float* gate_up, int64_t row_count, int64_t dim, float* y,
                    ParallelRunner&);
  // y[r][i] = cap * tanh(x[r][i] / cap); y may be x. REQUIRES: cap > 0.
  void (*soft_cap)(const float* x, float cap, int64_t row_count, int64_t dim, float* y,
                   ParallelRunner&);
  // y[r] = table[ids[r]] widened, rows of `dim` in `dtype`.
  void (*gather_rows)(const void* table, DType dtype, const int32_t* ids, int64_t row_count,
                      int64_t dim, float* y, ParallelRunner&);

  // These work on one row, in the calling thread; they give the same bits on every path.
  //
  // The index of the greatest, the first of equal ones; -1 if one is NaN or +infinity. REQUIRES:
  // count > 0.
  int64_t (*arg_max)(const float* x, int64_t count);
  // y[i] = 2^((x[i] - greatest) * scale_log2), 0 for less than 2^-126; y may be x. REQUIRES: no
  // x[i] is over `greatest`, which is finite; scale_log2 is finite and positive.
  void (*exp2_scaled)(const float* x, int64_t count, float greatest, float scale_log2, float* y);

  const RecurrenceKernels* recurrence;  // recurrence.h

  size_t (*quantised_scratch_bytes)(int64_t row_count, int64_t k);
  void (*quantised_linear)(const QuantisedLinearArgs&, ParallelRunner&);
};

// The paths that this build has and this CPU can run, never empty ("scalar" is always there). The
// first is the one that was measured to be the fastest on this kind of CPU: the same on every
// machine of a CPU model that grants the same instructions.
std::span<const Backend* const> Backends();
// Why "avx512_amx" is not among them although the CPU has its instructions; "" elsewhere.
std::string_view TilesRefused();
// The named path, or the first for ""; environment variable QUIRE_KERNELS names the default.
// BadArgument lists the names.
Result<const Backend*> FindBackend(std::string_view name);

// Widening and rounding (nearest even) of one row-major array, on the scalar path; for loading,
// export and tests.
void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count);

// Moves stored tokens bit for bit between slots, tiled or row layout (consolidation, commit, copies
// on write). opens_tile as in AppendArgs, per token.
void CopySlots(const KVPages& pages, std::span<const AppendTarget> from,
               std::span<const AppendTarget> to, const uint8_t* opens_tile);
// Logical rows of one stored token: k [kv head][qk_head_dim], v [kv head][v_head_dim] in `dtype`
// (kF32, or the layout's if that is no quantised one): codes times their scale, and back. v may be
// null where it is not wanted; of a latent layout it is the key's first dimensions, and not
// written.
void ReadSlot(const KVPages& pages, AppendTarget slot, DType dtype, void* k, void* v);
void WriteSlot(const KVPages& pages, AppendTarget slot, DType dtype, const void* k, const void* v,
               bool opens_tile);

}  // namespace quire

#endif  // QUIRE_KERNELS_BACKEND_H_
