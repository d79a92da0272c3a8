#include "quire/kv_export.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/guard.h"

namespace quire {
namespace {

// Part of the passport's "numerics": counts up when a kernel's arithmetic changes, so that KV of an
// older build is recomputed instead of mixed in.
constexpr std::string_view kKernelGeneration = "1";

// The type in which attention multiplies: bf16 pairs where the CPU has them, else widened.
std::string_view ComputeType(const AttentionKVCacheOptions& options) {
  const bool pairs = options.kernel_path == "avx512_bf16";
  for (const AttentionLayerSpec& layer : options.layers) {
    if (pairs && layer.dtype == DType::kBF16) return "bf16";
  }
  return "f32";
}

TensorView ViewOf(std::span<const std::byte> bytes, DType dtype, int64_t count, int64_t heads,
                  int64_t dim) {
  return TensorView(bytes.data(), dtype, {count, heads, dim});
}

LayerKV ViewOfLayer(const AttentionLayerSpec& spec, int64_t count, std::span<const std::byte> k,
                    std::span<const std::byte> v) {
  return {.k = ViewOf(k, spec.dtype, count, spec.num_kv_heads, spec.qk_head_dim),
          .v = ViewOf(v, spec.dtype, count, spec.num_kv_heads, spec.v_head_dim)};
}

SectionSpec SectionOf(SectionKind kind, int64_t layer, const AttentionLayerSpec& spec,
                      int64_t count) {
  const int64_t dim = kind == SectionKind::kKey ? spec.qk_head_dim : spec.v_head_dim;
  return {kind, layer, layer, spec.dtype, {count, spec.num_kv_heads, dim}};
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
    for (size_t l = 0; l < options.layers.size(); ++l) {
      if (!options.layers[l].rope) continue;
      return Status(StatusCode::kBadArgument,
                    "CachePassport: layer " + std::to_string(l) +
                        " has RoPE options of its own; a passport has one set for all layers, so "
                        "KV of this cache cannot leave it as chunks");
    }
    identity.rope = RopePassport(options.rope, long_factors);
    identity.layout = kLogicalLayout;
    identity.numerics = std::string(kKernelGeneration) + "/" + options.kernel_path + "/" +
                        std::string(ComputeType(options));
    identity.first_layer = 0;
    identity.layers.clear();
    for (const AttentionLayerSpec& layer : options.layers) {
      identity.layers.push_back({.kind = StateKind::kAttention,
                                 .dtype = layer.dtype,
                                 .kv_heads = layer.num_kv_heads,
                                 .head_dim = layer.qk_head_dim,
                                 .v_head_dim = layer.v_head_dim});
    }
    QUIRE_RETURN_IF_ERROR(identity.ToJson().status());
    return std::move(identity);
  });
}

ChunkFields NextFields(const Passport& passport, const KeySpace& keys, const ChunkKey& previous,
                       int64_t start, std::span<const int32_t> tokens) {
  // RopePassport begins so if the cache stores rotated keys.
  const bool rotated = passport.rope.starts_with("mode=normal");
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
      for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue})
        sections.push_back(SectionOf(kind, static_cast<int64_t>(l), layers[l], count));
    }
    QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer,
                           ChunkWriter::Create(std::move(fields), sections, options));
    for (size_t l = 0; l < layers.size(); ++l) {
      const int64_t layer = static_cast<int64_t>(l);
      const LayerKV to =
          ViewOfLayer(layers[l], count, writer.section(2 * layer), writer.section(2 * layer + 1));
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
    QUIRE_ASSIGN_OR_RETURN(const auto k,
                           FindSection(chunk, SectionOf(SectionKind::kKey, layer, spec, count)));
    QUIRE_ASSIGN_OR_RETURN(const auto v,
                           FindSection(chunk, SectionOf(SectionKind::kValue, layer, spec, count)));
    return ViewOfLayer(spec, count, k, v);
  });
}

LayerKV FirstTokens(const LayerKV& kv, int64_t count) {
  const auto first = [count](const TensorView& rows) {
    return TensorView(rows.data(), rows.dtype(), {count, rows.dim(1), rows.dim(2)});
  };
  return {.k = first(kv.k), .v = first(kv.v)};
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
