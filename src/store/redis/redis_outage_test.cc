// The Redis tier when servers are gone, hang, lie, move their slots or fail over.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/fake_clock.h"
#include "store/testing/test_redis_tier.h"

namespace quire {
namespace {

using namespace redis_test;  // NOLINT(google-build-using-namespace)

// ---- Outages

// Example 30.
TEST(RedisOutage, ADeadServerCostsNothingOnceItIsKnown) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto clock = std::make_shared<FakeClock>();
  const auto tier = Open(server.tcp(), {}, "", clock);
  const auto chunk = MakeChunk(1);
  const int64_t deadline_ns = clock->SteadyNs() + kLongNs;
  const TierWrite item{.id = IdOf(*chunk), .chunk = chunk.get()};
  ASSERT_TRUE(tier->Write(std::span(&item, 1), deadline_ns)[0].ok());
  server.Kill();
  int dropped = 0;
  for (int i = 0; i < 1000; ++i) {
    const Status status = tier->Write(std::span(&item, 1), deadline_ns)[0];
    dropped += status.code() == StatusCode::kUnavailable ? 1 : 0;
  }
  EXPECT_EQ(dropped, 1000);
  EXPECT_FALSE(tier->Usage().available);
  const ChunkId id = IdOf(*chunk);
  EXPECT_EQ(tier->Prefix(std::span(&id, 1), deadline_ns).status().code(), StatusCode::kUnavailable);
  server.Start();
  // It is back, and nobody asks it before the back-off is over.
  EXPECT_EQ(tier->Prefix(std::span(&id, 1), deadline_ns).status().code(), StatusCode::kUnavailable);
  clock->Advance(10'000 * kMs - 1);
  EXPECT_TRUE(tier->Usage().available);
  EXPECT_EQ(*tier->Prefix(std::span(&id, 1), clock->SteadyNs() + kLongNs), 0);
  EXPECT_TRUE(tier->Write(std::span(&item, 1), clock->SteadyNs() + kLongNs)[0].ok());
  EXPECT_EQ(*tier->Prefix(std::span(&id, 1), clock->SteadyNs() + kLongNs), 1);
}

TEST(RedisOutage, AServerThatWasStartedAgainIsUsedAtOnce) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Kill();
  server.Start();
  // The spare connection is dead, the server is not.
  EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kNotFound);
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
}

TEST(RedisOutage, AServerThatHangsCostsTheDeadlineAndThenNothing) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1, kThreePieces);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Signal(SIGSTOP);
  const int64_t begin_ns = MachineTime()->SteadyNs();
  EXPECT_EQ(ReadOne(*tier, *chunk, 50 * kMs).code(), StatusCode::kTimeout);
  EXPECT_GE(MachineTime()->SteadyNs() - begin_ns, 50 * kMs);
  EXPECT_FALSE(WriteOne(*tier, *MakeChunk(2, kThreePieces), 50 * kMs).ok());
  AwaitOutage(*tier, *chunk);
  server.Signal(SIGCONT);
  Status status = ReadOne(*tier, *chunk);
  while (status.code() == StatusCode::kUnavailable) status = ReadOne(*tier, *chunk);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(RedisOutage, ADeadlineThatHasPassedAsksNobody) {
  FakeRedis server([](const auto&) { return "+OK\r\n"; });
  const auto tier = Open(server.tcp());
  EXPECT_EQ(ReadOne(*tier, *MakeChunk(1), -1).code(), StatusCode::kTimeout);
  EXPECT_EQ(WriteOne(*tier, *MakeChunk(1), -1).code(), StatusCode::kTimeout);
  EXPECT_EQ(server.command_count(), 0);
}

