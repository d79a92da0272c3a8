// Looking for chunks. Reading them is in chunk_fetcher_read.cc.
#include "store/tiered/chunk_fetcher.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace quire {

ChunkFetcher::ChunkFetcher(std::shared_ptr<StoreParts> parts) : parts_(std::move(parts)) {
  for (const TierKind kind : kSlowTiers)
    if (parts_->slow[At(kind)] != nullptr) queues_[At(kind)] = std::make_unique<ReadQueue>();
}

ChunkFetcher::~ChunkFetcher() { Close(); }

void ChunkFetcher::Close() noexcept {
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    // Each one leaves the set when it ends.
    while (!parts_->open_fetches.empty())
      (*parts_->open_fetches.begin())->End(MissReason::kCancelled);
  }
  for (const auto& queue : queues_)
    if (queue != nullptr) queue->Close();
  std::map<ChunkId, Load> left;  // of tasks that will not run
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    left.swap(loads_);
  }
  for (const auto& [id, load] : left) ReleasePin(*load);
}

Result<std::vector<std::shared_ptr<ChunkFetch>>> ChunkFetcher::Start(
    std::span<const FetchRequest> requests, bool to_memory) {
  Fetches states;
  for (const FetchRequest& request : requests) {
    std::vector<ChunkKey> hashed;
    if (request.chain.empty()) {
      QUIRE_ASSIGN_OR_RETURN(hashed, request.keys->Chain(request.tokens, request.chunk_tokens,
                                                         request.tail, request.extras));
    }
    const auto chain = request.chain.empty() ? std::span<const ChunkKey>(hashed) : request.chain;
    states.push_back(std::make_shared<FetchState>(parts_, request, chain, to_memory));
  }
  std::vector<std::shared_ptr<ChunkFetch>> handles;
  for (const Fetch& state : states) handles.push_back(std::make_shared<FetchHandle>(state));
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    for (const Fetch& state : states) parts_->open_fetches.insert(state.get());
  }
  Search(std::move(states));
  started_ += std::ssize(handles);
  return handles;
}

void ChunkFetcher::Search(Fetches fetches) noexcept {
  while (!fetches.empty()) {
    const std::array<Fetches, kTierCount> asking = SearchWithoutWaiting(fetches);
    fetches.clear();
    for (const TierKind kind : kSlowTiers) {
      const Fetches& those = asking[At(kind)];
      if (those.empty() || PushAsk(*parts_->slow[At(kind)], those)) continue;
      for (const Fetch& fetch : those) {
        fetch->search().unavailable = true;
        fetches.push_back(fetch);  // there was room for all of them
      }
    }
  }
}

// By tier: those that cannot go on before it was asked. The others are located.
std::array<ChunkFetcher::Fetches, kTierCount> ChunkFetcher::SearchWithoutWaiting(
    const Fetches& fetches) noexcept {
  std::array<Fetches, kTierCount> asking;
  Fetches located;
  bool has_room = true;
  try {
    located.reserve(fetches.size());
    for (Fetches& those : asking) those.reserve(fetches.size());
    for (const Fetch& fetch : fetches) {
      const SlowTier* const tier = SearchSome(fetch);
      (tier == nullptr ? located : asking[At(tier->kind)]).push_back(fetch);
    }
    StartRuns(fetches);  // may go while others wait for their answer
  } catch (const std::bad_alloc&) {
    // What was found so far may come; the rest is a miss.
    has_room = false;
    for (Fetches& those : asking) those.clear();
    for (const Fetch& fetch : fetches) {
      for (FetchState::Search::Run& run : fetch->search().runs) {
        for (const Load& load : run.loads) Fail(load, MissReason::kNoRoom);
        run = {};
      }
    }
  }
  const std::lock_guard lock(parts_->fetch_mutex);
  for (const Fetch& fetch : has_room ? located : fetches) {
    const FetchState::Search& search = fetch->search();
    const MissReason why = search.next == fetch->count() ? MissReason::kNone
                           : !has_room                   ? MissReason::kNoRoom
                           : search.unavailable          ? MissReason::kUnavailable
                           : search.expired              ? MissReason::kExpired
                                                         : MissReason::kNotStored;
    fetch->EndIfLate();
    fetch->Located(why);
  }
  return asking;
}

