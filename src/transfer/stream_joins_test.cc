// Streams that join their connection, and peers that may bring none.
#include "transfer/stream_joins.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

using StreamsGranted = TransferSession::StreamsGranted;

StreamsGranted Granted(uint8_t connection, uint16_t count, const std::string& key) {
  return {.connection = {std::byte{connection}}, .key = key, .count = count};
}

wire::TransferHello HelloOf(uint8_t socket) {
  return {.heartbeat_ms = 1,
          .dead_after_ms = 1,
          .lease_ms = 1,
          .window_bytes = 1,
          .nonce = {std::byte{socket}}};
}

wire::TransferJoin JoinOf(const StreamsGranted& granted, uint16_t stream,
                          const wire::TransferHello& hello) {
  return {.connection = granted.connection,
          .stream = stream,
          .proof = wire::JoinProof(granted.key, granted.connection, stream, hello)};
}

void ExpectRefused(const Status& status, const std::string& why) {
  EXPECT_EQ(status.code(), StatusCode::kRemote) << status.ToString();
  EXPECT_NE(status.message().find(why), std::string_view::npos) << status.ToString();
}

struct Book {
  StreamBook::Entry Expect(const StreamsGranted& granted) {
    return book->Expect(granted, [this](uint16_t stream, std::unique_ptr<ByteChannel>) {
      taken.push_back(stream);
    });
  }
  Status Check(const wire::TransferJoin& join, const wire::TransferHello& hello) {
    return book->Check(join, hello).status();
  }

  const std::shared_ptr<StreamBook> book = std::make_shared<StreamBook>();
  std::vector<uint16_t> taken;
};

constexpr const char* kNobodyWaits = "not one that a connection waits for";

TEST(StreamBook, EachStreamOfAConnectionJoinsOnce) {
  Book book;
  const StreamsGranted granted = Granted(1, 3, "key");
  const StreamBook::Entry entry = book.Expect(granted);
  EXPECT_EQ(book.book->due(), 2U);
  for (const uint16_t stream : {2, 1}) {
    const auto claim = book.book->Check(JoinOf(granted, stream, HelloOf(7)), HelloOf(7));
    ASSERT_TRUE(claim.ok()) << claim.status().ToString();
    ExpectRefused(book.Check(JoinOf(granted, stream, HelloOf(8)), HelloOf(8)), "has joined");
    claim->Deliver(nullptr);
    EXPECT_EQ(book.taken.back(), stream);
  }
  EXPECT_EQ(book.taken, (std::vector<uint16_t>{2, 1}));
  EXPECT_EQ(book.book->due(), 0U);
}

TEST(StreamBook, NumbersThatTheConnectionHasNotAreRefused) {
  Book book;
  const StreamsGranted granted = Granted(1, 3, "key");
  const StreamBook::Entry entry = book.Expect(granted);
  for (const uint16_t stream : {0, 3, 15, 16, 65535})
    ExpectRefused(book.Check(JoinOf(granted, stream, HelloOf(7)), HelloOf(7)), "of 3");
  EXPECT_EQ(book.book->due(), 2U);
}

// A wrong token, another connection's, another stream's, another socket's, and one bit less.
TEST(StreamBook, AProofIsOfOneStreamOfOneConnectionOnOneSocket) {
  Book book;
  const StreamsGranted first = Granted(1, 3, "key");
  const StreamsGranted second = Granted(2, 3, "another key");
  const StreamBook::Entry entries[] = {book.Expect(first), book.Expect(second)};
  const wire::TransferJoin right = JoinOf(first, 1, HelloOf(7));
  std::vector<wire::TransferJoin> wrong(5, right);
  wrong[0].proof = JoinOf(Granted(1, 3, "no key"), 1, HelloOf(7)).proof;
  wrong[1].connection = second.connection;
  wrong[2].stream = 2;
  wrong[3].proof = JoinOf(first, 1, HelloOf(8)).proof;
  wrong[4].proof.bytes[31] ^= 1;
  for (const wire::TransferJoin& join : wrong)
    ExpectRefused(book.Check(join, HelloOf(7)), kNobodyWaits);
  EXPECT_EQ(book.book->due(), 4U);
  EXPECT_TRUE(book.Check(right, HelloOf(7)).ok());
}

TEST(StreamBook, NothingJoinsAfterTheConnectionHasLeft) {
  Book book;
  const StreamsGranted granted = Granted(1, 3, "key");
  StreamBook::Entry entry = book.Expect(granted);
  const auto claim = book.book->Check(JoinOf(granted, 1, HelloOf(7)), HelloOf(7));
  ASSERT_TRUE(claim.ok());
  entry = StreamBook::Entry();
  EXPECT_EQ(book.book->due(), 0U);
  ExpectRefused(book.Check(JoinOf(granted, 2, HelloOf(7)), HelloOf(7)), kNobodyWaits);
  claim->Deliver(nullptr);  // it was on its way
  EXPECT_EQ(book.taken, std::vector<uint16_t>{1});
}

