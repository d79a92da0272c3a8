// Rows from one connection to another in this process, over TCP, shared memory and UCX: digests,
// staging memory and records included. Beside them one copy of the same bytes. Argument: bytes of a
// part as a cache gives it; the connection cuts those above a frame.
#include <benchmark/benchmark.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "quire/transfer_peer.h"

namespace quire {
namespace {

constexpr int64_t kHeads = 8;
constexpr int64_t kDim = 128;
constexpr int64_t kBenchRowBytes = kHeads * kDim * 2 * 2;  // keys and values of bfloat16
constexpr int64_t kLayers = 16;                            // of a forward
constexpr int64_t kMinuteNs = 60 * int64_t{1'000'000'000};

// One layer's rows in plain memory: what is completed is counted and not copied further.
class BenchReceiver final : public KVTransfer {
 public:
  explicit BenchReceiver(int64_t rows)
      : memory_(static_cast<size_t>(rows * kBenchRowBytes)), rows_(rows) {}
  LayerKV Rows(int64_t first, int64_t count) {
    std::byte* const k = memory_.data() + first * kBenchRowBytes / 2;
    return {.k = TensorView(k, DType::kBF16, {count, kHeads, kDim}),
            .v = TensorView(k + rows_ * kBenchRowBytes / 2, DType::kBF16, {count, kHeads, kDim})};
  }
  Result<ReceiveView> View(uint64_t, int64_t, const ReceivePart& part) override {
    return ReceiveView{.rows = Rows(part.first_row, part.count), .memory = nullptr};
  }
  Status Store(uint64_t, int64_t, const ReceivePart&, const ReceiveView&,
               std::optional<uint32_t>) override {
    return Status();
  }
  StagingUse staging() const override { return StagingUse(); }
  Status SetStagingLimit(int64_t) override { return Status(); }
  Status Complete(uint64_t, int64_t, const ReceivePart& part) override {
    const std::lock_guard lock(mutex_);
    completed_ += part.count;
    changed_.notify_all();
    return Status();
  }
  Status FailReceive(uint64_t, const Status&) override { return Status(); }
  Result<ReceiveProgress> GetReceiveProgress(uint64_t) const override { return ReceiveProgress{}; }
  void WaitFor(int64_t rows) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ >= rows; });
    completed_ = 0;
  }

 private:
  static Status Unused() { return Status(StatusCode::kInternal, "a channel has no such call"); }
  Result<ReceiveMap> DisaggPrepareRecv(int64_t, int64_t) override { return Unused(); }
  Status DisaggCommitRecv(uint64_t, int64_t) override { return Unused(); }
  Status DisaggCancelRecv(uint64_t) override { return Unused(); }
  Status WaitReceived(uint64_t, int64_t, Clock&, int64_t) const override { return Unused(); }
  Status SetLayerSink(std::shared_ptr<LayerSink>) override { return Unused(); }
  Status DisaggMarkSend(int64_t, int64_t, std::span<const ReceiveMap>, int64_t, int64_t,
                        int64_t) override {
    return Unused();
  }
  Status DisaggUnmarkSend(int64_t) override { return Unused(); }
  Result<int64_t> DisaggDetachSend(int64_t) override { return Unused(); }
  Status DisaggFlushSend(int64_t) override { return Unused(); }
  Result<SendProgress> GetSendProgress(int64_t) const override { return Unused(); }

  std::vector<std::byte> memory_;
  const int64_t rows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t completed_ = 0;
};

struct Loop {
  // Both ends are here.
  Loop(const std::string& endpoint, int64_t rows) : receiver(rows) {
    TransferPeerOptions options;
    PassportLayer layer;
    layer.kv_heads = layer.head_dim = layer.v_head_dim = 1;
    options.passport.layers = {layer};
    options.send_wait = std::chrono::nanoseconds(kMinuteNs);
    auto listener = TransferListener::Start({.endpoint = endpoint, .peer = options});
    status = listener.status();
    if (!status.ok()) return;
    to = TransferPeer::Connect((*listener)->endpoint(), options).value();
    from = (*listener)->Accept(*clock, kNever).value().value();
    QUIRE_CHECK(to->SetReceiver(&receiver).ok());
    const ReceiveMap map{.epoch = 1, .slots = {1, 0, rows}, .count = rows, .kv_heads = {kHeads}};
    QUIRE_CHECK(to->Request({}, map).ok());
    QUIRE_CHECK(from->NextRequest(*clock, kNever).ok());
  }
  ~Loop() { QUIRE_CHECK(to == nullptr || to->SetReceiver(nullptr).ok()); }

  Status status;  // why there is none
  const std::shared_ptr<Clock> clock = MachineTime();
  BenchReceiver receiver;
  std::shared_ptr<TransferPeer> to;
  std::shared_ptr<TransferPeer> from;
};

void Move(benchmark::State& state, const std::string& endpoint) {
  const int64_t rows = state.range(0) / kBenchRowBytes;
  Loop loop(endpoint, rows);
  if (!loop.status.ok()) return state.SkipWithError(loop.status.ToString().c_str());
  BenchReceiver source(rows * kLayers);
  for (auto _ : state) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      SendRange range;
      range.epoch = 1;
      range.count = rows;
      range.local = source.Rows(layer * rows, rows);
      range.head_count = kHeads;
      QUIRE_CHECK(loop.from->OnLayerAppended(layer, std::span(&range, 1)).ok());
    }
    const SendRecord record{.epoch = 1, .count = rows};
    QUIRE_CHECK(loop.from->OnForwardEnded(std::span(&record, 1)).ok());
    loop.receiver.WaitFor(rows * kLayers);
  }
  state.SetBytesProcessed(state.iterations() * kLayers * rows * kBenchRowBytes);
}

void Tcp(benchmark::State& state) { Move(state, "127.0.0.1:0"); }
void SharedMemoryRings(benchmark::State& state) {
  Move(state, "unix:/tmp/quire-transfer-bench.sock");
}
// UCX_TLS picks the transports, as it does for ucx_perftest.
void Ucx(benchmark::State& state) { Move(state, "ucx:127.0.0.1:0"); }

// The same bytes from and to memory as large.
void Memcpy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> from(bytes * kLayers);
  std::vector<std::byte> to(bytes);
  for (auto _ : state) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      std::memcpy(to.data(), from.data() + static_cast<size_t>(layer) * bytes, bytes);
      benchmark::ClobberMemory();
    }
  }
  state.SetBytesProcessed(state.iterations() * kLayers * state.range(0));
}

void Sizes(benchmark::internal::Benchmark* bench) {
  for (const int64_t kib : {64, 256, 1024, 4096, 16384}) bench->Arg(kib << 10);
  bench->UseRealTime();
}
BENCHMARK(Tcp)->Apply(Sizes);
BENCHMARK(SharedMemoryRings)->Apply(Sizes);
BENCHMARK(Ucx)->Apply(Sizes);
BENCHMARK(Memcpy)->Apply(Sizes);

}  // namespace
}  // namespace quire
