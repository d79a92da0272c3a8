// Chunks of a model's shape put into a place and got back: Quire's tiers beside a copy in memory,
// the disk read and written in one go, and Redis through hiredis alone.
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/random.h"
#include "chunk_place.h"
#include "quire/chunk_store.h"

namespace quire::bench {
namespace {

constexpr int64_t kNeverNs = std::numeric_limits<int64_t>::max();
// Of a tier: what is slow because the machine has other work, too, is not lost.
constexpr int64_t kPatienceMs = 600'000;

[[noreturn]] void Fail(const std::string& what) {
  Require(Status(StatusCode::kIoError, what));
  std::abort();  // not reached: Require ends the process
}
void Check(bool ok, const std::string& what) {
  if (!ok) Fail(what);
}

// `layers` layers of kv_heads * head_dim bfloat16 keys and values, block_tokens tokens a chunk.
ChunkSet MakeChunks(const JsonValue& request) {
  ChunkSet set;
  const int64_t layers = Require(request.GetInt("layers", 1));
  const int64_t count = Require(request.GetInt("chunks", 1));
  set.passport.model = "bench";
  set.passport.block_tokens = Require(request.GetInt("block_tokens", 1));
  const PassportLayer layer{.kind = StateKind::kAttention,
                            .dtype = DType::kBF16,
                            .kv_heads = Require(request.GetInt("kv_heads", 1)),
                            .head_dim = Require(request.GetInt("head_dim", 1)),
                            .v_head_dim = Require(request.GetInt("head_dim", 1))};
  set.passport.layers.assign(static_cast<size_t>(layers), layer);

  RandomSequence random(5);
  const int64_t block = set.passport.block_tokens;
  for (int64_t i = 0; i < block * count; ++i) {
    set.tokens.push_back(static_cast<int32_t>(random.Below(32000)));
  }
  const KeySpace keys(Require(set.passport.Fingerprint()), "");
  set.keys = keys.Chain(set.tokens, block).value();
  std::vector<SectionSpec> sections;
  for (int64_t i = 0; i < layers; ++i) {
    for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue}) {
      sections.push_back({.kind = kind,
                          .layer_first = i,
                          .layer_last = i,
                          .dtype = layer.dtype,
                          .dims = {block, layer.kv_heads, layer.head_dim}});
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    ChunkFields fields;
    fields.key = set.keys[static_cast<size_t>(i)];
    fields.fingerprint = keys.fingerprint();
    fields.context = i == 0 ? keys.root().digest : set.keys[static_cast<size_t>(i - 1)].digest;
    fields.first_position = static_cast<uint32_t>(i * block);
    fields.tokens.assign(set.tokens.begin() + i * block, set.tokens.begin() + (i + 1) * block);
    ChunkWriter writer = Require(ChunkWriter::Create(
        fields, sections, {.alignment = 4096, .limits = ChunkLimits::Of(set.passport)}));
    for (size_t s = 0; s < sections.size(); ++s) {
      const std::span<std::byte> bytes = writer.section(static_cast<int64_t>(s)).value();
      for (size_t at = 0; at + sizeof(uint64_t) <= bytes.size(); at += sizeof(uint64_t)) {
        const uint64_t word = random.Bits();
        std::memcpy(bytes.data() + at, &word, sizeof(word));
      }
    }
    set.chunks.push_back(Require(std::move(writer).Seal()));
  }
  return set;
}

// One tier of a ChunkStore.
class TierPlace final : public ChunkPlace {
 public:
  TierPlace(const std::string& tier, const PlaceRequest& request) {
    if (tier == "ram") options_.ram.bytes_max = int64_t{1} << 33;
    if (tier == "disk") {
      options_.disk.directory = request.directory;
      options_.disk.io_timeout_ms = kPatienceMs;
      options_.disk.durability = request.sync ? Durability::kSync : Durability::kOs;
    }
    if (tier == "redis") {
      options_.redis.endpoints = request.redis;
      options_.redis.connect_timeout_ms = kPatienceMs;
      options_.redis.io_timeout_ms = kPatienceMs;
    }
    options_.promote = false;
    options_.queue_bytes_max = int64_t{1} << 33;
    options_.fetch_bytes_max = int64_t{1} << 33;
    store_ = Require(ChunkStore::Open(options_));
  }

