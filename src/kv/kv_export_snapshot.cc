// Snapshots out of and into a cache.
#include <algorithm>
#include <utility>

#include "base/guard.h"
#include "chunk/snapshot_file.h"
#include "quire/kv_export.h"
#include "quire/snapshot.h"

namespace quire {
namespace {

Status CheckLength(AttentionKVCache& cache, int64_t seq_id, size_t token_count) {
  QUIRE_ASSIGN_OR_RETURN(const int64_t length, cache.GetSequenceLength(seq_id));
  if (length == static_cast<int64_t>(token_count)) return Status();
  return Status(StatusCode::kBadArgument, "SaveSnapshot: sequence " + std::to_string(seq_id) +
                                              " has " + std::to_string(length) + " tokens, and " +
                                              std::to_string(token_count) + " ids were given");
}

// The chunk of all state that belongs to no token.
Result<ChunkBuffer> StateChunk(const KeySpace& keys, const std::string& sampler) {
  ChunkFields fields;
  fields.key = SnapshotStateKey(keys);
  fields.fingerprint = keys.fingerprint();
  std::vector<SectionSpec> sections;
  if (!sampler.empty()) {
    sections.push_back(
        {SectionKind::kSampler, 0, 0, DType::kU8, {static_cast<int64_t>(sampler.size())}});
  }
  QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer, ChunkWriter::Create(std::move(fields), sections));
  if (!sampler.empty())
    std::ranges::copy(std::as_bytes(std::span(sampler)), writer.section(0).begin());
  return std::move(writer).Seal();
}

Status SaveChunks(AttentionKVCache& cache, int64_t seq_id, std::vector<ChunkFields> chain,
                  SnapshotWriter& writer) {
  int64_t start = 0;
  for (ChunkFields& fields : chain) {
    const int64_t count = static_cast<int64_t>(fields.tokens.size());
    QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer chunk,
                           ExportChunk(cache, seq_id, start, std::move(fields)));
    QUIRE_RETURN_IF_ERROR(writer.Add(chunk.bytes()));
    start += count;
  }
  return Status();
}

// What of the snapshot's passport may be another than the cache's: how tokens are cut into chunks,
// and the kernels if the caller says so.
Status CheckPassport(const AttentionKVCache& cache, Passport identity, const SnapshotInfo& info,
                     const SnapshotLoadOptions& options, const std::string& path) {
  identity.block_tokens = info.passport.block_tokens;
  QUIRE_ASSIGN_OR_RETURN(Passport ours,
                         CachePassport(cache, std::move(identity), info.long_factors));
  if (options.any_numerics) ours.numerics = info.passport.numerics;
  QUIRE_ASSIGN_OR_RETURN(const std::string json, ours.ToJson());
  const std::string difference = PassportDifference(json, info.passport_json);
  if (difference.empty()) return Status();
  return Status(StatusCode::kIncompatible,
                path + ": the snapshot is of another model, cache or build: " + difference);
}

Status LoadChunks(AttentionKVCache& cache, int64_t seq_id, const SnapshotReader& reader,
                  SnapshotInfo& info) {
  QUIRE_ASSIGN_OR_RETURN(const bool long_factors, cache.UsesLongRope(seq_id));
  if (long_factors != info.long_factors)
    QUIRE_RETURN_IF_ERROR(cache.SelectLongRope(seq_id, info.long_factors));
  ChunkKey previous = reader.keys().root();
  for (int64_t i = 0; i < reader.kv_chunk_count(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotChunk chunk, reader.ReadChunk(i, previous));
    QUIRE_RETURN_IF_ERROR(ImportChunks(cache, seq_id, std::span(&chunk.view, 1)));
    const std::vector<int32_t>& tokens = chunk.view.header().tokens;
    info.tokens.insert(info.tokens.end(), tokens.begin(), tokens.end());
    previous = chunk.view.header().key;
  }
  return Status();
}

}  // namespace

Status SaveSnapshot(AttentionKVCache& cache, int64_t seq_id, const SnapshotContents& contents,
                    const std::string& path) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckLength(cache, seq_id, contents.tokens.size()));
    QUIRE_ASSIGN_OR_RETURN(const bool long_factors, cache.UsesLongRope(seq_id));
    QUIRE_ASSIGN_OR_RETURN(const Passport passport,
                           CachePassport(cache, contents.identity, long_factors));
    QUIRE_ASSIGN_OR_RETURN(std::string json, passport.ToJson());
    const KeySpace keys(FingerprintOf(json), "");
    std::vector<ChunkFields> chain = ChainFields(passport, keys, contents.tokens, /*tail=*/true);
    QUIRE_ASSIGN_OR_RETURN(
        SnapshotWriter writer,
        SnapshotWriter::Create(path, std::move(json), static_cast<int64_t>(chain.size()) + 1,
                               contents.created_ms));
    QUIRE_RETURN_IF_ERROR(SaveChunks(cache, seq_id, std::move(chain), writer));
    QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer state, StateChunk(keys, contents.sampler));
    QUIRE_RETURN_IF_ERROR(writer.Add(state.bytes()));
    return std::move(writer).Finish();
  });
}

Result<SnapshotInfo> LoadSnapshot(AttentionKVCache& cache, int64_t seq_id, const Passport& identity,
                                  const std::string& path, const SnapshotLoadOptions& options) {
  return GuardEntry([&]() -> Result<SnapshotInfo> {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotReader reader, SnapshotReader::Open(path));
    QUIRE_ASSIGN_OR_RETURN(SnapshotInfo info, InfoWithoutTokens(reader));
    QUIRE_RETURN_IF_ERROR(CheckPassport(cache, identity, info, options, path));
    QUIRE_RETURN_IF_ERROR(cache.AddSequence(seq_id));
    // Guarded by itself: the sequence goes again also when there is no memory.
    const Status loaded = GuardEntry([&] { return LoadChunks(cache, seq_id, reader, info); });
    if (loaded.ok()) return info;
    const Status removed = cache.RemoveSequence(seq_id);  // it is no part of a forward: cannot fail
    return removed.ok() ? loaded : removed;
  });
}

}  // namespace quire
