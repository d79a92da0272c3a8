// operator new and delete, replaced in the test programs that link replaced_new.cc, so that
// allocations can be refused.
#ifndef QUIRE_BASE_TESTING_REPLACED_NEW_H_
#define QUIRE_BASE_TESTING_REPLACED_NEW_H_

#include <cstddef>

namespace quire {

// The program defines it. It is asked before each allocation of `bytes` bytes; true makes the
// allocation throw std::bad_alloc.
bool RefusesAllocation(size_t bytes) noexcept;

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_REPLACED_NEW_H_
