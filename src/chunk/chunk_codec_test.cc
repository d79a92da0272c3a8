#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "chunk/chunk_layout.h"
#include "chunk/snapshot_file.h"
#include "chunk/testing/test_chunk.h"

namespace quire {
namespace {

using namespace chunk_layout;
using Bytes = std::vector<std::byte>;

const ChunkLimits& Limits() {
  static const ChunkLimits limits = ChunkLimits::Of(SamplePassport());
  return limits;
}

// Opens the chunk and reads all of it.
Status ReadAll(const Bytes& chunk, const ChunkExpectation& expected = ExpectSample()) {
  const Result<ChunkView> view = ChunkView::Open(chunk, expected, Limits());
  return view.ok() ? view->CheckAll() : view.status();
}

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::ranges::equal(a, b);
}

// ---- Round trips

TEST(ChunkCodec, ReadsWhatItWrites) {
  for (const int64_t alignment : {64, 4096}) {
    for (const std::string_view mac_key : {"", "secret"}) {
      const Bytes chunk = SampleChunk({.alignment = alignment, .mac_key = mac_key});
      ChunkExpectation expected = ExpectSample();
      expected.mac_key = mac_key;
      const Result<ChunkView> view = ChunkView::Open(chunk, expected, Limits());
      ASSERT_TRUE(view.ok()) << view.status().ToString();
      const ChunkHeader& header = view->header();
      const ChunkFields fields = SampleFields();
      EXPECT_EQ(header.key, fields.key);
      EXPECT_EQ(header.fingerprint, fields.fingerprint);
      EXPECT_EQ(header.first_position, 0u);
      EXPECT_EQ(header.created_ms, 1000);
      EXPECT_EQ(header.expires_ms, 2000);
      EXPECT_EQ(header.context, fields.context);
      EXPECT_EQ(header.rope_table_id, fields.rope_table_id);
      EXPECT_EQ(header.generation, 7u);
      EXPECT_EQ(header.numerics_id, 9u);
      EXPECT_EQ(header.tokens, fields.tokens);
      EXPECT_EQ(header.has_mac, !mac_key.empty());
      EXPECT_EQ(header.header_bytes % alignment, 0);
      EXPECT_EQ(header.total_bytes, static_cast<int64_t>(chunk.size()));
      const std::vector<SectionSpec> specs = SampleSections();
      ASSERT_EQ(header.sections.size(), specs.size());
      for (size_t s = 0; s < specs.size(); ++s) {
        EXPECT_EQ(static_cast<const SectionSpec&>(header.sections[s]), specs[s]);
        EXPECT_EQ(header.sections[s].offset % alignment, 0);
        const auto bytes = view->section(static_cast<int64_t>(s));
        ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
        ASSERT_EQ(static_cast<int64_t>(bytes->size()), header.sections[s].length);
        for (size_t i = 0; i < bytes->size(); ++i)
          ASSERT_EQ((*bytes)[i], static_cast<std::byte>(s * 37 + i));
      }
    }
  }
}

TEST(ChunkCodec, FlagsGoThereAndBack) {
  for (int flags = 0; flags < 8; ++flags) {
    ChunkFields fields = SampleFields();
    fields.tail = flags & 1;
    fields.contextual = flags & 2;
    fields.approximate = flags & 4;
    const auto header = DecodeChunkHeader(ChunkOf(fields, {}), Limits());
    ASSERT_TRUE(header.ok()) << header.status().ToString();
    EXPECT_EQ(header->tail, fields.tail);
    EXPECT_EQ(header->contextual, fields.contextual);
    EXPECT_EQ(header->approximate, fields.approximate);
  }
}

TEST(ChunkCodec, TakesEveryTypeScalarsAndEmptyTensors) {
  const std::vector<SectionSpec> specs = {
      {SectionKind::kKey, 0, 0, ElementType(kDLInt, 8), {3, 0, 2}},
      {SectionKind::kValue, 0, 0, ElementType(kDLFloat, 64), {}},
      {SectionKind::kRecurrentState, 0, 1, ElementType(10, 8), {1, 2, 3, 4}},
      {static_cast<SectionKind>(999), 1, 1, ElementType(kDLInt, 64), {0}},
      {SectionKind::kTokens, 65535, 65535, ElementType(kDLUInt, 16), {2}},
  };
  const auto header = DecodeChunkHeader(ChunkOf({}, specs), Limits());
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  const std::vector<int64_t> lengths = {0, 8, 24, 0, 4};
  ASSERT_EQ(header->sections.size(), specs.size());
  for (size_t s = 0; s < specs.size(); ++s) {
    EXPECT_EQ(static_cast<const SectionSpec&>(header->sections[s]), specs[s]);
    EXPECT_EQ(header->sections[s].length, lengths[s]);
  }
  EXPECT_EQ(header->Find(SectionKind::kRecurrentState, 1), 2);
  EXPECT_EQ(header->Find(SectionKind::kRecurrentState, 2), -1);
  EXPECT_EQ(header->Find(SectionKind::kKey, 1), -1);
}

TEST(ChunkCodec, AChunkWithoutTokensAndSectionsIsAHeader) {
  const Bytes chunk = ChunkOf({}, {});
  EXPECT_EQ(chunk.size(), 192u);
  EXPECT_TRUE(DecodeChunkHeader(chunk, Limits()).ok());
}

// The bytes of the page docs/formats/chunk.md: a change of them is a change of the format.
TEST(ChunkCodec, BytesOfTheFormatPage) {
  const Bytes chunk = SampleChunk();
  const std::span<const std::byte> bytes(chunk);
  ASSERT_EQ(chunk.size(), 384u + 4 * 64);
  EXPECT_EQ(std::memcmp(chunk.data(), "QKVCHNK1", 8), 0);
  EXPECT_EQ(Load<uint16_t>(bytes, 8), 1);
  EXPECT_EQ(Load<uint16_t>(bytes, 10), 0);
  EXPECT_EQ(Load<uint32_t>(bytes, 12), 384u);
  EXPECT_EQ(Load<uint8_t>(bytes, 16), SampleFields().key.digest.bytes[0]);
  EXPECT_EQ(Load<uint8_t>(bytes, 48), SampleFields().fingerprint.bytes[0]);
  EXPECT_EQ(Load<uint32_t>(bytes, 80), 5u);
  EXPECT_EQ(Load<uint32_t>(bytes, 84), 0u);
  EXPECT_EQ(Load<uint64_t>(bytes, 88), 1000u);
  EXPECT_EQ(Load<uint64_t>(bytes, 96), 2000u);
  EXPECT_EQ(Load<uint8_t>(bytes, 104), SampleFields().context.bytes[0]);
  EXPECT_EQ(Load<uint64_t>(bytes, 136), ShortId("rope"));
  EXPECT_EQ(Load<uint64_t>(bytes, 144), 7u);
  EXPECT_EQ(Load<uint32_t>(bytes, 152), 9u);
  EXPECT_EQ(Load<uint32_t>(bytes, 156), 4u);
  EXPECT_EQ(Load<uint32_t>(bytes, 164), 0u);
  // The second entry: values of layer 0, bf16 [5, 1, 2].
  EXPECT_EQ(Load<uint16_t>(bytes, 208), 2);
  EXPECT_EQ(Load<uint16_t>(bytes, 210), 0);
  EXPECT_EQ(Load<uint16_t>(bytes, 212), 0);
  EXPECT_EQ(Load<uint16_t>(bytes, 214), 4 * 256 + 16);
  EXPECT_EQ(Load<uint8_t>(bytes, 216), 3);
  EXPECT_EQ(Load<uint32_t>(bytes, 220), 5u);
  EXPECT_EQ(Load<uint32_t>(bytes, 224), 1u);
  EXPECT_EQ(Load<uint32_t>(bytes, 228), 2u);
  EXPECT_EQ(Load<uint32_t>(bytes, 232), 0u);
  EXPECT_EQ(Load<uint32_t>(bytes, 236), 1u);  // 64 bytes into the payload
  EXPECT_EQ(Load<uint32_t>(bytes, 240), 20u);
  EXPECT_EQ(Load<uint32_t>(bytes, 244), Crc32c(chunk.data() + 384 + 64, 20));
  EXPECT_EQ(Load<int32_t>(bytes, 328), 3);
  EXPECT_EQ(Load<int32_t>(bytes, 344), 5);
  EXPECT_EQ(Load<uint8_t>(bytes, 384), 0);
  EXPECT_EQ(Load<uint8_t>(bytes, 384 + 64), 37);
}

// ---- Damage

// Every bit of the chunk flipped alone: never a wrong byte. A flip in the padding of the payload,
// which nobody reads, is the one that does no harm.
TEST(ChunkCodec, NoFlippedBitIsServed) {
  const Bytes good = SampleChunk();
  const Result<ChunkView> good_view = ChunkView::Open(good, ExpectSample(), Limits());
  ASSERT_TRUE(good_view.ok());
  Bytes chunk = good;
  size_t harmless = 0;
  for (size_t bit = 0; bit < 8 * chunk.size(); ++bit) {
    chunk[bit / 8] ^= std::byte{1} << bit % 8;
    const Result<ChunkView> view = ChunkView::Open(chunk, ExpectSample(), Limits());
    if (view.ok()) {
      int64_t refused = 0;
      for (int64_t s = 0; s < 4; ++s) {
        const auto section = view->section(s);
        if (!section.ok()) {
          EXPECT_EQ(section.status().code(), StatusCode::kCorrupt);
          ++refused;
        } else {
          ASSERT_TRUE(SameBytes(*section, *good_view->section(s))) << bit;
        }
      }
      ASSERT_LE(refused, 1) << bit;  // the other sections are still served
      if (refused == 0) ++harmless;
    } else {
      // A header's length that is over the limits is refused before the checksum could be taken.
      ASSERT_TRUE(view.status().code() == StatusCode::kCorrupt ||
                  view.status().code() == StatusCode::kTooLarge)
          << bit << ' ' << view.status().ToString();
    }
    chunk[bit / 8] ^= std::byte{1} << bit % 8;
  }
  const size_t padding = 2 * (64 - 40) + 2 * (64 - 20);
  EXPECT_EQ(harmless, 8 * padding);
}

TEST(ChunkCodec, WithAMacEveryFlippedBitIsRefusedByWhoHasTheKey) {
  ChunkExpectation expected = ExpectSample();
  expected.mac_key = "secret";
  Bytes chunk = SampleChunk({.mac_key = "secret"});
  ASSERT_TRUE(ReadAll(chunk, expected).ok());
  for (size_t bit = 0; bit < 8 * chunk.size(); ++bit) {
    chunk[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_FALSE(ReadAll(chunk, expected).ok()) << bit;
    // Nor does a correct checksum help.
    if (bit / 8 < 416) {
      Bytes forged = chunk;
      SealAgain(forged);
      EXPECT_FALSE(bit / 32 != kCrcAt / 4 && ReadAll(forged, expected).ok()) << bit;
    }
    chunk[bit / 8] ^= std::byte{1} << bit % 8;
  }
}

TEST(ChunkCodec, TheMacIsThatOfTheKey) {
  ChunkExpectation expected = ExpectSample();
  expected.mac_key = "secret";
  EXPECT_EQ(ReadAll(SampleChunk(), expected).code(), StatusCode::kIncompatible);
  EXPECT_EQ(ReadAll(SampleChunk({.mac_key = "other"}), expected).code(), StatusCode::kCorrupt);
  // A reader without a key reads signed chunks too.
  EXPECT_TRUE(ReadAll(SampleChunk({.mac_key = "other"})).ok());
}

TEST(ChunkCodec, NoCutOrLengthenedChunkIsServed) {
  for (const int64_t alignment : {64, 4096}) {
    const Bytes good = SampleChunk({.alignment = alignment});
    for (size_t size = 0; size < good.size(); ++size) {
      EXPECT_EQ(ReadAll(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(size))).code(),
                StatusCode::kCorrupt)
          << size;
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    EXPECT_EQ(ReadAll(longer).code(), StatusCode::kCorrupt);
  }
}

TEST(ChunkCodec, ASectionReadAloneIsChecked) {
  const Bytes chunk = SampleChunk();
  const auto header = DecodeChunkHeader(std::span(chunk).first(384), Limits());
  ASSERT_TRUE(header.ok());
  const Section& section = header->sections[2];
  Bytes bytes(chunk.begin() + section.offset, chunk.begin() + section.offset + section.length);
  EXPECT_TRUE(CheckSection(*header, 2, bytes).ok());
  EXPECT_EQ(CheckSection(*header, 0, bytes).code(), StatusCode::kCorrupt);
  bytes.pop_back();
  EXPECT_EQ(CheckSection(*header, 2, bytes).code(), StatusCode::kCorrupt);
  EXPECT_EQ(CheckSection(*header, 4, bytes).code(), StatusCode::kBadArgument);
  EXPECT_EQ(CheckSection(*header, -1, bytes).code(), StatusCode::kBadArgument);
}

// ---- Foreign chunks

TEST(ChunkCodec, OnlyWhatWasAskedForIsServed) {
  const Bytes chunk = SampleChunk();
  struct Case {
    const char* message;
    StatusCode code;
    std::function<void(ChunkExpectation&)> change;
  };
  static const std::vector<int32_t> other = {3, 1, 4, 1, 6};
  const std::vector<Case> cases = {
      {"that was asked for", StatusCode::kIncompatible,
       [](auto& e) { e.key.digest.bytes[31] ^= 1; }},
      {"passport", StatusCode::kIncompatible, [](auto& e) { e.fingerprint.bytes[0] ^= 1; }},
      {"expired 0 ms ago", StatusCode::kNotFound, [](auto& e) { e.now_ms = 2000; }},
      {"is exact", StatusCode::kIncompatible, [](auto& e) { e.approximate = true; }},
      {"other tokens", StatusCode::kIncompatible, [](auto& e) { e.tokens = other; }},
      {"other tokens", StatusCode::kIncompatible, [](auto& e) { e.tokens = e.tokens->first(4); }},
      {"no MAC", StatusCode::kIncompatible, [](auto& e) { e.mac_key = "k"; }},
  };
  for (const Case& c : cases) {
    ChunkExpectation expected = ExpectSample();
    c.change(expected);
    const Status status = ReadAll(chunk, expected);
    EXPECT_EQ(status.code(), c.code) << c.message;
    EXPECT_NE(status.message().find(c.message), std::string_view::npos) << status.ToString();
  }
  ChunkExpectation any_tokens = ExpectSample();
  any_tokens.tokens.reset();
  EXPECT_TRUE(ReadAll(chunk, any_tokens).ok());
  ChunkExpectation just_in_time = ExpectSample();
  just_in_time.now_ms = 1999;
  EXPECT_TRUE(ReadAll(chunk, just_in_time).ok());
  ChunkFields for_ever = SampleFields();
  for_ever.expires_ms = 0;
  just_in_time.now_ms = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(ReadAll(ChunkOf(for_ever, SampleSections()), just_in_time).ok());
}

// A digest that collides must not serve the tokens of somebody else: the writer here has the key
// that the reader asks for, and other tokens.
TEST(ChunkCodec, ACollisionOfKeysIsSeen) {
  ChunkFields fields = SampleFields();
  fields.tokens = {2, 7, 1, 8, 2};
  EXPECT_EQ(ReadAll(ChunkOf(fields, SampleSections())).code(), StatusCode::kIncompatible);
}

TEST(ChunkCodec, ApproximateChunksAreServedToWhoAsksForThem) {
  ChunkFields fields = SampleFields();
  fields.approximate = true;
  const Bytes chunk = ChunkOf(fields, SampleSections());
  EXPECT_EQ(ReadAll(chunk).code(), StatusCode::kIncompatible);
  ChunkExpectation expected = ExpectSample();
  expected.approximate = true;
  EXPECT_TRUE(ReadAll(chunk, expected).ok());
}

// ---- Hostile headers, with the right checksum

struct Forgery {
  const char* name;
  size_t at;
  uint64_t value;
  size_t size;
  StatusCode code;
};

constexpr size_t kEntry = kFixedBytes;  // of the first section

const Forgery kForgeries[] = {
    {"magic", 0, 0, 1, StatusCode::kCorrupt},
    {"version", kVersionAt, 2, 2, StatusCode::kIncompatible},
    {"version 0", kVersionAt, 0, 2, StatusCode::kIncompatible},
    {"compressed", kFlagsAt, 1, 2, StatusCode::kIncompatible},
    {"encrypted", kFlagsAt, 2, 2, StatusCode::kIncompatible},
    {"unknown flag", kFlagsAt, 1 << 15, 2, StatusCode::kIncompatible},
    {"header of 0 bytes", kHeaderBytesAt, 0, 4, StatusCode::kCorrupt},
    {"header of no units", kHeaderBytesAt, 383, 4, StatusCode::kCorrupt},
    {"header shorter than its tables", kHeaderBytesAt, 192, 4, StatusCode::kCorrupt},
    {"header of 4 GiB", kHeaderBytesAt, 0xFFFFFFC0, 4, StatusCode::kTooLarge},
    {"4 G tokens", kTokenCountAt, 0xFFFFFFFF, 4, StatusCode::kCorrupt},
    {"tokens over the limit", kTokenCountAt, 6, 4, StatusCode::kTooLarge},
    {"created before time", kCreatedAt, uint64_t{1} << 63, 8, StatusCode::kCorrupt},
    {"expires before time", kExpiresAt, uint64_t{1} << 63, 8, StatusCode::kCorrupt},
    {"4 G sections", kSectionCountAt, 0xFFFFFFFF, 4, StatusCode::kCorrupt},
    {"a section less", kSectionCountAt, 3, 4, StatusCode::kIncompatible},  // tokens move
    {"reserved", kReservedAt, 1, 4, StatusCode::kIncompatible},
    {"kind out of order", kEntry + kEntryKindAt, 3, 2, StatusCode::kCorrupt},
    {"kind twice", kEntry + kEntryKindAt, 2, 2, StatusCode::kCorrupt},
    {"layers backwards", kEntry + kEntryBytes + kEntryLayerFirstAt, 1, 2, StatusCode::kCorrupt},
    {"elements of 4 bits", kEntry + kEntryDTypeAt, 4, 1, StatusCode::kCorrupt},
    {"elements of 0 bits", kEntry + kEntryDTypeAt, 0, 1, StatusCode::kCorrupt},
    {"other size of elements", kEntry + kEntryDTypeAt, 32, 1, StatusCode::kCorrupt},
    {"rank 5", kEntry + kEntryRankAt, 5, 1, StatusCode::kCorrupt},
    {"rank 2", kEntry + kEntryRankAt, 2, 1, StatusCode::kCorrupt},
    {"padding", kEntry + kEntryPaddingAt, 1, 1, StatusCode::kCorrupt},
    {"dim of 4 G", kEntry + kEntryDimsAt, 0xFFFFFFFF, 4, StatusCode::kTooLarge},
    {"product that overflows", kEntry + kEntryDimsAt, 0xFFFFFFFFFFFFFFFF, 8, StatusCode::kTooLarge},
    {"dim behind the rank", kEntry + kEntryDimsAt + 12, 1, 4, StatusCode::kCorrupt},
    {"offset of 256 GiB", kEntry + 3 * kEntryBytes + kEntryOffsetAt, 0xFFFFFFFF, 4,
     StatusCode::kTooLarge},
    {"overlap", kEntry + kEntryBytes + kEntryOffsetAt, 0, 4, StatusCode::kCorrupt},
    {"length", kEntry + kEntryLengthAt, 41, 4, StatusCode::kCorrupt},
    {"length of 4 GiB", kEntry + kEntryLengthAt, 0xFFFFFFFF, 4, StatusCode::kCorrupt},
    {"section checksum", kEntry + kEntryCrcAt, 0, 4, StatusCode::kCorrupt},
};

TEST(ChunkCodec, NoForgedHeaderIsServed) {
  const Bytes good = SampleChunk();
  for (const Forgery& forgery : kForgeries) {
    Bytes chunk = good;
    std::memcpy(chunk.data() + forgery.at, &forgery.value, forgery.size);
    SealAgain(chunk);
    const Status status = ReadAll(chunk);
    EXPECT_EQ(status.code(), forgery.code) << forgery.name << ": " << status.ToString();
    EXPECT_LT(status.message().size(), 300u) << status.ToString();
  }
}

// Two sections in the same place, both with the right checksum.
TEST(ChunkCodec, NoSectionsOverlap) {
  Bytes chunk = SampleChunk();
  const size_t entry = kEntry + kEntryBytes;
  Store(std::span(chunk), entry + kEntryOffsetAt, uint32_t{0});
  Store(std::span(chunk), entry + kEntryCrcAt, Crc32c(chunk.data() + 384, 20));
  SealAgain(chunk);
  EXPECT_EQ(DecodeChunkHeader(chunk, Limits()).status().code(), StatusCode::kCorrupt);
}

// ---- Limits

TEST(ChunkCodec, LimitsHoldAtTheirEdge) {
  const auto create = [](ChunkLimits limits) {
    return ChunkWriter::Create(SampleFields(), SampleSections(), {.limits = limits})
        .status()
        .code();
  };
  const auto decode = [](ChunkLimits limits) {
    return DecodeChunkHeader(SampleChunk(), limits).status().code();
  };
  const ChunkLimits exact{.token_count_max = 5,
                          .section_count_max = 4,
                          .section_bytes_max = 40,
                          .total_bytes_max = 640};
  ASSERT_EQ(create(exact), StatusCode::kOk);
  ASSERT_EQ(decode(exact), StatusCode::kOk);
  for (int64_t ChunkLimits::*limit :
       {&ChunkLimits::token_count_max, &ChunkLimits::section_count_max,
        &ChunkLimits::section_bytes_max, &ChunkLimits::total_bytes_max}) {
    ChunkLimits below = exact;
    below.*limit -= 1;
    EXPECT_EQ(create(below), StatusCode::kTooLarge);
    EXPECT_EQ(decode(below), StatusCode::kTooLarge);
  }
}

TEST(ChunkCodec, LimitsOfAPassportTakeItsLargestChunk) {
  for (const int64_t alignment : {64, 4096}) {
    EXPECT_TRUE(ReadAll(SampleChunk({.alignment = alignment, .limits = Limits()})).ok());
  }
  Passport huge = SamplePassport();
  huge.block_tokens = (int64_t{1} << 31) - 1;
  huge.layers.assign(65535, {.dtype = ElementType(kDLFloat, 64),
                             .kv_heads = (int64_t{1} << 31) - 1,
                             .head_dim = (int64_t{1} << 31) - 1,
                             .v_head_dim = (int64_t{1} << 31) - 1});
  const ChunkLimits limits = ChunkLimits::Of(huge);
  EXPECT_GT(limits.total_bytes_max, 0);
  EXPECT_LT(limits.total_bytes_max, int64_t{1} << 45);
}

TEST(ChunkCodec, TheWriterRefusesWhatTheReaderWould) {
  const auto code_of = [](std::vector<SectionSpec> specs, ChunkWriteOptions options = {}) {
    return ChunkWriter::Create({}, specs, options).status().code();
  };
  const SectionSpec key{SectionKind::kKey, 0, 0, DType::kF32, {1}};
  EXPECT_EQ(code_of({key}), StatusCode::kOk);
  EXPECT_EQ(code_of({key, key}), StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 1, 0, DType::kF32, {1}}}), StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, -1, 0, DType::kF32, {1}}}), StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 65536, DType::kF32, {1}}}), StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, DType::kF32, {-1}}}), StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, DType::kF32, {int64_t{1} << 32}}}),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, DType::kF32, {1, 1, 1, 1, 1}}}),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, ElementType(kDLInt, 4), {1}}}),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, DType::kU8, {(int64_t{64} << 20) + 1}}}),
            StatusCode::kTooLarge);
  EXPECT_EQ(code_of({{SectionKind::kKey, 0, 0, DType::kU8, {int64_t{64} << 20}}}), StatusCode::kOk);
  EXPECT_EQ(code_of({key}, {.alignment = 128}), StatusCode::kBadArgument);
  ChunkFields fields;
  fields.expires_ms = -1;
  EXPECT_EQ(ChunkWriter::Create(fields, {}).status().code(), StatusCode::kBadArgument);
}

