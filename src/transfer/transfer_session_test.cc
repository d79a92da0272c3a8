// Both sides of the protocol without sockets: every stage, damaged bytes, time, and peers that
// break the rules.
#include "transfer/transfer_session.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>

#include "base/checksum.h"
#include "base/guard.h"
#include "base/random.h"
#include "base/testing/refuse_each.h"
#include "base/testing/soak.h"
#include "transfer/testing/hostile_transfer_peer.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

using wire::TransferOpcode;

const Status kUnwanted(StatusCode::kCancelled, "unwanted");

using Spoil = std::function<void(std::vector<std::byte>&)>;

// A receiver that connects and a sender that listens; the test carries their bytes.
class SessionPair {
 public:
  explicit SessionPair(std::string secret = "", std::string sender_secret = "")
      : receiver(TestSessionOptions(true, std::move(secret))),
        sender(TestSessionOptions(false, std::move(sender_secret))) {}
  SessionPair(TransferSession::Options first, TransferSession::Options second)
      : receiver(std::move(first)), sender(std::move(second)) {}

  // Until neither has anything to say; what the sender says goes through `spoil`.
  void Exchange(size_t piece = 1 << 20, const Spoil& spoil = {}) {
    for (bool has_moved = true; has_moved;) {
      has_moved = Carry(&receiver, &sender, piece, {});
      has_moved |= Carry(&sender, &receiver, piece, spoil);
    }
  }
  bool Carry(TestSession* from, TestSession* to, size_t piece, const Spoil& spoil) {
    bool has_moved = false;
    while (from->session.has_output()) {
      std::vector<std::byte> bytes = TakeOutput(&from->session, piece, now);
      frames_of_receiver += from == &receiver;
      if (spoil) spoil(bytes);
      to->session.Receive(bytes, now);
      has_moved = true;
    }
    return has_moved;
  }
  // A read of the receiver's, as a connection makes it: its bytes are there and not checked.
  FrameRead BeginRead() {
    FrameRead read = receiver.session.BeginRead();
    const std::span<std::byte> place = read.places.front();
    std::ranges::copy(TakeOutput(&sender.session, place.size(), now), place.begin());
    return read;
  }
  void ReadOne() {
    FrameRead read = BeginRead();
    read.Check(read.places.front().size());
    receiver.session.OnRead(read, now);
  }
  // The same of a part's rows, which are `bytes`; what comes before is taken.
  FrameRead BeginReadOfRows(size_t bytes) {
    while (receiver.session.BeginRead().places.front().size() != bytes) ReadOne();
    return BeginRead();
  }
  // Both sides live on for a while, heartbeat by heartbeat.
  void Live(int64_t ns) {
    for (const int64_t until = now + ns; now < until;) {
      now += kTestSecondNs / 4;
      receiver.session.Tick(now);
      sender.session.Tick(now);
      Exchange();
    }
  }

  // A reservation that the sender has learnt of.
  ReceiveMap Ask(int64_t rows, int64_t deadline_ns = TransferJob::kNoDeadline) {
    const ReceiveMap map = receiver.receiver.Reserve(rows);
    const TransferRequest request{
        .job = {.id = map.epoch, .tokens = {1, 2, 3}, .deadline_ns = deadline_ns}, .map = map};
    EXPECT_TRUE(receiver.session.receives().Open(request, now).ok());
    Exchange();
    return map;
  }
  void SendAll(uint64_t epoch, int64_t first, int64_t count) {
    for (int64_t layer = 0; layer < kTestLayers; ++layer) {
      EXPECT_TRUE(sender.SendRows(
          epoch, layer,
          {.first_row = first, .count = count, .first_head = 0, .head_count = kTestHeads}));
    }
  }
  void ExpectQuiet() {
    EXPECT_EQ(sender.window_left, sender.window_bytes);
    EXPECT_EQ(receiver.session.receives().open_count(), 0U);
    EXPECT_EQ(sender.session.sends().open_count(), 0U);
    EXPECT_TRUE(sender.sends.empty());
  }

  int64_t now = 0;
  uint64_t frames_of_receiver = 0;  // where pieces are whole frames
  TestSession receiver;
  TestSession sender;
};

std::vector<std::byte> MakeFrame(uint64_t number, TransferOpcode opcode,
                                 std::vector<std::byte> head, uint32_t claims = 0) {
  std::vector<std::byte> frame(wire::kTransferHeaderBytes);
  const auto bytes = claims > 0 ? claims : static_cast<uint32_t>(head.size());
  wire::EncodeTransferHeader({.opcode = opcode,
                              .number = number,
                              .head_bytes = bytes,
                              .head_crc = Crc32c(head.data(), head.size())},
                             std::span(frame).first<wire::kTransferHeaderBytes>());
  frame.insert(frame.end(), head.begin(), head.end());
  return frame;
}

TEST(HostileTransferPeer, BreaksNothingInManySessions) {
  const int64_t sessions = RoundsOf(30'000);
  ReportFigure("sessions", 2 * sessions);
  for (const char* secret : {"", "a secret"}) {
    HostileTransferPeer peer(secret);
    RandomSequence random(SoakSeed(6), *secret == 0 ? 0 : 1);
    for (int64_t i = 0; i < sessions; ++i) {
      SCOPED_TRACE(i);
      peer.RunSession([&](int64_t bound) { return random.Below(bound); });
    }
    // The sessions reach what they are to break.
    EXPECT_GT(peer.sessions_open, sessions / 2);
    EXPECT_GT(peer.rows_complete, sessions / 20);
    EXPECT_GT(peer.requests, sessions / 50);
    EXPECT_GT(peer.ended, sessions / 4);
  }
}

TEST(HostileTransferPeer, OpensNothingThatIsNotWhole) {
  const int64_t openings = RoundsOf(30'000);
  ReportFigure("openings", 2 * openings);
  for (const char* secret : {"", "a secret"}) {
    HostileTransferPeer peer(secret);
    RandomSequence random(SoakSeed(7), *secret == 0 ? 0 : 1);
    for (int64_t i = 0; i < openings; ++i) {
      SCOPED_TRACE(i);
      peer.RunOpening([&](int64_t bound) { return random.Below(bound); });
    }
    EXPECT_GT(peer.openings, openings / 50);
    EXPECT_GT(peer.joins, openings / 50);
  }
}

TEST(TransferSession, MovesRowsLayerByLayerInPiecesOfAnySize) {
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{1} << 20}) {
    SessionPair pair("a secret", "a secret");
    pair.Exchange(piece);
    ASSERT_TRUE(pair.receiver.is_open && pair.sender.is_open);
    const ReceiveMap map = pair.Ask(6);
    ASSERT_EQ(pair.sender.sends.count(map.epoch), 1U);
    EXPECT_EQ(pair.sender.sends[map.epoch].job.tokens, (std::vector<int32_t>{1, 2, 3}));
    EXPECT_EQ(pair.sender.sends[map.epoch].map.slots, map.slots);
    pair.SendAll(map.epoch, 0, 4);
    pair.sender.SendRecord(map.epoch, 0, 4);
    pair.Exchange(piece);
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 4);
    // Head by head: the other side has other heads.
    for (const int64_t head : {0, 1}) {
      for (int64_t layer = 0; layer < kTestLayers; ++layer) {
        ASSERT_TRUE(pair.sender.SendRows(
            map.epoch, layer, {.first_row = 4, .count = 2, .first_head = head, .head_count = 1}));
      }
    }
    pair.sender.SendRecord(map.epoch, 4, 2);
    pair.Exchange(piece);
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 6);
    pair.receiver.receiver.CheckPages();
    // The reservation is committed: within a heartbeat the sender knows.
    pair.receiver.receiver.End(map.epoch);
    pair.Live(kTestSecondNs);
    pair.ExpectQuiet();
  }
}

