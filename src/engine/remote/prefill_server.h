// Where other processes ask for prompts: a listener, the connections that came, and what they ask
// for. The engine takes it between two steps (PrefillTraffic).
//
// Threads: one of its own accepts, and forgets what is over; the connections' threads call `wake`;
// the engine's thread does the rest. The connections are under a mutex, which is not held while
// anything waits.
#ifndef QUIRE_ENGINE_REMOTE_PREFILL_SERVER_H_
#define QUIRE_ENGINE_REMOTE_PREFILL_SERVER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "quire/kv_transfer.h"
#include "quire/transfer_peer.h"

namespace quire {

// A prompt that is computed for a peer.
struct PrefillJob {
  std::shared_ptr<TransferPeer> peer;
  int64_t connection = 0;  // number of the peer in the channel
  int64_t window = 0;      // bytes that the connection takes before the peer has taken any
  TransferJob job;
  ReceiveMap map;
  int64_t sent = 0;              // tokens of the map that the peer has, while there is no mark
  int64_t marked_sequence = -1;  // whose tokens are sent; -1: none
  bool is_refused = false;       // nothing more is sent
};

class PrefillServer {
 public:
  // `wake` is called, from any thread, when there may be something to take.
  static Result<std::unique_ptr<PrefillServer>> Start(const TransferListenerOptions& options,
                                                      std::function<void()> wake);
  PrefillServer(const PrefillServer&) = delete;
  PrefillServer& operator=(const PrefillServer&) = delete;
  ~PrefillServer();

  const std::string& endpoint() const { return listener_->endpoint(); }
  Status last_refusal() const { return listener_->last_refusal(); }
  // The sink of the marks: connections by their numbers.
  const std::shared_ptr<RemoteChannel>& channel() const { return channel_; }

  // ---- From any thread.
  // Nobody else connects; with `at_once` all connections are closed.
  void End(bool at_once) noexcept;
  bool is_ending() const noexcept { return is_ending_.load(std::memory_order_acquire); }
  // Prompts that peers have asked for and have neither got nor given up.
  int64_t open_count() const;
  // Connections that are over are forgotten.
  void ForgetEnded() noexcept;

  // ---- The engine's thread.
  // The next prompt that is asked for, if any: true. Connections have their turns: one that always
  // asks keeps nobody out. OutOfMemory, and nothing is lost.
  Result<bool> Take(PrefillJob* job);
  int64_t connection_count() const;
  // The bytes of rows that were sent and that no peer has taken yet.
  int64_t sending_bytes() const;
  void TellLoad(const TransferLoad& load);

 private:
  PrefillServer(std::unique_ptr<TransferListener> listener, std::function<void()> wake);
  void Accept() noexcept;
  Status Add(const std::shared_ptr<TransferPeer>& peer);

  struct Connection {
    std::shared_ptr<TransferPeer> peer;
    int64_t window = 0;
  };

  const std::unique_ptr<TransferListener> listener_;
  const std::function<void()> wake_;
  const std::shared_ptr<RemoteChannel> channel_ = CreateRemoteChannel();
  const std::shared_ptr<Clock> clock_ = MachineTime();

  mutable std::mutex mutex_;
  std::map<int64_t, Connection> connections_;  // by their numbers
  int64_t next_connection_ = 0;
  int64_t taken_from_ = -1;  // the connection that had its turn last
  TransferLoad told_;
  bool is_closed_ = false;

  std::atomic<bool> is_ending_ = false;
  std::thread thread_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REMOTE_PREFILL_SERVER_H_
