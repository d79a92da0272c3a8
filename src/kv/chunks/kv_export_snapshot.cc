// Snapshots out of and into a cache.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "chunk/snapshot_file.h"
#include "kv/chunks/kv_sections.h"
#include "quire/kv_export.h"
#include "quire/snapshot.h"

namespace quire {
namespace {

Status CheckLength(const SequenceStates& states, int64_t seq_id, size_t token_count) {
  QUIRE_ASSIGN_OR_RETURN(const int64_t length, states.GetSequenceLength(seq_id));
  if (length == static_cast<int64_t>(token_count)) return Status();
  return Status(StatusCode::kBadArgument, "SaveSnapshot: sequence " + std::to_string(seq_id) +
                                              " has " + std::to_string(length) + " tokens, and " +
                                              std::to_string(token_count) + " ids were given");
}

// What a file of version 2 has beyond one of version 1.
struct HiddenState {
  WindowSettings windows;
  int64_t length = 0;
  HiddenRanges hidden;
  bool any = false;
};

Result<HiddenState> HiddenStateOf(const SequenceStates& states, int64_t seq_id) {
  HiddenState state;
  QUIRE_ASSIGN_OR_RETURN(state.length, states.GetSequenceLength(seq_id));
  if (states.attention() != nullptr) {
    QUIRE_ASSIGN_OR_RETURN(state.windows, states.attention()->GetWindows(seq_id));
  }
  state.hidden = HiddenOfLayers(states, state.windows, state.length);
  const auto hides = [](const TokenRange& range) { return range.count() > 0; };
  state.any = states.recurrent_count() > 0 || !(state.windows == WindowSettings()) ||
              std::ranges::any_of(state.hidden, hides);
  return state;
}

// The chunk of all state that belongs to no token.
Result<ChunkBuffer> StateChunk(const SequenceStates& states, int64_t seq_id,
                               const HiddenState& hidden, const KeySpace& keys,
                               const std::string& sampler) {
  ChunkFields fields;
  fields.key = SnapshotStateKey(keys);
  fields.fingerprint = keys.fingerprint();
  std::vector<SectionSpec> sections;
  if (hidden.length > 0) {
    QUIRE_ASSIGN_OR_RETURN(sections, StateSections(states));
  }
  if (!sampler.empty()) {
    sections.push_back(
        {SectionKind::kSampler, 0, 0, DType::kU8, {static_cast<int64_t>(sampler.size())}});
  }
  if (hidden.any) sections.push_back(SnapshotWindowSection());
  std::ranges::sort(sections, {}, [](const SectionSpec& section) {
    return std::pair(section.layer_first, section.kind);
  });
  QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer, ChunkWriter::Create(std::move(fields), sections));
  const auto bytes_of = [&](SectionKind kind) {
    return writer.section(writer.header().Find(kind, 0));
  };
  if (!sampler.empty()) {
    QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, bytes_of(SectionKind::kSampler));
    std::ranges::copy(std::as_bytes(std::span(sampler)), bytes.begin());
  }
  if (hidden.any) {
    QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, bytes_of(SectionKind::kWindow));
    WriteSnapshotWindows(hidden.windows, hidden.length, bytes);
  }
  if (hidden.length > 0) QUIRE_RETURN_IF_ERROR(ExportStates(states, seq_id, hidden.length, writer));
  return std::move(writer).Seal();
}

Status SaveChunks(const SequenceStates& states, int64_t seq_id, const HiddenState& hidden,
                  std::vector<ChunkFields> chain, SnapshotWriter& writer) {
  int64_t start = 0;
  for (ChunkFields& fields : chain) {
    const int64_t count = static_cast<int64_t>(fields.tokens.size());
    QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer chunk,
                           ExportRows(states, seq_id, start, std::move(fields), hidden.hidden,
                                      /*with_states=*/false, {}));
    QUIRE_RETURN_IF_ERROR(writer.Add(chunk.bytes()));
    start += count;
  }
  QUIRE_DCHECK(start == hidden.length) << "the chain has other tokens than the sequence";
  return Status();
}

