#include "store/testing/test_disk.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/random.h"

namespace quire {

namespace fs = std::filesystem;

// ---------------------------------------------------------------------- files

TestDirectory::TestDirectory(const std::string& parent) {
  const fs::path above = fs::is_directory(parent) ? fs::path(parent) : fs::temp_directory_path();
  std::string path = (above / "quire-disk-XXXXXX").string();
  EXPECT_NE(::mkdtemp(path.data()), nullptr);
  path_ = path;
}

TestDirectory::~TestDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<std::string> TestDirectory::Files() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(path_))
    if (entry.is_regular_file()) names.push_back(fs::relative(entry.path(), path_).string());
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> TestDirectory::ChunkFiles() const {
  std::vector<std::string> names = Files();
  std::erase_if(names, [](const std::string& name) {
    return !name.ends_with(".qkv") || name.starts_with("quarantine");
  });
  return names;
}

std::string ReadFileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFileBytes(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// ---------------------------------------------------------------------- chunks

Passport TestPassport() {
  Passport passport;
  passport.model = "test";
  passport.revision = "r0";
  passport.block_tokens = 4;
  PassportLayer layer;
  layer.dtype = DType::kBF16;
  layer.kv_heads = 1;
  layer.head_dim = layer.v_head_dim = 6;
  passport.layers.assign(2, layer);
  return passport;
}

Digest TestFingerprint() { return *TestPassport().Fingerprint(); }

KeySpace TestKeys(std::string_view salt) { return KeySpace(TestFingerprint(), salt); }

namespace {

TestChunk MakeChunk(const KeySpace& keys, const ChunkKey& before, std::vector<int32_t> tokens,
                    const TestChunkShape& shape) {
  TestChunk chunk;
  chunk.id = {keys.fingerprint(), keys.root(), keys.Next(before, tokens)};
  ChunkFields fields;
  fields.key = chunk.id.key;
  fields.fingerprint = chunk.id.fingerprint;
  fields.created_ms = 1;
  fields.expires_ms = shape.expires_ms;
  fields.context = before.digest;
  fields.tokens = tokens;
  std::vector<SectionSpec> sections;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue})
      sections.push_back({kind, layer, layer, DType::kBF16, {shape.tokens, 1, shape.width}});
  }
  ChunkWriteOptions options;
  options.alignment = shape.alignment;
  options.mac_key = shape.mac_key;
  auto writer = ChunkWriter::Create(fields, sections, options);
  EXPECT_TRUE(writer.ok()) << writer.status().ToString();
  for (size_t s = 0; s < sections.size(); ++s) {
    const auto bytes = writer->section(static_cast<int64_t>(s)).value();
    RandomSequence random(chunk.id.key.digest.bytes[0], s);
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>(i % 64 == 0 ? random.Bits() : i * 7 + s);
  }
  ChunkHeader header = writer->header();
  auto sealed = std::move(*writer).Seal();
  EXPECT_TRUE(sealed.ok());
  header = *DecodeChunkHeader(sealed->bytes(), {});
  chunk.stored = std::make_shared<const StoredChunk>(std::move(header), std::move(*sealed));
  chunk.tokens = std::move(tokens);
  return chunk;
}

}  // namespace

std::vector<TestChunk> TestChain(int64_t count, int64_t seed, const TestChunkShape& shape,
                                 std::string_view salt) {
  const KeySpace keys = TestKeys(salt);
  std::vector<TestChunk> chain;
  ChunkKey before = keys.root();
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < shape.tokens; ++t)
      tokens.push_back(static_cast<int32_t>(seed * 1000 + i * shape.tokens + t));
    chain.push_back(MakeChunk(keys, before, std::move(tokens), shape));
    before = chain.back().id.key;
  }
  return chain;
}

