// Checks of LayerKV, the keys and values of one layer that a caller or a source gives or wants.
#ifndef QUIRE_KV_CACHE_LAYER_KV_H_
#define QUIRE_KV_CACHE_LAYER_KV_H_

#include <cstdint>

#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// Tokens of it; 0 if its keys are not of rank 3.
int64_t TokenCount(const LayerKV& kv);

// BadArgument unless all tensors that such a layer has are contiguous, of its dtypes and of `count`
// tokens. `call` and `layer` are for the message.
Status CheckLayerKV(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                    const LayerKV& kv, int64_t count);

// The same, with keys of float32 in place of the layer's dtype if the caller has such.
Status CheckMovedKV(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                    const LayerKV& kv, int64_t count);

}  // namespace quire

#endif  // QUIRE_KV_CACHE_LAYER_KV_H_
