// DiskFolder: the files of a disk tier and the catalog of them, kept in step. Its calls block; the
// tier makes them on the threads of its lanes.
//
// Several processes may use one folder. Only the holder of the lock file makes chunk files appear,
// go, or change places, and keeps the sum of their bytes in it; bytes are read and written without
// it. What appears is complete and has its final name at once (a link), so a reader sees a whole
// file or none, and one that it has opened stays until it is closed.
#ifndef QUIRE_STORE_DISK_DISK_FOLDER_H_
#define QUIRE_STORE_DISK_DISK_FOLDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
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

  // Brings the catalog in step with the files, those of other processes among them.
  Status Scan(FileSession& io);
  Result<int64_t> Verify(FileSession& io);
  Result<int64_t> CollectGarbage(FileSession& io);

 private:
  // Files from here on are read and written past the page cache: a second copy of them in memory
  // serves nobody, as the RAM tier is in front. Smaller ones gain more from the kernel's read-ahead
  // than from it.
  static constexpr int64_t kDirectBytesMin = 128 << 10;

  // Damaged files are kept so that the disk's failure can be looked into: some, not all.
  static constexpr int64_t kQuarantineFilesMax = 16;
  static constexpr int64_t kQuarantineShare = 16;  // of bytes_max

  static constexpr auto kAlignment = static_cast<int64_t>(kDirectAlignment);

  DiskFolder(std::shared_ptr<FileSystem> files, std::shared_ptr<Clock> clock,
             DiskTierOptions options, EvictionKind eviction, std::string mac_key,
             int64_t bytes_max);

  // The right to change which files there are.
  class Lock {
   public:
    Lock(DiskFolder& folder, FileSession& io);
    ~Lock();
    const Status& status() const { return status_; }

   private:
    std::unique_lock<std::mutex> threads_;  // flock() does not separate those of one process
    FileSystem& files_;
    const int file_;
    Status status_;
  };

  bool syncs() const { return options_.durability == Durability::kSync; }
  ChunkExpectation Expect(const ChunkHeader& header) const;
  void Note(const ChunkId& id, const ChunkHeader& header, const ChunkWorth& worth);
  static ChunkWorth WorthOf(FileSession& io, int file);

  // Returns the damaged ones, which the caller quarantines.
  Result<std::vector<FoundChunkFile>> ScanFiles(FileSession& io);
  Status LearnHeader(FileSession& io, const FoundChunkFile& found,
                     std::vector<FoundChunkFile>* damaged);

  Result<ChunkHeader> DecodeHeaderOf(FileSession& io, const ChunkId& id, ChunkFile& file);
  Result<std::shared_ptr<const StoredChunk>> LoadWhole(FileSession& io, const ChunkId& id,
                                                       ChunkFile& file);

  // A file being written: nameless, or with a name in the temporary folder. The lock on it says
  // that its writer lives.
  struct NewFile {
    OpenFile file{};
    std::string path{};
    bool direct = false;
  };
  Status CreateNewFile(FileSession& io, bool named, NewFile* new_file);
  void DropNewFile(FileSession& io, NewFile& new_file);
  Status WriteNewFile(FileSession& io, const NewChunk& chunk, NewFile& new_file);
  Status WritePieces(FileSession& io, const NewChunk& chunk, NewFile& new_file,
                     FileTransfers& transfers);
  Status StoreOnce(FileSession& io, const NewChunk& chunk, bool* stored);
  Status Publish(FileSession& io, const NewChunk& chunk, NewFile& new_file, bool* is_there);
  // Gives the new file the name of the file `inode`.
  Status Replace(FileSession& io, const NewChunk& chunk, uint64_t inode, NewFile& new_file);
  // Ok with *is_there: a sound file is there, as durable as a new one would be.
  Status CheckPresent(FileSession& io, const ChunkId& id, bool* is_there);
  Status WriteSmallFile(FileSession& io, std::string_view folder, const std::string& path,
                        std::string_view text);

  // With the lock:
  Status MakeRoom(FileSession& io, const ChunkKey& root, int64_t bytes);
  Status LearnFolder(FileSession& io);
  Status DropExpired(FileSession& io);
  Result<bool> Evict(FileSession& io, std::span<const ChunkId> victims, ChunkEvent::Kind why);
  Status RemoveFile(FileSession& io, const ChunkId& id, ChunkEvent::Kind why, bool* removed);
  void QuarantineFile(FileSession& io, const ChunkId& id, uint64_t inode);
  int64_t TrimQuarantine(FileSession& io, int64_t files_max, int64_t bytes_max);
  Result<int64_t> Usage(FileSession& io);
  Result<int64_t> CountUsage(FileSession& io);
  Status AddUsage(FileSession& io, int64_t bytes);

  Status FreeDisk(FileSession& io, int64_t bytes);
  int64_t RemoveLeftovers(FileSession& io);

  const std::shared_ptr<FileSystem> files_;
  const std::shared_ptr<Clock> clock_;
  const DiskTierOptions options_;
  const std::string mac_key_;
  DiskCatalog catalog_;
  FileTransfersPool transfers_;
  OpenFile lock_file_;
  std::mutex change_mutex_;
  bool direct_works_ = false;
  bool nameless_works_ = true;
  ChunkFolders folders_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_DISK_FOLDER_H_
