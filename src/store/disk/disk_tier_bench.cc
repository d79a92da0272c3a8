// The disk tier beside the disk's own sequential speed, in one run: as bytes per second. Works in
// the current directory, which says what disk is measured.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/clock.h"
#include "store/disk/disk_tier.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int64_t kChunkCount = 64;

struct Directory {
  Directory() : path((fs::current_path() / "quire-disk-bench-XXXXXX").string()) {
    if (::mkdtemp(path.data()) == nullptr) path.clear();
  }
  ~Directory() { fs::remove_all(path); }
  std::string path;
};

// Chunks of 256 tokens: `layers` layers with sections of `section_kib` KiB.
struct Chain {
  Chain(int64_t layers, int64_t section_kib) {
    constexpr int64_t kTokens = 256;
    Passport passport;
    passport.model = "bench";
    passport.layers.resize(static_cast<size_t>(layers));
    const KeySpace keys(FingerprintOf("bench"), "");
    ChunkKey before = keys.root();
    for (int64_t i = 0; i < kChunkCount; ++i) {
      ChunkFields fields;
      fields.tokens.assign(kTokens, static_cast<int32_t>(i));
      fields.key = keys.Next(before, fields.tokens);
      fields.fingerprint = keys.fingerprint();
      fields.context = before.digest;
      std::vector<SectionSpec> sections;
      for (int64_t layer = 0; layer < layers; ++layer) {
        for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue})
          sections.push_back(
              {kind, layer, layer, DType::kBF16, {kTokens, section_kib * 1024 / 2 / kTokens}});
      }
      ids.push_back({keys.fingerprint(), keys.root(), fields.key});
      before = fields.key;
      auto writer = ChunkWriter::Create(fields, sections, {.alignment = 4096});
      for (size_t s = 0; s < sections.size(); ++s)
        std::ranges::fill(writer->section(static_cast<int64_t>(s)).value(),
                          static_cast<std::byte>(s + 1));
      auto sealed = std::move(*writer).Seal();
      auto header = DecodeChunkHeader(sealed->bytes(), {});
      bytes += header->total_bytes;
      chunks.push_back(std::make_unique<StoredChunk>(std::move(*header), std::move(*sealed)));
    }
  }
  std::vector<ChunkId> ids;
  std::vector<std::unique_ptr<StoredChunk>> chunks;
  int64_t bytes = 0;
};

class Sink final : public TierReadSink {
 public:
  Result<std::span<std::byte>> OnHeader(size_t item, const ChunkHeader& header) override {
    if (buffers.size() <= item) buffers.resize(item + 1);
    if (std::ssize(buffers[item].bytes()) != header.total_bytes)
      buffers[item] = ChunkBuffer(header.total_bytes);
    return buffers[item].bytes();
  }
  void OnSection(size_t, int64_t) override {}
  void OnEnd(size_t, const Status& status) override { ok = ok && status.ok(); }
  bool Cancelled(size_t) const override { return false; }
  std::vector<ChunkBuffer> buffers;
  bool ok = true;
};

std::vector<TierWrite> WritesOf(const Chain& chain) {
  std::vector<TierWrite> writes;
  for (size_t i = 0; i < chain.ids.size(); ++i)
    writes.push_back({chain.ids[i], chain.chunks[i].get()});
  return writes;
}

std::unique_ptr<DiskTier> Open(const Directory& directory, bool use_uring) {
  DiskTierSetup setup;
  setup.disk.directory = directory.path;
  setup.disk.use_uring = use_uring;
  return std::move(*DiskTier::Open(setup));
}

// dd with direct: requests of a MiB, one after the other.
void RawDisk(benchmark::State& state) {
  const bool writes = state.range(0) != 0;
  const Directory directory;
  const std::string path = directory.path + "/raw";
  const ChunkBuffer block(kBlockBytes);
  const int64_t size = int64_t{360} << 20;
  const auto pass = [&](bool write) {
    const int file =
        ::open(path.c_str(), (write ? O_CREAT | O_TRUNC | O_WRONLY : O_RDONLY) | O_DIRECT, 0600);
    auto* const data = const_cast<std::byte*>(block.bytes().data());
    for (int64_t at = 0; at < size; at += kBlockBytes) {
      if ((write ? ::pwrite(file, data, kBlockBytes, at) : ::pread(file, data, kBlockBytes, at)) !=
          kBlockBytes)
        state.SkipWithError("short");
    }
    ::close(file);
  };
  pass(true);
  for (auto _ : state) pass(writes);
  state.SetBytesProcessed(state.iterations() * size);
}
BENCHMARK(RawDisk)->ArgName("write")->Arg(0)->Arg(1)->UseRealTime()->MinTime(1);

void TierReads(benchmark::State& state) {
  const Directory directory;
  const Chain chain(22, state.range(0));
  const auto tier = Open(directory, state.range(2) != 0);
  (void)tier->Write(WritesOf(chain), kNever);
  const auto batch = static_cast<size_t>(state.range(1));
  Sink sink;
  for (auto _ : state) {
    for (size_t first = 0; first < chain.ids.size(); first += batch) {
      std::vector<TierRead> reads;
      for (size_t i = first; i < std::min(first + batch, chain.ids.size()); ++i) {
        TierRead read;
        read.id = chain.ids[i];
        read.expected.key = chain.ids[i].key;
        read.expected.fingerprint = chain.ids[i].fingerprint;
        reads.push_back(read);
      }
      tier->Read(reads, kNever, sink);
    }
  }
  if (!sink.ok) state.SkipWithError("a chunk was not read");
  state.SetBytesProcessed(state.iterations() * chain.bytes);
}
BENCHMARK(TierReads)
    ->ArgNames({"section_kib", "batch", "uring"})
    ->Args({128, 16, 1})
    ->Args({128, 1, 1})
    ->Args({16, 16, 1})
    ->Args({128, 16, 0})
    ->UseRealTime()
    ->MinTime(1);

void TierWrites(benchmark::State& state) {
  const Chain chain(22, 128);
  for (auto _ : state) {
    state.PauseTiming();
    auto directory = std::make_unique<Directory>();
    auto tier = Open(*directory, state.range(0) != 0);
    state.ResumeTiming();
    for (const Status& status : tier->Write(WritesOf(chain), kNever))
      if (!status.ok()) state.SkipWithError("a chunk was not written");
    state.PauseTiming();
    tier.reset();
    directory.reset();
    state.ResumeTiming();
  }
  state.SetBytesProcessed(state.iterations() * chain.bytes);
}
BENCHMARK(TierWrites)->ArgName("uring")->Arg(1)->Arg(0)->UseRealTime()->MinTime(1);

void Checksum(benchmark::State& state) {
  const ChunkBuffer block(128 << 10);
  const auto bytes = block.bytes();
  std::fill_n(const_cast<std::byte*>(bytes.data()), bytes.size(), std::byte{7});
  for (auto _ : state) benchmark::DoNotOptimize(Crc32c(bytes.data(), bytes.size()));
  state.SetBytesProcessed(state.iterations() * std::ssize(bytes));
}
BENCHMARK(Checksum);

}  // namespace
}  // namespace quire