Result<std::span<std::byte>> TestSink::OnHeader(size_t item, const ChunkHeader& header) {
  headers[item] = header;
  buffers[item] = ChunkBuffer(header.total_bytes);
  std::ranges::fill(buffers[item].bytes(), std::byte{0xAB});
  return buffers[item].bytes();
}

void TestSink::OnEnd(size_t item, const Status& status) {
  statuses[item] = status;
  ++ends[item];
}

std::vector<TierRead> ReadsOf(std::span<const TestChunk> chunks, int64_t now_ms,
                              std::string_view mac_key) {
  std::vector<TierRead> reads;
  for (const TestChunk& chunk : chunks) {
    TierRead read;
    read.id = chunk.id;
    read.expected.key = chunk.id.key;
    read.expected.fingerprint = chunk.id.fingerprint;
    read.expected.now_ms = now_ms;
    read.expected.tokens = chunk.tokens;
    read.expected.mac_key = mac_key;
    reads.push_back(read);
  }
  return reads;
}

std::vector<TierWrite> WritesOf(std::span<const TestChunk> chunks) {
  std::vector<TierWrite> writes;
  for (const TestChunk& chunk : chunks) writes.push_back({chunk.id, chunk.stored.get()});
  return writes;
}

Status ReadBack(DiskTier& tier, const TestChunk& chunk, int64_t now_ms, std::string_view mac_key) {
  TestSink sink(1);
  tier.Read(ReadsOf({&chunk, 1}, now_ms, mac_key), kNever, sink);
  EXPECT_EQ(sink.ends[0], 1);
  if (!sink.statuses[0].ok()) return sink.statuses[0];
  EXPECT_EQ(sink.order.size(), chunk.stored->header().sections.size());
  const auto wanted = chunk.stored->bytes();
  const auto got = std::as_const(sink.buffers[0]).bytes();
  // The header may have another expiry; every byte of the sections is the same.
  EXPECT_EQ(got.size(), wanted.size());
  for (const Section& section : chunk.stored->header().sections) {
    const auto begin = static_cast<size_t>(section.offset);
    const auto size = static_cast<size_t>(section.length);
    EXPECT_TRUE(std::ranges::equal(got.subspan(begin, size), wanted.subspan(begin, size)))
        << "wrong bytes were served";
  }
  EXPECT_TRUE(sink.headers[0].expires_ms != chunk.stored->header().expires_ms ||
              std::ranges::equal(got, wanted))
      << "wrong bytes between sections";
  return Status();
}

Status Put(DiskTier& tier, const TestChunk& chunk) {
  return tier.Write(WritesOf({&chunk, 1}), kNever)[0];
}

// ---------------------------------------------------------------------- faults

void FaultyFileSystem::FailAt(int64_t at, int error, bool sticky, std::string name) {
  const std::lock_guard<std::mutex> guard(mutex_);
  matched_ = 0;
  fail_at_ = at;
  error_ = error;
  sticky_ = sticky;
  name_ = std::move(name);
}

void FaultyFileSystem::CallAt(int64_t at, std::function<void(std::string_view)> hook) {
  const std::lock_guard<std::mutex> guard(mutex_);
  hook_at_ = at < 0 ? -1 : calls_ + at;
  hook_ = std::move(hook);
}

int64_t FaultyFileSystem::calls() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return calls_;
}

int FaultyFileSystem::Fault(std::string_view name) {
  std::function<void(std::string_view)> hook;
  int error = 0;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (hook_ && (hook_at_ < 0 || hook_at_ == calls_)) hook = hook_;
    ++calls_;
    if (fail_at_ >= 0 && (name_.empty() || name_ == name)) {
      const int64_t number = matched_++;
      if (number == fail_at_ || (sticky_ && number > fail_at_)) error = error_;
    }
  }
  if (hook) hook(name);
  return error;
}

#define QUIRE_FAULT(name) \
  if (const int fault = Fault(name); fault < 0) return fault

