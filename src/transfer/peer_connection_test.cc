// Connections with their threads, over a socket, shared memory and UCX, and while the bytes are
// delayed, cut, changed, repeated and moved.
#include "transfer/peer_connection.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/guard.h"
#include "base/testing/refuse_each.h"
#include "base/testing/soak.h"
#include "base/testing/threads_of_process.h"
#include "transfer/testing/faulty_channel.h"
#include "transfer/testing/gate.h"
#include "transfer/testing/test_channels.h"
#include "transfer/testing/test_session.h"

namespace quire {
namespace {

// What happens where a connection's bytes move.
struct ChannelHooks {
  using Places = std::span<const std::span<std::byte>>;

  std::atomic<bool> are_on = false;       // set all others before
  std::function<void(Places)> on_read{};  // bytes have come
  std::function<void()> on_write{};
};

int64_t BytesOf(ChannelHooks::Places places) {
  int64_t bytes = 0;
  for (const std::span<std::byte>& place : places) bytes += std::ssize(place);
  return bytes;
}

// Another channel, in which no two threads are at a time.
class WatchedChannel final : public ByteChannel {
 public:
  WatchedChannel(std::unique_ptr<ByteChannel> inner, const ChannelHooks* hooks)
      : inner_(std::move(inner)), hooks_(hooks) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    const Inside inside(&is_inside_);
    const Result<size_t> count = inner_->Read(into);
    if (hooks_->are_on && hooks_->on_read && count.ok() && *count > 0) hooks_->on_read(into);
    return count;
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    const Inside inside(&is_inside_);
    if (hooks_->are_on && hooks_->on_write) hooks_->on_write();
    return inner_->Write(parts);
  }
  void EndWrites() noexcept override {
    const Inside inside(&is_inside_);
    inner_->EndWrites();
  }
  bool HasLeft() noexcept override {
    const Inside inside(&is_inside_);
    return inner_->HasLeft();
  }
  Wait PrepareWait(bool wants_read, bool wants_write) override {
    const Inside inside(&is_inside_);
    return inner_->PrepareWait(wants_read, wants_write);
  }

 private:
  class Inside {
   public:
    explicit Inside(std::atomic<bool>* is_inside) : is_inside_(is_inside) {
      QUIRE_CHECK(!is_inside_->exchange(true)) << "two threads are in a channel";
    }
    ~Inside() { *is_inside_ = false; }

   private:
    std::atomic<bool>* const is_inside_;
  };

  const std::unique_ptr<ByteChannel> inner_;
  const ChannelHooks* const hooks_;
  std::atomic<bool> is_inside_ = false;
};

// A receiver that connects and a sender.
struct ConnectionPair {
  explicit ConnectionPair(Channels channels, int64_t window_bytes = 1 << 20,
                          int64_t dead_after_ns = kMinuteNs, int64_t send_wait_ns = kMinuteNs) {
    channels[0] = std::make_unique<WatchedChannel>(std::move(channels[0]), &to_hooks);
    channels[1] = std::make_unique<WatchedChannel>(std::move(channels[1]), &from_hooks);
    TransferSession::Options options = TestSessionOptions(true, "a secret");
    options.window_bytes = window_bytes;
    options.dead_after_ns = dead_after_ns;
    options.send_wait_ns = send_wait_ns;
    to = PeerConnection::Start(std::move(channels[0]), "test", options, nullptr).value();
    options.is_connector = false;
    from = PeerConnection::Start(std::move(channels[1]), "test", options, nullptr).value();
    EXPECT_TRUE(to->SetReceiver(&receiver).ok());
  }
  ~ConnectionPair() { EXPECT_TRUE(to->SetReceiver(nullptr).ok()); }
  int64_t Soon() const { return clock->SteadyNs() + kMinuteNs; }

  // A reservation that the sender has learnt of, or why not.
  Result<uint64_t> Ask(int64_t rows) {
    const ReceiveMap map = receiver.Reserve(rows);
    QUIRE_RETURN_IF_ERROR(to->WaitOpen(Soon()));
    QUIRE_RETURN_IF_ERROR(to->Request({}, map));
    QUIRE_ASSIGN_OR_RETURN(const auto request, from->NextRequest(*clock, Soon()));
    EXPECT_EQ(request->map.slots, map.slots);
    return map.epoch;
  }
  Status Send(uint64_t epoch, int64_t first, int64_t count, int64_t first_head = 0,
              int64_t head_count = kTestHeads) {
    return SendRows(from.get(), epoch, first, count, first_head, head_count);
  }

  // Holds up the first read of `rows` rows, before they are hashed, and changes a bit then.
  void HoldReadOf(int64_t rows, Gate* gate, bool is_damaged) {
    to_hooks.on_read = [=](ChannelHooks::Places places) {
      if (BytesOf(places) != rows * kTestRowBytes || gate->passed() > 0) return;
      gate->Pass();
      if (is_damaged) places.front().front() ^= std::byte{1};
    };
    to_hooks.are_on = true;
  }

