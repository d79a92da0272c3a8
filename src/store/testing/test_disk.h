// What tests of the disk tier share: a directory, chunks, a sink, a file system that fails.
#ifndef QUIRE_STORE_TESTING_TEST_DISK_H_
#define QUIRE_STORE_TESTING_TEST_DISK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk.h"
#include "store/disk/disk_tier.h"
#include "store/disk/file_system.h"

namespace quire {

// Removed with all that is in it.
class TestDirectory {
 public:
  // In `parent` where there is one; else among temporary files.
  explicit TestDirectory(const std::string& parent = "");
  ~TestDirectory();
  const std::string& path() const { return path_; }
  // All files below, by path relative to it.
  std::vector<std::string> Files() const;
  std::vector<std::string> ChunkFiles() const;  // those that end in .qkv, quarantine left out

 private:
  std::string path_;
};

std::string ReadFileBytes(const std::string& path);
void WriteFileBytes(const std::string& path, std::string_view bytes);

struct TestChunk {
  ChunkId id{};
  std::vector<int32_t> tokens{};
  std::shared_ptr<const StoredChunk> stored{};
};

struct TestChunkShape {
  int64_t layers = 2;
  int64_t width = 6;  // elements of a key or value of a token
  int64_t tokens = 4;
  int64_t alignment = 64;
  int64_t expires_ms = 0;
  std::string mac_key{};
};

Passport TestPassport();
Digest TestFingerprint();
KeySpace TestKeys(std::string_view salt = "");
// The first `count` chunks of a prefix chain; another `seed` is another chain. Contents follow from
// the key.
std::vector<TestChunk> TestChain(int64_t count, int64_t seed = 0, const TestChunkShape& shape = {},
                                 std::string_view salt = "");

// Keeps what arrives, in memory that was filled with garbage.
class TestSink : public TierReadSink {
 public:
  explicit TestSink(size_t count)
      : kept(std::make_shared<std::vector<ChunkBuffer>>(count)),
        headers(count),
        statuses(count),
        ends(count) {}
  Result<std::span<std::byte>> OnHeader(size_t item, const ChunkHeader& header) override;
  // Every second one is copied to its place.
  std::shared_ptr<const void> OwnerOf(size_t item) override {
    return item % 2 == 0 ? kept : nullptr;
  }
  void OnSection(size_t item, int64_t section) override { order.push_back({item, section}); }
  void OnEnd(size_t item, const Status& status) override;
  bool Cancelled(size_t item) const override { return cancelled.contains(item); }

  std::shared_ptr<std::vector<ChunkBuffer>> kept;
  std::vector<ChunkBuffer>& buffers = *kept;
  std::vector<ChunkHeader> headers;
  std::vector<Status> statuses;
  std::vector<int> ends;
  std::vector<std::pair<size_t, int64_t>> order;
  std::set<size_t> cancelled;
};

std::vector<TierRead> ReadsOf(std::span<const TestChunk> chunks, int64_t now_ms,
                              std::string_view mac_key = {});
std::vector<TierWrite> WritesOf(std::span<const TestChunk> chunks);
// Reads one chunk: ok, and then its bytes are those that were put, or why not. A wrong byte is a
// failure of the test.
Status ReadBack(DiskTier& tier, const TestChunk& chunk, int64_t now_ms = 1,
                std::string_view mac_key = {});
Status Put(DiskTier& tier, const TestChunk& chunk);

// Passes calls on, and does something at one of them.
class FaultyFileSystem : public FileSystem {
 public:
  explicit FaultyFileSystem(std::shared_ptr<FileSystem> below) : below_(std::move(below)) {}

  // Call number `at` (from 0, counted from now on) of those named `name` ("" = any) and, if
  // `sticky`, all after it, return `error` (or, 1: move half of the bytes).
  void FailAt(int64_t at, int error, bool sticky = false, std::string name = "");
  // Before call number `at`, and before all if -1.
  void CallAt(int64_t at, std::function<void(std::string_view name)> hook);
  int64_t calls() const;

