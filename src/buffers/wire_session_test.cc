// Both ends of the protocol without sockets: hostile peers, damaged bytes, time.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/soak.h"
#include "buffers/client_session.h"
#include "buffers/server_session.h"
#include "buffers/testing/hostile_peer.h"
#include "wire/testing/test_tensor.h"

namespace quire {
namespace {

using wire::Message;
using wire::Opcode;

constexpr int64_t kSecondNs = 1'000'000'000;
constexpr std::byte kNonce[wire::kNonceBytes] = {};

TEST(HostilePeer, BreaksNothingInManySessions) {
  const int64_t sessions = RoundsOf(50'000);
  ReportFigure("sessions", 2 * sessions);
  for (const char* secret : {"", "a secret"}) {
    HostilePeer peer(secret);
    RandomSequence random(SoakSeed(5), *secret == 0 ? 0 : 1);
    for (int64_t i = 0; i < sessions; ++i) {
      SCOPED_TRACE(i);
      peer.RunSession([&](int64_t bound) { return random.Below(bound); });
    }
    // The sessions reach what they are to break.
    EXPECT_GT(peer.sessions_open, sessions / 10);
    EXPECT_GT(peer.entries_taken, sessions / 100);
    EXPECT_GT(peer.errors, sessions * 2 / 5);
    EXPECT_GT(peer.goodbyes, sessions * 2 / 5);
    EXPECT_GT(peer.answers, peer.errors);
  }
}

// A server and a client whose bytes the test carries.
class Pair : private ClientSession::Owner {
 public:
  explicit Pair(int64_t requests_max = 8, std::string client_secret = {},
                std::string server_secret = {})
      : lookup(LocalLookupBuffer::Create({.capacity_bytes = 1 << 24}).value()),
        store(StoreBuffer::Create({.capacity_bytes = 1 << 24}).value()),
        served_{.lookup = lookup.get(),
                .store = store.get(),
                .secret = std::move(server_secret),
                .requests_max = requests_max,
                .query_bytes_max = 1 << 16,
                .heartbeat_ns = kSecondNs / 2,
                .dead_after_ns = 3 * kSecondNs,
                .lease_ns = 30 * kSecondNs,
                .budget = wire::ByteBudget(1 << 25),
                .waiting = wire::ByteBudget(1 << 16)} {
    server = std::make_unique<ServerSession>(
        &served_, std::span(kNonce), [this] { is_woken_ = true; }, now);
    client = std::make_unique<ClientSession>(
        static_cast<ClientSession::Owner*>(this),
        ClientSession::Options{.secret = std::move(client_secret),
                               .services = wire::kServiceLookup | wire::kServiceStore,
                               .message_bytes_max = 1 << 24},
        std::span(kNonce), now);
  }

  // All that one side has to say, in pieces of `piece` bytes; to the server through `spoil`.
  void Exchange(size_t piece = 1 << 20,
                const std::function<void(std::vector<std::byte>&)>& spoil = {}) {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      if (is_woken_) server->Wake(now);
      is_woken_ = false;
      while (client->has_output()) {
        std::vector<std::byte> bytes = OneFrame(*client, piece);
        client->Sent(bytes.size());
        if (spoil) spoil(bytes);
        server->Receive(bytes, now);
        has_moved = true;
      }
      while (server->has_output() && !is_server_mute) {
        const std::vector<std::byte> bytes = OneFrame(*server, piece);
        server->Sent(bytes.size(), now);
        client_status = client->Receive(bytes, now);
        has_moved = true;
      }
    }
  }
  // A piece of what the client has to say, and all that the server says then.
  void Turn(size_t piece) {
    const std::vector<std::byte> bytes = OneFrame(*client, piece);
    client->Sent(bytes.size());
    server->Receive(bytes, now);
    while (server->has_output()) {
      const std::vector<std::byte> answer = OneFrame(*server, size_t{1} << 20);
      server->Sent(answer.size(), now);
      client_status = client->Receive(answer, now);
    }
  }
  void PassTime(int64_t ns) {
    now += ns;
    server->Tick(now);
    client_status = client->Tick(now);
  }

  uint64_t Send(Message message) {
    message.request = ++request_;
    client->Send(std::move(message));
    return request_;
  }
  uint64_t Take(int64_t timeout_ns) {
    Message message{.opcode = Opcode::kTake};
    wire::FieldWriter(&message.fields).Add(timeout_ns);
    return Send(std::move(message));
  }
  // The query has `token` `count` times.
  uint64_t TakeTokens(int64_t timeout_ns, int64_t count, int64_t token) {
    Message message{.opcode = Opcode::kTake};
    wire::FieldWriter(&message.fields).Add(timeout_ns);
    message.tensors.emplace_back("tokens",
                                 Ids(std::vector<int64_t>(static_cast<size_t>(count), token)));
    return Send(std::move(message));
  }
  void Insert(const std::vector<int64_t>& tokens, int64_t floats = 0) {
    LookupEntry entry{.tokens = Ids(tokens), .roi = Ones(tokens.size()), .tensors = {}};
    if (floats > 0) entry.tensors.emplace_back("key", Floats({floats}, 2));
    ASSERT_TRUE(lookup->Insert(std::move(entry), Timeout(0)).ok());
  }
  // "" when there is no answer yet.
  std::string CodeOf(uint64_t request) const {
    const auto place = answers.find(request);
    if (place == answers.end()) return "";
    return std::string(StatusCodeName(place->second.status().code()));
  }

  uint64_t Put(const std::string& key, int64_t floats) {
    Message put{.opcode = Opcode::kPut};
    wire::FieldWriter(&put.fields).AddText(key);
    put.tensors.emplace_back("", Floats({floats}, 1));
    return Send(std::move(put));
  }
  uint64_t Get(const std::string& key) {
    Message get{.opcode = Opcode::kGet};
    wire::FieldWriter(&get.fields).AddText(key);
    return Send(std::move(get));
  }
  // Bytes that the server still takes.
  int64_t budget_left() const { return served_.budget.left(); }
  // Bytes of queries that may still wait.
  int64_t waiting_left() const { return served_.waiting.left(); }

  int64_t now = 0;
  std::unique_ptr<LocalLookupBuffer> lookup;
  std::unique_ptr<StoreBuffer> store;
  std::unique_ptr<ServerSession> server;
  std::unique_ptr<ClientSession> client;
  Status client_status;
  bool is_server_mute = false;
  std::map<uint64_t, Result<Message>> answers;

 private:
  void OnAnswer(uint64_t request, Result<Message> answer) override {
    EXPECT_TRUE(answers.emplace(request, std::move(answer)).second) << "two answers";
  }
  template <typename Session>
  static std::vector<std::byte> OneFrame(Session& session, size_t most) {
    std::vector<std::byte> bytes;
    for (const auto part : session.Gather()) {
      const auto some = part.first(std::min(part.size(), most - bytes.size()));
      bytes.insert(bytes.end(), some.begin(), some.end());
    }
    return bytes;
  }

  ServedBuffers served_;
  bool is_woken_ = false;
  uint64_t request_ = 0;
};

TEST(WireSession, CarriesEntriesInPiecesOfAnySize) {
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{63}, size_t{4096}, size_t{1} << 20}) {
    Pair pair;
    pair.Exchange(piece);
    const int64_t floats = piece < 100 ? 50 : 600'000;  // more than two frames
    pair.Insert({7, 8}, floats);
    const uint64_t take = pair.Take(0);
    pair.Exchange(piece);
    ASSERT_EQ(pair.CodeOf(take), "Ok");
    const Message& answer = *pair.answers.at(take);
    ASSERT_EQ(answer.tensors.size(), 3U);
    EXPECT_EQ(ValuesOf<int64_t>(answer.tensors[0].second), (std::vector<int64_t>{7, 8}));
    EXPECT_EQ(answer.tensors[2].first, "key");
    EXPECT_EQ(ValuesOf<float>(answer.tensors[2].second),
              std::vector<float>(static_cast<size_t>(floats), 2));
    EXPECT_GT(pair.lookup->used_bytes(), 0) << "until it is acknowledged";
    pair.answers.clear();
    pair.client->Send({.opcode = Opcode::kAcknowledge, .request = take});
    pair.Exchange(piece);
    EXPECT_EQ(pair.CodeOf(take), "Ok");
    EXPECT_EQ(pair.lookup->used_bytes(), 0);
  }
}

