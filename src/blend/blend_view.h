// The views that blending takes, checked and in one form.
#ifndef QUIRE_BLEND_BLEND_VIEW_H_
#define QUIRE_BLEND_BLEND_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// Rows [token][head][dim] in any order of tokens and heads; strides in elements, the numbers of a
// head are adjacent.
struct BlendView {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_count = 0;
  int64_t head_count = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  int64_t element_bytes() const { return dtype == DType::kF32 ? 4 : 2; }
  std::byte* row(int64_t token, int64_t head) const {
    return data + (token * token_stride + head * head_stride) * element_bytes();
  }
  bool operator==(const BlendView&) const = default;
};

inline Status BlendError(std::string message) {
  return Status(StatusCode::kBadArgument, "blend: " + std::move(message));
}

// `name` says in messages which argument it is. `head_dim`: numbers of a head, 0: the last
// dimension. BadArgument for what quire/blend.h does not take.
Result<BlendView> ReadBlendView(std::string_view name, const TensorView& view, int token_axis,
                                int64_t head_dim);

// BadArgument unless all rows of the view are apart, so that each can be written.
Status CheckRowsAreApart(std::string_view name, const BlendView& view);

// Whether some byte may belong to both.
bool ShareMemory(const BlendView& a, const BlendView& b);

// BadArgument unless the rows are ascending and in [0, row_count).
Status CheckRows(std::span<const int64_t> rows, int64_t row_count);

// BadArgument unless query_start_loc begins with 0, never falls and ends with row_count.
Status CheckQueryStartLoc(std::span<const int32_t> query_start_loc, int64_t row_count);

}  // namespace quire

#endif  // QUIRE_BLEND_BLEND_VIEW_H_