// The tier that has to be asked now; null when there is nothing more to be found.
SlowTier* ChunkFetcher::SearchSome(const Fetch& fetch) {
  FetchState::Search& search = fetch->search();
  for (; search.next < fetch->count(); ++search.next, search.asked = {}) {
    const int64_t i = search.next;
    if (TakeFromMemory(*fetch, i)) continue;
    if (Claim(fetch, i, nullptr)) continue;  // on its way already
    bool found = false;
    for (const TierKind kind : kSlowTiers) {
      SlowTier* tier = parts_->slow[At(kind)].get();
      if (tier == nullptr || found) continue;
      switch (AskWithoutWaiting(*fetch, *tier, i)) {
        case Answer::kNo:
          break;
        case Answer::kYes:
          found = Claim(fetch, i, tier);
          break;
        case Answer::kAsk:
          search.asked[At(kind)] = true;
          return tier;
      }
    }
    if (!found) return nullptr;
  }
  return nullptr;
}

// Takes chunk i from RAM if it is there: found and pinned in one step.
bool ChunkFetcher::TakeFromMemory(FetchState& fetch, int64_t i) {
  if (!parts_->has_memory()) return false;
  MissReason miss = MissReason::kNone;
  const ChunkId& id = fetch.id(i);
  const Removals::Move move = parts_->removals.BeginMove();  // it may be due for the slow tiers
  const std::optional<KeptChunk> kept = parts_->memory->Take(id, parts_->clock->WallMs(), &miss);
  if (miss == MissReason::kExpired) fetch.search().expired = true;
  if (!kept) return false;
  FetchState::Slot slot{.chunk = kept->chunk};
  const PinnedChunk pin{id.key, TierBit(TierKind::kRam)};
  if (!std::ranges::equal(slot.chunk->header().tokens, fetch.tokens(i))) {
    // A digest that collides serves nobody other tokens.
    parts_->Unpin(pin);
    return false;
  }
  try {
    slot.pin = parts_->pins.Add(pin, /*named=*/false, parts_->clock->SteadyNs());
  } catch (...) {
    parts_->Unpin(pin);
    throw;
  }
  parts_->Wanted(*kept);
  const PinBoard::Ticket ticket = slot.pin;
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    if (fetch.Found(i, &slot)) return true;
  }
  if (parts_->pins.Release(ticket)) parts_->Unpin(pin);
  return true;  // it has ended; the search sees it at its next claim or its end
}

// What the tier says without I/O, or said before.
ChunkFetcher::Answer ChunkFetcher::AskWithoutWaiting(FetchState& fetch, SlowTier& tier, int64_t i) {
  FetchState::Search& search = fetch.search();
  if (!tier.usable()) {
    search.unavailable = true;
    return Answer::kNo;
  }
  if (i < search.asked_until[At(tier.kind)]) return Answer::kYes;
  const int known = tier.tier->Knows(fetch.id(i));
  if (known >= 0) return known == 1 ? Answer::kYes : Answer::kNo;
  return search.asked[At(tier.kind)] ? Answer::kNo : Answer::kAsk;
}

