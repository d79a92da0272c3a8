// The processes that compute prompts for this one: connections to them, what they say of
// themselves, and which one is asked for a prompt.
//
// Threads: one of its own connects, and connects again, since that waits; with several peers to
// connect to, one for each, so that peers that do not answer are waited for together. The engine's
// thread chooses and reports. The connections' threads write what arrives into the receiver. All
// state is under one mutex, which is not held while anything waits. A peer that does not answer or
// loses prompts is left alone for a while (CircuitBreaker).
#ifndef QUIRE_ENGINE_REMOTE_REMOTE_PEERS_H_
#define QUIRE_ENGINE_REMOTE_REMOTE_PEERS_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "net/circuit_breaker.h"
#include "quire/engine.h"
#include "quire/kv_transfer.h"
#include "quire/transfer_peer.h"

namespace quire {

// What a prompt is, for choosing.
struct PromptAsk {
  uint64_t key = 0;            // of its beginning and its salt: equal prompts go to equal peers
  int64_t tokens = 0;          // that are wanted
  int64_t bytes = 0;           // of keys and values, about
  std::string_view peer = {};  // the address of the only one that may be asked; empty: any
  // What it takes to compute them here; 0: not known.
  double here_seconds = 0;
  double here_seconds_per_token = 0;
};

// Both 0 where no speed is known.
struct PrefillPrediction {
  double here_seconds = 0;
  double remote_seconds = 0;
};

// What a peer says and did, and the prompt: how long it takes until all is here. The peer sends
// while it computes, so the slower of both counts, behind its queue. A speed of the peer that is
// not known is taken to be that of this process.
PrefillPrediction PredictPrefill(const PromptAsk& ask, const PrefillPeerInfo& peer);

// By rendezvous: the order in which peers are asked for the key. A peer that comes or goes changes
// it for its own keys alone.
std::vector<size_t> PeerOrder(uint64_t key, std::span<const std::string> addresses);

// Whether both lead to the same place: "localhost" is 127.0.0.1. What is no address is the same as
// itself.
bool IsSameAddress(const std::string& a, const std::string& b);

// How a prompt ended.
struct PromptOutcome {
  Status status;
  int64_t tokens = 0, bytes = 0;  // that came
  double seconds = 0;             // that it took
  double busy_seconds = 0;        // of them, for which the peer was predicted to compute
};

// Mean of the bytes per second that a peer's prompts came with. The peer sends while it computes,
// so a prompt tells a bound from below, unless it took clearly longer than computing does.
class MovingRate {
 public:
  void Note(const PromptOutcome& outcome, int64_t now_ns);
  // 0: not known, or not any more; a peer that was slow is tried again.
  double At(int64_t now_ns) const;

 private:
  double bytes_per_second_ = 0;
  int64_t noted_ns_ = 0;
};

// Calls from any thread.
class RemotePeers {
 public:
  // `receiver` outlives this. Connects to all once; Incompatible if one of them holds other KV.
  static Result<std::unique_ptr<RemotePeers>> Create(const PrefillPeerOptions& options,
                                                     const Passport& passport, KVTransfer* receiver,
                                                     std::shared_ptr<Clock> clock);
  RemotePeers(const RemotePeers&) = delete;
  RemotePeers& operator=(const RemotePeers&) = delete;
  ~RemotePeers();  // what is being received fails

  struct Chosen {
    size_t index = 0;  // for Report
    std::shared_ptr<TransferPeer> peer;
    PrefillPrediction prediction;
    double busy_seconds = 0;  // as in PromptOutcome
  };
  // The first peer in the prompt's order that is there and, where `when` is kAuto, predicted to be
  // faster than this process. The ask's own peer, or none, if it has one.
  std::optional<Chosen> Choose(const PromptAsk& ask, RemotePrefill when) const;
  void Report(size_t index, const PromptOutcome& outcome);
  // A prompt that could not be asked for, through no fault of the peer.
  void NoteError(size_t index, const Status& why);
  std::vector<PrefillPeerInfo> Infos() const;

 private:
  struct Peer {
    std::string address;
    std::unique_ptr<CircuitBreaker> breaker;
    std::shared_ptr<TransferPeer> connection;  // null, or perhaps over
    int64_t streams = 0;                       // of it
    PrefillPeerInfo info;
    MovingRate rate;
  };

  RemotePeers(const PrefillPeerOptions& options, const Passport& passport, KVTransfer* receiver,
              std::shared_ptr<Clock> clock);
  void Run() noexcept;
  // A peer that may be connected to, and what came of it.
  struct Attempt {
    size_t index;
    CircuitBreaker::Call call;
    Status status{};
  };
  // Connects where there is no connection, everywhere at the same time. The first error, unless one
  // is a mistake of ours.
  Status ConnectAll();
  bool IsMissing(size_t index);
  Status Connect(Attempt& attempt);
  PrefillPeerInfo InfoOf(const Peer& peer) const;

  KVTransfer* const receiver_;
  TransferPeerOptions options_;
  const std::shared_ptr<Clock> clock_;
  std::vector<std::string> addresses_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // it is closing
  std::vector<Peer> peers_;          // as many for ever
  bool is_closing_ = false;

  std::thread thread_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REMOTE_REMOTE_PEERS_H_
