// Checkpoints of TvmKVCacheObj, in TVM's form: a JSON text, and for each layer a tensor [1, pages,
// 2, Hkv, P, D] of the kept tokens, keys before values, of MLA layers [1, pages, P, D], as their
// pages are in TVM's caches. Zero behind the last token.
#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/checksum.h"
#include "base/json.h"
#include "ffi/tensors.h"
#include "ffi/tvm/tvm_kv_cache.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;
using nlohmann::json;

constexpr int64_t kFormatVersion = 1;
constexpr std::string_view kCacheType = "quire.tvm.KVCache";
// Written by TVM itself: the same form without our fields.
constexpr std::string_view kTvmCacheType = "relax.vm.PagedAttentionKVCache";

std::string Call(const char* name, int64_t seq_id) {
  return std::string("attention_kv_cache_") + name + ": sequence " + std::to_string(seq_id) + " ";
}

int64_t PageCount(int64_t length, int64_t page_size) {
  return (length + page_size - 1) / page_size;
}

std::string_view RopeModeName(RopeMode mode) {
  switch (mode) {
    case RopeMode::kNone:
      return "none";
    case RopeMode::kNormal:
      return "normal";
    case RopeMode::kInline:
      return "inline";
  }
  return "";
}

// The first layer that is latent (MLA), or the first that is not; null without such layers.
const AttentionLayerSpec* FindLayer(const AttentionKVCacheOptions& options, bool latent) {
  const auto found = std::ranges::find(options.layers, latent, &AttentionLayerSpec::latent);
  return found == options.layers.end() ? nullptr : &*found;
}

// What fixes the meaning of stored keys and values; capacities are left out. Numbers of heads and
// dims are those of the cache's creation, as in TVM.
json GeometryOf(const AttentionKVCacheOptions& options, int64_t first_layer) {
  const AttentionLayerSpec& first = options.layers.front();
  const AttentionLayerSpec* const plain = FindLayer(options, false);
  const AttentionLayerSpec* const latent = FindLayer(options, true);
  json kinds = json::array();
  for (const AttentionLayerSpec& layer : options.layers)
    kinds.push_back(layer.latent ? "mla" : layer.window > 0 ? "mha_sliding" : "mha");
  return {{"page_size", options.page_size},
          {"num_layers", options.layers.size()},
          {"layer_begin", first_layer},
          {"layer_end", first_layer + std::ssize(options.layers)},
          {"num_qo_heads", first.num_qo_heads},
          {"num_kv_heads", plain != nullptr ? plain->num_kv_heads : 1},
          {"qk_head_dim", first.qk_head_dim},
          {"v_head_dim", latent != nullptr ? latent->v_head_dim : first.v_head_dim},
          {"dtype", DTypeName(first.dtype)},
          {"attn_kinds", std::move(kinds)},
          {"rope_mode", RopeModeName(options.rope.mode)}};
}

// Windows of layers and the angles: TVM's texts have no place for them.
json ExtendedGeometryOf(const AttentionKVCacheOptions& options) {
  json windows = json::array();
  for (const AttentionLayerSpec& layer : options.layers) windows.push_back(layer.window);
  json rotation = json::array();
  if (options.rope.mode != RopeMode::kNone) {
    const RopeFrequencies frequencies = ValueOrThrow(ComputeRopeFrequencies(
        options.rope, options.layers.front().qk_head_dim, options.rope.use_long_factors));
    rotation = {options.rope.pairing == RopePairing::kInterleaved, frequencies.amplitude,
                frequencies.inv_freq};
  }
  return {{"layer_windows", std::move(windows)}, {"rotation", std::move(rotation)}};
}

[[noreturn]] void ThrowIncompatible(const std::string& message) {
  Throw(Status(StatusCode::kIncompatible, "attention_kv_cache_prepare_import: " + message));
}

void CheckSame(const json& wanted, const JsonValue& metadata, bool required) {
  for (const auto& [key, value] : wanted.items()) {
    const auto given = metadata.json().find(key);
    if (given == metadata.json().end()) {
      if (required) ThrowIncompatible("the metadata has no field '" + key + "'");
      continue;
    }
    if (*given == value) continue;
    ThrowIncompatible("the checkpoint has " + key + " = " + given->dump() + ", this cache " +
                      value.dump());
  }
}

// Keys and values; of latent layers both in one.
int64_t PartCount(const AttentionLayerSpec& layer) { return layer.latent ? 1 : 2; }

