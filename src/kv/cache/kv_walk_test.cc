// Seeded random walks over the cache and the oracle side by side. After each operation everything
// that can be observed is compared: statuses, counters, positions, stored keys and values,
// attention within the oracle's bounds, and, bit for bit, attention of the same tokens prefilled
// alone in a second cache with another page size. After a failed call the digest must be the one
// before it.
//
// A walk is a list of operations made from its seed before anything runs; what an operation does is
// chosen from its numbers and the state that it meets, so that any part of a list is a list again.
// A failing list is made shorter by leaving parts out, then printed: it can be pasted into
// KeptWalks, which stay as tests.
//
// There are two settings, told apart by the seed (kWideSeed): small shapes in many walks, and in a
// few walks heads up to 256 wide, MLA of 576 and 512, pages up to 256, batches up to 64, and tokens
// with a NaN or an infinity. Rows that do not see such a token are what they are without it.
//
// tools/soak runs other seeds. QUIRE_WALK_PAIRS is a folder for the shards' counts of pairs of
// features (tools/feature_pairs.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/testing/soak.h"
#include "kv/testing/kv_walker.h"

namespace quire::kv_walk {
namespace {

constexpr std::array<const char*, kKindCount> kKindNames = {
    "kAdd",         "kRemove",         "kFork",      "kPop",      "kBegin",    "kLayer",
    "kEnd",         "kAbort",          "kForward",   "kDebugGet", "kDebugSet", "kClear",
    "kPagesNeeded", "kSelectLongRope", "kBadTensor", "kRetain",   "kDecode",   "kImport",
    "kWindow",      "kShared",         "kLoading",   "kTree",     "kCommit",   "kForkAndLoad",
    "kSwitch",      "kTransfer",       "kSend",      "kReceive"};

struct Walk {
  uint64_t seed = 0;
  std::vector<WalkOp> ops;
};

// Streams of one seed, so that a kept list keeps its cache when the making of lists changes.
enum Stream : uint64_t {
  kOptionsStream,
  kOpsStream,
  kWindowsStream,
  kCodesStream,
  kTreesStream,
  kLatentStream,
  kRopeStream,
  kOtherStream,
  kTransfersStream
};

// ---------------------------------------------------------------------- making a walk

std::vector<AttentionLayerSpec> DrawLayers(RandomSequence& random) {
  const DType dtype = OneOf(random, {DType::kF32, DType::kF16, DType::kBF16});
  switch (random.Below(7)) {
    case 0:
      return {{2, 1, 8, 8, dtype}};
    case 1:
      return {{4, 2, 8, 8, dtype}, {4, 2, 8, 8, dtype}};
    case 2:
      return {{2, 2, 6, 4, dtype}};
    case 3:
      return {{3, 1, 16, 16, dtype}};
    case 4:  // two groups
      return {{4, 2, 8, 8, dtype}, {2, 1, 4, 8, DType::kBF16}, {4, 2, 8, 8, dtype}};
    case 5:  // two groups that differ in dtype alone
      return {{2, 2, 4, 4, DType::kF32}, {2, 2, 4, 4, DType::kBF16}};
    default:
      return {{1, 1, 32, 17, dtype}};
  }
}

std::vector<AttentionLayerSpec> DrawWideLayers(RandomSequence& random) {
  const DType dtype = OneOf(random, {DType::kF32, DType::kF16, DType::kBF16});
  switch (random.Below(5)) {
    case 0:
      return {{2, 1, 256, 256, dtype}};
    case 1:
      return {{4, 2, 128, 128, dtype}, {4, 2, 128, 128, dtype}};
    case 2:
      return {{2, 2, 192, 128, dtype}};
    case 3:  // two groups
      return {{6, 3, 64, 64, dtype}, {2, 1, 96, 80, DType::kBF16}};
    default:
      return {{4, 4, 64, 64, dtype}, {4, 4, 64, 64, DType::kF32}};
  }
}

// `long_factors`: whatever is drawn, the long ones of LongRoPE are used.
RopeOptions DrawRope(RandomSequence& random, bool long_factors,
                     const std::vector<AttentionLayerSpec>& layers) {
  RopeOptions rope;
  rope.mode = OneOf(random, {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline});
  rope.pairing = OneOf(random, {RopePairing::kHalfSplit, RopePairing::kInterleaved});
  rope.scaling =
      OneOf(random, {RopeScaling::kNone, RopeScaling::kDynamic, RopeScaling::kLlama3,
                     RopeScaling::kLongRope, RopeScaling::kLongRope, RopeScaling::kYarn});
  rope.rotary_dim = OneOf<int64_t>(random, {0, 4, 2});
  rope.factor = 4;
  rope.theta = 1000;
  rope.original_max_position_embeddings = 64;
  rope.use_long_factors = random.Below(2) == 0;
  if (long_factors) {
    if (rope.mode == RopeMode::kNone) rope.mode = RopeMode::kNormal;
    rope.scaling = RopeScaling::kLongRope;
    rope.use_long_factors = true;
  }
  const bool equal_dims = std::all_of(
      layers.begin(), layers.end(),
      [&](const AttentionLayerSpec& layer) { return layer.qk_head_dim == layers[0].qk_head_dim; });
  if (rope.scaling == RopeScaling::kLongRope) {  // the factors' number must suit every layer
    if (!equal_dims && rope.rotary_dim == 0) rope.rotary_dim = 4;
    const int64_t dim = rope.rotary_dim == 0 ? layers[0].qk_head_dim : rope.rotary_dim;
    for (int64_t i = 0; i < dim / 2; ++i) {
      rope.short_factors.push_back(1 + 0.1 * static_cast<double>(i));
      rope.long_factors.push_back(2 + static_cast<double>(i));
    }
  }
  return rope;
}

// Two seeds of three store codes in all layers or some: keys and values drawn apart.
void DrawCodes(RandomSequence& random, bool often_one_side,
               std::vector<AttentionLayerSpec>& layers) {
  const auto draw = [&](DType plain) {
    if (often_one_side)
      return OneOf(random, {DType::kI8, DType::kF8E4M3, DType::kF8E4M3, plain, plain});
    return OneOf(random, {DType::kI8, DType::kI8, DType::kF8E4M3, plain});
  };
  const DType keys = draw(layers[0].dtype);
  const DType values = draw(DType::kBF16);
  const bool all = random.Below(2) == 0;
  for (AttentionLayerSpec& layer : layers) {
    if (!all && random.Below(2) == 0) continue;
    layer.dtype = keys;
    layer.v_dtype = values;
  }
}

// Windows, soft caps and learned sinks. Layers of one shape may come to be in two groups.
void DrawWindows(RandomSequence& random, std::vector<AttentionLayerSpec>& layers) {
  for (AttentionLayerSpec& layer : layers) {
    if (random.Below(2) == 0) layer.window = OneOf<int64_t>(random, {1, 2, 5, 16, 17, 40});
    if (random.Below(3) == 0) layer.soft_cap = OneOf(random, {2.0, 30.0});
    for (int64_t h = 0; h < layer.num_qo_heads && random.Below(3) == 0; ++h)
      layer.head_sinks.resize(static_cast<size_t>(layer.num_qo_heads),
                              static_cast<float>(random.Uniform(-2, 3)));
  }
}

// All layers or some become latent; their caller rotates, by options of its own or the cache's.
void DrawLatents(RandomSequence& random, bool wide, AttentionKVCacheOptions& options) {
  const bool all = random.Below(3) == 0;
  const int64_t rank = wide ? 512 : OneOf<int64_t>(random, {5, 8, 17, 32});
  const bool has_factors = options.rope.scaling == RopeScaling::kLongRope;
  const bool keeps_factors = has_factors && options.rope.rotary_dim == 4 && random.Below(3) != 0;
  const int64_t rope_dim = keeps_factors ? 4 : wide ? 64 : OneOf<int64_t>(random, {4, 6, 4, 0});
  // Many heads take another way through the kernels; the oracle is slow with them.
  const bool many_heads = wide || (rank <= 8 && options.prefill_chunk_size <= 16);
  for (size_t l = 0; l < options.layers.size(); ++l) {
    AttentionLayerSpec& layer = options.layers[l];
    if (!all && l != 0 && random.Below(2) == 0) continue;
    layer.latent = true;
    layer.num_kv_heads = 1;
    layer.num_qo_heads = layer.head_sinks.empty()
                             ? random.Below(2) == 0 && many_heads ? 16 : 1 + random.Below(2)
                             : std::ssize(layer.head_sinks);
    layer.v_head_dim = rank;
    layer.qk_head_dim = rank + rope_dim;
    layer.v_dtype.reset();
    if (keeps_factors || (!has_factors && random.Below(2) == 0)) continue;
    RopeOptions& rope = layer.rope.emplace();
    rope.mode = OneOf(random, {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline});
    rope.pairing = OneOf(random, {RopePairing::kHalfSplit, RopePairing::kInterleaved});
    rope.theta = 100;
  }
}

// Layers, all or some, that rotate by options of their own.
void DrawRopesOfLayers(RandomSequence& random, AttentionKVCacheOptions& options) {
  for (AttentionLayerSpec& layer : options.layers) {
    if (layer.latent || random.Below(3) == 0) continue;
    RopeOptions& rope = layer.rope.emplace();
    rope.mode = options.rope.mode;
    rope.pairing = options.rope.pairing;
    rope.theta = OneOf(random, {50.0, 3000.0});
  }
}

// Sizes of the second setting. Where a page has many tokens a batch of 64 finds too few of them,
// unless its members share their last ones.
void Widen(RandomSequence& random, WalkSetting* setting) {
  AttentionKVCacheOptions& options = setting->options;
  options.page_size = OneOf<int64_t>(random, {16, 16, 32, 100, 128, 256});
  options.max_num_sequences = 16 + random.Below(49);
  options.token_capacity = 3000 + options.page_size * (8 + random.Below(16));
  options.prefill_chunk_size = OneOf<int64_t>(random, {64, 80, 150});
  setting->batch_max = 64;
  setting->has_bad_tokens = random.Below(4) != 0;
}

// Where there are several in all of a layer.
void HalveHeads(WalkSetting* setting) {
  for (size_t l = 0; l < setting->options.layers.size(); ++l) {
    AttentionLayerSpec& layer = setting->options.layers[l];
    if (layer.num_kv_heads % 2 != 0) continue;
    layer.num_kv_heads /= 2;
    layer.num_qo_heads /= 2;
    if (!layer.head_sinks.empty()) layer.head_sinks.resize(static_cast<size_t>(layer.num_qo_heads));
    setting->halved_layers |= 1U << l;
  }
}

}  // namespace

WalkSetting MakeSetting(uint64_t seed) {
  RandomSequence random(seed, kOptionsStream);
  WalkSetting setting;
  AttentionKVCacheOptions& options = setting.options;
  options.layers = IsWide(seed) ? DrawWideLayers(random) : DrawLayers(random);
  // What would seldom meet by itself: TVM's windows in some seeds, long factors beside them.
  const bool tvm_span = seed % 8 == 0 || seed % 16 == 6;
  options.rope = DrawRope(random, seed % 16 == 8, options.layers);
  options.page_size = OneOf<int64_t>(random, {1, 3, 4, 7, 7, 16, 16, 64});
  options.max_num_sequences = 3 + random.Below(10);
  // A few pages, so that calls often find too few; 64 reaches beyond a segment of attention.
  const int64_t pages = options.page_size == 64 ? 5 + random.Below(7) : 8 + random.Below(24);
  options.token_capacity = pages * options.page_size - random.Below(options.page_size);
  options.prefill_chunk_size = OneOf<int64_t>(random, {4, 16, 40, 150});
  if (IsWide(seed)) Widen(random, &setting);
  options.poison_freed_pages = true;
  options.runner = std::make_shared<SerialRunner>();
  const std::vector<std::string> paths = KernelPaths();
  options.kernel_path =
      paths[static_cast<size_t>(random.Below(static_cast<int64_t>(paths.size())))];
  setting.style.input_dtype = random.Below(3) == 0 ? options.layers[0].dtype : DType::kF32;
  setting.style.output_dtype = random.Below(3) == 0 ? options.layers[0].dtype : DType::kF32;
  const bool one_dtype = std::all_of(
      options.layers.begin(), options.layers.end(),
      [&](const AttentionLayerSpec& layer) { return layer.dtype == options.layers[0].dtype; });
  if (!one_dtype) setting.style = ForwardStyle();
  setting.id_count = options.max_num_sequences + 2;
  setting.chains = random.Below(2) == 0;
  setting.evicts = random.Below(4) != 0;
  setting.fresh_period = 8;
  // Every second seed, so that what was there before windows is walked as well.
  setting.has_windows = seed % 2 == 0;
  RandomSequence windows(seed, kWindowsStream);
  if (setting.has_windows) DrawWindows(windows, options.layers);
  RandomSequence codes(seed, kCodesStream);
  if (seed % 3 != 1) {
    DrawCodes(codes, seed % 3 == 2, options.layers);
    setting.style = ForwardStyle();  // float32 fits every layer
  }
  if (seed % 5 == 2) {
    RandomSequence latents(seed, kLatentStream);
    if (IsWide(seed)) options.prefill_chunk_size = 32;  // the oracle is slow with them
    DrawLatents(latents, IsWide(seed), options);
    setting.style = ForwardStyle();
  }
  if (seed % 7 == 3) {
    RandomSequence ropes(seed, kRopeStream);
    DrawRopesOfLayers(ropes, options);
  }
  options.tvm_window_span = setting.has_windows && (windows.Below(3) == 0 || tvm_span);
  options.max_tree_size = 4 + RandomSequence(seed, kTreesStream).Below(40);
  options.max_pop = std::array{0, 1, 5, 16}[static_cast<size_t>(seed % 4)];
  // Where there is another cache, tokens come whose layers were all run.
  options.allow_skipped_layers = seed % 4 == 1 && RandomSequence(seed, kOtherStream).Below(2) == 0;
  return setting;
}

std::optional<WalkSetting> MakeOtherSetting(uint64_t seed) {
  RandomSequence random(seed, kOtherStream);
  if (random.Below(2) == 0) return std::nullopt;
  WalkSetting setting = MakeSetting(seed);
  AttentionKVCacheOptions& options = setting.options;
  const int64_t page_size = OneOf<int64_t>(random, {1, 3, 4, 7, 16, 20, 64});
  options.page_size = page_size == options.page_size ? 5 : page_size;
  options.max_num_sequences = 4 + random.Below(9);
  options.token_capacity = options.page_size * (8 + random.Below(24)) + 60;
  if (IsWide(seed)) options.token_capacity += 2000;
  setting.id_count = options.max_num_sequences + 2;
  setting.chains = random.Below(2) == 0;
  if (random.Below(3) != 0) HalveHeads(&setting);
  return setting;
}

namespace {

// Sequences that a walk begins with.
uint32_t AddedFirst(uint64_t seed) { return IsWide(seed) ? 48 : 3; }

// Where there is another cache, some operations become those of a transfer.
void AddTransfers(Walk* walk) {
  if (!MakeOtherSetting(walk->seed)) return;
  RandomSequence random(walk->seed, kTransfersStream);
  for (size_t i = AddedFirst(walk->seed); i < walk->ops.size(); ++i) {
    constexpr std::array<Kind, 8> kKinds = {Kind::kSwitch,   Kind::kTransfer, Kind::kTransfer,
                                            Kind::kTransfer, Kind::kTransfer, Kind::kTransfer,
                                            Kind::kReceive,  Kind::kSend};
    if (random.Below(4) == 0)
      walk->ops[i].kind = kKinds[static_cast<size_t>(random.Below(kKinds.size()))];
  }
}

Walk MakeWalk(uint64_t seed, int64_t op_count) {
  RandomSequence random(seed, kOpsStream);
  // Usual shares; a walk draws its own, and leaves some kinds out.
  std::array<double, kKindCount> weights = {3, 3, 12,  10, 4,  6, 3,  1, 40, 6,  4, 0.15,
                                            2, 2, 0.5, 4,  12, 8, 12, 4, 8,  14, 8, 27};
  for (double& weight : weights) {
    weight *= random.Below(5) == 0 ? 0 : std::exp(random.Uniform(-1.5, 1.5));
  }
  weights[static_cast<size_t>(Kind::kAdd)] += 1;
  double& remove = weights[static_cast<size_t>(Kind::kRemove)];
  remove =
      std::min(remove, weights[static_cast<size_t>(Kind::kAdd)]);  // else there is nothing to do
  weights[static_cast<size_t>(Kind::kForward)] += 10;
  double sum = 0;
  for (const double weight : weights) sum += weight;
  Walk walk;
  walk.seed = seed;
  for (uint32_t i = 0; i < AddedFirst(seed); ++i) walk.ops.push_back({Kind::kAdd, i, 1, 0});
  for (int64_t i = AddedFirst(seed); i < op_count; ++i) {
    double draw = random.Uniform() * sum;
    size_t kind = 0;
    while (kind + 1 < kKindCount && draw >= weights[kind]) draw -= weights[kind++];
    walk.ops.push_back({static_cast<Kind>(kind), static_cast<uint32_t>(random.Bits()),
                        static_cast<uint32_t>(random.Bits()),
                        static_cast<uint32_t>(random.Bits())});
  }
  AddTransfers(&walk);
  return walk;
}

// ---------------------------------------------------------------------- running a walk

AttentionKVCacheOptions FreshOptions(const WalkSetting& setting) {
  AttentionKVCacheOptions options = setting.options;
  options.page_size = options.page_size == 16 ? 64 : 16;
  options.max_num_sequences = 1;
  options.token_capacity = setting.options.token_capacity + 2 * setting.options.page_size;
  // Sequences of which a part slides away grow beyond the capacity.
  if (setting.has_windows) options.token_capacity = std::max<int64_t>(4000, options.token_capacity);
  options.prefill_chunk_size = options.token_capacity;
  options.tvm_window_span =
      false;  // what such a window has hidden is hidden in the fresh cache too
  return options;
}

}  // namespace

Walker::Walker(const WalkSetting& setting, uint64_t first_token)
    : setting_(setting),
      layers_(setting_.options.layers),
      cache_(AttentionKVCache::Create(setting.options).value()),
      fresh_(AttentionKVCache::Create(FreshOptions(setting)).value()),
      model_(setting.options, cache_.get()),
      next_token_(first_token) {
  for (size_t l = 0; l < layers_.size(); ++l)
    layer_features_.push_back(FeaturesOf(setting_.options, l));
}

// Mostly an id that is there.
int64_t Walker::PickId(uint32_t draw) const {
  if (history_.empty() || draw % 16 == 0) {
    return static_cast<int64_t>(draw / 16) % (setting_.id_count + 1) - (draw % 48 == 0);
  }
  return std::next(history_.begin(), draw / 16 % static_cast<uint32_t>(history_.size()))->first;
}

// Mostly a batch that may run. One in twelve has one thing wrong.
Batch Walker::DrawBatch(uint32_t seed, bool with_trees) const {
  RandomSequence random(seed);
  Batch batch;
  std::vector<int64_t> ids;
  for (const auto& [id, history] : history_) {
    // One that has a tree is refused, or given nodes.
    if (retained_.count(id) == 0 && (trees_.count(id) == 0 || with_trees || seed % 8 == 0))
      ids.push_back(id);
  }
  const int64_t most = std::min(setting_.batch_max, static_cast<int64_t>(ids.size()));
  const int64_t count = most == 0 ? 0 : 1 + random.Below(most);
  int64_t room = setting_.options.prefill_chunk_size;
  for (int64_t i = 0; i < count && room > 0; ++i) {
    const int64_t at = i + random.Below(static_cast<int64_t>(ids.size()) - i);
    std::swap(ids[static_cast<size_t>(i)], ids[static_cast<size_t>(at)]);
    const int64_t style = random.Below(10);
    const int64_t limit = style < 6 ? 1 : style < 9 ? 5 : room;
    batch.ids.push_back(ids[static_cast<size_t>(i)]);
    batch.lengths.push_back(1 + random.Below(std::min(limit, room)));
    room -= batch.lengths.back();
  }
  if (batch.ids.empty() || random.Below(12) != 0) return batch;
  const size_t victim = static_cast<size_t>(random.Below(static_cast<int64_t>(batch.ids.size())));
  switch (random.Below(8)) {
    case 0:
      batch.ids[victim] = setting_.id_count + 5;
      break;
    case 6:
      if (!retained_.empty()) batch.ids[victim] = *retained_.begin();
      break;
    case 1:
      batch.ids.push_back(batch.ids[victim]);
      batch.lengths.push_back(1);
      break;
    case 2:
      batch.lengths[victim] = 0;
      break;
    case 3:
      batch.lengths[victim] = -1;
      break;
    case 4:
      batch.lengths[victim] = setting_.options.prefill_chunk_size + 1;
      break;
    case 5:
      batch.lengths.pop_back();
      break;
    default:
      batch = Batch();
  }
  return batch;
}

std::string Walker::Compare(const char* what, const Status& cache, const Status& model) {
  if (cache.code() == model.code()) return "";
  return std::string(what) + ": cache says " + cache.ToString() + ", model says " +
         model.ToString();
}

std::string Differ(const char* what, int64_t cache, int64_t model) {
  if (cache == model) return "";
  return std::string(what) + ": cache " + std::to_string(cache) + ", model " +
         std::to_string(model);
}

std::string OutOfBounds(const char* what, int64_t found, const KVModel::PageBounds& bounds) {
  if (bounds.least <= found && found <= bounds.most) return "";
  return std::string(what) + ": cache " + std::to_string(found) + ", right are " +
         std::to_string(bounds.least) + " to " + std::to_string(bounds.most);
}

Walker::Room Walker::RoomNow() const {
  return {.available = cache_->GetNumAvailablePages(),
          .in_use = cache_->pages_in_use(),
          .tokens = cache_->GetDistinctTokenCount()};
}

std::string Walker::Call(const char* what, const KVModel::Taken& taken,
                         const std::function<Status(AttentionKVCache&)>& f, Status* status) {
  const uint64_t digest = cache_->StateDigest();
  const Room before = RoomNow();
  *status = f(*cache_);
  ++seen_[what][status->code()];
  model_.FindNoRoom(status->code() == StatusCode::kOutOfPages);
  std::string error = Compare(what, *status, f(model_));
  if (!error.empty()) return error;
  if (!status->ok() && cache_->StateDigest() != digest)
    return std::string(what) + " failed and changed the state: " + status->ToString();
  error = CheckRoom(*status, before, taken);
  return error.empty() ? "" : std::string(what) + ": " + error;
}

// A call that works may give back pages that windows hide, or that it has copied.
std::string Walker::CheckRoom(const Status& status, const Room& before,
                              const KVModel::Taken& taken) {
  const Room now = RoomNow();
  if (!status.ok()) {
    std::string error = Differ("free pages behind a failure", now.available, before.available);
    if (error.empty()) error = Differ("pages behind a failure", now.in_use, before.in_use);
    if (error.empty()) error = Differ("tokens behind a failure", now.tokens, before.tokens);
    const bool lacks_room = taken.largest().most > before.available;
    if (!error.empty() || status.code() != StatusCode::kOutOfPages || lacks_room) return error;
    return status.ToString() + ", with " + std::to_string(before.available) + " pages available";
  }
  const bool takes = !taken.pages.empty();
  const bool may_free = !takes || (taken.ends && (setting_.has_windows || taken.copies_max > 0));
  KVModel::PageBounds pages = taken.sum();
  if (may_free) pages.least = -before.in_use;
  std::string error = OutOfBounds("pages taken", now.in_use - before.in_use, pages);
  pages = taken.largest();
  if (may_free || setting_.has_windows) pages.least = -before.in_use;
  if (error.empty())
    error = OutOfBounds("free pages taken", before.available - now.available, pages);
  // Groups free pages apart from one another where there are windows.
  if (error.empty() && !setting_.has_windows && taken.largest().least > before.available)
    error = "works with " + std::to_string(before.available) + " pages available";
  const KVModel::PageBounds tokens = {takes ? taken.tokens : -before.tokens,
                                      taken.tokens + taken.copies_max};
  return error.empty() ? OutOfBounds("tokens taken", now.tokens - before.tokens, tokens) : error;
}

// What holds for any pages.
std::string Walker::ComparePages() {
  const int64_t allocated = cache_->pages_allocated();
  const PageCounts counts = cache_->page_counts();
  const Room now = RoomNow();
  const int64_t groups = model_.group_count();
  std::string error = OutOfBounds("pages in use", now.in_use, model_.PagesInUse());
  const auto expect = [&](const char* what, int64_t found, int64_t least, int64_t most) {
    if (error.empty()) error = OutOfBounds(what, found, {least, most});
  };
  expect("pages and free ones", groups * now.available + now.in_use,
         setting_.has_windows ? 0 : allocated, allocated);
  expect("distinct tokens", now.tokens, model_.GetDistinctTokenCount(),
         cache_->GetTotalSequenceLength() + tokens_taken_);
  if (cache_->Empty())
    expect("free pages of an empty cache", groups * now.available, allocated, allocated);
  expect("page_counts().total", counts.total, allocated, allocated);
  expect("page_counts().free", counts.free, allocated - now.in_use, allocated - now.in_use);
  expect("page_counts(), all kinds",
         counts.free + counts.exclusive + counts.shared + counts.retained_only, allocated,
         allocated);
  if (retained_.empty()) expect("page_counts().retained_only", counts.retained_only, 0, 0);
  if (model_.sequence_count() < 2) expect("page_counts().shared", counts.shared, 0, 0);
  return error;
}

std::string Walker::CompareCounters() {
  std::string error;
  const auto compare = [&](const char* what, int64_t cache, int64_t model) {
    if (error.empty()) error = Differ(what, cache, model);
  };
  compare("Empty", cache_->Empty(), model_.Empty());
  compare("sequence_count", cache_->sequence_count(), model_.sequence_count());
  compare("retained", cache_->retained_sequence_count(), model_.retained_sequence_count());
  compare("total length", cache_->GetTotalSequenceLength(), model_.GetTotalSequenceLength());
  if (error.empty()) error = ComparePages();
  for (int64_t id = -1; id <= setting_.id_count; ++id) {
    compare("HasSequence", cache_->HasSequence(id), model_.HasSequence(id));
    const Result<int64_t> length = cache_->GetSequenceLength(id);
    const Result<int64_t> expected = model_.GetSequenceLength(id);
    if (error.empty()) error = Compare("GetSequenceLength", length.status(), expected.status());
    if (length.ok() && expected.ok()) compare("length", *length, *expected);
    const Result<int64_t> held = cache_->HeldTokens(id);
    const Result<int64_t> expected_held = model_.HeldTokens(id);
    if (error.empty()) error = Compare("HeldTokens", held.status(), expected_held.status());
    if (!held.ok() || !expected_held.ok()) continue;
    compare("held tokens", *held, *expected_held);
    compare("tree size", *cache_->GetTreeSize(id), *model_.GetTreeSize(id));
    if (error.empty()) error = CompareProgress(id);
    slid_tokens_ += *length - *held;
  }
  const Result<std::span<const int32_t>> positions = cache_->GetQueryPositions();
  const Result<std::span<const int32_t>> expected = model_.GetQueryPositions();
  if (error.empty()) error = Compare("GetQueryPositions", positions.status(), expected.status());
  if (error.empty() && positions.ok() && !std::ranges::equal(*positions, *expected)) {
    error = "query positions differ";
  }
  if (error.empty() && open_ != positions.ok()) error = "the walk lost track of the forward";
  return error;
}

std::string Walker::Step(const WalkOp& op) {
  const std::string error = Apply(op);
  return error.empty() ? Compare() : error;
}

std::string Walker::Compare() {
  std::string error = CompareCounters();
  if (error.empty()) error = CompareIncoming();
  if (!error.empty()) return error;
  const Status cache = cache_->CheckInvariants();
  return cache.ok() ? "" : "invariants of the cache: " + cache.ToString();
}

std::string Walker::Apply(const WalkOp& op) {
  // Little can be done in a forward in which a call has failed.
  if (open_ && call_failed_ && op.c % 4 != 0) return Abort();
  switch (op.kind) {
    case Kind::kAdd:
      return Add(op);
    case Kind::kRemove:
      return Remove(op);
    case Kind::kFork:
      return Fork(op);
    case Kind::kPop:
      return Pop(op);
    case Kind::kBegin:
      return Begin(op);
    case Kind::kLayer:
      return Layer(op.a % 24 == 0 ? op.b % layers_.size() : layers_.size(), op.c);
    case Kind::kEnd:
      return End(op.a);
    case Kind::kAbort:
      return Abort();
    case Kind::kForward:
      return Forward(op);
    case Kind::kDebugGet:
      return DebugGet(op);
    case Kind::kDebugSet:
      return DebugSet(op);
    case Kind::kClear:
      return Clear();
    case Kind::kPagesNeeded: {
      KVModel::Taken taken;
      return PagesNeeded(DrawBatch(op.a), &taken);
    }
    case Kind::kSelectLongRope:
      return SelectLongRope(op);
    case Kind::kBadTensor:
      return BadTensor(op);
    case Kind::kRetain:
      return Retain(op);
    case Kind::kDecode:
      return Decode(op);
    case Kind::kImport:
      return Import(op);
    case Kind::kWindow:
      return Window(op);
    case Kind::kShared:
      return Shared(op);
    case Kind::kLoading:
      return Loading(op);
    case Kind::kTree:
      return Tree(op);
    case Kind::kCommit:
      return CommitTrees(op);
    case Kind::kForkAndLoad:
      return open_ ? RunRest(op) : LoadingBehindFork(op);
    case Kind::kSwitch:
    case Kind::kTransfer:
    case Kind::kSend:
    case Kind::kReceive:
      break;  // of Walkers
  }
  return "no such operation";
}

std::string Walker::Add(const WalkOp& op) {
  // Mostly an id that is not there.
  int64_t id = static_cast<int64_t>(op.a) % setting_.id_count;
  for (int64_t i = 0; op.b % 8 != 0 && i < setting_.id_count && history_.count(id) != 0; ++i) {
    id = (id + 1) % setting_.id_count;
  }
  if (op.b % 64 == 8) id = -1 - id;
  QUIRE_WALK_CALL("AddSequence", status, [&](AttentionKVCache& c) { return c.AddSequence(id); });
  if (!status.ok()) return "";
  history_[id];
  past_features_[id] = {};
  long_factors_[id] = setting_.options.rope.use_long_factors;
  return "";
}

std::string Walker::Remove(const WalkOp& op) { return RemoveId(PickId(op.a)); }

std::string Walker::RemoveId(int64_t id) {
  QUIRE_WALK_CALL("RemoveSequence", status,
                  [&](AttentionKVCache& c) { return c.RemoveSequence(id); });
  if (!status.ok()) return "";
  history_.erase(id);
  trees_.erase(id);
  retained_.erase(id);
  outgoing_.erase(id);
  halves_.erase(id);
  return "";
}

std::string Walker::Fork(const WalkOp& op) {
  if (!setting_.chains || op.a % 4 == 0) return ForkOnce(op);
  // The next links hang on the newest child, at its end mostly.
  RandomSequence random(op.a);
  const int64_t links = 1 + random.Below(6);
  std::string error;
  for (int64_t i = 0; i < links && error.empty(); ++i) {
    const uint32_t position = random.Below(4) == 0 ? static_cast<uint32_t>(random.Bits()) : 0;
    error = ForkOnce({Kind::kFork, static_cast<uint32_t>(random.Bits()),
                      static_cast<uint32_t>(random.Bits()), position});
  }
  return error;
}

std::string Walker::ForkOnce(const WalkOp& op) {
  const bool full = model_.sequence_count() - model_.retained_sequence_count() ==
                    setting_.options.max_num_sequences;
  if (full && setting_.evicts && op.a % 4 != 0) {
    const std::string error = Remove({Kind::kRemove, op.b, 0, 0});
    if (!error.empty()) return error;
  }
  int64_t parent = PickId(op.a);
  if (setting_.chains && op.b % 4 != 0 && history_.count(newest_child_) != 0)
    parent = newest_child_;
  int64_t child = static_cast<int64_t>(op.b) % setting_.id_count;
  for (int64_t i = 0; op.b % 8 != 0 && i < setting_.id_count && history_.count(child) != 0; ++i) {
    child = (child + 1) % setting_.id_count;
  }
  if (op.b % 64 == 8) child = -1 - child;
  const int64_t length =
      model_.GetSequenceLength(parent).ok() ? *model_.GetSequenceLength(parent) : 0;
  // Mostly near the end, where many forks meet in one page; else from -2 to one too far.
  int64_t position = static_cast<int64_t>(op.c / 4) % (length + 4) - 2;
  if (op.c % 4 == 0) position = -1;
  if (op.c % 4 > 1) position = std::max<int64_t>(length - static_cast<int64_t>(op.c / 4) % 6, 0);
  bool forked = false;
  const std::string error = ForkTo(parent, child, position, &forked);
  if (!forked) return error;
  if (!setting_.chains || open_) return "";
  const Batch both = {{parent, child}, {1, 1}};
  const Batch child_alone = {{child}, {1}};
  const std::string failed = BeginBatch(retained_.count(parent) == 0 ? both : child_alone, op);
  return failed.empty() && open_ ? RunRest({Kind::kForward, op.c, op.b, op.a}) : failed;
}

std::string Walker::ForkTo(int64_t parent, int64_t child, int64_t position, bool* forked) {
  *forked = false;
  QUIRE_WALK_CALL("ForkSequence", status,
                  [&](AttentionKVCache& c) { return c.ForkSequence(parent, child, position); });
  const bool is_found = status.ok() || status.code() == StatusCode::kBadState;
  if (is_found && !open_ && cache_->CanFork(parent, position) != (status.ok() && position >= 0))
    return "CanFork says something else than ForkSequence";
  if (!status.ok()) return "";
  History history = history_.at(parent);
  if (position >= 0) history.resize(static_cast<size_t>(position));
  history_[child] = std::move(history);
  past_features_[parent] |= Feature::kForked;
  past_features_[child] = past_features_[parent];
  halves_[child] = halves_[parent];
  long_factors_[child] = long_factors_.at(parent);
  newest_child_ = child;
  *forked = true;
  return "";
}

std::string Walker::Pop(const WalkOp& op) {
  const int64_t id = PickId(op.a);
  const int64_t length = model_.GetSequenceLength(id).ok() ? *model_.GetSequenceLength(id) : 0;
  // Few tokens mostly; from -1 to one too many.
  const int64_t range = op.b % 4 == 0 ? length + 3 : std::min<int64_t>(length + 3, 7);
  return PopTokens(id, static_cast<int64_t>(op.c) % range - 1);
}

std::string Walker::PopTokens(int64_t id, int64_t n) {
  const int64_t length = model_.GetSequenceLength(id).ok() ? *model_.GetSequenceLength(id) : 0;
  QUIRE_WALK_CALL("PopN", status, [&](AttentionKVCache& c) { return c.PopN(id, n); });
  if (!status.ok()) return "";
  past_features_[id].AddIf(n > 0, Feature::kPopped);
  const size_t committed = std::min(history_.at(id).size(), static_cast<size_t>(length - n));
  const size_t nodes = static_cast<size_t>(length - n) - committed;
  history_.at(id).resize(committed);
  if (trees_.count(id) == 0) return "";
  trees_.at(id).parents.resize(nodes);
  trees_.at(id).tokens.resize(nodes);
  if (nodes == 0) trees_.erase(id);
  return "";
}

// What the cache says is what its forward is held to.
std::string Walker::SameNeeds(const char* call,
                              const std::function<Result<int64_t>(const AttentionKVCache&)>& ask,
                              const std::function<KVModel::Taken()>& expect,
                              KVModel::Taken* taken) {
  const uint64_t digest = cache_->StateDigest();
  const Result<int64_t> needed = ask(*cache_);
  std::string error = Compare(call, needed.status(), ask(model_).status());
  if (error.empty() && cache_->StateDigest() != digest)
    error = std::string(call) + " changed the state";
  if (!error.empty() || !needed.ok()) return error;
  *taken = expect();
  error = OutOfBounds(call, *needed, taken->largest());
  for (KVModel::PageBounds& group : taken->pages) {
    group.most = std::min(group.most, *needed);
    if (!setting_.has_windows) group.least = *needed;
  }
  return error;
}

std::string Walker::PagesNeeded(const Batch& batch, KVModel::Taken* taken) {
  return SameNeeds(
      "PagesNeeded",
      [&](const AttentionKVCache& c) { return c.PagesNeeded(batch.ids, batch.lengths); },
      [&] { return model_.TakenByForward(batch.ids, batch.lengths); }, taken);
}

std::string Walker::Begin(const WalkOp& op) {
  if (history_.empty() && op.b % 4 != 0) return Add(op);
  return BeginBatch(DrawBatch(op.a), op);
}

std::string Walker::BeginBatch(const Batch& batch, const WalkOp& op, std::vector<WalkLoad> loads) {
  Batch planned = batch;
  std::array<std::vector<LayerLoad>, 2> given;
  for (const WalkLoad& load : loads) {
    const int64_t count = static_cast<int64_t>(load.tokens.size());
    planned.lengths[load.member] += count;
    for (size_t side = 0; side < 2; ++side)
      given[side].push_back({batch.ids[load.member], count, load.sources[side].get()});
  }
  // More tokens than a chunk can be loaded, but not asked about.
  KVModel::Taken taken = model_.TakenByForward(planned.ids, planned.lengths);
  std::string error = PagesNeeded(planned, &taken);
  if (!error.empty()) return error;
  const Room before = RoomNow();
  const char* const call = loads.empty() ? "BeginForward" : "BeginLoadingForward";
  QUIRE_WALK_TAKE(call, status, taken, [&](AttentionKVCache& c) {
    if (loads.empty()) return c.BeginForward(batch.ids, batch.lengths);
    return c.BeginLoadingForward(batch.ids, batch.lengths, given[SideOf(c)]);
  });
  if (status.code() == StatusCode::kOutOfPages && setting_.evicts) return Remove(op);
  if (!status.ok()) return "";
  const Status plan = cache_->CheckInvariants();  // looks at the plan of the open forward
  if (error.empty() && !plan.ok()) error = "after BeginForward: " + plan.ToString();
  Opened(batch, before);
  tree_forward_ = false;
  loads_ = std::move(loads);
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    FeatureSet features = FeaturesOfMember(batch.ids[i]);
    features |= batch.lengths[i] == 1 ? Feature::kDecode : Feature::kChunk;
    for (const WalkLoad& load : loads_) features.AddIf(load.member == i, Feature::kLoading);
    member_features_.push_back(features);
    History& history = history_.at(batch.ids[i]);
    before_[batch.ids[i]] = history;
    windows_before_[batch.ids[i]] = *model_.GetWindows(batch.ids[i]);
    for (const WalkLoad& load : loads_) {
      if (load.member == i) history.insert(history.end(), load.tokens.begin(), load.tokens.end());
    }
    for (int64_t n = 0; n < batch.lengths[i]; ++n) {
      rows_.push_back(NewToken(batch.ids[i]));
      history.push_back({rows_.back(), nullptr});
    }
  }
  return error;
}

