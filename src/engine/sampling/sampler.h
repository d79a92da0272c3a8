// Draws the next token from a row of logits (SamplingOptions in quire/engine.h says in which order
// what applies).
//
// A draw is a function of (logits, prompt, answer, options, stream) and of nothing else: candidates
// are in the total order (logit descending, id ascending); their weights are exponentials in
// float32 with the same bits on every kernel path; sums of weights are in double in id order, those
// of all tokens block by block (token_weights.cc); the random number is that of (seed, stream,
// position of the token in the answer). So an answer is the same in any batch and after any
// preemption.
#ifndef QUIRE_ENGINE_SAMPLING_SAMPLER_H_
#define QUIRE_ENGINE_SAMPLING_SAMPLER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/engine.h"

namespace quire {

struct Backend;

struct DrawInput {
  // [vocab_size], or only of the first ones of a vocabulary: those that can be drawn. The history
  // has no others.
  std::span<const float> logits;
  std::span<const int32_t> prompt;
  std::span<const int32_t> answer;  // so far; its length is the position of the token to draw
  const SamplingOptions* options = nullptr;  // valid for this vocabulary
  int64_t stream = 0;
  std::span<const uint32_t> mask = {};  // TokenFilter::FillMask; empty: all are allowed
};

enum class DrawError : uint8_t {
  kNone,
  kNotANumber,   // a logit is NaN or +infinity
  kAllMasked,    // every logit is -infinity
  kNoneAllowed,  // by the mask
  kFilterFailed,
};

struct Draw {
  int32_t token = -1;
  DrawError error = DrawError::kNone;
  std::vector<TokenLogprob>
      logprobs;  // of the chosen token, then of the best; sized by ReserveLogprobs
};

// Memory of one worker. It holds nothing between two draws.
struct DrawScratch {
  DrawScratch(int64_t vocab_size, const Backend& path);
  // The memory of one for this vocabulary.
  static int64_t Bytes(int64_t vocab_size);
  int64_t bytes() const;

  const Backend* backend;           // never null
  std::vector<double> adjusted;     // [vocab_size] logits with penalties and bias
  std::vector<float> weights;       // [vocab_size] by id
  std::vector<float> allowed;       // [vocab_size] logits with a mask applied
  std::vector<uint32_t> mask;       // of vocab_size bits, where DrawInput::mask is filled
  std::vector<int32_t> candidates;  // capacity vocab_size
  std::vector<int32_t> counts;      // [vocab_size] all zero between two draws
};

// Makes room for what DrawToken writes, so that it needs no memory.
void ReserveLogprobs(const SamplingOptions& options, int64_t vocab_size, Draw* draw);

// REQUIRES: scratch of this vocabulary, ReserveLogprobs(draw). Any thread, with a scratch of its
// own.
void DrawToken(const DrawInput& input, DrawScratch* scratch, Draw* draw) noexcept;

}  // namespace quire

#endif  // QUIRE_ENGINE_SAMPLING_SAMPLER_H_