  const std::shared_ptr<Clock> clock = MachineTime();
  TestReceiver receiver;
  ChannelHooks to_hooks, from_hooks;
  std::shared_ptr<PeerConnection> to;
  std::shared_ptr<PeerConnection> from;
};

TEST(PeerConnection, RowsArriveOverEveryChannel) {
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    // A window of a few rows, so that the sender waits for the receiver.
    ConnectionPair pair(MakeChannels(way), 1000 * kTestRowBytes);
    const auto epoch = pair.Ask(20'000);
    ASSERT_TRUE(epoch.ok()) << epoch.status().ToString();
    for (int64_t row = 0; row < 20'000; row += 500)
      ASSERT_EQ(pair.Send(*epoch, row, 500).ToString(), "Ok");
    EXPECT_TRUE(pair.receiver.WaitReceived(*epoch, 20'000, *pair.clock, pair.Soon()).ok());
    pair.receiver.CheckPages();
    EXPECT_EQ(pair.to->stats().bytes_received, kTestLayers * 20'000 * kTestRowBytes);
    EXPECT_EQ(pair.from->stats().parts_sent_again, 0);
  }
}

// A state has one staging memory for all of its connections: here room for one part alone, for two
// senders with one head each, and four hundred times as much comes.
TEST(PeerConnection, TwoSendersShareTheStagingMemoryOfAReceiver) {
  constexpr int64_t kRows = 400;
  constexpr int64_t kRowsOfPart = 4;
  constexpr int64_t kStaging = kRowsOfPart * kTestRowBytes / kTestHeads;
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    ConnectionPair first(MakeChannels(way), kStaging), second(MakeChannels(way), 1 << 20);
    TestReceiver& receiver = first.receiver;
    ASSERT_TRUE(second.to->SetReceiver(nullptr).ok());
    ASSERT_TRUE(receiver.SetStagingLimit(kStaging).ok());
    const Status refused = second.to->SetReceiver(&receiver);
    EXPECT_EQ(refused.code(), StatusCode::kBadArgument);
    EXPECT_NE(refused.message().find("staging_bytes"), std::string::npos) << refused.ToString();
    ConnectionPair third(MakeChannels(way), kStaging);
    ASSERT_TRUE(third.to->SetReceiver(nullptr).ok());
    ASSERT_TRUE(third.to->SetReceiver(&receiver).ok());
    const ReceiveMap map = receiver.Reserve(kRows);
    const auto send = [&](ConnectionPair& pair, int64_t head) -> Status {
      QUIRE_RETURN_IF_ERROR(pair.to->WaitOpen(pair.Soon()));
      QUIRE_RETURN_IF_ERROR(pair.to->Request({}, map));
      QUIRE_RETURN_IF_ERROR(pair.from->NextRequest(*pair.clock, pair.Soon()).status());
      for (int64_t row = 0; row < kRows; row += 100)
        QUIRE_RETURN_IF_ERROR(pair.Send(map.epoch, row, 100, head, 1));
      return Status();
    };
    Status statuses[2];
    std::thread other([&] { statuses[1] = send(third, 1); });
    statuses[0] = send(first, 0);
    other.join();
    for (const Status& status : statuses) EXPECT_EQ(status.ToString(), "Ok");
    EXPECT_TRUE(receiver.WaitReceived(map.epoch, kRows, *first.clock, first.Soon()).ok());
    receiver.CheckPages();
    EXPECT_EQ(receiver.staging().largest, kStaging);
    ASSERT_TRUE(third.to->SetReceiver(nullptr).ok());
  }
}

TEST(PeerConnection, ARowBeyondTheWindowIsRefusedAndNoneIsHeld) {
  ConnectionPair pair(MakeChannels(Way::kSocket), kTestRowBytes - 1);
  const auto epoch = pair.Ask(1);
  ASSERT_TRUE(epoch.ok());
  const Status status = pair.Send(*epoch, 0, 1);
  EXPECT_EQ(status.code(), StatusCode::kTooLarge);
  EXPECT_NE(status.message().find("window_bytes"), std::string::npos);
}

TEST(PeerConnection, ASenderThatWaitsForTheWindowEndsWithTheConnection) {
  for (const bool closes_receiver : {false, true}) {
    ConnectionPair pair(MakeChannels(Way::kSocket), kTestRowBytes);
    const auto epoch = pair.Ask(100'000);
    ASSERT_TRUE(epoch.ok());
    Status status;
    std::thread sender([&] {
      for (int64_t row = 0; row < 100'000 && status.ok(); ++row) status = pair.Send(*epoch, row, 1);
    });
    EXPECT_TRUE(pair.receiver.WaitReceived(*epoch, 3, *pair.clock, pair.Soon()).ok());
    (closes_receiver ? pair.to : pair.from)->Close();
    sender.join();
    EXPECT_FALSE(status.ok());
    pair.receiver.CheckPages();
  }
}

// A receiver that takes nothing: Hold() keeps its connection's thread in View.
TEST(PeerConnection, ASenderWaitsForTheWindowForItsTimeAlone) {
  ConnectionPair pair(MakeChannels(Way::kSocket), kTestRowBytes, kMinuteNs, 1'000'000);
  const auto epoch = pair.Ask(100);
  ASSERT_TRUE(epoch.ok());
  EXPECT_EQ(pair.from->send_room(), kTestRowBytes);
  std::unique_lock held = pair.receiver.Hold();
  Status status;
  for (int64_t row = 0; row < 100 && status.ok(); ++row) status = pair.Send(*epoch, row, 1);
  EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.ToString();
  EXPECT_NE(status.message().find("send_wait"), std::string::npos);
  EXPECT_LT(pair.from->send_room(), kTestRowBytes);
  EXPECT_TRUE(pair.from->SendStatus(*epoch).ok());
  held.unlock();
}

// Parts are as large as the window takes, not larger.
TEST(PeerConnection, AWindowOfOneRowTakesRowByRow) {
  ConnectionPair pair(MakeChannels(Way::kSocket), kTestRowBytes);
  const auto epoch = pair.Ask(50);
  ASSERT_TRUE(epoch.ok());
  ASSERT_EQ(pair.Send(*epoch, 0, 50).ToString(), "Ok");
  EXPECT_TRUE(pair.receiver.WaitReceived(*epoch, 50, *pair.clock, pair.Soon()).ok());
  pair.receiver.CheckPages();
  EXPECT_EQ(pair.from->stats().parts_sent, kTestLayers * 50);
}

// Else the window would become too small for a prompt, which would then wait for ever.
TEST(PeerConnection, RowsThatCannotBeSentTakeNoRoom) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  const auto epoch = pair.Ask(4);
  ASSERT_TRUE(epoch.ok());
  const int64_t room = pair.from->send_room();
  TestRows rows = RowsOfLayer(0, 4);
  SendRange range;
  range.epoch = *epoch;
  range.count = 4;
  range.local = rows.View(0, 4);
  range.head_count = kTestHeads;
  bool has_leaked = false;
  RefuseEach("OnLayerAppended", StatusCode::kOk, [&] {
    has_leaked |= pair.from->send_room() != room;
    return pair.from->OnLayerAppended(0, std::span(&range, 1));
  });
  EXPECT_FALSE(has_leaked);
}

TEST(PeerConnection, RowsOfAllHeadsStayWhereTheyAreUntilTheyAreTaken) {
  constexpr int64_t kRows = 100;
  ConnectionPair pair(MakeChannels(Way::kSocket));
  const auto epoch = pair.Ask(kRows);
  ASSERT_TRUE(epoch.ok());
  std::promise<void> gone;
  std::shared_ptr<TestRows> rows(new TestRows(RowsOfLayer(0, kRows)), [&gone](TestRows* held) {
    delete held;
    gone.set_value();
  });
  SendRange range;
  range.epoch = *epoch;
  range.count = kRows;
  range.local = rows->View(0, kRows);
  range.head_count = 1;
  std::unique_lock held = pair.receiver.Hold();
  const auto send = [&] {
    range.memory = rows;
    EXPECT_TRUE(pair.from->OnLayerAppended(0, std::span(&range, 1)).ok());
    range.memory = nullptr;
  };
  send();
  EXPECT_EQ(rows.use_count(), 1) << "some heads lie in too many runs";
  range.head_count = kTestHeads;
  send();
  EXPECT_GT(rows.use_count(), 1);
  rows.reset();
  held.unlock();
  EXPECT_EQ(gone.get_future().wait_for(std::chrono::nanoseconds(kMinuteNs)),
            std::future_status::ready);
}

// From a moment on it damages what comes, and takes no bytes.
class BreakableChannel final : public ByteChannel {
 public:
  BreakableChannel(std::unique_ptr<ByteChannel> inner, const std::atomic<bool>* is_broken)
      : inner_(std::move(inner)), is_broken_(is_broken) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    const Result<size_t> count = inner_->Read(into);
    if (count.ok() && *count > 0 && *is_broken_) into.front().front() ^= std::byte{1};
    return count;
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    return *is_broken_ ? Result<size_t>(size_t{0}) : inner_->Write(parts);
  }
  void EndWrites() noexcept override { inner_->EndWrites(); }
  Wait PrepareWait(bool wants_read, bool wants_write) override {
    return inner_->PrepareWait(wants_read, wants_write && !*is_broken_);
  }

 private:
  const std::unique_ptr<ByteChannel> inner_;
  const std::atomic<bool>* const is_broken_;
};

// Whether it is, by the moment. Takes the connection's wake.
bool AwaitOver(PeerConnection* connection, int64_t until_ns) {
  std::mutex mutex;
  std::condition_variable changed;
  connection->SetWake([&] {
    const std::lock_guard lock(mutex);
    changed.notify_all();
  });
  bool is_over = false;
  {
    std::unique_lock lock(mutex);
    is_over =
        WaitUntil(*MachineTime(), changed, lock, until_ns, [&] { return connection->is_over(); });
  }
  connection->SetWake(nullptr);
  return is_over;
}

// A connection that has broken off and has not said so yet: what began then would never end.
TEST(PeerConnection, NothingBeginsOnAConnectionThatIsEndingAndCloseDoesNotWaitForIt) {
  std::atomic<bool> is_broken = false;
  Channels channels = MakeChannels(Way::kSocket);
  channels[0] = std::make_unique<BreakableChannel>(std::move(channels[0]), &is_broken);
  ConnectionPair pair(std::move(channels));
  const auto epoch = pair.Ask(4);
  ASSERT_TRUE(epoch.ok());
  is_broken = true;
  // The next heartbeat is damaged.
  EXPECT_EQ(pair.receiver.WaitReceived(*epoch, 4, *pair.clock, pair.Soon()).code(),
            StatusCode::kCorrupt);
  EXPECT_EQ(pair.to->status().code(), StatusCode::kCorrupt);
  EXPECT_FALSE(pair.to->is_over());  // the peer has not taken the reason
  EXPECT_EQ(pair.to->Request({}, pair.receiver.Reserve(4)).code(), StatusCode::kCorrupt);
  EXPECT_EQ(pair.to->stats().receives_open, 0);
  pair.to->Close();
  // Half of the time after which it would be over by itself.
  EXPECT_TRUE(AwaitOver(pair.to.get(), pair.clock->SteadyNs() + kMinuteNs / 2));
}

TEST(PeerConnection, AnOwnerIsWokenForWhatComesAndWhatEnds) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  std::mutex mutex;
  std::condition_variable changed;
  int64_t wakes = 0;
  pair.from->SetWake([&] {
    const std::lock_guard lock(mutex);
    static_cast<void>(pair.from->stats());  // calls of the peer are legal
    ++wakes;
    changed.notify_all();
  });
  const auto wait_for = [&](const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return WaitUntil(*pair.clock, changed, lock, pair.Soon(), condition);
  };
  ASSERT_TRUE(pair.to->WaitOpen(pair.Soon()).ok());
  const ReceiveMap map = pair.receiver.Reserve(4);
  EXPECT_EQ(pair.from->SendStatus(map.epoch).code(), StatusCode::kNotFound);
  ASSERT_TRUE(pair.to->Request({}, map).ok());
  EXPECT_TRUE(wait_for([&] { return pair.from->SendStatus(map.epoch).ok(); }));
  EXPECT_EQ(pair.to->Cancel(map.epoch, Status()).code(), StatusCode::kBadArgument);
  ASSERT_TRUE(pair.to->Cancel(map.epoch, Status(StatusCode::kTimeout, "too late")).ok());
  EXPECT_TRUE(
      wait_for([&] { return pair.from->SendStatus(map.epoch).code() == StatusCode::kTimeout; }));
  pair.to->Close();
  EXPECT_TRUE(wait_for([&] { return !pair.from->status().ok(); }));
  pair.from->SetWake(nullptr);
  EXPECT_GE(wakes, 3);
}

// Epochs do not come in order: the oldest endings are forgotten, not the smallest numbers.
TEST(PeerConnection, TheLastEndingsAreRemembered) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  ASSERT_TRUE(pair.to->WaitOpen(pair.Soon()).ok());
  const auto end = [&](uint64_t epoch) {
    pair.receiver.last_epoch = epoch - 1;
    EXPECT_EQ(pair.Ask(1).value(), epoch);
    EXPECT_TRUE(pair.from->Refuse(epoch, Status(StatusCode::kFull, "busy")).ok());
  };
  for (uint64_t epoch = 1000; epoch > 1000 - 256; --epoch) end(epoch);
  end(1);
  EXPECT_EQ(pair.from->SendStatus(1).code(), StatusCode::kFull);
  EXPECT_EQ(pair.from->SendStatus(1000 - 255).code(), StatusCode::kFull);
  EXPECT_EQ(pair.from->SendStatus(1000).code(), StatusCode::kNotFound);
}

TEST(PeerConnection, ARequestDoesNotEndForNoReason) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  const auto epoch = pair.Ask(1);
  ASSERT_TRUE(epoch.ok());
  EXPECT_EQ(pair.from->Refuse(*epoch, Status()).code(), StatusCode::kBadArgument);
  const SendRecord record{.epoch = *epoch, .count = 1};
  EXPECT_EQ(pair.from->OnSendStopped(std::span(&record, 1), Status()).code(),
            StatusCode::kBadArgument);
  EXPECT_TRUE(pair.from->SendStatus(*epoch).ok());
  EXPECT_TRUE(pair.Send(*epoch, 0, 1).ok());
}

// A stranger that connects at the limit of threads must not end the process.
TEST(PeerConnection, AThreadThatTheSystemDoesNotGiveIsAnError) {
  Channels channels = MakeChannels(Way::kSocket);
  Status found[2];
  {
    const ScopedNoThreads no_threads;
    found[0] =
        PeerConnection::Start(std::move(channels[0]), "test", TestSessionOptions(true), nullptr)
            .status();
    found[1] = TransferListener::Start({.peer = {.passport = TestPassport()}}).status();
  }
  for (const Status& status : found) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("thread"), std::string::npos) << status.ToString();
  }
}

