// Rows from one connection to another in this process, over one and several streams of TCP, shared
// memory and UCX: digests, staging memory and records included. Beside them one copy of the same
// bytes. Argument: bytes of a part as a cache gives it; the connection cuts those above a frame.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "transfer/testing/connection_loop.h"

namespace quire {
namespace {

constexpr int64_t kParts = 16;  // of a forward

void Move(benchmark::State& state, const std::string& endpoint, int64_t streams = 1) {
  const int64_t rows = state.range(0) / RowMemory::kRowBytes;
  const auto loop = ConnectionLoop::Open(endpoint, kParts * rows, streams);
  if (!loop.ok()) return state.SkipWithError(loop.status().ToString().c_str());
  for (auto _ : state) QUIRE_CHECK((*loop)->Move(rows).ok());
  state.SetBytesProcessed(state.iterations() * kParts * state.range(0));
}

void Tcp(benchmark::State& state) { Move(state, "127.0.0.1:0"); }
void TcpInFourStreams(benchmark::State& state) { Move(state, "127.0.0.1:0", 4); }
void SharedMemoryRings(benchmark::State& state) {
  Move(state, "unix:/tmp/quire-transfer-bench.sock");
}
// UCX_TLS picks the transports, as it does for ucx_perftest.
void Ucx(benchmark::State& state) { Move(state, "ucx:127.0.0.1:0"); }

// The same bytes, from memory as large to memory as large.
void Memcpy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> from(bytes * kParts);
  std::vector<std::byte> to(from.size());
  for (auto _ : state) {
    for (size_t at = 0; at < from.size(); at += bytes)
      std::memcpy(to.data() + at, from.data() + at, bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kParts * state.range(0));
}

void Sizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t kib : {64, 256, 1024, 4096, 16384}) bench->Arg(kib << 10);
  bench->UseRealTime();
}
BENCHMARK(Tcp)->Apply(Sizes);
BENCHMARK(TcpInFourStreams)->Apply(Sizes);
BENCHMARK(SharedMemoryRings)->Apply(Sizes);
BENCHMARK(Ucx)->Apply(Sizes);
BENCHMARK(Memcpy)->Apply(Sizes);

}  // namespace
}  // namespace quire
