#include "transfer/testing/hostile_transfer_peer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

using wire::TransferOpcode;
using Choose = std::function<int64_t(int64_t)>;

constexpr size_t kStrangerMemoryMax = size_t{1} << 16;  // reliability goal R5
constexpr int64_t kRows = 4;
constexpr int kStepsMax = 24;

class HostileSession {
 public:
  HostileSession(const std::string& secret, const Choose& choose)
      : choose_(choose), side_(TestSessionOptions(true, secret)), secret_(secret) {
    hello_ = {.has_secret = !secret.empty(),
              .heartbeat_ms = 500,
              .dead_after_ms = 3000,
              .lease_ms = 30000,
              .window_bytes = 1 << 20,
              .instance = {std::byte{2}}};
    own_hello_ = {.has_secret = !secret.empty(),
                  .heartbeat_ms = 500,
                  .dead_after_ms = 3000,
                  .lease_ms = 30000,
                  .window_bytes = 1 << 20,
                  .instance = {std::byte{1}}};
    own_hello_.nonce[0] = std::byte{1};
    foreign_ = side_.receiver.Reserve(kRows);  // of somebody else
  }

  void Open() {
    Send(TransferOpcode::kHello, wire::Encode(hello_));
    if (!secret_.empty()) {
      const Digest proof =
          wire::TransferProof(secret_, wire::kListenerProofLabel, own_hello_, hello_);
      const auto bytes = std::as_bytes(std::span(proof.bytes));
      Send(TransferOpcode::kProve, {bytes.begin(), bytes.end()});
    }
    const std::string passport = TestPassport().ToJson().value();
    const auto bytes = std::as_bytes(std::span(passport.data(), passport.size()));
    Send(TransferOpcode::kPassport, {bytes.begin(), bytes.end()});
    QUIRE_CHECK(side_.session.is_open()) << "an opening by the rules is taken";
    asked_ = side_.receiver.Reserve(kRows);
    TransferRequest request;
    request.map = asked_;
    QUIRE_CHECK(side_.session.receives().Open(request, now_ns_).ok());
  }

  // Half of the sessions break no rule of the frames, so that rows get to their records.
  void Step() {
    if (is_first_step_) is_tame_ = choose_(2) == 0;
    is_first_step_ = false;
    is_wild_ = !is_tame_;
    if (is_tame_) return choose_(2) == 0 ? SendRows() : TameStep();
    switch (choose_(12)) {
      case 0:
        return SendRows();
      case 1:
        return Send(TransferOpcode::kRecord, wire::Encode(SomeRecord()));
      case 2:
        return Send(TransferOpcode::kJob, wire::Encode(TransferJob{.id = Small()}));
      case 3:
        return SendMap();
      case 4:
        return Send(TransferOpcode::kCredit,
                    wire::Encode(wire::TransferCredit{Small(), choose_(2) == 1}));
      case 5:
        return Send(choose_(2) == 0 ? TransferOpcode::kCancel : TransferOpcode::kStop,
                    wire::EncodeEnd(Small(), Status(StatusCode::kFull, "no")));
      case 6:
        return Send(TransferOpcode::kLease, wire::Encode(wire::TransferLease{Small()}));
      case 7:
        return Send(static_cast<TransferOpcode>(choose_(20)),
                    std::vector<std::byte>(static_cast<size_t>(choose_(80))));
      case 8:
        return DamageOne();
      case 9:
        now_ns_ += choose_(2) * kTestSecondNs;
        return side_.session.Tick(now_ns_);
      case 10:
        return ActHere();
      default:
        return Drain();
    }
  }

  void TameStep() {
    switch (choose_(4)) {
      case 0:
        return Drain();
      case 1:
        now_ns_ += choose_(2) * kTestSecondNs;
        return side_.session.Tick(now_ns_);
      default:
        return Send(TransferOpcode::kRecord, wire::Encode(SomeRecord()));
    }
  }

  void SendBytes(std::span<const std::byte> bytes) {
    side_.session.Receive(bytes, now_ns_);
    Check();
  }
  void Drain() {
    while (side_.session.has_output()) TakeOutput(&side_.session, size_t{1} << 20, now_ns_);
  }
  void Finish(HostileTransferPeer* counts) {
    counts->sessions_open += side_.is_open;
    counts->requests += static_cast<int64_t>(side_.over.size() + side_.sends.size());
    for (int64_t layer = 0; layer < kTestLayers && asked_.epoch != 0; ++layer)
      counts->rows_complete += side_.receiver.CompleteRows(asked_.epoch, layer);
    counts->ended += !side_.session.status().ok();
    side_.session.Lose(Status(StatusCode::kUnavailable, "the test ends"));
    Check();
    QUIRE_CHECK(side_.sends.empty()) << "a transfer never ended";
    QUIRE_CHECK(side_.window_left == side_.window_bytes) << "a part was never taken";
    if (asked_.epoch != 0)
      QUIRE_CHECK(!side_.receiver.open.at(asked_.epoch).failure.ok()) << "a wait would not end";
  }

