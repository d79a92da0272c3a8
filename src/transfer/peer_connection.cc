#include "transfer/peer_connection.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/copied_checksum.h"
#include "base/guard.h"
#include "base/random.h"
#include "base/start_thread.h"

namespace quire {
namespace {

// What one direction may do before the other one has its turn.
constexpr int kReadsPerTurn = 16;
constexpr int kWritesPerTurn = 16;
// What a peer that is gone may have said before: more than a ring or a socket holds of small
// frames.
constexpr int kLastReads = 1 << 16;
// The head of a part and its data, at least: each write may wake the peer.
constexpr size_t kFramesPerWrite = 8;
// For what was written last, the reason of the end above all.
constexpr int64_t kLingerNs = 250 * kNsPerMs;
// Transfers that are over, of which a late send still learns the reason.
constexpr size_t kOverMax = 256;

Status CheckTime(const char* name, std::chrono::nanoseconds value) {
  constexpr int64_t kDay = int64_t{86'400} * 1'000'000'000;
  if (value.count() >= 1 && value.count() <= kDay) return Status();
  return Status(StatusCode::kBadArgument, "TransferPeerOptions::" + std::string(name) + " is " +
                                              std::to_string(value.count()) +
                                              " ns; it must be above 0 and at most a day");
}

// Copies the runs one after the other: their digest.
uint32_t CopyRuns(std::span<const std::span<const std::byte>> runs, std::byte* to) {
  uint32_t digest = 0;
  for (const std::span<const std::byte>& run : runs) {
    digest = CopyCrc32c(to, run.data(), run.size(), digest);
    to += run.size();
  }
  return digest;
}

Result<size_t> ReadAndCheck(ByteChannel& channel, FrameRead* read) {
  uint32_t sum = read->crc;
  const Result<size_t> count =
      read->is_hashed ? channel.ReadSummed(read->places, &sum) : channel.Read(read->places);
  if (count.ok() && *count > 0) read->CheckSummed(*count, sum);
  return count;
}

// Lets a lock go for its life.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>* lock) : lock_(lock) { lock_->unlock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { lock_->lock(); }

 private:
  std::unique_lock<std::mutex>* const lock_;
};

bool AreThere(std::span<const std::unique_ptr<ByteChannel>> streams) {
  return std::ranges::all_of(streams, [](const auto& stream) { return stream != nullptr; });
}

// Once the session says so, and not before, a direction goes over all streams.
void ApplyStripes(TransferSession* session, StripedChannel* striped) {
  if (session->TakeReadsStriped()) striped->StripeReads();
  if (session->TakeWritesStriped()) striped->StripeWrites();
}

// What ends for no reason would be taken for open.
Status CheckReason(const char* call, const Status& why) {
  if (!why.ok()) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": the status is ok; give one that says why the transfer ends");
}

Status ClosedHere() {
  return Status(StatusCode::kClosed, "transfer: the connection was closed by this process");
}

// TLS with a part absent would be no TLS, or with anybody.
Status CheckTls(const TransferPeerOptions& options) {
  const std::pair<const char*, const std::string*> files[] = {
      {"tls_ca_file", &options.tls_ca_file},
      {"tls_cert_file", &options.tls_cert_file},
      {"tls_key_file", &options.tls_key_file}};
  std::string absent;
  int64_t given = 0;
  for (const auto& [name, file] : files) {
    if (file->empty()) absent = name;
    if (!file->empty()) ++given;
  }
  const std::string together = "tls_ca_file, tls_cert_file and tls_key_file go together";
  if (given > 0 && !absent.empty()) {
    return Status(StatusCode::kBadArgument,
                  "TransferPeerOptions: " + together + ", and " + absent + " is empty");
  }
  if (given > 0 || options.tls_server_name.empty()) return Status();
  return Status(StatusCode::kBadArgument, "TransferPeerOptions: tls_server_name is \"" +
                                              options.tls_server_name +
                                              "\", and the files are empty: " + together);
}

}  // namespace

