// Bytes over several streams: their order, whatever the sizes, the buffers and the order in which
// they arrive, and what happens when a stream is lost.
#include "transfer/striped_channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/testing/soak.h"
#include "transfer/testing/faulty_channel.h"
#include "transfer/testing/test_channels.h"

namespace quire {
namespace {

constexpr size_t kStripe = wire::kStripeBytes;

struct Ends {
  std::unique_ptr<StripedChannel> channel;
  std::vector<int> fds;
};

// Both ends of `count` streams. buffer: of each socket, in bytes; 0: as the system has it. Each
// stream delays 1 of `delay` writes.
std::pair<Ends, Ends> MakeEnds(size_t count, int buffer = 0, int64_t delay = 0) {
  StreamPairs made =
      MakeStreams(count, buffer, [delay](std::unique_ptr<ByteChannel> stream, size_t number) {
        if (delay == 0) return stream;
        return std::unique_ptr<ByteChannel>(std::make_unique<FaultyChannel>(
            std::move(stream), FaultRates{.delay = delay}, SoakSeed(number)));
      });
  Ends ends[2];
  for (size_t side = 0; side < 2; ++side) {
    ends[side] = {.channel = std::make_unique<StripedChannel>(std::move(made.streams[side])),
                  .fds = std::move(made.fds[side])};
  }
  return {std::move(ends[0]), std::move(ends[1])};
}

// Byte `i` of what one side says; no period of it fits a stripe.
std::byte ByteAt(uint64_t seed, uint64_t i) {
  return static_cast<std::byte>((i * 0x9e3779b97f4a7c15U + seed) >> 37);
}

std::vector<std::byte> Said(uint64_t seed, uint64_t from, size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = ByteAt(seed, from + i);
  return bytes;
}

Result<size_t> WriteAll(ByteChannel* channel, std::span<const std::byte> bytes) {
  return channel->Write(std::span(&bytes, 1));
}

// One side of a conversation: what it has said and heard, byte for byte.
struct Talk {
  ByteChannel* channel;
  uint64_t says;   // seed
  uint64_t hears;  // seed
  uint64_t total;
  RandomSequence* random;
  uint64_t said = 0;
  uint64_t heard = 0;

