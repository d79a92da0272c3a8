// quire.BlockMemory, quire.ChunkSpace and quire.ChunkFetch: a store for engines that are not ours.
#ifndef QUIRE_FFI_CHUNK_SPACE_H_
#define QUIRE_FFI_CHUNK_SPACE_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/store.h"
#include "quire/attention_kv_cache.h"
#include "quire/chunk.h"
#include "quire/chunk_blocks.h"
#include "quire/chunk_store.h"

namespace quire::ffi {

using Extras = tvm::ffi::Array<tvm::ffi::Bytes>;

// Where the sections of an engine's layers lie. It points into arrays that Python keeps.
class BlockMemoryObj : public tvm::ffi::Object {
 public:
  // Byte offsets of runs within a block, [n], in the order of a section; its number, for Add.
  int64_t AddOrder(const tvm::ffi::TensorView& offsets, int64_t run_bytes);
  // `blocks`: [block_count, ...], of which at most one dimension behind the first is not contiguous
  // with those after it. order: a number; -1 for none. Before the first use only.
  void Add(const tvm::ffi::String& kind, int64_t layer, const tvm::ffi::TensorView& blocks,
           int64_t order);
  const std::map<std::pair<SectionKind, int64_t>, BlockMemory>& places() const { return places_; }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.BlockMemory", BlockMemoryObj, tvm::ffi::Object);

 private:
  struct Order {
    std::vector<uint32_t> offsets;
    int64_t run_bytes;
  };
  std::deque<Order> orders_;  // which places point into
  std::map<std::pair<SectionKind, int64_t>, BlockMemory> places_;
};

class BlockMemoryRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(BlockMemoryRef, tvm::ffi::ObjectRef,
                                                BlockMemoryObj);
};

// A fetch, and which of its sections are known to be verified.
class ChunkFetchObj : public tvm::ffi::Object {
 public:
  // first_token: of chunk 0 of the fetch, in the text.
  ChunkFetchObj(std::shared_ptr<ChunkFetch> fetch, const Passport& passport, int64_t first_token)
      : passport_(passport),
        first_token_(first_token),
        fetch_(std::move(fetch)),
        layers_(static_cast<size_t>(fetch_->chunk_count())) {}

  // chunks, located, found, ready, done, miss.
  OptionMap State();
  tvm::ffi::String Tier(int64_t i);
  bool Wait(int64_t timeout_ms);
  // Whether the layer is verified in all chunks that were found.
  bool WaitLayer(int64_t layer, int64_t timeout_ms);
  // The bytes of a section as unsigned integers of its elements' size, sharing the chunk's memory.
  tvm::ffi::Tensor Section(int64_t i, const tvm::ffi::String& kind, int64_t layer);
  // Element type of a section, as ElementType::ToString.
  tvm::ffi::String SectionType(int64_t i, const tvm::ffi::String& kind, int64_t layer);
  // Copies the layer's sections of chunks [first, first + count) into blocks of the memory.
  void Scatter(int64_t layer, const BlockMemoryRef& memory, const tvm::ffi::TensorView& blocks,
               int64_t first, int64_t count);
  // Appends the first `count` chunks to a sequence of a cache, which is added if it is absent; it
  // must end where they begin. As ImportChunks; BadArgument, BadState, Incompatible.
  Status AppendTo(AttentionKVCache& cache, int64_t seq_id, int64_t count);
  void Cancel();
  void Close();

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.ChunkFetch", ChunkFetchObj, tvm::ffi::Object);

 private:
  Result<std::shared_ptr<ChunkFetch>> Open();
  // Chunk i if its section of the layer is verified. BadArgument, BadState.
  Result<std::shared_ptr<const StoredChunk>> Verified(ChunkFetch& fetch, int64_t i, int64_t layer);
  Result<std::pair<std::shared_ptr<const StoredChunk>, int64_t>> FindSection(int64_t i,
                                                                             SectionKind wanted,
                                                                             int64_t layer);

