#include "engine/prefix/prefix_cache.h"

#include <iterator>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/guard.h"

namespace quire {

int64_t CommonPrefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

void NoteKnown(int64_t common, int64_t length, PrefixMatch* best) noexcept {
  if (common < best->known) return;
  const bool goes_on = common < length;
  best->goes_on = common > best->known ? goes_on : best->goes_on && goes_on;
  best->known = common;
}

PrefixCache::PrefixCache(EngineStates state, int64_t page_size, const Limits& limits,
                         std::shared_ptr<Clock> clock)
    : state_(state),
      page_size_(page_size),
      sequences_max_(limits.sequences),
      tokens_max_(limits.tokens),
      clock_(std::move(clock)) {
  QUIRE_CHECK(limits.sequences >= 1);
}

void PrefixCache::Retain(int64_t sequence_id, std::vector<int32_t> tokens, const PrefixSpace& space,
                         int64_t stored) noexcept {
  if (tokens.empty() || !MakeRetained(sequence_id)) return state_.RemoveSequence(sequence_id);
  try {
    Entries entry;
    entry.push_back({.sequence_id = sequence_id,
                     .tokens = std::move(tokens),
                     .space = space,
                     .stored = stored,
                     .part = PartOf(space.salt)});
    Insert(std::move(entry));
    while (token_count_ > tokens_max_) GiveUpOldest();
  } catch (const std::bad_alloc&) {
    const auto order = by_space_.find(space);
    if (order != by_space_.end() && order->second.empty()) by_space_.erase(order);
    state_.RemoveSequence(sequence_id);  // retaining is a favour, not a duty
  }
}

bool PrefixCache::MakeRetained(int64_t sequence_id) noexcept {
  Status status = state_.SetRetained(sequence_id, true);
  while (status.code() == StatusCode::kOutOfPages && !by_use_.empty()) {
    GiveUpOldest();
    status = state_.SetRetained(sequence_id, true);
  }
  return status.ok();
}

void PrefixCache::GiveUpOldest() noexcept {
  const Entries::iterator victim = TakeVictim();
  if (before_eviction) before_eviction(ViewOf(*victim));
  NoteEvicted(*victim, 0);
  Remove(victim);
}

void PrefixCache::SetPart(const std::string& salt, int64_t pages) {
  if (pages == 0) {
    MoveTo(&part_of_all_, salt);
    parts_.erase(salt);
    return;
  }
  const auto [place, is_new] = parts_.try_emplace(salt);
  place->second.pages = pages;
  if (is_new) MoveTo(&place->second, salt);
}

void PrefixCache::MoveTo(Part* part, const std::string& salt) noexcept {
  for (auto entry = by_use_.begin(); entry != by_use_.end(); ++entry)
    if (entry->space.salt == salt && entry->leases == 0) Move(entry, part);
}

void PrefixCache::Move(Entries::iterator entry, Part* part) noexcept {
  const int64_t pages = PagesOf(static_cast<int64_t>(entry->tokens.size()));
  entry->part->pages_kept -= pages;
  part->by_use.insert(entry->part->by_use.extract(entry->used));
  entry->part = part;
  part->pages_kept += pages;
}

void PrefixCache::AddLease(std::span<const int32_t> tokens, const PrefixSpace& space,
                           int64_t until_ns) noexcept {
  if (tokens.empty()) return;
  if (TakeAsked(tokens, space)) {
    ++lease_counts_.used;
    return;
  }
  const PrefixMatch match = Find(tokens, space);
  if (match.length < std::ssize(tokens)) return;
  const Entries::iterator entry = by_id_.at(match.sequence_id);
  const Status added = GuardEntry([&]() -> Status {
    leases_.push_back({.entry = entry, .tokens = std::ssize(tokens), .until_ns = until_ns});
    return {};
  });
  if (!added.ok()) return;
  if (++entry->leases == 1) Move(entry, &leased_);
  EndSurplusLeases();
}

PrefixCache::Leases::iterator PrefixCache::EndLease(Leases::iterator lease,
                                                    int64_t* count) noexcept {
  const Entries::iterator entry = lease->entry;
  QUIRE_CHECK(entry->leases > 0);
  if (--entry->leases == 0) Move(entry, PartOf(entry->space.salt));
  ++*count;
  return leases_.erase(lease);
}

void PrefixCache::EndLease(std::span<const int32_t> tokens, const PrefixSpace& space,
                           int64_t until_ns) noexcept {
  if (tokens.empty()) return;
  for (auto lease = leases_.begin(); lease != leases_.end(); ++lease) {
    const int64_t left = lease->tokens - std::ssize(tokens);
    if (left < 0 || left > 1 || lease->entry->space != space) continue;
    if (CommonPrefix(tokens, lease->entry->tokens) < std::ssize(tokens)) continue;
    EndLease(lease, &lease_counts_.used);
    return;
  }
  NoteAsked(tokens, space, until_ns);
}

void PrefixCache::NoteAsked(std::span<const int32_t> tokens, const PrefixSpace& space,
                            int64_t until_ns) noexcept {
  if (lease_limits_.leases == 0) return;
  // Without memory the next lease lives its time.
  static_cast<void>(GuardEntry([&]() -> Status {
    asked_.push_back({.space = space,
                      .tokens = std::ssize(tokens),
                      .hash = Hash64(tokens.data(), tokens.size_bytes()),
                      .until_ns = until_ns});
    return {};
  }));
  if (std::ssize(asked_) > lease_limits_.leases) asked_.pop_front();
}

bool PrefixCache::TakeAsked(std::span<const int32_t> tokens, const PrefixSpace& space) noexcept {
  const int64_t now_ns = asked_.empty() ? 0 : clock_->SteadyNs();
  std::erase_if(asked_, [&](const Asked& asked) { return now_ns >= asked.until_ns; });
  const auto found = std::ranges::find_if(asked_, [&](const Asked& asked) {
    const int64_t left = std::ssize(tokens) - asked.tokens;
    if (left < 0 || left > 1 || asked.space != space) return false;
    const auto first = tokens.first(static_cast<size_t>(asked.tokens));
    return asked.hash == Hash64(first.data(), first.size_bytes());
  });
  if (found == asked_.end()) return false;
  asked_.erase(found);
  return true;
}

void PrefixCache::EndOverdueLeases() noexcept {
  if (leases_.empty()) return;
  const int64_t now_ns = clock_->SteadyNs();
  for (auto lease = leases_.begin(); lease != leases_.end();)
    lease = now_ns < lease->until_ns ? std::next(lease) : EndLease(lease, &lease_counts_.overdue);
}

void PrefixCache::EndLeases() noexcept {
  while (!leases_.empty()) EndLease(leases_.begin(), &lease_counts_.given_up);
  asked_.clear();
}

void PrefixCache::EndSurplusLeases() noexcept {
  while (lease_count() > lease_limits_.leases || leased_.pages_kept > lease_limits_.pages) {
    QUIRE_CHECK(!leases_.empty()) << "pages are counted that no lease holds";
    EndLease(leases_.begin(), &lease_counts_.given_up);
  }
}

void PrefixCache::PassLeases(Entries::iterator from, Entries::iterator to) noexcept {
  if (from->leases == 0) return;
  for (Lease& lease : leases_)
    if (lease.entry == from) lease.entry = to;
  Move(to, &leased_);
  to->leases = std::exchange(from->leases, 0);
}

PrefixCache::Part* PrefixCache::PartOf(const std::string& salt) {
  const auto found = parts_.find(salt);
  return found == parts_.end() ? &part_of_all_ : &found->second;
}

void PrefixCache::MakeNewest(Entries::iterator entry) noexcept {
  by_use_.splice(by_use_.end(), by_use_, entry);
  auto& by_use = entry->part->by_use;
  auto node = by_use.extract(entry->used);
  entry->used = ++last_used_;
  node.key() = entry->used;
  by_use.insert(by_use.end(), std::move(node));
}

int64_t PrefixCache::PagesToGive(const Entry& entry, int64_t missing) const {
  const Part& part = *entry.part;
  if (IsOfAll(part) || !part.is_beyond()) return missing;
  return std::min(missing, part.pages_kept - part.pages);
}

PrefixCache::Entries::iterator PrefixCache::Victim() const noexcept {
  const Part* oldest = nullptr;
  const auto consider = [&](const Part& part) {
    if (part.by_use.empty()) return;
    if (oldest == nullptr || part.by_use.begin()->first < oldest->by_use.begin()->first) {
      oldest = &part;
    }
  };
  consider(part_of_all_);
  for (const auto& [salt, part] : parts_) {
    if (part.is_beyond()) consider(part);
  }
  if (oldest == nullptr && !leases_.empty()) return leases_.front().entry;
  if (oldest == nullptr) {
    for (const auto& [salt, part] : parts_) consider(part);
  }
  QUIRE_CHECK(oldest != nullptr) << "nothing is kept";
  return oldest->by_use.begin()->second;
}

PrefixCache::Entries::iterator PrefixCache::TakeVictim() noexcept {
  Entries::iterator victim = Victim();
  while (victim->leases > 0) {
    EndLease(leases_.begin(), &lease_counts_.given_up);
    victim = Victim();
  }
  return victim;
}

void PrefixCache::NoteEvicted(const Entry& entry, int64_t kept) noexcept {
  evicted_.Note(entry.space, entry.sequence_id, entry.tokens, kept, clock_->SteadyNs());
}

std::optional<int64_t> PrefixCache::EvictedAgo(std::span<const int32_t> tokens,
                                               const PrefixSpace& space, int64_t known) const {
  const std::optional<int64_t> time_ns = evicted_.Find(space, tokens, known);
  if (!time_ns) return {};
  return clock_->SteadyNs() - *time_ns;
}

void PrefixCache::Count(const Entry& entry, int64_t tokens, int64_t sign) noexcept {
  token_count_ += sign * tokens;
  page_count_max_ += sign * PagesOf(tokens);
  entry.part->pages_kept += sign * PagesOf(tokens);
}

// `entry` is a list of one, so that what allocates comes before what changes.
void PrefixCache::Insert(Entries entry) {
  const Entries::iterator added = entry.begin();
  std::map<int64_t, Entries::iterator> by_id = {{added->sequence_id, added}};
  added->used = last_used_ + 1;
  std::map<uint64_t, Entries::iterator> by_use = {{added->used, added}};
  Index& by_tokens = by_space_[added->space];
  const auto [place, is_new] = by_tokens.insert(added);
  if (!is_new) {  // the same tokens are retained already
    state_.RemoveSequence(added->sequence_id);
    (*place)->stored = std::max((*place)->stored, added->stored);
    return Touch((*place)->sequence_id);
  }
  by_use_.splice(by_use_.end(), entry);
  by_id_.merge(by_id);
  added->part->by_use.merge(by_use);
  last_used_ = added->used;
  Count(*added, static_cast<int64_t>(added->tokens.size()), 1);
  const auto is_prefix = [this](Entries::iterator a, Entries::iterator b) {
    return state_.forks_anywhere() &&
           CommonPrefix(a->tokens, b->tokens) == static_cast<int64_t>(a->tokens.size());
  };
  if (const auto next = std::next(place); next != by_tokens.end() && is_prefix(added, *next)) {
    const Entries::iterator longer = *next;
    longer->stored = std::max(longer->stored, added->stored);
    Remove(added);
    return MakeNewest(longer);
  }
  if (place != by_tokens.begin() && is_prefix(*std::prev(place), added)) {
    PassLeases(*std::prev(place), added);
    Remove(*std::prev(place));
    EndSurplusLeases();
  }
  if (sequence_count() > sequences_max_) GiveUpOldest();
}

PrefixMatch PrefixCache::Find(std::span<const int32_t> tokens, const PrefixSpace& space,
                              int64_t border) const {
  PrefixMatch best;
  const auto order = by_space_.find(space);
  if (order == by_space_.end()) return best;
  const Index& by_tokens = order->second;
  const auto consider = [&](Entries::iterator entry) {
    const int64_t common = CommonPrefix(tokens, entry->tokens);
    NoteKnown(common, static_cast<int64_t>(entry->tokens.size()), &best);
    if (common <= best.length) return;
    const int64_t length = state_.ForkBorder(entry->sequence_id, common, border);
    if (length <= best.length) return;
    best.sequence_id = entry->sequence_id;
    best.length = length;
  };
  if (!state_.forks_anywhere()) {  // others than the neighbours may be the ones to be forked
    for (const Entries::iterator entry : by_tokens) consider(entry);
    return best;
  }
  const auto place = by_tokens.lower_bound(tokens);
  if (place != by_tokens.end()) consider(*place);
  if (place != by_tokens.begin()) consider(*std::prev(place));
  return best;
}

PrefixCache::Family PrefixCache::FamilyOf(std::span<const int32_t> beginning,
                                          const PrefixSpace& space) const {
  Family family(state_, beginning);
  const auto order = by_space_.find(space);
  if (order == by_space_.end()) return family;
  const Index& by_tokens = order->second;
  family.members_.assign(by_tokens.lower_bound(beginning),
                         by_tokens.upper_bound(Beginning{beginning}));
  return family;
}

int64_t PrefixCache::Family::Common(std::span<const int32_t> rest,
                                    Entries::const_iterator member) const {
  const int64_t common = CommonPrefix(rest, RestOf(member));
  compared_ += common + 1;
  return common;
}

PrefixMatch PrefixCache::Family::Find(std::span<const int32_t> rest) const {
  PrefixMatch best;
  // False: those further away have no more in common.
  const auto consider = [&](Entries::const_iterator member) {
    const int64_t common = Common(rest, member);
    if (common == 0 || length_ + common <= best.length) return false;
    const int64_t length = state_.ForkBorder(member->sequence_id, length_ + common, 1);
    if (length > std::max(length_, best.length)) {
      best.sequence_id = member->sequence_id;
      best.length = length;
    }
    return !state_.forks_anywhere();
  };
  const auto place =
      std::partition_point(members_.begin(), members_.end(), [&](Entries::const_iterator member) {
        const std::span<const int32_t> other = RestOf(member);
        const auto common = static_cast<size_t>(Common(rest, member));
        return common < rest.size() && (common == other.size() || other[common] < rest[common]);
      });
  auto after = place;
  while (after != members_.end() && consider(*after)) ++after;
  auto before = place;
  while (before != members_.begin() && consider(*std::prev(before))) --before;
  return best;
}

void PrefixCache::Touch(int64_t sequence_id) noexcept {
  const auto found = by_id_.find(sequence_id);
  if (found != by_id_.end()) MakeNewest(found->second);
}

void PrefixCache::Evict(int64_t pages) noexcept {
  while (!by_use_.empty()) {
    const int64_t missing = pages - state_.pages_free();
    if (missing <= 0) return;
    const Entries::iterator victim = TakeVictim();
    if (before_eviction) before_eviction(ViewOf(*victim));
    const int64_t given = PagesToGive(*victim, missing);
    const bool is_left = CutTail(victim, given);
    // What is still missing is in pages that others hold too: nothing is won by keeping the rest.
    if (is_left && given == missing && state_.pages_free() < pages) {
      NoteEvicted(*victim, 0);
      Remove(victim);
    }
  }
}

bool PrefixCache::CutTail(Entries::iterator entry, int64_t pages) noexcept {
  const auto length = static_cast<int64_t>(entry->tokens.size());
  const int64_t pages_kept = std::max<int64_t>(0, PagesOf(length) - pages);
  const int64_t kept = state_.ForkStart(entry->sequence_id, pages_kept * page_size_);
  NoteEvicted(*entry, kept);
  if (kept == 0) {
    Remove(entry);
    return false;
  }
  const Status status = state_.kv().PopN(entry->sequence_id, length - kept);
  // A window hides what the end would see, or the allocator refused; removing needs no memory.
  if (!status.ok()) {
    NoteEvicted(*entry, 0);
    Remove(entry);
    return false;
  }
  Index& by_tokens = IndexOf(*entry);
  Index::node_type node = by_tokens.extract(by_tokens.find(entry));
  entry->tokens.resize(kept);
  entry->stored = std::min(entry->stored, kept);
  Count(*entry, length, -1);
  Count(*entry, kept, 1);
  // Texts that begin with the shortened one stand from its place on.
  const auto place = by_tokens.lower_bound(entry);
  const bool is_redundant =
      place != by_tokens.end() && CommonPrefix(entry->tokens, (*place)->tokens) == kept &&
      (state_.forks_anywhere() || static_cast<int64_t>((*place)->tokens.size()) == kept);
  if (!is_redundant) {
    by_tokens.insert(place, std::move(node));
    return true;
  }
  Forget(entry);
  return false;
}

void PrefixCache::Remove(Entries::iterator entry) noexcept {
  const auto order = by_space_.find(entry->space);
  order->second.erase(entry);
  if (order->second.empty()) by_space_.erase(order);
  Forget(entry);
}

void PrefixCache::Forget(Entries::iterator entry) noexcept {
  QUIRE_CHECK(entry->leases == 0) << "a lease of what is gone";
  by_id_.erase(entry->sequence_id);
  entry->part->by_use.erase(entry->used);
  state_.RemoveSequence(entry->sequence_id);
  Count(*entry, static_cast<int64_t>(entry->tokens.size()), -1);
  by_use_.erase(entry);
}

void PrefixCache::ForEach(const std::function<void(const Retained&)>& visit) {
  for (Entry& entry : by_use_) visit(ViewOf(entry));
}

void PrefixCache::ForNewest(int64_t count, const std::function<void(const Facts&)>& visit) const {
  for (auto entry = by_use_.rbegin(); entry != by_use_.rend() && count > 0; ++entry, --count) {
    visit({.sequence_id = entry->sequence_id,
           .tokens = static_cast<int64_t>(entry->tokens.size()),
           .stored = entry->stored,
           .salt = entry->space.salt});
  }
}

void PrefixCache::CheckInvariants() const {
  size_t indexed = 0;
  for (const auto& [space, by_tokens] : by_space_) indexed += by_tokens.size();
  QUIRE_CHECK(by_use_.size() == indexed);
  QUIRE_CHECK(sequence_count() <= sequences_max_);
  QUIRE_CHECK(token_count_ <= tokens_max_);
  QUIRE_CHECK(sequence_count() == state_.retained_sequence_count());
  int64_t tokens = 0;
  int64_t pages = 0;
  std::map<const Part*, int64_t> kept;
  std::map<const Part*, size_t> counts;
  std::map<const Entry*, int64_t> leases;
  for (const Lease& lease : leases_) {
    ++leases[&*lease.entry];
    QUIRE_CHECK(lease.tokens <= static_cast<int64_t>(lease.entry->tokens.size()));
  }
  QUIRE_CHECK(lease_count() <= lease_limits_.leases);
  QUIRE_CHECK(leased_.pages_kept <= lease_limits_.pages);
  uint64_t used = 0;
  const Entry* victim = nullptr;  // by looking at all
  QUIRE_CHECK(by_id_.size() == by_use_.size());
  for (const Entry& entry : by_use_) {
    QUIRE_CHECK(&*by_id_.at(entry.sequence_id) == &entry);
    const auto length = static_cast<int64_t>(entry.tokens.size());
    tokens += length;
    pages += PagesOf(length);
    kept[entry.part] += PagesOf(length);
    ++counts[entry.part];
    QUIRE_CHECK(&*entry.part->by_use.at(entry.used) == &entry);
    QUIRE_CHECK(entry.used > used) << "the order of use is another one";
    used = entry.used;
    QUIRE_CHECK(entry.leases == leases[&entry]);
    QUIRE_CHECK((entry.part == &leased_) == (entry.leases > 0));
    const bool may_go = entry.leases == 0 && (IsOfAll(*entry.part) || entry.part->is_beyond());
    if (victim == nullptr && may_go) victim = &entry;
    const Result<int64_t> held = state_.GetSequenceLength(entry.sequence_id);
    QUIRE_CHECK(held.ok()) << held.status().ToString();
    QUIRE_CHECK(*held == length) << "sequence " << entry.sequence_id;
  }
  QUIRE_CHECK(tokens == token_count_);
  QUIRE_CHECK(pages == page_count_max_);
  QUIRE_CHECK(used <= last_used_);
  const auto check_part = [&](const Part& part) {
    QUIRE_CHECK(part.pages_kept == kept[&part]);
    QUIRE_CHECK(part.by_use.size() == counts[&part]);
  };
  check_part(part_of_all_);
  check_part(leased_);
  for (const auto& [salt, part] : parts_) check_part(part);
  for (const auto& [space, by_tokens] : by_space_) CheckOrder(space, by_tokens);
  if (by_use_.empty()) return;
  if (victim == nullptr && !leases_.empty()) victim = &*leases_.front().entry;
  if (victim == nullptr) victim = &by_use_.front();
  QUIRE_CHECK(&*Victim() == victim) << "sequence " << victim->sequence_id << " goes next";
}

void PrefixCache::CheckOrder(const PrefixSpace& space, const Index& by_tokens) const {
  QUIRE_CHECK(!by_tokens.empty());
  for (auto it = by_tokens.begin(); it != by_tokens.end(); ++it) {
    const Entry& entry = **it;
    QUIRE_CHECK(entry.space == space) << "sequence " << entry.sequence_id;
    QUIRE_CHECK(entry.stored >= 0);
    QUIRE_CHECK(entry.stored <= static_cast<int64_t>(entry.tokens.size()));
    const auto next = std::next(it);
    if (next == by_tokens.end()) return;
    QUIRE_CHECK(LexicographicOrder()(*it, *next));
    QUIRE_CHECK(!state_.forks_anywhere() || CommonPrefix(entry.tokens, (*next)->tokens) <
                                                static_cast<int64_t>(entry.tokens.size()))
        << "sequence " << entry.sequence_id << " is a prefix of another";
  }
}

}  // namespace quire
