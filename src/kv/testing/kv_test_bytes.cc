#include "kv/testing/kv_test_bytes.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

namespace quire {

namespace {

std::vector<std::byte> BytesOf(const Result<std::vector<LayerOutputs>>& outputs) {
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  std::vector<std::byte> bytes;
  if (!outputs.ok()) return bytes;
  for (const LayerOutputs& layer : *outputs)
    bytes.insert(bytes.end(), layer.o.bytes().begin(), layer.o.bytes().end());
  return bytes;
}

}  // namespace

std::vector<std::byte> ForwardBytes(AttentionKVCache& cache, int64_t id,
                                    const std::vector<uint64_t>& tokens) {
  return BytesOf(RunForward(cache, cache.options().layers, std::vector<int64_t>{id}, {tokens}));
}

std::vector<std::byte> LayerBytes(AttentionKVCache& cache, const std::vector<uint64_t>& tokens) {
  return BytesOf(FinishForward(cache, cache.options().layers, tokens));
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

ChunkSource::ChunkSource(const SequenceStates& states, std::span<const ChunkView> chunks,
                         int64_t start)
    : states_(states), chunks_(chunks), start_(start), end_(start) {
  for (const ChunkView& chunk : chunks) end_ += std::ssize(chunk.header().tokens);
  blocks_.reserve(chunks.size());
}

Result<std::span<const LayerKV>> ChunkSource::Load(int64_t layer) {
  if (arrive != nullptr) QUIRE_RETURN_IF_ERROR(arrive(layer));
  blocks_.clear();
  int64_t position = start_;
  const AttentionLayerSpec& spec =
      states_.attention()->options().layers[static_cast<size_t>(layer)];
  for (const ChunkView& chunk : chunks_) {
    QUIRE_ASSIGN_OR_RETURN(const LayerKV kv, ChunkLayer(chunk, spec, layer, position, end_));
    if (kv.k.rank() > 0) blocks_.push_back(kv);
    position += std::ssize(chunk.header().tokens);
  }
  return std::span<const LayerKV>(blocks_);
}

Result<TensorView> ChunkSource::LoadState(int64_t layer) {
  const int64_t behind =
      states_.attention() == nullptr ? 0 : std::ssize(states_.attention()->options().layers);
  if (arrive != nullptr) QUIRE_RETURN_IF_ERROR(arrive(behind + layer));
  return ChunkState(chunks_.back(), states_, layer);
}

}  // namespace quire
