// Connections over UCX: the bytes, their bounds, peers that break the rules, and the addresses.
#include "transfer/ucx_channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "net/socket_address.h"
#include "quire/transfer_peer.h"
#include "transfer/byte_channel.h"
#include "transfer/testing/test_channels.h"
#include "transfer/testing/test_session.h"

#if QUIRE_TESTS_UCX
#include <ucp/api/ucp.h>
#endif

namespace quire {
namespace {

TransferPeerOptions UcxPeerOptions(std::string secret = "") {
  return {.secret = std::move(secret),
          .passport = TestPassport(),
          .connect_timeout = std::chrono::seconds(60)};
}

// ---- With and without UCX

TEST(UcxAddress, WhatCannotBeIsRefusedByName) {
  const auto expect_bad = [](const std::string& endpoint, const TransferPeerOptions& options,
                             const std::string& why) {
    ExpectSays(TransferListener::Start({.endpoint = endpoint, .peer = options}).status(),
               StatusCode::kBadArgument, why);
    ExpectSays(TransferPeer::Connect(endpoint, options).status(), StatusCode::kBadArgument, why);
  };
  expect_bad("ucx:", UcxPeerOptions(), "it has no port");
  expect_bad("ucx:example:1", UcxPeerOptions(), "not numeric");
  expect_bad("ucx:unix:/tmp/a", UcxPeerOptions(), "ucx:ADDRESS:PORT");
  expect_bad("ucx:192.0.2.1:7000", UcxPeerOptions(),
             "ucx:192.0.2.1:7000 is reached over a network");
  TransferPeerOptions with_tls = UcxPeerOptions("a secret");
  with_tls.tls_ca_file = with_tls.tls_cert_file = with_tls.tls_key_file = "/no/such/file";
  expect_bad("ucx:127.0.0.1:0", with_tls, "there is no TLS over UCX");
}

TEST(UcxLibrary, ItsAbsenceSaysWhatToInstall) {
  ExpectSays(OpenUcxLibrary("/no/such/folder/").status(), StatusCode::kBadArgument, "libucx-dev");
  ExpectSays(OpenUcxLibrary("").status(), StatusCode::kBadArgument, "libquire_ucx.so");
}

#if !QUIRE_TESTS_UCX

TEST(UcxChannel, IsTested) {
  GTEST_SKIP() << "not here: UCX's headers (libucx-dev) were not found, or this is a sanitized "
                  "build";
}

#else

class UcxChannel : public testing::Test {
 protected:
  void SetUp() override { ::setenv("UCX_TLS", "tcp", /*replace=*/1); }
};

Result<size_t> ReadSome(ByteChannel& channel, std::span<std::byte> into) {
  return channel.Read(std::span(&into, 1));
}
Result<size_t> WriteSome(ByteChannel& channel, std::span<const std::byte> bytes) {
  return channel.Write(std::span(&bytes, 1));
}

// What is at a position of a stream.
std::byte ByteAt(size_t position) { return static_cast<std::byte>(position * 2654435761U >> 13); }

// One direction of a connection.
struct Direction {
  ByteChannel* from;
  ByteChannel* to;
  size_t total;
  size_t written = 0;
  size_t read = 0;

