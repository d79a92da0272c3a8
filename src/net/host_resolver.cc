#include "net/host_resolver.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/start_thread.h"

namespace quire {
namespace {

// Long enough that connecting costs no look-up, short enough to follow a server that has moved.
constexpr int64_t kRememberedNs = 30'000'000'000;

// In numbers, of either kind.
bool IsIpAddress(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

// "" if there is none.
std::string FirstAddress(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return {};
  char text[NI_MAXHOST] = "";
  const bool ok = getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof(text), nullptr, 0,
                              NI_NUMERICHOST) == 0;
  freeaddrinfo(found);
  return ok ? text : "";
}

}  // namespace

struct HostResolver::State {
  struct Entry {
    std::string address;  // "" = the look-up found none
    int64_t until_ns = 0;
    bool pending = false;
    bool known = false;
  };
  std::shared_ptr<Clock> clock;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Entry> entries;  // of the options' names and those that servers tell
};

HostResolver::HostResolver(std::shared_ptr<Clock> clock) : state_(std::make_shared<State>()) {
  state_->clock = std::move(clock);
}

void HostResolver::LookUp(const std::shared_ptr<State>& state, const std::string& host) {
  std::string address = FirstAddress(host);
  const std::lock_guard<std::mutex> guard(state->mutex);
  State::Entry& entry = state->entries[host];
  entry.known = !address.empty();
  entry.address = std::move(address);
  entry.until_ns = state->clock->SteadyNs() + kRememberedNs;
  entry.pending = false;
  state->changed.notify_all();
}

Result<std::string> HostResolver::Resolve(const std::string& host, int64_t deadline_ns) {
  if (IsIpAddress(host)) return host;
  std::unique_lock<std::mutex> lock(state_->mutex);
  State::Entry& entry = state_->entries[host];
  if (entry.known && state_->clock->SteadyNs() < entry.until_ns) return entry.address;
  if (!entry.pending) {
    std::thread thread;
    QUIRE_RETURN_IF_ERROR(StartThread("looking up a host's name", &thread,
                                      [state = state_, host] { LookUp(state, host); }));
    thread.detach();
    entry.pending = true;  // the thread waits for the lock before it is done
  }
  if (!WaitUntil(*state_->clock, state_->changed, lock, deadline_ns,
                 [&] { return !entry.pending; })) {
    return Status(StatusCode::kTimeout, "looking up " + host + " takes longer than the deadline");
  }
  if (!entry.known) return Status(StatusCode::kUnavailable, "there is no host named " + host);
  return entry.address;
}

}  // namespace quire
