#include "chunk/testing/test_chunk.h"

#include <algorithm>

#include "base/check.h"
#include "chunk/chunk_layout.h"
#include "chunk/snapshot_file.h"

namespace quire {

Passport SamplePassport() {
  return {.model = "sample",
          .block_tokens = 5,
          .layers = std::vector<PassportLayer>(
              2, {.dtype = DType::kBF16, .kv_heads = 1, .head_dim = 4, .v_head_dim = 2})};
}

ChunkFields SampleFields() {
  const Digest fingerprint = *SamplePassport().Fingerprint();
  const KeySpace space(fingerprint, "salt");
  ChunkFields fields;
  fields.tokens = {3, 1, 4, 1, 5};
  fields.key = space.Next(space.root(), fields.tokens);
  fields.fingerprint = fingerprint;
  fields.first_position = 0;
  fields.created_ms = 1000;
  fields.expires_ms = 2000;
  fields.context = space.root().digest;
  fields.rope_table_id = ShortId("rope");
  fields.generation = 7;
  fields.numerics_id = 9;
  return fields;
}

std::vector<SectionSpec> SampleSections() {
  std::vector<SectionSpec> sections;
  for (int64_t layer = 0; layer < 2; ++layer) {
    sections.push_back({SectionKind::kKey, layer, layer, DType::kBF16, {5, 1, 4}});
    sections.push_back({SectionKind::kValue, layer, layer, DType::kBF16, {5, 1, 2}});
  }
  return sections;
}

std::vector<std::byte> ChunkOf(ChunkFields fields, const std::vector<SectionSpec>& sections,
                               const ChunkWriteOptions& options) {
  Result<ChunkWriter> writer = ChunkWriter::Create(std::move(fields), sections, options);
  QUIRE_CHECK(writer.ok()) << writer.status().ToString();
  for (size_t s = 0; s < sections.size(); ++s) {
    const std::span<std::byte> bytes = writer->section(static_cast<int64_t>(s)).value();
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(s * 37 + i);
  }
  const Result<ChunkBuffer> buffer = std::move(*writer).Seal();
  QUIRE_CHECK(buffer.ok()) << buffer.status().ToString();
  return {buffer->bytes().begin(), buffer->bytes().end()};
}

std::vector<std::byte> SampleChunk(const ChunkWriteOptions& options) {
  return ChunkOf(SampleFields(), SampleSections(), options);
}

Passport CallerPassport() {
  Passport passport = SamplePassport();
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>(), {2, 3}, {2, 3, 1, 1, 2}}) {
    passport.layers.push_back({.kind = StateKind::kCaller,
                               .dtype = DType::kF16,
                               .kv_heads = 1,
                               .head_dim = 1,
                               .v_head_dim = 1,
                               .state_shape = shape});
  }
  return passport;
}

std::vector<std::byte> CallerChunk() {
  ChunkFields fields = SampleFields();
  fields.fingerprint = *CallerPassport().Fingerprint();
  std::vector<SectionSpec> sections = SampleSections();
  sections.push_back({SectionKind::kRecurrentState, 2, 2, DType::kF16, {}});
  sections.push_back({SectionKind::kRecurrentState, 3, 3, DType::kF16, {2, 3}});
  sections.push_back({SectionKind::kRecurrentState, 4, 4, DType::kF16, {6, 1, 1, 2}});
  return ChunkOf(std::move(fields), sections);
}

ChunkExpectation ExpectSample() {
  static const ChunkFields fields = SampleFields();
  return {.key = fields.key,
          .fingerprint = fields.fingerprint,
          .now_ms = 1500,
          .tokens = std::span<const int32_t>(fields.tokens)};
}

Status WriteSampleSnapshot(const std::string& path) {
  QUIRE_ASSIGN_OR_RETURN(std::string json, SamplePassport().ToJson());
  const KeySpace keys(FingerprintOf(json), "");
  QUIRE_ASSIGN_OR_RETURN(SnapshotWriter writer,
                         SnapshotWriter::Create(path, std::move(json), 2, /*created_ms=*/1));
  ChunkFields fields;
  fields.fingerprint = keys.fingerprint();
  fields.tokens = {3, 1, 4, 1, 5};
  fields.key = keys.Next(keys.root(), fields.tokens);
  QUIRE_RETURN_IF_ERROR(writer.Add(ChunkOf(fields, SampleSections())));
  fields.tokens.clear();
  fields.key = SnapshotStateKey(keys);
  QUIRE_RETURN_IF_ERROR(writer.Add(ChunkOf(fields, {})));
  return std::move(writer).Finish();
}

