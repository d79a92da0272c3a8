// CacheBlend: KV of text that was computed elsewhere is used at any place of a prompt. Keys are
// rotated to their new positions, and the tokens whose cached KV differs most from fresh KV are
// computed again. Yao et al. 2025 (EuroSys, arXiv 2405.16444).
//
// The functions are pure: they read and write the views that they are given, keep nothing, and may
// run on any number of threads at a time with distinct outputs. A call that fails has written
// nothing. Work is cut into parts by calls on parts of the views.
//
// A view of KV is [tokens, heads, dim] or [tokens, channels] with token_axis 0, or [heads, tokens,
// dim] with token_axis 1; float32, float16 or bfloat16. Tokens and heads may have any strides of at
// least 0, the numbers of a head are adjacent. A batch is all rows of its requests, one request
// after the other; query_start_loc [request_count + 1] says where each begins.
#ifndef QUIRE_BLEND_H_
#define QUIRE_BLEND_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "quire/rope.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// How the keys of a layer are rotated (RopeFrequencies has the numbers).
struct KeyRotation {
  // At the positions that keys are moved to: [pair_count]. 2 * pair_count dimensions of each head
  // are rotated. The amplitude of cos and sin (YaRN, LongRoPE) stays in the keys and is not applied
  // again.
  std::span<const double> inv_freq = {};
  // Those that the keys were rotated by; empty: the same. Other ones where the frequencies depend
  // on the length of a sequence.
  std::span<const double> old_inv_freq = {};
  RopePairing pairing = RopePairing::kHalfSplit;
  // Where the rotated dimensions of a head begin: the position part of a latent row (MLA).
  int64_t first_dim = 0;
  // Numbers of a head. Needed for [tokens, channels]; 0: the last dimension.
  int64_t head_dim = 0;
};

// Where the rows of keys were and are to be, and which rows count: [tokens] each.
struct KeyMoves {
  std::span<const int64_t> old_positions = {};
  std::span<const int64_t> new_positions = {};
  std::span<const uint8_t> valid = {};  // 0: the row is not read or written; empty: all rows count
};

// moved[t] = keys[t], rotated from its old to its new position: one rotation by the difference.
// Angles are computed in double, the rotation in float32, the result is rounded once. A row whose
// position and frequencies stay is copied bit for bit, as are dimensions that are not rotated. The
// result of a row depends on that row, its positions and `rotation` alone, not on the kernel path.
// `moved` is `keys` itself (the same view) or shares no memory with it.
// BadArgument for views, positions outside [0, 2^31) or frequencies that are not as described.
Status ShiftKeys(const TensorView& keys, int token_axis, const KeyMoves& moves,
                 const KeyRotation& rotation, const TensorView& moved);

// How far the cached KV of a token is from fresh KV.
enum class DeviationMetric : uint8_t {
  kVL2,     // "v_l2": mean over heads and channels of (fresh v - cached v)^2
  kKL2,     // "k_l2": the same of keys; cached keys are at their new positions
  kKVL2,    // "kv_l2": the mean over the numbers of both
  kCosine,  // "cosine": mean over heads of 1 - cos(fresh v, cached v); 1 where one of them is 0
  // "random": numbers in [0, 1) that depend on the row's place in the batch alone. No KV is read:
  // the yardstick of what the other ones are worth.
  kRandom,
};
Result<DeviationMetric> ParseDeviationMetric(std::string_view name);

// Keys and values of one layer. What a metric does not read may be left out.
struct KVRows {
  TensorView k = {};
  TensorView v = {};
};

// What a row of a batch has in the cache.
inline constexpr uint8_t kRowInvalid = 0;  // nothing that may be used: it is computed
inline constexpr uint8_t kRowMoved = 1;    // KV that was computed with other tokens before it
inline constexpr uint8_t kRowExact = 2;    // KV as a forward would give it: never recomputed

// deviations[r] for each batch row r in `rows` that is kRowMoved in `kinds`; -infinity for all
// others, whose KV is not read: NaN in them changes nothing. A NaN among the numbers of a moved row
// gives +infinity. `fresh` has rows.size() tokens, and its token i is row rows[i] of the batch;
// without `rows` it has all rows. `cached`: [row_count] tokens. `kinds`, `deviations`: [row_count].
//
// The sum of a head's squares is taken in float32, in 16 lanes (number c in lane c mod 16), which
// are added in a tree (8 + 8, 4 + 4, ...); heads, keys before values, are added in double.
// BadArgument for views that do not fit together, and rows that are not ascending.
Status ComputeDeviations(DeviationMetric metric, int token_axis, const KVRows& fresh,
                         const KVRows& cached, std::optional<std::span<const int64_t>> rows,
                         std::span<const uint8_t> kinds, std::span<float> deviations);

