// What can be said about snapshots without a cache.
#include "quire/snapshot.h"

#include <algorithm>
#include <cstring>

#include "base/guard.h"
#include "chunk/snapshot_file.h"

namespace quire {
namespace {

Status ReadState(const SnapshotReader& reader, SnapshotInfo* info) {
  QUIRE_ASSIGN_OR_RETURN(const SnapshotChunk state, reader.ReadState());
  for (const Section& section : state.view.header().sections) {
    if (section.kind == SectionKind::kRecurrentState) info->state_bytes += section.length;
  }
  if (reader.version() == kSnapshotVersionHiding) {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotWindows windows, ReadSnapshotWindows(state.view));
    info->windows = windows.windows;
  }
  const int64_t index = state.view.header().Find(SectionKind::kSampler, 0);
  if (index < 0) return Status();
  QUIRE_ASSIGN_OR_RETURN(const auto bytes, state.view.section(index));
  info->sampler.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return Status();
}

}  // namespace

Result<SnapshotInfo> InfoWithoutTokens(const SnapshotReader& reader) {
  SnapshotInfo info;
  info.passport = reader.passport();
  info.passport_json = reader.passport_json();
  info.created_ms = reader.created_ms();
  info.chunk_count = reader.kv_chunk_count();
  info.file_bytes = reader.file_bytes();
  const std::string& rope = info.passport.rope;
  const auto has = [&](std::string_view field) { return rope.find(field) != std::string::npos; };
  info.long_factors = has(";set=long") || (has(";scaling=dynamic;") && !has(";set=short"));
  info.version = reader.version();
  QUIRE_RETURN_IF_ERROR(ReadState(reader, &info));
  return info;
}

namespace {

// Calls visit(header) for the KV chunks in order.
template <typename F>
Status VisitHeaders(const SnapshotReader& reader, F&& visit) {
  ChunkKey previous = reader.keys().root();
  for (int64_t i = 0; i < reader.kv_chunk_count(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const ChunkHeader header, reader.ReadHeader(i, previous));
    previous = header.key;
    visit(header);
  }
  return Status();
}

// Calls visit(chunk) for the KV chunks in order, each verified.
template <typename F>
Status VisitChunks(const SnapshotReader& reader, F&& visit) {
  ChunkKey previous = reader.keys().root();
  for (int64_t i = 0; i < reader.kv_chunk_count(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotChunk chunk, reader.ReadChunk(i, previous));
    previous = chunk.view.header().key;
    visit(chunk.view);
  }
  return Status();
}

void AddTokens(const ChunkHeader& header, std::vector<int32_t>& tokens) {
  tokens.insert(tokens.end(), header.tokens.begin(), header.tokens.end());
}

// What is remembered of a chunk for a comparison: its tokens and the digests of its sections.
struct ChunkSummary {
  std::vector<int32_t> tokens;
  std::vector<Section> sections;
};

struct SnapshotSummary {
  SnapshotInfo info;
  std::vector<ChunkSummary> chunks;
  std::vector<Section> states;  // of recurrent layers
};

Result<SnapshotSummary> Summarise(const std::string& path) {
  QUIRE_ASSIGN_OR_RETURN(const SnapshotReader reader, SnapshotReader::Open(path));
  SnapshotSummary summary;
  QUIRE_ASSIGN_OR_RETURN(summary.info, InfoWithoutTokens(reader));
  QUIRE_RETURN_IF_ERROR(VisitChunks(reader, [&](const ChunkView& chunk) {
    AddTokens(chunk.header(), summary.info.tokens);
    summary.chunks.push_back({chunk.header().tokens, chunk.header().sections});
  }));
  QUIRE_ASSIGN_OR_RETURN(const SnapshotChunk state, reader.ReadState());
  for (const Section& section : state.view.header().sections) {
    if (section.kind == SectionKind::kRecurrentState) summary.states.push_back(section);
  }
  return summary;
}

bool SameSection(const Section& a, const Section& b) {
  return static_cast<const SectionSpec&>(a) == static_cast<const SectionSpec&>(b) &&
         a.crc32c == b.crc32c;
}

// Compares by the sections' verified digests: 32 bits find a difference in all but one of 2^32
// cases, for each section.
void CompareChunk(const ChunkSummary& ours, const ChunkSummary& theirs, int64_t position,
                  SnapshotDifference& difference) {
  for (const Section& section : ours.sections) {
    const auto is_its = [&](const Section& other) {
      return other.kind == section.kind && other.layer_first == section.layer_first;
    };
    const auto other = std::ranges::find_if(theirs.sections, is_its);
    if (other == theirs.sections.end()) continue;  // one has left out what slid out of a window
    ++difference.compared_sections;
    if (SameSection(section, *other)) continue;
    if (difference.different_sections++ > 0) continue;
    const int64_t last = position + static_cast<int64_t>(ours.tokens.size()) - 1;
    difference.first_section = "layer " + std::to_string(section.layer_first) + " " +
                               std::string(SectionKindName(section.kind)) + " of tokens " +
                               std::to_string(position) + " to " + std::to_string(last);
  }
}

}  // namespace

Result<SnapshotInfo> ReadSnapshotInfo(const std::string& path) {
  return GuardEntry([&]() -> Result<SnapshotInfo> {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotReader reader, SnapshotReader::Open(path));
    QUIRE_ASSIGN_OR_RETURN(SnapshotInfo info, InfoWithoutTokens(reader));
    QUIRE_RETURN_IF_ERROR(
        VisitHeaders(reader, [&](const ChunkHeader& header) { AddTokens(header, info.tokens); }));
    return info;
  });
}

Result<SnapshotInfo> VerifySnapshot(const std::string& path) {
  return GuardEntry([&]() -> Result<SnapshotInfo> {
    QUIRE_ASSIGN_OR_RETURN(SnapshotSummary summary, Summarise(path));
    return std::move(summary.info);
  });
}

Result<SnapshotDifference> DiffSnapshots(const std::string& ours, const std::string& theirs) {
  return GuardEntry([&]() -> Result<SnapshotDifference> {
    QUIRE_ASSIGN_OR_RETURN(const SnapshotSummary a, Summarise(ours));
    QUIRE_ASSIGN_OR_RETURN(const SnapshotSummary b, Summarise(theirs));
    SnapshotDifference difference;
    difference.passport = PassportDifference(a.info.passport_json, b.info.passport_json);
    difference.same_sampler = a.info.sampler == b.info.sampler;
    difference.same_windows = a.info.windows == b.info.windows;
    difference.same_states = std::ranges::equal(a.states, b.states, SameSection);
    const auto [end, unused] = std::ranges::mismatch(a.info.tokens, b.info.tokens);
    difference.common_tokens = end - a.info.tokens.begin();
    int64_t position = 0;
    for (size_t i = 0; i < std::min(a.chunks.size(), b.chunks.size()); ++i) {
      if (a.chunks[i].tokens != b.chunks[i].tokens) break;
      CompareChunk(a.chunks[i], b.chunks[i], position, difference);
      position += static_cast<int64_t>(a.chunks[i].tokens.size());
    }
    return difference;
  });
}

}  // namespace quire
