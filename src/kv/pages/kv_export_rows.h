// Stored tokens out of the pages as logical rows and back, for whole ranges; ReadSlot and WriteSlot
// of kernels/backend.h are the same for one token.
#ifndef QUIRE_KV_PAGES_KV_EXPORT_ROWS_H_
#define QUIRE_KV_PAGES_KV_EXPORT_ROWS_H_

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "quire/seams.h"

namespace quire {

// k [slot][kv head][qk_head_dim], v [slot][kv head][v_head_dim], in the layout's dtypes, bit for
// bit; scales [slot][kv head] of what is quantised. v and v_scale of a latent layout are null.
struct RowsOut {
  void* k;
  void* v;
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};
struct RowsIn {
  const void* k;
  const void* v;
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
};

void ReadRows(const KVPages& pages, std::span<const AppendTarget> slots, const RowsOut& to,
              ParallelRunner& runner) noexcept;

// The first `rows` of some rows: all fill whole tiles that no other row shares, or none does.
struct RowRun {
  int64_t rows;
  bool whole_tiles;
};
// opens_tile as in AppendArgs, of the same length as slots. REQUIRES: slots is not empty.
RowRun FirstRun(const KVLayout& layout, std::span<const AppendTarget> slots,
                const uint8_t* opens_tile) noexcept;
// Stores rows as they are, as append_kv does with rows of the layout's dtypes and no rotation.
// REQUIRES: the rows fill whole tiles.
void WriteTiles(const KVPages& pages, std::span<const AppendTarget> slots, const RowsIn& from,
                ParallelRunner& runner) noexcept;

}  // namespace quire

#endif  // QUIRE_KV_PAGES_KV_EXPORT_ROWS_H_