int FaultyFileSystem::Open(const std::string& path, OpenMode mode) {
  QUIRE_FAULT(mode == OpenMode::kNameless ? "nameless" : "open");
  return below_->Open(path, mode);
}
int64_t FaultyFileSystem::Read(int file, std::span<std::byte> to, int64_t offset) {
  const int fault = Fault("read");
  if (fault < 0) return fault;
  if (fault > 0 && to.size() > 1) to = to.first(to.size() / 2);
  return below_->Read(file, to, offset);
}
int64_t FaultyFileSystem::Write(int file, std::span<const std::byte> from, int64_t offset) {
  const int fault = Fault("write");
  if (fault < 0) return fault;
  if (fault > 0 && from.size() > 1) from = from.first(from.size() / 2);
  return below_->Write(file, from, offset);
}
int FaultyFileSystem::Allocate(int file, int64_t size) {
  QUIRE_FAULT("allocate");
  return below_->Allocate(file, size);
}
int FaultyFileSystem::Stat(const std::string& path, FileStat* to) {
  QUIRE_FAULT("stat");
  return below_->Stat(path, to);
}
int FaultyFileSystem::StatFile(int file, FileStat* to) {
  QUIRE_FAULT("stat");
  return below_->StatFile(file, to);
}
int FaultyFileSystem::SetRecord(int file, std::span<const std::byte> record) {
  QUIRE_FAULT("set_record");
  return below_->SetRecord(file, record);
}
int64_t FaultyFileSystem::GetRecord(int file, std::span<std::byte> to) {
  QUIRE_FAULT("get_record");
  return below_->GetRecord(file, to);
}
int FaultyFileSystem::Sync(int file) {
  QUIRE_FAULT("sync");
  return below_->Sync(file);
}
int FaultyFileSystem::Link(int file, const std::string& path, const std::string& to) {
  QUIRE_FAULT("link");
  return below_->Link(file, path, to);
}
int FaultyFileSystem::Rename(const std::string& from, const std::string& to) {
  QUIRE_FAULT("rename");
  return below_->Rename(from, to);
}
int FaultyFileSystem::Unlink(const std::string& path) {
  QUIRE_FAULT("unlink");
  return below_->Unlink(path);
}
int FaultyFileSystem::MakeDirectory(const std::string& path) {
  QUIRE_FAULT("mkdir");
  return below_->MakeDirectory(path);
}
int FaultyFileSystem::RemoveDirectory(const std::string& path) {
  QUIRE_FAULT("rmdir");
  return below_->RemoveDirectory(path);
}
int FaultyFileSystem::List(const std::string& path, std::vector<std::string>* names) {
  QUIRE_FAULT("list");
  return below_->List(path, names);
}
int FaultyFileSystem::Lock(int file, bool wait) {
  QUIRE_FAULT("lock");
  return below_->Lock(file, wait);
}

// ---------------------------------------------------------------------- power

namespace {
constexpr uint64_t kRootInode = 1;
using Guard = std::lock_guard<std::mutex>;
}  // namespace

PowerFileSystem::PowerFileSystem() { nodes_[kRootInode].is_directory = true; }

void PowerFileSystem::CutAt(int64_t at) {
  const Guard guard(mutex_);
  cut_at_ = calls_ + at;
}

bool PowerFileSystem::is_cut() const {
  const Guard guard(mutex_);
  return cut_at_ >= 0 && calls_ > cut_at_;
}

bool PowerFileSystem::IsOff() { return cut_at_ >= 0 && calls_++ >= cut_at_; }