std::vector<std::byte> FrameOf(wire::TransferOpcode opcode, const std::vector<std::byte>& head) {
  std::vector<std::byte> frame(wire::kTransferHeaderBytes);
  wire::EncodeTransferHeader({.opcode = opcode,
                              .head_bytes = static_cast<uint32_t>(head.size()),
                              .head_crc = Crc32c(head.data(), head.size())},
                             std::span(frame).first<wire::kTransferHeaderBytes>());
  frame.insert(frame.end(), head.begin(), head.end());
  return frame;
}

// In pieces of one byte. What it does not read is left in `bytes`.
Status Hear(StreamJoin* join, std::vector<std::byte>* bytes) {
  while (!bytes->empty() && !join->has_heard()) {
    FrameRead read = join->BeginRead();
    read.places.front().front() = bytes->front();
    bytes->erase(bytes->begin());
    read.Check(1);
    QUIRE_RETURN_IF_ERROR(join->OnRead(read));
  }
  return Status();
}

std::vector<std::byte> SaidBy(StreamJoin* join) {
  std::vector<std::byte> bytes;
  while (join->has_output()) {
    const std::span<const std::byte> span = join->Gather().front();
    bytes.insert(bytes.end(), span.begin(), span.end());
    join->Sent(span.size());
  }
  return bytes;
}

// Both sides' machines, from the grant to the stream: with a secret and without.
TEST(StreamJoin, AListenerTakesTheStreamThatItHasAllowed) {
  for (const char* secret : {"", "a secret"}) {
    Book book;
    StreamsGranted granted = Granted(2, 4, wire::JoinKey({std::byte{5}}, secret));
    const StreamBook::Entry entry = book.Expect(granted);
    TestSession listener(TestSessionOptions(false, secret));
    listener.book = book.book;
    std::vector<std::byte> hello = TakeOutput(&listener.session, 1 << 20, 0);
    hello.push_back(std::byte{42});  // of the connection: not to be read
    StreamJoin join(granted, 3);
    EXPECT_FALSE(join.has_output());
    ASSERT_TRUE(Hear(&join, &hello).ok());
    EXPECT_EQ(hello, std::vector<std::byte>{std::byte{42}});
    ASSERT_TRUE(join.has_heard());
    listener.session.Receive(SaidBy(&join), 0);
    EXPECT_TRUE(listener.session.is_joined()) << listener.session.status().ToString();
    EXPECT_FALSE(listener.session.accepts_input());
    EXPECT_FALSE(listener.session.has_output());
    EXPECT_EQ(listener.session.next_deadline(), kNever);
    // The secret is part of the proof.
    granted.key = wire::JoinKey({std::byte{5}}, "another");
    TestSession second(TestSessionOptions(false, secret));
    second.book = book.book;
    std::vector<std::byte> greeting = TakeOutput(&second.session, 1 << 20, 0);
    StreamJoin forged(granted, 2);
    ASSERT_TRUE(Hear(&forged, &greeting).ok());
    second.session.Receive(SaidBy(&forged), 0);
    ExpectRefused(second.session.status(), kNobodyWaits);
    EXPECT_TRUE(second.session.has_output()) << "it is told why";
  }
}

// The proof is made of the hello; a peer that has not read that has guessed.
TEST(StreamJoin, AJoinBeforeTheHelloIsReadIsABreach) {
  Book book;
  const StreamsGranted granted = Granted(2, 4, "key");
  const StreamBook::Entry entry = book.Expect(granted);
  TestSession listener(TestSessionOptions(false));
  listener.book = book.book;
  wire::TransferHello hello;
  TransferSession::Options options = TestSessionOptions(false);
  hello.heartbeat_ms = 500;
  hello.dead_after_ms = 3000;
  hello.lease_ms = 30000;
  hello.window_bytes = 1 << 20;
  hello.instance = options.instance;
  hello.nonce = options.nonce;
  const auto frame = FrameOf(wire::TransferOpcode::kJoin, wire::Encode(JoinOf(granted, 1, hello)));
  listener.session.Receive(frame, 0);
  EXPECT_EQ(listener.session.status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(book.book->due(), 3U);
}

TEST(StreamJoin, APeerThatDoesNotGreetIsAnError) {
  const struct {
    wire::TransferOpcode opcode;
    std::vector<std::byte> head;
    StatusCode code;
  } cases[] = {
      {wire::TransferOpcode::kGoodbye, wire::EncodeEnd(0, Status(StatusCode::kFull, "no room")),
       StatusCode::kRemote},
      {wire::TransferOpcode::kHeartbeat, {}, StatusCode::kCorrupt},
      {wire::TransferOpcode::kHello, std::vector<std::byte>(3), StatusCode::kCorrupt},
      {wire::TransferOpcode::kPassport, std::vector<std::byte>(2000), StatusCode::kTooLarge},
  };
  for (const auto& each : cases) {
    StreamJoin join(Granted(1, 2, "key"), 1);
    std::vector<std::byte> bytes = FrameOf(each.opcode, each.head);
    EXPECT_EQ(Hear(&join, &bytes).code(), each.code);
    EXPECT_FALSE(join.has_output());
  }
}

}  // namespace
}  // namespace quire