// Each has its few moments, and then goes for the one that comes next; what is open stays.
TEST(TransferListener, StrangersKeepNobodyOut) {
  constexpr int64_t kPlaces = 2;
  constexpr int64_t kStrangers = 16;
  TransferPeerOptions options{.passport = TestPassport()};
  options.connect_timeout = options.dead_after = std::chrono::nanoseconds(kMinuteNs);
  const auto listener = TransferListener::Start({.peer = options, .peers_max = kPlaces}).value();
  const Endpoint endpoint = Endpoint::Parse(listener->endpoint()).value();
  std::vector<Socket> strangers;
  const auto come = [&](int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      strangers.push_back(Socket::Connect(endpoint).value());
      PollEntry entry{.fd = strangers.back().fd(), .wants_write = true};
      PollSockets(std::span(&entry, 1), kMinuteNs);
      ASSERT_TRUE(strangers.back().ConnectError().ok());
    }
  };
  come(kStrangers);
  const auto peer = TransferPeer::Connect(listener->endpoint(), options);
  ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  EXPECT_GE(listener->refused(), kStrangers - kPlaces);
  EXPECT_EQ(listener->last_refusal().code(), StatusCode::kTimeout);
  EXPECT_NE(listener->last_refusal().message().find("2 (peers_max)"), std::string_view::npos)
      << listener->last_refusal().ToString();
  come(kStrangers);
  const auto second = TransferPeer::Connect(listener->endpoint(), options);
  ASSERT_TRUE(second.ok()) << second.status().ToString();
  for (const auto& open : {*peer, *second}) EXPECT_EQ(open->status().ToString(), "Ok");
}