Passport HidingPassport() {
  Passport passport = SamplePassport();
  passport.layers[1].window = 3;
  passport.layers.push_back({.kind = StateKind::kRecurrent,
                             .dtype = DType::kF32,
                             .kv_heads = 1,
                             .head_dim = 2,
                             .v_head_dim = 3});
  return passport;
}

namespace {

KeySpace HidingKeys() { return KeySpace(*HidingPassport().Fingerprint(), ""); }

}  // namespace

ChunkExpectation ExpectHidingState() {
  const KeySpace keys = HidingKeys();
  return {.key = SnapshotStateKey(keys),
          .fingerprint = keys.fingerprint(),
          .tokens = std::span<const int32_t>()};
}

std::vector<std::byte> HidingStateChunk(std::span<const std::byte> windows) {
  const std::vector<SectionSpec> sections = {
      SnapshotWindowSection(), {SectionKind::kRecurrentState, 2, 2, DType::kF32, {1, 2, 3}}};
  const KeySpace keys = HidingKeys();
  ChunkFields fields;
  fields.fingerprint = keys.fingerprint();
  fields.key = SnapshotStateKey(keys);
  Result<ChunkWriter> writer = ChunkWriter::Create(std::move(fields), sections);
  QUIRE_CHECK(writer.ok()) << writer.status().ToString();
  std::ranges::copy(windows.first(64), writer->section(0).value().begin());
  std::ranges::fill(writer->section(1).value(), std::byte{0x3f});
  const Result<ChunkBuffer> buffer = std::move(*writer).Seal();
  QUIRE_CHECK(buffer.ok()) << buffer.status().ToString();
  return {buffer->bytes().begin(), buffer->bytes().end()};
}

Status WriteHidingSnapshot(const std::string& path) {
  QUIRE_ASSIGN_OR_RETURN(std::string json, HidingPassport().ToJson());
  const KeySpace keys = HidingKeys();
  QUIRE_ASSIGN_OR_RETURN(
      SnapshotWriter writer,
      SnapshotWriter::Create(path, std::move(json), 2, /*created_ms=*/1, kSnapshotVersionHiding));
  ChunkFields fields;
  fields.fingerprint = keys.fingerprint();
  fields.tokens = {3, 1, 4, 1, 5};
  fields.key = keys.Next(keys.root(), fields.tokens);
  std::vector<SectionSpec> sections = SampleSections();
  sections[0].dims[0] = sections[1].dims[0] = 4;
  sections[2].dims[0] = sections[3].dims[0] = 2;
  QUIRE_RETURN_IF_ERROR(writer.Add(ChunkOf(fields, sections)));
  std::vector<std::byte> windows(64);
  WriteSnapshotWindows({.window = 5, .sinks = 1, .slid = 1}, 5, windows);
  QUIRE_RETURN_IF_ERROR(writer.Add(HidingStateChunk(windows)));
  return std::move(writer).Finish();
}

void SealAgain(std::vector<std::byte>& chunk) {
  using namespace chunk_layout;
  if (chunk.size() < kFixedBytes) return;
  const std::span<const std::byte> bytes(chunk);
  const int64_t header_bytes = Load<uint32_t>(bytes, kHeaderBytesAt);
  if (header_bytes < kChunkFixedBytes || header_bytes > static_cast<int64_t>(chunk.size())) return;
  const bool has_mac = (Load<uint16_t>(bytes, kFlagsAt) & kFlagMac) != 0;
  const int64_t sections = Load<uint32_t>(bytes, kSectionCountAt);
  const int64_t tokens = Load<uint32_t>(bytes, kTokenCountAt);
  if (HeaderContentBytes(sections, tokens, has_mac) > header_bytes) return;
  const size_t mac_at =
      has_mac ? static_cast<size_t>(HeaderContentBytes(sections, tokens, false)) : 0;
  const uint32_t crc = HeaderCrc(bytes.first(static_cast<size_t>(header_bytes)), mac_at);
  Store(std::span(chunk), kCrcAt, crc);
}

void SealSnapshotAgain(std::span<std::byte> file) {
  constexpr size_t kHeaderBytesAt = 12;
  constexpr size_t kCrcAt = 28;
  if (file.size() < 64) return;
  const size_t header_bytes = chunk_layout::Load<uint32_t>(file, kHeaderBytesAt);
  if (header_bytes < 64 || header_bytes > file.size()) return;
  chunk_layout::Store(file, kCrcAt, uint32_t{0});
  chunk_layout::Store(file, kCrcAt, Crc32c(file.data(), header_bytes));
}

}  // namespace quire
