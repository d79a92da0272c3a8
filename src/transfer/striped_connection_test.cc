// Connections of several streams: their opening at a listener, rows over them, and peers that bring
// no streams, wrong ones, or lose one.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/soak.h"
#include "transfer/peer_connection.h"
#include "transfer/stream_joins.h"
#include "transfer/testing/faulty_channel.h"
#include "transfer/testing/listening.h"
#include "transfer/testing/test_channels.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

int64_t Soon() { return MachineTime()->SteadyNs() + kMinuteNs; }

TransferPeerOptions PatientOptions(int64_t streams, const std::string& secret = "a secret") {
  TransferPeerOptions options;
  options.secret = secret;
  options.passport = TestPassport();
  options.connect_timeout = options.dead_after = options.send_wait =
      std::chrono::nanoseconds(kMinuteNs);
  options.window_bytes = int64_t{1} << 20;
  options.streams = streams;
  return options;
}

TransferSession::Options SideOptions(bool is_connector, int64_t streams) {
  TransferSession::Options options = TestSessionOptions(is_connector, "a secret");
  options.dead_after_ns = kMinuteNs;
  options.streams = streams;
  return options;
}

// `rows` rows from one end to the other. The receiver stays set.
Status MoveRows(TransferPeer* from, TransferPeer* to, TestReceiver* receiver, int64_t rows) {
  const std::shared_ptr<Clock> clock = MachineTime();
  const ReceiveMap map = receiver->Reserve(rows);
  QUIRE_RETURN_IF_ERROR(to->Request({}, map));
  QUIRE_RETURN_IF_ERROR(from->NextRequest(*clock, Soon()).status());
  for (int64_t row = 0; row < rows; row += 500)
    QUIRE_RETURN_IF_ERROR(SendRows(from, map.epoch, row, std::min<int64_t>(500, rows - row)));
  return receiver->WaitReceived(map.epoch, rows, *clock, Soon());
}

void ExpectRowsMove(TransferPeer* from, TransferPeer* to, int64_t rows = 5000) {
  TestReceiver receiver;
  ASSERT_TRUE(to->SetReceiver(&receiver).ok());
  EXPECT_EQ(MoveRows(from, to, &receiver, rows).ToString(), "Ok");
  receiver.CheckPages();
  EXPECT_EQ(from->stats().parts_sent_again, 0);
  EXPECT_TRUE(to->SetReceiver(nullptr).ok());
}

TEST(StripedConnection, RowsGoBothWaysOverAnyNumberOfStreams) {
  for (const char* secret : {"", "a secret"}) {
    // The places of a listener are for connections, whatever the number of their streams.
    const Listening listening(PatientOptions(1, secret), "127.0.0.1:0", /*peers_max=*/1);
    for (const int64_t streams : {1, 2, 3, 8, 16}) {
      SCOPED_TRACE(streams);
      const auto here =
          TransferPeer::Connect(listening.listener->endpoint(), PatientOptions(streams, secret));
      ASSERT_TRUE(here.ok()) << here.status().ToString();
      const std::shared_ptr<TransferPeer> there = listening.Accept();
      ASSERT_NE(there, nullptr);
      EXPECT_EQ((*here)->stats().streams, streams);
      EXPECT_EQ(there->stats().streams, streams);
      ASSERT_NO_FATAL_FAILURE(ExpectRowsMove(there.get(), here->get()));
      ASSERT_NO_FATAL_FAILURE(ExpectRowsMove(here->get(), there.get()));
      // The other side learns why, over all of them.
      (*here)->Close();
      ExpectSays(there->NextRequest(*MachineTime(), Soon()).status(), StatusCode::kRemote,
                 "closed");
    }
    EXPECT_EQ(listening.listener->refused(), 0);
  }
}

