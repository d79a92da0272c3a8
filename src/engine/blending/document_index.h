// Documents that blended prompts have named, and where they stand in the tokens of other prompts.
//
// Each known document is cut into chunks from its first token on, and a table has the places of
// each chunk by the hash of its tokens. A prompt is gone through with a rolling hash, so that every
// offset is looked up; what the table has is compared token by token and goes on in both directions
// as far as the tokens are equal. Work is at most kPlacesMax comparisons for each token of the
// prompt, and memory is bounded. Salts have tables of their own, and equal shares of the memory; to
// make room takes no longer the more documents there are.
#ifndef QUIRE_ENGINE_BLENDING_DOCUMENT_INDEX_H_
#define QUIRE_ENGINE_BLENDING_DOCUMENT_INDEX_H_

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "quire/engine.h"

namespace quire {

// An order of chains of tokens. Those of one prompt begin with one anchor, which may be long, and
// differ at their ends.
struct EndsFirst {
  bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
    return std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
  }
};

// Tokens of a prompt that are those of a known document.
struct FoundDocument {
  int64_t begin = 0, end = 0;  // in the prompt
  // The document's anchor and its tokens; those of the prompt begin at `from`.
  std::shared_ptr<const std::vector<int32_t>> chain;
  int64_t from = 0;
  int64_t anchor_tokens = 0;

  int64_t chain_end() const { return from + end - begin; }
};

class DocumentIndex {
 public:
  // Chunks of one salt with one hash: those that came last.
  static constexpr int64_t kPlacesMax = 8;
  // About 12 bytes for each.
  static constexpr int64_t kTokensMax = int64_t{1} << 21;

  // REQUIRES: both at least 1. `tokens_max`: of all documents with their anchors. The salt that has
  // most of it, which is more than an equal share, loses what it named or found longest ago; a salt
  // that has its share or less loses nothing to others.
  explicit DocumentIndex(int64_t chunk_tokens = BlendRequest::kFoundTokensMin,
                         int64_t tokens_max = kTokensMax)
      : chunk_tokens_(chunk_tokens), tokens_max_(tokens_max) {}

  // The document is known from now on to prompts of this salt. Nothing is kept of one that has not
  // a whole chunk, or that does not fit and has more tokens than an equal share. std::bad_alloc:
  // nothing has changed but what gave way. REQUIRES: 0 <= anchor_tokens <= chain.size().
  void Add(const std::string& salt, std::span<const int32_t> chain, int64_t anchor_tokens);

  struct Findings {
    std::vector<FoundDocument> documents;
    int64_t own_end = 0;  // of a whole document that is the prompt's own beginning; 0: none is
  };
  // Ascending and disjoint, at most `count_max`: from left to right the longest part of a known
  // document that has a whole chunk from the leftmost place on; of equally long ones the one that
  // was named first. Parts that are the prompt's own beginning, anchor and all, are none: prefix
  // caches have them as they are. std::bad_alloc.
  Findings Find(const std::string& salt, std::span<const int32_t> prompt, DocumentSearch search,
                int64_t count_max = SamplingOptions::kBlendDocumentsMax);

  int64_t document_count() const;
  int64_t salt_count() const { return static_cast<int64_t>(salts_.size()); }  // that have documents
  int64_t token_count() const { return token_count_; }
  int64_t place_count() const;  // of chunks

 private:
  struct Document {
    std::shared_ptr<const std::vector<int32_t>> chain;
    int64_t anchor_tokens;
  };
  using Documents = std::list<Document>;
  struct Place {
    Documents::iterator document;
    int64_t from;  // in its chain
  };
  struct ContentOrder {
    bool operator()(Documents::iterator a, Documents::iterator b) const;
  };
  struct Salt {
    Documents documents;  // least recently used first; not empty between two calls
    std::set<Documents::iterator, ContentOrder> by_content;
    std::unordered_map<uint64_t, std::vector<Place>> places;  // by the hash of the chunk
    int64_t tokens = 0;
  };
  using Salts = std::map<std::string, Salt>;
  struct SizeOrder {
    bool operator()(Salts::iterator a, Salts::iterator b) const;
  };
  // One pass over a prompt.
  class Search;

  uint64_t HashOf(std::span<const int32_t> chunk) const;
  // What each salt may keep against all others, once one of this name has documents.
  int64_t ShareWith(const std::string& salt) const;
  // REQUIRES: tokens <= ShareWith(salt).
  void MakeRoom(const std::string& salt, int64_t tokens) noexcept;
  void Remove(Salts::iterator salt, Documents::iterator document) noexcept;
  void AddTokens(Salts::iterator salt, int64_t tokens) noexcept;

  const int64_t chunk_tokens_;
  const int64_t tokens_max_;
  Salts salts_;
  std::set<Salts::iterator, SizeOrder> by_size_;  // all salts, by their tokens, then by name
  int64_t token_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_BLENDING_DOCUMENT_INDEX_H_
