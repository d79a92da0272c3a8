// A peer of the server of buffers that does everything wrong, in an order that somebody else
// chooses: random numbers in tests, bytes in the fuzz target.
#ifndef QUIRE_BUFFERS_TESTING_HOSTILE_PEER_H_
#define QUIRE_BUFFERS_TESTING_HOSTILE_PEER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "buffers/server_session.h"
#include "wire/wire_link.h"

namespace quire {

// Buffers for one hostile session after the other. A check fails (and ends the process) when a
// session breaks a promise: more memory than a stranger may have, an answer that is not
// well-formed, an entry that is lost or doubled, bytes of the budget that stay away.
class HostilePeer {
 public:
  explicit HostilePeer(std::string secret);

  // `choose(n)`: any number in [0, n). One connection from its begin to its end.
  void RunSession(const std::function<int64_t(int64_t)>& choose);
  // Whatever bytes, as they are.
  void SendRaw(std::span<const std::byte> bytes);

  // Sums over all sessions.
  int64_t sessions_open = 0;  // that got past the hello
  int64_t answers = 0;
  int64_t errors = 0;  // answers that say no
  int64_t goodbyes = 0;
  int64_t entries_taken = 0;

 private:
  class Session;
  void Refill();
  void CheckNothingIsLost(int64_t taken_least, int64_t taken_most);

  std::unique_ptr<LocalLookupBuffer> lookup_;
  std::unique_ptr<StoreBuffer> store_;
  ServedBuffers served_;
  int64_t entries_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_TESTING_HOSTILE_PEER_H_