// A side is open as soon as it has the other one's passport, and its own may not be written yet.
TEST(TransferSession, ARequestDoesNotPassTheOpening) {
  for (const char* secret : {"", "a secret"}) {
    SessionPair pair(secret, secret);
    while (!pair.receiver.is_open) {
      pair.sender.session.Receive(TakeOutput(&pair.receiver.session, 1 << 20, pair.now), pair.now);
      pair.Carry(&pair.sender, &pair.receiver, 1 << 20, {});
    }
    ASSERT_TRUE(pair.receiver.session.has_output());
    const ReceiveMap map = pair.Ask(4);
    EXPECT_EQ(pair.sender.session.status().ToString(), "Ok");
    EXPECT_EQ(pair.sender.sends.count(map.epoch), 1U);
  }
}

TEST(TransferSession, RowsCountAfterTheirRecordAlone) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.SendAll(map.epoch, 0, 4);
  pair.Exchange();
  EXPECT_EQ(pair.sender.window_left, pair.sender.window_bytes);  // they are there
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 0);
  pair.sender.SendRecord(map.epoch, 0, 4, /*is_aborted=*/true);
  pair.SendAll(map.epoch, 0, 2);
  pair.sender.SendRecord(map.epoch, 0, 2);
  pair.Exchange();
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 2);
  pair.receiver.receiver.CheckPages();
}

TEST(TransferSession, SecretsAreShownByBothSides) {
  const std::string pairs[][2] = {{"one", "two"}, {"one", ""}, {"", "two"}};
  for (const auto& secrets : pairs) {
    SessionPair pair(secrets[0], secrets[1]);
    pair.Exchange();
    EXPECT_FALSE(pair.receiver.is_open);
    EXPECT_FALSE(pair.sender.is_open);
    EXPECT_TRUE(pair.receiver.session.is_over() && pair.sender.session.is_over());
    EXPECT_EQ(pair.receiver.session.status().code(), StatusCode::kRemote);
    EXPECT_NE(pair.receiver.session.status().message().find("secret"), std::string::npos);
  }
  // What the connecting side shows is no proof of the other one.
  TestSession stranger(TestSessionOptions(true, "unknown"));
  TestSession listener(TestSessionOptions(false, "a secret"));
  listener.session.Receive(TakeOutput(&stranger.session, 1 << 20, 0), 0);
  TakeOutput(&listener.session, 1 << 20, 0);  // its hello
  const std::vector<std::byte> proof = TakeOutput(&listener.session, 1 << 20, 0);
  listener.session.Receive(proof, 0);
  EXPECT_FALSE(listener.is_open);
  EXPECT_EQ(listener.session.status().code(), StatusCode::kRemote);
}

TEST(TransferSession, AnotherModelIsRefusedByBothSidesWithTheField) {
  TransferSession::Options other = TestSessionOptions(false);
  Passport passport = TestPassport();
  passport.model = "another";
  other.passport = passport.ToJson().value();
  SessionPair pair(TestSessionOptions(true), std::move(other));
  pair.Exchange();
  for (const TestSession* side : {&pair.receiver, &pair.sender}) {
    EXPECT_FALSE(side->is_open);
    EXPECT_EQ(side->session.status().code(), StatusCode::kIncompatible);
    EXPECT_NE(side->session.status().message().find("model: "), std::string::npos);
    EXPECT_NE(side->session.status().message().find("another"), std::string::npos);
  }
}

TEST(TransferSession, DamagedRowsAreSentAgain) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  int damaged = 0;
  pair.Exchange(1 << 20, [&](std::vector<std::byte>& frame) {
    const bool is_data = frame[6] == static_cast<std::byte>(TransferOpcode::kData);
    if (is_data && damaged++ < 2) frame.back() ^= std::byte{4};
  });
  EXPECT_EQ(pair.sender.session.sends().parts_sent_again, 2);
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 4);
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 4);
  pair.receiver.receiver.CheckPages();
  EXPECT_EQ(pair.sender.window_left, pair.sender.window_bytes);
}

// Where other parts hold all of the staging memory, nothing is read until there is room.
TEST(TransferSession, APartWithoutRoomWaitsAndTheConnectionWithIt) {
  constexpr int64_t kPartBytes = 4 * kTestRowBytes;
  SessionPair pair;
  pair.Exchange();
  TestReceiver& receiver = pair.receiver.receiver;
  TransferSession& session = pair.receiver.session;
  ASSERT_TRUE(receiver.SetStagingLimit(kPartBytes).ok());
  const ReceiveMap map = pair.Ask(4);
  const ReceiveMap other = receiver.Reserve(4);
  const ReceivePart one{.first_row = 0, .count = 1, .first_head = 0, .head_count = kTestHeads};
  std::optional<ReceiveView> held = receiver.View(other.epoch, 0, one).value();
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  const auto carry = [&] {
    while (pair.sender.session.has_output() && session.accepts_input()) {
      // A frame at a time, as a connection reads.
      const size_t wanted = session.BeginRead().places.front().size();
      session.Receive(TakeOutput(&pair.sender.session, wanted, pair.now), pair.now);
    }
  };
  carry();
  EXPECT_TRUE(session.receives().waits_for_room());
  EXPECT_LT(pair.sender.window_left, pair.sender.window_bytes);
  // A wait is no silence of the peer, and ends when there is room.
  for (int i = 0; i < 40; ++i) {
    pair.now += kTestSecondNs / 8;
    session.Tick(pair.now);
    EXPECT_LE(session.next_deadline(), pair.now + 1'000'000);
  }
  EXPECT_TRUE(session.receives().waits_for_room() && session.is_open());
  held.reset();
  pair.now += 1'000'000;
  session.Tick(pair.now);
  EXPECT_FALSE(session.receives().waits_for_room());
  session.Tick(pair.now);
  EXPECT_TRUE(session.is_open());
  carry();
  EXPECT_EQ(receiver.CompleteRows(map.epoch, 1), 4);
  receiver.CheckPages();
  EXPECT_EQ(receiver.staging().held, 0);
  EXPECT_EQ(receiver.staging().largest, kPartBytes);
}

TEST(TransferSession, ATransferThatEndsWhileItWaitsForRoomLetsTheOthersGoOn) {
  for (const bool by_deadline : {false, true}) {
    SessionPair pair;
    pair.Exchange();
    TestReceiver& receiver = pair.receiver.receiver;
    TransferSession& session = pair.receiver.session;
    ASSERT_TRUE(receiver.SetStagingLimit(kTestRowBytes).ok());
    const ReceiveMap map = pair.Ask(1, by_deadline ? kTestSecondNs : TransferJob::kNoDeadline);
    const ReceivePart one{.first_row = 0, .count = 1, .first_head = 0, .head_count = kTestHeads};
    const ReceiveMap other = receiver.Reserve(1);
    const ReceiveView held = receiver.View(other.epoch, 0, one).value();
    ASSERT_TRUE(pair.sender.SendRows(map.epoch, 0, one));
    while (pair.sender.session.has_output() && session.accepts_input()) {
      const size_t wanted = session.BeginRead().places.front().size();
      session.Receive(TakeOutput(&pair.sender.session, wanted, pair.now), pair.now);
    }
    ASSERT_TRUE(session.receives().waits_for_room());
    pair.now += by_deadline ? kTestSecondNs : 0;
    if (by_deadline) {
      session.Tick(pair.now);
    } else {
      EXPECT_TRUE(session.receives().Cancel(map.epoch, kUnwanted).ok());
    }
    EXPECT_FALSE(session.receives().waits_for_room());
    pair.Exchange();
    pair.ExpectQuiet();
    EXPECT_TRUE(session.is_open());
  }
}