  // A put takes the chunk over, so each needs one of its own.
  void BeforePut(const ChunkSet& set) override {
    Require(store_->AddPassport(set.passport));
    for (int64_t i = 0; i < set.size(); ++i) {
      ChunkBuffer copy(static_cast<int64_t>(set.bytes(i).size()));
      std::memcpy(copy.bytes().data(), set.bytes(i).data(), set.bytes(i).size());
      copies_.push_back(std::move(copy));
    }
  }
  void Put(const ChunkSet& set) override {
    const KeySpace keys = KeysOf(set);
    std::vector<std::shared_ptr<ChunkPut>> puts;
    for (ChunkBuffer& copy : copies_)
      puts.push_back(Require(store_->Put(keys, std::move(copy), {})));
    copies_.clear();
    for (const auto& put : puts) {
      put->Wait(kNeverNs);
      Require(put->status());
    }
    Require(store_->Flush(kNeverNs));  // Redis acknowledges nothing unless replicas are asked for
  }
  void Get(const ChunkSet& set, std::span<std::byte>) override {
    const KeySpace keys = KeysOf(set);
    const auto fetch = Require(store_->Fetch({.keys = &keys,
                                              .tokens = set.tokens,
                                              .chunk_tokens = set.passport.block_tokens,
                                              .deadline_ns = kNeverNs}));
    fetch->Wait(kNeverNs);
    Check(fetch->ready() == set.size(),
          "a chunk is missing: " + std::string(MissReasonName(fetch->miss())));
    const ChunkLimits limits = ChunkLimits::Of(set.passport);
    for (int64_t i = 0; i < set.size(); ++i) {
      const ChunkView view = Require(fetch->chunk(i)->View(
          {.key = set.keys[static_cast<size_t>(i)], .fingerprint = keys.fingerprint()}, limits));
      // What came from a slow tier was verified as it came.
      if (fetch->tier(i) == TierKind::kRam) Require(view.CheckAll());
    }
  }
  void Remove(const ChunkSet& set) override { Require(store_->Clear(KeysOf(set)).status()); }

 private:
  static KeySpace KeysOf(const ChunkSet& set) {
    return KeySpace(Require(set.passport.Fingerprint()), "");
  }

  ChunkStoreOptions options_;
  std::unique_ptr<ChunkStore> store_;
  std::vector<ChunkBuffer> copies_;
};

// A copy from memory to memory, which is what keeping a chunk costs at least.
class CopyPlace final : public ChunkPlace {
 public:
  void BeforePut(const ChunkSet& set) override {
    kept_.resize(set.bytes(0).size() * static_cast<size_t>(set.size()));
  }
  void Put(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      std::memcpy(kept_.data() + Offset(set, i), set.bytes(i).data(), set.bytes(i).size());
    }
  }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      std::memcpy(into.data() + Offset(set, i), kept_.data() + Offset(set, i), set.bytes(i).size());
    }
  }
  void Remove(const ChunkSet&) override {}

 private:
  static size_t Offset(const ChunkSet& set, int64_t i) {
    return set.bytes(i).size() * static_cast<size_t>(i);
  }
  std::vector<std::byte> kept_;
};

class FileDescriptor {
 public:
  FileDescriptor(const std::string& path, int flags) : fd_(open(path.c_str(), flags, 0600)) {
    Check(fd_ >= 0, path + ": " + std::strerror(errno));
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { close(fd_); }

  void WriteAll(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), std::min(bytes.size(), kBlock));
      Check(written > 0, std::string("write: ") + std::strerror(errno));
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
  }
  void ReadAll(std::span<std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t got = read(fd_, bytes.data(), std::min(bytes.size(), kBlock));
      Check(got > 0, std::string("read: ") + std::strerror(errno));
      bytes = bytes.subspan(static_cast<size_t>(got));
    }
  }
  void Sync() const { Check(fdatasync(fd_) == 0, "fdatasync"); }
  void DropFromMemory() const {
    Sync();
    posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  }

 private:
  static constexpr size_t kBlock = size_t{4} << 20;  // as dd measures disks
  int fd_;
};

// Everything behind each other in one file, past the page cache: what the disk itself gives.
class RawDiskPlace final : public ChunkPlace {
 public:
  explicit RawDiskPlace(const PlaceRequest& request)
      : path_(request.directory + "/raw"), sync_(request.sync) {}
  void Put(const ChunkSet& set) override {
    const FileDescriptor file(path_, O_CREAT | O_TRUNC | O_WRONLY | O_DIRECT);
    for (int64_t i = 0; i < set.size(); ++i) file.WriteAll(set.bytes(i));
    if (sync_) file.Sync();
  }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    const FileDescriptor file(path_, O_RDONLY | O_DIRECT);
    file.ReadAll(into.first(set.bytes(0).size() * static_cast<size_t>(set.size())));
  }
  void Remove(const ChunkSet&) override { unlink(path_.c_str()); }

 private:
  std::string path_;
  bool sync_;
};

