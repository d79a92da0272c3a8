#include "engine/blending/document_index.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

// h = h * kBase + token + 1, modulo 2^64.
constexpr uint64_t kBase = 0x9E3779B97F4A7C15;

uint64_t Digit(int32_t token) { return static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1; }

}  // namespace

bool DocumentIndex::ContentOrder::operator()(Documents::iterator a, Documents::iterator b) const {
  if (a->anchor_tokens != b->anchor_tokens) return a->anchor_tokens < b->anchor_tokens;
  return EndsFirst()(*a->chain, *b->chain);
}

bool DocumentIndex::SizeOrder::operator()(Salts::iterator a, Salts::iterator b) const {
  return std::tie(a->second.tokens, a->first) < std::tie(b->second.tokens, b->first);
}

int64_t DocumentIndex::document_count() const {
  int64_t count = 0;
  for (const auto& [name, salt] : salts_) count += std::ssize(salt.documents);
  return count;
}

uint64_t DocumentIndex::HashOf(std::span<const int32_t> chunk) const {
  uint64_t hash = 0;
  for (const int32_t token : chunk) hash = hash * kBase + Digit(token);
  return hash;
}

int64_t DocumentIndex::place_count() const {
  int64_t count = 0;
  for (const auto& [name, salt] : salts_) {
    for (const auto& [hash, places] : salt.places) count += std::ssize(places);
  }
  return count;
}

void DocumentIndex::Add(const std::string& salt, std::span<const int32_t> chain,
                        int64_t anchor_tokens) {
  const auto tokens = std::ssize(chain);
  QUIRE_CHECK(anchor_tokens >= 0 && anchor_tokens <= tokens);
  if (tokens - anchor_tokens < chunk_tokens_) return;
  Documents one;
  one.push_back(
      {std::make_shared<const std::vector<int32_t>>(chain.begin(), chain.end()), anchor_tokens});
  const auto document = one.begin();
  if (const auto own = salts_.find(salt); own != salts_.end()) {
    Salt& held = own->second;
    const auto known = held.by_content.find(document);
    if (known != held.by_content.end()) {
      return held.documents.splice(held.documents.end(), held.documents, *known);
    }
  }
  if (token_count_ + tokens > tokens_max_) {
    if (tokens > ShareWith(salt)) return;
    MakeRoom(salt, tokens);
  }
  const auto [own, is_new] = salts_.try_emplace(salt);
  try {
    if (is_new) by_size_.insert(own);
  } catch (...) {
    salts_.erase(own);
    throw;
  }
  Salt& added = own->second;
  added.documents.splice(added.documents.end(), one);
  AddTokens(own, tokens);
  try {
    added.by_content.insert(document);
    for (int64_t from = anchor_tokens; from + chunk_tokens_ <= tokens; from += chunk_tokens_) {
      const auto chunk =
          chain.subspan(static_cast<size_t>(from), static_cast<size_t>(chunk_tokens_));
      std::vector<Place>& places = added.places[HashOf(chunk)];
      places.push_back({document, from});
      if (std::ssize(places) > kPlacesMax) places.erase(places.begin());
    }
  } catch (...) {
    Remove(own, document);
    throw;
  }
}

int64_t DocumentIndex::ShareWith(const std::string& salt) const {
  return tokens_max_ / (salt_count() + (salts_.contains(salt) ? 0 : 1));
}

void DocumentIndex::AddTokens(Salts::iterator salt, int64_t tokens) noexcept {
  auto node = by_size_.extract(salt);
  salt->second.tokens += tokens;
  by_size_.insert(std::move(node));
  token_count_ += tokens;
}

// The largest one has more than the mean, and so more than its share.
void DocumentIndex::MakeRoom(const std::string& salt, int64_t tokens) noexcept {
  while (token_count_ + tokens > tokens_max_) {
    Salts::iterator largest = *by_size_.rbegin();
    const auto own = salts_.find(salt);
    if (own != salts_.end() && own->second.tokens + tokens >= largest->second.tokens) largest = own;
    Remove(largest, largest->second.documents.begin());
  }
}

void DocumentIndex::Remove(Salts::iterator salt, Documents::iterator document) noexcept {
  Salt& held = salt->second;
  const std::span<const int32_t> chain = *document->chain;
  const auto tokens = std::ssize(chain);
  for (int64_t from = document->anchor_tokens; from + chunk_tokens_ <= tokens;
       from += chunk_tokens_) {
    const auto found = held.places.find(
        HashOf(chain.subspan(static_cast<size_t>(from), static_cast<size_t>(chunk_tokens_))));
    // Else all of its places gave way, or were never put there.
    if (found == held.places.end()) continue;
    std::erase_if(found->second, [&](const Place& place) { return place.document == document; });
    if (found->second.empty()) held.places.erase(found);
  }
  const auto known = held.by_content.find(document);
  if (known != held.by_content.end() && *known == document) held.by_content.erase(known);
  AddTokens(salt, -tokens);
  held.documents.erase(document);
  if (!held.documents.empty()) return;
  by_size_.erase(salt);
  salts_.erase(salt);
}

