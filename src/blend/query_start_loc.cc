#include "base/guard.h"
#include "blend/blend_view.h"
#include "quire/blend.h"

namespace quire {

Status FillPositions(std::span<const int32_t> query_start_loc,
                     std::span<const int64_t> context_lengths, std::span<int64_t> positions) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(
        CheckQueryStartLoc(query_start_loc, static_cast<int64_t>(positions.size())));
    if (context_lengths.size() + 1 != query_start_loc.size()) {
      return BlendError("query_start_loc is of " + std::to_string(query_start_loc.size() - 1) +
                        " requests, but there are " + std::to_string(context_lengths.size()) +
                        " context lengths");
    }
    constexpr int64_t kContextEnd = int64_t{1} << 31;
    for (size_t request = 0; request < context_lengths.size(); ++request) {
      if (context_lengths[request] < 0 || context_lengths[request] >= kContextEnd) {
        return BlendError("the context length of request " + std::to_string(request) + " is " +
                          std::to_string(context_lengths[request]) + ", outside of [0, 2^31)");
      }
    }
    for (size_t request = 0; request < context_lengths.size(); ++request) {
      const int32_t begin = query_start_loc[request];
      for (int32_t row = begin; row < query_start_loc[request + 1]; ++row) {
        positions[static_cast<size_t>(row)] = context_lengths[request] + (row - begin);
      }
    }
    return {};
  });
}

}  // namespace quire
