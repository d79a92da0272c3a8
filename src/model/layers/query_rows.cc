#include "model/layers/query_rows.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "model/layers/row_ops.h"

namespace quire {

QueryRows::QueryRows(int64_t count, RowBuffer hidden)
    : hidden_(hidden), rows_(static_cast<size_t>(count)) {
  std::iota(rows_.begin(), rows_.end(), 0);
}

Result<int64_t> QueryRows::Follow(const AttentionKVCache& cache,
                                  std::initializer_list<RowBuffer> buffers) {
  QUIRE_ASSIGN_OR_RETURN(const std::span<const int32_t> left, cache.GetQueryRows());
  if (left.size() == rows_.size()) return count();
  from_.clear();
  size_t i = 0;
  for (const int32_t row : left) {
    while (i < rows_.size() && rows_[i] != row) ++i;
    QUIRE_CHECK(i < rows_.size()) << "row " << row << " goes on and has not come";
    from_.push_back(static_cast<int32_t>(i));
  }
  rows_.assign(left.begin(), left.end());
  Move(hidden_);
  for (const RowBuffer& buffer : buffers) Move(buffer);
  return count();
}

int64_t QueryRows::Find(int64_t row) const {
  const auto found = std::lower_bound(rows_.begin(), rows_.end(), row);
  return found == rows_.end() || *found != row ? -1 : found - rows_.begin();
}

void QueryRows::Move(const RowBuffer& buffer) const noexcept {
  for (size_t to = 0; to < from_.size(); ++to) {
    const auto from = static_cast<size_t>(from_[to]);
    if (from == to) continue;
    CopyFloats(buffer.data + static_cast<int64_t>(from) * buffer.width, buffer.width,
               buffer.data + static_cast<int64_t>(to) * buffer.width);
  }
}

}  // namespace quire
