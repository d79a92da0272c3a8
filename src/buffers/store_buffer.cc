#include "quire/store_buffer.h"

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/guard.h"
#include "buffers/store_key.h"

namespace quire {
namespace {

// Keys are spread over 64 parts with a lock each; a reader and a writer of different keys
// seldom meet.
constexpr size_t kPartCount = 64;

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

struct Part {
  mutable std::mutex mutex;
  std::unordered_map<std::string, HostTensor, TextHash, std::equal_to<>> tensors;
};

class LocalStoreBuffer final : public StoreBuffer {
 public:
  explicit LocalStoreBuffer(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  Status Put(std::string_view key, HostTensor value) override {
    return GuardEntry([&]() -> Status {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Put", key));
      const int64_t bytes = EntryBytes(key, value);
      if (bytes > capacity_bytes_) return Refuse(StatusCode::kTooLarge, key, bytes);
      Part& part = PartOf(key);
      const std::lock_guard lock(part.mutex);
      QUIRE_RETURN_IF_ERROR(CheckOpen("Put"));
      const auto place = part.tensors.find(key);
      const int64_t freed =
          place == part.tensors.end() ? 0 : EntryBytes(place->first, place->second);
      if (!Reserve(bytes - freed)) return Refuse(StatusCode::kFull, key, bytes);
      if (place != part.tensors.end()) {
        std::swap(place->second, value);  // the old one is freed behind the lock
        return {};
      }
      try {
        part.tensors.emplace(key, std::move(value));
      } catch (const std::bad_alloc&) {
        used_bytes_ -= bytes;
        throw;
      }
      ++size_;
      return {};
    });
  }

  Result<bool> Delete(std::string_view key) override {
    return GuardEntry([&]() -> Result<bool> {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Delete", key));
      Part& part = PartOf(key);
      const std::lock_guard lock(part.mutex);
      QUIRE_RETURN_IF_ERROR(CheckOpen("Delete"));
      const auto place = part.tensors.find(key);
      if (place == part.tensors.end()) return false;
      used_bytes_ -= EntryBytes(place->first, place->second);
      --size_;
      part.tensors.erase(place);
      return true;
    });
  }

  Result<std::optional<HostTensor>> Get(std::string_view key) const override {
    return GuardEntry([&]() -> Result<std::optional<HostTensor>> {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Get", key));
      const Part& part = PartOf(key);
      const std::lock_guard lock(part.mutex);
      QUIRE_RETURN_IF_ERROR(CheckOpen("Get"));
      const auto place = part.tensors.find(key);
      if (place == part.tensors.end()) return std::optional<HostTensor>();
      return std::optional<HostTensor>(place->second);
    });
  }

  Result<bool> Exists(std::string_view key) const override {
    return GuardEntry([&]() -> Result<bool> {
      QUIRE_RETURN_IF_ERROR(CheckStoreKey("Exists", key));
      const Part& part = PartOf(key);
      const std::lock_guard lock(part.mutex);
      QUIRE_RETURN_IF_ERROR(CheckOpen("Exists"));
      return part.tensors.find(key) != part.tensors.end();
    });
  }

  Result<std::vector<std::optional<HostTensor>>> MultiGet(
      std::span<const std::string_view> keys) const override {
    return ForEach<std::optional<HostTensor>>(keys, [&](std::string_view key) { return Get(key); });
  }

  Result<std::vector<bool>> MultiExists(std::span<const std::string_view> keys) const override {
    return ForEach<bool>(keys, [&](std::string_view key) { return Exists(key); });
  }

  Result<int64_t> PrefixHits(std::span<const std::string_view> keys) const override {
    int64_t hits = 0;
    for (const std::string_view key : keys) {
      QUIRE_ASSIGN_OR_RETURN(const bool exists, Exists(key));
      if (!exists) break;
      ++hits;
    }
    return hits;
  }

  void Close() noexcept override {
    closed_ = true;
    for (Part& part : parts_) {
      const std::lock_guard lock(part.mutex);  // calls that are inside have seen it open
      for (const auto& [key, value] : part.tensors) used_bytes_ -= EntryBytes(key, value);
      size_ -= static_cast<int64_t>(part.tensors.size());
      part.tensors.clear();
    }
  }

  int64_t used_bytes() const override { return used_bytes_; }
  int64_t capacity_bytes() const override { return capacity_bytes_; }
  int64_t size() const override { return size_; }

 private:
  static int64_t EntryBytes(std::string_view key, const HostTensor& value) {
    return static_cast<int64_t>(key.size()) + value.bytes();
  }

  Status CheckOpen(const char* call) const {
    if (!closed_) return {};
    return Status(StatusCode::kClosed, std::string("StoreBuffer::") + call + ": it is closed");
  }

  Status Refuse(StatusCode code, std::string_view key, int64_t bytes) const {
    return Status(code, "StoreBuffer::Put: \"" + std::string(key) + "\" takes " +
                            std::to_string(bytes) + " bytes; " + std::to_string(used_bytes_) +
                            " of " + std::to_string(capacity_bytes_) +
                            " are used: delete keys or make it larger");
  }

  // Adds to the used bytes unless that passes the capacity.
  bool Reserve(int64_t bytes) {
    int64_t used = used_bytes_;
    do {
      if (used + bytes > capacity_bytes_) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
    return true;
  }

  template <typename T, typename F>
  static Result<std::vector<T>> ForEach(std::span<const std::string_view> keys, F&& call) {
    return GuardEntry([&]() -> Result<std::vector<T>> {
      std::vector<T> results;
      results.reserve(keys.size());
      for (const std::string_view key : keys) {
        QUIRE_ASSIGN_OR_RETURN(T result, call(key));
        results.push_back(std::move(result));
      }
      return results;
    });
  }

  Part& PartOf(std::string_view key) { return parts_[TextHash()(key) % kPartCount]; }
  const Part& PartOf(std::string_view key) const { return parts_[TextHash()(key) % kPartCount]; }

  const int64_t capacity_bytes_;
  std::atomic<int64_t> used_bytes_ = 0;
  std::atomic<int64_t> size_ = 0;
  std::atomic<bool> closed_ = false;
  Part parts_[kPartCount];
};

}  // namespace

// One after the other: what follows a failure must not be stored.
Status StoreBuffer::MultiPut(std::span<const std::string_view> keys,
                             std::span<const HostTensor> values, int64_t* stored) {
  if (stored != nullptr) *stored = 0;
  return GuardEntry([&]() -> Status {
    if (keys.size() != values.size()) {
      return Status(StatusCode::kBadArgument,
                    "StoreBuffer::MultiPut: " + std::to_string(keys.size()) + " keys and " +
                        std::to_string(values.size()) + " values; give one value for each key");
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      QUIRE_RETURN_IF_ERROR(Put(keys[i], values[i]));
      if (stored != nullptr) ++*stored;
    }
    return {};
  });
}

Result<std::unique_ptr<StoreBuffer>> StoreBuffer::Create(const StoreBufferOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<StoreBuffer>> {
    if (options.capacity_bytes < 1) {
      return Status(StatusCode::kBadArgument, "StoreBufferOptions::capacity_bytes is " +
                                                  std::to_string(options.capacity_bytes) +
                                                  "; it must be at least 1");
    }
    return std::unique_ptr<StoreBuffer>(std::make_unique<LocalStoreBuffer>(options.capacity_bytes));
  });
}

}  // namespace quire
