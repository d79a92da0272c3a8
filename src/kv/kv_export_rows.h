// Stored tokens out of the pages as logical rows, for whole ranges; ReadSlot of kernels/backend.h
// is the same for one token.
#ifndef QUIRE_KV_KV_EXPORT_ROWS_H_
#define QUIRE_KV_KV_EXPORT_ROWS_H_

#include <span>

#include "kernels/backend.h"
#include "quire/seams.h"

namespace quire {

// k [slot][kv head][qk_head_dim], v [slot][kv head][v_head_dim], in the layout's dtype, bit for
// bit.
void ReadRows(const KVPages& pages, std::span<const AppendTarget> slots, void* k, void* v,
              ParallelRunner& runner) noexcept;

}  // namespace quire

#endif  // QUIRE_KV_KV_EXPORT_ROWS_H_