TEST(RedisOutage, CancelledAndRefusedItemsEnd) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierRead> reads;
  for (int32_t i = 0; i < 4; ++i) {
    chunks.push_back(MakeChunk(i, {.layers = 24, .head_dim = 16384}));
    ASSERT_TRUE(WriteOne(*tier, *chunks.back()).ok());
    reads.push_back(ReadOf(*chunks.back()));
  }
  Collector sink(reads.size());
  sink.on_section = [&](size_t, int64_t) { sink.items[1].cancelled = true; };
  tier->Read(reads, In(kLongNs), sink);
  EXPECT_EQ(sink.items[1].status.code(), StatusCode::kCancelled);
  EXPECT_LT(sink.items[1].sections.size(), 48U);
  for (const size_t i : {0, 2, 3}) EXPECT_TRUE(sink.items[i].status.ok());
  Collector full(reads.size());
  full.refuse_headers = true;
  tier->Read(reads, In(kLongNs), full);
  for (const auto& item : full.items) {
    EXPECT_EQ(item.status.code(), StatusCode::kFull);
    EXPECT_EQ(item.ends, 1);
  }
}

// ---- Servers that lie

// A server without cluster support that answers all else with `answer`.
FakeRedis::Answer Standalone(FakeRedis::Answer answer) {
  return [answer = std::move(answer)](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER")
      return std::string("-ERR This instance has cluster support disabled\r\n");
    return answer(command);
  };
}

TEST(RedisOutage, GarbageIsAnOutageAndNeverData) {
  const auto chunk = MakeChunk(1);
  for (const std::string& garbage :
       {std::string("HTTP/1.1 400 Bad Request\r\n\r\n"), std::string("$-7\r\n"),
        std::string("*99999999999999\r\n"), std::string("$99999999999999999999\r\n"),
        std::string("$5\r\nabcdefg\r\n"), std::string(100000, 'x'), std::string("$536870912\r\n"),
        std::string("*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n"),
        std::string("\r\n"), std::string("+\n"), std::string("+1\r\n+1\r\n+1\r\n"),
        FakeRedis::kHangUp}) {
    FakeRedis server(Standalone([&](const auto&) { return garbage; }));
    const auto tier = Open(server.tcp());
    const Status read = ReadOne(*tier, *chunk);
    EXPECT_TRUE(read.code() == StatusCode::kUnavailable || read.code() == StatusCode::kCorrupt)
        << garbage.substr(0, 20) << ": " << read.ToString();
    EXPECT_FALSE(WriteOne(*tier, *chunk).ok());
  }
}

// The values of a chunk, as a writer made them.
std::map<std::string, std::string> ValuesOf(const StoredChunk& chunk) {
  std::map<std::string, std::string> values;
  const std::vector<int64_t> pieces = CutRedisPieces(chunk.header());
  auto at = static_cast<size_t>(chunk.header().header_bytes);
  const std::string_view bytes(reinterpret_cast<const char*>(chunk.bytes().data()),
                               chunk.bytes().size());
  values[HeaderName(chunk)] = EncodeRedisHeader(Space().root(), pieces, chunk.bytes().first(at));
  for (size_t i = 0; i < pieces.size(); ++i) {
    values[PieceName(chunk, static_cast<int64_t>(i))] =
        bytes.substr(at, static_cast<size_t>(pieces[i]));
    at += static_cast<size_t>(pieces[i]);
  }
  return values;
}

TEST(RedisOutage, RepliesThatEndEarlyAreMisses) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  for (const double share : {0.0, 0.3, 0.99}) {
    FakeRedis* self = nullptr;
    std::atomic<bool> cut = false;
    FakeRedis server(Standalone([&](const std::vector<std::string>& command) {
      if (cut) return FakeRedis::kHangUp;
      const std::string reply = RespBulk(values.at(command[1]));
      if (command[1] != PieceName(*chunk, 1)) return reply;
      cut = true;
      return reply.substr(0, static_cast<size_t>(static_cast<double>(reply.size()) * share));
    }));
    self = &server;
    const auto tier = Open(self->tcp());
    EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kUnavailable) << share;
  }
}