 private:
  uint64_t Small() { return static_cast<uint64_t>(choose_(5)); }

  void Send(TransferOpcode opcode, std::vector<std::byte> head,
            std::span<const std::byte> data = {}) {
    std::vector<std::byte> frame(wire::kTransferHeaderBytes);
    // Now and then a number, a length or a checksum that is wrong.
    const int64_t wrong = is_wild_ ? choose_(40) : 40;
    wire::EncodeTransferHeader(
        {.opcode = opcode,
         .number = wrong == 0 ? number_ + 1 : number_,
         .head_bytes = wrong == 1 ? 0xfffffff0U : static_cast<uint32_t>(head.size()),
         .data_bytes = wrong == 2 ? 0xfffffff0U : static_cast<uint32_t>(data.size()),
         .head_crc = wrong == 3 ? 1U : Crc32c(head.data(), head.size())},
        std::span(frame).first<wire::kTransferHeaderBytes>());
    ++number_;
    frame.insert(frame.end(), head.begin(), head.end());
    frame.insert(frame.end(), data.begin(), data.end());
    SendBytes(frame);
  }

  // Mostly rows of the layer as they should be, else with something that no sender says.
  void SendRows() {
    const int64_t layer = choose_(kTestLayers);
    const int64_t first = choose_(kRows);
    const int64_t count = 1 + choose_(kRows - first);
    TestRows rows = RowsOfLayer(layer, kRows);
    const LayerKV sent = rows.View(first, count);
    wire::TransferPart part{.receiver = own_hello_.instance,
                            .epoch = asked_.epoch,
                            .layer = layer,
                            .part = {first, count, 0, kTestHeads},
                            .number = ++part_,
                            .bytes = count * kTestRowBytes,
                            .digest = DigestOfHeads(sent, 0, kTestHeads)};
    std::vector<std::byte> data;
    for (const auto& run : PartRuns(sent, {0, count, 0, kTestHeads}))
      data.insert(data.end(), run.begin(), run.end());
    if (!is_tame_) Twist(&part, &data);
    if (is_tame_ && choose_(8) == 0) data.back() ^= std::byte{1};
    Send(TransferOpcode::kPart, wire::Encode(part));
    for (size_t at = 0; at < data.size();) {
      const size_t size = std::min(data.size() - at, 1 + static_cast<size_t>(choose_(200)));
      Send(TransferOpcode::kData,
           wire::Encode(wire::TransferData{part.number, static_cast<int64_t>(at)}),
           std::span(data).subspan(at, size));
      at += size;
    }
  }
  void Twist(wire::TransferPart* part, std::vector<std::byte>* data) {
    switch (choose_(24)) {
      case 0:
        part->epoch = foreign_.epoch;
        break;
      case 1:
        part->epoch = Small();
        break;
      case 2:
        part->receiver[3] ^= std::byte{1};
        break;
      case 3:
        part->part.first_row = choose_(100) - 50;
        break;
      case 4:
        part->part.count = choose_(1000);
        break;
      case 5:
        part->part.first_head = choose_(4);
        break;
      case 6:
        part->layer = choose_(6);
        break;
      case 7:
        part->bytes = choose_(1 << 21);
        break;
      case 8:
      case 9:
      case 10:
        data->back() ^= std::byte{1};
        break;
      case 11:
        part->number = Small();
        break;
      case 12:
        data->resize(static_cast<size_t>(choose_(static_cast<int64_t>(data->size()))));
        break;
      case 13:
        part->bytes = int64_t{1} << 40;
        break;
      default:
        break;
    }
  }
  wire::TransferRecord SomeRecord() {
    return {.receiver = own_hello_.instance,
            .epoch = choose_(8) == 0 ? foreign_.epoch : asked_.epoch,
            .first_row = choose_(2),
            .count = choose_(kRows + 1),
            .is_aborted = choose_(4) == 0};
  }
  void SendMap() {
    const uint64_t job = choose_(3) == 0 ? Small() : 0;
    Send(TransferOpcode::kMap,
         wire::Encode(wire::TransferMap{
             .job = job,
             .map = {.epoch = Small(), .slots = {1, 0, 2}, .count = choose_(3), .kv_heads = {2}}}));
  }
  void DamageOne() {
    const std::vector<std::byte> noise(static_cast<size_t>(1 + choose_(70)),
                                       static_cast<std::byte>(choose_(256)));
    SendBytes(noise);
  }
  // What this side does meanwhile.
  void ActHere() {
    if (!side_.session.is_open()) return;
    const uint64_t epoch = Small();
    switch (choose_(4)) {
      case 0:
        if (!side_.sends.empty()) side_.SendRows(side_.sends.begin()->first, 0, {0, 1, 0, 1});
        break;
      case 1:
        side_.session.sends().Stop(epoch, Status(StatusCode::kCancelled, "here"));
        break;
      case 2:
        side_.SendRecord(epoch, 0, 1, choose_(2) == 1);
        break;
      default:
        side_.session.Close(Status(StatusCode::kClosed, "here"), now_ns_);
        break;
    }
  }
  void Check() {
    if (!side_.is_open)
      QUIRE_CHECK(side_.session.memory_bytes() <= kStrangerMemoryMax) << "for a stranger";
    for (int64_t layer = 0; layer < kTestLayers; ++layer)
      QUIRE_CHECK(side_.receiver.CompleteRows(foreign_.epoch, layer) == 0) << "of somebody else";
  }

