// Servers and clients over real sockets: what only those show.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/fake_clock.h"
#include "base/testing/refuse_each.h"
#include "base/testing/soak.h"
#include "base/testing/threads_of_process.h"
#include "buffers/remote_connection.h"
#include "buffers/testing/remote_pair.h"
#include "net/socket.h"
#include "quire/remote_buffers.h"
#include "wire/testing/test_tensor.h"
#include "wire/wire_link.h"

namespace quire {
namespace {

using std::chrono::milliseconds;

LookupEntry Entry(const std::vector<int64_t>& tokens, int64_t floats = 0) {
  LookupEntry entry{.tokens = Ids(tokens), .roi = Ones(tokens.size()), .tensors = {}};
  if (floats > 0) entry.tensors.emplace_back("key", Floats({floats}, 1));
  return entry;
}

std::unique_ptr<BufferServer> Serve(BufferServerOptions options = {}) {
  if (!options.lookup) options.lookup = {.capacity_bytes = 1 << 26};
  if (!options.store) options.store = {.capacity_bytes = 1 << 26};
  // Clients of a test are no threads of their own, and give no signs of life.
  if (options.dead_after == BufferServerOptions().dead_after)
    options.dead_after = std::chrono::minutes(1);
  return BufferServer::Start(options).value();
}

auto ConnectLookup(const std::unique_ptr<BufferServer>& server, RemoteBufferOptions options = {}) {
  return ConnectLookupBuffer(server->endpoint(), Patient(std::move(options)));
}

auto ConnectStore(const std::unique_ptr<BufferServer>& server) {
  return ConnectStoreBuffer(server->endpoint(), Patient(RemoteBufferOptions()));
}

// A connection that sends what it is told and reads only when it is told.
class RawClient {
 public:
  explicit RawClient(const std::string& endpoint)
      : socket_(Socket::Connect(Endpoint::Parse(endpoint).value()).value()) {
    Wait(true);
  }
  void Send(wire::Message message) {
    sender_.Queue(std::move(message));
    while (sender_.has_output()) {
      const size_t count = socket_.Write(sender_.Gather()).value();
      if (count == 0) {
        Wait(true);
      } else {
        sender_.Consume(count);
      }
    }
  }
  void Hello() {
    Send({.opcode = wire::Opcode::kHello, .fields = wire::EncodeFields(wire::ClientHello{})});
    Read(wire::kHeaderBytes + 64);
  }
  void Read(size_t count) {
    std::vector<std::byte> bytes(count);
    for (size_t have = 0; have < count;) {
      have += socket_.Read(std::span(bytes).subspan(have)).value();
      if (have < count) Wait(false);
    }
  }
  // Until the server ends the connection.
  void ReadToEnd() {
    std::vector<std::byte> bytes(4096);
    while (socket_.Read(bytes).ok()) Wait(false);
  }

