// Where memory can have huge pages.
#ifndef QUIRE_BASE_HUGE_PAGES_H_
#define QUIRE_BASE_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

constexpr size_t kHugePageBytes = size_t{2} << 20;  // of x86-64, and of arm64 with 4 KiB pages

// The part of `bytes` that is whole huge pages; empty where there is none.
inline std::span<std::byte> HugePagesOf(std::span<std::byte> bytes) {
  const size_t head = (0 - reinterpret_cast<uintptr_t>(bytes.data())) % kHugePageBytes;
  if (bytes.size() < head + kHugePageBytes) return {};
  const size_t size = (bytes.size() - head) / kHugePageBytes * kHugePageBytes;
  return bytes.subspan(head, size);
}

}  // namespace quire

#endif  // QUIRE_BASE_HUGE_PAGES_H_
