// Memory that comes and goes in pieces of a few sizes, used again: fresh memory costs more than the
// copy into it.
#ifndef QUIRE_BASE_SPARE_MEMORY_H_
#define QUIRE_BASE_SPARE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace quire {

// One thread at a time.
class SpareMemory {
 public:
  static constexpr size_t kPiecesMax = 256;

  // Holds at most `limit` bytes. May throw std::bad_alloc; nothing else here does.
  explicit SpareMemory(int64_t limit) : limit_(limit) { pieces_.reserve(kPiecesMax); }

  // A piece of exactly that size; null: there is none.
  std::unique_ptr<std::byte[]> Take(int64_t bytes) noexcept;
  // The pieces that have lain here longest make room for it.
  void Give(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept;
  // Frees the oldest until it holds at most `bytes`.
  void ShrinkTo(int64_t bytes) noexcept;
  int64_t held() const { return held_; }

 private:
  struct Piece {
    std::unique_ptr<std::byte[]> memory{};
    int64_t bytes = 0;
  };

  const int64_t limit_;
  std::vector<Piece> pieces_;  // the oldest first
  int64_t held_ = 0;
};

// The same for pieces that come back by themselves. What lies here and what is held have `limit`
// bytes together, unless what is held has more alone. All calls from any thread.
class SharedSpareMemory {
 public:
  explicit SharedSpareMemory(int64_t limit) : limit_(limit), spare_(limit) {}

  // `bytes` bytes, which come back when the last holder lets go. May throw std::bad_alloc.
  static std::shared_ptr<std::byte[]> Take(const std::shared_ptr<SharedSpareMemory>& from,
                                           int64_t bytes);
  // The bytes of pieces that nobody holds.
  int64_t spare_bytes() const;

 private:
  void Give(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept;
  void Hold(int64_t bytes) noexcept;

  const int64_t limit_;
  mutable std::mutex mutex_;
  SpareMemory spare_;
  int64_t held_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BASE_SPARE_MEMORY_H_