void Walker::Opened(const Batch& batch, const Room& before) {
  const Room now = RoomNow();
  pages_taken_ = now.in_use - before.in_use;
  tokens_taken_ = now.tokens - before.tokens;
  open_ = true;
  call_failed_ = false;
  batch_ = batch;
  largest_batch_ = std::max(largest_batch_, std::ssize(batch.ids));
  rows_.clear();
  before_.clear();
  member_features_.clear();
  masked_ = false;
  outputs_.assign(layers_.size(), LayerOutputs());
  appended_.assign(layers_.size(), 0);
  attended_.assign(layers_.size(), 0);
}

uint64_t Walker::NewToken(int64_t id) {
  uint64_t number = next_token_++;
  if (setting_.has_bad_tokens && RandomBits(number, 0, 0) % 128 == 0) number = BadToken(number);
  return HalfToken(number, setting_.halved_layers, halves_[id]);
}

bool IsWithin(double cache, double model, double bound) {
  if (!std::isfinite(bound)) return true;
  return std::isfinite(model) ? std::abs(cache - model) <= bound : !std::isfinite(cache);
}

// Rows behind the forward's own must be ignored.
std::vector<uint64_t> Walker::RowsWithPadding(uint32_t draw) const {
  std::vector<uint64_t> rows = rows_;
  for (uint32_t i = 0; i < draw % 4; ++i) rows.push_back(draw);
  return rows;
}

