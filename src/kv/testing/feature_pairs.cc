#include "kv/testing/feature_pairs.h"

#include <algorithm>
#include <initializer_list>
#include <sstream>

namespace quire {
namespace {

struct FeatureText {
  const char* name;
  const char* meaning;
};

// In the order of Feature. The page docs/feature-pairs.md is made from these lines.
constexpr std::array<FeatureText, kFeatureCount> kTexts = {{
    {"layer window", "the layer has a window of its own"},
    {"soft cap", "the layer's scores are capped"},
    {"head sinks", "the layer's heads have learned sinks"},
    {"grouped heads", "several query heads read one head of keys"},
    {"latent", "a latent layer (MLA)"},
    {"float32 keys", "keys, or latent rows, are stored as float32"},
    {"float16 keys", "as float16"},
    {"bfloat16 keys", "as bfloat16"},
    {"int8 keys", "as int8 codes"},
    {"fp8 keys", "as e4m3 codes"},
    {"int8 values", "values are stored as int8 codes"},
    {"fp8 values", "as e4m3 codes"},
    {"RoPE none", "the cache does not rotate"},
    {"RoPE normal", "keys are stored rotated"},
    {"RoPE inline", "keys are rotated when they are read"},
    {"RoPE of layer", "the layer has rotation options of its own"},
    {"mixed layers", "the cache has layers of other shapes, dtypes or kinds"},
    {"odd pages", "a page's tokens are no multiple of 16"},
    {"retained beside", "some other sequence of the cache is retained"},
    {"pending beside", "some other sequence of the cache waits for tokens of another cache"},
    {"long factors", "the sequence's positions use the long factors of LongRoPE"},
    {"window", "the sequence has a sliding window"},
    {"sinks", "the sequence's window has sinks"},
    {"TVM span", "the window is TVM's: W + 1 tokens, kept-relative positions"},
    {"slid", "tokens of the sequence have slid away for good"},
    {"forked", "the sequence was forked, or is a fork"},
    {"popped", "tokens were popped off the sequence"},
    {"aborted", "a forward of the sequence was aborted"},
    {"imported", "tokens were imported, or loaded layer by layer earlier"},
    {"exported", "tokens of the sequence were exported"},
    {"debug set", "DebugSetKV or DebugSetKVMLA wrote tokens"},
    {"committed", "nodes of a token tree were accepted"},
    {"received", "tokens of the sequence came from another cache, with other pages"},
    {"sending", "the sequence is marked: its tokens go to another cache"},
    {"decode", "one new token"},
    {"chunk", "several new tokens"},
    {"loading", "the forward loads tokens of the sequence layer by layer"},
    {"tree", "the new tokens are nodes of a tree"},
    {"later round", "nodes behind those of an earlier forward"},
    {"fused", "AttentionWithFusedQKV or AttentionWithMLA"},
    {"halves", "Append or AppendMLAKV, then Attend"},
    {"shared KV", "AttentionWithSharedKV"},
    {"self piece", "SelfAttention, alone or in a merge"},
    {"cross piece", "CrossAttention, alone or in a merge"},
    {"merge", "MergeAttnOutputInplace of the two"},
    {"mask", "a mask among the new tokens"},
}};

struct Exclusion {
  std::initializer_list<Feature> some;
  std::initializer_list<Feature> others;  // empty: any two of `some`
  const char* reason;
};

using enum Feature;

const std::array<Exclusion, 10> kExclusions = {{
    {{kKeysF32, kKeysF16, kKeysBF16, kKeysI8, kKeysF8}, {}, "a layer's keys have one dtype"},
    {{kValuesI8, kValuesF8}, {}, "a layer's values have one dtype"},
    {{kLatent}, {kValuesI8, kValuesF8}, "a latent row is key and value in one, of one dtype"},
    {{kRopeNone, kRopeNormal, kRopeInline}, {}, "a layer has one mode of rotation"},
    {{kRopeLong}, {kRopeNone}, "what is not rotated has no factors"},
    {{kRopeLong}, {kRopeOfLayer}, "options of a layer are never LongRoPE"},
    {{kDecode, kChunk, kTree}, {}, "a sequence's new tokens are one, several or a tree"},
    {{kLaterRound}, {kDecode, kChunk}, "rounds are of trees"},
    {{kLoading}, {kTree, kLaterRound}, "BeginLoadingForward takes no trees"},
    {{kFused, kHalves, kSharedKV},
     {kFused, kHalves, kSharedKV, kSelf, kCross, kMerge},
     "these are different calls"},
}};

bool IsIn(std::initializer_list<Feature> list, Feature feature) {
  return std::find(list.begin(), list.end(), feature) != list.end();
}

Feature FeatureOfKeys(DType dtype) {
  if (dtype == DType::kF32) return kKeysF32;
  if (dtype == DType::kF16) return kKeysF16;
  if (dtype == DType::kI8) return kKeysI8;
  return dtype == DType::kF8E4M3 ? kKeysF8 : kKeysBF16;
}

}  // namespace

const char* FeatureName(Feature feature) { return kTexts[static_cast<size_t>(feature)].name; }

std::string WhyNeverTogether(Feature a, Feature b) {
  if (a == b) return "";
  for (const Exclusion& exclusion : kExclusions) {
    const auto& others = exclusion.others.size() == 0 ? exclusion.some : exclusion.others;
    if ((IsIn(exclusion.some, a) && IsIn(others, b)) ||
        (IsIn(exclusion.some, b) && IsIn(others, a)))
      return exclusion.reason;
  }
  return "";
}

FeatureSet FeaturesOf(const AttentionKVCacheOptions& options, size_t layer) {
  const AttentionLayerSpec& spec = options.layers[layer];
  const RopeMode mode = spec.rope ? spec.rope->mode : options.rope.mode;
  FeatureSet set = FeatureOfKeys(spec.dtype);
  set.AddIf(spec.window > 0, kLayerWindow)
      .AddIf(spec.soft_cap > 0, kSoftCap)
      .AddIf(!spec.head_sinks.empty(), kHeadSinks)
      .AddIf(spec.num_qo_heads > spec.num_kv_heads, kGroupedHeads)
      .AddIf(spec.latent, kLatent)
      .AddIf(!spec.latent && spec.value_dtype() == DType::kI8, kValuesI8)
      .AddIf(!spec.latent && spec.value_dtype() == DType::kF8E4M3, kValuesF8)
      .AddIf(mode == RopeMode::kNone, kRopeNone)
      .AddIf(mode == RopeMode::kNormal, kRopeNormal)
      .AddIf(mode == RopeMode::kInline, kRopeInline)
      .AddIf(spec.rope.has_value(), kRopeOfLayer)
      .AddIf(options.page_size % 16 != 0, kOddPages);
  const auto differs = [&](const AttentionLayerSpec& other) {
    return other.latent != spec.latent || other.dtype != spec.dtype ||
           other.value_dtype() != spec.value_dtype() || other.window != spec.window ||
           other.num_kv_heads != spec.num_kv_heads || other.qk_head_dim != spec.qk_head_dim ||
           other.v_head_dim != spec.v_head_dim;
  };
  return set.AddIf(std::ranges::any_of(options.layers, differs), kMixedLayers);
}

void FeaturePairs::Count(const FeatureSet& together) {
  for (size_t a = 0; a < kFeatureCount; ++a) {
    if (!together.Has(a)) continue;
    for (size_t b = 0; b <= a; ++b) counts_[a][b] += together.Has(b);
  }
}

void FeaturePairs::Add(const FeaturePairs& other) {
  for (size_t a = 0; a < kFeatureCount; ++a) {
    for (size_t b = 0; b <= a; ++b) counts_[a][b] += other.counts_[a][b];
  }
}

int64_t FeaturePairs::CountOf(Feature a, Feature b) const {
  const size_t i = static_cast<size_t>(a);
  const size_t j = static_cast<size_t>(b);
  return counts_[std::max(i, j)][std::min(i, j)];
}

std::string FeaturePairs::ToText() const {
  std::ostringstream text;
  for (const FeatureText& feature : kTexts)
    text << "feature\t" << feature.name << "\t" << feature.meaning << "\n";
  for (size_t a = 0; a < kFeatureCount; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      const std::string reason = WhyNeverTogether(static_cast<Feature>(a), static_cast<Feature>(b));
      const bool never = !reason.empty() && counts_[a][b] == 0;
      text << (never ? "never\t" : "pair\t") << kTexts[a].name << "\t" << kTexts[b].name << "\t";
      if (never)
        text << reason << "\n";
      else
        text << counts_[a][b] << "\n";
    }
  }
  return text.str();
}

}  // namespace quire
