// Where a defect of Quire is reported. A failed check means that Quire is wrong, not its caller:
// what a caller can get wrong is answered with a Status.
#ifndef QUIRE_CHECK_FAILURE_H_
#define QUIRE_CHECK_FAILURE_H_

#include <string_view>

namespace quire {

// Receives "file:line: check failed: ...". It is called on the thread where the check failed, which
// may be one of Quire's own. When it returns, the process aborts.
//
// It may throw instead. The exception leaves the call of Quire that the thread is in; the object of
// that call cannot be trusted after it, so make no further call on it but its destructor. A handler
// must not throw on a thread that is in no call of the host (a worker, a tier's thread), nor while
// another exception is on its way: return there. A check in a noexcept function ends the process,
// because C++ calls std::terminate; the default terminate handler prints the what() of the
// exception.
using CheckFailureHandler = void (*)(std::string_view message);

// Returns the handler that was in place. nullptr puts back the default, which prints to stderr.
// Callable from any thread.
CheckFailureHandler SetCheckFailureHandler(CheckFailureHandler handler);

}  // namespace quire

#endif  // QUIRE_CHECK_FAILURE_H_
