// Test only: engines of test_server.h that compute prompts for each other, and a process that
// computes prompts by hand and is lost where the test says.
#ifndef QUIRE_ENGINE_TESTING_REMOTE_PAIR_H_
#define QUIRE_ENGINE_TESTING_REMOTE_PAIR_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/testing/test_server.h"
#include "model/testing/test_checkpoint.h"
#include "quire/kv_export.h"
#include "quire/transfer_peer.h"

namespace quire {

inline Passport PairIdentity() {
  Passport identity;
  identity.model = "fake";
  return identity;
}

// No peer is lost because the machine is busy.
inline TransferPeerOptions Patient(TransferPeerOptions peer) {
  peer.connect_timeout = peer.dead_after = std::chrono::minutes(1);
  return peer;
}

inline std::string Serve(Server* server, const std::string& endpoint,
                         const TransferPeerOptions& peer = {}) {
  const Result<std::string> taken =
      server->engine->ServePrefill(PairIdentity(), {.endpoint = endpoint, .peer = Patient(peer)});
  EXPECT_TRUE(taken.ok()) << taken.status().ToString();
  return taken.ok() ? *taken : std::string();
}

inline void Attach(Server* server, PrefillPeerOptions options) {
  options.peer = Patient(options.peer);
  const Status attached = server->engine->AttachPrefillPeers(PairIdentity(), options);
  EXPECT_TRUE(attached.ok()) << attached.ToString();
}

// All pages are free, or retained for others. Layers of several groups count a page that is
// retained in each of them.
inline void ExpectAllPagesBack(const Server& server) {
  const EngineStats stats = server.engine->Stats();
  if (server.model->info().layers[1].window == 0) {
    EXPECT_EQ(stats.pages_free + stats.retained_pages, stats.pages_total);
  } else {
    EXPECT_GE(stats.pages_free + stats.retained_pages, stats.pages_total);
  }
  EXPECT_EQ(stats.remote_waiting, 0);
  EXPECT_EQ(stats.served_waiting, 0);
}

// Waits until that many rows of an epoch count at the receiver.
using RowsWaiter = std::function<void(uint64_t epoch, int64_t rows)>;

// Passes on what a cache sends, until the connection is closed before call `cut`, from 0 on: when
// what has a record has come.
class CutSink final : public LayerSink {
 public:
  CutSink(std::shared_ptr<TransferPeer> peer, int64_t cut, RowsWaiter await)
      : peer_(std::move(peer)), cut_(cut), await_(std::move(await)) {}

  Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) override {
    CutHere(ranges.front().epoch);
    return peer_->OnLayerAppended(layer, ranges);
  }
  Status OnForwardEnded(std::span<const SendRecord> records) override {
    CutHere(records.front().epoch);
    rows_ += peer_->status().ok() ? records.front().count : 0;
    return peer_->OnForwardEnded(records);
  }
  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return peer_->OnForwardAborted(records);
  }
  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return peer_->OnSendStopped(records, why);
  }
  int64_t calls() const { return calls_; }
  int64_t rows() const { return rows_; }  // with a record

 private:
  void CutHere(uint64_t epoch) {
    if (calls_++ != cut_) return;
    if (await_) await_(epoch, rows_);
    peer_->Close();
  }

  const std::shared_ptr<TransferPeer> peer_;
  const int64_t cut_;
  const RowsWaiter await_;
  int64_t calls_ = 0;
  int64_t rows_ = 0;
};

// Where a HandServer is lost: before it takes the job, before it marks its sequence, at a call of
// the sink, or not at all.
struct LostAt {
  enum class Stage { kBeforeJob, kBeforeMark, kAtCall, kRefused, kSilent } stage = Stage::kAtCall;
  int64_t call = std::numeric_limits<int64_t>::max();
  RowsWaiter await = {};  // before it is lost at a call; null: at once
};

// A process that computes one prompt, in forwards of `chunk` tokens, on a thread of its own.
class HandServer {
 public:
  HandServer(const std::string& endpoint, const Sizes& sizes)
      : sizes_(sizes), cache_(MakeCache(model_, sizes, sizes.pages)) {
    TransferListenerOptions options;
    options.endpoint = endpoint;
    options.peer = Patient({});
    options.peer.passport = CachePassport(SequenceStates(*cache_), PairIdentity(), false).value();
    listener_ = TransferListener::Start(options).value();
  }
  ~HandServer() { Join(); }

  const std::string& endpoint() const { return listener_->endpoint(); }
  // Accepts the connection, which is there, and says how busy it is.
  void Accept(const TransferLoad& load = {}) {
    peer_ = listener_->Accept(*clock_, kNever).value().value();
    EXPECT_TRUE(peer_->SetLoad(load).ok());
  }
  void Run(const LostAt& lost) {
    thread_ = std::thread([this, lost] { Compute(lost); });
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  // After Join.
  int64_t calls() const { return calls_; }
  int64_t rows() const { return rows_; }
  bool asked() const { return asked_; }
  const std::shared_ptr<TransferPeer>& peer() const { return peer_; }

 private:
  void Compute(const LostAt& lost) {
    using Stage = LostAt::Stage;
    if (lost.stage == Stage::kBeforeJob) return peer_->Close();
    const Result<std::optional<TransferRequest>> request = peer_->NextRequest(*clock_, kNever);
    ASSERT_TRUE(request.ok()) << request.status().ToString();
    asked_ = true;
    if (lost.stage == Stage::kSilent) return;
    if (lost.stage == Stage::kBeforeMark) return peer_->Close();
    if (lost.stage == Stage::kRefused) {
      const Status refused =
          peer_->Refuse((*request)->map.epoch, Status(StatusCode::kFull, "no room at all"));
      EXPECT_TRUE(refused.ok()) << refused.ToString();
      return;
    }
    const auto sink = std::make_shared<CutSink>(peer_, lost.call, lost.await);
    Send(**request, sink);
    calls_ = sink->calls();
    rows_ = sink->rows();
  }
  void Send(const TransferRequest& request, const std::shared_ptr<CutSink>& sink) {
    const Tokens& tokens = request.job.tokens;
    ASSERT_TRUE(cache_->transfer()->SetLayerSink(sink).ok());
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    const Status marked = cache_->transfer()->DisaggMarkSend(
        0, request.map.first_position, std::span(&request.map, 1), /*peer=*/0, /*rank=*/0);
    ASSERT_TRUE(marked.ok()) << marked.ToString();
    for (int64_t begin = 0; begin < std::ssize(tokens); begin += sizes_.chunk) {
      const int64_t count = std::min(sizes_.chunk, std::ssize(tokens) - begin);
      const int64_t id = 0;
      ASSERT_TRUE(cache_->BeginForward(std::span(&id, 1), std::span(&count, 1)).ok());
      const auto chunk =
          std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
      ASSERT_TRUE(model_.Forward({cache_.get(), nullptr}, chunk, {}, nullptr).ok());
      ASSERT_TRUE(cache_->EndForward().ok());
    }
  }

  const Sizes sizes_;
  const std::shared_ptr<Clock> clock_ = MachineTime();
  FakeModel model_;
  const std::unique_ptr<AttentionKVCache> cache_;
  std::unique_ptr<TransferListener> listener_;
  std::shared_ptr<TransferPeer> peer_;
  bool asked_ = false;
  int64_t calls_ = 0, rows_ = 0;
  std::thread thread_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_REMOTE_PAIR_H_