// Many parts are damaged at a time, and wait to come again: none of them holds memory meanwhile.
TEST(TransferSession, DamagedPartsHoldNoMemory) {
  SessionPair pair;
  pair.Exchange();
  ASSERT_TRUE(pair.receiver.receiver.SetStagingLimit(kTestRowBytes).ok());
  const ReceiveMap map = pair.Ask(6);
  for (int64_t row = 0; row < 6; ++row) pair.SendAll(map.epoch, row, 1);
  pair.sender.SendRecord(map.epoch, 0, 6);
  int damaged = 0;
  pair.Exchange(1 << 20, [&](std::vector<std::byte>& frame) {
    const bool is_data = frame[6] == static_cast<std::byte>(TransferOpcode::kData);
    if (is_data && damaged++ < 6) frame.back() ^= std::byte{4};
  });
  EXPECT_EQ(pair.sender.session.sends().parts_sent_again, 6);
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 6);
  pair.receiver.receiver.CheckPages();
}

TEST(TransferSession, APartLargerThanTheStagingMemoryEndsItsTransferByName) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  ASSERT_TRUE(pair.receiver.receiver.SetStagingLimit(3 * kTestRowBytes).ok());
  pair.SendAll(map.epoch, 0, 4);
  pair.Exchange();
  const Status failure = pair.receiver.receiver.open.at(map.epoch).failure;
  EXPECT_EQ(failure.code(), StatusCode::kTooLarge);
  EXPECT_NE(failure.message().find("staging_bytes"), std::string::npos);
  EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kTooLarge);
  pair.ExpectQuiet();
  EXPECT_TRUE(pair.receiver.session.is_open());
}

TEST(TransferSession, DamageThatStaysEndsTheTransferAndNothingElse) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  pair.Exchange(1 << 20, [&](std::vector<std::byte>& frame) {
    if (frame[6] == static_cast<std::byte>(TransferOpcode::kData)) frame.back() ^= std::byte{4};
  });
  EXPECT_EQ(pair.receiver.receiver.open.at(map.epoch).failure.code(), StatusCode::kCorrupt);
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 0);
  EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kCorrupt);
  pair.ExpectQuiet();
  const ReceiveMap next = pair.Ask(2);
  pair.SendAll(next.epoch, 0, 2);
  pair.sender.SendRecord(next.epoch, 0, 2);
  pair.Exchange();
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(next.epoch, 1), 2);
}

TEST(TransferSession, CancelAtEveryStageFreesBothSides) {
  // Frames of the sender until the receiver cancels.
  for (int stage = 0; stage < 12; ++stage) {
    SCOPED_TRACE(stage);
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(4);
    pair.SendAll(map.epoch, 0, 4);
    pair.sender.SendRecord(map.epoch, 0, 4);
    int frames = 0;
    const auto cancel = [&] {
      if (frames++ == stage) {
        EXPECT_TRUE(pair.receiver.session.receives().Cancel(map.epoch, kUnwanted).ok());
        pair.receiver.receiver.End(map.epoch);
      }
    };
    pair.Exchange(1 << 20, [&](std::vector<std::byte>&) { cancel(); });
    while (frames <= stage) cancel();
    pair.Exchange();
    pair.ExpectQuiet();
    EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kCancelled);
    // Late rows of a cancelled transfer go nowhere.
    const int64_t views = pair.receiver.receiver.views;
    EXPECT_FALSE(pair.sender.SendRows(
        map.epoch, 0, {.first_row = 0, .count = 1, .first_head = 0, .head_count = 1}));
    pair.Exchange();
    EXPECT_EQ(pair.receiver.receiver.views, views);
  }
}

// How a transfer ends, whose job has a second.
const std::function<void(SessionPair&, uint64_t)> kEnds[] = {
    [](SessionPair& pair, uint64_t epoch) {
      EXPECT_TRUE(pair.receiver.session.receives().Cancel(epoch, kUnwanted).ok());
    },
    [](SessionPair& pair, uint64_t) { pair.receiver.session.receives().SetReceiver(nullptr); },
    [](SessionPair& pair, uint64_t) { pair.receiver.session.receives().Tick(kTestSecondNs); },
    [](SessionPair& pair, uint64_t) { pair.receiver.session.Lose(kUnwanted); },
};

// A part is stored without the session, which goes on meanwhile.
TEST(TransferSession, ATransferMayEndWhileItsPartIsStored) {
  for (size_t i = 0; i < std::size(kEnds); ++i) {
    SCOPED_TRACE(i);
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(2, kTestSecondNs);
    pair.SendAll(map.epoch, 0, 2);
    pair.sender.SendRecord(map.epoch, 0, 2);
    TransferSession& session = pair.receiver.session;
    ReceiveHalf& receives = session.receives();
    while (!receives.has_due()) pair.ReadOne();
    ReceiveHalf::DueStore due = receives.TakeDue();
    EXPECT_EQ(due.Store().ToString(), "Ok");
    EXPECT_EQ(pair.receiver.receiver.staging().held, 0);
    kEnds[i](pair, map.epoch);
    receives.OnStored(due, Status());
    EXPECT_EQ(receives.parts_received, 0);
    EXPECT_EQ(receives.open_count(), 0U);
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 0);
    if (!session.is_open()) continue;
    pair.Exchange();
    pair.ExpectQuiet();
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 0);
  }
}

// Bytes are read and hashed without the session. Where the transfer ends meanwhile, what comes is
// nobody's, damaged or not: the reader keeps its memory until then, and no longer.
TEST(TransferSession, ATransferMayEndWhileItsPartIsRead) {
  constexpr size_t kBytes = 2 * kTestRowBytes;
  constexpr size_t kStages =
      3;  // the end comes before the bytes are there, before or after the check
  for (size_t i = 0; i < std::size(kEnds) * kStages * 2; ++i) {
    const auto& end = kEnds[i / (kStages * 2)];
    const size_t stage = i / 2 % kStages;
    SCOPED_TRACE(testing::Message() << "end " << i / (kStages * 2) << " at stage " << stage);
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(2, kTestSecondNs);
    pair.SendAll(map.epoch, 0, 2);
    pair.sender.SendRecord(map.epoch, 0, 2);
    TestReceiver& receiver = pair.receiver.receiver;
    FrameRead read = pair.BeginReadOfRows(kBytes);
    if (stage == 0) end(pair, map.epoch);
    if (i % 2 == 1) read.places.front().front() ^= std::byte{1};
    if (stage == 1) end(pair, map.epoch);
    EXPECT_EQ(receiver.staging().held, static_cast<int64_t>(kBytes));
    read.Check(kBytes);
    EXPECT_EQ(receiver.staging().held, stage < 2 ? 0 : static_cast<int64_t>(kBytes));
    if (stage == 2) end(pair, map.epoch);
    EXPECT_EQ(receiver.staging().held, 0);
    TransferSession& session = pair.receiver.session;
    const bool goes_on = session.is_open();
    session.OnRead(read, pair.now);
    EXPECT_FALSE(session.receives().has_due());
    EXPECT_EQ(session.receives().open_count(), 0U);
    EXPECT_EQ(session.is_open(), goes_on);
    if (!goes_on) continue;
    pair.Exchange();
    pair.ExpectQuiet();
    EXPECT_EQ(pair.sender.session.sends().parts_sent_again, 0);
    EXPECT_EQ(session.receives().parts_received, 0);
    EXPECT_EQ(receiver.CompleteRows(map.epoch, 0), 0);
    EXPECT_EQ(receiver.CompleteRows(map.epoch, 1), 0);
  }
}

