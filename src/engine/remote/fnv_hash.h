// FNV-1a: a hash that is the same in every process. It protects from nothing: texts of equal hashes
// can be made.
#ifndef QUIRE_ENGINE_REMOTE_FNV_HASH_H_
#define QUIRE_ENGINE_REMOTE_FNV_HASH_H_

#include <cstdint>
#include <string_view>

namespace quire {

class FnvHash {
 public:
  void Add(uint64_t value) { value_ = (value_ ^ value) * 0x100000001B3ULL; }
  void Add(std::string_view text) {
    for (const char c : text) Add(uint64_t{static_cast<uint8_t>(c)});
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325ULL;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REMOTE_FNV_HASH_H_