TEST(WireSession, ATakeThatWaitsHoldsNothingUp) {
  Pair pair;
  pair.Exchange();
  const uint64_t waiting = pair.Take(-1);
  const uint64_t short_one = pair.Take(kSecondNs);
  Message put{.opcode = Opcode::kPut};
  wire::FieldWriter(&put.fields).AddText("k");
  put.tensors.emplace_back("", Floats({600'000}, 1));
  const uint64_t stored = pair.Send(std::move(put));
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(waiting), "");
  EXPECT_EQ(pair.CodeOf(stored), "Ok");
  EXPECT_EQ(pair.store->size(), 1);
  pair.PassTime(kSecondNs);
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(short_one), "Ok");
  EXPECT_TRUE(pair.answers.at(short_one)->tensors.empty());
  pair.Insert({1});
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(waiting), "Ok");
}

TEST(WireSession, SmallAnswersPassLargeOnes) {
  Pair pair;
  pair.Exchange();
  pair.Insert({1}, 1'500'000);
  const uint64_t take = pair.Take(0);
  pair.is_server_mute = true;
  pair.Exchange();
  const uint64_t stats = pair.Send({.opcode = Opcode::kStats});
  pair.Exchange();
  pair.is_server_mute = false;
  // One frame of the entry, then it is the other one's turn.
  for (int i = 0; i < 2; ++i) {
    std::vector<std::byte> bytes;
    for (const auto part : pair.server->Gather())
      bytes.insert(bytes.end(), part.begin(), part.end());
    pair.server->Sent(bytes.size(), pair.now);
    ASSERT_TRUE(pair.client->Receive(bytes, pair.now).ok());
  }
  EXPECT_EQ(pair.CodeOf(stats), "Ok");
  EXPECT_EQ(pair.CodeOf(take), "");
}

