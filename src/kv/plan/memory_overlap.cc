#include "kv/plan/memory_overlap.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace quire {

MemoryRuns::MemoryRuns(const TensorView& tensor, int64_t rows) noexcept {
  const int64_t element = DTypeBytes(tensor.dtype());
  begin_ = static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data()));
  run_bytes_ = element;
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    const int64_t count = axis == 0 && rows >= 0 ? std::min(rows, tensor.dim(0)) : tensor.dim(axis);
    if (count == 0) run_bytes_ = 0;
    // Elements that follow one another are a run.
    if (axis == tensor.rank() - 1 && tensor.stride(axis) == 1) {
      run_bytes_ *= count;
    } else if (count > 1) {
      AddAxis(count, tensor.stride(axis) * element);
    }
  }
  MergeAxes();
}

void MemoryRuns::AddAxis(int64_t count, int64_t stride) noexcept {
  QUIRE_DCHECK(count > 1);
  QUIRE_DCHECK(axis_count_ < TensorView::kMaxRank);
  if (stride < 0) {
    begin_ += (count - 1) * stride;
    stride = -stride;
  }
  int at = axis_count_++;
  for (; at > 0 && axes_[at - 1].stride < stride; --at) axes_[at] = axes_[at - 1];
  axes_[at] = {.count = count, .stride = stride};
}

void MemoryRuns::MergeAxes() noexcept {
  while (axis_count_ > 0 && axes_[axis_count_ - 1].stride <= run_bytes_) {
    const Axis inner = axes_[--axis_count_];
    repeats_ |= inner.stride < run_bytes_;
    run_bytes_ += (inner.count - 1) * inner.stride;
  }
  reach_[axis_count_] = run_bytes_;
  for (int axis = axis_count_; axis-- > 0;)
    reach_[axis] = reach_[axis + 1] + (axes_[axis].count - 1) * axes_[axis].stride;
}

int64_t MemoryRuns::run_count() const noexcept {
  int64_t count = 1;
  for (int axis = 0; axis < axis_count_; ++axis) count *= axes_[axis].count;
  return count;
}

bool MemoryRuns::Touches(int axis, int64_t base, int64_t begin, int64_t end) const noexcept {
  if (base >= end || base + reach_[axis] <= begin) return false;
  if (axis == axis_count_) return true;
  const auto [count, stride] = axes_[axis];
  QUIRE_DCHECK(stride > run_bytes_) << "MergeAxes leaves no such axis";
  const int64_t behind = begin - base - reach_[axis + 1];  // those that end there are before it
  const int64_t first = behind < 0 ? 0 : behind / stride + 1;
  const int64_t last = std::min(count - 1, (end - 1 - base) / stride);
  for (int64_t i = first; i <= last; ++i) {
    if (Touches(axis + 1, base + i * stride, begin, end)) return true;
  }
  return false;
}

bool MemoryRuns::AnyRunTouches(int axis, int64_t base, const MemoryRuns& other) const noexcept {
  if (axis == axis_count_) return other.Touches(0, other.begin_, base, base + run_bytes_);
  if (base >= other.end() || base + reach_[axis] <= other.begin_) return false;
  for (int64_t i = 0; i < axes_[axis].count; ++i) {
    if (AnyRunTouches(axis + 1, base + i * axes_[axis].stride, other)) return true;
  }
  return false;
}

bool MemoryRuns::Overlaps(const MemoryRuns& other) const noexcept {
  if (empty() || other.empty() || begin_ >= other.end() || other.begin_ >= end()) return false;
  const bool fewer = run_count() <= other.run_count();
  return fewer ? AnyRunTouches(0, begin_, other) : other.AnyRunTouches(0, other.begin_, *this);
}

void MemoryRuns::AddStarts(int axis, int64_t base, std::vector<int64_t>* starts) const {
  if (axis == axis_count_) return starts->push_back(base);
  for (int64_t i = 0; i < axes_[axis].count; ++i)
    AddStarts(axis + 1, base + i * axes_[axis].stride, starts);
}

bool MemoryRuns::OverlapsItself() const {
  if (empty() || repeats_) return !empty();
  bool nested = true;
  for (int axis = 0; axis < axis_count_; ++axis) nested &= axes_[axis].stride >= reach_[axis + 1];
  if (nested) return false;
  std::vector<int64_t> starts;
  starts.reserve(static_cast<size_t>(run_count()));
  AddStarts(0, begin_, &starts);
  std::ranges::sort(starts);
  for (size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] - starts[i - 1] < run_bytes_) return true;
  }
  return false;
}

namespace {

std::string Where(const TensorCall& call) {
  const std::string name = std::string(call.name) + ": ";
  return call.layer < 0 ? name : name + "layer " + std::to_string(call.layer) + ": ";
}

Status Overlapping(const TensorCall& call, const NamedTensor& output, const NamedTensor& other) {
  return Status(StatusCode::kBadArgument, Where(call) + output.name + " " +
                                              output.tensor->ToString() + " shares memory with " +
                                              other.name + " " + other.tensor->ToString() +
                                              "; give each memory of its own");
}

}  // namespace

Status CheckOutputs(const TensorCall& call, std::initializer_list<NamedTensor> outputs,
                    std::initializer_list<NamedTensor> inputs, int64_t rows) {
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    const MemoryRuns runs(*output.tensor, rows);
    if (runs.OverlapsItself()) {
      return Status(StatusCode::kBadArgument,
                    Where(call) + "rows of " + output.name + " " + output.tensor->ToString() +
                        " share memory with each other; give a tensor whose strides keep them "
                        "apart");
    }
    for (const NamedTensor& input : inputs) {
      if (input.tensor != nullptr && runs.Overlaps(MemoryRuns(*input.tensor, rows)))
        return Overlapping(call, output, input);
    }
    for (const NamedTensor* next = &output + 1; next != outputs.end(); ++next) {
      if (next->tensor != nullptr && runs.Overlaps(MemoryRuns(*next->tensor, rows)))
        return Overlapping(call, output, *next);
    }
  }
  return Status();
}

}  // namespace quire