  FaultLatch latch_;
  const Passport passport_;
  const int64_t first_token_;
  std::mutex mutex_;
  std::shared_ptr<ChunkFetch> fetch_;  // null after Close; guarded by mutex_
  std::vector<int64_t>
      layers_;  // of each chunk, verified: those before this one; guarded by mutex_
};

class ChunkFetchRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(ChunkFetchRef, tvm::ffi::ObjectRef, ChunkFetchObj);
};

// Incompatible unless chunks of the passport are those of the cache, whose sequence (which may be
// absent) is the one.
Status RequirePassportOf(AttentionKVCache& cache, int64_t seq_id, const Passport& passport);

// Keys of the chains that were asked for last, so that a chain that grows by a chunk costs one hash
// and not those of its whole prompt. All calls from any thread.
class RecentChains {
 public:
  explicit RecentChains(int64_t chunk_tokens) : chunk_tokens_(static_cast<size_t>(chunk_tokens)) {}
  // As KeySpace::Chain without a tail.
  Result<std::vector<ChunkKey>> Chain(const KeySpace& keys, std::span<const int32_t> tokens,
                                      std::span<const std::string> extras);

 private:
  struct Entry {
    std::vector<int32_t> tokens;      // of whole chunks
    std::vector<std::string> extras;  // none for chunks after them
    std::vector<ChunkKey> keys;
  };
  size_t CommonChunks(const Entry& entry, std::span<const int32_t> tokens,
                      std::span<const std::string> extras) const;

  const size_t chunk_tokens_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // last used first
  size_t token_count_ = 0;
};

// The chunks of one passport and salt.
class ChunkSpaceObj : public tvm::ffi::Object {
 public:
  ChunkSpaceObj(const ChunkStoreRef& store, const tvm::ffi::String& passport,
                const tvm::ffi::Bytes& salt, const tvm::ffi::Bytes& mac_key);

  tvm::ffi::String Fingerprint() const;
  int64_t chunk_tokens() const { return passport_.block_tokens; }
  tvm::ffi::Array<tvm::ffi::String> Keys(const tvm::ffi::TensorView& tokens, const Extras& extras);
  int64_t KnownPrefix(const tvm::ffi::TensorView& tokens, const Extras& extras);
  tvm::ffi::Array<bool> Wanted(const tvm::ffi::TensorView& tokens, const Extras& extras);
  // A ChunkFetchObj. Options: extras, first_chunk, timeout_ms, prefetch, compute_seconds_per_token.
  tvm::ffi::ObjectRef Fetch(const tvm::ffi::TensorView& tokens, const OptionMap& options);
  // Chunk `index` of the tokens' chain, from arrays or from blocks of the memory. Options: extras,
  // ttl_ms, priority, recompute_seconds.
  void PutSections(const tvm::ffi::TensorView& tokens, int64_t index,
                   const BlockMemoryRef& sections, const OptionMap& options);
  void PutBlocks(const tvm::ffi::TensorView& tokens, int64_t index, const BlockMemoryRef& memory,
                 const tvm::ffi::TensorView& blocks, const OptionMap& options);

  // Puts the whole chunks of the tokens that the store lacks, out of a sequence of a cache. How
  // many leading chunks the store has or takes; fewer than all where a queue is full.
  Result<int64_t> PutSequence(AttentionKVCache& cache, int64_t seq_id,
                              std::span<const int32_t> tokens, int64_t ttl_ms);

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.ChunkSpace", ChunkSpaceObj, tvm::ffi::Object);

 private:
  void Put(const tvm::ffi::TensorView& tokens, int64_t index, const BlockMemoryRef& memory,
           std::span<const int64_t> blocks, const OptionMap& options);
  Result<ChunkFields> FieldsOf(std::span<const int32_t> tokens, int64_t index,
                               std::span<const std::string> extras, int64_t ttl_ms);

  FaultLatch latch_;
  const std::shared_ptr<ChunkStore> store_;
  const Passport passport_;
  const KeySpace keys_;
  const std::string mac_key_;
  const ChunkLimits limits_;
  RecentChains chains_;
};

class ChunkSpaceRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(ChunkSpaceRef, tvm::ffi::ObjectRef, ChunkSpaceObj);
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_CHUNK_SPACE_H_