// Moves tokens between [tokens, heads, dim], contiguous, and their places in a group's tensor.
template <typename Move>
void ForEachRow(const AttentionLayerSpec& layer, int64_t page_size, int64_t length, Move&& move) {
  const auto row_bytes = static_cast<size_t>(layer.qk_head_dim * DTypeBytes(layer.dtype));
  const int64_t parts = PartCount(layer);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
        const int64_t paged =
            ((t / page_size * parts + part) * layer.num_kv_heads + h) * page_size + t % page_size;
        move(part, static_cast<size_t>(t * layer.num_kv_heads + h) * row_bytes,
             static_cast<size_t>(paged) * row_bytes, row_bytes);
      }
    }
  }
}

size_t PartBytes(const AttentionLayerSpec& layer, int64_t length) {
  return static_cast<size_t>(length * layer.num_kv_heads * layer.qk_head_dim *
                             DTypeBytes(layer.dtype));
}

// The tokens [from, to) of contiguous [tokens, heads, dim].
TensorView Tokens(const AttentionLayerSpec& layer, std::vector<std::byte>& bytes, int64_t from,
                  int64_t to) {
  return TensorView(bytes.data() + PartBytes(layer, from), layer.dtype,
                    {to - from, layer.num_kv_heads, layer.qk_head_dim});
}

}  // namespace

// ---------------------------------------------------------------------- what fits what

std::string TvmKVCacheObj::Geometry() const {
  json all = GeometryOf(config_.cache, config_.first_layer);
  all.update(ExtendedGeometryOf(config_.cache));
  return all.dump();
}

tf::String TvmKVCacheObj::GetLayoutHash() {
  const std::string geometry = Geometry();
  uint64_t hash = Hash64(geometry);
  std::string text(16, '0');
  for (size_t i = text.size(); i-- > 0; hash >>= 4) text[i] = "0123456789abcdef"[hash & 15];
  return tf::String(text);
}

std::vector<int64_t> TvmKVCacheObj::GroupShape(int64_t group, int64_t length) const {
  const AttentionLayerSpec& spec = layer(group);
  const int64_t page_size = config_.cache.page_size;
  const int64_t pages = PageCount(length, page_size);
  if (spec.latent) return {1, pages, page_size, spec.qk_head_dim};
  return {1, pages, 2, spec.num_kv_heads, page_size, spec.qk_head_dim};
}

void TvmKVCacheObj::CheckGroup(const char* call, int64_t group) const {
  const auto count = static_cast<int64_t>(config_.cache.layers.size());
  if (group >= 0 && group < count) return;
  ThrowBadArgument(std::string(call) + ": there is no page group " + std::to_string(group) +
                   "; the cache has " + std::to_string(count) + ", one per layer");
}

TensorView TvmKVCacheObj::CheckGroupTensor(const char* call, int64_t group, int64_t length,
                                           const tf::TensorView& tensor) const {
  const TensorView view = ViewOf(tensor);
  const std::vector<int64_t> shape = GroupShape(group, length);
  if (view.dtype() == layer(group).dtype && view.is_contiguous() &&
      std::ranges::equal(view.shape(), shape)) {
    return view;
  }
  const TensorView wanted(nullptr, layer(group).dtype, std::span<const int64_t>(shape));
  ThrowBadArgument(std::string(call) + ": the tensor is " + view.ToString() + "; page group " +
                   std::to_string(group) + " is contiguous " + wanted.ToString());
}

// ---------------------------------------------------------------------- export

