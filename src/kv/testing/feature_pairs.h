// Which features of the attention state the random walks exercise together: the table of
// docs/feature-pairs.md. One occurrence of a pair: one sequence of a batch in one call on one layer
// whose outputs were compared with the oracle's, where both features hold.
#ifndef QUIRE_KV_TESTING_FEATURE_PAIRS_H_
#define QUIRE_KV_TESTING_FEATURE_PAIRS_H_

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>

#include "quire/attention_kv_cache.h"

namespace quire {

enum class Feature : uint8_t {
  // Features of the layer.
  kLayerWindow,
  kSoftCap,
  kHeadSinks,
  kGroupedHeads,
  kLatent,
  kKeysF32,
  kKeysF16,
  kKeysBF16,
  kKeysI8,
  kKeysF8,
  kValuesI8,
  kValuesF8,
  kRopeNone,
  kRopeNormal,
  kRopeInline,
  kRopeOfLayer,
  // Features of the cache.
  kMixedLayers,
  kOddPages,
  kRetainedBeside,
  kPendingBeside,
  // Features of the sequence.
  kRopeLong,
  kWindow,
  kSinks,
  kTvmSpan,
  kSlid,
  kForked,
  kPopped,
  kAborted,
  kImported,
  kExported,
  kDebugSet,
  kCommitted,
  kReceived,
  kSending,
  // Features of the forward.
  kDecode,
  kChunk,
  kLoading,
  kTree,
  kLaterRound,
  // Features of the call.
  kFused,
  kHalves,
  kSharedKV,
  kSelf,
  kCross,
  kMerge,
  kMask,
};
constexpr size_t kFeatureCount = static_cast<size_t>(Feature::kMask) + 1;

class FeatureSet {
 public:
  FeatureSet() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a feature alone is a set.
  FeatureSet(Feature feature) { bits_.set(static_cast<size_t>(feature)); }
  FeatureSet& AddIf(bool condition, Feature feature) {
    if (condition) bits_.set(static_cast<size_t>(feature));
    return *this;
  }
  void Remove(Feature feature) { bits_.reset(static_cast<size_t>(feature)); }
  FeatureSet& operator|=(const FeatureSet& other) {
    bits_ |= other.bits_;
    return *this;
  }
  friend FeatureSet operator|(FeatureSet a, const FeatureSet& b) { return a |= b; }
  bool Has(size_t feature) const { return bits_.test(feature); }

 private:
  std::bitset<kFeatureCount> bits_;
};

const char* FeatureName(Feature feature);
// Why the two cannot hold together; empty if they can. Symmetric.
std::string WhyNeverTogether(Feature a, Feature b);

// Those of the layer and of the cache as a whole.
FeatureSet FeaturesOf(const AttentionKVCacheOptions& options, size_t layer);

class FeaturePairs {
 public:
  void Count(const FeatureSet& together);
  void Add(const FeaturePairs& other);
  // A feature with itself: its own occurrences.
  int64_t CountOf(Feature a, Feature b) const;
  // For tools/feature_pairs.py: "feature", name, meaning; "pair", name, name, count; "never", name,
  // name, reason; separated by tabs.
  std::string ToText() const;

 private:
  std::array<std::array<int64_t, kFeatureCount>, kFeatureCount> counts_ = {};  // [a][b], b <= a
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_FEATURE_PAIRS_H_