// A digest takes its time. So the session takes that of the check, and looks at no byte.
TEST(TransferSession, RowsAreHashedBeforeTheSessionHearsOfThem) {
  constexpr size_t kBytes = 2 * kTestRowBytes;
  for (const bool is_damaged : {false, true}) {
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(2);
    pair.SendAll(map.epoch, 0, 2);
    FrameRead read = pair.BeginReadOfRows(kBytes);
    if (is_damaged) read.places.front().front() ^= std::byte{1};
    read.Check(kBytes);
    read.places.front().front() ^= std::byte{1};
    pair.receiver.session.OnRead(read, pair.now);
    EXPECT_EQ(pair.receiver.session.receives().has_due(), !is_damaged);
  }
}

TEST(TransferSession, OneReadsAtATime) {
  SessionPair pair;
  FrameRead first = pair.receiver.session.BeginRead();
  FrameRead second = pair.receiver.session.BeginRead();
  first.Check(1);
  EXPECT_DEATH(pair.receiver.session.OnRead(first, pair.now), "two read");
  EXPECT_DEATH(pair.receiver.session.OnRead(second, pair.now), "not checked");
}

// A cancel that came before what it cancels would end nothing: the peer would compute for nobody.
TEST(TransferSession, ACancelDoesNotPassItsRequest) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.receiver.receiver.Reserve(4);
  ReceiveHalf& receives = pair.receiver.session.receives();
  ASSERT_TRUE(receives.Open({.job = {.id = 1, .tokens = {1, 2, 3}}, .map = map}, pair.now).ok());
  ASSERT_TRUE(receives.Cancel(map.epoch, kUnwanted).ok());
  pair.Exchange();
  pair.ExpectQuiet();
  EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kCancelled);
}

// A reservation of which nothing is known for want of memory goes on.
TEST(TransferSession, AReservationIsOverWhenItIsNotFoundAlone) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.receiver.receiver.is_without_memory = true;
  pair.Live(2 * kTestSecondNs);
  pair.receiver.receiver.is_without_memory = false;
  ASSERT_EQ(pair.sender.sends.count(map.epoch), 1U);
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  pair.Exchange();
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 4);
  pair.receiver.receiver.End(map.epoch);
  pair.Live(2 * kTestSecondNs);
  pair.ExpectQuiet();
}

TEST(TransferSession, AStopTellsTheReceiverWhy) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.sender.session.sends().Stop(map.epoch, Status(StatusCode::kFull, "no room for the job"));
  pair.Exchange();
  const Status& failure = pair.receiver.receiver.open.at(map.epoch).failure;
  EXPECT_EQ(failure.code(), StatusCode::kFull);
  EXPECT_EQ(failure.message(), "no room for the job");
  pair.ExpectQuiet();
}

TEST(TransferSession, ADeadPeerIsNoticedAndALiveOneIsNot) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.Live(100 * kTestSecondNs);  // silent but for heartbeats and renewals
  EXPECT_TRUE(pair.receiver.session.is_open() && pair.sender.session.is_open());
  EXPECT_EQ(pair.sender.sends.count(map.epoch), 1U);
  const int64_t heard = pair.now;
  pair.receiver.session.Tick(heard + 3 * kTestSecondNs - 1);
  EXPECT_TRUE(pair.receiver.session.is_open());
  pair.receiver.session.Tick(heard + 3 * kTestSecondNs);
  EXPECT_TRUE(pair.receiver.session.is_over());
  EXPECT_EQ(pair.receiver.receiver.open.at(map.epoch).failure.code(), StatusCode::kUnavailable);
  pair.sender.session.Tick(heard + 3 * kTestSecondNs);
  EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kUnavailable);
  pair.ExpectQuiet();
}

TEST(TransferSession, DeadlinesAndLeasesEndTransfers) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap late = pair.Ask(4, 2 * kTestSecondNs);
  const ReceiveMap kept = pair.Ask(4);
  pair.Live(3 * kTestSecondNs);
  EXPECT_EQ(pair.receiver.receiver.open.at(late.epoch).failure.code(), StatusCode::kTimeout);
  EXPECT_EQ(pair.sender.over.count(late.epoch), 1U);
  EXPECT_EQ(pair.sender.over.count(kept.epoch), 0U);
  // A receiver that says heartbeats alone renews nothing.
  for (int i = 0; i < 70; ++i) {
    pair.now += kTestSecondNs / 2;
    pair.sender.session.Tick(pair.now);
    pair.receiver.session.receives().EndAll(Status(StatusCode::kCancelled, "forgotten"));
    pair.receiver.session.Tick(pair.now);
    pair.Exchange();
  }
  EXPECT_EQ(pair.sender.over.at(kept.epoch).code(), StatusCode::kTimeout);
  pair.ExpectQuiet();
}

// A receiver that reads rows, renews leases and confirms nothing, or next to nothing.
TEST(TransferSession, APeerThatConfirmsNoRowsIsNotWaitedForWithoutEnd) {
  for (const bool confirms_some : {false, true}) {
    SCOPED_TRACE(confirms_some);
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(40);
    pair.Live(100 * kTestSecondNs);  // a wait for the first row is none for the peer
    for (int64_t row = 0; row < 40; ++row) pair.SendAll(map.epoch, row, 1);
    uint64_t frame = pair.frames_of_receiver;
    TransferSession& session = pair.sender.session;
    const auto say = [&](TransferOpcode opcode, std::vector<std::byte> head) {
      session.Receive(MakeFrame(frame++, opcode, std::move(head)), pair.now);
    };
    const int64_t begin = pair.now;
    session.Tick(begin);
    uint64_t confirmed = 0;
    while (session.is_open() && pair.now < begin + 60 * kTestSecondNs) {
      while (session.has_output()) TakeOutput(&session, 1 << 20, pair.now);
      say(TransferOpcode::kLease, wire::Encode(wire::TransferLease{map.epoch}));
      if (confirms_some)
        say(TransferOpcode::kCredit, wire::Encode(wire::TransferCredit{++confirmed, false}));
      pair.now += kTestSecondNs;
      session.Tick(pair.now);
    }
    EXPECT_EQ(session.status().code(), StatusCode::kTimeout) << session.status().ToString();
    EXPECT_EQ(pair.now - begin, 30 * kTestSecondNs);
    EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kTimeout);
    EXPECT_EQ(pair.sender.window_left, pair.sender.window_bytes);
  }
}