// A listener runs for a month, and its owner takes a connection now and then: what came and went
// meanwhile holds no files, and is not what the owner gets.
TEST(TransferListener, ConnectionsThatEndBeforeTheyAreTakenHoldNothing) {
  TransferPeerOptions options{.passport = TestPassport()};
  options.connect_timeout = options.dead_after = std::chrono::nanoseconds(kMinuteNs);
  const auto listener = TransferListener::Start({.peer = options, .peers_max = 4}).value();
  const std::shared_ptr<Clock> clock = MachineTime();
  const int64_t until_ns = clock->SteadyNs() + kMinuteNs;
  const auto files = [] {
    using Files = std::filesystem::directory_iterator;
    return std::distance(Files("/proc/self/fd"), Files());
  };
  const auto before = files();
  for (int i = 0; i < 12; ++i) {
    const auto peer = TransferPeer::Connect(listener->endpoint(), options);
    ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  }
  while (files() > before) {
    ASSERT_LT(clock->SteadyNs(), until_ns) << files() - before << " files are held";
    std::this_thread::yield();
  }
  const auto peer = TransferPeer::Connect(listener->endpoint(), options).value();
  const auto taken = listener->Accept(*clock, until_ns);
  ASSERT_TRUE(taken.ok() && taken->has_value());
  EXPECT_EQ((**taken)->status().ToString(), "Ok");
}

TEST(PeerConnection, LoadsAreHeardOf) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  ASSERT_TRUE(pair.to->WaitOpen(pair.Soon()).ok());
  std::mutex mutex;
  std::condition_variable changed;
  pair.to->SetWake([&] {
    const std::lock_guard lock(mutex);
    changed.notify_all();
  });
  const TransferLoad load{.queued_tokens = 5, .ns_per_token = 6};
  ASSERT_TRUE(pair.from->SetLoad(load).ok());
  {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(WaitUntil(*pair.clock, changed, lock, pair.Soon(),
                          [&] { return pair.to->load() == load; }));
  }
  pair.to->SetWake(nullptr);
}

// An engine says its load with each step, and waits for no bytes of others in it.
TEST(PeerConnection, ALoadIsSaidWithoutWaitingForTheThread) {
  ConnectionPair pair(MakeChannels(Way::kSocket));
  const auto epoch = pair.Ask(4);
  ASSERT_TRUE(epoch.ok());
  std::unique_lock held = pair.receiver.Hold();
  ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
  // The thread has the session, and waits in View.
  std::future<void> look;
  do {
    look = std::async(std::launch::async, [&] { static_cast<void>(pair.to->stats()); });
  } while (look.wait_for(std::chrono::milliseconds(100)) == std::future_status::ready);
  const TransferLoad some{.queued_tokens = 1, .ns_per_token = 2};
  std::future<Status> said = std::async(std::launch::async, [&] { return pair.to->SetLoad(some); });
  EXPECT_EQ(said.wait_for(std::chrono::nanoseconds(kMinuteNs)), std::future_status::ready);
  held.unlock();
  EXPECT_EQ(said.get().ToString(), "Ok");
  for (const TransferLoad& load : {TransferLoad{-1, 0}, TransferLoad{0, (int64_t{1} << 40) + 1}})
    EXPECT_EQ(pair.to->SetLoad(load).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(pair.to->status().ok());
}

// Rows of an epoch are held up: it is cancelled, and another one asked for. Then all goes on.
void CancelAndAskMeanwhile(ConnectionPair* pair, uint64_t epoch, Gate* held) {
  const ReceiveMap next = pair->receiver.Reserve(4);
  std::future<Status> called = std::async(std::launch::async, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(pair->to->Cancel(epoch, Status(StatusCode::kCancelled, "test")));
    QUIRE_RETURN_IF_ERROR(pair->to->Request({}, next));
    EXPECT_EQ(pair->to->stats().receives_open, 1);
    return Status();
  });
  EXPECT_EQ(called.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  pair->receiver.End(epoch);
  held->Release();
  EXPECT_EQ(called.get().ToString(), "Ok");
  ASSERT_TRUE(pair->from->NextRequest(*pair->clock, pair->Soon()).ok());
  ASSERT_EQ(pair->Send(next.epoch, 0, 4).ToString(), "Ok");
  EXPECT_TRUE(pair->receiver.WaitReceived(next.epoch, 4, *pair->clock, pair->Soon()).ok());
  pair->receiver.CheckPages();
  EXPECT_EQ(pair->to->stats().parts_received, kTestLayers);
  EXPECT_EQ(pair->from->stats().parts_sent_again, 0);
  EXPECT_EQ(pair->receiver.staging().held, 0);
}

// A copy to pages holds up the rows behind it, and no call.
TEST(PeerConnection, NoCallWaitsForACopy) {
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    Gate held;
    ConnectionPair pair(MakeChannels(way));
    pair.receiver.on_store = [&] { held.Pass(); };
    const auto epoch = pair.Ask(4);
    ASSERT_TRUE(epoch.ok());
    ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
    EXPECT_TRUE(held.AwaitInside());
    CancelAndAskMeanwhile(&pair, *epoch, &held);
  }
}