// A file per chunk through the page cache, as simple caches do.
class FilesPlace final : public ChunkPlace {
 public:
  explicit FilesPlace(const PlaceRequest& request)
      : directory_(request.directory + "/"), sync_(request.sync) {}
  void Put(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const FileDescriptor file(directory_ + set.name(i), O_CREAT | O_TRUNC | O_WRONLY);
      file.WriteAll(set.bytes(i));
      if (sync_) file.Sync();
    }
  }
  void BeforeGet(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      FileDescriptor(directory_ + set.name(i), O_RDONLY).DropFromMemory();
    }
  }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const size_t size = set.bytes(i).size();
      const FileDescriptor file(directory_ + set.name(i), O_RDONLY);
      file.ReadAll(into.subspan(static_cast<size_t>(i) * size, size));
    }
  }
  void Remove(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) unlink((directory_ + set.name(i)).c_str());
  }

 private:
  std::string directory_;
  bool sync_;
};

// SET and GET of whole chunks, pipelined over one connection; GET copies out of hiredis' reply, as
// every user of a cache has to.
class HiredisPlace final : public ChunkPlace {
 public:
  explicit HiredisPlace(const PlaceRequest& request)
      : context_(redisConnectUnix(request.redis.substr(sizeof("unix:") - 1).c_str()), redisFree) {
    Check(context_ != nullptr && context_->err == 0, "Redis does not answer at " + request.redis);
  }
  void Put(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const std::string key = "raw:" + set.name(i);
      redisAppendCommand(context_.get(), "SET %b %b", key.data(), key.size(), set.bytes(i).data(),
                         set.bytes(i).size());
    }
    for (int64_t i = 0; i < set.size(); ++i) Reply();
  }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const std::string key = "raw:" + set.name(i);
      redisAppendCommand(context_.get(), "GET %b", key.data(), key.size());
    }
    for (int64_t i = 0; i < set.size(); ++i) {
      const auto reply = Reply();
      const size_t size = set.bytes(i).size();
      Check(reply->len == size, "Redis gave another length");
      std::memcpy(into.data() + static_cast<size_t>(i) * size, reply->str, size);
    }
  }
  void Remove(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const std::string key = "raw:" + set.name(i);
      redisAppendCommand(context_.get(), "DEL %b", key.data(), key.size());
      Reply();
    }
  }

 private:
  struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
  };
  std::unique_ptr<redisReply, FreeReply> Reply() {
    void* reply = nullptr;
    Check(redisGetReply(context_.get(), &reply) == REDIS_OK, "Redis has gone");
    return std::unique_ptr<redisReply, FreeReply>(static_cast<redisReply*>(reply));
  }

  std::unique_ptr<redisContext, decltype(&redisFree)> context_;
};

std::unique_ptr<ChunkPlace> MakePlace(const std::string& name, const PlaceRequest& request) {
  if (name == "ram" || name == "disk" || name == "redis") {
    return std::make_unique<TierPlace>(name, request);
  }
  if (name == "copy") return std::make_unique<CopyPlace>();
  if (name == "raw_disk") return std::make_unique<RawDiskPlace>(request);
  if (name == "files") return std::make_unique<FilesPlace>(request);
  if (name == "hiredis") return std::make_unique<HiredisPlace>(request);
  std::unique_ptr<ChunkPlace> peer = MakePeerPlace(name, request);
  Check(peer != nullptr, name + ": its library was not there when the benchmark was built");
  return peer;
}

class ChunkCase final : public BenchCase {
 public:
  explicit ChunkCase(const JsonValue& request)
      : set_(MakeChunks(request)),
        into_(static_cast<int64_t>(set_.bytes(0).size()) * set_.size()),
        place_(MakePlace(Require(request.GetString("place")),
                         {.directory = Require(request.GetString("directory")),
                          .redis = Require(request.GetString("redis")),
                          .sync = Require(request.GetBoolOr("sync", false))})) {
    std::memset(into_.bytes().data(), 1, into_.bytes().size());
  }

  nlohmann::json Run(const RunLimits& limits) override {
    nlohmann::json samples;
    const double begin = Now();
    for (int64_t i = 0; i < limits.min_calls || Now() - begin < limits.seconds; ++i) {
      place_->BeforePut(set_);
      const double put = Now();
      place_->Put(set_);
      samples["put"].push_back(Now() - put);
      place_->BeforeGet(set_);
      const double get = Now();
      place_->Get(set_, into_.bytes());
      samples["get"].push_back(Now() - get);
      place_->Remove(set_);
    }
    return samples;
  }

 private:
  ChunkSet set_;
  ChunkBuffer into_;
  std::unique_ptr<ChunkPlace> place_;
};

}  // namespace

std::unique_ptr<BenchCase> MakeChunkCase(const JsonValue& request) {
  return std::make_unique<ChunkCase>(request);
}

}  // namespace quire::bench