TEST(RedisOutage, AnswersTheRightValuesOfAFakeServer) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  FakeRedis server(Standalone(
      [&](const std::vector<std::string>& command) { return RespBulk(values.at(command[1])); }));
  EXPECT_TRUE(ReadOne(*Open(server.tcp()), *chunk).ok());
}

// "CLUSTER SLOTS" of one server that has all.
std::string SlotsAt(int port) {
  return RespArray(
      {RespArray({":0\r\n", ":16383\r\n",
                  RespArray({RespBulk("127.0.0.1"), ":" + std::to_string(port) + "\r\n",
                             RespBulk("an id")})})});
}

// Example 32, and a storm of MOVED.
TEST(RedisOutage, MovedIsFollowedOnceAndAStormIsCutShort) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  std::atomic<int> right_port = 0, map_port = 0;
  std::atomic<int64_t> asked_wrong = 0;
  const auto moved = [&] {
    ++asked_wrong;
    return "-MOVED " + std::to_string(RedisSlotOf(HeaderName(*chunk))) +
           " 127.0.0.1:" + std::to_string(right_port) + "\r\n";
  };
  FakeRedis wrong([&](const std::vector<std::string>& command) {
    return command[0] == "CLUSTER" ? SlotsAt(map_port) : moved();
  });
  FakeRedis right([&](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER") return SlotsAt(right_port);
    return RespBulk(values.at(command[1]));
  });
  right_port = right.port();
  map_port = wrong.port();
  // Time stands: on a busy machine the map would be asked for again meanwhile.
  const auto clock = std::make_shared<FakeClock>();
  const auto tier = Open(wrong.tcp() + "," + right.tcp(), {}, "", clock);
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(asked_wrong, 1);  // the map was corrected by it
  map_port = right.port();
  clock->Advance(100 * kMs);
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(asked_wrong, 1);

  // All say it is elsewhere, for ever.
  FakeRedis* other = nullptr;
  std::atomic<int64_t> commands = 0;
  FakeRedis first([&](const std::vector<std::string>& command) {
    ++commands;
    if (command[0] == "CLUSTER") return SlotsAt(first.port());
    return "-MOVED 1 127.0.0.1:" + std::to_string(other->port()) + "\r\n";
  });
  FakeRedis second([&](const std::vector<std::string>& command) {
    ++commands;
    if (command[0] == "CLUSTER") return SlotsAt(second.port());
    return "-MOVED 1 127.0.0.1:" + std::to_string(first.port()) + "\r\n";
  });
  other = &second;
  const auto lost = Open(first.tcp() + "," + second.tcp(), {}, "", clock);
  EXPECT_EQ(ReadOne(*lost, *chunk).code(), StatusCode::kUnavailable);
  EXPECT_LE(commands, 4);
}

TEST(RedisOutage, NobodyIsFollowedToServersThatNoMapNames) {
  std::atomic<int64_t> stranger_asked = 0;
  FakeRedis stranger([&](const auto&) {
    ++stranger_asked;
    return std::string("+OK\r\n");
  });
  for (const std::string verb : {"MOVED", "ASK"}) {
    FakeRedis liar([&](const std::vector<std::string>& command) {
      if (command[0] == "CLUSTER") return SlotsAt(liar.port());
      if (command[0] == "AUTH") return std::string("+OK\r\n");
      return "-" + verb + " 1 127.0.0.1:" + std::to_string(stranger.port()) + "\r\n";
    });
    const auto tier = Open(liar.tcp(), {.password = "sesame-open"});
    EXPECT_FALSE(ReadOne(*tier, *MakeChunk(1)).ok());
  }
  EXPECT_EQ(stranger_asked, 0);
}

