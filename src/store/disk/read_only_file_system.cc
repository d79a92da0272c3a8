#include "store/disk/read_only_file_system.h"

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace quire {
namespace {

class ReadOnlyFileSystem final : public FileSystem {
 public:
  explicit ReadOnlyFileSystem(std::shared_ptr<FileSystem> files) : files_(std::move(files)) {}

  int Open(const std::string& path, OpenMode mode) override {
    if (mode == OpenMode::kNameless || mode == OpenMode::kNew) return -EROFS;
    return files_->Open(path, mode == OpenMode::kReadWrite ? OpenMode::kRead : mode);
  }
  void Close(int file) noexcept override { files_->Close(file); }
  int SetDirect(int file) override { return files_->SetDirect(file); }
  int64_t Read(int file, std::span<std::byte> to, int64_t offset) override {
    return files_->Read(file, to, offset);
  }
  int64_t Write(int, std::span<const std::byte>, int64_t) override { return -EROFS; }
  int Allocate(int, int64_t) override { return -EROFS; }
  int Stat(const std::string& path, FileStat* to) override { return files_->Stat(path, to); }
  int StatFile(int file, FileStat* to) override { return files_->StatFile(file, to); }
  int SetRecord(int, std::span<const std::byte>) override { return -EROFS; }
  int64_t GetRecord(int file, std::span<std::byte> to) override {
    return files_->GetRecord(file, to);
  }
  int Sync(int) override { return 0; }  // nothing was written
  int Link(int, const std::string&, const std::string&) override { return -EROFS; }
  int Rename(const std::string&, const std::string&) override { return -EROFS; }
  int Unlink(const std::string&) override { return -EROFS; }
  int MakeDirectory(const std::string&) override { return -EROFS; }
  int RemoveDirectory(const std::string&) override { return -EROFS; }
  int List(const std::string& path, std::vector<std::string>* names) override {
    return files_->List(path, names);
  }
  int Lock(int, bool) override { return 0; }
  void Unlock(int) noexcept override {}
  int64_t FreeBytes(const std::string& path) override { return files_->FreeBytes(path); }
  // Its writes are of files that Open has refused.
  std::unique_ptr<FileQueue> CreateQueue(size_t depth) override {
    return files_->CreateQueue(depth);
  }

 private:
  const std::shared_ptr<FileSystem> files_;
};

}  // namespace

std::shared_ptr<FileSystem> CreateReadOnlyFileSystem(std::shared_ptr<FileSystem> files) {
  return std::make_shared<ReadOnlyFileSystem>(std::move(files));
}

}  // namespace quire
