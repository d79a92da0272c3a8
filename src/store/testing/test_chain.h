// Chains of small chunks for tests of stores and tiers.
#ifndef QUIRE_STORE_TESTING_TEST_CHAIN_H_
#define QUIRE_STORE_TESTING_TEST_CHAIN_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quire/chunk.h"
#include "quire/chunk_store.h"

namespace quire {

inline constexpr int64_t kTestBlock = 4;
inline constexpr int64_t kTestLayers = 4;

inline Passport TestPassport(DType dtype = DType::kF32) {
  return {.model = "test",
          .block_tokens = kTestBlock,
          .layers = std::vector<PassportLayer>(
              kTestLayers, {.dtype = dtype, .kv_heads = 1, .head_dim = 4, .v_head_dim = 4})};
}

inline KeySpace TestKeys(std::string_view salt = "", DType dtype = DType::kF32) {
  return KeySpace(*TestPassport(dtype).Fingerprint(), salt);
}

// first, first + 1, ...
inline std::vector<int32_t> TokensFrom(int32_t first, int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<int32_t>(i));
  return tokens;
}

// Byte k of section s of a chunk: a function of its key, so that no chunk passes for another one.
inline std::byte TestByte(const ChunkKey& key, size_t s, size_t k) {
  return static_cast<std::byte>(key.digest.bytes[k % 32] + 31 * s + k);
}

struct TestChunkOptions {
  int64_t expires_ms = 0;
  std::string_view mac_key = {};
  std::vector<std::string> extras = {};  // of the leading chunks of the chain
};

// Chunk i of the chain of the tokens, sealed.
inline ChunkBuffer TestChunk(const KeySpace& keys, std::span<const int32_t> tokens, int64_t i,
                             const TestChunkOptions& options = {}) {
  const std::vector<ChunkKey> chain =
      keys.Chain(tokens, kTestBlock, /*tail=*/true, options.extras).value();
  const size_t begin = static_cast<size_t>(i * kTestBlock);
  const size_t count = std::min(static_cast<size_t>(kTestBlock), tokens.size() - begin);
  ChunkFields fields;
  fields.key = chain[static_cast<size_t>(i)];
  fields.fingerprint = keys.fingerprint();
  fields.first_position = static_cast<uint32_t>(begin);
  fields.created_ms = 1;
  fields.expires_ms = options.expires_ms;
  fields.context = i == 0 ? keys.root().digest : chain[static_cast<size_t>(i - 1)].digest;
  fields.tail = static_cast<int64_t>(count) < kTestBlock;
  fields.tokens.assign(tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                       tokens.begin() + static_cast<std::ptrdiff_t>(begin + count));
  std::vector<SectionSpec> sections;
  for (int64_t layer = 0; layer < kTestLayers; ++layer) {
    const std::vector<int64_t> dims = {static_cast<int64_t>(count), 1, 4};
    sections.push_back({SectionKind::kKey, layer, layer, DType::kF32, dims});
    sections.push_back({SectionKind::kValue, layer, layer, DType::kF32, dims});
  }
  const ChunkKey key = fields.key;
  Result<ChunkWriter> writer =
      ChunkWriter::Create(std::move(fields), sections, {.mac_key = options.mac_key});
  EXPECT_TRUE(writer.ok()) << writer.status().ToString();
  for (size_t s = 0; s < sections.size(); ++s) {
    const std::span<std::byte> bytes = writer->section(static_cast<int64_t>(s)).value();
    for (size_t k = 0; k < bytes.size(); ++k) bytes[k] = TestByte(key, s, k);
  }
  Result<ChunkBuffer> sealed = std::move(*writer).Seal();
  EXPECT_TRUE(sealed.ok()) << sealed.status().ToString();
  return *std::move(sealed);
}

// Whether the sections of the chunk up to those of `layers_end` are what TestChunk wrote.
inline bool IsTestChunk(const StoredChunk& chunk, const ChunkKey& key,
                        int64_t layers_end = kTestLayers) {
  if (chunk.header().key != key) return false;
  for (size_t s = 0; s < static_cast<size_t>(2 * layers_end); ++s) {
    const Section& section = chunk.header().sections[s];
    for (size_t k = 0; k < static_cast<size_t>(section.length); ++k)
      if (chunk.bytes()[static_cast<size_t>(section.offset) + k] != TestByte(key, s, k))
        return false;
  }
  return true;
}

inline int64_t TestChunkBytes() {
  const ChunkBuffer chunk = TestChunk(TestKeys(), TokensFrom(0, kTestBlock), 0);
  return static_cast<int64_t>(chunk.bytes().size());
}

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_TEST_CHAIN_H_
