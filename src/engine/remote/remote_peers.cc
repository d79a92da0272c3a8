#include "engine/remote/remote_peers.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/guard.h"
#include "base/start_thread.h"
#include "engine/remote/fnv_hash.h"
#include "transfer/peer_endpoint.h"

namespace quire {
namespace {

constexpr size_t kPeersMax = 64;
constexpr int64_t kTimeoutMsMax = 86'400'000;
// How often lost connections are looked for. Breakers say whether a peer is tried then.
constexpr int64_t kLookNs = 200 * kNsPerMs;
// Weight of the newest prompt in the mean of the bytes per second.
constexpr double kRateWeight = 0.3;
// A prompt that took longer than computing by this factor waited for its bytes.
constexpr double kMovingFactor = 1.25;
// For how long a rate is believed that no newer prompt confirms.
constexpr int64_t kRateLifeNs = 60'000 * kNsPerMs;

Status BadPeers(const std::string& what) {
  return Status(StatusCode::kBadArgument, "Engine::AttachPrefillPeers: " + what);
}

Status CheckOptions(const PrefillPeerOptions& options) {
  const std::vector<std::string>& addresses = options.addresses;
  if (addresses.empty() || addresses.size() > kPeersMax) {
    return BadPeers(std::to_string(addresses.size()) + " addresses; give 1 to " +
                    std::to_string(kPeersMax));
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    for (size_t before = 0; before < i; ++before) {
      if (IsSameAddress(addresses[i], addresses[before]))
        return BadPeers("the address " + addresses[i] + " is given twice");
    }
  }
  if (options.timeout_ms < 1 || options.timeout_ms > kTimeoutMsMax) {
    return BadPeers("timeout_ms is " + std::to_string(options.timeout_ms) +
                    "; it must be at least 1 and at most " + std::to_string(kTimeoutMsMax));
  }
  return {};
}

// The finalizer of SplitMix64: every bit of the input changes half of the output.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// A mistake in what this process was told. All else may be different in a moment.
bool IsFinal(const Status& status) {
  return status.code() == StatusCode::kIncompatible || status.code() == StatusCode::kBadArgument;
}

uint64_t HashOf(std::string_view text) {
  FnvHash hash;
  hash.Add(text);
  return hash.value();
}

}  // namespace

PrefillPrediction PredictPrefill(const PromptAsk& ask, const PrefillPeerInfo& peer) {
  if (ask.here_seconds_per_token <= 0) return {};
  const double speed =
      peer.seconds_per_token > 0 ? peer.seconds_per_token : ask.here_seconds_per_token;
  const double compute = speed * static_cast<double>(ask.tokens);
  const double move =
      peer.bytes_per_second > 0 ? static_cast<double>(ask.bytes) / peer.bytes_per_second : 0;
  return {
      .here_seconds = ask.here_seconds,
      .remote_seconds = speed * static_cast<double>(peer.queued_tokens) + std::max(compute, move)};
}

std::vector<size_t> PeerOrder(uint64_t key, std::span<const std::string> addresses) {
  std::vector<uint64_t> weights;
  for (const std::string& address : addresses) weights.push_back(Mix(key ^ Mix(HashOf(address))));
  std::vector<size_t> order(addresses.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });
  return order;
}

bool IsSameAddress(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const Result<PeerEndpoint> first = PeerEndpoint::Parse(a);
  const Result<PeerEndpoint> second = PeerEndpoint::Parse(b);
  return first.ok() && second.ok() && first->ToString() == second->ToString();
}

void MovingRate::Note(const PromptOutcome& outcome, int64_t now_ns) {
  if (outcome.bytes == 0 || outcome.seconds <= 0) return;
  const double rate = static_cast<double>(outcome.bytes) / outcome.seconds;
  const double before = At(now_ns);
  const bool was_moving = outcome.seconds > kMovingFactor * outcome.busy_seconds;
  if (before > 0 && rate < before && !was_moving) return;  // the peer was still computing
  noted_ns_ = now_ns;
  bytes_per_second_ = before == 0 ? rate : before + kRateWeight * (rate - before);
}

double MovingRate::At(int64_t now_ns) const {
  return now_ns - noted_ns_ < kRateLifeNs ? bytes_per_second_ : 0;
}

RemotePeers::RemotePeers(const PrefillPeerOptions& options, const Passport& passport,
                         KVTransfer* receiver, std::shared_ptr<Clock> clock)
    : receiver_(receiver),
      options_(options.peer),
      clock_(std::move(clock)),
      addresses_(options.addresses) {
  options_.passport = passport;
  for (const std::string& address : addresses_) {
    Peer& peer = peers_.emplace_back();
    peer.address = address;
    peer.breaker = std::make_unique<CircuitBreaker>(clock_, address);
    peer.info.address = address;
  }
}

Result<std::unique_ptr<RemotePeers>> RemotePeers::Create(const PrefillPeerOptions& options,
                                                         const Passport& passport,
                                                         KVTransfer* receiver,
                                                         std::shared_ptr<Clock> clock) {
  QUIRE_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<RemotePeers> peers(
      new RemotePeers(options, passport, receiver, std::move(clock)));
  const Status connected = peers->ConnectAll();
  if (IsFinal(connected)) return connected;
  QUIRE_RETURN_IF_ERROR(
      StartThread("lost prefill peers", &peers->thread_, [here = peers.get()] { here->Run(); }));
  return peers;
}

RemotePeers::~RemotePeers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    // The engine's cache is about to go.
    static_cast<void>(peer.connection->SetReceiver(nullptr));
    peer.connection->Close();
  }
}

