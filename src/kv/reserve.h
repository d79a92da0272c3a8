// Capacity ahead of a commit that must not allocate.
#ifndef QUIRE_KV_RESERVE_H_
#define QUIRE_KV_RESERVE_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace quire {

// Room for `size` elements in all. Grows at least twofold: std::vector::reserve alone would move
// all elements each time that a table reserved step by step is one element longer.
template <typename T>
void ReserveGrowing(std::vector<T>& table, size_t size) {
  if (table.capacity() < size) table.reserve(std::max(size, 2 * table.capacity()));
}

}  // namespace quire

#endif  // QUIRE_KV_RESERVE_H_
