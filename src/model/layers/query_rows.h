// QueryRows: the rows that a decoder carries through its layers. In a forward that blends
// (AttentionKVCache::BeginBlendingForward) there are fewer behind some attention layers: what is
// computed for the others ends there.
//
// The rows of every buffer lie one after the other, so the mixer that has attended moves those that
// go on to the front of its own and of the residual stream, in place: they ascend.
#ifndef QUIRE_MODEL_LAYERS_QUERY_ROWS_H_
#define QUIRE_MODEL_LAYERS_QUERY_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// Rows of `width` floats, one after the other.
struct RowBuffer {
  float* data;
  int64_t width;
};

class QueryRows {
 public:
  // All `count` rows of a forward. `hidden`: the residual stream. May throw std::bad_alloc.
  QueryRows(int64_t count, RowBuffer hidden);

  int64_t count() const { return std::ssize(rows_); }
  // Behind the attention of a layer: takes what goes on, moves its rows in the residual stream and
  // in `buffers`, and returns how many there are.
  Result<int64_t> Follow(const AttentionKVCache& cache, std::initializer_list<RowBuffer> buffers);
  // Where a row of the whole forward is among these; -1: it ended in some layer.
  int64_t Find(int64_t row) const;

 private:
  void Move(const RowBuffer& buffer) const noexcept;

  const RowBuffer hidden_;
  std::vector<int32_t> rows_;  // of the whole forward, ascending
  std::vector<int32_t> from_;  // where those that go on have been
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_QUERY_ROWS_H_
