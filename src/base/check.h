// Checks of invariants. A failed check is a defect of Quire: the handler of quire/check_failure.h
// gets it, and by default the process stops, because its state can no longer be trusted. What a
// caller can get wrong is answered with a Status instead.
#ifndef QUIRE_BASE_CHECK_H_
#define QUIRE_BASE_CHECK_H_

#include <sstream>

#include "quire/check_failure.h"

namespace quire {
namespace internal {

// Collects the message of one failed check; its destructor reports it and does not return. It
// throws what the handler throws.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  CheckFailure(const CheckFailure&) = delete;
  CheckFailure& operator=(const CheckFailure&) = delete;
  [[noreturn]] ~CheckFailure() noexcept(false);
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Gives both branches of the conditional in QUIRE_CHECK the type void; & binds weaker than << and
// stronger than ?:.
struct CheckVoidify {
  void operator&(std::ostream&) const {}
};

}  // namespace internal
}  // namespace quire

// QUIRE_CHECK(condition) << "what it means, with the values";
#define QUIRE_CHECK(condition)                      \
  (condition) ? static_cast<void>(0)                \
              : ::quire::internal::CheckVoidify() & \
                    ::quire::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

// The same in debug builds; compiled but never evaluated otherwise.
#ifdef NDEBUG
#define QUIRE_DCHECK(condition) QUIRE_CHECK(true || (condition))
#else
#define QUIRE_DCHECK(condition) QUIRE_CHECK(condition)
#endif

#endif  // QUIRE_BASE_CHECK_H_
