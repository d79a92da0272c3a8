// PageStorage: the bytes of all pages of all layers.
#ifndef QUIRE_KV_PAGES_PAGE_STORAGE_H_
#define QUIRE_KV_PAGES_PAGE_STORAGE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/numa_nodes.h"
#include "kernels/backend.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/page_pool.h"
#include "tensor/host_memory.h"

namespace quire {

// Bytes that are NaN in float32, float16 and bfloat16 alike. Poisoned memory makes a kernel that
// reads what it should not fail a test instead of passing by luck.
inline constexpr int kPoisonByte = 0xFF;

// One mapping per group, in which page i of all layers is one run of memory: what a token opens is
// filled by it, and not the beginning of a huge page in each layer. Physical memory is taken when a
// page is first written.
class PageStorage final : public PageFreeListener {
 public:
  // With `poison` all pages are NaN now and again whenever they are freed. OutOfMemory if a group
  // cannot be mapped.
  static Result<std::unique_ptr<PageStorage>> Create(std::vector<LayerGroup> groups, bool poison);

  // Pages that nobody has written come from all nodes in turn: any thread may read any page.
  void SpreadOver(NumaNodes& nodes) const noexcept;

  // What Create maps for these groups.
  static int64_t Bytes(std::span<const LayerGroup> groups);
  int64_t bytes() const;

  const KVPages& layer(int64_t index) const { return layers_[static_cast<size_t>(index)]; }
  // Moves tokens in all layers of the group.
  void Copy(int group, std::span<const AppendTarget> from, std::span<const AppendTarget> to,
            const uint8_t* opens_tile) const noexcept;
  void OnPageFreed(int group, int32_t page) noexcept override;

 private:
  struct Mapping {
    HostMemory bytes;        // [page][layer of the group]
    HostMemory v_nonfinite;  // [layer of the group][page][tile]
  };
  PageStorage(std::vector<LayerGroup> groups, bool poison)
      : groups_(std::move(groups)), poison_(poison) {}
  Status Map();

  std::vector<LayerGroup> groups_;
  bool poison_;
  std::vector<Mapping> mappings_;  // of the groups
  std::vector<KVPages> layers_;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_PAGE_STORAGE_H_
