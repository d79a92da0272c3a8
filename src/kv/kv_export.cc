#include "quire/kv_export.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/guard.h"
#include "kernels/kv_layout.h"

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

// The sections of a layer's tokens, in the order in which they stand in a chunk.
std::vector<SectionSpec> SectionsOf(int64_t layer, const AttentionLayerSpec& spec, int64_t count) {
  const int64_t heads = spec.num_kv_heads;
  const bool latent = spec.latent;
  const auto section = [&](SectionKind kind, DType dtype, std::vector<int64_t> dims) {
    return SectionSpec{kind, layer, layer, dtype, std::move(dims)};
  };
  std::vector<SectionSpec> sections;
  if (!latent) {
    sections.push_back(section(SectionKind::kKey, spec.dtype, {count, heads, spec.qk_head_dim}));
    sections.push_back(
        section(SectionKind::kValue, spec.value_dtype(), {count, heads, spec.v_head_dim}));
  }
  if (IsQuantised(spec.dtype))
    sections.push_back(section(SectionKind::kKeyScale, DType::kF32, {count, heads}));
  if (!latent && IsQuantised(spec.value_dtype()))
    sections.push_back(section(SectionKind::kValueScale, DType::kF32, {count, heads}));
  // Behind its scales: sections of a layer ascend by kind.
  if (latent)
    sections.push_back(section(SectionKind::kLatent, spec.dtype, {count, spec.qk_head_dim}));
  return sections;
}

// Adds the bytes of one of these sections to the layer's tensors.
void SetSection(const AttentionLayerSpec& spec, const SectionSpec& section,
                std::span<const std::byte> bytes, LayerKV* kv) {
  if (section.kind == SectionKind::kLatent) {
    kv->k = TensorView(bytes.data(), spec.dtype, {section.dims[0], int64_t{1}, section.dims[1]});
  } else if (section.kind == SectionKind::kKey) {
    kv->k =
        TensorView(bytes.data(), spec.dtype, {section.dims[0], section.dims[1], section.dims[2]});
  } else if (section.kind == SectionKind::kValue) {
    kv->v = TensorView(bytes.data(), spec.value_dtype(),
                       {section.dims[0], section.dims[1], section.dims[2]});
  } else {
    TensorView& scale = section.kind == SectionKind::kKeyScale ? kv->k_scale : kv->v_scale;
    scale = TensorView(bytes.data(), DType::kF32, {section.dims[0], section.dims[1]});
  }
}

// The verified bytes of the section that has exactly this shape.
Result<std::span<const std::byte>> FindSection(const ChunkView& chunk, const SectionSpec& wanted) {
  const int64_t index = chunk.header().Find(wanted.kind, wanted.layer_first);
  const bool fits =
      index >= 0 && static_cast<const SectionSpec&>(
                        chunk.header().sections[static_cast<size_t>(index)]) == wanted;
  if (fits) return chunk.section(index);
  return Status(StatusCode::kIncompatible,
                "ImportChunks: the chunk has no " + std::string(SectionKindName(wanted.kind)) +
                    " section of layer " + std::to_string(wanted.layer_first) + " with " +
                    std::to_string(wanted.dims[0]) + " tokens in the shape of this cache");
}

Result<KVBlock> BlockOf(const ChunkView& chunk, std::span<const AttentionLayerSpec> layers,
                        int64_t position) {
  KVBlock block;
  for (size_t l = 0; l < layers.size(); ++l) {
    QUIRE_ASSIGN_OR_RETURN(const LayerKV kv,
                           ChunkLayer(chunk, layers[l], static_cast<int64_t>(l), position));
    block.push_back(kv);
  }
  return block;
}

Status ImportBlocks(AttentionKVCache& cache, int64_t seq_id, std::span<const KVBlock> blocks) {
  const bool is_new = !cache.HasSequence(seq_id);
  if (is_new) QUIRE_RETURN_IF_ERROR(cache.AddSequence(seq_id));
  const Status status = cache.ImportKV(seq_id, blocks);
  if (status.ok() || !is_new) return status;
  const Status removed = cache.RemoveSequence(seq_id);  // it was empty: this cannot fail
  return removed.ok() ? status : removed;
}

}  // namespace

Result<Passport> CachePassport(const AttentionKVCache& cache, Passport identity,
                               bool long_factors) {
  return GuardEntry([&]() -> Result<Passport> {
    const AttentionKVCacheOptions& options = cache.options();
    const RopeOptions* rope = &options.rope;
    for (size_t l = 0; l < options.layers.size(); ++l) {
      const AttentionLayerSpec& layer = options.layers[l];
      if (!layer.rope) continue;
      // By it the caller rotates, and in mode kNone this cache rotates nothing.
      const bool is_first = rope == &options.rope;
      if (layer.latent && options.rope.mode == RopeMode::kNone &&
          (is_first || *rope == *layer.rope)) {
        rope = &*layer.rope;
        continue;
      }
      return Status(StatusCode::kBadArgument,
                    "CachePassport: layer " + std::to_string(l) +
                        " has RoPE options of its own; a passport has one set for all layers, so "
                        "KV of this cache cannot leave it as chunks");
    }
    identity.rope = RopePassport(*rope, long_factors);
    identity.layout = kLogicalLayout;
    identity.numerics = std::string(kKernelGeneration) + "/" + options.kernel_path + "/" +
                        std::string(ComputeType(options));
    identity.first_layer = 0;
    identity.layers.clear();
    bool quantised = false;
    for (const AttentionLayerSpec& layer : options.layers) {
      quantised |= IsQuantised(layer.dtype) || IsQuantised(layer.value_dtype());
      identity.layers.push_back({.kind = layer.latent ? StateKind::kLatent : StateKind::kAttention,
                                 .dtype = layer.dtype,
                                 .kv_heads = layer.num_kv_heads,
                                 .head_dim = layer.qk_head_dim,
                                 .v_head_dim = layer.v_head_dim});
      if (layer.value_dtype() != layer.dtype)
        identity.layers.back().v_dtype = ElementType(layer.value_dtype());
    }
    identity.quant = quantised ? kQuantScheme : "none";
    QUIRE_RETURN_IF_ERROR(identity.ToJson().status());
    return std::move(identity);
  });
}

