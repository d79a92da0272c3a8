// Prompts that this engine computes for other processes (docs/transfer.md).
//
// Each is a request with max_tokens 0 that has a `job`: it waits, is scheduled and preempted as all
// others, uses prefix cache and store under its tenant's salt, and has no outputs. While its leader
// has a sequence, that is marked: each forward's rows go to the peer's connection. A prompt that is
// preempted goes on later at the row that the peer has not got.
//
// Rows and states of recurrent layers that no peer has taken yet hold `sending_bytes` at most: a
// connection takes a quarter, and what a step's forward may add is granted to prompts in their
// order, before it is planned. A state goes in one piece: where it is larger than that, a
// connection takes as much as the state has.
//
// What the engine does not compute, the peer is told of; a peer that is gone, or wants it no more,
// ends the request before the next step. A prompt whose peer takes bytes slowly is in no forward
// until there is room for its rows, so that nobody waits for them.
//
// A prompt of Submit that a peer is about to ask for has a lease in the prefix cache. It ends when
// all was sent, in time, when pages are short, or when no peer can ask any more. A peer may have
// asked before: then it ends at once. Sequences with recurrent layers can be gone on from at their
// end alone, so that one ends where the peer's job goes on.
//
// Threads: PrefillBell is rung by the connections' threads, and asked by the loop's. All else is
// called on the engine's thread.
//
// Invariant: at most one sequence of a job is marked, its leader's, and it is detached before the
// sequence goes to anybody else.
#ifndef QUIRE_ENGINE_TRAFFIC_PREFILL_TRAFFIC_H_
#define QUIRE_ENGINE_TRAFFIC_PREFILL_TRAFFIC_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/prefix/engine_states.h"
#include "engine/remote/prefill_server.h"
#include "engine/request/request_queue.h"
#include "engine/traffic/sample_sequences.h"
#include "quire/engine.h"
#include "quire/kv_export.h"

namespace quire {

// Says that a peer may want something. All calls from any thread.
class PrefillBell {
 public:
  void Ring() noexcept;
  bool is_rung() const noexcept { return is_rung_.load(std::memory_order_acquire); }
  void Clear() noexcept { is_rung_.store(false, std::memory_order_release); }
  // Until it is rung, or the moment. Whether it is.
  bool Await(Clock& clock, int64_t until_ns);
  // Called in Ring. When this returns, the one before is not called any more.
  void SetWake(std::function<void()> wake);

 private:
  std::atomic<bool> is_rung_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> wake_;
};

class PrefillTraffic {
 public:
  // What is pointed to, and what `state` views, outlives this.
  struct Parts {
    EngineStates state;
    const RequestQueue* requests;
    SampleSequences* sequences;
    PrefixCache* prefix_cache;
    Clock* clock;  // of the prefix cache
    int64_t bytes_per_token;
    StateSizes states;
    int64_t sending_bytes;  // EngineOptions::sending_bytes
    int64_t prefill_chunk;
  };
  // What is on its way to peers holds that at most, `option` being EngineOptions::sending_bytes and
  // not 0.
  static int64_t SendingBytesOf(int64_t option, const StateSizes& states) {
    return std::max(option, states.largest);
  }
  explicit PrefillTraffic(const Parts& parts)
      : state_(parts.state),
        requests_(*parts.requests),
        sequences_(*parts.sequences),
        prefix_cache_(*parts.prefix_cache),
        clock_(*parts.clock),
        bytes_per_token_(parts.bytes_per_token),
        states_(parts.states),
        sending_bytes_(SendingBytesOf(
            parts.sending_bytes > 0 ? parts.sending_bytes : EngineOptions::kSendingBytesDefault,
            states_)),
        prefill_chunk_(parts.prefill_chunk) {}
  PrefillTraffic(const PrefillTraffic&) = delete;
  PrefillTraffic& operator=(const PrefillTraffic&) = delete;
  ~PrefillTraffic();

  // As Engine::ServePrefill.
  Result<std::string> Serve(const SequenceStates& states, const Passport& identity,
                            TransferListenerOptions options);

