// Both sides of TLS over a pair of sockets, in turns on one thread.
#include "net/tls_session.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "net/socket.h"
#include "net/testing/test_certificates.h"

namespace quire {
namespace {

using Bytes = std::vector<std::byte>;

const TestCertificates& Certificates() {
  static const TestCertificates certificates;
  return certificates;
}
const TestCertificates& Others() {
  static const TestCertificates certificates;
  return certificates;
}

TlsOptions ServerOptions() {
  return {.is_server = true,
          .ca_file = Certificates().ca(),
          .cert_file = Certificates().server(),
          .key_file = Certificates().server_key()};
}

TlsOptions ClientOptions() {
  return {.ca_file = Certificates().ca(),
          .cert_file = Certificates().client(),
          .key_file = Certificates().client_key()};
}

std::pair<Socket, Socket> SocketPair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  return {Socket(fds[0]), Socket(fds[1])};
}

// One side. Its socket is the session's.
struct Side {
  Side(Socket own, const TlsOptions& options, const std::string& host = "127.0.0.1")
      : socket(std::move(own)),
        session(TlsContext::Create(options).value()->Start(socket.fd(), host).value()) {}

  // Goes on with the handshake.
  void Shake() {
    if (is_open || !status.ok()) return;
    const Result<bool> done = session->Handshake();
    status = done.status();
    is_open = done.ok() && *done;
  }
  // All that has come.
  Bytes Read() {
    Bytes bytes(1 << 20);
    size_t count = 0;
    for (;;) {
      const Result<size_t> got = session->Read(std::span(bytes).subspan(count));
      if (!got.ok()) status = got.status();
      if (!got.ok() || *got == 0) break;
      count += *got;
    }
    bytes.resize(count);
    return bytes;
  }
  // How many of them were taken.
  size_t Write(std::span<const std::byte> bytes) {
    const Result<size_t> taken = session->Write(std::span(&bytes, 1));
    if (!taken.ok()) status = taken.status();
    return taken.ok() ? *taken : 0;
  }

  Socket socket;
  std::unique_ptr<TlsSession> session;
  Status status;
  bool is_open = false;
};

// Two sides whose bytes the test passes on, or not.
struct Pair {
  explicit Pair(const TlsOptions& client_options = ClientOptions(),
                const TlsOptions& server_options = ServerOptions(),
                const std::string& host = "127.0.0.1") {
    auto [client_socket, of_client] = SocketPair();
    auto [server_socket, of_server] = SocketPair();
    client_wire = std::move(of_client);
    server_wire = std::move(of_server);
    client = std::make_unique<Side>(std::move(client_socket), client_options, host);
    server = std::make_unique<Side>(std::move(server_socket), server_options);
  }
  static Bytes Take(const Socket& wire) {
    Bytes bytes(1 << 20);
    const Result<size_t> count = wire.Read(std::span(bytes));
    bytes.resize(count.ok() ? *count : 0);
    return bytes;
  }
  static void Put(const Socket& wire, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const Result<size_t> count = wire.Write(std::span(&bytes, 1));
      if (!count.ok() || *count == 0) return;
      bytes = bytes.subspan(*count);
    }
  }
  void Pass() const {
    Put(server_wire, Take(client_wire));
    Put(client_wire, Take(server_wire));
  }
  // Until neither side goes on.
  void Shake() const {
    for (int turn = 0; turn < 8; ++turn) {
      client->Shake();
      server->Shake();
      Pass();
    }
    if (client->is_open) client->Read();  // what the server says of it
  }

  std::unique_ptr<Side> client, server;
  Socket client_wire, server_wire;  // the other ends of their sockets
};

class TlsSessionTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HaveOpenssl()) GTEST_SKIP() << "openssl is not installed; tools/setup.sh does it";
  }
};

void ExpectUnavailable(const Status& status, const std::string& why) {
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find(why), std::string_view::npos) << status.ToString();
}

Bytes NumberedBytes(size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  return bytes;
}