ChunkFields NextFields(const Passport& passport, const KeySpace& keys, const ChunkKey& previous,
                       int64_t start, std::span<const int32_t> tokens) {
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

std::vector<ChunkFields> ChainFields(const Passport& passport, const KeySpace& keys,
                                     std::span<const int32_t> tokens, bool tail) {
  const size_t block = static_cast<size_t>(passport.block_tokens);
  std::vector<ChunkFields> chain;
  ChunkKey previous = keys.root();
  for (size_t start = 0; start < tokens.size(); start += block) {
    const auto part = tokens.subspan(start, std::min(block, tokens.size() - start));
    if (part.size() < block && !tail) break;
    chain.push_back(NextFields(passport, keys, previous, static_cast<int64_t>(start), part));
    previous = chain.back().key;
  }
  return chain;
}

Result<ChunkBuffer> ExportChunk(AttentionKVCache& cache, int64_t seq_id, int64_t start,
                                ChunkFields fields, const ChunkWriteOptions& options) {
  return GuardEntry([&]() -> Result<ChunkBuffer> {
    const std::vector<AttentionLayerSpec>& layers = cache.options().layers;
    const int64_t count = static_cast<int64_t>(fields.tokens.size());
    std::vector<SectionSpec> sections;
    for (size_t l = 0; l < layers.size(); ++l) {
      for (SectionSpec& section : SectionsOf(static_cast<int64_t>(l), layers[l], count))
        sections.push_back(std::move(section));
    }
    QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer,
                           ChunkWriter::Create(std::move(fields), sections, options));
    for (size_t s = 0; s < sections.size();) {
      const int64_t layer = sections[s].layer_first;
      LayerKV to;
      for (; s < sections.size() && sections[s].layer_first == layer; ++s) {
        SetSection(layers[static_cast<size_t>(layer)], sections[s],
                   writer.section(static_cast<int64_t>(s)), &to);
      }
      QUIRE_RETURN_IF_ERROR(cache.ExportKV(seq_id, layer, start, to));
    }
    return std::move(writer).Seal();
  });
}

Result<LayerKV> ChunkLayer(const ChunkView& chunk, const AttentionLayerSpec& spec, int64_t layer,
                           int64_t position) {
  return GuardEntry([&]() -> Result<LayerKV> {
    const ChunkHeader& header = chunk.header();
    if (header.first_position != kNotRotated && header.first_position != position) {
      return Status(StatusCode::kIncompatible,
                    "ImportChunks: the chunk's keys are rotated for position " +
                        std::to_string(header.first_position) + " and would stand at " +
                        std::to_string(position));
    }
    const int64_t count = static_cast<int64_t>(header.tokens.size());
    LayerKV kv;
    for (const SectionSpec& section : SectionsOf(layer, spec, count)) {
      QUIRE_ASSIGN_OR_RETURN(const auto bytes, FindSection(chunk, section));
      SetSection(spec, section, bytes, &kv);
    }
    return kv;
  });
}

LayerKV FirstTokens(const LayerKV& kv, int64_t count) {
  const auto first = [count](const TensorView& rows) {
    if (rows.rank() == 0) return rows;  // scales, where there are none
    std::vector<int64_t> shape(rows.shape().begin(), rows.shape().end());
    shape[0] = count;
    return TensorView(rows.data(), rows.dtype(), shape);
  };
  return {.k = first(kv.k),
          .v = first(kv.v),
          .k_scale = first(kv.k_scale),
          .v_scale = first(kv.v_scale)};
}

Status ImportChunks(AttentionKVCache& cache, int64_t seq_id, std::span<const ChunkView> chunks) {
  return GuardEntry([&]() -> Status {
    int64_t position = 0;
    if (cache.HasSequence(seq_id)) {
      QUIRE_ASSIGN_OR_RETURN(position, cache.GetSequenceLength(seq_id));
    }
    std::vector<KVBlock> blocks;
    for (const ChunkView& chunk : chunks) {
      QUIRE_ASSIGN_OR_RETURN(KVBlock block, BlockOf(chunk, cache.options().layers, position));
      blocks.push_back(std::move(block));
      position += static_cast<int64_t>(chunk.header().tokens.size());
    }
    return ImportBlocks(cache, seq_id, blocks);
  });
}

}  // namespace quire