TEST(WireSession, CancelEndsATakeWhereverItIs) {
  Pair pair;
  pair.Exchange();
  const uint64_t waiting = pair.Take(-1);
  pair.Exchange();
  pair.client->Cancel(waiting);
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(waiting), "Cancelled");
  EXPECT_EQ(pair.lookup->waiting(), 0);
  pair.Insert({1}, 600'000);
  const uint64_t half = pair.Take(0);
  pair.is_server_mute = true;
  pair.Exchange();
  const auto part = pair.server->Gather()[0];
  ASSERT_TRUE(pair.client->Receive(part, pair.now).ok());
  pair.server->Sent(part.size(), pair.now);
  pair.client->Cancel(half);
  pair.Exchange();
  EXPECT_EQ(pair.lookup->size(), 1) << "it is back at once";
  pair.is_server_mute = false;
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(half), "Cancelled");
  const uint64_t whole = pair.Take(0);
  pair.Exchange();
  EXPECT_EQ(pair.lookup->size(), 0);
  pair.client->Cancel(whole);  // instead of an acknowledgement
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(whole), "Ok");
  EXPECT_EQ(pair.lookup->size(), 1);
}

TEST(WireSession, EveryFlippedBitIsNoticed) {
  // A put on its way to the server: the value is stored as sent or not at all.
  for (size_t at = 0; at < 64 + 9 + 8 + 8; ++at) {
    for (int bit = 0; bit < 8; bit += 3) {
      Pair pair;
      pair.Exchange();
      Message put{.opcode = Opcode::kPut};
      wire::FieldWriter(&put.fields).AddText("k");
      put.tensors.emplace_back("", Ids({0x1122334455667788}));
      const uint64_t request = pair.Send(std::move(put));
      pair.Exchange(1 << 20, [&](std::vector<std::byte>& bytes) {
        ASSERT_LT(at, bytes.size());
        bytes[at] ^= static_cast<std::byte>(1 << bit);
      });
      EXPECT_EQ(pair.store->size(), 0) << at;
      const bool is_body = at >= wire::kHeaderBytes;
      EXPECT_EQ(pair.CodeOf(request), is_body ? "Remote" : "") << at;
      EXPECT_EQ(pair.client_status.code(), is_body ? StatusCode::kOk : StatusCode::kRemote) << at;
      EXPECT_EQ(pair.server->is_open(), is_body);
    }
  }
}