Result<TransferSession::Options> SessionOptions(const TransferPeerOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckTime("connect_timeout", options.connect_timeout));
  QUIRE_RETURN_IF_ERROR(CheckTime("heartbeat", options.heartbeat));
  QUIRE_RETURN_IF_ERROR(CheckTime("dead_after", options.dead_after));
  QUIRE_RETURN_IF_ERROR(CheckTime("lease", options.lease));
  QUIRE_RETURN_IF_ERROR(CheckTime("send_wait", options.send_wait));
  constexpr int64_t kWindowMax = int64_t{1} << 36;
  if (options.window_bytes < 1 || options.window_bytes > kWindowMax) {
    return Status(StatusCode::kBadArgument,
                  "TransferPeerOptions::window_bytes is " + std::to_string(options.window_bytes) +
                      "; it must be from 1 to " + std::to_string(kWindowMax));
  }
  if (options.send_bytes < 0 || options.send_bytes > kWindowMax) {
    return Status(StatusCode::kBadArgument,
                  "TransferPeerOptions::send_bytes is " + std::to_string(options.send_bytes) +
                      "; it must be from 0 to " + std::to_string(kWindowMax));
  }
  if (options.streams < 1 || options.streams > wire::kStreamsMax) {
    return Status(StatusCode::kBadArgument,
                  "TransferPeerOptions::streams is " + std::to_string(options.streams) +
                      "; it must be from 1 to " + std::to_string(wire::kStreamsMax));
  }
  TransferSession::Options session{.secret = options.secret,
                                   .heartbeat_ns = options.heartbeat.count(),
                                   .dead_after_ns = options.dead_after.count(),
                                   .lease_ns = options.lease.count(),
                                   .window_bytes = options.window_bytes,
                                   .send_bytes = options.send_bytes,
                                   .send_wait_ns = options.send_wait.count(),
                                   .carries_salts = !options.secret.empty()};
  QUIRE_ASSIGN_OR_RETURN(session.passport, options.passport.ToJson());
  if (static_cast<int64_t>(session.passport.size()) > wire::kPassportBytesMax) {
    return Status(StatusCode::kTooLarge, "TransferPeerOptions::passport has " +
                                             std::to_string(session.passport.size()) +
                                             " bytes; a connection opens with at most " +
                                             std::to_string(wire::kPassportBytesMax));
  }
  return session;
}

Result<PeerEndpoint> PeerEndpoint::Parse(std::string_view text) {
  constexpr std::string_view kUcx = "ucx:";
  PeerEndpoint endpoint{.is_ucx = text.substr(0, kUcx.size()) == kUcx};
  if (endpoint.is_ucx) text.remove_prefix(kUcx.size());
  QUIRE_ASSIGN_OR_RETURN(endpoint.address, Endpoint::Parse(text));
  if (!endpoint.is_ucx || !endpoint.address.is_unix) return endpoint;
  return Status(StatusCode::kBadArgument, "endpoint \"ucx:" + std::string(text) +
                                              "\": UCX needs an address: give ucx:ADDRESS:PORT");
}

Status CheckReach(const PeerEndpoint& endpoint, const TransferPeerOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckTls(options));
  const bool has_tls = !options.tls_ca_file.empty();
  if (endpoint.is_ucx && has_tls) {
    return Status(StatusCode::kBadArgument,
                  "TransferPeerOptions: " + endpoint.ToString() +
                      ": there is no TLS over UCX; leave tls_ca_file, tls_cert_file and "
                      "tls_key_file empty and set secret, or use " +
                      endpoint.address.ToString());
  }
  if (endpoint.address.is_local() || !options.secret.empty() || has_tls) return Status();
  const std::string reached = "TransferPeerOptions: " + endpoint.ToString() +
                              " is reached over a network, and secret is empty: set one, or ";
  return Status(StatusCode::kBadArgument,
                reached + (endpoint.is_ucx ? "use ucx:127.0.0.1:PORT"
                                           : "TLS with tls_ca_file, tls_cert_file and "
                                             "tls_key_file, or use 127.0.0.1 or unix:PATH"));
}

Result<std::shared_ptr<const TlsContext>> TlsOf(const PeerEndpoint& endpoint,
                                                const TransferPeerOptions& options, bool listens) {
  if (endpoint.address.is_unix || options.tls_ca_file.empty())
    return std::shared_ptr<const TlsContext>();
  Result<std::shared_ptr<const TlsContext>> made =
      TlsContext::Create({.is_server = listens,
                          .ca_file = options.tls_ca_file,
                          .cert_file = options.tls_cert_file,
                          .key_file = options.tls_key_file,
                          .server_name = options.tls_server_name});
  if (made.ok()) return made;
  return Status(made.status().code(),
                "TransferPeerOptions: " + std::string(made.status().message()));
}