// A side that would say less often that it lives says it as often as the other one has to hear it.
TEST(TransferSession, SignsOfLifeKeepToThePatienceOfThePeer) {
  TransferSession::Options sender = TestSessionOptions(false);
  sender.heartbeat_ns = 10 * kTestSecondNs;
  sender.dead_after_ns = 60 * kTestSecondNs;
  SessionPair pair(TestSessionOptions(true), sender);
  pair.Exchange();
  pair.Live(20 * kTestSecondNs);
  EXPECT_TRUE(pair.receiver.session.is_open());
  EXPECT_LE(pair.sender.session.next_deadline(), pair.now + kTestSecondNs);
  // Nor more often than a hundred times a second, whatever the other one says.
  TransferSession::Options hasty = TestSessionOptions(true);
  hasty.dead_after_ns = kNsPerMs;
  SessionPair other(hasty, TestSessionOptions(false));
  other.Exchange();
  EXPECT_GE(other.sender.session.next_deadline(), 10 * kNsPerMs);
}

// What a side holds for the other one is bounded here, whatever the other one allows.
TEST(TransferSession, AWindowBeyondThisSidesLimitIsNotUsed) {
  TransferSession::Options greedy = TestSessionOptions(true);
  greedy.window_bytes = int64_t{1} << 36;
  SessionPair pair(greedy, TestSessionOptions(false));
  pair.Exchange();
  EXPECT_EQ(pair.sender.window_bytes, wire::kPartBytesMax);
  EXPECT_EQ(pair.receiver.window_bytes, int64_t{1} << 20);

  TransferSession::Options small = TestSessionOptions(false);
  small.send_bytes = 4096;
  SessionPair other(greedy, small);
  other.Exchange();
  EXPECT_EQ(other.sender.window_bytes, 4096);
}

// The sender's lease is what ends a transfer, also where it is the shorter one.
TEST(TransferSession, RenewalsKeepToTheShorterLease) {
  TransferSession::Options sender = TestSessionOptions(false);
  sender.lease_ns = 4 * kTestSecondNs;
  SessionPair pair(TestSessionOptions(true), sender);
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.Live(20 * kTestSecondNs);
  EXPECT_EQ(pair.sender.over.count(map.epoch), 0U);
}

// A sender that names a lease of nothing, and reads no renewals: they would fill this side's
// memory.
TEST(TransferSession, RenewalsAreNoMoreThanAHundredInASecond) {
  TransferSession::Options hasty = TestSessionOptions(false);
  hasty.lease_ns = 1;
  SessionPair pair(TestSessionOptions(true), hasty);
  pair.Exchange();
  pair.Ask(4);
  TransferSession& session = pair.receiver.session;
  session.Tick(pair.now);
  EXPECT_GE(session.next_deadline(), pair.now + 10 * kNsPerMs);
  const int64_t until = pair.now + 2 * kTestSecondNs;  // it is not dead yet
  while (pair.now < until) session.Tick(pair.now += kNsPerMs);
  ASSERT_TRUE(session.is_open());
  size_t bytes = 0;
  while (session.has_output()) bytes += TakeOutput(&session, 1 << 20, pair.now).size();
  EXPECT_LE(bytes, 200 * (wire::kTransferHeaderBytes + sizeof(uint64_t)));
}

TEST(TransferSession, AReceiverThatLeavesTellsWhoWaitsForIt) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.receiver.session.receives().SetReceiver(nullptr);
  EXPECT_EQ(pair.receiver.receiver.open.at(map.epoch).failure.code(), StatusCode::kCancelled);
  pair.Exchange();
  EXPECT_EQ(pair.sender.over.at(map.epoch).code(), StatusCode::kCancelled);
  pair.ExpectQuiet();
}

// Another cache counts epochs from 1 on, too: late rows of the first one would count there.
TEST(TransferSession, AnEpochOfAReceiverThatHasLeftIsNotUsedAgain) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  ReceiveHalf& receives = pair.receiver.session.receives();
  receives.SetReceiver(nullptr);
  TestReceiver other;
  const ReceiveMap same = other.Reserve(4);
  ASSERT_EQ(same.epoch, map.epoch);
  receives.SetReceiver(&other);
  const Status refused = receives.Open({.job = {.id = 2, .tokens = {1}}, .map = same}, pair.now);
  EXPECT_EQ(refused.code(), StatusCode::kBadState);
  EXPECT_NE(refused.message().find("connect again"), std::string::npos);
  pair.Exchange();
  EXPECT_EQ(other.CompleteRows(same.epoch, 0), 0);
  const ReceiveMap next = other.Reserve(4);
  EXPECT_TRUE(receives.Open({.job = {.id = 3, .tokens = {1}}, .map = next}, pair.now).ok());
  receives.SetReceiver(nullptr);
}

TEST(TransferSession, SaltsTravelWhereNobodyElseReads) {
  for (const bool carries : {true, false}) {
    TransferSession::Options options[2] = {TestSessionOptions(true), TestSessionOptions(false)};
    for (TransferSession::Options& option : options) option.carries_salts = carries;
    SessionPair pair(options[0], options[1]);
    pair.Exchange();
    const ReceiveMap map = pair.receiver.receiver.Reserve(4);
    TransferRequest request{.job = {.id = 1, .tokens = {1}, .salt = "ann"}, .map = map};
    const Status status = pair.receiver.session.receives().Open(request, pair.now);
    EXPECT_EQ(status.code(), carries ? StatusCode::kOk : StatusCode::kBadArgument);
    request.job.salt = std::string(4097, 's');
    EXPECT_EQ(pair.receiver.session.receives().Open(request, pair.now).code(),
              carries ? StatusCode::kBadState : StatusCode::kTooLarge);
    pair.Exchange();
    EXPECT_EQ(pair.sender.sends.size(), carries ? 1U : 0U);
    if (carries) {
      EXPECT_EQ(pair.sender.sends.at(map.epoch).job.salt, "ann");
    } else {
      pair.sender.session.Receive(
          MakeFrame(2, TransferOpcode::kJob, wire::Encode(TransferJob{.id = 1, .salt = "ann"})),
          pair.now);
      EXPECT_EQ(pair.sender.session.status().code(), StatusCode::kCorrupt);
    }
  }
}

// What the peer would take for a breach is refused here: others' transfers go over the connection.
TEST(TransferSession, ARequestThatNoMessageCanSayIsRefusedAndTheConnectionStays) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.receiver.receiver.Reserve(4);
  const TransferRequest good{.job = {.id = 1, .tokens = {1, 2, 3}}, .map = map};
  const std::function<void(TransferRequest&)> changes[] = {
      [](TransferRequest& r) { r.job.deadline_ns = -1; },
      [](TransferRequest& r) { r.job.window = (int64_t{1} << 40) + 1; },
      [](TransferRequest& r) { r.job.sinks = -1; },
      [](TransferRequest& r) { r.map.count = 0; },
      [](TransferRequest& r) { r.map.first_position = -1; },
      [](TransferRequest& r) { r.map.kv_heads.clear(); },
      [](TransferRequest& r) { r.map.epoch = 0; }};
  for (const auto& change : changes) {
    TransferRequest request = good;
    change(request);
    EXPECT_EQ(pair.receiver.session.receives().Open(request, pair.now).code(),
              StatusCode::kBadArgument);
  }
  ASSERT_TRUE(pair.receiver.session.receives().Open(good, pair.now).ok());
  pair.Exchange();
  EXPECT_TRUE(pair.sender.session.is_open());
  EXPECT_EQ(pair.sender.sends.count(map.epoch), 1U);
}