TEST(StripedConnection, StreamsOutOfRangeAreRefused) {
  for (const int64_t streams : {0, 17, -1}) {
    const TransferPeerOptions options = PatientOptions(streams);
    ExpectSays(TransferPeer::Connect("127.0.0.1:1", options).status(), StatusCode::kBadArgument,
               "streams is " + std::to_string(streams));
    ExpectSays(TransferListener::Start({.peer = options}).status(), StatusCode::kBadArgument,
               "streams is " + std::to_string(streams));
  }
}

TEST(StripedConnection, SharedMemoryHasOne) {
  const std::string path = "/tmp/quire-streams-" + std::to_string(::getpid()) + ".sock";
  TransferListenerOptions options{.endpoint = "unix:" + path, .peer = PatientOptions(4)};
  const auto listener = TransferListener::Start(options).value();
  const auto here = TransferPeer::Connect(listener->endpoint(), options.peer);
  ASSERT_TRUE(here.ok()) << here.status().ToString();
  EXPECT_EQ((*here)->stats().streams, 1);
}

// An older Quire on either side: one stream, and rows as ever.
TEST(StripedConnection, AnOlderPeerHasOne) {
  const Listening listening(PatientOptions(1));
  TransferSession::Options old = SideOptions(true, 4);
  old.version = 2;
  const auto here =
      PeerConnection::Start(StreamChannel(listening.Stranger()), "test", old, nullptr).value();
  ASSERT_TRUE(here->WaitOpen(Soon()).ok()) << here->status().ToString();
  const std::shared_ptr<TransferPeer> there = listening.Accept();
  ASSERT_NE(there, nullptr);
  EXPECT_EQ(there->stats().streams, 1);
  ExpectRowsMove(there.get(), here.get());

  Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
  const Socket listener = Socket::Listen(&endpoint).value();
  old.is_connector = false;
  std::shared_ptr<PeerConnection> older;
  std::thread accepts([&] {
    PollEntry entry{.fd = listener.fd(), .wants_read = true};
    PollSockets(std::span(&entry, 1), kMinuteNs);
    older = PeerConnection::Start(StreamChannel(listener.Accept().value()), "test", old, nullptr)
                .value();
  });
  const auto newer = TransferPeer::Connect(endpoint.ToString(), PatientOptions(4));
  accepts.join();
  ASSERT_TRUE(newer.ok()) << newer.status().ToString();
  EXPECT_EQ((*newer)->stats().streams, 1);
  ExpectRowsMove(older.get(), newer->get());
}

// ---- At a listener: those that bring nothing, or what is not theirs

// A connecting side without a thread, which the test carries to where it waits for its streams.
struct HandConnector {
  explicit HandConnector(Socket given)
      : socket(std::move(given)), side(SideOptions(true, 3), MachineTime()->SteadyNs()) {}

  void CarryUntil(const std::function<bool()>& is_done) {
    while (!is_done()) {
      FrameRead read = side.session.BeginRead();
      const size_t count = socket.Read(read.places).value();
      if (count > 0) {
        read.Check(count);
        side.session.OnRead(read, MachineTime()->SteadyNs());
      }
      while (side.session.has_output()) {
        const size_t written = socket.Write(side.session.Gather(1)).value();
        if (written == 0) break;
        side.session.Sent(written, MachineTime()->SteadyNs());
      }
      if (count > 0 || is_done()) continue;
      PollEntry entry{.fd = socket.fd(), .wants_read = true};
      PollSockets(std::span(&entry, 1), kMinuteNs);
    }
  }

  const Socket socket;
  TestSession side;
};

// Brings a stream over a socket, up to where it has said all that it says.
void Join(const Socket& socket, const TransferSession::StreamsGranted& granted, uint16_t stream) {
  StreamJoin join(granted, stream);
  while (!join.has_heard()) {
    FrameRead read = join.BeginRead();
    const size_t count = socket.Read(read.places).value();
    if (count == 0) {
      PollEntry entry{.fd = socket.fd(), .wants_read = true};
      PollSockets(std::span(&entry, 1), kMinuteNs);
      continue;
    }
    read.Check(count);
    ASSERT_TRUE(join.OnRead(read).ok());
  }
  while (join.has_output()) join.Sent(socket.Write(join.Gather()).value());
}

