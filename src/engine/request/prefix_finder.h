// Where a sample's tokens begin already: among what the prefix cache retains, and in the sequences
// of requests in work. Reads only.
#ifndef QUIRE_ENGINE_REQUEST_PREFIX_FINDER_H_
#define QUIRE_ENGINE_REQUEST_PREFIX_FINDER_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/prefix/engine_states.h"
#include "engine/prefix/prefix_cache.h"
#include "engine/request/request_queue.h"

namespace quire {

class PrefixFinder {
 public:
  // What is pointed to, and what `state` views, outlives this. `reuses`: false finds nothing.
  PrefixFinder(const RequestQueue* requests, const PrefixCache* prefix_cache, EngineStates state,
               bool reuses, int64_t page_size)
      : requests_(*requests),
        prefix_cache_(*prefix_cache),
        state_(state),
        reuses_(reuses),
        page_size_(page_size) {}

  // Whether sequences of the request can be forked at each of their positions.
  bool ForksAnywhere(const Request& request) const {
    return state_.forks_anywhere() && !request.has_window();
  }
  // The longest exact beginning, at a multiple of `border`; without one also a longer one that an
  // equal blend has left.
  PrefixMatch Find(const Request& request, const Sample& sample, int64_t border = 1) const;
  // Exact tokens behind an anchor, retained or of requests in work: for all documents behind it the
  // anchor is compared once. Views the finder's owners, and is valid until one of them changes.
  class Anchored {
   public:
    // The longest beginning of the anchor and a document that has tokens of the document; else
    // none. Tells `sequence_id` and `length` alone.
    PrefixMatch Find(std::span<const int32_t> document) const;

   private:
    friend class PrefixFinder;
    struct Holder {
      int64_t sequence_id;
      std::span<const int32_t> rest;  // behind the anchor
    };
    Anchored(const EngineStates& state, int64_t anchor_tokens, PrefixCache::Family kept)
        : state_(state), anchor_tokens_(anchor_tokens), kept_(std::move(kept)) {}

    EngineStates state_;
    int64_t anchor_tokens_;
    PrefixCache::Family kept_;
    std::vector<Holder> running_;
  };
  // REQUIRES: prefixes are reused.
  Anchored FindBehind(std::span<const int32_t> anchor, const PrefixSpace& space) const;
  // Where to fork another sample of the leader's request.
  PrefixMatch FindFork(const Request& request, const Sample& leader, const Sample& sample) const;
  // Whether a sample in work is about to compute more of this one's beginning than the `matched`
  // tokens that are there now. To wait for it costs a few steps and saves all that work; a page is
  // the least that is worth it, as that is what a fork costs.
  bool IsBeingComputed(const Request& request, const Sample& sample, int64_t matched) const;

 private:
  void ConsiderRunning(const Request& request, const Sample& sample,
                       std::span<const int32_t> seeing_all, int64_t border,
                       PrefixMatch* best) const;
  void ConsiderKept(const Request& request, std::span<const int32_t> tokens,
                    PrefixMatch* best) const;

  const RequestQueue& requests_;
  const PrefixCache& prefix_cache_;
  const EngineStates state_;
  const bool reuses_;
  const int64_t page_size_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_PREFIX_FINDER_H_