Result<std::shared_ptr<PeerConnection>> PeerConnection::Start(std::unique_ptr<ByteChannel> channel,
                                                              std::string endpoint,
                                                              TransferSession::Options options,
                                                              std::function<void()> changed,
                                                              std::shared_ptr<StreamBook> book) {
  FillRandom(options.instance);
  FillRandom(options.nonce);
  FillRandom(options.token);
  QUIRE_ASSIGN_OR_RETURN(Waker waker, Waker::Create());
  auto connection =
      std::make_shared<PeerConnection>(std::move(channel), std::move(endpoint), std::move(options),
                                       std::move(waker), std::move(changed), std::move(book));
  QUIRE_RETURN_IF_ERROR(StartThread("a connection of transfers", &connection->thread_,
                                    [here = connection.get()] { here->Run(); }));
  return connection;
}

PeerConnection::PeerConnection(std::unique_ptr<ByteChannel> channel, std::string endpoint,
                               TransferSession::Options options, Waker waker,
                               std::function<void()> changed, std::shared_ptr<StreamBook> book)
    : endpoint_(std::move(endpoint)),
      own_window_bytes_(options.window_bytes),
      changed_here_(std::move(changed)),
      book_(std::move(book)),
      waker_(std::move(waker)),
      channel_(std::move(channel)),
      session_(this, options, clock_->SteadyNs()),
      pace_(options.send_wait_ns) {}

PeerConnection::~PeerConnection() {
  Close();
  if (thread_.joinable()) thread_.join();
}

Status PeerConnection::WaitOpen(int64_t until_ns) {
  std::unique_lock lock(mutex_);
  const bool is_decided = WaitUntil(*clock_, changed_, lock, until_ns,
                                    [&] { return is_open_ || is_closing_ || !status_.ok(); });
  if (is_open_) return Status();
  if (!status_.ok()) return status_;
  if (is_decided) return ClosedHere();
  return Status(StatusCode::kTimeout,
                "transfer: " + endpoint_ + " did not open the connection within connect_timeout");
}

Result<std::optional<TransferSession::StreamsGranted>> PeerConnection::WaitStreams(
    int64_t until_ns) {
  std::unique_lock lock(mutex_);
  WaitUntil(*clock_, changed_, lock, until_ns,
            [&] { return granted_ || is_open_ || is_closing_ || !status_.ok(); });
  if (!status_.ok()) return status_;
  return granted_;
}

void PeerConnection::TakeStream(uint16_t stream, std::unique_ptr<ByteChannel> channel) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_over_) return;
  QUIRE_CHECK(stream >= 1 && stream < arrived_.size() && arrived_[stream] == nullptr)
      << "each stream comes once";
  arrived_[stream] = std::move(channel);
  waker_.Signal();
}

bool PeerConnection::has_joined() const {
  const std::lock_guard lock(mutex_);
  return has_joined_;
}

bool PeerConnection::is_open() const {
  const std::lock_guard lock(mutex_);
  return is_open_ && status_.ok();
}

bool PeerConnection::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

Status PeerConnection::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void PeerConnection::Close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closing_ = true;
  changed_.notify_all();
  waker_.Signal();
}

void PeerConnection::SetWake(std::function<void()> wake) {
  const std::lock_guard lock(wake_mutex_);
  wake_ = std::move(wake);
}

// With no lock of the connection's state: it may call the connection.
void PeerConnection::Wake() noexcept {
  const std::lock_guard wake_lock(wake_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(is_wake_due_, false)) return;
  }
  if (wake_) wake_();
}

// The call is made on a session that is open, and what it has to say is sent.
template <typename F>
auto PeerConnection::WithSession(F&& f) {
  return GuardEntry([&]() -> Status {
    {
      const std::lock_guard session_lock(session_mutex_);
      {
        const std::lock_guard lock(mutex_);
        if (!status_.ok()) return status_;
        if (is_closing_) return ClosedHere();
      }
      QUIRE_RETURN_IF_ERROR(f());
    }
    waker_.Signal();
    return Status();
  });
}

TransferPeerStats PeerConnection::stats() const {
  const std::lock_guard session_lock(session_mutex_);
  TransferSession& session = const_cast<TransferSession&>(session_);
  return {.parts_sent = session.sends().parts_sent,
          .parts_sent_again = session.sends().parts_sent_again,
          .bytes_sent = session.sends().bytes_sent,
          .parts_received = session.receives().parts_received,
          .bytes_received = session.receives().bytes_received,
          .sends_open = static_cast<int64_t>(session.sends().open_count()),
          .receives_open = static_cast<int64_t>(session.receives().open_count()),
          .streams = stream_count_};
}

