// A connection between two processes that move KV: the session, its bytes, and one thread that
// carries them. Callers' threads hand over parts through a queue, and wait for the window. They
// share the session with the thread, which lets it go while it reads, hashes, copies to pages,
// writes and waits: no call waits for bytes.
#ifndef QUIRE_TRANSFER_PEER_CONNECTION_H_
#define QUIRE_TRANSFER_PEER_CONNECTION_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/spare_memory.h"
#include "net/socket.h"
#include "quire/transfer_peer.h"
#include "transfer/byte_channel.h"
#include "transfer/part_runs.h"
#include "transfer/peer_endpoint.h"
#include "transfer/send_pace.h"
#include "transfer/stream_joins.h"
#include "transfer/striped_channel.h"
#include "transfer/transfer_session.h"

namespace quire {

// BadArgument for what is out of range, TooLarge for a passport that no opening takes.
Result<TransferSession::Options> SessionOptions(const TransferPeerOptions& options);
// BadArgument for an address of other machines without a secret or TLS, for a part of TLS, and for
// TLS over UCX.
Status CheckReach(const PeerEndpoint& endpoint, const TransferPeerOptions& options);
// What connections to or at an endpoint of CheckReach are protected by; null: nothing, or no other
// machine reads them. BadArgument for a file by its option.
Result<std::shared_ptr<const TlsContext>> TlsOf(const PeerEndpoint& endpoint,
                                                const TransferPeerOptions& options, bool listens);

class PeerConnection final : public TransferPeer,
                             public std::enable_shared_from_this<PeerConnection>,
                             private TransferSession::Owner {
 public:
  using StreamsGranted = TransferSession::StreamsGranted;

  // `changed` is called from the connection's thread when it waits for streams, when it is open,
  // and when it is over. `book`, of a listener: where its connections wait for streams.
  static Result<std::shared_ptr<PeerConnection>> Start(std::unique_ptr<ByteChannel> channel,
                                                       std::string endpoint,
                                                       TransferSession::Options options,
                                                       std::function<void()> changed,
                                                       std::shared_ptr<StreamBook> book = nullptr);
  PeerConnection(std::unique_ptr<ByteChannel> channel, std::string endpoint,
                 TransferSession::Options options, Waker waker, std::function<void()> changed,
                 std::shared_ptr<StreamBook> book);
  ~PeerConnection() override;

  // What brings streams to the connection; none if it opens without, or within the time does not
  // come as far. Why it is over, if so.
  Result<std::optional<StreamsGranted>> WaitStreams(int64_t until_ns);
  // One of them.
  void TakeStream(uint16_t stream, std::unique_ptr<ByteChannel> channel) noexcept;
  // Until both sides have compared passports, and all streams are there: why not, if so.
  Status WaitOpen(int64_t until_ns);
  // It is over because its socket has become a stream of another connection.
  bool has_joined() const;
  bool is_open() const;
  // The peer has been told why it ended, or cannot be.
  bool is_over() const;

  const std::string& endpoint() const override { return endpoint_; }
  Status status() const override;
  TransferPeerStats stats() const override;
  void SetWake(std::function<void()> wake) override;
  Status SetLoad(const TransferLoad& load) override;
  TransferLoad load() const override;
  void Close() noexcept override;

  // OutOfMemory for null: the peer could not be told, and the connection is over.
  Status SetReceiver(KVTransfer* receiver) override;
  Status Request(const TransferJob& job, const ReceiveMap& map) override;
  Status Cancel(uint64_t epoch, const Status& why) override;
  Result<std::optional<TransferRequest>> NextRequest(Clock& clock, int64_t until_ns) override;
  Status SendStatus(uint64_t epoch) const override;
  int64_t send_room() const override;
  Status Refuse(uint64_t epoch, const Status& why) override;

  Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) override;
  Status OnForwardEnded(std::span<const SendRecord> records) override;
  Status OnForwardAborted(std::span<const SendRecord> records) override;
  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override;

 private:
  using Command = std::function<void(TransferSession&)>;

  // For copies of rows, of which none is on its way.
  static constexpr int64_t kSpareBytesMax = 16 * kPartBytes;

