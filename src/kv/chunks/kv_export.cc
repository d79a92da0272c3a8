#include "quire/kv_export.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kernels/kv_layout.h"
#include "kv/chunks/kv_sections.h"
#include "quire/recurrent_cache.h"

namespace quire {
namespace {

// Part of the passport's "numerics": counts up when a kernel's arithmetic changes, so that KV of an
// older build is recomputed instead of mixed in.
constexpr std::string_view kKernelGeneration = "1";

// What the numbers of quantised keys and values mean; their types are the layers' own.
constexpr std::string_view kQuantScheme = "token-head-f32";

// The type in which attention multiplies: bf16 pairs where the CPU has them, else widened.
std::string_view ComputeType(const AttentionKVCacheOptions& options) {
  const bool pairs = options.kernel_path == "avx512_bf16";
  for (const AttentionLayerSpec& layer : options.layers) {
    const bool narrow = ComputeDType(layer.dtype) == DType::kBF16 ||
                        ComputeDType(layer.value_dtype()) == DType::kBF16;
    if (pairs && narrow) return "bf16";
  }
  return "f32";
}

// The RoPE of all layers: the cache's, then each set that layers have in place of it, behind the
// ranges of these layers.
std::string RopeOfLayers(const AttentionKVCacheOptions& options, bool long_factors) {
  std::string text = RopePassport(options.rope, long_factors);
  const std::vector<AttentionLayerSpec>& layers = options.layers;
  std::vector<RopeOptions> written;
  for (const AttentionLayerSpec& layer : layers) {
    if (!layer.rope) continue;
    if (std::find(written.begin(), written.end(), *layer.rope) != written.end()) continue;
    written.push_back(*layer.rope);
    std::string ranges;
    for (size_t first = 0; first < layers.size(); ++first) {
      if (layers[first].rope != layer.rope) continue;
      size_t last = first;
      while (last + 1 < layers.size() && layers[last + 1].rope == layer.rope) ++last;
      ranges += (ranges.empty() ? "" : ",") + std::to_string(first) + "-" + std::to_string(last);
      first = last;
    }
    text += "|layers=" + ranges + ";" + RopePassport(*layer.rope, long_factors);
  }
  return text;
}

PassportLayer PassportOf(const AttentionLayerSpec& layer) {
  PassportLayer passport{.kind = layer.latent ? StateKind::kLatent : StateKind::kAttention,
                         .dtype = layer.dtype,
                         .kv_heads = layer.num_kv_heads,
                         .head_dim = layer.qk_head_dim,
                         .v_head_dim = layer.v_head_dim,
                         .window = layer.window};
  if (layer.value_dtype() != layer.dtype) passport.v_dtype = ElementType(layer.value_dtype());
  return passport;
}

PassportLayer PassportOf(StateTensor tensor) {
  if (tensor.kind == StateKind::kCaller) {
    return {.kind = tensor.kind,
            .dtype = tensor.dtype,
            .kv_heads = 1,
            .head_dim = 1,
            .v_head_dim = 1,
            .state_shape = std::move(tensor.shape)};
  }
  std::vector<int64_t> dims = std::move(tensor.shape);
  if (dims.size() == 2) dims.insert(dims.begin(), 1);  // a convolution has no heads
  QUIRE_DCHECK(dims.size() == 3);
  return {.kind = tensor.kind,
          .dtype = tensor.dtype,
          .kv_heads = dims[0],
          .head_dim = dims[1],
          .v_head_dim = dims[2]};
}

void DescribeAttention(const AttentionKVCacheOptions& options, bool long_factors,
                       Passport* passport) {
  passport->rope = RopeOfLayers(options, long_factors);
  bool quantised = false;
  for (const AttentionLayerSpec& layer : options.layers) {
    quantised |= IsQuantised(layer.dtype) || IsQuantised(layer.value_dtype());
    passport->layers.push_back(PassportOf(layer));
  }
  passport->quant = quantised ? kQuantScheme : "none";
}

// A chunk has the layers of one attention cache.
Status RequireOneCache(const char* call, const SequenceStates& states) {
  if (states.composite() == nullptr || states.composite()->parts().more_attention.empty())
    return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) +
                    ": the state has several attention caches; chunks have the layers of one");
}

