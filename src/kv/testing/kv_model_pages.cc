// What the oracle, which has no pages, knows of a cache's: a token of position p stands in slot
// p mod page_size of its page, a slot that somebody else sees is never written, and a page range of
// a sequence lies in few pages, else it may be gathered in one.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "kv/testing/kv_model.h"

namespace quire {
namespace {

// Pages that may hold one page range of a sequence: what would need a fifth is gathered.
constexpr int64_t kPagesPerRange = 4;

int64_t PagesOf(int64_t tokens, int64_t page_size) { return (tokens + page_size - 1) / page_size; }

}  // namespace

KVModel::PageBounds KVModel::Taken::largest() const {
  PageBounds all;
  for (const PageBounds& group : pages)
    all = {std::max(all.least, group.least), std::max(all.most, group.most)};
  return all;
}

KVModel::PageBounds KVModel::Taken::sum() const {
  PageBounds all;
  for (const PageBounds& group : pages) all = {all.least + group.least, all.most + group.most};
  return all;
}

int64_t KVModel::RangeOf(int64_t position) const {
  return position - position % groups_[0].page_size;
}

// Each call opens one page of a range, or none.
bool KVModel::MayGather(const Sequence& sequence, int64_t end) const {
  std::set<int64_t> calls;
  for (int64_t p = RangeOf(end); p < end; ++p)
    calls.insert(sequence.tokens[static_cast<size_t>(p)].call);
  return std::ssize(calls) >= kPagesPerRange;
}

// A sequence whose last page is not full goes on in it if nobody else has gone on there. So of
// sequences that end in the same token one can, unless there is one that has this token and more.
KVModel::PageBounds KVModel::PagesTakenBy(std::span<const Growth> growths, size_t group) const {
  const int64_t page_size = groups_[group].page_size;
  PageBounds taken;
  struct End {
    int64_t members = 0;
    bool may_be_apart = false;
  };
  std::map<std::pair<int64_t, const TokenValues*>, End> ends;
  for (const Growth& growth : growths) {
    const Sequence& sequence = *growth.sequence;
    const int64_t length = std::ssize(sequence.tokens);
    int64_t pages = PagesOf(length + growth.count, page_size) - PagesOf(length, page_size) +
                    PagesOf(sequence.tree_size() + growth.nodes, page_size) -
                    PagesOf(sequence.tree_size(), page_size);
    const bool goes_on = growth.count > 0 && length % page_size != 0;
    const bool may_gather = goes_on && MayGather(sequence, length);
    const bool opens =
        goes_on && (growth.next == NextPage::kOwn || !sequence.tokens.back().held[group]);
    pages += opens;
    taken = {taken.least + pages, taken.most + pages + (opens && may_gather)};
    if (!goes_on || opens) continue;
    End& end = ends[{length, sequence.tokens.back().values.get()}];
    ++end.members;
    end.may_be_apart |= may_gather || sequence.tokens.back().gathered != 0;
  }
  for (const auto& place : ends) {
    const auto [length, values] = place.first;
    const End& end = place.second;
    const auto ends_here = [at = static_cast<size_t>(length), values = values](const auto& entry) {
      const std::vector<Token>& tokens = entry.second.tokens;
      return tokens.size() > at && tokens[at - 1].values.get() == values;
    };
    const bool has_more = std::ranges::any_of(sequences_, ends_here);
    taken.least += end.may_be_apart ? 0 : end.members - 1;
    taken.most += end.members - (has_more || end.may_be_apart ? 0 : 1);
  }
  return taken;
}

KVModel::Taken KVModel::TakenBy(std::span<const Growth> growths) const {
  Taken taken;
  for (size_t g = 0; g < groups_.size(); ++g) taken.pages.push_back(PagesTakenBy(growths, g));
  for (const Growth& growth : growths) {
    const int64_t length = std::ssize(growth.sequence->tokens);
    taken.tokens += growth.nodes > 0 ? growth.nodes : growth.count;
    if (growth.count > 0 && MayGather(*growth.sequence, length))
      taken.copies_max += length - RangeOf(length);
  }
  return taken;
}

KVModel::Taken KVModel::TakenByForward(std::span<const int64_t> seq_ids,
                                       std::span<const int64_t> lengths,
                                       const std::span<const int64_t>* parents) const {
  std::vector<Growth> growths;
  size_t first = 0;
  for (size_t i = 0; i < seq_ids.size() && i < lengths.size(); ++i) {
    if (!HasSequence(seq_ids[i]) || lengths[i] < 1) continue;
    const Sequence& sequence = sequences_.at(seq_ids[i]);
    growths.push_back({.sequence = &sequence, .count = lengths[i]});
    if (parents == nullptr) continue;
    const auto nodes = parents->subspan(first, static_cast<size_t>(lengths[i]));
    growths.back().count = LevelsWith(sequence, nodes) - sequence.levels;
    growths.back().nodes = lengths[i];
    first += nodes.size();
  }
  return TakenBy(growths);
}

KVModel::Taken KVModel::TakenByImport(int64_t seq_id, int64_t count) const {
  if (!HasSequence(seq_id)) return {};
  Taken taken = TakenBy(std::vector{Growth{.sequence = &sequences_.at(seq_id), .count = count}});
  taken.ends = true;
  return taken;
}

KVModel::Taken KVModel::TakenByReceive(int64_t seq_id, int64_t count) const {
  if (!HasSequence(seq_id) || count < 1) return {};
  const Growth growth = {
      .sequence = &sequences_.at(seq_id), .count = count, .next = NextPage::kOwn};
  Taken taken = TakenBy(std::span(&growth, 1));
  taken.ends = true;
  return taken;
}

KVModel::Taken KVModel::TakenByDebugSet(int64_t seq_id, int64_t start) const {
  if (!HasSequence(seq_id) || start < 0) return {};
  const int64_t length = std::ssize(sequences_.at(seq_id).tokens);
  if (start >= length || !IsShared(seq_id, start)) return {};
  Taken taken;
  taken.copies_max = length - RangeOf(start);
  taken.ends = true;
  for (const Group& group : groups_) {
    const int64_t pages =
        PagesOf(length, group.page_size) - PagesOf(RangeOf(start), group.page_size);
    taken.pages.push_back({.least = 0, .most = pages});
  }
  return taken;
}

// At least as many of a page range as one position of it has tokens; at most one for each part of a
// path that one call made, and one for each time that the range may have been gathered.
KVModel::PageBounds KVModel::PagesInUse() const {
  PageBounds in_use;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t page_size = groups_[g].page_size;
    std::set<std::pair<int64_t, const TokenValues*>> tokens, parts;
    std::set<std::pair<int64_t, int64_t>> gathered;  // [position, call]
    for (const auto& [id, sequence] : sequences_) {
      const int64_t tree_pages = PagesOf(sequence.tree_size(), page_size);
      in_use = {in_use.least + tree_pages, in_use.most + tree_pages};
      const Token* before = nullptr;  // held, in the same page range
      for (int64_t p = 0; p < std::ssize(sequence.tokens); ++p) {
        const Token& token = sequence.tokens[static_cast<size_t>(p)];
        if (p % page_size == 0 || (before != nullptr && before->held[g] == 0)) before = nullptr;
        if (token.held[g] != 0) {
          tokens.emplace(p, token.values.get());
          if (before == nullptr || before->call != token.call) parts.emplace(p, token.values.get());
          if (token.gathered != 0) gathered.emplace(RangeOf(p), token.gathered);
        }
        before = &token;
      }
    }
    std::map<int64_t, int64_t> at_position, in_range;
    for (const auto& [position, values] : tokens) ++at_position[position];
    for (const auto& [position, count] : at_position) {
      int64_t& most = in_range[position / page_size];
      most = std::max(most, count);
    }
    for (const auto& [range, count] : in_range) in_use.least += count;
    in_use.most += std::ssize(parts) + std::ssize(gathered);
  }
  return in_use;
}

}  // namespace quire