tf::String TvmKVCacheObj::GetCheckpointMetadata(int64_t seq_id) {
  RefuseImporting("attention_kv_cache_get_checkpoint_metadata", seq_id);
  const int64_t length = GetSequenceLength(seq_id);
  const int64_t page_size = config_.cache.page_size;
  json metadata = GeometryOf(config_.cache, config_.first_layer);
  metadata.update(ExtendedGeometryOf(config_.cache));
  metadata.update(
      {{"format_version", kFormatVersion},
       {"cache_type", kCacheType},
       {"rotary_scale", config_.cache.rope.position_scale},
       {"rotary_theta", config_.cache.rope.theta},
       {"reserved_num_seqs", config_.cache.max_num_sequences},
       {"prefill_chunk_size", config_.cache.prefill_chunk_size},
       {"page_group_layout", "1,num_logical_pages,2,num_kv_heads,page_size,qk_head_dim"},
       {"layout_hash", std::string(GetLayoutHash())},
       {"seq_id", seq_id},
       {"seq_length", length}});
  if (has_latent_) metadata["mla_page_group_layout"] = "1,num_logical_pages,page_size,qk_head_dim";
  if (config_.has_layer_windows) {
    metadata["held_tokens"] = latch_.Run([&] { return cache_->HeldTokens(seq_id); });
  }
  if (const auto window = windows_.find(seq_id); window != windows_.end())
    metadata["window"] = {window->second.window, window->second.sinks};
  json pages = json::array();
  for (int64_t p = 0; p < PageCount(length, page_size); ++p) {
    pages.push_back({{"logical_page_index", p},
                     {"start_pos", p * page_size},
                     {"length", std::min(page_size, length - p * page_size)}});
  }
  metadata["logical_pages"] = std::move(pages);
  json groups = json::array();
  for (size_t g = 0; g < config_.cache.layers.size(); ++g) {
    const auto group = static_cast<int64_t>(g);
    const std::vector<int64_t> shape = GroupShape(group, length);
    groups.push_back({{"group_index", g},
                      {"layer_begin", config_.first_layer + group},
                      {"layer_end", config_.first_layer + group + 1},
                      {"num_logical_pages", shape[1]},
                      {"dtype", DTypeName(layer(group).dtype)},
                      {"shape", shape},
                      {"nbytes", static_cast<size_t>(PartCount(layer(group))) *
                                     PartBytes(layer(group), shape[1] * page_size)}});
  }
  metadata["groups"] = std::move(groups);
  return tf::String(metadata.dump());
}

void TvmKVCacheObj::ExportPageGroup(int64_t seq_id, int64_t group, tf::TensorView out) {
  const char* call = "attention_kv_cache_export_page_group";
  RefuseImporting(call, seq_id);
  CheckGroup(call, group);
  const int64_t length = GetSequenceLength(seq_id);
  const TensorView view = CheckGroupTensor(call, group, length, out);
  const AttentionLayerSpec& spec = layer(group);
  std::vector<std::byte> parts[2] = {std::vector<std::byte>(PartBytes(spec, length)),
                                     std::vector<std::byte>(PartBytes(spec, length))};
  // What a layer's window let go stays zero: only then is a token of the sequence not held.
  int64_t begin = 0;
  if (spec.window > 0) {
    begin = length - latch_.Run([&] { return cache_->HeldTokens(seq_id); });
  }
  for (const KeptRun& run : KeptRuns(seq_id, begin, length)) {
    const LayerKV tokens = {Tokens(spec, parts[0], run.from, run.to),
                            Tokens(spec, parts[1], run.from, run.to)};
    latch_.Run([&] { return cache_->ExportKV(seq_id, group, run.position, tokens); });
  }
  std::memset(view.data(), 0, static_cast<size_t>(view.element_count() * DTypeBytes(spec.dtype)));
  auto* const paged = view.data_as<std::byte>();
  ForEachRow(spec, config_.cache.page_size, length,
             [&](int64_t part, size_t flat, size_t place, size_t bytes) {
               std::memcpy(paged + place, parts[part].data() + flat, bytes);
             });
}

// ---------------------------------------------------------------------- import

void TvmKVCacheObj::RefuseImporting(const char* call, int64_t seq_id) const {
  if (imports_.count(seq_id) == 0) return;
  Throw(Status(StatusCode::kBadState,
               std::string(call) + ": sequence " + std::to_string(seq_id) +
                   " is being imported; end that with attention_kv_cache_finish_import, or remove "
                   "the sequence"));
}

TvmKVCacheObj::Import& TvmKVCacheObj::FindImport(const char* call, int64_t seq_id) {
  const auto found = imports_.find(seq_id);
  if (found != imports_.end()) return found->second;
  Throw(Status(StatusCode::kBadState, Call(call, seq_id) + "is not being imported; call "
                                                           "attention_kv_cache_prepare_import"));
}