// Not to the session at once: an engine says it with each step, and would wait for the thread.
Status PeerConnection::SetLoad(const TransferLoad& load) {
  return GuardEntry([&]() -> Status {
    if (!wire::IsLoad(load)) {
      return Status(StatusCode::kBadArgument,
                    "SetLoad: " + std::to_string(load.queued_tokens) + " tokens at " +
                        std::to_string(load.ns_per_token) +
                        " ns each is no load; neither may be negative, or above 2^40");
    }
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    if (is_closing_) return ClosedHere();
    if (own_load_ == load) return Status();
    own_load_ = load;
    waker_.Signal();
    return Status();
  });
}

TransferLoad PeerConnection::load() const {
  const std::lock_guard lock(mutex_);
  return load_;
}

// -------------------------------------------------------------------------------------- receiving

Status PeerConnection::SetReceiver(KVTransfer* receiver) {
  std::unique_lock session_lock(session_mutex_);
  const Status told = GuardEntry([&]() -> Status {
    if (receiver != nullptr && session_.receives().receiver() != nullptr) {
      return Status(StatusCode::kBadState,
                    "SetReceiver: a cache receives over this connection already; a connection has "
                    "one receiver");
    }
    if (receiver != nullptr) QUIRE_RETURN_IF_ERROR(CheckStaging(receiver->staging().limit));
    session_.receives().SetReceiver(receiver);
    return Status();
  });
  if (receiver != nullptr) return told;
  // The one before may be gone when this returns, whatever was refused.
  if (!told.ok()) {
    // The peer does not know which transfers are over, and would wait for their parts' credits.
    session_.Lose(told);
    session_.receives().SetReceiver(nullptr);
  }
  waker_.Signal();
  stored_.wait(session_lock, [&] { return !is_storing_; });
  return told;
}

// Parts of several rows are as large as the window lets them be, and those must find room.
Status PeerConnection::CheckStaging(int64_t staging_bytes) const {
  const int64_t part_bytes = std::min(kPartBytes, own_window_bytes_);
  if (part_bytes <= staging_bytes) return Status();
  return Status(StatusCode::kBadArgument,
                "SetReceiver: parts of up to " + std::to_string(part_bytes) + " bytes come over " +
                    endpoint_ + ", and the receiver's staging memory has " +
                    std::to_string(staging_bytes) +
                    " bytes; raise staging_bytes, or lower the connection's window_bytes");
}

Status PeerConnection::Request(const TransferJob& job, const ReceiveMap& map) {
  return WithSession([&] {
    return session_.receives().Open(TransferRequest{.job = job, .map = map}, clock_->SteadyNs());
  });
}

Status PeerConnection::Cancel(uint64_t epoch, const Status& why) {
  return WithSession([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckReason("Cancel", why));
    return session_.receives().Cancel(epoch, why);
  });
}

// ---------------------------------------------------------------------------------------- sending

Result<std::optional<TransferRequest>> PeerConnection::NextRequest(Clock& clock, int64_t until_ns) {
  return GuardEntry([&]() -> Result<std::optional<TransferRequest>> {
    std::unique_lock lock(mutex_);
    WaitUntil(clock, changed_, lock, until_ns,
              [&] { return !requests_.empty() || is_closing_ || !status_.ok(); });
    if (!status_.ok()) return status_;
    if (is_closing_) return ClosedHere();
    if (requests_.empty()) return std::optional<TransferRequest>();
    std::optional<TransferRequest> request = std::move(requests_.front());
    requests_.pop_front();
    return request;
  });
}

Status PeerConnection::SendStatus(uint64_t epoch) const {
  const std::lock_guard lock(mutex_);
  return CheckSendLocked(epoch);
}

int64_t PeerConnection::send_room() const {
  const std::lock_guard lock(mutex_);
  return window_left_;
}

Status PeerConnection::Refuse(uint64_t epoch, const Status& why) {
  return WithSession([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckReason("Refuse", why));
    {
      const std::lock_guard lock(mutex_);
      QUIRE_RETURN_IF_ERROR(CheckSendLocked(epoch));
    }
    session_.sends().Stop(epoch, why);
    return Status();
  });
}

Status PeerConnection::OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) {
  return GuardEntry([&]() -> Status {
    for (const SendRange& range : ranges) QUIRE_RETURN_IF_ERROR(SendRows(layer, range));
    return Status();
  });
}