TEST(WireSession, LostRepeatedAndMovedFramesEndTheConnection) {
  for (const int how : {0, 1, 2}) {
    Pair pair;
    pair.Exchange();
    std::vector<std::byte> held;
    pair.Send({.opcode = Opcode::kStats});
    pair.Send({.opcode = Opcode::kPing});
    pair.Exchange(1 << 20, [&](std::vector<std::byte>& bytes) {
      if (held.empty()) {
        held = bytes;
        if (how == 0) bytes.clear();                                        // lost
        if (how == 1) bytes.insert(bytes.end(), held.begin(), held.end());  // repeated
        if (how == 2) bytes.clear();                                        // later
      } else if (how == 2) {
        bytes.insert(bytes.end(), held.begin(), held.end());
      }
    });
    EXPECT_EQ(pair.client_status.code(), StatusCode::kRemote) << how;
    EXPECT_NE(pair.client_status.message().find("lost, repeated or moved"), std::string::npos);
    EXPECT_FALSE(pair.server->is_open());
  }
}

TEST(WireSession, ASilentClientIsDeadAndItsEntryGoesBack) {
  Pair pair;
  pair.Exchange();
  pair.Insert({1});
  pair.Take(0);
  pair.Exchange();
  EXPECT_EQ(pair.lookup->size(), 0);
  pair.now += 3 * kSecondNs - 1;
  pair.server->Tick(pair.now);
  EXPECT_FALSE(pair.server->is_over());
  pair.now += 1;
  pair.server->Tick(pair.now);
  EXPECT_TRUE(pair.server->is_over());
  EXPECT_EQ(pair.lookup->size(), 1);
}

TEST(WireSession, PingsKeepAConnectionAndASilentServerIsNoticed) {
  Pair pair;
  pair.Exchange();
  for (int i = 0; i < 20; ++i) {
    pair.PassTime(kSecondNs / 2);
    pair.Exchange();
  }
  EXPECT_TRUE(pair.client_status.ok());
  EXPECT_TRUE(pair.server->is_open());
  pair.is_server_mute = true;
  for (int i = 0; i < 6; ++i) {
    pair.PassTime(kSecondNs / 2);
    pair.Exchange();
  }
  EXPECT_EQ(pair.client_status.code(), StatusCode::kUnavailable);
}

TEST(WireSession, AnEntryWithoutAcknowledgementGoesBackAfterItsLease) {
  Pair pair;
  pair.Exchange();
  pair.Insert({1});
  const uint64_t take = pair.Take(0);
  pair.Exchange();
  for (int i = 0; i < 60; ++i) {
    EXPECT_EQ(pair.lookup->size(), 0);
    pair.PassTime(kSecondNs / 2);
    pair.Exchange();
  }
  EXPECT_EQ(pair.lookup->size(), 1);
  pair.answers.clear();
  pair.client->Send({.opcode = Opcode::kAcknowledge, .request = take});
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(take), "Remote") << "too late";
  EXPECT_EQ(pair.lookup->size(), 1);
}

TEST(WireSession, AStrangerHasLittleTimeAndMemory) {
  Pair pair;
  EXPECT_LE(pair.server->memory_bytes(), 1 << 16);
  pair.server->Tick(3 * kSecondNs - 1);
  EXPECT_FALSE(pair.server->has_output());
  pair.server->Tick(3 * kSecondNs);
  EXPECT_TRUE(pair.server->has_output()) << "a goodbye";
  pair.server->Tick(6 * kSecondNs);
  EXPECT_TRUE(pair.server->is_over());
}