  const Choose& choose_;
  TestSession side_;
  const std::string secret_;
  wire::TransferHello hello_;
  wire::TransferHello own_hello_;
  ReceiveMap asked_{};
  ReceiveMap foreign_{};
  uint64_t number_ = 0;  // of the next frame
  uint64_t part_ = 0;
  bool is_first_step_ = true;
  bool is_tame_ = false;
  bool is_wild_ = false;  // the opening is by the rules
  int64_t now_ns_ = 0;
};

// The other side of an opening: it mostly says what is due, and else something else.
class HostileOpening {
 public:
  HostileOpening(const std::string& secret, const Choose& choose)
      : choose_(choose),
        secret_(secret),
        listens_(choose(2) == 0),
        side_(OptionsOf(secret, listens_, choose)) {
    hello_ = {.has_secret = !secret.empty(),
              .heartbeat_ms = 500,
              .dead_after_ms = 3000,
              .lease_ms = 30000,
              .window_bytes = 1 << 20,
              .instance = {std::byte{9}}};
    if (choose(4) == 0) hello_.version_last = 2;
    side_.book = book_;
    waiting_ = book_->Expect(awaited_, [](uint16_t, std::unique_ptr<ByteChannel>) {});
    greeting_ = Heard();
  }

  void Step() {
    const bool is_by_the_rules = choose_(8) > 0;
    if (!is_by_the_rules && choose_(2) == 0) {
      if (has_joined_) return;
      side_.session.OnJoined();  // too early, too late, or when it is due
      has_joined_ = side_.granted.has_value();
      return Check();
    }
    if (!is_by_the_rules) {
      Send(static_cast<TransferOpcode>(choose_(20)),
           std::vector<std::byte>(static_cast<size_t>(choose_(60))));
      return;
    }
    SayDue();
  }
  void Finish(HostileTransferPeer* counts) {
    counts->openings += side_.is_open && has_joined_;
    counts->joins += side_.session.is_joined();
    side_.session.Lose(Status(StatusCode::kUnavailable, "the test ends"));
  }

 private:
  static TransferSession::Options OptionsOf(const std::string& secret, bool listens,
                                            const Choose& choose) {
    TransferSession::Options options = TestSessionOptions(!listens, secret);
    options.streams = 1 + choose(4);
    options.token = {std::byte{7}};
    return options;
  }