// The queue takes memory in steps: many requests, so that each frame of one meets a step.
TEST(TransferSession, ARequestForWhichThereIsNoMemoryWasNotMade) {
  constexpr size_t kRequests = 24;
  SessionPair pair;
  pair.Exchange();
  ReceiveHalf& receives = pair.receiver.session.receives();
  for (size_t i = 0; i < kRequests; ++i) {
    const ReceiveMap map = pair.receiver.receiver.Reserve(1);
    const TransferRequest request{.job = {.id = map.epoch, .tokens = {1, 2, 3}}, .map = map};
    RefuseEach("Open", StatusCode::kOk,
               [&] { return GuardEntry([&] { return receives.Open(request, pair.now); }); });
  }
  EXPECT_EQ(receives.open_count(), kRequests);
  pair.Exchange();
  EXPECT_TRUE(pair.sender.session.is_open()) << pair.sender.session.status().ToString();
  EXPECT_EQ(pair.sender.sends.size(), kRequests);
}

TEST(TransferSession, ALoadIsToldAndNotWithEachChange) {
  SessionPair pair;
  pair.Exchange();
  const int64_t frames = 40;
  int64_t told = 0;
  TransferLoad last;
  for (int64_t i = 1; i <= frames; ++i) {
    pair.sender.session.SetLoad({.queued_tokens = i, .ns_per_token = 7});
    pair.now += 10 * kNsPerMs;
    pair.sender.session.Tick(pair.now);
    pair.Exchange();
    told += pair.receiver.load != last;
    last = pair.receiver.load;
  }
  EXPECT_EQ(told, frames / 5);
  pair.Live(kTestSecondNs);
  EXPECT_EQ(pair.receiver.load, (TransferLoad{frames, 7}));
  EXPECT_EQ(pair.sender.load, TransferLoad());
}

TEST(TransferSession, AnOpeningThatDoesNotComeEnds) {
  TestSession listener(TestSessionOptions(false, "a secret"));
  TakeOutput(&listener.session, 1 << 20, 0);
  listener.session.Tick(3 * kTestSecondNs - 1);
  EXPECT_TRUE(listener.session.status().ok());
  listener.session.Tick(3 * kTestSecondNs);
  EXPECT_EQ(listener.session.status().code(), StatusCode::kTimeout);
  TakeOutput(&listener.session, 1 << 20, 0);  // the goodbye
  EXPECT_TRUE(listener.session.is_over());
}

// Else some strangers would keep all peers out of a listener whose peers may be silent for an hour.
TEST(TransferSession, AStrangerDoesNotStayAsLongAsAPeerMayBeSilent) {
  TransferSession::Options patient = TestSessionOptions(false, "a secret");
  patient.dead_after_ns = 3600 * kTestSecondNs;
  TestSession listener(patient);
  TakeOutput(&listener.session, 1 << 20, 0);
  EXPECT_LE(listener.session.next_deadline(), 10 * kTestSecondNs);
  listener.session.Tick(10 * kTestSecondNs);
  EXPECT_EQ(listener.session.status().code(), StatusCode::kTimeout);
  // Nor one that does not take the reason.
  listener.session.Tick(20 * kTestSecondNs);
  EXPECT_TRUE(listener.session.is_over());
}

TEST(TransferSession, AStrangerGetsNoMemory) {
  for (const uint32_t claims : {2000U, 1U << 16, 1U << 20, 0xffffffffU}) {
    TestSession listener(TestSessionOptions(false, "a secret"));
    listener.session.Receive(MakeFrame(0, TransferOpcode::kHello, {}, claims), 0);
    EXPECT_EQ(listener.session.status().code(), StatusCode::kTooLarge);
    EXPECT_LE(listener.session.memory_bytes(), size_t{1} << 16);
  }
}

TEST(TransferSession, BreachesEndTheConnectionWithAReason) {
  const wire::Instance other{std::byte{9}};
  const wire::TransferPart part{
      .receiver = {std::byte{1}},
      .epoch = 1,
      .layer = 0,
      .part = {.first_row = 0, .count = 1, .first_head = 0, .head_count = kTestHeads},
      .number = 1,
      .bytes = kTestRowBytes};
  auto foreign = part;
  foreign.receiver = other;
  auto beyond = part;
  beyond.bytes = (int64_t{1} << 20) + 1;
  auto huge = part;
  huge.bytes = int64_t{1} << 40;
  auto wide = part;  // within the window, and more than one part of several rows has
  wide.part.count = 2;
  wide.bytes = int64_t{1} << 20;
  auto negative = part;
  negative.part.first_row = -1;
  const wire::TransferMap map{.map = {.epoch = 5, .slots = {}, .count = 1, .kv_heads = {2}}};
  auto nothing = map;
  nothing.map.count = 0;
  const struct {
    const char* name;
    TransferOpcode opcode;
    std::vector<std::byte> head;
  } breaches[] = {
      {"hello again", TransferOpcode::kHello, wire::Encode(wire::TransferHello{})},
      {"passport again", TransferOpcode::kPassport, {}},
      {"unknown", static_cast<TransferOpcode>(99), {}},
      {"another instance", TransferOpcode::kPart, wire::Encode(foreign)},
      {"beyond the window", TransferOpcode::kPart, wire::Encode(beyond)},
      {"a part of a terabyte", TransferOpcode::kPart, wire::Encode(huge)},
      {"a negative row", TransferOpcode::kPart, wire::Encode(negative)},
      {"a megabyte of two rows", TransferOpcode::kPart, wire::Encode(wide)},
      {"a credit of nothing", TransferOpcode::kCredit,
       wire::Encode(wire::TransferCredit{7, false})},
      {"a map of no tokens", TransferOpcode::kMap, wire::Encode(nothing)},
      {"a map of no job", TransferOpcode::kMap, wire::Encode(wire::TransferMap{3, map.map})},
      {"a cut job", TransferOpcode::kJob, std::vector<std::byte>(9)},
      {"a long heartbeat", TransferOpcode::kHeartbeat, std::vector<std::byte>(1)},
      {"a record of another", TransferOpcode::kRecord,
       wire::Encode(wire::TransferRecord{.receiver = other})},
  };
  for (const auto& breach : breaches) {
    SCOPED_TRACE(breach.name);
    SessionPair pair;
    pair.Exchange();
    ASSERT_TRUE(pair.receiver.is_open);
    // The sender's frames so far: hello and passport.
    pair.receiver.session.Receive(MakeFrame(2, breach.opcode, breach.head), pair.now);
    EXPECT_FALSE(pair.receiver.session.is_open());
    EXPECT_FALSE(pair.receiver.session.status().ok());
    EXPECT_EQ(pair.receiver.receiver.views, 0);
    pair.Carry(&pair.receiver, &pair.sender, 1 << 20, {});
    EXPECT_EQ(pair.sender.session.status().code(), StatusCode::kRemote);
  }
}

// The receiver's frame about the first part that is sent to it. Its hello, passport, streams, job
// and map come before: the first frame is 5.
void TellOfFirstPart(SessionPair* pair, uint64_t frame, bool wants_again) {
  const wire::TransferCredit credit{1, wants_again};
  pair->sender.session.Receive(MakeFrame(frame, TransferOpcode::kCredit, wire::Encode(credit)),
                               pair->now);
}