  bool is_done() const { return read == total; }
  void Write(RandomSequence& random) {
    const auto count = std::min(total - written, static_cast<size_t>(1 + random.Below(700'000)));
    std::vector<std::byte> bytes(count);
    for (size_t i = 0; i < count; ++i) bytes[i] = ByteAt(written + i);
    const std::span<const std::byte> all(bytes);
    const size_t head = std::min<size_t>(count, 37);
    const std::span<const std::byte> parts[] = {all.first(head), {}, all.subspan(head)};
    const auto taken = from->Write(parts);
    ASSERT_TRUE(taken.ok()) << taken.status().ToString();
    written += *taken;
  }
  void Read(RandomSequence& random) {
    std::vector<std::byte> bytes(static_cast<size_t>(1 + random.Below(300'000)));
    const std::span<std::byte> all(bytes);
    const size_t head = std::min<size_t>(bytes.size(), 5);
    const std::span<std::byte> places[] = {all.first(head), all.subspan(head)};
    const auto count = to->Read(places);
    ASSERT_TRUE(count.ok()) << count.status().ToString();
    for (size_t i = 0; i < *count; ++i) ASSERT_EQ(bytes[i], ByteAt(read + i)) << read + i;
    read += *count;
  }
};

TEST_F(UcxChannel, BytesComeInOrderInBothDirections) {
  Channels channels = MakeUcxChannels();
  RandomSequence random(7);
  Direction there{.from = channels[0].get(), .to = channels[1].get(), .total = size_t{30} << 20};
  Direction back{.from = channels[1].get(), .to = channels[0].get(), .total = size_t{9} << 20};
  for (;;) {
    for (Direction* direction : {&there, &back}) {
      if (direction->written < direction->total) direction->Write(random);
      ASSERT_FALSE(HasFatalFailure());
    }
    for (Direction* direction : {&there, &back}) {
      direction->Read(random);
      ASSERT_FALSE(HasFatalFailure());
    }
    if (there.is_done() && back.is_done()) break;
    WaitForEither(channels[0]->PrepareWait(true, there.written < there.total),
                  channels[1]->PrepareWait(true, back.written < back.total));
  }
}

// Writes as much as there is room for, which is `bytes`.
void FillUp(Channels& channels, size_t bytes) {
  const std::vector<std::byte> some(1 << 20, std::byte{3});
  for (size_t taken = 0; taken < bytes;) {
    const size_t count = WriteSome(*channels[0], some).value();
    taken += count;
    ASSERT_LE(taken, bytes);
    if (count == 0)
      WaitForEither(channels[0]->PrepareWait(false, true), channels[1]->PrepareWait(false, false));
  }
  EXPECT_EQ(WriteSome(*channels[0], some).value(), 0U);
}
constexpr size_t kUcxBytesMax = kQuireUcxPiecesMax * kQuireUcxPieceBytesMax;

TEST_F(UcxChannel, AWriterIsHeldUpUntilTheOtherSideReads) {
  Channels channels = MakeUcxChannels();
  FillUp(channels, kUcxBytesMax);
  std::vector<std::byte> into(kUcxBytesMax / 2);
  for (size_t read = 0; read < into.size();) {
    WaitForEither(channels[0]->PrepareWait(false, false), channels[1]->PrepareWait(true, false));
    read += ReadSome(*channels[1], std::span(into).subspan(read)).value();
  }
  FillUp(channels, kUcxBytesMax / 2);
}

// Nothing to do is not "ready": the thread would run for ever.
TEST_F(UcxChannel, AFullSideThatDoesNotReadWaits) {
  Channels channels = MakeUcxChannels();
  FillUp(channels, kUcxBytesMax);
  ByteChannel::Wait wait = channels[1]->PrepareWait(true, false);
  while (!wait.is_ready) {
    WaitForEither(wait, channels[0]->PrepareWait(false, false));
    wait = channels[1]->PrepareWait(true, false);
  }
  EXPECT_FALSE(channels[1]->PrepareWait(false, false).is_ready);
  EXPECT_FALSE(channels[0]->PrepareWait(true, true).is_ready);
}

TEST_F(UcxChannel, WhatWasWrittenBeforeTheEndIsRead) {
  Channels channels = MakeUcxChannels();
  const std::vector<std::byte> bytes(700'000, std::byte{5});
  size_t written = 0;
  size_t read = 0;
  while (written < bytes.size()) {
    written += WriteSome(*channels[0], std::span(bytes).subspan(written)).value();
    channels[1]->PrepareWait(false, false);
  }
  channels[0]->EndWrites();
  std::vector<std::byte> into(100'000);
  Result<size_t> count = size_t{0};
  while ((count = ReadSome(*channels[1], into)).ok()) {
    read += *count;
    WaitForEither(channels[0]->PrepareWait(false, false), channels[1]->PrepareWait(true, false));
    EXPECT_FALSE(channels[0]->HasLeft()) << "the other side's end has not come";
  }
  EXPECT_EQ(read, bytes.size());
  ExpectSays(count.status(), StatusCode::kUnavailable, "closed the connection");
  channels[1]->EndWrites();
  while (!channels[0]->HasLeft() || !channels[1]->HasLeft())
    WaitForEither(channels[0]->PrepareWait(false, false), channels[1]->PrepareWait(false, false));
}

TEST_F(UcxChannel, APeerThatIsGoneEndsTheConnection) {
  Channels channels = MakeUcxChannels();
  // Both ends have heard of each other.
  ASSERT_EQ(WriteSome(*channels[0], std::vector<std::byte>(10)).value(), 10U);
  std::vector<std::byte> into(10);
  while (ReadSome(*channels[1], into).value() == 0)
    WaitForEither(channels[0]->PrepareWait(false, false), channels[1]->PrepareWait(true, false));
  channels[0].reset();
  Result<size_t> count = size_t{0};
  while ((count = ReadSome(*channels[1], into)).ok()) {
    const ByteChannel::Wait wait = channels[1]->PrepareWait(true, false);
    WaitForEither(wait, wait);
  }
  ExpectSays(count.status(), StatusCode::kUnavailable, "UCX: ");
  EXPECT_TRUE(channels[1]->HasLeft()) << "there is nobody to wait for";
}

TEST_F(UcxChannel, PeersAndListenersMeetAndSayWhyTheyEnd) {
  const std::shared_ptr<Clock> clock = MachineTime();
  const auto listener =
      TransferListener::Start({.endpoint = "ucx:127.0.0.1:0", .peer = UcxPeerOptions("a secret")})
          .value();
  EXPECT_EQ(listener->endpoint().substr(0, 14), "ucx:127.0.0.1:");
  const auto other = TransferPeer::Connect(listener->endpoint(), UcxPeerOptions("another secret"));
  ExpectSays(other.status(), StatusCode::kRemote, "secret");
  const auto peer = TransferPeer::Connect(listener->endpoint(), UcxPeerOptions("a secret"));
  ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  EXPECT_EQ((*peer)->endpoint(), listener->endpoint());
  const auto accepted = listener->Accept(*clock, kNever).value().value();
  EXPECT_EQ(listener->refused(), 1);
  (*peer)->Close();
  const Status over = accepted->NextRequest(*clock, kNever).status();
  ExpectSays(over, StatusCode::kRemote, "the connection was closed");
  // The port is taken.
  ExpectSays(TransferListener::Start({.endpoint = listener->endpoint(), .peer = UcxPeerOptions()})
                 .status(),
             StatusCode::kUnavailable, listener->endpoint());
  listener->Close();
  EXPECT_FALSE(listener->Accept(*clock, kNever).ok());
}

TEST_F(UcxChannel, NobodyAnswersWhereNobodyListens) {
  std::string endpoint;
  {
    endpoint = TransferListener::Start({.endpoint = "ucx:127.0.0.1:0", .peer = UcxPeerOptions()})
                   .value()
                   ->endpoint();
  }
  ExpectSays(TransferPeer::Connect(endpoint, UcxPeerOptions()).status(), StatusCode::kUnavailable,
             endpoint);
}

TEST_F(UcxChannel, TransportsThatAreNotThereAreSaid) {
  ::setenv("UCX_TLS", "no_such_transport", /*replace=*/1);
  ExpectSays(TransferPeer::Connect("ucx:127.0.0.1:7", UcxPeerOptions()).status(),
             StatusCode::kUnavailable, "UCX_TLS");
}

// ---- A peer that breaks the rules: plain UCX.

struct Message {
  const char* why;
  unsigned id = kQuireUcxPiece;
  std::vector<uint64_t> header = {0};
  size_t bytes = 10;
  bool is_rendezvous = false;
  int times = 1;
};

class HostileUcxPeer {
 public:
  explicit HostileUcxPeer(const Endpoint& endpoint) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    EXPECT_EQ(ucp_init(&params, nullptr, &context_), UCS_OK);
    ucp_worker_params_t worker{};
    EXPECT_EQ(ucp_worker_create(context_, &worker, &worker_), UCS_OK);
    const SocketAddress address = AddressOf(endpoint);
    ucp_ep_params_t to{};
    to.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    to.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    to.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    to.sockaddr = {.addr = address.get(), .addrlen = address.size};
    EXPECT_EQ(ucp_ep_create(worker_, &to, &endpoint_), UCS_OK);
  }
  ~HostileUcxPeer() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* const closing = ucp_ep_close_nbx(endpoint_, &param);
    if (UCS_PTR_IS_PTR(closing)) requests_.push_back(closing);
    for (void* const request : requests_) ucp_request_free(request);
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }
  HostileUcxPeer(const HostileUcxPeer&) = delete;
  HostileUcxPeer& operator=(const HostileUcxPeer&) = delete;

  // The message stays where it is.
  void Send(const Message& message) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = message.is_rendezvous ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
    void* const request = ucp_am_send_nbx(endpoint_, message.id, message.header.data(),
                                          message.header.size() * sizeof(uint64_t), bytes_.data(),
                                          message.bytes, &param);
    if (UCS_PTR_IS_PTR(request)) requests_.push_back(request);
  }
  void Progress() { ucp_worker_progress(worker_); }

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  std::vector<void*> requests_;
  const std::vector<std::byte> bytes_ = std::vector<std::byte>(2 * kQuireUcxPieceBytesMax);
};

TEST_F(UcxChannel, APeerThatBreaksTheRulesIsRefused) {
  const Message messages[] = {
      {.why = "without its number", .header = {}},
      {.why = "without its number", .header = {0, 0}},
      {.why = "too large", .bytes = kQuireUcxPieceBytesMax + 1},
      {.why = "too large", .bytes = kQuireUcxPieceBytesMax + 1, .is_rendezvous = true},
      {.why = "no place", .header = {kQuireUcxPiecesMax}},
      {.why = "no place", .header = {UINT64_MAX}, .is_rendezvous = true},
      {.why = "twice", .header = {1}, .times = 2},
      {.why = "twice", .header = {1}, .is_rendezvous = true, .times = 2},
      {.why = "what was not sent", .id = kQuireUcxTaken, .header = {1}, .bytes = 0},
      {.why = "what was not sent", .id = kQuireUcxTaken, .header = {}, .bytes = 0},
      {.why = "what was not sent", .id = kQuireUcxTaken, .header = {0}, .bytes = 1}};
  for (const Message& message : messages) {
    SCOPED_TRACE(message.why);
    Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
    const auto listener = ListenUcx(&endpoint).value();
    HostileUcxPeer peer(endpoint);
    for (int i = 0; i < message.times; ++i) peer.Send(message);
    std::unique_ptr<ByteChannel> channel;
    Result<size_t> count = size_t{0};
    std::vector<std::byte> into(100);
    while (count.ok()) {
      peer.Progress();
      if (channel == nullptr)
        channel = listener->Accept().value();
      else
        count = ReadSome(*channel, into);
      ASSERT_EQ(count.ok() ? *count : 0, 0U) << "a byte of it was read";
    }
    ExpectSays(count.status(), StatusCode::kCorrupt, message.why);
  }
}

// UCX drops it with a warning; the connection goes on.
TEST_F(UcxChannel, AMessageOfAnotherKindIsNoByte) {
  Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
  const auto listener = ListenUcx(&endpoint).value();
  HostileUcxPeer peer(endpoint);
  const Message messages[] = {{.why = "", .id = 77}, {.why = "", .bytes = 3}};
  for (const Message& message : messages) peer.Send(message);
  std::unique_ptr<ByteChannel> channel;
  size_t count = 0;
  std::vector<std::byte> into(100);
  while (count == 0) {
    peer.Progress();
    if (channel == nullptr)
      channel = listener->Accept().value();
    else
      count = ReadSome(*channel, into).value();
  }
  EXPECT_EQ(count, 3U);
}

#endif  // QUIRE_TESTS_UCX

}  // namespace
}  // namespace quire
