// Connections over TLS: listener and peer, their certificates, and others that come to the port.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/soak.h"
#include "net/testing/test_certificates.h"
#include "transfer/peer_connection.h"
#include "transfer/testing/listening.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

const TestCertificates& Certificates() {
  static const TestCertificates certificates;
  return certificates;
}
const TestCertificates& Others() {
  static const TestCertificates certificates;
  return certificates;
}

TransferPeerOptions PlainOptions() {
  TransferPeerOptions options;
  options.passport = TestPassport();
  options.connect_timeout = options.dead_after = options.send_wait =
      std::chrono::nanoseconds(kMinuteNs);
  return options;
}

TransferPeerOptions ListenerTls() {
  TransferPeerOptions options = PlainOptions();
  options.tls_ca_file = Certificates().ca();
  options.tls_cert_file = Certificates().server();
  options.tls_key_file = Certificates().server_key();
  return options;
}

TransferPeerOptions PeerTls() {
  TransferPeerOptions options = PlainOptions();
  options.tls_ca_file = Certificates().ca();
  options.tls_cert_file = Certificates().client();
  options.tls_key_file = Certificates().client_key();
  return options;
}

class TlsChannelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HaveOpenssl()) GTEST_SKIP() << "openssl is not installed; tools/setup.sh does it";
  }
};

// Rows of all layers through a window of a few of them; and a salt, without a secret.
TEST_F(TlsChannelTest, RowsAndSaltsArrive) {
  TransferPeerOptions options = PeerTls();
  options.window_bytes = 1000 * kTestRowBytes;
  for (const std::string name : {"", "localhost"}) {
    options.tls_server_name = name;
    options.streams = name.empty() ? 1 : 5;
    const Listening listening(ListenerTls());
    TestReceiver receiver;
    const auto to = listening.Connect(options);
    ASSERT_TRUE(to.ok()) << to.status().ToString();
    const std::shared_ptr<TransferPeer> from = listening.Accept();
    ASSERT_NE(from, nullptr);
    ASSERT_TRUE((*to)->SetReceiver(&receiver).ok());
    const int64_t rows = RoundsOf(20'000);
    const ReceiveMap map = receiver.Reserve(rows);
    const int64_t until = listening.clock->SteadyNs() + kMinuteNs;
    ASSERT_TRUE((*to)->Request({.id = 1, .tokens = {1, 2}, .salt = "of ann"}, map).ok());
    const auto request = from->NextRequest(*listening.clock, until);
    ASSERT_TRUE(request.ok() && request->has_value()) << request.status().ToString();
    EXPECT_EQ((*request)->job.salt, "of ann");
    for (int64_t layer = 0; layer < kTestLayers; ++layer) {
      TestRows sent = RowsOfLayer(layer, rows);
      SendRange range;
      range.epoch = map.epoch;
      range.count = rows;
      range.local = sent.View(0, rows);
      range.head_count = kTestHeads;
      const Status status = from->OnLayerAppended(layer, std::span(&range, 1));
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    const SendRecord record{.epoch = map.epoch, .count = rows};
    ASSERT_TRUE(from->OnForwardEnded(std::span(&record, 1)).ok());
    EXPECT_TRUE(receiver.WaitReceived(map.epoch, rows, *listening.clock, until).ok());
    receiver.CheckPages();
    EXPECT_EQ((*to)->stats().bytes_received, kTestLayers * rows * kTestRowBytes);
    EXPECT_EQ(from->stats().streams, options.streams);
    ASSERT_TRUE((*to)->SetReceiver(nullptr).ok());
    // The other side learns why, through TLS too.
    (*to)->Close();
    ExpectSays(from->NextRequest(*listening.clock, until).status(), StatusCode::kRemote, "closed");
  }
}

TEST_F(TlsChannelTest, OtherCertificatesAreRefusedByTheSideThatReadsThem) {
  Listening listening(ListenerTls());
  TransferPeerOptions options = PeerTls();
  options.tls_ca_file = Others().ca();
  ExpectSays(listening.Connect(options).status(), StatusCode::kUnavailable,
             "the server's certificate is refused");
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "the client says: ");
  options = PeerTls();
  options.tls_server_name = "example";
  ExpectSays(listening.Connect(options).status(), StatusCode::kUnavailable, "tls_server_name");
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "the client says: ");
  options = PeerTls();
  options.tls_cert_file = Others().client();
  options.tls_key_file = Others().client_key();
  EXPECT_EQ(listening.Connect(options).status().code(), StatusCode::kUnavailable);
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "tls_ca_file");
  options.tls_cert_file = Certificates().expired();
  options.tls_key_file = Certificates().server_key();
  EXPECT_EQ(listening.Connect(options).status().code(), StatusCode::kUnavailable);
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "certificate has expired");
  // A secret does not stand for a certificate, nor the other way round.
  options = PeerTls();
  options.secret = "a secret";
  ExpectSays(listening.Connect(options).status(), StatusCode::kRemote, "secret");
  ExpectSays(listening.Refusal(), StatusCode::kRemote, "secret");
  // And all that cost the listener nothing.
  const auto known = listening.Connect(PeerTls());
  ASSERT_TRUE(known.ok()) << known.status().ToString();
  EXPECT_NE(listening.Accept(), nullptr);
  EXPECT_EQ(listening.listener->refused(), 5);
  options = ListenerTls();
  options.tls_cert_file = Certificates().expired();
  ExpectSays(Listening(options).Connect(PeerTls()).status(), StatusCode::kUnavailable,
             "certificate has expired");
}

