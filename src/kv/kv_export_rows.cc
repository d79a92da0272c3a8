#include "kv/kv_export_rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/kv_slot.h"

namespace quire {
namespace {

// Slots per task: the tokens of a tile lie in the same cache lines, so a task takes about a tile.
constexpr int64_t kTaskSlots = kTilePositions;

struct RowArgs {
  const KVPages& pages;
  std::span<const AppendTarget> slots;
  void* k;
  void* v;
};

// Elements that lie in twos, `step` apart.
template <typename Element>
void CopyPairs(const Element* from, size_t step, int count, Element* to) {
  int d = 0;
  for (; d + 1 < count; d += 2, from += step) std::memcpy(to + d, from, 2 * sizeof(Element));
  if (d < count) to[d] = *from;
}

template <typename Element>
void CopySingles(const Element* from, size_t step, int count, Element* to) {
  if (step == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(Element));
    return;
  }
  for (int d = 0; d < count; ++d) to[d] = from[static_cast<size_t>(d) * step];
}

// One head of slots [begin, end): those of a tile share its lines, and a tile of one head fits the
// first-level cache, where those of all heads do not.
template <typename Element>
void ReadHead(const RowArgs& args, int64_t begin, int64_t end, int head) {
  const KVLayout& layout = args.pages.layout;
  for (int64_t i = begin; i < end; ++i) {
    const AppendTarget slot = args.slots[static_cast<size_t>(i)];
    const auto* page = reinterpret_cast<const Element*>(PageAt(args.pages, slot.page));
    const int64_t row = i * layout.num_kv_heads + head;
    Element* const k = static_cast<Element*>(args.k) + row * layout.qk_head_dim;
    const KeyElements key = KeyOfSlot(layout, slot.slot, head);
    if (key.pair == 2) {
      CopyPairs(page + key.first, key.step, layout.qk_head_dim, k);
    } else {
      CopySingles(page + key.first, key.step, layout.qk_head_dim, k);
    }
    const ValueElements value = ValueOfSlot(layout, slot.slot, head);
    CopySingles(page + value.first, value.step, layout.v_head_dim,
                static_cast<Element*>(args.v) + row * layout.v_head_dim);
  }
}

}  // namespace

void ReadRows(const KVPages& pages, std::span<const AppendTarget> slots, void* k, void* v,
              ParallelRunner& runner) noexcept {
  const RowArgs args{.pages = pages, .slots = slots, .k = k, .v = v};
  const auto read = DTypeBytes(pages.layout.dtype) == 4 ? ReadHead<uint32_t> : ReadHead<uint16_t>;
  const int64_t count = static_cast<int64_t>(slots.size());
  runner.ParallelFor((count + kTaskSlots - 1) / kTaskSlots, [&](int64_t task, int /*worker*/) {
    const int64_t end = std::min(count, (task + 1) * kTaskSlots);
    for (int head = 0; head < pages.layout.num_kv_heads; ++head)
      read(args, task * kTaskSlots, end, head);
  });
}

}  // namespace quire
