#include "kv/pages/kv_export_rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "kernels/kv_slot.h"
#include "kv/pages/kv_export_tiles.h"

namespace quire {
namespace {

// Slots per task: the tokens of a tile lie in the same cache lines, so a task takes about a tile.
constexpr int64_t kTaskSlots = kTilePositions;

struct RowArgs {
  const KVPages& pages;
  std::span<const AppendTarget> slots;
  RowsOut to;
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
void ReadKeyHead(const RowArgs& args, int64_t begin, int64_t end, int head) {
  const KVLayout& layout = args.pages.layout;
  for (int64_t i = begin; i < end; ++i) {
    const AppendTarget slot = args.slots[static_cast<size_t>(i)];
    const auto* page = reinterpret_cast<const Element*>(PageAt(args.pages, slot.page));
    Element* const k =
        static_cast<Element*>(args.to.k) + (i * layout.num_kv_heads + head) * layout.qk_head_dim;
    const SlotElements key = KeyOfSlot(layout, slot.slot, head);
    if (key.pair == 2) {
      CopyPairs(page + key.first, key.step, layout.qk_head_dim, k);
    } else {
      CopySingles(page + key.first, key.step, layout.qk_head_dim, k);
    }
  }
}

template <typename Element>
void ReadValueHead(const RowArgs& args, int64_t begin, int64_t end, int head) {
  const KVLayout& layout = args.pages.layout;
  for (int64_t i = begin; i < end; ++i) {
    const AppendTarget slot = args.slots[static_cast<size_t>(i)];
    const SlotElements value = ValueOfSlot(layout, slot.slot, head);
    const auto* values = reinterpret_cast<const Element*>(ValuesAt(args.pages, slot.page));
    CopySingles(
        values + value.first, value.step, layout.v_head_dim,
        static_cast<Element*>(args.to.v) + (i * layout.num_kv_heads + head) * layout.v_head_dim);
  }
}

using ReadHeadFunction = void (*)(const RowArgs&, int64_t begin, int64_t end, int head);
ReadHeadFunction KeyReader(DType dtype) {
  const int64_t bytes = DTypeBytes(dtype);
  if (bytes == 1) return ReadKeyHead<uint8_t>;
  return bytes == 2 ? ReadKeyHead<uint16_t> : ReadKeyHead<uint32_t>;
}
ReadHeadFunction ValueReader(DType dtype) {
  const int64_t bytes = DTypeBytes(dtype);
  if (bytes == 1) return ReadValueHead<uint8_t>;
  return bytes == 2 ? ReadValueHead<uint16_t> : ReadValueHead<uint32_t>;
}

// Scales of slots [begin, end), bit for bit: a NaN keeps its payload.
void ReadScales(const RowArgs& args, int64_t begin, int64_t end, int part, float* to) {
  const int heads = args.pages.layout.num_kv_heads;
  for (int64_t i = begin; i < end; ++i) {
    const AppendTarget slot = args.slots[static_cast<size_t>(i)];
    for (int head = 0; head < heads; ++head) {
      std::memcpy(to + i * heads + head, ScaleOfSlot(args.pages, slot.page, slot.slot, head, part),
                  sizeof(float));
    }
  }
}

// Whether the slots are those of one whole tile, in order.
bool IsTile(std::span<const AppendTarget> slots) {
  if (slots.size() != kTilePositions || slots[0].page < 0) return false;
  if (slots[0].slot % kTilePositions != 0) return false;
  for (int lane = 0; lane < kTilePositions; ++lane) {
    const AppendTarget slot = slots[static_cast<size_t>(lane)];
    if (slot.page != slots[0].page || slot.slot != slots[0].slot + lane) return false;
  }
  return true;
}

// Bytes from a row to the next, and from a head to the next.
struct RowBytes {
  explicit RowBytes(const KVLayout& layout)
      : k_head(static_cast<size_t>(layout.qk_head_dim) * layout.k_element_bytes()),
        v_head(layout.latent ? 0
                             : static_cast<size_t>(layout.v_head_dim) * layout.v_element_bytes()),
        k(k_head * static_cast<size_t>(layout.num_kv_heads)),
        v(v_head * static_cast<size_t>(layout.num_kv_heads)) {}
  size_t k_head, v_head, k, v;
};

void ReadWholeTile(const RowArgs& args, int64_t begin) {
  const KVLayout& layout = args.pages.layout;
  const RowBytes bytes(layout);
  const AppendTarget first = args.slots[static_cast<size_t>(begin)];
  const std::byte* const page = PageAt(args.pages, first.page);
  std::byte* k = static_cast<std::byte*>(args.to.k) + static_cast<size_t>(begin) * bytes.k;
  std::byte* v = layout.latent
                     ? nullptr
                     : static_cast<std::byte*>(args.to.v) + static_cast<size_t>(begin) * bytes.v;
  for (int head = 0; head < layout.num_kv_heads; ++head, k += bytes.k_head, v += bytes.v_head)
    ReadTile(layout, page, first.slot / kTilePositions, head, k, bytes.k, v, bytes.v);
}

// Those of a tile's 16 tokens and one head lie side by side in the page, the heads' in the rows.
void WriteScales(const KVPages& pages, AppendTarget first, int part, const float* from) {
  const int heads = pages.layout.num_kv_heads;
  for (int head = 0; head < heads; ++head) {
    float* const to = ScaleOfSlot(pages, first.page, first.slot, head, part);
    for (int lane = 0; lane < kTilePositions; ++lane)
      std::memcpy(to + lane, from + lane * heads + head, sizeof(float));
  }
}

}  // namespace

void ReadRows(const KVPages& pages, std::span<const AppendTarget> slots, const RowsOut& to,
              ParallelRunner& runner) noexcept {
  const KVLayout& layout = pages.layout;
  const RowArgs args{.pages = pages, .slots = slots, .to = to};
  const ReadHeadFunction read_keys = KeyReader(layout.dtype);
  const ReadHeadFunction read_values = ValueReader(layout.v_dtype());
  const bool whole_tiles = MovesWholeTiles(layout);
  const int64_t count = static_cast<int64_t>(slots.size());
  // Tasks end where tiles end, so the first may be shorter.
  const int64_t lead = count == 0 ? 0 : slots[0].slot % kTaskSlots;
  runner.ParallelFor((count + lead + kTaskSlots - 1) / kTaskSlots, [&](int64_t task, int) {
    const int64_t begin = std::max<int64_t>(0, task * kTaskSlots - lead);
    const int64_t end = std::min(count, (task + 1) * kTaskSlots - lead);
    if (IsQuantised(layout.dtype)) ReadScales(args, begin, end, 0, to.k_scale);
    if (!layout.latent && IsQuantised(layout.v_dtype()))
      ReadScales(args, begin, end, layout.v_scale_part(), to.v_scale);
    if (whole_tiles &&
        IsTile(slots.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)))) {
      return ReadWholeTile(args, begin);
    }
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      read_keys(args, begin, end, head);
      if (!layout.latent) read_values(args, begin, end, head);
    }
  });
}