TEST(WireSession, WhoDoesNotReadIsNotReadFrom) {
  Pair pair(4);
  pair.Exchange();
  pair.is_server_mute = true;
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(pair.server->accepts_input());
    pair.Send({.opcode = Opcode::kStats});
    pair.Exchange();
  }
  EXPECT_FALSE(pair.server->accepts_input());
  pair.is_server_mute = false;
  pair.Exchange();
  EXPECT_TRUE(pair.server->accepts_input());
}

TEST(WireSession, OnlyTheSameSecretOpens) {
  const auto status = [](const char* client, const char* server) {
    Pair pair(8, client, server);
    pair.Exchange();
    EXPECT_EQ(pair.client->is_open(), pair.client_status.ok());
    return pair.client_status.code();
  };
  EXPECT_EQ(status("a", "a"), StatusCode::kOk);
  EXPECT_EQ(status("a", "b"), StatusCode::kRemote);
  EXPECT_EQ(status("", "b"), StatusCode::kRemote);
  EXPECT_EQ(status("a", ""), StatusCode::kRemote);
}

TEST(WireSession, ClosingTellsWhoWaits) {
  Pair pair;
  pair.Exchange();
  pair.Take(-1);
  pair.Exchange();
  pair.server->Close(pair.now);
  pair.Exchange();
  EXPECT_EQ(pair.client_status.code(), StatusCode::kClosed);
  EXPECT_TRUE(pair.server->is_over());
  EXPECT_EQ(pair.lookup->waiting(), 0);
}

TEST(WireSession, TooManyRequestsAndTooLargeOnesAreRefused) {
  Pair pair(2);
  pair.Exchange();
  pair.Take(-1);
  pair.Take(-1);
  const uint64_t third = pair.Take(-1);
  Message put{.opcode = Opcode::kPut};
  wire::FieldWriter(&put.fields).AddText("k");
  put.tensors.emplace_back("", Floats({5'000'000}, 1));
  const uint64_t large = pair.Send(std::move(put));
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(third), "Full");
  EXPECT_EQ(pair.CodeOf(large), "TooLarge");
  EXPECT_TRUE(pair.server->is_open());
}

// A server keeps the tokens of every query that waits, over all connections.
TEST(WireSession, QueriesThatWaitHaveABudget) {
  Pair pair;
  pair.Exchange();
  const int64_t whole = pair.waiting_left();
  const int64_t half = whole / 2 / static_cast<int64_t>(sizeof(int64_t));  // tokens
  const uint64_t first = pair.TakeTokens(-1, half, 1), second = pair.TakeTokens(-1, half, 2);
  const uint64_t third = pair.TakeTokens(-1, 1, 3);
  const uint64_t hasty = pair.TakeTokens(0, half, 3), any = pair.Take(-1);
  pair.Exchange();
  EXPECT_EQ(pair.waiting_left(), 0);
  EXPECT_EQ(pair.CodeOf(third), "Full");
  EXPECT_EQ(pair.CodeOf(hasty), "Ok") << "what does not wait takes no room";
  for (const uint64_t request : {first, second, any}) EXPECT_EQ(pair.CodeOf(request), "");
  // Each end of a wait gives back what it had: an entry, a cancel, and the connection's end.
  pair.Insert({1});
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(first), "Ok");
  EXPECT_EQ(pair.waiting_left(), whole / 2);
  pair.client->Cancel(second);
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(second), "Cancelled");
  EXPECT_EQ(pair.waiting_left(), whole);
  pair.TakeTokens(-1, 2 * half, 4);
  pair.Exchange();
  EXPECT_EQ(pair.waiting_left(), 0);
  pair.server->Close(pair.now);
  EXPECT_EQ(pair.waiting_left(), whole);
}

TEST(WireSession, APutTakesTheServersBudgetWhileItArrives) {
  constexpr int64_t kBytes = 3 << 20;  // at least three frames
  Pair pair;
  pair.Exchange();
  const int64_t whole = pair.budget_left();
  const uint64_t put = pair.Put("k", kBytes / 4);
  std::vector<int64_t> taken;  // before each frame
  pair.Exchange(1 << 20,
                [&](std::vector<std::byte>&) { taken.push_back(whole - pair.budget_left()); });
  ASSERT_GE(taken.size(), 3u);
  EXPECT_EQ(taken[0], 0);
  for (size_t i = 1; i < taken.size(); ++i) EXPECT_EQ(taken[i], kBytes) << "frame " << i;
  EXPECT_EQ(pair.CodeOf(put), "Ok");
  EXPECT_EQ(pair.budget_left(), whole);
}

