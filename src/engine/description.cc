#include "engine/description.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "base/check.h"
#include "chunk/sha256.h"

namespace quire {
namespace {

// That two of some thousand salts share a digest is a chance of 1e-12.
constexpr size_t kDigestBytes = 8;

}  // namespace

EngineDescriber::EngineDescriber(const Parts& parts)
    : blocks_(dynamic_cast<const BlockQueries*>(parts.cache)),
      requests_(*parts.requests),
      prefix_cache_(*parts.prefix_cache),
      clock_(*parts.clock),
      salt_key_(parts.salt_key) {
  QUIRE_CHECK(blocks_ != nullptr || parts.cache == nullptr) << "a cache that tells no blocks";
}

Result<EngineDescription> EngineDescriber::Describe(const EngineStats& stats) const {
  EngineDescription description;
  description.stats = stats;
  description.salt_key = std::string(salt_key_);
  const Holders holders = AddSequences(&description);
  AddWaiting(&description);
  QUIRE_RETURN_IF_ERROR(AddBlocks(holders, &description));
  return description;
}

std::string EngineDescriber::DigestOf(const std::string& salt) const {
  if (salt.empty()) return {};
  const Digest digest = HmacSha256(salt_key_).Update(std::as_bytes(std::span(salt))).Finish();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < kDigestBytes; ++i) {
    const auto byte = static_cast<uint8_t>(digest.bytes[i]);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

EngineDescriber::Holders EngineDescriber::AddSequences(EngineDescription* description) const {
  Holders holders;
  std::vector<DescribedSequence>& sequences = description->sequences;
  for (const auto& request : requests_.running()) {
    for (size_t i = 0; i < request->samples.size(); ++i) {
      const Sample& sample = request->samples[i];
      if (!sample.has_sequence()) continue;
      if (std::ssize(sequences) == kDescribedMax) {
        description->cut = true;
        return holders;
      }
      sequences.push_back(
          {.request_id = request->has_outputs() ? request->id : DescribedSequence::kInternal,
           .sample = static_cast<int64_t>(i),
           .tokens = sample.computed,
           .salt_digest = DigestOf(request->space.salt)});
      holders.ids.push_back(sample.sequence_id);
      holders.stored.push_back(sample.stored.tokens);
    }
  }
  const int64_t room = kDescribedMax - std::ssize(sequences);
  description->cut = prefix_cache_.sequence_count() > room;
  prefix_cache_.ForNewest(room, [&](const PrefixCache::Facts& facts) {
    sequences.push_back({.tokens = facts.tokens, .salt_digest = DigestOf(facts.salt)});
    holders.ids.push_back(facts.sequence_id);
    holders.stored.push_back(facts.stored);
  });
  return holders;
}

void EngineDescriber::AddWaiting(EngineDescription* description) const {
  const int64_t now_ns = clock_.SteadyNs();
  for (const auto& request : requests_.waiting()) {
    if (!request->has_outputs()) continue;
    if (std::ssize(description->waiting) == kDescribedMax) {
      description->cut = true;
      return;
    }
    description->waiting.push_back(
        {.request_id = request->id,
         .prompt_tokens = request->prompt_tokens,
         .seconds = static_cast<double>(now_ns - request->submitted_ns) * 1e-9,
         .salt_digest = DigestOf(request->space.salt)});
  }
}

// A path is of one salt, as KV is shared within one only.
Status EngineDescriber::AddBlocks(const Holders& holders, EngineDescription* description) const {
  description->visited = std::ssize(holders.ids);
  if (blocks_ == nullptr) return {};
  QUIRE_ASSIGN_OR_RETURN(const SeenBlocks seen,
                         blocks_->DescribeBlocks(holders.ids, kDescribedMax));
  description->cut |= seen.cut;
  description->visited += seen.visited;
  std::vector<DescribedBlock>& blocks = description->blocks;
  for (const SeenBlock& block : seen.blocks) {
    blocks.push_back({.parent = block.parent,
                      .begin = block.tokens.begin,
                      .end = block.tokens.end,
                      .bytes = block.bytes});
  }
  std::vector<int64_t> stored(blocks.size());  // [block] of the sequences that see it, the most
  QUIRE_DCHECK(seen.ends.size() <= description->sequences.size());
  for (size_t i = 0; i < seen.ends.size(); ++i) {
    DescribedSequence& sequence = description->sequences[i];
    sequence.block = seen.ends[i];
    if (sequence.block < 0) continue;
    const auto end = static_cast<size_t>(sequence.block);
    ++blocks[end].sequences;
    blocks[end].salt_digest = sequence.salt_digest;
    stored[end] = std::max(stored[end], holders.stored[i]);
  }
  for (size_t b = blocks.size(); b-- > 0;) {  // from the leaves: parents come before them
    DescribedBlock& block = blocks[b];
    block.stored_tokens = std::clamp<int64_t>(stored[b] - block.begin, 0, block.end - block.begin);
    if (block.parent < 0) continue;
    const auto parent = static_cast<size_t>(block.parent);
    QUIRE_DCHECK(parent < b) << "parents come before their children";
    blocks[parent].sequences += block.sequences;
    blocks[parent].salt_digest = block.salt_digest;
    stored[parent] = std::max(stored[parent], stored[b]);
  }
  return {};
}

}  // namespace quire