void PowerFileSystem::Restart(uint64_t seed) {
  const Guard guard(mutex_);
  RandomSequence random(seed);
  for (auto& [inode, node] : nodes_) {
    std::string data = node.durable;
    for (const size_t sector : node.dirty) {
      if (random.Below(2) == 0) continue;
      const size_t begin = sector * kSectorBytes;
      const std::string bytes =
          begin < node.data.size() ? node.data.substr(begin, kSectorBytes) : std::string();
      if (data.size() < begin + bytes.size()) data.resize(begin + bytes.size());
      data.replace(begin, bytes.size(), bytes);
    }
    node.data = node.durable = data;
    node.dirty.clear();
    auto entries = node.durable_entries;
    for (const auto& [name, target] : node.changes) {
      if (random.Below(2) == 0) continue;
      if (target == 0) entries.erase(name);
      if (target != 0) entries[name] = target;
    }
    node.entries = node.durable_entries = entries;
    node.changes.clear();
  }
  open_.clear();
  locks_.clear();
  cut_at_ = -1;
}

PowerFileSystem::Node* PowerFileSystem::Parent(const std::string& path, std::string* name) {
  const size_t slash = path.find_last_of('/');
  *name = path.substr(slash + 1);
  const uint64_t inode = slash == 0 ? kRootInode : Lookup(path.substr(0, slash));
  const auto found = nodes_.find(inode);
  return found == nodes_.end() || !found->second.is_directory ? nullptr : &found->second;
}

uint64_t PowerFileSystem::Lookup(const std::string& path) {
  uint64_t inode = kRootInode;
  size_t at = 1;
  while (at < path.size()) {
    const size_t end = std::min(path.find('/', at), path.size());
    const auto& entries = nodes_[inode].entries;
    const auto found = entries.find(path.substr(at, end - at));
    if (end > at) {
      if (found == entries.end()) return 0;
      inode = found->second;
    }
    at = end + 1;
  }
  return inode;
}

void PowerFileSystem::Set(Node& directory, const std::string& name, uint64_t inode) {
  if (inode == 0) directory.entries.erase(name);
  if (inode != 0) directory.entries[name] = inode;
  directory.changes.emplace_back(name, inode);
}

void PowerFileSystem::Mark(Node& node, size_t begin, size_t end) {
  for (size_t sector = begin / kSectorBytes; sector * kSectorBytes < end; ++sector)
    node.dirty.insert(sector);
  node.changed_at = ++time_;
}

int PowerFileSystem::Open(const std::string& path, OpenMode mode) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  if (mode == OpenMode::kNameless) {
    if (Lookup(path) == 0) return -ENOENT;
    nodes_[next_inode_];
    open_[next_file_] = next_inode_++;
    return next_file_++;
  }
  uint64_t inode = Lookup(path);
  if (inode != 0 && mode == OpenMode::kNew) return -EEXIST;
  if (inode == 0) {
    std::string name;
    Node* const parent = Parent(path, &name);
    if (parent == nullptr || mode == OpenMode::kRead || mode == OpenMode::kDirectory)
      return -ENOENT;
    inode = next_inode_++;
    nodes_[inode];
    Set(*parent, name, inode);
  }
  open_[next_file_] = inode;
  return next_file_++;
}

void PowerFileSystem::Close(int file) noexcept {
  Unlock(file);
  const Guard guard(mutex_);
  open_.erase(file);
}

int PowerFileSystem::SetDirect(int) { return -EINVAL; }

int64_t PowerFileSystem::Read(int file, std::span<std::byte> to, int64_t offset) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  const std::string& data = nodes_[open_[file]].data;
  const auto begin = std::min(static_cast<size_t>(offset), data.size());
  const size_t count = std::min(to.size(), data.size() - begin);
  std::memcpy(to.data(), data.data() + begin, count);
  return static_cast<int64_t>(count);
}

int64_t PowerFileSystem::Write(int file, std::span<const std::byte> from, int64_t offset) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  Node& node = nodes_[open_[file]];
  const auto begin = static_cast<size_t>(offset);
  if (node.data.size() < begin + from.size()) node.data.resize(begin + from.size());
  std::memcpy(node.data.data() + begin, from.data(), from.size());
  Mark(node, begin, begin + from.size());
  return static_cast<int64_t>(from.size());
}

