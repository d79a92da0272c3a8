// The Redis tier over TLS: against real servers, whose certificates the tests make.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "store/testing/test_redis_tier.h"

namespace quire {
namespace {

using namespace redis_test;  // NOLINT(google-build-using-namespace)

#define QUIRE_NEEDS_TLS() \
  QUIRE_NEEDS_REDIS();    \
  if (!HaveOpenssl()) GTEST_SKIP() << "openssl is not installed; tools/setup.sh does it"

const TestCertificates& Certificates() {
  static const TestCertificates certificates;
  return certificates;
}

RedisTierOptions Trusting(const std::string& ca_file = Certificates().ca()) {
  RedisTierOptions options;
  options.tls = true;
  options.tls_ca_file = ca_file;
  return options;
}

std::string LocalName(const RedisServer& server) {
  return "localhost:" + server.tls().substr(server.tls().find(':') + 1);
}

TEST(RedisTls, ChunksGoThereAndBack) {
  QUIRE_NEEDS_TLS();
  const RedisServer server({}, &Certificates());
  for (const std::string& endpoint : {server.tls(), LocalName(server)}) {
    const auto tier = Open(endpoint, Trusting());
    std::vector<ChunkId> ids;
    std::vector<std::shared_ptr<const StoredChunk>> chunks;
    for (int32_t i = 0; i < 4; ++i) chunks.push_back(MakeChunk(100 * i, kThreePieces));
    for (const auto& chunk : chunks) {
      const Status written = WriteOne(*tier, *chunk);
      ASSERT_TRUE(written.ok()) << written.ToString();
      ids.push_back(IdOf(*chunk));
    }
    std::vector<TierRead> reads;
    for (const auto& chunk : chunks) reads.push_back(ReadOf(*chunk));
    Collector sink(chunks.size());
    tier->Read(reads, In(kLongNs), sink);
    for (size_t i = 0; i < chunks.size(); ++i) {
      ASSERT_TRUE(sink.items[i].status.ok()) << sink.items[i].status.ToString();
      EXPECT_TRUE(SameBytes(*chunks[i], sink.items[i].buffer));
    }
    EXPECT_TRUE(std::is_sorted(sink.layers.begin(), sink.layers.end()));
    EXPECT_EQ(*tier->Prefix(ids, In(kLongNs)), 4);
    EXPECT_EQ(tier->List(In(kLongNs))->size(), 4U);
    EXPECT_EQ(*tier->Verify(In(kLongNs)), 0);
    for (const ChunkId& id : ids) EXPECT_TRUE(*tier->Remove(id.key, In(kLongNs)));
  }
}

TEST(RedisTls, ConnectionsAreUsedAgain) {
  QUIRE_NEEDS_TLS();
  const RedisServer server({}, &Certificates());
  const auto tier = Open(server.tls(), Trusting());
  const auto chunk = MakeChunk(1);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  const auto accepted = [&] {
    const std::string info = server.Command({"INFO", "stats"});
    const size_t at = info.find("total_connections_received:");
    return std::stoi(info.substr(info.find(':', at) + 1));
  };
  const int before = accepted();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(accepted() - before, 1) << "the question itself";
}

TEST(RedisTls, OnlyTheServerThatWasMeantIsTrusted) {
  QUIRE_NEEDS_TLS();
  const RedisServer server({}, &Certificates());
  const TestCertificates others;
  const auto chunk = MakeChunk(1);
  const auto expect_refused = [&](const RedisTierOptions& options, const std::string& why) {
    const auto tier = Open(server.tls(), options);
    const Status status = WriteOne(*tier, *chunk);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find(why), std::string_view::npos) << status.ToString();
  };
  expect_refused(Trusting(others.ca()), "certificate is refused");
  expect_refused(Trusting(""), "certificate is refused");  // the system trusts nobody of ours
  RedisTierOptions other_name = Trusting();
  other_name.tls_server_name = "redis.example";
  expect_refused(other_name, "not redis.example's");
  other_name.tls_server_name = "127.0.0.9";
  expect_refused(other_name, "not 127.0.0.9's");
  RedisTierOptions named = Trusting();
  named.tls_server_name = "localhost";
  EXPECT_TRUE(WriteOne(*Open(server.tls(), named), *chunk).ok());
  RedisTierOptions anybody = Trusting(others.ca());
  anybody.tls_verify = false;
  EXPECT_TRUE(WriteOne(*Open(server.tls(), anybody), *chunk).ok());
  EXPECT_EQ(server.Command({"DBSIZE"}), "2")
      << "a header and a piece: nothing came from those refused";
}

TEST(RedisTls, AServerMayAskForACertificateOfTheClient) {
  QUIRE_NEEDS_TLS();
  const RedisServer server({"--tls-auth-clients", "yes"}, &Certificates());
  const auto chunk = MakeChunk(1);
  const Status stranger = WriteOne(*Open(server.tls(), Trusting()), *chunk);
  // The server's reason may be lost: it resets the connection right behind saying it.
  EXPECT_EQ(stranger.code(), StatusCode::kUnavailable) << stranger.ToString();
  RedisTierOptions known = Trusting();
  known.tls_cert_file = Certificates().client();
  known.tls_key_file = Certificates().client_key();
  const auto tier = Open(server.tls(), known);
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
}

TEST(RedisTls, BothSidesMustMeanTls) {
  QUIRE_NEEDS_TLS();
  const RedisServer server({}, &Certificates());
  const auto chunk = MakeChunk(1);
  const Status to_plain = WriteOne(*Open(server.tcp(), Trusting()), *chunk, 500 * kMs);
  EXPECT_EQ(to_plain.code(), StatusCode::kTimeout) << "it waits for more of what it was sent";
  EXPECT_NE(to_plain.message().find("is this the server's port for TLS?"), std::string_view::npos)
      << to_plain.ToString();
  EXPECT_EQ(WriteOne(*Open(server.tls()), *chunk).code(), StatusCode::kUnavailable);
}

TEST(RedisTls, OutagesAreThoseOfPlainConnections) {
  QUIRE_NEEDS_TLS();
  RedisServer server({}, &Certificates());
  const auto tier = Open(server.tls(), Trusting());
  const auto chunk = MakeChunk(1, kThreePieces);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Kill();
  server.Start();
  EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kNotFound);  // by a new connection, at once
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Signal(SIGSTOP);
  EXPECT_EQ(ReadOne(*tier, *chunk, 50 * kMs).code(), StatusCode::kTimeout);
  AwaitOutage(*tier, *chunk);  // handshakes hang
  server.Signal(SIGCONT);
  Status status = ReadOne(*tier, *chunk);
  while (status.code() == StatusCode::kUnavailable) status = ReadOne(*tier, *chunk);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(RedisTls, WhatIsNoTlsIsAnOutageAndNeverData) {
  QUIRE_NEEDS_TLS();
  for (const std::string& answer :
       {std::string("+OK\r\n"), std::string(64, '\0'), std::string("\x16\x03\x03\xff\xff")}) {
    const FakeRedis peer([](const auto&) { return FakeRedis::kHangUp; }, answer);
    const auto tier = Open(peer.tcp(), Trusting());
    const Status status = WriteOne(*tier, *MakeChunk(1));
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  }
}

TEST(RedisTls, RefusesOptionsByName) {
  QUIRE_NEEDS_TLS();
  const auto expect_bad = [](const RedisTierOptions& changed, const std::string& name) {
    RedisTierOptions options = changed;
    if (options.endpoints.empty()) options.endpoints = "127.0.0.1:1";
    const auto made = RedisTier::Create(options, "", nullptr);
    EXPECT_EQ(made.status().code(), StatusCode::kBadArgument) << name;
    EXPECT_NE(made.status().message().find(name), std::string_view::npos)
        << made.status().ToString();
  };
  expect_bad(Trusting("/no/such/file"), "tls_ca_file");
  expect_bad(Trusting(Certificates().client_key()), "tls_ca_file");
  RedisTierOptions options = Trusting();
  options.tls_cert_file = Certificates().client();
  expect_bad(options, "tls_key_file");
  options.tls_key_file = Certificates().server_key();  // of another certificate
  expect_bad(options, "tls_key_file");
  options.tls_key_file = Certificates().locked_key();  // nobody is asked for its password
  options.tls_cert_file = Certificates().client();
  expect_bad(options, "tls_key_file");
  options.tls_cert_file = "/no/such/file";
  expect_bad(options, "tls_cert_file");
  options = Trusting();
  options.tls = false;
  expect_bad(options, "redis.tls is off");
  options = {};
  options.tls_verify = false;
  expect_bad(options, "redis.tls_verify");
  options = Trusting();
  options.endpoints = "unix:/tmp/socket";
  expect_bad(options, "unix:/tmp/socket");
}

TEST(RedisTls, AClusterIsFollowedByNumbersItsCertificatesHave) {
  QUIRE_NEEDS_TLS();
  RedisServerCluster cluster({}, &Certificates());
  const auto tier = Open(cluster.server(0).tls(), Trusting());
  std::vector<ChunkId> ids;
  for (int32_t i = 0; i < 12; ++i) {
    const auto chunk = MakeChunk(i);
    const Status written = WriteOne(*tier, *chunk);
    ASSERT_TRUE(written.ok()) << written.ToString();
    EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
    ids.push_back(IdOf(*chunk));
  }
  EXPECT_EQ(*tier->Prefix(ids, In(kLongNs)), 12);
  EXPECT_EQ(tier->List(In(kLongNs))->size(), 12U);
}

}  // namespace
}  // namespace quire