TEST(WireSession, APutOverTheServersBudgetIsFullUntilTheOthersArrived) {
  constexpr int64_t kFloats = 3 << 20;  // two of them fit into the budget, three do not
  Pair pair;
  pair.Exchange();
  const int64_t whole = pair.budget_left();
  ASSERT_LT(whole, 3 * 4 * kFloats);
  ASSERT_GE(whole, 2 * 4 * kFloats);
  pair.Put("a", kFloats);
  pair.Put("b", kFloats);
  const uint64_t third = pair.Put("c", kFloats);
  pair.Exchange();
  ASSERT_EQ(pair.CodeOf(third), "Full");
  EXPECT_NE(pair.answers.at(third).status().message().find("while others arrive"),
            std::string_view::npos);
  EXPECT_EQ(pair.budget_left(), whole);
  const uint64_t again = pair.Put("c", 1000);
  pair.Exchange();
  EXPECT_NE(pair.CodeOf(again), "");
  EXPECT_EQ(pair.budget_left(), whole);
}

// Signs of life, questions about the buffer and acknowledgements have no place of their own.
TEST(WireSession, SmallRequestsPassPutsThatFillAllPlaces) {
  constexpr int64_t kFloats = 700'000;  // three frames
  Pair pair(2);
  pair.Exchange();
  const uint64_t first = pair.Put("a", kFloats), second = pair.Put("b", kFloats);
  const uint64_t stats = pair.Send({.opcode = Opcode::kStats});
  pair.client->Cancel(99);
  pair.Turn(1 << 20);
  pair.Turn(1 << 20);
  pair.Turn(1 << 20);
  EXPECT_EQ(pair.CodeOf(stats), "Ok") << pair.client_status.ToString();
  EXPECT_EQ(pair.CodeOf(first), "");
  pair.PassTime(kSecondNs / 2);  // a ping
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(first), "Ok");
  EXPECT_EQ(pair.CodeOf(second), "Ok");
  EXPECT_TRUE(pair.client_status.ok()) << pair.client_status.ToString();
}

TEST(WireSession, MoreUnfinishedMessagesThanPlacesEndTheConnection) {
  constexpr int64_t kFloats = 700'000;
  Pair pair(2);
  pair.Exchange();
  for (const char* key : {"a", "b", "c"}) pair.Put(key, kFloats);
  pair.Exchange();
  EXPECT_EQ(pair.client_status.code(), StatusCode::kTooLarge);
  EXPECT_FALSE(pair.server->is_open());
}

// The answer comes while most of the put is to be sent, in the middle of a frame; its place is
// another request's then.
TEST(WireSession, APutThatIsRefusedAtItsHeadIsSentNoFurther) {
  constexpr int64_t kFloats = 700'000;  // three frames
  Pair pair(1);
  pair.Exchange();
  const uint64_t large = pair.Put("a", 5'000'000);
  pair.Turn(1 << 16);
  ASSERT_EQ(pair.CodeOf(large), "TooLarge");
  const uint64_t next = pair.Put("b", kFloats);
  int64_t bytes = 0;
  pair.Exchange(1 << 20, [&](std::vector<std::byte>& some) { bytes += std::ssize(some); });
  EXPECT_EQ(pair.CodeOf(next), "Ok") << pair.client_status.ToString();
  EXPECT_LT(bytes, (1 << 20) + 4 * kFloats + 1000) << "the rest of a frame, and the second put";
  EXPECT_EQ(pair.store->size(), 1);
  EXPECT_EQ(pair.answers.size(), 2u);
  EXPECT_TRUE(pair.server->is_open());
}