bool ChunkFetcher::PushAsk(SlowTier& tier, const Fetches& fetches) noexcept {
  int priority = fetches.front()->priority();
  for (const Fetch& fetch : fetches) priority = std::max(priority, fetch->priority());
  try {
    return queues_[At(tier.kind)]->Push(priority, [this, those = fetches, asked = &tier]() mutable {
      Ask(*asked, std::move(those));
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void ChunkFetcher::Ask(SlowTier& tier, Fetches fetches) noexcept {
  int64_t deadline_ns = 0;
  auto late = fetches.end();
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    late = std::partition(fetches.begin(), fetches.end(), [](const Fetch& fetch) {
      fetch->EndIfLate();
      return !fetch->located();
    });
  }
  fetches.erase(late, fetches.end());  // without the lock
  if (fetches.empty()) return;
  for (const Fetch& fetch : fetches) deadline_ns = std::max(deadline_ns, fetch->deadline_ns());
  Status left = Status::OutOfMemory();  // of those without an answer
  size_t answered = 0;
  const auto take = [&](const Status& status) {
    tier.Count(status);
    if (!status.ok()) fetches[answered]->search().unavailable = true;
    ++answered;
  };
  try {
    if (auto call = tier.Admit(deadline_ns)) {
      std::vector<std::span<const ChunkId>> chains;
      for (const Fetch& fetch : fetches) chains.push_back(fetch->ids_from(fetch->search().next));
      for (const Result<int64_t>& there : tier.tier->Prefixes(chains, deadline_ns)) {
        call->Report(there.status());
        FetchState::Search& search = fetches[answered]->search();
        if (there.ok())
          search.asked_until[At(tier.kind)] =
              search.next + std::clamp<int64_t>(*there, 0, std::ssize(chains[answered]));
        take(there.status());
      }
    } else {
      left = Status(StatusCode::kUnavailable, "the tier is left alone for a while");
    }
  } catch (const std::bad_alloc&) {
    left = Status::OutOfMemory();
  }
  while (answered < fetches.size()) take(left);
  Search(std::move(fetches));
}

bool ChunkFetcher::Claim(const Fetch& fetch, int64_t i, SlowTier* tier) {
  const ChunkId& id = fetch->id(i);
  bool result = false;
  PinnedChunk pin{id.key};
  PinBoard::Ticket ticket = 0;
  if (tier != nullptr) {
    // A pinned chunk is there: an answer that is out of date by now shows here.
    if (tier->tier->Pin(id.key, 1)) {
      pin.tiers = TierBit(tier->kind);
      try {
        ticket = parts_->pins.Add(pin, /*named=*/false, parts_->clock->SteadyNs());
      } catch (...) {
        parts_->Unpin(pin);
        throw;
      }
    } else if (tier->tier->Knows(id) == 0) {
      return false;
    }
  }
  const auto release = [&]() noexcept {
    if (parts_->pins.Release(ticket)) parts_->Unpin(pin);
  };
  try {
    for (;;) {
      {
        const std::lock_guard lock(parts_->fetch_mutex);
        const auto at = loads_.find(id);
        // What was removed comes to the fetches that wanted it before.
        const bool comes = at != loads_.end() && !at->second->is_removed;
        // A load that has ended since RAM was asked brought the chunk there before it left loads_.
        const bool in_memory =
            !comes && parts_->has_memory() && parts_->memory->Has(id, parts_->clock->WallMs());
        if (!in_memory) {
          const bool begins = at == loads_.end() && tier != nullptr;
          result = comes ? Join(fetch, i, at->second) : begins && Begin(fetch, i, *tier, &ticket);
          break;
        }
      }
      if (TakeFromMemory(*fetch, i)) {
        result = true;
        break;
      }
    }
  } catch (...) {
    release();
    throw;
  }
  release();
  return result;
}

void ChunkFetcher::Disown(const Removals::Scope& removal) noexcept {
  const std::lock_guard lock(parts_->fetch_mutex);
  for (const auto& [id, load] : loads_) load->is_removed |= removal.Covers(id);
}

// A new load. Takes over the pin. False if the fetch has ended. REQUIRES: the mutex is held.
bool ChunkFetcher::Begin(const Fetch& fetch, int64_t i, SlowTier& tier, PinBoard::Ticket* pin) {
  const ChunkId& id = fetch->id(i);
  const int64_t tokens = static_cast<int64_t>(fetch->tokens(i).size());
  FetchState::Search::Run& run = fetch->search().runs[At(tier.kind)];
  const auto load = std::make_shared<ChunkLoad>(parts_->fetch_budget, id, tier.kind);
  load->is_removed = parts_->removals.Covers(id);
  const auto at = loads_.emplace(id, load).first;
  try {
    run.loads.push_back(load);
    if (!Join(fetch, i, load)) {
      run.loads.pop_back();
      loads_.erase(at);
      return false;
    }
  } catch (...) {
    if (!run.loads.empty() && run.loads.back() == load) run.loads.pop_back();
    loads_.erase(at);
    throw;
  }
  if (run.loads.size() == 1) run.first = i;
  run.bytes += parts_->passports.Find(id.fingerprint)->block_bytes * tokens / fetch->chunk_tokens();
  run.tokens += tokens;
  load->pin = std::exchange(*pin, 0);
  return true;
}

// False if the fetch has ended. REQUIRES: the mutex is held.
bool ChunkFetcher::Join(const Fetch& fetch, int64_t i, const Load& load) {
  load->waiters.push_back({fetch, i});
  FetchState::Slot slot{.load = load, .tier = load->tier};
  if (!fetch->Found(i, &slot)) {
    load->waiters.pop_back();
    return false;
  }
  load->to_memory = load->to_memory || fetch->to_memory();
  return true;
}

// Hands what was found to the threads of its tiers, unless computing is faster.
void ChunkFetcher::StartRuns(const Fetches& fetches) {
  for (const TierKind kind : kSlowTiers) {
    std::vector<Load> loads;
    size_t count = 0;
    for (const Fetch& fetch : fetches) count += fetch->search().runs[At(kind)].loads.size();
    if (count == 0) continue;
    loads.reserve(count);  // nothing fails from here on
    SlowTier& tier = *parts_->slow[At(kind)];
    int priority = std::numeric_limits<int>::min();
    for (const Fetch& fetch : fetches) {
      FetchState::Search::Run run = std::exchange(fetch->search().runs[At(kind)], {});
      if (run.loads.empty()) continue;
      const double compute = fetch->compute_seconds_per_token() * static_cast<double>(run.tokens);
      if (!tier.predictor.Allow(run.bytes, compute)) {
        {
          const std::lock_guard lock(parts_->fetch_mutex);
          fetch->Failed(run.first, MissReason::kNotWorth);
        }
        // Others that joined may think otherwise. What nobody wants is not under way any more, or
        // the next one would join it instead of judging for itself.
        std::erase_if(run.loads, [&](const Load& load) { return DropIfUnwanted(load); });
        if (run.loads.empty()) continue;
      }
      priority = std::max(priority, fetch->priority());
      loads.insert(loads.end(), run.loads.begin(), run.loads.end());
    }
    if (!loads.empty()) PushRead(tier, priority, std::move(loads));
  }
}

bool ChunkFetcher::DropIfUnwanted(const Load& load) noexcept {
  {
    const std::lock_guard lock(parts_->fetch_mutex);
    if (!load->waiters.empty()) return false;
    const auto at = loads_.find(load->id);
    if (at != loads_.end() && at->second == load) loads_.erase(at);
  }
  ReleasePin(*load);
  return true;
}

void ChunkFetcher::PushRead(SlowTier& tier, int priority, std::vector<Load> loads) noexcept {
  const auto shared = [&]() noexcept -> std::shared_ptr<std::vector<Load>> {
    try {
      return std::make_shared<std::vector<Load>>(loads);
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }();
  bool pushed = false;
  try {
    pushed =
        shared != nullptr && queues_[At(tier.kind)]->Push(
                                 priority, [this, shared, each = &tier] { Read(*each, *shared); });
  } catch (const std::bad_alloc&) {
    pushed = false;
  }
  if (pushed) return;
  for (const Load& load : loads) Fail(load, MissReason::kNoRoom);
}

}  // namespace quire