// Which rows are recomputed, and from which layers on.
struct BlendOptions {
  DeviationMetric metric = DeviationMetric::kVL2;
  // Layers whose fresh KV is compared, ascending. Up to the first one all rows are computed, behind
  // layer check_layers[i] those that its selection kept.
  std::vector<int64_t> check_layers = {1};
  std::vector<double> ratios = {0.15};  // [check layer] in [0, 1], none above the one before it
  // [check layer]: moved rows of a smaller deviation are not recomputed even where the ratio
  // allows. Empty: 0 everywhere.
  std::vector<float> thresholds = {};
  int64_t link_tokens = 0;  // first tokens of each document but its request's first: recomputed
  bool force_last = true;   // the last row of each request is recomputed: its logits are needed
  int64_t min_tokens = 0;   // requests with fewer rows recompute all but exact ones
};

// BadArgument with the field, where it says no schedule for a model of `layer_count` layers.
Status CheckBlendOptions(const BlendOptions& options, int64_t layer_count);

// What the default blend costs a model against full prefill (`quire blend eval` measures it).
struct BlendVerdict {
  double divergence = 0;  // mean Kullback-Leibler divergence of the next token, in nats
  double agreement = 0;   // in [0, 1]: the part of the tokens of which the likeliest is the same
  static constexpr double kDivergenceMost = 0.3;
  static constexpr double kAgreementLeast = 0.75;
  // Whether such blends are allowed; a NaN allows none.
  bool passes() const { return divergence <= kDivergenceMost && agreement >= kAgreementLeast; }
};

// Adjacent rows of one request that were taken from one text.
struct BlendDocument {
  int64_t first_row = 0;  // of the batch
  int64_t row_count = 0;
  // A budget of its own: its rows are ranked among themselves. Without one they share that of their
  // request, BlendOptions::ratios.
  std::optional<double> ratio = std::nullopt;
};

struct SelectionBatch {
  std::span<const int32_t> query_start_loc;  // [request_count + 1], of all rows
  std::span<const uint8_t> kinds;            // [row_count]
  std::span<const float> deviations;         // [row_count], of moved rows that are candidates
  std::span<const BlendDocument> documents;  // ascending, disjoint
  // Rows that the check layer before it kept; no value: all rows.
  std::optional<std::span<const int64_t>> candidates = std::nullopt;
};

struct TokenSelection {
  std::vector<int64_t> rows;             // of the batch, ascending
  std::vector<int32_t> query_start_loc;  // [request_count + 1], of these rows
};

// The selection of check layer options.check_layers[check_index]. Selected are, in each request:
// its invalid rows; link tokens; beside these the floor(n * ratio + 1e-6) of its n moved rows that
// deviate most (equal ones: the lower row first; an infinite one and NaN first of all); the last
// row; all of them only if they are candidates. A larger ratio selects a superset, and a request's
// rows do not depend on others. BadArgument for a batch that is not as described, OutOfMemory.
Result<TokenSelection> SelectTokens(const SelectionBatch& batch, const BlendOptions& options,
                                    size_t check_index);

// all[rows[i]] = some[i] for each i, bit for bit. `rows` is ascending. The views have equal shapes
// but for their numbers of tokens, equal dtypes, and share no memory.
Status ScatterRows(const TensorView& some, int token_axis, std::span<const int64_t> rows,
                   const TensorView& all);
// some[i] = all[rows[i]].
Status GatherRows(const TensorView& all, int token_axis, std::span<const int64_t> rows,
                  const TensorView& some);

// positions[r] = context_lengths[request] + the row's index in its request, for the rows of a batch
// whose requests have tokens in the cache already. Sizes: [row_count], [request_count].
Status FillPositions(std::span<const int32_t> query_start_loc,
                     std::span<const int64_t> context_lengths, std::span<int64_t> positions);

}  // namespace quire

#endif  // QUIRE_BLEND_H_
