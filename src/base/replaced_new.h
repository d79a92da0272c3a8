// operator new and delete, replaced in the test programs that link replaced_new.cc, so that
// allocations can be refused.
#ifndef QUIRE_BASE_REPLACED_NEW_H_
#define QUIRE_BASE_REPLACED_NEW_H_

namespace quire {

// The program's: asked before each allocation; true makes it throw std::bad_alloc.
bool RefusesAllocation() noexcept;

}  // namespace quire

#endif  // QUIRE_BASE_REPLACED_NEW_H_
