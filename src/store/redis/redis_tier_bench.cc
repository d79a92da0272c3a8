// Chunks of 256 tokens through the tier, checksums included, next to the same bytes as pipelined
// GET and SET of raw hiredis, in turns: what to compare is the ratio in one run.
#include <benchmark/benchmark.h>
#include <hiredis/hiredis.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "store/redis/redis_tier.h"
#include "store/testing/test_redis.h"

namespace quire {
namespace {

constexpr int64_t kTokens = 256;
constexpr int64_t kPatienceNs = 60'000'000'000;
constexpr int32_t kChunks = 4;

struct Model {
  const char* name;
  int64_t layers, kv_heads, head_dim;
};
constexpr Model kModels[] = {
    {"0.5B", 24, 2, 64},  // 3 MiB a chunk
    {"1.1B", 22, 4, 64},  // 5.5 MiB
    {"8B", 32, 8, 128},   // 32 MiB
};

std::shared_ptr<const StoredChunk> MakeChunk(const Model& model, int32_t first_token) {
  const KeySpace space(FingerprintOf(model.name), "");
  ChunkFields fields;
  fields.tokens.resize(kTokens);
  std::iota(fields.tokens.begin(), fields.tokens.end(), first_token);
  fields.key = space.Next(space.root(), fields.tokens);
  fields.fingerprint = space.fingerprint();
  std::vector<SectionSpec> sections;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue}) {
      sections.push_back(
          {kind, layer, layer, DType::kBF16, {kTokens, model.kv_heads, model.head_dim}});
    }
  }
  ChunkWriter writer = *ChunkWriter::Create(fields, sections);
  for (size_t s = 0; s < sections.size(); ++s) {
    const std::span<std::byte> bytes = writer.section(static_cast<int64_t>(s)).value();
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + s);
  }
  ChunkHeader header = writer.header();
  return std::make_shared<const StoredChunk>(std::move(header), *std::move(writer).Seal());
}

class Sink final : public TierReadSink {
 public:
  explicit Sink(std::vector<ChunkBuffer>& buffers) : buffers_(buffers) {}
  Result<std::span<std::byte>> OnHeader(size_t i, const ChunkHeader&) override {
    return buffers_[i].bytes();
  }
  void OnSection(size_t, int64_t) override {}
  void OnEnd(size_t, const Status& status) override {
    QUIRE_CHECK(status.ok()) << status.ToString();
  }
  bool Cancelled(size_t) const override { return false; }

 private:
  std::vector<ChunkBuffer>& buffers_;
};

// A server, chunks of one model, the tier and a raw connection to the same server.
struct Scene {
  Scene(const Model& model, bool use_unix) {
    QUIRE_CHECK(HaveRedisServer()) << "redis-server is not installed";
    server = std::make_unique<RedisServer>();
    RedisTierOptions options;
    options.endpoints = use_unix ? server->unix_socket() : server->tcp();
    tier = RedisTier::Create(options, "", nullptr).value();
    raw = use_unix ? redisConnectUnix(server->socket_path().c_str())
                   : redisConnect("127.0.0.1", server->port());
    QUIRE_CHECK(raw != nullptr && raw->err == 0);
    const KeySpace space(FingerprintOf(model.name), "");
    for (int32_t i = 0; i < kChunks; ++i) {
      chunks.push_back(MakeChunk(model, i * 1000));
      const ChunkHeader& header = chunks.back()->header();
      const ChunkId id{header.fingerprint, space.root(), header.key};
      writes.push_back({.id = id, .chunk = chunks.back().get()});
      reads.push_back({.id = id,
                       .expected = {.key = id.key,
                                    .fingerprint = id.fingerprint,
                                    .tokens = std::span<const int32_t>(header.tokens)}});
      buffers.emplace_back(header.total_bytes);
      bytes += header.total_bytes;
    }
  }
  ~Scene() { redisFree(raw); }

