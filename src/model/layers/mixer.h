// What a layer is made of: a mixer, which looks at other tokens, and an MLP, which works on each
// token by itself. The decoder strings them together and knows no kinds.
#ifndef QUIRE_MODEL_LAYERS_MIXER_H_
#define QUIRE_MODEL_LAYERS_MIXER_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "model/layers/query_rows.h"
#include "model/layers/row_ops.h"
#include "quire/model.h"
#include "quire/status.h"

namespace quire {

// One run over the rows of a forward.
struct MixerRun {
  const RowOps& ops;
  int64_t row_count;
  const float* x;             // [n, hidden_size], normalised
  float* floats;              // row_floats() for each row
  void* scratch;              // ScratchBytes(n)
  float* y;                   // [n, hidden_size]; may be x: only the last step writes it
  bool accumulate;            // the output is added to y, in place of filling it
  QueryRows* rows = nullptr;  // of a mixer's run: followed behind attention
};

// Holds weights; what lasts between tokens is in the caches. A row's output depends on its own
// tokens alone, whatever else is in the batch.
class Mixer {
 public:
  virtual ~Mixer() = default;
  // Floats of working memory for each row.
  virtual int64_t row_floats() const = 0;
  // The scratch memory for products of row_count rows.
  virtual size_t ScratchBytes(const RowOps& ops, int64_t row_count) const = 0;
  // The output has the rows that go on behind attention. REQUIRES: `state` has the cache that the
  // mixer's layers are in. Errors are those of the cache.
  virtual Status Run(const ModelState& state, const MixerRun& run) const = 0;
};

class Mlp {
 public:
  virtual ~Mlp() = default;
  virtual int64_t row_floats() const = 0;
  virtual size_t ScratchBytes(const RowOps& ops, int64_t row_count) const = 0;
  virtual void Run(const MixerRun& run) const = 0;
};

// Hands out the floats of a run, buffer after buffer.
class RowBuffers {
 public:
  explicit RowBuffers(const MixerRun& run) : next_(run.floats), row_count_(run.row_count) {}
  // [n, width]
  float* Take(int64_t width) { return std::exchange(next_, next_ + width * row_count_); }

 private:
  float* next_;
  int64_t row_count_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_MIXER_H_
