// CountingGate: the gate of a paged cache. A call that may change pages publishes their counts as
// it ends, so that any thread can read them at any time without waiting for a call.
#ifndef QUIRE_KV_CACHE_COUNTING_GATE_H_
#define QUIRE_KV_CACHE_COUNTING_GATE_H_

#include <mutex>
#include <type_traits>
#include <utility>

#include "kv/cache/page_counts.h"
#include "kv/control/call_gate.h"
#include "kv/pages/block_tree.h"
#include "quire/status.h"

namespace quire {

class CountingGate {
 public:
  // The tree must outlive it.
  explicit CountingGate(const BlockTree& tree) : tree_(tree), published_(tree) {}

  // Runs the body of a call that changes sequences, pages or the plan. Queries wait until it
  // returns.
  template <typename F>
  std::invoke_result_t<F> EnterAlone(const char* call, F&& body) const {
    return gate_.EnterAlone(call, [&]() -> std::invoke_result_t<F> {
      struct Leave {
        const CountingGate& gate;
        ~Leave() { gate.Publish(); }
      } leave{*this};
      return body();
    });
  }
  // Such a call in two halves (CallGate::Open).
  Status Open(const char* call) const { return gate_.Open(call); }
  void Close() const noexcept {
    Publish();
    gate_.Close();
  }
  // Calls of a layer, and exports, change none of these: queries go on meanwhile.
  template <typename F>
  std::invoke_result_t<F> Enter(const char* call, F&& body) const {
    return gate_.Enter(call, std::forward<F>(body));
  }
  template <typename F>
  std::invoke_result_t<F> Ask(F&& body) const {
    return gate_.Ask(std::forward<F>(body));
  }
  [[nodiscard]] std::unique_lock<std::recursive_mutex> Lock() const { return gate_.Lock(); }

  // As of the last call that changed them. From any thread.
  PageCounts counts() const { return published_.Load(); }

 private:
  void Publish() const noexcept { published_.Store(tree_); }

  const BlockTree& tree_;
  CallGate gate_;
  mutable PublishedCounts published_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_COUNTING_GATE_H_
