// What a forward loads: the states behind imported tokens, each when its layer is run.
#include <cstring>
#include <string>

#include "base/check.h"
#include "kv/recurrent/recurrent_cache.h"

namespace quire {

Result<TensorView> LayerSource::LoadState(int64_t layer) {
  return Status(StatusCode::kBadState, "LayerSource::LoadState: layer " + std::to_string(layer) +
                                           ": this source has no states of recurrent layers");
}

// The state goes where the member's first piece begins, which no kernel writes: a layer that is run
// again finds it there.
Status SlottedRecurrentCache::LoadStates(const LayerCall& call) {
  uint8_t& loaded = loaded_[static_cast<size_t>(call.layer)];
  if (loaded != 0) return Status();
  for (const StateMember& member : history_.members()) {
    if (member.imported == 0) continue;
    QUIRE_DCHECK(member.source != nullptr && !member.pending.empty());
    const Result<TensorView> state = member.source->LoadState(call.layer);
    if (!state.ok()) {
      return Status(state.status().code(),
                    std::string(call.name) + ": layer " + std::to_string(call.layer) +
                        " of sequence " + std::to_string(history_.table()[member.index].id) +
                        " was not loaded: " + std::string(state.status().message()) +
                        "; call AbortForward");
    }
    QUIRE_RETURN_IF_ERROR(CheckState(call.name, call.layer, "the loaded state", *state));
    std::memcpy(StateIn(member.pending.front().slot, call.layout->state_offset), state->data(),
                static_cast<size_t>(call.layout->state_size()) * sizeof(float));
  }
  loaded = 1;
  return Status();
}

}  // namespace quire
