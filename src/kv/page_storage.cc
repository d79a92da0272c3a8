#include "kv/page_storage.h"

#include <cstring>
#include <utility>

namespace quire {
namespace {

// Of one layer.
size_t PagesBytes(const LayerGroup& group) {
  return static_cast<size_t>(group.page_count) * group.layout.page_bytes();
}
size_t TileCount(const LayerGroup& group) {
  return static_cast<size_t>(group.page_count) * static_cast<size_t>(group.layout.tiles_per_page());
}

}  // namespace

int64_t PageStorage::Bytes(std::span<const LayerGroup> groups) {
  size_t bytes = 0;
  for (const LayerGroup& group : groups) {
    bytes += group.layers.size() * (HostMemory::AllocatedBytes(PagesBytes(group)) +
                                    HostMemory::AllocatedBytes(TileCount(group)));
  }
  return static_cast<int64_t>(bytes);
}

int64_t PageStorage::bytes() const {
  size_t bytes = 0;
  for (const Layer& layer : layers_) bytes += layer.bytes.size() + layer.v_nonfinite.size();
  return static_cast<int64_t>(bytes);
}

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
    for (const int64_t index : group.layers) {
      Layer& layer = layers_[static_cast<size_t>(index)];
      QUIRE_ASSIGN_OR_RETURN(layer.bytes, HostMemory::Allocate(PagesBytes(group)));
      QUIRE_ASSIGN_OR_RETURN(layer.v_nonfinite, HostMemory::Allocate(TileCount(group)));
      layer.pages = {.layout = group.layout,
                     .base = layer.bytes.data(),
                     .v_nonfinite = layer.v_nonfinite.as<uint8_t>()};
      if (poison_) std::memset(layer.bytes.data(), kPoisonByte, PagesBytes(group));
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