TvmKVCacheObj::Import TvmKVCacheObj::ReadMetadata(const std::string& text) const {
  const json parsed = ValueOrThrow(ParseJson(text, "attention_kv_cache_prepare_import: metadata"));
  const JsonValue metadata(parsed, "attention_kv_cache_prepare_import: metadata");
  const std::string type = ValueOrThrow(ValueOrThrow(metadata.Get("cache_type")).String());
  if (type != kCacheType && type != kTvmCacheType)
    ThrowIncompatible("cache_type is '" + type + "', not '" + std::string(kCacheType) + "'");
  const int64_t version = ValueOrThrow(metadata.GetInt("format_version"));
  if (version != kFormatVersion)
    ThrowIncompatible("format_version is " + std::to_string(version) + "; known is 1");
  CheckSame(GeometryOf(config_.cache, config_.first_layer), metadata, true);
  CheckSame(ExtendedGeometryOf(config_.cache), metadata, type == kCacheType);
  Import import;
  import.length = ValueOrThrow(metadata.GetInt("seq_length", 0, INT32_MAX));
  import.held = ValueOrThrow(metadata.GetIntOr("held_tokens", import.length, 0, import.length));
  import.layers.resize(config_.cache.layers.size());
  const auto window = ValueOrThrow(metadata.Find("window"));
  if (!window) return import;
  if (!config_.has_sequence_windows)
    ThrowIncompatible("the sequence has a window, and the cache no support_sliding_window");
  import.window.window = ValueOrThrow(ValueOrThrow(window->At(0)).Int(1, INT32_MAX));
  import.window.sinks = ValueOrThrow(ValueOrThrow(window->At(1)).Int(0, import.window.window - 1));
  return import;
}

void TvmKVCacheObj::PrepareImport(int64_t seq_id, const tf::String& metadata) {
  RefuseImporting("attention_kv_cache_prepare_import", seq_id);
  std::map<int64_t, Import> entry;
  entry.emplace(seq_id, ReadMetadata(std::string(metadata)));
  if (cache_->HasSequence(seq_id)) RemoveSequence(seq_id);
  AddSequence(seq_id);
  imports_.merge(entry);
}

void TvmKVCacheObj::ImportPageGroup(int64_t seq_id, int64_t group, tf::TensorView in) {
  const char* call = "attention_kv_cache_import_page_group";
  Import& import = FindImport("import_page_group", seq_id);
  CheckGroup(call, group);
  LayerTokens& tokens = import.layers[static_cast<size_t>(group)];
  if (!tokens.k.empty()) {
    Throw(Status(StatusCode::kBadState, Call("import_page_group", seq_id) + "has page group " +
                                            std::to_string(group) + " already"));
  }
  const TensorView view = CheckGroupTensor(call, group, import.length, in);
  const AttentionLayerSpec& spec = layer(group);
  LayerTokens taken = {std::vector<std::byte>(PartBytes(spec, import.length)),
                       std::vector<std::byte>(PartBytes(spec, import.length))};
  const auto* const paged = view.data_as<const std::byte>();
  ForEachRow(spec, config_.cache.page_size, import.length,
             [&](int64_t part, size_t flat, size_t place, size_t bytes) {
               std::vector<std::byte>& to = part == 0 ? taken.k : taken.v;
               std::memcpy(to.data() + flat, paged + place, bytes);
             });
  tokens = std::move(taken);
}

void TvmKVCacheObj::FinishImport(int64_t seq_id) {
  Import& import = FindImport("finish_import", seq_id);
  KVBlock block;
  for (size_t l = 0; l < import.layers.size() && import.length > 0; ++l) {
    LayerTokens& tokens = import.layers[l];
    if (tokens.k.empty()) {
      Throw(Status(StatusCode::kBadState, Call("finish_import", seq_id) + "lacks page group " +
                                              std::to_string(l) +
                                              "; import it with "
                                              "attention_kv_cache_import_page_group"));
    }
    const AttentionLayerSpec& spec = layer(static_cast<int64_t>(l));
    block.push_back(
        {Tokens(spec, tokens.k, 0, import.length), Tokens(spec, tokens.v, 0, import.length)});
  }
  if (!block.empty()) latch_.Run([&] { return cache_->ImportKV(seq_id, std::span(&block, 1)); });
  const int64_t held = latch_.Run([&] { return cache_->HeldTokens(seq_id); });
  if (held > import.held) {
    latch_.Run([&] { return cache_->PopN(seq_id, import.length); });
    Throw(Status(StatusCode::kIncompatible,
                 Call("finish_import", seq_id) + "needs its last " + std::to_string(held) +
                     " tokens in every layer, and the checkpoint has " +
                     std::to_string(import.held) +
                     ": it was popped after tokens had slid out of the layers' window; compute "
                     "it again"));
  }
  const SequenceWindowArguments window = import.window;
  imports_.erase(seq_id);
  if (window.window > 0) EnableSlidingWindowForSeq(seq_id, window.window, window.sinks);
}

}  // namespace quire::ffi
