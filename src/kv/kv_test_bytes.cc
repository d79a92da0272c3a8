#include "kv/kv_test_bytes.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

namespace quire {

std::vector<std::byte> ForwardBytes(AttentionKVCache& cache, int64_t id,
                                    const std::vector<uint64_t>& tokens) {
  const auto outputs =
      RunForward(cache, cache.options().layers, std::vector<int64_t>{id}, {tokens});
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  std::vector<std::byte> bytes;
  if (!outputs.ok()) return bytes;
  for (const LayerOutputs& layer : *outputs)
    bytes.insert(bytes.end(), layer.o.bytes().begin(), layer.o.bytes().end());
  return bytes;
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void WriteByteAt(const std::string& path, size_t at, char byte) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(at)).put(byte);
}

namespace {

Digest FingerprintOf(const SequenceStates& states, const Passport& identity, Passport* passport) {
  Result<Passport> made = CachePassport(states, identity, false);
  EXPECT_TRUE(made.ok()) << made.status().ToString();
  *passport = *std::move(made);
  return *passport->Fingerprint();
}

}  // namespace

TestChain::TestChain(const SequenceStates& states, Passport identity)
    : keys_(FingerprintOf(states, identity, &passport_), "") {}

Status TestChain::Add(const SequenceStates& states, int64_t seq_id, int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(end() + 1));
  const ChunkKey previous = chain_.empty() ? keys_.root() : chain_.back();
  ChunkFields fields = NextFields(passport_, keys_, previous, end(), tokens);
  const ChunkKey key = fields.key;
  QUIRE_ASSIGN_OR_RETURN(ChunkBuffer chunk, ExportChunk(states, seq_id, end(), std::move(fields)));
  chain_.push_back(key);
  ends_.push_back(end() + count);
  chunks_.push_back(std::move(chunk));
  return Status();
}

std::vector<ChunkView> TestChain::Views(size_t count) const {
  std::vector<ChunkView> views;
  for (size_t i = 0; i < count; ++i) {
    Result<ChunkView> view =
        ChunkView::Open(chunks_[i].bytes(), {.key = chain_[i], .fingerprint = keys_.fingerprint()},
                        ChunkLimits::Of(passport_));
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    if (view.ok()) views.push_back(*std::move(view));
  }
  return views;
}

}  // namespace quire
