// LookupBuffer: hands KV from producers to consumers within a process, found by token ids and
// removed as it is taken. The interface of vLLM's KVLookupBuffer (insert, drop_select), with exact
// ids, limits, time-outs and an order that is always that of insertion.
#ifndef QUIRE_LOOKUP_BUFFER_H_
#define QUIRE_LOOKUP_BUFFER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "quire/host_tensor.h"
#include "quire/status.h"

namespace quire {

// Tensors by name, in the order in which they were put in.
using TensorBundle = std::vector<std::pair<std::string, HostTensor>>;

struct LookupEntry {
  HostTensor tokens;  // [T], integers, bool, or floats (then compared bit by bit)
  HostTensor roi;     // [T], bool or integers 0 and 1: the tokens that the tensors are of
  TensorBundle tensors;

  // The bytes of tokens, roi and all tensors.
  int64_t bytes() const;
};

// Which entry to take. Without tokens: any. Without roi: all tokens.
// Let s and q be the entry's and the query's tokens where their roi is set, and m the smaller
// length. The entry matches iff m > 0 and the first m are equal: integers as integers of any width,
// floats only with floats of the same type.
struct LookupQuery {
  std::optional<HostTensor> tokens{};
  std::optional<HostTensor> roi{};
};

enum class SelectOrder : uint8_t {
  kFifo,     // of the entries that match, the one inserted first
  kLongest,  // the one with the longest match, of several the one inserted first
};

struct LookupBufferOptions {
  int64_t capacity_bytes = 0;
  SelectOrder prefer = SelectOrder::kFifo;
  // What happens to an entry that was taken and not handed over (Handover): it is put back at its
  // old place (then it may be handed over twice), or drop it (then perhaps never).
  bool put_back = true;
};

// How long a call may block: nullopt = for ever, 0 = not at all.
using Timeout = std::optional<std::chrono::nanoseconds>;

// An entry that is out of the buffer while it is on its way to a consumer. Its bytes still count.
// Movable; may outlive its buffer.
class Handover {
 public:
  class Ledger;  // the buffer's side

  Handover(std::shared_ptr<Ledger> ledger, int64_t id, LookupEntry* entry) noexcept;
  Handover(Handover&& other) noexcept;
  Handover& operator=(Handover&& other) noexcept;
  ~Handover();  // as Fail, unless it was completed

  // REQUIRES: neither Complete nor Fail was called.
  const LookupEntry& entry() const { return *entry_; }
  // The consumer has it: frees its bytes. REQUIRES: as entry().
  LookupEntry Complete() noexcept;
  // The consumer does not have it: puts it back or drops it, as the options say. Nothing happens
  // when it is done already.
  void Fail() noexcept;

 private:
  std::shared_ptr<Ledger> ledger_;  // null: done
  int64_t id_ = 0;
  LookupEntry* entry_ = nullptr;  // the ledger's
};

// All calls from any thread at any time.
class LookupBuffer {
 public:
  // BadArgument for a capacity below 1.
  static Result<std::unique_ptr<LookupBuffer>> Create(const LookupBufferOptions& options);
  virtual ~LookupBuffer() = default;  // REQUIRES: no call is inside; Close and let them return

  // Takes the entry over; its tensors may be shared. Blocks while there is no room, earlier callers
  // first. TooLarge for an entry over the capacity, Full when the time is over, Closed;
  // BadArgument for tokens or roi that are not as described or two tensors of one name. Nothing is
  // inserted then.
  virtual Status Insert(LookupEntry entry, Timeout timeout = std::nullopt) = 0;

  // Removes an entry that matches and returns it. Blocks until there is one; an entry goes to the
  // oldest waiting query that it matches. nullopt when the time is over; Closed; BadArgument.
  virtual Result<std::optional<LookupEntry>> DropSelect(const LookupQuery& query,
                                                        Timeout timeout = std::nullopt) = 0;
  // The same for consumers that may yet fail to get it.
  virtual Result<std::optional<Handover>> Take(const LookupQuery& query,
                                               Timeout timeout = std::nullopt) = 0;

  // Ends all waiting calls with Closed, and every later one. Twice is fine.
  virtual void Close() noexcept = 0;

  // used_bytes() is the sum over the entries, those on their way included, and never over
  // capacity_bytes().
  virtual int64_t used_bytes() const = 0;
  virtual int64_t capacity_bytes() const = 0;
  virtual int64_t size() const = 0;     // entries that can be taken
  virtual int64_t waiting() const = 0;  // calls that block now
};

}  // namespace quire

#endif  // QUIRE_LOOKUP_BUFFER_H_
