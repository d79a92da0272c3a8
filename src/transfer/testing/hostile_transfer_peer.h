// A peer that speaks the protocol of transfers and breaks it, in an order that somebody else
// chooses: random numbers in tests, bytes in the fuzz target.
#ifndef QUIRE_TRANSFER_TESTING_HOSTILE_TRANSFER_PEER_H_
#define QUIRE_TRANSFER_TESTING_HOSTILE_TRANSFER_PEER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

namespace quire {

// A check fails (and ends the process) when a session breaks a promise: more memory than a stranger
// may have, a byte that counts and is not the sender's, a reservation that nobody asked for
// touched, a transfer or a part that ends twice or never.
class HostileTransferPeer {
 public:
  explicit HostileTransferPeer(std::string secret) : secret_(std::move(secret)) {}

  // `choose(n)`: any number in [0, n). One connection from its begin to its end.
  void RunSession(const std::function<int64_t(int64_t)>& choose);
  // An opening of several streams, in either role, or a socket that is to join one.
  void RunOpening(const std::function<int64_t(int64_t)>& choose);
  // Whatever bytes, as they are, from the begin of a connection or, with `is_open`, after its
  // opening.
  void SendRaw(std::span<const std::byte> bytes, bool is_open);

  // Sums over all sessions.
  int64_t sessions_open = 0;  // that got past the passports
  int64_t rows_complete = 0;
  int64_t requests = 0;
  int64_t ended = 0;     // with a goodbye
  int64_t openings = 0;  // of several streams, that were completed
  int64_t joins = 0;

 private:
  const std::string secret_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_HOSTILE_TRANSFER_PEER_H_