std::string Walker::CompareOutputs(size_t layer, const LayerOutputs& cache,
                                   const LayerOutputs& model) {
  const auto compare = [&](const char* what, const TestTensor& got, const TestTensor& expected,
                           const std::vector<double>& bounds) -> std::string {
    for (size_t i = 0; i < bounds.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i);
      bad_numbers_ += !std::isfinite(expected.Get(at));
      if (got.Get(at) == expected.Get(at)) continue;  // both may be infinite
      if (IsWithin(got.Get(at), expected.Get(at), bounds[i])) continue;
      std::ostringstream text;
      text << what << " of layer " << layer << " at " << i << ": cache " << got.Get(at)
           << ", model " << expected.Get(at) << ", bound " << bounds[i];
      return text.str();
    }
    for (int64_t i = static_cast<int64_t>(bounds.size()); i < got.count(); ++i) {
      if (!std::isnan(got.Get(i))) return std::string(what) + ": a row of padding was written";
    }
    return "";
  };
  const KVModel::Bounds& bounds = model_.last_bounds();
  std::string error = compare("o", cache.o, model.o, bounds.o);
  if (error.empty() && cache.lse.count() > 0) {
    error = compare("lse", cache.lse, model.lse, bounds.lse);
  }
  return error.empty() ? error : error + "\n" + *cache_->DebugPlan();
}

// Before its forward.
FeatureSet Walker::FeaturesOfMember(int64_t id) const {
  const WindowSettings windows = model_.GetWindows(id).value();
  const bool is_long =
      setting_.options.rope.scaling == RopeScaling::kLongRope && long_factors_.at(id);
  return FeatureSet(past_features_.at(id))
      .AddIf(is_long, Feature::kRopeLong)
      .AddIf(windows.window > 0 || windows.span > 0, Feature::kWindow)
      .AddIf(windows.span > 0, Feature::kTvmSpan)
      .AddIf(
          (windows.window > 0 && windows.sinks > 0) || (windows.span > 0 && windows.span_sinks > 0),
          Feature::kSinks)
      .AddIf(windows.slid > 0, Feature::kSlid)
      .AddIf(IsSending(id), Feature::kSending)
      .AddIf(!retained_.empty(), Feature::kRetainedBeside)
      .AddIf(!incoming_.empty(), Feature::kPendingBeside);
}

void Walker::CountPairs(size_t layer, const FeatureSet& call) {
  for (const FeatureSet& member : member_features_) {
    FeatureSet together = layer_features_[layer] | member | call;
    // Long factors are of the cache's rotation.
    if (together.Has(static_cast<size_t>(Feature::kRopeNone)) || layers_[layer].rope.has_value())
      together.Remove(Feature::kRopeLong);
    pairs_.Count(together);
  }
}