class DocumentIndex::Search {
 public:
  Search(DocumentIndex* index, const std::string& salt, std::span<const int32_t> prompt,
         DocumentSearch search)
      : index_(*index),
        salt_(index->salts_.find(salt)),
        prompt_(prompt),
        tokens_(std::ssize(prompt)),
        search_(search),
        chunk_(index->chunk_tokens_) {
    for (int64_t i = 0; i < chunk_; ++i) highest_ *= kBase;
  }

  Findings Run(int64_t count_max) {
    Findings findings;
    std::vector<FoundDocument>& all = findings.documents;
    if (salt_ == index_.salts_.end()) return findings;
    int64_t free_from = 0;  // what is before it was found
    bool has_hash = false;
    uint64_t hash = 0;  // of the chunk that begins at `at`
    for (int64_t at = 0; at + chunk_ <= tokens_ && std::ssize(all) < count_max;) {
      if (!has_hash) {
        hash = index_.HashOf(prompt_.subspan(static_cast<size_t>(at), static_cast<size_t>(chunk_)));
        has_hash = true;
      }
      const std::optional<Match> match = BestAt(at, free_from, hash);
      if (match) {
        Use(match->document);
        if (!IsOwnBeginning(*match)) {
          all.push_back(Found(*match));
        } else if (match->end == std::ssize(*match->document->chain)) {
          findings.own_end = match->end;
        }
        at = free_from = match->end;
        has_hash = false;
        continue;
      }
      if (at + chunk_ < tokens_) hash = Rolled(hash, at);
      ++at;
    }
    return findings;
  }

 private:
  // Tokens [begin, end) of the prompt are those of the document's chain from `from` on.
  struct Match {
    Documents::iterator document;
    int64_t from, begin, end;
  };

  uint64_t Rolled(uint64_t hash, int64_t at) const {
    return hash * kBase + Digit(prompt_[static_cast<size_t>(at + chunk_)]) -
           highest_ * Digit(prompt_[static_cast<size_t>(at)]);
  }

  std::optional<Match> BestAt(int64_t at, int64_t free_from, uint64_t hash) {
    std::optional<Match> best;
    const auto places = salt_->second.places.find(hash);
    if (places == salt_->second.places.end()) return best;
    for (const Place& place : places->second) {
      if (!MayBeUsed(place.document)) continue;
      const Match match = Extended(place, at, free_from);
      if (match.end - at < chunk_) continue;  // equal hashes of other tokens
      if (!best || match.end - match.begin > best->end - best->begin) best = match;
    }
    return best;
  }

  bool MayBeUsed(Documents::iterator document) {
    if (search_ == DocumentSearch::kAnywhere) return true;
    const auto [entry, is_new] = has_anchor_.try_emplace(&*document, false);
    if (is_new) {
      const auto anchor = std::span<const int32_t>(*document->chain)
                              .first(static_cast<size_t>(document->anchor_tokens));
      entry->second = std::ssize(anchor) <= tokens_ &&
                      std::equal(anchor.begin(), anchor.end(), prompt_.begin());
    }
    return entry->second;
  }

  // As far as the tokens are equal, from the chunk on in both directions.
  Match Extended(const Place& place, int64_t at, int64_t free_from) const {
    const std::span<const int32_t> chain = *place.document->chain;
    const auto later =
        std::mismatch(prompt_.begin() + at, prompt_.end(), chain.begin() + place.from, chain.end());
    const int64_t before_max = std::min(at - free_from, place.from - place.document->anchor_tokens);
    int64_t before = 0;
    while (before < before_max && prompt_[static_cast<size_t>(at - before - 1)] ==
                                      chain[static_cast<size_t>(place.from - before - 1)]) {
      ++before;
    }
    return {.document = place.document,
            .from = place.from - before,
            .begin = at - before,
            .end = later.first - prompt_.begin()};
  }

  bool IsOwnBeginning(const Match& match) const {
    const std::span<const int32_t> chain = *match.document->chain;
    return match.from == match.begin &&
           std::equal(prompt_.begin(), prompt_.begin() + match.end, chain.begin());
  }

  void Use(Documents::iterator document) {
    Documents& documents = salt_->second.documents;
    documents.splice(documents.end(), documents, document);
  }

  static FoundDocument Found(const Match& match) {
    return {.begin = match.begin,
            .end = match.end,
            .chain = match.document->chain,
            .from = match.from,
            .anchor_tokens = match.document->anchor_tokens};
  }

  DocumentIndex& index_;
  const Salts::iterator salt_;
  const std::span<const int32_t> prompt_;
  const int64_t tokens_;
  const DocumentSearch search_;
  const int64_t chunk_;
  uint64_t highest_ = 1;  // kBase to the power of chunk_
  std::map<const Document*, bool> has_anchor_;
};

DocumentIndex::Findings DocumentIndex::Find(const std::string& salt,
                                            std::span<const int32_t> prompt, DocumentSearch search,
                                            int64_t count_max) {
  QUIRE_CHECK(search != DocumentSearch::kOff);
  return Search(this, salt, prompt, search).Run(count_max);
}

}  // namespace quire