  int Open(const std::string& path, OpenMode mode) override;
  void Close(int file) noexcept override { below_->Close(file); }
  int SetDirect(int) override { return -22; }  // odd sizes come from here: no alignment
  int64_t Read(int file, std::span<std::byte> to, int64_t offset) override;
  int64_t Write(int file, std::span<const std::byte> from, int64_t offset) override;
  int Allocate(int file, int64_t size) override;
  int Stat(const std::string& path, FileStat* to) override;
  int StatFile(int file, FileStat* to) override;
  int SetRecord(int file, std::span<const std::byte> record) override;
  int64_t GetRecord(int file, std::span<std::byte> to) override;
  int Sync(int file) override;
  int Link(int file, const std::string& path, const std::string& to) override;
  int Rename(const std::string& from, const std::string& to) override;
  int Unlink(const std::string& path) override;
  int MakeDirectory(const std::string& path) override;
  int RemoveDirectory(const std::string& path) override;
  int List(const std::string& path, std::vector<std::string>* names) override;
  int Lock(int file, bool wait) override;
  void Unlock(int file) noexcept override { below_->Unlock(file); }
  int64_t FreeBytes(const std::string& path) override { return below_->FreeBytes(path); }

 private:
  int Fault(std::string_view name);

  const std::shared_ptr<FileSystem> below_;
  mutable std::mutex mutex_;
  int64_t calls_ = 0, matched_ = 0, fail_at_ = -1, hook_at_ = 0;
  int error_ = 0;
  bool sticky_ = false;
  std::string name_;
  std::function<void(std::string_view)> hook_;
};

// A disk in memory that loses power: what was not synced is there, or not, sector by sector and
// entry by entry, as the seed has it.
class PowerFileSystem final : public FileSystem {
 public:
  PowerFileSystem();
  // From call number `at` (counted from now on) on nothing works: -EIO.
  void CutAt(int64_t at);
  bool is_cut() const;
  // The machine starts again.
  void Restart(uint64_t seed);

  int Open(const std::string& path, OpenMode mode) override;
  void Close(int file) noexcept override;
  int SetDirect(int file) override;
  int64_t Read(int file, std::span<std::byte> to, int64_t offset) override;
  int64_t Write(int file, std::span<const std::byte> from, int64_t offset) override;
  int Allocate(int file, int64_t size) override;
  int Stat(const std::string& path, FileStat* to) override;
  int StatFile(int file, FileStat* to) override;
  int Sync(int file) override;
  int Link(int file, const std::string& path, const std::string& to) override;
  int Rename(const std::string& from, const std::string& to) override;
  int Unlink(const std::string& path) override;
  int MakeDirectory(const std::string& path) override;
  int RemoveDirectory(const std::string& path) override;
  int List(const std::string& path, std::vector<std::string>* names) override;
  int Lock(int file, bool wait) override;
  void Unlock(int file) noexcept override;
  int64_t FreeBytes(const std::string&) override { return int64_t{1} << 40; }

 private:
  static constexpr size_t kSectorBytes = 512;
  struct Node {
    bool is_directory = false;
    std::string data{}, durable{};  // of a file
    std::set<size_t> dirty{};       // sectors
    // Of a directory: inode by name; and what was done to each name since the last sync, in order
    // (0 = removed).
    std::map<std::string, uint64_t> entries{}, durable_entries{};
    std::vector<std::pair<std::string, uint64_t>> changes{};
    int64_t changed_at = 0;
  };
  bool IsOff();
  // The directory that the path's last name is in; nullptr if there is none.
  Node* Parent(const std::string& path, std::string* name);
  uint64_t Lookup(const std::string& path);
  void Set(Node& directory, const std::string& name, uint64_t inode);
  void Fill(uint64_t inode, FileStat* to);
  void Mark(Node& node, size_t begin, size_t end);

  mutable std::mutex mutex_;
  std::map<uint64_t, Node> nodes_;
  std::map<int, uint64_t> open_;
  std::map<uint64_t, int> locks_;
  uint64_t next_inode_ = 2;
  int next_file_ = 3;
  int64_t calls_ = 0, cut_at_ = -1, time_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_TEST_DISK_H_