std::string Walker::Compared(size_t layer, const LayerOutputs& cache, const LayerOutputs& model,
                             const FeatureSet& call) {
  std::string error = CompareOutputs(layer, cache, model);
  if (error.empty()) CountPairs(layer, call);
  return error;
}

std::string Walker::FusedMasked(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw) {
  const AttentionLayerSpec& spec = layers_[layer];
  const int64_t l = static_cast<int64_t>(layer);
  const TokenInputs inputs = MakeTokenInputs(spec, l, setting_.style.input_dtype, rows);
  const TestTensor mask = DrawMask(draw);
  LayerOutputs outputs[2];
  for (LayerOutputs& o : outputs)
    o.o = TestTensor(setting_.style.output_dtype,
                     {std::ssize(rows), spec.num_qo_heads, spec.v_head_dim});
  QUIRE_WALK_CALL("a fused call with a mask", status, [&](AttentionKVCache& c) {
    const TensorView& o = outputs[SideOf(c)].o.view();
    if (spec.latent) {
      return c.AttentionWithMLA(l, inputs.q.view(), inputs.kv(), o, ScoreScale(spec), &mask.view());
    }
    return c.AttentionWithFusedQKV(l, inputs.qkv.view(), o, ScoreScale(spec), &mask.view());
  });
  call_failed_ |= !status.ok();
  if (!status.ok()) return "";
  appended_[layer] = attended_[layer] = 1;
  masked_ = true;
  return Compared(layer, outputs[0], outputs[1], Feature::kFused | FeatureSet(Feature::kMask));
}

std::string Walker::Fused(size_t layer, const std::vector<uint64_t>& rows) {
  LayerOutputs cache;
  LayerOutputs model;
  ForwardStyle style = setting_.style;
  style.calls = CallStyle::kFused;
  const int64_t l = static_cast<int64_t>(layer);
  const char* const call = layers_[layer].latent ? "AttentionWithMLA" : "AttentionWithFusedQKV";
  QUIRE_WALK_CALL(call, status, [&](AttentionKVCache& c) {
    return RunLayer(c, layers_[layer], l, rows, style, &c == cache_.get() ? &cache : &model);
  });
  call_failed_ |= !status.ok();
  if (!status.ok()) return "";
  appended_[layer] = attended_[layer] = 1;
  outputs_[layer] = cache;
  return Compared(layer, cache, model, Feature::kFused);
}

std::string Walker::Append(size_t layer, const std::vector<uint64_t>& rows) {
  const TokenInputs inputs = MakeTokenInputs(layers_[layer], static_cast<int64_t>(layer),
                                             setting_.style.input_dtype, rows);
  const char* const call = layers_[layer].latent ? "AppendMLAKV" : "Append";
  QUIRE_WALK_CALL(call, status, [&](AttentionKVCache& c) {
    return AppendInputs(c, layers_[layer], static_cast<int64_t>(layer), inputs);
  });
  call_failed_ |= !status.ok();
  if (status.ok() && open_) appended_[layer] = 1;
  return "";
}

// Mostly a mask of the open forward that hides about half, or a tenth, or all of the new tokens.
TestTensor Walker::DrawMask(uint32_t draw) const {
  RandomSequence random(draw);
  int64_t count = random.Below(16) == 0 ? 1 : 0;
  for (const int64_t length : batch_.lengths) count += length * length;
  TestTensor mask(DType::kU8, {count});
  const int64_t tenths = OneOf<int64_t>(random, {5, 9, 0});
  for (int64_t i = 0; i < count; ++i)
    mask.view().data_as<uint8_t>()[i] = random.Below(10) < tenths ? 1 : 0;
  return mask;
}

// Besides the call without a mask, whose outputs are those that are compared with a fresh cache.
std::string Walker::AttendMasked(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw) {
  const AttentionLayerSpec& spec = layers_[layer];
  const int64_t n = static_cast<int64_t>(rows.size());
  const TokenInputs inputs =
      MakeTokenInputs(spec, static_cast<int64_t>(layer), setting_.style.input_dtype, rows);
  const TestTensor mask = DrawMask(draw);
  const auto outputs = TwoOutputs(spec, n);
  QUIRE_WALK_CALL("Attend with a mask", status, [&](AttentionKVCache& c) {
    const LayerOutputs& o = outputs[SideOf(c)];
    return c.Attend(static_cast<int64_t>(layer), inputs.q.view(), o.o.view(), &o.lse.view(),
                    ScoreScale(spec), &mask.view());
  });
  call_failed_ |= !status.ok();
  if (!status.ok()) return "";
  attended_[layer] = 1;
  return Compared(layer, outputs[0], outputs[1], Feature::kHalves | FeatureSet(Feature::kMask));
}

// The cache writes to the first, the model to the second.
std::array<LayerOutputs, 2> Walker::TwoOutputs(const AttentionLayerSpec& spec, int64_t n) const {
  std::array<LayerOutputs, 2> outputs;
  for (LayerOutputs& side : outputs) {
    side.o = TestTensor(setting_.style.output_dtype, {n, spec.num_qo_heads, spec.v_head_dim});
    side.lse = TestTensor(DType::kF32, {n, spec.num_qo_heads});
  }
  return outputs;
}

std::string Walker::Attend(size_t layer, const std::vector<uint64_t>& rows) {
  const AttentionLayerSpec& spec = layers_[layer];
  const int64_t n = static_cast<int64_t>(rows.size());
  const TokenInputs inputs =
      MakeTokenInputs(spec, static_cast<int64_t>(layer), setting_.style.input_dtype, rows);
  const auto outputs = TwoOutputs(spec, n);
  QUIRE_WALK_CALL("Attend", status, [&](AttentionKVCache& c) {
    const LayerOutputs& o = outputs[SideOf(c)];
    return c.Attend(static_cast<int64_t>(layer), inputs.q.view(), o.o.view(), &o.lse.view(),
                    ScoreScale(spec));
  });
  call_failed_ |= !status.ok();
  if (!status.ok()) return "";
  attended_[layer] = 1;
  outputs_[layer] = outputs[0];
  return Compared(layer, outputs[0], outputs[1], Feature::kHalves);
}

// Both outputs are of the same tokens and heads; the caches' own bits are merged by both.
std::string Walker::Merge(const LayerOutputs& self, const LayerOutputs& cross) {
  LayerOutputs sides[2];
  for (LayerOutputs& side : sides) {
    side.o = TestTensor(self.o.view().dtype(),
                        {self.o.view().shape().begin(), self.o.view().shape().end()});
    side.lse =
        TestTensor(DType::kF32, {self.lse.view().shape().begin(), self.lse.view().shape().end()});
    std::memcpy(side.o.view().data(), self.o.bytes().data(), self.o.bytes().size());
    std::memcpy(side.lse.view().data(), self.lse.bytes().data(), self.lse.bytes().size());
  }
  QUIRE_WALK_CALL("MergeAttnOutputInplace", status, [&](AttentionKVCache& c) {
    LayerOutputs& side = sides[SideOf(c)];
    return c.MergeAttnOutputInplace(side.o.view(), side.lse.view(), cross.o.view(),
                                    cross.lse.view());
  });
  if (!status.ok()) return "";
  const double ulp = self.o.view().dtype() == DType::kF32   ? 0x1p-20
                     : self.o.view().dtype() == DType::kF16 ? 0x1p-9
                                                            : 0x1p-6;
  const auto differs = [&](const TestTensor& a, const TestTensor& b, double bound) {
    for (int64_t i = 0; i < a.count(); ++i) {
      if (a.Get(i) == b.Get(i) || (std::isnan(a.Get(i)) && std::isnan(b.Get(i)))) continue;
      if (!IsWithin(a.Get(i), b.Get(i), bound * (4 + std::abs(b.Get(i))))) return true;
    }
    return false;
  };
  if (differs(sides[0].o, sides[1].o, ulp)) return "merged o is not the model's";
  return differs(sides[0].lse, sides[1].lse, 0x1p-20) ? "merged lse is not the model's" : "";
}

// The pieces store nothing and change no state but "attended", so they may precede any call.
std::string Walker::Pieces(size_t layer, const std::vector<uint64_t>& rows, uint32_t draw) {
  const AttentionLayerSpec& spec = layers_[layer];
  AttentionLayerSpec self = spec;
  const bool has_own_heads = draw % 2 == 0;
  const TestTensor mask = DrawMask(draw);
  const TensorView* const masked = open_ && draw / 2 % 2 == 0 ? &mask.view() : nullptr;
  if (has_own_heads) {
    const bool rotates = setting_.options.rope.mode == RopeMode::kInline && !spec.latent;
    // As wide as what the model turns for a latent layer.
    const int64_t own_dim =
        spec.latent ? std::max<int64_t>(6, spec.qk_head_dim - spec.v_head_dim) : 6;
    self = {6, 3, rotates ? spec.qk_head_dim : own_dim, 5, spec.dtype};
  }
  const int64_t l = static_cast<int64_t>(layer);
  const int64_t n = static_cast<int64_t>(rows.size());
  const TokenInputs own = MakeTokenInputs(self, l, setting_.style.input_dtype, rows);
  const TokenInputs inputs = MakeTokenInputs(spec, l, setting_.style.input_dtype, rows);
  const auto selves = TwoOutputs(self, n);
  const auto crosses = TwoOutputs(spec, n);
  QUIRE_WALK_CALL("SelfAttention", self_status, [&](AttentionKVCache& c) {
    const LayerOutputs& out = selves[SideOf(c)];
    return c.SelfAttention(l, own.q.view(), own.k.view(), own.v.view(), out.o.view(),
                           out.lse.view(), ScoreScale(self), masked);
  });
  call_failed_ |= !self_status.ok();
  if (!self_status.ok()) return "";
  FeatureSet call = Feature::kSelf;
  call.AddIf(masked != nullptr, Feature::kMask);
  std::string error = Compared(layer, selves[0], selves[1], call);
  if (!error.empty()) return "SelfAttention: " + error;
  QUIRE_WALK_CALL("CrossAttention", status, [&](AttentionKVCache& c) {
    const LayerOutputs& out = crosses[SideOf(c)];
    return c.CrossAttention(l, inputs.q.view(), out.o.view(), out.lse.view(), ScoreScale(spec));
  });
  call_failed_ |= !status.ok();
  if (!status.ok()) return "";
  error = Compared(layer, crosses[0], crosses[1], Feature::kCross);
  if (!error.empty()) return "CrossAttention: " + error;
  if (!has_own_heads) error = Merge(selves[0], crosses[0]);
  if (error.empty() && !has_own_heads) CountPairs(layer, call | Feature::kCross | Feature::kMerge);
  return error;
}

// `layer` == number of layers: the next one that was not run.
std::string Walker::Layer(size_t layer, uint32_t draw) {
  if (layer == layers_.size()) {
    if (!open_) {
      layer = 0;
    } else {
      layer =
          static_cast<size_t>(std::find(attended_.begin(), attended_.end(), 0) - attended_.begin());
      if (layer == layers_.size()) return "";  // all were run
    }
  }
  const std::vector<uint64_t> rows = open_ ? RowsWithPadding(draw / 8) : std::vector<uint64_t>{1};
  const bool appended = open_ && appended_[layer];
  if (draw / 4 % 5 == 0) {
    if (std::string error = Pieces(layer, rows, draw / 32); !error.empty()) return error;
  }
  if (appended && draw / 64 % 8 == 0) {
    if (std::string error = AttendMasked(layer, rows, draw / 512); !error.empty()) return error;
  }
  if (appended && draw / 1024 % 4 == 0) {
    const std::string error =
        Shared({Kind::kShared, static_cast<uint32_t>(layer), draw / 4096, draw / 512});
    if (!error.empty()) return error;
  }
  if (draw % 4 == 0 || (draw % 4 == 1 && appended)) return Attend(layer, rows);
  if (draw % 4 == 1) return Append(layer, rows);
  if (draw % 4 == 2 && !appended && open_ && draw / 64 % 8 == 0)
    return FusedMasked(layer, rows, draw / 512);
  if (draw % 4 == 2) return appended ? Attend(layer, rows) : Fused(layer, rows);
  if (appended) return Attend(layer, rows);
  std::string error = Append(layer, rows);
  if (error.empty() && open_ && appended_[layer] && draw / 64 % 6 == 0)
    error = AttendMasked(layer, rows, draw / 512);
  return error.empty() ? Attend(layer, rows) : error;
}

std::string Walker::End(uint32_t draw) {
  QUIRE_WALK_CALL("EndForward", status, [&](AttentionKVCache& c) { return c.EndForward(); });
  if (!status.ok()) return "";
  pages_taken_ = tokens_taken_ = 0;
  open_ = false;
  before_.clear();
  const bool skipped = std::ranges::count(attended_, 0) > 0;
  if (std::ranges::count(appended_, 0) > 0) skipped_tokens_.insert(rows_.begin(), rows_.end());
  skipped_layers_ += std::ranges::count(appended_, 0);
  for (const WalkLoad& load : loads_) past_features_[batch_.ids[load.member]] |= Feature::kImported;
  const bool compares =
      !masked_ && !skipped && draw % static_cast<uint32_t>(setting_.fresh_period) == 0;
  return compares ? CompareFresh(draw) : "";
}