 private:
  void Wait(bool to_write) {
    PollEntry entry{.fd = socket_.fd(), .wants_read = !to_write, .wants_write = to_write};
    PollSockets(std::span(&entry, 1), int64_t{20'000'000'000});
  }

  Socket socket_;
  wire::WireSender sender_;
};

wire::Message TakeAny(uint64_t request) {
  wire::Message message{.opcode = wire::Opcode::kTake, .request = request};
  wire::FieldWriter(&message.fields).Add(int64_t{-1});
  return message;
}

TEST(BufferServer, ASlowReaderHoldsNobodyUp) {
  const auto server = Serve();
  RawClient slow(server->endpoint());
  slow.Hello();
  ASSERT_TRUE(server->lookup()->Insert(Entry({1}, 8'000'000)).ok());  // more than sockets hold
  slow.Send(TakeAny(1));
  while (server->lookup()->size() > 0) std::this_thread::yield();
  const auto client = ConnectLookup(server).value();
  for (int64_t i = 2; i < 50; ++i) {
    ASSERT_TRUE(server->lookup()->Insert(Entry({i}, 100'000)).ok());
    EXPECT_EQ(ValuesOf<int64_t>(client->DropSelect({}).value()->tokens)[0], i);
  }
  EXPECT_EQ(server->lookup()->used_bytes(), 9 + 32'000'000) << "of the one on its way";
}

TEST(BufferServer, AConnectionThatEndsPutsBackWhatItHad) {
  const auto server = Serve();
  ASSERT_TRUE(server->lookup()->Insert(Entry({1}, 8'000'000)).ok());
  {
    RawClient consumer(server->endpoint());
    consumer.Hello();
    consumer.Send(TakeAny(1));
    consumer.Read(5000);
    EXPECT_EQ(server->lookup()->size(), 0);
  }
  const auto client = ConnectLookup(server).value();
  EXPECT_EQ(client->DropSelect({}).value()->bytes(), 9 + 32'000'000);
}

TEST(BufferServer, ItsThreadsTakeNoSignals) {
  const int64_t before = ThreadsThatTakeSignals();
  const auto server = Serve();
  const auto client = ConnectLookupBuffer(server->endpoint()).value();
  EXPECT_LE(ThreadsThatTakeSignals(), before);
}

#if !defined(QUIRE_SANITIZED)  // they need more memory of their own than a limit leaves
TEST(BufferServerDeathTest, WithoutAThreadNothingIsServedAndNoSocketIsLeft) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto serve = [] {
    const std::string path = "/tmp/quire-no-thread-" + std::to_string(::getpid());
    LeaveRoomForThreads(0);
    const Status status = BufferServer::Start({.endpoint = "unix:" + path,
                                               .lookup = LookupBufferOptions{.capacity_bytes = 1}})
                              .status();
    const bool is_told = status.code() == StatusCode::kUnavailable;
    std::exit(is_told && !std::filesystem::exists(path) ? 0 : 1);
  };
  EXPECT_EXIT(serve(), testing::ExitedWithCode(0), "");
}

TEST(BufferServerDeathTest, WithoutAThreadNothingIsConnected) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto connect = [] {
    LeaveRoomForThreads(0);
    const Status status = ConnectStoreBuffer("127.0.0.1:9").status();
    std::exit(status.code() == StatusCode::kUnavailable &&
                      status.message().find("thread") != std::string_view::npos
                  ? 0
                  : 1);
  };
  EXPECT_EXIT(connect(), testing::ExitedWithCode(0), "");
}
#endif

// The largest numbers mean that there is no limit.
TEST(BufferServer, LargestLimitsAreNone) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto server = Serve({.lookup = LookupBufferOptions{.capacity_bytes = kMost},
                             .store = StoreBufferOptions{.capacity_bytes = kMost}});
  const auto client = ConnectStoreBuffer(
      server->endpoint(),
      {.connect_timeout = std::chrono::nanoseconds::max(), .message_bytes_max = kMost});
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_TRUE((*client)->Put("key", Floats({3}, 1)).ok());
  EXPECT_EQ((*client)->Get("key").value()->bytes(), 12);
}

TEST(BufferServer, ServesManyClientsAtOnce) {
  constexpr int kClients = 8;
  constexpr int64_t kEntries = 400;
  const auto server = Serve({.lookup = LookupBufferOptions{.capacity_bytes = 40'000}});
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> threads;
  for (int c = 0; c < kClients; ++c) {
    threads.emplace_back([&] {
      const auto client = ConnectLookup(server).value();
      for (int64_t i = 0; i < kEntries / kClients; ++i) {
        const LookupEntry entry = *client->DropSelect({}).value();
        sum += ValuesOf<int64_t>(entry.tokens)[0];
      }
    });
  }
  for (int64_t i = 0; i < kEntries; ++i) {
    ASSERT_TRUE(server->lookup()->Insert(Entry({i}, i % 7 * 100)).ok());
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, kEntries * (kEntries - 1) / 2);
  EXPECT_EQ(server->lookup()->used_bytes(), 0);
}

TEST(BufferServer, ManyThreadsShareOneClient) {
  const auto server = Serve({.requests_max = 4});  // fewer than threads: some wait for a place
  const auto client = ConnectLookup(server).value();
  const auto store = ConnectStore(server).value();
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      const LookupEntry entry = *client->DropSelect({}).value();
      const std::string key = "k" + std::to_string(t);
      const Status status = store->Put(key, entry.tokens);
      EXPECT_TRUE(status.ok()) << status.ToString();
      const auto got = store->Get(key);
      ASSERT_TRUE(got.ok()) << got.status().ToString();
      sum += ValuesOf<int64_t>(**got)[0];
    });
  }
  for (int64_t i = 0; i < 12; ++i) ASSERT_TRUE(server->lookup()->Insert(Entry({i})).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 66);
  EXPECT_EQ(server->lookup()->used_bytes(), 0);
}

// Questions about the buffer go through beside them, and so does the rest of a put that is refused.
TEST(BufferServer, LargePutsOfManyThreadsKeepTheirConnection) {
  const auto server = Serve({.store = {{.capacity_bytes = 1 << 24}}, .requests_max = 2});
  const auto client = ConnectStore(server).value();
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 4; ++i) {
        const Status put = client->Put("k" + std::to_string(t), Floats({400'000}, 1));
        EXPECT_TRUE(put.ok()) << put.ToString();
        EXPECT_GT(client->size(), 0);
        const Status large = client->Put("large", Floats({5'000'000}, 1));
        EXPECT_EQ(large.code(), StatusCode::kTooLarge);
        EXPECT_NE(large.message().find("the tensor has"), std::string_view::npos)
            << large.ToString();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(server->store()->size(), 8);
}

TEST(BufferServer, AClientClosesWithoutMemory) {
  const auto server = Serve();
  const auto connection = RemoteConnection::Open(server->endpoint(), Patient(RemoteBufferOptions()),
                                                 wire::kServiceLookup)
                              .value();
  const auto take = connection->StartTake({}, kNever).value();
  std::thread closing([&] {
    RefuseFromHere();
    connection->Close();
  });
  closing.join();
  EXPECT_EQ(connection->Await(take).status().code(), StatusCode::kClosed);
}

TEST(BufferServer, ATakeThatWaitedForAPlaceWaitsAtTheServerForTheRest) {
  constexpr int64_t kWaitNs = 30'000'000'000;
  const auto server = Serve({.requests_max = 1});
  const auto clock = std::make_shared<FakeClock>();
  const auto connection = RemoteConnection::Open(server->endpoint(), Patient(RemoteBufferOptions()),
                                                 wire::kServiceLookup, clock)
                              .value();
  const auto first = connection->StartTake({}, kNever).value();
  std::thread waiter([&] {
    const auto second = connection->StartTake({}, kWaitNs);
    ASSERT_TRUE(second.ok()) << second.status().ToString();
    const auto begin = std::chrono::steady_clock::now();
    const auto answer = connection->Await(*second);
    EXPECT_TRUE(answer.ok() && answer->tensors.empty());
    EXPECT_LT((std::chrono::steady_clock::now() - begin).count(), kWaitNs / 2);
  });
  clock->AwaitWaiters(1);
  clock->Advance(kWaitNs - 1);
  ASSERT_TRUE(server->lookup()->Insert(Entry({1})).ok());  // the first one's, which gives its place
  EXPECT_EQ(connection->Await(first).value().tensors.size(), 2);
  waiter.join();
}

TEST(BufferServer, ClosingEitherSideWakesWhoWaits) {
  for (const bool by_server : {true, false}) {
    const auto server = Serve();
    const auto client = ConnectLookup(server).value();
    std::thread waiter(
        [&] { EXPECT_EQ(client->DropSelect({}).status().code(), StatusCode::kClosed); });
    while (server->lookup()->waiting() == 0) std::this_thread::yield();
    if (by_server) {
      server->Close();
      server->Close();
    } else {
      client->Close();
      client->Close();
    }
    waiter.join();
    if (by_server) continue;
    EXPECT_EQ(client->DropSelect({}).status().code(), StatusCode::kClosed);
    while (server->lookup()->waiting() > 0) std::this_thread::yield();
  }
}

TEST(BufferServer, AHandoverThatFailsGoesBackToTheServer) {
  const auto server = Serve();
  const auto client = ConnectLookup(server).value();
  ASSERT_TRUE(server->lookup()->Insert(Entry({1, 1})).ok());
  ASSERT_TRUE(server->lookup()->Insert(Entry({1, 2})).ok());
  {
    const Handover taken = std::move(*client->Take({}).value());
    EXPECT_EQ(ValuesOf<int64_t>(taken.entry().tokens), (std::vector<int64_t>{1, 1}));
    EXPECT_EQ(client->size(), 1);
  }
  EXPECT_EQ(client->size(), 2);
  EXPECT_EQ(ValuesOf<int64_t>(client->DropSelect({}).value()->tokens),
            (std::vector<int64_t>{1, 1}));
}

TEST(BufferServer, AcceptsNoMoreConnectionsThanAllowed) {
  const auto server = Serve({.connections_max = 2});
  auto first = ConnectLookup(server).value();
  const auto second = ConnectLookup(server).value();
  const RemoteBufferOptions hasty{.connect_timeout = milliseconds(20)};
  EXPECT_EQ(ConnectLookupBuffer(server->endpoint(), hasty).status().code(),
            StatusCode::kUnavailable);
  first = nullptr;
  EXPECT_TRUE(ConnectLookup(server).ok());
}

TEST(BufferServer, CountsAConnectionBeforeItsClientHasOne) {
  const auto server = Serve({});
  std::vector<std::shared_ptr<LookupBuffer>> clients;
  for (int64_t i = 1; i <= 200; ++i) {
    clients.push_back(ConnectLookup(server).value());
    ASSERT_EQ(server->connections(), i);
  }
}

TEST(BufferServer, WhoSaysNoHelloIsShownOut) {
  const auto server = Serve({.dead_after = milliseconds(5)});
  RawClient silent(server->endpoint());
  silent.ReadToEnd();
  EXPECT_EQ(server->connections(), 0);
}

TEST(BufferServer, ListensAtUnixSocketsOfThisUser) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("quire_server_" + std::to_string(::getpid()));
  auto server = Serve({.endpoint = "unix:" + path});
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const auto store = ConnectStoreBuffer("unix:" + path).value();
  EXPECT_TRUE(store->Put("k", Ids({1})).ok());
  EXPECT_EQ(BufferServer::Start({.endpoint = "unix:" + path, .store = StoreBufferOptions{1}})
                .status()
                .code(),
            StatusCode::kUnavailable)
      << "somebody listens there";
  server = nullptr;
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Something removes old files of /tmp, a second server starts at the name, the first one ends.
TEST(BufferServer, LeavesTheFileOfAnotherServer) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("quire_second_" + std::to_string(::getpid()));
  auto first = Serve({.endpoint = "unix:" + path});
  std::filesystem::remove(path);
  const auto second = Serve({.endpoint = "unix:" + path});
  first = nullptr;
  const auto store = ConnectStoreBuffer("unix:" + path);
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  EXPECT_TRUE((*store)->Put("k", Ids({1})).ok());
}

TEST(BufferServer, RefusesOptionsOutOfRange) {
  const auto code = [](BufferServerOptions options) {
    return BufferServer::Start(options).status().code();
  };
  const StoreBufferOptions store{.capacity_bytes = 100};
  EXPECT_EQ(code({}), StatusCode::kBadArgument) << "nothing to serve";
  EXPECT_EQ(code({.endpoint = "0.0.0.0:0", .store = store}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoint = "[::]:0", .store = store}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoint = "0.0.0.0:0", .secret = "s", .store = store}), StatusCode::kOk);
  EXPECT_EQ(code({.store = StoreBufferOptions{0}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.store = store, .connections_max = 0}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.store = store, .requests_max = 0}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.store = store, .lease = milliseconds(0)}), StatusCode::kBadArgument);
  const auto nobody = ConnectStoreBuffer("unix:/nowhere/at/all");
  EXPECT_EQ(nobody.status().code(), StatusCode::kUnavailable);
}

TEST(BufferServer, RefusesAnswersThatAreTooLarge) {
  const auto server = Serve();
  ASSERT_TRUE(server->lookup()->Insert(Entry({1}, 1000)).ok());
  const auto small = ConnectLookup(server, {.message_bytes_max = 1000}).value();
  EXPECT_EQ(small->DropSelect({}).status().code(), StatusCode::kTooLarge);
  const auto client = ConnectLookup(server).value();
  EXPECT_EQ(client->DropSelect({}).value()->bytes(), 9 + 4000) << "it went back";
}

TEST(BufferServer, TakesTensorsAsLargeAsItsStoreWhateverQueriesMayHold) {
  const auto server = Serve({.store = {{.capacity_bytes = 1 << 20}}, .query_bytes_max = 64});
  const auto client = ConnectStore(server).value();
  const Status put = client->Put("k", Floats({(1 << 18) - 100}, 1));
  EXPECT_TRUE(put.ok()) << put.ToString();
}

}  // namespace
}  // namespace quire
