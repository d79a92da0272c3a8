#include "net/host_resolver.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/guard.h"
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

}  // namespace

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

// One that somebody waits for stays when it is forgotten.
struct HostResolver::Entry {
  std::string address;  // "" = the look-up found none
  int64_t until_ns = 0;
  bool pending = false;
  bool known = false;
  Status failure;  // of the look-up itself
};

struct HostResolver::State {
  std::shared_ptr<Clock> clock;
  std::function<std::string(const std::string&)> find;
  std::mutex mutex;
  std::condition_variable changed;
  // The options' names and those that servers tell, kNamesMax at most.
  std::map<std::string, std::shared_ptr<Entry>> entries;

  // That of `host`, perhaps a new one. Unavailable: all places are those of look-ups under way.
  Result<std::shared_ptr<Entry>> EntryOf(const std::string& host);
  Status MakePlace();
  void LookUp(const std::string& host, Entry* entry);
};

Result<std::shared_ptr<HostResolver::Entry>> HostResolver::State::EntryOf(const std::string& host) {
  if (const auto found = entries.find(host); found != entries.end()) return found->second;
  if (entries.size() >= kNamesMax) QUIRE_RETURN_IF_ERROR(MakePlace());
  return entries.emplace(host, std::make_shared<Entry>()).first->second;
}

// Forgets the name whose address is the oldest.
Status HostResolver::State::MakePlace() {
  auto oldest = entries.end();
  for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
    if (entry->second->pending) continue;
    if (oldest == entries.end() || entry->second->until_ns < oldest->second->until_ns)
      oldest = entry;
  }
  if (oldest == entries.end()) {
    return Status(StatusCode::kUnavailable,
                  std::to_string(entries.size()) +
                      " names of hosts are being looked up, and no more are at a time; the name "
                      "server does not answer");
  }
  entries.erase(oldest);
  return Status();
}

void HostResolver::State::LookUp(const std::string& host, Entry* entry) {
  Result<std::string> address = GuardEntry([&]() -> Result<std::string> { return find(host); });
  const std::lock_guard<std::mutex> guard(mutex);
  entry->failure = address.status();
  entry->known = address.ok() && !address->empty();
  if (address.ok()) entry->address = *std::move(address);
  entry->until_ns = clock->SteadyNs() + kRememberedNs;
  entry->pending = false;
  changed.notify_all();
}

HostResolver::HostResolver(std::shared_ptr<Clock> clock,
                           std::function<std::string(const std::string&)> find)
    : state_(std::make_shared<State>()) {
  state_->clock = std::move(clock);
  state_->find = std::move(find);
}

size_t HostResolver::name_count() const {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->entries.size();
}

Result<std::string> HostResolver::Resolve(const std::string& host, int64_t deadline_ns) {
  if (IsIpAddress(host)) return host;
  std::unique_lock<std::mutex> lock(state_->mutex);
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, state_->EntryOf(host));
  if (entry->known && state_->clock->SteadyNs() < entry->until_ns) return entry->address;
  if (!entry->pending) {
    std::thread thread;
    QUIRE_RETURN_IF_ERROR(
        StartThread("looking up a host's name", &thread,
                    [state = state_, host, entry] { state->LookUp(host, entry.get()); }));
    thread.detach();
    entry->pending = true;  // the thread waits for the lock before it is done
  }
  if (!WaitUntil(*state_->clock, state_->changed, lock, deadline_ns,
                 [&] { return !entry->pending; })) {
    return Status(StatusCode::kTimeout, "looking up " + host + " takes longer than the deadline");
  }
  QUIRE_RETURN_IF_ERROR(entry->failure);
  if (!entry->known) return Status(StatusCode::kUnavailable, "there is no host named " + host);
  return entry->address;
}

}  // namespace quire