// The last forward of one sequence of the batch, with the same tokens alone in an empty cache.
std::string Walker::CompareFresh(uint32_t draw) {
  ++fresh_comparisons_;
  const size_t member = draw / 64 % batch_.ids.size();
  int64_t first_row = 0;
  for (size_t i = 0; i < member; ++i) first_row += batch_.lengths[i];
  int64_t rows = batch_.lengths[member];
  const int64_t id = batch_.ids[member];
  History history = history_.at(id);
  if (tree_forward_) {  // one node, as the last token of its path
    ++tree_comparisons_;
    const int64_t row = draw / 512 % rows;
    const History path = PathTo(id, std::ssize(trees_.at(id).tokens) - rows + row);
    history.insert(history.end(), path.begin(), path.end());
    first_row += row;
    rows = 1;
  }
  if (static_cast<int64_t>(history.size()) > fresh_->options().token_capacity) return "";
  if (std::ranges::any_of(history, &KnownToken::has_lost_inputs)) return "";
  if (std::ranges::any_of(history, [&](const KnownToken& token) {
        return skipped_tokens_.contains(token.number);
      })) {
    return "";
  }
  if (Status s = fresh_->Clear(); !s.ok()) return "fresh Clear: " + s.ToString();
  if (Status s = fresh_->AddSequence(0); !s.ok()) return "fresh AddSequence: " + s.ToString();
  if (HasLongSet(setting_.options.rope.scaling) && setting_.options.rope.mode != RopeMode::kNone) {
    const Status s = fresh_->SelectLongRope(0, long_factors_.at(id));
    if (!s.ok()) return "fresh SelectLongRope: " + s.ToString();
  }
  fresh_window_ = windows_before_.at(id);
  std::vector<LayerOutputs> outputs;
  const std::string error = RunFresh(history, history.size() - static_cast<size_t>(rows), &outputs);
  if (!error.empty() || outputs.empty()) return error;
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (!std::ranges::equal(outputs_[l].o.rows(first_row, rows), outputs[l].o.bytes())) {
      return "o of layer " + std::to_string(l) + " of sequence " + std::to_string(id) +
             " is not that of the same tokens alone";
    }
    const bool both = outputs_[l].lse.count() > 0 && outputs[l].lse.count() > 0;
    if (both &&
        !std::ranges::equal(outputs_[l].lse.rows(first_row, rows), outputs[l].lse.bytes())) {
      return "lse of layer " + std::to_string(l) + " of sequence " + std::to_string(id) +
             " is not that of the same tokens alone";
    }
  }
  return "";
}

// Brings the fresh cache's sequence, of the first *done tokens, into having this window.
std::string Walker::MakeFreshWindow(const WindowSettings& window, size_t* done,
                                    const std::vector<uint64_t>& numbers) {
  ForwardStyle style = setting_.style;
  const auto append = [&](size_t end) -> Status {
    if (end <= *done) return Status();
    const auto first = numbers.begin() + static_cast<ptrdiff_t>(*done);
    const auto last = numbers.begin() + static_cast<ptrdiff_t>(end);
    *done = end;
    return RunForward(*fresh_, layers_, std::vector<int64_t>{0}, {{first, last}}, style).status();
  };
  const auto lose = [&]() -> Status {
    // A window of one token beside the sinks loses all that is to be lost.
    const size_t end = static_cast<size_t>(window.sinks + window.lost);
    QUIRE_RETURN_IF_ERROR(append(end - 1));
    QUIRE_RETURN_IF_ERROR(fresh_->EnableSlidingWindowForSeq(0, window.sinks + 1, window.sinks));
    QUIRE_RETURN_IF_ERROR(append(end));
    return fresh_->DisableSlidingWindowForSeq(0);
  };
  Status status = window.lost > 0 ? lose() : Status();
  if (status.ok() && window.window > 0)
    status = fresh_->EnableSlidingWindowForSeq(0, window.window, window.sinks);
  return status.ok() ? "" : "fresh window: " + status.ToString();
}

// Leaves `outputs` empty where tokens that were set cannot be set again, as they have slid away.
std::string Walker::RunFresh(const History& history, size_t old_length,
                             std::vector<LayerOutputs>* outputs) {
  const std::vector<int64_t> ids = {0};
  std::vector<uint64_t> numbers;
  for (const KnownToken& token : history) numbers.push_back(token.number);
  ForwardStyle style = setting_.style;
  style.calls = CallStyle::kHalves;
  size_t done = 0;
  const std::string error = MakeFreshWindow(fresh_window_, &done, numbers);
  if (!error.empty()) return error;
  if (old_length > done) {
    const auto prefill = RunForward(*fresh_, layers_, ids,
                                    {{numbers.begin() + static_cast<ptrdiff_t>(done),
                                      numbers.begin() + static_cast<ptrdiff_t>(old_length)}},
                                    style);
    if (!prefill.ok()) return "fresh prefill: " + prefill.status().ToString();
  }
  for (size_t p = 0; p < old_length; ++p) {
    const auto position = static_cast<int64_t>(p);
    Status s;
    if (const auto& set = history[p].set; set != nullptr)
      s = fresh_->DebugSetKV(0, position, set->first.view(), set->second.view());
    if (const auto& set = history[p].latent_set; s.ok() && set != nullptr)
      s = fresh_->DebugSetKVMLA(0, position, set->view());
    if (s.code() == StatusCode::kBadArgument && setting_.has_windows) return "";
    if (!s.ok()) return "fresh DebugSetKV: " + s.ToString();
  }
  auto result =
      RunForward(*fresh_, layers_, ids,
                 {{numbers.begin() + static_cast<ptrdiff_t>(old_length), numbers.end()}}, style);
  if (!result.ok()) return "fresh forward: " + result.status().ToString();
  *outputs = *std::move(result);
  return "";
}

std::string Walker::Abort() {
  const Room before = RoomNow();
  QUIRE_WALK_CALL("AbortForward", status, [&](AttentionKVCache& c) { return c.AbortForward(); });
  if (!status.ok()) return "";
  const Room now = RoomNow();
  std::string error =
      Differ("tokens behind AbortForward", now.tokens, before.tokens - tokens_taken_);
  // What windows hide goes, too.
  if (error.empty() && (!setting_.has_windows || now.in_use > before.in_use - pages_taken_))
    error = Differ("pages behind AbortForward", now.in_use, before.in_use - pages_taken_);
  if (!error.empty()) return error;
  pages_taken_ = tokens_taken_ = 0;
  open_ = false;
  for (auto& [id, history] : before_) history_.at(id) = std::move(history);
  before_.clear();
  for (const int64_t id : batch_.ids) {
    past_features_[id] |= Feature::kAborted;
    if (!tree_forward_) continue;
    trees_.erase(id);
    if (trees_before_.count(id) != 0) trees_[id] = trees_before_.at(id);
  }
  return "";
}

// Begin if none is open, the layers that are missing, End. Now and then the caller changes its
// mind.
std::string Walker::Forward(const WalkOp& op) {
  if (!open_) {
    std::string error = Begin(op);
    if (error.empty() && open_) error = CompareCounters();
    if (!error.empty() || !open_) return error;
  }
  return RunRest(op);
}

// Now and then the caller changes its mind.
std::string Walker::RunRest(const WalkOp& op) {
  if (op.c % 8 == 5) return Abort();
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (attended_[l]) continue;
    if (setting_.options.allow_skipped_layers && (op.b / 8 + l) % 5 == 0) continue;
    std::string error = Layer(l, appended_[l] ? op.b : op.b / 4 * 4 + 2 + op.b % 2);
    const uint32_t draw = op.b / 16 + static_cast<uint32_t>(l);
    if (error.empty() && open_ && appended_[l] && draw % 6 == 0)
      error = Shared({Kind::kShared, static_cast<uint32_t>(l), op.b / 32, op.c});
    if (!error.empty()) return error;
  }
  return End(op.c);
}

std::string Walker::DebugGet(const WalkOp& op) {
  const int64_t id = PickId(op.a);
  int64_t length = model_.GetSequenceLength(id).ok() ? *model_.GetSequenceLength(id) : 0;
  // Tokens of an open forward have bytes only when their layers were run.
  const bool unwritten = open_ && before_.count(id) != 0 &&
                         std::find(appended_.begin(), appended_.end(), 0) != appended_.end();
  if (unwritten) length = static_cast<int64_t>(before_.at(id).size());
  const int64_t start = static_cast<int64_t>(op.b / 8) % (length + 1);
  int64_t end = start + 1 + static_cast<int64_t>(op.c % 9);
  if (unwritten || op.b % 8 != 0) end = std::min(end, length);
  const bool latent = DebugsLatents(op.c);
  const AttentionLayerSpec& spec = FirstOf(latent);
  const int64_t count = std::max<int64_t>(end - start, 0);
  const DType dtype = op.c % 3 == 0 ? setting_.style.input_dtype : DType::kF32;
  const int64_t layer_count = CountOf(latent);
  if (latent) return DebugGetLatents(id, start, count, dtype);
  std::array<TestTensor, 2> k, v;
  for (size_t i = 0; i < 2; ++i) {
    k[i] = TestTensor(dtype, {layer_count, count, spec.num_kv_heads, spec.qk_head_dim});
    v[i] = TestTensor(dtype, {layer_count, count, spec.num_kv_heads, spec.v_head_dim});
  }
  QUIRE_WALK_CALL("DebugGetKV", status, [&](AttentionKVCache& c) {
    const size_t i = SideOf(c);
    return c.DebugGetKV(id, start, end, k[i].view(), v[i].view());
  });
  if (!status.ok()) return "";
  for (int64_t i = 0; i < k[0].count(); ++i) {
    const int64_t layer = LayerOfKind(i / (k[0].count() / layer_count), false);
    const double expected = k[1].Get(i);
    if (IsWithin(k[0].Get(i), expected, model_.StoredKeyBound(layer, expected))) continue;
    return "key element " + std::to_string(i) + " from " + std::to_string(start) + " of sequence " +
           std::to_string(id) + ": cache " + std::to_string(k[0].Get(i)) + ", model " +
           std::to_string(expected);
  }
  if (!std::ranges::equal(v[0].bytes(), v[1].bytes())) {
    return "values of sequence " + std::to_string(id) + " from " + std::to_string(start) +
           " differ";
  }
  return "";
}

// What latent layers store is what they were given, so it is equal bit for bit.
std::string Walker::DebugGetLatents(int64_t id, int64_t start, int64_t count, DType dtype) {
  std::array<TestTensor, 2> kv;
  for (TestTensor& side : kv)
    side = TestTensor(dtype, {CountOf(true), count, FirstOf(true).qk_head_dim});
  QUIRE_WALK_CALL("DebugGetKVMLA", status, [&](AttentionKVCache& c) {
    return c.DebugGetKVMLA(id, start, start + count, kv[SideOf(c)].view());
  });
  if (!status.ok() || std::ranges::equal(kv[0].bytes(), kv[1].bytes())) return "";
  return "latents of sequence " + std::to_string(id) + " from " + std::to_string(start) + " differ";
}

std::string Walker::DebugSetLatents(int64_t id, int64_t start, int64_t count) {
  const AttentionLayerSpec& spec = FirstOf(true);
  const int64_t layer_count = CountOf(true);
  const int64_t dim = spec.qk_head_dim;
  TestTensor kv(DType::kF32, {layer_count, count, dim});
  std::vector<TestTensor> tokens;
  for (int64_t t = 0; t < count; ++t) {
    tokens.emplace_back(DType::kF32, std::vector<int64_t>{layer_count, 1, dim});
    const std::vector<uint64_t> number = {next_token_++};
    for (int64_t l = 0; l < layer_count; ++l) {
      const TokenInputs inputs = MakeTokenInputs(spec, l, DType::kF32, number);
      for (int64_t i = 0; i < dim; ++i) {
        kv.Set((l * count + t) * dim + i, inputs.k.Get(i));
        tokens.back().Set(l * dim + i, inputs.k.Get(i));
      }
    }
  }
  QUIRE_WALK_TAKE("DebugSetKVMLA", status, model_.TakenByDebugSet(id, start),
                  [&](AttentionKVCache& c) { return c.DebugSetKVMLA(id, start, kv.view()); });
  if (status.ok()) past_features_[id] |= Feature::kDebugSet;
  for (int64_t t = 0; status.ok() && t < count; ++t) {
    history_.at(id)[static_cast<size_t>(start + t)].latent_set =
        std::make_shared<const TestTensor>(tokens[static_cast<size_t>(t)]);
  }
  return "";
}

int64_t Walker::LayerOfKind(int64_t i, bool latent) const {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].latent == latent && i-- == 0) return static_cast<int64_t>(l);
  }
  return 0;
}

bool Walker::DebugsLatents(uint32_t draw) const {
  if (CountOf(true) == 0) return draw % 256 == 77;  // which is refused
  return CountOf(false) == 0 ? draw % 256 != 77 : draw / 32 % 2 == 0;
}

std::string Walker::DebugSet(const WalkOp& op) {
  const int64_t id = PickId(op.a);
  const int64_t length = model_.GetSequenceLength(id).ok() ? *model_.GetSequenceLength(id) : 0;
  const int64_t start = static_cast<int64_t>(op.b / 8) % (length + 1);
  int64_t count = 1 + static_cast<int64_t>(op.c % 5);
  if (op.b % 8 != 0) count = std::max<int64_t>(std::min(count, length - start), 1);
  const bool latent = DebugsLatents(op.c);
  if (latent) return DebugSetLatents(id, start, count);
  const AttentionLayerSpec& spec = FirstOf(latent);
  const int64_t layer_count = std::max<int64_t>(CountOf(latent), 1);
  TestTensor k(DType::kF32, {layer_count, count, spec.num_kv_heads, spec.qk_head_dim});
  TestTensor v(DType::kF32, {layer_count, count, spec.num_kv_heads, spec.v_head_dim});
  std::vector<std::pair<TestTensor, TestTensor>> tokens;
  for (int64_t t = 0; t < count; ++t) {
    TestTensor token_k(DType::kF32, {layer_count, 1, spec.num_kv_heads, spec.qk_head_dim});
    TestTensor token_v(DType::kF32, {layer_count, 1, spec.num_kv_heads, spec.v_head_dim});
    const std::vector<uint64_t> number = {next_token_++};
    for (int64_t l = 0; l < layer_count; ++l) {
      const TokenInputs inputs = MakeTokenInputs(spec, l, DType::kF32, number);
      for (int64_t i = 0; i < inputs.k.count(); ++i) {
        k.Set((l * count + t) * inputs.k.count() + i, inputs.k.Get(i));
        token_k.Set(l * inputs.k.count() + i, inputs.k.Get(i));
      }
      for (int64_t i = 0; i < inputs.v.count(); ++i) {
        v.Set((l * count + t) * inputs.v.count() + i, inputs.v.Get(i));
        token_v.Set(l * inputs.v.count() + i, inputs.v.Get(i));
      }
    }
    tokens.emplace_back(token_k, token_v);
  }
  QUIRE_WALK_TAKE("DebugSetKV", status, model_.TakenByDebugSet(id, start),
                  [&](AttentionKVCache& c) { return c.DebugSetKV(id, start, k.view(), v.view()); });
  if (status.ok()) past_features_[id] |= Feature::kDebugSet;
  for (int64_t t = 0; status.ok() && t < count; ++t) {
    history_.at(id)[static_cast<size_t>(start + t)].set =
        std::make_shared<const std::pair<TestTensor, TestTensor>>(tokens[static_cast<size_t>(t)]);
  }
  return "";
}