// A receiver that reads nothing and confirms all the same would have this side hold a whole prompt.
TEST(TransferSession, APartIsConfirmedAfterItWasSentAlone) {
  for (const bool wants_again : {false, true}) {
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(4);
    pair.SendAll(map.epoch, 0, 4);
    TakeOutput(&pair.sender.session, 1 << 20, pair.now);  // what announces the first part
    TellOfFirstPart(&pair, 5, wants_again);
    EXPECT_EQ(pair.sender.session.status().code(), StatusCode::kCorrupt);
    EXPECT_EQ(pair.sender.session.sends().parts_sent_again, 0);
  }
}

TEST(TransferSession, APartIsSentAgainTwiceAtMost) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap map = pair.Ask(4);
  pair.SendAll(map.epoch, 0, 4);
  while (pair.sender.session.has_output()) TakeOutput(&pair.sender.session, 1 << 20, pair.now);
  for (uint64_t frame = 5; frame < 8; ++frame) {
    EXPECT_TRUE(pair.sender.session.is_open()) << frame;
    TellOfFirstPart(&pair, frame, true);
  }
  EXPECT_EQ(pair.sender.session.status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(pair.sender.session.sends().parts_sent_again, 2);
}

TEST(TransferSession, PartsOfWhatWasNotAskedForGoNowhere) {
  SessionPair pair;
  pair.Exchange();
  const ReceiveMap hidden = pair.receiver.receiver.Reserve(4);  // of somebody else
  const ReceiveMap map = pair.Ask(4);
  ASSERT_TRUE(pair.sender.session.sends().OnMap({.map = hidden}, pair.now).ok());
  pair.SendAll(hidden.epoch, 0, 4);
  pair.sender.SendRecord(hidden.epoch, 0, 4);
  pair.SendAll(map.epoch, 0, 4);
  pair.sender.SendRecord(map.epoch, 0, 4);
  pair.Exchange();
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(hidden.epoch, 0), 0);
  EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 0), 4);
  EXPECT_EQ(pair.receiver.receiver.views, kTestLayers);
  EXPECT_EQ(pair.sender.window_left, pair.sender.window_bytes);
}

// ---- Several streams

SessionPair PairOfStreams(int64_t wanted, int64_t given, uint16_t version_here = 3,
                          uint16_t version_there = 3) {
  TransferSession::Options connector = TestSessionOptions(true, "a secret");
  connector.streams = wanted;
  connector.version = version_here;
  TransferSession::Options listener = TestSessionOptions(false, "a secret");
  listener.streams = given;
  listener.version = version_there;
  listener.token = {std::byte{7}};
  return SessionPair(connector, listener);
}

TEST(TransferSession, StreamsAreGrantedBeforeTheConnectionOpens) {
  const struct {
    int64_t wanted, given;
    uint16_t count;
  } cases[] = {{2, 16, 2}, {16, 16, 16}, {8, 3, 3}};
  for (const auto& each : cases) {
    SessionPair pair = PairOfStreams(each.wanted, each.given);
    pair.Exchange();
    for (const TestSession* side : {&pair.receiver, &pair.sender}) {
      EXPECT_FALSE(side->is_open);
      ASSERT_TRUE(side->granted.has_value());
      EXPECT_EQ(side->granted->count, each.count);
      EXPECT_EQ(side->granted->connection, wire::Instance{std::byte{2}});
      EXPECT_EQ(side->granted->key, wire::JoinKey({std::byte{7}}, "a secret"));
    }
    for (TestSession* side : {&pair.sender, &pair.receiver}) {
      side->session.OnJoined();
      pair.Exchange();
    }
    EXPECT_TRUE(pair.receiver.is_open && pair.sender.is_open);
    const ReceiveMap map = pair.Ask(4);
    pair.SendAll(map.epoch, 0, 4);
    pair.sender.SendRecord(map.epoch, 0, 4);
    pair.Exchange();
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 4);
    pair.receiver.receiver.CheckPages();
  }
}

TEST(TransferSession, OneStreamNeedsNoAnswer) {
  for (const auto& [wanted, given] : {std::pair(1, 16), std::pair(1, 1), std::pair(8, 1)}) {
    SessionPair pair = PairOfStreams(wanted, given);
    pair.Exchange();
    EXPECT_TRUE(pair.receiver.is_open && pair.sender.is_open) << wanted << " of " << given;
    EXPECT_FALSE(pair.receiver.granted || pair.sender.granted);
  }
}

// What an older Quire speaks; the frames of both are of one version.
TEST(TransferSession, VersionsAgreeOnTheLastThatBothSpeak) {
  for (const auto& [here, there] : {std::pair(2, 3), std::pair(3, 2), std::pair(2, 2)}) {
    SessionPair pair =
        PairOfStreams(8, 16, static_cast<uint16_t>(here), static_cast<uint16_t>(there));
    pair.Exchange();
    ASSERT_TRUE(pair.receiver.is_open && pair.sender.is_open) << here << " and " << there;
    EXPECT_FALSE(pair.receiver.granted || pair.sender.granted);
    const ReceiveMap map = pair.Ask(4);
    pair.SendAll(map.epoch, 0, 4);
    pair.sender.SendRecord(map.epoch, 0, 4);
    pair.Exchange();
    EXPECT_EQ(pair.receiver.receiver.CompleteRows(map.epoch, 1), 4);
  }
  wire::TransferHello hello{.version_first = 4,
                            .version_last = 5,
                            .heartbeat_ms = 1,
                            .dead_after_ms = 1,
                            .lease_ms = 1,
                            .window_bytes = 1};
  for (const uint16_t version : {1, 4}) {
    hello.version_first = hello.version_last = version;
    TestSession side(TestSessionOptions(true));
    side.session.Receive(MakeFrame(0, TransferOpcode::kHello, wire::Encode(hello)), 0);
    EXPECT_EQ(side.session.status().code(), StatusCode::kIncompatible);
    EXPECT_NE(side.session.status().message().find("version: 2 to 3 here"), std::string::npos)
        << side.session.status().ToString();
  }
}

// Bytes behind the frame that says it are of all streams, and none before it.
TEST(TransferSession, EachSideChangesToAllStreamsBehindItsOwnWord) {
  SessionPair pair = PairOfStreams(2, 2);
  pair.Exchange();
  TransferSession& connects = pair.receiver.session;
  TransferSession& listens = pair.sender.session;
  listens.OnJoined();
  EXPECT_TRUE(pair.sender.is_open);
  EXPECT_FALSE(pair.receiver.is_open);
  listens.SetLoad({.queued_tokens = 1, .ns_per_token = 1});
  pair.now = kTestSecondNs;
  listens.Tick(pair.now);  // a load is said, behind the word
  ASSERT_EQ(listens.Gather(8).size(), 1U) << "no frame goes with the one that ends plain bytes";
  EXPECT_FALSE(listens.TakeWritesStriped());
  connects.Receive(TakeOutput(&listens, wire::kTransferHeaderBytes - 1, pair.now), pair.now);
  EXPECT_FALSE(listens.TakeWritesStriped());
  const std::vector<std::byte> last = TakeOutput(&listens, 1 << 20, pair.now);
  EXPECT_EQ(last.size(), 1U);
  EXPECT_TRUE(listens.TakeWritesStriped());
  EXPECT_FALSE(listens.TakeWritesStriped()) << "once";
  EXPECT_FALSE(listens.TakeReadsStriped());
  // The connecting side has not seen its streams yet: what is striped cannot be read.
  connects.Receive(last, pair.now);
  EXPECT_FALSE(pair.receiver.is_open);
  EXPECT_FALSE(connects.accepts_input());
  EXPECT_FALSE(connects.TakeReadsStriped());
  connects.OnJoined();
  EXPECT_TRUE(pair.receiver.is_open);
  EXPECT_TRUE(connects.accepts_input());
  EXPECT_TRUE(connects.TakeReadsStriped());
  const std::vector<std::byte> answer = TakeOutput(&connects, 1 << 20, pair.now);
  EXPECT_TRUE(connects.TakeWritesStriped());
  listens.Receive(answer, pair.now);
  EXPECT_TRUE(listens.TakeReadsStriped());
  pair.Exchange();
  EXPECT_EQ(pair.receiver.load.queued_tokens, 1);
  EXPECT_TRUE(connects.is_open() && listens.is_open());
}

