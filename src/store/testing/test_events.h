// Test only: what a tier says has happened.
#ifndef QUIRE_STORE_TESTING_TEST_EVENTS_H_
#define QUIRE_STORE_TESTING_TEST_EVENTS_H_

#include <vector>

#include "store/tier/chunk_tier.h"

namespace quire {

// Since the last call.
inline std::vector<ChunkEvent::Kind> EventsOf(ChunkTier& tier) {
  std::vector<ChunkEvent> events;
  tier.TakeEvents(&events);
  std::vector<ChunkEvent::Kind> kinds;
  for (const ChunkEvent& event : events) kinds.push_back(event.kind);
  return kinds;
}

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_TEST_EVENTS_H_
