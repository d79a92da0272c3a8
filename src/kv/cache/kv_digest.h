// A digest of what callers can observe of a paged cache, for tests that compare states.
#ifndef QUIRE_KV_CACHE_KV_DIGEST_H_
#define QUIRE_KV_CACHE_KV_DIGEST_H_

#include <cstdint>

#include "kv/cache/kv_sender.h"
#include "kv/cache/layer_steps.h"
#include "kv/cache/paged_sequences.h"

namespace quire {

// Independent of what cannot be observed: how tokens are cut into blocks, the order of free pages,
// whether an attention call has failed. Takes time in the order of all pages.
uint64_t DigestState(const PagedSequences& kv, const KVSender& sender, const LayerSteps& steps);

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_DIGEST_H_
