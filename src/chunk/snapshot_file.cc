#include "chunk/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/random.h"
#include "chunk/chunk_layout.h"

namespace quire {
namespace {

using chunk_layout::kUnitBytes;
using chunk_layout::Load;
using chunk_layout::RoundUp;
using chunk_layout::Store;

constexpr std::string_view kSnapshotMagic = "QSNAPSH1";
constexpr size_t kAtVersion = 8;
constexpr size_t kAtHeaderBytes = 12;
constexpr size_t kAtFileBytes = 16;
constexpr size_t kAtChunkCount = 24;
constexpr size_t kAtCrc = 28;
constexpr size_t kAtCreated = 32;
constexpr size_t kAtPassportBytes = 40;
constexpr size_t kAtReserved = 44;
constexpr int64_t kFixedHeaderBytes = 64;
constexpr int64_t kTableEntryBytes = 16;
// 256 Mi tokens in chunks of 256: more than any model's context, and a table of 16 MiB.
constexpr int64_t kChunkCountMax = int64_t{1} << 20;
// Passports that list their layers one by one take some 60 bytes for each.
constexpr int64_t kPassportBytesMax = int64_t{4} << 20;
constexpr int64_t kHeaderBytesMax =
    kFixedHeaderBytes + kChunkCountMax * kTableEntryBytes + kPassportBytesMax + kUnitBytes;

Status SystemError(const std::string& path, const std::string& what) {
  const int error = errno;
  return Status(error == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError,
                path + ": " + what + ": " + std::strerror(error));
}

Status Corrupt(const std::string& path, const std::string& why) {
  return Status(StatusCode::kCorrupt, path + ": damaged snapshot: " + why);
}

// A message about a chunk, with the file in front of it.
Status InFile(const std::string& path, int64_t index, const Status& status) {
  return Status(status.code(),
                path + ": chunk " + std::to_string(index) + ": " + std::string(status.message()));
}

uint32_t SnapshotCrc(std::span<const std::byte> header) {
  constexpr uint32_t kZero = 0;
  uint32_t crc = Crc32c(header.data(), kAtCrc);
  crc = Crc32c(&kZero, sizeof(kZero), crc);
  return Crc32c(header.data() + kAtCreated, header.size() - kAtCreated, crc);
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string PathOfOpen(const FileHandle& file) {
  return "/proc/self/fd/" + std::to_string(file.get());
}

// A file in the folder that goes with the process, and gets a name when it is complete. EOPNOTSUPP
// where there is none such. Readable for the owner alone, as KV is as secret as the text that it
// was computed from.
FileHandle OpenNameless(const std::string& folder) {
  FileHandle file(::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.get() < 0 || ::access(PathOfOpen(file).c_str(), F_OK) == 0) return file;
  file = FileHandle();
  errno = EOPNOTSUPP;
  return file;
}

int64_t SnapshotHeaderBytes(int64_t chunk_count, size_t passport_bytes) {
  return RoundUp(
      kFixedHeaderBytes + chunk_count * kTableEntryBytes + static_cast<int64_t>(passport_bytes),
      kUnitBytes);
}

}  // namespace

FileHandle::~FileHandle() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

// ---------------------------------------------------------------------- writing

SnapshotWriter::SnapshotWriter(std::string path, std::string passport_json, int64_t chunk_count,
                               int64_t created_ms)
    : path_(std::move(path)),
      passport_json_(std::move(passport_json)),
      chunk_count_(chunk_count),
      created_ms_(created_ms),
      end_(SnapshotHeaderBytes(chunk_count, passport_json_.size())) {}

SnapshotWriter::~SnapshotWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Result<SnapshotWriter> SnapshotWriter::Create(std::string path, std::string passport_json,
                                              int64_t chunk_count, int64_t created_ms,
                                              uint32_t version) {
  if (chunk_count < 1 || chunk_count > kChunkCountMax) {
    return Status(StatusCode::kTooLarge, path + ": a snapshot has 1 to " +
                                             std::to_string(kChunkCountMax) + " chunks, not " +
                                             std::to_string(chunk_count));
  }
  if (static_cast<int64_t>(passport_json.size()) > kPassportBytesMax) {
    return Status(StatusCode::kTooLarge,
                  path + ": the passport has " + std::to_string(passport_json.size()) +
                      " bytes; at most " + std::to_string(kPassportBytesMax) + " are taken");
  }
  SnapshotWriter writer(std::move(path), std::move(passport_json), chunk_count, created_ms);
  writer.version_ = version;
  writer.file_ = OpenNameless(FolderOf(writer.path_));
  if (writer.file_.get() >= 0) return writer;
  if (errno != EOPNOTSUPP) return SystemError(writer.path_, "cannot be created");
  std::string name = writer.path_ + ".XXXXXX";
  writer.file_ = FileHandle(::mkostemp(name.data(), O_CLOEXEC));
  if (writer.file_.get() < 0) return SystemError(name, "cannot be created");
  writer.temporary_ = std::move(name);
  return writer;
}

Status SnapshotWriter::WriteAt(std::span<const std::byte> bytes, int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file_.get(), bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return SystemError(path_, "cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
  return Status();
}

Status SnapshotWriter::Add(std::span<const std::byte> chunk) {
  QUIRE_CHECK(static_cast<int64_t>(table_.size()) < chunk_count_) << path_;
  QUIRE_RETURN_IF_ERROR(WriteAt(chunk, end_));
  table_.push_back({.offset = static_cast<uint64_t>(end_), .length = chunk.size()});
  end_ = RoundUp(end_ + static_cast<int64_t>(chunk.size()), kUnitBytes);
  return Status();
}

std::vector<std::byte> SnapshotWriter::EncodeHeader() const {
  const int64_t header_bytes = SnapshotHeaderBytes(chunk_count_, passport_json_.size());
  std::vector<std::byte> header(static_cast<size_t>(header_bytes));
  const std::span<std::byte> out(header);
  std::memcpy(header.data(), kSnapshotMagic.data(), kSnapshotMagic.size());
  Store(out, kAtVersion, version_);
  Store(out, kAtHeaderBytes, static_cast<uint32_t>(header_bytes));
  Store(out, kAtFileBytes, end_);
  Store(out, kAtChunkCount, static_cast<uint32_t>(chunk_count_));
  Store(out, kAtCreated, created_ms_);
  Store(out, kAtPassportBytes, static_cast<uint32_t>(passport_json_.size()));
  size_t at = kFixedHeaderBytes;
  for (const Entry& entry : table_) {
    Store(out, at, entry.offset);
    Store(out, at + 8, entry.length);
    at += kTableEntryBytes;
  }
  std::memcpy(header.data() + at, passport_json_.data(), passport_json_.size());
  Store(out, kAtCrc, SnapshotCrc(header));
  return header;
}

// A rename is on the disk once its folder is.
Status SnapshotWriter::SyncFolder() const {
  const std::string folder = FolderOf(path_);
  const FileHandle handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (handle.get() < 0 || ::fsync(handle.get()) != 0)
    return SystemError(folder, "cannot be synced");
  return Status();
}

Status SnapshotWriter::Finish() && {
  QUIRE_CHECK(static_cast<int64_t>(table_.size()) == chunk_count_) << path_;
  QUIRE_RETURN_IF_ERROR(WriteAt(EncodeHeader(), 0));
  if (::ftruncate(file_.get(), end_) != 0) return SystemError(path_, "cannot be extended");
  if (::fdatasync(file_.get()) != 0) return SystemError(path_, "cannot be synced");
  QUIRE_RETURN_IF_ERROR(TakePlace());
  return SyncFolder();
}

// A link replaces no file, a rename does and needs a name.
Status SnapshotWriter::TakePlace() {
  const bool is_nameless = temporary_.empty();
  if (is_nameless && LinkTo(path_)) return Status();
  if (is_nameless && errno == EEXIST) {
    uint64_t number = 0;  // a name of nobody else's
    FillRandom(std::as_writable_bytes(std::span(&number, 1)));
    std::string name = path_ + "." + std::to_string(number);
    if (!LinkTo(name)) return SystemError(name, "cannot be created");
    temporary_ = std::move(name);
  }
  if (temporary_.empty() || std::rename(temporary_.c_str(), path_.c_str()) != 0)
    return SystemError(path_, "cannot be put in its place");
  temporary_.clear();
  return Status();
}

bool SnapshotWriter::LinkTo(const std::string& path) const {
  return ::linkat(AT_FDCWD, PathOfOpen(file_).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) ==
         0;
}

// ---------------------------------------------------------------------- reading

SnapshotReader::SnapshotReader(FileHandle file, std::string path, std::string passport_json,
                               Passport passport, const Digest& fingerprint)
    : file_(std::move(file)),
      path_(std::move(path)),
      passport_json_(std::move(passport_json)),
      passport_(std::move(passport)),
      keys_(fingerprint, ""),
      limits_(ChunkLimits::Of(passport_)) {}

Status SnapshotReader::ReadAt(const FileHandle& file, const std::string& path, int64_t offset,
                              std::span<std::byte> to) {
  while (!to.empty()) {
    const ssize_t got = ::pread(file.get(), to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(path, "cannot be read");
    if (got == 0) return Corrupt(path, "it ends at byte " + std::to_string(offset));
    to = to.subspan(static_cast<size_t>(got));
    offset += got;
  }
  return Status();
}

Result<SnapshotReader> SnapshotReader::Open(const std::string& path) {
  FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0)
    return SystemError(path, "cannot be opened");
  const int64_t file_bytes = status.st_size;
  std::vector<std::byte> header(kFixedHeaderBytes);
  QUIRE_RETURN_IF_ERROR(ReadAt(file, path, 0, header));
  if (std::memcmp(header.data(), kSnapshotMagic.data(), kSnapshotMagic.size()) != 0)
    return Corrupt(path, "it does not begin with " + std::string(kSnapshotMagic));
  const int64_t header_bytes = Load<uint32_t>(header, kAtHeaderBytes);
  if (header_bytes < kFixedHeaderBytes || header_bytes > std::min(file_bytes, kHeaderBytesMax))
    return Corrupt(path, "its header is said to have " + std::to_string(header_bytes) + " bytes");
  header.resize(static_cast<size_t>(header_bytes));
  QUIRE_RETURN_IF_ERROR(ReadAt(file, path, 0, header));
  if (Load<uint32_t>(header, kAtCrc) != SnapshotCrc(header))
    return Corrupt(path, "the checksum of its header is wrong");
  const uint32_t version = Load<uint32_t>(header, kAtVersion);
  const bool is_known = version == kSnapshotVersion || version == kSnapshotVersionHiding;
  if (!is_known || Load<uint32_t>(header, kAtReserved) != 0) {
    return Status(StatusCode::kIncompatible,
                  path + ": a snapshot of version " + std::to_string(version) +
                      " or with newer fields; this build reads versions 1 and 2");
  }
  if (Load<int64_t>(header, kAtFileBytes) != file_bytes) {
    return Corrupt(path, "it has " + std::to_string(file_bytes) + " bytes instead of " +
                             std::to_string(Load<int64_t>(header, kAtFileBytes)));
  }
  const int64_t count = Load<uint32_t>(header, kAtChunkCount);
  const int64_t passport_bytes = Load<uint32_t>(header, kAtPassportBytes);
  const int64_t passport_at = kFixedHeaderBytes + count * kTableEntryBytes;
  if (count < 1 || count > kChunkCountMax || passport_bytes > header_bytes - passport_at)
    return Corrupt(path, "its header does not hold table and passport");
  std::string json(reinterpret_cast<const char*>(header.data()) + passport_at,
                   static_cast<size_t>(passport_bytes));
  Result<Passport> passport = Passport::FromJson(json);
  if (!passport.ok()) {
    return Status(passport.status().code(), path + ": " + std::string(passport.status().message()));
  }
  const Digest fingerprint = FingerprintOf(json);
  SnapshotReader reader(std::move(file), path, std::move(json), *std::move(passport), fingerprint);
  reader.version_ = version;
  reader.created_ms_ = Load<int64_t>(header, kAtCreated);
  reader.file_bytes_ = file_bytes;
  QUIRE_RETURN_IF_ERROR(reader.DecodeTable(header, count));
  return reader;
}

Status SnapshotReader::DecodeTable(std::span<const std::byte> header, int64_t count) {
  int64_t end = static_cast<int64_t>(header.size());
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(kFixedHeaderBytes + i * kTableEntryBytes);
    const Entry entry{.offset = Load<int64_t>(header, at), .length = Load<int64_t>(header, at + 8)};
    const bool fits = entry.offset >= end && entry.offset <= file_bytes_ &&
                      entry.length >= kChunkFixedBytes &&
                      entry.length <= file_bytes_ - entry.offset;
    if (!fits) {
      return Corrupt(path_, "chunk " + std::to_string(i) +
                                " is not behind the one before, or not "
                                "in the file");
    }
    if (entry.length > limits_.total_bytes_max) {
      return Status(StatusCode::kTooLarge, path_ + ": chunk " + std::to_string(i) + " has " +
                                               std::to_string(entry.length) +
                                               " bytes; its passport allows " +
                                               std::to_string(limits_.total_bytes_max));
    }
    end = entry.offset + entry.length;
    table_.push_back(entry);
  }
  return Status();
}

Result<ChunkBuffer> SnapshotReader::ReadPart(int64_t index, int64_t length) const {
  ChunkBuffer buffer(length);
  const int64_t offset = table_[static_cast<size_t>(index)].offset;
  QUIRE_RETURN_IF_ERROR(ReadAt(file_, path_, offset, buffer.bytes()));
  return buffer;
}

Result<ChunkHeader> SnapshotReader::ReadHeader(int64_t index, const ChunkKey& previous) const {
  QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer begin, ReadPart(index, kChunkFixedBytes));
  const Result<int64_t> header_bytes = ChunkHeaderBytes(begin.bytes(), limits_);
  if (!header_bytes.ok()) return InFile(path_, index, header_bytes.status());
  const int64_t length = table_[static_cast<size_t>(index)].length;
  QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer bytes, ReadPart(index, std::min(*header_bytes, length)));
  Result<ChunkHeader> header = DecodeChunkHeader(bytes.bytes(), limits_);
  if (!header.ok()) return InFile(path_, index, header.status());
  const Status status = CheckChunk(*header, {.key = keys_.Next(previous, header->tokens),
                                             .fingerprint = keys_.fingerprint(),
                                             .now_ms = created_ms_});
  if (!status.ok()) return InFile(path_, index, status);
  return header;
}