TEST(RedisOutage, AskIsSentOnceBehindAsking) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  std::mutex mutex;
  std::vector<std::string> log;
  std::atomic<int> target_port = 0, source_port = 0;
  const auto slots = [&] {
    const auto range = [](int first, int last, int port) {
      return RespArray({":" + std::to_string(first) + "\r\n", ":" + std::to_string(last) + "\r\n",
                        RespArray({RespBulk("127.0.0.1"), ":" + std::to_string(port) + "\r\n"})});
    };
    const int slot = RedisSlotOf(HeaderName(*chunk));
    return RespArray({range(slot, slot, source_port), range(0, slot - 1, target_port)});
  };
  FakeRedis target([&](const std::vector<std::string>& command) {
    const std::lock_guard<std::mutex> guard(mutex);
    log.push_back(command[0]);
    if (command[0] == "CLUSTER") return slots();
    if (command[0] == "ASKING") return std::string("+OK\r\n");
    if (log.size() < 2 || log[log.size() - 2] != "ASKING") return std::string("-MOVED 1 :1\r\n");
    return RespBulk(values.at(command[1]));
  });
  FakeRedis source([&](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER") return slots();
    return "-ASK 1 127.0.0.1:" + std::to_string(target_port) + "\r\n";
  });
  target_port = target.port();
  source_port = source.port();
  const auto tier = Open(source.tcp());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(std::ranges::count(log, "ASKING"), 4);  // for the header and three pieces
}

TEST(RedisOutage, ErrorsOfTheServerAreMissesAndDrops) {
  const auto chunk = MakeChunk(1);
  for (const std::string error :
       {"LOADING Redis is loading the dataset in memory", "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down", "NOAUTH Authentication required.",
        "BUSY Redis is busy running a script.", "ERR anything", ""}) {
    FakeRedis server(Standalone([&](const auto&) { return "-" + error + "\r\n"; }));
    const auto tier = Open(server.tcp());
    EXPECT_FALSE(ReadOne(*tier, *chunk).ok()) << error;
    EXPECT_FALSE(WriteOne(*tier, *chunk).ok()) << error;
    const ChunkId id = IdOf(*chunk);
    EXPECT_FALSE(tier->Prefix(std::span(&id, 1), In(kLongNs)).ok()) << error;
  }
}

TEST(RedisOutage, AHostThatNobodyKnowsIsAnOutage) {
  const auto tier = Open("no-such-host.invalid:6379", {.connect_timeout_ms = 100});
  const auto chunk = MakeChunk(1);
  const StatusCode code = ReadOne(*tier, *chunk, 300 * kMs).code();
  EXPECT_TRUE(code == StatusCode::kUnavailable || code == StatusCode::kTimeout);
  AwaitOutage(*tier, *chunk);
}

