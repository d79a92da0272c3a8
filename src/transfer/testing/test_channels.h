// Both ends of a connection in this process, over each way that bytes go.
#ifndef QUIRE_TRANSFER_TESTING_TEST_CHANNELS_H_
#define QUIRE_TRANSFER_TESTING_TEST_CHANNELS_H_

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/byte_channel.h"

namespace quire {

using Channels = std::array<std::unique_ptr<ByteChannel>, 2>;  // the connecting one first

enum class Way : uint8_t { kSocket, kSharedMemory, kUcx };

// Those that the build tests; ucx_channel_test.cc says where UCX is not among them.
inline std::vector<Way> EachWay() {
  std::vector<Way> ways = {Way::kSocket, Way::kSharedMemory};
#if QUIRE_TESTS_UCX
  ways.push_back(Way::kUcx);
#endif
  return ways;
}

inline std::string NameOf(Way way) {
  constexpr const char* kNames[] = {"socket", "shared memory", "UCX"};
  return kNames[static_cast<size_t>(way)];
}

inline std::pair<Socket, Socket> SocketPair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  return {Socket(fds[0]), Socket(fds[1])};
}

// Both ends of some streams.
struct StreamPairs {
  std::vector<std::unique_ptr<ByteChannel>> streams[2];
  std::vector<int> fds[2];
};
// What a stream becomes; its number is twice that of the stream, and one more for the second end.
using StreamWrap =
    std::function<std::unique_ptr<ByteChannel>(std::unique_ptr<ByteChannel>, size_t)>;

// buffer: of each socket, in bytes; 0: as the system has it.
inline StreamPairs MakeStreams(size_t count, int buffer = 0, const StreamWrap& wrap = {}) {
  StreamPairs made;
  for (size_t i = 0; i < count; ++i) {
    auto [first, second] = SocketPair();
    Socket* const sockets[] = {&first, &second};
    for (size_t side = 0; side < 2; ++side) {
      const int fd = sockets[side]->fd();
      if (buffer > 0) {
        EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer)), 0);
        EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer)), 0);
      }
      auto stream = StreamChannel(std::move(*sockets[side]));
      if (wrap) stream = wrap(std::move(stream), 2 * i + side);
      made.fds[side].push_back(fd);
      made.streams[side].push_back(std::move(stream));
    }
  }
  return made;
}

inline std::vector<PollEntry> EntriesOf(const ByteChannel::Wait& wait) {
  std::vector<PollEntry> entries = {wait.entry};
  entries.insert(entries.end(), wait.more.begin(), wait.more.end());
  return entries;
}

// Waits for one of two ends; the caller looks at both.
inline void WaitForEither(const ByteChannel::Wait& a, const ByteChannel::Wait& b) {
  if (a.is_ready || b.is_ready) return;
  std::vector<PollEntry> entries = EntriesOf(a);
  for (const PollEntry& entry : EntriesOf(b)) entries.push_back(entry);
  PollSockets(entries, int64_t{60} * 1'000'000'000);
}

inline Channels MakeUcxChannels() {
  ::setenv("UCX_TLS", "tcp", /*replace=*/1);
  Endpoint endpoint = Endpoint::Parse("127.0.0.1:0").value();
  const std::unique_ptr<ByteListener> listener = ListenUcx(&endpoint).value();
  Channels channels;
  channels[0] = ConnectUcx(endpoint).value();
  while (channels[1] == nullptr) {
    WaitForEither(listener->PrepareWait(), channels[0]->PrepareWait(true, false));
    channels[1] = listener->Accept().value();
    EXPECT_TRUE(channels[0]->Read({}).ok());
  }
  return channels;
}

inline Channels MakeChannels(Way way) {
  if (way == Way::kUcx) return MakeUcxChannels();
  auto [first, second] = SocketPair();
  if (way == Way::kSocket)
    return {StreamChannel(std::move(first)), StreamChannel(std::move(second))};
  return {ConnectSharedMemory(std::move(first)).value(), AcceptSharedMemory(std::move(second))};
}

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_TEST_CHANNELS_H_
