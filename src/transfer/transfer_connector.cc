// A connection from the side that connects: its socket, and those of further streams, which join
// when both sides know each other. All on the caller's thread, within connect_timeout.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/guard.h"
#include "transfer/peer_connection.h"
#include "transfer/stream_joins.h"

namespace quire {
namespace {

struct Connecting {
  const PeerEndpoint& peer;
  const TlsContext* tls;  // null: none
  Clock& clock;
  int64_t until_ns;

  int64_t left_ns() const { return until_ns - clock.SteadyNs(); }
};

// All of them at once; the peer's answers are not waited for.
Result<std::vector<Socket>> ConnectSockets(const Connecting& how, size_t count) {
  std::vector<Socket> sockets;
  for (size_t i = 0; i < count; ++i) {
    QUIRE_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(how.peer.address));
    sockets.push_back(std::move(socket));
  }
  for (const Socket& socket : sockets) {
    PollEntry entry{.fd = socket.fd(), .wants_write = true};
    // A signal of the host ends a wait before its time.
    for (int64_t left = how.left_ns(); !entry.can_write && left > 0; left = how.left_ns())
      PollSockets(std::span(&entry, 1), left);
    if (!entry.can_write) {
      return Status(StatusCode::kTimeout, "connecting to " + how.peer.address.ToString() +
                                              ": no answer within connect_timeout");
    }
    QUIRE_RETURN_IF_ERROR(socket.ConnectError());
  }
  return sockets;
}

Result<std::unique_ptr<ByteChannel>> ChannelOf(Socket socket, const Connecting& how) {
  const Endpoint& endpoint = how.peer.address;
  if (endpoint.is_unix) return ConnectSharedMemory(std::move(socket));
  socket.KeepAlive();
  if (how.tls == nullptr) return StreamChannel(std::move(socket));
  // Without the interface of a link-local address, which no certificate has.
  const std::string host = endpoint.address.substr(0, endpoint.address.find('%'));
  QUIRE_ASSIGN_OR_RETURN(auto secured, how.tls->Start(socket.fd(), host));
  return TlsChannel(std::move(socket), std::move(secured));
}

Result<std::vector<std::unique_ptr<ByteChannel>>> ConnectChannels(const Connecting& how,
                                                                  size_t count) {
  std::vector<std::unique_ptr<ByteChannel>> channels;
  if (how.peer.is_ucx) {
    QUIRE_ASSIGN_OR_RETURN(auto channel, ConnectUcx(how.peer.address));
    channels.push_back(std::move(channel));
    return channels;
  }
  QUIRE_ASSIGN_OR_RETURN(std::vector<Socket> sockets, ConnectSockets(how, count));
  for (Socket& socket : sockets) {
    QUIRE_ASSIGN_OR_RETURN(auto channel, ChannelOf(std::move(socket), how));
    channels.push_back(std::move(channel));
  }
  return channels;
}

struct Joining {
  std::unique_ptr<ByteChannel> channel;
  StreamJoin join;

  bool is_done() const { return join.has_heard() && !join.has_output(); }
  // As far as it goes without a wait.
  Status Go() {
    while (!join.has_heard()) {
      FrameRead read = join.BeginRead();
      QUIRE_ASSIGN_OR_RETURN(const size_t count, channel->Read(read.places));
      if (count == 0) break;
      read.Check(count);
      QUIRE_RETURN_IF_ERROR(join.OnRead(read));
    }
    while (join.has_output()) {
      QUIRE_ASSIGN_OR_RETURN(const size_t count, channel->Write(join.Gather()));
      if (count == 0) break;
      join.Sent(count);
    }
    return Status();
  }
};

Status GoOn(std::vector<std::unique_ptr<Joining>>& joins, const Connecting& how) {
  std::vector<PollEntry> entries;
  for (;;) {
    entries.clear();
    bool is_ready = false;
    for (const auto& joining : joins) {
      if (joining->is_done()) continue;
      QUIRE_RETURN_IF_ERROR(joining->Go());
      if (joining->is_done()) continue;
      const ByteChannel::Wait wait =
          joining->channel->PrepareWait(!joining->join.has_heard(), joining->join.has_output());
      entries.push_back(wait.entry);
      is_ready |= wait.is_ready;
    }
    if (entries.empty()) return Status();
    const int64_t left = how.left_ns();
    if (left <= 0) {
      return Status(StatusCode::kTimeout, std::to_string(entries.size()) +
                                              " of them were not greeted within connect_timeout");
    }
    PollSockets(entries, is_ready ? 0 : left);
  }
}

// The streams that the listener gives the connection, beside its first one.
Status JoinStreams(PeerConnection* connection, const TransferSession::StreamsGranted& granted,
                   const Connecting& how) {
  QUIRE_ASSIGN_OR_RETURN(auto channels, ConnectChannels(how, granted.count - 1U));
  std::vector<std::unique_ptr<Joining>> joins;
  for (auto& channel : channels) {
    const auto stream = static_cast<uint16_t>(joins.size() + 1);
    joins.push_back(std::unique_ptr<Joining>(
        new Joining{.channel = std::move(channel), .join = StreamJoin(granted, stream)}));
  }
  QUIRE_RETURN_IF_ERROR(GoOn(joins, how));
  for (size_t i = 0; i < joins.size(); ++i)
    connection->TakeStream(static_cast<uint16_t>(i + 1), std::move(joins[i]->channel));
  return Status();
}

Status BringStreams(PeerConnection* connection, const Connecting& how) {
  QUIRE_ASSIGN_OR_RETURN(const auto granted, connection->WaitStreams(how.until_ns));
  if (!granted) return Status();
  const Status joined = GuardEntry([&] { return JoinStreams(connection, *granted, how); });
  if (joined.ok()) return Status();
  // Streams end with their connection, whose reason is the better one.
  QUIRE_RETURN_IF_ERROR(connection->status());
  return Status(joined.code(), "transfer: further streams of " + connection->endpoint() + ": " +
                                   std::string(joined.message()));
}

}  // namespace

Result<std::shared_ptr<TransferPeer>> TransferPeer::Connect(const std::string& name,
                                                            const TransferPeerOptions& options) {
  return GuardEntry([&]() -> Result<std::shared_ptr<TransferPeer>> {
    QUIRE_ASSIGN_OR_RETURN(const PeerEndpoint endpoint, PeerEndpoint::Parse(name));
    QUIRE_RETURN_IF_ERROR(CheckReach(endpoint, options));
    QUIRE_ASSIGN_OR_RETURN(TransferSession::Options session, SessionOptions(options));
    QUIRE_ASSIGN_OR_RETURN(const auto tls, TlsOf(endpoint, options, /*listens=*/false));
    session.is_connector = true;
    session.carries_salts |= endpoint.address.is_unix || tls != nullptr;
    session.streams = endpoint.is_tcp() ? options.streams : 1;
    const std::shared_ptr<Clock> clock = MachineTime();
    const Connecting how{.peer = endpoint,
                         .tls = tls.get(),
                         .clock = *clock,
                         .until_ns = clock->SteadyNs() + options.connect_timeout.count()};
    QUIRE_ASSIGN_OR_RETURN(auto channels, ConnectChannels(how, 1));
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<PeerConnection> connection,
                           PeerConnection::Start(std::move(channels.front()), endpoint.ToString(),
                                                 std::move(session), nullptr));
    QUIRE_RETURN_IF_ERROR(BringStreams(connection.get(), how));
    QUIRE_RETURN_IF_ERROR(connection->WaitOpen(how.until_ns));
    return std::shared_ptr<TransferPeer>(connection);
  });
}

}  // namespace quire
