// Whether the memory of two tensors has a byte in common, exactly: rows of one may lie between rows
// of the other, as slices of one wide row do.
#ifndef QUIRE_KV_PLAN_MEMORY_OVERLAP_H_
#define QUIRE_KV_PLAN_MEMORY_OVERLAP_H_

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// The bytes of a tensor: runs of equal length, one at begin + the sum of i * stride over the axes,
// 0 <= i < count, for each choice of the i.
class MemoryRuns {
 public:
  // The runs of the first `rows` indices of the first axis; of all, if it is negative. REQUIRES:
  // the last dimension is contiguous.
  explicit MemoryRuns(const TensorView& tensor, int64_t rows = -1) noexcept;

  bool Overlaps(const MemoryRuns& other) const noexcept;
  // Whether two elements are in the same place. May throw std::bad_alloc, but not where every
  // axis steps over all that the axes further in reach.
  bool OverlapsItself() const;

 private:
  struct Axis {
    int64_t count;
    int64_t stride;  // bytes, positive
  };
  bool empty() const { return run_bytes_ == 0; }
  int64_t end() const { return begin_ + reach_[0]; }
  int64_t run_count() const noexcept;
  void AddAxis(int64_t count, int64_t stride) noexcept;
  void MergeAxes() noexcept;
  // Whether [begin, end) has a byte in common with the runs of the axes from `axis` on, the first
  // of which begins at `base`.
  bool Touches(int axis, int64_t base, int64_t begin, int64_t end) const noexcept;
  bool AnyRunTouches(int axis, int64_t base, const MemoryRuns& other) const noexcept;
  void AddStarts(int axis, int64_t base, std::vector<int64_t>* starts) const;

  int64_t begin_ = 0;
  int64_t run_bytes_ = 0;
  int axis_count_ = 0;
  Axis axes_[TensorView::kMaxRank] = {};          // strides descend
  int64_t reach_[TensorView::kMaxRank + 1] = {};  // [axis]: bytes that the axes from there on span
  bool repeats_ = false;                          // an axis steps by less than a run
};

// A tensor of a call, with the name that it has there.
struct NamedTensor {
  const char* name;
  const TensorView* tensor;  // null: not given
};

// Which call, for messages: of a layer, unless that is negative.
struct TensorCall {
  const char* name;
  int64_t layer = -1;
};

// BadArgument, with the names of both, if an output shares memory with another tensor of the call
// or with itself. `rows` indices of the first axis count in each tensor; -1: all.
Status CheckOutputs(const TensorCall& call, std::initializer_list<NamedTensor> outputs,
                    std::initializer_list<NamedTensor> inputs, int64_t rows);

}  // namespace quire

#endif  // QUIRE_KV_PLAN_MEMORY_OVERLAP_H_