Status ImportInto(const SequenceStates& states, int64_t seq_id, int64_t end,
                  std::span<const KVBlock> blocks, std::span<const int64_t> tokens,
                  std::span<const std::vector<TensorView>> at_end) {
  QUIRE_DCHECK(at_end.size() == states.recurrent_count());
  AttentionKVCache* const cache = states.attention();
  if (states.recurrent_count() > 0 && blocks.empty()) return Status();  // there is no such state
  if (states.composite() != nullptr) {
    return states.composite()->ImportState(seq_id, end, {.blocks = blocks, .tokens = tokens},
                                           at_end);
  }
  if (cache == nullptr) return states.recurrent(0).ImportState(seq_id, end, at_end[0]);
  const auto has_window = [](const AttentionLayerSpec& layer) { return layer.window != 0; };
  if (std::ranges::any_of(cache->options().layers, has_window))
    return cache->ImportVisibleKV(seq_id, {.blocks = blocks, .tokens = tokens});
  return cache->ImportKV(seq_id, blocks);
}

}  // namespace

SequenceStates::SequenceStates(CompositeState& composite) : kv_(&composite) {
  const CompositeState::Parts& parts = composite.parts();
  composite_ = &composite;
  attention_ = parts.attention.get();
}

size_t SequenceStates::recurrent_count() const {
  if (composite_ != nullptr) return composite_->parts().recurrent.size();
  return alone_ != nullptr ? 1 : 0;
}

RecurrentState& SequenceStates::recurrent(size_t part) const {
  QUIRE_DCHECK(part < recurrent_count());
  return composite_ != nullptr ? *composite_->parts().recurrent[part] : *alone_;
}

bool SequenceStates::HasSequence(int64_t seq_id) const {
  QUIRE_DCHECK(composite_ != nullptr || alone_ != nullptr || attention_ != nullptr);
  if (composite_ != nullptr) return composite_->HasSequence(seq_id);
  return alone_ != nullptr ? alone_->HasSequence(seq_id) : attention_->HasSequence(seq_id);
}

Result<int64_t> SequenceStates::GetSequenceLength(int64_t seq_id) const {
  if (composite_ != nullptr) return composite_->GetSequenceLength(seq_id);
  return alone_ != nullptr ? alone_->GetSequenceLength(seq_id)
                           : attention_->GetSequenceLength(seq_id);
}

Result<Passport> CachePassport(const SequenceStates& states, Passport identity, bool long_factors) {
  QUIRE_RETURN_IF_ERROR(RequireOneCache("CachePassport", states));
  return GuardEntry([&]() -> Result<Passport> {
    identity.layout = kLogicalLayout;
    identity.rope = identity.quant = "none";
    identity.first_layer = 0;
    identity.layers.clear();
    std::string path, compute = "f32";
    if (states.attention() != nullptr) {
      const AttentionKVCacheOptions& options = states.attention()->options();
      DescribeAttention(options, long_factors, &identity);
      path = options.kernel_path;
      compute = ComputeType(options);
    }
    std::string states_path;
    for (size_t part = 0; part < states.recurrent_count(); ++part) {
      const RecurrentState& state = states.recurrent(part);
      QUIRE_ASSIGN_OR_RETURN(std::vector<StateTensor> tensors, StateTensorsOf(state));
      for (StateTensor& tensor : tensors) identity.layers.push_back(PassportOf(std::move(tensor)));
      // What a caller computes runs on no kernel of ours.
      if (const auto* cache = dynamic_cast<const RecurrentCache*>(&state)) {
        const std::string& own = cache->options().kernel_path;
        if (own == path || own == states_path) continue;
        states_path += (states_path.empty() ? "" : "+") + own;
      }
    }
    if (!states_path.empty()) path += (path.empty() ? "" : "+") + states_path;
    const std::string of_cache = std::string(kKernelGeneration) + "/" + path + "/" + compute;
    identity.numerics = of_cache + (identity.numerics.empty() ? "" : "/") + identity.numerics;
    QUIRE_RETURN_IF_ERROR(identity.ToJson().status());
    return std::move(identity);
  });
}

ChunkFields NextFields(const Passport& passport, const KeySpace& keys, const ChunkKey& previous,
                       int64_t start, std::span<const int32_t> tokens) {
  QUIRE_DCHECK(start >= 0 && start <= std::numeric_limits<uint32_t>::max());
  QUIRE_DCHECK(std::ssize(tokens) <= passport.block_tokens) << "no chunk is longer";
  // RopePassport begins so if the cache stores rotated keys. Latents come rotated if they have a
  // part for it.
  const bool rotated =
      passport.rope.starts_with("mode=normal") ||
      std::ranges::any_of(passport.layers, [](const PassportLayer& layer) {
        return layer.kind == StateKind::kLatent && layer.v_head_dim != layer.head_dim;
      });
  ChunkFields fields;
  fields.key = keys.Next(previous, tokens);
  fields.fingerprint = keys.fingerprint();
  fields.first_position = rotated ? static_cast<uint32_t>(start) : kNotRotated;
  fields.context = previous.digest;
  fields.rope_table_id = ShortId(passport.rope);
  fields.numerics_id = static_cast<uint32_t>(ShortId(passport.numerics));
  fields.tail = static_cast<int64_t>(tokens.size()) < passport.block_tokens;
  fields.approximate = keys.approximate();
  fields.tokens.assign(tokens.begin(), tokens.end());
  return fields;
}