// The tensors are replaced: only the answers keep them.
TEST(WireSession, AnswersOfAStoreHoldAtMostTheStoresCapacity) {
  constexpr int64_t kGets = 6;
  Pair pair;
  pair.Exchange();
  const int64_t bytes = pair.store->capacity_bytes() / 5 * 2;
  std::vector<std::weak_ptr<std::byte[]>> buffers;
  std::vector<uint64_t> gets;
  pair.is_server_mute = true;
  for (int64_t i = 0; i < kGets; ++i) {
    auto buffer = std::make_shared<std::byte[]>(static_cast<size_t>(bytes));
    buffers.push_back(buffer);
    ASSERT_TRUE(
        pair.store
            ->Put("k",
                  HostTensor::Share(ElementType(kDLUInt, 8), {bytes}, std::move(buffer)).value())
            .ok());
    gets.push_back(pair.Get("k"));
    pair.Exchange();
  }
  ASSERT_TRUE(pair.store->Put("k", Ids({7})).ok());
  EXPECT_EQ(std::ranges::count_if(buffers, [](const auto& b) { return !b.expired(); }), 2);
  EXPECT_TRUE(pair.server->accepts_input()) << "what is small does not wait";
  const uint64_t stats = pair.Send({.opcode = Opcode::kStats});
  pair.is_server_mute = false;
  pair.Exchange();
  EXPECT_EQ(pair.CodeOf(stats), "Ok");
  for (const uint64_t get : gets) ASSERT_EQ(pair.CodeOf(get), "Ok");
  EXPECT_EQ(pair.answers.at(gets[1])->tensors[0].second.bytes(), bytes);
  EXPECT_EQ(ValuesOf<int64_t>(pair.answers.at(gets[2])->tensors[0].second), std::vector<int64_t>{7})
      << "it is looked up when there is room";
}

// Each get that waits counts as an answer: nothing is read from a client that does not read.
TEST(WireSession, GetsThatWaitAreBounded) {
  Pair pair(4);
  pair.Exchange();
  ASSERT_TRUE(pair.store->Put("k", Floats({3'000'000}, 1)).ok());  // 12 of 16 MiB
  pair.is_server_mute = true;
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(pair.server->accepts_input());
    pair.Get("k");
    pair.Exchange();
  }
  EXPECT_FALSE(pair.server->accepts_input());
  const uint64_t wrong = pair.Get(std::string(100'000, 'x'));
  const int64_t before = pair.server->memory_bytes();
  pair.Exchange();
  EXPECT_LT(pair.server->memory_bytes(), before + 10'000) << "no long key is kept";
  pair.is_server_mute = false;
  pair.Exchange();
  EXPECT_EQ(pair.answers.size(), 9u);
  EXPECT_EQ(pair.CodeOf(wrong), "BadArgument");
  EXPECT_TRUE(pair.server->accepts_input());
  EXPECT_TRUE(pair.server->is_open());
}

// Any process may listen at the port: it has shown no secret yet.
TEST(WireSession, AGoodbyeHasNoTensors) {
  for (const bool is_open : {false, true}) {
    Pair pair;
    if (is_open) pair.Exchange();
    const auto buffer = std::make_shared<std::byte[]>(size_t{1} << 21);
    Message goodbye{.opcode = Opcode::kGoodbye, .is_reply = true};
    goodbye.tensors.emplace_back(
        "", HostTensor::Share(ElementType(kDLUInt, 8), {1 << 21}, buffer).value());
    wire::WireSender sender;
    if (is_open) {  // frames are counted: the hello was the first one
      sender.Queue({.opcode = Opcode::kHello, .is_reply = true});
      sender.Gather();
      sender.Consume(wire::kHeaderBytes);
    }
    sender.Queue(std::move(goodbye));
    const auto parts = sender.Gather();
    for (size_t i = 0; i < 2; ++i) {  // its header and its head, no data
      pair.client_status = pair.client->Receive(parts[i], pair.now);
    }
    EXPECT_EQ(pair.client_status.code(), StatusCode::kRemote);
    EXPECT_NE(pair.client_status.message().find("tensors where none belong"),
              std::string_view::npos)
        << pair.client_status.ToString();
  }
}

}  // namespace
}  // namespace quire
