// Files of each version of the formats, in testdata/: they are read for ever, and what is written
// today is equal to them byte for byte. A change that is meant takes a new version and new files,
// which this program writes with QUIRE_REWRITE_GOLDENS=1.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "chunk/testing/test_chunk.h"
#include "quire/snapshot.h"

namespace quire {
namespace {

std::string PathOf(const std::string& name) { return QUIRE_CHUNK_TESTDATA "/" + name; }

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string Text(const std::vector<std::byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string SnapshotBytes(Status (*write)(const std::string& path)) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("format_golden_" + std::to_string(::getpid()));
  const Status status = write(path);
  EXPECT_TRUE(status.ok()) << status.ToString();
  const std::string bytes = ReadFile(path);
  std::filesystem::remove(path);
  return bytes;
}

void Compare(const std::string& name, const std::string& bytes) {
  if (std::getenv("QUIRE_REWRITE_GOLDENS") != nullptr) {
    std::ofstream(PathOf(name), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  const std::string golden = ReadFile(PathOf(name));
  EXPECT_TRUE(bytes == golden) << name << ": other bytes than that version has; " << bytes.size()
                               << " of them, the file has " << golden.size();
}

void ReadChunk(const std::string& name, std::string_view mac_key) {
  const std::string golden = ReadFile(PathOf(name));
  ChunkExpectation expected = ExpectSample();
  expected.mac_key = mac_key;
  const auto view = ChunkView::Open(std::as_bytes(std::span(golden)), expected,
                                    ChunkLimits::Of(SamplePassport()));
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_TRUE(view->CheckAll().ok());
  EXPECT_EQ(view->header().tokens, SampleFields().tokens);
  EXPECT_EQ((*view->section(3))[1], static_cast<std::byte>(3 * 37 + 1));
}

TEST(FormatGolden, WhatIsWrittenIsVersion1) {
  Compare("chunk_v1.bin", Text(SampleChunk()));
  Compare("signed_chunk_v1.bin", Text(SampleChunk({.mac_key = "key"})));
  Compare("snapshot_v1.bin", SnapshotBytes(WriteSampleSnapshot));
  Compare("caller_chunk_v1.bin", Text(CallerChunk()));
}

TEST(FormatGolden, SnapshotsThatHideSomethingAreVersion2) {
  Compare("snapshot_v2.bin", SnapshotBytes(WriteHidingSnapshot));
  const auto info = VerifySnapshot(PathOf("snapshot_v2.bin"));
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->version, 2);
  EXPECT_EQ(info->tokens, (std::vector<int32_t>{3, 1, 4, 1, 5}));
  EXPECT_EQ(info->passport, HidingPassport());
  EXPECT_EQ(info->windows, (WindowSettings{.window = 5, .sinks = 1, .slid = 1}));
  EXPECT_EQ(info->state_bytes, 24);
}

TEST(FormatGolden, CallersStatesAreRead) {
  const std::string golden = ReadFile(PathOf("caller_chunk_v1.bin"));
  ChunkExpectation expected = ExpectSample();
  expected.fingerprint = *CallerPassport().Fingerprint();
  const auto view = ChunkView::Open(std::as_bytes(std::span(golden)), expected,
                                    ChunkLimits::Of(CallerPassport()));
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_TRUE(view->CheckAll().ok());
  EXPECT_EQ(view->section(4)->size(), 2U);
  EXPECT_EQ(view->section(6)->size(), 24U);
}

TEST(FormatGolden, Version1IsRead) {
  ReadChunk("chunk_v1.bin", "");
  ReadChunk("signed_chunk_v1.bin", "key");
  const auto info = VerifySnapshot(PathOf("snapshot_v1.bin"));
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->tokens, (std::vector<int32_t>{3, 1, 4, 1, 5}));
  EXPECT_EQ(info->passport, SamplePassport());
}

}  // namespace
}  // namespace quire
