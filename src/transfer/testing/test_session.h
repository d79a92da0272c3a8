// One side of a connection for tests: a session with its owner, which notes what it is told, and a
// sender of the rows of RowsOfLayer.
#ifndef QUIRE_TRANSFER_TESTING_TEST_SESSION_H_
#define QUIRE_TRANSFER_TESTING_TEST_SESSION_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "transfer/part_runs.h"
#include "transfer/stream_joins.h"
#include "transfer/testing/test_receiver.h"
#include "transfer/transfer_session.h"

namespace quire {

inline constexpr int64_t kTestSecondNs = 1'000'000'000;
// For what must come; nothing waits so long.
inline constexpr int64_t kMinuteNs = 60 * kTestSecondNs;

inline void ExpectSays(const Status& status, StatusCode code, const std::string& why) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.message().find(why), std::string_view::npos) << status.ToString();
}

inline Passport TestPassport() {
  PassportLayer layer;
  layer.dtype = DType::kF32;
  layer.v_dtype = DType::kF16;
  layer.kv_heads = kTestHeads;
  layer.head_dim = layer.v_head_dim = kTestDim;
  Passport passport;
  passport.model = "test";
  passport.layers.assign(kTestLayers, layer);
  return passport;
}

inline TransferSession::Options TestSessionOptions(bool is_connector, std::string secret = "") {
  TransferSession::Options options{.is_connector = is_connector,
                                   .secret = std::move(secret),
                                   .passport = TestPassport().ToJson().value(),
                                   .heartbeat_ns = kTestSecondNs / 2,
                                   .dead_after_ns = 3 * kTestSecondNs,
                                   .lease_ns = 30 * kTestSecondNs,
                                   .window_bytes = int64_t{1} << 20,
                                   .send_wait_ns = 60 * kTestSecondNs,
                                   .carries_salts = true};
  options.instance[0] = std::byte{is_connector ? uint8_t{1} : uint8_t{2}};
  options.nonce[0] = options.instance[0];
  return options;
}

class TestSession final : private TransferSession::Owner {
 public:
  explicit TestSession(TransferSession::Options options, int64_t now_ns = 0)
      : session(this, std::move(options), now_ns) {
    session.receives().SetReceiver(&receiver);
  }

  // Heads [first_head, + head_count) of rows [first, + count) of a layer, as a cache would send
  // them. False: the window or the transfer does not take them.
  bool SendRows(uint64_t epoch, int64_t layer, const ReceivePart& part) {
    const auto rows = std::make_shared<TestRows>(RowsOfLayer(layer, part.first_row + part.count));
    const int64_t bytes = part.count * RowBytes(rows->View(0, 1), part.head_count);
    if (bytes > window_left || sends.count(epoch) == 0) return false;
    window_left -= bytes;
    auto outgoing = std::make_shared<OutgoingPart>();
    for (const std::span<std::byte> run : PartRuns(rows->View(0, rows->count), part))
      outgoing->runs.emplace_back(run);
    outgoing->memory = rows;
    const LayerKV sent = rows->View(part.first_row, part.count);
    outgoing->head = {.receiver = peer_instance,
                      .epoch = epoch,
                      .layer = layer,
                      .part = part,
                      .bytes = bytes,
                      .digest = DigestOfHeads(sent, part.first_head, part.head_count)};
    session.sends().SendPart(std::move(outgoing));
    return true;
  }
  void SendRecord(uint64_t epoch, int64_t first, int64_t count, bool is_aborted = false) {
    session.sends().SendRecord({.receiver = peer_instance,
                                .epoch = epoch,
                                .first_row = first,
                                .count = count,
                                .is_aborted = is_aborted});
  }

  TestReceiver receiver;
  bool is_open = false;
  int64_t window_bytes = 0;
  int64_t window_left = 0;
  wire::Instance peer_instance{};
  TransferLoad load;
  std::optional<TransferSession::StreamsGranted> granted;
  std::shared_ptr<StreamBook> book;           // null: nothing joins
  Status reason;                              // why the session is over
  std::map<uint64_t, TransferRequest> sends;  // by epoch: open
  std::map<uint64_t, Status> over;
  TransferSession session;

 private:
  void OnOpen(int64_t bytes, const wire::Instance& instance) override {
    is_open = true;
    window_bytes = window_left = bytes;
    peer_instance = instance;
  }
  void OnLoad(const TransferLoad& told) override { load = told; }
  void OnStreams(const TransferSession::StreamsGranted& streams) override {
    QUIRE_CHECK(!granted && streams.count >= 2) << "streams are given once";
    granted = streams;
  }
  Status OnJoin(const wire::TransferJoin& join, const wire::TransferHello& hello) override {
    if (book == nullptr) return Status(StatusCode::kRemote, "nothing joins");
    return book->Check(join, hello).status();
  }
  void OnOver(const Status& why) noexcept override {
    QUIRE_CHECK(reason.ok() && !why.ok()) << "a session ends once";
    reason = why;
  }
  void OnRequest(TransferRequest request) override {
    const uint64_t epoch = request.map.epoch;
    sends.emplace(epoch, std::move(request));
  }
  void OnSendOver(uint64_t epoch, const Status& why) override {
    QUIRE_CHECK(sends.erase(epoch) == 1) << "a transfer ends once";
    over.emplace(epoch, why);
  }
  void OnPartTaken(const OutgoingPart& part) override {
    window_left += part.head.bytes;
    QUIRE_CHECK(window_left <= window_bytes) << "a part is taken once";
  }
};

// The frame that one side has to say next, of `piece` bytes at most.
inline std::vector<std::byte> TakeOutput(TransferSession* session, size_t piece, int64_t now_ns) {
  std::vector<std::byte> bytes;
  for (const std::span<const std::byte> span : session->Gather(/*frames_max=*/1)) {
    const size_t count = std::min(span.size(), piece - bytes.size());
    bytes.insert(bytes.end(), span.begin(), span.begin() + static_cast<ptrdiff_t>(count));
  }
  session->Sent(bytes.size(), now_ns);
  return bytes;
}

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_TEST_SESSION_H_