// Nor for a read and a digest. Damage of rows that nobody wants any more is none.
TEST(PeerConnection, NoCallWaitsForARead) {
  for (const Way way : EachWay()) {
    for (const bool is_damaged : {false, true}) {
      SCOPED_TRACE(NameOf(way));
      Gate held;
      ConnectionPair pair(MakeChannels(way));
      const auto epoch = pair.Ask(4);
      ASSERT_TRUE(epoch.ok());
      pair.HoldReadOf(4, &held, is_damaged);
      ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
      EXPECT_TRUE(held.AwaitInside());
      CancelAndAskMeanwhile(&pair, *epoch, &held);
    }
  }
}

// Rows that wait behind those that are written are dropped meanwhile.
TEST(PeerConnection, NoCallWaitsForAWrite) {
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    Gate held;
    ConnectionPair pair(MakeChannels(way));
    const auto epoch = pair.Ask(4);
    ASSERT_TRUE(epoch.ok());
    pair.from_hooks.on_write = [&] { held.Pass(); };
    pair.from_hooks.are_on = true;
    ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
    EXPECT_TRUE(held.AwaitInside());
    std::future<Status> called = std::async(std::launch::async, [&]() -> Status {
      QUIRE_RETURN_IF_ERROR(pair.from->Refuse(*epoch, Status(StatusCode::kFull, "busy")));
      EXPECT_EQ(pair.from->stats().sends_open, 0);
      return Status();
    });
    EXPECT_EQ(called.wait_for(std::chrono::minutes(1)), std::future_status::ready);
    held.Release();
    EXPECT_EQ(called.get().ToString(), "Ok");
    EXPECT_EQ(pair.receiver.WaitReceived(*epoch, 4, *pair.clock, pair.Soon()).code(),
              StatusCode::kFull);
    const auto next = pair.Ask(4);
    ASSERT_TRUE(next.ok());
    ASSERT_EQ(pair.Send(*next, 0, 4).ToString(), "Ok");
    EXPECT_TRUE(pair.receiver.WaitReceived(*next, 4, *pair.clock, pair.Soon()).ok());
    pair.receiver.CheckPages();
  }
}

TEST(PeerConnection, AConnectionIsClosedWhileItReads) {
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    Gate held;
    ConnectionPair pair(MakeChannels(way));
    const auto epoch = pair.Ask(8);
    ASSERT_TRUE(epoch.ok());
    pair.HoldReadOf(4, &held, true);
    ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
    EXPECT_TRUE(held.AwaitInside());
    const ReceiveMap next = pair.receiver.Reserve(4);
    std::future<Status> called = std::async(std::launch::async, [&] {
      pair.to->Close();
      return pair.to->Request({}, next);
    });
    EXPECT_EQ(called.wait_for(std::chrono::minutes(1)), std::future_status::ready);
    held.Release();
    EXPECT_EQ(called.get().code(), StatusCode::kClosed);
    EXPECT_EQ(pair.receiver.WaitReceived(*epoch, 8, *pair.clock, pair.Soon()).code(),
              StatusCode::kClosed);
    EXPECT_FALSE(pair.from->NextRequest(*pair.clock, pair.Soon()).ok());
    ASSERT_TRUE(pair.to->SetReceiver(nullptr).ok());
    pair.receiver.CheckPages();
    EXPECT_EQ(pair.receiver.staging().held, 0);
  }
}

// The bytes that come then have memory of their own.
TEST(PeerConnection, AReceiverLeavesWhileItsRowsAreRead) {
  Gate held;
  ConnectionPair pair(MakeChannels(Way::kSocket));
  ASSERT_TRUE(pair.to->WaitOpen(pair.Soon()).ok());
  ASSERT_TRUE(pair.to->SetReceiver(nullptr).ok());
  auto leaving = std::make_unique<TestReceiver>();
  ASSERT_TRUE(pair.to->SetReceiver(leaving.get()).ok());
  const ReceiveMap map = leaving->Reserve(4);
  ASSERT_TRUE(pair.to->Request({}, map).ok());
  ASSERT_TRUE(pair.from->NextRequest(*pair.clock, pair.Soon()).ok());
  pair.HoldReadOf(4, &held, true);
  ASSERT_TRUE(pair.Send(map.epoch, 0, 4).ok());
  EXPECT_TRUE(held.AwaitInside());
  std::future<Status> left =
      std::async(std::launch::async, [&] { return pair.to->SetReceiver(nullptr); });
  const bool has_left = left.wait_for(std::chrono::minutes(1)) == std::future_status::ready;
  EXPECT_TRUE(has_left);
  EXPECT_EQ(leaving->open.at(map.epoch).failure.code(), StatusCode::kCancelled);
  if (has_left) leaving.reset();
  held.Release();
  EXPECT_EQ(left.get().ToString(), "Ok");
  ASSERT_TRUE(pair.to->SetReceiver(&pair.receiver).ok());
  pair.receiver.last_epoch = map.epoch;  // an epoch of the one before is not used again
  const auto next = pair.Ask(4);
  ASSERT_TRUE(next.ok()) << next.status().ToString();
  ASSERT_EQ(pair.Send(*next, 0, 4).ToString(), "Ok");
  EXPECT_TRUE(pair.receiver.WaitReceived(*next, 4, *pair.clock, pair.Soon()).ok());
  pair.receiver.CheckPages();
  EXPECT_EQ(pair.from->stats().parts_sent_again, 0);
}

