#include "blend/blend_view.h"

#include <functional>
#include <limits>
#include <utility>

namespace quire {
namespace {

Status BadBlendView(std::string_view name, const TensorView& view, const std::string& why) {
  return BlendError(std::string(name) + " (" + view.ToString() + "): " + why);
}

Status CheckBlendShape(std::string_view name, const TensorView& view, int token_axis) {
  if (token_axis != 0 && token_axis != 1) {
    return BlendError("token_axis is " + std::to_string(token_axis) + ", not 0 or 1");
  }
  if (view.dtype() != DType::kF32 && view.dtype() != DType::kF16 && view.dtype() != DType::kBF16) {
    return BadBlendView(name, view,
                        "give float32, float16 or bfloat16; quantised KV is dequantised first");
  }
  if (view.rank() != 3 && !(view.rank() == 2 && token_axis == 0)) {
    return BadBlendView(name, view,
                        "give [tokens, heads, dim] or [tokens, channels] with token axis 0, "
                        "[heads, tokens, dim] with token axis 1");
  }
  for (int axis = 0; axis < view.rank(); ++axis) {
    if (view.dim(axis) < 0) return BadBlendView(name, view, "a dimension is negative");
  }
  if (view.element_count() == 0) return {};
  if (view.data() == nullptr) return BadBlendView(name, view, "its data pointer is null");
  for (int axis = 0; axis < view.rank(); ++axis) {
    if (view.stride(axis) < 0) return BadBlendView(name, view, "a stride is negative");
  }
  const int last = view.rank() - 1;
  if (view.dim(last) > 1 && view.stride(last) != 1) {
    return BadBlendView(name, view, "the numbers of a head are not adjacent; make it contiguous");
  }
  return {};
}

}  // namespace

Result<BlendView> ReadBlendView(std::string_view name, const TensorView& view, int token_axis,
                                int64_t head_dim) {
  QUIRE_RETURN_IF_ERROR(CheckBlendShape(name, view, token_axis));
  BlendView rows;
  rows.data = view.data_as<std::byte>();
  rows.dtype = view.dtype();
  rows.token_count = view.dim(token_axis);
  rows.token_stride = view.stride(token_axis);
  const int64_t last = view.dim(view.rank() - 1);
  rows.dim = head_dim == 0 ? last : head_dim;
  if (rows.dim < 0 || (view.rank() == 3 && rows.dim != last) ||
      (rows.dim > 0 && last % rows.dim != 0)) {
    return BadBlendView(name, view,
                        "its rows do not consist of heads of " + std::to_string(rows.dim));
  }
  if (view.rank() == 3) {
    rows.head_count = view.dim(1 - token_axis);
    rows.head_stride = view.stride(1 - token_axis);
  } else {
    rows.head_count = rows.dim == 0 ? 0 : last / rows.dim;
    rows.head_stride = rows.dim;
  }
  return rows;
}

Status CheckRowsAreApart(std::string_view name, const BlendView& view) {
  if (view.token_count == 0 || view.head_count == 0 || view.dim == 0) return {};
  std::pair<int64_t, int64_t> inner{view.head_stride, view.head_count};
  std::pair<int64_t, int64_t> outer{view.token_stride, view.token_count};
  if (inner.second == 1 || (outer.second > 1 && outer.first < inner.first)) std::swap(inner, outer);
  const bool inner_apart = inner.second == 1 || inner.first >= view.dim;
  const bool outer_apart =
      outer.second == 1 || outer.first >= (inner.second - 1) * inner.first + view.dim;
  if (inner_apart && outer_apart) return {};
  return BlendError(std::string(name) +
                    ": its rows overlap each other; give one that can be written");
}

bool ShareMemory(const BlendView& a, const BlendView& b) {
  const auto end_of = [](const BlendView& view) {
    return view.row(view.token_count - 1, view.head_count - 1) + view.dim * view.element_bytes();
  };
  for (const BlendView& view : {a, b}) {
    if (view.token_count == 0 || view.head_count == 0 || view.dim == 0) return false;
  }
  const std::less<const std::byte*> before;
  return before(a.data, end_of(b)) && before(b.data, end_of(a));
}

Status CheckRows(std::span<const int64_t> rows, int64_t row_count) {
  int64_t previous = -1;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] <= previous || rows[i] >= row_count) {
      return BlendError("rows[" + std::to_string(i) + "] is " + std::to_string(rows[i]) +
                        "; rows ascend and are below " + std::to_string(row_count));
    }
    previous = rows[i];
  }
  return {};
}

Status CheckQueryStartLoc(std::span<const int32_t> query_start_loc, int64_t row_count) {
  if (query_start_loc.empty() || query_start_loc.front() != 0) {
    return BlendError("query_start_loc does not begin with 0");
  }
  for (size_t i = 1; i < query_start_loc.size(); ++i) {
    if (query_start_loc[i] < query_start_loc[i - 1]) {
      return BlendError("query_start_loc falls at request " + std::to_string(i - 1));
    }
  }
  if (query_start_loc.back() != row_count) {
    return BlendError("query_start_loc ends with " + std::to_string(query_start_loc.back()) +
                      ", but there are " + std::to_string(row_count) + " rows");
  }
  return {};
}

}  // namespace quire
