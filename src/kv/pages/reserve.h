// Capacity ahead of a commit that must not allocate.
#ifndef QUIRE_KV_PAGES_RESERVE_H_
#define QUIRE_KV_PAGES_RESERVE_H_

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

// Gives memory back that is more than four times what is used. Less would be taken again soon by a
// table that grows and shrinks. To leave it is no error: a copy that cannot be allocated is not
// made.
template <typename T>
void ReleaseUnused(std::vector<T>& table) noexcept {
  if (table.capacity() / 4 > table.size()) table.shrink_to_fit();
}
template <typename T>
void FreeAll(std::vector<T>& table) noexcept {
  std::vector<T>().swap(table);
}

// How much of a memory that is used again and again has been needed lately: the most of the last
// 64 to 128 uses. So steps of different sizes that take turns do not take it again each time.
class RecentPeak {
 public:
  // Returns the peak, `size` included.
  size_t Count(size_t size) noexcept {
    now_ = std::max(now_, size);
    const size_t peak = std::max(now_, before_);
    if (++uses_ == kUses) {
      before_ = now_;
      now_ = size;
      uses_ = 0;
    }
    return peak;
  }

 private:
  static constexpr int kUses = 64;

  size_t now_ = 0;
  size_t before_ = 0;
  int uses_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_RESERVE_H_
