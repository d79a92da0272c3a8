// A call with each of its allocations refused in turn. For tests with REFUSES_ALLOCATIONS that list
// refuse_each.cc in their sources.
#ifndef QUIRE_BASE_TESTING_REFUSE_EACH_H_
#define QUIRE_BASE_TESTING_REFUSE_EACH_H_

#include <cstdint>
#include <functional>
#include <string>

#include "quire/status.h"

namespace quire {

// Makes the call with allocation n refused, for n = 0, 1, ... until it needs no more. It must
// answer OutOfMemory each time, and `expected` at the end. Allocations of other threads are not
// refused.
void RefuseEach(const std::string& name, StatusCode expected, const std::function<Status()>& call);

// Refuses every allocation of the calling thread from here on, to its end.
void RefuseFromHere();

// Whether an allocation of the call under test was refused: a call that may do without it says so
// by answering OutOfMemory nevertheless.
bool AllocationRefused();

// While it lives nothing is refused: for what a call under test is given, not part of it.
class AllocationsAllowed {
 public:
  AllocationsAllowed();
  ~AllocationsAllowed();
  AllocationsAllowed(const AllocationsAllowed&) = delete;
  AllocationsAllowed& operator=(const AllocationsAllowed&) = delete;

 private:
  const int64_t left_;
};

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_REFUSE_EACH_H_