// What of the snapshot's passport may be another than the cache's: how tokens are cut into chunks,
// and the kernels if the caller says so.
Status CheckPassport(const SequenceStates& states, Passport identity, const SnapshotInfo& info,
                     const SnapshotLoadOptions& options, const std::string& path) {
  identity.block_tokens = info.passport.block_tokens;
  QUIRE_ASSIGN_OR_RETURN(Passport ours,
                         CachePassport(states, std::move(identity), info.long_factors));
  if (options.any_numerics) ours.numerics = info.passport.numerics;
  QUIRE_ASSIGN_OR_RETURN(const std::string json, ours.ToJson());
  const std::string difference = PassportDifference(json, info.passport_json);
  if (difference.empty()) return Status();
  return Status(StatusCode::kIncompatible,
                path + ": the snapshot is of another model, cache or build: " + difference);
}

// Calls take(chunk, position) for the chunks in order, each verified, and collects their tokens.
template <typename F>
Status ForEachChunk(const SnapshotReader& reader, SnapshotInfo& info, F&& take) {
  ChunkKey previous = reader.keys().root();
  for (int64_t i = 0; i < reader.kv_chunk_count(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(SnapshotChunk chunk, reader.ReadChunk(i, previous));
    previous = chunk.view.header().key;
    const std::vector<int32_t> tokens = chunk.view.header().tokens;
    QUIRE_RETURN_IF_ERROR(take(std::move(chunk), static_cast<int64_t>(info.tokens.size())));
    info.tokens.insert(info.tokens.end(), tokens.begin(), tokens.end());
  }
  return Status();
}

Status LoadPlain(AttentionKVCache& cache, int64_t seq_id, const SnapshotReader& reader,
                 SnapshotInfo& info) {
  return ForEachChunk(reader, info, [&](const SnapshotChunk& chunk, int64_t position) -> Status {
    const SequenceStates states(cache);
    const HiddenRanges none(static_cast<size_t>(AttentionLayerCount(states)));
    QUIRE_ASSIGN_OR_RETURN(const KVBlock block,
                           ImportRows(chunk.view, states, position, none, none));
    return cache.ImportKV(seq_id, std::span(&block, 1));
  });
}

// REQUIRES: the sequence has no tokens.
Status EnableWindow(const SequenceStates& states, int64_t seq_id, const WindowSettings& windows) {
  if (windows == WindowSettings()) return Status();
  QUIRE_DCHECK(states.attention() != nullptr) << "only attention has windows";
  const bool is_span = windows.span > 0;
  return states.attention()->EnableSlidingWindowForSeq(
      seq_id, is_span ? windows.span : windows.window,
      is_span ? windows.span_sinks : windows.sinks);
}

// All chunks at once: what a window hides is known at their end, and a sequence that ended before
// would lack rows that it sees.
Status LoadHiding(const SequenceStates& states, int64_t seq_id, const SnapshotReader& reader,
                  SnapshotInfo& info) {
  QUIRE_ASSIGN_OR_RETURN(const SnapshotChunk state, reader.ReadState());
  QUIRE_ASSIGN_OR_RETURN(const SnapshotWindows saved, ReadSnapshotWindows(state.view));
  if (states.attention() == nullptr && !(saved.windows == WindowSettings())) {
    return Status(StatusCode::kCorrupt,
                  "damaged snapshot: it has windows, and its passport no attention layers");
  }
  const HiddenRanges hidden = HiddenOfLayers(states, saved.windows, saved.length);
  std::vector<SnapshotChunk> chunks;
  std::vector<KVBlock> blocks;
  std::vector<int64_t> tokens;
  QUIRE_RETURN_IF_ERROR(
      ForEachChunk(reader, info, [&](SnapshotChunk chunk, int64_t position) -> Status {
        QUIRE_ASSIGN_OR_RETURN(KVBlock block,
                               ImportRows(chunk.view, states, position, hidden, hidden));
        blocks.push_back(std::move(block));
        tokens.push_back(static_cast<int64_t>(chunk.view.header().tokens.size()));
        chunks.push_back(std::move(chunk));
        return Status();
      }));
  if (static_cast<int64_t>(info.tokens.size()) != saved.length) {
    return Status(StatusCode::kCorrupt, "damaged snapshot: its windows are those of " +
                                            std::to_string(saved.length) + " tokens, and it has " +
                                            std::to_string(info.tokens.size()));
  }
  QUIRE_DCHECK(blocks.size() == tokens.size() && blocks.size() == chunks.size());
  if (saved.length == 0) return EnableWindow(states, seq_id, saved.windows);
  const KVImport import{.blocks = blocks, .tokens = tokens, .windows = saved.windows};
  QUIRE_ASSIGN_OR_RETURN(const auto tensors, StatesOf(state.view, states));
  if (states.composite() != nullptr)
    return states.composite()->ImportState(seq_id, saved.length, import, tensors);
  if (states.attention() != nullptr) return states.attention()->ImportVisibleKV(seq_id, import);
  return states.recurrent(0).ImportState(seq_id, saved.length, tensors[0]);
}

Status LoadChunks(const SequenceStates& states, int64_t seq_id, const SnapshotReader& reader,
                  SnapshotInfo& info) {
  AttentionKVCache* const cache = states.attention();
  if (cache != nullptr) {
    QUIRE_ASSIGN_OR_RETURN(const bool long_factors, cache->UsesLongRope(seq_id));
    if (long_factors != info.long_factors)
      QUIRE_RETURN_IF_ERROR(cache->SelectLongRope(seq_id, info.long_factors));
  }
  if (reader.version() == kSnapshotVersionHiding) return LoadHiding(states, seq_id, reader, info);
  if (states.recurrent_count() > 0) {
    return Status(StatusCode::kCorrupt,
                  "damaged snapshot: a file of version 1 has no recurrent states");
  }
  QUIRE_DCHECK(cache != nullptr) << "a state without attention is recurrent";
  return LoadPlain(*cache, seq_id, reader, info);
}

}  // namespace