// Without memory to tell the peer the connection ends. The receiver has left in any case.
TEST(PeerConnection, AReceiverLeavesWithoutMemory) {
  for (const bool is_read : {false, true}) {
    RefuseEach("SetReceiver", StatusCode::kOk, [&] {
      std::optional<AllocationsAllowed> allowed(std::in_place);
      Gate held;
      ConnectionPair pair(MakeChannels(Way::kSocket));
      const uint64_t epochs[] = {pair.Ask(4).value(), pair.Ask(4).value()};
      if (is_read) {
        pair.HoldReadOf(4, &held, false);
        EXPECT_TRUE(pair.Send(epochs[0], 0, 4).ok());
        EXPECT_TRUE(held.AwaitInside());
      }
      allowed.reset();
      Status left = pair.to->SetReceiver(nullptr);
      allowed.emplace();
      for (const uint64_t epoch : epochs) EXPECT_FALSE(pair.receiver.open.at(epoch).failure.ok());
      EXPECT_EQ(pair.to->status().code(), left.code());
      EXPECT_EQ(pair.to->SetReceiver(&pair.receiver).ToString(), "Ok");
      if (is_read) held.Release();
      return left;
    });
  }
}

// An owner that ends a connection, and one whose connection finds none while it reads.
TEST(PeerConnection, AConnectionEndsWithoutMemory) {
  for (const bool closes : {true, false}) {
    ConnectionPair pair(MakeChannels(Way::kSocket));
    const auto epoch = pair.Ask(4);
    ASSERT_TRUE(epoch.ok());
    const auto refuse = [] { RefuseFromHere(); };
    if (closes) {
      pair.from_hooks.on_write = refuse;
    } else {
      pair.from_hooks.on_read = [refuse](ChannelHooks::Places) { refuse(); };
    }
    pair.from_hooks.are_on = true;
    if (closes) {
      pair.from->Close();
    } else {
      EXPECT_TRUE(pair.to->Request({}, pair.receiver.Reserve(4)).ok());
    }
    EXPECT_TRUE(AwaitOver(pair.from.get(), pair.Soon()));
    EXPECT_FALSE(pair.from->SendStatus(*epoch).ok());
    EXPECT_EQ(pair.from->stats().sends_open, 0);
  }
}

// Rows of each transfer are damaged once, every third transfer is cancelled while it comes, and
// somebody asks all the time.
TEST(PeerConnection, ManyThreadsCallWhileRowsAreRead) {
  constexpr int kRounds = 201;
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    std::atomic<bool> damages = false;
    ConnectionPair pair(MakeChannels(way));
    pair.to_hooks.on_read = [&](ChannelHooks::Places places) {
      if (BytesOf(places) == 4 * kTestRowBytes && damages.exchange(false))
        places.front().front() ^= std::byte{1};
    };
    pair.to_hooks.are_on = true;
    std::atomic<bool> is_over = false;
    std::thread asks([&] {
      while (!is_over) EXPECT_LE(pair.to->stats().receives_open, 1);
    });
    for (int i = 0; i < kRounds; ++i) {
      const bool is_cancelled = i % 3 == 0;
      const auto epoch = pair.Ask(4);
      EXPECT_TRUE(epoch.ok()) << epoch.status().ToString();
      if (!epoch.ok()) break;
      damages = true;
      const auto cancel = [&] {
        return pair.to->Cancel(*epoch, Status(StatusCode::kCancelled, "test"));
      };
      std::future<Status> cancelled;
      if (is_cancelled) cancelled = std::async(std::launch::async, cancel);
      const Status sent = pair.Send(*epoch, 0, 4);
      if (!is_cancelled) {
        EXPECT_EQ(sent.ToString(), "Ok");
        EXPECT_TRUE(pair.receiver.WaitReceived(*epoch, 4, *pair.clock, pair.Soon()).ok());
      }
      EXPECT_EQ((is_cancelled ? cancelled.get() : cancel()).ToString(), "Ok");
      pair.receiver.CheckPages();
      pair.receiver.End(*epoch);
    }
    is_over = true;
    asks.join();
    // In front of each third one nothing is on its way.
    EXPECT_GE(pair.from->stats().parts_sent_again, kRounds / 3);
    EXPECT_EQ(pair.receiver.staging().held, 0);
  }
}

TEST(PeerConnection, AReceiverLeavesWhenNothingIsCopiedToItAnyMore) {
  Gate held;
  ConnectionPair pair(MakeChannels(Way::kSocket));
  pair.receiver.on_store = [&] { held.Pass(); };
  const auto epoch = pair.Ask(4);
  ASSERT_TRUE(epoch.ok());
  ASSERT_TRUE(pair.Send(*epoch, 0, 4).ok());
  EXPECT_TRUE(held.AwaitInside());
  std::future<Status> left =
      std::async(std::launch::async, [&] { return pair.to->SetReceiver(nullptr); });
  EXPECT_EQ(left.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  held.Release();
  EXPECT_EQ(left.get().ToString(), "Ok");
  EXPECT_EQ(held.passed(), 1) << "the second layer's rows went to a receiver that has left";
  EXPECT_EQ(pair.receiver.open.at(*epoch).failure.code(), StatusCode::kCancelled);
}

TEST(PeerConnection, AfterACancelNoLateRowIsTaken) {
  constexpr int kCancels = 2000;
  ReportFigure("cancels", static_cast<int64_t>(EachWay().size()) * kCancels);
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    ConnectionPair pair(MakeChannels(way));
    for (int i = 0; i < kCancels; ++i) {
      const auto epoch = pair.Ask(4);
      ASSERT_TRUE(epoch.ok());
      // Rows are on their way when the reservation ends.
      static_cast<void>(pair.Send(*epoch, 0, 4));
      ASSERT_TRUE(pair.to->Cancel(*epoch, Status(StatusCode::kCancelled, "test")).ok());
      pair.receiver.End(*epoch);
    }
    const auto epoch = pair.Ask(4);
    ASSERT_TRUE(epoch.ok());
    ASSERT_EQ(pair.Send(*epoch, 0, 4).ToString(), "Ok");
    EXPECT_TRUE(pair.receiver.WaitReceived(*epoch, 4, *pair.clock, pair.Soon()).ok());
    pair.receiver.CheckPages();
    EXPECT_EQ(pair.to->stats().receives_open, 1);
  }
}

