#include "base/check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace quire {
namespace {

void PrintToStderr(std::string_view message) {
  std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()), message.data());
  std::fflush(stderr);
}

std::atomic<CheckFailureHandler> handler_in_place{&PrintToStderr};

}  // namespace

CheckFailureHandler SetCheckFailureHandler(CheckFailureHandler handler) {
  return handler_in_place.exchange(handler != nullptr ? handler : &PrintToStderr);
}

namespace internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << file << ':' << line << ": check failed: " << condition << ' ';
}

CheckFailure::~CheckFailure() noexcept(false) {
  handler_in_place.load()(stream_.str());
  std::abort();
}

}  // namespace internal
}  // namespace quire
