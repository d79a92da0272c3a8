// HostResolver: names to numbers, without waiting for a name server longer than the caller can.
#ifndef QUIRE_NET_HOST_RESOLVER_H_
#define QUIRE_NET_HOST_RESOLVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// The first address of a host as a number; "" if there is none. The system's.
std::string FirstAddress(const std::string& host);

// All calls from any thread.
class HostResolver {
 public:
  // Servers of a cluster may tell new names for ever: beyond these the oldest is forgotten, and no
  // more look-ups are under way, each with a thread of its own.
  static constexpr size_t kNamesMax = 256;

  // find: as FirstAddress; from any thread, also after the resolver has gone.
  explicit HostResolver(std::shared_ptr<Clock> clock,
                        std::function<std::string(const std::string&)> find = FirstAddress);

  // The address of `host` as a number, which it may be already. Remembered for a while. Timeout,
  // Unavailable.
  Result<std::string> Resolve(const std::string& host, int64_t deadline_ns);

  // Names that are remembered or looked up.
  size_t name_count() const;

 private:
  // Outlives the resolver: a look-up cannot be called off, and ends in a thread of its own.
  struct State;
  struct Entry;

  const std::shared_ptr<State> state_;
};

}  // namespace quire

#endif  // QUIRE_NET_HOST_RESOLVER_H_