  // What comes next, or something of its kind.
  void SayDue() {
    switch (next_++) {
      case 0:
        return SayHelloOrJoin();
      case 1:
        if (!secret_.empty()) Send(TransferOpcode::kProve, Proof());
        return;
      case 2: {
        const std::string passport = TestPassport().ToJson().value();
        const auto bytes = std::as_bytes(std::span(passport.data(), passport.size()));
        return Send(TransferOpcode::kPassport, {bytes.begin(), bytes.end()});
      }
      case 3: {
        wire::TransferStreams streams{.count = static_cast<uint16_t>(choose_(6))};
        if (!listens_ || choose_(8) == 0) streams.token[0] = std::byte{1};
        return Send(TransferOpcode::kStreams, wire::Encode(streams));
      }
      case 4:
        if (!side_.granted || has_joined_) return;
        has_joined_ = true;
        side_.session.OnJoined();
        return Check();
      case 5:
        return Send(TransferOpcode::kStriped, {});
      default:
        return Send(TransferOpcode::kHeartbeat, {});
    }
  }
  void SayHelloOrJoin() {
    if (choose_(3) > 0) return Send(TransferOpcode::kHello, wire::Encode(hello_));
    const auto stream = static_cast<uint16_t>(choose_(5));
    wire::TransferJoin join{.connection = awaited_.connection, .stream = stream};
    join.proof = wire::JoinProof(awaited_.key, join.connection, stream, greeting_);
    const bool is_wrong = choose_(3) == 0;
    if (is_wrong) join.proof.bytes[static_cast<size_t>(choose_(32))] ^= 1;
    Send(TransferOpcode::kJoin, wire::Encode(join));
    const bool may_join = listens_ && !is_wrong && stream >= 1 && stream < awaited_.count;
    QUIRE_CHECK(may_join || !side_.session.is_joined()) << "a stranger's socket is a stream";
  }
  std::vector<std::byte> Proof() const {
    const Digest proof = wire::TransferProof(
        secret_, listens_ ? wire::kConnectorProofLabel : wire::kListenerProofLabel,
        listens_ ? hello_ : greeting_, listens_ ? greeting_ : hello_);
    const auto bytes = std::as_bytes(std::span(proof.bytes));
    return {bytes.begin(), bytes.end()};
  }
  // This side's hello, as it says it.
  wire::TransferHello Heard() {
    const std::vector<std::byte> frame = TakeOutput(&side_.session, size_t{1} << 20, 0);
    return wire::DecodeTransferHello(std::span(frame).subspan(wire::kTransferHeaderBytes)).value();
  }
  void Send(TransferOpcode opcode, const std::vector<std::byte>& head) {
    std::vector<std::byte> frame(wire::kTransferHeaderBytes);
    wire::EncodeTransferHeader({.opcode = opcode,
                                .number = number_++,
                                .head_bytes = static_cast<uint32_t>(head.size()),
                                .head_crc = Crc32c(head.data(), head.size())},
                               std::span(frame).first<wire::kTransferHeaderBytes>());
    frame.insert(frame.end(), head.begin(), head.end());
    side_.session.Receive(frame, 0);
    Check();
    while (side_.session.has_output()) TakeOutput(&side_.session, size_t{1} << 20, 0);
    if (side_.session.TakeReadsStriped() || side_.session.TakeWritesStriped())
      QUIRE_CHECK(has_joined_) << "all streams begin where there is one";
  }
  void Check() {
    if (side_.granted) QUIRE_CHECK(has_joined_ || !side_.is_open) << "its streams are not there";
    if (!side_.is_open)
      QUIRE_CHECK(side_.session.memory_bytes() <= kStrangerMemoryMax) << "for a stranger";
  }

  // A connection that waits for streams.
  const TransferSession::StreamsGranted awaited_{
      .connection = {std::byte{5}}, .key = "key", .count = 4};
  const Choose& choose_;
  const std::string secret_;
  const bool listens_;  // the side that is attacked
  TestSession side_;
  const std::shared_ptr<StreamBook> book_ = std::make_shared<StreamBook>();
  StreamBook::Entry waiting_;
  wire::TransferHello hello_;
  wire::TransferHello greeting_;
  uint64_t number_ = 0;  // of the next frame
  int next_ = 0;         // of what is to be said
  bool has_joined_ = false;
};

}  // namespace

void HostileTransferPeer::RunOpening(const Choose& choose) {
  HostileOpening opening(secret_, choose);
  const int64_t steps = 1 + choose(kStepsMax);
  for (int64_t i = 0; i < steps; ++i) opening.Step();
  opening.Finish(this);
}

void HostileTransferPeer::RunSession(const Choose& choose) {
  HostileSession session(secret_, choose);
  // Most sessions begin well, so that states behind the opening are reached.
  if (choose(8) > 0) session.Open();
  const int64_t steps = 1 + choose(kStepsMax);
  for (int64_t i = 0; i < steps; ++i) session.Step();
  session.Finish(this);
}

void HostileTransferPeer::SendRaw(std::span<const std::byte> bytes, bool is_open) {
  const Choose nothing = [](int64_t) { return int64_t{0}; };
  HostileSession session(secret_, nothing);
  if (is_open) session.Open();
  session.SendBytes(bytes);
  session.Finish(this);
}

}  // namespace quire