Result<std::vector<ChunkFields>> ChainFields(const Passport& passport, const KeySpace& keys,
                                             std::span<const int32_t> tokens, bool tail) {
  return GuardEntry([&]() -> Result<std::vector<ChunkFields>> {
    if (passport.block_tokens < 1) {
      return Status(StatusCode::kBadArgument, "ChainFields: the passport's block_tokens is " +
                                                  std::to_string(passport.block_tokens) +
                                                  "; it must be at least 1");
    }
    const size_t block = static_cast<size_t>(passport.block_tokens);
    std::vector<ChunkFields> chain;
    ChunkKey previous = keys.root();
    while (!tokens.empty() && (tail || tokens.size() >= block)) {
      const auto part = tokens.first(std::min(block, tokens.size()));
      const auto start = static_cast<int64_t>(chain.size() * block);
      chain.push_back(NextFields(passport, keys, previous, start, part));
      previous = chain.back().key;
      tokens = tokens.subspan(part.size());
    }
    return chain;
  });
}

Result<ChunkBuffer> ExportChunk(const SequenceStates& states, int64_t seq_id, int64_t start,
                                ChunkFields fields, const ChunkWriteOptions& options) {
  return GuardEntry([&]() -> Result<ChunkBuffer> {
    QUIRE_RETURN_IF_ERROR(RequireOneCache("ExportChunk", states));
    QUIRE_ASSIGN_OR_RETURN(const int64_t length, states.GetSequenceLength(seq_id));
    const int64_t count = static_cast<int64_t>(fields.tokens.size());
    if (start < 0 || count < 1 || count > length - start) {
      return Status(StatusCode::kBadArgument,
                    "ExportChunk: " + std::to_string(count) + " tokens from " +
                        std::to_string(start) + " on are not in sequence " +
                        std::to_string(seq_id) + " of length " + std::to_string(length));
    }
    const int64_t end = start + count;
    return ExportRows(states, seq_id, start, std::move(fields), HiddenOfLayers(states, {}, end),
                      /*with_states=*/true, options);
  });
}

Status ImportChunks(const SequenceStates& states, int64_t seq_id,
                    std::span<const ChunkView> chunks) {
  return GuardEntry([&]() -> Status {
    int64_t position = 0;
    const bool is_new = !states.HasSequence(seq_id);
    if (!is_new) {
      QUIRE_ASSIGN_OR_RETURN(position, states.GetSequenceLength(seq_id));
    }
    int64_t end = position;
    for (const ChunkView& chunk : chunks) end += static_cast<int64_t>(chunk.header().tokens.size());
    const HiddenRanges at_end = HiddenOfLayers(states, {}, end);
    std::vector<KVBlock> blocks;
    std::vector<int64_t> tokens;
    for (const ChunkView& chunk : chunks) {
      tokens.push_back(static_cast<int64_t>(chunk.header().tokens.size()));
      const HiddenRanges stored = HiddenOfLayers(states, {}, position + tokens.back());
      QUIRE_ASSIGN_OR_RETURN(KVBlock block, ImportRows(chunk, states, position, stored, at_end));
      blocks.push_back(std::move(block));
      position += tokens.back();
    }
    QUIRE_DCHECK(position == end) << "chunks stand behind one another";
    std::vector<std::vector<TensorView>> states_at_end(states.recurrent_count());
    if (!chunks.empty()) {
      QUIRE_ASSIGN_OR_RETURN(states_at_end, StatesOf(chunks.back(), states));
    }
    if (is_new) QUIRE_RETURN_IF_ERROR(states.kv().AddSequence(seq_id));
    const Status status =
        GuardEntry([&] { return ImportInto(states, seq_id, end, blocks, tokens, states_at_end); });
    if (status.ok() || !is_new) return status;
    const Status removed = states.kv().RemoveSequence(seq_id);  // it was empty: this cannot fail
    return removed.ok() ? status : removed;
  });
}

}  // namespace quire