TEST(PeerConnection, NoFaultOfAChannelCountsAWrongByte) {
  constexpr int kPairs = 60;
  const std::vector<Way> ways = EachWay();
  const FaultRates kinds[] = {{.change = 8}, {.repeat = 12},
                              {.move = 12},  {.cut = 12},
                              {.delay = 2},  {.change = 40, .repeat = 80, .move = 80, .cut = 80}};
  int complete = 0;
  int failed = 0;
  int64_t again = 0;
  for (int i = 0; i < kPairs; ++i) {
    SCOPED_TRACE(i);
    const FaultRates& rates = kinds[static_cast<size_t>(i) % std::size(kinds)];
    const size_t round = static_cast<size_t>(i) / std::size(kinds);
    Channels channels = MakeChannels(ways[round % ways.size()]);
    for (auto& channel : channels) {
      channel = std::make_unique<FaultyChannel>(std::move(channel), rates,
                                                SoakSeed(static_cast<uint64_t>(i)));
    }
    ConnectionPair pair(std::move(channels), 1 << 20, kTestSecondNs / 2);
    const auto epoch = pair.Ask(400);
    Status status = epoch.status();
    for (int64_t row = 0; row < 400 && status.ok(); row += 40) status = pair.Send(*epoch, row, 40);
    // A byte in the wrong place may leave a side that waits for more: it says when it is over.
    if (!status.ok()) {
      pair.from->Close();
      pair.to->Close();
    }
    if (epoch.ok()) status = pair.receiver.WaitReceived(*epoch, 400, *pair.clock, pair.Soon());
    complete += status.ok();
    failed += !status.ok();
    pair.receiver.CheckPages();
    again += pair.from->stats().parts_sent_again;
  }
  EXPECT_GT(complete, kPairs / 10);
  EXPECT_GT(failed, kPairs / 10);
  EXPECT_GT(again, 0);
}

// A side that has no room for what comes waits for room, and for nothing that the peer does: else
// its thread would take a core from those that compute.
TEST(ByteChannel, AWaitForNothingIsEndedByNothing) {
  for (const Way way : {Way::kSocket, Way::kSharedMemory}) {
    SCOPED_TRACE(NameOf(way));
    Channels channels = MakeChannels(way);
    std::byte bytes[10] = {};
    const std::span<std::byte> place(bytes);
    const auto read = [&] { return channels[1]->Read(std::span(&place, 1)); };
    EXPECT_EQ(read().value(), 0U);  // takes the memory
    const auto ends = [&](bool wants_read) {
      ByteChannel::Wait wait = channels[1]->PrepareWait(wants_read, false);
      PollSockets(std::span(&wait.entry, 1), 0);
      return wait.is_ready || wait.entry.can_read;
    };
    EXPECT_FALSE(ends(true));  // from here on the peer sends signals
    const std::span<const std::byte> written(bytes);
    EXPECT_EQ(channels[0]->Write(std::span(&written, 1)).value(), 10U);
    EXPECT_FALSE(ends(false));
    channels[0].reset();
    EXPECT_FALSE(ends(false));
    EXPECT_TRUE(ends(true));
    EXPECT_EQ(read().value(), 10U);
    EXPECT_TRUE(ends(true));
    EXPECT_EQ(read().status().code(), StatusCode::kUnavailable);
  }
}

// The threads of connections wait so, and have nobody to tell that there is no memory.
TEST(PollSockets, AWaitForAFewTakesNoMemory) {
  auto [here, there] = SocketPair();
  PollEntry entries[2 + wire::kStreamsMax] = {{.fd = here.fd(), .wants_write = true},
                                              {.fd = there.fd(), .wants_read = true}};
  std::string told;
  RefuseEach("after PollSockets", StatusCode::kOk, [&] {
    PollSockets(entries, 0);  // what it would throw, nobody catches
    return GuardEntry([&] {
      told.assign(1000, entries[0].can_write && !entries[1].can_read ? 'y' : 'n');
      return Status();
    });
  });
  EXPECT_EQ(told.front(), 'y');
}

TEST(Socket, AnIdlePeerIsAskedFor) {
  Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
  const Socket listener = Socket::Listen(&endpoint).value();
  const Socket socket = Socket::Connect(endpoint).value();
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    EXPECT_EQ(::getsockopt(socket.fd(), level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 0);
  socket.KeepAlive();
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), 30);
}

// A sender without a thread, whose channel the test carries and drops.
struct HandSender {
  explicit HandSender(std::unique_ptr<ByteChannel> given)
      : channel(std::move(given)), side(TestSessionOptions(false, "a secret"), clock->SteadyNs()) {}

  void CarryUntil(const std::function<bool()>& is_done) {
    while (!is_done()) {
      FrameRead read = side.session.BeginRead();
      const size_t count = channel->Read(read.places).value();
      if (count > 0) {
        read.Check(count);
        side.session.OnRead(read, clock->SteadyNs());
      }
      while (side.session.has_output()) {
        const size_t written = channel->Write(side.session.Gather(8)).value();
        if (written == 0) break;
        side.session.Sent(written, clock->SteadyNs());
      }
      if (count > 0 || is_done()) continue;
      ByteChannel::Wait wait = channel->PrepareWait(true, side.session.has_output());
      if (!wait.is_ready) PollSockets(std::span(&wait.entry, 1), kTestSecondNs / 100);
    }
  }

  const std::shared_ptr<Clock> clock = MachineTime();
  std::unique_ptr<ByteChannel> channel;
  TestSession side;
};

