// Prompts that other processes compute for this engine (docs/transfer.md): which are asked for,
// when they have come, and what becomes of those that do not.
//
// A request is asked for when it is admitted, behind what the prefix cache and the store had. Its
// leader then holds the pages of all that is to come, and is in no forward until it is there or
// will not come; the last token is always computed here. What came of a prompt that is lost is
// kept: the rest is computed, so that the answer has the same bits. Prompts that blend, documents
// that the engine learns for them, and prompts of other processes are computed here.
//
// Threads: all calls come from the engine's thread. What arrives is written into the cache's
// reservations by the connections' threads (remote_peers.h); this one polls them between steps.
// Infos and CheckPeer may be called by any thread.
//
// Invariant: a sequence with pending tokens belongs to the leader of a running request that has
// `remote`. So `remote` is reset before the sequence goes to anybody else.
#ifndef QUIRE_ENGINE_TRAFFIC_REMOTE_TRAFFIC_H_
#define QUIRE_ENGINE_TRAFFIC_REMOTE_TRAFFIC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/prefix/engine_states.h"
#include "engine/remote/remote_peers.h"
#include "engine/remote/remote_receive.h"
#include "engine/request/prefix_finder.h"
#include "engine/request/request_queue.h"
#include "quire/engine.h"

namespace quire {

class RemoteTraffic {
 public:
  // What is pointed to, and what `state` views, outlives this.
  struct Parts {
    EngineStates state;
    const RequestQueue* requests;
    const PrefixFinder* finder;
    Clock* clock;
    int64_t bytes_per_token;
    int64_t staging_bytes;  // EngineOptions::staging_bytes
  };
  explicit RemoteTraffic(const Parts& parts);
  RemoteTraffic(const RemoteTraffic&) = delete;
  RemoteTraffic& operator=(const RemoteTraffic&) = delete;

  // As Engine::AttachPrefillPeers.
  Status Attach(const SequenceStates& states, const Passport& identity,
                const PrefillPeerOptions& options, const std::shared_ptr<Clock>& clock);
  // From any thread.
  std::vector<PrefillPeerInfo> Infos() const;
  // BadArgument for the address of a peer: an engine that asked itself would hold the pages of a
  // prompt twice, and wait for itself.
  Status CheckNotOwn(const std::string& listen) const;
  // From any thread: whether SamplingOptions::prefill_peer is empty or one that is attached.
  Status CheckPeer(const std::string& address) const;
  // The number of requests that are looked at for being admitted, `others` without peers: others
  // may pass one that is held back.
  size_t admissible(size_t others) const;

  // ---- Requests that wait
  // Holds back those whose beginning is on its way for another one. `keeps`: what was held back
  // before for other reasons stays so.
  void HoldBack(bool keeps) const;
  // `request` has got its sequence: asks a peer for the rest, if that is worth it. False: there are
  // too few pages for it now. REQUIRES: its leader has a sequence or nothing is to be asked.
  bool Start(Request* request, double here_seconds_per_token);

  // ---- Requests in work
  int64_t receiving() const;
  static bool Receives(const Request& request, const Sample& sample) {
    return TokensToCome(request, sample) > 0;
  }
  // That its sequence has reserved.
  static int64_t TokensToCome(const Request& request, const Sample& sample);
  // The sample's sequence is about to go elsewhere, without what is to come.
  static void GiveUp(Request* request, const Sample& sample) noexcept;
  // Takes what has come, and ends the requests that fail for what has not.
  void Poll(const RequestEnder& end);
  // Nothing else is to be done: waits for a moment. True if all of a prompt has come, or will not.
  bool Await() const;
  // A step was computed.
  void NoteComputed() noexcept;

  void Publish(EngineStats* stats) const noexcept;

 private:
  // What is known of a receive beside the receive.
  struct Asked {
    int64_t request_id;
    size_t peer;
    int64_t start_ns;
    double busy_seconds;
  };
  // How a receive stands: `complete` tokens can be taken. Over: all has come, or will not.
  struct Standing {
    bool is_over = false;
    int64_t complete = 0;
    Status failure;
  };

  bool IsPrefixComing(const Request& request) const;
  PromptAsk AskFor(const Request& request, int64_t count, double here_seconds_per_token) const;
  Result<std::unique_ptr<RemoteReceive>> Ask(const Request& request,
                                             const RemotePeers::Chosen& chosen,
                                             int64_t count) const;
  // What becomes of a request that could not be asked for: as Start.
  bool NotAsked(const Request& request, size_t peer, const Status& why);
  const Asked& AskedOf(const Request& request) const;
  Standing StandingOf(const Request& request) const;
  // The end of a receive: what is complete is kept.
  void Finish(Request* request, const Standing& standing) noexcept;

  const EngineStates state_;
  const RequestQueue& requests_;
  const PrefixFinder& finder_;
  Clock& clock_;
  const int64_t bytes_per_token_;
  const int64_t staging_bytes_;         // that what comes may hold
  mutable std::mutex attach_mutex_;     // of calls from any thread, while peers are attached
  std::unique_ptr<RemotePeers> peers_;  // null: none are attached
  PrefillPeerOptions options_;
  std::vector<Asked> asked_;  // of all receives, and of some that were given up
  int64_t looked_ns_ = 0;     // when a step ended last

  // As in EngineStats.
  int64_t tokens_ = 0, bytes_ = 0, losses_ = 0, timeouts_ = 0;
  double overlap_seconds_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_REMOTE_TRAFFIC_H_
