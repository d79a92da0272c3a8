// Where a RecurrentCache keeps what: sizes and offsets of states, inputs and scratch, known before
// any of it is taken.
#ifndef QUIRE_KV_RECURRENT_RECURRENT_LAYOUT_H_
#define QUIRE_KV_RECURRENT_RECURRENT_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "kernels/recurrence.h"
#include "kv/recurrent/state_history.h"
#include "quire/recurrent_cache.h"
#include "quire/status.h"

namespace quire {

// All counts in floats.
struct RecurrentLayerLayout {
  bool convolution = false;
  MatrixStateShape matrix{};
  ConvolutionShape channels{};
  int64_t state_offset = 0;  // in a slot
  int64_t input_offset = 0;  // in a block of kRecurrentCheckpointInterval tokens

  int64_t state_size() const { return convolution ? channels.state_size() : matrix.state_size(); }
  int64_t input_size() const { return convolution ? channels.channel_count : matrix.input_size(); }
  int64_t output_size() const {
    return convolution ? channels.channel_count : matrix.head_count * matrix.value_dim;
  }
  // Beside a token's inputs: its query and, for a state space, its x.
  int64_t side_size() const { return convolution ? 0 : matrix.value_offset() + output_size(); }
  // Weights and bias of a convolution; A and D of a state space.
  int64_t parameter_size() const {
    return convolution ? channels.channel_count * (channels.width + 1) : 2 * matrix.head_count;
  }
};

struct RecurrentLayout {
  std::vector<RecurrentLayerLayout> layers{};
  int64_t slot_size = 0;
  int64_t block_size = 0;
  int64_t row_scratch = 0;        // per token of a forward: the largest layer's
  int64_t parameter_scratch = 0;  // the largest layer's
  StateHistoryOptions history{};

  int64_t storage_bytes() const;
  int64_t scratch_floats(int64_t row_count) const {
    return row_count * row_scratch + parameter_scratch;
  }
};

// BadArgument for options out of range.
Result<RecurrentLayout> MakeRecurrentLayout(const RecurrentCacheOptions& options);

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_RECURRENT_LAYOUT_H_