TEST_F(TlsChannelTest, WhoeverSpeaksNoTlsIsRefused) {
  Listening listening(ListenerTls());
  EXPECT_FALSE(listening.Connect(PlainOptions()).ok());
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "does the client speak TLS?");
  for (const std::string text : {"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01 and garbage"}) {
    const Socket stranger = listening.Stranger();
    const auto bytes = std::as_bytes(std::span(text));
    ASSERT_EQ(stranger.Write(std::span(&bytes, 1)).value(), bytes.size());
    stranger.EndWrites();
    ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "TLS: the handshake failed");
  }
  { const Socket silent = listening.Stranger(); }
  ExpectSays(listening.Refusal(), StatusCode::kUnavailable, "the client closed the connection");
  // Strangers that say nothing hold up nobody.
  const Socket waiting[] = {listening.Stranger(), listening.Stranger()};
  ASSERT_TRUE(listening.Connect(PeerTls()).ok());
  // TLS to a port without it.
  Listening plain(PlainOptions());
  ExpectSays(plain.Connect(PeerTls()).status(), StatusCode::kUnavailable,
             "is this the server's port for TLS?");
  EXPECT_EQ(plain.Refusal().code(), StatusCode::kCorrupt);
}

TEST_F(TlsChannelTest, AHandshakeHasTheTimeOfAnOpening) {
  TransferPeerOptions options = ListenerTls();
  options.dead_after = std::chrono::milliseconds(1);
  Listening listening(options);
  const Socket silent = listening.Stranger();
  ExpectSays(listening.Refusal(), StatusCode::kTimeout, "in the time allowed");
}

TEST_F(TlsChannelTest, AddressesOfOtherMachinesNeedASecretOrTls) {
  TransferPeerOptions options = PlainOptions();
  TransferListenerOptions listening{.endpoint = "0.0.0.0:0", .peer = options};
  ExpectSays(TransferListener::Start(listening).status(), StatusCode::kBadArgument,
             "tls_cert_file");
  ExpectSays(TransferPeer::Connect("192.0.2.1:7000", options).status(), StatusCode::kBadArgument,
             "tls_cert_file");
  listening.peer = ListenerTls();
  EXPECT_TRUE(TransferListener::Start(listening).ok());
}

TEST_F(TlsChannelTest, OptionsAreRefusedByName) {
  const auto expect_bad = [](const TransferPeerOptions& options, const std::string& why) {
    for (const std::string endpoint : {"127.0.0.1:0", "unix:/tmp/quire-tls-test.sock"}) {
      const bool reads = endpoint.substr(0, 5) != "unix:";
      if (!reads && why.find("is of no use") != std::string::npos) continue;
      ExpectSays(TransferListener::Start({.endpoint = endpoint, .peer = options}).status(),
                 StatusCode::kBadArgument, why);
      ExpectSays(TransferPeer::Connect(endpoint, options).status(), StatusCode::kBadArgument, why);
    }
  };
  TransferPeerOptions options = ListenerTls();
  options.tls_ca_file = "";
  expect_bad(options, "tls_ca_file is empty");
  options = ListenerTls();
  options.tls_key_file = "";
  expect_bad(options, "tls_key_file is empty");
  options = PlainOptions();
  options.tls_server_name = "example";
  expect_bad(options, "tls_server_name is \"example\"");
  options = ListenerTls();
  options.tls_cert_file = "/no/such/file";
  expect_bad(options, "tls_cert_file \"/no/such/file\" is of no use");
  options = ListenerTls();
  options.tls_key_file = Certificates().client_key();
  expect_bad(options, "tls_key_file \"" + Certificates().client_key() + "\" is of no use");
}

// No other machine reads what goes through memory: the files are not even opened.
TEST_F(TlsChannelTest, SharedMemoryIsAsItWas) {
  TransferPeerOptions options = PlainOptions();
  options.tls_ca_file = options.tls_cert_file = options.tls_key_file = "/no/such/file";
  const std::string path = Certificates().ca() + ".sock";
  const Listening listening(options, "unix:" + path);
  EXPECT_TRUE(listening.Connect(options).ok());
  EXPECT_TRUE(listening.Connect(PlainOptions()).ok());
}

}  // namespace
}  // namespace quire
