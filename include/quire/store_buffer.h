// StoreBuffer: tensors by name, within a process. The interface of vLLM's KVStoreBuffer (put, get),
// bounded, for any number of threads.
#ifndef QUIRE_STORE_BUFFER_H_
#define QUIRE_STORE_BUFFER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "quire/host_tensor.h"
#include "quire/status.h"

namespace quire {

// A key is 1 to kStoreKeyBytesMax bytes, whatever they are.
inline constexpr int64_t kStoreKeyBytesMax = 512;

struct StoreBufferOptions {
  int64_t capacity_bytes = 0;  // of the tensors and their keys
};

// All calls from any thread. What a Put stored is seen by every Get that begins after it returned;
// a Get during a Put sees the old or the new tensor.
class StoreBuffer {
 public:
  // BadArgument for a capacity below 1.
  static Result<std::unique_ptr<StoreBuffer>> Create(const StoreBufferOptions& options);
  virtual ~StoreBuffer() = default;

  // Stores, in place of what the key had. Full when there is no room (the old one stays), TooLarge
  // for what never fits, BadArgument for a key out of range, Closed.
  virtual Status Put(std::string_view key, HostTensor value) = 0;
  // Whether it was there.
  virtual Result<bool> Delete(std::string_view key) = 0;
  // nullopt if it is not there. Shares the bytes.
  virtual Result<std::optional<HostTensor>> Get(std::string_view key) const = 0;
  virtual Result<bool> Exists(std::string_view key) const = 0;

  // The same for several keys; results are in their order. MultiPut stores up to the first failure,
  // which it returns; `stored`, if not null, is how many it stored.
  Status MultiPut(std::span<const std::string_view> keys, std::span<const HostTensor> values,
                  int64_t* stored = nullptr);
  virtual Result<std::vector<std::optional<HostTensor>>> MultiGet(
      std::span<const std::string_view> keys) const = 0;
  virtual Result<std::vector<bool>> MultiExists(std::span<const std::string_view> keys) const = 0;
  // How many keys from the first on are there without a gap.
  virtual Result<int64_t> PrefixHits(std::span<const std::string_view> keys) const = 0;

  // Drops everything; every later call returns Closed. Twice is fine.
  virtual void Close() noexcept = 0;

  virtual int64_t used_bytes() const = 0;
  virtual int64_t capacity_bytes() const = 0;
  virtual int64_t size() const = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_BUFFER_H_