  // BadArgument if this engine serves at one of these addresses (RemoteTraffic::CheckNotOwn).
  Status CheckNotOwn(std::span<const std::string> peers) const;

  // ---- From any thread
  Status last_refusal() const;
  // Whether a peer may want something.
  bool is_asked() const noexcept { return bell_->is_rung(); }
  void SetWake(std::function<void()> wake) { bell_->SetWake(std::move(wake)); }
  // As Engine::EndPrefill.
  void End(bool at_once) noexcept;

  // ---- Between steps
  // Gives `add` what peers ask for, and ends the requests that they do not want any more. They are
  // told how busy this engine is. OutOfMemory, and nothing is lost.
  using JobAdder = std::function<Status(const std::shared_ptr<PrefillJob>& job)>;
  Status TakeJobs(double seconds_per_token, const RequestEnder& end, const JobAdder& add);
  // Options of the request that a job is. BadArgument for a map that is not of the job's tokens.
  static Result<SamplingOptions> OptionsOf(const PrefillJob& job);
  static PrefixSpace SpaceOf(const TransferJob& job);
  // Another forward is planned, or the same one again: nothing is granted yet.
  void BeginPlan();
  // Whether there is room for the rows of the request's next forward, which are granted then: in
  // its connection, and beside what is granted to others. True for one that has no job.
  bool GrantRoom(const Request& request);
  // Nothing else is to be done: waits for room for a moment. Whether all have it, and some had not.
  bool AwaitRoom(Clock* clock);

  // ---- Hooks of a request; nothing for one that has no job.
  // Its leader has a sequence: rows go to the peer. Where rows that are there cannot be sent, all
  // are computed; else the job is broken (FindBroken). Errors of a new sequence.
  Status Mark(Request* request);
  void NotePreempted(Request* request) noexcept;
  void NoteEnd(Request* request) noexcept;
  void NoteFailure(Request* request, const std::string& why) noexcept;

  // The sequence of a request that ends is about to be retained: where it is held for a peer, it is
  // cut to what the peer's job can go on from.
  void CutHeld(const Request& request, Sample* sample) const noexcept;
  // The prompt of a request that has ended is retained: a peer may be about to ask for it.
  void Hold(const Request& request, std::span<const int32_t> prompt) noexcept;

  // Peers are told how busy the engine is, also when it has nothing more to do.
  void Publish(EngineStats* stats) noexcept;

 private:
  // Requests whose peers do not want them any more, or to which nothing can be sent. All at once: a
  // peer that goes may leave many.
  std::vector<Request*> FindBroken() const;
  bool WaitsForRoom() const;
  bool IsHeld(const Request& request) const;
  // Bytes of the rows and states of the request's next forward, as far as its connection takes them
  // at a time. 0: none are sent.
  int64_t WantedBytes(const Request& request) const;
  // The engine does not compute it, or not to its end.
  void Refuse(PrefillJob* job, const Status& why) noexcept;
  // The peers' other half of a prediction.
  void TellLoad(double seconds_per_token) noexcept;
  Status MarkAt(PrefillJob* job, int64_t sequence_id);
  // Ends the mark, and notes the tokens that the peer has.
  void Detach(PrefillJob* job) noexcept;

  const EngineStates state_;
  const RequestQueue& requests_;
  SampleSequences& sequences_;
  PrefixCache& prefix_cache_;
  Clock& clock_;
  const int64_t bytes_per_token_;
  const StateSizes states_;
  const int64_t sending_bytes_;
  const int64_t prefill_chunk_;
  int64_t room_left_ = 0;  // of sending_bytes_, for the forward that is planned
  const std::shared_ptr<PrefillBell> bell_ = std::make_shared<PrefillBell>();
  mutable std::mutex serve_mutex_;         // of calls from any thread, while a server is made
  std::unique_ptr<PrefillServer> server_;  // null: it does not serve
  int64_t lease_ns_ = 0;                   // TransferPeerOptions::lease

  // As in EngineStats.
  int64_t prompts_ = 0, tokens_ = 0, losses_ = 0, timeouts_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_PREFILL_TRAFFIC_H_
