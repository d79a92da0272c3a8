// Each single allocation of a call refused: the call answers OutOfMemory and works when it is made
// again. Calls that build or parse JSON (passports, snapshots) are not here: nlohmann::json
// allocates in its destructor, and a refusal there ends the process.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/refuse_each.h"
#include "chunk/testing/test_chunk.h"
#include "quire/chunk.h"

namespace quire {
namespace {

TEST(ChunkFailure, KeysAndNames) {
  const Passport passport = SamplePassport();
  const KeySpace keys(passport.Fingerprint().value(), "salt");
  const std::vector<int32_t> tokens(40, 7);
  const auto ok = StatusCode::kOk;
  const auto bad = StatusCode::kBadArgument;
  RefuseEach("Chain", ok, [&] { return keys.Chain(tokens, 5).status(); });
  RefuseEach("Chain of 0", bad, [&] { return keys.Chain(tokens, 0).status(); });
  RefuseEach("FromHex", bad, [&] { return Digest::FromHex("xyz").status(); });
  RefuseEach("Parse", bad, [&] { return ElementType::Parse("nothing").status(); });
}

TEST(ChunkFailure, Writing) {
  const ChunkFields fields = SampleFields();
  const std::vector<SectionSpec> sections = SampleSections();
  const ChunkWriteOptions options{.mac_key = "a key that is long enough to allocate"};
  RefuseEach("Create", StatusCode::kOk, [&] {
    ChunkFields copy;
    {
      const AllocationsAllowed allowed;
      copy = fields;
    }
    return ChunkWriter::Create(std::move(copy), sections, options).status();
  });
  RefuseEach("Create, alignment 3", StatusCode::kBadArgument,
             [&] { return ChunkWriter::Create({}, sections, {.alignment = 3}).status(); });
  ChunkWriter writer = ChunkWriter::Create(fields, sections, options).value();
  RefuseEach("section 1000", StatusCode::kBadArgument,
             [&] { return writer.section(1000).status(); });
  ASSERT_TRUE(std::move(writer).Seal().ok());
  RefuseEach("section of a sealed chunk", StatusCode::kBadArgument,
             [&] { return writer.section(0).status(); });
}

TEST(ChunkFailure, Reading) {
  const std::vector<std::byte> chunk = SampleChunk();
  const ChunkExpectation expected = ExpectSample();
  const ChunkLimits limits;
  const auto corrupt = StatusCode::kCorrupt;
  const std::array<std::byte, 200> zeros{};
  RefuseEach("Open", StatusCode::kOk,
             [&] { return ChunkView::Open(chunk, expected, limits).status(); });
  RefuseEach("DecodeChunkHeader", StatusCode::kOk,
             [&] { return DecodeChunkHeader(chunk, limits).status(); });
  RefuseEach("ChunkHeaderBytes of zeros", corrupt,
             [&] { return ChunkHeaderBytes(zeros, limits).status(); });
  RefuseEach("ChunkHeaderBytes of nothing", corrupt,
             [&] { return ChunkHeaderBytes({}, limits).status(); });
  const ChunkHeader header = DecodeChunkHeader(chunk, limits).value();
  RefuseEach("CheckChunk", StatusCode::kIncompatible, [&] { return CheckChunk(header, {}); });
  RefuseEach("CheckSection", corrupt, [&] { return CheckSection(header, 0, {}); });
  const ChunkView view = ChunkView::Open(chunk, expected, limits).value();
  RefuseEach("section 1000", StatusCode::kBadArgument, [&] { return view.section(1000).status(); });
}

}  // namespace
}  // namespace quire