Status PeerConnection::SendRows(int64_t layer, const SendRange& range) {
  const int64_t row_bytes = RowBytes(range.local, range.head_count);
  int64_t part_bytes = kPartBytes;
  {
    const std::lock_guard lock(mutex_);
    part_bytes = std::min(part_bytes, window_bytes_);
  }
  const int64_t rows_max = std::max<int64_t>(1, part_bytes / std::max<int64_t>(1, row_bytes));
  for (int64_t first = 0, count = 0; first < range.count; first += count) {
    count = RowsOfPart(range.first_row + first, range.count - first, rows_max);
    QUIRE_RETURN_IF_ERROR(TakeWindow(range.epoch, count * row_bytes));
    const Status sent = GuardEntry([&] { return SendPart(layer, range, first, count); });
    if (!sent.ok()) GiveWindow(count * row_bytes);  // no part takes it
    QUIRE_RETURN_IF_ERROR(sent);
  }
  return Status();
}

Status PeerConnection::SendPart(int64_t layer, const SendRange& range, int64_t first,
                                int64_t count) {
  QUIRE_DCHECK(count > 0 && first >= 0 && count <= range.count - first);
  const ReceivePart local{.first_row = first,
                          .count = count,
                          .first_head = range.local_head,
                          .head_count = range.head_count};
  const auto part = std::make_shared<OutgoingPart>();
  FillPart(range.local, local, range.memory, part.get());
  part->head.epoch = range.epoch;
  part->head.layer = layer;
  part->head.part = {.first_row = range.first_row + first,
                     .count = count,
                     .first_head = range.remote_head,
                     .head_count = range.head_count};
  return Push(range.epoch, [this, part](TransferSession& session) {
    part->head.receiver = receiver_;
    session.sends().SendPart(part);
  });
}

// Rows in a few runs stay where they are, if they can. Those of some heads are gathered, as is what
// its owner writes to again.
void PeerConnection::FillPart(const LayerKV& rows, const ReceivePart& local,
                              const std::shared_ptr<const void>& memory, OutgoingPart* part) const {
  constexpr size_t kRunsMax = 8;
  const std::vector<std::span<std::byte>> runs = PartRuns(rows, local);
  part->head.bytes = local.count * RowBytes(rows, local.head_count);
  part->runs.assign(runs.begin(), runs.end());
  if (memory != nullptr && runs.size() <= kRunsMax) {
    part->memory = memory;
    part->wants_digest = true;
    return;
  }
  const auto copy = SharedSpareMemory::Take(copies_, part->head.bytes);
  part->head.digest = CopyRuns(part->runs, copy.get());
  part->runs.assign(
      {std::span<const std::byte>(copy.get(), static_cast<size_t>(part->head.bytes))});
  part->memory = copy;
}

Status PeerConnection::CheckSendLocked(uint64_t epoch) const {
  if (!status_.ok()) return status_;
  if (is_closing_) return ClosedHere();
  if (sends_.count(epoch) > 0) return Status();
  const auto over = over_.find(epoch);
  if (over != over_.end()) return over->second;
  return Status(StatusCode::kNotFound,
                "transfer: " + endpoint_ + " has not asked for epoch " + std::to_string(epoch));
}

Status PeerConnection::TakeWindow(uint64_t epoch, int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  std::unique_lock lock(mutex_);
  QUIRE_RETURN_IF_ERROR(CheckSendLocked(epoch));
  if (bytes > std::min(window_bytes_, wire::kPartBytesMax)) {
    return Status(StatusCode::kTooLarge,
                  "transfer: a row of " + std::to_string(bytes) + " bytes; parts to " + endpoint_ +
                      " have at most " +
                      std::to_string(std::min(window_bytes_, wire::kPartBytesMax)) +
                      "; raise its window_bytes, or the send_bytes (sending_bytes of an engine) "
                      "here");
  }
  const int64_t begin_ns = clock_->SteadyNs();
  const bool has_room = WaitUntil(*clock_, changed_, lock, begin_ns + pace_.left_ns(), [&] {
    return window_left_ >= bytes || is_closing_ || !status_.ok() || sends_.count(epoch) == 0;
  });
  pace_.Waited(clock_->SteadyNs() - begin_ns);
  QUIRE_RETURN_IF_ERROR(CheckSendLocked(epoch));
  if (!has_room) {
    return Status(StatusCode::kTimeout,
                  "transfer: " + endpoint_ + " has made no room for " + std::to_string(bytes) +
                      " bytes within send_wait, or too little again and again; it takes rows more "
                      "slowly than they are computed");
  }
  QUIRE_CHECK(bytes <= window_left_) << "the peer takes this for a breach";
  window_left_ -= bytes;
  pace_.Sent(bytes);
  return Status();
}

