// HostResolver: names to numbers, without waiting for a name server longer than the caller can.
#ifndef QUIRE_NET_HOST_RESOLVER_H_
#define QUIRE_NET_HOST_RESOLVER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// All calls from any thread.
class HostResolver {
 public:
  explicit HostResolver(std::shared_ptr<Clock> clock);

  // The address of `host` as a number, which it may be already. Remembered for a while. Timeout,
  // Unavailable.
  Result<std::string> Resolve(const std::string& host, int64_t deadline_ns);

 private:
  // Outlives the resolver: a look-up cannot be called off, and ends in a thread of its own.
  struct State;
  static void LookUp(const std::shared_ptr<State>& state, const std::string& host);

  const std::shared_ptr<State> state_;
};

}  // namespace quire

#endif  // QUIRE_NET_HOST_RESOLVER_H_