std::string Walker::Clear() {
  QUIRE_WALK_CALL("Clear", status, [&](AttentionKVCache& c) { return c.Clear(); });
  open_ = false;
  pages_taken_ = tokens_taken_ = 0;
  history_.clear();
  trees_.clear();
  retained_.clear();
  before_.clear();
  outgoing_.clear();
  halves_.clear();
  return status.ok() ? "" : "Clear: " + status.ToString();
}

std::string Walker::SelectLongRope(const WalkOp& op) {
  if (!HasLongSet(setting_.options.rope.scaling)) return "";
  const int64_t id = PickId(op.a);
  const bool use = op.b % 2 == 0;
  QUIRE_WALK_CALL("SelectLongRope", status,
                  [&](AttentionKVCache& c) { return c.SelectLongRope(id, use); });
  if (status.ok()) long_factors_[id] = use;
  return "";
}

std::string Walker::BadTensor(const WalkOp& op) {
  const AttentionLayerSpec& spec = layers_[0];
  const int64_t n = open_ ? static_cast<int64_t>(rows_.size()) : 1;
  TestTensor q(DType::kF32, {n, spec.num_qo_heads, spec.qk_head_dim});
  TestTensor k(DType::kF32, {n, spec.num_kv_heads, spec.qk_head_dim});
  TestTensor v(DType::kF32, {n, spec.num_kv_heads, spec.v_head_dim});
  TestTensor o(DType::kF32, {n, spec.num_qo_heads, spec.v_head_dim});
  int64_t layer = 0;
  const bool attend = op.b % 2 == 0;
  switch (op.a % 4) {
    case 0:
      layer = op.c % 2 == 0 ? -1 : static_cast<int64_t>(layers_.size());
      break;
    case 1:
      q = k = TestTensor(DType::kF32, {n, spec.num_qo_heads + 1, spec.qk_head_dim});
      break;
    case 2:
      o = v = TestTensor(DType::kF32, {n - 1, spec.num_kv_heads, spec.v_head_dim});
      break;
    default:
      q = v = TestTensor(DType::kI32, {n, spec.num_kv_heads, spec.v_head_dim});
  }
  QUIRE_WALK_CALL("attention with a bad argument", status, [&](AttentionKVCache& c) {
    return attend ? c.Attend(layer, q.view(), o.view(), nullptr, 1.0)
                  : c.Append(layer, k.view(), v.view());
  });
  call_failed_ = true;
  return status.ok() ? "a bad tensor was accepted" : "";
}

std::string Walker::Retain(const WalkOp& op) {
  const int64_t id = PickId(op.a);
  const bool retained = op.b % 8 == 0 ? op.b % 16 == 0 : retained_.count(id) == 0;
  QUIRE_WALK_CALL("SetRetained", status,
                  [&](AttentionKVCache& c) { return c.SetRetained(id, retained); });
  if (!status.ok()) return "";
  retained_.erase(id);
  if (retained) retained_.insert(id);
  return "";
}

// Steps of the last forward's batch, or of a new one, one token each.
std::string Walker::Decode(const WalkOp& op) {
  if (open_) return RunRest(op);
  Batch batch = op.a % 4 == 0 || batch_.ids.empty() ? DrawBatch(op.a) : batch_;
  batch.lengths.assign(batch.ids.size(), 1);
  std::string error;
  for (uint32_t step = 0; step <= op.b % 8 && error.empty(); ++step) {
    error = BeginBatch(batch, op);
    if (!open_) return error;
    if (error.empty()) error = CompareCounters();
    if (error.empty()) error = RunRest({op.kind, op.a, op.b + step, op.c / 8 + step});
    if (open_) return error;
  }
  return error;
}

// Tokens of a sequence out of the cache and out of the model: [0] and [1], per layer.
std::string Walker::ExportPart(int64_t id, int64_t start, int64_t count,
                               std::array<std::vector<StoredRows>, 2>* parts) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    for (std::vector<StoredRows>& side : *parts) side.emplace_back(layers_[l], count);
    QUIRE_WALK_CALL("ExportKV", status, [&](AttentionKVCache& c) {
      return c.ExportKV(id, static_cast<int64_t>(l), start, (*parts)[SideOf(c)][l].view());
    });
    if (!status.ok()) {
      for (std::vector<StoredRows>& side : *parts) side.clear();
      return "";
    }
    const StoredRows& ours = (*parts)[0][l];
    const StoredRows& models = (*parts)[1][l];
    for (int64_t i = 0; i < ours.k.count(); ++i) {
      const double expected = static_cast<double>(models.Key(i));
      const double bound = model_.StoredKeyBound(static_cast<int64_t>(l), expected);
      if (!IsWithin(static_cast<double>(ours.Key(i)), expected, bound))
        return "an exported key differs";
    }
    if (!std::ranges::equal(ours.v.bytes(), models.v.bytes()) ||
        !std::ranges::equal(ours.v_scale.bytes(), models.v_scale.bytes()))
      return "exported values differ";
  }
  past_features_[id] |= Feature::kExported;
  return "";
}

// A sequence gets tokens that another one has at the same positions. Keys and values of a walk's
// token depend on its number and position alone, so this is as if it had computed them.
std::string Walker::Import(const WalkOp& op) {
  const int64_t from = PickId(op.a);
  const int64_t to = PickId(op.b);
  const bool known = history_.count(from) != 0 && history_.count(to) != 0;
  const int64_t start = known ? static_cast<int64_t>(history_.at(to).size()) : 0;
  const int64_t available = known ? static_cast<int64_t>(history_.at(from).size()) - start : 1;
  const bool other_angles = known && long_factors_.at(from) != long_factors_.at(to);
  if (available < 1 || other_angles) return "";
  const bool unwritten = open_ && before_.count(from) != 0;
  if (unwritten) return "";
  const int64_t count = 1 + static_cast<int64_t>(op.c) % std::min<int64_t>(available, 40);
  std::array<std::vector<StoredRows>, 2> parts;
  const std::string error = ExportPart(from, start, count, &parts);
  if (!error.empty() || parts[0].empty()) return error;
  QUIRE_WALK_TAKE("ImportKV", status, model_.TakenByImport(to, count), [&](AttentionKVCache& c) {
    KVBlock block;
    for (const StoredRows& rows : parts[SideOf(c)]) block.push_back(rows.view());
    return c.ImportKV(to, std::span(&block, 1));
  });
  if (!status.ok()) return "";
  past_features_[to] |= Feature::kImported;
  const History& source = history_.at(from);
  const auto first = source.begin() + static_cast<ptrdiff_t>(start);
  const History part(first, first + static_cast<ptrdiff_t>(count));
  History& target = history_.at(to);
  target.insert(target.end(), part.begin(), part.end());
  return "";
}

// Tokens for a member, as Import takes them.
std::string Walker::DrawLoad(const Batch& batch, size_t member, const WalkOp& op,
                             std::vector<WalkLoad>* loads) {
  RandomSequence random(op.b, member);
  const int64_t from = PickId(static_cast<uint32_t>(random.Bits()));
  return random.Below(3) == 0 ? "" : MakeLoad(from, batch, member, random, loads);
}

// Now and then a layer of the tokens never arrives.
std::string Walker::MakeLoad(int64_t from, const Batch& batch, size_t member,
                             RandomSequence& random, std::vector<WalkLoad>* loads) {
  const int64_t to = batch.ids[member];
  if (history_.count(from) == 0 || history_.count(to) == 0) return "";
  const bool unwritten = open_ && before_.count(from) != 0;
  if (unwritten) return "";
  const History& source = history_.at(from);
  const int64_t start = static_cast<int64_t>(history_.at(to).size());
  const int64_t available = static_cast<int64_t>(source.size()) - start;
  if (available < 1 || long_factors_.at(from) != long_factors_.at(to)) return "";
  const int64_t count = 1 + random.Below(std::min<int64_t>(available, 60));
  WalkLoad load;
  load.member = member;
  const auto first = source.begin() + static_cast<ptrdiff_t>(start);
  load.tokens.assign(first, first + static_cast<ptrdiff_t>(count));
  const std::string error = ExportPart(from, start, count, &load.parts);
  if (!error.empty() || load.parts[0].empty()) return error;
  const int64_t fails_at = random.Below(8 * static_cast<int64_t>(layers_.size()));
  for (size_t side = 0; side < 2; ++side) {
    KVBlock block;
    for (const StoredRows& rows : load.parts[side]) block.push_back(rows.view());
    load.sources[side] = std::make_unique<BlockSource>(std::span(&block, 1));
    load.sources[side]->arrive = [fails_at](int64_t layer) {
      return layer == fails_at ? Status(StatusCode::kCorrupt, "the walk's layer") : Status();
    };
  }
  loads->push_back(std::move(load));
  return "";
}

std::string Walker::Loading(const WalkOp& op) {
  if (open_ && op.c % 2 != 0) return RunRest(op);
  const Batch batch = DrawBatch(op.a);
  std::vector<WalkLoad> loads;
  for (size_t member = 0; member < batch.lengths.size() && member < batch.ids.size(); ++member) {
    const std::string error = DrawLoad(batch, member, op, &loads);
    if (!error.empty()) return error;
  }
  std::string error = BeginBatch(batch, op, std::move(loads));
  if (error.empty() && open_) error = CompareCounters();
  return error.empty() && open_ ? RunRest(op) : error;
}

// A child, whose parent goes on and gives it what it has more.
std::string Walker::LoadingBehindFork(const WalkOp& op) {
  RandomSequence random(op.a);
  return LoadFromFork(PickId(static_cast<uint32_t>(random.Bits())), false, random, op);
}

// A fork: one of the two goes on and gives the other one what it has more.
std::string Walker::LoadFromFork(int64_t parent, bool parent_loads, RandomSequence& random,
                                 const WalkOp& op) {
  if (history_.count(parent) == 0 || retained_.count(parent) != 0) return "";
  int64_t child = 0;
  while (child < setting_.id_count && history_.count(child) != 0) ++child;
  bool forked = false;
  std::string error = ForkTo(parent, child, -1, &forked);
  if (!forked) return error;
  // TVM's windows are not inherited.
  const WindowSettings windows = model_.GetWindows(parent).value();
  if (windows.span > 0) {
    QUIRE_WALK_CALL("EnableSlidingWindowForSeq", status, [&](AttentionKVCache& c) {
      return c.EnableSlidingWindowForSeq(child, windows.span, windows.span_sinks);
    });
  }
  const int64_t from = parent_loads ? child : parent;
  const int64_t to = parent_loads ? parent : child;
  error = BeginBatch(
      {{from}, {1 + random.Below(std::min<int64_t>(6, setting_.options.prefill_chunk_size))}}, op);
  if (error.empty() && open_) error = RunRest({op.kind, op.b, op.a, 8 * op.c});
  if (!error.empty() || open_ || history_.count(to) == 0) return error;
  Batch batch = {{to}, {1 + random.Below(3)}};
  if (history_.count(from) != 0 && random.Below(2) == 0) {
    batch.ids.push_back(from);
    batch.lengths.push_back(1);
  }
  std::vector<WalkLoad> loads;
  error = MakeLoad(from, batch, 0, random, &loads);
  if (error.empty() && !loads.empty()) error = BeginBatch(batch, op, std::move(loads));
  if (error.empty() && open_) error = CompareCounters();
  if (error.empty() && open_) error = RunRest(op);
  // It makes room for the next one, mostly.
  return error.empty() && random.Below(4) != 0 ? RemoveId(child) : error;
}

// The tokens from a root to the node.
Walker::History Walker::PathTo(int64_t id, int64_t node) const {
  const WalkTree& tree = trees_.at(id);
  History path;
  for (; node >= 0; node = tree.parents[static_cast<size_t>(node)])
    path.push_back({tree.tokens[static_cast<size_t>(node)], nullptr});
  std::reverse(path.begin(), path.end());
  return path;
}

// Mostly good ones: chains, binary trees, stars and whatever comes.
std::vector<int64_t> Walker::DrawParents(const Batch& batch, RandomSequence& random) const {
  std::vector<int64_t> parents;
  for (size_t i = 0; i < batch.ids.size() && i < batch.lengths.size(); ++i) {
    const auto tree = trees_.find(batch.ids[i]);
    const int64_t first = tree == trees_.end() ? 0 : std::ssize(tree->second.tokens);
    const int64_t shape = random.Below(4);
    for (int64_t n = first; n < first + std::min<int64_t>(batch.lengths[i], 200); ++n) {
      parents.push_back(shape == 0   ? n - 1
                        : shape == 1 ? (n == 0 ? -1 : (n - 1) / 2)
                        : shape == 2 ? random.Below(n + 1) - 1
                                     : std::max<int64_t>(n - 1 - random.Below(4), -1));
    }
  }
  if (parents.empty() || random.Below(16) != 0) return parents;
  int64_t& victim = parents[static_cast<size_t>(random.Below(std::ssize(parents)))];
  if (random.Below(3) == 0) victim = -2;
  if (random.Below(3) == 0) victim = 1000;
  if (random.Below(3) == 0) parents.pop_back();
  return parents;
}

std::string Walker::Tree(const WalkOp& op) {
  if (open_ && op.c % 2 != 0) return RunRest(op);
  RandomSequence random(op.b);
  Batch batch = DrawBatch(op.a, true);
  if (!trees_.empty() && random.Below(2) == 0) {  // a later round
    batch = {};
    for (const auto& [id, tree] : trees_) {
      if (batch.ids.size() == 3 || random.Below(3) == 0) continue;
      batch.ids.push_back(id);
      batch.lengths.push_back(1 + random.Below(2));
    }
  }
  return TreeOf(batch, random, op);
}

