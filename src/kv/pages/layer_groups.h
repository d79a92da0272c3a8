// Layers of equal shape, window and RoPE form a group, which has one page table: one page size, one
// page pool, the same page ids.
#ifndef QUIRE_KV_PAGES_LAYER_GROUPS_H_
#define QUIRE_KV_PAGES_LAYER_GROUPS_H_

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/kv_layout.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// Heads, dimensions and page sizes up to here keep every product of the layout in 64 bits; no model
// is near.
inline constexpr int64_t kExtentMax = 1 << 20;

struct LayerGroup {
  KVLayout layout;
  int64_t window = kNoWindow;
  int64_t page_count = 0;
  std::vector<int64_t> layers;  // ascending
};

// The groups in the order of their first layers. BadArgument for options out of range, with the
// field's name; RoPE and kernel path are checked where they are used.
Result<std::vector<LayerGroup>> MakeLayerGroups(const AttentionKVCacheOptions& options);

}  // namespace quire

#endif  // QUIRE_KV_PAGES_LAYER_GROUPS_H_