TEST(TransferSession, StreamsThatDoNotComeEndTheOpening) {
  SessionPair pair = PairOfStreams(4, 4);
  pair.Exchange();
  for (TestSession* side : {&pair.receiver, &pair.sender}) {
    EXPECT_LE(side->session.next_deadline(), 3 * kTestSecondNs);
    side->session.Tick(3 * kTestSecondNs);
    EXPECT_EQ(side->session.status().code(), StatusCode::kTimeout);
    EXPECT_NE(side->session.status().message().find("not all streams"), std::string::npos);
    side->session.OnJoined();  // too late
    EXPECT_FALSE(side->is_open);
  }
}

// Which side each breach is made to, when it waits for streams, and in which frame.
TEST(TransferSession, BreachesWhereStreamsBeginEndTheConnection) {
  wire::TransferStreams many{.count = 5};
  wire::TransferStreams drawn{.count = 2};
  drawn.token[0] = std::byte{1};
  const struct {
    const char* name;
    bool is_to_listener;
    bool has_joined;
    TransferOpcode opcode;
    std::vector<std::byte> head;
  } cases[] = {
      {"rows before the streams", true, false, TransferOpcode::kLease,
       wire::Encode(wire::TransferLease{1})},
      {"streams twice", true, false, TransferOpcode::kStreams, wire::Encode(drawn)},
      {"a listener is told first", true, false, TransferOpcode::kStriped, {}},
      {"not striped", true, true, TransferOpcode::kHeartbeat, {}},
      {"striped with fields", true, true, TransferOpcode::kStriped, std::vector<std::byte>(1)},
      {"a join on a connection", true, true, TransferOpcode::kJoin,
       wire::Encode(wire::TransferJoin{})},
      {"granted twice", false, false, TransferOpcode::kStreams, wire::Encode(many)},
      {"a word before all streams", false, false, TransferOpcode::kLoad,
       wire::Encode(TransferLoad{})},
  };
  for (const auto& each : cases) {
    SCOPED_TRACE(each.name);
    SessionPair pair = PairOfStreams(4, 4);
    pair.Exchange();
    if (each.has_joined) {
      pair.sender.session.OnJoined();
      pair.Carry(&pair.sender, &pair.receiver, 1 << 20, {});
    }
    TestSession& side = each.is_to_listener ? pair.sender : pair.receiver;
    // Hello, proof, passport and streams come before.
    side.session.Receive(MakeFrame(4, each.opcode, each.head), pair.now);
    EXPECT_EQ(side.session.status().code(), StatusCode::kCorrupt)
        << side.session.status().ToString();
    EXPECT_FALSE(side.session.TakeReadsStriped());
  }
}

// In place of the streams that were asked for, or of the question.
TEST(TransferSession, StreamsThatNobodyAskedForEndTheConnection) {
  wire::TransferStreams drawn{.count = 2};
  drawn.token[0] = std::byte{1};
  for (const bool is_to_listener : {false, true}) {
    SessionPair pair = PairOfStreams(4, 4);
    TestSession& from = is_to_listener ? pair.receiver : pair.sender;
    TestSession& to = is_to_listener ? pair.sender : pair.receiver;
    // Three frames each: the rest of what the connecting side says is not carried.
    for (int i = 0; i < 3; ++i) {
      to.session.Receive(TakeOutput(&from.session, 1 << 20, 0), 0);
      from.session.Receive(TakeOutput(&to.session, 1 << 20, 0), 0);
    }
    ASSERT_TRUE(to.session.status().ok() && !to.is_open);
    const wire::TransferStreams wrong =
        is_to_listener ? drawn : wire::TransferStreams{.count = 5, .token = {std::byte{1}}};
    to.session.Receive(MakeFrame(3, TransferOpcode::kStreams, wire::Encode(wrong)), 0);
    EXPECT_EQ(to.session.status().code(), StatusCode::kCorrupt) << to.session.status().ToString();
    EXPECT_FALSE(to.granted.has_value());
  }
}

// Bytes of both directions that are lost, repeated, moved, changed or cut off.
TEST(TransferSession, NoFaultOfTheNetworkCountsAWrongByte) {
  constexpr int kSessions = 4000;
  ReportFigure("sessions", kSessions);
  int completed = 0;
  int ended = 0;
  int64_t again = 0;
  for (int i = 0; i < kSessions; ++i) {
    SCOPED_TRACE(i);
    RandomSequence random(SoakSeed(21), static_cast<uint64_t>(i));
    SessionPair pair;
    pair.Exchange();
    const ReceiveMap map = pair.Ask(8);
    for (int64_t row = 0; row < 8; row += 2) {
      pair.SendAll(map.epoch, row, 2);
      pair.sender.SendRecord(map.epoch, row, 2);
    }
    std::vector<std::byte> held;
    pair.Exchange(1 << 20, [&](std::vector<std::byte>& frame) {
      switch (random.Below(40)) {
        case 0:
        case 1:
        case 2:
          frame[static_cast<size_t>(random.Below(static_cast<int64_t>(frame.size())))] ^=
              static_cast<std::byte>(1 << random.Below(8));
          break;
        case 3:
          frame.insert(frame.end(), frame.begin(), frame.end());
          break;
        case 4:
          held.swap(frame);
          break;
        case 5:
          frame.resize(static_cast<size_t>(random.Below(static_cast<int64_t>(frame.size()))));
          break;
        default:
          break;
      }
      if (!held.empty() && random.Below(2) == 0) {
        frame.insert(frame.end(), held.begin(), held.end());
        held.clear();
      }
    });
    pair.receiver.receiver.CheckPages();
    again += pair.sender.session.sends().parts_sent_again;
    const bool all = pair.receiver.receiver.CompleteRows(map.epoch, 0) == 8 &&
                     pair.receiver.receiver.CompleteRows(map.epoch, 1) == 8;
    completed += all;
    // What did not come is told: at once, or when the deadline of a sign of life is over.
    pair.now += 3 * kTestSecondNs;
    pair.receiver.session.Tick(pair.now);
    pair.sender.session.Tick(pair.now);
    pair.sender.session.Lose(Status(StatusCode::kUnavailable, "cut"));
    if (!all) {
      EXPECT_FALSE(pair.receiver.receiver.open.at(map.epoch).failure.ok());
      ++ended;
    }
    EXPECT_EQ(pair.sender.window_left, pair.sender.window_bytes);
    EXPECT_TRUE(pair.sender.sends.empty());
  }
  EXPECT_GT(completed, kSessions / 20);
  EXPECT_GT(ended, kSessions / 20);
  EXPECT_GT(again, kSessions / 40);
}

}  // namespace
}  // namespace quire
