// KV on its way into and out of this engine: with the chunk store, from peers that compute prompts
// for it, and to peers for which it computes prompts. Each of the three has rules of its own; what
// they have in common, and in which order they are asked, is here.
//
// Invariants:
// - A request that waits has no layers and receives nothing; one in work has no load (its chunks
//   are there, come with its layers, or do not come any more). Without a store nothing is loaded.
// - What a request receives or sends ends before its sequences go to another holder.
#ifndef QUIRE_ENGINE_TRAFFIC_KV_TRAFFIC_H_
#define QUIRE_ENGINE_TRAFFIC_KV_TRAFFIC_H_

#include <cstdint>

#include "engine/traffic/prefill_traffic.h"
#include "engine/traffic/remote_traffic.h"
#include "engine/traffic/sequence_holders.h"
#include "engine/traffic/store_traffic.h"
#include "quire/engine.h"
#include "quire/model.h"

namespace quire {

struct KVTraffic {
  // What is pointed to outlives this.
  struct Parts {
    const Model* model;
    SequenceHolders* holders;
    Clock* clock;
    int64_t bytes_per_token;
    int64_t staging_bytes;  // EngineOptions::staging_bytes
    int64_t sending_bytes;  // EngineOptions::sending_bytes
    int64_t prefill_chunk;
  };
  explicit KVTraffic(const Parts& parts);
  KVTraffic(const KVTraffic&) = delete;
  KVTraffic& operator=(const KVTraffic&) = delete;

  // ---- Requests that wait
  // Begins what can be loaded, and holds back the requests whose KV is on its way.
  void StartLoads();
  // The request that is admitted next; null if there is none.
  Request* NextToAdmit() const;

  // ---- Requests in work
  // Another forward is planned, or the same one again.
  void BeginPlan() { prefill.BeginPlan(); }
  // Whether the sample can be in the forward: nothing is to come into its sequence, and there is
  // room for the rows that a peer gets.
  bool CanRun(const Request& request, const Sample& sample);
  // The request gives up its sequences and waits again.
  void NotePreempted(Request* request) noexcept;
  // A step was computed.
  void NoteComputed() noexcept;
  // Nothing else is to be done: waits for a moment. Whether there is something to decide now.
  bool Await();

  // For tests: the first violation stops the process.
  void CheckInvariants() const;
  void Publish(EngineStats* stats) noexcept;

  StoreTraffic store;
  RemoteTraffic remote;
  PrefillTraffic prefill;

 private:
  const RequestQueue& requests_;
  Clock& clock_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_KV_TRAFFIC_H_