constexpr const char* kNobodyWaits = "not one that a connection waits for";

TEST(StripedConnection, NoStrangerBringsAStream) {
  Listening listening(PatientOptions(1));
  HandConnector known(listening.Stranger());
  known.CarryUntil([&] { return known.side.granted.has_value(); });
  const TransferSession::StreamsGranted granted = *known.side.granted;
  EXPECT_EQ(granted.count, 3);
  TransferSession::StreamsGranted wrong = granted;
  wrong.key[0] = static_cast<char>(wrong.key[0] ^ 1);
  std::vector<Socket> sockets;
  const auto join = [&](const TransferSession::StreamsGranted& as, uint16_t stream) {
    sockets.push_back(listening.Stranger());
    Join(sockets.back(), as, stream);
  };
  join(wrong, 1);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, kNobodyWaits);
  wrong = granted;
  wrong.connection[5] ^= std::byte{1};
  join(wrong, 1);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, kNobodyWaits);
  join(granted, 0);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, "number 0 of 3");
  join(granted, 3);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, "number 3 of 3");
  join(granted, 2);
  HandConnector another(listening.Stranger());
  another.CarryUntil([&] { return another.side.granted.has_value(); });
  wrong = *another.side.granted;
  wrong.connection = granted.connection;
  join(wrong, 1);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, kNobodyWaits);
  // None of this did the connection anything: its last stream opens it, and one more is none of it.
  join(granted, 1);
  const std::shared_ptr<TransferPeer> open = listening.Accept();
  ASSERT_NE(open, nullptr);
  EXPECT_EQ(open->stats().streams, 3);
  join(granted, 1);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, kNobodyWaits);
  EXPECT_EQ(open->status().ToString(), "Ok");
}

// The second one of a number: which of two is the first, the listener decides.
TEST(StripedConnection, AStreamJoinsOnce) {
  Listening listening(PatientOptions(1));
  HandConnector known(listening.Stranger());
  known.CarryUntil([&] { return known.side.granted.has_value(); });
  const Socket sockets[] = {listening.Stranger(), listening.Stranger()};
  for (const Socket& socket : sockets) Join(socket, *known.side.granted, 1);
  ExpectSays(listening.Refusal(), StatusCode::kRemote, "has joined");
  const Socket last = listening.Stranger();
  Join(last, *known.side.granted, 2);
  EXPECT_NE(listening.Accept(), nullptr);
}

TEST(StripedConnection, APeerThatBringsNoStreamsIsRefusedInTime) {
  TransferPeerOptions options = PatientOptions(1);
  options.dead_after = std::chrono::milliseconds(500);
  Listening listening(options);
  Status refusal;
  // Where the machine is slow, the opening itself takes the time: then it is tried again.
  while (refusal.message().find("not all streams") == std::string_view::npos) {
    HandConnector known(listening.Stranger());
    known.CarryUntil([&] { return known.side.granted || !known.side.session.status().ok(); });
    refusal = listening.Refusal();
    EXPECT_EQ(refusal.code(), StatusCode::kTimeout) << refusal.ToString();
  }
}

// Each has its few moments; the connection that waits for its streams keeps its place.
TEST(StripedConnection, StrangersKeepNoStreamOut) {
  const Listening listening(PatientOptions(1), "127.0.0.1:0", /*peers_max=*/2);
  std::vector<Socket> strangers;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 12; ++i) strangers.push_back(listening.Stranger());
    const auto peer = TransferPeer::Connect(listening.listener->endpoint(), PatientOptions(4));
    ASSERT_TRUE(peer.ok()) << peer.status().ToString();
    EXPECT_EQ((*peer)->stats().streams, 4);
    const std::shared_ptr<TransferPeer> there = listening.Accept();
    ASSERT_NE(there, nullptr);
    ExpectRowsMove(there.get(), peer->get(), 100);
  }
}

