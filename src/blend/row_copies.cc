// Some rows of a batch: taken out, and put back.
#include <cstring>

#include "base/guard.h"
#include "blend/blend_view.h"
#include "quire/blend.h"

namespace quire {
namespace {

enum class CopyDirection { kGather, kScatter };

Status CopyRows(const TensorView& some_view, int token_axis, std::span<const int64_t> rows,
                const TensorView& all_view, CopyDirection direction) {
  QUIRE_ASSIGN_OR_RETURN(const BlendView some, ReadBlendView("some", some_view, token_axis, 0));
  QUIRE_ASSIGN_OR_RETURN(const BlendView all, ReadBlendView("all", all_view, token_axis, 0));
  if (some.dtype != all.dtype || some.head_count != all.head_count || some.dim != all.dim ||
      some.token_count != static_cast<int64_t>(rows.size())) {
    return BlendError(std::to_string(rows.size()) + " rows of " + all_view.ToString() +
                      " are not " + some_view.ToString());
  }
  QUIRE_RETURN_IF_ERROR(CheckRows(rows, all.token_count));
  const bool scatter = direction == CopyDirection::kScatter;
  QUIRE_RETURN_IF_ERROR(CheckRowsAreApart(scatter ? "all" : "some", scatter ? all : some));
  if (ShareMemory(some, all)) return BlendError("the views of some and of all rows share memory");
  const auto bytes = static_cast<size_t>(some.dim * some.element_bytes());
  for (size_t i = 0; i < rows.size() && bytes > 0; ++i) {
    for (int64_t head = 0; head < some.head_count; ++head) {
      std::byte* const one = some.row(static_cast<int64_t>(i), head);
      std::byte* const other = all.row(rows[i], head);
      std::memcpy(scatter ? other : one, scatter ? one : other, bytes);
    }
  }
  return {};
}

}  // namespace

Status ScatterRows(const TensorView& some, int token_axis, std::span<const int64_t> rows,
                   const TensorView& all) {
  return GuardEntry([&] { return CopyRows(some, token_axis, rows, all, CopyDirection::kScatter); });
}

Status GatherRows(const TensorView& all, int token_axis, std::span<const int64_t> rows,
                  const TensorView& some) {
  return GuardEntry([&] { return CopyRows(some, token_axis, rows, all, CopyDirection::kGather); });
}

}  // namespace quire