std::string Walker::TreeOf(const Batch& batch, RandomSequence& random, const WalkOp& op) {
  const std::vector<int64_t> parents = DrawParents(batch, random);
  const std::span<const int64_t> nodes = parents;
  KVModel::Taken taken;
  std::string error = SameNeeds(
      "PagesNeededForTree",
      [&](const AttentionKVCache& c) {
        return c.PagesNeededForTree(batch.ids, batch.lengths, nodes);
      },
      [&] { return model_.TakenByForward(batch.ids, batch.lengths, &nodes); }, &taken);
  if (!error.empty()) return error;
  const Room before = RoomNow();
  QUIRE_WALK_TAKE("BeginTreeForward", status, taken, [&](AttentionKVCache& c) {
    return c.BeginTreeForward(batch.ids, batch.lengths, parents);
  });
  if (status.code() == StatusCode::kOutOfPages && setting_.evicts) return Remove(op);
  if (!status.ok()) return "";
  const Status plan = cache_->CheckInvariants();
  if (!plan.ok()) return "after BeginTreeForward: " + plan.ToString();
  Opened(batch, before);
  tree_forward_ = true;
  loads_.clear();
  trees_before_ = trees_;
  size_t next = 0;
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    before_[batch.ids[i]] = history_.at(batch.ids[i]);
    windows_before_[batch.ids[i]] = *model_.GetWindows(batch.ids[i]);
    WalkTree& tree = trees_[batch.ids[i]];
    later_rounds_ += !tree.tokens.empty();
    FeatureSet features = FeaturesOfMember(batch.ids[i]) | Feature::kTree;
    member_features_.push_back(features.AddIf(!tree.tokens.empty(), Feature::kLaterRound));
    for (int64_t n = 0; n < batch.lengths[i]; ++n) {
      tree.parents.push_back(parents[next++]);
      rows_.push_back(NewToken(batch.ids[i]));
      tree.tokens.push_back(rows_.back());
    }
  }
  error = CompareCounters();
  return error.empty() ? RunRest(op) : error;
}

// Some of the sequences with trees, in any order; now and then one that has none.
std::string Walker::CommitTrees(const WalkOp& op) {
  RandomSequence random(op.a);
  std::vector<int64_t> ids, leaves;
  for (const auto& [id, tree] : trees_) {
    if (random.Below(3) == 0) continue;
    ids.push_back(id);
    leaves.push_back(random.Below(std::ssize(tree.tokens) + 1) - 1);
  }
  for (size_t i = ids.size(); i > 1; --i) {
    const size_t other = static_cast<size_t>(random.Below(static_cast<int64_t>(i)));
    std::swap(ids[i - 1], ids[other]);
    std::swap(leaves[i - 1], leaves[other]);
  }
  const int64_t wrong = random.Below(20);
  if (wrong == 0 && !ids.empty()) leaves[0] = random.Below(2) == 0 ? -2 : 1000;
  if (wrong == 1 && !ids.empty()) ids.push_back(ids[0]);
  if (wrong == 2) leaves.push_back(0);
  if (wrong == 3) ids.push_back(PickId(op.b));
  leaves.resize(wrong == 2 ? leaves.size() : ids.size(), -1);
  QUIRE_WALK_CALL("CommitAcceptedTokenTreeNodes", status,
                  [&](AttentionKVCache& c) { return c.CommitAcceptedTokenTreeNodes(ids, leaves); });
  for (size_t i = 0; status.ok() && i < ids.size(); ++i) {
    past_features_[ids[i]].AddIf(leaves[i] >= 0, Feature::kCommitted);
    const History path = PathTo(ids[i], leaves[i]);
    History& history = history_.at(ids[i]);
    history.insert(history.end(), path.begin(), path.end());
    trees_.erase(ids[i]);
  }
  return "";
}

std::string Walker::Window(const WalkOp& op) {
  if (!setting_.has_windows) return "";
  const int64_t id = PickId(op.a);
  if (op.b % 3 == 0) {
    QUIRE_WALK_CALL("DisableSlidingWindowForSeq", status,
                    [&](AttentionKVCache& c) { return c.DisableSlidingWindowForSeq(id); });
    return "";
  }
  // Mostly sinks that a window which was switched off leaves room for; now and then none at all.
  constexpr std::array<int64_t, 5> kSinks = {0, 1, 3, 16, 20};
  int64_t sinks = kSinks[op.c % kSinks.size()];
  if (history_.count(id) != 0 && model_.GetWindows(id)->lost > 0 && op.c / 8 % 4 != 0)
    sinks = model_.GetWindows(id)->sinks;
  const int64_t window = sinks + static_cast<int64_t>(op.c / 64 % 40) - (op.c / 64 % 40 == 1);
  QUIRE_WALK_CALL("EnableSlidingWindowForSeq", status, [&](AttentionKVCache& c) {
    return c.EnableSlidingWindowForSeq(id, window, sinks);
  });
  return "";
}

// A layer that has no keys and values of its own, before or after its source.
std::string Walker::Shared(const WalkOp& op) {
  const size_t layer = op.a % layers_.size();
  const AttentionLayerSpec& spec = layers_[layer];
  // What is never legal ends the forward, so it is seldom tried.
  if (open_ && !appended_[layer] && op.b % 16 != 0) return "";
  const std::vector<uint64_t> rows = open_ ? RowsWithPadding(op.b) : std::vector<uint64_t>{1};
  const int64_t n = static_cast<int64_t>(rows.size());
  const TokenInputs inputs = MakeTokenInputs(spec, 77, setting_.style.input_dtype, rows);
  const TestTensor mask = DrawMask(op.c);
  const TensorView* const masked = open_ && op.b / 16 % 2 == 0 ? &mask.view() : nullptr;
  const auto outputs = TwoOutputs(spec, n);
  QUIRE_WALK_CALL("AttentionWithSharedKV", status, [&](AttentionKVCache& c) {
    const LayerOutputs& o = outputs[SideOf(c)];
    return c.AttentionWithSharedKV(static_cast<int64_t>(layer), inputs.q.view(), o.o.view(),
                                   &o.lse.view(), ScoreScale(spec), masked);
  });
  call_failed_ |= open_ && !status.ok();
  if (!status.ok()) return "";
  FeatureSet call = Feature::kSharedKV;
  return Compared(layer, outputs[0], outputs[1], call.AddIf(masked != nullptr, Feature::kMask));
}

std::string Walker::Finish() {
  std::string error = open_ ? Abort() : "";
  while (error.empty() && !history_.empty()) {
    error = Step({Kind::kRemove, 16 * static_cast<uint32_t>(history_.size() / 2) + 1, 0, 0});
  }
  if (!error.empty()) return "at the end: " + error;
  return cache_->Empty() ? "" : "at the end: not empty";
}

