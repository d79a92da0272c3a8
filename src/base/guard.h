// The one place where std::bad_alloc becomes a value.
#ifndef QUIRE_BASE_GUARD_H_
#define QUIRE_BASE_GUARD_H_

#include <new>
#include <type_traits>
#include <utility>

#include "quire/status.h"

namespace quire {

// Runs `f`, which returns a Status or a Result<T>; a std::bad_alloc that leaves it becomes
// OutOfMemory. Every public entry point that allocates has its body in here. `f` plans before it
// commits, so unwinding leaves the object as it was.
template <typename F>
std::invoke_result_t<F> GuardEntry(F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory();
  }
}

}  // namespace quire

#endif  // QUIRE_BASE_GUARD_H_
