// KV from and to the chunk store: which requests wait for it, what is taken from it, when it is
// given to it.
//
// A request that waits to be admitted is looked up once: what the prefix cache does not have is
// asked for, and while it is on its way the request is held back and lets others pass. Whatever
// comes of that, at the latest when its deadline passes, the request goes on: behind the chunks
// that are there, or computing from where the prefix cache ends.
//
// It goes on before, if the layers come so fast that its first forward would find each of them in
// time: that forward takes them one by one. If one does not come, the forward is given up and
// planned again without the load. Documents that are learnt for a blended prompt go on together,
// with the prompt: its first piece is computed while they come, from the moment on at which those
// layers are there in which rows are selected. If one fails, it is computed, and the prompt waits.
//
// What has been computed is put after each step, a bounded number of bytes, and the rest of a
// sequence when it ends. KV from before the store was attached is put when its pages are about to
// be given up, and by StoreAll.
#ifndef QUIRE_ENGINE_TRAFFIC_STORE_TRAFFIC_H_
#define QUIRE_ENGINE_TRAFFIC_STORE_TRAFFIC_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/loading/layerwise_load.h"
#include "engine/loading/store_link.h"
#include "engine/prefix/engine_states.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/request/prefix_finder.h"
#include "engine/request/request_queue.h"
#include "engine/traffic/sample_sequences.h"
#include "quire/engine.h"

namespace quire {

class StoreTraffic {
 public:
  // What is pointed to, and what `state` views, outlives this.
  struct Parts {
    const Model* model;
    EngineStates state;
    PrefixCache* prefix_cache;
    const RequestQueue* requests;
    const PrefixFinder* finder;
    SampleSequences* sequences;
    const Clock* clock;  // the engine's; the store has its own
    int64_t prefill_chunk;
  };
  // Where a waiting request's KV comes from: `from` is forked, chunks are imported up to `end`.
  struct Start {
    PrefixMatch from;
    int64_t end = 0;
  };

  explicit StoreTraffic(const Parts& parts);
  StoreTraffic(const StoreTraffic&) = delete;
  StoreTraffic& operator=(const StoreTraffic&) = delete;

  bool is_attached() const { return link_ != nullptr; }
  // REQUIRES: none is attached.
  void Attach(std::unique_ptr<StoreLink> link);
  // Requests that are looked at for being admitted: those for which the store was asked, else one.
  size_t admissible() const { return link_ == nullptr ? 1 : static_cast<size_t>(kLoadsMax); }
  // Where a sequence of which `length` tokens are there has to stop next (StoreLink::NextStop).
  int64_t NextStop(int64_t length, int64_t prompt_tokens) const;

  // Whether a prompt has a last chunk in the store that is shorter than the others, so that only a
  // prompt of exactly these tokens takes it or gives it.
  bool EndsInTail(int64_t prompt_tokens) const {
    return link_ != nullptr && link_->EndsInTail(prompt_tokens);
  }

  // How much of the prompt the store has, as far as it knows without asking a disk or a network.
  int64_t KnownTokens(Request* request) const;

  // ---- Requests that wait
  Start FindStart(const Request& request) const;
  // `request` is about to wait. If others are ahead of it, the store brings its chunks into RAM in
  // the meantime, so that its load waits for no disk and no network.
  void Prefetch(Request* request) const;
  void StartLoads();
  // Waits for the first load, if there is one. True if it is usable: there is something to decide.
  bool AwaitLoad();
  // A load that has not ended is taken by the request's first forward, a layer at a time. Null if
  // it has ended, or brings nothing.
  std::unique_ptr<LayerwiseLoad> MakeLayerwise(Request* request, const Start& start);
  // After the request was given a sequence: takes the chunks that are there behind what was forked.
  void ImportChunks(Request* request, const Start& start) noexcept;
  // The end of its waiting. `known`: its first tokens that were in memory, whether or not a
  // sequence could be forked behind them.
  void NoteStart(Request* request, int64_t known) noexcept;