// ---- At a connecting side: a listener that grants streams and does not take them

class HandListener {
 public:
  HandListener() : socket_(Socket::Listen(&endpoint_).value()) {}

  std::string endpoint() const { return endpoint_.ToString(); }
  Socket Accept() const {
    PollEntry entry{.fd = socket_.fd(), .wants_read = true};
    PollSockets(std::span(&entry, 1), kMinuteNs);
    return socket_.Accept().value();
  }
  std::shared_ptr<PeerConnection> AcceptPeer(int64_t streams) const {
    return PeerConnection::Start(StreamChannel(Accept()), "test", SideOptions(false, streams),
                                 nullptr)
        .value();
  }

 private:
  Endpoint endpoint_ = Endpoint::Parse("127.0.0.1:0").value();
  const Socket socket_;
};

TEST(StripedConnection, AListenerThatTakesNoStreamsIsNotWaitedForWithoutEnd) {
  const HandListener listener;
  TransferPeerOptions options = PatientOptions(3);
  options.connect_timeout = std::chrono::milliseconds(300);
  std::shared_ptr<PeerConnection> there;
  std::thread accepts([&] { there = listener.AcceptPeer(3); });
  const Status status = TransferPeer::Connect(listener.endpoint(), options).status();
  accepts.join();
  EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.ToString();
}

TEST(StripedConnection, AListenerThatClosesAStreamIsAnErrorWithItsName) {
  const HandListener listener;
  std::shared_ptr<PeerConnection> there;
  std::thread accepts([&] {
    there = listener.AcceptPeer(3);
    for (int i = 0; i < 2; ++i) listener.Accept();
  });
  const Status status = TransferPeer::Connect(listener.endpoint(), PatientOptions(3)).status();
  accepts.join();
  ExpectSays(status, StatusCode::kUnavailable, "further streams of " + listener.endpoint());
  EXPECT_FALSE(there->NextRequest(*MachineTime(), Soon()).ok());
}

// ---- Both ends in the test's hands, the connecting side first: any channels as streams

struct StripedPair : StreamPairs {
  explicit StripedPair(uint16_t count, int buffer = 0, const StreamWrap& wrap = {},
                       int64_t dead_after_ns = kMinuteNs)
      : StreamPairs(MakeStreams(count, buffer, wrap)) {
    std::shared_ptr<PeerConnection>* const ends[] = {&to, &from};
    for (size_t side = 0; side < 2; ++side) {
      TransferSession::Options options = SideOptions(side == 0, count);
      options.dead_after_ns = dead_after_ns;
      options.send_wait_ns = kMinuteNs;
      *ends[side] =
          PeerConnection::Start(std::move(streams[side][0]), "test", options, nullptr).value();
    }
    EXPECT_TRUE(to->SetReceiver(&receiver).ok());
  }
  ~StripedPair() { EXPECT_TRUE(to->SetReceiver(nullptr).ok()); }

  // The second side's first: the other one may read its word before it has its streams.
  Status Open() {
    for (const size_t side : {1, 0}) {
      PeerConnection& end = side == 0 ? *to : *from;
      QUIRE_RETURN_IF_ERROR(end.WaitStreams(Soon()).status());
      for (size_t i = 1; i < streams[side].size(); ++i)
        end.TakeStream(static_cast<uint16_t>(i), std::move(streams[side][i]));
    }
    QUIRE_RETURN_IF_ERROR(from->WaitOpen(Soon()));
    return to->WaitOpen(Soon());
  }
  // What came before a failure is right.
  Status Move(int64_t rows) { return MoveRows(from.get(), to.get(), &receiver, rows); }

  TestReceiver receiver;
  std::shared_ptr<PeerConnection> to;
  std::shared_ptr<PeerConnection> from;
};