  bool is_done() const { return said == total && heard == total; }
  void Go() {
    const auto most = std::min<uint64_t>(total - said, 1 + static_cast<uint64_t>(Some()));
    const std::vector<std::byte> out = Said(says, said, most);
    const std::span<const std::byte> whole(out);
    const size_t cut = out.size() / 3;
    const std::span<const std::byte> parts[] = {whole.first(cut), whole.subspan(cut)};
    const auto written = channel->Write(parts);
    ASSERT_TRUE(written.ok()) << written.status().ToString();
    said += *written;
    std::vector<std::byte> in(1 + static_cast<size_t>(Some()));
    const std::span<std::byte> place(in);
    const std::span<std::byte> places[] = {place.first(in.size() / 2),
                                           place.subspan(in.size() / 2)};
    const auto read = channel->Read(places);
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    in.resize(*read);
    ASSERT_TRUE(in == Said(hears, heard, *read)) << "behind byte " << heard;
    heard += *read;
  }
  // Mostly small, as headers are.
  int64_t Some() const { return random->Below(random->Below(2) == 0 ? 100'000 : 100); }
};

TEST(StripedChannel, BytesComeInOrderOverAnyNumberOfStreams) {
  constexpr uint64_t kTotal = 600'001;
  for (const size_t count : {1, 2, 3, 8, 16}) {
    for (const int buffer : {0, 2048}) {
      for (const int64_t delay : {0, 3}) {
        SCOPED_TRACE(std::to_string(count) + " streams, buffers of " + std::to_string(buffer) +
                     ", delay " + std::to_string(delay));
        const auto [here, there] = MakeEnds(count, buffer, delay);
        for (const Ends* ends : {&here, &there}) {
          ends->channel->StripeReads();
          ends->channel->StripeWrites();
        }
        RandomSequence random(SoakSeed(count));
        Talk first{here.channel.get(), 1, 2, kTotal, &random};
        Talk second{there.channel.get(), 2, 1, kTotal, &random};
        for (;;) {
          ASSERT_NO_FATAL_FAILURE(first.Go());
          ASSERT_NO_FATAL_FAILURE(second.Go());
          if (first.is_done() && second.is_done()) break;
          WaitForEither(here.channel->PrepareWait(true, first.said < kTotal),
                        there.channel->PrepareWait(true, second.said < kTotal));
        }
      }
    }
  }
}

// The format: docs/formats/transfer-wire.md.
TEST(StripedChannel, AStripeOf64KiBGoesOverEachStreamInTurn) {
  const auto [here, there] = MakeEnds(3, 1 << 20);
  const std::vector<std::byte> plain = Said(1, 0, 100);
  ASSERT_EQ(WriteAll(here.channel.get(), plain).value(), plain.size());
  here.channel->StripeWrites();
  const std::vector<std::byte> out = Said(2, 0, 4 * kStripe + 10);
  ASSERT_EQ(WriteAll(here.channel.get(), out).value(), out.size());
  const auto stripe = [&](size_t i) { return std::span(out).subspan(i * kStripe, kStripe); };
  std::vector<std::byte> due[3];
  due[0] = plain;
  due[0].insert(due[0].end(), stripe(0).begin(), stripe(0).end());
  due[0].insert(due[0].end(), stripe(3).begin(), stripe(3).end());
  due[1].assign(stripe(1).begin(), stripe(1).end());
  due[1].insert(due[1].end(), out.end() - 10, out.end());
  due[2].assign(stripe(2).begin(), stripe(2).end());
  for (size_t i = 0; i < 3; ++i) {
    std::vector<std::byte> in(due[i].size() + 1);
    EXPECT_EQ(::recv(there.fds[i], in.data(), in.size(), 0), std::ssize(due[i])) << i;
    in.resize(due[i].size());
    EXPECT_TRUE(in == due[i]) << i;
  }
}

// A stream that is early waits, and wakes nobody: else the thread would turn until the late one has
// come.
TEST(StripedChannel, AnEarlyStreamWaitsForTheLateOne) {
  const auto ends = MakeEnds(2, 1 << 20);
  const Ends& here = ends.first;
  const Ends& there = ends.second;
  here.channel->StripeReads();
  const std::vector<std::byte> out = Said(1, 0, 2 * kStripe);
  ASSERT_EQ(::send(there.fds[1], out.data() + kStripe, kStripe, 0), std::ssize(out) / 2);
  std::vector<std::byte> in(out.size());
  const std::span<std::byte> place(in);
  EXPECT_EQ(here.channel->Read(std::span(&place, 1)).value(), 0U);
  const auto is_woken = [&] {
    const ByteChannel::Wait wait = here.channel->PrepareWait(true, false);
    std::vector<PollEntry> entries = EntriesOf(wait);
    PollSockets(entries, 0);
    return wait.is_ready ||
           std::ranges::any_of(entries, [](const PollEntry& e) { return e.can_read; });
  };
  EXPECT_FALSE(is_woken());
  ASSERT_EQ(::send(there.fds[0], out.data(), kStripe, 0), std::ssize(out) / 2);
  EXPECT_TRUE(is_woken());
  EXPECT_EQ(here.channel->Read(std::span(&place, 1)).value(), out.size());
  EXPECT_TRUE(in == out);
}

// Else a connection would find that only when its turn comes, with a prompt on it.
TEST(StripedChannel, ALostStreamIsNoticedBeforeItsTurn) {
  for (const bool is_striped : {false, true}) {
    const auto ends = MakeEnds(3);
    const Ends& here = ends.first;
    const Ends& there = ends.second;
    if (is_striped) here.channel->StripeReads();
    std::byte byte{};
    const std::span<std::byte> place(&byte, 1);
    const auto read = [&] { return here.channel->Read(std::span(&place, 1)); };
    EXPECT_EQ(read().value(), 0U);
    const std::vector<std::byte> out = Said(1, 0, 1);
    ASSERT_EQ(WriteAll(there.channel.get(), out).value(), 1U);
    ASSERT_EQ(::shutdown(there.fds[2], SHUT_RDWR), 0);
    EXPECT_EQ(read().value(), 1U) << "what came before counts";
    ByteChannel::Wait wait = here.channel->PrepareWait(true, false);
    std::vector<PollEntry> entries = EntriesOf(wait);
    PollSockets(entries, int64_t{60} * 1'000'000'000);
    EXPECT_TRUE(std::ranges::any_of(entries, [](const PollEntry& e) { return e.can_read; }));
    const Status status = read().status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("stream 2 of 3"), std::string_view::npos) << status.ToString();
    // A side that takes no bytes now is not woken by it again and again.
    wait = here.channel->PrepareWait(false, false);
    entries = EntriesOf(wait);
    PollSockets(entries, 0);
    EXPECT_FALSE(wait.is_ready ||
                 std::ranges::any_of(entries, [](const PollEntry& e) { return e.can_read; }));
  }
}

TEST(StripedChannel, AllThatWasWrittenBeforeTheEndIsRead) {
  auto [here, there] = MakeEnds(3, 1 << 20);
  here.channel->StripeReads();
  there.channel->StripeWrites();
  const std::vector<std::byte> out = Said(1, 0, 5 * kStripe + 7);
  ASSERT_EQ(WriteAll(there.channel.get(), out).value(), out.size());
  there.channel->EndWrites();
  EXPECT_TRUE(there.channel->HasLeft());
  there.channel.reset();
  std::vector<std::byte> in(out.size() + 1);
  const std::span<std::byte> place(in);
  EXPECT_EQ(here.channel->Read(std::span(&place, 1)).value(), out.size());
  in.pop_back();
  EXPECT_TRUE(in == out);
  EXPECT_EQ(here.channel->Read(std::span(&place, 1)).status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace quire