  // ---- Requests in work
  // What the sample's next forward loads; null: nothing.
  static LayerwiseLoad* LayersOf(const Request& request, const Sample& sample);
  // The forward has ended that took the request's layers.
  void CommitLayers(Request* request, Sample* sample) noexcept;
  // The forward was aborted. The whole chunks of a load that failed are taken as if nothing more
  // had been found, the rest is computed. True if the request had such a load.
  bool DropFailedLayers(Request* request) noexcept;
  // After a step.
  void StoreComputed() noexcept;
  // In an open forward whose layers have all been run: with windows, what a token at a chunk's end
  // sees, before it slides out of sight. `computed`: with the tokens of the forward.
  void StoreSeen(const Request& request, Sample* sample, int64_t computed) noexcept;
  // All of a sequence that is about to end.
  void StoreWhole(const Request& request, Sample* sample) noexcept;
  // Puts everything that is in memory. Timeout.
  Status StoreAll(int64_t timeout_ns);

  // A forward of `tokens` tokens took so long.
  void MeasureSpeed(int64_t tokens, int64_t ns) noexcept;
  double compute_seconds_per_token() const { return compute_seconds_per_token_; }
  void Publish(EngineStats* stats) const noexcept;

 private:
  // What a request asks the store for, and the sequence behind which its chunks begin.
  struct Lookup {
    Request* request;
    PrefixMatch border;
    int64_t size;
    bool tail;
  };
  bool PlanLoad(Request* request, std::vector<Lookup>* lookups) const;
  Result<std::vector<std::unique_ptr<PrefixLoad>>> LoadsOf(std::span<const Lookup> lookups);
  void BeginLoads(std::vector<Lookup>* lookups);
  // The keys of the leader's first `size` tokens; `tail`: also that of the shorter last chunk. They
  // are valid until they are asked for again.
  Result<std::span<const ChunkKey>> KeysOf(Request* request, int64_t size, bool tail) const;
  bool IsPrefixBeingLoaded(const Request& request, int64_t matched) const;
  // How many of the requests that wait may have loads: the first ones.
  size_t loading_count() const {
    return std::min(requests_.waiting().size(), static_cast<size_t>(kLoadsMax));
  }
  void PollLoads(size_t count);  // of the requests that wait
  void PollLoad(Request* request);
  int64_t LayersThere(const Request& request) const;
  bool KeepsPace(const Request& request, int64_t there, bool alone) const;
  bool IsInTime(const PrefixLoad& load, int64_t there, int64_t tokens, bool alone) const;
  Request* PromptOf(const Request& learner) const;
  bool DocumentsKeepPace(const Request& prompt, bool alone) const;
  bool TakeLayers(Request* request, int64_t there, bool alone);
  int64_t LoadableTokens(const Sample& leader) const;
  int64_t ChunkLayerCount() const;
  int64_t FirstLayerNeeded() const;
  Status TakeChunks(Request* request, const PrefixLoad& load, int64_t end) noexcept;
  void CountLoad(Request* request, MissReason miss, double seconds) noexcept;
  void CountLoaded(Request* request, TierKind tier, int64_t tokens) noexcept;
  static void ForgetLoad(Request* request) noexcept;
  int64_t StoreSample(const Request& request, Sample* sample, int64_t computed,
                      int64_t bytes_max) noexcept;
  void StoreRetained(const PrefixCache::Retained& retained) noexcept;

  const Model& model_;
  const EngineStates state_;
  PrefixCache& prefix_cache_;
  const RequestQueue& requests_;
  const PrefixFinder& finder_;
  SampleSequences& sequences_;
  const Clock& clock_;
  const int64_t prefill_chunk_;
  std::unique_ptr<StoreLink> link_;  // null: none is attached
  double compute_seconds_per_token_ = 0;
  double import_seconds_per_token_ = 0;  // what chunks take that are there

  // As in EngineStats.
  int64_t loads_ = 0, layer_loads_ = 0;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, recomputed_tokens_ = 0;
  std::array<int64_t, kTierCount> loaded_tokens_ = {};
  std::array<int64_t, kMissReasonCount> misses_ = {};
  double load_seconds_ = 0, overlap_seconds_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TRAFFIC_STORE_TRAFFIC_H_
