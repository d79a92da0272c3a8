// Snapshot: one sequence with all its state as one portable file: tokens, KV, recurrent states,
// windows and what has slid out of them, the choice of RoPE factors, the sampler's state. It can be
// restored by another process, on another machine, into pages of another size.
// docs/formats/snapshot.md is the byte layout.
#ifndef QUIRE_SNAPSHOT_H_
#define QUIRE_SNAPSHOT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/chunk.h"
#include "quire/kv_export.h"
#include "quire/status.h"

namespace quire {

struct SnapshotContents {
  Passport identity{};            // as CachePassport takes it
  std::vector<int32_t> tokens{};  // all of the sequence, in order
  std::string sampler{};          // opaque to Quire's caches, restored as it was
  int64_t created_ms = 0;
  // Engine::SaveSnapshot alone: of the requests whose KV it is. Not written.
  std::string cache_salt{};
};

// Writes `path` whole or not at all: a file without a name takes its place at the end, synced
// to the disk. An existing file is replaced. BadArgument if the tokens are not as many as the
// sequence has, UnknownSequence, NotFound (the folder of `path`), IoError.
Status SaveSnapshot(const SequenceStates& states, int64_t seq_id, const SnapshotContents& contents,
                    const std::string& path);

struct SnapshotInfo {
  Passport passport;
  std::string passport_json;
  std::vector<int32_t> tokens;
  std::string sampler;
  WindowSettings windows;
  int64_t state_bytes = 0;  // of recurrent layers
  int64_t version = 1;      // of the file: 2 if there are windows, rows left out or states
  int64_t created_ms = 0;
  int64_t chunk_count = 0;  // that hold KV
  int64_t file_bytes = 0;
  bool long_factors = false;
};

// Reads and verifies all but the KV. NotFound, IoError, Corrupt, Incompatible for a newer format,
// TooLarge.
Result<SnapshotInfo> ReadSnapshotInfo(const std::string& path);
// Reads and verifies everything.
Result<SnapshotInfo> VerifySnapshot(const std::string& path);

struct SnapshotDifference {
  std::string passport{};         // the first field that differs with both values; empty if none
  int64_t common_tokens = 0;      // of the same begin
  int64_t compared_sections = 0;  // of chunks with equal tokens after equal tokens
  int64_t different_sections = 0;
  std::string first_section{};  // "layer 3 key of tokens 256 to 511"; empty if none
  bool same_sampler = true;
  bool same_windows = true;
  bool same_states = true;
  bool operator==(const SnapshotDifference&) const = default;
};

// What two snapshots have in common. Both are verified.
Result<SnapshotDifference> DiffSnapshots(const std::string& ours, const std::string& theirs);

struct SnapshotLoadOptions {
  // Also take KV that was computed with other kernels: it is then close to what this cache would
  // compute, and not bit-equal.
  bool any_numerics = false;
  // Engine::LoadSnapshot alone: requests with this salt start after the snapshot's tokens.
  std::string cache_salt{};
};

// Adds the sequence seq_id with the snapshot's state. `identity`: the model that the cache is for,
// as CachePassport takes it; block_tokens is not compared. Incompatible with the field that
// differs; Corrupt, SequenceExists, OutOfPages. A failed call has changed nothing.
Result<SnapshotInfo> LoadSnapshot(const SequenceStates& states, int64_t seq_id,
                                  const Passport& identity, const std::string& path,
                                  const SnapshotLoadOptions& options = {});

}  // namespace quire

#endif  // QUIRE_SNAPSHOT_H_
