// operator new, replaced in the programs that link this, so that the n-th allocation of a call can
// be refused.
#ifndef QUIRE_KV_TESTING_ALLOCATION_REFUSAL_H_
#define QUIRE_KV_TESTING_ALLOCATION_REFUSAL_H_

#include <cstdint>

namespace quire {

// Allocations since the program began.
int64_t AllocationsMade();
// Bytes of all of them, whatever was freed since.
int64_t BytesAllocated();

// While it lives, the n-th allocation (from 0) fails, once.
class RefuseAllocation {
 public:
  explicit RefuseAllocation(int64_t n);
  ~RefuseAllocation();
  bool refused() const;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_ALLOCATION_REFUSAL_H_