// A sender is killed after its last row, as this side waits for room: what it wrote is there, and
// is kept, though nobody takes what this side says of it.
TEST(PeerConnection, AllThatAPeerSaidBeforeItWentIsTaken) {
  constexpr int64_t kRows = 40;
  const ReceivePart one{.first_row = 0, .count = 1, .first_head = 0, .head_count = kTestHeads};
  for (const Way way : {Way::kSocket, Way::kSharedMemory}) {
    SCOPED_TRACE(NameOf(way));
    Channels channels = MakeChannels(way);
    HandSender from(std::move(channels[1]));
    TestReceiver receiver;
    const auto to = PeerConnection::Start(std::move(channels[0]), "test",
                                          TestSessionOptions(true, "a secret"), nullptr)
                        .value();
    const int64_t soon = from.clock->SteadyNs() + kMinuteNs;
    from.CarryUntil([&] { return from.side.is_open && to->is_open(); });
    ASSERT_TRUE(to->SetReceiver(&receiver).ok());
    const ReceiveMap map = receiver.Reserve(kRows);
    const ReceiveMap other = receiver.Reserve(1);
    ASSERT_TRUE(receiver.SetStagingLimit(kTestRowBytes).ok());
    std::optional<ReceiveView> held = receiver.View(other.epoch, 0, one).value();
    ASSERT_TRUE(to->Request({}, map).ok());
    from.CarryUntil([&] { return from.side.sends.count(map.epoch) == 1; });
    for (int64_t row = 0; row < kRows; ++row) {
      ReceivePart part = one;
      part.first_row = row;
      for (int64_t layer = 0; layer < kTestLayers; ++layer)
        ASSERT_TRUE(from.side.SendRows(map.epoch, layer, part));
    }
    from.side.SendRecord(map.epoch, 0, kRows);
    from.CarryUntil([&] { return !from.side.session.has_output(); });
    from.channel.reset();
    held.reset();
    const Status status = receiver.WaitReceived(map.epoch, kRows, *from.clock, soon);
    EXPECT_EQ(status.ToString(), "Ok");
    receiver.CheckPages();
    ASSERT_TRUE(to->SetReceiver(nullptr).ok());
  }
}

// ---- What a peer may do with the memory that it shares

std::vector<std::byte> SomeBytes(size_t count) {
  return std::vector<std::byte>(count, std::byte{7});
}

TEST(SharedMemory, ForeignMemoryIsRefused) {
  const struct {
    int seals;
    off_t bytes;
    const char* why;
  } offers[] = {{0, 1 << 20, "shorter"},
                {F_SEAL_SHRINK | F_SEAL_GROW, 1 << 20, "another size"},
                {F_SEAL_SHRINK, 1 << 20, "shorter"}};
  for (const auto& offer : offers) {
    auto [here, there] = SocketPair();
    const auto channel = AcceptSharedMemory(std::move(here));
    const Socket memory(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(memory.fd(), offer.bytes), 0);
    ASSERT_EQ(::fcntl(memory.fd(), F_ADD_SEALS, offer.seals), 0);
    std::byte one{1};
    iovec vector = {&one, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = memory.fd();
    std::memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    ASSERT_EQ(::sendmsg(there.fd(), &message, 0), 1);
    std::vector<std::byte> into = SomeBytes(10);
    const std::span<std::byte> place(into);
    const auto read = channel->Read(std::span(&place, 1));
    EXPECT_EQ(read.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(read.status().message().find(offer.why), std::string::npos)
        << read.status().ToString();
  }
}

TEST(SharedMemory, BytesComeInOrderAcrossTheEndOfTheRing) {
  Channels channels = MakeChannels(Way::kSharedMemory);
  uint8_t next_in = 0;
  uint8_t next_out = 0;
  std::vector<std::byte> into = SomeBytes(300'001);
  size_t total = 0;
  while (total < (size_t{20} << 20)) {
    std::vector<std::byte> out(700'003);
    for (std::byte& byte : out) byte = static_cast<std::byte>(next_in++);
    const std::span<const std::byte> whole(out);
    const std::span<const std::byte> parts[] = {whole.first(10), whole.subspan(10)};
    const size_t written = channels[0]->Write(parts).value();
    next_in = static_cast<uint8_t>(next_in - (out.size() - written));
    for (;;) {
      const std::span<std::byte> place(into);
      const std::span<std::byte> places[] = {place.first(3), place.subspan(3)};
      const size_t count = channels[1]->Read(places).value();
      if (count == 0) break;
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(static_cast<uint8_t>(into[i]), next_out++) << total + i;
      total += count;
    }
    ASSERT_GT(written, 0U);
  }
}

TEST(SharedMemory, AWriterIsWokenForAQuarterOfTheRing) {
  constexpr size_t kRing = size_t{4} << 20;
  Channels channels = MakeChannels(Way::kSharedMemory);
  const std::vector<std::byte> out = SomeBytes(kRing);
  const std::span<const std::byte> part(out);
  ASSERT_EQ(channels[0]->Write(std::span(&part, 1)).value(), kRing);
  std::vector<std::byte> into(kRing / 4);
  const auto read = [&](size_t count) {
    const std::span<std::byte> place = std::span(into).first(count);
    EXPECT_EQ(channels[1]->Read(std::span(&place, 1)).value(), count);
  };
  const auto is_woken = [](ByteChannel::Wait wait) {
    PollSockets(std::span(&wait.entry, 1), 0);
    return wait.entry.can_read;
  };
  ByteChannel::Wait wait = channels[0]->PrepareWait(false, true);
  EXPECT_FALSE(wait.is_ready);
  read(kRing / 4 - 1);
  EXPECT_FALSE(is_woken(wait));
  wait = channels[0]->PrepareWait(false, true);
  EXPECT_FALSE(wait.is_ready);
  read(1);
  EXPECT_TRUE(is_woken(wait));
  EXPECT_TRUE(channels[0]->PrepareWait(false, true).is_ready);
}

TEST(SharedMemory, WhatAPeerWroteBeforeItWentIsRead) {
  Channels channels = MakeChannels(Way::kSharedMemory);
  const std::vector<std::byte> out = SomeBytes(100);
  const std::span<const std::byte> part(out);
  ASSERT_EQ(channels[0]->Write(std::span(&part, 1)).value(), 100U);
  channels[0].reset();
  std::vector<std::byte> into(60);
  const std::span<std::byte> place(into);
  EXPECT_EQ(channels[1]->Read(std::span(&place, 1)).value(), 60U);
  EXPECT_EQ(channels[1]->Read(std::span(&place, 1)).value(), 40U);
  // A signal may be read first.
  Result<size_t> last = channels[1]->Read(std::span(&place, 1));
  if (last.ok()) last = channels[1]->Read(std::span(&place, 1));
  EXPECT_EQ(last.status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace quire
