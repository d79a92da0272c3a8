// DiskFolder: the files of a disk tier and the catalog of them, kept in step. Its calls block; the
// tier makes them on the threads of its lanes.
//
// Several processes may use one folder. Only the holder of the lock (FolderLock) makes chunk files
// appear, go, or change places; bytes are read and written without it. What appears is complete and
// has its final name at once (a link), so a reader sees a whole file or none, and one that it has
// opened stays until it is closed.
#ifndef QUIRE_STORE_DISK_DISK_FOLDER_H_
#define QUIRE_STORE_DISK_DISK_FOLDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk.h"
#include "quire/chunk_store.h"
#include "quire/seams.h"
#include "store/disk/chunk_file_walk.h"
#include "store/disk/chunk_folders.h"
#include "store/disk/disk_catalog.h"
#include "store/disk/file_session.h"
#include "store/disk/file_transfers.h"
#include "store/disk/folder_lock.h"
#include "store/disk/quarantine_folder.h"
#include "store/disk/temporary_files.h"

namespace quire {

class DiskFolder {
 public:
  // Makes what is missing, and removes what dead processes left behind, as options.use allows.
  static Result<std::unique_ptr<DiskFolder>> Open(FileSession& io,
                                                  std::shared_ptr<FileSystem> files,
                                                  std::shared_ptr<Clock> clock,
                                                  DiskTierOptions options, EvictionKind eviction,
                                                  std::string mac_key);

  DiskCatalog& catalog() { return catalog_; }
  const DiskCatalog& catalog() const { return catalog_; }
  FileTransfersPool& transfers() { return transfers_; }
  Clock& clock() { return *clock_; }
  std::string PathOf(const ChunkId& id) const;
  // A put is acknowledged when a loss of power does not take it.
  bool syncs() const { return options_.durability == Durability::kSync; }

  Status AddPassport(FileSession& io, const Digest& fingerprint, const std::string& passport_json);
  // Those that are sound, as canonical JSON.
  Result<std::vector<std::string>> Passports(FileSession& io) const;

  // ---- Reading

  struct ChunkFile {
    OpenFile file{};
    FileStat stat{};
    bool direct = false;  // reads of it are aligned to 4096
  };
  // NotFound; the entry is then dropped from the catalog.
  Result<ChunkFile> OpenChunk(FileSession& io, const ChunkId& id);
  // What a file begins with, as the header of the chunk that it is named after.
  Result<ChunkHeader> CheckHeader(const ChunkId& id, const FileStat& stat,
                                  std::span<const std::byte> begin) const;
  // A chunk's header; a damaged one is quarantined.
  Result<ChunkHeader> ReadHeader(FileSession& io, const ChunkId& id, ChunkFile& file);
  // All of it, every digest verified, and the MAC if there is a key.
  Result<std::shared_ptr<const StoredChunk>> ReadWhole(FileSession& io, const ChunkId& id);
  // Whether a sound header is there, its time not over; the catalog knows it then.
  Result<bool> Find(FileSession& io, const ChunkId& id);
  // Where the file of the chunk with this key is; NotFound. Its header is not read: of what the
  // catalog does not know, the fingerprint is as short as in the folder's name.
  Result<ChunkId> Locate(FileSession& io, const ChunkKey& key) const;
  // The same, with a sound header.
  Result<ChunkId> FindKey(FileSession& io, const ChunkKey& key);
  // Adds the chunk to the catalog. `file` is its open descriptor.
  void NoteFound(FileSession& io, const ChunkId& id, const ChunkHeader& header, int file);

  // ---- Writing

  // What is to be written. `copy` brings bytes [offset, offset + to.size()) of the chunk, or false
  // when the caller has left.
  struct NewChunk {
    ChunkId id{};
    ChunkHeader header{};
    ChunkWorth worth{};
    std::function<bool(int64_t offset, std::span<std::byte> to)> copy{};
  };
  Status Store(FileSession& io, const NewChunk& chunk);
  Status SetExpiry(FileSession& io, const ChunkId& id, int64_t expires_ms);
  // In the file's record of its worth, and in the catalog. IoError where the file system has none.
  Status SetPriority(FileSession& io, const ChunkId& id, int priority);

  // ---- Removing

  Result<bool> Remove(FileSession& io, const ChunkId& id, ChunkEvent::Kind why);
  Result<int64_t> Clear(FileSession& io, const Digest& fingerprint, const ChunkKey& root);
  // Moves a damaged file aside, unless another one has taken its place since.
  void Quarantine(FileSession& io, const ChunkId& id, uint64_t inode);
  // Unsigned chunk in a store that signs: removes it, since it would block the signed chunk of the
  // same name. Incompatible if the chunk is not for this store for another reason.
  Status RemoveUnsigned(FileSession& io, const ChunkId& id);
  // An expired one, unless another one has taken its place since.
  void RemoveExpired(FileSession& io, const ChunkId& id, uint64_t inode);