RowRun FirstRun(const KVLayout& layout, std::span<const AppendTarget> slots,
                const uint8_t* opens_tile) noexcept {
  const bool moves_tiles = MovesWholeTiles(layout);
  const auto is_tile = [&](size_t row) {
    return moves_tiles && row + kTilePositions <= slots.size() && opens_tile[row] != 0 &&
           IsTile(slots.subspan(row, kTilePositions));
  };
  const bool whole_tiles = is_tile(0);
  size_t rows = 0;
  while (rows < slots.size() && is_tile(rows) == whole_tiles) {
    rows += whole_tiles ? static_cast<size_t>(kTilePositions) : 1;
  }
  QUIRE_DCHECK(rows > 0 && rows <= slots.size());
  return {static_cast<int64_t>(rows), whole_tiles};
}

void WriteTiles(const KVPages& pages, std::span<const AppendTarget> slots, const RowsIn& from,
                ParallelRunner& runner) noexcept {
  const KVLayout& layout = pages.layout;
  const RowBytes bytes(layout);
  QUIRE_DCHECK(MovesWholeTiles(layout) && slots.size() % kTilePositions == 0);
  const int64_t tiles = static_cast<int64_t>(slots.size()) / kTilePositions;
  runner.ParallelFor(tiles, [&](int64_t task, int) {
    const size_t row = static_cast<size_t>(task * kTilePositions);
    QUIRE_DCHECK(IsTile(slots.subspan(row, kTilePositions))) << "rows of another tile";
    const AppendTarget first = slots[row];
    const std::byte* from_k = static_cast<const std::byte*>(from.k) + row * bytes.k;
    const std::byte* from_v =
        layout.latent ? nullptr : static_cast<const std::byte*>(from.v) + row * bytes.v;
    bool finite = true;
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      const bool head_finite =
          WriteTile(layout, PageAt(pages, first.page), first.slot / kTilePositions, head, from_k,
                    bytes.k, from_v, bytes.v);
      finite = head_finite && finite;
      from_k += bytes.k_head;
      from_v += bytes.v_head;
    }
    const size_t scale = row * static_cast<size_t>(layout.num_kv_heads);
    if (IsQuantised(layout.dtype)) WriteScales(pages, first, 0, from.k_scale + scale);
    if (!layout.latent && IsQuantised(layout.v_dtype()))
      WriteScales(pages, first, layout.v_scale_part(), from.v_scale + scale);
    pages.v_nonfinite[TileFlag(layout, first.page, first.slot)] = finite ? 0 : 1;
  });
}

}  // namespace quire