TEST_F(TlsSessionTest, BytesGoBothWaysOnceBothSidesAreKnown) {
  for (const std::string host : {"127.0.0.1", "localhost"}) {
    const Pair pair(ClientOptions(), ServerOptions(), host);
    pair.Shake();
    ASSERT_TRUE(pair.client->is_open) << pair.client->status.ToString();
    ASSERT_TRUE(pair.server->is_open) << pair.server->status.ToString();
    // More than a handshake may have.
    const Bytes sent = NumberedBytes(3 * kTlsHandshakeBytesMax);
    for (auto [from, to] : {std::pair(pair.client.get(), pair.server.get()),
                            std::pair(pair.server.get(), pair.client.get())}) {
      Bytes received;
      std::span<const std::byte> left = sent;
      while (received.size() < sent.size()) {
        left = left.subspan(from->Write(left));
        ASSERT_TRUE(from->session->Flush().ok());
        pair.Pass();
        const Bytes more = to->Read();
        received.insert(received.end(), more.begin(), more.end());
        ASSERT_TRUE(to->status.ok()) << to->status.ToString();
      }
      EXPECT_EQ(received, sent);
      EXPECT_FALSE(from->session->wants_write());
    }
    pair.client->session->EndWrites();
    pair.Pass();
    EXPECT_TRUE(pair.server->Read().empty());
    ExpectUnavailable(pair.server->status, "the client closed the connection");
  }
}

TEST_F(TlsSessionTest, AServerOfOthersIsRefused) {
  const auto expect_refused = [](const TlsOptions& client, const TlsOptions& server,
                                 const std::string& why, const std::string& host = "127.0.0.1") {
    SCOPED_TRACE(why);
    const Pair pair(client, server, host);
    pair.Shake();
    EXPECT_FALSE(pair.client->is_open);
    ExpectUnavailable(pair.client->status, why);
    EXPECT_FALSE(pair.server->is_open);
    ExpectUnavailable(pair.server->status, "the client says: ");
  };
  TlsOptions client = ClientOptions();
  client.ca_file = Others().ca();
  expect_refused(client, ServerOptions(), "tls_ca_file names the authorities to trust");
  expect_refused(ClientOptions(), ServerOptions(), "is not 127.0.0.9's", "127.0.0.9");
  expect_refused(ClientOptions(), ServerOptions(), "is not example's; tls_server_name says",
                 "example");
  client = ClientOptions();
  client.server_name = "::1";
  expect_refused(client, ServerOptions(), "is not ::1's");
  TlsOptions server = ServerOptions();
  server.cert_file = Certificates().expired();
  expect_refused(ClientOptions(), server, "the server's certificate is refused: certificate has");
  client = ClientOptions();
  client.ca_file = Others().ca();
  client.verify = false;
  const Pair pair(client);
  pair.Shake();
  EXPECT_TRUE(pair.client->is_open && pair.server->is_open) << pair.client->status.ToString();
}

TEST_F(TlsSessionTest, AClientOfOthersIsRefused) {
  const auto expect_refused = [](const TlsOptions& client, const std::string& why,
                                 const std::string& told) {
    SCOPED_TRACE(why);
    const Pair pair(client);
    pair.Shake();
    EXPECT_FALSE(pair.server->is_open);
    ExpectUnavailable(pair.server->status, why);
    ExpectUnavailable(pair.client->status, "the server says: ");
    ExpectUnavailable(pair.client->status, told);
    // Nothing that it sent was read.
    EXPECT_FALSE(pair.server->session->has_buffered());
  };
  TlsOptions client = ClientOptions();
  client.cert_file = client.key_file = "";
  expect_refused(client, "peer did not return a certificate", "certificate required");
  client.cert_file = Others().client();
  client.key_file = Others().client_key();
  expect_refused(client, "the client's certificate is refused: ", "");
  client.cert_file = Certificates().expired();
  client.key_file = Certificates().server_key();
  expect_refused(client, "the client's certificate is refused: certificate has expired",
                 "certificate expired");
}

TEST_F(TlsSessionTest, WhatIsNoHandshakeEnds) {
  const Bytes noise = NumberedBytes(5000);
  for (const std::string text : {"GET / HTTP/1.1\r\n\r\n", "QTRN\x02", "\x16\x03\x01", "noise"}) {
    SCOPED_TRACE(text);
    const Pair pair;
    const auto bytes = std::as_bytes(std::span(text));
    for (const Socket* wire : {&pair.client_wire, &pair.server_wire}) {
      Pair::Put(*wire, bytes);
      Pair::Put(*wire, noise);
    }
    for (Side* side : {pair.client.get(), pair.server.get()}) {
      side->Shake();
      side->Shake();
      ExpectUnavailable(side->status, "TLS: the handshake failed: ");
    }
  }
  const Pair pair;
  Pair::Put(pair.server_wire, std::as_bytes(std::span("QTRN with all that follows")));
  pair.server->Shake();
  ExpectUnavailable(pair.server->status, "does the client speak TLS?");
}