Status PeerConnection::Push(uint64_t epoch, Command command) {
  const std::lock_guard lock(mutex_);
  QUIRE_RETURN_IF_ERROR(CheckSendLocked(epoch));
  commands_.push_back(std::move(command));
  if (commands_.size() == 1) waker_.Signal();
  return Status();
}

Status PeerConnection::SendRecords(std::span<const SendRecord> records, bool is_aborted) {
  return GuardEntry([&]() -> Status {
    {
      const std::lock_guard lock(mutex_);
      pace_.Reset();  // the forward is over
    }
    for (const SendRecord& record : records) {
      wire::TransferRecord message{.epoch = record.epoch,
                                   .first_row = record.first_row,
                                   .count = record.count,
                                   .is_aborted = is_aborted};
      QUIRE_RETURN_IF_ERROR(Push(record.epoch, [this, message](TransferSession& session) mutable {
        message.receiver = receiver_;
        session.sends().SendRecord(message);
      }));
    }
    return Status();
  });
}

Status PeerConnection::OnForwardEnded(std::span<const SendRecord> records) {
  return SendRecords(records, false);
}

Status PeerConnection::OnForwardAborted(std::span<const SendRecord> records) {
  return SendRecords(records, true);
}

Status PeerConnection::OnSendStopped(std::span<const SendRecord> records, const Status& why) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckReason("OnSendStopped", why));
    for (const SendRecord& record : records) {
      const uint64_t epoch = record.epoch;
      QUIRE_RETURN_IF_ERROR(Push(
          epoch, [epoch, why](TransferSession& session) { session.sends().Stop(epoch, why); }));
    }
    return Status();
  });
}

// ------------------------------------------------------- what the session tells, on its own thread

void PeerConnection::OnOpen(int64_t window_bytes, const wire::Instance& receiver) {
  {
    const std::lock_guard lock(mutex_);
    QUIRE_CHECK(!is_open_) << "a connection opens once";
    QUIRE_DCHECK(window_bytes > 0) << "the decoder of a hello takes none";
    is_open_ = true;
    window_left_ = window_bytes_ = window_bytes;
    receiver_ = receiver;
    changed_.notify_all();
  }
  if (changed_here_) changed_here_();
}

void PeerConnection::OnLoad(const TransferLoad& load) {
  const std::lock_guard lock(mutex_);
  load_ = load;
  is_wake_due_ = true;
}

void PeerConnection::OnStreams(const StreamsGranted& streams) {
  if (book_ != nullptr) {
    entry_ = book_->Expect(
        streams, [here = weak_from_this()](uint16_t stream, std::unique_ptr<ByteChannel> channel) {
          const auto connection = here.lock();
          if (connection != nullptr) connection->TakeStream(stream, std::move(channel));
        });
  }
  {
    const std::lock_guard lock(mutex_);
    granted_ = streams;
    changed_.notify_all();
  }
  if (changed_here_) changed_here_();
}

Status PeerConnection::OnJoin(const wire::TransferJoin& join, const wire::TransferHello& hello) {
  if (book_ == nullptr)
    return Status(StatusCode::kRemote, "transfer: no connection here has several streams");
  QUIRE_ASSIGN_OR_RETURN(claim_, book_->Check(join, hello));
  return Status();
}

void PeerConnection::OnOver(const Status& why) noexcept {
  const std::lock_guard lock(mutex_);
  status_ = why;
  is_wake_due_ = true;
  changed_.notify_all();
}

void PeerConnection::OnRequest(TransferRequest request) {
  const std::lock_guard lock(mutex_);
  QUIRE_DCHECK(sends_.count(request.map.epoch) == 0) << "an epoch is open twice";
  is_wake_due_ = true;
  sends_.insert(request.map.epoch);
  requests_.push_back(std::move(request));
  changed_.notify_all();
}

void PeerConnection::OnSendOver(uint64_t epoch, const Status& why) {
  const std::lock_guard lock(mutex_);
  sends_.erase(epoch);
  std::erase_if(requests_, [&](const TransferRequest& r) { return r.map.epoch == epoch; });
  is_wake_due_ = true;
  changed_.notify_all();
  if (!status_.ok()) return;  // which all calls say from now on, and there may be no memory
  std::erase(over_order_, epoch);
  if (over_order_.size() >= kOverMax) {
    over_.erase(over_order_.front());
    over_order_.pop_front();
  }
  over_order_.push_back(epoch);
  over_.insert_or_assign(epoch, why);
}