TEST(ChunkCodec, TheWriterHasNoSectionOutOfRangeAndNoneAfterSeal) {
  ChunkWriter writer = ChunkWriter::Create(SampleFields(), SampleSections()).value();
  const int64_t count = static_cast<int64_t>(SampleSections().size());
  for (const int64_t index : {int64_t{-1}, count, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(writer.section(index).status().code(), StatusCode::kBadArgument) << index;
  }
  for (int64_t index = 0; index < count; ++index) {
    const std::span<std::byte> bytes = writer.section(index).value();
    std::ranges::fill(bytes, std::byte{1});
  }
  ASSERT_TRUE(std::move(writer).Seal().ok());
  EXPECT_EQ(writer.section(0).status().code(), StatusCode::kBadArgument);  // NOLINT: moved from
}

// Removed with all that is in it.
struct SnapshotFolder {
  SnapshotFolder() {
    std::string name = std::filesystem::temp_directory_path() / "quire-snapshot-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path = name;
  }
  ~SnapshotFolder() { std::filesystem::remove_all(path); }
  SnapshotFolder(const SnapshotFolder&) = delete;
  SnapshotFolder& operator=(const SnapshotFolder&) = delete;
  std::vector<std::filesystem::path> Files() const {
    const std::filesystem::directory_iterator files(path);
    return {begin(files), end(files)};
  }
  std::filesystem::path path;
};

// So a process that dies meanwhile leaves nothing.
TEST(SnapshotWriter, ItsFileHasNoNameBeforeItIsComplete) {
  const SnapshotFolder folder;
  const int probe = ::open(folder.path.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (probe < 0) GTEST_SKIP() << folder.path << ": the file system has no files without a name";
  ::close(probe);
  auto writer = SnapshotWriter::Create(folder.path / "a", "{}", 1, 0);
  ASSERT_TRUE(writer.ok()) << writer.status().ToString();
  ASSERT_TRUE(writer->Add(SampleChunk()).ok());
  EXPECT_EQ(folder.Files().size(), 0u);
}

TEST(SnapshotWriter, ReplacesAFileAndLeavesNoOther) {
  const SnapshotFolder folder;
  const std::string path = folder.path / "a";
  for (const bool hides : {false, true}) {
    const Status written = hides ? WriteHidingSnapshot(path) : WriteSampleSnapshot(path);
    ASSERT_TRUE(written.ok()) << written.ToString();
    const auto info = VerifySnapshot(path);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->version, hides ? 2 : 1);
    EXPECT_EQ(folder.Files(), std::vector<std::filesystem::path>{path});
  }
  // A folder stays what it is.
  std::filesystem::create_directory(folder.path / "b");
  EXPECT_EQ(WriteSampleSnapshot(folder.path / "b").code(), StatusCode::kIoError);
  EXPECT_EQ(folder.Files().size(), 2u);
}

// A program that another thread of the host starts meanwhile does not get the file.
TEST(SnapshotWriter, ItsFileIsClosedInOtherPrograms) {
  namespace fs = std::filesystem;
  const SnapshotFolder folder;
  const auto writer = SnapshotWriter::Create(folder.path / "a", "{}", 1, 0);
  ASSERT_TRUE(writer.ok()) << writer.status().ToString();
  int found = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone);
    if (!target.starts_with(folder.path.string())) continue;
    ++found;
    const int flags = ::fcntl(std::stoi(entry.path().filename()), F_GETFD);
    EXPECT_EQ(flags & FD_CLOEXEC, FD_CLOEXEC);
  }
  EXPECT_EQ(found, 1);
}

}  // namespace
}  // namespace quire
