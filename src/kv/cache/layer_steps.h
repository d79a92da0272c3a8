// LayerSteps: how far the layers of the open forward have got.
//
// A layer loads what it imports, then stores the new tokens, once each. It attends to them as often
// as it is asked to, and EndForward needs that it has.
#ifndef QUIRE_KV_CACHE_LAYER_STEPS_H_
#define QUIRE_KV_CACHE_LAYER_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "kv/plan/attention_tensors.h"
#include "quire/status.h"

namespace quire {

class LayerSteps {
 public:
  explicit LayerSteps(size_t layer_count) : layers_(layer_count) {}

  // A forward begins: no layer has done anything.
  void Begin() noexcept {
    for (Layer& layer : layers_) layer = {};
  }
  int64_t count() const { return static_cast<int64_t>(layers_.size()); }
  bool loaded(int64_t layer) const { return at(layer).loaded; }
  bool appended(int64_t layer) const { return at(layer).appended; }
  bool attended(int64_t layer) const { return at(layer).attended; }
  void SetLoaded(int64_t layer) noexcept { at(layer).loaded = true; }
  void SetAppended(int64_t layer) noexcept {
    QUIRE_DCHECK(!at(layer).appended) << "layer " << layer << " has stored its rows already";
    at(layer).appended = true;
  }
  void SetAttended(int64_t layer, bool attended = true) noexcept { at(layer).attended = attended; }

  // BadState unless the layer's tokens have, or have not yet, been stored.
  Status RequireAppended(const AttentionCall& call, bool appended) const;
  // BadState, for EndForward, unless every layer has stored and attended.
  Status RequireAll() const;

 private:
  struct Layer {
    bool loaded = false;
    bool appended = false;
    bool attended = false;
  };
  Layer& at(int64_t layer) { return layers_[static_cast<size_t>(layer)]; }
  const Layer& at(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }

  std::vector<Layer> layers_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_LAYER_STEPS_H_
