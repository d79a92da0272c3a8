// For the tests that compare caches, files and chunks byte for byte.
#ifndef QUIRE_KV_TESTING_KV_TEST_BYTES_H_
#define QUIRE_KV_TESTING_KV_TEST_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/chunk.h"
#include "quire/kv_export.h"

namespace quire {

// The outputs of all layers of a forward of one sequence. Fails the test if a call fails.
std::vector<std::byte> ForwardBytes(AttentionKVCache& cache, int64_t id,
                                    const std::vector<uint64_t>& tokens);
// Those of a forward that has begun, of these new tokens, which it ends.
std::vector<std::byte> LayerBytes(AttentionKVCache& cache, const std::vector<uint64_t>& tokens);

std::string ReadWholeFile(const std::string& path);
void WriteByteAt(const std::string& path, size_t at, char byte);

// A chain of chunks under construction, and its chunks as views.
class TestChain {
 public:
  TestChain(const SequenceStates& states, Passport identity);

  // Exports the chunk [end(), end() + count) of the sequence, whose ids are 1, 2, 3 ...
  Status Add(const SequenceStates& states, int64_t seq_id, int64_t count);
  int64_t end() const { return ends_.empty() ? 0 : ends_.back(); }
  // The first `count` chunks, verified but for their sections.
  std::vector<ChunkView> Views(size_t count) const;
  std::span<std::byte> bytes(size_t chunk) { return chunks_[chunk].bytes(); }

 private:
  Passport passport_;
  KeySpace keys_;
  std::vector<ChunkKey> chain_;
  std::vector<int64_t> ends_;
  std::vector<ChunkBuffer> chunks_;
};

// Gives what a forward loads out of chunks, whose tokens stand from `start` on. Views outlive it.
class ChunkSource final : public LayerSource {
 public:
  ChunkSource(const SequenceStates& states, std::span<const ChunkView> chunks, int64_t start);
  int64_t tokens() const { return end_ - start_; }
  // Asked before a layer, those of recurrent states behind the others; its error is the answer.
  std::function<Status(int64_t layer)> arrive;

  Result<std::span<const LayerKV>> Load(int64_t layer) override;
  Result<TensorView> LoadState(int64_t layer) override;

 private:
  SequenceStates states_;
  std::span<const ChunkView> chunks_;
  int64_t start_;
  int64_t end_;
  std::vector<LayerKV> blocks_;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_KV_TEST_BYTES_H_
