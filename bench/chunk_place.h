// Where bench/store_bench.cc puts chunks and gets them back: Quire's tiers, and what they are
// compared with.
#ifndef QUIRE_BENCH_CHUNK_PLACE_H_
#define QUIRE_BENCH_CHUNK_PLACE_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench_case.h"
#include "quire/chunk.h"

namespace quire::bench {

// The chunks of one prefix chain, sealed. Each has the same size.
struct ChunkSet {
  Passport passport;
  std::vector<int32_t> tokens;
  std::vector<ChunkKey> keys;
  std::vector<ChunkBuffer> chunks;

  int64_t size() const { return static_cast<int64_t>(chunks.size()); }
  std::span<const std::byte> bytes(int64_t i) const {
    return chunks[static_cast<size_t>(i)].bytes();
  }
  std::string name(int64_t i) const { return keys[static_cast<size_t>(i)].digest.ToHex(); }
};

class ChunkPlace {
 public:
  virtual ~ChunkPlace() = default;
  // Not timed: what a caller has done before he puts.
  virtual void BeforePut(const ChunkSet&) {}
  // Returns when all are there, as durably as the place promises.
  virtual void Put(const ChunkSet& set) = 0;
  // Not timed: what keeps Get from reading copies in memory, where the place is not memory.
  virtual void BeforeGet(const ChunkSet&) {}
  // All chunks, in memory of the caller, verified where the place can. `into` has room for one
  // chunk after the other and was written before; a place may have memory of its own instead.
  virtual void Get(const ChunkSet& set, std::span<std::byte> into) = 0;
  // Not timed.
  virtual void Remove(const ChunkSet& set) = 0;
};

struct PlaceRequest {
  std::string directory;  // empty, and the place's alone
  std::string redis;      // "unix:PATH"
  bool sync = false;      // a put survives the loss of power
};

// Peers whose libraries the machine had when this was built.
std::vector<std::string> PeerPlaces();
// REQUIRES: one of them.
std::unique_ptr<ChunkPlace> MakePeerPlace(const std::string& name, const PlaceRequest& request);

}  // namespace quire::bench

#endif  // QUIRE_BENCH_CHUNK_PLACE_H_