Result<SnapshotChunk> SnapshotReader::Verify(ChunkBuffer buffer,
                                             const ChunkExpectation& expected) const {
  QUIRE_ASSIGN_OR_RETURN(ChunkView view,
                         ChunkView::Open(std::as_const(buffer).bytes(), expected, limits_));
  QUIRE_RETURN_IF_ERROR(view.CheckAll());
  return SnapshotChunk{std::move(buffer), std::move(view)};
}

Result<SnapshotChunk> SnapshotReader::ReadChunk(int64_t index, const ChunkKey& previous) const {
  QUIRE_ASSIGN_OR_RETURN(const ChunkHeader header, ReadHeader(index, previous));
  QUIRE_ASSIGN_OR_RETURN(ChunkBuffer buffer,
                         ReadPart(index, table_[static_cast<size_t>(index)].length));
  Result<SnapshotChunk> chunk = Verify(std::move(buffer), {.key = header.key,
                                                           .fingerprint = keys_.fingerprint(),
                                                           .now_ms = created_ms_,
                                                           .tokens = header.tokens});
  if (!chunk.ok()) return InFile(path_, index, chunk.status());
  return chunk;
}

Result<SnapshotChunk> SnapshotReader::ReadState() const {
  const int64_t index = kv_chunk_count();
  QUIRE_ASSIGN_OR_RETURN(ChunkBuffer buffer,
                         ReadPart(index, table_[static_cast<size_t>(index)].length));
  Result<SnapshotChunk> chunk = Verify(std::move(buffer), {.key = SnapshotStateKey(keys_),
                                                           .fingerprint = keys_.fingerprint(),
                                                           .now_ms = created_ms_,
                                                           .tokens = std::span<const int32_t>()});
  if (!chunk.ok()) return InFile(path_, index, chunk.status());
  return chunk;
}

