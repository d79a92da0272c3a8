#include "kv/page_storage.h"

#include <cstring>
#include <utility>

namespace quire {

Result<std::unique_ptr<PageStorage>> PageStorage::Create(std::vector<LayerGroup> groups,
                                                         bool poison) {
  std::unique_ptr<PageStorage> storage(new PageStorage(std::move(groups), poison));
  QUIRE_RETURN_IF_ERROR(storage->Map());
  return storage;
}

Status PageStorage::Map() {
  size_t layer_count = 0;
  for (const LayerGroup& group : groups_) layer_count += group.layers.size();
  layers_.resize(layer_count);
  for (const LayerGroup& group : groups_) {
    const size_t page_count = static_cast<size_t>(group.page_count);
    for (const int64_t index : group.layers) {
      Layer& layer = layers_[static_cast<size_t>(index)];
      QUIRE_ASSIGN_OR_RETURN(layer.bytes,
                             HostMemory::Allocate(page_count * group.layout.page_bytes()));
      const size_t tile_count = page_count * static_cast<size_t>(group.layout.tiles_per_page());
      QUIRE_ASSIGN_OR_RETURN(layer.v_nonfinite, HostMemory::Allocate(tile_count));
      layer.pages = {.layout = group.layout,
                     .base = layer.bytes.data(),
                     .v_nonfinite = layer.v_nonfinite.as<uint8_t>()};
      if (poison_)
        std::memset(layer.bytes.data(), kPoisonByte, page_count * group.layout.page_bytes());
    }
  }
  return Status();
}

void PageStorage::Copy(int group, std::span<const AppendTarget> from,
                       std::span<const AppendTarget> to, const uint8_t* opens_tile) const noexcept {
  if (from.empty()) return;
  for (const int64_t index : groups_[static_cast<size_t>(group)].layers) {
    CopySlots(layer(index), from, to, opens_tile);
  }
}

void PageStorage::OnPageFreed(int group, int32_t page) noexcept {
  if (!poison_) return;
  for (const int64_t index : groups_[static_cast<size_t>(group)].layers) {
    const KVPages& pages = layer(index);
    const size_t bytes = pages.layout.page_bytes();
    std::memset(pages.base + static_cast<size_t>(page) * bytes, kPoisonByte, bytes);
  }
}

}  // namespace quire