void PeerConnection::OnPartTaken(const OutgoingPart& part) { GiveWindow(part.head.bytes); }

void PeerConnection::GiveWindow(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  // Half a window is room for a sender that has waited for some.
  const bool was_small = window_left_ < window_bytes_ / 2;
  window_left_ += bytes;
  QUIRE_CHECK(window_left_ <= window_bytes_) << "bytes are given back that none has taken";
  is_wake_due_ |= was_small && window_left_ >= window_bytes_ / 2;
  // A forward that waits goes on with some parts together: to wake it costs a tenth of a part. What
  // it waits for comes, as more is on its way as long as less than this is left.
  if (window_left_ >= window_bytes_ / 4) changed_.notify_all();
}

// ------------------------------------------------------------------------------------- the thread

void PeerConnection::Run() noexcept {
  Wanted wanted;
  for (bool can_read = true; TakeTurn(can_read, &wanted); can_read = Wait(wanted)) Wake();
  Finish();
  Wake();
  if (channel_ != nullptr) Linger();
}

bool PeerConnection::TakeTurn(bool can_read, Wanted* wanted) {
  std::unique_lock session_lock(session_mutex_);
  bool goes_on = false;
  bool is_short = false;
  try {
    goes_on = Turn(session_lock, can_read);
  } catch (const std::bad_alloc&) {
    is_short = true;
  }
  if (!goes_on) {
    const char* const why = session_.is_joined()
                                ? "transfer: the socket is a stream of another connection"
                                : "transfer: the connection is over";
    session_.Lose(is_short ? Status::OutOfMemory()
                           : GuardEntry([&] { return Status(StatusCode::kUnavailable, why); }));
    return false;
  }
  *wanted = {.read = session_.accepts_input(),
             .write = session_.has_output(),
             .until_ns = session_.next_deadline()};
  return true;
}

// What a call has queued since then signals the waker.
bool PeerConnection::Wait(const Wanted& wanted) {
  const ByteChannel::Wait wait = channel_->PrepareWait(wanted.read, wanted.write);
  std::array<PollEntry, 2 + wire::kStreamsMax> places;
  places[0] = {.fd = waker_.fd(), .wants_read = true};
  places[1] = wait.entry;
  std::ranges::copy(wait.more, places.begin() + 2);
  const std::span<PollEntry> entries = std::span(places).first(2 + wait.more.size());
  const int64_t left_ns = wanted.until_ns == kNever
                              ? kNever
                              : std::max<int64_t>(0, wanted.until_ns - clock_->SteadyNs());
  PollSockets(entries, wait.is_ready ? 0 : left_ns);
  if (entries[0].can_read) waker_.Clear();
  return wait.is_ready ||
         std::ranges::any_of(entries.subspan(1), [](const PollEntry& e) { return e.can_read; });
}

void PeerConnection::Linger() noexcept {
  const int64_t until = clock_->SteadyNs() + kLingerNs;
  for (int64_t left = kLingerNs; !channel_->HasLeft() && left > 0;
       left = until - clock_->SteadyNs()) {
    const ByteChannel::Wait wait = channel_->PrepareWait(false, false);
    PollEntry entry = wait.entry;
    if (!wait.is_ready) PollSockets(std::span(&entry, 1), left);
  }
}

bool PeerConnection::Turn(std::unique_lock<std::mutex>& session_lock, bool can_read) {
  if (RunCommands()) {
    // If it is ending already, the peer is told why, and may take no bytes: it is not waited for.
    session_.Close(Status(StatusCode::kClosed, "the connection was closed"), clock_->SteadyNs());
    WriteSome(session_lock);  // what the peer takes at once
    return false;
  }
  if (can_read && !ReadSome(session_lock, kReadsPerTurn)) return false;
  if (session_.is_joined() || !WriteSome(session_lock)) return false;
  session_.Tick(clock_->SteadyNs());
  return !session_.is_over();
}