TEST(StripedConnection, RowsAreExactWithSocketsOfAFewBytes) {
  for (const uint16_t count : {2, 3, 8}) {
    for (const int buffer : {1, 16384}) {
      SCOPED_TRACE(std::to_string(count) + " streams of " + std::to_string(buffer));
      StripedPair pair(count, buffer);
      ASSERT_EQ(pair.Open().ToString(), "Ok");
      EXPECT_EQ(pair.to->stats().streams, count);
      EXPECT_EQ(pair.Move(2000).ToString(), "Ok");
      pair.receiver.CheckPages();
    }
  }
}

// Any of them, in the middle of a prompt or of nothing, on either side.
TEST(StripedConnection, ALostStreamIsALostConnection) {
  for (const size_t lost : {0, 1, 2}) {
    for (const bool is_idle : {false, true}) {
      for (const size_t side : {0, 1}) {
        SCOPED_TRACE(std::to_string(lost) + (is_idle ? " idle" : "") + std::to_string(side));
        StripedPair pair(3);
        ASSERT_EQ(pair.Open().ToString(), "Ok");
        const ReceiveMap map = pair.receiver.Reserve(20'000);
        ASSERT_TRUE(pair.to->Request({}, map).ok());
        ASSERT_TRUE(pair.from->NextRequest(*MachineTime(), Soon()).ok());
        Status sent;  // half of them: the others never come
        std::thread sender([&] {
          for (int64_t row = 0; row < 10'000 && !is_idle && sent.ok(); row += 500)
            sent = SendRows(pair.from.get(), map.epoch, row, 500);
        });
        if (!is_idle) {
          EXPECT_TRUE(pair.receiver.WaitReceived(map.epoch, 1000, *MachineTime(), Soon()).ok());
        }
        ASSERT_EQ(::shutdown(pair.fds[side][lost], SHUT_RDWR), 0);
        const Status status = pair.receiver.WaitReceived(map.epoch, 20'000, *MachineTime(), Soon());
        sender.join();
        EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
        EXPECT_FALSE(pair.from->NextRequest(*MachineTime(), Soon()).ok());
        // Returns when the connection's thread has let go of what it was about to store.
        ASSERT_TRUE(pair.to->SetReceiver(nullptr).ok());
        pair.receiver.CheckPages();
        EXPECT_EQ(pair.receiver.staging().held, 0);
      }
    }
  }
}

TEST(StripedConnection, NoFaultOfAStreamCountsAWrongByte) {
  constexpr int kPairs = 48;
  const FaultRates kinds[] = {{.change = 8}, {.repeat = 12},
                              {.move = 12},  {.cut = 12},
                              {.delay = 2},  {.change = 40, .repeat = 80, .move = 80, .cut = 80}};
  int complete = 0;
  int failed = 0;
  for (int i = 0; i < kPairs; ++i) {
    SCOPED_TRACE(i);
    const auto round = static_cast<size_t>(i);
    const FaultRates& rates = kinds[round % std::size(kinds)];
    const auto count = static_cast<uint16_t>(2 + round / std::size(kinds) % 3);
    // Each stream has faults of its own.
    StripedPair pair(
        count, 0,
        [&](std::unique_ptr<ByteChannel> inner, size_t number) {
          return std::make_unique<FaultyChannel>(std::move(inner), rates,
                                                 SoakSeed(100 * round + number));
        },
        kTestSecondNs / 2);
    Status status = pair.Open();
    // A byte in the wrong place may leave a side that waits for more: it says when it is over.
    if (status.ok()) status = pair.Move(2000);
    complete += status.ok();
    failed += !status.ok();
    pair.from->Close();
    pair.to->Close();
    pair.receiver.CheckPages();
  }
  EXPECT_GT(complete, kPairs / 10);
  EXPECT_GT(failed, kPairs / 10);
}

}  // namespace
}  // namespace quire
