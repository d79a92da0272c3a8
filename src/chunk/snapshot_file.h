// The container of a snapshot: a header with passport and table of chunks, then the chunks. It
// knows chunks and no caches.
#ifndef QUIRE_CHUNK_SNAPSHOT_FILE_H_
#define QUIRE_CHUNK_SNAPSHOT_FILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/chunk.h"
#include "quire/snapshot.h"
#include "quire/status.h"

namespace quire {

// An open file. Closes itself.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  FileHandle(FileHandle&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~FileHandle();
  int get() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

// Version 2 is what has windows, rows that are left out, or recurrent states.
inline constexpr uint32_t kSnapshotVersion = 1;
inline constexpr uint32_t kSnapshotVersionHiding = 2;

// Calls in order: Create, Add for each of the chunks, Finish. Dropped before that, it leaves no
// file; nor does a process that dies, where the file system has files without a name.
class SnapshotWriter {
 public:
  // `passport_json`: of all chunks. IoError.
  static Result<SnapshotWriter> Create(std::string path, std::string passport_json,
                                       int64_t chunk_count, int64_t created_ms,
                                       uint32_t version = kSnapshotVersion);
  SnapshotWriter(SnapshotWriter&&) noexcept = default;
  SnapshotWriter& operator=(SnapshotWriter&&) = delete;
  ~SnapshotWriter();

  Status Add(std::span<const std::byte> chunk);
  // Puts the file in its place. REQUIRES: as many chunks as announced.
  Status Finish() &&;

 private:
  struct Entry {
    uint64_t offset;
    uint64_t length;
  };
  SnapshotWriter(std::string path, std::string passport_json, int64_t chunk_count,
                 int64_t created_ms);
  Status WriteAt(std::span<const std::byte> bytes, int64_t offset);
  Status TakePlace();
  bool LinkTo(const std::string& path) const;
  Status SyncFolder() const;
  std::vector<std::byte> EncodeHeader() const;

  std::string path_;
  std::string temporary_;  // "" while the file has no name
  std::string passport_json_;
  int64_t chunk_count_;
  int64_t created_ms_;
  uint32_t version_ = kSnapshotVersion;
  int64_t end_ = 0;  // of what is written
  std::vector<Entry> table_;
  FileHandle file_;
};

// A verified chunk with the bytes that its view looks at.
struct SnapshotChunk {
  ChunkBuffer buffer;
  ChunkView view;
};

class SnapshotReader {
 public:
  // Reads and verifies header and passport. NotFound, IoError, Corrupt, Incompatible, TooLarge.
  static Result<SnapshotReader> Open(const std::string& path);

  const Passport& passport() const { return passport_; }
  const std::string& passport_json() const { return passport_json_; }
  const KeySpace& keys() const { return keys_; }
  int64_t created_ms() const { return created_ms_; }
  uint32_t version() const { return version_; }
  int64_t file_bytes() const { return file_bytes_; }
  // All chunks but the last one hold KV, the prefix chain from the first token on.
  int64_t kv_chunk_count() const { return static_cast<int64_t>(table_.size()) - 1; }
  // The header of KV chunk `index`, which must continue the chain behind `previous`.
  Result<ChunkHeader> ReadHeader(int64_t index, const ChunkKey& previous) const;
  // The same chunk, its sections verified too.
  Result<SnapshotChunk> ReadChunk(int64_t index, const ChunkKey& previous) const;
  // The last chunk: all state that belongs to no token.
  Result<SnapshotChunk> ReadState() const;

 private:
  struct Entry {
    int64_t offset;
    int64_t length;
  };
  SnapshotReader(FileHandle file, std::string path, std::string passport_json, Passport passport,
                 const Digest& fingerprint);
  static Status ReadAt(const FileHandle& file, const std::string& path, int64_t offset,
                       std::span<std::byte> to);
  Status DecodeTable(std::span<const std::byte> header, int64_t count);
  Result<ChunkBuffer> ReadPart(int64_t index, int64_t length) const;
  Result<SnapshotChunk> Verify(ChunkBuffer buffer, const ChunkExpectation& expected) const;

  FileHandle file_;
  std::string path_;
  std::string passport_json_;
  Passport passport_;
  KeySpace keys_;
  ChunkLimits limits_;
  int64_t created_ms_ = 0;
  uint32_t version_ = kSnapshotVersion;
  int64_t file_bytes_ = 0;
  std::vector<Entry> table_;  // never empty
};

// The key of the last chunk: of no tokens, so no chunk of the chain has it.
inline ChunkKey SnapshotStateKey(const KeySpace& keys) { return keys.Segment({}); }

// The section of the last chunk with the windows of a sequence of `length` tokens, int64 [8].
SectionSpec SnapshotWindowSection();
void WriteSnapshotWindows(const WindowSettings& windows, int64_t length, std::span<std::byte> to);
// What a file of version 2 adds: windows, whose numbers are in [0, 2^31), and a length. Corrupt.
struct SnapshotWindows {
  WindowSettings windows;
  int64_t length = 0;
};
Result<SnapshotWindows> ReadSnapshotWindows(const ChunkView& state);

// What the reader knows without reading KV chunks: all of the info but the tokens.
Result<SnapshotInfo> InfoWithoutTokens(const SnapshotReader& reader);

}  // namespace quire

#endif  // QUIRE_CHUNK_SNAPSHOT_FILE_H_
