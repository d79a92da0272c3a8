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

#include "base/testing/replaced_new.h"
#include "chunk/testing/test_chunk.h"
#include "quire/chunk.h"

namespace {

// Allocations that may still succeed; negative: all.
int64_t allocations_left = -1;
bool allocation_refused = false;

}  // namespace

namespace quire {

bool RefusesAllocation(size_t) noexcept {
  if (allocations_left < 0 || allocations_left-- != 0) return false;
  allocation_refused = true;
  return true;
}

namespace {

// The call with allocation n refused, for n = 0, 1, ... until it needs no more. It must answer
// OutOfMemory each time, and `expected` at the end.
void RefuseEach(const std::string& name, StatusCode expected, const std::function<Status()>& call) {
  SCOPED_TRACE(name);
  int64_t refusals = 0;
  for (;; ++refusals) {
    allocation_refused = false;
    allocations_left = refusals;
    const Status status = call();
    allocations_left = -1;
    if (!allocation_refused) {
      EXPECT_EQ(status.code(), expected);
      break;
    }
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << refusals;
  }
  EXPECT_GT(refusals, 0) << "the call allocates nothing";
}

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
    const int64_t left = std::exchange(allocations_left, -1);
    copy = fields;
    allocations_left = left;
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