  int64_t Until() const { return MachineTime()->SteadyNs() + kPatienceNs; }
  void Flush() const { server->Command({"FLUSHALL"}); }
  void Write() {
    for (const Status& status : tier->Write(writes, Until()))
      QUIRE_CHECK(status.ok()) << status.ToString();
  }
  void Read() {
    Sink sink(buffers);
    tier->Read(reads, Until(), sink);
  }
  // The pieces that the tier would make, under other names.
  template <typename F>
  void ForEachPiece(F&& f) {
    for (size_t c = 0; c < chunks.size(); ++c) {
      const ChunkHeader& header = chunks[c]->header();
      auto at = static_cast<size_t>(header.header_bytes);
      const std::vector<int64_t> pieces = CutRedisPieces(header);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const auto size = static_cast<size_t>(pieces[i]);
        f("raw:" + std::to_string(c) + ":" + std::to_string(i), c, at, size);
        at += size;
      }
    }
  }
  void RawSet() {
    int64_t count = 0;
    ForEachPiece([&](const std::string& key, size_t c, size_t at, size_t size) {
      redisAppendCommand(raw, "SET %b %b", key.data(), key.size(), chunks[c]->bytes().data() + at,
                         size);
      ++count;
    });
    for (; count > 0; --count) freeReplyObject(RawReply());
  }
  // As a user of hiredis gets it: reply objects, copied to where they are wanted.
  void RawGet() {
    ForEachPiece([&](const std::string& key, size_t, size_t, size_t) {
      redisAppendCommand(raw, "GET %b", key.data(), key.size());
    });
    ForEachPiece([&](const std::string&, size_t c, size_t at, size_t size) {
      redisReply* reply = RawReply();
      QUIRE_CHECK(reply->len == size);
      std::memcpy(buffers[c].bytes().data() + at, reply->str, size);
      freeReplyObject(reply);
    });
  }
  redisReply* RawReply() {
    void* reply = nullptr;
    QUIRE_CHECK(redisGetReply(raw, &reply) == REDIS_OK) << raw->errstr;
    return static_cast<redisReply*>(reply);
  }

  std::unique_ptr<RedisServer> server;
  std::unique_ptr<RedisTier> tier;
  redisContext* raw = nullptr;
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierWrite> writes;
  std::vector<TierRead> reads;
  std::vector<ChunkBuffer> buffers;
  int64_t bytes = 0;
};

// Seconds that `f` takes.
template <typename F>
double Seconds(F&& f) {
  const int64_t begin_ns = MachineTime()->SteadyNs();
  f();
  return static_cast<double>(MachineTime()->SteadyNs() - begin_ns) * 1e-9;
}

void Report(benchmark::State& state, const Scene& scene, double ours, double raw) {
  const double bytes = static_cast<double>(scene.bytes * state.iterations());
  state.counters["ours_GB/s"] = bytes / ours * 1e-9;
  state.counters["raw_GB/s"] = bytes / raw * 1e-9;
  state.counters["ratio"] = raw / ours;
}

// Arguments: model, unix socket.
void Get(benchmark::State& state) {
  const Model& model = kModels[state.range(0)];
  Scene scene(model, state.range(1) != 0);
  scene.Write();
  scene.RawSet();
  double ours = 0, raw = 0;
  for (auto _ : state) {
    ours += Seconds([&] { scene.Read(); });
    raw += Seconds([&] { scene.RawGet(); });
  }
  Report(state, scene, ours, raw);
  state.SetLabel(model.name);
}
BENCHMARK(Get)->ArgsProduct({{0, 1, 2}, {0, 1}})->UseRealTime();

void Set(benchmark::State& state) {
  const Model& model = kModels[state.range(0)];
  Scene scene(model, state.range(1) != 0);
  double ours = 0, raw = 0;
  for (auto _ : state) {
    scene.Flush();
    ours += Seconds([&] { scene.Write(); });
    scene.Flush();
    raw += Seconds([&] { scene.RawSet(); });
  }
  Report(state, scene, ours, raw);
  state.SetLabel(model.name);
}
BENCHMARK(Set)->ArgsProduct({{0, 1, 2}, {0, 1}})->UseRealTime();

}  // namespace
}  // namespace quire