  void OnOpen(int64_t window_bytes, const wire::Instance& receiver) override;
  void OnLoad(const TransferLoad& load) override;
  void OnStreams(const StreamsGranted& streams) override;
  Status OnJoin(const wire::TransferJoin& join, const wire::TransferHello& hello) override;
  void OnOver(const Status& why) noexcept override;
  void OnRequest(TransferRequest request) override;
  void OnSendOver(uint64_t epoch, const Status& why) override;
  void OnPartTaken(const OutgoingPart& part) override;

  Status CheckStaging(int64_t staging_bytes) const;
  Status SendRows(int64_t layer, const SendRange& range);
  // Rows `first`, ... of the range, `count` of them, for which there is room.
  Status SendPart(int64_t layer, const SendRange& range, int64_t first, int64_t count);
  void FillPart(const LayerKV& rows, const ReceivePart& local,
                const std::shared_ptr<const void>& memory, OutgoingPart* part) const;
  // Waits until the window takes them.
  Status TakeWindow(uint64_t epoch, int64_t bytes);
  void GiveWindow(int64_t bytes);
  Status CheckSendLocked(uint64_t epoch) const;
  Status Push(uint64_t epoch, Command command);
  Status SendRecords(std::span<const SendRecord> records, bool is_aborted);

  void Run() noexcept;
  void Wake() noexcept;
  struct Wanted {
    bool read = false;
    bool write = false;
    int64_t until_ns = 0;
  };
  // Whether it goes on, and what it waits for.
  bool TakeTurn(bool can_read, Wanted* wanted);
  // Whether there may be something to read.
  bool Wait(const Wanted& wanted);
  // With the session, which they let go while bytes move. False: it is over.
  bool Turn(std::unique_lock<std::mutex>& session_lock, bool can_read);
  bool ReadSome(std::unique_lock<std::mutex>& session_lock, int reads_max);
  bool WriteSome(std::unique_lock<std::mutex>& session_lock);
  void AddDigest(std::unique_lock<std::mutex>& session_lock);
  void StoreDue(std::unique_lock<std::mutex>& session_lock);
  // Whether the connection is to be closed.
  bool RunCommands();
  void BeginStreams(std::vector<std::unique_ptr<ByteChannel>> streams);
  void Finish() noexcept;
  // Until what was written reaches the peer without us: not for long, the peer may be dead.
  void Linger() noexcept;
  template <typename F>
  auto WithSession(F&& f);

  const std::string endpoint_;
  const int64_t own_window_bytes_;  // of parts to here
  const std::shared_ptr<Clock> clock_ = MachineTime();
  const std::shared_ptr<SharedSpareMemory> copies_ =
      std::make_shared<SharedSpareMemory>(kSpareBytesMax);
  const std::function<void()> changed_here_;
  const std::shared_ptr<StreamBook> book_;  // null: nothing joins
  const Waker waker_;

  std::mutex wake_mutex_;  // before the others; held while wake_ runs
  std::function<void()> wake_;

  // For the thread; null when it has become a stream of another connection.
  std::unique_ptr<ByteChannel> channel_;
  StripedChannel* striped_ = nullptr;  // channel_, once there are several streams
  StreamBook::Entry entry_;            // of the thread, as long as streams may join
  StreamBook::Claim claim_;            // of the thread
  mutable std::mutex session_mutex_;   // before mutex_, where both are held
  TransferSession session_;
  int64_t stream_count_ = 1;
  bool is_storing_ = false;         // in the receiver, without the session
  std::condition_variable stored_;  // it is not any more

  mutable std::mutex mutex_;         // of all that follows
  std::condition_variable changed_;  // window, requests, state
  bool is_open_ = false;
  bool is_closing_ = false;
  bool is_over_ = false;  // nothing is sent or read any more
  bool has_joined_ = false;
  std::optional<StreamsGranted> granted_;
  std::array<std::unique_ptr<ByteChannel>, wire::kStreamsMax> arrived_;  // by number, from 1 on
  Status status_;                                                        // why it is ending or over
  wire::Instance receiver_{};
  int64_t window_left_ = 0;
  int64_t window_bytes_ = 0;
  SendPace pace_;
  std::set<uint64_t> sends_;         // epochs that are open
  std::map<uint64_t, Status> over_;  // the last that are over, and why
  std::deque<uint64_t> over_order_;  // of them, the oldest first
  TransferLoad load_;                // of the other side
  TransferLoad own_load_;            // as SetLoad was told last
  bool is_wake_due_ = false;
  std::deque<TransferRequest> requests_;
  std::deque<Command> commands_;

  std::thread thread_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_PEER_CONNECTION_H_