Status SaveSnapshot(const SequenceStates& states, int64_t seq_id, const SnapshotContents& contents,
                    const std::string& path) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckLength(states, seq_id, contents.tokens.size()));
    bool long_factors = false;
    if (states.attention() != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(long_factors, states.attention()->UsesLongRope(seq_id));
    }
    QUIRE_ASSIGN_OR_RETURN(const Passport passport,
                           CachePassport(states, contents.identity, long_factors));
    QUIRE_ASSIGN_OR_RETURN(std::string json, passport.ToJson());
    QUIRE_ASSIGN_OR_RETURN(const HiddenState hidden, HiddenStateOf(states, seq_id));
    const KeySpace keys(FingerprintOf(json), "");
    QUIRE_ASSIGN_OR_RETURN(std::vector<ChunkFields> chain,
                           ChainFields(passport, keys, contents.tokens, /*tail=*/true));
    QUIRE_ASSIGN_OR_RETURN(
        SnapshotWriter writer,
        SnapshotWriter::Create(path, std::move(json), static_cast<int64_t>(chain.size()) + 1,
                               contents.created_ms,
                               hidden.any ? kSnapshotVersionHiding : kSnapshotVersion));
    QUIRE_RETURN_IF_ERROR(SaveChunks(states, seq_id, hidden, std::move(chain), writer));
    QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer state,
                           StateChunk(states, seq_id, hidden, keys, contents.sampler));
    QUIRE_RETURN_IF_ERROR(writer.Add(state.bytes()));
    return std::move(writer).Finish();
  });
}

Result<SnapshotInfo> LoadSnapshot(const SequenceStates& states, int64_t seq_id,
                                  const Passport& identity, const std::string& path,
                                  const SnapshotLoadOptions& options) {
  return GuardEntry([&]() -> Result<SnapshotInfo> {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotReader reader, SnapshotReader::Open(path));
    QUIRE_ASSIGN_OR_RETURN(SnapshotInfo info, InfoWithoutTokens(reader));
    QUIRE_RETURN_IF_ERROR(CheckPassport(states, identity, info, options, path));
    QUIRE_RETURN_IF_ERROR(states.kv().AddSequence(seq_id));
    // Guarded by itself: the sequence goes again also when there is no memory.
    const Status loaded = GuardEntry([&] { return LoadChunks(states, seq_id, reader, info); });
    if (loaded.ok()) return info;
    const Status removed = states.kv().RemoveSequence(seq_id);  // it is no part of a forward
    return removed.ok() ? loaded : removed;
  });
}

}  // namespace quire