TEST(RedisOutage, RefusesOptionsByName) {
  const auto code = [](RedisTierOptions options) {
    return RedisTier::Create(options, "", nullptr).status();
  };
  EXPECT_NE(code({.endpoints = "nonsense"}).message().find("nonsense"), std::string::npos);
  EXPECT_EQ(code({.endpoints = "h:1,"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:0"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .key_prefix = "{a}"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .ttl_ms = -1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .io_timeout_ms = 0}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .replicas = -1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .username = "u"}).code(), StatusCode::kBadArgument);
}

TEST(RedisOutage, ManyThreadsShareATier) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.unix_socket());
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int32_t i = 0; i < 20; ++i) {
        const auto chunk = MakeChunk((t + i) % 8 * 100, {.layers = 4, .head_dim = 2048});
        EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
        const Status status = ReadOne(*tier, *chunk);
        EXPECT_TRUE(status.ok() || status.code() == StatusCode::kNotFound) << status.ToString();
        if (i % 5 != 0) continue;
        EXPECT_TRUE(tier->Remove(IdOf(*chunk).key, In(kLongNs)).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tier->Usage().corrupt, 0);
}

// ---- A cluster

TEST(RedisCluster, SpreadsFollowsSlotsAndSurvivesAFailover) {
  QUIRE_NEEDS_REDIS();
  constexpr int32_t kChunks = 12;
  RedisServerCluster cluster;
  const auto tier = Open(cluster.seeds(), {.connect_timeout_ms = 200, .replicas = 1});
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierWrite> writes;
  std::vector<TierRead> reads;
  std::vector<ChunkId> ids;
  for (int32_t i = 0; i < kChunks; ++i) {
    chunks.push_back(MakeChunk(i * 100, {.layers = 4, .head_dim = 8192}));
    ids.push_back(IdOf(*chunks.back()));
    writes.push_back({.id = ids.back(), .chunk = chunks.back().get()});
    reads.push_back(ReadOf(*chunks.back()));
  }
  for (const Status& status : tier->Write(writes, In(kLongNs)))
    EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(*tier->Prefix(ids, In(kLongNs)), kChunks);
  const auto expect_all = [&] {
    Collector sink(reads.size());
    tier->Read(reads, In(kLongNs), sink);
    EXPECT_TRUE(std::ranges::is_sorted(sink.layers));
    for (size_t i = 0; i < reads.size(); ++i) {
      EXPECT_TRUE(sink.items[i].status.ok()) << sink.items[i].status.ToString();
      EXPECT_TRUE(SameBytes(*chunks[i], sink.items[i].buffer));
    }
  };
  expect_all();
  EXPECT_EQ(tier->List(In(kLongNs))->size(), size_t{kChunks});
  for (size_t i = 0; i < 3; ++i) EXPECT_NE(cluster.server(i).Command({"DBSIZE"}), "0");

  // A slot moves while we read it: first ASK, then MOVED.
  const int slot = RedisSlotOf(HeaderName(*chunks[0]));
  const size_t from = cluster.MasterOf(slot), to = (from + 1) % 3;
  const std::string from_id = cluster.server(from).Command({"CLUSTER", "MYID"});
  const std::string to_id = cluster.server(to).Command({"CLUSTER", "MYID"});
  const std::string slot_text = std::to_string(slot);
  const auto set_slot = [&](size_t server, const std::vector<std::string>& how) {
    std::vector<std::string> command = {"CLUSTER", "SETSLOT", slot_text};
    command.insert(command.end(), how.begin(), how.end());
    EXPECT_EQ(cluster.server(server).Command(command), "OK");
  };
  set_slot(to, {"IMPORTING", from_id});
  set_slot(from, {"MIGRATING", to_id});
  const auto migrate = [&](const std::string& name) {
    EXPECT_EQ(
        cluster.server(from).Command(
            {"MIGRATE", "127.0.0.1", std::to_string(cluster.server(to).port()), name, "0", "5000"}),
        "OK");
  };
  migrate(HeaderName(*chunks[0]));
  expect_all();
  for (int64_t piece = 0; piece < std::ssize(CutRedisPieces(chunks[0]->header())); ++piece)
    migrate(PieceName(*chunks[0], piece));
  expect_all();
  set_slot(to, {"NODE", to_id});
  set_slot(from, {"NODE", to_id});
  expect_all();
  expect_all();

  // A master dies: its chunks are misses until its replica has taken over, those of the others
  // hits.
  const size_t victim = cluster.MasterOf(RedisSlotOf(HeaderName(*chunks[5])));
  std::vector<bool> is_on_victim;
  for (const auto& chunk : chunks)
    is_on_victim.push_back(cluster.MasterOf(RedisSlotOf(HeaderName(*chunk))) == victim);
  cluster.server(victim).Kill();
  Collector sink(reads.size());
  tier->Read(reads, In(kLongNs), sink);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_EQ(sink.items[i].ends, 1);
    EXPECT_TRUE(is_on_victim[i] || sink.items[i].status.ok()) << sink.items[i].status.ToString();
  }
  const int64_t until_ns = In(240'000 * kMs);  // some seconds where the machine is not busy
  Status status(StatusCode::kUnavailable, "not asked yet");
  while (!status.ok() && MachineTime()->SteadyNs() < until_ns)
    status = ReadOne(*tier, *chunks[5], 500 * kMs);
  EXPECT_TRUE(status.ok()) << status.ToString();
  expect_all();
}

}  // namespace
}  // namespace quire