int PowerFileSystem::Allocate(int file, int64_t size) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  Node& node = nodes_[open_[file]];
  const size_t before = node.data.size();
  node.data.resize(std::max(before, static_cast<size_t>(size)));
  Mark(node, before, node.data.size());
  return 0;
}

void PowerFileSystem::Fill(uint64_t inode, FileStat* to) {
  const Node& node = nodes_[inode];
  *to = {static_cast<int64_t>(node.data.size()), inode, node.changed_at, node.is_directory};
}

int PowerFileSystem::Stat(const std::string& path, FileStat* to) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  const uint64_t inode = Lookup(path);
  if (inode == 0) return -ENOENT;
  Fill(inode, to);
  return 0;
}

int PowerFileSystem::StatFile(int file, FileStat* to) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  Fill(open_[file], to);
  return 0;
}

int PowerFileSystem::Sync(int file) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  Node& node = nodes_[open_[file]];
  node.durable = node.data;
  node.dirty.clear();
  node.durable_entries = node.entries;
  node.changes.clear();
  return 0;
}

int PowerFileSystem::Link(int file, const std::string& path, const std::string& to) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  if (!path.empty() && Lookup(path) == 0) return -ENOENT;
  std::string name;
  Node* const parent = Parent(to, &name);
  if (parent == nullptr) return -ENOENT;
  if (parent->entries.contains(name)) return -EEXIST;
  Set(*parent, name, open_[file]);
  return 0;
}

int PowerFileSystem::Rename(const std::string& from, const std::string& to) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  const uint64_t inode = Lookup(from);
  std::string from_name, to_name;
  Node* const from_parent = Parent(from, &from_name);
  Node* const to_parent = Parent(to, &to_name);
  if (inode == 0 || to_parent == nullptr) return -ENOENT;
  Set(*to_parent, to_name, inode);
  Set(*from_parent, from_name, 0);
  return 0;
}

int PowerFileSystem::Unlink(const std::string& path) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  if (Lookup(path) == 0) return -ENOENT;
  std::string name;
  Node* const parent = Parent(path, &name);
  Set(*parent, name, 0);
  return 0;
}

int PowerFileSystem::MakeDirectory(const std::string& path) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  if (Lookup(path) != 0) return -EEXIST;
  std::string name;
  Node* const parent = Parent(path, &name);
  if (parent == nullptr) return -ENOENT;
  const uint64_t inode = next_inode_++;
  nodes_[inode].is_directory = true;  // a map's nodes stay where they are
  Set(*parent, name, inode);
  return 0;
}

int PowerFileSystem::RemoveDirectory(const std::string& path) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  const uint64_t inode = Lookup(path);
  if (inode == 0) return -ENOENT;
  if (!nodes_[inode].entries.empty()) return -ENOTEMPTY;
  std::string name;
  Node* const parent = Parent(path, &name);
  Set(*parent, name, 0);
  return 0;
}

int PowerFileSystem::List(const std::string& path, std::vector<std::string>* names) {
  const Guard guard(mutex_);
  if (IsOff()) return -EIO;
  const uint64_t inode = Lookup(path);
  if (inode == 0) return -ENOENT;
  if (!nodes_[inode].is_directory) return -ENOTDIR;
  for (const auto& [name, target] : nodes_[inode].entries) names->push_back(name);
  return 0;
}

int PowerFileSystem::Lock(int file, bool) {
  const Guard guard(mutex_);
  if (IsOff() || !open_.contains(file)) return -EIO;
  const auto [lock, is_new] = locks_.try_emplace(open_[file], file);
  return is_new || lock->second == file ? 0 : -EAGAIN;
}

void PowerFileSystem::Unlock(int file) noexcept {
  const Guard guard(mutex_);
  std::erase_if(locks_, [&](const auto& lock) { return lock.second == file; });
}

}  // namespace quire