  // ---- Upkeep

  // Brings the catalog in step with the files, those of other processes among them. Folders of
  // chunks that are empty are added to `empty` unless it is null.
  Status Scan(FileSession& io, std::vector<std::string>* empty = nullptr);
  // How many were damaged. IoError when all others were looked at: some cannot be read.
  Result<int64_t> Verify(FileSession& io);
  Result<int64_t> CollectGarbage(FileSession& io);

 private:
  // Files from here on are read and written past the page cache: a second copy of them in memory
  // serves nobody, as the RAM tier is in front. Smaller ones gain more from the kernel's read-ahead
  // than from it.
  static constexpr int64_t kDirectBytesMin = 128 << 10;

  // Looking through the folder costs as much as it has files. So what others do is learnt when it
  // makes up this share of the bytes: less often, and a process would evict chunks of its own that
  // are newer than what others leave; more often, and puts would cost more.
  static constexpr int64_t kLearnShare = 8;

  static constexpr auto kAlignment = static_cast<int64_t>(kDirectAlignment);

  DiskFolder(std::shared_ptr<FileSystem> files, std::shared_ptr<Clock> clock,
             DiskTierOptions options, EvictionKind eviction, std::string mac_key, int64_t bytes_max,
             OpenFile lock_file, bool direct_works);

  ChunkExpectation Expect(const ChunkHeader& header) const;
  void Note(const ChunkId& id, const ChunkHeader& header, const ChunkWorth& worth);
  static ChunkWorth WorthOf(FileSession& io, int file);

  struct FolderContents {
    std::vector<FoundChunkFile> damaged{};  // the caller quarantines them
    int64_t bytes = 0;                      // of all files
  };
  Result<FolderContents> ScanFiles(FileSession& io, std::vector<std::string>* empty = nullptr);
  Status LearnHeader(FileSession& io, const FoundChunkFile& found,
                     std::vector<FoundChunkFile>* damaged);

  Result<ChunkHeader> DecodeHeaderOf(FileSession& io, const ChunkId& id, ChunkFile& file);
  Result<std::shared_ptr<const StoredChunk>> LoadWhole(FileSession& io, const ChunkId& id,
                                                       ChunkFile& file);

  Status WriteNewFile(FileSession& io, const NewChunk& chunk, NewFile& new_file);
  Status WritePieces(FileSession& io, const NewChunk& chunk, NewFile& new_file,
                     FileTransfers& transfers);
  // What became of one try to store a chunk.
  struct Attempt {
    bool stored = false;
    bool refused = false;  // Full: the limits and quotas leave it no room, however free the disk is
  };
  Status StoreOnce(FileSession& io, const NewChunk& chunk, Attempt* attempt);
  Status Publish(FileSession& io, const NewChunk& chunk, NewFile& new_file, Attempt* attempt);
  // Gives the new file the name of the file `inode`.
  Status Replace(FileSession& io, const NewChunk& chunk, uint64_t inode, NewFile& new_file);
  // Ok with *is_there: a sound file is there, as durable as a new one would be.
  Status CheckPresent(FileSession& io, const ChunkId& id, bool* is_there);

  // With the lock:
  Status MakeRoom(FileSession& io, const ChunkKey& root, int64_t bytes);
  bool HasMuchToLearn(int64_t used) const;
  Status LearnFolder(FileSession& io);
  Status DropExpired(FileSession& io);
  Result<int64_t> Evict(FileSession& io, std::span<const ChunkId> victims);
  Result<std::optional<int64_t>> RemoveFile(FileSession& io, const ChunkId& id,
                                            ChunkEvent::Kind why);
  void QuarantineFile(FileSession& io, const ChunkId& id, uint64_t inode);

  Status FreeDisk(FileSession& io, int64_t bytes);

  const std::shared_ptr<FileSystem> files_;
  const std::shared_ptr<Clock> clock_;
  const DiskTierOptions options_;
  const std::string mac_key_;
  DiskCatalog catalog_;
  FileTransfersPool transfers_;
  FolderLock lock_;
  TemporaryFiles temporary_;
  QuarantineFolder quarantine_;
  ChunkFolders folders_;
  const bool direct_works_;
  // With the lock:
  int64_t unreadable_ = 0;         // bytes that LearnFolder has found and could not learn
  int64_t room_since_learnt_ = 0;  // bytes that MakeRoom has made room for since then
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_DISK_FOLDER_H_