namespace {

struct Failure {
  std::string text;
  size_t op = 0;
};

Failure RunWalk(const Walk& walk, FeaturePairs* pairs = nullptr) {
  Walkers walkers(walk.seed);
  for (size_t i = 0; i < walk.ops.size(); ++i) {
    const std::string error = walkers.Step(walk.ops[i]);
    if (!error.empty()) return {error, i};
  }
  for (const auto& walker : walkers.all()) {
    if (pairs != nullptr) pairs->Add(walker->pairs());
  }
  return {walkers.Finish(), walk.ops.size()};
}

// ---------------------------------------------------------------------- a failing walk

// Leaves out what the failure does not need: ever smaller parts, as long as it fails (in whatever
// way).
Walk Shorten(Walk walk, size_t failed_at) {
  constexpr int kMostRuns = 2000;
  int runs = 0;
  walk.ops.resize(std::min(walk.ops.size(), failed_at + 1));
  for (size_t part = std::max<size_t>(walk.ops.size() / 2, 1);;) {
    bool shorter = false;
    for (size_t at = 0; at < walk.ops.size() && runs < kMostRuns;) {
      Walk tried = walk;
      const size_t end = std::min(at + part, tried.ops.size());
      tried.ops.erase(tried.ops.begin() + static_cast<ptrdiff_t>(at),
                      tried.ops.begin() + static_cast<ptrdiff_t>(end));
      ++runs;
      const Failure failure = RunWalk(tried);
      if (failure.text.empty()) {
        at += part;
        continue;
      }
      tried.ops.resize(std::min(tried.ops.size(), failure.op + 1));
      walk = std::move(tried);
      shorter = true;
    }
    if (runs >= kMostRuns || (part == 1 && !shorter)) return walk;
    part = std::max<size_t>(part / 2, 1);
  }
}

std::string Describe(const Walk& walk) {
  const WalkSetting setting = MakeSetting(walk.seed);
  std::ostringstream text;
  text << "seed " << walk.seed << ", page size " << setting.options.page_size << ", kernels "
       << setting.options.kernel_path << ", rope mode "
       << static_cast<int>(setting.options.rope.mode) << ", layers";
  for (const AttentionLayerSpec& layer : setting.options.layers) {
    text << " {" << layer.num_qo_heads << ", " << layer.num_kv_heads << ", " << layer.qk_head_dim
         << ", " << layer.v_head_dim << ", " << DTypeName(layer.dtype) << " "
         << DTypeName(layer.value_dtype()) << (layer.latent ? " latent}" : "}");
  }
  text << "\n{" << walk.seed << "u,\n {";
  for (const WalkOp& op : walk.ops) {
    text << "{Kind::" << kKindNames[static_cast<size_t>(op.kind)] << ", " << op.a << "u, " << op.b
         << "u, " << op.c << "u},\n  ";
  }
  text << "}},\n";
  return text.str();
}

void ExpectPasses(const Walk& walk, FeaturePairs* pairs = nullptr) {
  const Failure failure = RunWalk(walk, pairs);
  if (failure.text.empty()) return;
  const Walk shortened = Shorten(walk, failure.op);
  ADD_FAILURE() << "operation " << failure.op << " of seed " << walk.seed << ": " << failure.text
                << "\nshorter, " << shortened.ops.size()
                << " operations: " << RunWalk(shortened).text << "\n"
                << Describe(shortened);
}

// ---------------------------------------------------------------------- tests

// Together 300 000 operations, in pieces that ctest can run side by side; a third of them under the
// sanitizers, which take five times as long.
constexpr int kShards = 54;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kWalksPerShard = 3;
constexpr int kWideWalksPerShard = 1;
#else
constexpr int kWalksPerShard = 10;
constexpr int kWideWalksPerShard = 3;
#endif
constexpr int kOpsPerWalk = 750;
// Shards of the second setting, whose operations take a hundred times as long.
constexpr int kWideShards = 10;
constexpr int kOpsPerWideWalk = 300;

// Lists worth keeping.
std::vector<Walk> KeptWalks() {
  return {
      // A forward that gathers a range behind the first one is aborted: the block made for the cut
      // must go.
      {1u,
       {
           {Kind::kBegin, 596097369u, 2411807810u, 452325661u},
           {Kind::kAdd, 57950248u, 3569907473u, 3497918852u},
           {Kind::kFork, 2095377047u, 1971536948u, 979960231u},
           {Kind::kAdd, 3729905532u, 3762210052u, 1426329781u},
           {Kind::kAdd, 1632773149u, 127264049u, 1068735177u},
           {Kind::kAdd, 1896520966u, 4062198121u, 4136178181u},
           {Kind::kAdd, 2500564084u, 165702685u, 1366685608u},
           {Kind::kBegin, 2183242315u, 1513279023u, 3658992533u},
           {Kind::kForward, 2431383109u, 756888728u, 3534352287u},
           {Kind::kRemove, 1909446635u, 1861576977u, 1676914050u},
           {Kind::kFork, 2242432665u, 2167181979u, 3971742917u},
           {Kind::kForward, 2829693473u, 3404610074u, 4064741730u},
           {Kind::kForward, 4293965178u, 60823837u, 2863732065u},
           {Kind::kFork, 2553931767u, 3527003602u, 2471071627u},
           {Kind::kFork, 2743594042u, 2904780599u, 2176156767u},
       }},
      // A path that was cut where its window hid all before: of a page range a part is freed, and
      // the rest, which is seen, has to come along when the range is copied.
      {174u,
       {
           {Kind::kForward, 2649376686u, 3474455174u, 1787127706u},
           {Kind::kFork, 1136895849u, 101346054u, 1379197035u},
           {Kind::kForward, 2365844035u, 857542057u, 3158665318u},
           {Kind::kFork, 309979715u, 2443231601u, 3562892472u},
           {Kind::kLoading, 2339504965u, 642545329u, 1484546426u},
           {Kind::kWindow, 598961096u, 1698034408u, 250375977u},
           {Kind::kFork, 159225709u, 2433074861u, 4279846807u},
           {Kind::kFork, 1757282551u, 152144167u, 1205782061u},
           {Kind::kFork, 768468661u, 112053943u, 2793391905u},
           {Kind::kForward, 3558684502u, 1763205444u, 1379310596u},
           {Kind::kFork, 514425711u, 3349723692u, 342396408u},
           {Kind::kFork, 3883162606u, 853523999u, 471061198u},
           {Kind::kFork, 266649293u, 4275434429u, 3137946712u},
           {Kind::kRemove, 1367004653u, 2312639044u, 2327265476u},
           {Kind::kForward, 1815592649u, 4068236286u, 578567305u},
           {Kind::kImport, 4160999772u, 3438811437u, 1990801067u},
           {Kind::kRetain, 143839167u, 3343687474u, 667613036u},
           {Kind::kFork, 1561799250u, 2156047944u, 801436879u},
           {Kind::kFork, 2232498851u, 871836360u, 1928920624u},
           {Kind::kImport, 1663272326u, 860748278u, 1657620564u},
           {Kind::kRemove, 2732735297u, 3628808182u, 3020217226u},
           {Kind::kWindow, 310731489u, 2301792963u, 1681408734u},
           {Kind::kForward, 2833250513u, 2438510184u, 2152185489u},
           {Kind::kRetain, 405627093u, 777291152u, 2031765826u},
           {Kind::kLoading, 2233386553u, 2921467264u, 4053064562u},
           {Kind::kFork, 4004615947u, 1169596962u, 3473717545u},
           {Kind::kFork, 1201712650u, 4027462099u, 797482606u},
           {Kind::kFork, 1889466519u, 3093852473u, 767436979u},
           {Kind::kLoading, 2794105348u, 1300998044u, 3020625386u},
           {Kind::kLoading, 739528193u, 3607584300u, 3383920465u},
           {Kind::kRetain, 4183570849u, 3575859635u, 1897066273u},
           {Kind::kFork, 2684155358u, 830890968u, 3278294318u},
           {Kind::kLoading, 206447213u, 2459362529u, 1318520626u},
           {Kind::kRetain, 1329409976u, 338920822u, 3107095465u},
           {Kind::kFork, 3558051873u, 1924963050u, 2010551828u},
           {Kind::kForward, 1309821032u, 970240406u, 2518650747u},
           {Kind::kLoading, 2870841942u, 2151210305u, 4154201671u},
           {Kind::kFork, 4104991911u, 1230914276u, 1524560113u},
           {Kind::kLoading, 4101726347u, 3126423906u, 3899444332u},
           {Kind::kFork, 3026228554u, 1702284886u, 2449581657u},
           {Kind::kFork, 1748727930u, 1379790159u, 813852739u},
           {Kind::kLoading, 4278234203u, 3121997094u, 3619764728u},
           {Kind::kLoading, 1885606401u, 3934331059u, 446283008u},
           {Kind::kForward, 2412523314u, 1804215609u, 1574171407u},
           {Kind::kRetain, 1308135671u, 2876534244u, 3013667190u},
           {Kind::kFork, 3453190405u, 2350442516u, 3038963901u},
           {Kind::kLoading, 4045899172u, 1062370471u, 2091417119u},
           {Kind::kFork, 4212332377u, 1681957877u, 1323283411u},
           {Kind::kRetain, 3466939804u, 1335923890u, 3251146283u},
           {Kind::kFork, 1841455996u, 3416721918u, 1997061347u},
           {Kind::kLoading, 2153831019u, 1974228487u, 3937807489u},
           {Kind::kFork, 4228075223u, 2323474451u, 1342363869u},
           {Kind::kForward, 401093301u, 1904471176u, 1867489462u},
           {Kind::kFork, 1067390635u, 1788887275u, 3393248197u},
           {Kind::kFork, 2382884415u, 415795243u, 1697013776u},
           {Kind::kForward, 333144947u, 2812998163u, 1495612852u},
           {Kind::kForward, 1529082753u, 2895750383u, 3332581923u},
           {Kind::kForward, 3886358852u, 176455734u, 2361038276u},
           {Kind::kFork, 1655423314u, 1893633783u, 807217468u},
           {Kind::kRetain, 684452726u, 2427558u, 3864577853u},
           {Kind::kFork, 2785105627u, 2566793555u, 2027169168u},
           {Kind::kLoading, 3642998889u, 3338185890u, 36851728u},
           {Kind::kAdd, 461135390u, 778037895u, 1116295546u},
           {Kind::kForward, 294984926u, 488103023u, 760047587u},
           {Kind::kFork, 103413350u, 3174492891u, 3253840656u},
           {Kind::kForward, 2118885925u, 179598300u, 1900670951u},
           {Kind::kFork, 2763631888u, 1983203923u, 1023751159u},
           {Kind::kFork, 2290433189u, 448057001u, 2296095982u},
           {Kind::kForward, 509828199u, 563108366u, 2101894978u},
           {Kind::kForward, 4085058923u, 857631273u, 2783922295u},
           {Kind::kFork, 3633936797u, 805302385u, 754419485u},
           {Kind::kLoading, 3848163885u, 1777836018u, 133644964u},
           {Kind::kForward, 3667071490u, 2152217660u, 3431529591u},
           {Kind::kForward, 1643600275u, 3823655227u, 3051218022u},
           {Kind::kRemove, 3020652943u, 1567609060u, 61415332u},
           {Kind::kLoading, 2124949706u, 1632502205u, 2178639595u},
           {Kind::kRemove, 3358803917u, 2114783048u, 600327u},
           {Kind::kRetain, 859380299u, 3585907747u, 2176390u},
           {Kind::kFork, 2185644277u, 2842931656u, 1297703863u},
           {Kind::kRetain, 742004357u, 1206673599u, 1767558833u},
           {Kind::kForward, 3413569705u, 2886160753u, 2161293635u},
           {Kind::kFork, 1487305811u, 2554970950u, 4194481165u},
       }},
  };
}

TEST(KVWalkKept, CacheAndModelAgree) {
  for (const Walk& walk : KeptWalks()) ExpectPasses(walk);
}

class KVWalk : public testing::TestWithParam<int> {};

TEST_P(KVWalk, CacheAndModelAgree) {
  FeaturePairs pairs;
  for (int i = 0; i < kWalksPerShard && !HasFailure(); ++i) {
    const uint64_t seed = SoakSeed(1) + static_cast<uint64_t>(GetParam() * kWalksPerShard + i);
    ExpectPasses(MakeWalk(seed, kOpsPerWalk), &pairs);
  }
  ReportFigure("operations", kWalksPerShard * kOpsPerWalk);
  const char* const folder = std::getenv("QUIRE_WALK_PAIRS");
  if (folder == nullptr) return;
  std::filesystem::create_directories(folder);
  std::ofstream file(std::string(folder) + "/" + std::to_string(GetParam()));
  file << pairs.ToText();
  EXPECT_TRUE(file.good()) << "QUIRE_WALK_PAIRS is no folder that can be written to: " << folder;
}

class KVWideWalk : public testing::TestWithParam<int> {};

// QUIRE_WIDE_WALKS: walks of each shard (./test --all asks for more).
TEST_P(KVWideWalk, CacheAndModelAgree) {
  const char* const wanted = std::getenv("QUIRE_WIDE_WALKS");
  const bool is_wanted = wanted != nullptr && *wanted != '\0';
  const int64_t walks = is_wanted ? std::strtoll(wanted, nullptr, 10) : kWideWalksPerShard;
  ASSERT_GE(walks, 1) << "QUIRE_WIDE_WALKS is " << wanted;
  for (int64_t i = 0; i < walks && !HasFailure(); ++i) {
    const auto number = static_cast<uint64_t>(i * kWideShards + GetParam());
    ExpectPasses(MakeWalk(kWideSeed + SoakSeed(1) + number, kOpsPerWideWalk));
  }
  ReportFigure("operations", walks * kOpsPerWideWalk);
}

// Each feature for itself, and none with one that is said to exclude it. The counts of all pairs
// are added over the shards (tests/project/test_feature_pairs.py).
void ExpectFeatures(const FeaturePairs& pairs) {
  for (size_t a = 0; a < kFeatureCount; ++a) {
    const Feature one = static_cast<Feature>(a);
    EXPECT_GE(pairs.CountOf(one, one), 500) << FeatureName(one);
    for (size_t b = 0; b < a; ++b) {
      const Feature other = static_cast<Feature>(b);
      if (WhyNeverTogether(one, other).empty()) continue;
      EXPECT_EQ(pairs.CountOf(one, other), 0)
          << FeatureName(one) << " with " << FeatureName(other) << ", which is said not to occur";
    }
  }
}

// The walks are worth nothing if they go round in a corner.
TEST(KVWalkCoverage, TheWalksReachEveryOutcome) {
  Walker::Seen seen;
  int64_t fresh_comparisons = 0;
  int64_t repeated_forwards = 0;
  int64_t slid_tokens = 0;
  int64_t tree_comparisons = 0;
  int64_t later_rounds = 0;
  int64_t received_tokens = 0;
  int64_t joined_tokens = 0;
  int64_t skipped_layers = 0;
  FeaturePairs pairs;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Walk walk = MakeWalk(seed, kOpsPerWalk);
    // What walks seldom come to: a bad tensor in an open forward, an unknown sequence in a commit.
    for (uint32_t i = 0; i < 8; ++i) {
      walk.ops.push_back({Kind::kCommit, static_cast<uint32_t>(seed) + 40 * i, 48 * i, i});
      walk.ops.push_back({Kind::kSend, static_cast<uint32_t>(seed), i, i});
      walk.ops.push_back({Kind::kBegin, i, 7 * i, i});
      walk.ops.push_back({Kind::kBadTensor, i, i / 4, i});
      // A mark in an open forward.
      walk.ops.push_back({Kind::kBegin, 31 * i + 5, 7 * i, i});
      walk.ops.push_back({Kind::kSwitch, 0, 0, 0});
      for (uint32_t n = 0; n < 4; ++n)
        walk.ops.push_back({Kind::kTransfer, static_cast<uint32_t>(seed) + 100 * i, n, i});
    }
    Walkers walkers(seed);
    for (const WalkOp& op : walk.ops) ASSERT_EQ(walkers.Step(op), "") << "seed " << seed;
    for (const auto& walker : walkers.all()) {
      for (const auto& [call, codes] : walker->seen()) {
        for (const auto& [code, count] : codes) seen[call][code] += count;
      }
      fresh_comparisons += walker->fresh_comparisons();
      repeated_forwards += walker->repeated_forwards();
      slid_tokens += walker->slid_tokens();
      tree_comparisons += walker->tree_comparisons();
      later_rounds += walker->later_rounds();
      received_tokens += walker->received_tokens();
      joined_tokens += walker->joined_tokens();
      skipped_layers += walker->skipped_layers();
      pairs.Add(walker->pairs());
    }
  }
  using Code = StatusCode;
  const std::map<std::string, std::vector<Code>> expected = {
      {"AddSequence", {Code::kOk, Code::kSequenceExists, Code::kBadArgument, Code::kTooLarge}},
      {"RemoveSequence", {Code::kOk, Code::kUnknownSequence, Code::kBadState}},
      {"ForkSequence",
       {Code::kOk, Code::kUnknownSequence, Code::kSequenceExists, Code::kBadArgument,
        Code::kTooLarge, Code::kBadState}},
      {"PopN", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState}},
      {"BeginForward",
       {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState, Code::kTooLarge,
        Code::kOutOfPages}},
      {"BeginLoadingForward",
       {Code::kOk, Code::kBadArgument, Code::kBadState, Code::kTooLarge, Code::kOutOfPages}},
      {"BeginTreeForward",
       {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState, Code::kTooLarge,
        Code::kOutOfPages}},
      {"CommitAcceptedTokenTreeNodes",
       {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState}},
      {"AttentionWithFusedQKV", {Code::kOk, Code::kBadState, Code::kCorrupt}},
      {"a fused call with a mask", {Code::kOk, Code::kBadArgument}},
      {"Append", {Code::kOk, Code::kBadState, Code::kCorrupt}},
      {"AttentionWithMLA", {Code::kOk, Code::kBadState}},
      {"AppendMLAKV", {Code::kOk, Code::kBadState}},
      {"DebugGetKVMLA", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument}},
      {"DebugSetKVMLA", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument}},
      {"Attend", {Code::kOk, Code::kBadState}},
      {"attention with a bad argument", {Code::kBadArgument, Code::kBadState}},
      {"EndForward", {Code::kOk, Code::kBadState}},
      {"AbortForward", {Code::kOk, Code::kBadState}},
      {"DebugGetKV", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument}},
      {"DebugSetKV", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kOutOfPages}},
      {"ExportKV", {Code::kOk, Code::kUnknownSequence, Code::kBadArgument}},
      {"EnableSlidingWindowForSeq",
       {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState}},
      {"DisableSlidingWindowForSeq", {Code::kOk, Code::kUnknownSequence, Code::kBadState}},
      {"AttentionWithSharedKV", {Code::kOk, Code::kBadState}},
      {"SelfAttention", {Code::kOk, Code::kBadState}},
      {"CrossAttention", {Code::kOk}},
      {"MergeAttnOutputInplace", {Code::kOk}},
      {"ImportKV", {Code::kOk, Code::kUnknownSequence, Code::kBadState, Code::kOutOfPages}},
      {"SelectLongRope", {Code::kOk, Code::kUnknownSequence, Code::kBadState}},
      {"DisaggPrepareRecv",
       {Code::kOk, Code::kUnknownSequence, Code::kBadArgument, Code::kBadState, Code::kOutOfPages}},
      {"DisaggCommitRecv", {Code::kOk, Code::kNotFound, Code::kBadArgument, Code::kBadState}},
      {"DisaggCancelRecv", {Code::kOk, Code::kNotFound}},
      {"DisaggMarkSend", {Code::kOk, Code::kBadArgument, Code::kBadState, Code::kIncompatible}},
      {"DisaggUnmarkSend", {Code::kOk, Code::kNotFound}},
      {"DisaggFlushSend", {Code::kOk, Code::kBadState, Code::kNotFound, Code::kUnavailable}},
      {"SetLayerSink", {Code::kOk, Code::kBadState}},
      {"SetRetained", {Code::kOk, Code::kUnknownSequence, Code::kTooLarge, Code::kBadState}},
      {"Clear", {Code::kOk}}};
  for (const auto& [call, codes] : expected) {
    for (const Code code : codes) {
      EXPECT_GE(seen[call][code], 1) << call << " never ends with " << StatusCodeName(code);
    }
  }
  EXPECT_GE(fresh_comparisons, 100);
  EXPECT_GE(repeated_forwards, 1000);
  EXPECT_GE(slid_tokens, 100000);
  EXPECT_GE(tree_comparisons, 60);
  EXPECT_GE(later_rounds, 300);
  EXPECT_GE(received_tokens, 3000);
  EXPECT_GE(joined_tokens, 100);
  ExpectFeatures(pairs);
  if (std::getenv("QUIRE_WALK_PRINT") == nullptr) return;
  for (const auto& [call, codes] : seen) {
    for (const auto& [code, count] : codes) {
      std::printf("%s %s %lld\n", call.c_str(), StatusCodeName(code).data(),
                  static_cast<long long>(count));
    }
  }
  EXPECT_GE(skipped_layers, 100);
  std::printf("fresh %lld, repeated %lld, received %lld, joined %lld\n",
              static_cast<long long>(fresh_comparisons), static_cast<long long>(repeated_forwards),
              static_cast<long long>(received_tokens), static_cast<long long>(joined_tokens));
}

TEST(KVWalkCoverage, TheWideWalksComeToWhatTheyAreFor) {
  int64_t bad_numbers = 0;
  int64_t largest_batch = 0;
  int64_t wide_latents = 0;
  FeaturePairs pairs;
  for (uint64_t seed = kWideSeed; seed < kWideSeed + 12; ++seed) {
    Walkers walkers(seed);
    for (const WalkOp& op : MakeWalk(seed, kOpsPerWideWalk / 2).ops)
      ASSERT_EQ(walkers.Step(op), "") << "seed " << seed;
    for (const auto& walker : walkers.all()) {
      bad_numbers += walker->bad_numbers();
      largest_batch = std::max(largest_batch, walker->largest_batch());
      pairs.Add(walker->pairs());
    }
    for (const AttentionLayerSpec& layer : MakeSetting(seed).options.layers)
      wide_latents += layer.qk_head_dim == 576 && layer.v_head_dim == 512;
  }
  EXPECT_GE(bad_numbers, 10000);
  EXPECT_GE(largest_batch, 40);
  EXPECT_GE(wide_latents, 1);
  for (const Feature feature : {Feature::kLatent, Feature::kLayerWindow, Feature::kWindow,
                                Feature::kTree, Feature::kLoading, Feature::kReceived}) {
    EXPECT_GE(pairs.CountOf(feature, feature), 20) << FeatureName(feature);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, KVWalk, testing::Range(0, kShards));
INSTANTIATE_TEST_SUITE_P(Seeds, KVWideWalk, testing::Range(0, kWideShards));

}  // namespace
}  // namespace quire::kv_walk