void RemotePeers::Run() noexcept {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const int64_t until_ns = clock_->SteadyNs() + kLookNs;
      if (WaitUntil(*clock_, changed_, lock, until_ns, [&] { return is_closing_; })) return;
    }
    // What fails is kept for each peer; without memory the next round tries again.
    static_cast<void>(GuardEntry([&] { return ConnectAll(); }));
  }
}

Status RemotePeers::ConnectAll() {
  std::vector<Attempt> attempts;
  attempts.reserve(peers_.size());
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!IsMissing(i)) continue;
    auto call = peers_[i].breaker->Admit(clock_->SteadyNs() + options_.connect_timeout.count());
    if (call) attempts.push_back({.index = i, .call = *std::move(call)});
  }
  const auto connect = [this](Attempt* attempt) {
    attempt->status = GuardEntry([&] { return Connect(*attempt); });
  };
  std::vector<std::thread> threads(attempts.size());
  for (size_t i = 0; i + 1 < attempts.size(); ++i) {
    // Where the system has no thread to give, the attempt comes later, on this one.
    static_cast<void>(GuardEntry([&] {
      return StartThread("connecting to a prefill peer", &threads[i],
                         [&connect, attempt = &attempts[i]] { connect(attempt); });
    }));
  }
  for (size_t i = 0; i < attempts.size(); ++i)
    if (!threads[i].joinable()) connect(&attempts[i]);
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
  Status first;
  for (const Attempt& attempt : attempts) {
    const Status& connected = attempt.status;
    if (!connected.ok() && (first.ok() || IsFinal(connected))) first = connected;
  }
  return first;
}

// Whether the peer is to be connected to.
bool RemotePeers::IsMissing(size_t index) {
  // Its end waits for its thread, and may be here: not under the lock, which the engine takes.
  std::shared_ptr<TransferPeer> gone;
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_[index];
  if (is_closing_) return false;
  if (peer.connection == nullptr) return true;
  if (peer.connection->status().ok()) return false;
  peer.info.error = peer.connection->status().ToString();
  gone = std::move(peer.connection);
  return true;
}

Status RemotePeers::Connect(Attempt& attempt) {
  Result<std::shared_ptr<TransferPeer>> opened =
      TransferPeer::Connect(addresses_[attempt.index], options_);
  Status status = opened.status();
  // Not when it is asked for: the engine does not wait for a connection's thread.
  const int64_t streams = status.ok() ? (*opened)->stats().streams : 0;
  if (status.ok()) status = (*opened)->SetReceiver(receiver_);
  // Another model there is as good as nobody: it is not asked again at once.
  attempt.call.Report(status.ok() ? status : Status(StatusCode::kUnavailable, ""));
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_[attempt.index];
  if (status.ok()) {
    QUIRE_CHECK(peer.connection == nullptr) << peer.address << " has two connections";
    peer.connection = *std::move(opened);
    peer.streams = streams;
    peer.info.error.clear();
  } else {
    peer.info.error = status.ToString();
  }
  return status;
}

PrefillPeerInfo RemotePeers::InfoOf(const Peer& peer) const {
  PrefillPeerInfo info = peer.info;
  info.bytes_per_second = peer.rate.At(clock_->SteadyNs());
  if (peer.connection == nullptr || !peer.connection->status().ok()) return info;
  info.connected = true;
  info.streams = peer.streams;
  const TransferLoad load = peer.connection->load();
  info.queued_tokens = load.queued_tokens;
  info.seconds_per_token = static_cast<double>(load.ns_per_token) * 1e-9;
  return info;
}

std::optional<RemotePeers::Chosen> RemotePeers::Choose(const PromptAsk& ask,
                                                       RemotePrefill when) const {
  if (when == RemotePrefill::kOff) return {};
  const std::vector<size_t> order = PeerOrder(ask.key, addresses_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const size_t index : order) {
    const Peer& peer = peers_[index];
    if (!ask.peer.empty() && ask.peer != peer.address) continue;
    PrefillPeerInfo info = InfoOf(peer);
    if (!info.connected || !peer.breaker->available()) continue;
    const PrefillPrediction prediction = PredictPrefill(ask, info);
    const bool is_faster = prediction.remote_seconds < prediction.here_seconds;
    if (when == RemotePrefill::kAuto && ask.peer.empty() && !is_faster) continue;
    info.bytes_per_second = 0;
    return Chosen{.index = index,
                  .peer = peer.connection,
                  .prediction = prediction,
                  .busy_seconds = PredictPrefill(ask, info).remote_seconds};
  }
  return {};
}

void RemotePeers::Report(size_t index, const PromptOutcome& outcome) {
  const std::lock_guard<std::mutex> lock(mutex_);
  QUIRE_CHECK(index < peers_.size());
  QUIRE_CHECK(outcome.tokens >= 0);
  QUIRE_CHECK(outcome.bytes >= 0);
  Peer& peer = peers_[index];
  peer.info.tokens += outcome.tokens;
  peer.info.bytes += outcome.bytes;
  peer.rate.Note(outcome, clock_->SteadyNs());
  // A peer that is full says so at once: that is an answer.
  const bool is_answer = outcome.status.ok() || outcome.status.code() == StatusCode::kFull;
  if (std::optional<CircuitBreaker::Call> call = peer.breaker->Admit(kNever))
    call->Report(is_answer ? Status() : Status(StatusCode::kUnavailable, ""));
  if (outcome.status.ok()) {
    ++peer.info.prompts;
    return;
  }
  ++peer.info.losses;
  peer.info.error = outcome.status.ToString();
}

void RemotePeers::NoteError(size_t index, const Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  QUIRE_CHECK(index < peers_.size());
  peers_[index].info.error = why.ToString();
}

std::vector<PrefillPeerInfo> RemotePeers::Infos() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PrefillPeerInfo> infos;
  for (const Peer& peer : peers_) infos.push_back(InfoOf(peer));
  return infos;
}

}  // namespace quire