TEST_F(TlsSessionTest, AHandshakeMayBeCutAnywhere) {
  const Pair whole;
  whole.client->Shake();
  const Bytes hello = Pair::Take(whole.client_wire);
  ASSERT_GT(hello.size(), 100U);
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{5}, size_t{9}, hello.size() - 1}) {
    SCOPED_TRACE(cut);
    Pair pair;
    Pair::Put(pair.server_wire, std::span(hello).first(cut));
    pair.server->Shake();
    EXPECT_TRUE(pair.server->status.ok()) << "it waits for the rest";
    EXPECT_FALSE(pair.server->is_open);
    EXPECT_FALSE(pair.server->session->has_buffered()) << "a poll would be left out";
    pair.server_wire = Socket();
    pair.server->Shake();
    ExpectUnavailable(pair.server->status, "the client closed the connection");
  }
}

// A first message that says it has 124 KiB, in records of 16 KiB.
TEST_F(TlsSessionTest, AStrangerIsReadForSoLongAlone) {
  const Pair pair;
  Bytes record(5 + (1 << 14));
  const uint8_t header[] = {0x16, 3, 1, 0x40, 0, /*client hello*/ 1, 1, 0xF0, 0};
  for (int i = 0; i < 6; ++i) {
    std::memcpy(record.data(), header, i == 0 ? sizeof(header) : 5);
    Pair::Put(pair.server_wire, record);
    pair.server->Shake();
    EXPECT_EQ(pair.server->status.ok(), i < 3) << i << ": " << pair.server->status.ToString();
  }
  ExpectUnavailable(pair.server->status, std::generic_category().message(EMSGSIZE));
}

TEST_F(TlsSessionTest, APartOfARecordIsNothingYet) {
  const Pair pair;
  pair.Shake();
  const Bytes sent = NumberedBytes(1000);
  ASSERT_EQ(pair.client->Write(sent), sent.size());
  const Bytes record = Pair::Take(pair.client_wire);
  size_t at = 0;
  for (const size_t until : {size_t{3}, size_t{700}}) {
    Pair::Put(pair.server_wire, std::span(record).subspan(at, until - at));
    at = until;
    EXPECT_TRUE(pair.server->Read().empty());
    EXPECT_FALSE(pair.server->session->has_buffered());
  }
  Pair::Put(pair.server_wire, std::span(record).subspan(at));
  Bytes first(10);
  EXPECT_EQ(pair.server->session->Read(first).value(), first.size());
  EXPECT_TRUE(pair.server->session->has_buffered());
  EXPECT_EQ(pair.server->Read().size(), sent.size() - first.size());
  EXPECT_FALSE(pair.server->session->has_buffered());
  // Changed bytes are no bytes.
  ASSERT_EQ(pair.client->Write(sent), sent.size());
  Bytes changed = Pair::Take(pair.client_wire);
  changed[100] ^= std::byte{1};
  Pair::Put(pair.server_wire, changed);
  EXPECT_TRUE(pair.server->Read().empty());
  ExpectUnavailable(pair.server->status, "TLS: receiving failed: ");
}

TEST_F(TlsSessionTest, FilesAreRefusedByTheirOption) {
  const auto expect_bad = [](TlsOptions options, const std::string& name) {
    options.prefix = "of.tls";
    const Status status = TlsContext::Create(options).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << name;
    EXPECT_EQ(status.message().find("of.tls" + name), 0U) << status.ToString();
  };
  TlsOptions options = ServerOptions();
  options.ca_file = "/no/such/file";
  expect_bad(options, "_ca_file \"/no/such/file\" is of no use: ");
  options = ServerOptions();
  options.key_file = "";
  expect_bad(options, "_cert_file and of.tls_key_file go together");
  options.key_file = Certificates().client_key();
  expect_bad(options, "_key_file");
  options.cert_file = Certificates().server_key();
  expect_bad(options, "_cert_file");
}

}  // namespace
}  // namespace quire
