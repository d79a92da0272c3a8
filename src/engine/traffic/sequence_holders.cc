#include "engine/traffic/sequence_holders.h"

#include <utility>

#include "base/check.h"
#include "engine/traffic/remote_traffic.h"

namespace quire {

SequenceHolders::SequenceHolders(EngineStates states, const EngineOptions& options,
                                 const PrefixCache::Limits& retained,
                                 std::unique_ptr<ModelDrafter> model_drafter,
                                 std::shared_ptr<Clock> clock)
    : state(states),
      speculator(std::move(model_drafter), options.max_tree_nodes, options.prefill_chunk),
      prefix_cache(state, options.page_size, retained, std::move(clock)),
      finder(&requests, &prefix_cache, state, options.prefix_cache, options.page_size),
      sequences(state, &prefix_cache, &speculator),
      samples_max_(options.max_num_sequences) {}

void SequenceHolders::Publish(EngineStats* stats) const noexcept {
  const StateSlotCounts slots = state.slot_counts();
  stats->states_total = slots.total;
  stats->states_free = slots.free;
  stats->retained_states = slots.retained;
  stats->retained_sequences = prefix_cache.sequence_count();
  stats->retained_tokens = prefix_cache.token_count();
  stats->retained_pages = state.retained_pages();
  stats->waiting = static_cast<int64_t>(requests.waiting().size());
  stats->running = static_cast<int64_t>(requests.running().size());
  stats->learning = requests.waiting_learners();
  speculator.Publish(stats);
}

void SequenceHolders::CheckInvariants() const {
  prefix_cache.CheckInvariants();
  int64_t held = prefix_cache.sequence_count();
  int64_t samples = 0;
  int64_t drafts = 0;
  for (const auto& request : requests.running()) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(sample.finished() ? !sample.has_sequence() : sample.pending() >= 1);
      samples += sample.finished() ? 0 : 1;
      drafts += sample.draft_state == kNoDraftState ? 0 : 1;
      QUIRE_CHECK(sample.draft_state == kNoDraftState || sample.has_sequence());
      if (!sample.has_sequence()) continue;
      ++held;
      const Result<int64_t> length = state.GetSequenceLength(sample.sequence_id);
      QUIRE_CHECK(length.ok()) << length.status().ToString();
      // Tokens that are to come are in the lengths of attention.
      const int64_t to_come = RemoteTraffic::TokensToCome(*request, sample);
      const int64_t expected = sample.computed + (state.is_recurrent() ? 0 : to_come);
      QUIRE_CHECK(*length == expected) << "sequence " << sample.sequence_id;
    }
  }
  QUIRE_CHECK(samples <= samples_max_);
  QUIRE_CHECK(state.sequence_count() == held) << "a sequence that nobody holds";
  CheckWaiting();
  const Status status = state.CheckInvariants();
  QUIRE_CHECK(status.ok()) << status.ToString();
  speculator.CheckInvariants();
  QUIRE_CHECK(speculator.state_count() == drafts) << "a draft of a sample that is gone";
}

void SequenceHolders::CheckWaiting() const {
  for (const auto& request : requests.waiting()) {
    for (const Sample& sample : request->samples) {
      QUIRE_CHECK(!sample.has_sequence());
      QUIRE_CHECK(sample.draft_state == kNoDraftState);
    }
  }
}

}  // namespace quire
