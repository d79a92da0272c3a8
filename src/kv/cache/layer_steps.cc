#include "kv/cache/layer_steps.h"

#include <string>

namespace quire {

Status LayerSteps::RequireAppended(const AttentionCall& call, bool appended) const {
  if (at(call.layer).appended == appended) return Status();
  return Status(StatusCode::kBadState,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    (appended ? " has not been appended to in this forward; call Append first"
                              : " has been appended to in this forward already"));
}

Status LayerSteps::RequireAll() const {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].appended && layers_[l].attended) continue;
    const char* missing = layers_[l].appended ? "Attend" : "Append";
    return Status(StatusCode::kBadState,
                  "EndForward: layer " + std::to_string(l) + " lacks its " + missing +
                      "; run every layer, call AbortForward, or create the cache with "
                      "allow_skipped_layers");
  }
  return Status();
}

}  // namespace quire
