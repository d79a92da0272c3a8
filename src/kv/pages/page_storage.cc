#include "kv/pages/page_storage.h"

#include <cstring>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

// From a page to the next one: the page of all layers.
size_t StrideOf(const LayerGroup& group) { return group.layers.size() * group.layout.page_bytes(); }
size_t PagesBytes(const LayerGroup& group) {
  return static_cast<size_t>(group.page_count) * StrideOf(group);
}
// The number of tiles of one layer.
size_t TileCount(const LayerGroup& group) {
  return static_cast<size_t>(group.page_count) * static_cast<size_t>(group.layout.tiles_per_page());
}
size_t FlagsBytes(const LayerGroup& group) { return group.layers.size() * TileCount(group); }

}  // namespace

int64_t PageStorage::Bytes(std::span<const LayerGroup> groups) {
  size_t bytes = 0;
  for (const LayerGroup& group : groups) {
    bytes += HostMemory::AllocatedBytes(PagesBytes(group)) +
             HostMemory::AllocatedBytes(FlagsBytes(group));
  }
  return static_cast<int64_t>(bytes);
}

int64_t PageStorage::bytes() const {
  size_t bytes = 0;
  for (const Mapping& mapping : mappings_)
    bytes += mapping.bytes.size() + mapping.v_nonfinite.size();
  return static_cast<int64_t>(bytes);
}

Result<std::unique_ptr<PageStorage>> PageStorage::Create(std::vector<LayerGroup> groups,
                                                         bool poison) {
  std::unique_ptr<PageStorage> storage(new PageStorage(std::move(groups), poison));
  QUIRE_RETURN_IF_ERROR(storage->Map());
  return storage;
}

void PageStorage::SpreadOver(NumaNodes& nodes) const noexcept {
  for (const Mapping& mapping : mappings_) {
    nodes.Spread(mapping.bytes.data(), mapping.bytes.size());
    nodes.Spread(mapping.v_nonfinite.data(), mapping.v_nonfinite.size());
  }
}

Status PageStorage::Map() {
  size_t layer_count = 0;
  for (const LayerGroup& group : groups_) layer_count += group.layers.size();
  layers_.resize(layer_count);
  for (const LayerGroup& group : groups_) {
    Mapping mapping;
    QUIRE_ASSIGN_OR_RETURN(mapping.bytes, HostMemory::Allocate(PagesBytes(group)));
    QUIRE_ASSIGN_OR_RETURN(mapping.v_nonfinite, HostMemory::Allocate(FlagsBytes(group)));
    if (poison_) std::memset(mapping.bytes.data(), kPoisonByte, PagesBytes(group));
    for (size_t i = 0; i < group.layers.size(); ++i) {
      layers_[static_cast<size_t>(group.layers[i])] = {
          .layout = group.layout,
          .base = mapping.bytes.data() + i * group.layout.page_bytes(),
          .v_nonfinite = mapping.v_nonfinite.as<uint8_t>() + i * TileCount(group),
          .page_stride = StrideOf(group)};
    }
    mappings_.push_back(std::move(mapping));
  }
  return Status();
}

void PageStorage::Copy(int group, std::span<const AppendTarget> from,
                       std::span<const AppendTarget> to, const uint8_t* opens_tile) const noexcept {
  QUIRE_DCHECK(from.size() == to.size());
  if (from.empty()) return;
  for (const int64_t index : groups_[static_cast<size_t>(group)].layers) {
    CopySlots(layer(index), from, to, opens_tile);
  }
}

void PageStorage::OnPageFreed(int group, int32_t page) noexcept {
  if (!poison_) return;
  const LayerGroup& freed = groups_[static_cast<size_t>(group)];
  QUIRE_DCHECK(page >= 0 && page < freed.page_count);
  std::memset(mappings_[static_cast<size_t>(group)].bytes.data() +
                  static_cast<size_t>(page) * StrideOf(freed),
              kPoisonByte, StrideOf(freed));
}

}  // namespace quire