// ---------------------------------------------------------------------- windows

namespace {

constexpr size_t kWindowNumbers = 8;  // the last one is reserved

}  // namespace

SectionSpec SnapshotWindowSection() {
  return {SectionKind::kWindow, 0, 0, ElementType(kDLInt, 64), {int64_t{kWindowNumbers}}};
}

void WriteSnapshotWindows(const WindowSettings& windows, int64_t length, std::span<std::byte> to) {
  const int64_t numbers[kWindowNumbers] = {
      length,       windows.window, windows.sinks,     windows.lost,
      windows.slid, windows.span,   windows.span_sinks};
  for (size_t i = 0; i < kWindowNumbers; ++i) Store(to, i * sizeof(int64_t), numbers[i]);
}

Result<SnapshotWindows> ReadSnapshotWindows(const ChunkView& state) {
  const int64_t index = state.header().Find(SectionKind::kWindow, 0);
  const bool fits = index >= 0 && static_cast<const SectionSpec&>(
                                      state.header().sections[static_cast<size_t>(index)]) ==
                                      SnapshotWindowSection();
  if (!fits) {
    return Status(StatusCode::kCorrupt,
                  "damaged snapshot: a file of version 2 without a section of windows");
  }
  QUIRE_ASSIGN_OR_RETURN(const auto bytes, state.section(index));
  int64_t numbers[kWindowNumbers];
  for (size_t i = 0; i < kWindowNumbers; ++i) {
    numbers[i] = Load<int64_t>(bytes, i * sizeof(int64_t));
    if (numbers[i] >= 0 && numbers[i] < int64_t{1} << 31) continue;
    return Status(StatusCode::kCorrupt, "damaged snapshot: number " + std::to_string(i) +
                                            " of its windows is " + std::to_string(numbers[i]));
  }
  return SnapshotWindows{.windows = {.window = numbers[1],
                                     .sinks = numbers[2],
                                     .lost = numbers[3],
                                     .slid = numbers[4],
                                     .span = numbers[5],
                                     .span_sinks = numbers[6]},
                         .length = numbers[0]};
}

}  // namespace quire