bool PeerConnection::RunCommands() {
  std::deque<Command> commands;
  std::vector<std::unique_ptr<ByteChannel>> streams;
  bool is_closing = false;
  {
    const std::lock_guard lock(mutex_);
    const auto streams_here = std::span(arrived_).first(granted_ ? granted_->count : 0);
    if (!streams_here.empty() && AreThere(streams_here.subspan(1))) {
      streams.resize(granted_->count);
      for (size_t i = 1; i < streams.size(); ++i) streams[i] = std::move(arrived_[i]);
    }
    commands.swap(commands_);
    is_closing = is_closing_;
    session_.SetLoad(own_load_);
  }
  if (!streams.empty()) BeginStreams(std::move(streams));
  for (const Command& command : commands) command(session_);
  return is_closing;
}

void PeerConnection::BeginStreams(std::vector<std::unique_ptr<ByteChannel>> streams) {
  QUIRE_CHECK(striped_ == nullptr) << "streams come once";
  stream_count_ = std::ssize(streams);
  streams.front() = std::move(channel_);
  auto striped = std::make_unique<StripedChannel>(std::move(streams));
  striped_ = striped.get();
  channel_ = std::move(striped);
  entry_ = StreamBook::Entry();
  session_.OnJoined();
  ApplyStripes(&session_, striped_);
}

bool PeerConnection::ReadSome(std::unique_lock<std::mutex>& session_lock, int reads_max) {
  for (int i = 0; i < reads_max && session_.accepts_input(); ++i) {
    FrameRead read = session_.BeginRead();
    Result<size_t> count = size_t{0};
    {
      const Unlocked unlocked(&session_lock);
      count = ReadAndCheck(*channel_, &read);
    }
    if (!count.ok()) {
      session_.Lose(Status(count.status().code(), "transfer: " + endpoint_ + ": " +
                                                      std::string(count.status().message())));
      return false;
    }
    if (*count == 0) break;
    session_.OnRead(read, clock_->SteadyNs());
    ApplyStripes(&session_, striped_);
    if (session_.receives().has_due()) StoreDue(session_lock);
  }
  return true;
}

void PeerConnection::StoreDue(std::unique_lock<std::mutex>& session_lock) {
  ReceiveHalf::DueStore due = session_.receives().TakeDue();
  Status stored;
  is_storing_ = true;
  {
    const Unlocked unlocked(&session_lock);
    stored = due.Store();
  }
  is_storing_ = false;
  stored_.notify_all();
  session_.receives().OnStored(due, stored);
}

// The part that is written next gets one: then its rows are in the cache, and no forward waits.
void PeerConnection::AddDigest(std::unique_lock<std::mutex>& session_lock) {
  const std::shared_ptr<OutgoingPart> part = session_.WithoutDigest();
  if (part == nullptr) return;
  uint32_t digest = 0;
  {
    const Unlocked unlocked(&session_lock);
    for (const auto& run : part->runs) digest = Crc32c(run.data(), run.size(), digest);
  }
  part->head.digest = digest;
  part->wants_digest = false;
}

bool PeerConnection::WriteSome(std::unique_lock<std::mutex>& session_lock) {
  for (int i = 0; i < kWritesPerTurn && session_.has_output(); ++i) {
    AddDigest(session_lock);
    const std::span<const std::span<const std::byte>> frames = session_.Gather(kFramesPerWrite);
    if (frames.empty()) continue;  // the part has gone meanwhile, and the next one wants its digest
    Result<size_t> count = size_t{0};
    {
      const Unlocked unlocked(&session_lock);
      count = channel_->Write(frames);
    }
    if (!count.ok()) {
      // What the peer said before it closed says why, and its last rows may count.
      if (!ReadSome(session_lock, kLastReads)) return false;
      session_.Lose(Status(count.status().code(), "transfer: " + endpoint_ + ": " +
                                                      std::string(count.status().message())));
      return false;
    }
    if (*count == 0) break;
    session_.Sent(*count, clock_->SteadyNs());
    ApplyStripes(&session_, striped_);
  }
  return true;
}

// The session is over, and has said so; or the channel goes on with another one. Without memory for
// its streams a connection has no channel left.
void PeerConnection::Finish() noexcept {
  entry_ = StreamBook::Entry();
  if (!claim_.is_empty()) {
    claim_.Deliver(std::move(channel_));
  } else if (channel_ != nullptr) {
    channel_->EndWrites();
  }
  {
    const std::lock_guard lock(mutex_);
    QUIRE_CHECK(!status_.ok()) << "those that wait would wait for ever";
    is_over_ = true;
    has_joined_ = !claim_.is_empty();
    is_wake_due_ = true;
    commands_.clear();
    for (auto& stream : arrived_) stream.reset();
  }
  if (changed_here_) changed_here_();
}

}  // namespace quire
